# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A run ends with a model that normalises, or with an error that carries one.

Tests training/observers/guard.py.
"""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
from training_tools import ROWS, SGD, Recorder, train
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, Bernoulli, Exponential, Gaussian, layered
from ebmpp.errors import DivergenceError, DomainError, NormalizationError
from ebmpp.estimators.base import Estimate
from ebmpp.training.optimizers import projected

BALL = partial(optax.projections.projection_l2_ball, scale=0.9)
NORMALS = np.random.default_rng(0).normal(size=(2, 200, 6)).astype(np.float32)


def train_gaussian(optimizer: Any, num_steps: int) -> ebmpp.FitResult:
    graph, rows = layered(v=Gaussian(6), h=Gaussian(4)), NORMALS[0] @ NORMALS[1][:6]
    options = {
        "rng_key": zoo.KEY,
        "estimator": PCD(num_chains=50),
        "progress_bar": False,
    }
    return ebmpp.fit(graph, rows, optimizer=optimizer, num_steps=num_steps, **options)


@pytest.mark.nightly
def test_leaving_the_domain_is_an_error_with_params_inside_it() -> None:
    with pytest.raises(
        NormalizationError, match="eigenvalue .*optimizers.projected"
    ) as caught:
        train_gaussian(optax.sgd(0.5), 60)
    error = caught.value
    assert isinstance(error, DivergenceError) and isinstance(error, DomainError)
    layered(v=Gaussian(6), h=Gaussian(4)).check(error.params)
    assert error.history.sizes["step"] == error.step <= 6


@pytest.mark.nightly
def test_a_projection_keeps_the_params_inside_the_domain() -> None:
    fit = train_gaussian(projected(optax.sgd(0.5), BALL), 60)
    fit.graph.check(fit.params)


@dataclasses.dataclass(frozen=True)
class Pushing(Recorder):
    """Its gradient is -1 everywhere, so a step of rate 1 adds 1 to each param."""

    def estimate(
        self, graph: Any, params: Any, state: Any, batch: Any, key: Any
    ) -> Estimate:
        return Estimate(jax.tree.map(lambda p: -jnp.ones_like(p), params), state, {})


UNIT_RATE = optax.sgd(1.0)
START = {"v": np.full(2, -5.5, np.float32), "h": np.zeros(2), "v:h": np.zeros((2, 2))}


def push(**options: Any) -> ebmpp.FitResult:
    """Run until the natural parameter of v, at most t - 5.5 + 2 t after t steps, is positive."""
    defaults = {
        "rng_key": zoo.KEY,
        "estimator": Pushing(),
        "params": START,
        "optimizer": UNIT_RATE,
    }
    graph = layered(v=Exponential(2), h=Bernoulli(2))
    return ebmpp.fit(
        graph, np.ones((4, 2), np.float32), progress_bar=False, **defaults | options
    )


@pytest.mark.nightly
def test_monitors_callbacks_and_checkpoints_get_params_inside_the_domain(
    tmp_path: Any,
) -> None:
    seen = []
    options = {
        "monitors": {"bias": lambda p: p["v"][0]},
        "monitor_every": 1,
        "checkpoint_every": 1,
    }
    with pytest.raises(NormalizationError, match="block 'v'") as caught:
        push(
            callbacks=[lambda progress: seen.append(progress.step)],
            checkpoint_dir=tmp_path,
            **options,
        )
    assert seen == [0, 1] and caught.value.step == 2
    jax.tree.map(
        np.testing.assert_array_equal,
        caught.value.params,
        jax.tree.map(lambda a: a + 1, START),
    )
    np.testing.assert_array_equal(caught.value.history["bias"], [-5.5, -4.5])
    assert [path.name for path in tmp_path.glob("*.zip")] == ["checkpoint-000001.zip"]


# floats overflow after the domain is left
GROWING = optax.sgd(optax.exponential_decay(1.0, 1, 1e6))


@pytest.mark.parametrize("options", [{"num_steps": 2}, {"optimizer": GROWING}])
def test_a_model_that_stops_normalising_between_looks_is_not_returned(
    options: dict,
) -> None:
    with pytest.raises(NormalizationError) as caught:
        push(**options)
    layered(v=Exponential(2), h=Bernoulli(2)).check(caught.value.params)


def test_unmet_pairs_stop_the_run() -> None:
    class Unmet(Recorder):
        def estimate(
            self, graph: Any, params: Any, state: Any, batch: Any, key: Any
        ) -> Estimate:
            nan = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
            return Estimate(nan, state, {"num_unmet": jnp.array(3)})

    with pytest.raises(DivergenceError, match="3 coupled pairs .*max_sweeps") as caught:
        train(ROWS, Unmet(), num_steps=2, optimizer=SGD)
    assert caught.value.step == 0 == caught.value.history.sizes["step"]
