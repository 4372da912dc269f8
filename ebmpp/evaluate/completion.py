# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What is missing, given what is known: means, modes and draws for many rows at once."""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
from typing import Any
import warnings

import numpy as np
from numpyro.diagnostics import split_gelman_rubin

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Blocks, Params, checks, random
from ebmpp.core.compile import Compiled, compiled
from ebmpp.core.statistics import standard_error
from ebmpp.errors import StateError
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.moves import Target, gibbs_sweep, search
from ebmpp.moves.move import draw_sweep

METHODS = ("posterior", "local_mode")

_MOST_CHAINS = 2**14  # at once: all that is kept of a sweep is one number a chain
_HIGH = 1.1  # R-hat
_FEW = 20  # draws a chain, of which R-hat is mostly noise

State = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Completion:
    """What :func:`complete` found: a dict of the free blocks each, those with observed units included."""

    mean: State
    """Mean statistics, ``(*batch, *statistic_shape)``; of observed units their own."""
    standard_error: State | None
    """Of ``mean``, from independent chains; nan with one chain, None for local modes."""
    mode: State | None
    """The most probable state that was found, ``(*batch, *shape)``; None where a family has no mode."""
    log_density: np.ndarray | None
    """Of ``mode`` with all that is given, unnormalised, ``(*batch,)``."""
    draws: State
    """The last state of each chain, or the mode that each search found: ``(num_chains, *batch, *shape)``."""
    r_hat: np.ndarray | None
    """Split R-hat of the log density, ``(*batch,)``; nan where it never moved, None for local modes."""
    method: str

    def __repr__(self) -> str:
        shapes = {b: v.shape for b, v in self.draws.items()}
        told = ""
        if self.r_hat is not None and np.isfinite(self.r_hat).any():
            told = f", R-hat up to {np.nanmax(self.r_hat):.3g}"
        return f"Completion({self.method!r}, draws {shapes}{told})"


def complete(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    method: str = "posterior",
    num_chains: int = 10,
    num_warmup: int = 100,
    num_samples: int = 200,
    **given: Array | states.Observed,
) -> Completion:
    """Means, modes and draws of everything that is not given: half images, random masks, missing entries.

    ``"posterior"`` runs Gibbs chains a row from initial draws. Means are averages of the conditional means
    along the chains (so no probability is 0, and where one layer alone is free they are exact); a draw is the
    last state of a chain, so the draws of a row are independent; modes are what local searches from there
    find. Chains that have not mixed show in ``standard_error`` and ``r_hat``, and are warned of: then
    :class:`~ebmpp.ParallelTempering`, which takes the same observations, may help.

    ``"local_mode"`` searches from initial draws instead (Taniguchi et al. 2023): fast, sharp, and **no law**.
    Its draws are the modes found, its means those of each layer given the rest at the best of them.

    A row is a state of its own: its result does not depend on the rows beside it.

    :param graph: the model.
    :param params: its params.
    :param rng_key: a jax key.
    :param method: "posterior" or "local_mode".
    :param num_chains: chains or searches a row.
    :param num_warmup: sweeps before the means.
    :param num_samples: sweeps that the means are taken over, at least 1.
    :param given: what is known: blocks, or :class:`~ebmpp.Observed` ones (:meth:`Observed.where_finite` of a
        table with nan), with leading axes or without.
    :raises StateError: for values that do not fit the graph, or nothing to complete.
    :raises ArgumentError: for another method, numbers out of range, or under ``jit``.
    :raises NotImplementedError: for local modes of a family without a mode.

    **References**

    1. Taniguchi, Suzuki, Iwasawa, Matsuo (2023), Algorithm 5 and figure 4: completion by local search.
    2. Gelfand, Smith (1990), *Sampling-based approaches to calculating marginal densities*: means of
       conditional means.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> table = jnp.array([[1.0, 0.0, jnp.nan, jnp.nan], [0.0, jnp.nan, 1.0, 1.0]])
    >>> made = ebmpp.complete(rbm, rbm.init(jax.random.key(0)), rng_key=jax.random.key(1),
    ...                       v=ebmpp.Observed.where_finite(table))
    >>> made.mean["v"].shape, made.draws["v"].shape
    ((2, 4), (10, 2, 4))
    >>> made.mean["v"][1, [0, 2, 3]].tolist()
    [0.0, 1.0, 1.0]
    """
    checks.instance("complete: graph", graph, FactorGraph, "a FactorGraph")
    rng_key = checks.key("complete: rng_key", rng_key)
    checks.on_host("complete", rng_key, params, given)
    num_chains = checks.count("complete: num_chains", num_chains)
    num_warmup = checks.count("complete: num_warmup", num_warmup, least=0)
    num_samples = checks.count("complete: num_samples", num_samples)
    checks.choice("complete: method", method, METHODS)
    graph.check(params)
    known = states.as_clamped(graph.families, given)
    if len(known.full) == len(graph.families):
        raise StateError("complete: every block is given whole, so nothing is missing; leave one out")
    run = Runs(Target(graph, params, known), num_chains, random.key_pair(rng_key))
    made = run.local_mode() if method == "local_mode" else run.posterior(num_warmup, num_samples)
    if made.r_hat is not None and (made.r_hat > _HIGH).any():
        high = int((made.r_hat > _HIGH).sum())
        warnings.warn(
            f"complete: chains of {high} of {made.r_hat.size} rows disagree (R-hat above {_HIGH}, up to "
            f"{np.nanmax(made.r_hat):.3g}), so their means and draws are not yet those of the posterior: "
            "raise num_warmup and num_samples, or run ebmpp.ParallelTempering with the same observations",
            stacklevel=2,
        )
    return made


