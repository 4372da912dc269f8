# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""The log likelihood of each observation, with discrete units summed out.

For observation i that is :math:`\log p(y_i \mid y_{-i}, \theta)`, the difference of the
log sums with and without i. Where observations are independent given the other sites,
it is :math:`\log p(y_i \mid \theta)`. With posterior draws of theta, importance weights
proportional to its inverse give leave-one-out cross-validation:
:math:`p(\theta \mid y_{-i}) \propto p(\theta \mid y) / p(y_i \mid y_{-i}, \theta)`.

A tree of units is summed as often as observations read it, and all trees at once: once
for a mixture of any number of points, and T times for a hidden Markov chain of T steps.

**References**

1. Vehtari, Gelman, Gabry (2017), *Practical Bayesian model evaluation using
   leave-one-out cross-validation and WAIC*.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
from numpyro.primitives import Messenger

import jax
from jax import lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import SiteArrays, expand
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.distribution.tractability import base_of
from ebmpp.traced.block import SiteValues
from ebmpp.traced.data import Message, with_log_density
from ebmpp.traced.model import Inputs, ModelInfo
from ebmpp.traced.sweep.forests import ForestLayers
from ebmpp.traced.sweep.posterior import ModelDensity

_MOST_AT_ONCE = 2**20  # entries of the tables that are summed in parallel
_WEIGHTS = ": weights"


class Pointwise(ModelDensity):
    """A model's log density with a weight of each observation; 0 leaves it out.

    :param sums: over the discrete sites; None without any.
    """

    def __init__(self, info: ModelInfo, sums: ForestLayers | None) -> None:
        self.ones = {}
        for name, site in info.trace(info.latent, info.arguments.arrays).items():
            is_sample = site["type"] == "sample" and site["is_observed"]
            if is_sample and np.size(site["value"]):
                rows = base_of(site["fn"]).log_prob(site["value"])
                shape = site["fn"].batch_shape or jnp.shape(rows)
                self.ones[name + _WEIGHTS] = jnp.ones(shape)
        super().__init__(info, sums.posterior.sites if sums else info.sites, self.ones)
        self.sums: ForestLayers | None = None
        if sums is None:
            return
        terms = self.terms(products=False)
        self.sums = ForestLayers(self, terms, sums.colors, sums.units)
        self._group(self.sums)

    def _group(self, sums: ForestLayers) -> None:
        """Group observations of which no two read the same tree of units."""

        def density(units, siblings, arguments):
            return self._log_density({}, {**units, **siblings}, arguments)

        prototypes = {**self.info.latent, **self.ones}
        names = [*self.sites, *self.ones]
        program = self.info.program(density, prototypes, names)
        terms = SumOfTerms(program, self.info.arguments.arrays, {}, products=False)
        numbers = terms.numbers
        trees = sums.layers[0].forest.trees
        tree = np.full(terms.sets.size, -1)
        tree[np.concatenate([numbers[s] for s in sums.spans])] = trees
        observation = np.full(terms.sets.size, -1)
        weights = np.concatenate([numbers[w] for w in sorted(self.ones)])
        observation[weights] = np.arange(len(weights))
        edges = cast(np.ndarray, terms.edges)
        ends = np.concatenate([edges, edges[:, ::-1]])
        pairs = np.unique([observation[ends[:, 0]], tree[ends[:, 1]]], axis=1)
        #: pairs of an observation and a tree that it reads
        self.pairs = pairs[:, (pairs >= 0).all(0)]
        self.groups = np.full(len(weights), -1)
        count = np.zeros(trees.max() + 1, int)
        readers, first = np.unique(self.pairs[0], return_index=True)
        for reader, read in zip(readers, np.split(self.pairs[1], first[1:])):
            self.groups[reader] = count[read].max()
            count[read] = count[read].max() + 1

    def model_at(self, siblings: SiteValues) -> Callable:
        return _Weighted(self.info.model, siblings)

    def __call__(self, inputs: Inputs) -> SiteArrays:
        """Return the log likelihood of all observations by site."""
        values, context = inputs
        ones, unravel = ravel_pytree(self.ones)

        def weighted(weights):
            siblings = {**context.siblings, **unravel(weights)}
            return values, context._replace(siblings=siblings)

        sums = self.sums
        rest = sums.constant if sums else self.log_density
        result = jax.grad(lambda weights: rest(weighted(weights)))(ones)
        if sums and self.pairs.size:
            groups = jnp.asarray(self.groups)

            def without(number):
                """Return the log sum of each tree without a group of observations."""
                weights = jnp.where(groups == number, 0.0, 1.0)
                return sums.log_sums_by_tree(weighted(weights))

            batch = max(1, _MOST_AT_ONCE // (sums.size * sums.num_values**2))
            numbers = jnp.arange(self.groups.max() + 1)
            log_sums = lax.map(without, numbers, batch_size=batch)
            observation, tree = self.pairs
            full = sums.log_sums_by_tree(weighted(ones))
            gain = full[tree] - log_sums[groups[observation], tree]
            result = result.at[observation].add(gain)
        named = unravel(result).items()
        return {name.removesuffix(_WEIGHTS): value for name, value in named}


class _Weighted(Messenger):
    """A model with weights of its observations."""

    def __init__(self, model: Callable, values: SiteValues) -> None:
        super().__init__(model)
        self.values = values

    def process_message(self, msg: Message) -> None:
        weights = self.values.get(f"{msg.get('name')}{_WEIGHTS}")
        if msg["type"] == "sample" and weights is not None:
            log_prob = base_of(msg["fn"]).log_prob

            def weighted(value):
                rows = jnp.asarray(log_prob(value))
                weight = expand(weights, rows)
                return jnp.where(weight > 0, weight * rows, 0)

            msg["fn"] = with_log_density(msg["fn"], weighted)
