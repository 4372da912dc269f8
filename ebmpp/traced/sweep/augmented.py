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
import math
from typing import Any, cast

from numpyro.distributions import Distribution
from numpyro.primitives import Messenger

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.distribution import EnergyDistribution
from ebmpp.distribution.tractability import base_of, with_base
from ebmpp.families import Family
from ebmpp.traced.block import SiteValues
from ebmpp.traced.data import Replaced
from ebmpp.traced.model import Context, DrawnSites, Inputs, ModelInfo
from ebmpp.traced.sweep.posterior import ModelDensity

_LATENTS = 1 << 18  # folded into the keys of latents beside their numbers


def priors_with_latents(
    info: ModelInfo, sites: Sequence[str]
) -> dict[str, EnergyDistribution]:
    """Return the priors that are energies with latents; one raised to a power is no sum over latents."""

    def plain(scale):
        return scale is None or (isinstance(scale, int | float) and scale == 1)

    priors = {
        name: info.distributions[name] for name in sites if plain(info.scales[name])
    }
    return {
        name: p
        for name, p in priors.items()
        if isinstance(p, EnergyDistribution) and p.summed
    }


class Augmented(ModelDensity):
    """The log density of a model joint with latents of its energy priors, which count as siblings."""

    def __init__(self, info: ModelInfo, sites: Sequence[str]) -> None:
        #: site and block of each latent block, by the name that it has here
        self.blocks: dict[str, tuple[str, str]] = {}
        self.families: dict[str, Family] = {}
        #: by site, the name of an input per row that is 1, and nan where a latent's
        #: conditional is degenerate
        self.valid: dict[str, str] = {}
        extra: dict[str, Array] = {}

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
        self.natural = self.trace(self._natural, info.latent)

    @property
    def num_latents(self) -> int:
        """Number of latent units."""
        return sum(math.prod(self.shapes[name]) for name in self.families)

    def model_at(self, siblings: Mapping[str, Array]) -> Callable[..., Any]:
        """Return the model with joint densities of sites and latents in place of the priors."""
        latents: dict[str, dict[str, Array]] = {site: {} for site in self.valid}
        for name, (site, b) in self.blocks.items():
            latents[site][b] = siblings[name]
        valid = {site: siblings[name] for site, name in self.valid.items()}
        return _WithLatents(self.info.model, latents, valid)

    def _natural(
        self, sites: Mapping, siblings: Mapping, arguments: Sequence
    ) -> list[Array]:
        trace = self.info.trace({**sites, **siblings}, arguments)
        etas = {}
        for site in self.valid:
            fn = trace[site]["fn"]
            prior = cast(EnergyDistribution, base_of(fn))
            counts = _counts(fn, sites[site])
            for b, eta in prior.latent_parameters(sites[site]).items():
                # rows that a mask leaves out may have any distribution: the families'
                # default
                default = jnp.broadcast_to(
                    prior.graph.families[b].default_eta(), eta.shape
                )
                counted = counts.reshape(counts.shape + (1,) * (eta.ndim - counts.ndim))
                etas[site, b] = jnp.where(counted, eta, default)
        return [etas[place] for place in self.blocks.values()]

    def etas(self, values: SiteValues, context: Context) -> dict[str, Array]:
        """Return natural parameters of the latents given everything else."""
        inputs = self.natural.inputs({**context.siblings, **values}, context.arguments)
        results = self.natural.run(inputs, self.natural.outputs)
        return {
            name: results[slot]
            for name, slot in zip(self.blocks, self.natural.outputs, strict=True)
        }

    def move(
        self, inputs: Inputs, keys: Array, beta: Any = None, *_: Any
    ) -> DrawnSites:
        """Draw the latents, with the indicators; see :meth:`~ebmpp.traced.sweep.sweep.BlockSweep.__call__`."""
        latents = {}
        etas = self.etas(*inputs)
        if beta is not None:
            etas = {name: beta * eta for name, eta in etas.items()}
        for number, (name, family) in enumerate(self.families.items()):
            latents[name] = family.sample(
                self._words(name, number, keys, family.num_words), etas[name]
            )
        return latents | self._indicators(etas), jnp.zeros((), jnp.int32)

    def couple(self, first: Inputs, second: Inputs, keys: Array) -> tuple[dict, dict]:
        """Return coupled latents of two chains (:mod:`ebmpp.moves.couplings`), equal where the chains are."""
        etas = [self.etas(*chain) for chain in (first, second)]
        latents = self._indicators(etas[0]), self._indicators(etas[1])
        for number, (name, family) in enumerate(self.families.items()):
            words = self._words(name, number, keys, family.num_couple_words)
            latents[0][name], latents[1][name] = family.couple(
                words, etas[0][name], etas[1][name]
            )
        return latents

    def _indicators(self, etas: Mapping[str, Array]) -> dict[str, Array]:
        result = {name: jnp.ones(self.shapes[name]) for name in self.valid.values()}
        for name, eta in etas.items():
            indicator = self.valid[self.blocks[name][0]]
            inside = (
                self.families[name]
                .in_domain(eta)
                .reshape(*self.shapes[indicator], -1)
                .all(-1)
            )
            result[indicator] = jnp.where(inside, result[indicator], jnp.nan)
        return result

    def _words(self, name: str, number: int, keys: Array, per_unit: int) -> Array:
        shape = self.shapes[name]
        words = random.words(
            random.fold_in(keys, number, _LATENTS), math.prod(shape) * per_unit
        )
        return words.reshape(*shape, per_unit)

    def log_conditional(
        self, values: SiteValues, context: Context, latents: Mapping[str, Array]
    ) -> Array:
        """Return log p(latents | everything else), without the latents' base measures."""
        total = jnp.zeros(())
        for name, eta in self.etas(values, context).items():
            family = self.families[name]
            total += (
                eta * family.statistics(latents[name])
            ).sum() - family.log_normalizer(eta).sum()
        return total


class _WithLatents(Messenger):
    """A model whose energy priors are joint with the values ``latents``, times factors of their rows."""

    def __init__(
        self,
        model: Callable[..., Any],
        latents: Mapping[str, SiteValues],
        valid: SiteValues,
    ) -> None:
        super().__init__(model)
        self.latents = latents
        self.valid = valid

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["name"] in self.latents:
            latents = self.latents[msg["name"]]
            valid = self.valid[msg["name"]]
            prior = cast(EnergyDistribution, base_of(msg["fn"]))

            def joint(value):
                return prior.joint_log_prob(value, latents) * valid

            msg["fn"] = with_base(msg["fn"], Replaced(prior, joint))


def _counts(fn: Distribution, value: Array) -> Array:
    """Return a mask of the rows of a site's value that enter its log density, because they are not masked."""
    base = base_of(fn)
    rows = jnp.ones(value.shape[: value.ndim - len(base.event_shape)])

    def total(rows):
        return jnp.sum(with_base(fn, Replaced(base, lambda _: rows)).log_prob(value))

    return jax.grad(total)(rows) != 0
