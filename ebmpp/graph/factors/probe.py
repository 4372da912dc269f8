# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Numerical check, on declaration, that the energy of a factor is multi-affine."""

from collections.abc import Callable, Mapping, Sequence
import itertools
import math
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.core.precision import full_precision
from ebmpp.errors import DeclarationError, NotMultiAffineError
from ebmpp.families import Family
from ebmpp.families.random_statistics import random_statistics
from ebmpp.graph.factors.factor import Factor, Params
from ebmpp.graph.factors.lateral import Split

_STATES = 8
_ROUNDING = 128 * float(np.finfo(np.float32).eps)  # relative, of a sum, per root of the number of terms
_STATE_TOLERANCE = 1e-3  # relative; some states are far from zero, and kinks are coarse

_Point = list[np.ndarray]


def probe(
    factor: Factor,
    families: Mapping[str, Family],
    params: Params,
    splits: Mapping[str, Split] = MappingProxyType({}),
) -> None:
    """Check that the energy is affine in the statistics of each block of ``factor``, or of each of its parts.

    The gradient in one block's statistics is compared between random points that differ in this block alone,
    and the change of the energy with the gradient. A smooth function that passes is affine there with
    probability one. A function with kinks or jumps, such as a comparison, can be constant between two random
    points, so it is also tried at states, and between each and the state with a block at 0, where energies
    are differentiated.

    :param splits: parts of the blocks whose units interact.
    :raises DeclarationError: if the energy fails, or is not a finite scalar.
    :raises NotMultiAffineError: if it is not affine.
    """
    scope = tuple(families[b] for b in factor.blocks)
    floats = np.dtype(jnp.result_type(float))
    generator = np.random.default_rng(0)
    noisy = lambda a: (np.asarray(a) + generator.normal(size=np.shape(a))).astype(a.dtype)
    candidates = [
        jax.tree.map(noisy, params),
        params,
    ]  # an energy may restrict its params, as a logarithm does
    between, *moves = _points(factor, families, generator)
    # One program, dropped on return: op by op, each width of a block would leave twenty in jax's caches.
    measure = jax.jit(lambda *args: _measure(factor, scope, splits, *args))
    fine = np.asarray(_ROUNDING * math.sqrt(sum(math.prod(f.statistic_shape) for f in scope)), floats)
    for values in candidates:
        probed = _run(factor, measure, values, *between, fine)
        if np.isfinite(probed.value):
            break
    else:
        raise DeclarationError(f"{factor!r}: energy must be finite at its initial params, got {probed.value}")
    _check(factor, scope, splits, probed, *between, fine)
    coarse = np.maximum(fine, np.asarray(_STATE_TOLERANCE, floats))
    for here, there in moves:
        _check(
            factor,
            scope,
            splits,
            _run(factor, measure, values, here, there, coarse),
            here,
            there,
            coarse,
        )


def _points(
    factor: Factor, families: Mapping[str, Family], generator: np.random.Generator
) -> list[tuple[_Point, _Point]]:
    """Return pairs of points: statistics of all blocks, and others to move one block to."""
    scope, floats = [families[b] for b in factor.blocks], np.dtype(jnp.result_type(float))
    draw = lambda: [generator.uniform(0.1, 0.9, f.statistic_shape).astype(floats) for f in scope]
    states = jax.device_get(random_statistics(families, factor.blocks, _STATES + 1))
    rows = [[states[b][i].astype(floats) for b in factor.blocks] for i in range(_STATES + 1)]
    zero = [np.zeros_like(t) for t in rows[0]]
    moves = [(row, to) for row, after in itertools.pairwise(rows) for to in (after, zero)]
    return [(draw(), draw()), *moves]


class _Probed(NamedTuple):
    """Measurements at one pair of points."""

    value: Array
    slopes: tuple[Array, ...]
    """Gradient of the energy in each block."""
    moved: tuple[tuple[Array, Array], ...]
    """Value and gradient with one block moved; of a block in parts, whether gradient and value are wrong."""


def _run(
    factor: Factor, measure: Callable[..., _Probed], params: Params, here: _Point, *args: Any
) -> _Probed:
    try:
        return jax.device_get(measure(params, here, *args))
    except DeclarationError:
        raise
    except Exception as error:
        shapes = {b: t.shape for b, t in zip(factor.blocks, here, strict=True)}
        raise DeclarationError(
            f"{factor!r}: energy failed for params of shape {jax.tree.map(np.shape, params)} and statistics "
            f"of shape {shapes}: {error} (jax compiles it: write it in jax.numpy)"
        ) from error


