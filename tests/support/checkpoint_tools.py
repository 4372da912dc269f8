# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A run with checkpoints, for this process and for others that are killed."""

import os
from pathlib import Path
import signal
import subprocess
import sys
from typing import Any

import numpy as np

import jax
import optax

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, ParticleUCD, WeightedPCD
from ebmpp.training import Fit

RBM = ebmpp.layered(v=Bernoulli(9), h=Bernoulli(3))
DATA = np.asarray(ebmpp.data.bars_and_stripes(3))
ESTIMATORS = {
    "cd": CD(),
    "pcd": PCD(num_chains=10),
    "ucd": UCD(num_pairs=4, num_slots=4, coupling="common"),
    "particles": ParticleUCD(num_particles=20, path="training", max_rungs=8, refit_every=5),
    "weighted": WeightedPCD(num_chains=20, num_watchers=20),
}


def size(params: Any) -> jax.Array:
    return (params["v:h"] ** 2).sum()


def run(
    steps: int = 12,
    directory: Any = None,
    estimator: str = "cd",
    resume: bool = False,
    data: Any = DATA,
    graph: ebmpp.FactorGraph = RBM,
    **options: Any,
) -> Fit:
    """A short run that makes a checkpoint every four steps."""
    options = {"rng_key": jax.random.key(0), "batch_size": 5, "monitors": {"size": size}} | options
    options = {"optimizer": optax.adam(0.05)} | options
    return ebmpp.fit(
        graph,
        data,
        estimator=ESTIMATORS[estimator],
        num_steps=steps,
        monitor_every=3,
        checkpoint_dir=directory,
        checkpoint_every=4,
        resume=resume,
        progress_bar=False,
        **options,
    )


def names(directory: Path) -> list[str]:
    """Of what is in a directory, to any depth."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def finished(directory: Path) -> list[int]:
    """The steps of the checkpoints in a directory."""
    return sorted(int(path.stem.removeprefix("checkpoint-")) for path in directory.glob("checkpoint-*.zip"))


def start(directory: Path, die: str = "") -> subprocess.Popen:
    """A process with a run that has no end, in a directory; it goes on where one before it stopped.

    :param die: "fsync" or "replace": it kills itself in the midst of its third checkpoint, with the bytes
        written or on the disk, and not yet in their place.
    """
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]; import checkpoint_tools as t; "
    return subprocess.Popen([sys.executable, "-c", f"{code}t.endless({str(directory)!r}, {die!r})"])


def endless(directory: str, die: str) -> None:
    """What :func:`start` starts."""
    if die:
        real, calls = getattr(os, die), []

        def deadly(*given: Any) -> Any:
            calls.append(given)
            if len(calls) > 3:  # the marker, two checkpoints, and this one
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given)

        setattr(os, die, deadly)
    run(10**6, directory, resume=True)
