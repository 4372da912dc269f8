# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""The log likelihood of all data and of each observation, with discrete units summed out.

For observation i it is :math:`\log p(y_i \mid y_{-i}, \theta)`, the difference of the
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

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
from numpyro.primitives import Messenger

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import SiteArrays, expand, select
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.distribution.tractability import base_of
from ebmpp.traced.block import SiteValues
from ebmpp.traced.data import Message, Replaced, with_log_density
from ebmpp.traced.model import Inputs, ModelInfo
from ebmpp.traced.sweep.forests import ForestLayers
from ebmpp.traced.sweep.posterior import ModelDensity

_MOST_AT_ONCE = 2**20  # entries of the tables that are summed in parallel
_WEIGHTS = ": weights"


class Likelihood(ModelDensity):
    """A model's log density with weights of its sites; 0 leaves an observation or prior out.

    :param sums: over the discrete sites; None without any.
    """

    def __init__(self, info: ModelInfo, sums: ForestLayers | None) -> None:
        #: by discrete site, the number of values of each unit
        self.num_possible = {
            name: np.broadcast_to(table.valid.sum(0), info.latent[name].shape)
            for name, table in (sums.posterior.values if sums else {}).items()
        }
        weights = {}
        self.observed = []
        for name, site in info.trace(info.latent, info.arguments.arrays).items():
            if site["type"] == "sample" and np.size(site["value"]):
                rows = base_of(site["fn"]).log_prob(site["value"])
                shape = site["fn"].batch_shape or jnp.shape(rows)
                weights[name + _WEIGHTS] = jnp.ones(shape)
                self.observed += [name] if site["is_observed"] else []
        self.weights = weights
        super().__init__(info, sums.posterior.sites if sums else info.sites, weights)
        self.sums: ForestLayers | None = None
        #: weights of the observations
        self.ones = select(weights, [name + _WEIGHTS for name in self.observed])
        if sums is None:
            return
        terms = self.terms(products=False)
        self.sums = ForestLayers(self, terms, sums.colors, sums.units)
        if self.observed:
            self._group(self.sums)

    def _group(self, sums: ForestLayers) -> None:
        """Group observations of which no two read the same tree of units."""

        def density(units, siblings, arguments):
            return self._log_density({}, {**units, **siblings}, arguments)

        prototypes = {**self.info.latent, **self.weights}
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

    def _log_density(
        self, sites: SiteValues, siblings: SiteValues, arguments: Sequence
    ) -> Array:
        model = _Weighted(self.info.model, siblings, self.num_possible)
        return self.info.log_density_of(model, {**sites, **siblings}, arguments)

    def log_likelihood(self, inputs: Inputs, unweighted: Sequence[str]) -> Array:
        """Return the log density of the data without the priors of some sites."""
        keys = [name + _WEIGHTS for name in unweighted]
        inputs = self._weighted(inputs, {key: 0 * self.weights[key] for key in keys})
        return self.sums.log_sum(inputs) if self.sums else self.log_density(inputs)

    def _weighted(self, inputs: Inputs, weights: SiteArrays) -> Inputs:
        values, context = inputs
        siblings = {**context.siblings, **self.weights, **weights}
        return values, context._replace(siblings=siblings)

    def pointwise(self, inputs: Inputs) -> SiteArrays:
        """Return the log likelihood of all observations by site."""
        ones, unravel = ravel_pytree(self.ones)

        def weighted(weights):
            return self._weighted(inputs, unravel(weights))

        sums = self.sums
        rest = sums.constant if sums else self.log_density
        result = jax.grad(lambda weights: rest(weighted(weights)))(ones)
        if sums and self.observed and self.pairs.size:
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
    """A model with weights of its sites, in which masked discrete units count as one value."""

    def __init__(
        self, model: Callable, weights: SiteValues, counts: Mapping[str, np.ndarray]
    ) -> None:
        super().__init__(model)
        self.weights = weights
        self.counts = counts

    def process_message(self, msg: Message) -> None:
        name = msg.get("name", "")
        weights = self.weights.get(f"{name}{_WEIGHTS}")
        if msg["type"] != "sample" or weights is None:
            return
        fn = msg["fn"]
        log_prob = base_of(fn).log_prob

        def weighted(value):
            rows = jnp.asarray(log_prob(value))
            weight = expand(weights, rows)
            return jnp.where(weight > 0, weight * rows, 0)

        msg["fn"] = result = with_log_density(fn, weighted)
        if name in self.counts:
            logs = jnp.log(self.counts[name])
            unmasked = with_log_density(fn, lambda _: logs)

            def without_masked(value):
                lost = logs.sum() - jnp.sum(unmasked.log_prob(value))
                return jnp.sum(result.log_prob(value)) - lost

            msg["fn"] = Replaced(fn, without_masked)
