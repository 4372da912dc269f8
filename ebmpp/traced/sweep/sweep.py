# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A sweep over all sites of a block of a model: discrete layers, then continuous sites."""

from collections.abc import Callable
import functools
import itertools
import math
from typing import Any, cast

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.errors import IntractableError
from ebmpp.families import Categorical
from ebmpp.graph.factors.coloring import color_units
from ebmpp.traced.block import Sites
from ebmpp.traced.dependence import Terms
from ebmpp.traced.model import Context, ModelInfo
from ebmpp.traced.sweep.augmented import Augmented, priors_with_latents, scaled_priors
from ebmpp.traced.sweep.clusters import Clusters
from ebmpp.traced.sweep.continuous import ContinuousSite
from ebmpp.traced.sweep.layers import MOST_COLUMNS, Conditionals, Layer
from ebmpp.traced.sweep.posterior import Posterior

_FEW_LAYERS = 8  # that need no permission
_CLUSTERS, _CONTINUOUS = 1 << 17, 1 << 16  # folded into keys beside a part's number
_Part = Callable[[Sites, Context, Array, Any, bool], tuple[Sites, Array]]


class Sweep:
    """The sites of a block, and how each of them is drawn given everything else.

    :param info: the model.
    :param sequential: True if discrete units may be drawn sequentially where all of them interact.
    :param clusters: True if a sweep begins with a move of clusters of discrete units.
    :raises IntractableError: for sites that cannot be drawn, or not many units at once; and for clusters
        where units do not interact in pairs.
    """

    def __init__(self, info: ModelInfo, sequential: bool, clusters: bool) -> None:
        self.info = info
        self.finite = tuple(name for name in info.sites if name not in info.continuous)
        self.posterior = Posterior(info, self.finite)
        self.conditionals = _conditionals(self.posterior, sequential) if self.finite else None
        #: the density of the discrete units, joint with the latents of energy priors if these are drawn too
        self.joint = self.posterior if self.conditionals is None else self.conditionals.posterior
        self.augmented = self.joint if isinstance(self.joint, Augmented) else None
        if clusters and not self.finite:
            raise IntractableError("from_model: clusters=True needs discrete sites. Leave clusters away")
        self.clusters = Clusters(self.joint) if clusters else None
        self.continuous = tuple(ContinuousSite(info, name) for name in info.continuous)

    @functools.cached_property
    def collapsed(self) -> Conditionals | None:
        """Conditionals of the discrete units given everything else, latents summed out."""
        if self.augmented is None:
            return self.conditionals
        size = sum(math.prod(self.posterior.shapes[name]) for name in self.finite)
        return Conditionals(self.posterior, None, np.arange(size))

    def log_density(self, values: Sites, context: Context) -> Array:
        """Return the log density of the model, joint with the latents that are drawn too."""
        return self.joint.log_density(self.joint.inputs(values, context))

    def table(self, values: Sites, context: Context) -> Array:
        """Return log probabilities of all discrete units, up to a constant, ``(units, values)``."""
        if self.conditionals is None:
            return jnp.zeros((0, 1))
        sites = {name: values[name] for name in self.finite}
        return self.conditionals.table(sites, self.joint.inputs(values, context))

    def with_latents(
        self, values: Sites, context: Context, keys: Array, beta: Any = None
    ) -> dict[str, Array]:
        """Return the sites, and latents drawn given everything else where there are any."""
        if self.augmented is None:
            return dict(values)
        return {**values, **self.augmented.draw(self.without_latents(values), context, keys, beta)}

    def without_latents(self, values: Sites) -> dict[str, Array]:
        """Return the sites alone."""
        return {name: values[name] for name in self.info.sites}

    def log_conditional(self, values: Sites, latents: Sites, context: Context) -> Array:
        """Return log p(latents | values), up to a constant in the values."""
        return (
            jnp.zeros(())
            if self.augmented is None
            else self.augmented.log_conditional(values, context, latents)
        )

    # -- one chain -------------------------------------------------------------------------------

    def __call__(
        self, values: Sites, context: Context, keys: Array, beta: Any = None, backward: bool = False
    ) -> tuple[dict[str, Array], Array]:
        """Draw all sites once.

        :param values: the sites, and latents where these are drawn too; a forward sweep ignores those.
        :param keys: words of this sweep, ``(2,)``.
        :param beta: exponent of the density that is drawn from; 1 by default.
        :param backward: the last layer first, which is the reversal of the sweep.
        :return: the sites, with latents, and the number of units that kept their value because their
            conditional is degenerate.
        """
        parts: list[_Part] = []
        if self.augmented is not None:
            parts.append(self._draw_latents)
        if self.clusters is not None:
            parts.append(functools.partial(self._move_clusters, self.clusters))
        if self.conditionals is not None:
            parts.append(functools.partial(self._draw_discrete, self.conditionals))
        parts += [functools.partial(self._draw_continuous, number) for number in range(len(self.continuous))]
        degenerate = jnp.zeros((), jnp.int32)
        for part in parts[::-1] if backward else parts:
            moved, more = part(values, context, keys, beta, backward)
            values, degenerate = {**values, **moved}, degenerate + more
        return dict(values), degenerate

    def _draw_latents(
        self, values: Sites, context: Context, keys: Array, beta: Any, backward: bool
    ) -> tuple[Sites, Array]:
        return self.with_latents(values, context, keys, beta), jnp.zeros((), jnp.int32)

    def _move_clusters(
        self, move: Clusters, values: Sites, context: Context, keys: Array, beta: Any, backward: bool
    ) -> tuple[Sites, Array]:
        sites, inputs = {name: values[name] for name in self.finite}, self.joint.inputs(values, context)
        return move(sites, inputs, random.fold_in(keys, 0, _CLUSTERS), beta), jnp.zeros((), jnp.int32)

    def _draw_discrete(
        self,
        conditionals: Conditionals,
        values: Sites,
        context: Context,
        keys: Array,
        beta: Any,
        backward: bool,
    ) -> tuple[Sites, Array]:
        sites, inputs = {name: values[name] for name in self.finite}, self.joint.inputs(values, context)
        draw = lambda layer, logits: _draw(random.fold_in(keys, layer.number), logits, beta)
        return conditionals.sweep(sites, inputs, draw, backward)

    def _draw_continuous(
        self, number: int, values: Sites, context: Context, keys: Array, beta: Any, backward: bool
    ) -> tuple[Sites, Array]:
        site = self.continuous[number]
        at = site.derivatives(values[site.name], site.posterior.inputs(values, context))
        new, degenerate = site.draw(
            at, random.fold_in(keys, number, _CONTINUOUS), 1.0 if beta is None else beta
        )
        return {site.name: new.astype(values[site.name].dtype)}, degenerate

    # -- two chains ------------------------------------------------------------------------------

    def couple(
        self, first: tuple[Sites, Context], second: tuple[Sites, Context], keys: Array
    ) -> tuple[dict[str, Array], dict[str, Array], Array]:
        """Draw the discrete sites of two chains, each unit's two conditionals coupled maximally.

        Which units interact is the same in both chains, and so are their layers.

        :return: the sites of both, and whether a unit's conditional is degenerate.
        """
        conditionals, chains = cast(Conditionals, self.conditionals), (first, second)
        latents = ({}, {}) if self.augmented is None else self.augmented.couple(*chains, keys)
        inputs = [self.joint.inputs({**v, **h}, c) for (v, c), h in zip(chains, latents, strict=True)]
        family = Categorical(1, max(2, conditionals.num_values))

        def couple_layer(layer: Layer, carry: tuple) -> tuple:
            x, y, broken = carry
            etas = [conditionals.logits(layer, v, i) for v, i in zip((x, y), inputs, strict=True)]
            words = random.words(random.fold_in(keys, layer.number), 3 * len(etas[0])).reshape(-1, 3)
            drawn = family.couple(words, *etas)
            valid = jnp.isfinite(etas[0].max(-1)) & jnp.isfinite(etas[1].max(-1))
            x, y = (conditionals.put(layer, v, d, valid) for v, d in zip((x, y), drawn, strict=True))
            return x, y, broken | ~valid.all()

        return conditionals.walk(couple_layer, (dict(first[0]), dict(second[0]), jnp.zeros((), bool)))


