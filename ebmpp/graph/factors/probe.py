# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Check, on declaration, that the energy of a factor is multi-affine: by numbers, and by its traced form."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Eta, checks
from ebmpp.core.backend import full_precision
from ebmpp.core.compile import compiled
from ebmpp.errors import DeclarationError, NotMultiAffineError
from ebmpp.families.family import Families, Family
from ebmpp.graph.factors.factor import Factor, Params
from ebmpp.graph.factors.lateral import Split

#: Operations that map polynomials to polynomials.
_ARITHMETIC = frozenset(
    "add add_any broadcast_in_dim concatenate conv_general_dilated "
    "convert_element_type copy cumsum dot_general integer_pow mul neg "
    "optimization_barrier pad reduce_precision reduce_sum reshape rev slice split "
    "square squeeze sub tile transpose".split()
)
#: The same, where these operands do not depend on the variables.
_CONSTANT_OPERANDS = dict.fromkeys(
    ("div", "dynamic_slice", "gather"), slice(1, None)
) | {
    "dynamic_update_slice": slice(2, None),
    "scatter-add": slice(1, 2),
    "select_n": slice(1),
}
_COUNTS = 128  # each of which is tried
_FAR = np.rint(np.geomspace(1, 1e5, 30))
_STATES = 8
# relative, of a sum, per root of the number of terms
_ROUNDING = 128 * float(np.finfo(np.float32).eps)
_STATE_TOLERANCE = 1e-3  # relative; some states are far from zero, and kinks are coarse

_ONE_PART = np.zeros((), int)  # of a block whose units do not interact

_Point = list[np.ndarray]
#: Statistics of all blocks, and others to move one block to.
_Move = tuple[_Point, _Point]


def probe(
    factor: Factor, families: Families, params: Params, splits: Mapping[str, Split]
) -> None:
    """Check that the energy is affine in the statistics of each block of ``factor``, or of each of its parts.

    The gradient in one block's statistics is compared between random points that differ
    in this block alone, and the change of the energy with the gradient. A smooth
    function that passes is affine there with probability one. A function with kinks or
    jumps, such as a comparison, can be constant between two random points, so it is
    also tried at states, and between each and the state with a block at 0, where
    energies are differentiated. Unless its traced form is a polynomial, it is tried
    over the range of each family.
    """
    scope = tuple(families[b] for b in factor.blocks)
    floats = np.dtype(jnp.result_type(float))
    generator = np.random.default_rng(0)

    def noisy(a):
        return (np.asarray(a) + generator.normal(size=np.shape(a))).astype(a.dtype)

    between, *moves = _points(factor, families, generator)
    probed = _Probe(
        factor, scope, {b: _parts(splits[b]) for b, _ in factor.lateral if b in splits}
    )
    # One program, dropped on return: op by op, each width of a block would leave twenty
    # in jax's caches.
    measure = jax.jit(probed.measure)
    # an energy may restrict its params, as a logarithm
    for values in (
        jax.tree.map(noisy, params),
        params,
    ):
        value = probed.run(measure, values, *between).value
        if np.isfinite(value):
            break
    if not bool(np.isfinite(value)):
        raise checks.error(
            f"{factor!r}: energy",
            "finite at its initial params",
            float(value),
            DeclarationError,
        )
    fine = np.asarray(
        _ROUNDING * math.sqrt(sum(math.prod(f.statistic_shape) for f in scope)), floats
    )
    coarse = np.maximum(fine, np.asarray(_STATE_TOLERANCE, floats))

    def energy(*t):
        return factor.evaluate(values, *t, families=scope)

    is_exact = is_polynomial(
        jax.make_jaxpr(energy)(*between[0]).jaxpr, [True] * len(scope)
    )
    far = () if is_exact else _far_moves(scope)
    coarsely = ((move, coarse) for move in itertools.chain(moves, far))
    for points, tolerance in itertools.chain([(between, fine)], coarsely):
        probed.check(probed.run(measure, values, *points), *points, tolerance)


def _far_moves(scope: Sequence[Family]) -> Iterator[_Move]:
    """Yield pairs of points over the range of each family."""
    floats = np.dtype(jnp.result_type(float))
    columns = [
        [np.asarray(t, floats) for t in far_statistics(family)] for family in scope
    ]
    if all(columns):
        length = max(map(len, columns))
        rows = zip(
            *(itertools.islice(itertools.cycle(column), length) for column in columns),
            strict=True,
        )
        yield from itertools.pairwise(map(list, rows))


