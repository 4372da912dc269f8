# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Interface of an estimator: its input, output and metrics at one step."""

import abc
from collections.abc import Iterator, Mapping
import dataclasses
from types import MappingProxyType
from typing import (
    ClassVar,
    NamedTuple,
    Protocol,
    dataclass_transform,
    runtime_checkable,
)

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import Blocks, Key, Params, PerRow, Rows, checks, num_rows
from ebmpp.graph import FactorGraph

#: Metrics of steps by name, ``(steps,)`` each.
Columns = Mapping[str, np.ndarray]


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

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.weights)

    @classmethod
    def uniform(cls, rows: Rows, known: Rows = MappingProxyType({})) -> "Batch":
        """Make a batch of equal weights."""
        size = num_rows(rows)
        weights = np.full(size, 1 / size, jnp.result_type(float))
        return cls(rows, jnp.asarray(weights), dict(known))


#: Ways to the negative phase of :class:`ebmpp.UCD`, in the order of their numbers.
METHODS = ("gibbs", "mixture", "particles")


@dataclass_transform(frozen_default=True, kw_only_default=True)
class StepMetrics(Mapping[str, Array]):
    """Base class of an estimator's metrics: a dataclass that is also a mapping of columns.

    Subclasses become frozen dataclasses and pytrees. A field that is None has no
    column. A field that holds metrics itself has a column ``field_name`` for each of
    theirs.
    """

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        jax.tree_util.register_dataclass(cls)

    def _columns(self) -> dict[str, Array]:
        columns = {}
        for field, value in vars(self).items():
            if isinstance(value, StepMetrics):
                columns |= {f"{field}_{name}": v for name, v in value.items()}
            elif value is not None:
                columns[field] = value
        return columns

    def __getitem__(self, name: str) -> Array:
        return self._columns()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns())

    def __len__(self) -> int:
        return len(self._columns())


class ChainMetrics(StepMetrics):
    """Metrics of chains of fixed length.

    :param acceptance: share of accepted proposals; None for moves without proposals.
    """

    acceptance: Array | None = None


class PairMetrics(StepMetrics):
    """Metrics of coupled pairs of chains.

    :param meeting_time_mean: over the pairs that met, including the lag.
    :param num_unmet: pairs that were stopped before they met.
    :param sweeps: mean number of sweeps per pair that met.
    :param trials: mean number of coupled trials per draw.
    :param corrected: share of pairs that made a correction.
    :param acceptance: share of accepted proposals; None for moves without proposals.
    :param largest_weight: of the leading chains' starts and of proposals from a pool,
        over the mean of the proposals'; None without a pool.
    """

    meeting_time_mean: Array
    meeting_time_max: Array
    num_unmet: Array
    lag: Array
    k: Array
    m: Array
    sweeps: Array
    trials: Array
    corrected: Array
    acceptance: Array | None = None
    largest_weight: Array | None = None


class Column(NamedTuple):
    """Display of a column of the history.

    :param label: of an axis.
    :param short: name in the progress bar, which shows no other columns.
    :param panel: "own", "meeting" for the one of meeting times, or "none" for costs and
        settings, which are not drawn.
    :param categories: names of the integers of a categorical column.
    """

    label: str
    unit: str = ""
    short: str = ""
    panel: str = "own"
    categories: tuple[str, ...] = ()


#: Display of the estimators' metrics, by name.
COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "meeting_time_mean": Column("mean", "sweeps", "tau", "meeting"),
        "meeting_time_max": Column("max", "sweeps", "max", "meeting"),
        "lag": Column("lag", "sweeps", "lag", "meeting"),
        "gradient_norm": Column("gradient norm", short="grad"),
        "num_unmet": Column("unmet pairs"),
        "k": Column("k", "sweeps", panel="none"),
        "m": Column("m", "sweeps", panel="none"),
        "sweeps": Column("sweeps per pair", "sweeps", panel="none"),
        "posterior_sweeps": Column("posterior sweeps per pair", "sweeps", panel="none"),
        "cost": Column("cost", "sweeps", panel="none"),
        "trials": Column("trials per draw", panel="none"),
        "corrected": Column("share of corrected pairs", panel="none"),
        "method": Column("method", panel="none", categories=METHODS),
        "log_likelihood": Column("log likelihood", "nats"),
        "conditional_log_likelihood": Column("conditional log likelihood", "nats"),
        "log_partition": Column("log partition", "nats"),
        "log_partition_error": Column("log partition error", "nats"),
    }
)
#: Columns with sweeps per pair.
SWEEPS = ("sweeps", "posterior_sweeps")
#: Columns with numbers of pairs that have not met.
UNMET = ("num_unmet", "posterior_num_unmet")


def column_of(name: str) -> Column:
    """Return the display of a column; custom metrics and monitors have their names."""
    return COLUMNS.get(name, Column(name.replace("_", " ")))


