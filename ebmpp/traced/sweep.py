# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A sweep over all sites of a block that follows from a model: discrete layers, then continuous sites."""

from collections.abc import Callable, Sequence
import functools
import itertools
import math
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.errors import IntractableError, StateError
from ebmpp.graph.factors.coloring import color_units
from ebmpp.traced.augmented import Augmented, priors_with_latents, scaled
from ebmpp.traced.block import Call
from ebmpp.traced.clusters import ModelClusters
from ebmpp.traced.conditionals import COLUMNS, Conditionals, Layer, Sites
from ebmpp.traced.continuous import ContinuousSite
from ebmpp.traced.dependence import Terms
from ebmpp.traced.posterior import Posterior, Reading

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
        self.conditionals = _conditionals(read, self.posterior, unit_by_unit) if self.finite else None
        #: the density that discrete units are drawn by, with the latents of energy priors if these tie them
        self.drawn = self.posterior if self.conditionals is None else self.conditionals.posterior
        if clusters and not self.finite:
            raise IntractableError("from_model: clusters=True is for discrete sites, and there are none")
        self.clusters = ModelClusters(self.drawn) if clusters else None
        self.continuous = tuple(ContinuousSite(read, name) for name in read.continuous)

    @property
    def augmented(self) -> Augmented | None:
        """Of the latents that are drawn along; None without such."""
        return self.drawn if isinstance(self.drawn, Augmented) else None

    @functools.cached_property
    def collapsed(self) -> Conditionals | None:
        """Laws of the discrete units given everything else, latents summed out."""
        if self.augmented is None:
            return self.conditionals
        size = sum(math.prod(self.posterior.shapes[name]) for name in self.finite)
        return Conditionals(self.posterior, None, np.arange(size))

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
        """The inputs of a part's program; the block's other sites, and latents, are among its siblings."""
        return posterior.inputs(*self._around(posterior, values, call))

    def _around(self, posterior: Posterior, values: Sites, call: Call) -> tuple[dict[str, Array], Call]:
        own = {name: values[name] for name in posterior.sites}
        others = {name: v for name, v in values.items() if name not in own}
        return own, call._replace(siblings={**call.siblings, **others})

    def log_density(self, values: Sites, call: Call) -> Array:
        """Of the model, joint with the latents that are drawn along."""
        program = self.drawn.program
        return program.run(self.given(self.drawn, values, call), [program.output])[program.output]

    # -- latents -------------------------------------------------------------------------------------

    def with_latents(self, values: Sites, call: Call, keys: Array, beta: Any = None) -> dict[str, Array]:
        """The block's sites, and latents drawn given everything else where there are such.

        :param keys: words, ``(2,)``.
        :param beta: the power of the joint density that is drawn from; 1 unless given.
        """
        if self.augmented is None:
            return dict(values)
        own, around = self._around(self.augmented, self.without_latents(values), call)
        return {**values, **self.augmented.draw(own, around, keys, beta)}

    def couple_latents(
        self, first: tuple[Sites, Call], second: tuple[Sites, Call], keys: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """The sites of two chains, each with latents, which are coupled."""
        if self.augmented is None:
            return dict(first[0]), dict(second[0])
        drawn = self.augmented.couple(
            *(self._around(self.augmented, *side) for side in (first, second)), keys
        )
        return {**first[0], **drawn[0]}, {**second[0], **drawn[1]}

    def log_law(self, values: Sites, whole: Sites, call: Call) -> Array:
        """log p(h | values) of the latents h in ``whole``, up to what does not depend on the values."""
        if self.augmented is None:
            return jnp.zeros(())
        return self.augmented.log_law(*self._around(self.augmented, values, call), whole)

    def without_latents(self, values: Sites) -> dict[str, Array]:
        """The sites alone."""
        return {name: values[name] for name in self.sites}

    # -- sweeps --------------------------------------------------------------------------------------

    def __call__(
        self, values: Sites, call: Call, keys: Array, beta: Any = None, backward: bool = False
    ) -> tuple[dict[str, Array], Array]:
        """All sites once, and how many units kept their values for want of a law.

        :param values: the sites; where latents are drawn along these too, which a sweep that goes forward
            does not read.
        :param keys: words of this sweep, ``(2,)``.
        :param beta: the power of the density that is drawn from; 1 unless given.
        :param backward: the last layer first: the reversal of the sweep.
        :return: the first of them with latents where such are drawn along.
        """
        steps: list[Callable[..., tuple[dict[str, Array], Array]]] = []
        if self.augmented is not None:
            steps.append(self._latents)
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

    def _latents(
        self, values: Sites, call: Call, keys: Array, beta: Any, backward: bool
    ) -> tuple[dict[str, Array], Array]:
        return self.with_latents(values, call, keys, beta), jnp.zeros((), jnp.int32)

    def _cluster(
        self, move: ModelClusters, values: Sites, call: Call, keys: Array, beta: Any, backward: bool
    ) -> tuple[dict[str, Array], Array]:
        own = {name: values[name] for name in self.finite}
        given = self.given(self.drawn, values, call)
        return move(own, given, random.fold_in(keys, 0, _CLUSTERS), beta), jnp.zeros((), jnp.int32)

    def _discrete(
        self, laws: Conditionals, values: Sites, call: Call, keys: Array, beta: Any, backward: bool
    ) -> tuple[dict[str, Array], Array]:
        own = {name: values[name] for name in self.finite}
        given = self.given(self.drawn, values, call)
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


def _conditionals(read: Reading, posterior: Posterior, unit_by_unit: bool) -> Conditionals:
    """:raises IntractableError: where hardly two units can be drawn at once, and nobody asked for that."""
    terms, powers, joint = _terms(posterior), scaled(read, posterior.sites), None
    if priors_with_latents(read, posterior.sites) and not powers:
        augmented = Augmented(read, posterior.sites)
        joint = _in_layers(augmented, _terms(augmented))
    # latents are one layer more, and better summed out where that takes no more layers
    most = math.inf if joint is None else joint.num_layers + 1
    plain = None if terms.most_together > most else _in_layers(posterior, terms)
    if joint is not None and (plain is None or plain.num_layers > most):
        return joint
    if plain is not None:
        return plain
    if unit_by_unit:
        return Conditionals(posterior, None, np.arange(terms.sets.size))
    raise IntractableError(_too_many(posterior, terms, powers))


def _terms(posterior: Posterior) -> Terms:
    tables = {site: v.table for site, v in posterior.values.items()}
    terms = Terms(posterior.program, posterior.arguments.arrays, tables)
    posterior.relied |= terms.relied
    return terms


def _in_layers(posterior: Posterior, terms: Terms) -> Conditionals | None:
    """Laws by layers; None where hardly two units can be drawn at once."""
    size, edges = terms.sets.size, terms.edges
    if edges is None:
        return None
    colors = color_units(size, edges) if len(edges) else np.zeros(size, int)
    layers = int(colors.max(initial=0)) + 1
    return Conditionals(posterior, terms, colors) if layers <= _FEW or 2 * layers <= size else None


def _too_many(posterior: Posterior, terms: Terms, powers: Sequence[str]) -> str:
    size, together = terms.sets.size, terms.most_together
    values = max(len(v.table) for v in posterior.values.values())
    all_of = f"all {size} units" if together == size else f"up to {max(together, 2)} of the {size} units"
    told = ""
    if powers:
        told = (
            f"The prior of site {powers[0]!r} is scaled (numpyro.handlers.scale), so that its latents cannot "
            "be drawn along, which would take the units apart. "
        )
    return (
        f"from_model: {all_of} of sites {list(posterior.sites)} interact with one another (one term of the "
        "log density reads them, as a regression reads all its indicators), so that hardly two can be drawn "
        f"at once. {told}One unit at a time a sweep takes {size} x {values} = {size * values} evaluations of "
        "the model's log density; ask for that with unit_by_unit=True, or declare the graph: "
        "GibbsBlock(graph, sites, params)"
    )
