# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased expectations under the posterior of a composite, from coupled pairs of it."""

from collections.abc import Callable
from functools import partial
import math
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.ppl.composite import CompositeState, CoupledComposite
from ebmpp.sampling.engine import Outcome, Window
from ebmpp.sampling.expectation import Estimate, asked_for, estimate_from


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
) -> Estimate:
    """E[fn(sites)] under the posterior, without bias, by H_{k:m} over pairs of composite chains.

    All pairs run together until the last has met: what it costs is the slowest pair's time.

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
    :return: an :class:`~ebmpp.sampling.expectation.Estimate`; ``trials`` and ``acceptance`` are nan.
    :raises UnmetError: when pairs are unmet and ``unmet`` is "raise".
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with couplings*.

    **Example**

    >>> import jax, jax.numpy as jnp, numpyro.distributions as dist
    >>> from ebmpp import Bernoulli, Bias, FactorGraph, GibbsBlock
    >>> from ebmpp.ppl import Conjugate, CoupledComposite
    >>> from ebmpp.ppl import composite_expectation
    >>> pixels = FactorGraph({"x": Bernoulli(4)}, factors=[Bias("x")])
    >>> field = lambda sites, y: (y - 0.5) * sites["precision"]
    >>> precision = lambda sites, y: dist.Gamma(3.0, 1 + 0.5 * ((y - sites["x"]) ** 2).sum())
    >>> kernel = CoupledComposite([GibbsBlock(pixels, ["x"], {"x": field}),
    ...                            Conjugate("precision", precision, dist.Gamma(1.0, 1.0))])
    >>> y = jnp.array([0.9, 0.1, 1.2, 0.0])
    >>> made = composite_expectation(kernel, lambda s: s["x"], y, rng_key=jax.random.key(0), num_pairs=50)
    >>> made.value.shape, made.num_unmet
    ((4,), 0)
    """
    checks.instance("composite_expectation: kernel", kernel, CoupledComposite, "a CoupledComposite")
    checks.function("composite_expectation: fn", fn, "a state", arguments=1)
    rng_key = checks.key("composite_expectation: rng_key", rng_key)
    asked = asked_for("composite_expectation", k, m, kernel.lag, max_sweeps, unmet)
    num_pairs = checks.count("composite_expectation: num_pairs", num_pairs)
    keys = jax.random.split(rng_key, num_pairs)
    window = asked.window()
    total, state = _run(kernel, fn, keys, window, model_args, model_kwargs)
    met = jnp.where(state.met, state.meeting_time, -1)
    outcome = Outcome(total, met, math.nan, None, state.broken.sum())
    return estimate_from(outcome, asked)


@partial(jax.jit, static_argnums=(0, 1))
def _run(
    kernel: CoupledComposite,
    fn: Callable[[dict[str, Array]], Any],
    keys: Array,
    window: Window,
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[Any, CompositeState]:
    """Sums of weighted values, pair by pair, and the last states."""
    start = jax.vmap(lambda key: kernel.start(key, args, kwargs, {}))(keys)

    def count(total: Any, z: dict[str, Array], weights: Array) -> Any:
        values = jax.vmap(fn)(z)

        def weigh(s: Array, v: Array) -> Array:
            w = _after(weights, v)
            return s + jnp.where(w == 0, 0.0, w * v.astype(w.dtype))

        return jax.tree.map(weigh, total, values)

    def ahead(t: Array, carry: tuple[dict[str, Array], Any]) -> tuple[dict[str, Array], Any]:
        z, total = carry
        total = count(total, z, jnp.broadcast_to(window.inside(t), len(keys)))
        step = lambda z, key: kernel.single(z, key, (t + 1).astype(jnp.uint32), args, kwargs)
        return jax.vmap(step)(z, keys), total

    shapes = jax.eval_shape(jax.vmap(fn), start)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.result_type(float)), shapes)
    z, total = lax.fori_loop(0, window.lag, ahead, (start, zero))
    state = jax.vmap(lambda key, z, y: kernel.state_at(key, z, y))(keys, z, start)
    total = _count_pairs(count, total, state, window)

    def going(carry: tuple[CompositeState, Any]) -> Array:
        state, _ = carry
        late = (window.max_sweeps > 0) & (state.t >= window.max_sweeps)
        waits = jnp.where(state.met, state.t < window.m, ~late)
        return (waits & ~state.broken).any()

    def one(carry: tuple[CompositeState, Any]) -> tuple[CompositeState, Any]:
        state = kernel.sample(carry[0], args, kwargs)
        return state, _count_pairs(count, carry[1], state, window)

    state, total = lax.while_loop(going, one, (state, total))
    return total, state


def _count_pairs(count: Callable[..., Any], total: Any, state: CompositeState, window: Window) -> Any:
    correction = jnp.where(state.met, 0, window.correction(state.t))
    total = count(total, state.z, window.inside(state.t) + correction)
    return count(total, state.y, -correction)


def _after(weights: Array, value: Array) -> Array:
    return weights.reshape(-1, *(1,) * (value.ndim - 1)).astype(jnp.result_type(float))