def _draw(keys: Array, logits: Array, beta: Any) -> tuple[Array, Array]:
    """Return values of units, by number, and a mask of those whose conditional is not degenerate."""
    if beta is not None:
        logits = jnp.where(jnp.isneginf(logits), logits, beta * logits)
    uniforms = random.uniform(random.words(keys, len(logits)))
    if logits.shape[1] > MOST_COLUMNS:
        drawn = random.inverse_cdf(uniforms, jax.nn.softmax(logits, -1))
        return drawn, jnp.isfinite(logits.max(-1))
    # the same column by column: XLA on CPU is five times slower along a short last axis
    columns = [logits[:, k] for k in range(logits.shape[1])]
    top = functools.reduce(jnp.maximum, columns)
    cumulated = list(itertools.accumulate(jnp.exp(column - top) for column in columns))
    threshold = uniforms * cumulated[-1]
    drawn = sum(((c <= threshold).astype(jnp.int32) for c in cumulated[:-1]), jnp.zeros(len(top), jnp.int32))
    return drawn, jnp.isfinite(top)


def _conditionals(posterior: Posterior, sequential: bool) -> Conditionals:
    """Raise an IntractableError where hardly two units can be drawn at once, without ``sequential``."""
    info, sites, joint = posterior.info, posterior.sites, None
    terms, scaled = posterior.terms(), scaled_priors(info, sites)
    if priors_with_latents(info, sites) and not scaled:
        augmented = Augmented(info, sites)
        joint = _in_layers(augmented, augmented.terms())
    # latents are one more layer, and better summed out where that takes no more layers
    most = math.inf if joint is None else joint.num_layers + 1
    collapsed = None if terms.most_together > most else _in_layers(posterior, terms)
    if joint is not None and (collapsed is None or collapsed.num_layers > most):
        return joint
    if collapsed is not None:
        return collapsed
    if sequential:
        return Conditionals(posterior, None, np.arange(terms.sets.size))
    size, together = terms.sets.size, max(terms.most_together, 2)
    cost = size * max(len(v.table) for v in posterior.values.values())
    number = f"all {size}" if together == size else f"up to {together} of the {size}"
    reason = (
        f", as the prior of site {scaled[0]!r} is scaled and its latents cannot be drawn" if scaled else ""
    )
    raise IntractableError(
        f"from_model: {number} units of sites {list(sites)} interact in one term of the log density{reason}. "
        "Declare the graph by GibbsBlock(graph, sites, params), or draw one unit at a time with "
        f"sequential=True, at {cost} evaluations of the model per sweep"
    )


def _in_layers(posterior: Posterior, terms: Terms) -> Conditionals | None:
    """Return conditionals by layers; None where hardly two units can be drawn at once."""
    size, edges = terms.sets.size, terms.edges
    if edges is None:
        return None
    colors = color_units(size, edges) if len(edges) else np.zeros(size, int)
    layers = int(colors.max(initial=0)) + 1
    return Conditionals(posterior, terms, colors) if layers <= _FEW_LAYERS or 2 * layers <= size else None
