# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Clusters of units that move together, read off a model whose units interact in pairs.

Two values a and b are picked at random. Each unit at one of them may go to the other, all others stay. Given
what may be, the log density is that of an Ising model: s_i = 1 where a unit stays, -1 where it goes, and of
any function w of two units the coupling and the fields are

    K = (w00 + w11 - w01 - w10) / 4,   h_i = (w00 + w01 - w10 - w11) / 4,   h_j = (w00 + w10 - w01 - w11) / 4

with 0 for the present value and 1 for the other one. Of such a model the algorithm of Swendsen and Wang
draws: a bond joins a pair with K > 0 with probability 1 - exp(-2 K), and a cluster of units that bonds join
goes with probability 1 / (1 + exp(2 sum h)). Fields and pairs that frustrate one another are allowed for.
That leaves the law of the units as it is, and is its own reversal, because what may be is the same from where
it comes to.

**References**

1. Swendsen, Wang (1987), *Nonuniversal critical dynamics in Monte Carlo simulations*.
2. Wolff (1989), *Collective Monte Carlo updating for spin systems*: the Ising model within another one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.errors import IntractableError
from ebmpp.graph.factors import pairwise
from ebmpp.graph.factors.coloring import color_units
from ebmpp.moves.clusters import components
from ebmpp.traced.conditionals import Sites
from ebmpp.traced.dependence import Terms
from ebmpp.traced.posterior import Posterior


class _Reads(NamedTuple):
    """Elements of a term, and what they are a function of."""

    single: np.ndarray
    """Elements of one unit."""
    unit: np.ndarray
    double: np.ndarray
    """Elements of two units."""
    edge: np.ndarray
    """The number of the pair."""


