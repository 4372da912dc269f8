# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Ladders: the places of a path at which particles stop, fixed, given or found by a pilot run."""

from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Float32, Int32
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.annealing import systems
from ebmpp.annealing.log_partition import not_finite
from ebmpp.annealing.path import Path
from ebmpp.core import Key, checks, random
from ebmpp.core.compile import compiled

_SIGMOID_SLOPE = 4.0  # of the logistic function at either end
_CAPACITY = 256  # initial room for the places of a pilot
# factors of the steps that a pilot tries
_GROW = 1.3
_SHRINK = 0.75
_SHORTEST = 1e-6  # of these steps
_SMOOTHING = 0.2  # share of the latest rung in the smoothed correlation


def temperatures(
    kind: str | Any, num_temperatures: int
) -> Float32[np.ndarray, "temperatures"]:
    """Return increasing inverse temperatures from 0 to 1.

    :param kind: "linear"; "sigmoid", which is denser at both ends (Wu, Burda,
        Salakhutdinov, Grosse 2017, *On the quantitative analysis of decoder-based
        generative models*, section 4); or values from 0 to 1.
    :param num_temperatures: number of values, 0 and 1 included; ignored where ``kind``
        gives the values.

    >>> temperatures("sigmoid", 5).round(2).tolist()
    [0.0, 0.1, 0.5, 0.9, 1.0]
    """
    if not isinstance(kind, str):
        return given_places("ladder", kind, 1)
    linear = np.linspace(
        0.0, 1.0, checks.count("num_temperatures", num_temperatures, 2)
    )
    kinds = "linear", "sigmoid", "adaptive"
    if (
        checks.choice("ladder", kind, kinds, "increasing values from 0 to 1")
        == "linear"
    ):
        return linear.astype(np.float32)
    # a logistic function up to scale and location
    rising = np.tanh(_SIGMOID_SLOPE * (linear - 0.5))
    return (0.5 + 0.5 * rising / rising[-1]).astype(np.float32)


def given_places(name: str, values: Any, end: int) -> Float32[np.ndarray, "places"]:
    """Return a user's places as an array; they must increase from 0 to ``end``, the place of the model."""
    places = np.asarray(checks.numbers(name, values), np.float32)
    ends = places.ndim == 1 and len(places) > 1 and (places[0], places[-1]) == (0, end)
    if not ends or not (np.diff(places) > 0).all():
        raise checks.error(
            name, f"numbers that increase from 0 to {end}, the model", values
        )
    return places


def constant_speed(
    betas: Float[np.ndarray, "pilot"],
    spread: Float[np.ndarray, "steps"],
    num_temperatures: int,
) -> Float32[np.ndarray, "temperatures"]:
    """Return increasing inverse temperatures whose log-weights have about the same spread at each step.

    Gelman, Meng (1998), *Simulating normalizing constants*, section 4.2: constant speed
    along a path.

    :param spread: standard deviation of a pilot's log-weights at each step between its
        ``betas``.

    >>> constant_speed(np.array([0, 0.5, 1]), np.array([0.3, 0.1]), 5).round(2).tolist()
    [0.0, 0.17, 0.33, 0.5, 1.0]
    """
    # the small terms keep steps without any spread apart
    cumulated = np.concatenate(
        [[0.0], np.cumsum(spread + 1e-3 * spread.mean() + 1e-12)]
    )
    levels = np.linspace(0.0, cumulated[-1], num_temperatures)
    places = np.interp(levels, cumulated, betas).astype(np.float32)
    places[0] = 0.0
    places[-1] = 1.0
    return np.unique(places)


class Ladder(NamedTuple):
    """The places of a path at which a system stops."""

    places: Float[Array, "places"]
    count: Int32[Array, ""]
    """Number of places that are used, including the reference."""
    correlation: Float[Array, ""]
    """Largest correlation of the pilot's log-densities before and after the sweeps of a rung, smoothed over
    rungs; 0 where it is not measured."""
    relative_ancestry: Float[Array, ""]
    """Of the pilot at the end; 1 where it is not measured."""

    def is_complete(self) -> Bool[Array, ""]:
        """Return True if there was room for all places; otherwise the last step is a long one."""
        return self.count < len(self.places)


