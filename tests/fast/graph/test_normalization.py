# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable

import numpy as np
from own_families import Geometric, Loss, Narrow, Ordinal
import pytest

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Exponential,
    Factor,
    FactorGraph,
    Family,
    Gaussian,
    Poisson,
    Spin,
    exact,
)
from ebmpp.errors import DomainError
from ebmpp.graph.definite import least_eigenvalue
from helpers import pair


def params(graph: FactorGraph, weight: float, **biases: object) -> dict[str, Array]:
    """Default biases but for those given, and one weight everywhere."""
    made = graph.init(jax.random.key(0), scheme={"weight": "zero", "bias": "zero"})
    made = {name: value + weight if ":" in name else value for name, value in made.items()}
    return made | {name: jnp.asarray(value, jnp.float32) for name, value in biases.items()}


UNBOUNDED = [
    (Poisson(2), Poisson(3), 0.1, "every coupling between them must be at most 0; 6 are not"),
    (Poisson(2), Poisson(3), -0.1, None),
    (Poisson(2), Exponential(1), 0.1, "at most 0; 2 are not"),
    (Poisson(2), Exponential(1), -0.1, None),
    (Poisson(2), Gaussian(2), -0.1, "exactly zero; 4 are not"),
    (Exponential(2), Gaussian(1), 0.1, "exactly zero"),
    (Poisson(1), Gaussian(1, "learned"), 0.1, "exactly zero"),
    (Poisson(2), Bernoulli(3), 5.0, None),
    (Gaussian(2), Bernoulli(3), 5.0, None),
    (Gaussian(2), Gaussian(2), 0.4, None),  # eigenvalues 1 +- 2 * 0.4
    (Gaussian(2), Gaussian(2), 0.6, r"\['a', 'b'\] has smallest eigenvalue -0.2"),
]


@pytest.mark.parametrize(("first", "second", "weight", "message"), UNBOUNDED)
def test_couplings(first: Family, second: Family, weight: float, message: str | None) -> None:
    graph = pair(first, second)
    if message is None:
        graph.check(params(graph, weight))
        return
    with pytest.raises(DomainError, match=message) as error:
        graph.check(params(graph, weight))
    assert "'a:b'" in str(error.value), "the message should name the factor to change"


def test_what_an_exponential_reaches_over_its_neighbours() -> None:
    # rate 1, neighbours add 3 * 0.3 at most; a Spin's reach counts with either sign
    graph = pair(Exponential(2), Bernoulli(3))
    graph.check(params(graph, 0.3))
    graph.check(params(graph, -10.0))
    with pytest.raises(
        DomainError, match=r"block 'a' .* must be negative, and at unit \(0,\) it reaches 0.2"
    ):
        graph.check(params(graph, 0.4))
    spins = pair(Exponential(2), Spin(3))
    spins.check(params(spins, -0.3))
    with pytest.raises(DomainError, match="reaches 0.2"):
        spins.check(params(spins, -0.4))


def test_an_exponential_alone() -> None:
    graph = FactorGraph({"x": Exponential(2)}, factors=[Bias("x")])
    graph.check({"x": jnp.array([-1.0, -0.1])})
    with pytest.raises(DomainError, match=r"at unit \(1,\) it reaches 0.5"):
        graph.check({"x": jnp.array([-1.0, 0.5])})


def test_a_learned_variance_needs_a_negative_second_parameter() -> None:
    graph = pair(Gaussian(2, "learned"), Bernoulli(1))
    graph.check(params(graph, 3.0))
    with pytest.raises(
        DomainError, match=r"negative in its second entry .* at unit \(1,\) it reaches \[3. 0.\]"
    ):
        graph.check(params(graph, 3.0, a=[[0.0, -0.5], [0.0, 0.0]]))


def test_the_precision_of_learned_variances() -> None:
    graph = pair(Gaussian(1, "learned"), Gaussian(1))
    graph.check(params(graph, 1.9, a=[[0.0, -2.0]]))  # precision [[4, -1.9], [-1.9, 1]]
    with pytest.raises(DomainError, match="smallest eigenvalue"):
        graph.check(params(graph, 2.1, a=[[0.0, -2.0]]))


