# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Monitors and history of a training run."""

from collections.abc import Callable, Mapping
import dataclasses
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import Params, backend, checks, num_rows
from ebmpp.errors import ArgumentError, TrainingError
from ebmpp.estimators.base import COLUMNS, decode

if TYPE_CHECKING:
    import xarray as xr

_CANNOT_TRACE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)
_MAX_PENDING = 4096  # entries on the device


#: A function of the params to a scalar.
MonitorFn = Callable[..., Array | float]


# compared by identity: arrays have no hash
@dataclasses.dataclass(frozen=True, eq=False)
class Monitor:
    """Function of the params with further arrays as arguments.

    A plain function of the params is a monitor too, compiled by :func:`ebmpp.fit`.

    :param fn: called with the params, then the estimator's state if ``takes_state``,
        then the arguments. Hashable: equal functions are compiled once.
    :param arguments: arrays, or pytrees of them.
    :param takes_state: pass the state of the run's estimator (persistent chains, say).
    :param compiled: False for a function that cannot be traced.
    :param log_likelihood: True for a mean log-likelihood or pseudo-likelihood in nats
        per row: the run warns if it falls.

    **Example**

    >>> import jax.numpy as jnp
    >>> distance = Monitor(lambda params, truth: abs(params["v"] - truth).max(), (jnp.ones(2),))
    >>> float(distance({"v": jnp.array([1.0, 3.0])}))
    2.0
    """

    fn: MonitorFn
    arguments: tuple[PyTree, ...] = ()
    takes_state: bool = False
    compiled: bool = True
    log_likelihood: bool = False

    def __call__(self, params: Params, estimator_state: PyTree = None) -> Array | float:
        """Return the value."""
        args = self.inputs(params, estimator_state)
        return _evaluate(self.fn, *args) if self.compiled else self.fn(*args)

    def inputs(self, params: Params, estimator_state: PyTree) -> tuple[PyTree, ...]:
        """Return the arguments of ``fn``."""
        state = (estimator_state,) if self.takes_state else ()
        return (params, *state, *self.arguments)


