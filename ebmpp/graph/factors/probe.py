# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Check on declaration that a factor's energy is multi-affine, by numbers and by its trace."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import re
from typing import NamedTuple

from jaxtyping import Float, Integer, PyTree, Real, UInt32
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Eta, Numbers, checks, compiled, expand, full_precision, select
from ebmpp.dependence.rules import is_polynomial
from ebmpp.errors import DeclarationError, NotMultiAffineError
from ebmpp.families.family import Families, Family
from ebmpp.graph.factors.factor import Factor, FactorParams
from ebmpp.graph.factors.interactions import as_scalar, energy_failed, terms_of, trace
from ebmpp.graph.factors.lateral import Split

_NUM_VALUES = 128  # that are tried of a family of many values
_NUM_STATES = 8
_FAR = np.rint(np.geomspace(1, 1e5, 30))
# relative, of a sum, per root of the number of terms
_ROUNDING = 128 * float(np.finfo(np.float32).eps)
_STATE_TOLERANCE = 1e-3  # relative; some states are far from zero, and kinks are coarse
_ONE_PART = np.zeros((), int)  # of a block whose units do not interact
# in the first line of an error; the rest may quote the user's code
_LOOK_UP = re.compile("(?i)(integer|boolean).*ind(ex|ic)|ind(ex|ic).*integer")


class _Move(NamedTuple):
    """Statistics of all blocks, and others to which one block at a time moves."""

    here: list[np.ndarray]
    there: list[np.ndarray]


class _Measured(NamedTuple):
    """Measurements at a move."""

    value: Array
    """Energy at its start."""
    slopes: tuple[Array, ...]
    """Gradient of the energy in each block."""
    moved: tuple[tuple[Array, Array], ...]
    """Energies and gradients with each part of one block moved."""


def probe(
    factor: Factor,
    families: Families,
    params: FactorParams,
    splits: Mapping[str, Split],
) -> None:
    """Check that the energy is affine in the statistics of each block, or of each of its parts.

    The gradient in one block's statistics is compared between random points that differ
    in this block alone, and the change of the energy with the gradient. A smooth
    function that passes is affine there with probability one. A function with kinks or
    jumps, such as a comparison, can be constant between two random points, so it is
    also tried at states, and between each and the state with a block at 0, where
    energies are differentiated. A polynomial that is affine between random points is
    affine everywhere; all else is tried over the range of each family.
    """
    families = select(families, factor.blocks)
    lateral = dict(factor.lateral)
    parts = [
        _unit_parts(splits[b]) if b in lateral and b in splits else _ONE_PART
        for b in factor.blocks
    ]
    probed = _Probe(factor, families, parts)
    generator = np.random.default_rng(0)
    random_move, *moves = _moves(families, generator)

    # One program, dropped on return: op by op, each width of a block would leave twenty
    # in jax's caches.
    measure = jax.jit(probed.measure)
    # an energy may restrict its params, as a logarithm
    for values in (with_noise(params, generator), params):
        measured = probed.run(measure, values, random_move)
        if np.isfinite(measured.value):
            break
    else:
        raise checks.declaration_error(
            f"{factor!r}: energy",
            "finite at its initial params",
            float(measured.value),
            hint="Declare impossible states by a Table, or with affine=False.",
        )
    num_terms = sum(math.prod(f.statistic_shape) for f in families.values())
    tolerance = _ROUNDING * math.sqrt(num_terms)
    probed.check(measured, random_move, tolerance)
    tolerance = max(tolerance, _STATE_TOLERANCE)
    if not is_polynomial(trace(factor, families)):
        moves = itertools.chain(moves, _far_moves(families.values()))
    for move in moves:
        probed.check(probed.run(measure, values, move), move, tolerance)


def check_values(
    factor: Factor,
    families: Families,
    params: FactorParams,
    splits: Mapping[str, Split],
) -> bool:
    """Check values of an energy that need not be affine: not nan or -inf, and lateral pairs.

    :return: True if some are infinite, or the energy has an infinite constant.
    """
    statistics = random_statistics(families, factor.blocks, _NUM_STATES)

    def energy_at(t):
        return factor.energy_at(params, t, families)

    energies_at = jax.jit(jax.vmap(energy_at))
    values = np.asarray(energies_at(statistics))
    if not (values > -np.inf).all():
        raise checks.declaration_error(
            f"{factor!r}: energy", "a number or +inf at every state", values
        )
    here = {b: t[:-1] for b, t in statistics.items()}
    for block, _ in factor.lateral:
        parts = _unit_parts(splits[block])
        units = np.arange(parts.size).reshape(parts.shape)

        def changes(groups, number, block=block):
            moved = jnp.where(groups == number, statistics[block][1:], here[block])
            return energies_at({**here, block: moved}) - energies_at(here)

        alone = jax.lax.map(functools.partial(changes, units), units.ravel())
        numbers = np.arange(parts.max() + 1)
        jointly = jax.lax.map(functools.partial(changes, parts), numbers)
        sums = jax.ops.segment_sum(alone, parts.ravel(), len(numbers))
        gap = jnp.abs(sums - jointly)
        is_close = gap <= _STATE_TOLERANCE * (1 + jnp.abs(jointly))
        if not (is_close | ~jnp.isfinite(gap)).all():
            raise checks.declaration_error(
                f"{factor!r}: lateral pairs of block {block!r}",
                "all pairs of units that interact",
                list(dict(factor.lateral)),
                hint="Leave out lateral: the pairs are then read from the traced energy.",
            )
    constants = terms_of(factor, families).program.constants.values()
    return any(np.isposinf(v).any() for v in (values, *constants))


