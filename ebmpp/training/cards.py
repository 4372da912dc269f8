# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What ``print`` and notebooks show of a training run: where its history ends, and its params."""

from typing import TYPE_CHECKING

import numpy as np

from ebmpp.core.display import Card, Cell, Grid, Measured
from ebmpp.core.types import Params
from ebmpp.graph import FactorGraph, display

if TYPE_CHECKING:
    import xarray as xr


def card(title: str, graph: FactorGraph, params: Params, history: "xr.Dataset") -> Card:
    """First and last values of what the history has, and the factors."""
    rows = []
    named = {str(name): v for name, v in history.data_vars.items() if v.size}
    for name, v in sorted(named.items(), key=lambda item: item[1].dims != ("monitor_step",)):
        along = str(v.dims[0])
        steps, there = history[along].values, np.flatnonzero(~np.isnan(v.values))
        first, last = (there[0], there[-1]) if len(there) else (0, -1)  # a stage may lack it
        ends = v.values[last].item(), steps[last].item()
        rows.append((name, v.values[first].item(), _last(name, ends[0], last, history), ends[1]))
    told = Grid(("history", "first", "last", "at step"), rows)
    return Card(title, (told, display.factor_grid(graph, params)))


def _last(name: str, value: float, at: int, history: "xr.Dataset") -> Cell:
    """With its error, where the history has one."""
    if name == "log_likelihood" and "log_partition_error" in history:
        error = history["log_partition_error"]
        if error.dims == history[name].dims:
            return Measured(value, error.values[at].item())
    return value
