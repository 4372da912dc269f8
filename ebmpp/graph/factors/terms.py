# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Natural parameters of a part from the terms that the energy of a factor is a sum of.

Units of a part share no term. Therefore one evaluation with each of them at another
value shows how the energy changes for each unit: by the terms that read it. The terms
at the current state pass from part to part, so that a part of units of K values takes
K - 1 evaluations. Where no term reads more than two units, a few evaluations per visit
of a block give a weight for each pair of units, as of a :class:`~ebmpp.Pairwise`
factor.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Statistics, expand, full_precision
from ebmpp.core.backend import materialize
from ebmpp.core.groups import UNROLLED
from ebmpp.dependence.rules import is_finite, is_polynomial, linear_sums
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.families import Bernoulli
from ebmpp.families.family import Families
from ebmpp.graph.factors.evaluation import natural_of_energies, values_of
from ebmpp.graph.factors.factor import Factor, FactorParams
from ebmpp.graph.factors.interactions import terms_of
from ebmpp.graph.factors.lateral import Field, Split, StatisticsAt
from ebmpp.graph.factors.pairwise import Neighbours
from ebmpp.graph.factors.zeros import BARRIER


class Prepared(NamedTuple):
    """Values that all parts of a visit share."""

    params: FactorParams
    arrays: Mapping[int, Array]
    """By slot: coefficients of the terms, or changes of the sums by each statistic."""
    others: Statistics
    """Statistics of the other blocks, with the rows first."""


