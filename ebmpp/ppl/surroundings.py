# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Where a graph stands in a NumPyro model: its sites, and what its params are functions of."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import numpy as np
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace
from numpyro.infer.util import log_density

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Rows, checks
from ebmpp.distribution.layout import Layout
from ebmpp.errors import IntractableError, ParameterError, StateError
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.moves import gibbs
from ebmpp.ppl import binding
from ebmpp.traced.block import STATES, TRIES, Call, compare

Sites = Sequence[str] | Mapping[str, str | Layout] | None


class _Seen(dict):
    """The values of sibling sites; remembers whether anybody looked."""

    looked = False

    def __getitem__(self, name: str) -> Array:
        self.looked = True
        if name not in self:
            raise StateError(
                f"a function of the block's params asked for site {name!r}; the sibling sites are "
                f"{sorted(self)} (none outside numpyro.infer.Gibbs)"
            )
        return super().__getitem__(name)


class Surroundings:
    """A graph among the sites of a model; the arguments are those of :class:`~ebmpp.GibbsBlock`."""

    def __init__(
        self,
        graph: FactorGraph,
        sites: Sites,
        params: Mapping[str, Any] | Callable[..., Any] | None,
        given: Mapping[str, Any] | None,
        log_weight: Callable[..., Array] | None,
    ) -> None:
        if log_weight is not None:
            checks.function("GibbsBlock: log_weight", log_weight, "the sites")
        self.graph, self.log_weight, self.given = graph, log_weight, dict(given or {})
        self.layouts = _layouts(graph, sites, self.given)
        self.params = dict(params) if isinstance(params, Mapping) else params
        if isinstance(self.params, dict):
            states.check_factors(graph.param_shapes, self.params)

    # -- names -----------------------------------------------------------------------------------

    @property
    def site_blocks(self) -> tuple[str, ...]:
        """The blocks that are sites, or parts of one."""
        return tuple(b for layout in self.layouts.values() for b in layout.names)

    @property
    def latents(self) -> tuple[str, ...]:
        """The blocks that are neither a site nor given."""
        taken = {*self.site_blocks, *self.given}
        return tuple(b for b in self.graph.families if b not in taken)

    @property
    def layers(self) -> tuple[tuple[str, ...], ...]:
        """The layers of a sweep: the latents' before the sites'.

        In this order the latents are drawn again before they are read: siblings are updated with the
        latents summed out, and may have moved.
        """
        latents, found = set(self.latents), []
        for wanted in (latents, set(self.site_blocks)):
            layers = (tuple(b for b in layer if b in wanted) for layer in self.graph.block_layers)
            found.extend(layer for layer in layers if layer)
        return tuple(found)

    # -- binding ---------------------------------------------------------------------------------

    def batch_of(self, values: Rows) -> tuple[int, ...]:
        """The leading axes that the sites share.

        :raises StateError: for missing sites, or axes that differ.
        """
        if set(values) != set(self.layouts):
            raise StateError(
                f"GibbsBlock has sites {sorted(self.layouts)}, and was given {sorted(values)}: name the same "
                "sites in numpyro.infer.Gibbs([(block, sites), ...])"
            )
        axes = {}
        for site, layout in self.layouts.items():
            shape = jnp.shape(values[site])
            axes[site] = shape[: len(shape) - len(layout.shape)]
            if axes[site] + layout.shape != shape:
                raise StateError(
                    f"site {site!r} has shape {shape} in the model, and its blocks {layout.names} make "
                    f"{layout.shape}"
                )
        if len(set(axes.values())) > 1:
            raise StateError(f"the sites of one block have the same leading axes; got {axes}")
        return next(iter(axes.values()))

    def bind(self, values: Rows, call: Call, check: bool = False) -> binding.Bound:
        """The graph at this moment's values of everything else.

        :param values: the block's own sites (for their leading axes).
        :raises ParameterError: for params that do not fit.
        :raises IntractableError: for latents that interact, and whose params depend on siblings.
        """
        batch = self.batch_of(values)
        seen, depends = self._evaluate(call)
        self._refuse_stale_latents(depends)
        params, axes = binding.bind_params(self.graph, seen, batch, check)
        clamped = self._clamped(call, batch, check)
        weight = None
        if (log_weight := self.log_weight) is not None:
            own, others = lambda x: self.to_sites(x, values, batch), dict(call.siblings)
            weight = lambda x: jnp.reshape(log_weight(own(x), others, *call.args, **call.kwargs), -1)
        sites, given = self.site_blocks, states.Clamped(clamped, batch=batch)
        return binding.Bound(
            self.graph, params, given, axes=axes, order=self.layers, log_weight=weight, weighted=sites
        )

    def _evaluate(self, call: Call) -> tuple[dict[str, Any], set[str]]:
        """Params, and the factors whose params depend on siblings."""
        seen, args, kwargs = _Seen(call.siblings), call.args, call.kwargs
        if self.params is None:
            if not args:
                raise ParameterError("GibbsBlock has no params: give them, or as the model's first argument")
            return args[0], set()
        if not isinstance(self.params, dict):
            made = self.params(seen, *args, **kwargs)
            return made, set(self.graph.param_shapes) if seen.looked else set()
        made, depends = {}, set()
        for name, value in self.params.items():
            seen.looked = False
            made[name] = value(seen, *args, **kwargs) if callable(value) else value
            if seen.looked:
                depends.add(name)
        return made, depends

    def _refuse_stale_latents(self, depends: set[str]) -> None:
        latents = set(self.latents)
        stale = [f.name for f in self.graph.factors if f.name in depends and latents & set(f.blocks)]
        clash = self.graph.interacting(latents)
        if stale and clash:
            raise IntractableError(
                f"params of factor {stale[0]!r} depend on sibling sites, which are updated with the latent "
                f"blocks {self.latents} summed out; {clash[0]} interact, so they cannot be drawn again in "
                "one go before they are read. Make a latent block a site of the model, or let params of "
                "the latents' factors not depend on siblings"
            )

    def _clamped(self, call: Call, batch: tuple[int, ...], check: bool) -> dict[str, Array]:
        of_sites = lambda fn: fn(_Seen(call.siblings), *call.args, **call.kwargs)
        made = {b: of_sites(v) if callable(v) else v for b, v in self.given.items()}
        held = states.as_clamped(self.graph.families, made, check)
        if held.partial:
            raise StateError(
                f"given block {next(iter(held.partial))!r} is an Observed, and a block that is given here is "
                "held as a whole: give every unit, or make it a site of the model"
            )
        rows = math.prod(batch)
        if held.batch not in ((), batch):
            raise StateError(f"given blocks have leading axes {held.batch}, and the sites have {batch}")
        return {b: jnp.broadcast_to(v, (rows, *v.shape[1:])) for b, v in held.whole.items()}

    def to_rows(self, values: Rows, latents: Rows, made: binding.Bound) -> dict[str, Array]:
        """Every block as rows."""
        x = {}
        for site, layout in self.layouts.items():
            for b, v in layout.split(values[site]).items():
                family = self.graph.families[b]
                x[b] = v.reshape(-1, *family.shape).astype(family.dtype)
        return x | dict(latents) | made.clamped

    def to_sites(self, x: Rows, like: Rows, batch: tuple[int, ...]) -> dict[str, Array]:
        """The sites' values, of the dtypes of ``like``."""
        made = {}
        for site, layout in self.layouts.items():
            value = layout.join({b: x[b] for b in layout.names})
            made[site] = value.reshape(batch + layout.shape).astype(jnp.result_type(like[site]))
        return made


