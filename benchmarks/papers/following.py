# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Runs of ``fit`` on models too large to sum: log-likelihoods along the way, and costs."""

from collections.abc import Mapping, Sequence
import math
import time
from typing import Any
import warnings

import numpy as np
from records import Row, rounded
import xarray as xr

import jax

import ebmpp
from ebmpp.errors import DivergenceError
from ebmpp.training import Progress


class Watch:
    """Callback of ``fit``: log-likelihoods per row by annealed importance sampling at
    every monitored step.

    :param rows: rows of the one visible block by name.
    :param base: the rows whose base rates annealing starts from.
    :param seconds: of training, log-likelihoods excluded, after which the run ends.
    """

    def __init__(
        self,
        graph: ebmpp.FactorGraph,
        rows: Mapping[str, Any],
        base: Any,
        *,
        particles: int,
        temperatures: int,
        seed: int = 0,
        seconds: float = math.inf,
    ) -> None:
        self.graph = graph
        self.rows = rows
        self.seed = seed
        self.limit = seconds
        self.annealing = {
            "num_particles": particles,
            "num_temperatures": temperatures,
            "ladder": "adaptive",
            "data": base,
        }
        self.points: list[dict[str, float]] = []
        self.start = time.monotonic()
        self.excluded = 0.0

    def __call__(self, progress: Progress) -> bool:
        """Evaluate; return True when the time is over."""
        jax.block_until_ready(progress.params)
        now = time.monotonic()
        seconds = now - self.start - self.excluded
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the effective sample size is stored
            key = jax.random.fold_in(jax.random.key(self.seed), progress.step)
            ais = ebmpp.ais(self.graph, progress.params, rng_key=key, **self.annealing)
        point = {"step": progress.step, "seconds": seconds}
        point |= {
            name: ais.average_log_likelihood(rows).value
            for name, rows in self.rows.items()
        }
        point |= {
            "standard_error": ais.standard_error,
            "effective": ais.effective_sample_size,
        }
        self.points.append(point)
        self.excluded += time.monotonic() - now
        return seconds > self.limit

    def train(self, data: Any, total: int, **options: Any) -> tuple[xr.Dataset, str]:
        """Run :func:`ebmpp.fit`; return the history and why the run ended.

        :param total: steps of the whole run.
        """
        self.start = time.monotonic()
        try:
            history = ebmpp.fit(
                self.graph, data, callbacks=[self], progress_bar=False, **options
            ).history
        except DivergenceError as error:
            return error.history, f"stopped: {error}"
        stopped = history.sizes["step"] < total
        return history, f"stopped after {self.limit:.0f} s" if stopped else "all steps"

    @property
    def seconds_per_step(self) -> float:
        """Seconds from the first monitored step on, before which everything is compiled."""
        if len(self.points) < 2:
            return math.nan
        first = self.points[min(1, len(self.points) - 2)]
        last = self.points[-1]
        return (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])

    def column(self, name: str) -> np.ndarray:
        """Return a number of all points."""
        return np.array([point[name] for point in self.points], float)


def coupling_numbers(history: xr.Dataset, most: int = 60) -> Row:
    """Summarise the meeting times of a run; empty for a run without coupled pairs."""
    if "meeting_time_mean" not in history or not history.sizes["step"]:
        return {}
    tau, lag, sweeps, trials = (
        history[n].values.astype(float)
        for n in ("meeting_time_mean", "lag", "sweeps", "trials")
    )
    discarded = 2 * (trials - 1)  # over the two draws of a sweep
    return {
        "meeting_time_mean": rounded(np.nanmean(tau)),
        "meeting_time_mean_last": round(float(np.nanmean(tau[-20:])), 1),
        "meeting_time_max": int(np.nanmax(history["meeting_time_max"].values)),
        "lag_last": int(lag[np.isfinite(lag)][-1]),  # a step of another way has none
        "sweeps_a_batch": round(float(np.nanmean(sweeps)), 2),
        "discarded_a_sweep": round(float(np.nanmean(discarded)), 3),
        "sweeps_to_meet": averages(tau - lag, most),
        "discarded": averages(discarded, most),
    }


def averages(values: np.ndarray, most: int = 60) -> list[float | None]:
    """Return means over consecutive parts; None where nothing is finite."""
    means = [
        float(part.mean()) for part in np.array_split(values, min(most, len(values)))
    ]
    return [round(mean, 3) if np.isfinite(mean) else None for mean in means]


def costs(rows: Sequence[Row], printed: Mapping[str, float]) -> str:
    """Return a table of the cost of a batch by method, also relative to CD-1, beside the paper's.

    The minimum over runs is shown, as a busy machine stops some.

    :param rows: runs with "method", "ms_a_batch" and "sweeps_a_batch".
    :param printed: times of methods in the paper, in any unit.
    """
    lines = [
        f"{'method':<52}{'runs':>5}{'ms a batch':>12}{'sweeps':>9}{'over CD-1':>11}{'printed':>9}"
    ]

    def least(runs):
        return float(np.nanmin([row["ms_a_batch"] or np.nan for row in runs]))

    first = [row for row in rows if row["method"] == "CD-1"]
    for label, runs in by_method(rows).items():
        sweeps = float(np.median([row["sweeps_a_batch"] or np.nan for row in runs]))
        line = f"{label:<52}{len(runs):>5}{least(runs):>12.2f}{sweeps:>9.1f}"
        if first:
            line += f"{least(runs) / least(first):>11.1f}"
            line += (
                f"{printed[label] / printed['CD-1']:>9.1f}" if label in printed else ""
            )
        lines.append(line)
    return "\n".join(lines)


def by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group runs by their method, in the order of appearance."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row["method"], []).append(row)
    return grouped


def medians(rows: Sequence[Row], name: str) -> str:
    """Return a table of the median and the range over seeds of a number, by method."""
    lines = [f"{'method':<58}{'seeds':>6}{name:>18}{'range':>24}"]
    for label, runs in by_method(rows).items():
        values = [row[name] for row in runs]
        reach = f"{min(values):.2f} to {max(values):.2f}"
        lines.append(f"{label:<58}{len(runs):>6}{np.median(values):>18.2f}{reach:>24}")
    return "\n".join(lines)
