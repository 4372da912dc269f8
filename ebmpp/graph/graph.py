# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Factor graphs of visible and latent blocks."""

from collections.abc import Iterable, Mapping
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from jaxtyping import PyTree
import networkx as nx
import numpyro.distributions as dist

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import (
    Draws,
    Natural,
    Params,
    PerRow,
    PerState,
    Rows,
    StateLike,
    checks,
    compiled,
    omit,
    select,
    sharding,
)
from ebmpp.core.display import Card, Shown
from ebmpp.errors import IntractableError, clash
from ebmpp.families import Family
from ebmpp.graph import (
    display,
    energy,
    initialization,
    networks,
    normalization,
    states,
    tables,
)
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Bias, Bilinear, lateral
from ebmpp.graph.networks import FamilyLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class FactorGraph(Declaration, Shown):
    r"""An energy-based model of visible and latent blocks.

    .. math:: \log p(x) = -E(t(x)) + \sum_b \log r_b(x_b) - \log Z

    It is immutable, hashable and compared by value, so it can be a static argument of
    ``jax.jit``. All methods take leading batch axes and work under ``jit``, ``vmap``
    and ``grad``.

    :param visible: blocks with data, a dict of families.
    :param latent: the other blocks.
    :param factors: terms of the energy.
    :param labels: names of the units of some blocks, in their order: different and
        hashable.
    :raises DeclarationError: for an unknown block, two factors of one name, a block in
        no factor, or an energy that fails.
    :raises NotMultiAffineError: for a factor that is not affine in each unit's
        statistics.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.FactorGraph(visible={"v": ebmpp.Bernoulli(4)}, latent={"h": ebmpp.Bernoulli(3)},
    ...     factors=[ebmpp.Bias("v"), ebmpp.Bias("h"), ebmpp.Bilinear("v", "h")])
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
        family: FamilyLike,
        *,
        block: str = "x",
        shared: bool = False,
        bias: bool = True,
    ) -> "FactorGraph":
        """Declare one visible block with a unit per node, whose units interact along the edges.

        The nodes become the units' ``labels``. Params follow the order of
        ``graph.nodes`` and ``graph.edges``, which need **not** be that of the lists
        that the graph was made of. To give couplings by edge, call
        ``nx.set_edge_attributes(graph, {(a, b): 0.5, ...}, "weight")`` before: ``init``
        returns them, and ``to_networkx(params)`` shows them.

        :param graph: undirected. Edge attributes ``weight`` and node attributes
            ``bias`` give initial params; the weights of parallel edges add up.
        :param family: a family, or a class such as ``Spin`` that is called with the
            number of nodes.
        :param shared: use one weight for all edges; parallel edges count.
        :param bias: add a bias to each unit.
        :raises DeclarationError: for a directed graph, loops or a wrong number of
            units.

        **Example**

        >>> import networkx as nx, ebmpp
        >>> torus = nx.grid_2d_graph(64, 64, periodic=True)
        >>> ising = ebmpp.FactorGraph.from_networkx(torus, family=ebmpp.Spin, shared=True)
        >>> ising.layers
        (('x[0]',), ('x[1]',))
        """
        return networks.of_networkx(cls, graph, family, block, shared, bias)

    def to_networkx(self, params: Params | None = None) -> nx.Graph:
        """Return the graph of blocks or, with ``params``, of units with biases and weights.

        Blocks have the attributes ``family``, ``visible``, ``layer`` and ``parts``, and
        their edges ``factors``. Units have ``block`` and ``bias``, and edges
        ``weight``; ``from_networkx`` inverts this for one block. Units are named by
        label, number or index, with their block if there are several.

        :raises ArgumentError: with ``params``, for units of several statistics each.
        :raises IntractableError: with ``params``, for an energy in which three units
            interact.

        **Example**

        >>> import networkx as nx, ebmpp
        >>> path = nx.path_graph(["a", "b", "c"])
        >>> ising = ebmpp.FactorGraph.from_networkx(path, family=ebmpp.Spin)
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
    def from_bqm(cls, bqm: PyTree, *, block: str = "x") -> "FactorGraph":
        """Declare one visible block with a unit per variable of a binary quadratic model.

        ``init`` returns its biases and weights with opposite signs, so that p(x) is
        proportional to exp(-bqm.energy(x)). The variables become the units' ``labels``.
        The offset is dropped; terms (a, b) and (b, a) add up, and (a, a) is a constant
        for spins.

        :param bqm: a ``dimod.BinaryQuadraticModel``, or the two dicts ``(h, J)`` of an
            Ising model.
        :raises ArgumentError: for anything else, or a model without variables.

        **Example**

        >>> import jax, ebmpp
        >>> graph = ebmpp.FactorGraph.from_bqm(({"a": 0.5, "b": 0.0}, {("a", "b"): -1.0}))
        >>> graph.labels["x"], graph.init(jax.random.key(0))["x:x"].tolist()
        (('a', 'b'), [1.0])
        """
        return networks.of_bqm(cls, bqm, block)

    @classmethod
    def from_qubo(cls, q: Mapping | ArrayLike, *, block: str = "x") -> "FactorGraph":
        r"""Declare one visible block of Bernoulli units whose energy is :math:`x^T Q x`.

        ``init`` returns the params with which p(x) is proportional to
        :math:`\exp(-x^T Q x)`, so that the mode minimises a quadratic unconstrained
        binary optimisation problem. Terms (i, j) and (j, i) add up.

        :param q: a dict ``{(i, j): value}``, whose variables become the units'
            ``labels``, or a square matrix.
        :raises ArgumentError: for anything else, or a value that is not finite.

        **Example**

        >>> import jax, ebmpp
        >>> q = {("a", "a"): -1.0, ("a", "b"): 2.0, ("b", "b"): -1.5}
        >>> graph = ebmpp.FactorGraph.from_qubo(q)
        >>> params = graph.init(jax.random.key(0))
        >>> result = ebmpp.local_search(graph, params, rng_key=jax.random.key(1))
        >>> graph.labels["x"], result.state["x"].tolist()
        (('a', 'b'), [0.0, 1.0])
        """
        return networks.of_qubo(cls, q, block)

    def to_bqm(self, params: Params) -> Any:
        """Return the energy as a ``dimod.BinaryQuadraticModel``.

        Variables are named as in :meth:`to_networkx`. Needs dimod, an extra: ``pip
        install ebmpp[dimod]``.

        :raises ArgumentError: unless all blocks are Spin, or all are Bernoulli.
        :raises IntractableError: for an energy in which three units interact.
        :raises ImportError: without dimod.
        """
        self.check(params)
        return networks.to_bqm(self, params)

    def _card(self) -> Card:
        return display.card(self)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plot the block graph, one column per layer.

        Visible blocks are shaded, and factors are on the edges. A factor over one block
        is listed below it; one over three blocks or more is on each edge that it makes.
        Needs matplotlib.

        :param ax: axes to draw on; a new figure by default.

        **Example**

        >>> import ebmpp
        >>> axes = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3)).plot()
        >>> [text.get_text() for text in axes.texts if "layer" in text.get_text()]
        ['layer 0', 'layer 1']
        """
        return display.plot_graph(self, ax)

    def init(
        self,
        rng_key: Array,
        data: StateLike | tables.Table | None = None,
        scheme: str | Mapping[str, str] = "gaussian",
        weights: ArrayLike | None = None,
    ) -> Params:
        """Return initial params, a dict by factor.

        :param data: rows of the visible blocks, whose base rates become the visible
            biases; rates of known entries for an :class:`~ebmpp.Observed` block.
        :param scheme: "gaussian" (weights of standard deviation 0.01, base-rate
            biases), "orthogonal" (semi-orthogonal weights, Logistic(0, 0.5) biases:
            Taniguchi et al. 2023), or a dict with "weight" ("gaussian", "orthogonal",
            "zero") and "bias" ("base_rate", "logistic", "zero").
        :param weights: of the rows in the base rates, not all zero; equal by default.
        :raises ParameterError: for an unknown scheme.
        :raises StateError: for data of a wrong name, shape or value.
        """
        initialization.resolve(scheme)  # before the data are read
        means = (
            {}
            if data is None
            else tables.mean_statistics(self, data, weights, warns=True)
        )
        rng_key = checks.key("init: rng_key", rng_key)
        params = initialization.init_params(self, rng_key, scheme, means)
        if means:
            tables.warn_if_stuck(self, params)
        return params

    def check(self, params: Params, values: bool = True) -> None:
        """Check names, shapes and finite values of params, and that the model normalises.

        :param values: False to check names and shapes only.
        :raises ParameterError: naming the factor.
        :raises DomainError: if the model does not normalise, with the reason.
        """
        states.check_params(self.param_shapes, params)
        if not values:
            return
        states.check_finite(self.effective_params(params))
        if states.is_concrete(params):
            with sharding.eager():  # under jit, concrete params would be staged
                normalization.check(self, params)

    def effective_params(self, params: Params) -> dict[str, PyTree]:
        """Return params with 0 at entries without effect, such as zeros of a Table."""
        return {f.name: f.effective_params(params[f.name]) for f in self.factors}

    def _as_state(self, x: StateLike) -> dict[str, PyTree]:
        x = dict(x) if isinstance(x, Mapping) else states.as_visible(self, x)
        states.check_names(x, self.families)
        return x

    def _rows(
        self, params: Params, x: StateLike, needed: Iterable[str]
    ) -> tuple[dict, tuple[int, ...]]:
        states.check_params(self.param_shapes, params)
        return states.as_rows(self.families, self._as_state(x), tuple(needed))

    def energy(self, params: Params, x: StateLike) -> PerState:
        """Return E(t(x)).

        :param x: every block, shapes ``(*batch, *shape)``. Here and in the methods
            below, a bare array stands for the only visible block.
        :raises StateError: for a missing or unknown block, a wrong shape, or a value
            outside the support.
        """
        rows, batch = self._rows(params, x, self.families)
        value = -energy.with_infinities(self, -_energies(self, params, rows))
        return value.reshape(batch)

    def log_density(self, params: Params, x: StateLike) -> PerState:
        """Return log p(x) + log Z, minus the energy plus the base measures."""
        rows, batch = self._rows(params, x, self.families)
        value = energy.with_infinities(self, _log_densities(self, params, rows))
        return value.reshape(batch)

    def _natural(
        self, params: Params, x: StateLike, block: str
    ) -> tuple[Natural, Family]:
        """Return natural parameters and family of a block, or of a part such as "x[0]"."""
        parts = {
            lateral.part_name(b, i): (b, i)
            for b, s in self.splits.items()
            for i in range(s.num_parts)
        }
        name, part = parts.get(block, (block, None))
        states.check_names([name], self.families)
        state = self._as_state(x)
        scope = {b: v for b, v in state.items() if b in self.splits or b != name}
        rows, batch = self._rows(params, scope, self.scope([name]))
        family = self.families[name]
        eta = _naturals(self, name, params, rows)
        eta = eta.reshape(batch + family.statistic_shape) if rows else eta
        if part is None:
            return eta, family
        units = self.splits[name].units[part]
        flat = eta.reshape(*batch, family.size, *family.stat_shape)
        return jnp.take(flat, units, axis=len(batch)), dataclasses.replace(
            family, shape=(len(units),)
        )

    def natural_parameters(self, params: Params, x: StateLike, block: str) -> Natural:
        """Return the natural parameters of ``block`` given its neighbours.

        Their shape is ``(*batch, *shape, *stat_shape)``.

        :param block: a block, or a part such as "x[0]" of one whose units interact.
            Such a block as a whole gives the natural parameter of each unit given all
            others.
        """
        return self._natural(params, x, block)[0]

    def conditional(
        self, params: Params, x: StateLike, block: str
    ) -> dist.Distribution:
        """Return the conditional of ``block`` given the rest, a NumPyro distribution.

        :param block: a block, or a part such as "x[0]" of one whose units interact: the
            units ``splits["x"].units[0]``.
        :raises IntractableError: for a block whose units interact.
        """
        if block in self.splits and block not in self.nonconjugate:
            raise IntractableError(
                f"{clash(block, block)}, so they are not independent given the rest. "
                f"Ask for a part such as {lateral.part_name(block, 0)!r}, or draw the "
                "block by BlockedGibbs."
            )
        eta, family = self._natural(params, x, block)
        return family.distribution(eta)

    def mean(self, params: Params, x: StateLike, block: str) -> Natural:
        """Return mean statistics of ``block``, or of its interacting units, given the rest."""
        eta, family = self._natural(params, x, block)
        return family.mean(eta)

    def mode(self, params: Params, x: StateLike, block: str) -> Draws:
        """Return the mode of ``block`` given the rest, or of each unit if its units interact."""
        eta, family = self._natural(params, x, block)
        return family.mode(eta)

    def log_marginal(
        self, params: Params, x: StateLike, blocks: Iterable[str] | str
    ) -> PerState:
        """Return the log unnormalised density of the other blocks, with ``blocks`` summed out.

        :param x: the other blocks, shapes ``(*batch, *shape)``; values of ``blocks``
            are ignored. Unknown units of an :class:`~ebmpp.Observed` block are summed
            out too.
        :param blocks: blocks that interact neither with one another nor with a partly
            observed block.
        :raises IntractableError: if two of ``blocks``, or units of one, interact.
        """
        blocks = states.check_names(blocks, self.families)
        states.check_params(self.param_shapes, params)
        rest = omit(self._as_state(x), blocks)
        states.check_summable(self, blocks)
        needed = [b for b in self.families if b not in blocks]
        rows, masks, batch = states.as_partial_rows(self.families, rest, needed)
        known = states.incomplete(masks)
        states.check_summable(self, blocks, known)
        value = _log_marginals(self, blocks, params, rows, known)
        value = energy.with_infinities(self, value)
        return value.reshape(batch) if rows else value

    def free_energy(self, params: Params, x: StateLike) -> PerState:
        """Return F with p(x) proportional to exp(-F(x)); blocks missing from ``x`` are summed out.

        :param x: usually the visible blocks, shapes ``(*batch, *shape)``, or
            :class:`~ebmpp.Observed` ones, whose unknown units are summed out too.
        :raises IntractableError: if two missing blocks, or units of one, interact.
        """
        x = self._as_state(x)
        return -self.log_marginal(params, x, [b for b in self.families if b not in x])


@compiled(statics=1)
def _energies(graph: FactorGraph, params: Params, rows: Rows) -> PerRow:
    return jax.vmap(lambda t: energy.energy(graph, params, t))(graph.statistics(rows))


_log_densities = compiled(energy.log_density, statics=1)


@compiled(statics=2)
def _naturals(graph: FactorGraph, block: str, params: Params, rows: Rows) -> Natural:
    """Return ``(rows, ...)``, or no leading axis for a block without neighbours."""

    def eta_at(t):
        eta = energy.natural(graph, params, t, [block])
        return energy.saturated(graph, eta)[block]

    return jax.vmap(eta_at)(graph.statistics(rows)) if rows else eta_at({})


@compiled(statics=2)
def _log_marginals(
    graph: FactorGraph, blocks: tuple[str, ...], params: Params, rows: Rows, known: Rows
) -> Array:
    """Return one value per row, or one value if all blocks are summed out."""

    def log_density_at(row, known):
        return energy.log_unnormalized(graph, params, row, blocks, known)

    return jax.vmap(log_density_at)(rows, known) if rows else log_density_at({}, {})


def layered(**blocks: Family) -> FactorGraph:
    """Declare a chain of blocks, each with a bias and bilinear to the next; the first is visible.

    Two blocks make a restricted Boltzmann machine, more a deep one.

    :param blocks: families in order.
    :raises DeclarationError: without blocks.

    **Example**

    >>> from ebmpp import Bernoulli, layered
    >>> layered(v=Bernoulli(6), h1=Bernoulli(4), h2=Bernoulli(3)).layers
    (('v', 'h2'), ('h1',))
    """
    if not blocks:
        raise checks.declaration_error(
            "layered", "given at least one block, such as v=Bernoulli(784)", blocks
        )
    first, *rest = blocks
    factors = [
        *map(Bias, blocks),
        *(Bilinear(a, b) for a, b in itertools.pairwise(blocks)),
    ]
    return FactorGraph(select(blocks, [first]), select(blocks, rest), factors)
