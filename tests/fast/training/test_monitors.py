# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Monitors against enumeration, and what they compile."""

import dataclasses

import numpy as np
import pytest
from training_tools import Walker, numbered

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import CD, PCD, Bernoulli, Categorical, ParticleUCD, Spin, Stage, exact
from ebmpp.core import random
from ebmpp.errors import IntractableError, StateError
from ebmpp.estimators import SDCP, gradient_bias
from ebmpp.estimators.base import Estimate, Estimator
from ebmpp.training import monitors, watching
from ebmpp.training.monitors import Monitor
from helpers import assert_law, assert_rows_law, pair, random_params

KEY = jax.random.key(0)
RBM = pair(Bernoulli(3), Bernoulli(2))
DATA = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 1]], np.float32)
PARAMS = random_params(RBM, seed=1, scale=1.0)
DEEP = ebmpp.layered(v=Bernoulli(3), a=Bernoulli(2), b=Bernoulli(2))


def test_log_likelihood_is_the_mean_over_rows():
    states, p = exact.probabilities(RBM, PARAMS)
    visible = {tuple(v): 0.0 for v in np.asarray(states["a"], int).tolist()}
    for v, weight in zip(np.asarray(states["a"], int).tolist(), np.asarray(p), strict=True):
        visible[tuple(v)] += float(weight)
    wanted = np.mean([np.log(visible[tuple(v)]) for v in DATA.astype(int).tolist()])
    np.testing.assert_allclose(monitors.log_likelihood(RBM, DATA)(PARAMS), wanted, rtol=1e-5)


def test_data_are_arguments_of_one_program():
    values = [monitors.log_likelihood(RBM, data)(PARAMS) for data in (DATA, DATA[::-1], 1 - DATA)]
    size = watching._evaluate._cache_size()
    for data in (DATA, 0 * DATA):
        values.append(monitors.log_likelihood(RBM, data)(PARAMS))
        monitors.log_likelihood(RBM, data)(random_params(RBM, seed=2))
    assert watching._evaluate._cache_size() == size
    assert values[0] == values[3] and len({float(v) for v in values}) == 3  # rows backwards: the same mean


def test_monitors_are_functions_under_transformations():
    monitor = monitors.log_likelihood(RBM, DATA)
    np.testing.assert_allclose(jax.jit(monitor)(PARAMS), monitor(PARAMS), rtol=1e-6)


def test_what_cannot_be_summed_is_refused_at_once():
    big = ebmpp.layered(v=Bernoulli(40), h=Bernoulli(40))
    with pytest.raises(IntractableError, match=r"2\*\*40 joint states.* monitors\.estimated_"):
        monitors.log_likelihood(big, np.zeros((2, 40)))
    with pytest.raises(IntractableError, match="latent blocks 'a' and 'b' interact .*reconstruction"):
        monitors.free_energy_gap(DEEP, DATA, DATA)


def test_an_estimated_likelihood_is_near_the_exact_one_and_is_followed():
    options = {"num_particles": 400, "num_temperatures": 60}
    exactly = monitors.log_likelihood(RBM, DATA)(PARAMS)
    values = [
        monitors.estimated_log_likelihood(RBM, DATA, rng_key=jax.random.key(i), base=1 - DATA, **options)(
            PARAMS
        )
        for i in range(10)
    ]
    assert_rows_law(np.array(values)[:, None], exactly[None], comparisons=1)
    follow = monitors.estimated_log_likelihood(RBM, DATA, rng_key=KEY, **options)
    assert follow(PARAMS) == follow(PARAMS) != values[0]
    fit = ebmpp.fit(
        RBM,
        DATA,
        params=PARAMS,
        estimator=CD(k=1),
        num_steps=2,
        rng_key=KEY,
        monitors={"estimate": follow},
        progress_bar=False,
    )
    assert fit.history.estimate[0] == pytest.approx(follow(PARAMS), abs=1e-5)
    with pytest.raises(IntractableError, match="latent blocks 'a' and 'b' interact .*reconstruction"):
        monitors.estimated_log_likelihood(DEEP, DATA, rng_key=KEY)


def test_the_gap_is_that_of_log_likelihoods():
    """log Z cancels: mean log p of training rows minus that of held-out ones."""
    train, held = DATA[:1], DATA[1:]
    gap = monitors.free_energy_gap(RBM, train, held)(PARAMS)
    mean = lambda rows: exact.log_likelihood(RBM, PARAMS, rows).mean()
    np.testing.assert_allclose(gap, mean(train) - mean(held), rtol=1e-4)


def enumerated_reconstruction(graph, params, data):
    """E over latents given v of the squared error, by summing over all joint states."""
    states, p = jax.device_get(exact.probabilities(graph, params))
    (visible,) = graph.visible
    latents = np.concatenate([states[b].reshape(len(p), -1) for b in graph.latent], axis=1)
    statistics, errors = np.asarray(graph.families[visible].statistics(states[visible])), []
    for row in np.asarray(data):
        here = (states[visible] == row).reshape(len(p), -1).all(1)
        for h in np.flatnonzero(here):
            same = (latents == latents[h]).all(1)
            mean = np.tensordot(p[same] / p[same].sum(), statistics[same], 1)
            errors.append(p[h] / p[here].sum() * ((statistics[h] - mean) ** 2).mean())
    return np.sum(errors) / len(data)


