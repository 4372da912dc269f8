# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Centered gradients: the steps of the model whose statistics are taken relative to offsets."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Key, Params, Rows, Scalar, Statistics
from ebmpp.errors import ArgumentError, DeclarationError
from ebmpp.estimators.base import Batch, Estimate, Estimator, Repeats, check_estimator
from ebmpp.estimators.phases import carried_chains
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.graph.factors import Bias
from ebmpp.graph.mean_field import mean_layer

_OFFSETS = ("data", "model", "average", "zero")


class CenteredState(NamedTuple):
    """What :class:`Centered` carries."""

    inner: Any
    """The state of the estimator inside."""
    offsets: Statistics
    """A block's offset, of its statistics' shape."""
    means: Statistics
    """Mean statistics given the batch's rows, as they were at the first of its steps."""
    step: Array
    """Which of the batch's steps is next, counted from 0."""

    @property
    def chains(self) -> Any:
        """The chains of the estimator inside, for another one to go on with."""
        return carried_chains(self.inner)


@dataclasses.dataclass(frozen=True)
class Centered(Estimator):
    """Centered gradients of any estimator: the declared model, better conditioned.

    For units that are mostly off or mostly on, and for deep machines.

    A gradient step depends on the parametrisation. In the centered one every factor of two blocks sees
    statistics minus offsets, so that a change of weights does not move the means along. The model stays
    as declared: with S the map from centered params to those of the graph and J its derivative, the
    estimator's gradient g becomes the direction J J^T g, which is what the step along the centered
    gradient J^T g is in the graph's own params. S follows from the energy: a block's bias is its centered
    bias minus the natural parameter that the factors of two blocks contribute at the offsets. For a
    Boltzmann machine with offsets mu and lambda that gives::

        direction_W = g_W - mu g_c^T - g_b lambda^T
        direction_b = g_b - direction_W lambda
        direction_c = g_c - direction_W^T mu

    J J^T g is a descent direction whatever the offsets, and zero only where g is. Plain gradient steps
    along it are gradient steps of the centered model exactly (to first order where the energy of a factor
    of one's own is not linear in its params). ``gradient_norm`` in the history is that of the direction.

    The offsets begin at the data's mean (visible blocks) and at the mean of the family's default law
    (latent ones: 1/2 for units in {0, 1}). At each step they slide before the direction is formed. The
    latent means given the rows are exact where the posterior is one layer; elsewhere they are of one
    mean-field pass from the offsets, which approximates nothing but the offsets.

    :param estimator: the one inside, such as :class:`CD`, :class:`PCD`, :class:`UCD`.
    :param sliding: how far offsets move toward a step's means, in [0, 1]: mu <- mu + sliding (mean - mu).
    :param offsets: which means they follow: "data" (the batch's rows and the latents given them), "model"
        (those of the estimator's negative phase), "average" (half of each), or "zero", which keeps all
        offsets at 0 and is the estimator inside.
    :param rates: relative rates of some factors, by name, above 0; the others have 1. They scale the centered
        gradient, so that biases go along with what their factors do: J D J^T g, which an optimiser that
        scales the direction is not. A deep machine's upper layers want a third of the lowest one's.
    :raises ArgumentError: for an estimator that is none, or is centered already.
    :raises ArgumentError: for a sliding factor or rates out of range or unknown offsets.

    **References**

    1. Montavon, Mueller (2012), *Deep Boltzmann machines and the centering trick*.
    2. Melchior, Fischer, Wiskott (2016), *How to center deep Boltzmann machines*; the offsets here are
       their d, m and a with a sliding average, and 0.
    3. Upadhya, Sastry (2017), Algorithm 4. There the positive phase keeps the offsets of inner step 0
       while those of the negative one slide on, so that the direction is not zero where the gradient is;
       here both phases have the offsets of the step.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.estimators.Centered(ebmpp.CD(k=1)), progress_bar=False)
    >>> fit.estimator_state.offsets["v"].shape
    (9,)
    """

    estimator: Estimator
    sliding: float = 0.01
    offsets: str = "data"
    rates: Mapping[str, float] | tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        check_estimator("Centered: estimator", self.estimator, "an estimator such as CD(k=1)")
        if isinstance(self.estimator, Centered):
            raise ArgumentError(f"Centered: {self.estimator!r} is centered already")
        checks.number("Centered: sliding", self.sliding, least=0, most=1)
        checks.choice("Centered: offsets", self.offsets, _OFFSETS)
        given = dict(self.rates) if isinstance(self.rates, tuple) else self.rates
        given = checks.instance("Centered: rates", given, Mapping, "a dict from factor names to numbers")
        rates = {name: checks.number(f"Centered: rates[{name!r}]", r, above=0) for name, r in given.items()}
        object.__setattr__(self, "rates", tuple(rates.items()))  # which can be hashed

    @property
    def steps_per_batch(self) -> int:
        """Those of the estimator inside."""
        return self.estimator.steps_per_batch

    def quick(self, graph: FactorGraph) -> bool:
        """That of the estimator inside."""
        return self.estimator.quick(graph)

    @property
    def max_sweeps(self) -> int | None:
        """That of the estimator inside."""
        return self.estimator.max_sweeps

    def caution(self, told: Mapping[str, np.ndarray]) -> str | None:
        """That of the estimator."""
        return self.estimator.caution(told)

    # -- the state -------------------------------------------------------------------------------

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> CenteredState:
        """Offsets at the data's mean and at the mean of each latent family's default law.

        :raises DeclarationError: for a graph that has no centered form, naming the factor.
        :raises ArgumentError: for rates of factors that it does not have.
        """
        _check_closed(graph)
        for name, _ in self.rates:
            checks.choice("Centered: rates", name, tuple(f.name for f in graph.factors))
        inner = self.estimator.init(graph, params, data, batch, key)
        offsets = {b: f.mean(f.default_eta()) for b, f in graph.latent.items()}
        offsets |= {b: graph.families[b].statistics(v).mean(0) for b, v in data.items()}
        if self.offsets == "zero":
            offsets = jax.tree.map(jnp.zeros_like, offsets)
        return CenteredState(inner, offsets, offsets, jnp.zeros((), jnp.int32))

    def adopt(self, before: Any, fresh: CenteredState) -> CenteredState:
        """Go on with the offsets of a centered estimator before, and with what the one inside adopts."""
        if isinstance(before, CenteredState):
            if self.offsets != "zero":
                fresh = fresh._replace(offsets=before.offsets)
            before = before.inner
        return fresh._replace(inner=self.estimator.adopt(before, fresh.inner))

    def repeats(self, state: CenteredState, count: int) -> Repeats:
        """Those of the estimator inside, whose gradient is the likelihood's."""
        return self.estimator.repeats(state.inner, count)

    # -- a step ----------------------------------------------------------------------------------

    def estimate(
        self, graph: FactorGraph, params: Params, state: CenteredState, batch: Batch, key: Key
    ) -> Estimate:
        """The gradient of the estimator inside, then the offsets, then the direction."""
        made = self.estimator.estimate(graph, params, state.inner, batch, key)
        means = self._means(graph, params, state, batch)
        offsets = self._slide(graph, state.offsets, means, made.gradient, batch.weights.sum())
        step = (state.step + 1) % self.steps_per_batch
        direction = centered_direction(graph, params, offsets, made.gradient, dict(self.rates))
        return Estimate(direction, CenteredState(made.state, offsets, means, step), made.metrics, made.sweeps)

    def _means(self, graph: FactorGraph, params: Params, state: CenteredState, batch: Batch) -> Statistics:
        """Mean statistics given the batch's rows, at the params that the batch meets first."""
        if self.offsets == "zero" or self.sliding == 0:
            return state.means
        fresh = lambda: _data_means(graph, params, state.offsets, batch)
        if self.steps_per_batch == 1:
            return fresh()
        return lax.cond(state.step == 0, fresh, lambda: state.means)

    def _slide(
        self, graph: FactorGraph, offsets: Statistics, means: Statistics, gradient: Params, weight: Scalar
    ) -> Statistics:
        if self.offsets == "zero" or self.sliding == 0:
            return offsets
        share = {"data": 0.0, "average": 0.5, "model": 1.0}[self.offsets]
        if share:  # the gradient in a bias is the model's mean minus the data's, times the batch's weight
            scale, names = share / _nonzero(weight), _bias_names(graph)
            means = {b: m + scale * gradient[names[b]] if b in names else m for b, m in means.items()}
        return {b: o + self.sliding * (means[b] - o) for b, o in offsets.items()}


