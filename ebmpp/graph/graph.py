# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The declaration: a factor graph of visible and latent blocks, and what follows from it."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
import networkx as nx
import numpyro.distributions as dist

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import checks, sharding
from ebmpp.core.compile import compiled
from ebmpp.core.display import Card, Shown
from ebmpp.core.types import Draws, Natural, Params, PerRow, Rows, StateLike
from ebmpp.errors import DeclarationError, IntractableError, clash
from ebmpp.families import Family
from ebmpp.graph import display, energy, initialization, networks, normalization, states, tables
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Bias, Bilinear, lateral

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class FactorGraph(Declaration, Shown):
    """An energy-based model: ``log p(x) = -E(t(x)) + sum_b log r_b(x_b) - log Z``.

    Immutable, hashable and compared by value, so it can be a static argument of ``jax.jit``. All
    methods take leading batch axes and work under ``jit``, ``vmap`` and ``grad``.

    :param visible: blocks that data are given for, a dict of families.
    :param latent: the other blocks.
    :param factors: the terms of the energy.
    :param labels: names of the units of some blocks, in their order: hashable, and each once.
    :raises DeclarationError: unknown block, two factors of one name, a block no factor mentions, or
        an energy that fails.
    :raises NotMultiAffineError: a factor that is not affine in each unit's statistics.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.FactorGraph(visible={"v": ebmpp.Bernoulli(4)}, latent={"h": ebmpp.Bernoulli(3)},
    ...                         factors=[ebmpp.Bias("v"), ebmpp.Bias("h"), ebmpp.Bilinear("v", "h")])
    >>> rbm.layers
    (('v',), ('h',))
    >>> params = rbm.init(jax.random.key(0))
    >>> rbm.free_energy(params, {"v": jax.numpy.zeros((10, 4))}).shape
    (10,)
    """

    @classmethod
    def from_networkx(
        cls,
        graph: nx.Graph,
        family: Callable[[int], Family] | Family,
        *,
        block: str = "x",
        shared: bool = False,
        bias: bool = True,
    ) -> "FactorGraph":
        """One visible block of a unit a node, in the nodes' order, whose units interact along the edges.

        The nodes are the units' ``labels``.

        :param graph: undirected. Where its edges have a ``weight`` and its nodes a ``bias``, that is where
            these params start.
        :param family: a class such as ``Spin``, called with the number of nodes; or a family of as
            many units.
        :param block: the block's name.
        :param shared: one weight for all edges.
        :param bias: whether units have biases.
        :raises DeclarationError: for a directed graph, parallel edges, loops or a wrong number of units.

        **Example**

        >>> import networkx as nx, ebmpp
        >>> torus = nx.grid_2d_graph(64, 64, periodic=True)
        >>> ising = ebmpp.FactorGraph.from_networkx(torus, family=ebmpp.Spin, shared=True)
        >>> ising.layers
        (('x[0]',), ('x[1]',))
        """
        made, factors = networks.declare(graph, family, block, shared, bias)
        return cls({block: made}, factors=factors, labels={block: graph.nodes})

    def to_networkx(self, params: Params | None = None) -> nx.Graph:
        """The graph of the blocks; or, given params, of the units with their biases and weights.

        Blocks have ``family``, ``visible``, ``layer`` and ``parts``, and edges between them ``factors``.
        Units are named as in ``labels``, or by number or index; with their block, ``("v", 3)``, where there
        are several. They have ``block`` and ``bias``, and edges ``weight``: ``from_networkx`` takes that back
        for one block. Two blocks' units of weight 0 have no edge.

        :raises ArgumentError: given params, for units of several statistics each.
        :raises IntractableError: given params, for an energy in which three units interact.

        **Example**

        >>> import networkx as nx, ebmpp
        >>> ising = ebmpp.FactorGraph.from_networkx(nx.path_graph(["a", "b", "c"]), family=ebmpp.Spin)
        >>> params = {"x": jax.numpy.array([0.5, 0.0, 0.0]), "x:x": jax.numpy.array([1.0, -2.0])}
        >>> units = ising.to_networkx(params)
        >>> units.nodes["a"]["bias"], units.edges["b", "c"]["weight"]
        (0.5, -2.0)
        """
        if params is None:
            return super().to_networkx()
        self.check(params)
        return networks.unit_network(self, params)

    @classmethod
    def from_bqm(cls, bqm: Any, *, block: str = "x") -> "FactorGraph":
        """One visible block of a unit a variable of a binary quadratic model: spins, or Bernoulli units.

        ``init`` gives its biases and weights, with the opposite signs: p(x) is proportional to
        exp(-bqm.energy(x)). The variables are the units' ``labels``. The offset, a constant, is left out.

        :param bqm: a ``dimod.BinaryQuadraticModel``, or the two dicts ``(h, J)`` of an Ising model.
        :param block: the block's name.
        :raises ArgumentError: for anything else, or a model without variables.

        **Example**

        >>> import jax, ebmpp
        >>> graph = ebmpp.FactorGraph.from_bqm(({"a": 0.5, "b": 0.0}, {("a", "b"): -1.0}))
        >>> graph.labels["x"], graph.init(jax.random.key(0))["x:x"].tolist()
        (('a', 'b'), [1.0])
        """
        made, factors, variables = networks.of_bqm(bqm, block)
        return cls({block: made}, factors=factors, labels={block: variables})

    def to_bqm(self, params: Params) -> Any:
        """The energy as a ``dimod.BinaryQuadraticModel``, of the variables of :meth:`to_networkx`.

        Needs dimod, an extra: ``pip install ebmpp[dimod]``.

        :raises ArgumentError: unless all units are Spin, or all are Bernoulli.
        :raises IntractableError: for an energy in which three units interact.
        :raises ImportError: without dimod.
        """
        self.check(params)
        return networks.to_bqm(self, params)

    def _card(self) -> Card:
        return display.card(self)

    def draw(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the block graph: a column a layer, visible blocks shaded, factors' names on the edges.

        A factor over one block is listed under that block's family; one over three blocks or more has its
        name on each edge it makes. Needs matplotlib.

        :param ax: where to; a new figure if None.

        **Example**

        >>> import ebmpp
        >>> axes = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3)).draw()
        >>> [text.get_text() for text in axes.texts if "layer" in text.get_text()]
        ['layer 0', 'layer 1']
        """
        return display.draw_graph(self, ax)

    # -- params ----------------------------------------------------------------------------------

    def init(
        self,
        rng_key: Array,
        data: StateLike | None = None,
        scheme: str | Mapping[str, str] = "gaussian",
        weights: ArrayLike | None = None,
    ) -> Params:
        """Initial params, a dict keyed by factor name.

        :param rng_key: a jax key.
        :param data: rows of the visible blocks; their base rates become the visible biases, those of known
            entries alone where a block is an :class:`~ebmpp.Observed`.
        :param scheme: "gaussian" (weights of standard deviation 0.01, base-rate biases), "orthogonal"
            (semi-orthogonal weights, Logistic(0, 0.5) biases: Taniguchi et al. 2023), or a dict with
            "weight" ("gaussian", "orthogonal", "zero") and "bias" ("base_rate", "logistic", "zero").
        :param weights: of the rows in the base rates, not all 0; equal ones by default.
        :raises ParameterError: for an unknown scheme.
        :raises StateError: for data of a wrong name, shape or value.
        """
        initialization.resolve(scheme)  # refused before the data are looked at
        means = {} if data is None else tables.mean_statistics(self, data, weights)
        rng_key = checks.key("init: rng_key", rng_key)
        return initialization.init_params(self.factors, self.families, rng_key, scheme, means)

    def check(self, params: Params, values: bool = True) -> None:
        """Check params: names, shapes, finite values, and that the model normalises.

        :param values: False for names and shapes alone.
        :raises ParameterError: naming the factor.
        :raises DomainError: with an account of what does not normalise.
        """
        states.check_params(self.param_shapes, params)
        if not values:
            return
        states.check_finite(params)
        if all(states.is_concrete(leaf) for leaf in jax.tree.leaves(params)):
            with sharding.at_once():  # under jit, known params would be staged
                normalization.check(self, params)

    def as_visible(self, data: StateLike) -> dict[str, Any]:
        """Data as a dict of visible blocks; a bare array (or the like) stands for the only one.

        :raises StateError: for a bare array when there are several visible blocks.
        """
        return states.as_visible(self, data)

    def _as_state(self, x: StateLike) -> dict[str, Any]:
        """A state as a dict of blocks; a bare array stands for the only visible one."""
        x = dict(x) if isinstance(x, Mapping) else states.as_visible(self, x)
        states.check_names(x, self.families)
        return x

    # -- what follows from the energy ------------------------------------------------------------

    def _rows(self, params: Params, x: StateLike, needed: Iterable[str]) -> tuple[dict, tuple[int, ...]]:
        states.check_params(self.param_shapes, params)
        return states.as_rows(self.families, self._as_state(x), tuple(needed))

    def energy(self, params: Params, x: StateLike) -> Float[Array, "*batch"]:
        """E(t(x)).

        :param x: every block, shapes ``(*batch, *shape)``; here and in what follows a bare array stands for
            the only visible block.
        :raises StateError: missing or unknown block, wrong shape, NaN, or outside the support.
        """
        rows, batch = self._rows(params, x, self.families)
        return _energies(self, params, rows).reshape(batch)

    def log_density(self, params: Params, x: StateLike) -> Float[Array, "*batch"]:
        """log p(x) + log Z: minus the energy, plus the base measures."""
        rows, batch = self._rows(params, x, self.families)
        return _log_densities(self, params, rows).reshape(batch)

    def _law(self, params: Params, x: StateLike, block: str) -> tuple[Natural, Family]:
        """Natural parameters of a block, or of a part of one such as "x[0]", and their family."""
        parts = {lateral.part_name(b, i): (b, i) for b, s in self.splits.items() for i in range(s.num_parts)}
        name, part = parts.get(block, (block, None))
        states.check_names([name], self.families)
        needed, x = self.neighbours([name]) + ((name,) if name in self.splits else ()), self._as_state(x)
        rows, batch = self._rows(params, {b: x[b] for b in x if b in self.splits or b != name}, needed)
        family = self.families[name]
        eta = _naturals(self, name, params, rows)
        eta = eta.reshape(batch + family.statistic_shape) if rows else eta
        if part is None:
            return eta, family
        units = self.splits[name].units[part]
        flat = eta.reshape(*batch, family.size, *family.stat_shape)
        return jnp.take(flat, units, axis=len(batch)), dataclasses.replace(family, shape=(len(units),))

    def natural_parameters(self, params: Params, x: StateLike, block: str) -> Natural:
        """eta of ``block`` given its neighbours in ``x``: shape ``(*batch, *shape, *stat_shape)``.

        :param block: a block, or a part such as "x[0]" of one whose units interact. Of such a whole
            block, the natural parameter of each unit given all the others.
        """
        return self._law(params, x, block)[0]

    def conditional(self, params: Params, x: StateLike, block: str) -> dist.Distribution:
        """The law of ``block`` given the rest: a NumPyro distribution over the whole block.

        :param block: a block, or a part such as "x[0]" of one whose units interact, whose units are those of
            ``splits["x"].units[0]``.
        :raises IntractableError: for a block whose units interact.
        """
        if block in self.splits:
            raise IntractableError(
                f"{clash(block, block)}, so given the rest it has no law of independent units; ask for one "
                f"of its parts, such as {lateral.part_name(block, 0)!r}, or draw the block with BlockedGibbs"
            )
        eta, family = self._law(params, x, block)
        return family.distribution(eta)

    def mean(self, params: Params, x: StateLike, block: str) -> Natural:
        """Mean statistics of ``block`` given the rest, dA/deta; of each unit, where the units interact."""
        eta, family = self._law(params, x, block)
        return family.mean(eta)

    def mode(self, params: Params, x: StateLike, block: str) -> Draws:
        """The most probable value of ``block`` given the rest; of each unit, where the units interact."""
        eta, family = self._law(params, x, block)
        return family.mode(eta)

    def marginal(self, params: Params, x: StateLike, blocks: Iterable[str] | str) -> Float[Array, "*batch"]:
        """log of the unnormalised density of the other blocks, ``blocks`` summed out exactly.

        :param x: the blocks that stay, shapes ``(*batch, *shape)``; values of ``blocks`` are ignored. Of an
            :class:`~ebmpp.Observed` one, the unknown units are summed out too.
        :param blocks: blocks that do not interact with one another, nor with one that lacks units.
        :raises IntractableError: when two of ``blocks``, or units of one, interact.
        """
        blocks = (blocks,) if isinstance(blocks, str) else tuple(blocks)
        states.check_names(blocks, self.families)
        states.check_params(self.param_shapes, params)
        kept = {b: v for b, v in self._as_state(x).items() if b not in blocks}
        needed = [b for b in self.families if b not in blocks]
        states.refuse_together(self, blocks)
        rows, known, batch = states.as_partial_rows(self.families, kept, needed)
        states.refuse_together(self, blocks, known)
        value = _log_marginals(self, blocks, params, rows, known)
        return value.reshape(batch) if rows else value

    def free_energy(self, params: Params, x: StateLike) -> Float[Array, "*batch"]:
        """F with p(x) proportional to exp(-F(x)): the blocks that ``x`` leaves out are summed out.

        :param x: usually the visible blocks, shapes ``(*batch, *shape)``, or :class:`~ebmpp.Observed` ones,
            whose unknown units are summed out too.
        :raises IntractableError: when two blocks left out, or units of one, interact.
        """
        x = self._as_state(x)
        return -self.marginal(params, x, [b for b in self.families if b not in x])


# -- programs of what is asked from the host: op by op each is a dozen or two, which compile one by one ----


@compiled(statics=1)
def _energies(graph: FactorGraph, params: Params, rows: Rows) -> PerRow:
    return jax.vmap(lambda t: energy.energy(graph, params, t))(graph.statistics(rows))


@compiled(statics=1)
def _log_densities(graph: FactorGraph, params: Params, rows: Rows) -> PerRow:
    return energy.log_density(graph, params, rows)


@compiled(statics=2)
def _naturals(graph: FactorGraph, block: str, params: Params, rows: Rows) -> Natural:
    """Of one block, ``(rows, ...)``; without a row where nothing is around it."""
    one = lambda t: energy.natural(graph, params, t, [block])[block]
    return jax.vmap(one)(graph.statistics(rows)) if rows else one({})


@compiled(statics=2)
def _log_marginals(
    graph: FactorGraph, blocks: tuple[str, ...], params: Params, rows: Rows, known: Rows
) -> Array:
    """Of each row; of no row where nothing is kept."""
    one = lambda row, known: energy.log_unnormalized(graph, params, row, blocks, known)
    return jax.vmap(one)(rows, known) if rows else one({}, {})


def layered(**blocks: Family) -> FactorGraph:
    """A chain of blocks, each with a bias and bilinear to the next; the first is visible.

    Two blocks make a (restricted) Boltzmann machine, more a deep one.

    :param blocks: families in order.
    :raises DeclarationError: without blocks.

    **Example**

    >>> from ebmpp import Bernoulli, layered
    >>> layered(v=Bernoulli(6), h1=Bernoulli(4), h2=Bernoulli(3)).layers
    (('v', 'h2'), ('h1',))
    """
    if not blocks:
        raise DeclarationError("layered needs at least one block, such as v=Bernoulli(784)")
    first, *rest = blocks
    factors = [*map(Bias, blocks), *(Bilinear(a, b) for a, b in itertools.pairwise(blocks))]
    return FactorGraph({first: blocks[first]}, {b: blocks[b] for b in rest}, factors)
