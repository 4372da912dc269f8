# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Proof, at declaration, that a factor is what the design needs: multi-affine. By its form or by numbers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
import itertools
import math
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import backend, checks
from ebmpp.core.precision import full_precision
from ebmpp.errors import DeclarationError, NotMultiAffineError
from ebmpp.families import Family
from ebmpp.graph.factors import Factor
from ebmpp.graph.factors.factor import Params
from ebmpp.graph.factors.lateral import Split
from ebmpp.graph.form import is_multi_affine
from ebmpp.graph.initialization import random_statistics

#: Of a program that runs once or twice: without LLVM's optimiser a graph of two layers is declared in three
#: quarters of the time on a CPU, where alone that was measured.
_ONCE = {"xla_backend_optimization_level": 0}
_STATES = 8  # at which it is probed, beside a point between them
_ROUNDING = 128 * float(np.finfo(np.float32).eps)  # of a sum, times the root of how many numbers are summed
_ROUGHLY = 1e-3  # relative, at states: some are far, where more is lost, and kinks are coarse


def probe(
    factor: Factor,
    families: Mapping[str, Family],
    params: Params,
    splits: Mapping[str, Split] = MappingProxyType({}),
) -> None:
    """Check that the energy is affine in the statistics of each block of ``factor``, or of each of its parts.

    Many are by their form. For the others the gradient in one block's statistics is compared between random
    points that differ in this block alone, and the energy's change with the gradient's; a smooth function
    that passes is affine there with probability one. One with kinks and jumps, such as a comparison, can be
    constant between two states: so it is tried at some states, too, and from each with a block at 0, where
    energies are differentiated.

    :param splits: how blocks whose units interact are split.

    :raises DeclarationError: when the energy fails, is not a scalar or not finite.
    :raises NotMultiAffineError: when it is not affine, or units of one block interact.
    """
    scope = tuple(families[b] for b in factor.blocks)
    floats = np.dtype(jnp.result_type(float))
    shapes = [jax.ShapeDtypeStruct(f.statistic_shape, floats) for f in scope]
    if is_multi_affine(partial(factor.evaluate, families=scope), params, shapes):
        return
    generator = np.random.default_rng(0)
    shaken = lambda a: (np.asarray(a) + generator.normal(size=np.shape(a))).astype(a.dtype)
    noisy = jax.tree.map(shaken, params)
    between, *others = _points(factor, families, generator)
    # One program, which goes when this function returns: op by op, each width of a block would leave some
    # twenty in jax's caches, of a megabyte each.
    options = None if backend.accelerated() else _ONCE
    measure = jax.jit(lambda *given: _measure(factor, scope, splits, *given), compiler_options=options)
    one = np.ones((), floats)
    fine = np.asarray(_ROUNDING * math.sqrt(sum(shape.size for shape in shapes)), floats)
    found = _run(factor, measure, noisy, *between, one, fine)
    if not np.isfinite(found.value):
        noisy = params  # an energy that restricts its params (a logarithm, say) is probed at its init
        found = _run(factor, measure, noisy, *between, one, fine)
    if not np.isfinite(found.value):
        raise DeclarationError(f"{factor!r}: energy is {found.value} at its initial params")
    _check(factor, scope, splits, found, noisy, *between, fine)
    rough = np.maximum(fine, np.asarray(_ROUGHLY, floats))
    for here, there in others:
        found = _run(factor, measure, noisy, here, there, one, rough)
        _check(factor, scope, splits, found, noisy, here, there, rough)


