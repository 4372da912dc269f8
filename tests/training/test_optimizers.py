# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Projections and averages of params, as optax transformations.

Tests training/optimizers.py.
"""

from typing import Any

import numpy as np
import pytest
from training_tools import leaves, train

import jax
import jax.numpy as jnp
import optax

from ebmpp.errors import ArgumentError
from ebmpp.training.optimizers import averaged, averaged_params, box, projected

PARAMS = {"v": np.zeros(200, np.float32), "w": {"deep": np.zeros((3, 400), np.float32)}}


def gradients(count: int, scale: float = 1.0) -> list[Any]:
    generator = np.random.default_rng(0)
    draw = lambda a: (scale * generator.standard_cauchy(a.shape)).astype(np.float32)
    return [jax.tree.map(draw, PARAMS) for _ in range(count)]


def iterates(optimizer: Any, steps: list[Any]) -> tuple[list[Any], Any]:
    """Return the params after each step, and the last state."""

    @jax.jit
    def step(gradient: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params, state, results = PARAMS, optimizer.init(PARAMS), []
    for gradient in steps:
        params, state = step(gradient, state, params)
        results.append(params)
    return results, state


def test_params_stay_in_a_box() -> None:
    params, _ = iterates(projected(optax.sgd(0.1), box(-0.7, 0.3)), gradients(30))
    values = np.stack([leaves(p) for p in params])
    rounding = 2e-7  # of updates of size 1, which are added to the params
    assert (
        -0.7 - rounding <= values.min() <= -0.69999
        and 0.29999 <= values.max() <= 0.3 + rounding
    )
    assert ((values > -0.69) & (values < 0.29)).mean() > 0.5
    steps = gradients(2, scale=1e-3)  # inside, the step is the optimiser's own
    free, inside = (
        iterates(o, steps)[0]
        for o in (optax.sgd(0.1), projected(optax.sgd(0.1), box(-10, 10)))
    )
    np.testing.assert_allclose(leaves(inside), leaves(free), rtol=1e-6, atol=1e-9)


def test_a_box_may_bound_some_params_only() -> None:
    low = np.linspace(-1, 1, 200, dtype=np.float32)
    values = gradients(1, 5.0)[0]
    result = box(low={"v": low}, high={"w": {"deep": np.full((3, 400), 2.0)}})(values)
    np.testing.assert_array_equal(result["v"], np.maximum(values["v"], low))
    np.testing.assert_array_equal(
        result["w"]["deep"], np.minimum(values["w"]["deep"], 2)
    )


@pytest.mark.parametrize("start", [0, 4, 100])
def test_the_average_is_of_the_params_from_its_start(start: int) -> None:
    free, _ = iterates(optax.adam(0.1), gradients(10))
    params, state = iterates(averaged(optax.adam(0.1), start), gradients(10))
    np.testing.assert_array_equal(leaves(params), leaves(free))
    counted = [leaves(p) for p in free][start:] or [leaves(free[-1])]
    np.testing.assert_allclose(
        leaves(averaged_params(state)), np.mean(counted, 0), rtol=1e-5, atol=1e-6
    )


def test_steps_that_are_accumulated() -> None:
    """As an object of optax, or converted by its own method."""
    pairs = optax.MultiSteps(optax.sgd(0.5), 2)
    first, second = (
        train(optimizer=optimizer)
        for optimizer in (pairs, pairs.gradient_transformation())
    )
    np.testing.assert_array_equal(leaves(first.params), leaves(second.params))
    inside = train(optimizer=averaged(projected(pairs, box(-9, 9))))
    np.testing.assert_allclose(leaves(inside.params), leaves(first.params), rtol=1e-6)


def test_the_average_is_found_in_the_state_of_a_fit() -> None:
    optimizer = optax.chain(
        optax.clip(1.0),
        averaged(projected(optax.sgd(0.5), box(-0.5, 0.5)), from_step=2),
    )
    fit = train(
        optimizer=optimizer,
        num_steps=6,
        monitors={"v": lambda p: p["v"].mean()},
        monitor_every=1,
    )
    average = averaged_params(fit.optimizer_state)
    np.testing.assert_allclose(
        average["v"].mean(), fit.history["v"][3:].mean(), rtol=1e-6
    )
    assert fit.history["v"][1:].max() == 0.5


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: box(1, -1), "box: low .* got 1"),
        (lambda: box({"u": 1})(PARAMS), "'u'"),
        (lambda: projected("sgd", box()), "optimizer .*'sgd'"),
        (lambda: averaged(optax.sgd), "optimizer .*optax.sgd"),
        (lambda: averaged(optax.sgd(0.1), -1), "from_step .*got -1"),
        (lambda: averaged_params(optax.adam(0.1).init(PARAMS)), "averaged"),
        (
            lambda: projected(optax.sgd(0.1), box()).update(
                PARAMS, projected(optax.sgd(0.1), box()).init(PARAMS)
            ),
            "params",
        ),
    ],
)
def test_invalid_arguments_are_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def stateless(change: Any) -> optax.GradientTransformation:
    return optax.GradientTransformation(
        lambda p: (), lambda g, s, p=None: (change(g), s)
    )


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        (stateless(lambda g: jax.tree.map(jnp.sum, g)), "updates .* shapes"),
        (
            stateless(lambda g: jax.tree.map(lambda a: a.astype(jnp.bfloat16), g)),
            "bfloat16",
        ),
        (
            optax.GradientTransformation(
                lambda p: jnp.zeros(2), lambda g, s, p=None: (g, s[:1])
            ),
            "state",
        ),
        (optax.lbfgs(), "value of a loss"),
    ],
)
def test_an_optimizer_that_does_not_fit_the_params_is_refused(
    optimizer: Any, match: str
) -> None:
    with pytest.raises(ArgumentError, match=match):
        train(optimizer=optimizer)
