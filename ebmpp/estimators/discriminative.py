# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditional likelihood: the gradient of log p(label | data), exact, alone or beside a generative one."""

from collections.abc import Mapping
import dataclasses
from functools import partial
import itertools
from typing import Any

from jaxtyping import Float
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, sharding
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Key, Params, Rows, State
from ebmpp.errors import ArgumentError, DeclarationError, IntractableError
from ebmpp.estimators.base import Batch, Estimate, Estimator, Repeats, check_estimator
from ebmpp.estimators.phases import check_posterior
from ebmpp.graph import FactorGraph, energy

_MOST_VALUES = 4096  # of the target block, each of them a free energy a row


@dataclasses.dataclass(frozen=True)
class Discriminative(Estimator):
    """The gradient of ``-sum_i w_i log p(target_i | rest_i)``, exact: for classifiers.

    The target is a visible block of few values, such as ``Categorical(1, 10)``, the rest are the other
    visible blocks. Both p(target, rest) and p(rest) are sums over latents of one layer and over the target's
    values, that is, free energies; log Z cancels, and nothing is sampled.

    With a ``generative`` estimator the loss is ``-log p(target | rest) - weight log p(target, rest)``, the
    hybrid of Larochelle and Bengio: the second term keeps a model of the data, and regularises.

    The history has ``conditional_log_likelihood``, the batch's (weighted) mean log p(target | rest).

    :param target: the visible block that is predicted.
    :param generative: an estimator such as :class:`UCD` or :class:`PCD`; None for the conditional alone.
    :param weight: of the generative gradient, not negative.
    :raises ArgumentError: for an estimator that is none.
    :raises ArgumentError: for a weight out of range.

    **References**

    1. Larochelle, Bengio (2008), *Classification using discriminative restricted Boltzmann machines*.

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
            check_estimator("Discriminative: generative", self.generative, "an estimator such as UCD()")
        checks.number("Discriminative: weight", self.weight, least=0)

    @property
    def steps_per_batch(self) -> int:
        """Those of the estimator beside."""
        return 1 if self.generative is None else self.generative.steps_per_batch

    @property
    def max_sweeps(self) -> int | None:
        """That of the estimator beside."""
        return None if self.generative is None else self.generative.max_sweeps

    def caution(self, told: Mapping[str, np.ndarray]) -> str | None:
        """That of the generative estimator."""
        return None if self.generative is None else self.generative.caution(told)

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> Any:
        """The state of the estimator beside.

        :raises DeclarationError: for a target that is no visible block, or the only one.
        :raises IntractableError: for a target of too many values, or latents that interact.
        """
        _check_target(graph, self.target)
        check_posterior(graph, "Discriminative", None)
        return () if self.generative is None else self.generative.init(graph, params, data, batch, key)

    def adopt(self, before: Any, fresh: Any) -> Any:
        """What the estimator beside adopts."""
        return fresh if self.generative is None else self.generative.adopt(before, fresh)

    def repeats(self, state: Any, count: int) -> Repeats:
        """Those of the estimator beside; the conditional gradient is exact.

        :raises ArgumentError: where there is none.
        """
        if self.generative is None:
            raise ArgumentError(
                f"{self!r} makes the exact gradient of log p({self.target} | the rest), which has no bias; "
                "what is judged is the gradient of the likelihood, that of an estimator beside it"
            )
        return self.generative.repeats(state, count)

    @full_precision
    def estimate(self, graph: FactorGraph, params: Params, state: Any, batch: Batch, key: Key) -> Estimate:
        """The exact conditional gradient, and the weighted one of the estimator beside."""

        def loss(p: Params) -> Array:
            rest = {b: x for b, x in batch.rows.items() if b != self.target}
            table = label_log_probabilities(graph, p, rest, self.target)
            each = jnp.take_along_axis(table, _index(graph, self.target, batch.rows[self.target]), axis=1)
            return -jnp.vdot(batch.weights, each[:, 0])

        value, gradient = jax.value_and_grad(loss)(params)
        told = {"conditional_log_likelihood": -value / _nonzero(batch.weights.sum())}
        if self.generative is None:
            return Estimate(gradient, state, told)
        made = self.generative.estimate(graph, params, state, batch, key)
        both = jax.tree.map(lambda g, h: g + self.weight * h, gradient, made.gradient)
        return Estimate(both, made.state, {**made.metrics, **told}, made.sweeps)


@partial(jax.jit, static_argnums=(0, 3))
def label_log_probabilities(
    graph: FactorGraph, params: Params, rest: Rows, target: str
) -> Float[Array, "rows values"]:
    """log p(target | rest) of every value of the target, the latents summed out.

    :param graph: latents of one layer.
    :param params: its params.
    :param rest: the other visible blocks, ``(rows, *shape)`` each.
    :param target: a visible block of few values.
    :return: the values in the order of ``itertools.product`` over the units.
    """
    values, latents = jnp.asarray(_values(graph, target)), tuple(graph.latent)

    def one(row: State) -> Array:
        given = lambda y: energy.log_unnormalized(graph, params, {**row, target: y}, latents)
        return jax.nn.log_softmax(jax.vmap(given)(values))

    return jax.vmap(one)(dict(rest))


def _values(graph: FactorGraph, target: str) -> np.ndarray:
    family = graph.families[target]
    with sharding.at_once():
        listed = np.asarray(family.states())
    made = np.array(list(itertools.product(listed, repeat=family.size)), family.dtype)
    return made.reshape(-1, *family.shape)


def _index(graph: FactorGraph, target: str, rows: Array) -> Array:
    """Which of :func:`_values` each row has, ``(rows, 1)``."""
    values = jnp.asarray(_values(graph, target)).reshape(-1, graph.families[target].size)
    same = (rows.reshape(len(rows), 1, -1) == values).all(-1)
    return same.argmax(1)[:, None]


def _check_target(graph: FactorGraph, target: str) -> None:
    if target not in graph.visible or len(graph.visible) < 2:
        raise DeclarationError(
            f"Discriminative: the target {target!r} is a visible block beside others; the visible blocks are "
            f"{list(graph.visible)}"
        )
    family = graph.families[target]
    states = family.states()
    if states is None or len(states) ** family.size > _MOST_VALUES:
        count = "infinitely many" if states is None else f"{len(states)}**{family.size}"
        raise IntractableError(
            f"Discriminative: block {target!r} ({family!r}) takes {count} values, and {_MOST_VALUES} are the "
            "most that are listed; the likelihood of all visible blocks (UCD, PCD) has no such limit"
        )


def _nonzero(total: Array) -> Array:
    return jnp.where(total == 0, 1.0, total)
