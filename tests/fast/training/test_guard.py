# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A run ends with a model that normalises, or with an error that carries one."""

import dataclasses

import numpy as np
import pytest
from training_tools import Recorder, assert_same_run

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, Exponential, Gaussian, layered
from ebmpp.errors import DivergenceError, DomainError, NormalizationError
from ebmpp.estimators.base import Estimate
from ebmpp.training.optimizers import ball, projected

GENERATOR = np.random.default_rng(0)
ROWS = (GENERATOR.normal(size=(200, 6)) @ GENERATOR.normal(size=(6, 6))).astype(np.float32)
GAUSSIAN = layered(v=Gaussian(6), h=Gaussian(4))
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Pushing(Recorder):
    """Its gradient is -1 everywhere, so a step of rate 1 adds 1 to each param."""

    def estimate(self, graph, params, state, batch, key):
        return Estimate(jax.tree.map(lambda p: -jnp.ones_like(p), params), state, {})


@pytest.mark.parametrize("steps", [4, 6, 100])
@pytest.mark.parametrize("estimator", [PCD(num_chains=50), UCD(num_pairs=8)])
def test_a_rate_that_leaves_the_domain_is_told_with_a_model_that_is_in_it(estimator, steps):
    given = {"rng_key": KEY, "estimator": estimator, "num_steps": steps, "progress_bar": False}
    with pytest.raises(NormalizationError, match=r"blocks \['v', 'h'\] has smallest eigenvalue") as caught:
        ebmpp.fit(GAUSSIAN, ROWS, optimizer=optax.sgd(0.5), **given)
    told = str(caught.value)
    assert "lower the learning rate" in told and "optimizers.projected" in told and "max_sweeps" not in told
    assert isinstance(caught.value, DivergenceError) and isinstance(caught.value, DomainError)
    GAUSSIAN.check(caught.value.params)
    assert caught.value.history.sizes["step"] == caught.value.step <= 6


def test_the_remedies_do():
    given = {"rng_key": KEY, "estimator": PCD(num_chains=50), "num_steps": 60, "progress_bar": False}
    made = ebmpp.fit(GAUSSIAN, ROWS, optimizer=projected(optax.sgd(0.5), ball(0.9)), **given)
    GAUSSIAN.check(made.params)


UPWARD = layered(v=Exponential(2), h=Bernoulli(2))
START = {"v": jnp.full(2, -5.5), "h": jnp.zeros(2), "v:h": jnp.zeros((2, 2))}
DATA = np.ones((4, 2), np.float32)


def push(**options):
    given = {"rng_key": KEY, "estimator": Pushing(), "params": START, "optimizer": optax.sgd(1.0)}
    return ebmpp.fit(UPWARD, DATA, progress_bar=False, **given | options)


def after(steps):
    return jax.tree.map(lambda a: a + steps, START)


def test_monitors_callbacks_and_checkpoints_get_params_that_pass(tmp_path):
    """The natural parameter is at most steps - 5.5 + 2 steps, so the second step is the first bad one."""
    seen, best = [], []

    def look(progress):
        UPWARD.check(progress.params)
        seen.append(progress.step)

    monitors = {"bias": lambda p: best.append(1) or p["v"][0]}
    with pytest.raises(NormalizationError, match=r"block 'v' .* must be negative") as caught:
        kept = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
        push(monitors=monitors, monitor_every=1, callbacks=[look], **kept)
    assert seen == [0, 1] and caught.value.step == 2
    jax.tree.map(np.testing.assert_array_equal, caught.value.params, after(1))
    np.testing.assert_array_equal(caught.value.history["bias"], [-5.5, -4.5])
    assert [path.name for path in tmp_path.glob("*.zip")] == ["checkpoint-000001.zip"]


def test_a_model_that_stops_normalising_between_looks_is_not_returned():
    for steps in (2, 60):
        with pytest.raises(NormalizationError) as caught:
            push(num_steps=steps)
        UPWARD.check(caught.value.params)
    assert_same_run(push(num_steps=1), push(num_steps=1))


def test_of_params_that_are_not_finite_the_last_that_pass_are_carried():
    """Here the domain is left first, and floats overflow after."""
    with pytest.raises(NormalizationError) as caught:
        push(optimizer=optax.sgd(optax.exponential_decay(1.0, 1, 1e6)), num_steps=20)
    UPWARD.check(caught.value.params)


def test_unmet_pairs_without_a_limit_are_told_without_it():
    rbm = layered(v=Bernoulli(3), h=Bernoulli(2))

    class Unmet(Recorder):
        def estimate(self, graph, params, state, batch, key):
            nan = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
            return Estimate(nan, state, {"num_unmet": jnp.array(3)})

    with pytest.raises(DivergenceError, match="3 coupled pairs had not met and cannot") as caught:
        ebmpp.fit(rbm, np.eye(3), rng_key=KEY, estimator=Unmet(), num_steps=2, progress_bar=False)
    assert "max_sweeps" not in str(caught.value) and "lower the learning rate" in str(caught.value)
