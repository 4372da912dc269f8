# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Energy-based models as NumPyro distributions, and double intractability."""

import itertools
import pickle

import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs, Predictive, TraceGraph_ELBO
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, EnergyDistribution, Gaussian, Poisson, Spin, exact, layered
from ebmpp.errors import DomainError, IntractableError, ParameterError, StateError
from ebmpp.families.spin import SpinDistribution
from ebmpp.ppl import check_model
from ebmpp.ppl.layout import Layout
from helpers import (
    FAMILIES,
    FINITE,
    assert_law,
    assert_rows_law,
    enumerate_numpy,
    numpy_log_weight,
    pair,
    random_params,
    random_state,
)

RBM = layered(v=Bernoulli(3), h=Bernoulli(2))
PARAMS = random_params(RBM, 1)
DEEP = layered(v=Spin(2), h1=Spin(2), h2=Spin(2))
SPINS = pair(Spin(2), Spin(2))
ROWS = np.array([[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def spin_params(coupling):
    return {"a": jnp.full(2, 0.1), "b": jnp.zeros(2), "a:b": coupling * jnp.ones((2, 2))}


def log_z(params):
    return exact.log_partition(SPINS, params)


# -- log_prob --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_log_prob_of_every_family_against_the_oracle(name):
    graph = pair(FAMILIES[name], Bernoulli(2))
    params = random_params(graph, 2)
    law = EnergyDistribution(graph, params, blocks="all")
    a, b = random_state(FAMILIES[name], 3, (4,)), random_state(Bernoulli(2), 4, (4,))
    wanted = [numpy_log_weight(graph, params, {"a": x, "b": y}) for x, y in zip(a, b, strict=True)]
    value = law.layout.join({"a": a, "b": b})
    np.testing.assert_allclose(law.log_prob(value), wanted, rtol=1e-5, atol=1e-5)
    visible = EnergyDistribution(graph, params)
    np.testing.assert_allclose(visible.log_prob(a), -graph.free_energy(params, {"a": a}), rtol=1e-5)
    assert visible.event_shape == (2,) and visible.support.is_discrete == (name in (*FINITE, "poisson"))
    assert bool(visible.support(a).all()) and visible.support(a).shape == (4,)


def test_log_partition_normalises():
    listed, probs, log_partition = enumerate_numpy(RBM, PARAMS)
    values = np.stack([x["v"] for x in listed[:: 2**2]])  # the last block varies fastest
    wanted = probs.reshape(-1, 2**2).sum(1)
    for given in (log_partition, jnp.asarray(log_partition), lambda p: exact.log_partition(RBM, p)):
        law = EnergyDistribution(RBM, PARAMS, log_partition=given)
        np.testing.assert_allclose(np.exp(law.log_prob(values)), wanted, rtol=1e-4)


def test_named_blocks_and_layouts():
    params = random_params(DEEP, 3)
    x = {b: random_state(f, i, (5,)) for i, (b, f) in enumerate(DEEP.families.items())}
    law = EnergyDistribution(DEEP, params, blocks=["h1"])
    np.testing.assert_allclose(law.log_prob(x["h1"]), DEEP.marginal(params, x, ["v", "h2"]), rtol=1e-5)
    layout = Layout.at(DEEP, (2, 3), {"v": [0, 5], "h1": [1, 4], "h2": [2, 3]})
    board = EnergyDistribution(DEEP, params, layout=layout)
    assert board.event_shape == (2, 3) and board.support.event_dim == 2
    np.testing.assert_allclose(board.log_prob(layout.join(x)), DEEP.log_density(params, x), rtol=1e-5)
    assert board.sample(jax.random.key(0), (4,)).shape == (4, 2, 3)


def test_spins_are_minus_one_and_one():
    law = EnergyDistribution(SPINS, spin_params(0.3))
    assert set(np.unique(law.sample(jax.random.key(0), (50,)))) == {-1.0, 1.0}
    with pytest.warns(UserWarning, match="Out-of-support"):
        assert law.log_prob(jnp.zeros(2)) == -np.inf


def test_support_of_mixed_families():
    graph = layered(v=Gaussian(2), h=Bernoulli(2))
    law = EnergyDistribution(graph, random_params(graph), blocks="all")
    support = law.support
    assert support.is_discrete and support.event_dim == 1
    wanted = [True, False, False]
    given = jnp.array([[0.3, -2, 0, 1], [0.3, -2, 0.5, 1], [jnp.nan, 0, 0, 1]])
    np.testing.assert_array_equal(support(given), wanted)
    assert bool(support(support.feasible_like(given)).all())
    leaves, tree = jax.tree.flatten(support)
    assert not leaves and jax.tree.unflatten(tree, leaves) == support
    assert "values in {0, 1}" in repr(support)
    mixed = layered(v=Gaussian(2), h=Gaussian(2, variance="learned"))
    real = EnergyDistribution(mixed, random_params(mixed), blocks="all", validate_args=False).support
    assert real == constraints.independent(constraints.real, 1)


# -- NumPyro's machinery ---------------------------------------------------------------------------


def test_expand_mask_jit_vmap_and_pytrees():
    law = EnergyDistribution(RBM, PARAMS, num_sweeps=5)
    wanted = law.log_prob(ROWS)
    expanded = law.expand((2,))
    assert expanded.shape() == (2, 3)
    np.testing.assert_allclose(expanded.log_prob(ROWS), wanted)
    np.testing.assert_allclose(law.mask(jnp.array([True, False])).log_prob(ROWS), wanted * np.array([1, 0]))
    np.testing.assert_allclose(jax.jit(lambda d, x: d.log_prob(x))(law, ROWS), wanted, rtol=1e-6)
    copied = pickle.loads(pickle.dumps(law))
    np.testing.assert_array_equal(copied.log_prob(ROWS), wanted)
    leaves, tree = jax.tree.flatten(law)
    again = jax.tree.unflatten(tree, leaves)
    assert tree == jax.tree.structure(copied) and again.support == law.support
    stacked = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), PARAMS)
    many = jax.vmap(lambda p: EnergyDistribution(RBM, p, num_sweeps=5))(stacked)
    both = jax.vmap(lambda d: d.log_prob(ROWS))(many)
    np.testing.assert_allclose(both[0], wanted, rtol=1e-5)
    assert jax.vmap(lambda d, k: d.sample(k))(many, jax.random.split(jax.random.key(0), 2)).shape == (2, 3)


def test_draws_depend_on_their_own_key_and_place():
    law = EnergyDistribution(RBM, PARAMS, num_sweeps=5)
    key = jax.random.key(3)
    many = law.sample(key, (3, 4))
    np.testing.assert_array_equal(law.sample(key, (5,)), many.reshape(12, 3)[:5])
    np.testing.assert_array_equal(law.sample(key), many[0, 0])
    np.testing.assert_array_equal(law.sample(jax.random.PRNGKey(3), (3, 4)), many)
    np.testing.assert_array_equal(jax.jit(law.sample, static_argnums=1)(key, (3, 4)), many)


def test_plates_and_predictive():
    def model(x=None):
        with numpyro.plate("rows", 2):
            return numpyro.sample("x", EnergyDistribution(RBM, PARAMS, num_sweeps=5), obs=x)

    drawn = Predictive(model, num_samples=4)(jax.random.key(0))["x"]
    assert drawn.shape == (4, 2, 3)
    with handlers.seed(rng_seed=0):
        log_density = numpyro.infer.util.log_density(model, (ROWS,), {}, {})[0]
    wanted = EnergyDistribution(RBM, PARAMS).log_prob(ROWS).sum()
    np.testing.assert_allclose(log_density, wanted, rtol=1e-6)


def test_draws_have_the_law():
    listed, probs, _ = enumerate_numpy(RBM, PARAMS)
    v = np.stack([x["v"] for x in listed])
    products = lambda x: np.einsum("ri,rj->rij", x, x)
    draws = EnergyDistribution(RBM, PARAMS).sample(jax.random.key(7), (4000,))
    upper = np.triu_indices(3)
    wanted = np.einsum("r,rij->ij", probs, products(v))[upper]
    assert_rows_law(products(np.asarray(draws))[:, *upper], wanted)


def test_discrete_sites_are_refused_by_gradient_methods():
    def model():
        scale = numpyro.sample("scale", dist.HalfNormal())
        x = numpyro.sample("x", EnergyDistribution(SPINS, spin_params(0.5)))
        numpyro.sample("y", dist.Normal(x, 1 + scale), obs=jnp.ones(2))

    with pytest.raises((ValueError, RuntimeError), match="owns no sites|enumerate support|[Dd]iscrete"):
        MCMC(DiscreteHMCGibbs(NUTS(model)), num_warmup=2, num_samples=2).run(jax.random.key(0))
    with pytest.raises(RuntimeError, match="does not have enumerate support"):
        MCMC(NUTS(model), num_warmup=2, num_samples=2).run(jax.random.key(0))


def test_discrete_sites_beside_enumerable_ones_are_refused():
    def model():
        numpyro.sample("scale", dist.HalfNormal())
        numpyro.sample("k", dist.Bernoulli(0.5), infer={})
        numpyro.sample("x", EnergyDistribution(SPINS, spin_params(0.5)))

    with pytest.raises((ValueError, RuntimeError), match="Discrete latent sites .*'x'|enumerate support"):
        MCMC(DiscreteHMCGibbs(NUTS(model)), num_warmup=2, num_samples=2).run(jax.random.key(0))


@pytest.mark.slow
def test_a_gaussian_block_by_nuts():
    graph = pair(Gaussian(2), Bernoulli(2))
    params = random_params(graph, 5) | {"a:b": jnp.array([[1.5, -1.0], [0.5, 1.0]])}
    tilt = jnp.array([0.3, -0.4])

    def model(params):  # params as an argument: no gradient goes there
        x = numpyro.sample("x", EnergyDistribution(graph, params, num_sweeps=5))
        numpyro.factor("tilt", x @ tilt)  # as if the bias were larger

    mcmc = MCMC(
        NUTS(model),
        num_warmup=100,
        num_samples=100,
        num_chains=40,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), params)
    x = np.asarray(mcmc.get_samples(group_by_chain=True)["x"])
    wanted = exact.moments(graph, params | {"a": params["a"] + tilt})["a"]
    assert_rows_law(x.mean(1), wanted)


