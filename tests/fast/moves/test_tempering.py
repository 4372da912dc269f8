# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Replicas of a graph, ladders of temperatures, and the tempered sweep."""

import pickle

import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, Categorical, Factor, FactorGraph, Gaussian
from ebmpp.errors import DeclarationError, DomainError
from ebmpp.moves import swaps, tempering
from ebmpp.moves.target import Target
from helpers import alone, numpy_energy, pair, random_params, random_state

MIXED = pair(Gaussian(2, "learned"), Categorical(3, 4))
PARAMS = random_params(MIXED, seed=1)
BETAS = np.array([0.0, 0.4, 1.0])


def at(beta: float) -> dict:
    """Params of the model whose interactions are weighted by ``beta``."""
    return PARAMS | {"a:b": beta * PARAMS["a:b"]}


def ensemble(rows: int) -> dict[str, np.ndarray]:
    families = tempering.replicate(MIXED, 3).families
    return {b: random_state(f, seed, (rows,)) for seed, (b, f) in enumerate(families.items())}


def test_energy_is_that_of_all_replicas():
    x = ensemble(4)
    tempered = tempering.tempered_params(MIXED, PARAMS, jnp.asarray(BETAS))
    given = tempering.replicate(MIXED, 3).energy(tempered, x)
    for row in range(4):
        each = [{b: v[row, r] for b, v in x.items()} for r in range(3)]
        wanted = sum(numpy_energy(MIXED, at(beta), one) for beta, one in zip(BETAS, each, strict=True))
        np.testing.assert_allclose(given[row], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", ["a", "b"])
def test_conditionals_are_those_of_each_temperature(block):
    x = ensemble(2)
    tempered = tempering.tempered_params(MIXED, PARAMS, jnp.asarray(BETAS))
    given = tempering.replicate(MIXED, 3).natural_parameters(tempered, x, block)
    for r, beta in enumerate(BETAS):
        wanted = MIXED.natural_parameters(at(beta), {b: v[:, r] for b, v in x.items()}, block)
        np.testing.assert_allclose(given[:, r], wanted, rtol=1e-4, atol=1e-5)


def test_replicas_are_a_value():
    made = tempering.replicate(MIXED, 3)
    assert made.layers == MIXED.layers
    assert made.families["a"] == Gaussian((3, 2), "learned")
    assert made is tempering.replicate(pair(Gaussian(2, "learned"), Categorical(3, 4)), 3)
    assert made != tempering.replicate(MIXED, 2)
    again = pickle.loads(pickle.dumps(made))
    assert again == made and hash(again) == hash(made)
    assert "Replicated(Bilinear('a', 'b'), 3)" in repr(made)


def test_replicas_can_be_made_under_jit():
    graph = pair(Bernoulli(1), Bernoulli(2))
    shape = lambda a: a * tempering.replicate(graph, 7).families["b"].size
    assert jax.jit(shape)(1) == 14


def test_independent_blocks_have_nothing_to_temper():
    with pytest.raises(DeclarationError, match="nothing to temper"):
        tempering.replicate(alone(Bernoulli(2)), 3)


# -- ladders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("betas", "message"),
    [
        ([0.0, 0.5], r"from 0 or more to 1.*got \[0.0, 0.5\]"),
        ([0.5, 0.2, 1.0], "increasing"),
        ([-0.1, 1.0], "from 0 or more"),
        ([0.0, float("nan"), 1.0], "increasing"),
        ([1.0], r"shape \(1,\)"),
        (np.ones((2, 3)), r"shape \(2, 3\).*last_state.betas\[0\]"),
        ("cold", "got 'cold'"),
    ],
)
def test_wrong_betas(betas, message):
    with pytest.raises(ValueError, match=message):
        tempering.check_betas(betas)


def precision_energy(weight, x, h):
    """What holds the variance of x, and hangs on h; at module level, so that its graph is a value."""
    return (1 + h @ weight) * x[..., 1].sum()


def test_the_hottest_replica_must_normalise():
    graph = FactorGraph(
        {"x": Gaussian(2, "learned")},
        {"h": Bernoulli(2)},
        [Bias("h"), Bilinear("x", "h"), Factor("x", "h", energy=precision_energy, init=np.ones(2), name="p")],
    )
    params = graph.init(jax.random.key(0))
    graph.check(params)
    tempering.check_hot(graph, params, 0.5)
    with pytest.raises(DomainError, match="at beta = 0, .*'x'.*starts at a larger beta"):
        tempering.check_hot(graph, params, 0.0)
    with pytest.raises(DomainError, match="at beta = 0"):
        ebmpp.kernels.tempering.ParallelTempering(graph).init(jax.random.key(0), 3, None, (params,), {})


def test_equalized_ladder_has_equal_rejections():
    """For a barrier that grows as beta squared, and neighbours refused in proportion to its increase."""
    betas = jnp.linspace(0.0, 1.0, 6)
    for _ in range(30):
        betas = tempering.equalized(betas, 0.9 * jnp.diff(betas**2))
    np.testing.assert_allclose(betas, np.sqrt(np.linspace(0, 1, 6)), atol=0.01)


@pytest.mark.parametrize("rejection", [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
def test_equalized_ladder_keeps_its_order_and_ends(rejection):
    made = tempering.equalized(jnp.array([0.1, 0.2, 0.5, 1.0]), jnp.array(rejection))
    assert made[0] == np.float32(0.1) and made[-1] == 1
    assert (np.diff(made) > 0).all()


# -- the sweep ---------------------------------------------------------------------------------------


def test_orders_are_those_of_one_parity():
    every = jnp.ones((1, 4), bool)
    assert swaps.new_order(every, 0)[0].tolist() == [1, 0, 3, 2, 4]
    assert swaps.new_order(every, 1)[0].tolist() == [0, 2, 1, 4, 3]
    assert swaps.new_order(~every, 1)[0].tolist() == [0, 1, 2, 3, 4]
    assert swaps.take(jnp.arange(10).reshape(1, 5, 2), jnp.array([[1, 0, 2, 4, 3]]))[0, 3].tolist() == [
        8,
        9,
    ]


def test_swaps_are_accepted_by_energies():
    x = ensemble(3)
    graph = tempering.replicate(MIXED, 3)
    tempered = tempering.tempered_params(MIXED, PARAMS, jnp.asarray(BETAS))
    given = swaps.log_ratio(Target(graph, tempered), x, 0)
    for low in range(2):
        order = np.arange(3)
        order[[low, low + 1]] = low + 1, low
        swapped = {b: v[:, order] for b, v in x.items()}
        wanted = graph.energy(tempered, x) - graph.energy(tempered, swapped)
        np.testing.assert_allclose(given[:, low], wanted, rtol=1e-3, atol=1e-4)


def test_a_tempered_sweep_needs_replicas():
    graph = pair(Bernoulli(2), Bernoulli(2))
    move = tempering.tempered_sweep(graph)
    with pytest.raises(ValueError, match="take the graph that replicate makes"):
        ebmpp.unbiased_expectation(
            graph, random_params(graph), lambda x: x["a"], rng_key=jax.random.key(0), coupling=move
        )
    with pytest.raises(ValueError, match="coupling 'best' is unknown"):
        tempering.tempered_sweep(graph, "best")