@partial(jax.jit, static_argnums=0)
def _evaluate(fn: MonitorFn, *args: PyTree) -> Array | float:
    return fn(*args)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metrics:
    """Scalars of several steps in few arrays.

    XLA compiles a kernel for each array that a loop writes.

    :param tables: ``(steps, metrics)`` each, one per dtype, with columns ``names``.
    """

    tables: tuple[Array, ...]
    names: tuple[tuple[str, ...], ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def stack(cls, metrics: Mapping[str, Array]) -> "Metrics":
        """Collect the metrics of one step, ``(metrics,)`` per dtype."""
        by_dtype = {}
        for name, value in metrics.items():
            by_dtype.setdefault(jnp.result_type(value), []).append(name)
        names = tuple(map(tuple, by_dtype.values()))
        rows = tuple(jnp.stack([metrics[name] for name in group]) for group in names)
        return cls(rows, names)


class _Pending(NamedTuple):
    """The first ``count`` rows of metrics on the device, and scalars that are equal in all."""

    metrics: Metrics
    count: int
    scalars: dict[str, ArrayLike]

    def columns(self) -> dict[str, np.ndarray]:
        """Return the rows as columns by name, of values on the host."""
        columns = {}
        for names, table in zip(self.metrics.names, self.metrics.tables, strict=True):
            columns |= zip(names, np.asarray(table)[: self.count].T)
        return columns | {n: np.full(self.count, v) for n, v in self.scalars.items()}


class MetricTable:
    """Columns of scalars, on the device until they are read; nan where a row lacks one."""

    def __init__(self, *parts: Mapping[str, np.ndarray]) -> None:
        self._parts = [dict(part) for part in parts if part]
        self._pending: list[_Pending] = []

    @property
    def last(self) -> dict[str, float]:
        """The last row, from the device."""
        self._fetch()
        part = self._parts[-1] if self._parts else {}
        return {name: v[-1] for name, v in part.items() if len(v)}

    def append(
        self, metrics: Metrics, count: int, scalars: Mapping[str, ArrayLike]
    ) -> None:
        """Add the first ``count`` rows of metrics, and scalars that are equal in all."""
        if len(self._pending) >= _MAX_PENDING:
            self._fetch()
        self._pending.append(_Pending(metrics, count, dict(scalars)))

    def discard_running(self) -> None:
        """Drop the rows that the device has not computed."""
        self._pending = [p for p in self._pending if backend.is_ready(p)]

    def columns(self, stop: int | None = None) -> dict[str, np.ndarray]:
        """Return read-only columns by name, up to row ``stop``."""
        self._fetch()
        names = dict.fromkeys(name for part in self._parts for name in part)
        joined = {name: self._column(name) for name in names}
        self._parts = [joined] if joined else []
        for v in joined.values():
            v.flags.writeable = False
        return {name: v[:stop] for name, v in joined.items()}

    def _column(self, name: str) -> np.ndarray:
        dtypes = [part[name].dtype for part in self._parts if name in part]
        dtype = np.result_type(*dtypes)
        values = []
        is_real = np.issubdtype(dtype, np.floating)
        for part in self._parts:
            missing = np.full(num_rows(part), np.nan, dtype if is_real else float)
            values.append(part.get(name, missing))
        return np.concatenate(values)

    def _fetch(self) -> None:
        for pending in jax.device_get(self._pending):
            self._parts.append(pending.columns())
        self._pending = []


class Log:
    """Metrics of the steps, and values of the monitors."""

    def __init__(self, monitors: Mapping[str, MonitorFn]) -> None:
        self.monitors = {
            name: fn if isinstance(fn, Monitor) else jax.jit(fn)
            for name, fn in monitors.items()
        }
        self.steps = MetricTable()
        self.monitored = MetricTable()
        self.attrs: dict[str, str] = {}

    def append(
        self, metrics: Metrics, count: int, constants: Mapping[str, int]
    ) -> None:
        """Add metrics to the table of steps; refuse monitors with the name of a metric."""
        names = {*sum(metrics.names, ()), *constants, "step", "monitor_step"}
        clash = self.monitors.keys() & names
        if clash:
            raise checks.error(
                "fit: monitors", "named unlike the metrics of the steps", sorted(clash)
            )
        self.steps.append(metrics, count, constants)

    def monitor(self, step: int, params: Params, estimator_state: PyTree) -> None:
        """Add the monitors' values at the params before ``step``."""
        if not self.monitors:
            return
        values = {
            name: _value(name, monitor, params, estimator_state)
            for name, monitor in self.monitors.items()
        }
        self.monitored.append(Metrics((), ()), 1, {"monitor_step": step, **values})

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the history as arrays, for :meth:`load`."""
        steps = {f"step:{n}": v for n, v in self.steps.columns().items()}
        return steps | {f"monitor:{n}": v for n, v in self.monitored.columns().items()}

    def load(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Restore the history before ``step``."""
        columns = {"step": {}, "monitor": {}}
        for key, values in arrays.items():
            kind, _, name = key.partition(":")
            columns[kind][name] = values
        self.steps = MetricTable(columns["step"])
        monitored = columns["monitor"]
        # A run that a callback stopped has monitored this step already; the resumed run
        # monitors it again.
        before = monitored.get("monitor_step", np.empty(0)) < step
        self.monitored = MetricTable({name: v[before] for name, v in monitored.items()})

    def latest(self) -> dict[str, str]:
        """Return what the progress bar shows; meeting times without the lag."""
        # nan where a method has none
        last = {name: float(v) for name, v in self.steps.last.items() if v == v}
        for name in {"meeting_time_mean", "meeting_time_max"} & last.keys():
            last[name] -= last.get("lag", 0)
        line = {
            column.short: f"{last[name]:.3g}"
            for name, column in COLUMNS.items()
            if column.short and name in last
        }
        if "log_likelihood" in last:
            line["log_likelihood"] = f"{last['log_likelihood']:.4g}"
            if "log_partition_error" in last:
                line["log_likelihood"] += f" +- {last['log_partition_error']:.2g}"
        for name, value in self.monitored.last.items():
            if name != "monitor_step":
                line[name] = f"{float(value):.4g}"
        return line

    def failure(
        self, kind: type[TrainingError], message: str, params: Params, step: int
    ) -> TrainingError:
        """Return an error that carries the last good params and the history before ``step``."""
        message += " The error's .params are the last good ones, .history has the steps before."
        return kind(message, params, self.dataset(step), step)

    def dataset(self, stop: int | None = None) -> "xr.Dataset":
        """Return the history so far, up to step ``stop``, with read-only arrays."""
        # xarray and pandas take more than a second to import
        from ebmpp.training.dataset import HistoryDataset

        columns = self.steps.columns(stop)
        values = {
            name: ("step", decode(name, v))
            for name, v in columns.items()
            if name != "ok"
        }
        steps = np.arange(num_rows(columns) if columns else 0)
        dataset = HistoryDataset(values, {"step": steps}, self.attrs)
        monitored = self.monitored.columns()
        if not monitored:
            return dataset
        dataset = dataset.assign_coords(monitor_step=monitored.pop("monitor_step"))
        values = {name: ("monitor_step", v) for name, v in monitored.items()}
        return dataset.assign(values).sel(monitor_step=slice(stop))


def _value(
    name: str, monitor: MonitorFn, params: Params, estimator_state: PyTree
) -> Array | float:
    """Evaluate a monitor; raise ArgumentError if it cannot be compiled or returns no scalar."""
    # new dicts, which the monitor may change
    copy = jax.tree.map(lambda leaf: leaf, params)
    try:
        is_monitor = isinstance(monitor, Monitor)
        value = monitor(copy, estimator_state) if is_monitor else monitor(copy)
    except _CANNOT_TRACE as error:
        raise ArgumentError(
            f"fit: monitor {name!r} cannot be compiled, since it uses float, if or "
            "numpy. Give Monitor(fn, compiled=False), which is called as it is. "
            f"({error})"
        ) from error
    checks.on_host("fit", value)
    if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
        raise checks.error(f"fit: value of monitor {name!r}", "a scalar", value)
    return value
