# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Energy-based models as NumPyro distributions: densities, draws, moments and NumPyro's machinery.

Tests distribution/energy_distribution.py, distribution/layout.py,
graph/transforms/batches.py.
"""

from functools import cache
import itertools
import pickle
from typing import Any

import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import kl_divergence
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs, Predictive
from oracle import enumerate_numpy, log_weight
import pytest
import zoo

import jax

from ebmpp import (
    Bernoulli,
    Binomial,
    Categorical,
    EnergyDistribution,
    Poisson,
    Spin,
    exact,
)
from ebmpp.errors import ArgumentError, IntractableError, ParameterError
from ebmpp.ppl import Layout
from helpers import (
    FAMILIES,
    FINITE,
    assert_rows_law,
    often,
    pair,
    random_params,
    random_state,
)

ROWS = np.array(list(itertools.product([0.0, 1.0], repeat=4)), np.float32)


def law(params: Any = None, **options: Any) -> EnergyDistribution:
    """The visible units of the RBM."""
    return EnergyDistribution(
        zoo.graph("rbm"), params or zoo.params("rbm"), num_sweeps=5, **options
    )


@cache
def param_sets() -> list[dict]:
    return [random_params(zoo.graph("rbm"), seed) for seed in (1, 2)]


def stacked() -> dict:
    return jax.tree.map(lambda *a: np.stack(a), *param_sets())


def probabilities(
    graph: Any, params: Any, blocks: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Joint values of the blocks and their probabilities, by enumeration in numpy."""
    states, probs, _ = enumerate_numpy(graph, params)
    rows = np.stack(
        [np.concatenate([np.ravel(x[b]) for b in blocks]) for x in states]
    ).astype(float)
    values, place = np.unique(rows, axis=0, return_inverse=True)
    return values, np.bincount(place.ravel(), probs)


@cache
def visible(index: int) -> np.ndarray:
    """Probabilities of :data:`ROWS`."""
    return probabilities(zoo.graph("rbm"), param_sets()[index], ["v"])[1]


def log_partition(params: Any) -> Any:
    return exact.log_partition(zoo.graph("rbm"), params)