def _layouts(graph: FactorGraph, sites: Sites, given: Mapping[str, Any]) -> dict[str, Layout]:
    """:raises StateError: for an unknown block, or a block in two places."""
    if isinstance(sites, str):
        sites = (sites,)
    if sites is None:
        sites = tuple(b for b in graph.visible if b not in given)
    named = dict(sites) if isinstance(sites, Mapping) else {b: b for b in sites}
    states.check_names(given, graph.families)
    made = {}
    for site, what in named.items():
        if not isinstance(what, Layout):
            states.check_names([what], graph.families)
            what = Layout.of(graph, [what])
        made[site] = what
    blocks = [*given, *(b for layout in made.values() for b in layout.names)]
    twice = sorted({b for b in blocks if blocks.count(b) > 1})
    if twice or not made:
        raise StateError(f"every block is one site, given or latent; {twice or 'no site'} is wrong")
    return made


# -- is the graph the posterior of its sites? --------------------------------------------------------


def verify(
    within: Surroundings,
    model: Callable[..., Any],
    *model_args: Any,
    rng_key: Array | None = None,
    tolerance: float = 1e-3,
    **model_kwargs: Any,
) -> None:
    """Compare how the model's log density and the block's change between random states of the sites.

    The two must change alike, whatever the other sites are; a constant does not matter. A term that is
    missing, counted twice, or of the wrong scale shows at once.

    :param within: the block among its siblings.
    :param model: the NumPyro model.
    :param model_args: its arguments.
    :param rng_key: for the random states; a fixed key unless given.
    :param tolerance: relative to the size of the changes.
    :param model_kwargs: its keyword arguments.
    :raises StateError: where they differ, telling by how much; or for sites that the model has not.
    :raises IntractableError: for latent blocks that cannot be summed out in closed form.
    """
    key = jax.random.key(0) if rng_key is None else rng_key
    clash = within.graph.interacting(within.latents)
    if clash:
        raise IntractableError(f"latent blocks {clash[0]} interact: their sum has no closed form to compare")
    theirs, ours = [], []
    for number in range(TRIES):
        k = jax.random.fold_in(key, number)
        found = prototype_trace(model, k, model_args, model_kwargs)
        values = {name: found[name]["value"] for name in latent_sample_sites(found)}
        missing = sorted(set(within.layouts) - set(values))
        if missing:
            raise StateError(f"sites {missing} are not latent sample sites of the model: {sorted(values)}")
        siblings = {name: v for name, v in values.items() if name not in within.layouts}
        own = {name: values[name] for name in within.layouts}
        batch = within.batch_of(own)
        made = within.bind(own, Call(siblings, model_args, model_kwargs), check=True)
        for index in range(STATES):
            x = gibbs.initial_rows(within.graph, within.site_blocks, made.keys(k, index)) | made.clamped
            sites = within.to_sites(x, own, batch)
            theirs.append(log_density(model, model_args, model_kwargs, siblings | sites)[0])
            ours.append(_log_density(within, made, x))
    compare(np.asarray(theirs), np.asarray(ours), list(within.layouts), tolerance)


def _log_density(within: Surroundings, made: Any, x: dict[str, Array]) -> Array:
    graph, latents = within.graph, within.latents
    one = lambda target, row: energy.log_unnormalized(graph, target.params, row, latents)
    value = made.map(lambda target, rows: jax.vmap(lambda row: one(target, row))(rows), x).sum()
    return value if made.log_weight is None else value + jnp.sum(made.log_weight(x))
