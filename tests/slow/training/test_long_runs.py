# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Longer runs: annealing along their path, the bias of their gradients, and pretraining."""

from functools import cache

import numpy as np
import pytest
import zoo

import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, Bernoulli, Bias, Bilinear, FactorGraph, Gaussian, ParticleUCD, Poisson, Stage
from ebmpp.estimators import gradient_bias
from ebmpp.training import monitors, pretrain, trail
from helpers import assert_law


@cache
def trained() -> ebmpp.Fit:
    graph, data = ebmpp.layered(v=Bernoulli(9), h=Bernoulli(4)), ebmpp.data.bars_and_stripes(3)
    options = {"estimator": PCD(num_chains=200), "optimizer": optax.sgd(0.2), "num_steps": 1500}
    return ebmpp.fit(graph, data, rng_key=zoo.KEY, keep_path=True, progress_bar=False, **options)


def test_annealing_along_a_path_is_exact() -> None:
    fit = trained()
    assert 5 < len(fit.path) < 40  # as many knots as the model needs, of 64 checkpoints
    log_z = float(ebmpp.exact.log_partition(fit.graph, fit.params))
    options = {"rng_key": zoo.KEY, "path": fit.path}
    smc = ebmpp.smc(fit.graph, fit.params, num_particles=2000, **options)
    assert smc.standard_error < 0.1
    assert_law(np.exp(smc.log_z - log_z).mean(), 1, smc.standard_error)
    sizes = {"num_particles": 200, "num_pairs": 20}
    mean = ebmpp.particle_expectation(fit.graph, fit.params, lambda x: x["v"], **sizes, **options)
    assert_law(mean.value, ebmpp.exact.moments(fit.graph, fit.params)["v"], mean.standard_error)
    assert mean.acceptance > 0.5


def test_a_path_that_needs_too_many_knots_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail, "_MOST", 2)
    options = {"estimator": CD(), "optimizer": optax.sgd(5.0), "num_steps": 3, "progress_bar": False}
    with pytest.warns(UserWarning, match="more than 2 knots"):
        fit = ebmpp.fit(zoo.graph("rbm"), np.eye(4), rng_key=zoo.KEY, keep_path=True, **options)
    assert len(fit.path) == 5 and fit.path.ends_at(fit.params)


def test_half_of_the_draws_at_a_knot_are_effective_at_the_next() -> None:
    path = trained().path
    assert path.kept == ("h",)
    bits = np.unpackbits(np.arange(16, dtype=np.uint8)[:, None], axis=1)[:, 4:].astype(float)
    rungs = [path.at(jnp.array(float(i))) for i in range(len(path))]
    knots = [(rung, path.slope(rung.params, {"h": bits})) for rung in rungs]
    log_p = np.zeros(16)
    for (low, slope), (high, next_slope) in zip(knots, knots[1:], strict=False):
        gain = np.asarray(path.gain(low, high, slope, next_slope), float)
        p = np.exp(log_p - log_p.max())
        p /= p.sum()
        assert (p @ np.exp(gain)) ** 2 / (p @ np.exp(2 * gain)) > 0.4  # 0.5 among 500 particles
        log_p = log_p + gain


def test_gradient_bias_starts_from_the_state_of_the_run() -> None:
    """It is nan where the chains belong to another estimator or stage."""
    graph, rows = zoo.graph("rbm"), zoo.rows("rbm", 4)["v"]
    stages = [Stage(num_steps=1, estimator=PCD(num_chains=20)), Stage(num_steps=1, estimator=CD())]
    options = {"rng_key": zoo.KEY, "num_repeats": 3, "num_references": 3}
    options |= {"reference": ParticleUCD(num_particles=20, max_rungs=4)}
    bias = monitors.gradient_bias(graph, rows, PCD(num_chains=20), **options)
    run = {"rng_key": zoo.KEY, "monitors": {"bias": bias}, "monitor_every": 1, "progress_bar": False}
    fit = ebmpp.fit(graph, rows, schedule=stages, **run)
    values = fit.history["bias"].values
    assert np.isfinite(values[:2]).all() and np.isnan(values[2]) and fit.estimator == CD()
    direct = gradient_bias(graph, zoo.params("rbm"), rows, CD(), **options)
    monitor = monitors.gradient_bias(graph, rows, CD(), **options)
    assert monitor(zoo.params("rbm")) == direct.total.squared_bias


def test_levels_of_several_blocks_and_families_are_trained() -> None:
    factors = [*map(Bias, ("x", "y", "h", "top")), Bilinear("x", "h"), Bilinear("y", "h")]
    factors += [Bilinear("side", "y"), Bilinear("h", "top")]
    latent = {"h": Bernoulli(2), "top": Bernoulli(2), "side": Bernoulli(2)}
    graph = FactorGraph({"x": Poisson(2), "y": Gaussian(3)}, latent, factors)
    generator = np.random.default_rng(0)
    rows = {"x": generator.poisson(2.0, (8, 2)).astype(np.float32), "y": generator.normal(size=(8, 3))}
    options = {"optimizer": optax.sgd(0.01), "num_steps": 2, "progress_bar": False}
    params, start = pretrain(graph, rows, rng_key=zoo.KEY, **options), graph.init(zoo.KEY, rows)
    graph.check(params)
    assert all((np.asarray(params[name]) != start[name]).any() for name in start)


def test_a_pretrained_deep_model_starts_above_its_initial_likelihood() -> None:
    images = ebmpp.data.binarize(ebmpp.data.digits())[:, 16:48]  # four rows of pixels in the middle
    graph = ebmpp.layered(v=Bernoulli(32), h1=Bernoulli(8), h2=Bernoulli(6))
    options = {"rng_key": zoo.KEY, "num_steps": 1000, "optimizer": optax.sgd(0.05), "progress_bar": False}
    likelihood = lambda params: float(ebmpp.exact.log_likelihood(graph, params, images[:300]).mean())
    assert likelihood(pretrain(graph, images, **options)) > likelihood(graph.init(zoo.KEY, images)) + 1.5