@pytest.mark.parametrize("name", often(FAMILIES, "bernoulli", "categorical", "poisson"))
def test_log_prob_matches_enumeration(name: str) -> None:
    graph = pair(FAMILIES[name], Bernoulli(2))
    params = random_params(graph, 2)
    a, b = random_state(FAMILIES[name], 3, (4,)), random_state(Bernoulli(2), 4, (4,))
    marginal = EnergyDistribution(graph, params)

    @jax.jit
    def log_probs(params: Any) -> tuple:
        joint = EnergyDistribution(graph, params, blocks="all")
        value = joint.layout.join({"a": a, "b": b})
        return (
            joint.log_prob(value),
            EnergyDistribution(graph, params).log_prob(a),
            marginal.support(a),
        )

    joint, summed, is_inside = log_probs(params)
    weight = lambda x, y: log_weight(graph, params, {"a": x[None], "b": y[None]})[0]
    expected = [weight(x, y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(joint, expected, rtol=1e-5, atol=1e-5)
    latent = np.array(list(itertools.product([0.0, 1.0], repeat=2)))
    expected = [np.logaddexp.reduce([weight(x, y) for y in latent]) for x in a]
    np.testing.assert_allclose(summed, expected, rtol=1e-5, atol=1e-5)
    assert (
        marginal.event_shape == (2,)
        and is_inside.shape == (4,)
        and bool(is_inside.all())
    )
    assert marginal.support.is_discrete == (name in (*FINITE, "poisson"))


def test_log_partition_normalises_a_batch_of_params() -> None:
    def log_probs(params: Any) -> tuple:
        batch = law(params, log_partition=log_partition)
        assert (batch.batch_shape, batch.event_shape, batch.shape((7,))) == (
            (2,),
            (4,),
            (7, 2, 4),
        )
        numbers = jax.vmap(log_partition)(params)
        return batch.log_prob(ROWS[:, None]), law(
            params, log_partition=numbers
        ).log_prob(ROWS[3])

    rows, row = jax.jit(log_probs)(stacked())
    expected = np.stack([visible(0), visible(1)], 1)
    np.testing.assert_allclose(np.exp(rows), expected, rtol=1e-4)
    np.testing.assert_allclose(np.exp(row), expected[3], rtol=1e-4)


def test_named_blocks_and_layouts() -> None:
    graph, params = zoo.graph("deep"), zoo.params("deep")
    x = {b: random_state(f, i, (5,)) for i, (b, f) in enumerate(graph.families.items())}
    layout = Layout.at(graph, (2, 4), {"v": [0, 5, 7], "h1": [1, 4, 6], "h2": [2, 3]})

    @jax.jit
    def log_probs(params: Any) -> tuple:
        middle = EnergyDistribution(graph, params, blocks=["h1"]).log_prob(x["h1"])
        board = EnergyDistribution(graph, params, layout=layout)
        assert board.event_shape == (2, 4) and board.support.event_dim == 2
        expected = (
            graph.log_marginal(params, x, ["v", "h2"]),
            graph.log_density(params, x),
        )
        return (
            (middle, board.log_prob(layout.join(x))),
            expected,
            board.sample(zoo.KEY, (4,)),
        )

    reported, expected, draws = log_probs(params)
    assert draws.shape == (4, 2, 4)
    for a, b in zip(reported, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_values_outside_the_support() -> None:
    with pytest.warns(UserWarning, match="Out-of-support"):
        # eager, where it warns
        assert law().log_prob(np.float32([0, 1, -1, 0])) == -np.inf
    support = EnergyDistribution(
        zoo.graph("gaussian"), zoo.params("gaussian"), blocks="all"
    ).support
    values = np.float32(
        [[0.3, -2, 0.1, 0, 1], [0.3, -2, 0, 0.5, 1], [np.nan, 0, 0, 0, 1]]
    )
    inside, feasible = jax.jit(
        lambda v: (support(v), support(support.feasible_like(v)))
    )(values)
    np.testing.assert_array_equal(inside, [True, False, False])
    assert support.is_discrete and bool(feasible.all())


def test_draws_match_enumeration() -> None:
    batch = EnergyDistribution(zoo.graph("rbm"), stacked(), num_sweeps=60)
    draws = batch.sample(zoo.KEY, (4000,))
    upper = np.triu_indices(4)
    for i in range(2):
        products = lambda x: np.einsum("ri,rj->rij", x, x)[:, *upper]
        assert_rows_law(
            products(np.asarray(draws[:, i])),
            visible(i) @ products(ROWS),
            comparisons=20,
        )


def test_draws_depend_on_their_key_and_place() -> None:
    draws = law().sample(zoo.KEY, (3, 4))
    np.testing.assert_array_equal(law().sample(zoo.KEY, (5,)), draws.reshape(12, 4)[:5])
    np.testing.assert_array_equal(law().sample(jax.random.PRNGKey(0), (3, 4)), draws)
    with pytest.raises(NotImplementedError, match="not differentiable in the params"):
        law().rsample(zoo.KEY)


def test_no_draws_and_no_rows_have_shapes() -> None:
    distribution = law(validate_args=False)
    assert distribution.sample(zoo.KEY, (0,)).shape == (0, 4)
    assert distribution.sample(zoo.KEY, (2, 0)).shape == (2, 0, 4)
    assert distribution.log_prob(np.zeros((0, 4))).shape == (0,)
    for shape in ((-1,), (1.5,), "a"):
        with pytest.raises(ArgumentError, match="sample_shape"):
            distribution.sample(zoo.KEY, shape)


def test_expand_mask_vmap_and_pickle() -> None:
    rows, mask = ROWS[[3, 9]], np.array([True, False])
    base, copied = law(), pickle.loads(pickle.dumps(law()))
    assert base.expand((2,)).shape() == (2, 4)
    ask = jax.jit(
        lambda d: [e.log_prob(rows) for e in (d, d.expand((2,)), d.mask(mask), copied)]
    )
    expected, expanded, masked, unpickled = ask(base)
    np.testing.assert_allclose(expanded, expected)
    np.testing.assert_allclose(masked, expected * mask)
    np.testing.assert_allclose(unpickled, expected, rtol=1e-6)

    @jax.jit
    def of_batch(params: Any, keys: Any) -> tuple:
        batch = jax.vmap(law)(params)
        assert batch.batch_shape == (2,)
        return jax.vmap(lambda d, k: (d.log_prob(rows), d.sample(k)))(batch, keys)

    log_probs, draws = of_batch(stacked(), jax.random.split(zoo.KEY, 2))
    assert draws.shape == (2, 4)
    for params, log_prob in zip(param_sets(), log_probs, strict=True):
        np.testing.assert_allclose(
            log_prob, -zoo.graph("rbm").free_energy(params, {"v": rows}), rtol=1e-5
        )


@pytest.mark.nightly
def test_plates_and_predictive() -> None:
    params = stacked()  # outside of the trace of the model

    def model(x: Any = None) -> None:
        with numpyro.plate("sets", 2):
            numpyro.sample("x", law(params), obs=x)

    rows = ROWS[[3, 9]]
    assert Predictive(model, num_samples=4)(zoo.KEY)["x"].shape == (4, 2, 4)
    with handlers.seed(rng_seed=0):
        density = numpyro.infer.util.log_density(model, (rows,), {}, {})[0]
    expected = sum(law(p).log_prob(x) for p, x in zip(param_sets(), rows, strict=True))
    np.testing.assert_allclose(density, expected, rtol=1e-5)


def test_discrete_sites_are_refused_by_gradient_methods() -> None:
    def model(enumerable: bool) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal())
        if enumerable:
            numpyro.sample("k", dist.Bernoulli(0.5), infer={})
        x = numpyro.sample("x", law())
        numpyro.sample("y", dist.Normal(x, 1 + scale), obs=np.ones(4))

    for kernel, enumerable in (
        (DiscreteHMCGibbs(NUTS(model)), True),
        (NUTS(model), False),
    ):
        with pytest.raises(
            (ValueError, RuntimeError),
            match=r"Discrete latent sites .*'x'|enumerate support",
        ):
            MCMC(kernel, num_warmup=2, num_samples=2).run(jax.random.key(0), enumerable)


@pytest.mark.parametrize(
    ("family", "is_single"),
    [
        *(
            (family, True)
            for family in (Bernoulli(1), Categorical(1, 3), Binomial(1, 4))
        ),
        *((family, False) for family in (Spin(1), Bernoulli(2), Poisson(1))),
    ],
)
def test_single_units_numbered_from_0_are_enumerated(
    family: Any, is_single: bool
) -> None:
    graph = pair(family, Bernoulli(1))
    assert (
        EnergyDistribution(graph, random_params(graph)).has_enumerate_support
        is is_single
    )


@pytest.mark.nightly
def test_gradients_in_params_need_the_log_partition() -> None:
    graph, params = zoo.graph("gaussian"), zoo.params("gaussian")
    x = np.float32([0.3, -1.0, 0.5])
    slope = jax.jit(jax.grad(lambda x: EnergyDistribution(graph, params).log_prob(x)))(
        x
    )
    expected = jax.jit(jax.grad(lambda x: -graph.free_energy(params, {"v": x})))(x)
    np.testing.assert_allclose(slope, expected, rtol=1e-5)
    density = lambda j, **options: law(
        zoo.params("rbm") | {"v": j * np.ones(4)}, **options
    ).log_prob(ROWS[5])
    for take in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(jax.jit(f)))):
        with pytest.raises(IntractableError, match="differentiated in its params"):
            take(density)(0.3)
    known = jax.jit(jax.grad(lambda j: density(j, log_partition=log_partition)))(0.3)
    means = exact.moments(zoo.graph("rbm"), zoo.params("rbm") | {"v": np.full(4, 0.3)})[
        "v"
    ]
    np.testing.assert_allclose(known, (ROWS[5] - np.asarray(means)).sum(), rtol=1e-4)