def test_reconstruction_has_the_law_of_a_draw_of_the_latents():
    graph, data = pair(Categorical(2, 3), Spin(2)), np.array([[0, 2], [1, 1], [2, 2]])
    params = random_params(graph, seed=1, scale=1.0)
    monitor = lambda key: monitors.reconstruction(graph, data, key)(params)
    values = jax.vmap(monitor)(jax.random.split(KEY, 400))
    assert_rows_law(values, enumerated_reconstruction(graph, params, data))
    assert monitor(KEY) == monitor(KEY)


def test_reconstruction_takes_latents_that_interact():
    value = monitors.reconstruction(DEEP, DATA, KEY)(jax.tree.map(jnp.zeros_like, DEEP.init(KEY)))
    assert float(value) == 0.25  # means of one half


# -- variance ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Noise(Estimator):
    """A gradient of known variance."""

    scale: float

    def init(self, graph, params, data, batch, key):
        return ()

    def estimate(self, graph, params, state, batch, key):
        flat, unravel = jax.flatten_util.ravel_pytree(params)
        noise = jax.random.normal(jax.random.wrap_key_data(key), flat.shape)
        return Estimate(unravel(100 + self.scale * noise), state, {})


def test_total_variance_is_summed_over_all_params():
    repeats, count = 500, sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    value = monitors.gradient_variance(RBM, DATA, Noise(2.0), repeats, KEY)(PARAMS)
    wanted = 4.0 * count
    assert_law(value, wanted, wanted * np.sqrt(2 / ((repeats - 1) * count)))  # chi-squared


def test_an_estimator_that_carries_a_state_is_repeated_from_the_runs_own():
    data = np.zeros((4, 1), np.float32)
    variance = monitors.gradient_variance(pair(ebmpp.Gaussian(1), Bernoulli(1)), data, Walker(), 200, KEY)
    still = monitors.gradient_variance(pair(ebmpp.Gaussian(1), Bernoulli(1)), data, Noise(1.0), 20, KEY)
    assert variance.takes_state and not still.takes_state
    schedule = [Stage(num_steps=2, estimator=Walker()), Stage(num_steps=2, estimator=Noise(0.0))]
    at = Monitor(lambda params, state: state["at"] if state else jnp.nan, takes_state=True)
    made = numbered(
        schedule=schedule, monitors={"variance": variance, "at": at, "still": still}, monitor_every=1
    )
    # the gradient moves by a tenth of a standard normal, in all of the 3 params alike
    assert_law(made.history["variance"][:3], 0.03, 0.03 * np.sqrt(2 / 199))
    assert np.isnan(made.history["variance"][3:]).all() and made.history["still"].notnull().all()
    np.testing.assert_array_equal(made.history["at"][1:3], made.history["walk"][:2])


def test_chains_of_other_batches_have_no_variance_here():
    """S-DCP carries a chain a row of the run's batches, which are smaller than the monitor's."""
    variance = monitors.gradient_variance(RBM, DATA, SDCP(d=2, k=1), 2, KEY)
    state = SDCP(d=2, k=1).init(RBM, PARAMS, {"a": DATA[:2]}, 2, random.key_pair(KEY))
    assert np.isnan(variance(PARAMS, state))
    own = SDCP(d=2, k=1).init(RBM, PARAMS, {"a": DATA}, 4, random.key_pair(KEY))
    assert variance(PARAMS, own) > 0


@pytest.mark.slow
def test_the_bias_of_a_run_is_followed_from_its_own_state():
    """Where the chains are another estimator's, or another stage's, there is none."""
    stages = [Stage(num_steps=1, estimator=PCD(num_chains=20)), Stage(num_steps=1, estimator=CD())]
    options = {"rng_key": KEY, "num_repeats": 3, "num_references": 3}
    reference = ParticleUCD(num_particles=20, max_rungs=4)
    bias = monitors.gradient_bias(RBM, DATA, PCD(num_chains=20), reference=reference, **options)
    run = {"rng_key": KEY, "monitors": {"bias": bias}, "monitor_every": 1, "progress_bar": False}
    made = ebmpp.fit(RBM, DATA, schedule=stages, **run)
    values = made.history["bias"].values
    assert np.isfinite(values[:2]).all() and np.isnan(values[2])
    assert made.estimator == CD()
    by_hand = monitors.gradient_bias(RBM, DATA, CD(), reference=reference, **options)
    direct = gradient_bias(RBM, PARAMS, DATA, CD(), reference=reference, **options)
    assert by_hand(PARAMS) == direct.total.squared_bias


@pytest.mark.parametrize("repeats", [1, 2.0])
def test_a_variance_needs_two(repeats):
    with pytest.raises(ValueError, match=f"num_repeats is an int of at least 2, not {repeats}"):
        monitors.gradient_variance(RBM, DATA, CD(), repeats, KEY)


@pytest.mark.parametrize(
    "make",
    [
        lambda data: monitors.log_likelihood(RBM, data),
        lambda data: monitors.free_energy_gap(RBM, DATA, data),
        lambda data: monitors.reconstruction(RBM, data, KEY),
        lambda data: monitors.gradient_variance(RBM, data, CD(), 2, KEY),
        lambda data: monitors.gradient_bias(RBM, data, CD(), rng_key=KEY),
    ],
)
def test_data_are_checked_at_once(make):
    with pytest.raises(StateError, match=r"got 2.0 at index \(0, 0\)"):
        make(DATA * 2)