# -- double intractability -------------------------------------------------------------------------

X = jnp.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0]])


def intractable(x, log_partition=None):
    coupling = numpyro.sample("J", dist.Uniform(0, 2))
    with numpyro.plate("rows", 2):
        law = EnergyDistribution(SPINS, spin_params(coupling), blocks="all", log_partition=log_partition)
        numpyro.sample("x", law, obs=x)


def nuts(model, samples=100, chains=1):
    method = "vectorized" if chains > 1 else "sequential"
    return MCMC(
        NUTS(model),
        num_warmup=100,
        num_samples=samples,
        num_chains=chains,
        chain_method=method,
        progress_bar=False,
    )


def test_nuts_without_log_partition_is_refused():
    with pytest.raises(IntractableError, match=r"doubly intractable.*log_partition=.*ebmpp\.ppl\.Exchange"):
        nuts(intractable).run(jax.random.key(0), X)


@pytest.mark.slow
def test_nuts_with_log_partition_has_the_posterior():
    grid = jnp.linspace(0.0, 2.0, 401)[1:-1]
    one = lambda j: SPINS.log_density(spin_params(j), {"a": X[:, :2], "b": X[:, 2:]}).sum()
    weight = jax.nn.softmax(jax.vmap(lambda j: one(j) - 2 * log_z(spin_params(j)))(grid))
    mean = float(weight @ grid)
    mcmc = nuts(intractable, chains=40)
    mcmc.run(jax.random.key(0), X, log_partition=log_z)
    drawn = np.asarray(mcmc.get_samples(group_by_chain=True)["J"])
    chain = np.stack([drawn.mean(1), ((drawn - mean) ** 2).mean(1)])
    error = chain.std(1, ddof=1) / np.sqrt(40)
    assert_law(chain.mean(1), [mean, float(weight @ (grid - mean) ** 2)], error)


