# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A run that writes checkpoints every four steps, in this process or in one that is killed."""

import os
from pathlib import Path
import signal
import subprocess
import sys
from typing import Any

from training_tools import ADAM, train

from ebmpp.training import FitResult


def run(directory: Any = None, num_steps: int = 12, **options: Any) -> FitResult:
    """Train with Adam and an estimator whose state is a random walk."""
    options = {
        "monitors": {"sum": _sum},
        "keep_best": ("sum", "max"),
        "monitor_every": 3,
    } | options
    options = {
        "optimizer": ADAM,
        "checkpoint_dir": directory,
        "checkpoint_every": 4,
    } | options
    return train(num_steps=num_steps, **options)


def _sum(params: Any) -> Any:
    return params["v:h"].sum()


def steps_in(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory."""
    return sorted(
        int(path.stem.removeprefix("checkpoint-"))
        for path in directory.glob("checkpoint-*.zip")
    )


def names_in(directory: Path) -> list[str]:
    """Return the relative paths of everything in a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def start_process(directory: Path, die_in: str = "") -> subprocess.Popen:
    """Start a process that resumes an unbounded run in a directory.

    :param die_in: "fsync" or "replace": the process kills itself during its third
        checkpoint, at this call.
    """
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    code = (
        f"import checkpoint_tools as t; t.run_endlessly({str(directory)!r}, {die_in!r})"
    )
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment)


def run_endlessly(directory: str, die_in: str) -> None:
    """Body of the process of :func:`start_process`."""
    if die_in:
        function, calls = getattr(os, die_in), []

        def kill_or_call(*args: Any) -> Any:
            calls.append(args)
            if len(calls) > 2:  # two checkpoints, and this one
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        setattr(os, die_in, kill_or_call)
    run(directory, 10**6, resume=True)
