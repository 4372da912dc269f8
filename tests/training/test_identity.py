# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Digests that distinguish the optimisers and monitors of two runs."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import jax
import jax.numpy as jnp
import optax

from ebmpp.core.archive import digest
from ebmpp.training.fitting import monitor_identity
from ebmpp.training.monitors import Monitor
from ebmpp.training.optimizers import Comparable, averaged, box, projected
from ebmpp.training.steps import TrainState

PARAMS = {"v": np.zeros(5, np.float32), "w": {"deep": np.zeros((3, 4), np.float32)}}


def scaled_by(
    factor: Any, wrap: Any = lambda update: update
) -> optax.GradientTransformation:
    """An optimiser that holds an array."""
    update = lambda g, state, params=None: (
        jax.tree.map(lambda a: -jnp.sum(factor) * a, g),
        state,
    )
    return optax.GradientTransformation(lambda params: (), wrap(update))


def scaled_on_the_host(factor: float) -> optax.GradientTransformation:
    """An optimiser that calls back to Python."""

    def update(g: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), g)
        return jax.pure_callback(
            lambda g: jax.tree.map(lambda a: factor * a, g), shapes, g
        ), state

    return optax.GradientTransformation(lambda params: (), update)


class OtherState(NamedTuple):
    """A state with the leaves of optax's, and another structure."""

    trace: Any


def with_other_state(rate: float) -> optax.GradientTransformation:
    inner = optax.trace(rate)
    update = lambda g, state, params=None: inner.update(
        g, optax.TraceState(state.trace), params
    )
    wrapped = lambda *args: (lambda updates, state: (updates, OtherState(state.trace)))(
        *update(*args)
    )
    return optax.GradientTransformation(
        lambda params: OtherState(inner.init(params).trace), wrapped
    )


steps = optax.piecewise_constant_schedule
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "other rate": lambda: optax.sgd(0.1001),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "early drop": lambda: optax.sgd(steps(0.1, {1000: 0.5})),
    "late drop": lambda: optax.sgd(steps(0.1, {30_000: 0.5})),
    "adam": lambda: optax.adam(0.1),
    "other moments": lambda: optax.adam(0.1, b2=0.99),
    "box": lambda: projected(optax.sgd(0.1), box(-0.1, 0.1)),
    "array": lambda: scaled_by(np.float32([1, 2])),
    "other array": lambda: scaled_by(np.float32([1, 3])),
    "array in a program": lambda: scaled_by(np.float32([1, 2]), jax.jit),
    "other array in a program": lambda: scaled_by(np.float32([1, 3]), jax.jit),
    "callback": lambda: scaled_on_the_host(1.0),
    "other callback": lambda: scaled_on_the_host(2.0),
    "trace": lambda: optax.trace(0.9),
    "trace in another state": lambda: with_other_state(0.9),
    "smaller box": lambda: projected(optax.sgd(0.1), box(-0.09, 0.1)),
}


def comparable(optimizer: Any) -> Comparable:
    return Comparable.for_params(optimizer, PARAMS)


def test_different_optimizers_are_distinguished() -> None:
    results = {name: comparable(make()) for name, make in OPTIMIZERS.items()}
    assert len({(c.digest, c.host) for c in results.values()}) == len(OPTIMIZERS)
    assert all(
        comparable(OPTIMIZERS[name]()) == results[name]
        for name in ("early drop", "adam", "box")
    )
    optimizer = optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(3)), averaged(optax.adam(0.1))
    )
    assert comparable(optimizer) == comparable(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        optax.sgd,
        lambda rate: optax.sgd(np.float32(rate), momentum=0.9),
        lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate)),
        optax.adamw,
        lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
        lambda rate: optax.chain(optax.scale_by_rms(), optax.scale(-rate)),
    ],
)
def test_optimizers_that_differ_in_their_rate_are_one_program(make: Any) -> None:
    first, second = map(comparable, map(make, (0.1, 0.3)))
    assert first == second and first.digest != second.digest
    assert first != comparable(optax.adam(0.1, b1=0.5))
    generator = np.random.default_rng(0)
    draw = lambda a: generator.normal(size=a.shape).astype(np.float32)
    gradient, params = (jax.tree.map(draw, PARAMS) for _ in range(2))
    for rate, optimizer in ((0.1, first), (0.3, second)):
        state = make(rate).init(params)
        inputs = (gradient, state, params)
        results = jax.jit(optimizer.update)(optimizer.numbers, *inputs)
        expected = jax.jit(make(rate).update)(*inputs)
        # XLA may round a number that it knows otherwise than one that it is given
        close = partial(np.testing.assert_allclose, rtol=1e-6)
        jax.tree.map(close, tuple(results), expected)


def times(factor: Any) -> Any:
    return lambda params: factor * params["v"].sum()


FUNCTIONS = [
    lambda params: params["v"].sum(),
    lambda params: params["w"].sum(),
    lambda params: params["v"].mean(),
    lambda params, power=2: (params["v"] ** power).sum(),
    lambda params, power=3: (params["v"] ** power).sum(),
    times(2),
    times(np.arange(3)),
    times(np.arange(3) + 1),
    partial(lambda a, params: a * params["v"].sum(), 6),
    partial(lambda a, params: a * params["v"].sum(), 7),
    jax.jit(times(4)),
    jax.jit(times(5)),
    Monitor(lambda params, rows: rows.sum(), (np.ones(2),)),
    Monitor(lambda params, rows: rows.sum(), (np.zeros(2),)),
]


def test_monitors_of_other_code_or_values_are_distinguished() -> None:
    flat = {"v": PARAMS["v"], "w": PARAMS["w"]["deep"]}
    state = TrainState(flat, (), (), np.array(True))
    assert len({monitor_identity(fn, state) for fn in FUNCTIONS}) == len(FUNCTIONS)
    for make in (lambda: times(2), lambda: times(np.ones(3))):
        assert monitor_identity(make(), state) == monitor_identity(make(), state)


def test_digests_depend_on_names_shapes_types_and_values() -> None:
    a = np.arange(6, dtype=np.float32)
    tables = (
        {"a": a},
        {"b": a},
        {"a": a.reshape(2, 3)},
        {"a": a.astype(np.float64)},
        {"a": a + 1},
    )
    assert len({digest(table) for table in tables}) == 5
