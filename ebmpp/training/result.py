# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Result of a training run."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import PyTree
import numpy as np

import optax

from ebmpp.annealing.path import Path
from ebmpp.core import Params
from ebmpp.core.display import Card, Grid, Measured, Shown
from ebmpp.estimators import Estimator
from ebmpp.estimators.base import Columns
from ebmpp.graph import FactorGraph, display

if TYPE_CHECKING:
    import xarray as xr


class Past(NamedTuple):
    """Estimator of a run's last stage, and metrics of its steps, past runs included."""

    estimator: Estimator | None = None
    columns: Columns = {}


@dataclasses.dataclass(frozen=True)
class FitResult(Shown):
    """A trained model.

    :param graph: the trained graph.
    :param params: the last params.
    :param history: an ``xarray.Dataset``: per ``step`` the gradient norm and the
        estimator's metrics, such as ``meeting_time_mean``, ``num_unmet`` and ``lag`` of
        coupled chains, nan where a stage has none; per ``monitor_step`` (the number of
        steps done) the monitors; with a schedule also ``stage``.
        ``history.to_dataframe()`` has one row per step, with the monitors' values after
        it. ``history.attrs["stopped_by"]`` is "max_seconds" in a run that this argument
        of ``fit`` ended.
    :param optimizer_state: optax state after the last step.
    :param estimator_state: the estimator's state (persistent chains, the adaptive lag).
    :param best_params: with ``keep_best``, the params at the monitor's best value, if
        it had any.
    :param best_step: number of steps done at that value.
    :param path: with ``keep_path``, the path from independent units to the last params,
        an argument of :func:`ebmpp.smc`, :func:`ebmpp.particle_expectation` and
        :class:`ebmpp.ParallelTempering`.
    :param estimator: the estimator of the last step.
    :param optimizer: its optimiser; None in a copy by pickle, which optax does not
        support.
    :param num_steps: gradient steps in all, including the steps of ``start``.
    :param past: steps by which a run that continues this one chooses its estimator.
    """

    graph: FactorGraph
    params: Params
    history: "xr.Dataset"
    optimizer_state: PyTree
    estimator_state: PyTree
    best_params: Params | None = None
    best_step: int | None = None
    path: Path | None = None
    estimator: Estimator | None = None
    optimizer: optax.GradientTransformation | None = None
    num_steps: int = 0
    past: Past = Past()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"optimizer": None}

    def __repr__(self) -> str:
        steps = self.history.sizes["step"]
        by = f" by {self.estimator!r}" if self.estimator else ""
        best = "" if self.best_step is None else f", best at step {self.best_step}"
        params = optax.tree.size(self.params)
        return f"FitResult({steps} steps{by}, {params} params in {len(self.params)} factors{best})"

    def _card(self) -> Card:
        history = Grid(
            ("history", "first", "last", "at step"), _history_rows(self.history)
        )
        factors = display.factor_grid(self.graph, self.params)
        return Card(repr(self), (history, factors))


def _history_rows(history: "xr.Dataset") -> list[tuple[Any, ...]]:
    """Return first and last values of the history's columns, monitors first."""
    columns = {str(name): v for name, v in history.data_vars.items() if v.size}
    # monitors first
    ordered = sorted(columns.items(), key=lambda pair: pair[1].dims == ("step",))
    rows = []
    for name, column in ordered:
        steps = history[str(column.dims[0])].values
        is_name = column.dtype.kind == "U"
        known = column.values != "" if is_name else ~np.isnan(column.values)
        known = np.flatnonzero(known)
        if not len(known):  # a stage may lack it
            known = np.array([0, -1])
        first = known[0]
        last = known[-1]
        end = column.values[last].item()
        if name == "log_likelihood" and "log_partition_error" in history:
            error = history["log_partition_error"]
            if error.dims == column.dims:
                end = Measured(end, error.values[last].item())
        rows.append((name, column.values[first].item(), end, steps[last].item()))
    return rows
