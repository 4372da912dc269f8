# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The history of a training run, as it comes."""

from collections.abc import Mapping
import dataclasses
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.errors import ArgumentError
from ebmpp.training.watching import Monitor, Watch

if TYPE_CHECKING:
    import xarray as xr

#: What happens where a traced array is taken for a number or for numpy's.
_LEAVES = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
_MOST_WAITING = 4096  # rows on the device; each scalar is an array of its own there


@partial(jax.tree_util.register_dataclass, data_fields=["tables"], meta_fields=["names"])
@dataclasses.dataclass(frozen=True)
class Metrics:
    """Scalars of several steps, side by side: XLA compiles a kernel for each array that a loop writes.

    :param tables: ``(steps, metrics)``, one per dtype.
    :param names: of the columns of each.
    """

    tables: tuple[Array, ...]
    names: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, metrics: Mapping[str, Array]) -> "Metrics":
        """The metrics of one step, ``(metrics,)`` per dtype."""
        by_dtype: dict[Any, list[str]] = {}
        for name, value in metrics.items():
            by_dtype.setdefault(jnp.result_type(value), []).append(name)
        rows = tuple(jnp.stack([metrics[name] for name in names]) for names in by_dtype.values())
        return cls(rows, tuple(map(tuple, by_dtype.values())))

    def columns(self) -> dict[str, np.ndarray]:
        """The columns by name, from the device."""
        tables = zip(self.names, jax.device_get(self.tables), strict=True)
        return {name: table[:, i] for names, table in tables for i, name in enumerate(names)}


class Table:
    """Rows of scalars by name, in columns; on the device until somebody looks.

    What a row lacks is nan, and a column of whole numbers that lacks one is of floats.
    """

    def __init__(self, columns: Mapping[str, np.ndarray] = MappingProxyType({})) -> None:
        self._parts = [dict(columns)] if columns else []  # of rows that have the same names
        self._waiting: list[Mapping[str, Any]] = []
        self._several: list[tuple[Metrics, int, dict[str, int]]] = []  # of chunks, their steps, and constants

    def __len__(self) -> int:
        return sum(map(_length, self._parts)) + len(self._waiting) + sum(n for _, n, _ in self._several)

    @property
    def last(self) -> dict[str, Any]:
        """The last row, from the device."""
        self._fetch()
        whole = [part for part in self._parts[-1:] if _length(part)]
        return {name: v[-1] for part in whole for name, v in part.items()}

    def append(self, row: Mapping[str, Any]) -> None:
        """One more row."""
        full = len(self._waiting) >= _MOST_WAITING
        if full or self._several or (self._waiting and row.keys() != self._waiting[-1].keys()):
            self._fetch()
        self._waiting.append(row)

    def extend(self, metrics: Metrics, count: int, constants: Mapping[str, int]) -> None:
        """The first ``count`` rows of metrics, and columns that are constant."""
        if self._waiting or len(self._several) >= _MOST_WAITING:
            self._fetch()
        self._several.append((metrics, count, dict(constants)))

    def columns(self, stop: int | None = None) -> dict[str, np.ndarray]:
        """The columns by name, up to row ``stop``; they cannot be written."""
        self._fetch()
        names = dict.fromkeys(name for part in self._parts for name in part)
        whole = {name: self._column(name) for name in names}
        self._parts = [whole] if whole else []
        for v in whole.values():
            v.flags.writeable = False
        return {name: v[:stop] for name, v in whole.items()}

    def _column(self, name: str) -> np.ndarray:
        dtype = np.result_type(*(part[name].dtype for part in self._parts if name in part))
        if not all(name in part for part in self._parts) and not np.issubdtype(dtype, np.floating):
            dtype = np.dtype(float)
        without = lambda part: np.full(_length(part), np.nan)
        given = [part[name] if name in part else without(part) for part in self._parts]
        return np.concatenate(given, dtype=dtype, casting="same_kind")

    def _fetch(self) -> None:
        rows, self._waiting = jax.device_get(self._waiting), []
        if rows:
            self._parts.append({name: np.array([row[name] for row in rows]) for name in rows[0]})
        several, self._several = self._several, []
        for metrics, count, constants in several:
            columns = {name: column[:count] for name, column in metrics.columns().items()}
            self._parts.append(columns | {name: np.full(count, value) for name, value in constants.items()})


def _length(columns: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(columns.values()), ()))


