# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Centered gradients: steps of the model with statistics relative to offsets."""

from collections.abc import Mapping
import dataclasses
from functools import partial
from typing import NamedTuple

from jaxtyping import PyTree

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Key, Params, Rows, Scalar, Statistics, checks, full_precision
from ebmpp.estimators.base import Batch, Choice, Columns, Estimate, Estimator, Repeats
from ebmpp.estimators.phases import carried_chains
from ebmpp.graph import Bias, Factor, FactorGraph, energy
from ebmpp.graph.declaration import schedule


class CenteredState(NamedTuple):
    """State of :class:`Centered`.

    :param inner: state of the inner estimator.
    :param offsets: offset of each block, of its statistics' shape.
    :param means: mean statistics given the batch's rows, at the first of the batch's
        steps.
    :param step: index of the batch's next step.
    """

    inner: PyTree
    offsets: Statistics
    means: Statistics
    step: Array

    @property
    def model_chains(self) -> Rows:
        """Chains of the inner estimator."""
        return carried_chains(self.inner)


@dataclasses.dataclass(frozen=True)
class Centered(Estimator):
    r"""Centered gradients of any estimator: the declared model, better conditioned.

    For units that are mostly off or mostly on, and for deep machines.

    In the centered parametrisation every factor of two blocks, and every
    :class:`~ebmpp.Pairwise` of one, sees statistics minus offsets, so a change of
    weights does not move the means. The model stays as declared: with S the map from
    centered params to the graph's and J its derivative, the gradient g becomes the
    direction :math:`J J^T g`, the step along the centered gradient :math:`J^T g` in the
    graph's params. S follows from the energy: a block's bias is its centered bias minus
    the natural parameter that these factors contribute at the offsets. For a Boltzmann
    machine with offsets :math:`\mu, \lambda`:

    .. math::

        d_W = g_W - \mu g_c^T - g_b \lambda^T, \quad d_b = g_b - d_W \lambda, \quad
        d_c = g_c - d_W^T \mu

    It is a descent direction for any offsets, zero only where g is, and
    ``gradient_norm`` in the history is its norm. Offsets begin at the data's mean and
    at the mean of each latent family's default distribution. The latent means given the
    rows are exact where the posterior is one layer, else of one mean-field pass.

    :param estimator: the inner estimator, such as :class:`CD`, :class:`PCD` or
        :class:`UCD`.
    :param sliding: rate in [0, 1] of the offsets: mu <- mu + sliding (mean - mu).
    :param rates: relative learning rates of some factors, by name, above 0; the others
        have 1. They scale the centered gradient, so biases follow their factors:
        :math:`J D J^T g`. Upper layers of a deep machine work best with a third of the
        lowest one's rate.
    :raises ArgumentError: for an invalid or centered estimator, unknown factors, or
        numbers out of range.
    :raises DeclarationError: in training, for a graph without a centered form.

    **References**

    1. Montavon, Mueller (2012), *Deep Boltzmann machines and the centering trick*.
    2. Melchior, Fischer, Wiskott (2016), *How to center deep Boltzmann machines*; the
       offsets here are their d with a sliding average.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.Centered(ebmpp.CD(k=1)), progress_bar=False)
    >>> fit.estimator_state.offsets["v"].shape
    (9,)
    """

    estimator: Estimator
    sliding: float = 0.01
    rates: Mapping[str, float] | tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        checks.instance(
            "Centered: estimator",
            self.estimator,
            Estimator,
            "an estimator such as CD(k=1)",
        )
        if isinstance(self.estimator, Centered):
            raise checks.error(
                "Centered: estimator", "not centered already", self.estimator
            )
        checks.number("Centered: sliding", self.sliding, least=0, most=1)
        rates = dict(self.rates) if isinstance(self.rates, tuple) else self.rates
        checks.instance(
            "Centered: rates", rates, Mapping, "a dict from factor names to numbers"
        )
        pairs = (
            (name, checks.number(f"Centered: rates[{name!r}]", rate, above=0))
            for name, rate in rates.items()
        )
        object.__setattr__(self, "rates", tuple(pairs))  # hashable

    @property
    def steps_per_batch(self) -> int:
        return self.estimator.steps_per_batch

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> CenteredState:
        """Put the offsets at the means of the data and of the latents' default distributions."""
        self._check_factors(graph)
        for name, _ in self.rates:
            checks.choice("Centered: rates", name, tuple(f.name for f in graph.factors))
        inner = self.estimator.init_state(graph, params, data, batch, key)
        offsets = {b: f.mean(f.default_eta()) for b, f in graph.latent.items()}
        offsets |= {b: graph.families[b].statistics(v).mean(0) for b, v in data.items()}
        return CenteredState(inner, offsets, offsets, jnp.int32(0))

    def _check_factors(self, graph: FactorGraph) -> None:
        """Raise DeclarationError if offsets would lead out of the declared model."""
        names = _bias_names(graph)
        for factor in _interacting(graph):
            lacking = [b for b in factor.blocks if b not in names]
            joins_blocks = len(factor.blocks) == 2 and not factor.lateral
            if lacking or not (joins_blocks or factor.is_pairwise):
                raise checks.declaration_error(
                    "Centered: factors",
                    "over one block, or two with a Bias each, or a Pairwise with one",
                    factor,
                    hint=f"Blocks without one: {lacking}.",
                )

    def adopt(self, before: PyTree, fresh: CenteredState) -> CenteredState:
        """Continue the offsets of a centered estimator, and what the inner estimator adopts."""
        if isinstance(before, CenteredState):
            fresh = fresh._replace(offsets=before.offsets)
            before = before.inner
        return fresh._replace(inner=self.estimator.adopt(before, fresh.inner))

    def choose(self, graph: FactorGraph, history: Columns) -> Choice:
        choice = self.estimator.choose(graph, history)
        centered = dataclasses.replace(self, estimator=choice.estimator)
        return choice._replace(estimator=centered)

    def diagnose(self, history: Columns) -> str | None:
        return self.estimator.diagnose(history)

    def diagnose_chains(
        self, graph: FactorGraph, params: Params, data: Rows, history: Columns, key: Key
    ) -> str | None:
        return self.estimator.diagnose_chains(graph, params, data, history, key)

    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: CenteredState,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        """Make the inner gradient, move the offsets, then form the direction."""
        inner = self.estimator.estimate(graph, params, state.inner, batch, key)
        offsets = state.offsets
        means = state.means
        if self.sliding:
            means = self._batch_means(graph, params, state, batch)
            offsets = {b: o + self.sliding * (means[b] - o) for b, o in offsets.items()}
        direction = centered_direction(
            graph, params, offsets, inner.gradient, dict(self.rates)
        )
        step = (state.step + 1) % self.steps_per_batch
        state = CenteredState(inner.state, offsets, means, step)
        return Estimate(direction, state, inner.metrics, inner.sweeps)

    def _batch_means(
        self, graph: FactorGraph, params: Params, state: CenteredState, batch: Batch
    ) -> Statistics:
        """Return mean statistics given the rows, at the params of the batch's first step."""

        def fresh():
            return _data_means(graph, params, state.offsets, batch)

        if self.steps_per_batch == 1:
            return fresh()
        return lax.cond(state.step == 0, fresh, lambda: state.means)

    def repeats(self, state: CenteredState, count: int) -> Repeats:
        # its gradient is the likelihood's
        return self.estimator.repeats(state.inner, count)

    def fast_compile(self, graph: FactorGraph) -> bool:
        return self.estimator.fast_compile(graph)


