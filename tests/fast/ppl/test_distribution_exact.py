# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Energy-based models as distributions are used: batches, moments, enumeration, divergences, SVI."""

import itertools

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import kl_divergence
from numpyro.infer import MCMC, NUTS, SVI, DiscreteHMCGibbs, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
import pytest

import jax
import jax.numpy as jnp
import optax

from ebmpp import (
    Bernoulli,
    Binomial,
    Categorical,
    EnergyDistribution,
    Gaussian,
    Poisson,
    Spin,
    exact,
    layered,
)
from ebmpp.errors import IntractableError, ParameterError
from ebmpp.families.spin import SpinDistribution
from ebmpp.ppl.layout import Layout
from helpers import assert_law, assert_rows_law, enumerate_numpy, pair, random_params

RBM = layered(v=Bernoulli(3), h=Bernoulli(2))
PARAMS = [random_params(RBM, i) for i in range(6)]
ROWS = np.array(list(itertools.product([0.0, 1.0], repeat=3)), np.float32)


def stacked(number: int = 2):
    return jax.tree.map(lambda *a: jnp.stack(a), *PARAMS[:number])


def listed(graph, params, blocks):
    """Joint values of the blocks, one after the other, and their probabilities, by the slow oracle."""
    states, probs, _ = enumerate_numpy(graph, params)
    rows = np.stack([np.concatenate([np.ravel(x[b]) for b in blocks]) for x in states]).astype(float)
    values, place = np.unique(rows, axis=0, return_inverse=True)
    return values, np.bincount(place.ravel(), probs)


# -- batches ---------------------------------------------------------------------------------------


def test_a_batch_of_params_is_a_batch_of_laws():
    law = EnergyDistribution(RBM, stacked(), num_sweeps=5)
    assert (law.batch_shape, law.event_shape, law.shape((7,))) == ((2,), (3,), (7, 2, 3))
    each = np.stack([EnergyDistribution(RBM, p).log_prob(ROWS) for p in PARAMS[:2]], -1)
    np.testing.assert_allclose(law.log_prob(ROWS[:, None]), each, rtol=1e-5)
    np.testing.assert_allclose(law.log_prob(ROWS[:2]), np.diag(each), rtol=1e-5)
    np.testing.assert_allclose(law.log_prob(ROWS[3]), each[3], rtol=1e-5)
    np.testing.assert_allclose(jax.jit(lambda d, x: d.log_prob(x))(law, ROWS[:, None]), each, rtol=1e-5)
    normal = EnergyDistribution(RBM, stacked(), log_partition=lambda p: exact.log_partition(RBM, p))
    np.testing.assert_allclose(np.exp(normal.log_prob(ROWS[:, None])).sum(0), [1, 1], rtol=1e-5)
    log_z = [exact.log_partition(RBM, p) for p in PARAMS[:2]]
    given = EnergyDistribution(RBM, stacked(), log_partition=jnp.stack(log_z))
    np.testing.assert_allclose(given.log_prob(ROWS[3]), normal.log_prob(ROWS[3]), rtol=1e-5)


def test_leading_axes_broadcast_and_one_leaf_may_have_them_alone():
    fields = jax.random.normal(jax.random.key(0), (4, 1, 3))
    latent = jax.random.normal(jax.random.key(1), (2, 2))
    law = EnergyDistribution(RBM, PARAMS[0] | {"v": fields, "h": latent}, num_sweeps=3)
    assert law.batch_shape == (4, 2) and law.mean.shape == (4, 2, 3)
    one = EnergyDistribution(RBM, PARAMS[0] | {"v": fields[3, 0], "h": latent[1]})
    np.testing.assert_allclose(law.log_prob(ROWS[5])[3, 1], one.log_prob(ROWS[5]), rtol=1e-5)
    np.testing.assert_allclose(law.mean[3, 1], one.mean, rtol=1e-5)
    assert law.expand((5, 4, 2)).sample(jax.random.key(2)).shape == (5, 4, 2, 3)
    with pytest.raises(ParameterError, match=r"leading axes {'v': \(3,\), 'h': \(2,\), .* do not broadcast"):
        EnergyDistribution(RBM, PARAMS[0] | {"v": jnp.zeros((3, 3)), "h": latent})
    with pytest.raises(ParameterError, match=r"factor 'h': params have shape \(5,\), expected \(2,\)"):
        EnergyDistribution(RBM, PARAMS[0] | {"v": fields, "h": jnp.zeros(5)})
    with pytest.raises(ParameterError, match="not finite"):
        EnergyDistribution(RBM, PARAMS[0] | {"v": fields.at[2, 0, 1].set(jnp.nan)})
    with pytest.raises(ParameterError, match=r"one number, or \(2,\) of them, one for each law"):
        EnergyDistribution(RBM, stacked(), log_partition=np.zeros(3))


