# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A sweep over all sites of a block that follows from a model: discrete layers, then continuous sites."""

from collections.abc import Callable
import functools
import itertools
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.errors import IntractableError, StateError
from ebmpp.graph.coloring import color_units
from ebmpp.ppl.conditionals import COLUMNS, Conditionals, Layer, Sites
from ebmpp.ppl.continuous import ContinuousSite
from ebmpp.ppl.dependence import Terms
from ebmpp.ppl.model_clusters import ModelClusters
from ebmpp.ppl.posterior import Posterior, Reading
from ebmpp.ppl.sites import Call

_FEW = 8  # layers that nobody needs be asked for
_CLUSTERS = 1 << 17
_CONTINUOUS = 1 << 16  # what the keys of continuous sites are folded with beside their numbers


class ModelSweep:
    """The sites of a block, and how each of them is drawn given everything else.

    :param read: the model.
    :param unit_by_unit: whether discrete units may be drawn one at a time where all of them interact.
    :param clusters: whether a sweep begins with a move of clusters of discrete units.
    :raises IntractableError: for sites that cannot be drawn, or not many units at once; and for clusters
        where units do not interact in pairs.
    """

    def __init__(self, read: Reading, unit_by_unit: bool, clusters: bool) -> None:
        self.sites = read.sites
        self.finite = tuple(name for name in read.sites if name not in read.continuous)
        self.posterior = Posterior(read, self.finite)
        self.conditionals = None
        if self.finite:
            tables = {site: v.table for site, v in self.posterior.values.items()}
            terms = Terms(self.posterior.program, self.posterior.arguments.arrays, tables)
            self.posterior.relied |= terms.relied
            self.conditionals = _in_layers(self.posterior, terms, unit_by_unit)
        if clusters and not self.finite:
            raise IntractableError("from_model: clusters=True is for discrete sites, and there are none")
        self.clusters = ModelClusters(self.posterior) if clusters else None
        self.continuous = tuple(ContinuousSite(read, name) for name in read.continuous)

    # -- what surrounds a part of the block ----------------------------------------------------------

    def check(self, values: Sites) -> None:
        """:raises StateError: for other sites than the block's."""
        if set(values) != set(self.sites):
            raise StateError(
                f"the block has sites {sorted(self.sites)}, and was given {sorted(values)}: name the same "
                "sites in numpyro.infer.Gibbs([(block, sites), ...])"
            )

    def apart(self, values: Sites, call: Call) -> tuple[dict[str, Array], Call]:
        """The block's own sites among all of a model's, and what surrounds them.

        :raises StateError: for missing sites.
        """
        own = {site: jnp.asarray(values[site]) for site in self.sites if site in values}
        self.check(own)
        siblings = {site: jnp.asarray(v) for site, v in values.items() if site not in own}
        return own, call._replace(siblings=siblings)

    def given(self, posterior: Posterior, values: Sites, call: Call) -> dict[int, Any]:
        """The inputs of a part's program, the block's other sites being among its siblings."""
        own = {name: values[name] for name in posterior.sites}
        others = {name: v for name, v in values.items() if name not in own}
        return posterior.inputs(own, call._replace(siblings={**call.siblings, **others}))

    def log_density(self, values: Sites, call: Call) -> Array:
        """Of the model."""
        program = self.posterior.program
        return program.run(self.given(self.posterior, values, call), [program.output])[program.output]

    # -- sweeps --------------------------------------------------------------------------------------

    def __call__(
        self, values: Sites, call: Call, keys: Array, beta: Any = None, backward: bool = False
    ) -> tuple[dict[str, Array], Array]:
        """All sites once, and how many units kept their values for want of a law.

        :param keys: words of this sweep, ``(2,)``.
        :param beta: the power of the density that is drawn from; 1 unless given.
        :param backward: the last layer first: the reversal of the sweep.
        """
        self.check(values)
        steps: list[Callable[..., tuple[dict[str, Array], Array]]] = []
        if self.clusters is not None:
            steps.append(functools.partial(self._cluster, self.clusters))
        if self.conditionals is not None:
            steps.append(functools.partial(self._discrete, self.conditionals))
        steps += [functools.partial(self._site, number) for number in range(len(self.continuous))]
        kept = jnp.zeros((), jnp.int32)
        for step in steps[::-1] if backward else steps:
            moved, more = step(values, call, keys, beta, backward)
            values, kept = {**values, **moved}, kept + more
        return dict(values), kept

    def _cluster(
        self, move: ModelClusters, values: Sites, call: Call, keys: Array, beta: Any, backward: bool
    ) -> tuple[dict[str, Array], Array]:
        own = {name: values[name] for name in self.finite}
        given = self.given(self.posterior, values, call)
        return move(own, given, random.fold_in(keys, 0, _CLUSTERS), beta), jnp.zeros((), jnp.int32)

    def _discrete(
        self, laws: Conditionals, values: Sites, call: Call, keys: Array, beta: Any, backward: bool
    ) -> tuple[dict[str, Array], Array]:
        own = {name: values[name] for name in self.finite}
        given = self.given(self.posterior, values, call)
        return laws.sweep(own, given, lambda layer, logits: _draw(keys, layer, logits, beta), backward)

    def _site(
        self, number: int, values: Sites, call: Call, keys: Array, beta: Any, backward: bool
    ) -> tuple[dict[str, Array], Array]:
        site = self.continuous[number]
        law = site.law(values[site.name], self.given(site.posterior, values, call))
        new, kept = site.draw(law, random.fold_in(keys, number, _CONTINUOUS), 1.0 if beta is None else beta)
        return {site.name: new.astype(values[site.name].dtype)}, kept