def _points(
    factor: Factor, families: Families, generator: np.random.Generator
) -> list[_Move]:
    """Return pairs of random points, and then of states."""
    scope = [families[b] for b in factor.blocks]
    floats = np.dtype(jnp.result_type(float))

    def draw():
        return [
            generator.uniform(0.1, 0.9, f.statistic_shape).astype(floats) for f in scope
        ]

    states = jax.device_get(random_statistics(families, factor.blocks, _STATES + 1))
    rows = [
        [states[b][i].astype(floats) for b in factor.blocks] for i in range(_STATES + 1)
    ]
    zero = [np.zeros_like(t) for t in rows[0]]
    moves = [
        (row, to) for row, after in itertools.pairwise(rows) for to in (after, zero)
    ]
    return [(draw(), draw()), *moves]


class _Probed(NamedTuple):
    """Measurements at one pair of points."""

    value: Array
    slopes: tuple[Array, ...]
    """Gradient of the energy in each block."""
    moved: tuple[tuple[Array, Array], ...]
    """Values and gradients with each part of one block moved."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Probe:
    """A factor, the families of its blocks, and the parts of the blocks whose units interact in it."""

    factor: Factor
    scope: tuple[Family, ...]
    parts: Mapping[str, np.ndarray]

    def run(
        self,
        measure: Callable[..., _Probed],
        params: Params,
        here: _Point,
        there: _Point,
    ) -> _Probed:
        """Return measurements on the host; raise DeclarationError if the energy fails."""
        try:
            return jax.device_get(measure(params, here, there))
        except DeclarationError:
            raise
        except Exception as error:
            shapes = {b: t.shape for b, t in zip(self.factor.blocks, here, strict=True)}
            raise DeclarationError(
                f"{self.factor!r}: energy failed for params of shape "
                f"{jax.tree.map(np.shape, params)} and statistics of shape {shapes}: "
                f"{error} (jax compiles it: write it in jax.numpy)"
            ) from error

    @full_precision
    def measure(
        self, params: Params, here: Sequence[Array], there: Sequence[Array]
    ) -> _Probed:
        """Return the energy at a point, its gradients, and both with each part of one block moved."""
        factor = self.factor
        scope = self.scope
        value = factor.evaluate(params, *here, families=scope)
        is_number = isinstance(value, jax.Array | np.ndarray | np.number | float | int)
        if not is_number or jnp.shape(value) != ():
            raise checks.error(
                f"{factor!r}: value of energy", "a scalar", value, DeclarationError
            )
        moved = []
        for i, block in enumerate(factor.blocks):

            def energy_at(t, i=i):
                return factor.evaluate(
                    params, *here[:i], t, *here[i + 1 :], families=scope
                )

            colors = self.parts.get(block, _ONE_PART)

            def move(part, i=i, colors=colors):
                return jnp.where(colors == part, there[i], here[i])

            def along(part, f=energy_at, move=move):
                return jax.value_and_grad(f)(move(part))

            moved.append(jax.lax.map(along, jnp.arange(colors.max() + 1)))
        slopes = jax.grad(lambda t: factor.evaluate(params, *t, families=scope))(
            tuple(here)
        )
        return _Probed(jnp.asarray(value), slopes, tuple(moved))

    def check(
        self, probed: _Probed, here: _Point, there: _Point, tolerance: np.ndarray
    ) -> None:
        """Refuse an energy that is not affine between two points."""
        for i, (block, family) in enumerate(
            zip(self.factor.blocks, self.scope, strict=True)
        ):
            colors = self.parts.get(block, _ONE_PART)
            if not _is_affine(probed, i, colors, there[i] - here[i], tolerance):
                pairs = (
                    "beyond its lateral pairs, "
                    if block in self.parts
                    else "with one another, "
                )
                raise NotMultiAffineError(
                    f"{self.factor!r}: energy must be affine in the statistics of each "
                    f"unit of block {block!r} ({family!r}) given all other units. If "
                    f"its units interact {pairs}declare all such pairs with "
                    "lateral=... or Pairwise, or split the block. Otherwise write "
                    "comparisons, jnp.where and activations as products: x**2 of 0 and "
                    "1 is x, a == b is a*b + (1-a)*(1-b); x**2 of reals is a statistic "
                    "of Gaussian(..., variance='learned')."
                )


def _parts(split: Split) -> np.ndarray:
    """Return the part of each unit, broadcastable to statistics."""
    return split.colors.reshape(
        split.family.shape + (1,) * len(split.family.stat_shape)
    )


# On the host: compiling these dozen sums takes longer than the energy.
def _is_affine(
    probed: _Probed, i: int, colors: np.ndarray, step: np.ndarray, tolerance: np.ndarray
) -> bool:
    """Return True if no part's gradient changes as it moves, and the energy follows the gradient."""
    value = probed.value
    slope = probed.slopes[i]
    with np.errstate(all="ignore"):  # nan is not affine
        size = (abs(slope) * abs(step)).sum() + abs(value)
        for part, (value_there, slope_there) in enumerate(
            zip(*probed.moved[i], strict=True)
        ):
            inside = colors == part
            change = np.where(inside, slope_there - slope, 0)
            jump = value_there - value - (slope * np.where(inside, step, 0)).sum()
            scale = abs(slope).max() + abs(slope_there).max()
            total = size + abs(value_there)
            if not (
                abs(change).max() <= tolerance * scale
                and abs(jump) <= tolerance * total
            ):
                return False
    return True


