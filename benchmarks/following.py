# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A callback of ``fit`` for models too large to sum: log-likelihoods along a run, kept as they come."""

from collections.abc import Mapping
import math
from pathlib import Path
import time
from typing import Any
import warnings

import xarray as xr

import jax

import ebmpp
from ebmpp.errors import DivergenceError
from ebmpp.training import Progress

#: of the history of a run with coupled chains
TIMES = ("meeting_time_mean", "meeting_time_max", "lag")


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


def gather(folder: Path, script: str, names: Mapping[str, Any]) -> dict[str, xr.Dataset]:
    """Every run that there is, finished or not, by name."""
    found = {}
    for name in names:
        if raw(folder, script, name).exists():
            with xr.open_dataset(raw(folder, script, name), engine="h5netcdf") as made:
                found[name] = made.load()
    return found


def raw(folder: Path, script: str, name: str) -> Path:
    """Where a run is kept."""
    return folder / "raw" / f"{script}-{name}.nc"