def test_draws_of_a_batch_have_its_laws():
    law = EnergyDistribution(RBM, stacked(), num_sweeps=60)
    draws = law.sample(jax.random.key(7), (4000,))
    assert draws.shape == (4000, 2, 3)
    for i in range(2):
        assert_rows_law(np.asarray(draws[:, i]), exact.moments(RBM, PARAMS[i])["v"])
    np.testing.assert_array_equal(law.sample(jax.random.key(7), (5,)), draws[:5])


def test_what_vmap_returns_is_a_batch():
    made = jax.vmap(lambda p: EnergyDistribution(RBM, p))(stacked())
    law = EnergyDistribution(RBM, stacked())
    assert made.batch_shape == (2,)
    np.testing.assert_array_equal(made.log_prob(ROWS[:, None]), law.log_prob(ROWS[:, None]))
    inside = jax.vmap(lambda d: d.log_prob(ROWS), out_axes=1)(law)
    np.testing.assert_allclose(inside, law.log_prob(ROWS[:, None]), rtol=1e-5)


def test_a_batch_in_a_plate_and_predictive():
    def model(x=None):
        with numpyro.plate("sets", 2):
            numpyro.sample("x", EnergyDistribution(RBM, stacked(), num_sweeps=5), obs=x)

    assert Predictive(model, num_samples=4)(jax.random.key(0))["x"].shape == (4, 2, 3)
    log_density = numpyro.infer.util.log_density(model, (ROWS[:2],), {}, {})[0]
    wanted = sum(EnergyDistribution(RBM, p).log_prob(x) for p, x in zip(PARAMS, ROWS[:2], strict=False))
    np.testing.assert_allclose(log_density, wanted, rtol=1e-5)


# -- moments, entropy, divergence ------------------------------------------------------------------

FINITE = {
    "bernoulli": Bernoulli(2),
    "spin": Spin((2, 1)),
    "binomial": Binomial(2, 3),
    "categorical": Categorical(2, 3),
}


