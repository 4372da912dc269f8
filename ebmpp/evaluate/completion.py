# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Completion: means, modes and draws of missing units given the known ones, by row."""

from collections.abc import Iterator
import contextlib
import dataclasses
import warnings

from jaxtyping import PyTree
import numpy as np
from numpyro.diagnostics import split_gelman_rubin

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Numbers,
    Params,
    checks,
    compiled,
    expand,
    random,
    select,
)
from ebmpp.core.statistics import standard_error
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.moves import Target, gibbs_sweep, search
from ebmpp.moves.move import draw_sweep

_MAX_CHAINS = 2**14  # per program; a sweep stores one number per chain
_MAX_R_HAT = 1.1
_MIN_DRAWS = 20  # per chain; with fewer, R-hat is mostly noise

#: Values or statistics on the host, by block.
HostBlocks = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Completion:
    """Result of :func:`complete`, by free block; blocks with observed units are included.

    :param mean: mean statistics, ``(*batch, *statistic_shape)``; exact for observed
        units.
    :param standard_error: of ``mean`` from independent chains; nan for one chain, None
        for local modes.
    :param mode: most probable state found, ``(*batch, *shape)``; None if a family has
        no mode.
    :param log_density: unnormalised log density of ``mode`` with the known values,
        ``(*batch,)``.
    :param draws: last state of each chain, or the mode of each search,
        ``(num_chains, *batch, *shape)``.
    :param r_hat: split R-hat of the log density, ``(*batch,)``; nan if it never moved,
        None for local modes.
    :param method: "posterior" or "local_mode".
    """

    mean: HostBlocks
    standard_error: HostBlocks | None
    mode: HostBlocks | None
    log_density: np.ndarray | None
    draws: HostBlocks
    r_hat: np.ndarray | None
    method: str

    def __repr__(self) -> str:
        shapes = {b: v.shape for b, v in self.draws.items()}
        r_hat = ""
        if self.r_hat is not None and np.isfinite(self.r_hat).any():
            r_hat = f", R-hat up to {np.nanmax(self.r_hat):.3g}"
        return f"Completion({self.method!r}, draws {shapes}{r_hat})"


def complete(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    method: str = "posterior",
    num_chains: int = 10,
    num_warmup: int = 100,
    num_samples: int = 200,
    **known: Numbers | states.Observed,
) -> Completion:
    """Complete missing units given known ones: half images, random masks, missing entries.

    ``"posterior"`` runs Gibbs chains for each row. Means are averages of the
    conditional means along the chains, exact if only one layer is free. Draws are the
    last states of independent chains. Modes are found by local searches from the draws.
    Chains that have not mixed raise a warning; :class:`~ebmpp.ParallelTempering`
    accepts the same observations and may mix faster.

    ``"local_mode"`` runs local searches from initial draws. It is fast and **does not
    sample a distribution**: draws are the modes found, and means are conditional means
    at the best mode.

    :param method: "posterior" or "local_mode".
    :param num_chains: chains or searches per row.
    :param num_samples: sweeps after ``num_warmup`` warm-up sweeps, at least 1.
    :param known: known blocks, or :class:`~ebmpp.Observed` ones
        (:meth:`Observed.where_finite` of a table with nan), with or without leading
        axes.
    :raises StateError: values that do not fit the graph, or no missing units.
    :raises ArgumentError: another method, numbers out of range, or a call under
        ``jit``.
    :raises NotImplementedError: local modes of a family without a mode.

    **References**

    1. Taniguchi, Suzuki, Iwasawa, Matsuo (2023), Algorithm 5 and figure 4: completion
       by local search.
    2. Gelfand, Smith (1990), *Sampling-based approaches to calculating marginal
       densities*: means of conditional means.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> table = jnp.array([[1.0, 0.0, jnp.nan, jnp.nan], [0.0, jnp.nan, 1.0, 1.0]])
    >>> result = ebmpp.complete(rbm, rbm.init(jax.random.key(0)), rng_key=jax.random.key(1),
    ...                         v=ebmpp.Observed.where_finite(table))
    >>> result.mean["v"].shape, result.draws["v"].shape
    ((2, 4), (10, 2, 4))
    >>> result.mean["v"][1, [0, 2, 3]].tolist()
    [0.0, 1.0, 1.0]
    """
    rng_key = checks.key("complete: rng_key", rng_key)
    checks.on_host("complete", rng_key, params, known)
    num_chains = checks.count("complete: num_chains", num_chains)
    num_warmup = checks.count("complete: num_warmup", num_warmup, least=0)
    num_samples = checks.count("complete: num_samples", num_samples)
    checks.choice("complete: method", method, ("posterior", "local_mode"))
    target = Target.checked("complete", graph, params, known)
    runs = Runs(target, num_chains, random.key_pair(rng_key))
    if method == "local_mode":
        return runs.local_mode()
    result = runs.posterior(num_warmup, num_samples)
    r_hat = result.r_hat
    if r_hat is not None and (r_hat > _MAX_R_HAT).any():
        num_rows = (r_hat > _MAX_R_HAT).sum()
        warnings.warn(
            f"complete: chains of {num_rows} of {r_hat.size} rows disagree (R-hat "
            f"up to {np.nanmax(r_hat):.3g}), so they do not sample the posterior yet. "
            "Raise num_warmup and num_samples, or use ebmpp.ParallelTempering with the "
            "same observations",
            stacklevel=2,
        )
    return result