def test_gradients_that_are_fine():
    law = lambda p: EnergyDistribution(SPINS, p, blocks="all")
    graph = pair(Gaussian(2), Bernoulli(2))
    params, x = random_params(graph, 1), jnp.array([0.3, -1.0])
    slope = jax.grad(lambda x: EnergyDistribution(graph, params).log_prob(x))(x)
    np.testing.assert_allclose(slope, jax.grad(lambda x: -graph.free_energy(params, {"a": x}))(x), rtol=1e-5)
    scale = jax.jit(jax.grad(lambda s, p: s * law(p).log_prob(X[0])))(2.0, spin_params(0.3))
    np.testing.assert_allclose(scale, law(spin_params(0.3)).log_prob(X[0]), rtol=1e-6)
    for take in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(jax.jit(f)))):
        with pytest.raises(IntractableError, match="differentiated in its params"):
            take(lambda j: law(spin_params(j)).log_prob(X[0]))(0.3)
    known = lambda j: EnergyDistribution(SPINS, spin_params(j), log_partition=log_z).log_prob(X[0, :2])
    assert np.isfinite(jax.grad(known)(0.3))


def test_nuts_on_another_site_is_fine():
    def model(params):
        scale = numpyro.sample("scale", dist.HalfNormal())
        numpyro.sample("x", EnergyDistribution(SPINS, params, blocks="all"), obs=X[0])
        numpyro.sample("y", dist.Normal(X[0], scale), obs=jnp.zeros(4))

    mcmc = nuts(model, 20)
    mcmc.run(jax.random.key(0), spin_params(0.3))
    assert np.isfinite(mcmc.get_samples()["scale"]).all()
    check_model(model, spin_params(0.3))


