# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""A block derived from a NumPyro model whose sweeps begin with a move of clusters of units.

Two values a and b are picked at random. Each unit at one of them may move to the other,
all others stay. Given these choices the log density is that of an Ising model with s_i
= 1 where a unit stays, and -1 where it moves. A function w of two units contributes the
coupling and the fields

.. math:: K = (w_{00} + w_{11} - w_{01} - w_{10}) / 4, \quad
    h_i = (w_{00} + w_{01} - w_{10} - w_{11}) / 4, \quad
    h_j = (w_{00} + w_{10} - w_{01} - w_{11}) / 4

with 0 for the present value and 1 for the other one. The algorithm of Swendsen and Wang
then joins a pair with K > 0 by a bond with probability 1 - exp(-2 K), and moves each
cluster of joined units with probability 1 / (1 + exp(2 sum h)). Fields, and pairs that
frustrate one another, are allowed. The move leaves the conditional of the units
invariant and is its own reversal, because the choices are the same from where it ends.

**References**

1. Swendsen, Wang (1987), *Nonuniversal critical dynamics in Monte Carlo simulations*.
2. Wolff (1989), *Collective Monte Carlo updating for spin systems*: the Ising model
   within another one.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import SiteArrays
from ebmpp.errors import ArgumentError, IntractableError
from ebmpp.graph.coloring import color_units
from ebmpp.graph.factors import pairwise
from ebmpp.moves.clusters import components
from ebmpp.ppl import ModelBlock
from ebmpp.traced.block import SiteValues
from ebmpp.traced.model import Inputs
from ebmpp.traced.sweep.posterior import ModelDensity

_CLUSTERS = 1 << 17  # folded into the keys