class Log:
    """Metrics step by step, and what monitors say now and then.

    :param monitors: functions of the params, or :class:`~ebmpp.monitors.Monitor`.
    """

    def __init__(self, monitors: Mapping[str, Watch]) -> None:
        self.monitors = {n: fn if isinstance(fn, Monitor) else jax.jit(fn) for n, fn in monitors.items()}
        self.steps, self.monitored = Table(), Table()

    def append(self, metrics: Metrics, count: int, constants: Mapping[str, int]) -> None:
        """Add the metrics of consecutive steps, of which the first ``count`` are valid.

        :param constants: further columns, the same in all these steps.

        :raises ArgumentError: for a monitor with the name of a metric, which would replace it.
        """
        clash = self.monitors.keys() & {*sum(metrics.names, ()), *constants, "step", "monitor_step"}
        if clash:
            raise ArgumentError(
                f"fit: a monitor is named {min(clash)!r}, as is what the history has of each step; call it "
                "something else"
            )
        self.steps.extend(metrics, count, constants)

    def monitor(self, step: int, params: Any, estimator_state: Any) -> None:
        """What the monitors say of the params before ``step``."""
        if self.monitors:
            values = {n: _value(n, fn, params, estimator_state) for n, fn in self.monitors.items()}
            self.monitored.append({"monitor_step": step, **values})

    def arrays(self) -> dict[str, np.ndarray]:
        """The history as arrays: what :meth:`load` takes."""
        made = {f"step:{n}": v for n, v in self.steps.columns().items()}
        return made | {f"monitor:{n}": v for n, v in self.monitored.columns().items()}

    def load(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Go on before ``step`` after what :meth:`arrays` made."""
        of = lambda kind: {n.removeprefix(kind): v for n, v in arrays.items() if n.startswith(kind)}
        self.steps = Table(of("step:"))
        monitored = of("monitor:")
        # A run that was stopped by a callback looked at this step already, and the one that goes on will.
        before = monitored.get("monitor_step", np.empty(0)) < step
        self.monitored = Table({name: v[before] for name, v in monitored.items()})

    def latest(self) -> dict[str, str]:
        """What the progress bar shows."""
        shown = {"meeting_time_mean": "tau", "meeting_time_max": "max", "lag": "lag", "gradient_norm": "grad"}
        last = self.steps.last
        line = {short: f"{float(last[name]):.3g}" for name, short in shown.items() if name in last}
        if "log_likelihood" in last:
            error = f" +- {float(last['log_partition_error']):.2g}" if "log_partition_error" in last else ""
            line["log_likelihood"] = f"{float(last['log_likelihood']):.4g}{error}"
        return line | {n: f"{float(v):.4g}" for n, v in self.monitored.last.items() if n != "monitor_step"}

    def failed_at(self) -> int | None:
        """The first step whose gradient or params were not finite."""
        bad = np.flatnonzero(~self.steps.columns()["ok"])
        return int(bad[0]) if len(bad) else None

    def dataset(self, stop: int | None = None) -> "xr.Dataset":
        """The history so far, up to step ``stop``; its arrays cannot be written."""
        import xarray as xr  # with pandas more than a second: for when there is something to keep

        columns = self.steps.columns(stop)
        made = xr.Dataset(
            {name: ("step", v) for name, v in columns.items() if name != "ok"},
            coords={"step": np.arange(len(self.steps))[:stop]},
        )
        monitored = self.monitored.columns()
        if not monitored:
            return made
        at = monitored.pop("monitor_step")
        if stop is not None:
            monitored, at = {n: v[at <= stop] for n, v in monitored.items()}, at[at <= stop]
        values = {name: ("monitor_step", v) for name, v in monitored.items()}
        return made.assign(values).assign_coords(monitor_step=at)


def _value(name: str, monitor: Watch, params: Any, estimator_state: Any) -> Array | float:
    """:raises ArgumentError: for a monitor that leaves jax, or returns no number."""
    given = jax.tree.map(lambda leaf: leaf, params)  # dicts of its own
    try:
        value = monitor(given, estimator_state) if isinstance(monitor, Monitor) else monitor(given)
    except _LEAVES as error:
        raise ArgumentError(
            f"fit: monitor {name!r} leaves jax while it is compiled, by float, if or numpy; give "
            f"Monitor(fn, compiled=False), which is called as it is. jax says: {error}"
        ) from error
    except TypeError as error:
        if "valid JAX type" not in str(error):
            raise
        raise ArgumentError(
            f"fit: monitor {name!r} returned no number, and a scalar is expected: {error}"
        ) from error
    if not _is_scalar(value):
        told = f"shape {value.shape}" if hasattr(value, "shape") else checks.tell(value)
        raise ArgumentError(f"fit: monitor {name!r} returned {told}, and a scalar is expected")
    return value


def _is_scalar(value: Any) -> bool:
    if not hasattr(value, "dtype"):
        return isinstance(value, int | float)
    return np.shape(value) == () and (value.dtype == bool or jnp.issubdtype(value.dtype, jnp.number))
