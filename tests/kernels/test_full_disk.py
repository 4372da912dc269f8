# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A long run on a full disk ends with an error of the library."""

from pathlib import Path
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly

PROGRAM = """
import resource, signal, sys
import jax
from numpyro.infer import MCMC
import ebmpp
from ebmpp.errors import CheckpointError
from ebmpp.kernels import LongRun

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
graph = ebmpp.layered(v=ebmpp.Bernoulli(20), h=ebmpp.Bernoulli(10))
mcmc = MCMC(ebmpp.BlockedGibbs(graph), num_warmup=0, num_samples=2000, num_chains=2,
            chain_method="vectorized", progress_bar=False)
for limit in (400_000, 100_000, 2_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        run = LongRun(mcmc, directory=f"{sys.argv[1]}/{limit}", keep=True)
        run.run(jax.random.key(0), graph.init(jax.random.key(0)))
    except CheckpointError as error:
        print("refused")
"""


def test_a_full_disk_is_a_checkpoint_error(tmp_path: Path) -> None:
    call = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(
        call, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0 and result.stdout.split() == ["refused"] * 3, (
        result.stderr
    )
