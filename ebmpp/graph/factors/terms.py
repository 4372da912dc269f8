# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Natural parameters of a part from the terms that the energy of a factor is a sum of.

Units of a part share no term. Therefore one evaluation with all of them at one value
shows the energy of each unit at that value: the sum of the terms that read it. Where no
term reads more than two units, a few evaluations per visit of a block give a weight for
each pair of units, as of a :class:`~ebmpp.Pairwise` factor.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import expand, full_precision
from ebmpp.core.groups import UNROLLED, positions_by_group
from ebmpp.dependence.rules import is_finite, is_polynomial
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.families import Bernoulli
from ebmpp.families.family import Families
from ebmpp.graph.factors.evaluation import natural_of_energies, values_of
from ebmpp.graph.factors.factor import Factor, FactorParams
from ebmpp.graph.factors.interactions import terms_of
from ebmpp.graph.factors.lateral import Field, Split, StatisticsAt
from ebmpp.graph.factors.pairwise import Neighbours
from ebmpp.graph.factors.zeros import BARRIER

#: Params, and the coefficients of the terms at these.
Prepared = tuple[FactorParams, Mapping[int, Array]]


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
        # parts of one unit share no evaluation
        is_shared = not factor.affine and split.num_parts < split.family.size
        if not traced.live or not (are_pairs or is_shared):
            return None
        terms = cls(factor, split, traced)
        unit, element = terms.reads
        parts = element * split.num_parts + split.colors[unit]
        if len(np.unique(parts)) < len(parts):
            return None
        # affine energies are evaluated where units need not have states
        is_exact = is_polynomial if factor.affine else is_finite
        has_weights = is_exact(traced.program) and not factor.has_zeros
        if are_pairs and has_weights and np.bincount(element).max(initial=0) <= 2:
            return PairTerms(terms)
        return None if factor.affine else terms

    @property
    def values(self) -> np.ndarray:
        """Statistics at which units are evaluated: of all values, or 0 and the unit vectors."""
        values = values_of(self.split.family)
        if values is not None and not self.factor.affine:
            return values.statistics
        width = math.prod(self.split.family.stat_shape)
        return np.eye(width + 1, width, -1)

    def prepare(self, params: FactorParams) -> Prepared:
        """Return the params and the coefficients of the terms."""
        program = self.traced.program
        zero = {name: jnp.zeros(program.shapes[s]) for name, s in program.sites.items()}
        return params, self.traced.coefficients(self._inputs(params, zero))

    @full_precision
    def field(
        self,
        prepared: Prepared,
        others: Mapping[str, Array],
        statistics_at: StatisticsAt,
        part: Any,
    ) -> Field:
        """Return natural parameters of the units of ``part``.

        :param others: statistics of the other blocks, with the rows first.
        """
        split = self.split
        family = split.family
        here = jnp.moveaxis(statistics_at(np.arange(family.size)), 1, -1)
        is_here = expand(split.colors == part, target=here)
        element, place = (jnp.asarray(table)[part] for table in self._tables)
        width = split.part_family(part).size

        def energies_of(value):
            value = value.reshape(*family.stat_shape, 1).astype(here.dtype)
            moved = jnp.where(is_here, value, here)
            moved = moved.reshape(*family.statistic_shape, -1)
            elements = self.elements(prepared, moved, others)
            # rows are contiguous, so this is faster than a gather of a table
            return jax.ops.segment_sum(
                elements[element], place, width, indices_are_sorted=True
            )

        table = jnp.asarray(self.values)
        if len(table) <= UNROLLED:
            energies = jnp.stack(list(map(energies_of, table)))
        else:
            energies = lax.map(energies_of, table)
        eta = natural_of_energies(family, energies)
        return jnp.moveaxis(eta, 0, -1).reshape(*eta.shape[1:], *family.stat_shape)

    def _inputs(self, params: FactorParams, sites: Mapping[str, Array]) -> dict:
        leaves = dict(enumerate(jax.tree.leaves(params)))
        return self.traced.program.inputs({**sites, **leaves}, [])

    def elements(
        self, prepared: Prepared, here: Array, others: Mapping[str, Array]
    ) -> Array:
        """Return all terms times their coefficients, ``(elements, rows)``.

        :param here: statistics of the block, with the rows last.
        """
        params, coefficients = prepared

        def at_row(here, others):
            sites = {**others, self.split.block: here}
            values = self.traced.evaluate(self._inputs(params, sites), self.traced.live)
            terms = self.traced.multiply(coefficients, values)
            elements = jnp.concatenate([v.ravel() for v in terms.values()])
            return jnp.minimum(elements, BARRIER)

        return jax.vmap(at_row, (-1, 0), -1)(here, others)

    @functools.cached_property
    def reads(self) -> tuple[np.ndarray, np.ndarray]:
        """Units, and elements of the terms that read them, sorted."""
        element, number = self.traced.reads_of(self.split.block)
        unit = number.astype(np.int64) // math.prod(self.split.family.stat_shape)
        count = element.max(initial=0) + 1
        return np.divmod(np.unique(unit * count + element), count)

    @functools.cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Elements that a part is in, and the places of their units in it; places are padded."""
        split = self.split
        unit, element = self.reads
        groups = positions_by_group(split.colors[unit], split.num_parts)
        places = [split.place[unit[group]] for group in groups]
        return (
            split.padded([element[group] for group in groups], 0),
            split.padded(places, split.family.size),
        )


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
        shape = (*terms.split.family.statistic_shape, -1)
        rows = jnp.asarray(np.moveaxis(states, -1, 1).reshape(shape))
        values = terms.elements(terms.prepare(params), rows, {})[elements]
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