def is_polynomial(jaxpr: Any, variables: list[bool]) -> bool:
    """Return True if all results are polynomials in the inputs that ``variables`` marks.

    A polynomial that is affine between random points is affine everywhere. Comparisons
    and roots are not polynomials, and may be affine on a part of the states.
    """
    varying = {v for v, varies in zip(jaxpr.invars, variables, strict=True) if varies}
    for equation in jaxpr.eqns:
        inputs = [not hasattr(v, "val") and v in varying for v in equation.invars]
        if any(inputs):
            if not _keeps_polynomials(equation, inputs):
                return False
            varying.update(equation.outvars)
    return True


def _keeps_polynomials(equation: Any, inputs: list[bool]) -> bool:
    name = equation.primitive.name
    params = equation.params
    inner = params.get("call_jaxpr", params.get("jaxpr"))
    if inner is not None and name not in ("while", "cond"):
        inner = getattr(inner, "jaxpr", inner)
        if len(inner.invars) != len(inputs):
            return False
        return is_polynomial(inner, [True] * len(inputs) if name == "scan" else inputs)
    if name == "convert_element_type":
        return jnp.issubdtype(params["new_dtype"], jnp.inexact)
    if name == "integer_pow":
        return params["y"] >= 0
    fixed = _CONSTANT_OPERANDS.get(name)
    return name in _ARITHMETIC or (fixed is not None and not any(inputs[fixed]))


def far_statistics(family: Family) -> list[Array]:
    """Return statistics of states over the range of a family, of equal units and of two random halves."""
    states = family.states()
    generator = np.random.default_rng(0)
    if states is None:
        values = np.concatenate([np.arange(_COUNTS), _FAR, -_FAR])
    else:
        values = np.asarray(states)[
            np.linspace(0, len(states) - 1, min(len(states), _COUNTS)).astype(int)
        ]
    values = values[np.asarray(family.in_support(values.astype(float)))]
    equal = [np.full(family.shape, value) for value in values]
    moved = [
        np.where(generator.random(family.shape) < 0.5, x, equal[0])
        for x in equal[-2 * len(_FAR) :]
    ]
    return [family.statistics(jnp.asarray(x, family.dtype)) for x in equal + moved]


def random_statistics(families: Families, blocks: Iterable[str], rows: int) -> Eta:
    """Return statistics of ``rows`` states, the same in every call.

    Units of finitely many values take them with proportions that differ between rows,
    and are nearly all equal in every second row. Others are initial draws, ten times as
    large in every second row where they are unbounded.
    """
    generator = np.random.default_rng(0)
    scope = tuple((b, families[b]) for b in blocks)
    return _statistics_of(scope, {b: _numbers(f, rows, generator) for b, f in scope})


def _numbers(family: Family, rows: int, generator: np.random.Generator) -> np.ndarray:
    """Return numbers of values, or random words where there are infinitely many values."""
    states = family.states()
    if states is None:
        return generator.integers(
            0, 2**32, (rows, *family.shape, family.num_words), np.uint32
        )
    shares = generator.dirichlet(np.full(len(states), 0.5), rows)
    shares[::2] = (
        0.05 * shares[::2]
        + 0.95 * np.eye(len(states))[np.arange(0, rows, 2) // 2 % len(states)]
    )
    return np.stack(
        [generator.choice(len(states), family.shape, p=p) for p in shares]
    ).astype(np.int32)


@compiled(statics=1)
def _statistics_of(
    scope: tuple[tuple[str, Family], ...], numbers: dict[str, Array]
) -> Eta:
    statistics = {}
    for b, family in scope:
        states = family.states()
        x = family.initial(numbers[b]) if states is None else states[numbers[b]]
        if np.isinf(family.statistic_bounds).any():
            far = jnp.where(jnp.arange(len(x)) % 2, 10, 1).reshape(
                -1, *(1,) * (x.ndim - 1)
            )
            x = (x * far.astype(x.dtype)).astype(x.dtype)
        statistics[b] = family.statistics(x)
    return statistics
