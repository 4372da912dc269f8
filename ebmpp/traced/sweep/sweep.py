# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A sweep over all sites of a block of a model: discrete layers, then continuous sites."""

from collections.abc import Sequence
import functools
import math
from typing import Any

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.core import SiteArrays, random, select
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.errors import IntractableError
from ebmpp.graph.coloring import color_units
from ebmpp.moves.forests import forest_layers
from ebmpp.traced.block import Coupled
from ebmpp.traced.model import DrawnSites, Inputs, ModelInfo
from ebmpp.traced.sweep.augmented import Augmented, priors_with_latents
from ebmpp.traced.sweep.conditionals import Conditionals
from ebmpp.traced.sweep.continuous import continuous_site
from ebmpp.traced.sweep.enumerated import Enumerated
from ebmpp.traced.sweep.forests import ForestLayers
from ebmpp.traced.sweep.layers import UnitLayers
from ebmpp.traced.sweep.posterior import ModelDensity
from ebmpp.traced.sweep.sequential import Sequential

_FEW_LAYERS = 8  # that need no permission
_FEW_STATES = 64  # of all units, which are then drawn jointly by default
_MOST_STATES = 2**22  # of all edges of a forest that is drawn jointly by default


class BlockSweep:
    """The sites of a block, and how each of them is drawn given everything else.

    :param info: the model.
    :param sequential: True if discrete units may be drawn sequentially where all of
        them interact.
    :param how: "forest" to draw discrete units by layers that are forests, "units" by
        layers of units that do not interact; "auto" the former where all units form a
        forest.
    :raises IntractableError: for sites that cannot be drawn, or not many units at once.
    """

    def __init__(self, info: ModelInfo, sequential: bool, how: str) -> None:
        self.info = info
        self.finite = tuple(name for name in info.sites if name not in info.continuous)
        self.posterior = ModelDensity(info, self.finite)
        self.conditionals: Conditionals | None = None
        #: the density of the discrete units, joint with the latents of energy priors if
        #: these are drawn too
        self.joint = self.posterior
        if self.finite:
            self.conditionals = _conditionals(self.posterior, sequential, how)
            self.joint = self.conditionals.posterior
        self.augmented = self.joint if isinstance(self.joint, Augmented) else None
        self.continuous = tuple(continuous_site(info, s) for s in info.continuous)
        parts = self.augmented, self.conditionals
        self.discrete: list[Any] = [part for part in parts if part is not None]
        self.parts: list[Any] = [*self.discrete, *self.continuous]

    @functools.cached_property
    def collapsed(self) -> Conditionals | None:
        """Conditionals of the discrete units given everything else, latents summed out."""
        return Sequential(self.posterior) if self.augmented else self.conditionals

    @functools.cached_property
    def sums(self) -> ForestLayers:
        """Sums over the states of all discrete units, if these form a forest."""
        drawn = self.conditionals
        is_joint = isinstance(drawn, ForestLayers) and drawn.num_layers == 1
        if is_joint and not self.augmented:
            return drawn
        if drawn is not None:
            terms = self.posterior.terms(products=False)
            if terms.is_forest:
                colors = np.zeros(terms.sets.size, int)
                return ForestLayers(self.posterior, terms, colors, drawn)
        raise IntractableError(
            f"from_model: the discrete units of sites {list(self.info.sites)} must "
            "form a forest to be summed out. Leave sites that join them in cycles to "
            "another block"
        )

    def with_latents(self, inputs: Inputs, keys: Array) -> Inputs:
        """Add latents drawn given everything else to the sites, where there are any."""
        if self.augmented is None:
            return inputs
        values, context = inputs
        latents, _ = self.augmented.move(inputs, keys)
        return {**values, **latents}, context

    def __call__(
        self,
        inputs: Inputs,
        keys: Array,
        beta: Array | None = None,
        backward: bool = False,
    ) -> DrawnSites:
        """Draw all sites once.

        :param inputs: the sites, and latents where these are drawn too, which a forward
            sweep ignores; and everything else.
        :param keys: words of this sweep, ``(2,)``.
        :param beta: exponent of the density that is drawn from; 1 by default.
        :param backward: the last layer first, which is the reversal of the sweep.
        :return: the sites, with latents, and the number of units that kept their value
            because their conditional is degenerate.
        """
        values, context = inputs
        degenerate = jnp.int32(0)
        for part in self.parts[::-1] if backward else self.parts:
            moved, more = part.move((values, context), keys, beta, backward)
            values = {**values, **moved}
            degenerate += more
        return values, degenerate

    def begin(
        self, inputs: Inputs, held: Sequence[str], keys: Array
    ) -> tuple[SiteArrays, SiteArrays]:
        """Draw the discrete sites but those ``held``, given the continuous ones.

        :return: the sites, and a mask of the conditionals that are nan,
            ``(*shape, values)`` for each site.
        """
        values, context = self.with_latents(inputs, keys)
        result = {}
        if self.conditionals is not None:
            uniforms = random.uniforms(keys, self.conditionals.size)
            inputs = values, context
            moved, table = self.conditionals.begin(inputs, held, uniforms)
            values = {**values, **moved}
            result = self.conditionals.by_site(jnp.isnan(table))
        for site in self.continuous:
            mask = site.invalid(site.derivatives((values, context)))
            result[site.name] = mask.reshape(*site.shape, 1)
        return select(values, self.info.sites), result

    def walk(self, inputs: Inputs, keys: Array) -> tuple[SiteArrays, Array]:
        """Return random values of the sites, and the change that their conditionals imply."""
        values, context = inputs
        change = jnp.zeros(())
        augmented = self.augmented
        if self.conditionals is not None:
            before = self.with_latents(inputs, keys)
            moved, change = self.conditionals.walk(before, keys)
            values = {**values, **moved}
            if augmented is not None:  # p(z) = p(z, h) / p(h | z), at one h for both
                latents, _ = before
                change += augmented.log_conditional(inputs, latents)
                change -= augmented.log_conditional((values, context), latents)
        for site in self.continuous:
            moved, more = site.walk((values, context), keys)
            values = {**values, **moved}
            change += more
        return dict(values), change

    def couple(self, first: Inputs, second: Inputs, keys: Array) -> Coupled:
        """Draw the sites of two chains, unit by unit or group by group coupled maximally.

        Which units interact is the same in both chains, and so are their layers.

        :return: the sites of both, and True if a conditional is degenerate.
        """
        x, x_context = first
        y, y_context = second
        broken = jnp.bool_(False)
        for part in self.parts:
            new_x, new_y, more = part.couple((x, x_context), (y, y_context), keys)
            x = {**x, **new_x}
            y = {**y, **new_y}
            broken |= more
        return select(x, self.info.sites), select(y, self.info.sites), broken