@full_precision
def _measure(
    factor: Factor,
    scope: tuple[Family, ...],
    splits: Mapping[str, Split],
    params: Params,
    here: Sequence[Array],
    there: Sequence[Array],
    tolerance: Array,
) -> _Probed:
    value = factor.evaluate(params, *here, families=scope)
    if not isinstance(value, jax.Array | np.ndarray | np.number | float | int) or jnp.shape(value) != ():
        description = f"shape {jnp.shape(value)}" if hasattr(value, "shape") else checks.tell(value)
        raise DeclarationError(f"{factor!r}: energy must return a scalar for one state, got {description}")
    moved = []
    for i, block in enumerate(factor.blocks):
        energy_at = lambda t, i=i: factor.evaluate(params, *here[:i], t, *here[i + 1 :], families=scope)
        if not _is_split(factor, block, splits):
            moved.append(jax.value_and_grad(energy_at)(there[i]))
        elif factor.local(dict(zip(factor.blocks, scope, strict=True)), splits[block]) is not None:
            moved.append((jnp.array(False), jnp.array(False)))  # affine by construction
        else:
            moved.append(_compare_parts(energy_at, here[i], there[i], splits[block], tolerance))
    slopes = jax.grad(lambda t: factor.evaluate(params, *t, families=scope))(tuple(here))
    return _Probed(jnp.asarray(value), slopes, tuple(moved))


def _is_split(factor: Factor, block: str, splits: Mapping[str, Split]) -> bool:
    return block in splits and any(b == block for b, _ in factor.lateral)


def _check(
    factor: Factor,
    scope: tuple[Family, ...],
    splits: Mapping[str, Split],
    probed: _Probed,
    here: _Point,
    there: _Point,
    tolerance: np.ndarray,
) -> None:
    """Refuse an energy that is not affine between two points."""
    for i, (block, family) in enumerate(zip(factor.blocks, scope, strict=True)):
        is_split = _is_split(factor, block, splits)
        curved, jumps = probed.moved[i] if is_split else _compare(probed, i, here[i], there[i], tolerance)
        if curved or jumps:
            pairs = "beyond its lateral pairs, " if is_split else "with one another, "
            raise NotMultiAffineError(
                f"{factor!r}: energy must be affine in the statistics of each unit of block {block!r} "
                f"({family!r}) while all other units are held fixed. If units of the block interact "
                f"{pairs}declare all such pairs with lateral=... or Pairwise, or split the block. Otherwise "
                "write comparisons, jnp.where, look-ups and activations as products: x**2 of 0 and 1 is x, a "
                "== b is a*b + (1-a)*(1-b); x**2 of reals is a statistic of Gaussian(..., "
                "variance='learned')."
            )


# On the host: compiling these dozen sums takes longer than the energy.
def _compare(
    probed: _Probed, i: int, here: np.ndarray, there: np.ndarray, tolerance: np.ndarray
) -> tuple[bool, bool]:
    """Return whether a block's gradient changes as it moves, and whether the energy departs from it."""
    value_here, slope_here, (value_there, slope_there) = probed.value, probed.slopes[i], probed.moved[i]
    with np.errstate(all="ignore"):  # nan is not affine
        scale = abs(slope_here).max() + abs(slope_there).max()
        curved = not abs(slope_here - slope_there).max() <= tolerance * scale
        step = there - here
        predicted, size = (slope_here * step).sum(), (abs(slope_here) * abs(step)).sum()
        size = size + abs(value_here) + abs(value_there)
        return curved, not abs(value_there - value_here - predicted) <= tolerance * size


def _compare_parts(
    energy_at: Callable[[Array], Array], here: Array, there: Array, split: Split, tolerance: Array
) -> tuple[Array, Array]:
    """Do the same for each part: the gradients of its units must not change when all its units move."""
    family = split.family
    colors = jnp.asarray(split.colors).reshape(*family.shape, *(1,) * len(family.stat_shape))
    value, slope = jax.value_and_grad(energy_at)(here)

    def change(part: Array) -> tuple[Array, Array]:
        inside = colors == part
        step = jnp.where(inside, there - here, 0)
        value_there, slope_there = jax.value_and_grad(energy_at)(here + step)
        curved = jnp.where(inside, jnp.abs(slope_there - slope), 0).max()
        return curved, jnp.abs(value_there - value - jnp.vdot(slope, step))

    curved, jumps = jax.lax.map(change, jnp.arange(split.num_parts))
    scale = 2 * jnp.abs(slope).max()
    size = jnp.vdot(jnp.abs(slope), jnp.abs(there - here)) + 2 * jnp.abs(value)
    return ~(curved <= tolerance * scale).all(), ~(jumps <= tolerance * size).all()
