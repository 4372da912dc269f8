# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The Gaussian-Bernoulli machine: a tiny one against a mixture of Gaussians, and the program itself."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from numpyro.infer import MCMC
import pytest
from scipy import stats
import xarray as xr

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp import exact
from helpers import assert_law, assert_rows_law
from models import gaussian_bernoulli as model

FEW = ["--latent=3", "--steps=4", "--batch-size=10", "--num-pairs=4", "--no-progress"]
STATES = np.array(list(itertools.product([0.0, 1.0], repeat=2)))
TINY = model.declare(3, 2)
PARAMS = {
    "v:h": {
        "mean": jnp.array([0.5, -0.2, 0.0]),
        "log_variance": jnp.array([-1.0, 0.0, 1.0]),
        "weight": jnp.array([[0.8, -0.5], [0.3, 1.0], [-1.2, 0.4]]),
        "bias": jnp.array([0.2, -0.4]),
    }
}


def mixture(params: Any) -> tuple[Array, Array, Array]:
    """Log-weights of every h, v integrated out under its base measure; means and variances of v given h."""
    p = params["v:h"]
    variance, centre = jnp.exp(p["log_variance"]), p["mean"] + (STATES - 0.5) @ p["weight"].T
    log_weight = STATES @ p["bias"] + (centre**2 / variance + p["log_variance"]).sum(1) / 2
    return log_weight, centre, variance


def test_its_law_is_the_mixture_that_the_formula_says() -> None:
    log_weight, centre, variance = mixture(PARAMS)
    share = jax.nn.softmax(log_weight)
    v = np.random.default_rng(0).normal(size=(20, 3))
    wanted = [
        np.log(
            sum(w * stats.multivariate_normal(c, np.diag(variance)).pdf(row) for w, c in zip(share, centre))
        )
        for row in v
    ]
    np.testing.assert_allclose(exact.log_likelihood(TINY, PARAMS, v.astype(np.float32)), wanted, rtol=1e-5)
    log_z = float(jax.nn.logsumexp(log_weight))
    np.testing.assert_allclose(exact.log_partition(TINY, PARAMS), log_z, rtol=1e-6)


@pytest.mark.slow
def test_gibbs_chains_have_its_law() -> None:
    log_weight, centre, variance = mixture(PARAMS)
    share = np.asarray(jax.nn.softmax(log_weight), float)
    mcmc = MCMC(
        ebmpp.BlockedGibbs(TINY),
        num_warmup=30,
        num_samples=1,
        num_chains=8000,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), PARAMS)
    v = np.asarray(mcmc.get_samples()["v"], float)
    wanted = np.concatenate([share @ centre, share @ (np.asarray(centre) ** 2 + np.asarray(variance))])
    assert_rows_law(np.concatenate([v, v**2], 1), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("moves", ["maximal", "langevin"])
def test_coupled_gradients_are_those_of_the_log_partition_function(moves: str) -> None:
    wanted = jax.grad(lambda p: -jax.nn.logsumexp(mixture(p)[0]))(PARAMS)
    coupling = ebmpp.moves.langevin_sweep(TINY, step_size=1.2, num_steps=3) if moves == "langevin" else moves
    est = ebmpp.unbiased_expectation(
        TINY,
        PARAMS,
        lambda x: jax.grad(lambda p: TINY.energy(p, x))(PARAMS),
        rng_key=jax.random.key(1),
        num_pairs=6000,
        coupling=coupling,
    )
    for name, value in est.value["v:h"].items():
        assert_law(value, wanted["v:h"][name], est.standard_error["v:h"][name], comparisons=14)


@pytest.mark.slow
def test_the_estimator_of_log_likelihood_gradients_is_autodiff_of_the_exact_one() -> None:
    v = np.random.default_rng(3).normal(size=(6, 3)).astype(np.float32)

    def log_likelihood(p: Any) -> Array:
        log_weight, centre, variance = mixture(p)
        each = -((v[:, None] - centre) ** 2 / variance + jnp.log(2 * jnp.pi * variance)).sum(-1) / 2
        return jax.nn.logsumexp(each + jax.nn.log_softmax(log_weight), axis=1).mean()

    wanted, got = jax.grad(log_likelihood)(PARAMS), exact.grad_log_likelihood(TINY, PARAMS, v)
    for name, value in wanted["v:h"].items():
        mean = got["v:h"][name]
        mean = mean.mean(0) if mean.ndim > value.ndim else mean
        np.testing.assert_allclose(mean, value, atol=2e-5)


def test_images_are_standardised_and_come_back_grey() -> None:
    data = model.images("digits", seed=0)
    assert np.abs(data.train.mean(0)).max() < 1e-4 and data.train.std(0).max() < 1.001
    order = np.random.default_rng(0).permutation(1797)
    real = np.asarray(ebmpp.data.digits())[order][: len(data.held_out)]
    back = data.grey(data.held_out) * 17
    assert ((back >= 16 * real - 1e-3) & (back <= 16 * real + 1 + 1e-3)).all()  # within the level's own step


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["ucd", "langevin"])
def test_it_writes_what_it_says(
    estimator: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_SWEEPS", 20)
    model.main([f"--out={tmp_path}", f"--estimator={estimator}", *FEW])
    for name in ("samples", "params", "learning_curve"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    with xr.open_datatree(tmp_path / "samples.nc", engine="h5netcdf") as tree:
        assert tree["posterior"]["v"].shape[-1] == 64
    told = capsys.readouterr().out
    assert "an image, exact" in told and "of the exact variance" in told and told.count("wrote") == 5


def test_numbers_are_checked(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        model.parse(["--steps=0"])
    assert "--steps is at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        model.parse(["--estimator=langevin", "--step-size=-1", "--latent=2"])
    assert "is a number above 0, not -1.0" in capsys.readouterr().err