@pytest.mark.parametrize(("scale", "fails"), [(0.4, False), (1.1, True)])
def test_a_three_way_factor_is_tried(scale: float, fails: bool) -> None:
    energy: Callable[..., Array] = lambda w, x, y, z: -w * x.sum() * y.sum() * z.sum()
    gate = Factor("x", "y", "z", energy=energy, init=jnp.zeros(()))
    blocks = {"x": Exponential(1), "y": Bernoulli(1), "z": Bernoulli(1)}
    graph = FactorGraph(blocks, factors=[*map(Bias, "xyz"), gate, Bilinear("y", "z")])
    made = graph.init(jax.random.key(0)) | {"x:y:z": jnp.float32(scale)}
    if fails:
        with pytest.raises(DomainError, match="it reaches 0.1"):
            graph.check(made)
    else:
        graph.check(made)


def test_nothing_is_looked_at_under_jit() -> None:
    graph = pair(Poisson(2), Poisson(1))

    @jax.jit
    def checked(given: dict[str, Array]) -> Array:
        graph.check(given)
        return given["a"].sum()

    assert np.isfinite(checked(params(graph, 1.0)))


# -- families of one's own --------------------------------------------------------------------------

OWN = [
    (Geometric(2), Poisson(3), 0.1, "'a' .* and 'b' .* are both unbounded, .* at most 0; 6 are not"),
    (Geometric(2), Poisson(3), -0.1, None),
    (Narrow(2), Poisson(1), 0.1, "exactly zero; 2 are not"),
    (Narrow(2), Gaussian(2), 0.9, None),  # precisions 4 and 1, coupled by 2 * 0.9 in one direction
    (Narrow(2), Gaussian(2), 1.1, "joint precision .* smallest eigenvalue -0.16"),
    (Loss(1), Poisson(2), -0.1, "at least 0; 2 are not"),
    (Loss(1), Poisson(2), 0.1, None),
    (Loss(1), Bernoulli(3), -0.4, r"block 'a' .* must be positive, and at unit \(0,\) it reaches -0.2"),
    (Loss(1), Bernoulli(3), -0.3, None),
    (Geometric(1), Bernoulli(3), 0.4, r"must be negative, and at unit \(0,\) it reaches 0.2"),
    (Ordinal(2), Poisson(3), 5.0, None),  # no bounds said: its states have some
    (Geometric(1), Ordinal(1), 0.08, None),  # -1 + 0.08 * (3 + 9)
    (Geometric(1), Ordinal(1), 0.1, r"it reaches 0.2"),
]


@pytest.mark.parametrize(("first", "second", "weight", "message"), OWN)
def test_families_of_ones_own_are_asked(
    first: Family, second: Family, weight: float, message: str | None
) -> None:
    graph = pair(first, second)
    if message is None:
        graph.check(params(graph, weight))
        return
    with pytest.raises(DomainError, match=message):
        graph.check(params(graph, weight))


# -- many Gaussian units ----------------------------------------------------------------------------


def coupled(size: int, strength: float) -> tuple[FactorGraph, dict[str, Array]]:
    """Two blocks of ``size`` units, whose precision has eigenvalues 1 +- strength and 1."""
    graph = pair(Gaussian(size), Gaussian(size))
    one, other = (np.random.default_rng(i).normal(size=size) for i in range(2))
    weight = strength * np.outer(one, other) / np.linalg.norm(one) / np.linalg.norm(other)
    return graph, params(graph, 0.0) | {"a:b": jnp.asarray(weight, jnp.float32)}


@pytest.mark.parametrize("size", [300, 2100])
def test_precisions_of_many_units_are_decided(size: int) -> None:
    graph, good = coupled(size, 0.97)
    graph.check(good)
    graph, bad = coupled(size, 1.03)
    with pytest.raises(DomainError, match=r"smallest eigenvalue -0.0\d+ or less, .*'a:b'"):
        graph.check(bad)


def test_a_precision_that_cannot_be_decided_is_told() -> None:
    graph, near = coupled(300, 1 - 1e-6)
    with pytest.warns(RuntimeWarning, match=r"may not normalise: .* is between -.* and .*'a:b'"):
        graph.check(near)


@pytest.mark.parametrize("smallest", [1e-3, -1e-3])
def test_bounds_of_eigenvalues_hold(smallest: float) -> None:
    generator = np.random.default_rng(3)
    spectrum = np.concatenate([[smallest], generator.uniform(0.5, 4, 599)])
    basis = np.linalg.qr(generator.normal(size=(600, 600)))[0]
    lower, upper = least_eigenvalue(lambda v: basis @ (spectrum * (basis.T @ v)), 600, 1e-12)
    assert lower <= smallest <= upper + 1e-12
    assert lower * upper > 0
    low, high = least_eigenvalue(lambda v: 2 * v, 600, 1e-12)  # one step, and there is no other vector
    np.testing.assert_allclose([low, high], 2, rtol=1e-9)


