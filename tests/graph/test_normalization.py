# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable

import numpy as np
from own_families import Geometric, Loss, Narrow, Ordinal
import pytest

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, Exponential, Factor, FactorGraph, Family, Gaussian, Poisson, Spin
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
