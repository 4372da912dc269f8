# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What an estimator is: what it is given at a step, and what it makes of it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import checks
from ebmpp.core.types import Blocks, Key, Params, PerRow, Rows
from ebmpp.errors import ArgumentError
from ebmpp.graph import FactorGraph


class Batch(NamedTuple):
    """The rows of one step."""

    rows: Rows
    """The visible blocks, ``(rows, *shape)`` each."""
    weights: PerRow
    """``(rows,)``: the step's loss is ``-sum_i w_i log p(v_i)``. 1/rows each where rows are not weighted;
    where they are, the sum is 1 on average over batches."""

    known: Rows = {}
    """Of the visible blocks that lack units, which are known, ``(rows, *shape)`` each; at the others stands
    something in the support, which means nothing. Always empty for estimators that do not say that they
    take missing entries."""

    @classmethod
    def of(cls, rows: Rows, known: Rows = MappingProxyType({})) -> "Batch":
        """Rows of equal weight."""
        size = len(next(iter(rows.values())))
        return cls(rows, jnp.full(size, 1 / size), dict(known))


class Estimate(NamedTuple):
    """One step's gradient."""

    gradient: Params
    """Of the batch's loss, a pytree like the params."""
    state: Any
    """What the estimator carries to the next step."""
    metrics: dict[str, Array]
    """Scalars for the history."""
    sweeps: ArrayLike = 1.0
    """Sweeps of all chains per row of the batch: what the step cost, by which :func:`~ebmpp.fit` bounds how
    many steps run before it looks at the run again."""


class Repeats(NamedTuple):
    """How an estimator's step is done again, so that its bias shows: see :meth:`Estimator.repeats`."""

    estimator: "Estimator"
    """Whose step: one of fewer chains, or the one inside another."""
    states: tuple[Any, ...]
    """That each repeat begins in: the same object where all begin in one."""
    chains: int | None = None
    """How many chains each state has, where the states are groups of the chains; None where all are one."""


@runtime_checkable
class Estimator(Protocol):
    """An estimator of the gradient: an immutable, hashable value.

    A class of one's own inherits from this, has ``init`` and ``estimate``, and the rest where it differs.
    """

    takes_missing: ClassVar[bool] = False
    """Whether it reads ``Batch.known``, so that rows may lack entries."""

    limit_name: ClassVar[str] = "max_sweeps"
    """What a user calls :attr:`max_sweeps`."""

    @property
    def max_sweeps(self) -> int | None:
        """After how many sweeps it gives up a pair of chains that has not met; None for never."""
        return None

    @property
    def steps_per_batch(self) -> int:
        """For how many steps in a row it needs the same rows."""
        return 1

    def quick(self, graph: FactorGraph) -> bool:
        """Whether its step, one of many kernels, is to be compiled soon at the price of how it runs.

        See ``ebmpp.core.programs.Program``; measured for coupled pairs, which pay nothing.
        """
        return False

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> Any:
        """The state before the first step; ``batch`` is the number of rows a step sees."""

    def estimate(self, graph: FactorGraph, params: Params, state: Any, batch: Batch, key: Key) -> Estimate:
        """One step: traced once, so everything that changes is an array."""

    def caution(self, told: Mapping[str, np.ndarray]) -> str | None:
        """What a user should know of a stage that is done; :func:`~ebmpp.fit` warns of it. None: nothing.

        :param told: the history of its steps, ``(steps,)`` each.
        """
        return None

    def adopt(self, before: Any, fresh: Any) -> Any:
        """The first state of a stage, from the last one of the stage before and from what ``init`` made."""
        return fresh

    def repeats(self, state: Any, count: int) -> Repeats:
        """Its step at the same params and rows, done again: for :func:`ebmpp.estimators.gradient_bias`.

        By default each repeat begins in the state, and what the state is off by counts as bias. An estimator
        whose state is chains that owe one another nothing gives groups of them.

        :param state: what it carries.
        :param count: how many are asked for.
        :raises ArgumentError: where the gradient is not one of the likelihood.
        """
        return Repeats(self, (state,) * count)


def split_chains(chains: Rows, count: int) -> tuple[Blocks, ...]:
    """So many groups of equal size, or as many as there are chains; those that are left over are in none."""
    rows = len(next(iter(chains.values())))
    each = max(1, rows // count)
    group = lambda i: {b: v[i * each : (i + 1) * each] for b, v in chains.items()}
    return tuple(group(i) for i in range(min(count, rows)))


_MEMBERS = (
    "init",
    "estimate",
    "adopt",
    "steps_per_batch",
    "quick",
    "takes_missing",
    "max_sweeps",
    "limit_name",
    "caution",
    "repeats",
)


def check_whole(estimator: Any) -> None:
    """:raises ArgumentError: for an estimator of one's own that lacks a part, which is named."""
    lacking = [name for name in _MEMBERS if not hasattr(estimator, name)]
    if lacking and hasattr(estimator, "estimate"):
        raise ArgumentError(
            f"estimator {type(estimator).__name__} has no {', '.join(lacking)}: let its class inherit from "
            "ebmpp.estimators.Estimator, whose defaults are those of a plain one"
        )


def check_estimator(name: str, value: Any, what: str) -> None:
    """:raises ArgumentError: for what is no estimator.

    :param what: what is expected, in words.
    """
    check_whole(value)
    checks.instance(name, value, Estimator, what)
