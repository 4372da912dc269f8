# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A callback of ``fit`` for models too large to sum: log-likelihoods along a run, as they come; costs."""

from collections.abc import Mapping, Sequence
import math
from pathlib import Path
import time
from typing import Any
import warnings

import numpy as np
import xarray as xr

import jax

import ebmpp
from ebmpp.errors import DivergenceError
from ebmpp.training import Progress

#: of the history of a run with coupled chains
TIMES = ("meeting_time_mean", "meeting_time_max", "lag", "sweeps", "trials")


class Watch:
    """Log-likelihoods a row by annealed importance sampling at every monitored step.

    :param file: where the run is kept.
    :param rows: name: rows of the one visible block.
    :param base: the rows whose base rates annealing starts from.
    :param known: attributes to keep with the run.
    :param seconds: of training (log-likelihoods left out) after which the run ends.
    """

    def __init__(
        self,
        file: Path,
        graph: ebmpp.FactorGraph,
        rows: Mapping[str, Any],
        base: Any,
        *,
        particles: int,
        temperatures: int,
        seed: int = 0,
        known: Mapping[str, float] | None = None,
        seconds: float = math.inf,
    ) -> None:
        self.file, self.graph, self.rows, self.limit = file, graph, rows, seconds
        self.annealing = {
            "num_particles": particles,
            "num_temperatures": temperatures,
            "ladder": "adaptive",
            "data": base,
        }
        self.seed, self.known = seed, dict(known or {})
        self.points: list[dict[str, float]] = []
        self.began, self.spent = time.monotonic(), 0.0
        self.history = xr.Dataset()

    @property
    def seconds(self) -> float:
        """Of training."""
        return time.monotonic() - self.began - self.spent

    def __call__(self, progress: Progress) -> bool:
        jax.block_until_ready(progress.params)
        seconds, start = self.seconds, time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the effective sample size is kept
            key = jax.random.fold_in(jax.random.key(self.seed), progress.step)
            ais = ebmpp.ais(self.graph, progress.params, rng_key=key, **self.annealing)
        point = {"step": progress.step, "seconds": seconds}
        point |= {name: ais.average_log_likelihood(rows).value for name, rows in self.rows.items()}
        point |= {"standard_error": ais.standard_error, "effective": ais.effective_sample_size}
        self.points.append(point)
        self.history = progress.history
        self.save("still running, or killed")
        self.spent += time.monotonic() - start
        return seconds > self.limit

    def train(self, data: Any, total: int, **options: Any) -> str:
        """``ebmpp.fit`` with this callback; what ended it.

        :param total: steps of the whole run.
        :param options: of :func:`ebmpp.fit`.
        """
        ended = "all steps"
        self.began = time.monotonic()
        try:
            fit = ebmpp.fit(self.graph, data, callbacks=[self], progress_bar=False, **options)
            self.history = fit.history
            if fit.history.sizes["step"] < total:
                ended = f"stopped after {self.limit:.0f} s"
        except DivergenceError as error:
            ended, self.history = f"stopped: {error}", error.history
        self.save(ended)
        return ended

    def save(self, ended: str) -> None:
        """Keep what there is."""
        columns = {n: ("point", [p[n] for p in self.points]) for n in self.points[0]}
        if TIMES[0] in self.history and self.history.sizes["step"]:
            columns |= {n: ("train_step", self.history[n].values.astype(float)) for n in TIMES}
        made = xr.Dataset(columns, attrs={"ended": ended} | self.known)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        made.to_netcdf(self.file, engine="h5netcdf")


def gather(folder: Path, script: str, names: Mapping[str, Any]) -> dict[str, dict[int, xr.Dataset]]:
    """Every run that there is, finished or not, by name and seed."""
    found: dict[str, dict[int, xr.Dataset]] = {}
    for name in names:
        own = {
            int(p.stem.rsplit("-", 1)[1]): p
            for p in raw(folder, script, name, 0).parent.glob(f"{script}-{name}-*.nc")
        }
        for seed in sorted(own):
            with xr.open_dataset(own[seed], engine="h5netcdf") as made:
                found.setdefault(name, {})[seed] = made.load()
    return found


def raw(folder: Path, script: str, name: str, seed: int) -> Path:
    """Where a run is kept."""
    return folder / "raw" / f"{script}-{name}-{seed}.nc"


def a_step(made: xr.Dataset) -> float:
    """Seconds a step, from the first monitored step on, before which everything is compiled."""
    step, seconds = made["step"].values, made["seconds"].values
    first = min(1, len(step) - 2)
    return float((seconds[-1] - seconds[first]) / (step[-1] - step[first])) if len(step) > 1 else math.nan


def costs(rows: Sequence[Mapping[str, Any]], printed: Mapping[str, float]) -> str:
    """What a batch costs by method: the least over runs, since a busy machine stops some, and over CD-1's,
    beside the paper's.

    :param rows: numbers of runs, with "method", "ms_a_batch" and "sweeps_a_batch".
    :param printed: times of methods in the paper, in any unit.
    """
    lines = [f"{'method':<52}{'runs':>5}{'ms a batch':>12}{'sweeps':>9}{'over CD-1':>11}{'printed':>9}"]
    least = lambda own: float(np.nanmin([row["ms_a_batch"] or np.nan for row in own]))
    first = [row for row in rows if row["method"] == "CD-1"]
    for label in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == label]
        sweeps = float(np.median([row["sweeps_a_batch"] or np.nan for row in own]))
        line = f"{label:<52}{len(own):>5}{least(own):>12.2f}{sweeps:>9.1f}"
        if first:
            line += f"{least(own) / least(first):>11.1f}"
            line += f"{printed[label] / printed['CD-1']:>9.1f}" if label in printed else ""
        lines.append(line)
    return "\n".join(lines)
