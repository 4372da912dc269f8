# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Joint draws of few interacting units.

Tests traced/sweep/enumerated.py.
"""

from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import log_density
import pytest

import jax
from jax import random
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.errors import StateError
from ebmpp.traced.block import Call
from helpers import assert_law

ROWS = 4000


def cycle(y: Any) -> None:
    """Three units in a cycle, of two, three and two values, some of them impossible."""
    a = numpyro.sample("a", dist.Bernoulli(0.3))
    b = numpyro.sample(
        "b", dist.Categorical(jnp.array([[0.2, 0.3, 0.5], [0, 0.6, 0.4]])[a])
    )
    c = numpyro.sample("c", dist.Bernoulli(jnp.where(a == 1, 0.8, 0.3) ** (b + 1)))
    numpyro.sample("y", dist.Normal(a * b - c, 1.0), obs=y)


def exact_shares(y: float) -> np.ndarray:
    states = np.indices((2, 3, 2)).reshape(3, -1).T
    densities = [
        log_density(cycle, (y,), {}, dict(zip("abc", map(jnp.asarray, state))))[0]
        for state in states
    ]
    return np.asarray(jax.nn.softmax(jnp.array(densities)))


def shares(z: dict[str, Any]) -> np.ndarray:
    numbers = np.ravel_multi_index([np.asarray(z[s], int) for s in "abc"], (2, 3, 2))
    return np.bincount(numbers, minlength=12) / len(numbers)


def test_each_draw_is_one_of_the_joint_distribution() -> None:
    block = GibbsBlock.from_model(cycle, ["a", "b", "c"], 0.4)
    assert "3 units, 1 layer" in repr(block)
    call = Call({}, (0.4,), {})
    # at an impossible state
    values = {"a": jnp.int32(1), "b": jnp.int32(0), "c": jnp.int32(0)}
    step = jax.jit(jax.vmap(lambda key: block.advance(values, call, key, 1)))
    drawn = step(random.split(random.key(0), ROWS))
    exact = exact_shares(0.4)
    error = np.sqrt(exact * (1 - exact) / ROWS)
    assert_law(shares(drawn.z), exact, error, 24)
    assert not drawn.degenerate.any()

    keys = random.split(random.key(1), ROWS)
    first = jax.vmap(lambda key: block.init(key, 0, {}, (0.4,), {}))(keys)
    assert_law(shares(first.z), exact, error, 24)
    held = {"a": jnp.zeros(ROWS, int), "c": jnp.ones(ROWS, int)}
    first = jax.vmap(lambda key, v: block.init(key, 0, v, (0.4,), {}))(keys, held)
    rest = exact.reshape(2, 3, 2) * np.eye(2)[0][:, None, None] * np.eye(2)[1]
    rest = rest.ravel() / rest.sum()
    error = np.sqrt(rest * (1 - rest) / ROWS)
    assert_law(shares(first.z), rest, error)
    block.verify(cycle, 0.4)


def test_conditionals_of_units_follow_from_the_joint_states() -> None:
    joint = GibbsBlock.from_model(cycle, ["a", "b", "c"], 0.4)
    units = GibbsBlock.from_model(cycle, ["a", "b", "c"], 0.4, joint="units")
    assert max(units.layers["c"], units.layers["b"]) > 0
    values = {"a": jnp.int32(1), "b": jnp.int32(2), "c": jnp.int32(0)}
    expected = units.log_conditionals(values)
    for site, table in joint.log_conditionals(values).items():
        np.testing.assert_allclose(table, expected[site], atol=1e-5)


def test_coupled_draws_are_of_the_joint_distribution_and_meet() -> None:
    block = GibbsBlock.from_model(cycle, ["a", "b", "c"], 0.4)
    x = {"a": jnp.int32(0), "b": jnp.int32(0), "c": jnp.int32(0)}
    y = {"a": jnp.int32(1), "b": jnp.int32(2), "c": jnp.int32(1)}
    call = Call({}, (0.4,), {})
    keys = random.bits(random.key(2), (ROWS, 2))
    couple = jax.jit(jax.vmap(lambda key: block.couple((x, call), (y, call), key)))
    first, second, broken = couple(keys)
    exact = exact_shares(0.4)
    error = np.sqrt(exact * (1 - exact) / ROWS)
    assert_law(shares(first), exact, error)
    assert all((first[s] == second[s]).all() for s in "abc") and not broken.any()


def test_a_joint_state_without_a_number_is_refused() -> None:
    def model(y: Any) -> None:
        a, b, c = (numpyro.sample(s, dist.Bernoulli(0.5)) for s in "abc")
        numpyro.factor("f", jnp.where(a + b + c == 3, jnp.sqrt(y), a * b * c - a * c))

    block = GibbsBlock.from_model(model, ["a", "b", "c"], jnp.float32(1))
    assert "1 layer" in repr(block)
    start = dict.fromkeys("abc", 0)
    with pytest.raises(StateError, match="is nan where it is"):
        block.init(random.key(0), 0, start, (jnp.float32(-1),), {})
