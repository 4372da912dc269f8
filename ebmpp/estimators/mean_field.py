# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The mean-field posterior, for positive phases that are not one layer."""

import dataclasses

import jax

from ebmpp.core import checks
from ebmpp.core.types import Params, Rows, State, Statistics
from ebmpp.graph import FactorGraph
from ebmpp.graph.mean_field import mean_field


@dataclasses.dataclass(frozen=True)
class MeanField:
    """The latents' posterior as a product of independent units, by coordinate ascent on its lower bound.

    For deep machines, as ``posterior=`` of the biased estimators.

    A pass sets the mean statistics of each block, those next to the visible ones first, to those of its
    conditional at the means of the others, which maximises the bound in that block. The energy is affine in
    each unit's statistics, so the gradient at mean statistics is the gradient of the bound's expected energy.
    **Biased**: it climbs the bound, not the likelihood. Where the posterior is one layer it is not needed,
    and estimators do not use it.

    :param passes: over the latent layers, at least 1.
    :raises ArgumentError: for another number.

    **References**

    1. Salakhutdinov, Hinton (2009), *Deep Boltzmann machines*, section 3.1.

    **Example**

    >>> import jax, ebmpp
    >>> deep = ebmpp.layered(v=ebmpp.Bernoulli(9), h1=ebmpp.Bernoulli(4), h2=ebmpp.Bernoulli(3))
    >>> fit = ebmpp.fit(deep, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=3,
    ...                 estimator=ebmpp.PCD(num_chains=10, posterior=ebmpp.estimators.MeanField(10)),
    ...                 progress_bar=False)
    >>> sorted(fit.params)
    ['h1', 'h1:h2', 'h2', 'v', 'v:h1']
    """

    passes: int = 20

    def __post_init__(self) -> None:
        checks.set_counts(self, "passes")

    def statistics(self, graph: FactorGraph, params: Params, rows: Rows) -> Statistics:
        """Mean statistics of every block given the rows; the visible blocks' are their own.

        :param rows: the visible blocks, ``(rows, *shape)`` each.
        :return: ``(rows, *statistic_shape)`` a block.
        """

        def one(row: State) -> Statistics:
            return mean_field(graph, params, graph.statistics(row), self.passes)[0]

        return jax.vmap(one)(dict(rows))
