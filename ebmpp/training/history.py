# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Monitors, history and progress bar of a training run."""

from collections.abc import Callable, Hashable, Mapping
import contextlib
import dataclasses
from functools import partial
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Params, backend, checks
from ebmpp.core.display import Card, Grid, Measured
from ebmpp.errors import ArgumentError, TrainingError
from ebmpp.estimators.metrics import decode
from ebmpp.graph import FactorGraph, display

if TYPE_CHECKING:
    import xarray as xr

_LEAVES_JAX = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)
_MAX_PENDING = 4096  # entries on the device
_LABELS = {
    "tau": "meeting_time_mean",
    "max": "meeting_time_max",
    "lag": "lag",
    "grad": "gradient_norm",
}


#: A function of the params to a scalar.
Watch = Callable[..., Array | float]


@dataclasses.dataclass(
    frozen=True, eq=False
)  # compared by identity: arrays have no hash
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

    fn: Watch
    arguments: tuple[Any, ...] = ()
    takes_state: bool = False
    compiled: bool = True
    log_likelihood: bool = False

    def __call__(self, params: Params, estimator_state: Any = None) -> Array | float:
        """Return the value."""
        state = (estimator_state,) if self.takes_state else ()
        args = (params, *state, *self.arguments)
        return _evaluate(self.fn, *args) if self.compiled else self.fn(*args)


@partial(jax.jit, static_argnums=0)
def _evaluate(fn: Watch, *args: Any) -> Array | float:
    return fn(*args)


@partial(
    jax.tree_util.register_dataclass, data_fields=["tables"], meta_fields=["names"]
)
@dataclasses.dataclass(frozen=True)
class Metrics:
    """Scalars of several steps in few arrays: XLA compiles a kernel for each array that a loop writes.

    :param tables: ``(steps, metrics)`` each, one per dtype, with columns ``names``.
    """

    tables: tuple[Array, ...]
    names: tuple[tuple[str, ...], ...]

    @classmethod
    def stack(cls, metrics: Mapping[str, Array]) -> "Metrics":
        """Collect the metrics of one step, ``(metrics,)`` per dtype."""
        by_dtype: dict[Any, list[str]] = {}
        for name, value in metrics.items():
            by_dtype.setdefault(jnp.result_type(value), []).append(name)
        rows = tuple(
            jnp.stack([metrics[name] for name in names]) for names in by_dtype.values()
        )
        return cls(rows, tuple(map(tuple, by_dtype.values())))

    def columns(self, count: int) -> dict[str, np.ndarray]:
        """Return the first ``count`` rows as columns by name, of tables on the host."""
        tables = zip(self.names, self.tables, strict=True)
        return {
            name: np.asarray(t[:count, i])
            for names, t in tables
            for i, name in enumerate(names)
        }


class Table:
    """Columns of scalars, which stay on the device until they are read; nan where a row lacks one."""

    def __init__(self, columns: Mapping[str, np.ndarray] = {}) -> None:
        self._parts = [dict(columns)] if columns else []
        self._pending: list[tuple[Metrics | dict[str, Any], int, dict[str, int]]] = []

    @property
    def last(self) -> dict[str, Any]:
        """The last row, from the device."""
        self._fetch()
        return {
            name: v[-1]
            for part in self._parts[-1:]
            for name, v in part.items()
            if len(v)
        }

    def append(
        self, rows: Metrics | dict, count: int = 1, constants: Mapping[str, int] = {}
    ) -> None:
        """Add one row, or the first ``count`` rows of metrics with columns that are constant."""
        if len(self._pending) >= _MAX_PENDING:
            self._fetch()
        self._pending.append((rows, count, dict(constants)))

    def discard_running(self) -> None:
        """Drop the rows that the device has not computed."""
        self._pending = [entry for entry in self._pending if backend.is_ready(entry[0])]

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
        dtype = np.result_type(
            *(part[name].dtype for part in self._parts if name in part)
        )
        # where a part has no value
        dtype = dtype if np.issubdtype(dtype, np.floating) else np.dtype(float)

        def missing(part):
            return np.full(len(next(iter(part.values()))), np.nan, dtype)

        return np.concatenate(
            [part[name] if name in part else missing(part) for part in self._parts]
        )

    def _fetch(self) -> None:
        counts = [(count, constants) for _, count, constants in self._pending]
        entries = jax.device_get([rows for rows, _, _ in self._pending])
        self._pending = []
        for rows, (count, constants) in zip(entries, counts, strict=True):
            columns, scalars = (
                (rows.columns(count), constants)
                if isinstance(rows, Metrics)
                else ({}, rows)
            )
            self._parts.append(
                columns
                | {name: np.full(count, value) for name, value in scalars.items()}
            )


