# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Long runs of a small machine, in this process and in others that are killed."""

from functools import cache
import os
from pathlib import Path
import signal
import subprocess
import sys
from typing import Any

from mcmc_tools import make_mcmc, strong_params
import numpy as np
from numpyro.infer import MCMC
import zoo

import jax

from ebmpp import BlockedGibbs
from ebmpp.kernels import LongDraws, LongRun

WARMUP, DRAWS, THINNING = 7, 60, 3


@cache
def kernel() -> BlockedGibbs:
    return BlockedGibbs(zoo.graph("rbm"))


def chains(
    some_kernel: Any = None, draws: int = DRAWS, count: int = 3, **options: Any
) -> MCMC:
    options = {"num_warmup": WARMUP, "thinning": THINNING} | options
    return make_mcmc(some_kernel or kernel(), draws, count, **options)


def run(
    directory: Any = None, draws: int = DRAWS, resume: bool = False, **options: Any
) -> LongDraws:
    """Make a run that writes a checkpoint after the batch in which every 20th step is."""
    options = {"batch_length": 9} | options
    if directory is not None:
        options = {
            "directory": directory,
            "keep": True,
            "checkpoint_every": 20,
            "resume": resume,
        } | options
    return LongRun(chains(draws=draws), **options).run(
        zoo.KEY, strong_params(), extra_fields=("i",)
    )


def contents(result: LongDraws) -> dict[str, Any]:
    """Return everything that a run returns, as arrays."""
    moments = {
        "fn": vars(result.moments),
        **{n: vars(m) for n, m in result.fields.items()},
    }
    state = result.last_state._replace(
        rng_key=jax.random.key_data(result.last_state.rng_key)
    )
    tree = result.draws().load() if result.num_kept else {}
    draws = {g: {str(n): x.values for n, x in tree[g].data_vars.items()} for g in tree}
    return jax.tree.map(
        np.asarray, {"moments": moments, "state": state, "draws": draws}
    )


def assert_same_run(first: LongDraws, second: LongDraws) -> None:
    """Assert that two runs are equal bit by bit; nan equals nan."""
    jax.tree.map(np.testing.assert_array_equal, contents(first), contents(second))


def start_killed_run(directory: Path, calls: int) -> subprocess.Popen:
    """Start a process whose run kills itself when it renames a file for the ``calls``-th time."""
    here = Path(__file__).parent
    code = (
        f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parents[1])!r}]; "
        "import long_run_tools as t; "
    )
    return subprocess.Popen(
        [sys.executable, "-c", f"{code}t.run_until_killed({str(directory)!r}, {calls})"]
    )


def run_until_killed(directory: str, calls: int) -> None:
    replace, count = os.replace, iter(range(1, 1000))

    def replace_or_die(*args: Any) -> None:
        if next(count) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*args)

    os.replace = replace_or_die
    run(directory)
