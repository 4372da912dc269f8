# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Interface of an estimator: its input and output at one step."""

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import checks
from ebmpp.core.types import Blocks, Key, Params, PerRow, Rows
from ebmpp.graph import FactorGraph

#: Metrics of steps by name, ``(steps,)`` each.
History = Mapping[str, np.ndarray]


class Batch(NamedTuple):
    """Rows of one step.

    :param rows: the visible blocks, ``(rows, *shape)`` each.
    :param weights: ``(rows,)``: the step's loss is ``-sum_i w_i log p(v_i)``. Each is
        1/rows for equal rows; for weighted rows their sum is 1 on average over batches.
    :param known: masks of known entries, ``(rows, *shape)``, of the visible blocks that
        have missing entries. The values at missing entries are in the support but carry
        no information. Empty unless the estimator's ``takes_missing`` is True.
    """

    rows: Rows
    weights: PerRow
    known: Rows = {}

    @classmethod
    def uniform(cls, rows: Rows, known: Rows = MappingProxyType({})) -> "Batch":
        """Make a batch of equal weights."""
        size = len(next(iter(rows.values())))
        return cls(rows, jnp.full(size, 1 / size), dict(known))


class Estimate(NamedTuple):
    """Gradient of one step.

    :param gradient: gradient of the batch's loss, a pytree like the params.
    :param state: the estimator's state for the next step.
    :param metrics: scalars for the history.
    :param sweeps: cost: sweeps of all chains per row of the batch. :func:`~ebmpp.fit`
        bounds by it how many steps run in one program.
    """

    gradient: Params
    state: Any
    metrics: dict[str, Array]
    sweeps: ArrayLike = 1.0


class Choice(NamedTuple):
    """Estimator of the next steps, the stage's step at which it is chosen again, and constant metrics."""

    estimator: "Estimator"
    until: int = checks.LARGEST
    record: Mapping[str, int] = MappingProxyType({})


class Estimator(abc.ABC):
    """Base class of the gradient's estimators: immutable, hashable values.

    A custom estimator implements ``init`` and ``estimate``, and overrides the rest
    where it differs.
    """

    takes_missing: ClassVar[bool] = False
    """True if ``estimate`` reads ``Batch.known``, so that rows may have missing entries."""

    @property
    def steps_per_batch(self) -> int:
        """Number of consecutive steps that need the same rows."""
        return 1

    @abc.abstractmethod
    def init(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> Any:
        """Return the state before the first step; ``batch`` is the number of rows per step."""

    @abc.abstractmethod
    def estimate(
        self, graph: FactorGraph, params: Params, state: Any, batch: Batch, key: Key
    ) -> Estimate:
        """Make the gradient of one step. It is traced once, so everything that changes is an array."""

    def adopt(self, before: Any, fresh: Any) -> Any:
        """Return the first state of a stage, of the structure of ``fresh``.

        :param before: the last state of the stage before, of any estimator.
        :param fresh: the state that ``init`` made for this stage.
        """
        return fresh

    def choose(self, graph: FactorGraph, history: History) -> Choice:
        """Return the estimator of a stage's next steps, by the metrics of its past steps alone."""
        return Choice(self)

    def diagnose(self, history: History) -> str | None:
        """Return a warning about a finished stage, or None.

        :param history: metrics of its steps, ``(steps,)`` each.
        """
        return None

    def diagnose_chains(
        self, graph: FactorGraph, params: Params, data: Rows, history: History, key: Key
    ) -> str | None:
        """Return a warning about chains at the last params, or None.

        :param data: rows of the data, without missing entries.
        :param history: as for :meth:`diagnose`.
        """
        return None

    def _repeats(self, state: Any, count: int) -> "Repeats":
        """Return how a step is repeated by :func:`~ebmpp.estimators.gradient_bias`.

        By default each repeat starts from the given state, so that a bias of the state
        counts. Estimators with independent chains split them into ``count`` groups, and
        those whose gradient is not the likelihood's raise ArgumentError.
        """
        return Repeats(self, (state,) * count)


class Repeats(NamedTuple):
    """Steps whose gradients are compared to measure their bias.

    :param estimator: the estimator of the steps: one of fewer chains, or the one inside
        another.
    :param states: state that each repeat starts from.
    :param chains: number of chains per state; None where all states are one.
    """

    estimator: Estimator
    states: tuple[Any, ...]
    chains: int | None = None


def split_chains(chains: Rows, count: int) -> tuple[tuple[Blocks, ...], int]:
    """Split chains into ``count`` groups of one size, or one per chain, and return that size too."""
    rows = len(next(iter(chains.values())))
    size = max(1, rows // count)

    def group(i):
        return {b: v[i * size : (i + 1) * size] for b, v in chains.items()}

    return tuple(group(i) for i in range(min(count, rows))), size


def shapes(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """Return a pytree's structure, and the shapes of its leaves."""
    return jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
