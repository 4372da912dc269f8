# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Custom families: defaults derived from their states, use in a graph, and training.

Tests families/finite.py.
"""

import dataclasses
import functools

import numpy as np
import numpyro.distributions as dist
from own_families import Geometric, Ordinal, Ternary
import pytest
import zoo

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Bias,
    BlockedGibbs,
    Categorical,
    FactorGraph,
    Family,
    GibbsBlock,
    fit,
    layered,
    local_search,
)
from ebmpp.core import random
from ebmpp.errors import StateError
from ebmpp.estimators import PCD
from ebmpp.ppl import Conjugate, CoupledComposite, composite_expectation
from helpers import FAMILIES, assert_rows_law, often

ROWS = 20_000


@dataclasses.dataclass(frozen=True, repr=False)
class Broken(Ternary):
    """Draws of a value that is no state, outside of jit as well or inside alone."""

    value: float = np.nan
    is_first: bool = False
    is_staged: bool = False

    def _broken(self, words: jax.Array) -> jax.Array:
        is_sound = self.is_staged and not isinstance(words, jax.core.Tracer)
        return jnp.full(words.shape[:-1], 1.0 if is_sound else self.value)

    def initial(self, words: jax.Array) -> jax.Array:
        return self._broken(words)

    def sample(self, words: jax.Array, eta: jax.Array) -> jax.Array:
        return super().sample(words, eta) if self.is_first else self._broken(words)


BROKEN = {
    "nan": Broken(3),
    "nan in jit": Broken(3, is_staged=True),
    "first": Broken(3, 7.0, is_first=True),
}


@pytest.mark.parametrize("name", often(BROKEN, "nan in jit", "first"))
def test_start_outside_of_the_support_is_refused(name: str) -> None:
    graph = FactorGraph({"x": BROKEN[name]}, factors=[Bias("x")])
    params = graph.init(zoo.KEY)
    for keys in (zoo.KEY, jax.random.split(zoo.KEY, 2)):
        with pytest.raises(StateError, match=r"'x' .* must have values in \{0, 1, 2\}"):
            BlockedGibbs(graph).init(keys, 0, None, (params,), {})
    start = {"x": np.ones(3)}
    kernel = BlockedGibbs(graph)
    state = kernel.init(zoo.KEY, 0, start, (params,), {})
    state = jax.jit(lambda s: kernel.sample(s, (params,), {}))(state)
    is_told = "['x'] NOT FINITE" in kernel.get_diagnostics_str(state)
    assert is_told == (name != "first")


@pytest.mark.nightly
def test_latents_and_composites_outside_of_the_support_are_refused() -> None:
    graph = layered(x=Bernoulli(2), h=Broken(3))
    block = GibbsBlock(graph, ["x"], graph.init(zoo.KEY))
    with pytest.raises(StateError, match="'h' .* got nan"):
        block.init(zoo.KEY, 0, {"x": np.zeros(2)}, (), {})
    nowhere = dist.Normal(np.nan, 1.0, validate_args=False)
    step = Conjugate("m", lambda sites: dist.Normal(0, 1), nowhere)
    with pytest.raises(StateError, match=r"finite values of sites \['m'\]"):
        CoupledComposite([step]).init(zoo.KEY, 0, None, (), {})
    for broken in (Broken(2, 7.0), Bernoulli(2)):  # finite values that are no states
        graph = layered(x=broken, h=Broken(3, 7.0))
        block = GibbsBlock(graph, ["x"], graph.init(zoo.KEY))
        pairs = CoupledComposite([block])
        with pytest.raises(StateError, match=r"possible .* sites \['x'\]"):
            pairs.init(zoo.KEY, 0, None, (), {})
        with pytest.raises(StateError, match="start"):
            composite_expectation(pairs, lambda s: s["x"], rng_key=zoo.KEY, num_pairs=2)


def test_custom_family_in_a_graph() -> None:
    graph = layered(n=Geometric(2), h=Bernoulli(1))
    params = {
        "n": np.float32([-1, -0.7]),
        "h": np.float32([0.3]),
        "n:h": np.float32([[-0.5], [0.2]]),
    }
    eta = np.float32([-1.5, -0.5])
    h = {"h": np.ones((3, 1), np.float32)}
    np.testing.assert_allclose(
        graph.natural_parameters(params, h, "n"), np.tile(eta, (3, 1)), rtol=1e-6
    )
    np.testing.assert_allclose(
        graph.mean(params, h, "n"), np.tile(1 / np.expm1(-eta), (3, 1)), rtol=1e-5
    )
    marginal = graph.log_marginal(params, {"h": np.float32([[0], [1]])}, "n")
    off = -np.log1p(-np.exp([-1.0, -0.7])).sum()
    np.testing.assert_allclose(
        marginal, [off, 0.3 - np.log1p(-np.exp(eta)).sum()], rtol=1e-5
    )

    def sample(eta: jax.Array) -> jax.Array:
        keys = random.fold_in(random.key_pair(zoo.KEY), jnp.arange(ROWS))
        words = random.words(keys, 4).reshape(ROWS, 2, 2)
        return Geometric(2).sample(words, jnp.broadcast_to(eta, (ROWS, 2)))

    assert_rows_law(jax.jit(sample)(eta), 1 / np.expm1(-eta))
    with pytest.raises(NotImplementedError, match=r"Geometric must define mode\(eta\)"):
        graph.mode(params, h, "n")
    with pytest.raises(
        NotImplementedError, match=r"Geometric must define from_mean\(mean\)"
    ):
        graph.init(zoo.KEY, np.ones((5, 2)))


DEFAULTS = {
    "ternary": Ternary(5),
    "ordinal": Ordinal(5),
    "categorical": FAMILIES["categorical"],
}


@pytest.mark.parametrize("name", often(DEFAULTS, "ordinal"))
def test_defaults_invert_the_mean_and_find_the_mode(name: str) -> None:
    family = DEFAULTS[name]
    eta = (
        np.random.default_rng(1)
        .uniform(-1, 1, (50, *family.statistic_shape))
        .astype(np.float32)
    )

    @jax.jit
    def derive(eta: jax.Array) -> tuple:
        mean = family.mean(eta)
        inverse = Family.from_mean(family, mean)
        states = family.states()
        table = family.statistics(states), family.log_base_measure(states)
        return mean, family.mean(inverse), Family.mode(family, eta), states, *table

    mean, round_trip, mode, states, statistics, log_base = jax.device_get(derive(eta))
    np.testing.assert_allclose(round_trip, mean, rtol=1e-4, atol=1e-5)
    flat = eta.reshape(*mode.shape, -1) @ statistics.reshape(len(states), -1).T
    np.testing.assert_array_equal(mode, states[(flat + log_base).argmax(-1)])
    assert mode.dtype == family.dtype


def inverse_and_mean(family: Family, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The natural parameters of means, and their means."""

    @jax.jit
    def derive(mean: jax.Array) -> tuple[jax.Array, jax.Array]:
        inverse = family.from_mean(mean)
        return inverse, family.mean(inverse)

    return jax.device_get(derive(mean))


