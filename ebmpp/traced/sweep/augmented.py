# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A model's log density joint with the latent blocks of its energy priors: data augmentation.

The latents h of an energy that is the prior of a site z are summed out of the model,
and all units of z that share one interact. Since p(z) is the sum over h of p(z, h), h
may be drawn given z, from the families of the graph, then z given h, from the traced
joint density. The latents are drawn before they are read, so they are no part of a
chain's state.

**References**

1. Tanner, Wong (1987), *The calculation of posterior distributions by data
   augmentation*.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
import math
from typing import cast

from numpyro.primitives import Messenger

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import SiteArrays, expand, random
from ebmpp.distribution import EnergyDistribution
from ebmpp.distribution.tractability import base_of
from ebmpp.families import Family
from ebmpp.traced.block import Coupled, SiteValues
from ebmpp.traced.data import Message, Trace, sum_unmasked, with_log_density
from ebmpp.traced.model import DrawnSites, Inputs, ModelInfo
from ebmpp.traced.sweep.posterior import ModelDensity

# folded into keys beside a latent's number; larger than the counters of random words
_LATENTS = (1 << 31) + 2


def priors_with_latents(
    info: ModelInfo, sites: Sequence[str]
) -> dict[str, EnergyDistribution]:
    """Return the priors that are energies with latents.

    One raised to a power is no sum over latents.
    """
    result = {}
    for name in sites:
        prior = info.distributions[name]
        scale = info.scales[name]
        is_plain = scale is None or (isinstance(scale, int | float) and scale == 1)
        if isinstance(prior, EnergyDistribution) and prior.summed and is_plain:
            result[name] = prior
    return result