@pytest.mark.nightly
def test_nuts_without_log_partition_is_refused() -> None:
    def model() -> None:
        coupling = numpyro.sample("J", dist.Uniform(0, 2))
        numpyro.sample(
            "x", law(zoo.params("rbm") | {"v": coupling * np.ones(4)}), obs=ROWS[5]
        )

    with pytest.raises(
        IntractableError,
        match=r"doubly intractable.*log_partition=.*ebmpp\.ppl\.Exchange",
    ):
        MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False).run(
            jax.random.key(0)
        )


@pytest.mark.nightly
@pytest.mark.parametrize("name", often(FINITE, "categorical"))
def test_moments_and_entropy_match_enumeration(name: str) -> None:
    graph = pair(FAMILIES[name], Bernoulli(2))
    params = random_params(graph, 2)
    distribution = EnergyDistribution(graph, params)
    values, probs = probabilities(graph, params, ["a"])
    mean = probs @ values
    np.testing.assert_allclose(np.ravel(distribution.mean), mean, rtol=1e-4, atol=1e-5)
    variance = probs @ (values - mean) ** 2
    np.testing.assert_allclose(
        np.ravel(distribution.variance), variance, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        distribution.entropy(), -probs @ np.log(probs), rtol=1e-4
    )
    support = np.asarray(distribution.enumerate_support())
    np.testing.assert_array_equal(
        np.unique(support.reshape(len(values), -1), axis=0), values
    )


