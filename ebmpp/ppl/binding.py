# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The binding of a graph to a NumPyro model: its sites, and the functions that give its params."""

from collections.abc import Callable, Mapping, Sequence
import itertools
import math

from jaxtyping import PyTree

from jax import Array
import jax.numpy as jnp

from ebmpp.core import Blocks, Rows, SiteArrays, checks
from ebmpp.distribution import Layout
from ebmpp.errors import IntractableError, StateError
from ebmpp.graph import FactorGraph, states
from ebmpp.ppl.bound import BoundGraph, bind_params
from ebmpp.traced.block import Call

#: Names of blocks, or by site a block's name or a layout; None for the visible blocks.
SitesLike = Sequence[str] | Mapping[str, str | Layout] | None
#: By factor params or functions, one function of all, or None for the first argument.
ParamsLike = Mapping[str, PyTree] | Callable[..., Mapping[str, PyTree]] | None


class _Siblings(dict):
    """Values of sibling sites, which records that one was read."""

    is_read = False

    def __getitem__(self, name: str) -> Array:
        self.is_read = True
        checks.names(
            "sibling site read by a function of the block's params",
            [name],
            self,
            StateError,
        )
        return super().__getitem__(name)


class Binding:
    """A graph among the sites of a model; see :class:`~ebmpp.GibbsBlock` for the arguments.

    ``site_blocks`` are sites, or parts of one; ``latents`` are neither a site nor
    clamped. Sweeps visit ``layers`` in order: latents come first, as siblings are
    updated with these summed out.
    """

    def __init__(
        self,
        graph: FactorGraph,
        sites: SitesLike,
        params: ParamsLike,
        clamped: Mapping[str, object] | None,
        log_likelihood: Callable[..., Array] | None,
    ) -> None:
        if log_likelihood is not None:
            checks.function("GibbsBlock: log_likelihood", log_likelihood, "the sites")
        self.graph = graph
        self.log_likelihood = log_likelihood
        self.clamped = dict(clamped or {})
        self.layouts = _layouts(graph, sites, self.clamped)
        self.site_blocks = tuple(
            b for layout in self.layouts.values() for b in layout.names
        )
        self.latents = tuple(
            b for b in graph.families if b not in {*self.site_blocks, *self.clamped}
        )
        parts = itertools.product((self.latents, self.site_blocks), graph.block_layers)
        layers = (tuple(b for b in layer if b in blocks) for blocks, layer in parts)
        self.layers = tuple(filter(None, layers))
        self.params = dict(params) if isinstance(params, Mapping) else params
        if isinstance(self.params, dict):
            states.check_factors(graph.param_shapes, self.params)

    def batch_of(self, values: Rows) -> tuple[int, ...]:
        """Return the leading axes that the sites share; raise a StateError if these differ."""
        shapes = {
            site: jnp.shape(v) for site, v in values.items() if site not in self.latents
        }
        expected = {site: layout.shape for site, layout in self.layouts.items()}
        site, shape = next(iter(expected.items()))
        batch = shapes.get(site, ())[: -len(shape) or None]
        if shapes != {site: batch + shape for site, shape in expected.items()}:
            raise checks.state_error(
                "GibbsBlock: shapes of its sites",
                f"{expected} after common leading axes",
                shapes,
                hint="Name these sites in numpyro.infer.Gibbs.",
            )
        return batch

    def bind(self, values: Rows, call: Call, check: bool = False) -> BoundGraph:
        """Return the graph at the present values of everything else.

        :param values: of the sites, of which only the leading axes count.
        :raises ParameterError: for params that do not fit.
        :raises IntractableError: for latents that interact, and whose params depend on
            siblings.
        """
        batch = self.batch_of(values)
        params, dependent = self._evaluate(call)
        touched = self.graph.touching(self.latents)
        stale = [f.name for f in touched if f.name in dependent]
        clash = self.graph.interacting(self.latents)
        if stale and clash:
            raise IntractableError(
                f"params of factor {stale[0]!r} depend on sibling sites, which are "
                f"updated with the latents summed out, but {clash[0]} interact. Make a "
                "latent block a site of the model"
            )
        params = bind_params(self.graph, params, batch, check)
        clamped = states.Clamped(
            self._evaluate_clamped(call, batch, check), batch=batch
        )
        log_likelihood = None
        if self.log_likelihood is not None:
            fn = self.log_likelihood

            def log_likelihood(x):
                sites = self.to_sites(x, values, batch)
                density = fn(sites, dict(call.siblings), *call.args, **call.kwargs)
                return jnp.reshape(density, -1)

        return BoundGraph(
            self.graph,
            params,
            clamped,
            order=self.layers,
            log_likelihood=log_likelihood,
            sites=self.site_blocks,
        )

    def _evaluate(self, call: Call) -> tuple[PyTree, set[str]]:
        """Return params, and the factors whose params depend on siblings."""
        if self.params is None:
            return call.args[0] if call.args else None, set()
        if not isinstance(self.params, dict):
            params, is_dependent = _value(self.params, call)
            return params, set(self.graph.param_shapes) if is_dependent else set()
        params = {}
        dependent = set()
        for name, value in self.params.items():
            params[name], is_dependent = _value(value, call)
            if is_dependent:
                dependent.add(name)
        return params, dependent

    def _evaluate_clamped(
        self, call: Call, batch: tuple[int, ...], check: bool
    ) -> Blocks:
        values = {b: _value(v, call)[0] for b, v in self.clamped.items()}
        clamped = states.as_clamped(self.graph.families, values, check)
        name = "GibbsBlock: clamped"
        partial = list(clamped.partial)
        if partial:
            raise checks.state_error(name, "whole, not Observed, blocks", partial)
        if clamped.batch not in ((), batch):
            expected = f"of the sites' leading axes {batch} or none"
            raise checks.state_error(name, expected, clamped.batch)
        rows = math.prod(batch)
        return {
            b: jnp.broadcast_to(v, (rows, *v.shape[1:]))
            for b, v in clamped.full.items()
        }

    def split(self, values: Rows) -> Blocks:
        """Return blocks with the sites' leading axes, and rows of those latents in ``values``."""
        blocks = {b: values[b] for b in self.latents if b in values}
        for site, layout in self.layouts.items():
            blocks |= layout.split(values[site])
        return blocks

    def to_rows(self, values: Rows, graph: BoundGraph) -> Blocks:
        """Return every block as rows, from the sites and those latents that ``values`` has."""
        rows = {}
        for b, v in self.split(values).items():
            family = self.graph.families[b]
            rows[b] = v.reshape(-1, *family.shape).astype(family.dtype)
        return rows | graph.clamped

    def to_sites(self, x: Rows, template: Rows, batch: tuple[int, ...]) -> SiteArrays:
        """Return the sites' values, of the dtypes of ``template``."""
        values = {}
        for site, layout in self.layouts.items():
            value = layout.join(x).reshape(batch + layout.shape)
            values[site] = value.astype(jnp.result_type(template[site]))
        return values


def _value(value: PyTree, call: Call) -> tuple[PyTree, bool]:
    """Return a value, or the value of a function, and whether the function read a sibling."""
    if not callable(value):
        return value, False
    siblings = _Siblings(call.siblings)
    return value(siblings, *call.args, **call.kwargs), siblings.is_read


def _layouts(
    graph: FactorGraph, sites: SitesLike, clamped: Mapping[str, object]
) -> dict[str, Layout]:
    """Raise a StateError for an unknown block, or a block in two places."""
    if sites is None:
        sites = tuple(b for b in graph.visible if b not in clamped)
    if not isinstance(sites, Mapping):
        sites = {b: b for b in ([sites] if isinstance(sites, str) else sites)}
    states.check_names(clamped, graph.families)
    layouts = {}
    blocks = list(clamped)
    for site, value in sites.items():
        layout = value if isinstance(value, Layout) else Layout.flat(graph, [value])
        layouts[site] = layout
        blocks += layout.names
    if not layouts or len(set(blocks)) != len(blocks):
        raise checks.state_error(
            "GibbsBlock: sites and clamped",
            "of a site or more, each block once",
            blocks,
        )
    return layouts