def _draw(keys: Array, layer: Layer, logits: Array, beta: Any) -> tuple[Array, Array]:
    """Values of a layer, by number, and which of them had a law."""
    if beta is not None:
        logits = jnp.where(jnp.isneginf(logits), logits, beta * logits)
    uniforms = random.uniform(random.words(random.fold_in(keys, layer.number), len(logits)))
    if logits.shape[1] > COLUMNS:
        drawn = random.inverse_cdf(uniforms, jax.nn.softmax(logits, -1))
        return drawn, jnp.isfinite(logits.max(-1))
    # the same, value by value: XLA on CPU is five times slower along a short last axis
    columns = [logits[:, k] for k in range(logits.shape[1])]
    top = functools.reduce(jnp.maximum, columns)
    cumulated = list(itertools.accumulate(jnp.exp(column - top) for column in columns))
    threshold = uniforms * cumulated[-1]
    drawn = sum(((c <= threshold).astype(jnp.int32) for c in cumulated[:-1]), jnp.zeros(len(top), jnp.int32))
    return drawn, jnp.isfinite(top)


def _in_layers(posterior: Posterior, terms: Terms, unit_by_unit: bool) -> Conditionals:
    """:raises IntractableError: where hardly two units can be drawn at once, and nobody asked for that."""
    size, edges = terms.sets.size, terms.edges
    if edges is not None:
        colors = color_units(size, edges) if len(edges) else np.zeros(size, int)
        layers = int(colors.max(initial=0)) + 1
        if layers <= _FEW or 2 * layers <= size:
            return Conditionals(posterior, terms, colors)
    if unit_by_unit:
        return Conditionals(posterior, None, np.arange(size))
    values = max(len(v.table) for v in posterior.values.values())
    together = terms.most_together
    all_of = f"all {size} units" if together == size else f"up to {max(together, 2)} of the {size} units"
    raise IntractableError(
        f"from_model: {all_of} of sites {list(posterior.sites)} interact with one another (one term of the "
        "log density reads them, as a regression reads all its indicators), so that hardly two can be drawn "
        f"at once. One unit at a time a sweep takes {size} x {values} = {size * values} evaluations of the "
        "model's log density; ask for that with unit_by_unit=True, or declare the graph: GibbsBlock(graph, "
        "sites, params)"
    )
