# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased expectations under the posterior of a composite, from coupled pairs of chains."""

from collections.abc import Callable, Hashable
import dataclasses
from functools import partial
import warnings

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import backend, checks, random
from ebmpp.core.types import Blocks, Chains, Keys, Rows, SiteArrays
from ebmpp.coupling.accumulators import Function, check_function
from ebmpp.coupling.expectation import PairRun, UnbiasedEstimate, estimate_pairs
from ebmpp.coupling.overlap import THRESHOLD, warning_of
from ebmpp.coupling.slots import check_window
from ebmpp.errors import StateError
from ebmpp.graph import FactorGraph
from ebmpp.kernels.base import InitParams
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.move import Drawn, Move, one_chain, rows_equal, stack_chains
from ebmpp.moves.target import Target
from ebmpp.ppl.composite import CoupledComposite
from ebmpp.traced import contents
from ebmpp.traced.block import Call

#: Pairs that run at once on a CPU. With more, the last of them run in a loop of their
#: own, for which the sweep compiles again: a first call of three units and two
#: conjugate sites takes 20.5 in place of 13.3 s.
_SLOTS = 8


def composite_expectation(
    kernel: CoupledComposite,
    fn: Callable[[SiteArrays], PyTree],
    *model_args: object,
    rng_key: Array,
    num_pairs: int = 1000,
    k: int = 1,
    m: int | None = None,
    max_sweeps: int | None = None,
    unmet: str = "raise",
    independent_starts: bool = False,
    init_params: InitParams = None,
    **model_kwargs: object,
) -> UnbiasedEstimate:
    """Estimate E[fn(sites)] under the posterior, without bias, from coupled pairs of chains.

    ``num_pairs``, ``k``, ``m`` (by default k), ``unmet`` and ``independent_starts`` are
    documented in :func:`~ebmpp.unbiased_expectation`.

    :param kernel: the composite; its lag is the estimate's.
    :param fn: from one state (a dict of sites and latent blocks) to a pytree of
        numbers.
    :param model_args: of the model. All but arrays are static, such as lengths,
        strings and data frames.
    :param rng_key: a jax key. A pair's draws depend on it and on the pair's number
        alone.
    :param max_sweeps: stop unmet pairs when their leading chain has made so many
        sweeps, more than the kernel's lag; None: no limit.
    :param init_params: starting values of some or all sites, ``(*shape,)`` or
        ``(num_pairs, *shape)``. Other sites of a model's block start at draws of its
        prior that are possible.
    :return: an :class:`~ebmpp.coupling.expectation.UnbiasedEstimate`; ``acceptance`` is
        nan.
    :raises UnmetError: when pairs are unmet and ``unmet`` is "raise".
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
    checks.instance(
        "composite_expectation: kernel", kernel, CoupledComposite, "a CoupledComposite"
    )
    rng_key = checks.key("composite_expectation: rng_key", rng_key)
    checks.on_host("composite_expectation", rng_key, model_args, model_kwargs)
    window = check_window("composite_expectation", k, m, kernel.lag, max_sweeps)
    checks.choice("composite_expectation: unmet", unmet, ("raise", "drop"))
    num_pairs = checks.count("composite_expectation: num_pairs", num_pairs)
    checks.flag("composite_expectation: independent_starts", independent_starts)
    call = jax.tree.map(_with_static, (model_args, model_kwargs))

    def starts(key):
        return _starts(kernel, key, num_pairs, call, init_params)

    x = starts(rng_key)
    y = starts(jax.random.fold_in(rng_key, 2)) if independent_starts else None
    sums = Function(fn, tuple((b, v.shape[1:], str(v.dtype)) for b, v in x.items()))
    check_function("composite_expectation: fn", fn, sums.blocks)
    sums = sums.in_blocks(num_pairs) if unmet == "raise" else sums
    target = _Posterior(None, call)
    moves = (_Sweep(kernel, tuple(x)),)
    key = random.fold_in(random.key_pair(rng_key), 1)
    slots = None if backend.accelerated() else _SLOTS
    pairs = PairRun(target, moves, sums, slots, x, y, key)
    estimate = estimate_pairs(pairs, window, unmet)
    if estimate.overlap > THRESHOLD:
        warnings.warn(
            warning_of("composite_expectation", estimate.overlap), stacklevel=2
        )
    return estimate


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
        return kernel.start(random.key_pair(key), _call(call), init)

    return jax.vmap(start)(keys, init)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "fixed", "pool", "tempering"],
    meta_fields=["graph"],
)
@dataclasses.dataclass(frozen=True)
class _Posterior(Target):
    """The posterior of all sites, which has no graph; params are the model's arguments."""

    graph: None
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

        return jax.vmap(of_row)(dict(x), keys), jnp.zeros(len(keys), jnp.int32)

    def attempt(
        self, target: Target, focused: None, z: Chains, trial: Trial
    ) -> Attempt:
        def of_row(x, y, key):
            return self.kernel.pair(x, y, key, _call(target.params))

        x, y, broken = jax.vmap(of_row)(one_chain(z, 0), one_chain(z, 1), trial.keys)
        are_equal = {
            b: rows_equal(v) | trial.same for b, v in stack_chains(x, y).items()
        }
        y = {b: where_rows(are_equal[b], x[b], v) for b, v in y.items()}
        return Attempt.final(x, y, broken, are_equal)