class Carried(NamedTuple):
    """Values at the current state, which pass from part to part during a visit."""

    elements: Array
    """Terms times their coefficients, or the energy alone, ``(elements, rows)``."""
    sums: dict[int, Array]
    """Linear sums of statistics by slot, ``(rows, ...)``, from which the energy follows."""


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
    """Terms of a factor, none of which reads two units of a part of a block."""

    factor: Factor
    split: Split
    traced: SumOfTerms

    @classmethod
    def find(
        cls, factor: Factor, families: Families, split: Split
    ) -> "Terms | PairTerms | None":
        """Return the terms of a factor; None where they do not help."""
        if not factor.affine and values_of(split.family) is None:
            return None
        traced = terms_of(factor, families)
        width = math.prod(split.family.stat_shape)
        are_pairs = len(factor.blocks) == 1 and traced.most_together <= 2 * width
        # affine energies are evaluated where units need not have states
        is_exact = is_polynomial if factor.affine else is_finite
        has_weights = is_exact(traced.program) and not factor.has_zeros
        if not traced.live:
            return None
        terms = cls(factor, split, traced)
        are_pairs = are_pairs and has_weights and terms.are_separate
        if are_pairs and np.bincount(terms.reads[1]).max(initial=0) <= 2:
            return PairTerms(terms)
        if factor.affine:
            return None
        if split.num_parts == split.family.size:
            return Whole(factor, split, traced)
        return terms if terms.are_separate else None

    @property
    def values(self) -> np.ndarray:
        """Statistics at which units are evaluated: of all values, or 0 and the unit vectors."""
        values = values_of(self.split.family)
        if values is not None and not self.factor.affine:
            return values.statistics
        width = math.prod(self.split.family.stat_shape)
        return np.eye(width + 1, width, -1)

    @property
    def carries(self) -> bool:
        """True if values pass from part to part; more than a few candidates would fill memory."""
        return len(self.values) <= UNROLLED

    @property
    def num_evaluations(self) -> int:
        """Number of evaluations of the energy per visit of the block."""
        return self.split.num_parts * (len(self.values) - self.carries) + self.carries

    def prepare(self, params: FactorParams, others: Statistics) -> Prepared:
        """Return what all parts of a visit share."""
        program = self.traced.program
        zero = {name: jnp.zeros(program.shapes[s]) for name, s in program.sites.items()}
        return Prepared(params, self._arrays(self._inputs(params, zero)), others)

    def _arrays(self, inputs: dict) -> dict[int, Array]:
        return self.traced.coefficients(inputs)

    @full_precision
    def evaluate(
        self, prepared: Prepared, t: Array, sums: dict[int, Array] | None
    ) -> Carried:
        """Return the values at a state.

        :param t: statistics of the block, ``(size, rows, *stat_shape)``.
        :param sums: None to compute them.
        """
        return Carried(self.elements(prepared, t), {})

    @full_precision
    def field(
        self, prepared: Prepared, carried: Carried | None, t: Array, part: Any
    ) -> tuple[Field, Callable[[Array], Carried] | None]:
        """Return natural parameters of the units of ``part``, and what it hands on.

        :return: the latter as a function of the units of the block after the draw.
        """
        split = self.split
        table = jnp.asarray(self.values, t.dtype)
        count = len(table)

        def read(t):
            """Return the statistics of the units, and the numbers of their values."""
            units = split.take(t, part).reshape(-1, t.shape[1], table.shape[1])
            distances = ((units[:, :, None] - table[None, None]) ** 2).sum(-1)
            return units, distances.argmin(-1).astype(jnp.int32)

        old, number = read(t)
        current = carried or self.evaluate(prepared, t, None)
        owner = jnp.asarray(self._owners)[part]

        def look(further):
            value = table[(number + further) % count]
            at = split.put(t, part, value.reshape(-1, *t.shape[1:]))
            # There are sums where a part is one unit. Its increments add up during a
            # visit, and the next visit starts from new sums.
            change = (value - old)[0]
            unit = split.at(part)[0]
            sums = {
                slot: v + jnp.tensordot(change, prepared.arrays[slot][unit], 1)
                for slot, v in current.sums.items()
            }
            new = self.evaluate(prepared, at, sums)
            changes = new.elements - current.elements
            return jax.ops.segment_sum(changes, owner, len(old)), new

        def advance(units):
            _, drawn = read(split.family.statistics(units))
            further = (drawn - number) % count
            of_element = jnp.take(further, owner, 0, mode="fill", fill_value=0)
            elements, sums = zip(current, *values)

            def select(*values):
                which = expand(further[0], target=values[0])
                return lax.select_n(jnp.broadcast_to(which, values[0].shape), *values)

            return Carried(
                lax.select_n(of_element, *elements), jax.tree.map(select, *sums)
            )

        if carried:
            changes, values = zip(*map(look, range(1, count)))
            changes = jnp.stack(changes)
        else:
            changes = lax.map(lambda further: look(further)[0], jnp.arange(1, count))
        changes = jnp.concatenate([jnp.zeros_like(changes[:1]), changes])
        further = (np.arange(count)[:, None, None] - number[None]) % count
        energies = jnp.take_along_axis(changes, further, 0)
        eta = natural_of_energies(split.family, energies)
        eta = jnp.moveaxis(eta, 0, -1).reshape(-1, *t.shape[1:])
        return eta, advance if carried else None

    def _inputs(self, params: FactorParams, sites: Mapping[str, Array]) -> dict:
        leaves = dict(enumerate(jax.tree.leaves(params)))
        return self.traced.program.inputs({**sites, **leaves}, [])

    def elements(self, prepared: Prepared, t: Array) -> Array:
        """Return all terms times their coefficients, ``(elements, rows)``."""
        values = self.run(prepared, t, {}, self.traced.live)
        by_row = {slot: c[None] for slot, c in prepared.arrays.items()}
        terms = self.traced.multiply(by_row, values)
        terms = [jnp.minimum(v, BARRIER) for v in terms.values()]

        def rows_last(terms):
            moved = [jnp.moveaxis(v, 0, -1) for v in terms]
            return jnp.concatenate([v.reshape(-1, t.shape[1]) for v in moved])

        return materialize(rows_last, terms)

    def run(
        self,
        prepared: Prepared,
        t: Array,
        known: Mapping[int, Array],
        slots: Iterable[int],
    ) -> dict[int, Array]:
        """Return the values of slots of the program at each row, given the ``known`` ones."""
        split = self.split

        def at_row(t, others, known):
            here = t.reshape(split.family.statistic_shape)
            sites = {**others, split.block: here}
            inputs = self._inputs(prepared.params, sites)
            return self.traced.evaluate(inputs | known, slots)

        return jax.vmap(at_row, (1, 0, 0))(t, prepared.others, known)

    @functools.cached_property
    def reads(self) -> tuple[np.ndarray, np.ndarray]:
        """Units, and elements of the terms that read them, sorted."""
        element, number = self.traced.reads_of(self.split.block)
        unit = number.astype(np.int64) // math.prod(self.split.family.stat_shape)
        count = element.max(initial=0) + 1
        return np.divmod(np.unique(unit * count + element), count)

    @property
    def are_separate(self) -> bool:
        """True if no element reads two units of a part."""
        unit, element = self.reads
        parts = element * self.split.num_parts + self.split.colors[unit]
        return len(np.unique(parts)) == len(parts)

    @functools.cached_property
    def _owners(self) -> np.ndarray:
        """By part and element, the place of the unit that it reads, or the size of the block."""
        unit, element = self.reads
        shape = (self.split.num_parts, element.max(initial=0) + 1)
        owners = np.full(shape, self.split.family.size)
        owners[self.split.colors[unit], element] = self.split.place[unit]
        return owners


@dataclasses.dataclass(frozen=True, eq=False)
class Whole(Terms):
    """The energy as its only term, where each unit is a part.

    It is evaluated from linear sums of the statistics, such as the product of the first
    layer of a network, which pass from part to part.
    """

    @full_precision
    def _arrays(self, inputs: dict) -> dict[int, Array]:
        block = self.traced.program.sites[self.split.block]

        def sums_at(t):
            changed = {**inputs, block: t.reshape(inputs[block].shape)}
            return self.traced.evaluate(changed, self._sums)

        units = inputs[block].reshape(self.split.family.size, -1)
        is_wide = units.size < sum(map(self.traced.program.size, self._sums))
        jacobian = jax.jacfwd if is_wide else jax.jacrev
        slopes = jacobian(sums_at)(units)
        return {s: jnp.moveaxis(v, (-2, -1), (0, 1)) for s, v in slopes.items()}

    @full_precision
    def evaluate(
        self, prepared: Prepared, t: Array, sums: dict[int, Array] | None
    ) -> Carried:
        if sums is None:
            sums = self.run(prepared, t, {}, self._sums)
        outputs = [self.traced.program.output]
        (energies,) = self.run(prepared, t, sums, outputs).values()
        return Carried(jnp.minimum(energies, BARRIER)[None], sums)

    @property
    def reads(self) -> tuple[np.ndarray, np.ndarray]:
        units = np.arange(self.split.family.size)
        return units, np.zeros_like(units)

    @functools.cached_property
    def _sums(self) -> list[int]:
        return linear_sums(self.traced.program)


