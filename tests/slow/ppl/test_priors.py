# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of models whose priors are energies with latents: posteriors in NumPyro, and conditionals."""

from typing import Any

import block_tools
from model_cases import Case, brute_force
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import Gibbs, HMCGibbs
from prior_cases import CASES, Y, block_of, energy, image, prior
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.errors import StateError
from ebmpp.ppl import Conjugate, CoupledComposite, composite_expectation, gibbs_fn
from helpers import assert_law, assert_rows_law


@pytest.mark.parametrize("name", CASES)
def test_conditionals_match_the_joint_density(name: str) -> None:
    case, block, values = block_of(name)
    block.verify(case.model, *case.args)
    exact = jax.jit(lambda v: brute_force(Case(case.model, case.sites, case.args, 0), block, v))(values)
    reported = block.log_conditionals(values)
    for site in case.sites:
        count = exact[site].shape[-1]
        np.testing.assert_allclose(np.exp(reported[site])[..., :count], np.exp(exact[site]), atol=5e-5)


def image_posterior() -> tuple[np.ndarray, float]:
    """Means of pixels and of the precision of :func:`image`, which is integrated out."""
    states = ((np.arange(16)[:, None] >> np.arange(4)) & 1) * 2.0 - 1
    params = prior("spins")[1]
    log = states @ params["v"] + np.log(2 * np.cosh(params["h"] + states @ params["v:h"])).sum(1)
    rate = 1.0 + 0.5 * ((Y - states) ** 2).sum(1)
    weight = np.exp(log - 4.0 * np.log(rate))
    weight /= weight.sum()
    return weight @ states, float(weight @ (4.0 / rate))


@pytest.mark.parametrize("kind", ["gibbs", "function", "both"])
def test_kernels_have_the_posterior(kind: str) -> None:
    """In Gibbs, by HMCGibbs, and with the precision in the block."""
    block, noise = block_of("image")[1], block_tools.short_hmc(image)
    kernels = {
        "gibbs": lambda: Gibbs([(block, ["z"]), (noise, None)]),
        "function": lambda: HMCGibbs(noise, gibbs_fn(block), ["z"]),
        "both": lambda: GibbsBlock.from_model(image, ["z", "precision"], Y, num_sweeps=2),
    }
    draws = block_tools.run_chains(kernels[kind](), Y, 300).get_samples(group_by_chain=True)
    mean, precision = image_posterior()
    assert_rows_law(np.asarray(draws["z"], float).mean(1), mean, comparisons=5)
    assert_rows_law(np.asarray(draws["precision"], float).mean(1), precision, comparisons=5)


def test_coupled_composite_is_unbiased() -> None:
    conditional = lambda sites, y: dist.Gamma(4.0, 1.0 + 0.5 * ((y - sites["z"]) ** 2).sum())
    steps = [block_of("image")[1], Conjugate("precision", conditional, dist.Gamma(2.0, 1.0))]
    options = {"rng_key": jax.random.key(3), "num_pairs": 2000, "k": 2, "m": 5}
    result = composite_expectation(CoupledComposite(steps), lambda sites: sites, Y, **options)
    assert set(result.value) == {"z", "precision"}  # latents are not part of the state
    mean, precision = image_posterior()
    assert result.num_unmet == 0 and (result.meeting_time > 1).any()
    assert_law(result.value["z"], mean, result.standard_error["z"], comparisons=5)
    assert_law(result.value["precision"], precision, result.standard_error["precision"], comparisons=5)


def test_degenerate_latent_keeps_the_units_and_is_counted() -> None:
    def model(y: Any) -> None:
        bias = numpyro.sample("bias", dist.Normal(0, 1))
        biases = {"h": prior("spins")[1]["h"] + bias}
        z = numpyro.sample("z", energy("spins", biases, validate_args=False))
        numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)

    block = GibbsBlock.from_model(model, ["z"], Y)
    siblings = lambda bias: {"_gibbs_sites": {"bias": jnp.array(bias)}}
    begin = lambda bias: block.init(jax.random.key(0), 0, {"z": jnp.ones(4)}, (Y,), siblings(bias))
    with pytest.raises(StateError, match="site 'z' is nan where it is -1"):
        begin(jnp.nan)
    state = block.sample(begin(0.3), (Y,), siblings(jnp.nan))
    assert int(state.kept) == 4 and (state.z["z"] == 1).all()
