# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Projections and means of params, as optax transformations."""

import numpy as np
import pytest
from training_tools import Walker, leaves, numbered

import jax
import jax.numpy as jnp
import optax

from ebmpp.errors import ArgumentError
from ebmpp.training.optimizers import averaged, averaged_params, ball, box, projected

GENERATOR = np.random.default_rng(0)
PARAMS = {"v": jnp.zeros(200), "w": {"deep": jnp.zeros((3, 400))}}


def gradients(count, scale=1.0):
    draw = lambda a: jnp.asarray(scale * GENERATOR.standard_cauchy(a.shape), jnp.float32)
    return [jax.tree.map(draw, PARAMS) for _ in range(count)]


def iterates(optimizer, steps, params=PARAMS):
    """The params after each step, and the last state."""
    state, made = optimizer.init(params), []
    for gradient in steps:
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
        made.append(params)
    return made, state


def test_params_stay_in_a_box():
    made, _ = iterates(projected(optax.sgd(0.1), box(-0.7, 0.3)), gradients(30))
    all_of = np.stack([leaves(p) for p in made])
    rounding = 2e-7  # of updates of size 1, which are added to the params
    assert -0.7 - rounding <= all_of.min() <= -0.69999 and 0.29999 <= all_of.max() <= 0.3 + rounding
    assert ((all_of > -0.69) & (all_of < 0.29)).mean() > 0.5
    # inside, it is the optimiser's own step
    steps = gradients(2, scale=1e-3)
    free, inside = (iterates(o, steps)[0] for o in (optax.sgd(0.1), projected(optax.sgd(0.1), box(-10, 10))))
    np.testing.assert_allclose(leaves(inside), leaves(free), rtol=1e-6, atol=1e-9)


def test_a_box_may_bound_some_params_only():
    low = np.linspace(-1, 1, 200, dtype=np.float32)
    project = box(low={"v": low}, high={"w": {"deep": jnp.full((3, 400), 2.0)}})
    values = gradients(1, 5.0)[0]
    made = project(values)
    np.testing.assert_array_equal(made["v"], np.maximum(values["v"], low))
    np.testing.assert_array_equal(made["w"]["deep"], np.minimum(values["w"]["deep"], 2))
    np.testing.assert_array_equal(box()(values)["v"], values["v"])
    np.testing.assert_array_equal(box(low={"w": 0.0})(values)["w"]["deep"].min(), 0)


def test_a_ball_is_of_all_params_together():
    project = ball(2.0)
    far, near = gradients(1)[0], jax.tree.map(lambda a: a + 1e-3, PARAMS)
    np.testing.assert_allclose(np.linalg.norm(leaves(project(far))), 2, rtol=1e-5)
    direction = leaves(far) / np.linalg.norm(leaves(far))
    np.testing.assert_allclose(leaves(project(far)), 2 * direction, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(leaves(project(near)), leaves(near))
    made, _ = iterates(projected(optax.adam(1.0), project), gradients(10))
    norms = [np.linalg.norm(leaves(p)) for p in made]
    assert max(norms) < 2 * (1 + 1e-5) and min(norms) > 1.9


def test_optaxs_own_projections_do():
    made, _ = iterates(projected(optax.sgd(1.0), optax.projections.projection_non_negative), gradients(3))
    assert leaves(made).min() == 0 and leaves(made).max() > 1


@pytest.mark.parametrize("start", [0, 4, 100])
def test_the_mean_is_that_of_the_params_from_its_start(start):
    steps = gradients(10)
    free, _ = iterates(optax.adam(0.1), steps)
    made, state = iterates(averaged(optax.adam(0.1), start), steps)
    np.testing.assert_array_equal(leaves(made), leaves(free))
    counted = [leaves(p) for p in free][start:] or [leaves(free[-1])]
    np.testing.assert_allclose(leaves(averaged_params(state)), np.mean(counted, 0), rtol=1e-5, atol=1e-6)


def test_the_mean_is_found_in_the_state_of_a_fit():
    optimizer = optax.chain(optax.clip(1.0), averaged(projected(optax.sgd(0.5), box(-0.5, 0.5)), start=2))
    every = {"monitors": {"a": lambda p: p["a"].sum()}, "monitor_every": 1}
    made = numbered(estimator=Walker(), optimizer=optimizer, num_steps=6, **every)
    mean = averaged_params(made.optimizer_state)
    np.testing.assert_allclose(mean["a"].sum(), made.history["a"][3:].mean(), rtol=1e-6)
    assert made.history["a"][1:].max() == 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: box(1, -1), "box: low is at most high; got low=1, high=-1"),
        (lambda: box({"u": 1})(PARAMS), r"unknown factor in optimizers.box 'u'; there is 'v', 'w'"),
        (lambda: ball(0.0), "ball: radius is a number above 0, not 0.0"),
        (lambda: averaged(optax.sgd(0.1), -1), "averaged: start is an int of at least 0, not -1"),
        (lambda: averaged_params(optax.adam(0.1).init(PARAMS)), "the state holds 0 of averaged"),
        (
            lambda: projected(optax.sgd(0.1), box()).update(PARAMS, (optax.EmptyState(),) * 2),
            "needs the params",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def wrong(change):
    return optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (change(g), s))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (wrong(lambda g: jax.tree.map(jnp.sum, g)), r"optimizer's updates have shapes .*'a': \(\)"),
        (wrong(lambda g: g | {"a:b": g["a"]}), "optimizer's updates have shapes"),
        (wrong(lambda g: {"a": g["a"]}), "optimizer's updates have shapes"),
        (
            wrong(lambda g: jax.tree.map(lambda a: a.astype(jnp.bfloat16), g)),
            "are bfloat16, and .*float32",
        ),
        (
            optax.GradientTransformation(lambda p: jnp.zeros(2), lambda g, s, p=None: (g, s[:1])),
            r"optimizer's state has shapes \[\(1,\)\] after an update, and \[\(2,\)\] before",
        ),
        (optax.lbfgs(), "without the value of a loss, so optimizers that need it or search along a line"),
        (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), "without the value of a loss"),
        (projected(optax.sgd(0.1), box({"u": 1.0})), "unknown factor in optimizers.box 'u'"),
    ],
)
def test_an_optimiser_that_does_not_go_with_the_params_is_refused(optimizer, message):
    with pytest.raises(ArgumentError, match=message):
        numbered(estimator=Walker(), optimizer=optimizer)