def _moves(families: Families, generator: np.random.Generator) -> list[_Move]:
    """Return a move between random points, and then moves between states."""
    floats = jnp.result_type(float)

    def random_point():
        return list(map(np.asarray, generic_statistics(families, generator).values()))

    moves = [_Move(random_point(), random_point())]
    statistics = jax.device_get(random_statistics(families, families, _NUM_STATES + 1))
    columns = (statistics[b].astype(floats) for b in families)
    states = list(map(list, zip(*columns)))
    zero = [np.zeros_like(t) for t in states[0]]
    for state, following in itertools.pairwise(states):
        moves += [_Move(state, following), _Move(state, zero)]
    return moves


def _far_moves(scope: Iterable[Family]) -> Iterator[_Move]:
    """Yield moves over the range of each family."""
    floats = jnp.result_type(float)
    columns = [np.asarray(far_statistics(family), floats) for family in scope]
    count = max(map(len, columns))
    states = [[column[i % len(column)] for column in columns] for i in range(count)]
    yield from itertools.starmap(_Move, itertools.pairwise(states))


@dataclasses.dataclass(frozen=True, eq=False)
class _Probe:
    """A factor, its families, and the parts of the blocks whose units interact in it."""

    factor: Factor
    families: Families
    parts: Sequence[np.ndarray]

    def run(
        self, measure: Callable[..., _Measured], params: FactorParams, move: _Move
    ) -> _Measured:
        """Return measurements on the host; raise DeclarationError if the energy fails."""
        try:
            return jax.device_get(measure(params, *move))
        except DeclarationError:
            raise
        except Exception as error:
            first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
            is_look_up = _LOOK_UP.search(first_line)
            kind = NotMultiAffineError if is_look_up else DeclarationError
            raise energy_failed(
                self.factor,
                self.families,
                params,
                error,
                " (jax compiles it: write it in jax.numpy, and a table look-up or a "
                "branch as a sum of products, or declare affine=False)",
                kind,
            ) from error

    @full_precision
    def measure(
        self, params: FactorParams, here: Sequence[Array], there: Sequence[Array]
    ) -> _Measured:
        """Return energies and gradients at a point, and with each part of one block moved."""
        scope = self.factor.scope(self.families)
        energy = functools.partial(self.factor.evaluate, params, families=scope)
        value = as_scalar(self.factor, energy(*here))

        def move_parts(i, parts):
            def move(part):
                moved = jnp.where(parts == part, there[i], here[i])
                energy_there = jax.value_and_grad(energy, argnums=i)
                return energy_there(*here[:i], moved, *here[i + 1 :])

            return jax.lax.map(move, jnp.arange(parts.max() + 1))

        slopes = jax.grad(energy, argnums=tuple(range(len(here))))(*here)
        moved = tuple(itertools.starmap(move_parts, enumerate(self.parts)))
        return _Measured(jnp.asarray(value), slopes, moved)

    def check(self, measured: _Measured, move: _Move, tolerance: float) -> None:
        """Refuse an energy that is not affine along a move."""
        for i, block in enumerate(self.factor.blocks):
            parts = self.parts[i]
            step = move.there[i] - move.here[i]
            if _is_affine(measured, i, parts, step, tolerance):
                continue
            beyond = "beyond its lateral pairs" if parts.ndim else "with one another"
            raise NotMultiAffineError(
                f"{self.factor!r}: energy must be affine in the statistics of each "
                f"unit of block {block!r} ({self.families[block]!r}) given all other units. If "
                f"its units interact {beyond}, declare all such pairs with "
                "lateral=... or Pairwise, or split the block. Otherwise write "
                "comparisons, jnp.where and activations as products: x**2 of 0 and "
                "1 is x, a == b is a*b + (1-a)*(1-b); x**2 of reals is a statistic "
                "of Gaussian(..., variance='learned'). Any other energy, such as a "
                "network, is declared by Factor(..., affine=False)."
            )


def _unit_parts(split: Split) -> Integer[np.ndarray, "*#statistics"]:
    """Return the part of each unit, broadcastable to statistics."""
    extra = (1,) * len(split.family.stat_shape)
    return split.colors.reshape(split.family.shape + extra)


