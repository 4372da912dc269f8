# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Ladders: the places of a path at which particles stop, fixed or found by a pilot run."""

import math
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Float32
import numpy as np
from numpy.typing import ArrayLike

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.annealing import systems
from ebmpp.annealing.log_partition import not_finite
from ebmpp.annealing.path import Path
from ebmpp.core import Count, Key, Scalar, checks, compiled, random

_SIGMOID_SLOPE = 4.0
_CAPACITY = 256  # initial room for the places of a pilot
_FIRST_STEP = 0.1
_STEP_GROWTH = 1.3
_STEP_SHRINKAGE = 0.75
_SHORTEST_STEP = 1e-6
_SMOOTHING = 0.2  # share of the latest rung in the smoothed correlation


def temperatures(
    kind: str | ArrayLike, num_temperatures: int
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
    count = checks.count("num_temperatures", num_temperatures, 2)
    linear = np.linspace(0.0, 1.0, count)
    kinds = ("linear", "sigmoid", "adaptive")
    checks.choice("ladder", kind, kinds, "increasing values from 0 to 1")
    if kind == "linear":
        return linear.astype(np.float32)
    # a logistic function up to scale and location
    rising = np.tanh(_SIGMOID_SLOPE * (linear - 0.5))
    return (0.5 + 0.5 * rising / rising[-1]).astype(np.float32)


def given_places(
    name: str, values: ArrayLike, end: int
) -> Float32[np.ndarray, "places"]:
    """Return a user's places as an array; they must increase from 0 to ``end``, the model."""
    places = np.asarray(checks.numbers(name, values), np.float32)
    has_ends = (
        places.ndim == 1 and len(places) > 1 and tuple(places[[0, -1]]) == (0, end)
    )
    if not has_ends or not (np.diff(places) > 0).all():
        raise checks.error(
            name, f"numbers that increase from 0 to {end}, the model", values
        )
    return places


def constant_speed(
    betas: Float[np.ndarray, "pilot"],
    spread: Float[np.ndarray, "steps"],
    num_temperatures: int,
) -> Float32[np.ndarray, "temperatures"]:
    """Return inverse temperatures whose log-weights have about equal spread at each step.

    Gelman, Meng (1998), *Simulating normalizing constants*, section 4.2: constant speed
    along a path.

    :param spread: standard deviation of a pilot's log-weights at each step between its
        ``betas``.

    >>> constant_speed(np.array([0, 0.5, 1]), np.array([0.3, 0.1]), 5).round(2).tolist()
    [0.0, 0.17, 0.33, 0.5, 1.0]
    """
    # the small terms keep steps without any spread apart
    widths = spread + 1e-3 * spread.mean() + 1e-12
    cumulated = np.concatenate([[0.0], np.cumsum(widths)])
    levels = np.linspace(0.0, cumulated[-1], num_temperatures)
    places = np.interp(levels, cumulated, betas).astype(np.float32)
    places[0] = 0.0
    places[-1] = 1.0
    return places


class Ladder(NamedTuple):
    """The places of a path at which a system stops."""

    places: Float[Array, "places"]
    count: Count
    """Number of places that are used, including the reference."""
    correlation: Scalar | float = 0.0
    """Largest correlation of the pilot's log-densities before and after the sweeps of a
    rung, smoothed over rungs; nan where it is not measured."""
    relative_ancestry: Scalar | float = 0.0
    """Of the pilot at the end; nan where it is not measured."""
    system: Any = None
    """The pilot's :class:`~ebmpp.annealing.systems.Systems` at the end; None where it is
    not measured."""

    def is_complete(self) -> Bool[Array, ""]:
        """Return True if there was room for all places; otherwise the last step is a long one."""
        return self.count < len(self.places)


class _Pilot(NamedTuple):
    """A pilot system on its way, and the places that it has found."""

    places: Float[Array, "places"]
    count: Count
    step: Scalar
    system: systems.Systems
    smoothed: Scalar
    largest: Scalar


def find_ladder(
    path: Path,
    key: Key,
    num: int,
    cess_threshold: Array | float,
    capacity: int,
    sweeps: Array | int = 1,
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

    def body(pilot):
        system = pilot.system
        place = pilot.places[pilot.count - 1]
        low = path.at(place)
        here = path.evaluate(low.params, system.x)

        def rung_after(step):
            return path.at(jnp.minimum(place + step, path.end))

        def is_too_long(step):
            high = rung_after(step)
            there = path.evaluate_at(high, here, system.x)
            gain = path.gain(low, high, here, there).reshape(system.log_weights.shape)
            cess = systems.conditional_ess(system.log_weights, gain)[0]
            # NaN is too long
            return ~(cess >= cess_threshold) & (step > _SHORTEST_STEP)

        def shorten(step):
            return _STEP_SHRINKAGE * step

        step = lax.while_loop(is_too_long, shorten, _STEP_GROWTH * pilot.step)
        step = jnp.where(pilot.count == capacity - 1, path.end, step)
        rung_keys = random.materialize(random.fold_in(keys, pilot.count))
        high = rung_after(step)
        system, before = systems.reweight(path, low, high, here, system, rung_keys)
        system = systems.move(path, high, before, system, rung_keys, sweeps)
        smoothed = pilot.smoothed
        if measure:
            start = path.at(jnp.zeros(()))
            after = path.evaluate(high.params, system.x)
            correlation = _correlation(
                path.gain(start, high, before, before),
                path.gain(start, high, after, after),
            )
            smoothed += _SMOOTHING * (correlation - smoothed)
        next_place = jnp.minimum(place + step, path.end)
        return _Pilot(
            places=pilot.places.at[pilot.count].set(next_place),
            count=pilot.count + 1,
            step=step,
            system=system,
            smoothed=smoothed,
            largest=jnp.maximum(pilot.largest, smoothed),
        )

    def is_open(pilot):
        return pilot.places[pilot.count - 1] < path.end

    zero = jnp.zeros(())
    pilot = _Pilot(
        places=jnp.zeros(capacity),
        count=jnp.ones((), jnp.int32),
        step=jnp.full((), _FIRST_STEP),
        system=systems.draw_initial(path, keys, num),
        smoothed=zero,
        largest=zero,
    )
    pilot = lax.while_loop(is_open, body, pilot)
    if not measure:
        return Ladder(pilot.places, pilot.count)
    ancestry = systems.relative_ancestry(pilot.system)[0]
    return Ladder(pilot.places, pilot.count, pilot.largest, ancestry, pilot.system)


def _correlation(a: Array, b: Array) -> Array:
    """Return the correlation of two columns; 0 where the values of one are all equal."""
    a = a - a.mean()
    b = b - b.mean()
    scale = jnp.sqrt((a**2).sum() * (b**2).sum())
    return (a * b).sum() / jnp.maximum(scale, 1e-30)


#: The cache is bounded by graphs.
_find = compiled(find_ladder, statics=(2, 4, 6), key=lambda path, *_: path.graph)


def adaptive_ladder(
    path: Path,
    key: Array,
    num: int,
    cess_threshold: float,
    sweeps: int = 1,
    most: float = math.inf,
    measure: bool = False,
) -> Ladder:
    """Find a ladder with room for all places, or ``most``; see :func:`find_ladder`.

    :raises DomainError: where no step meets the threshold, however short, unless
        ``most`` is given.
    """
    capacity = min(most, _CAPACITY)
    while True:
        ladder = _find(path, key, num, cess_threshold, capacity, sweeps, measure)
        if not measure:
            # on the host: a program that returns nan fails under jax_debug_nans
            ladder = ladder._replace(correlation=math.nan, relative_ancestry=math.nan)
        if int(ladder.count) < capacity or capacity == most:
            return ladder
        # the last step, to the end, is a long one; a pilot is stuck if the step before
        # is the shortest
        places = np.asarray(ladder.places)
        if places[-2] - places[-3] <= 2 * _SHORTEST_STEP:
            if most < math.inf:
                return ladder
            raise not_finite(f"weights at place {places[-2]:g} are uneven, or")
        capacity = min(most, 2 * capacity)


def thinned(
    path: Path, key: Array, num: int, cess_threshold: float, most: int
) -> Path | None:
    """Return a path with the places of an adaptive ladder as knots.

    :return: the path, or None if the ladder needs more than ``most`` places.
    """
    ladder = adaptive_ladder(path, key, num, cess_threshold, most=most)
    if not ladder.is_complete():
        return None
    knots = ladder.places[: int(ladder.count)]
    return jax.block_until_ready(path.cut(knots, ladder.count))