def test_check_model():
    with pytest.raises(IntractableError, match=r"site 'x' depend on the latent sites \['J'\]"):
        check_model(intractable, X)
    check_model(intractable, X, log_partition=log_z)
    check_model(handlers.condition(intractable, {"J": jnp.float32(0.3)}), X)

    def model(fn):  # a site that shares its name with an argument of the tracer, and one further up
        top = numpyro.sample("top", dist.Normal())
        middle = numpyro.sample("fn", dist.Normal(top))
        law = EnergyDistribution(SPINS, spin_params(middle)).mask(fn)
        numpyro.sample("x", law)

    with pytest.raises(IntractableError, match=r"\['fn'\]"):
        check_model(model, True)

    def fine():
        x = numpyro.sample("x", EnergyDistribution(SPINS, spin_params(0.3)))
        numpyro.sample("y", dist.Normal(x), obs=jnp.ones(2))

    check_model(fine)


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"params": {}}, ParameterError, "lacks factor 'v'"),
        ({"params": PARAMS | {"v": np.zeros(2)}}, ParameterError, r"factor 'v'.*\(2,\), expected \(3,\)"),
        ({"params": PARAMS | {"v": np.full(3, np.nan)}}, ParameterError, "not finite"),
        ({"blocks": ["w"]}, StateError, "unknown block 'w'"),
        ({"blocks": ()}, StateError, "at least one block"),
        ({"layout": Layout.of(RBM, ["h"]), "blocks": ["v"]}, StateError, "the layout is of blocks"),
        ({"layout": Layout.of(DEEP, ["h1"])}, StateError, "unknown block 'h1'"),
        ({"layout": Layout.of(DEEP, ["v"])}, StateError, "the layout is of blocks"),
        ({"log_partition": np.zeros(2)}, ParameterError, r"got shape \(2,\)"),
        ({"num_sweeps": 0}, ValueError, "num_sweeps"),
        ({"graph": 3}, TypeError, "graph is a FactorGraph, not 3"),
    ],
)
def test_mistakes(options, error, message):
    with pytest.raises(error, match=message):
        EnergyDistribution(**{"graph": RBM, "params": PARAMS} | options)


def test_more_mistakes():
    params = random_params(DEEP)
    with pytest.raises(IntractableError, match="'h1' and 'h2' interact"):
        EnergyDistribution(DEEP, params)
    with pytest.raises(StateError, match=r"got shape \(4,\)"):
        EnergyDistribution(RBM, PARAMS).log_prob(jnp.zeros(4))
    unbounded = layered(v=Poisson(1), h=Poisson(1))
    wrong = {"v": jnp.zeros(1), "h": jnp.zeros(1), "v:h": jnp.ones((1, 1))}
    with pytest.raises(DomainError):
        EnergyDistribution(unbounded, wrong)
    EnergyDistribution(unbounded, wrong, validate_args=False)


# -- what it does not have -------------------------------------------------------------------------


def test_what_it_lacks_is_named():
    with pytest.raises(NotImplementedError, match="no draws that can be differentiated in its params"):
        EnergyDistribution(RBM, PARAMS).rsample(jax.random.key(0))


def test_a_guide_is_not_taken_for_reparametrised():
    # were it, the gradient in the guide's params would lack the whole score function
    field = jnp.array([0.5, -1.0])

    def model():
        numpyro.sample("x", dist.Independent(SpinDistribution(field), 1))

    def guide(j):
        numpyro.sample("x", EnergyDistribution(SPINS, spin_params(j), log_partition=log_z))

    def bound(j):
        x = jnp.array(list(itertools.product([-1.0, 1.0], repeat=2)))
        law = EnergyDistribution(SPINS, spin_params(j), log_partition=log_z).log_prob(x)
        return -(jnp.exp(law) * (SpinDistribution(field).log_prob(x).sum(-1) - law)).sum()

    loss = TraceGraph_ELBO()
    one = jax.jit(
        jax.vmap(jax.grad(lambda j, key: loss.loss(key, {"j": j}, model, lambda: guide(j))), (None, 0))
    )
    made = np.asarray(one(0.4, jax.random.split(jax.random.key(0), 4000)))
    assert_law(made.mean(), jax.grad(bound)(0.4), made.std() / np.sqrt(len(made)))