class Augmented(ModelDensity):
    """A model's log density joint with latents of its energy priors, as siblings."""

    def __init__(self, info: ModelInfo, sites: Sequence[str]) -> None:
        #: site and block of each latent block, by the name that it has here
        self.blocks: dict[str, tuple[str, str]] = {}
        self.families: dict[str, Family] = {}
        #: by site, the name of an input per row that is 1, and nan where a latent's
        #: conditional is degenerate
        self.valid: dict[str, str] = {}
        extra = {}

        def fresh(name):
            return fresh(name + "'") if name in info.latent or name in extra else name

        for site, prior in priors_with_latents(info, sites).items():
            shape = info.latent[site].shape
            rows = shape[: len(shape) - len(prior.event_shape)]
            for b in prior.summed:
                name = fresh(f"{b} of {site}")
                family = prior.graph.families[b]
                self.blocks[name] = (site, b)
                self.families[name] = family
                extra[name] = jnp.zeros(rows + family.shape, family.dtype)
            self.valid[site] = fresh(f"latents of {site}")
            extra[self.valid[site]] = jnp.ones(rows)
        super().__init__(info, sites, extra)
        #: from the sites to natural parameters of the latents, in the order of their
        #: names
        self.natural = info.program_of_trace(self._natural, sites)

    @property
    def num_latents(self) -> int:
        """Number of latent units."""
        return sum(math.prod(self.shapes[name]) for name in self.families)

    def _log_density(
        self, sites: SiteValues, siblings: SiteValues, arguments: Sequence
    ) -> Array:
        """Return the log density with joint ones of sites and latents in place of the priors."""
        latents = {site: {} for site in self.valid}
        for name, (site, b) in self.blocks.items():
            latents[site][b] = siblings[name]
        valid = {site: siblings[name] for site, name in self.valid.items()}
        model = _WithLatents(self.info.model, latents, valid)
        return self.info.log_density_of(model, {**sites, **siblings}, arguments)

    def _natural(self, trace: Trace) -> list[Array]:
        etas = {}
        for site in self.valid:
            prior = cast(EnergyDistribution, base_of(trace[site]["fn"]))
            counts = _counts(trace[site])
            value = trace[site]["value"]
            for b, eta in prior.latent_parameters(value).items():
                # rows that a mask leaves out may have any distribution: the families'
                # default
                default = prior.graph.families[b].default_eta()
                default = jnp.broadcast_to(default, eta.shape)
                etas[site, b] = jnp.where(expand(counts, eta), eta, default)
        return [etas[place] for place in self.blocks.values()]

    def etas(self, inputs: Inputs) -> SiteArrays:
        """Return natural parameters of the latents given everything else."""
        values, context = inputs
        values = {**context.siblings, **values}
        outputs = self.natural.outputs
        slots = self.natural.inputs(values, context.arguments)
        results = self.natural.run(slots, outputs)
        return {name: results[slot] for name, slot in zip(self.blocks, outputs)}

    def move(
        self, inputs: Inputs, keys: Array, beta: Array | None = None, *_: object
    ) -> DrawnSites:
        """Draw the latents, with the indicators; see :class:`~ebmpp.traced.sweep.BlockSweep`."""
        etas = self.etas(inputs)
        if beta is not None:
            etas = {name: beta * eta for name, eta in etas.items()}
        latents = self._indicators(etas)
        for name, family in self.families.items():
            latents[name] = family.sample(
                self._words(name, keys, family.num_words), etas[name]
            )
        return latents, jnp.int32(0)

    def couple(self, first: Inputs, second: Inputs, keys: Array) -> Coupled:
        """Return coupled latents of two chains, equal where the chains are."""
        eta = self.etas(first)
        other = self.etas(second)
        x = self._indicators(eta)
        y = self._indicators(other)
        for name, family in self.families.items():
            x[name], y[name] = family.couple(
                self._words(name, keys, family.num_couple_words), eta[name], other[name]
            )
        # a degenerate conditional shows by its indicator, which is nan
        return x, y, jnp.bool_(False)

    def _indicators(self, etas: SiteValues) -> SiteArrays:
        result = {name: jnp.ones(self.shapes[name]) for name in self.valid.values()}
        for name, eta in etas.items():
            site, _ = self.blocks[name]
            indicator = self.valid[site]
            inside = self.families[name].in_domain(eta)
            row_inside = inside.reshape(*self.shapes[indicator], -1).all(-1)
            result[indicator] = jnp.where(row_inside, result[indicator], jnp.nan)
        return result

    def _words(self, name: str, keys: Array, per_unit: int) -> Array:
        shape = self.shapes[name]
        keys = random.fold_in(keys, list(self.families).index(name), _LATENTS)
        return random.words(keys, math.prod(shape) * per_unit).reshape(*shape, per_unit)

    def log_conditional(self, inputs: Inputs, latents: SiteValues) -> Array:
        """Return log p(latents | everything else), without the latents' base measures."""
        total = jnp.zeros(())
        for name, eta in self.etas(inputs).items():
            family = self.families[name]
            product = (eta * family.statistics(latents[name])).sum()
            total += product - family.log_normalizer(eta).sum()
        return total


class _WithLatents(Messenger):
    """A model whose energy priors are joint with ``latents``, times factors of their rows."""

    def __init__(
        self, model: Callable, latents: Mapping[str, SiteValues], valid: SiteValues
    ) -> None:
        super().__init__(model)
        self.latents = latents
        self.valid = valid

    def process_message(self, msg: Message) -> None:
        name = msg["name"]
        if msg["type"] == "sample" and name in self.latents:
            prior = cast(EnergyDistribution, base_of(msg["fn"]))

            def joint(value):
                density = prior.joint_log_prob(value, self.latents[name])
                return density * self.valid[name]

            msg["fn"] = with_log_density(msg["fn"], joint)


def _counts(site: Message) -> Array:
    """Return a mask of the rows of a site's value that are not masked out."""
    value = site["value"]
    event_dim = base_of(site["fn"]).event_dim
    rows = jnp.ones(value.shape[: value.ndim - event_dim])
    return jax.grad(partial(sum_unmasked, site))(rows) != 0