# -- all rows, a chunk at a time -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Runs:
    """One call. Rows are worked on in chunks of one shape, ``num_chains`` copies of each side by side."""

    target: Target
    chains: int
    key: Array

    def posterior(self, num_warmup: int, num_samples: int, climb: bool = True) -> Completion:
        """Chains.

        :param climb: whether to search for modes from where they end.
        """
        parts = []
        for target, x, keys, count in self._chunks():
            x, mean, trace = _sample(target, num_samples, x, keys, num_warmup)
            found = value = None
            with contextlib.suppress(NotImplementedError):  # of a family without a mode
                found, value = _search(target, x, keys) if climb else (None, None)
            parts.append(self._part(count, x, mean, found, value, np.asarray(trace)))
        return self._joined(parts, "posterior")

    def local_mode(self) -> Completion:
        """Searches."""
        parts = []
        for target, x, keys, count in self._chunks():
            found, value = _search(target, x, keys)
            best = self._best(found, np.asarray(value))
            at = {b: jnp.asarray(np.tile(v, (self.chains, *(1,) * (v.ndim - 1)))) for b, v in best.items()}
            mean = _means(target, at)
            parts.append(self._part(count, found, mean, found, value, None))
        return self._joined(parts, "local_mode")

    def _chunks(self) -> Iterator[tuple[Target, Blocks, Array, int]]:
        """Targets, starts and keys of ``chains`` copies of some rows; and how many are no filling."""
        rows = self.target.num_rows
        size = min(rows, max(1, _MOST_CHAINS // self.chains))
        for first in range(0, rows, size):
            row = np.minimum(np.arange(first, first + size), rows - 1)
            every = np.tile(row, self.chains)
            keys = _keys(self.key, np.repeat(np.arange(self.chains), size), every)
            target = self.target.take(every)
            yield target, _start(target, keys), keys, min(size, rows - first)

    def _by_chain(self, value: Any) -> np.ndarray:
        value = np.asarray(value)
        return value.reshape(self.chains, -1, *value.shape[1:])

    def _best(self, found: Mapping[str, Array], value: np.ndarray) -> State:
        """The state of the chain with the highest density, row by row."""
        chain = self._by_chain(value).argmax(0)
        return {b: self._by_chain(v)[chain, np.arange(len(chain))] for b, v in found.items()}

    def _part(self, count: int, x: Any, mean: Any, found: Any, value: Any, trace: Any) -> dict[str, Any]:
        """A chunk's share of the result, its filling cut off."""
        each = {b: self._by_chain(mean[b])[:, :count] for b in self.target.free}
        made: dict[str, Any] = {"mean": {b: v.mean(0) for b, v in each.items()}}
        made["draws"] = {b: self._by_chain(x[b])[:, :count] for b in self.target.free}
        if found is not None:
            best = self._best(found, np.asarray(value))
            made["mode"] = {b: best[b][:count] for b in self.target.free}
            made["log_density"] = self._by_chain(value).max(0)[:count]
        if trace is not None:
            made["standard_error"] = {b: standard_error(np.moveaxis(v, 0, -1)) for b, v in each.items()}
            made["r_hat"] = _r_hat(self._by_chain(trace.T)[:, :count])
        return made

    def _joined(self, parts: list[dict[str, Any]], method: str) -> Completion:
        """All chunks, with the leading axes of what was given."""
        batch = self.target.batch
        joined: dict[str, Any] = {"standard_error": None, "mode": None, "log_density": None, "r_hat": None}
        for name in parts[0]:
            axis = 1 if name == "draws" else 0
            lead = ((self.chains,) if axis else ()) + batch
            join = lambda values, axis=axis: np.concatenate(values, axis)
            whole = jax.tree.map(lambda *values: join(values), *[p[name] for p in parts])
            joined[name] = jax.tree.map(lambda v: v.reshape(lead + v.shape[axis + 1 :]), whole)
        self._put_known(joined)
        return Completion(method=method, **joined)

    def _put_known(self, joined: dict[str, Any]) -> None:
        """Means of observed units: their statistics, without error."""
        for b, k in self.target.keep.items():
            family, batch = self.target.graph.families[b], self.target.batch
            stats = np.asarray(family.statistics(self.target.given.partial[b]), float)
            known = np.asarray(k).reshape(k.shape + (1,) * len(family.stat_shape))
            shape = batch + family.statistic_shape
            known = np.broadcast_to(known, stats.shape).reshape(shape)
            joined["mean"][b] = np.where(known, stats.reshape(shape), joined["mean"][b])
            if joined["standard_error"] is not None:
                joined["standard_error"][b] = np.where(known, 0.0, joined["standard_error"][b])


def _r_hat(trace: np.ndarray) -> np.ndarray:
    """Split R-hat of each row, shape ``(chains, rows, draws)``; nan where nothing moved or too few draws."""
    if trace.shape[2] < _FEW:
        return np.full(trace.shape[1], np.nan)
    moved = np.ptp(trace, axis=(0, 2)) > 1e-4 * np.abs(trace).max(axis=(0, 2))  # more than rounding
    with np.errstate(divide="ignore", invalid="ignore"):
        value = split_gelman_rubin(np.moveaxis(trace.astype(float), 1, 2))
    return np.where(moved, value, np.nan)


# -- programs --------------------------------------------------------------------------------------


@jax.jit
def _keys(key: Array, chain: Array, row: Array) -> Array:
    return random.fold_in(random.fold_in(key, 1, chain), row)


@jax.jit
def _start(target: Target, keys: Array) -> Blocks:
    return search.start(target, random.fold_in(keys, 0))


@jax.jit
def _means(target: Target, x: Blocks) -> Blocks:
    """Conditional means of all free blocks."""
    made, graph = {}, target.graph
    for blocks in target.layers:
        eta = energy.natural_rows(graph, target.params, x, blocks)
        made |= {b: graph.families[b].mean(e) for b, e in eta.items()}
    return made


@compiled(statics=(1,))
def _sample(
    target: Target, num_samples: int, x: Blocks, keys: Array, num_warmup: Array
) -> tuple[Blocks, Blocks, Array]:
    """The last states, means of the conditional means, and the log densities ``(num_samples, chains)``."""
    moves = gibbs_sweep(target.graph, target.clamped)

    def sweep(index: Array, x: Blocks) -> Blocks:
        return draw_sweep(target, x, moves, random.fold_in(keys, 1, index))[0]

    def step(carry: tuple, index: Array) -> tuple:
        x, mean = carry
        x = sweep(num_warmup + index, x)
        now = _means(target, x)
        mean = jax.tree.map(lambda m, n: m + (n - m) / (index + 1).astype(m.dtype), mean, now)
        return (x, mean), energy.log_density(target.graph, target.params, x)

    x = lax.fori_loop(0, num_warmup, sweep, x)
    none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(_means, target, x))
    (x, mean), trace = lax.scan(step, (x, none), jnp.arange(num_samples))
    return x, mean, trace


@Compiled
def _search(target: Target, x: Blocks, keys: Array) -> tuple[Blocks, Array]:
    found = search.local_modes(target, x, random.fold_in(keys, 2))
    return found.x, found.value