@pytest.mark.nightly
def test_inverse_of_means_at_the_boundary_and_beyond() -> None:
    mean = np.float32([0, 1e-6, 1e-3, 1, 2 - 1e-3, 2, 2.1, -0.1, np.nan])
    family = Ternary(9)
    inverse, round_trip = inverse_and_mean(family, mean)
    np.testing.assert_array_equal(inverse[[0, 5]], [-np.inf, np.inf])
    assert np.isnan(inverse[6:]).all()
    np.testing.assert_allclose(round_trip[1:5], mean[1:5], rtol=1e-5)
    np.testing.assert_allclose(inverse[[1, 3]], [np.log(1e-6), 0], rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_inverse_of_means_of_several_statistics() -> None:
    # x is 1; E[x**2] < E[x]**2; not below 4; inside
    mean = np.float32([[1, 1], [2, 3], [4, 16], [1.5, 3.5]])
    family = Ordinal(4)
    inverse, round_trip = inverse_and_mean(family, mean)
    assert np.isnan(inverse[:3]).all()
    np.testing.assert_allclose(round_trip[3], mean[3], rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [Ternary(4), Ordinal((2, 2))], ids=repr)
def test_training_with_a_custom_visible_family(family: Family) -> None:
    graph = layered(v=family, h=Bernoulli(2))
    data = (
        np.random.default_rng(0).integers(0, 3, (40, *family.shape)).astype(np.float32)
    )
    options = {
        "num_steps": 5,
        "batch_size": 20,
        "rng_key": zoo.KEY,
        "progress_bar": False,
    }
    params = fit(graph, data, estimator=PCD(num_chains=20), **options).params
    graph.check(params)
    state = local_search(graph, params, rng_key=zoo.KEY).state
    assert np.asarray(family.in_support(state["v"])).all()


@pytest.mark.nightly
def test_inverse_of_means_of_rare_categories() -> None:
    """Units that are always the same, and one row of the default distribution."""
    counts = 1e5 * np.eye(4)[[0, 2]] + 0.25
    rare = (counts / counts.sum(1, keepdims=True)).astype(np.float32)
    inverse = jax.jit(functools.partial(Family.from_mean, Categorical(2, 4)))(rare)
    weights = np.exp(np.asarray(inverse, float))
    np.testing.assert_allclose(weights / weights.sum(1, keepdims=True), rare, rtol=1e-3)
