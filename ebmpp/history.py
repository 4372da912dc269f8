# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The history of a training run, as it comes."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xarray as xr

import jax
from jax import Array

Monitor = Callable[[Any], Array]


class Log:
    """Metrics as they come, on the device until somebody looks."""

    def __init__(self, monitors: Mapping[str, Monitor], every: int) -> None:
        self.monitors = {name: jax.jit(fn) for name, fn in monitors.items()}
        self.every = every
        self.steps: list[dict[str, Array]] = []
        self.monitored: list[tuple[int, dict[str, Array]]] = []

    def append(self, metrics: dict[str, Array]) -> None:
        """The metrics of the next step."""
        self.steps.append(metrics)

    def monitor(self, step: int, params: Any) -> None:
        """What the monitors say of the params before ``step``."""
        if self.monitors:
            self.monitored.append((step, {name: fn(params) for name, fn in self.monitors.items()}))

    def arrays(self) -> dict[str, np.ndarray]:
        """The history as arrays: what :meth:`load` takes."""
        self.steps = jax.device_get(self.steps)  # host values pass through: each is fetched once
        self.monitored = jax.device_get(self.monitored)
        made = {f"step:{n}": np.array([m[n] for m in self.steps]) for n in (self.steps or [{}])[0]}
        made |= {f"monitor:{n}": np.array([row[n] for _, row in self.monitored]) for n in self.monitors}
        return made | {"monitor_step": np.array([step for step, _ in self.monitored], int)}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on after what :meth:`arrays` made."""
        by_step = {n.removeprefix("step:"): v for n, v in arrays.items() if n.startswith("step:")}
        count = len(next(iter(by_step.values()), ()))
        self.steps = [{n: v[i] for n, v in by_step.items()} for i in range(count)]
        at = {n: arrays[f"monitor:{n}"] for n in self.monitors}
        self.monitored = [
            (int(s), {n: v[i] for n, v in at.items()}) for i, s in enumerate(arrays["monitor_step"])
        ]

    def latest(self) -> dict[str, str]:
        """What the progress bar shows."""
        shown = {"meeting_time_mean": "tau", "meeting_time_max": "max", "lag": "lag", "gradient_norm": "grad"}
        last = self.steps[-1]
        line = {short: f"{float(last[name]):.3g}" for name, short in shown.items() if name in last}
        if self.monitored:
            line |= {name: f"{float(value):.4g}" for name, value in self.monitored[-1][1].items()}
        return line

    def failed_at(self) -> int | None:
        """The first step whose gradient or params were not finite."""
        bad = [i for i, metrics in enumerate(self.steps) if not bool(metrics["ok"])]
        return bad[0] if bad else None

    def dataset(self, stop: int | None = None) -> xr.Dataset:
        """The history so far."""
        steps = jax.device_get(self.steps[:stop])
        names = [name for name in (steps[0] if steps else {}) if name != "ok"]
        made = xr.Dataset(
            {name: ("step", np.array([metrics[name] for metrics in steps])) for name in names},
            coords={"step": np.arange(len(steps))},
        )
        if not self.monitored:
            return made
        monitored = jax.device_get(self.monitored)
        values = {
            name: ("monitor_step", np.array([row[name] for _, row in monitored])) for name in self.monitors
        }
        return made.assign(values).assign_coords(monitor_step=[step for step, _ in monitored])