def decode(name: str, values: np.ndarray) -> np.ndarray:
    """Return a categorical column as strings, empty where it has no value; others as they are."""
    categories = column_of(name).categories
    if not categories:
        return values
    codes = np.nan_to_num(values, nan=len(categories)).astype(int)
    return np.array([*categories, ""])[codes]


def total_unmet(metrics: Mapping[str, Array]) -> Array | int:
    """Return the number of unmet pairs of both phases."""
    return sum(metrics.get(name, 0) for name in UNMET)


class Estimate(NamedTuple):
    """Gradient of one step.

    :param gradient: gradient of the batch's loss, a pytree like the params.
    :param state: the estimator's state for the next step.
    :param metrics: scalars for the history, by name: an estimator's own
        :class:`StepMetrics`, or a dict.
    :param sweeps: cost: sweeps of all chains per row of the batch. :func:`~ebmpp.fit`
        bounds by it how many steps run in one program.
    """

    gradient: Params
    state: PyTree
    metrics: Mapping[str, Array]
    sweeps: ArrayLike = 1.0


class Choice(NamedTuple):
    """Estimator of the next steps.

    :param until: the stage's step at which it is chosen again.
    :param record: constant metrics of these steps.
    """

    estimator: "Estimator"
    until: int = checks.LARGEST
    record: Mapping[str, int] = MappingProxyType({})


@runtime_checkable
class HasChains(Protocol):
    """State of an estimator whose persistent chains another estimator may continue."""

    @property
    def model_chains(self) -> Rows:
        """Chains of the model, such as the coldest of tempered ones."""


class Estimator(abc.ABC):
    """Base class of the gradient's estimators: immutable, hashable values.

    A custom estimator implements ``init_state`` and ``estimate``, and overrides the
    rest where it differs.
    """

    takes_missing: ClassVar[bool] = False
    """True if ``estimate`` reads ``Batch.known``, so that rows may have missing entries."""

    @property
    def steps_per_batch(self) -> int:
        """Number of consecutive steps that need the same rows."""
        return 1

    @abc.abstractmethod
    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> PyTree:
        """Return the state before the first step; ``batch`` is the number of rows per step."""

    @abc.abstractmethod
    def estimate(
        self, graph: FactorGraph, params: Params, state: PyTree, batch: Batch, key: Key
    ) -> Estimate:
        """Make the gradient of one step.

        It is traced once, so everything that changes is an array.
        """

    def adopt(self, before: PyTree, fresh: PyTree) -> PyTree:
        """Return the first state of a stage, of the structure of ``fresh``.

        :param before: the last state of the stage before, of any estimator;
            chains are in one that satisfies :class:`HasChains`.
        :param fresh: the state that ``init_state`` made for this stage.
        """
        return fresh

    def choose(self, graph: FactorGraph, history: Columns) -> Choice:
        """Return the estimator of a stage's next steps, by the metrics of its past steps alone."""
        return Choice(self)

    def diagnose(self, history: Columns) -> str | None:
        """Return a warning about a finished stage, or None.

        :param history: metrics of its steps, ``(steps,)`` each.
        """
        return None

    def diagnose_chains(
        self, graph: FactorGraph, params: Params, data: Rows, history: Columns, key: Key
    ) -> str | None:
        """Return a warning about chains at the last params, or None.

        :param data: rows of the data, without missing entries.
        :param history: as for :meth:`diagnose`.
        """
        return None

    def repeats(self, state: PyTree, count: int) -> "Repeats":
        """Return how a step is repeated by :func:`~ebmpp.estimators.gradient_bias`.

        By default each repeat starts from the given state, so that a bias of the state
        counts. Estimators with independent chains split them into ``count`` groups, and
        those whose gradient is not the likelihood's raise ArgumentError.
        """
        return Repeats(self, (state,) * count)

    def fast_compile(self, graph: FactorGraph) -> bool:
        """Return True if a step is compiled by XLA's older emitters, which run it as fast."""
        return False


class Repeats(NamedTuple):
    """Steps whose gradients are compared to measure their bias.

    :param estimator: the estimator of the steps: one of fewer chains, or the one inside
        another.
    :param states: state that each repeat starts from.
    :param chains: number of chains per state; None where all states are one.
    """

    estimator: Estimator
    states: tuple[PyTree, ...]
    chains: int | None = None


def split_chains(chains: Rows, count: int) -> tuple[tuple[Blocks, ...], int]:
    """Return ``count`` groups of chains, or one per chain, and their common size."""
    rows = num_rows(chains)
    size = max(1, rows // count)
    groups = (
        {b: v[start : start + size] for b, v in chains.items()}
        for start in range(0, size * min(count, rows), size)
    )
    return tuple(groups), size


def shapes(tree: PyTree) -> tuple[PyTree, list[tuple[int, ...]]]:
    """Return a pytree's structure, and the shapes of its leaves."""
    return jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
