# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A model's log density joint with the latent blocks of its energy priors: data augmentation.

The latents h of an energy that is the prior of a site z are summed out of the model, and all units of z that
share one interact. With them, p(z) is the sum over h of p(z, h), so the model's posterior of z is that of
(z, h) with h left away: h is drawn given z, from the families of the graph, and then z given h, as the
traced joint density has it. Each draw leaves the joint posterior as it is. The latents are drawn anew before
they are read, whatever they were, so that they are no part of a chain's state.

**References**

1. Tanner, Wong (1987), *The calculation of posterior distributions by data augmentation*.
"""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, cast

from numpyro.distributions import Distribution
from numpyro.primitives import Messenger

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import random
from ebmpp.distribution.energy_distribution import EnergyDistribution
from ebmpp.distribution.intractable import base_law, with_base
from ebmpp.families import Family
from ebmpp.traced.block import Call
from ebmpp.traced.dependence import Program
from ebmpp.traced.posterior import Posterior, Reading

_LATENTS = 1 << 18  # what the keys of latents are folded with beside their numbers


def priors_with_latents(read: Reading, sites: Sequence[str]) -> dict[str, EnergyDistribution]:
    """Those of the sites whose prior is an energy with blocks that are summed out."""
    laws = {name: law for name in sites if isinstance(law := read.laws[name], EnergyDistribution)}
    return {name: law for name, law in laws.items() if law.summed}


def scaled(read: Reading, sites: Sequence[str]) -> list[str]:
    """Of these sites, those whose density is raised to a power, which is no sum over latents any more."""
    plain = lambda scale: scale is None or (isinstance(scale, int | float) and scale == 1)
    return [name for name in priors_with_latents(read, sites) if not plain(read.scales[name])]


class Augmented(Posterior):
    """The log density of a model and the latents of its priors, whose values are as if they were siblings'.

    :param read: the model.
    :param sites: names of latent sites, of which some have energy priors with latents.
    :raises IntractableError: as :class:`~ebmpp.traced.posterior.Posterior`.
    """

    def __init__(self, read: Reading, sites: Sequence[str]) -> None:
        #: by the name that a latent block has here, its site and its block there
        self.blocks: dict[str, tuple[str, str]] = {}
        self.families: dict[str, Family] = {}
        #: by site, the name of an input by row that is 1, and not a number where a latent has no law
        self.sound: dict[str, str] = {}
        beside: dict[str, Array] = {}
        fresh = lambda name: fresh(name + "'") if name in read.latent or name in beside else name
        for site, law in priors_with_latents(read, sites).items():
            value = read.latent[site].shape
            lead = value[: len(value) - len(law.event_shape)]
            for b in law.summed:
                name, family = fresh(f"{b} of {site}"), law.graph.families[b]
                self.blocks[name], self.families[name] = (site, b), family
                beside[name] = jnp.zeros(lead + family.shape, family.dtype)
            self.sound[site] = fresh(f"law of {site}")
            beside[self.sound[site]] = jnp.ones(lead)
        super().__init__(read, sites, beside)
        own = {name: read.latent[name] for name in self.sites}
        others = {name: v for name, v in read.latent.items() if name not in own}
        #: from the sites to natural parameters of the latents, by name in order
        self.natural = Program(self._parameters, own, others, self.arguments.arrays)

    @property
    def num_latents(self) -> int:
        """Units that are drawn along."""
        return sum(math.prod(self.shapes[name]) for name in self.families)

    def model_at(self, others: Mapping[str, Array]) -> Callable[..., Any]:
        """The model with the latents' joint densities in the place of the priors."""
        latents: dict[str, dict[str, Array]] = {site: {} for site in self.sound}
        for name, (site, b) in self.blocks.items():
            latents[site][b] = others[name]
        return _AtLatents(self.model, latents, {site: others[name] for site, name in self.sound.items()})

    def _parameters(self, own: Mapping, others: Mapping, arguments: Sequence) -> list[Array]:
        trace, made = self.trace(own, others, arguments), {}
        for site in dict(self.blocks.values()):
            fn = trace[site]["fn"]
            law, counts = cast(EnergyDistribution, base_law(fn)), _counts(fn, own[site])
            for b, eta in law.latent_parameters(own[site]).items():
                inside = counts.reshape(counts.shape + (1,) * (eta.ndim - counts.ndim))
                own_law = jnp.broadcast_to(law.graph.families[b].default_eta(), eta.shape)
                made[site, b] = jnp.where(inside, eta, own_law)
        return [made[place] for place in self.blocks.values()]

    # -- draws -----------------------------------------------------------------------------------

    def parameters(self, values: Mapping[str, Array], call: Call) -> dict[str, Array]:
        """Natural parameters of the latents given everything else.

        Of rows that a mask leaves out any law would do: the families' own.

        :param values: the block's sites.
        :param call: values of their siblings, and the model's arguments.
        """
        made = self.natural.run(self.inputs(values, call, self.natural), self.natural.outputs)
        return {name: made[slot] for name, slot in zip(self.blocks, self.natural.outputs, strict=True)}

    def draw(
        self, values: Mapping[str, Array], call: Call, keys: Array, beta: Any = None
    ) -> dict[str, Array]:
        """Latents given everything else, and whether they have a law.

        :param keys: words, ``(2,)``.
        :param beta: what natural parameters are multiplied by; 1 unless given.
        """
        made, etas = {}, self.parameters(values, call)
        if beta is not None:
            etas = {name: beta * eta for name, eta in etas.items()}
        for number, (name, family) in enumerate(self.families.items()):
            made[name] = family.sample(self._words(name, number, keys, family.num_words), etas[name])
        return made | self._laws(etas)

    def couple(
        self,
        first: tuple[Mapping[str, Array], Call],
        second: tuple[Mapping[str, Array], Call],
        keys: Array,
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Latents of two chains from the same words: equal where the chains are.

        Unit by unit as often as can be, where a family knows how (see :mod:`ebmpp.moves.couplings`).
        """
        made: tuple[dict[str, Array], dict[str, Array]] = {}, {}
        etas = [self.parameters(*side) for side in (first, second)]
        for number, (name, family) in enumerate(self.families.items()):
            words = self._words(name, number, keys, family.num_couple_words)
            made[0][name], made[1][name] = family.couple(words, etas[0][name], etas[1][name])
        return made[0] | self._laws(etas[0]), made[1] | self._laws(etas[1])

    def _laws(self, etas: Mapping[str, Array]) -> dict[str, Array]:
        """1 in rows whose latents have a law, and not a number elsewhere."""
        made = {name: jnp.ones(self.shapes[name]) for name in self.sound.values()}
        for name, eta in etas.items():
            sound = self.sound[self.blocks[name][0]]
            inside = self.families[name].in_domain(eta).reshape(*self.shapes[sound], -1).all(-1)
            made[sound] = jnp.where(inside, made[sound], jnp.nan)
        return made

    def _words(self, name: str, number: int, keys: Array, each: int) -> Array:
        shape = self.shapes[name]
        words = random.words(random.fold_in(keys, number, _LATENTS), math.prod(shape) * each)
        return words.reshape(*shape, each)

    def log_law(self, values: Mapping[str, Array], call: Call, latents: Mapping[str, Array]) -> Array:
        """log p(latents | everything else), the latents' base measures left away."""
        total = jnp.zeros(())
        for name, eta in self.parameters(values, call).items():
            family = self.families[name]
            total += (eta * family.statistics(latents[name])).sum() - family.log_normalizer(eta).sum()
        return total


class _AtLatents(Messenger):
    """A model whose energy priors are joint with latents of known values.

    :param latents: by site, values of the blocks that its law sums out.
    :param sound: by site, what log densities are multiplied by, row by row.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        latents: Mapping[str, Mapping[str, Array]],
        sound: Mapping[str, Array],
    ) -> None:
        super().__init__(model)
        self.latents, self.sound = latents, sound

    def process_message(self, msg: dict[str, Any]) -> None:
        """Exchange the law of one of the sites."""
        if msg["type"] == "sample" and msg["name"] in self.latents:
            at = self.latents[msg["name"]], self.sound[msg["name"]]
            msg["fn"] = with_base(msg["fn"], _Joint(cast(EnergyDistribution, base_law(msg["fn"])), *at))


class _Inner(Distribution):
    """What stands in the place of an energy's law where a density is traced."""

    def __init__(self, law: EnergyDistribution) -> None:
        self.law = law
        super().__init__(law.batch_shape, law.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return self.law.support


class _Joint(_Inner):
    """A law joint with latents."""

    def __init__(self, law: EnergyDistribution, latents: Mapping[str, Array], sound: Array) -> None:
        super().__init__(law)
        self.latents, self.sound = latents, sound

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        del intermediates
        return self.law.joint_log_prob(value, self.latents) * self.sound


class _Known(_Inner):
    """Log densities that are known, row by row."""

    def __init__(self, law: EnergyDistribution, rows: Array) -> None:
        super().__init__(law)
        self.rows = rows

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        del value, intermediates
        return self.rows


def _counts(fn: Distribution, value: Array) -> Array:
    """Which rows of a site's value enter its log density, and are not masked."""
    law = base_law(fn)
    rows = jnp.ones(value.shape[: value.ndim - len(law.event_shape)])
    total = lambda rows: jnp.sum(with_base(fn, _Known(law, rows)).log_prob(value))
    return jax.grad(total)(rows) != 0
