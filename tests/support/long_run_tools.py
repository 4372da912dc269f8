# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Long runs of a small machine, for this process and for others that are killed."""

import os
from pathlib import Path
import signal
import subprocess
import sys
from typing import Any

from gibbs_tools import PARAMS, RBM
import numpy as np
from numpyro.infer import MCMC

import jax
import jax.numpy as jnp

from ebmpp import BlockedGibbs
from ebmpp.kernels import LongDraws, LongRun

KEY = jax.random.key(5)
KERNEL = BlockedGibbs(RBM)  # one object, so that its programs are compiled once
WARMUP, DRAWS, THINNING = 7, 60, 3


def chains(kernel: Any = KERNEL, draws: int = DRAWS, count: int = 3, **options: Any) -> MCMC:
    options = {"num_warmup": WARMUP, "thinning": THINNING, "chain_method": "vectorized"} | options
    return MCMC(kernel, num_samples=draws, num_chains=count, progress_bar=False, **options)


def corner(z: Any) -> Any:
    return z["v"][:2] * 1.5


def longest(carry: Any, z: Any) -> Any:
    """How long the first unit has been on, and the longest so far."""
    now = jnp.where(z["v"][0] > 0, carry[0] + 1, 0)
    return now, jnp.maximum(carry[1], now)


START = (jnp.int32(0), jnp.int32(0))


def run(directory: Any = None, draws: int = DRAWS, resume: bool = False, **options: Any) -> LongDraws:
    """A run that makes a checkpoint, and a file of draws, every 20 steps."""
    options = {"batch_length": 8, "covariance": corner, "fold": (START, longest)} | options
    if directory is not None:
        options = {"directory": directory, "keep": True, "every": 20, "resume": resume} | options
    return LongRun(chains(draws=draws), **options).run(KEY, PARAMS, extra_fields=("i",))


def told(made: LongDraws) -> dict[str, Any]:
    """Everything that a run returns, as arrays."""
    moments = {"fn": vars(made.moments), **{n: vars(m) for n, m in made.fields.items()}}
    state = made.last_state._replace(rng_key=jax.random.key_data(made.last_state.rng_key))
    draws = made.draws() if made.num_kept else {}
    kept = {
        g: {str(n): x.values for n, x in draws[g].data_vars.items()} for g in getattr(draws, "children", ())
    }
    parts = {"moments": moments, "cov": made.covariance, "fold": made.folded, "state": state, "draws": kept}
    return jax.tree.map(np.asarray, parts)


def assert_same(first: LongDraws, second: LongDraws) -> None:
    """Bit by bit; nan is nan."""
    one, other = told(first), told(second)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def start(directory: Path, calls: int) -> subprocess.Popen:
    """A process with a run that kills itself when a file is to be put in its place for this many times."""
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]; import long_run_tools as t; "
    return subprocess.Popen([sys.executable, "-c", f"{code}t.deadly({str(directory)!r}, {calls})"])


def deadly(directory: str, calls: int) -> None:
    """What :func:`start` starts."""
    real, seen = os.replace, []

    def replace(*given: Any) -> None:
        seen.append(given)
        if len(seen) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*given)

    os.replace = replace
    run(directory)