def find_ladder(
    path: Path,
    key: Key,
    num: int,
    cess_threshold: ArrayLike,
    capacity: int,
    sweeps: int = 1,
    measure: bool = False,
) -> Ladder:
    """Find places by a pilot system of ``num`` particles, whose draws are used for nothing else.

    Zhou, Johansen, Aston (2016), *Toward automatic model comparison: an adaptive
    sequential Monte Carlo approach*, section 3.4.

    :param cess_threshold: lowest conditional effective sample size of a step, as a
        share of the particles, below 1. The last step may miss it where the
        ``capacity``, the largest number of places, is reached.
    :param measure: measure the correlation and the ancestry too.
    """
    keys = key[None]

    def body(carry: tuple) -> tuple:
        places, count, step, system, smooth, largest = carry
        s = places[count - 1]
        low = path.at(s)
        here = path.evaluate(low.params, system.x)

        def rung_after(step):
            return path.at(jnp.minimum(s + step, path.end))

        def is_too_long(step: Array) -> Array:
            high = rung_after(step)
            there = path.evaluate_at(high, here, system.x)
            gain = path.gain(low, high, here, there).reshape(system.log_weights.shape)
            cess = systems.conditional_ess(system.log_weights, gain)[0]
            return ~(cess >= cess_threshold) & (step > _SHORTEST)  # NaN is too long

        step = lax.while_loop(is_too_long, lambda step: _SHRINK * step, _GROW * step)
        step = jnp.where(count == capacity - 1, path.end, step)
        rung_keys = random.fold_in(keys, count)
        high = rung_after(step)
        system, evaluation = systems.reweight(path, low, high, here, system, rung_keys)
        system = systems.move(path, high, evaluation, system, rung_keys, sweeps)
        if measure:
            after = path.evaluate(high.params, system.x)
            values = [
                path.gain(path.at(jnp.zeros(())), high, at, at)
                for at in (evaluation, after)
            ]
            a, b = (v - v.mean() for v in values)
            # 0 where particles are all equal
            correlation = (a * b).sum() / jnp.maximum(
                jnp.sqrt((a**2).sum() * (b**2).sum()), 1e-30
            )
            smooth += _SMOOTHING * (correlation - smooth)
        places = places.at[count].set(jnp.minimum(s + step, path.end))
        return places, count + 1, step, system, smooth, jnp.maximum(largest, smooth)

    zero = jnp.zeros(())
    step = jnp.full((), 0.1)
    start = (
        jnp.zeros(capacity),
        jnp.ones((), jnp.int32),
        step,
        systems.begin(path, keys, num),
        zero,
        zero,
    )

    def is_open(carry):
        return carry[0][carry[1] - 1] < path.end

    places, count, _, system, _, correlation = lax.while_loop(is_open, body, start)
    ancestry = systems.relative_ancestry(system)[0] if measure else jnp.ones(())
    return Ladder(places, count, correlation, ancestry)


#: The cache is bounded by graphs.
_find = compiled(find_ladder, statics=(2, 4, 5, 6), key=lambda path, *_: path.graph)


def adaptive_ladder(
    path: Path,
    key: Array,
    num: int,
    cess_threshold: float,
    sweeps: int = 1,
    most: int | None = None,
    measure: bool = False,
) -> Ladder:
    """Find a ladder with room for all its places, or for at ``most`` so many; see :func:`find_ladder`.

    :raises DomainError: where no step meets the threshold, however short, unless
        ``most`` is given.
    """
    capacity = _CAPACITY if most is None else min(most, _CAPACITY)
    while True:
        ladder = _find(path, key, num, cess_threshold, capacity, sweeps, measure)
        if int(ladder.count) < capacity or capacity == most:
            return ladder
        # the last step, to the end, is a long one; a pilot is stuck if the step before
        # is the shortest
        if bool(ladder.places[-2] - ladder.places[-3] <= 2 * _SHORTEST):
            if most is not None:
                return ladder
            raise not_finite(
                f"weights at place {float(ladder.places[-2]):g} are uneven, or"
            )
        capacity = 2 * capacity if most is None else min(most, 2 * capacity)


def thinned(
    path: Path, key: Array, num: int, cess_threshold: float, most: int
) -> Path | None:
    """Return a path whose knots are the places of an adaptive ladder, at most ``most``, or else None."""
    ladder = adaptive_ladder(path, key, num, cess_threshold, most=most)
    if not ladder.is_complete():
        return None
    return jax.block_until_ready(
        path.cut(ladder.places[: int(ladder.count)], ladder.count)
    )