class ClusterBlock(ModelBlock):
    """A block of :meth:`ebmpp.GibbsBlock.from_model` whose sweeps begin with a cluster move.

    The move of Swendsen and Wang changes whole regions of discrete units that attract
    one another, which draws of single units hardly do above a critical strength. Units
    must interact in pairs.

    :param model: a NumPyro model, conditioned on the data.
    :param sites: names of its latent sites that the block draws.
    :param args: the model's arguments.
    :param kwargs: its keyword arguments.
    :param options: ``num_sweeps``, ``sequential``, ``tempering`` and ``joint`` (here
        "units" by default) of :meth:`ebmpp.GibbsBlock.from_model`.
    :raises IntractableError: where no units interact, or three or more in one term of
        the log density.

    **References**

    1. Swendsen, Wang (1987), *Nonuniversal critical dynamics in Monte Carlo
       simulations*.

    **Example**

    >>> import numpyro, numpyro.distributions as dist, ebmpp.contrib
    >>> def model():
    ...     z = numpyro.sample("z", dist.Bernoulli(0.5).expand([6]).to_event(1))
    ...     numpyro.factor("alike", 2.0 * (z[1:] == z[:-1]).sum())
    >>> ebmpp.contrib.ClusterBlock(model, ["z"]).layers["z"].tolist()
    [0, 1, 0, 1, 0, 1]
    """

    def __init__(
        self,
        model: Callable[..., Any],
        sites: Sequence[str],
        args: tuple = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        options.setdefault("joint", "units")
        super().__init__(model, sites, args, kwargs, **options)
        first = 0 if self.sweep.augmented is None else 1  # latents are drawn before
        self.sweep.parts.insert(first, ClusterMove(self.sweep.joint))

    def check_coupled(self, coupling: str | None) -> None:
        """Raise an ArgumentError: clusters of two chains are not coupled."""
        raise ArgumentError(
            f"CoupledComposite: clusters of {self!r} are not coupled. Use GibbsBlock.from_model"
        )


class _Reads(NamedTuple):
    """Elements of a term that read one unit, or a pair."""

    single: np.ndarray
    unit: np.ndarray
    double: np.ndarray
    edge: np.ndarray


class ClusterMove:
    """The cluster move of a block's discrete units.

    :param posterior: the log density.
    """

    def __init__(self, posterior: ModelDensity) -> None:
        self.posterior = posterior
        self.terms = posterior.terms(products=False)
        self.size = self.terms.sets.size
        edges = self.terms.edges
        most = self.terms.most_together
        if most != 2 or edges is None:
            raise IntractableError(
                f"ClusterBlock: units must interact in pairs, and a term of the log density "
                f"of sites {list(posterior.sites)} reads up to {most}. Use GibbsBlock.from_model"
            )
        self.edges = edges
        self.colors = color_units(self.size, edges)
        self.neighbours = pairwise.table(self.size, edges)
        self.reads = {slot: self._reads(slot) for slot in self.terms.live}
        self.num_values = posterior.num_values

    def _reads(self, slot: int) -> _Reads:
        element, unit = self.terms.elements(slot)
        counts = np.bincount(element, minlength=self.terms.live[slot].size)[element]
        alone = counts == 1
        together = counts == 2
        head, tail = np.sort(unit[together].reshape(-1, 2), axis=1).T
        codes = self.edges[:, 0] * self.size + self.edges[:, 1]
        edge = np.searchsorted(codes, head * self.size + tail)
        return _Reads(element[alone], unit[alone], element[together][::2], edge)

    def move(
        self,
        inputs: Inputs,
        keys: Array,
        beta: Any = None,
        backward: bool = False,
    ) -> tuple[SiteValues, Array]:
        """Move the clusters; see :meth:`~ebmpp.traced.sweep.sweep.BlockSweep.__call__`."""
        del backward
        sites = {name: inputs[0][name] for name in self.posterior.sites}
        slots = self.posterior.inputs(inputs)
        keys = random.fold_in(keys, 0, _CLUSTERS)
        beta = 1.0 if beta is None else beta
        uniforms = random.uniform(random.words(keys, 2 + self.size + len(self.edges)))
        bond = uniforms[2 + self.size :]
        coin = uniforms[2 : 2 + self.size]
        a = jnp.floor(uniforms[0] * self.num_values).astype(jnp.int32)
        b = jnp.floor(uniforms[1] * (self.num_values - 1)).astype(jnp.int32)
        other, may_move = self._others(sites, a, b + (b >= a))
        coupling, field, may_move = self._ising(sites, other, slots, may_move)
        head, tail = self.edges.T
        is_bond = bond < -jnp.expm1(-2 * beta * coupling)
        is_bond = is_bond & may_move[head] & may_move[tail]
        label = components(self.neighbours, is_bond[:, None])[:, 0]
        total = jnp.zeros(self.size).at[label].add(field)
        flips = coin < jax.nn.sigmoid(-2 * beta * total)
        moves = flips[label] & may_move
        return self._mixed(sites, other, moves), jnp.zeros((), jnp.int32)

    def _others(
        self, sites: SiteValues, a: Array, b: Array
    ) -> tuple[SiteArrays, Array]:
        """Return the value, a or b, that each unit may move to; and which units may move."""
        other = {}
        may_move = []
        for name in sorted(sites):
            value = sites[name]
            table, valid = map(jnp.asarray, self.posterior.values[name])
            last = len(table) - 1
            index_a = jnp.minimum(a, last)
            index_b = jnp.minimum(b, last)
            both = valid[index_a] & valid[index_b] & (jnp.maximum(a, b) <= last)
            value_a = jnp.broadcast_to(table[index_a].astype(value.dtype), value.shape)
            value_b = jnp.broadcast_to(table[index_b].astype(value.dtype), value.shape)
            is_a = (value == value_a) & both
            is_b = (value == value_b) & both
            other[name] = jnp.where(is_a, value_b, jnp.where(is_b, value_a, value))
            may_move.append((is_a ^ is_b).ravel())
        return other, jnp.concatenate(may_move)

    def _mixed(self, sites: SiteValues, other: SiteValues, mask: Array) -> SiteArrays:
        """Return ``other`` at the units of a mask."""
        result = {}
        start = 0
        for name in sorted(sites):
            stop = start + sites[name].size
            here = jnp.reshape(mask[start:stop], sites[name].shape)
            result[name] = jnp.where(here, other[name], sites[name])
            start = stop
        return result

    def _ising(
        self,
        sites: SiteValues,
        other: SiteValues,
        inputs: Mapping[int, Any],
        may_move: Array,
    ) -> tuple[Array, Array, Array]:
        """Return the positive couplings of pairs, the fields of units, and which units may move."""
        values = self.posterior.inputs_at(sites, inputs)
        coefficients = self.terms.coefficients(values)

        def sums(sites):
            return self._sums(sites, inputs, coefficients)

        single_stay, stay = sums(sites)
        single_move, move = sums(other)
        head, tail = self.edges.T
        colors = jnp.asarray(self.colors)
        moved = []
        for color in range(int(self.colors.max()) + 1):
            _, double = sums(self._mixed(sites, other, colors == color))
            moved.append(double)
        by_color = jnp.stack(moved)
        pairs = jnp.arange(len(self.edges))
        # only the first unit moves, and only the second
        first = by_color[colors[head], pairs]
        second = by_color[colors[tail], pairs]
        finite = jnp.isfinite(jnp.stack([stay, move, first, second])).all(0)
        # the four are the same wherever the move ends, and so are the units that are
        # fixed because of them
        is_infinite = jnp.zeros(self.size, bool).at[head].max(~finite)
        fixed = is_infinite.at[tail].max(~finite) | ~may_move
        both = ~fixed[head] & ~fixed[tail]
        stay = jnp.where(finite, stay, 0.0)
        move = jnp.where(finite, move, 0.0)
        first = jnp.where(finite, first, 0.0)
        second = jnp.where(finite, second, 0.0)
        coupling = jnp.where(both, (stay + move - first - second) / 4, 0.0)
        alone = jnp.where(fixed[tail], (stay - first) / 2, 0.0)
        field_head = jnp.where(both, (stay + second - first - move) / 4, alone)
        alone = jnp.where(fixed[head], (stay - second) / 2, 0.0)
        field_tail = jnp.where(both, (stay + first - second - move) / 4, alone)
        field = (single_stay - single_move) / 2
        field = field.at[head].add(field_head).at[tail].add(field_tail)
        fixed = fixed | jnp.isnan(field)
        return jnp.maximum(coupling, 0), jnp.where(fixed, 0.0, field), ~fixed

    def _sums(
        self,
        sites: SiteValues,
        inputs: Mapping[int, Any],
        coefficients: Mapping[int, Array],
    ) -> tuple[Array, Array]:
        """Return the sums of the elements that read each unit alone, and each pair."""
        values = self.posterior.inputs_at(sites, inputs)
        evaluated = self.terms.evaluate(values, self.terms.live)
        terms = self.terms.multiply(coefficients, evaluated)
        single = jnp.zeros(self.size)
        double = jnp.zeros(len(self.edges))
        for slot, reads in self.reads.items():
            term = terms[slot].ravel()
            single = single.at[reads.unit].add(term[reads.single])
            double = double.at[reads.edge].add(term[reads.double])
        return single, double