def centered_direction(
    graph: FactorGraph,
    params: Params,
    offsets: Statistics,
    gradient: Params,
    rates: Mapping[str, float] | None = None,
) -> Params:
    """J D J^T ``gradient``: J the derivative of the map from centered params to the own ones, D the rates."""
    to_own = lambda centered: _own_params(graph, centered, offsets)
    _, transposed = jax.vjp(to_own, params)
    # J depends on the factors of two blocks alone, which S leaves as they are: params will do for both.
    (centered,) = transposed(gradient)
    scaled = {name: jax.tree.map(lambda g, r=r: r * g, centered[name]) for name, r in (rates or {}).items()}
    _, direction = jax.jvp(to_own, (params,), ({**centered, **scaled},))
    return direction


def _own_params(graph: FactorGraph, centered: Params, offsets: Statistics) -> Params:
    """S: the graph's params under which its energy is the centered one, up to a constant."""
    pairs = [f for f in graph.factors if len(f.blocks) == 2]
    if not pairs:
        return centered
    # What a factor contributes at zero is there with and without offsets: only the difference is shifted.
    moved, still = (
        energy.contributed(graph, pairs, centered, at)
        for at in (offsets, jax.tree.map(jnp.zeros_like, offsets))
    )
    shifted = {
        name: centered[name] - (moved[block] - still[block]) for block, name in _bias_names(graph).items()
    }
    return {**centered, **shifted}