# -- couplings that other blocks change ------------------------------------------------------------


def _curve(w: Array, v: Array, h: Array) -> Array:
    return -v[:, 1].sum() * (w * h).sum()


@pytest.mark.parametrize("switch", [Bernoulli(1), Spin(1)], ids=repr)
def test_a_precision_that_another_block_lowers(switch: Family) -> None:
    factors = [*map(Bias, "vuh"), Bilinear("v", "u"), Factor("v", "h", energy=_curve, init=jnp.zeros(1))]
    graph = FactorGraph({"v": Gaussian(1, "learned"), "u": Gaussian(1)}, {"h": switch}, factors)
    made = graph.init(jax.random.key(0)) | {"v": jnp.array([[0.0, -0.5]]), "v:u": jnp.array([[0.8]])}
    # precision [[1 - 2 w t, -0.8], [-0.8, 1]] at t = 1: positive definite below w = 0.18
    graph.check(made | {"v:h": jnp.array([0.17])})
    with pytest.raises(DomainError, match=r"-0.0122\d* at a state of blocks \['h'\]"):
        graph.check(made | {"v:h": jnp.array([0.19])})
    assert jnp.isfinite(exact.log_partition(graph, made | {"v:h": jnp.array([0.17])}))


def test_a_precision_that_one_hot_units_hold_up() -> None:
    """No state of theirs is 0, where the model would not normalise."""
    factors = [*map(Bias, "vuc"), Bilinear("v", "u"), Factor("v", "c", energy=_curve, init=jnp.zeros((1, 2)))]
    graph = FactorGraph({"v": Gaussian(1, "learned"), "u": Gaussian(1)}, {"c": Categorical(1, 2)}, factors)
    made = graph.init(jax.random.key(0), scheme={"weight": "zero", "bias": "zero"})
    made |= {"v": jnp.array([[0.0, -0.1]]), "v:u": jnp.array([[0.8]]), "v:c": jnp.full((1, 2), -2.0)}
    expected = np.log(2) - 0.5 * np.log(4.2 - 0.64)
    np.testing.assert_allclose(exact.log_partition(graph, made), expected, rtol=1e-4)


@pytest.mark.parametrize(("reach", "fails"), [(0.95, False), (1.05, True)])
def test_the_worst_of_many_states_is_found(reach: float, fails: bool) -> None:
    """One of 2^31, to which half of 30 units must be 1 and half of them 0."""
    gate = Factor("a", "b", "h", energy=lambda w, a, b, h: -a[0] * b[0] * (w @ h), init=jnp.zeros(30))
    graph = FactorGraph({"a": Gaussian(1), "b": Gaussian(1)}, {"h": Bernoulli(30)}, [*map(Bias, "abh"), gate])
    signs = jnp.where(jax.random.permutation(jax.random.key(3), 30) < 15, 1.0, -1.0)
    made = graph.init(jax.random.key(0)) | {"a:b:h": signs * reach / 15}
    if fails:
        with pytest.raises(DomainError, match=r"-0.05 at a state of blocks \['h'\]"):
            graph.check(made)
    else:
        graph.check(made)


@pytest.mark.parametrize(("weights", "fails"), [([-0.1, -0.2], False), ([-0.1, 0.2], True)])
def test_a_gate_between_counts_is_tried_at_states(weights: list[float], fails: bool) -> None:
    """Where the gate is at 0, which it never is, the coupling of the counts is positive."""
    couple = Factor("a", "b", energy=lambda _, a, b: -0.3 * a[0] * b[0], name="up")
    gate = Factor(
        "a", "b", "c", energy=lambda w, a, b, c: -a[0] * b[0] * (c[0] @ (w - 0.3)), init=jnp.zeros(2)
    )
    blocks = {"a": Poisson(1), "b": Poisson(1), "c": Categorical(1, 2)}
    graph = FactorGraph(blocks, factors=[*map(Bias, "abc"), couple, gate])
    made = graph.init(jax.random.key(0)) | {"a:b:c": jnp.array(weights)}
    if fails:
        with pytest.raises(DomainError, match="must be at most 0; 1 are not"):
            graph.check(made)
    else:
        graph.check(made)
