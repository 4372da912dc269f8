# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased expectations under the posterior of a composite, from coupled pairs of chains."""

from collections.abc import Callable, Hashable
import dataclasses
from functools import partial

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Chains,
    Keys,
    Rows,
    SiteArrays,
    backend,
    checks,
    in_chunks,
    random,
)
from ebmpp.coupling.accumulators import Function, check_function
from ebmpp.coupling.expectation import (
    NEVER,
    PairRun,
    UnbiasedEstimate,
    cause_of,
    estimate_pairs,
)
from ebmpp.coupling.slots import check_window
from ebmpp.errors import StateError, UnmetError
from ebmpp.graph import FactorGraph
from ebmpp.kernels.base import InitParams
from ebmpp.moves.couplings import Attempt, Trial
from ebmpp.moves.move import Drawn, Move, final_attempt, split_chains, stack_chains
from ebmpp.moves.target import Target
from ebmpp.ppl.composite import CoupledComposite
from ebmpp.traced import contents
from ebmpp.traced.block import Call

#: Pairs that run at once on a CPU. With more, the last of them run in a loop of their
#: own, for which the sweep compiles again: a first call of three units and two
#: conjugate sites takes 20.5 in place of 13.3 s.
_SLOTS = 8
#: Single chains that move at once on a CPU, as many as in the slots. A sweep of eight
#: schools took 33 us with 16 chains, 30 with 8, 175 with 64 and 650 with 256.
_ROWS = 2 * _SLOTS
#: Of windows: their lag is the largest of a pilot's meeting times, and they last this
#: many lags. Starts are so wide that the few pairs that meet later dominate the
#: variance: eight schools, 500 pairs, standard errors of the scale 2.1 for the 0.95
#: quantile and two lags, 0.039 for the largest time, and 0.019 with five lags.
_LENGTH = 5
_PILOT = 3  # folded into its keys
_MOST_PILOT_SWEEPS = 10_000
_PILOT_REMEDY = (
    "Chains may be in different modes: compare chains of NumPyro, or give k, m, lag and "
    "max_sweeps to wait longer"
)


def composite_expectation(
    kernel: CoupledComposite,
    fn: Callable[[SiteArrays], PyTree],
    *model_args: object,
    rng_key: Array,
    num_pairs: int = 1000,
    k: int | None = None,
    m: int | None = None,
    lag: int | None = None,
    max_sweeps: int | None = None,
    unmet: str = "raise",
    independent_starts: bool | None = None,
    init_params: InitParams = None,
    **model_kwargs: object,
) -> UnbiasedEstimate:
    """Estimate E[fn(sites)] under the posterior, without bias, from coupled pairs of chains.

    ``num_pairs``, ``k``, ``m`` and ``unmet`` are documented in
    :func:`~ebmpp.unbiased_expectation`. Without k, m and lag, a pilot of as many other
    pairs chooses k = lag = the largest of its meeting times and m = 5 lag.

    :param kernel: the composite.
    :param fn: from one state (a dict of sites and latent blocks) to a pytree of
        numbers.
    :param model_args: of the model; by default the arguments of
        :meth:`CoupledComposite.from_model`. All but arrays are static, such as lengths,
        strings and data frames.
    :param rng_key: a jax key. A pair's chains depend on it and on the pair's number
        alone, to the last bit on a CPU; on an accelerator values may be rounded
        differently with another number of pairs.
    :param lag: sweeps that the leading chain is ahead; the kernel's where k or m is
        given.
    :param max_sweeps: stop unmet pairs when their leading chain has made so many
        sweeps, more than the lag; None: no limit, but one of 10,000 for the pilot.
    :param independent_starts: see :func:`~ebmpp.unbiased_expectation`; the kernel's by
        default.
    :param init_params: starting values of some or all sites, ``(*shape,)`` or
        ``(num_pairs, *shape)``. Other sites of a model's block start at draws of its
        prior that are possible.
    :return: an :class:`~ebmpp.coupling.expectation.UnbiasedEstimate`; ``acceptance`` is
        nan.
    :raises UnmetError: when pairs are unmet and ``unmet`` is "raise", or pairs of the
        pilot without ``max_sweeps``.
    :raises ArgumentError: for numbers out of range; in ``jit``.
    :raises StateError: for ``init_params`` that do not fit, or if no possible start was
        found.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with
       couplings*.

    **Example**

    The kernel is made as in :class:`CoupledComposite`.

    >>> import jax, numpyro.distributions as dist
    >>> from ebmpp.ppl import Conjugate, CoupledComposite
    >>> mean = Conjugate("mean", lambda sites, y: dist.Normal(y / 2, 0.5**0.5), dist.Normal())
    >>> estimate = composite_expectation(CoupledComposite([mean]), lambda sites: sites["mean"], 3.0,
    ...                                  rng_key=jax.random.key(0), num_pairs=50)
    >>> estimate.value.shape, estimate.num_unmet
    ((), 0)
    """
    who = "composite_expectation"
    checks.instance(f"{who}: kernel", kernel, CoupledComposite)
    rng_key = checks.key(f"{who}: rng_key", rng_key)
    checks.on_host(who, rng_key, model_args, model_kwargs)
    has_window = not (k is None and m is None and lag is None)
    lag = kernel.lag if lag is None else lag
    window = check_window(who, k, m, lag, max_sweeps)
    checks.choice(f"{who}: unmet", unmet, ("raise", "drop"))
    num_pairs = checks.count(f"{who}: num_pairs", num_pairs)
    if independent_starts is None:
        independent_starts = kernel.independent_starts
    checks.flag(f"{who}: independent_starts", independent_starts)
    call = kernel.call_of(model_args, model_kwargs)
    call = jax.tree.map(_with_static, call.inputs)

    x = _starts(kernel, rng_key, num_pairs, call, init_params)
    sums = Function(fn, tuple((b, v.shape[1:], str(v.dtype)) for b, v in x.items()))
    check_function(f"{who}: fn", fn, sums.blocks)
    sums = sums.in_blocks(num_pairs) if unmet == "raise" else sums
    target = _Posterior(None, call)
    moves = (_Sweep(kernel, tuple(x)),)
    slots = None if backend.accelerated() else _SLOTS

    def pairs(run: int, x: Blocks) -> PairRun:
        y = None
        if independent_starts:
            y_key = jax.random.fold_in(rng_key, run + 1)
            y = _starts(kernel, y_key, num_pairs, call, init_params)
        key = random.fold_in(random.key_pair(rng_key), run)
        return PairRun(target, moves, sums, slots, x, y, key)

    quantile = 0
    if not has_window:
        # the pilot has the estimate's shapes, and so its program
        pilot_key = jax.random.fold_in(rng_key, _PILOT)
        pilot = pairs(_PILOT, _starts(kernel, pilot_key, num_pairs, call, init_params))
        limit = max_sweeps or _MOST_PILOT_SWEEPS
        limited = window._replace(k=NEVER, max_sweeps=limit)
        outcome = pilot.outcome(limited)
        times = np.asarray(outcome.meeting_time)
        if max_sweeps is None and (times < 0).any():
            cause = cause_of(int(outcome.broken))
            cause += pilot.describe_unmet(limited, times >= 0)
            raise UnmetError(
                f"{(times < 0).sum()} of {num_pairs} pairs of a pilot {cause}, within "
                f"{limit} sweeps. {_PILOT_REMEDY}."
            )
        window, quantile = window.after(times, level=1, length=_LENGTH)
    return estimate_pairs(who, pairs(1, x), window, unmet, quantile)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """An argument of a model that is no array; programs are compiled for its content."""

    value: object = dataclasses.field(compare=False)
    content: Hashable