def test_moments_of_gaussian_units() -> None:
    graph, params = (
        zoo.graph("gaussian"),
        jax.tree.map(np.asarray, zoo.params("gaussian")),
    )
    distribution = EnergyDistribution(graph, params)
    h = np.array(list(itertools.product([0.0, 1.0], repeat=2)))
    center = params["v"] + h @ params["v:h"].T
    weight = np.exp(h @ params["h"] + 0.5 * (center**2).sum(1))
    weight /= weight.sum()
    mean, variance = jax.jit(lambda d: (d.mean, d.variance))(distribution)
    np.testing.assert_allclose(mean, weight @ center, rtol=1e-4)
    expected = 1 + weight @ center**2 - (weight @ center) ** 2
    np.testing.assert_allclose(variance, expected, rtol=1e-4)
    with pytest.raises(IntractableError, match="infinitely many values"):
        distribution.entropy()


def test_moments_of_batches_in_a_layout() -> None:
    graph = zoo.graph("rbm")
    layout = Layout.at(graph, (7,), {"v": [0, 2, 4, 6], "h": [1, 3, 5]})
    batch = EnergyDistribution(graph, stacked(), layout=layout)
    mean, variance, entropy = jax.jit(lambda d: (d.mean, d.variance, d.entropy()))(
        batch
    )
    for i in range(2):
        values, probs = probabilities(graph, param_sets()[i], ["v", "h"])
        expected = np.zeros(7)
        expected[[0, 2, 4, 6, 1, 3, 5]] = probs @ values
        np.testing.assert_allclose(mean[i], expected, rtol=1e-4)
        np.testing.assert_allclose(variance[i], expected * (1 - expected), rtol=1e-4)
        np.testing.assert_allclose(entropy[i], -probs @ np.log(probs), rtol=1e-4)


def test_kl_divergences_match_enumeration() -> None:
    # no matter what log Z
    p, q = (law(params, log_partition=0.3) for params in param_sets())
    units = dist.Bernoulli(logits=np.float32([0.3, -1.0, 0.5, 0.1])).to_event(1)
    both, pairs = law(stacked()), lambda p, q, both: [(p, units), (units, q), (both, q)]
    reported = jax.jit(lambda *d: [kl_divergence(*pair) for pair in pairs(*d)])(
        p, q, both
    )
    first, second = visible(0), visible(1)
    logits = np.array([0.3, -1.0, 0.5, 0.1])
    third = np.exp(ROWS @ logits - np.log1p(np.exp(logits)).sum())
    np.testing.assert_allclose(reported[0], first @ np.log(first / third), rtol=1e-4)
    np.testing.assert_allclose(reported[1], third @ np.log(third / second), rtol=1e-4)
    np.testing.assert_allclose(
        reported[2], [first @ np.log(first / second), 0], rtol=1e-4, atol=1e-6
    )
    with pytest.raises(ParameterError, match=r"shapes \(4,\) and \(3,\)"):
        kl_divergence(p, law(blocks=["h"]))
    other = pair(Spin(4), Bernoulli(1))
    with pytest.raises(ParameterError, match="supports"):
        kl_divergence(p, EnergyDistribution(other, random_params(other)))
