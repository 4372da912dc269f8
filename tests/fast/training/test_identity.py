# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints that distinguish the optimisers and monitors of two runs."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import jax
import optax

from ebmpp.core.archive import digest
from ebmpp.core.identity import function_identity
from ebmpp.training.identity import differences, fingerprint, optimizer_moves
from ebmpp.training.monitors import Monitor
from ebmpp.training.optimizers import averaged, box, projected

PARAMS = {"v": np.zeros(5, np.float32), "w": {"deep": np.zeros((3, 4), np.float32)}}
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
    "smaller box": lambda: projected(optax.sgd(0.1), box(-0.09, 0.1)),
}


def identity(optimizer: Any) -> dict[str, Any]:
    return {"optimizer": [optimizer_moves(optimizer, PARAMS)]}


@pytest.fixture(scope="module")
def identities() -> dict[str, Any]:
    return {name: identity(make()) for name, make in OPTIMIZERS.items()}


def test_different_optimizers_are_distinguished(identities: dict[str, Any]) -> None:
    for a in identities:
        assert [b for b in identities if not differences(identities[a], identities[b])] == [a]


def test_equal_optimizers_have_the_same_identity_up_to_rounding(identities: dict[str, Any]) -> None:
    for name in ("early drop", "adam", "box"):
        assert not differences(identities[name], identity(OPTIMIZERS[name]()))
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), averaged(optax.adam(0.1)))
    assert not differences(identity(optimizer), identity(optimizer))
    rounded = jax.tree.map(lambda a: a * (1 + 1e-6), identities["adam"])
    assert not differences(identities["adam"], rounded)
    assert fingerprint(identities["adam"]) == fingerprint(rounded)


def times(factor: Any) -> Any:
    return lambda params: factor * params["v"].sum()


def recursive(depth: int) -> Any:
    def fn(params: Any) -> Any:
        return params["v"].sum() if depth == 0 else fn(params)

    return fn


FUNCTIONS = [
    lambda params: params["v"].sum(),
    lambda params: params["w"].sum(),
    lambda params: params["v"].mean(),
    lambda params, power=2: (params["v"] ** power).sum(),
    lambda params, power=3: (params["v"] ** power).sum(),
    times(2),
    times(np.arange(3)),
    times(np.arange(3) + 1),
    partial(lambda a, params: a * params["v"].sum(), 2),
    partial(lambda a, params: a * params["v"].sum(), 3),
    jax.jit(times(4)),
    jax.jit(times(5)),
    recursive(1),
    Monitor(lambda params, rows: rows.sum(), (np.ones(2),)),
    Monitor(lambda params, rows: rows.sum(), (np.zeros(2),)),
]


def test_functions_of_other_code_or_values_are_distinguished() -> None:
    assert len({function_identity(fn) for fn in FUNCTIONS}) == len(FUNCTIONS)
    for make in (lambda: times(2), lambda: times(np.ones(3)), lambda: recursive(2)):
        assert function_identity(make()) == function_identity(make())


def test_digests_depend_on_names_shapes_types_and_values() -> None:
    a = np.arange(6, dtype=np.float32)
    tables = ({"a": a}, {"b": a}, {"a": a.reshape(2, 3)}, {"a": a.astype(np.float64)}, {"a": a + 1})
    assert len({digest(table) for table in tables}) == 5