def _conditionals(posterior: ModelDensity, sequential: bool, how: str) -> Conditionals:
    """Return the draws of discrete units, jointly if ``how`` says so."""
    units = conditionals_by_units(posterior, sequential or how == "forest")
    terms = units.terms if isinstance(units, UnitLayers) else None
    if how == "units":
        return units
    if how == "auto" and not (terms and terms.is_forest):
        is_joint = units.num_layers > 1 and units.num_values**units.size <= _FEW_STATES
        return Enumerated(units) if is_joint else units
    if terms is None or terms.has_products:
        terms = units.posterior.terms(products=False)
    edges = terms.edges
    num_states = 0 if edges is None else len(edges) * units.num_values**2
    is_default = num_states <= _MOST_STATES and terms.is_forest
    if (how == "auto" and not is_default) or (edges is not None and not len(edges)):
        return units
    colors = None if edges is None else forest_layers(edges, [0] * units.size)
    if colors is None or colors.max() >= _FEW_LAYERS:
        raise IntractableError(
            f"from_model: the discrete units of sites {list(posterior.sites)} must "
            f"split into at most {_FEW_LAYERS} forests, and too many of them interact. "
            "Omit joint='forest'"
        )
    return ForestLayers(units.posterior, terms, colors, units)


def conditionals_by_units(posterior: ModelDensity, sequential: bool) -> Conditionals:
    """Raise an IntractableError if hardly two units can be drawn at once."""
    info = posterior.info
    sites = posterior.sites
    joint = None
    terms = posterior.terms()
    if priors_with_latents(info, sites):
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
        return Sequential(posterior)
    size = terms.sets.size
    cost = size * posterior.num_values
    raise IntractableError(
        f"from_model: hardly two of all {size} units of sites {list(sites)} can be "
        "drawn at once, as too many interact. Declare the graph by GibbsBlock(graph, "
        f"sites, params), or draw one unit at a time with sequential=True, at {cost} "
        "evaluations of the model per sweep"
    )


def _in_layers(posterior: ModelDensity, terms: SumOfTerms) -> Conditionals | None:
    """Return conditionals by layers; None where hardly two units can be drawn at once."""
    size = terms.sets.size
    edges = terms.edges
    if edges is None:
        return None
    colors = color_units(size, edges) if len(edges) else np.zeros(size, int)
    num_layers = int(colors.max(initial=0)) + 1
    if num_layers > _FEW_LAYERS and 2 * num_layers > size:
        return None
    return UnitLayers(posterior, terms, colors)
