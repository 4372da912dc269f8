# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What tells a run's optimisers and monitors from others."""

from functools import partial

import numpy as np
import pytest

import jax
import jax.numpy as jnp
import optax

from ebmpp.core.identity import function_identity
from ebmpp.training.identity import differences, fingerprint, optimizer_moves
from ebmpp.training.monitors import Monitor
from ebmpp.training.optimizers import averaged, box, projected

PARAMS = {"v": jnp.zeros(5), "w": {"deep": jnp.zeros((3, 4))}}
steps = optax.piecewise_constant_schedule
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "a little faster": lambda: optax.sgd(0.1001),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "less momentum": lambda: optax.sgd(0.1, momentum=0.8),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "early drop": lambda: optax.sgd(steps(0.1, {1000: 0.5})),
    "late drop": lambda: optax.sgd(steps(0.1, {30_000: 0.5})),
    "deep drop": lambda: optax.sgd(steps(0.1, {1000: 0.4})),
    "decay": lambda: optax.sgd(optax.exponential_decay(0.1, 1000, 0.99)),
    "adam": lambda: optax.adam(0.1),
    "other moments": lambda: optax.adam(0.1, b2=0.99),
    "decayed weights": lambda: optax.adamw(0.1, weight_decay=1e-3),
    "more decayed": lambda: optax.adamw(0.1, weight_decay=2e-3),
    "box": lambda: projected(optax.sgd(0.1), box(-0.1, 0.1)),
    "smaller box": lambda: projected(optax.sgd(0.1), box(-0.09, 0.1)),
    "frozen": lambda: projected(optax.sgd(0.1), box(high={"v": 0.0})),
}


def told(optimizer):
    return {"optimizer": [optimizer_moves(optimizer, PARAMS)]}


@pytest.fixture(scope="module")
def every():
    return {name: told(make()) for name, make in OPTIMIZERS.items()}


def test_optimisers_of_other_numbers_are_told_apart(every):
    for a in every:
        same = [b for b in every if not differences(every[a], every[b])]
        assert same == [a]


def test_an_optimiser_made_anew_is_the_same(every):
    for name, make in OPTIMIZERS.items():
        assert not differences(every[name], told(make()))
    wrapped = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), averaged(optax.adam(0.1)))
    assert not differences(told(wrapped), told(wrapped))


def test_the_last_bits_of_another_device_do_not_count(every):
    shaken = jax.tree.map(lambda a: a * (1 + 1e-6), every["adam"])
    assert not differences(every["adam"], shaken)
    assert fingerprint(every["adam"]) == fingerprint(shaken)


def times(factor):
    return lambda params: factor * params["v"].sum()


def recursive(depth):
    def fn(params):
        return params["v"].sum() if depth == 0 else fn(params)

    return fn


SEVERAL = [
    lambda params: params["v"].sum(),
    lambda params: params["w"].sum(),
    lambda params: params["v"].mean(),
    lambda params: 2 * params["v"].sum(),
    lambda params, power=2: (params["v"] ** power).sum(),
    lambda params, power=3: (params["v"] ** power).sum(),
    times(2),
    times(3),
    times(np.arange(3)),
    times(np.arange(3) + 1),
    partial(lambda a, params: a * params["v"].sum(), 2),
    partial(lambda a, params: a * params["v"].sum(), 3),
    jax.jit(times(4)),
    jax.jit(times(5)),
    recursive(1),
    Monitor(lambda params, rows: rows.sum(), (jnp.ones(2),)),
    Monitor(lambda params, rows: rows.sum(), (jnp.zeros(2),)),
]


def test_functions_that_compute_or_hold_something_else_are_told_apart():
    assert len({function_identity(fn) for fn in SEVERAL}) == len(SEVERAL)
    for make in (lambda: times(2), lambda: times(jnp.ones(3)), lambda: recursive(2)):
        assert function_identity(make()) == function_identity(make())
