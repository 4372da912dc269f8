# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of continuous sites as NumPyro kernels, and their limits."""

from typing import Any

from block_tools import run_chains
import numpy as np
import numpyro
import numpyro.distributions as dist

import jax.numpy as jnp

from ebmpp import GibbsBlock
from helpers import assert_law


def walk(y: Any) -> None:
    """A random walk seen through noise."""
    x = numpyro.sample("x", dist.Normal(0, 3).expand([3]).to_event(1))
    numpyro.factor("steps", -0.5 * (jnp.diff(x) ** 2).sum())
    numpyro.sample("y", dist.Normal(x, 0.5).to_event(1), obs=y)


def test_numpyro_runs_a_block_of_all_sites() -> None:
    """It starts at a draw from the prior, and its draws are independent."""
    y = np.float32([0.3, -1.2, 0.8])
    block = GibbsBlock.from_model(walk, ["x"], y)
    assert repr(block).endswith("Gaussian 'x'") and block.layers == {}
    mcmc = run_chains(block, y, 1, 2000, num_warmup=0, chain_method="sequential")
    conditional = block.conditional("x", {"x": jnp.zeros(3)})
    draws = np.asarray(mcmc.get_samples()["x"])
    assert_law(draws.mean(0), conditional.mean, np.sqrt(np.asarray(conditional.variance) / 2000))