@full_precision
def _data_means(graph: FactorGraph, params: Params, offsets: Statistics, batch: Batch) -> Statistics:
    """Mean statistics of every block given the rows: a pass over the latent layers, which are at offsets."""
    size = len(batch.weights)
    t = {b: jnp.broadcast_to(offsets[b], (size, *offsets[b].shape)) for b in graph.latent}
    t |= graph.statistics(batch.rows)
    for layer in schedule(graph, clamped=graph.visible):
        t |= jax.vmap(lambda row, layer=layer: mean_layer(graph, params, layer, row, row)[0])(t)
    share = batch.weights / _nonzero(batch.weights.sum())
    return {b: jnp.tensordot(share, v, 1) for b, v in t.items()}


def _nonzero(total: Scalar) -> Scalar:
    return jnp.where(total == 0, 1.0, total)


def _bias_names(graph: FactorGraph) -> dict[str, str]:
    """The name of a Bias factor for each block that has one, a number a unit's statistic."""
    biases = [f for f in reversed(graph.factors) if isinstance(f, Bias) and not f.shared]
    return {f.blocks[0]: f.name for f in biases}


def _check_closed(graph: FactorGraph) -> None:
    """:raises DeclarationError: where offsets lead out of the declared model."""
    names = _bias_names(graph)
    for factor in graph.factors:
        if len(factor.blocks) > 2:
            raise DeclarationError(
                f"Centered: {factor!r} is over {len(factor.blocks)} blocks, and offsets make factors of two "
                "blocks of it, which the model does not have; factors of one and of two blocks can be "
                "centered"
            )
        alone = [b for b in factor.blocks if len(factor.blocks) == 2 and b not in names]
        if alone:
            raise DeclarationError(
                f"Centered: offsets in {factor!r} move the natural parameter of block {alone[0]!r}, which "
                f"has no Bias to take that up, unit by unit; add Bias({alone[0]!r})"
            )