class Log:
    """Metrics of the steps, and values of the monitors."""

    def __init__(self, monitors: Mapping[str, Watch]) -> None:
        self.monitors = {
            n: fn if isinstance(fn, Monitor) else jax.jit(fn)
            for n, fn in monitors.items()
        }
        self.steps = Table()
        self.monitored = Table()
        self.attrs: dict[str, Any] = {}

    def append(
        self, metrics: Metrics, count: int, constants: Mapping[str, int]
    ) -> None:
        """Add metrics as :meth:`Table.append` does; refuse monitors with the name of a metric."""
        clash = self.monitors.keys() & {
            *sum(metrics.names, ()),
            *constants,
            "step",
            "monitor_step",
        }
        if clash:
            raise checks.error(
                "fit: monitors", "named unlike the metrics of the steps", sorted(clash)
            )
        self.steps.append(metrics, count, constants)

    def monitor(self, step: int, params: Any, estimator_state: Any) -> None:
        """Add the monitors' values at the params before ``step``."""
        if self.monitors:
            values = {
                n: _value(n, fn, params, estimator_state)
                for n, fn in self.monitors.items()
            }
            self.monitored.append({"monitor_step": step, **values})

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the history as arrays, for :meth:`load`."""
        steps = {f"step:{n}": v for n, v in self.steps.columns().items()}
        return steps | {f"monitor:{n}": v for n, v in self.monitored.columns().items()}

    def load(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Restore the history before ``step``."""

        def select(kind):
            return {
                n.removeprefix(kind): v for n, v in arrays.items() if n.startswith(kind)
            }

        self.steps = Table(select("step:"))
        monitored = select("monitor:")
        # A run that a callback stopped has monitored this step already; the resumed run
        # monitors it again.
        before = monitored.get("monitor_step", np.empty(0)) < step
        self.monitored = Table({name: v[before] for name, v in monitored.items()})

    def latest(self) -> dict[str, str]:
        """Return what the progress bar shows; meeting times without the lag."""
        # nan where a way has none
        last = {name: float(v) for name, v in self.steps.last.items() if v == v}
        for name in {"meeting_time_mean", "meeting_time_max"} & last.keys():
            last[name] -= last.get("lag", 0)
        line = {
            short: f"{last[name]:.3g}"
            for short, name in _LABELS.items()
            if name in last
        }
        if "log_likelihood" in last:
            error = (
                f" +- {float(last['log_partition_error']):.2g}"
                if "log_partition_error" in last
                else ""
            )
            line["log_likelihood"] = f"{float(last['log_likelihood']):.4g}{error}"
        return line | {
            n: f"{float(v):.4g}"
            for n, v in self.monitored.last.items()
            if n != "monitor_step"
        }

    def failure(
        self, kind: type[TrainingError], message: str, params: Params, step: int
    ) -> TrainingError:
        """Return an error that carries the last good params and the history before ``step``."""
        message += " The error's .params are the last good ones, .history has the steps before."
        return kind(message, params, self.dataset(step), step)

    def dataset(self, stop: int | None = None) -> "xr.Dataset":
        """Return the history so far, up to step ``stop``, with read-only arrays."""
        # xarray and pandas take more than a second to import
        from ebmpp.training.dataset import (
            History,
        )

        columns = self.steps.columns(stop)
        values = {
            name: ("step", decode(name, v))
            for name, v in columns.items()
            if name != "ok"
        }
        count = len(next(iter(columns.values()), ()))
        dataset = History(values, {"step": np.arange(count)}, self.attrs)
        monitored = self.monitored.columns()
        if not monitored:
            return dataset
        steps = monitored.pop("monitor_step")
        values = {name: ("monitor_step", v) for name, v in monitored.items()}
        return (
            dataset.assign(values)
            .assign_coords(monitor_step=steps)
            .sel(monitor_step=slice(stop))
        )