def _points(
    factor: Factor, families: Mapping[str, Family], generator: np.random.Generator
) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Statistics of each block, and others to move one of them to: some between states, then of states."""
    scope, floats = [families[b] for b in factor.blocks], np.dtype(jnp.result_type(float))
    draw = lambda: [generator.uniform(0.1, 0.9, f.statistic_shape).astype(floats) for f in scope]
    made = jax.device_get(random_statistics(families, factor.blocks, _STATES + 1))
    rows = [[made[b][i].astype(floats) for b in factor.blocks] for i in range(_STATES + 1)]
    zero = [np.zeros_like(t) for t in rows[0]]
    moves = [(row, to) for row, after in itertools.pairwise(rows) for to in (after, zero)]
    return [(draw(), draw()), *moves]


def _check(
    factor: Factor,
    scope: tuple[Family, ...],
    splits: Mapping[str, Split],
    found: "_Found",
    params: Params,
    here: list[np.ndarray],
    there: list[np.ndarray],
    tolerance: np.ndarray,
) -> None:
    """:raises NotMultiAffineError: where what was found between two points is not affine."""
    for i, (block, family) in enumerate(zip(factor.blocks, scope, strict=True)):
        in_parts = _in_parts(factor, block, splits)
        curved, jumps = found.there[i] if in_parts else _compare(found, i, here[i], there[i], tolerance)
        if not (curved or jumps):
            continue
        if in_parts:
            _refuse_parts(factor, splits[block])
        at = _energy_in(factor, scope, params, [jnp.asarray(t) for t in here], i)
        mutual = curved and not jumps_alone(
            at, jnp.asarray(here[i]), jnp.asarray(there[i]), family, tolerance
        )
        _refuse(factor, block, family, bool(mutual))


class _Found(NamedTuple):
    """What the probe measures."""

    value: Array
    """The energy."""
    slopes: tuple[Array, ...]
    """Its gradient in each block."""
    there: tuple[tuple[Array, Array], ...]
    """By block: value and gradient where it alone is moved. Of a block in parts, whether they are wrong."""


def _run(factor: Factor, measure: Callable[..., _Found], *given: Any) -> _Found:
    try:
        return jax.device_get(measure(*given))
    except DeclarationError:
        raise
    except Exception as error:
        params, stats, *_ = given
        shapes = {b: s.shape for b, s in zip(factor.blocks, stats, strict=True)}
        raise DeclarationError(
            f"{factor!r}: its energy failed when called with {_told(params)} and statistics of shape "
            f"{shapes}: {_remedy(error)}{error}"
        ) from error


def _told(params: Any) -> str:
    """The first argument of an energy, in words."""
    if isinstance(params, tuple) and not params:
        return "params (), for there is no init=... that makes some,"
    return f"params of shape {jax.tree.map(jnp.shape, params)}"


def _remedy(error: Exception) -> str:
    """What to write in place of Python's own ``if``, ``float`` and numpy, which cannot be compiled."""
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return "energies are compiled, so use jax.numpy in place of numpy. jax says: "
    if isinstance(error, jax.errors.ConcretizationTypeError):
        return (
            "energies are compiled, so Python's if, bool, float and int cannot depend on params or "
            "statistics; use jnp.where or jax.lax.cond. jax says: "
        )
    return ""


def _energy_in(
    factor: Factor, scope: tuple[Family, ...], params: Params, base: Sequence[Array], i: int
) -> Callable[[Array], Array]:
    """The energy as a function of one block's statistics."""
    return lambda t: factor.evaluate(params, *base[:i], t, *base[i + 1 :], families=scope)


@full_precision
def _measure(
    factor: Factor,
    scope: tuple[Family, ...],
    splits: Mapping[str, Split],
    params: Params,
    base: Sequence[Array],
    other: Sequence[Array],
    one: Array,
    tolerance: Array,
) -> _Found:
    value = factor.evaluate(params, *base, families=scope)
    if not isinstance(value, jax.Array | np.ndarray | np.number | float | int) or jnp.shape(value) != ():
        told = checks.tell(value) if not hasattr(value, "shape") else f"shape {jnp.shape(value)}"
        raise DeclarationError(
            f"{factor!r}: energy returned {told}, expected a scalar; it is called "
            "with one state, and the library adds the batch axes"
        )
    found = []
    for i, block in enumerate(factor.blocks):
        at, here, moved = _energy_in(factor, scope, params, base, i), base[i], other[i]
        if not _in_parts(factor, block, splits):
            found.append(_sloped(at, moved, one))
        elif factor.local(dict(zip(factor.blocks, scope, strict=True)), splits[block]) is not None:
            found.append((jnp.array(False), jnp.array(False)))  # affine by its form
        else:
            found.append(_measure_parts(at, here, moved, splits[block], tolerance))
    _, slopes = _sloped(lambda t: factor.evaluate(params, *t, families=scope), tuple(base), one)
    return _Found(jnp.asarray(value), slopes, tuple(found))


def _sloped(energy: Callable[[Any], Array], at: Any, one: Array) -> tuple[Array, Any]:
    """Value and gradient.

    :param one: 1, which the program is given: of one that it knows, what is probed under another program's
        trace would be computed at once, in programs of their own.
    """
    value, back = jax.vjp(energy, at)
    return value, back(one.astype(value.dtype))[0]