@dataclasses.dataclass(frozen=True)
class Runs:
    """Chains or searches for all rows, in chunks of rows with ``chains`` copies of each row."""

    target: Target
    chains: int
    key: Array

    def posterior(
        self, num_warmup: int, num_samples: int, find_modes: bool = True
    ) -> Completion:
        """Run chains, and search for modes from their last states."""
        chunks = []
        for target, x, keys, count in self._chunks():
            x, mean, trace = _sample(target, num_samples, x, keys, num_warmup)
            draws = select(x, target.free)
            chunk = {"draws": draws, "mean": mean, "trace": trace.T}
            if find_modes:
                # a family without a mode
                with contextlib.suppress(NotImplementedError):
                    chunk |= _search(target, x, keys)
            chunks.append(self._by_chain(chunk, count))
        return self._join(chunks, "posterior")

    def local_mode(self) -> Completion:
        """Run local searches."""
        chunks = []
        for target, x, keys, count in self._chunks():
            chunk = _search(target, x, keys)
            best, _ = _best(self._by_chain(chunk))
            best = {b: np.concatenate([v] * self.chains) for b, v in best.items()}
            chunk |= {"draws": chunk["modes"], "mean": _means(target, x | best)}
            chunks.append(self._by_chain(chunk, count))
        return self._join(chunks, "local_mode")

    def _chunks(self) -> Iterator[tuple[Target, Blocks, Array, int]]:
        """Yield the target, starts, keys and number of rows of each chunk.

        Copies of the last row pad the last chunk.
        """
        rows = self.target.num_rows
        size = min(rows, max(1, _MAX_CHAINS // self.chains))
        chain_numbers = np.repeat(np.arange(self.chains), size)
        for first in range(0, rows, size):
            numbers = np.minimum(np.arange(first, first + size), rows - 1)
            copies = np.tile(numbers, self.chains)
            keys = random.fold_in(random.fold_in(self.key, 1, chain_numbers), copies)
            target = self.target.take(copies)
            x = search.compiled_initial_states(target, random.fold_in(keys, 0))
            yield target, x, keys, min(size, rows - first)

    def _by_chain(self, values: PyTree, count: int | None = None) -> PyTree:
        """Return arrays ``(chains, count, ...)`` on the host."""

        def split(v):
            return np.asarray(v).reshape(self.chains, -1, *v.shape[1:])[:, :count]

        return jax.tree.map(split, values)

    def _join(self, chunks: list[dict[str, PyTree]], method: str) -> Completion:
        """Return the result of all rows, with the leading axes of the known values."""
        joined = jax.tree.map(lambda *values: np.concatenate(values, 1), *chunks)

        def shaped(v):
            return v.reshape(self.target.batch + v.shape[1:])

        error = None
        mode = None
        value = None
        r_hat = None
        if "trace" in joined:
            by_unit = {b: np.moveaxis(v, 0, -1) for b, v in joined["mean"].items()}
            error = {b: shaped(standard_error(v)) for b, v in by_unit.items()}
            r_hat = shaped(_r_hat(joined["trace"]))
        if "modes" in joined:
            mode, value = jax.tree.map(shaped, _best(joined))
        mean = {b: shaped(v.mean(0)) for b, v in joined["mean"].items()}
        draws = {b: np.stack([*map(shaped, v)]) for b, v in joined["draws"].items()}
        self._insert_known(mean, error)
        return Completion(mean, error, mode, value, draws, r_hat, method)

    def _insert_known(self, mean: HostBlocks, error: HostBlocks | None) -> None:
        """Replace means of observed units by their statistics, without error."""
        for b, keep in self.target.keep.items():
            family = self.target.graph.families[b]
            known = np.asarray(keep).reshape(self.target.batch + family.shape)
            known = expand(known, mean[b])
            stats = family.statistics(self.target.fixed.partial[b])
            stats = np.asarray(stats, float).reshape(mean[b].shape)
            mean[b] = np.where(known, stats, mean[b])
            if error is not None:
                error[b] = np.where(known, 0.0, error[b])


def _best(chunk: dict[str, PyTree]) -> tuple[HostBlocks, np.ndarray]:
    """Return each row's mode with the highest density of all chains, and this density."""
    chain = chunk["value"].argmax(0)
    row = np.arange(len(chain))
    modes = {b: v[chain, row] for b, v in chunk["modes"].items()}
    return modes, chunk["value"][chain, row]


def _r_hat(trace: np.ndarray) -> np.ndarray:
    """Return the split R-hat of each row; nan if the trace is constant or too short.

    :param trace: ``(chains, rows, draws)``.
    """
    if trace.shape[2] < _MIN_DRAWS:
        return np.full(trace.shape[1], np.nan)
    # beyond rounding
    has_moved = np.ptp(trace, axis=(0, 2)) > 1e-4 * np.abs(trace).max(axis=(0, 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        r_hat = split_gelman_rubin(np.moveaxis(trace.astype(float), 1, 2))
    return np.where(has_moved, r_hat, np.nan)


@jax.jit
def _means(target: Target, x: Blocks) -> Blocks:
    """Return conditional means of all free blocks."""
    means = {}
    graph = target.graph
    for blocks in target.layers:
        eta = energy.natural_rows(graph, target.params, x, blocks)
        means |= {b: graph.families[b].mean(e) for b, e in eta.items()}
    return means


@compiled(statics=(1,))
def _sample(
    target: Target, num_samples: int, x: Blocks, keys: Array, num_warmup: Array
) -> tuple[Blocks, Blocks, Array]:
    """Return last states, averages of the conditional means, and a trace.

    The trace has the log densities, ``(num_samples, chains)``.
    """
    moves = gibbs_sweep(target.graph, target.clamped)

    def sweep(index, x):
        return draw_sweep(target, x, moves, random.fold_in(keys, 1, index))[0]

    def step(carry, index):
        x, mean = carry
        x = sweep(num_warmup + index, x)

        def update(mean, new):
            return mean + (new - mean) / (index + 1).astype(mean.dtype)

        mean = jax.tree.map(update, mean, _means(target, x))
        return (x, mean), energy.log_density(target.graph, target.params, x)

    x = lax.fori_loop(0, num_warmup, sweep, x)
    shapes = jax.eval_shape(_means, target, x)
    zero = jax.tree.map(jnp.zeros_like, shapes)
    (x, mean), trace = lax.scan(step, (x, zero), jnp.arange(num_samples))
    return x, mean, trace


@compiled
def _search(target: Target, x: Blocks, keys: Array) -> dict[str, PyTree]:
    result = search.local_modes(target, x, random.fold_in(keys, 2))
    return {"modes": select(result.x, target.free), "value": result.value}