def _value(
    name: str, monitor: Watch, params: Any, estimator_state: Any
) -> Array | float:
    """Evaluate a monitor; raise ArgumentError if it cannot be compiled or returns no scalar."""
    # new dicts, which the monitor may change
    copy = jax.tree.map(lambda leaf: leaf, params)
    try:
        value = (
            monitor(copy, estimator_state)
            if isinstance(monitor, Monitor)
            else monitor(copy)
        )
    except _LEAVES_JAX as error:
        hint = "Give Monitor(fn, compiled=False), which is called as it is"
        cause = f"fit: monitor {name!r} cannot be compiled, since it uses float, if or numpy"
        raise ArgumentError(f"{cause}. {hint}. ({error})") from error
    if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
        raise checks.error(f"fit: value of monitor {name!r}", "a scalar", value)
    return value


class Bar(contextlib.AbstractContextManager["Bar"]):
    """Progress bar of a run that counts neither compilation nor dispatched steps as done."""

    def __init__(self, total: int | None, start: int, hidden: bool) -> None:
        self._bar = tqdm(
            total=total, initial=start, disable=hidden, desc="training", unit="step"
        )
        self._compiled: set[Hashable] = set()  # programs
        self._began: float | None = None  # time at which compilation began

    def __exit__(self, *raised: object) -> None:
        self._bar.close()

    def begin(self, program: Hashable) -> None:
        """Prepare for steps of a program, of which the first ones compile."""
        if not self._bar.disable and program not in self._compiled:
            self._compiled.add(program)
            self._began = time.monotonic()
            self._bar.set_description("compiling")

    def update(
        self, count: int, state: Any, latest: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Count steps that end in this state, and show the latest values when the bar is drawn."""
        if self._bar.disable:
            return
        # else dispatched steps would count, and Ctrl-C would wait for them
        backend.wait(state)
        if self._began is None:
            if self._bar.update(count):
                self._bar.set_postfix(latest())
            return
        seconds = time.monotonic() - self._began
        done = self._bar.n + count
        self._began = None
        # also the clock, so that the rate is that of steps alone
        self._bar.reset(self._bar.total)
        self._bar.n = self._bar.initial = self._bar.last_print_n = done
        self._bar.set_description("training", refresh=False)
        self._bar.set_postfix({"compiled": f"{seconds:.1f} s"})

    def stop(self, reason: str) -> None:
        """Say why the run ends before its last step."""
        self._bar.set_description(f"stopped by {reason}")


def card(title: str, graph: FactorGraph, params: Params, history: "xr.Dataset") -> Card:
    """Return first and last values of the history, and the factors, for display."""
    rows = []
    columns = {str(name): v for name, v in history.data_vars.items() if v.size}
    for name, v in sorted(
        columns.items(), key=lambda item: item[1].dims != ("monitor_step",)
    ):
        steps = history[str(v.dims[0])].values
        is_name = v.dtype.kind == "U"
        valid = np.flatnonzero(v.values != "" if is_name else ~np.isnan(v.values))
        # a stage may lack it
        first, last = (valid[0], valid[-1]) if len(valid) else (0, -1)
        end = v.values[last].item()
        if name == "log_likelihood" and "log_partition_error" in history:
            error = history["log_partition_error"]
            end = (
                Measured(end, error.values[last].item())
                if error.dims == v.dims
                else end
            )
        rows.append((name, v.values[first].item(), end, steps[last].item()))
    grid = Grid(("history", "first", "last", "at step"), rows)
    return Card(title, (grid, display.factor_grid(graph, params)))
