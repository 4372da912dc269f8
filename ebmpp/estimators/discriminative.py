# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditional likelihood: the exact gradient of log p(label | data)."""

import dataclasses
from functools import partial

from jaxtyping import Float, PyTree

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Key, Params, PerRow, Rows, checks, full_precision, omit
from ebmpp.errors import ArgumentError, IntractableError
from ebmpp.estimators import centering, phases
from ebmpp.estimators.base import (
    Batch,
    Columns,
    Estimate,
    Estimator,
    Repeats,
    StepMetrics,
)
from ebmpp.exact import enumeration
from ebmpp.graph import FactorGraph, energy

_MAX_VALUES = 4096  # of the target block, each of which costs a free energy per row


class DiscriminativeMetrics(StepMetrics):
    """Metrics of :class:`Discriminative`, beside its generative estimator's."""

    conditional_log_likelihood: Array


@dataclasses.dataclass(frozen=True)
class Discriminative(Estimator):
    """Exact gradient of ``-sum_i w_i log p(target_i | rest_i)``, for classifiers.

    The rest are the other visible blocks. p(target, rest) and p(rest) are free energies
    summed over the target's values: log Z cancels, and nothing is sampled. With a
    ``generative`` estimator the loss is
    ``-log p(target | rest) - weight log p(target, rest)``, the hybrid of Larochelle and
    Bengio. The history has ``conditional_log_likelihood``, the batch's (weighted) mean
    log p(target | rest).

    :param target: the visible block that is predicted, of few values, such as
        ``Categorical(1, 10)``.
    :param generative: an estimator such as :class:`UCD`; None for the conditional
        alone.
    :param weight: weight of the generative gradient, not negative.
    :raises ArgumentError: for an invalid estimator or a weight out of range.

    **References**

    1. Larochelle, Bengio (2008), *Classification using discriminative restricted
       Boltzmann machines*.

    **Example**

    >>> import jax, numpy as np, ebmpp
    >>> from ebmpp import Bernoulli, Bias, Bilinear, Categorical, FactorGraph
    >>> from ebmpp.estimators import Discriminative
    >>> graph = FactorGraph({"v": Bernoulli(4), "y": Categorical(1, 3)}, {"h": Bernoulli(5)},
    ...                     [*map(Bias, "vyh"), Bilinear("v", "h"), Bilinear("y", "h")])
    >>> rows = {"v": np.eye(4)[:3], "y": np.arange(3)[:, None]}
    >>> fit = ebmpp.fit(graph, rows, estimator=Discriminative("y"), rng_key=jax.random.key(0),
    ...                 num_steps=5, progress_bar=False)
    >>> bool(fit.history.conditional_log_likelihood[-1] > fit.history.conditional_log_likelihood[0])
    True
    """

    target: str
    generative: Estimator | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.generative is not None:
            checks.instance(
                "Discriminative: generative",
                self.generative,
                Estimator,
                "one such as UCD()",
            )
        checks.number("Discriminative: weight", self.weight, least=0)

    @property
    def steps_per_batch(self) -> int:
        return 1 if self.generative is None else self.generative.steps_per_batch

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> PyTree:
        """Check the target, and return the state of the generative estimator."""
        if self.target not in graph.visible or not len(graph.visible) > 1:
            raise checks.declaration_error(
                "Discriminative: target",
                f"one of several visible blocks {list(graph.visible)}",
                self.target,
            )
        family = graph.families[self.target]
        states = family.states()
        if states is None or not len(states) ** family.size <= _MAX_VALUES:
            raise checks.error(
                "Discriminative: target",
                f"of a family with at most {_MAX_VALUES} joint values",
                family,
                IntractableError,
                "The joint likelihood (UCD, PCD) has no such limit.",
            )
        phases.check_posterior(graph, "Discriminative", None)
        if self.generative is None:
            return ()
        return self.generative.init_state(graph, params, data, batch, key)

    def adopt(self, before: PyTree, fresh: PyTree) -> PyTree:
        if self.generative is None:
            return fresh
        return self.generative.adopt(before, fresh)

    def diagnose(self, history: Columns) -> str | None:
        return None if self.generative is None else self.generative.diagnose(history)

    @full_precision
    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: PyTree,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        """Return the exact conditional gradient plus the weighted generative one."""

        def loss(params):
            return -jnp.vdot(batch.weights, self._log_probs(graph, params, batch.rows))

        value, gradient = jax.value_and_grad(loss)(params)
        mean = -value / centering.nonzero(batch.weights.sum())
        metrics = DiscriminativeMetrics(conditional_log_likelihood=mean)
        if self.generative is None:
            return Estimate(gradient, state, metrics)
        other = self.generative.estimate(graph, params, state, batch, key)
        total = jax.tree.map(lambda g, h: g + self.weight * h, gradient, other.gradient)
        return Estimate(total, other.state, {**other.metrics, **metrics}, other.sweeps)

    def _log_probs(self, graph: FactorGraph, params: Params, rows: Rows) -> PerRow:
        """Return log p(target | rest) of each row."""
        rest = omit(rows, [self.target])
        table = label_log_probabilities(graph, params, rest, self.target)
        size, num_values = table.shape
        values = enumeration.list_states(graph, (self.target,))[self.target]
        labels = rows[self.target].reshape(size, 1, -1)
        is_value = (labels == values.reshape(num_values, -1)).all(-1)
        index = is_value.argmax(1)[:, None]
        return jnp.take_along_axis(table, index, axis=1)[:, 0]

    def repeats(self, state: PyTree, count: int) -> Repeats:
        if self.generative is None:
            raise ArgumentError(
                f"{self!r} makes the exact gradient of log p({self.target} | rest), "
                "which has no bias. Only the gradient of the likelihood, by a "
                "generative estimator, can be judged."
            )
        return self.generative.repeats(state, count)


@partial(jax.jit, static_argnums=(0, 3))
def label_log_probabilities(
    graph: FactorGraph, params: Params, rest: Rows, target: str
) -> Float[Array, "rows values"]:
    """Return log p(target | rest) of every value of the target, the latents summed out.

    :param rest: the other visible blocks, ``(rows, *shape)`` each.
    :return: the values in the order of :func:`~ebmpp.exact.enumeration.list_states`.
    """
    values = enumeration.list_states(graph, (target,))[target]
    latents = tuple(graph.latent)

    def one_row(row):
        def joint(y):
            return energy.log_unnormalized(graph, params, {**row, target: y}, latents)

        return jax.nn.log_softmax(jax.vmap(joint)(values))

    return jax.vmap(one_row)(dict(rest))
