# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of one step, typed per estimator, and how the history's columns are shown."""

from collections.abc import Iterator, Mapping
import dataclasses
from types import MappingProxyType
from typing import NamedTuple, dataclass_transform

import numpy as np

import jax
from jax import Array

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
#: Columns with numbers of pairs that have not met.
UNMET = ("num_unmet", "posterior_num_unmet")


def column_of(name: str) -> Column:
    """Return the display of a column, that of a monitor or a custom metric by its name alone."""
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