@dataclasses.dataclass(frozen=True, eq=False)
class PairTerms:
    r"""Terms of one block, each of one or two units, as weights of pairs of statistics.

    With statistics t and t' of both units and :math:`t_0 = t'_0 = 1`, a term is
    :math:`\sum_{pq} C_{pq} t_p t'_q`, and :math:`C = P F P^T` follows from its values F
    at the pairs of values of both. For each binary digit of the numbers of the parts,
    units take one value where it is 0 and another where it is 1.
    """

    terms: Terms

    @property
    def num_evaluations(self) -> int:
        """Number of evaluations of the energy that :meth:`prepare` makes, for all rows at once."""
        return self._num_digits * len(self.terms.values) ** 2

    @property
    def _num_digits(self) -> int:
        return (self.terms.split.num_parts - 1).bit_length() or 1

    def prepare(self, params: FactorParams) -> tuple[Array, Array]:
        """Return the constant part of the natural parameters and the weights of the pairs."""
        size = self.terms.split.family.size
        _, first, second = self._ends
        c = -self._coefficients(params)
        constant = jax.ops.segment_sum(c[:, 1:, 0], first, size)
        constant += jax.ops.segment_sum(c[:, 0, 1:], second, size)
        pairs, number = self._pairs
        is_pair = second < size
        weights = jax.ops.segment_sum(c[is_pair, 1:, 1:], number, len(pairs))
        return constant.ravel(), self._neighbours.arrange(weights.ravel())

    @full_precision
    def _coefficients(self, params: FactorParams) -> Array:
        """Return C of each element."""
        terms = self.terms
        elements, first, second = self._ends
        table = terms.values
        count = len(table)
        digits = np.arange(self._num_digits)[::-1]
        sides = np.append(terms.split.colors, 0)[:, None] >> digits & 1
        pairs = np.indices((count, count)).reshape(2, -1)
        states = table[pairs[sides[:-1]]]  # (size, digits, pairs of values, statistics)
        shape = (len(states), -1, *terms.split.family.stat_shape)
        t = jnp.asarray(states.reshape(shape))
        values = terms.elements(terms.prepare(params, {}), t)[elements]
        # the highest digit in which both units differ
        digit = (sides[first] != sides[second]).argmax(1)
        values = values.reshape(-1, len(digits), count, count)
        values = values[np.arange(len(digit)), digit]
        is_second = expand(sides[first, digit] == 1, target=values)
        values = jnp.where(is_second, values.swapaxes(1, 2), values)
        basis = np.linalg.pinv(np.c_[np.ones(count), table])
        return jnp.einsum("pk,ekl,ql->epq", basis, values, basis)

    @full_precision
    def field(
        self, prepared: tuple[Array, Array], statistics_at: StatisticsAt, part: Any
    ) -> Field:
        """Return natural parameters of the units of ``part``."""
        constant, weights = prepared
        family = self.terms.split.family
        t = statistics_at(np.arange(family.size))
        nodes = jnp.moveaxis(t, 1, -1).reshape(-1, t.shape[1])
        eta = self._neighbours.split.take(constant, part)[:, None]
        if len(self._pairs[0]):
            eta = eta + self._neighbours.field(weights, nodes.__getitem__, part)
        units = eta.reshape(-1, *family.stat_shape, eta.shape[1])
        return jnp.moveaxis(units, -1, 1)

    @functools.cached_property
    def _ends(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Elements that read a unit, its number, and that of the second, or the block's size."""
        unit, element = self.terms.reads
        elements, start = np.unique(element, return_index=True)
        _, end = np.unique(element[::-1], return_index=True)
        first = unit[start]
        last = unit[::-1][end]
        none = self.terms.split.family.size
        return elements, first, np.where(first == last, none, last)

    @functools.cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Distinct pairs of units, and the number of the pair of each element that reads two."""
        ends = np.stack(self._ends[1:], 1)
        inside = ends[ends[:, 1] < self.terms.split.family.size]
        pairs, number = np.unique(inside, axis=0, return_inverse=True)
        return pairs, number.ravel()

    @functools.cached_property
    def _neighbours(self) -> Neighbours:
        """Pairs of statistics as units with a scalar each."""
        split = self.terms.split
        width = math.prod(split.family.stat_shape)
        colors = np.repeat(split.colors, width)
        nodes = Split(split.block, Bernoulli(len(colors)), colors)
        statistic = np.indices((width, width)).reshape(2, -1).T
        edges = self._pairs[0][:, None] * width + statistic
        return Neighbours(self.terms.factor, nodes, edges.reshape(-1, 2))