def _with_static(leaf: object) -> Array | np.ndarray | np.generic | _Static:
    """Return an argument of a model as a pytree."""
    if contents.is_array(leaf) or isinstance(leaf, np.number):
        return leaf
    return _Static(leaf, contents.content(leaf))


def _call(params: PyTree) -> Call:
    """Return the model's call of arguments and keyword arguments by :func:`_with_static`."""

    def is_static(leaf):
        return isinstance(leaf, _Static)

    def value_of(leaf):
        return leaf.value if is_static(leaf) else leaf

    args, kwargs = jax.tree.map(value_of, params, is_leaf=is_static)
    return Call({}, args, kwargs)


def _starts(
    kernel: CoupledComposite,
    rng_key: Array,
    num_pairs: int,
    call: PyTree,
    init: InitParams,
) -> Blocks:
    """Return checked starts of all chains."""
    kernel.check_data(_call(call))
    keys = jax.random.split(rng_key, num_pairs)
    rows = {}
    if init:
        starts, _ = jax.eval_shape(
            lambda: kernel.start(random.key_pair(rng_key), _call(call), {})
        )
        kernel.check_sites(init)
        for site, value in init.items():
            name = f"init_params[{site!r}]"
            value = checks.numbers(name, value, StateError)
            shape = starts[site].shape
            full = (num_pairs, *shape)
            if value.shape not in (shape, full):
                expected = f"of shape {shape} or {full}"
                raise checks.state_error(name, expected, value)
            rows[site] = jnp.broadcast_to(value, full).astype(starts[site].dtype)
    x, possible = _draw_starts(kernel, keys, call, rows)
    kernel.check_started(possible)
    return x


@partial(jax.jit, static_argnums=0)
def _draw_starts(
    kernel: CoupledComposite, keys: Array, call: PyTree, init: Rows
) -> tuple[Blocks, Array]:
    def start(key, init):
        return kernel.start(key, _call(call), init)

    return in_chunks(start, _ROWS, random.key_pair(keys), init)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Posterior(Target):
    """The posterior of all sites, which has no graph; params are the model's arguments."""

    graph: None = dataclasses.field(metadata={"static": True})
    params: PyTree

    def num_parts(self, block: str) -> int:
        return 1

    def is_discrete(self, block: str) -> bool:
        return False  # the sweep compares its results itself


@dataclasses.dataclass(frozen=True)
class _Sweep(Move):
    """All steps of a composite, in order, as one move."""

    kernel: CoupledComposite
    blocks: tuple[str, ...]

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        return self.blocks

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        def of_row(z, key):
            return self.kernel.single(z, key, _call(target.params))

        return in_chunks(of_row, _ROWS, dict(x), keys), 0

    def attempt(
        self, target: Target, focused: None, z: Chains, trial: Trial
    ) -> Attempt:
        def of_row(x, y, key):
            return self.kernel.pair(x, y, key, _call(target.params))

        x, y, broken = in_chunks(of_row, _SLOTS, *split_chains(z), trial.keys)
        return final_attempt(stack_chains(x, y), trial, broken)