def centered_direction(
    graph: FactorGraph,
    params: Params,
    offsets: Statistics,
    gradient: Params,
    rates: Mapping[str, float],
) -> Params:
    """Return ``J D J^T gradient``: J maps centered params to the graph's, D has the rates."""

    def natural(centered):
        return natural_params(graph, centered, offsets)

    _, transposed = jax.vjp(natural, params)
    # J depends on the interacting factors alone, which S does not change: params serve
    # for both.
    (centered,) = transposed(gradient)
    for name, rate in rates.items():
        centered[name] = jax.tree.map(partial(jnp.multiply, rate), centered[name])
    _, direction = jax.jvp(natural, (params,), (centered,))
    return direction


def natural_params(graph: FactorGraph, centered: Params, offsets: Statistics) -> Params:
    """Apply S: return the params under which the graph's energy is the centered one.

    The energies are equal up to a constant.
    """
    pairs = _interacting(graph)
    if not pairs:
        return centered
    # A factor's contribution at zero is there with and without offsets: only the
    # difference is shifted.
    zeros = jax.tree.map(jnp.zeros_like, offsets)
    at_offsets = energy.contributed(graph, pairs, centered, offsets)
    at_zero = energy.contributed(graph, pairs, centered, zeros)
    return centered | {
        name: centered[name] - (at_offsets[b] - at_zero[b])
        for b, name in _bias_names(graph).items()
    }


@full_precision
def _data_means(
    graph: FactorGraph, params: Params, offsets: Statistics, batch: Batch
) -> Statistics:
    """Return mean statistics of every block given the rows.

    One pass over the latents begins at the offsets.
    """
    t = {
        b: jnp.broadcast_to(offsets[b], (batch.num_rows, *offsets[b].shape))
        for b in graph.latent
    }
    t |= graph.statistics(batch.rows)
    for layer in schedule(graph, clamped=graph.visible):

        def layer_means(row, layer=layer):
            means, _ = energy.mean_layer(graph, params, layer, row, row)
            return means

        t |= jax.vmap(layer_means)(t)
    share = batch.weights / nonzero(batch.weights.sum())
    return {b: jnp.tensordot(share, v, 1) for b, v in t.items()}


def nonzero(total: Scalar) -> Scalar:
    """Replace 0 by 1, as a divisor."""
    return jnp.where(total == 0, 1.0, total)


def _interacting(graph: FactorGraph) -> list[Factor]:
    return [f for f in graph.factors if f.interacts and f.affine]


def _bias_names(graph: FactorGraph) -> dict[str, str]:
    """Return the name of each block's Bias factor that has one number per statistic."""
    return {
        f.blocks[0]: f.name
        for f in reversed(graph.factors)
        if isinstance(f, Bias) and not f.shared
    }