@pytest.mark.parametrize("name", FINITE)
def test_moments_and_entropy_against_the_oracle(name):
    graph = pair(FINITE[name], Bernoulli(2))
    params = random_params(graph, 2)
    law = EnergyDistribution(graph, params)
    values, probs = listed(graph, params, ["a"])
    mean = probs @ values
    np.testing.assert_allclose(np.ravel(law.mean), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.ravel(law.variance), probs @ (values - mean) ** 2, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(law.entropy(), -probs @ np.log(probs), rtol=1e-4)
    assert law.mean.shape == law.variance.shape == law.event_shape
    support = law.enumerate_support()
    assert support.shape == (len(values), *law.event_shape)
    np.testing.assert_array_equal(np.unique(support.reshape(len(values), -1), axis=0), values)


def test_moments_of_units_of_infinitely_many_values():
    graph = layered(v=Gaussian(2), h=Bernoulli(2))  # a mixture of four Gaussians
    params = random_params(graph, 3)
    law = EnergyDistribution(graph, params)
    h = np.array(list(itertools.product([0.0, 1.0], repeat=2)))
    center = np.asarray(params["v"]) + h @ np.asarray(params["v:h"]).T
    weight = np.exp(h @ np.asarray(params["h"]) + 0.5 * (center**2).sum(1))
    weight /= weight.sum()
    np.testing.assert_allclose(law.mean, weight @ center, rtol=1e-4)
    wanted = 1 + weight @ center**2 - (weight @ center) ** 2
    np.testing.assert_allclose(law.variance, wanted, rtol=1e-4)
    with pytest.raises(IntractableError, match="infinitely many values"):
        law.entropy()


def test_a_value_in_another_order_and_batches_have_moments_too():
    layout = Layout.at(RBM, (5,), {"v": [0, 2, 4], "h": [1, 3]})
    law = EnergyDistribution(RBM, stacked(), layout=layout)
    for i in range(2):
        values, probs = listed(RBM, PARAMS[i], ["v", "h"])
        mean = layout.join({"v": (probs @ values)[:3], "h": (probs @ values)[3:]})
        np.testing.assert_allclose(law.mean[i], mean, rtol=1e-4)
        np.testing.assert_allclose(law.variance[i], mean * (1 - mean), rtol=1e-4)
        np.testing.assert_allclose(law.entropy()[i], -probs @ np.log(probs), rtol=1e-4)
    assert law.enumerate_support().shape == (32, 2, 5)
    assert law.enumerate_support(expand=False).shape == (32, 1, 5)


def test_exact_sums_are_differentiated_through():
    slope = jax.grad(lambda b: EnergyDistribution(RBM, PARAMS[0] | {"v": b}).mean[1])(PARAMS[0]["v"])
    np.testing.assert_allclose(slope[1], EnergyDistribution(RBM, PARAMS[0]).variance[1], rtol=1e-4)
    assert np.isfinite(
        jax.grad(lambda b: EnergyDistribution(RBM, PARAMS[0] | {"v": b}).entropy())(slope)
    ).all()


def test_divergences_of_numpyros_registry():
    p, q = (
        EnergyDistribution(RBM, params, log_partition=0.3) for params in PARAMS[:2]
    )  # no matter what log Z
    (_, first), (values, second) = (listed(RBM, params, ["v"]) for params in PARAMS[:2])
    np.testing.assert_allclose(kl_divergence(p, q), first @ np.log(first / second), rtol=1e-4)
    np.testing.assert_allclose(kl_divergence(p, p), 0, atol=1e-6)
    units = dist.Bernoulli(logits=jnp.array([0.3, -1.0, 0.5])).to_event(1)
    third = np.exp(units.log_prob(jnp.asarray(values)))
    np.testing.assert_allclose(kl_divergence(p, units), first @ np.log(first / third), rtol=1e-4)
    np.testing.assert_allclose(kl_divergence(units, q), third @ np.log(third / second), rtol=1e-4)
    both = EnergyDistribution(RBM, stacked())
    np.testing.assert_allclose(kl_divergence(both, q), [kl_divergence(p, q), 0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(kl_divergence(q, both), [kl_divergence(q, p), 0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(kl_divergence(p.expand((4,)), q), np.full(4, kl_divergence(p, q)), rtol=1e-4)
    rows = dist.Bernoulli(logits=jnp.zeros((2, 3))).to_event(1)
    assert kl_divergence(both, rows).shape == kl_divergence(p, rows).shape == (2,)
    with pytest.raises(
        ParameterError, match=r"two laws of the same values; these have shapes \(3,\) and \(2,\)"
    ):
        kl_divergence(p, EnergyDistribution(RBM, PARAMS[0], blocks=["h"]))
    other = pair(Spin(3), Bernoulli(1))
    with pytest.raises(ParameterError, match="and supports"):
        kl_divergence(p, EnergyDistribution(other, random_params(other)))


def test_large_models_are_refused():
    graph = layered(v=Bernoulli(40), h=Bernoulli(40))
    law = EnergyDistribution(graph, graph.init(jax.random.key(0)))
    for ask in (lambda: law.mean, lambda: law.variance, law.entropy, law.enumerate_support):
        with pytest.raises(IntractableError, match=r"2\*\*40 joint states to enumerate"):
            ask()
    counts = pair(Poisson(2), Bernoulli(1))
    with pytest.raises(IntractableError, match="infinitely many values"):
        EnergyDistribution(counts, random_params(counts)).enumerate_support()


# -- NumPyro's enumeration, SVI --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "single"),
    [
        (Bernoulli(1), True),
        (Categorical(1, 3), True),
        (Binomial(1, 4), True),
        (Spin(1), False),
        (Bernoulli(2), False),
        (Poisson(1), False),
    ],
)
def test_numpyro_enumerates_single_units_numbered_from_0(family, single):
    graph = pair(family, Bernoulli(1))
    assert EnergyDistribution(graph, random_params(graph)).has_enumerate_support is single


def switch(family):
    """A unit in each row of a plate, observed with noise."""
    graph = pair(family, Bernoulli(2))
    params = random_params(graph, 1)

    def model(y):
        scale = numpyro.sample("scale", dist.Uniform(0.5, 2))
        with numpyro.plate("rows", 3):
            x = numpyro.sample("x", EnergyDistribution(graph, params, num_sweeps=5))
        numpyro.sample("y", dist.Normal(x[:, 0], scale), obs=y)

    return graph, params, model


def test_discrete_hmc_gibbs_has_the_posterior():
    graph, params, model = switch(Categorical(1, 3))
    y = jnp.array([0.2, 1.4, 2.2])
    mcmc = MCMC(
        DiscreteHMCGibbs(NUTS(model)),
        num_warmup=30,
        num_samples=60,
        num_chains=60,
        chain_method=jax.vmap,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), y)
    drawn = np.asarray(mcmc.get_samples(group_by_chain=True)["x"])[..., 0]
    values, probs = listed(graph, params, ["a"])
    scale = np.linspace(0.5, 2, 401)
    table = np.exp(-0.5 * ((np.asarray(y)[:, None] - values[:, 0]) / scale[:, None, None]) ** 2)
    table = probs * table / scale[:, None, None]  # (scales, rows, values)
    weight = table.sum(-1).prod(-1)
    each = np.einsum("s,srv->rv", weight / weight.sum(), table / table.sum(-1, keepdims=True))
    share = np.stack([(drawn == v).mean(1) for v in range(3)], -1)  # (chains, rows, values)
    assert_law(share.mean(0), each, share.std(0, ddof=1) / np.sqrt(len(share)))


@pytest.mark.parametrize("family", [Spin(1), Bernoulli(2)])
def test_discrete_hmc_gibbs_refuses_other_values_by_name(family):
    with pytest.raises((ValueError, RuntimeError), match="owns no sites|Discrete latent sites .*'x'"):
        mcmc = MCMC(
            DiscreteHMCGibbs(NUTS(switch(family)[2])), num_warmup=1, num_samples=1, progress_bar=False
        )
        mcmc.run(jax.random.key(0), jnp.zeros(3))


def test_inferring_discrete_sites_of_one_unit():
    pytest.importorskip("funsor")
    from numpyro.contrib.funsor import infer_discrete
    from numpyro.handlers import seed, trace

    model = infer_discrete(switch(Bernoulli(1))[2], first_available_dim=-2, rng_key=jax.random.key(0))
    found = trace(seed(model, 0)).get_trace(jnp.zeros(3))
    assert found["x"]["value"].shape == (3, 1)


def test_a_guide_over_the_other_sites():
    graph = pair(Spin(2), Spin(2))
    x = jnp.array([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    of = lambda j: {"a": jnp.full(2, 0.1), "b": jnp.zeros(2), "a:b": j * jnp.ones((2, 2))}
    log_z = lambda p: exact.log_partition(graph, p)

    def model():
        coupling = numpyro.sample("J", dist.Normal(0, 1))
        with numpyro.plate("rows", 3):
            law = EnergyDistribution(graph, of(coupling), blocks="all", log_partition=log_z)
            numpyro.sample("x", law, obs=x)

    svi = SVI(model, guide := AutoNormal(model), optax.adam(0.02), Trace_ELBO(num_particles=8))
    params = svi.run(jax.random.key(0), 1500, progress_bar=False).params
    grid = jnp.linspace(-3, 4, 601)
    one = lambda j: graph.log_density(of(j), {"a": x[:, :2], "b": x[:, 2:]}).sum() - 3 * log_z(of(j))
    weight = jax.nn.softmax(jax.vmap(one)(grid) - 0.5 * grid**2)
    mean = float(weight @ grid)
    spread = float(weight @ (grid - mean) ** 2) ** 0.5
    made = guide.median(params)["J"]
    assert abs(float(made) - mean) < 0.25 * spread  # the best normal is not the posterior


def test_a_mean_field_guide_for_the_model_itself():
    graph, params = pair(Spin(2), Spin(1)), None
    params = random_params(graph, 4)
    law = EnergyDistribution(graph, params, log_partition=exact.log_partition(graph, params))
    units = dist.Independent(SpinDistribution(jnp.array([0.4, -0.2])), 1)
    bound = TraceMeanField_ELBO().loss(
        jax.random.key(0), {}, lambda: numpyro.sample("x", law), lambda: numpyro.sample("x", units)
    )
    np.testing.assert_allclose(bound, kl_divergence(units, law), rtol=1e-5)