# On the host: compiling these dozen sums takes longer than the energy.
def _is_affine(
    measured: _Measured, i: int, parts: np.ndarray, step: np.ndarray, tolerance: float
) -> bool:
    """Return True if no part's gradient changes as it moves, and the energy follows it."""
    value = measured.value
    slope = measured.slopes[i]
    with np.errstate(all="ignore"):  # nan is not affine
        size = (abs(slope) * abs(step)).sum() + abs(value)
        for part, (value_there, slope_there) in enumerate(zip(*measured.moved[i])):
            inside = parts == part
            change = np.where(inside, slope_there - slope, 0)
            jump = value_there - value - (slope * np.where(inside, step, 0)).sum()
            scale = abs(slope).max() + abs(slope_there).max()
            is_constant = abs(change).max() <= tolerance * scale
            if not is_constant or not abs(jump) <= tolerance * (
                size + abs(value_there)
            ):
                return False
    return True


def far_statistics(family: Family) -> Float[np.ndarray, "states ..."]:
    """Return statistics over the range of a family, of equal units and of two random halves.

    Where no integer has finite statistics, as between 0 and 1, they are of draws.
    """
    statistics = _finite_statistics(family, _states_over_range(family))
    if len(statistics):
        return statistics
    words = _random_words(family, _NUM_VALUES, np.random.default_rng(0))
    return _finite_statistics(family, family.initial(jnp.asarray(words)))


def _states_over_range(family: Family) -> Real[np.ndarray, "states ..."]:
    table = family.states()
    if table is None:
        values = np.concatenate([np.arange(_NUM_VALUES), _FAR, -_FAR])
    else:
        count = min(len(table), _NUM_VALUES)
        values = np.asarray(table)[np.linspace(0, len(table) - 1, count).astype(int)]
    values = values[np.asarray(family.in_support(values.astype(float)))]
    equal = np.multiply.outer(values, np.ones(family.shape, values.dtype))
    last = equal[-2 * len(_FAR) :]
    is_last = np.random.default_rng(0).random(last.shape) < 0.5
    return np.concatenate([equal, np.where(is_last, last, equal[:1])])


def _finite_statistics(
    family: Family, states: Real[Numbers, "states ..."]
) -> Float[np.ndarray, "finite ..."]:
    statistics = np.asarray(family.statistics(jnp.asarray(states, family.dtype)))
    axes = tuple(range(1, statistics.ndim))
    return statistics[np.isfinite(statistics).all(axes)]


def random_statistics(families: Families, blocks: Iterable[str], rows: int) -> Eta:
    """Return statistics of ``rows`` states, the same in every call.

    Units of finitely many values take them with proportions that differ between rows,
    and are nearly all equal in every second row. Others are initial draws, ten times as
    large in every second row where the support has such values.
    """
    generator = np.random.default_rng(0)
    scope = tuple((b, families[b]) for b in blocks)
    return _statistics_of(scope, {b: _numbers(f, rows, generator) for b, f in scope})


def generic_statistics(families: Families, generator: np.random.Generator) -> Eta:
    """Return random numbers in place of the statistics of one state."""
    return {
        b: jnp.asarray(generator.uniform(0.1, 0.9, f.statistic_shape), float)
        for b, f in families.items()
    }


def with_noise(
    params: PyTree, generator: np.random.Generator, scale: float = 1.0
) -> PyTree:
    """Return params plus Gaussian noise, on the host."""

    def add_noise(leaf):
        noise = scale * generator.normal(size=leaf.shape)
        return (np.asarray(leaf) + noise).astype(leaf.dtype)

    return jax.tree.map(add_noise, params)


def _random_words(
    family: Family, rows: int, generator: np.random.Generator
) -> UInt32[np.ndarray, "rows *units words"]:
    shape = (rows, *family.shape, family.num_words)
    return generator.integers(0, 2**32, shape, np.uint32)


def _numbers(family: Family, rows: int, generator: np.random.Generator) -> np.ndarray:
    """Return numbers of values, or random words where there are infinitely many values."""
    states = family.states()
    if states is None:
        return _random_words(family, rows, generator)
    count = len(states)
    shares = generator.dirichlet(np.full(count, 0.5), rows)
    dominant = np.eye(count)[np.arange(0, rows, 2) // 2 % count]
    shares[::2] = 0.05 * shares[::2] + 0.95 * dominant
    numbers = [generator.choice(count, family.shape, p=p) for p in shares]
    return np.stack(numbers).astype(np.int32)


@compiled(statics=1)
def _statistics_of(
    scope: tuple[tuple[str, Family], ...], numbers: dict[str, Array]
) -> Eta:
    statistics = {}
    for b, family in scope:
        states = family.states()
        if states is None:
            x = family.initial(numbers[b])
            is_odd = expand(jnp.arange(len(x)) % 2 == 1, target=x)
            x = jnp.where(is_odd & family.in_support(10 * x), 10 * x, x)
        else:
            x = states[numbers[b]]
        statistics[b] = family.statistics(x)
    return statistics