def _in_parts(factor: Factor, block: str, splits: Mapping[str, Split]) -> bool:
    return block in splits and any(b == block for b, _ in factor.lateral)


# On the host: compiled, its dozen sums take longer than the energy.
def _compare(
    found: _Found, i: int, here: np.ndarray, moved: np.ndarray, tolerance: np.ndarray
) -> tuple[bool, bool]:
    """Whether a block's gradient changes where the block alone is moved, and whether the energy changes by
    something else than the gradient says.
    """
    value_here, slope_here, (value_there, slope_there) = found.value, found.slopes[i], found.there[i]
    with np.errstate(all="ignore"):  # what is not a number is not affine
        scale = abs(slope_here).max() + abs(slope_there).max()
        curved = not abs(slope_here - slope_there).max() <= tolerance * scale
        step = moved - here
        predicted, size = (slope_here * step).sum(), (abs(slope_here) * abs(step)).sum()
        size = size + abs(value_here) + abs(value_there)
        return curved, not abs(value_there - value_here - predicted) <= tolerance * size


def _measure_parts(
    at: Callable[[Array], Array], here: Array, moved: Array, split: Split, tolerance: Array
) -> tuple[Array, Array]:
    """The same for each part: its units' gradients must not change when all of its units are moved."""
    family = split.family
    colors = jnp.asarray(split.colors).reshape(*family.shape, *(1,) * len(family.stat_shape))
    value, slope = jax.value_and_grad(at)(here)

    def change(part: Array) -> tuple[Array, Array]:
        inside = colors == part
        step = jnp.where(inside, moved - here, 0)
        value_there, there = jax.value_and_grad(at)(here + step)
        curved = jnp.where(inside, jnp.abs(there - slope), 0).max()
        return curved, jnp.abs(value_there - value - jnp.vdot(slope, step))

    curved, jumps = jax.lax.map(change, jnp.arange(split.num_parts))
    scale = 2 * jnp.abs(slope).max()
    size = jnp.vdot(jnp.abs(slope), jnp.abs(moved - here)) + 2 * jnp.abs(value)
    return ~(curved <= tolerance * scale).all(), ~(jumps <= tolerance * size).all()


def _refuse(factor: Factor, block: str, family: Family, mutual: bool) -> NoReturn:
    """:param mutual: whether units of the block interact with one another."""
    if mutual:
        raise NotMultiAffineError(
            f"{factor!r}: units of block {block!r} interact with one another, so they cannot be drawn "
            "together; say which do (Factor(..., lateral=...) or Pairwise), or split the block"
            + factor.advice
        )
    raise NotMultiAffineError(
        f"{factor!r}: its energy is not affine in the sufficient statistics of block {block!r} "
        f"({family!r}); accepted is an energy in which each unit's statistics enter linearly, the "
        "other units held fixed (products of different blocks' statistics are fine; comparisons, jnp.where, "
        "look-ups and relu are not, for they are linear at a unit's values at most: x**2 of 0 and 1 is x, of "
        "-1 and 1 it is 1, and a == b of 0 and 1 is a*b + (1-a)*(1-b); for x**2 of others use Gaussian(..., "
        "variance='learned'), whose statistics are x and x**2)" + factor.advice
    )


def _refuse_parts(factor: Factor, split: Split) -> NoReturn:
    raise NotMultiAffineError(
        f"{factor!r}: its energy is not affine in the statistics of units of block {split.block!r} "
        f"({split.family!r}) that its lateral pairs say do not interact; name every pair of units of this "
        "block whose product is in the energy, and let each unit's statistics enter linearly, the others "
        "held fixed"
    )


def jumps_alone(
    at: Callable[[Array], Array], here: Array, there: Array, family: Family, tolerance: np.ndarray
) -> bool:
    """Whether moving one unit's statistics changes that same unit's own gradient."""
    per_unit = max(1, int(np.prod(family.stat_shape)))
    flat, moved = here.reshape(-1, per_unit), there.reshape(-1, per_unit)
    gradient = lambda t: jax.grad(at)(t.reshape(here.shape)).reshape(-1, per_unit)
    before = gradient(flat)
    for unit in range(min(len(flat), 8)):
        after = gradient(flat.at[unit].set(moved[unit]))
        if not jnp.abs(after - before)[unit].max() <= tolerance * jnp.abs(before).max():
            return True
    return False
