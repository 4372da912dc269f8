# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A site of a composite that is drawn from its conditional in closed form."""

from collections.abc import Callable
import dataclasses
from typing import ClassVar

import numpyro.distributions as dist

from jax import Array
import jax.numpy as jnp

from ebmpp.core import Rows, SiteArrays, checks, random
from ebmpp.traced.block import Advanced, BlockChain, Call, Coupled
from ebmpp.traced.maximal import maximal


@dataclasses.dataclass(frozen=True)
class Conjugate:
    """A site that is drawn from its conditional, a NumPyro distribution in closed form.

    :param site: its name.
    :param conditional: ``fn(sites, *model_args, **model_kwargs)`` of the values of all
        other sites to the distribution of this one given everything else.
    :param initial: the distribution of starting values, of the same shape.

    The two chains of a pair are coupled maximally, for any distribution that has a
    density.

    **References**

    1. Thorisson (2000), *Coupling, stationarity, and regeneration*, chapter 1, section
       4.4.
    """

    site: str
    conditional: Callable[..., dist.Distribution]
    initial: dist.Distribution
    latents: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        checks.instance("Conjugate: site", self.site, str, "the name of a site")
        checks.function("Conjugate: conditional", self.conditional, "the other sites")
        checks.instance(
            "Conjugate: initial",
            self.initial,
            dist.Distribution,
            "a NumPyro distribution",
        )

    @property
    def sites(self) -> tuple[str, ...]:
        return (self.site,)

    def draw_initial(self, keys: Array) -> SiteArrays:
        """Draw a starting value."""
        return {self.site: jnp.asarray(self.initial.sample(random.as_key(keys)))}

    def advance(self, values: Rows, call: Call, keys: Array) -> Advanced:
        """Draw the site from its conditional."""
        drawn = self._given(call).sample(random.as_key(keys))
        return Advanced({self.site: jnp.asarray(drawn, values[self.site].dtype)})

    def couple(
        self,
        first: BlockChain,
        second: BlockChain,
        keys: Array,
        coupling: str | None = None,
    ) -> Coupled:
        """Draw the sites of two chains, coupled maximally."""
        values, call = first
        x, y, is_valid = maximal(keys, self._given(call), self._given(second[1]))
        dtype = values[self.site].dtype
        return {self.site: x.astype(dtype)}, {self.site: y.astype(dtype)}, ~is_valid

    def _given(self, call: Call) -> dist.Distribution:
        return self.conditional(call.siblings, *call.args, **call.kwargs)