class ModelClusters:
    """The cluster move of a model's discrete units.

    :param posterior: the model.
    :raises IntractableError: where no units interact, or three and more in one term.
    """

    def __init__(self, posterior: Posterior) -> None:
        tables = {site: v.table for site, v in posterior.values.items()}
        program = posterior.program
        self.posterior = posterior
        self.terms = Terms(program, posterior.arguments.arrays, tables, products=False)
        posterior.relied |= self.terms.relied
        self.size, edges = self.terms.sets.size, self.terms.edges
        most = self.terms.most_together
        if most != 2 or edges is None:
            told = "no two units interact" if most < 2 else f"a term of the log density reads {most} units"
            raise IntractableError(
                f"from_model: clusters=True is for units that interact in pairs, and of sites "
                f"{list(posterior.sites)} {told}; leave clusters away"
            )
        self.edges, self.colors = edges, color_units(self.size, edges)
        self.neighbours = pairwise.table(self.size, edges)
        self.reads = {slot: self._reads(slot) for slot in self.terms.live}
        self.count = max(len(v.table) for v in posterior.values.values())

    def _reads(self, slot: int) -> _Reads:
        element, unit = self.terms.elements(slot)
        many = np.bincount(element, minlength=self.terms.live[slot].size)[element]
        pairs, (first, second) = element[many == 2][::2], unit[many == 2].reshape(-1, 2).T
        codes = self.edges[:, 0] * self.size + self.edges[:, 1]
        edge = np.searchsorted(codes, np.minimum(first, second) * self.size + np.maximum(first, second))
        return _Reads(element[many == 1], unit[many == 1], pairs, edge)

    def __call__(
        self, sites: Sites, given: Mapping[int, Any], keys: Array, beta: Any = None
    ) -> dict[str, Array]:
        """New values of the discrete sites.

        :param sites: the block's discrete sites.
        :param given: values of the program's inputs.
        :param keys: words, ``(2,)``.
        :param beta: the power of the density that is drawn from; 1 unless given.
        """
        beta = 1.0 if beta is None else beta
        uniforms = random.uniform(random.words(keys, 2 + self.size + len(self.edges)))
        a = jnp.floor(uniforms[0] * self.count).astype(jnp.int32)
        b = jnp.floor(uniforms[1] * (self.count - 1)).astype(jnp.int32)
        other, moves = self._others(sites, a, b + (b >= a))
        coupling, field, moves = self._ising(sites, other, given, moves)
        one, two = self.edges.T
        bonds = (uniforms[2 + self.size :] < -jnp.expm1(-2 * beta * coupling)) & moves[one] & moves[two]
        label = components(self.neighbours, bonds[:, None])[:, 0]
        total = jnp.zeros(self.size).at[label].add(field)
        goes = (uniforms[2 : 2 + self.size] < jax.nn.sigmoid(-2 * beta * total))[label] & moves
        return self._mixed(sites, other, goes)

    def _others(self, sites: Sites, a: Array, b: Array) -> tuple[dict[str, Array], Array]:
        """Where units may go: the other one of two values; and which may."""
        made, moves = {}, []
        for name in sorted(sites):
            table, valid = (jnp.asarray(v) for v in self.posterior.values[name])
            at = lambda k, table=table, value=sites[name]: jnp.broadcast_to(
                table[jnp.minimum(k, len(table) - 1)].astype(value.dtype), value.shape
            )
            both = valid[jnp.minimum(a, len(valid) - 1)] & valid[jnp.minimum(b, len(valid) - 1)]
            both = both & (jnp.maximum(a, b) < len(valid))
            is_a, is_b = (sites[name] == at(a)) & both, (sites[name] == at(b)) & both
            made[name] = jnp.where(is_a, at(b), jnp.where(is_b, at(a), sites[name]))
            moves.append((is_a ^ is_b).ravel())
        return made, jnp.concatenate(moves)

    def _mixed(self, sites: Sites, other: Sites, chosen: Array) -> dict[str, Array]:
        """``other`` where units are chosen."""
        made, start = {}, 0
        for name in sorted(sites):
            stop = start + sites[name].size
            here = jnp.reshape(chosen[start:stop], sites[name].shape)
            made[name], start = jnp.where(here, other[name], sites[name]), stop
        return made

    def _ising(
        self, sites: Sites, other: Sites, given: Mapping[int, Any], moves: Array
    ) -> tuple[Array, Array, Array]:
        """Couplings of pairs that are more than 0, fields of units, and which units may move."""
        now = {**given, **self._put(sites)}
        slopes = self.terms.coefficients(now, self.terms.evaluate(now, self.terms.live))
        sums = lambda sites: self._sums(sites, given, slopes)
        single, (stay, go) = zip(sums(sites), sums(other), strict=True)
        one, two = self.edges.T
        colors, layers = jnp.asarray(self.colors), int(self.colors.max()) + 1
        each = jnp.stack([sums(self._mixed(sites, other, colors == c))[1] for c in range(layers)])
        pairs = jnp.arange(len(self.edges))
        # of which only the first unit goes, and only the second
        first, second = each[colors[one], pairs], each[colors[two], pairs]
        sound = jnp.isfinite(stay) & jnp.isfinite(go) & jnp.isfinite(first) & jnp.isfinite(second)
        # the four are the same from wherever the move may come to, and so is what is held for want of them
        held = jnp.zeros(self.size, bool).at[one].max(~sound).at[two].max(~sound) | ~moves
        both = ~held[one] & ~held[two]
        zero = lambda a: jnp.where(sound, a, 0.0)
        stay, go, first, second = map(zero, (stay, go, first, second))
        coupling = jnp.where(both, (stay + go - first - second) / 4, 0.0)
        alone = jnp.where(held[two], (stay - first) / 2, 0.0)
        of_first = jnp.where(both, (stay + second - first - go) / 4, alone)
        alone = jnp.where(held[one], (stay - second) / 2, 0.0)
        of_second = jnp.where(both, (stay + first - second - go) / 4, alone)
        field = (single[0] - single[1]) / 2
        field = field.at[one].add(of_first).at[two].add(of_second)
        held = held | jnp.isnan(field)
        return jnp.maximum(coupling, 0), jnp.where(held, 0.0, field), ~held

    def _put(self, sites: Sites) -> dict[int, Array]:
        program = self.posterior.program
        return {program.own[n]: v.astype(program.dtypes[program.own[n]]) for n, v in sites.items()}

    def _sums(
        self, sites: Sites, given: Mapping[int, Any], slopes: Mapping[int, Array]
    ) -> tuple[Array, Array]:
        """What elements of one unit add up to, unit by unit, and those of two, pair by pair."""
        terms = self.terms.evaluate({**given, **self._put(sites)}, self.terms.live)
        found = self.terms.weigh(slopes, terms)
        single, double = jnp.zeros(self.size), jnp.zeros(len(self.edges))
        for slot, reads in self.reads.items():
            weighed = found[slot].ravel()
            single = single.at[reads.unit].add(weighed[reads.single])
            double = double.at[reads.edge].add(weighed[reads.double])
        return single, double
