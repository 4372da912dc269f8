# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased expectations under the posterior of a composite, from coupled pairs of chains."""

from collections.abc import Callable
import dataclasses
from functools import partial
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import backend, checks, random
from ebmpp.core.types import Blocks, Chains, Keys, Rows
from ebmpp.coupling.accumulators import Function, check_function
from ebmpp.coupling.engine import run_pairs
from ebmpp.coupling.expectation import UnbiasedEstimate, check_request, estimate_from
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.move import Drawn, Move, equal
from ebmpp.moves.target import Target
from ebmpp.ppl.composite import CoupledComposite
from ebmpp.traced.block import Call

#: Pairs that run at once on a CPU. With more, the last of them run in a loop of their own, for which the
#: sweep compiles again. Three units and two conjugate sites: a first call takes 13.3 CPU-seconds, and 20.5
#: with 64 pairs at once; 50,000 further sweeps take 0.27 s, and 0.07.
_SLOTS = 8


def composite_expectation(
    kernel: CoupledComposite,
    fn: Callable[[dict[str, Array]], Any],
    *model_args: Any,
    rng_key: Array,
    num_pairs: int = 1000,
    k: int = 1,
    m: int | None = None,
    max_sweeps: int | None = None,
    unmet: str = "raise",
    **model_kwargs: Any,
) -> UnbiasedEstimate:
    """Estimate E[fn(sites)] under the posterior, without bias, by H_{k:m} over pairs of composite chains.

    :param kernel: the composite; its lag is the estimate's.
    :param fn: from one state (a dict of sites and latent blocks) to a pytree of numbers.
    :param model_args: of the model.
    :param rng_key: a jax key. A pair's draws depend on it and on the pair's number alone.
    :param num_pairs: independent pairs, at least 1.
    :param k: first sweep that counts, at least 0.
    :param m: last sweep that counts, at least k (the default).
    :param max_sweeps: stop unmet pairs when their leading chain has made so many sweeps, more than the
        kernel's lag; None: no limit.
    :param unmet: what to do about pairs stopped by ``max_sweeps``: "raise", or "drop" them, which is biased.
    :param model_kwargs: of the model.
    :return: an :class:`~ebmpp.coupling.expectation.UnbiasedEstimate`; ``acceptance`` is nan.
    :raises UnmetError: when pairs are unmet and ``unmet`` is "raise".
    :raises ArgumentError: for numbers out of range, or under ``jit``.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with couplings*.

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
    checks.instance("composite_expectation: kernel", kernel, CoupledComposite, "a CoupledComposite")
    checks.function("composite_expectation: fn", fn, "a state", arguments=1)
    rng_key = checks.key("composite_expectation: rng_key", rng_key)
    checks.on_host("composite_expectation", rng_key, model_args, model_kwargs)
    request = check_request("composite_expectation", k, m, kernel.lag, max_sweeps, unmet)
    num_pairs = checks.count("composite_expectation: num_pairs", num_pairs)
    call = Call({}, model_args, model_kwargs)
    x = _starts(kernel, jax.random.split(rng_key, num_pairs), call)
    sums = Function(fn, tuple((b, v.shape[1:], str(v.dtype)) for b, v in x.items()))
    check_function("composite_expectation: fn", fn, sums.state())
    sums = sums.in_blocks(num_pairs) if unmet == "raise" else sums
    target, moves = _Posterior(None, call), (_Sweep(kernel, tuple(x)),)
    key = random.fold_in(random.key_pair(rng_key), 1)
    slots = None if backend.accelerated() else _SLOTS
    run = run_pairs(target, moves, sums, slots, x, None, key, request.window())
    return estimate_from(run, request, sums)


@partial(jax.jit, static_argnums=0)
def _starts(kernel: CoupledComposite, keys: Array, call: Call) -> Blocks:
    return jax.vmap(lambda key: kernel.start(random.key_pair(key), call, {}))(keys)


@partial(jax.tree_util.register_dataclass, data_fields=["params", "given", "pool"], meta_fields=["graph"])
@dataclasses.dataclass(frozen=True)
class _Posterior(Target):
    """The posterior of all sites, which has no graph; params are the model's arguments."""

    graph: None
    params: Call

    def num_parts(self, block: str) -> int:
        return 1

    def is_discrete(self, block: str) -> bool:
        return False  # the sweep compares its results itself


@dataclasses.dataclass(frozen=True)
class _Sweep(Move):
    """All steps of a composite, in order, as one move."""

    kernel: CoupledComposite
    blocks: tuple[str, ...]

    def reads(self, graph: Any) -> tuple[str, ...]:
        return self.blocks

    def draw(self, target: Any, x: Rows, keys: Keys) -> Drawn:
        of_row = lambda z, key: self.kernel.single(z, key, target.params)
        return jax.vmap(of_row)(dict(x), keys), jnp.zeros(len(keys), jnp.int32)

    def attempt(self, target: Any, focused: Any, z: Chains, trial: Trial) -> Attempt:
        of_row = lambda x, y, key: self.kernel.pair(x, y, key, target.params)
        chains = ({b: v[i] for b, v in z.items()} for i in range(2))
        x, y, broken = jax.vmap(of_row)(*chains, trial.keys)
        are_equal = {b: equal(jnp.stack([x[b], y[b]])) | trial.same for b in self.blocks}
        y = {b: where_rows(are_equal[b], x[b], v) for b, v in y.items()}
        accepted = jnp.ones(len(trial.keys), bool)
        return Attempt(x, y, accepted, accepted, broken, are_equal)
