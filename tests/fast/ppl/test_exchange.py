# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exchange: posteriors against quadrature with the exact log Z, and NumPyro's contract."""

from functools import partial
import pickle
import warnings

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Categorical, EnergyDistribution, Spin, exact, layered, perfect_sample
from ebmpp.errors import IntractableError, ParameterError, StateError, UnmetError
from ebmpp.ppl import Exchange
from helpers import assert_law, pair, slow

# the two colours of a 2x4 board, and which squares touch
SPINS = layered(a=Spin(4), b=Spin(4))
SQUARES = [(i, j) for i in range(2) for j in range(4)]
TOUCH = np.array(
    [
        [abs(i - k) + abs(j - m) == 1 for k, m in SQUARES if (k + m) % 2]
        for i, j in SQUARES
        if (i + j) % 2 == 0
    ],
    np.float32,
)
PRIOR = {"J": dist.Uniform(0, 1.5)}
CHAINS = 60


def lattice(sites, *_, **__):
    field = jnp.full(4, 0.1)
    return {"a": field, "b": field, "a:b": sites["J"] * TOUCH}


def observed(_, x, **__):
    return x


X = perfect_sample(SPINS, lattice({"J": 0.3}), jax.random.key(5), 5)


def sampler(kernel, num_samples=10, num_chains=1, method="vectorized", num_warmup=5, **kwargs):
    return MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=method,
        progress_bar=False,
        **kwargs,
    )


def kernel(auxiliary="enumerate", graph=SPINS, prior=None, **kwargs):
    return Exchange(graph, prior or PRIOR, lattice, observed, auxiliary=auxiliary, **kwargs)


def quadrature(log_joint, low, high):
    """Mean and variance of one number from its unnormalised log density."""
    grid = np.linspace(low, high, 402)[1:-1].astype(np.float32)
    weight = np.asarray(jax.nn.softmax(jax.jit(jax.vmap(log_joint))(grid)), float)
    mean = weight @ grid
    return mean, weight @ (grid - mean) ** 2


def assert_posterior(draws, mean, variance):
    """Chains are independent, so their averages give the standard error, however they mix.

    :param draws: shape ``(chains, steps)``.
    """
    draws = np.asarray(draws, float)
    averages = np.stack([draws.mean(1), ((draws - mean) ** 2).mean(1)])
    error = averages.std(1, ddof=1) / np.sqrt(len(draws))
    assert_law(averages.mean(1), [mean, variance], error)


def log_likelihood(coupling, x=X, log_density=SPINS.log_density):
    params = lattice({"J": coupling})
    rows = len(next(iter(x.values())))
    return log_density(params, x).sum() - rows * exact.log_partition(SPINS, params)


# -- posteriors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auxiliary", "top", "chains"),
    [
        ("enumerate", 1.5, 60),
        slow("coupling_from_the_past", 0.4, 30),
        slow("random_cluster", 1.5, 20),
    ],
)
def test_posterior_against_quadrature(auxiliary, top, chains):
    made = kernel(auxiliary, prior={"J": dist.Uniform(0, top)})
    mcmc = sampler(made, 120, chains, num_warmup=60)
    mcmc.run(jax.random.key(1), X)
    assert_posterior(mcmc.get_samples(group_by_chain=True)["J"], *quadrature(log_likelihood, 0, top))
    assert int(mcmc.last_state.failures.sum()) == 0
    accepted = np.asarray(mcmc.last_state.mean_accept_prob).mean()
    assert 0.3 < accepted < 0.9 and f"acc. prob={accepted:.2f}" in made.get_diagnostics_str(mcmc.last_state)
    steps = np.asarray(mcmc.last_state.step_size)
    assert steps.std() > 0 and (steps != 0.5).all()  # each chain adapted its own


def test_latents_are_summed_out():
    x = {"a": X["a"]}  # b is latent in this graph
    mcmc = sampler(kernel(), 150, CHAINS, num_warmup=60)
    mcmc.run(jax.random.key(2), x)
    free = lambda p, x: -SPINS.free_energy(p, x)
    wanted = quadrature(partial(log_likelihood, x=x, log_density=free), 0, 1.5)
    assert_posterior(mcmc.get_samples(group_by_chain=True)["J"], *wanted)


def test_many_sweeps_from_the_data():
    with pytest.warns(UserWarning, match="approximate .double Metropolis-Hastings"):
        made = kernel(30, prior={"J": dist.Uniform(0, 0.5)})
    mcmc = sampler(made, 150, CHAINS, num_warmup=60)
    mcmc.run(jax.random.key(3), X)
    assert_posterior(mcmc.get_samples(group_by_chain=True)["J"], *quadrature(log_likelihood, 0, 0.5))


def both_params(sites, *_):
    field = jnp.broadcast_to(sites["theta"][1], (4,))
    return {"a": field, "b": field, "a:b": sites["theta"][0] * TOUCH}


@pytest.mark.slow
def test_several_dimensions_and_a_prior_on_the_line():
    prior = {"theta": dist.Normal(jnp.array([0.2, 0.0]), 0.3).to_event(1)}
    made = Exchange(SPINS, prior, both_params, observed)
    assert made.auxiliary == "enumerate" and made.target_accept == 0.234
    mcmc = sampler(made, 200, CHAINS, num_warmup=100)
    mcmc.run(jax.random.key(4), X)
    grid = jnp.stack(jnp.meshgrid(jnp.linspace(-1.2, 1.6, 61), jnp.linspace(-1.4, 1.4, 61)), -1).reshape(
        -1, 2
    )

    def log_joint(theta):
        params = both_params({"theta": theta})
        fit = SPINS.log_density(params, X).sum() - 5 * exact.log_partition(SPINS, params)
        return fit + prior["theta"].log_prob(theta)

    weight = np.asarray(jax.nn.softmax(jax.jit(jax.vmap(log_joint))(grid)), float)
    mean = weight @ grid
    draws = mcmc.get_samples(group_by_chain=True)["theta"]
    for i in range(2):
        assert_posterior(draws[..., i], mean[i], weight @ (grid[:, i] - mean[i]) ** 2)


# -- within Gibbs ----------------------------------------------------------------------------------


def joint_model(x, y):
    coupling = numpyro.sample("J", PRIOR["J"])
    offset = numpyro.sample("offset", dist.Normal())
    with numpyro.plate("rows", 5):
        numpyro.sample("x", EnergyDistribution(SPINS, lattice({"J": coupling}), blocks="all"), obs=x)
    numpyro.sample("y", dist.Normal(coupling + offset, 0.1), obs=y)


def rest(sites, x, y):
    return dist.Normal(sites["J"] + sites["offset"], 0.1).log_prob(y)


def data_of(sites, x, y):
    assert set(sites) == {"offset"}
    return {"a": x[:, :4], "b": x[:, 4:]}


@pytest.mark.slow
def test_a_block_of_gibbs_beside_nuts():
    block = Exchange(SPINS, PRIOR, lattice, data_of, log_weight=rest)
    mcmc = sampler(Gibbs([(block, ["J"]), (NUTS(joint_model), None)]), 80, 40, jax.vmap, 60)
    mcmc.run(jax.random.key(0), jnp.concatenate([X["a"], X["b"]], 1), 1.5)
    draws = mcmc.get_samples(group_by_chain=True)
    # the offset summed out: y is J plus noise of variance 1 + 0.1**2
    log_joint = lambda j: log_likelihood(j) - 0.5 * (1.5 - j) ** 2 / 1.01
    mean, variance = quadrature(log_joint, 0, 1.5)
    assert_posterior(draws["J"], mean, variance)
    # given J the offset is Gaussian around (y - J) / 1.01, with variance 0.01 / 1.01
    assert_posterior(draws["offset"], (1.5 - mean) / 1.01, variance / 1.01**2 + 0.01 / 1.01)


# -- NumPyro's contract ----------------------------------------------------------------------------


PAIR = pair(Spin(2), Spin(2))
FEW = {"a": X["a"][:, :2], "b": X["b"][:, :2]}


def frustrated(sites, *_):
    weight = jnp.ones((2, 2)).at[0, 0].set(sites["J"])  # attractive from 0 on
    return {"a": jnp.zeros(2), "b": jnp.zeros(2), "a:b": weight}


@pytest.mark.slow
def test_chain_methods_give_the_same_draws():
    methods = {
        "sequential": "sequential",
        "vectorized": "vectorized",
        "parallel": "parallel",
        "vmap": jax.vmap,
    }
    runs = {}
    with pytest.warns(UserWarning, match="approximate"):  # compiles fastest
        made = Exchange(PAIR, {"J": dist.Uniform(0, 1)}, frustrated, observed, auxiliary=1)
    for name, method in methods.items():
        mcmc = sampler(made, 8, 2, method)
        mcmc.run(jax.random.PRNGKey(3) if name == "vmap" else jax.random.key(3), FEW)
        runs[name] = np.asarray(mcmc.get_samples(group_by_chain=True)["J"])
    first = runs.pop("sequential")
    assert len(np.unique(first[:, 0])) == 2
    for drawn in runs.values():
        np.testing.assert_allclose(drawn, first, rtol=1e-5)


def test_pickle_resume_and_initial_values():
    made = pickle.loads(pickle.dumps(kernel()))
    assert not hasattr(made, "model") and made.wrap_model(None) is made
    whole = sampler(made, 8, num_warmup=4)
    whole.run(jax.random.key(0), X, init_params={"J": jnp.float32(0.2)})
    half = sampler(made, 4, num_warmup=4)
    half.run(jax.random.key(0), X, init_params={"J": jnp.float32(0.2)}, extra_fields=("step_size", "i"))
    np.testing.assert_array_equal(half.get_samples()["J"], whole.get_samples()["J"][:4])
    assert half.get_extra_fields()["i"].tolist() == [5, 6, 7, 8]
    assert len(np.unique(half.get_extra_fields()["step_size"])) == 1  # fixed after the warm-up
    half.post_warmup_state = half.last_state
    half.run(half.post_warmup_state.rng_key, X)
    np.testing.assert_array_equal(half.get_samples()["J"], whole.get_samples()["J"][4:])


# -- auxiliary draws that cannot be made -----------------------------------------------------------


def test_a_failed_auxiliary_draw_is_never_silent():
    made = Exchange(
        PAIR,
        {"J": dist.Uniform(-1, 1)},
        frustrated,
        observed,
        auxiliary="coupling_from_the_past",
    )
    mcmc = sampler(made, 30)
    with pytest.warns(UserWarning, match=r"1 chain\(s\) are NaN from here on: an auxiliary draw could not"):
        mcmc.run(jax.random.key(0), FEW, init_params={"J": jnp.float32(0.1)})
        jax.effects_barrier()
    assert np.isnan(mcmc.get_samples()["J"][-1]) and int(mcmc.last_state.failures) == 1
    assert "1 FAILED auxiliary draws" in made.get_diagnostics_str(mcmc.last_state)
    for chains, method in ((1, "sequential"), (2, "vectorized")):
        with pytest.raises(IntractableError, match="not attractive"):
            bad = jnp.full((chains,) if chains > 1 else (), -0.5)
            sampler(made, 4, chains, method).run(jax.random.key(0), FEW, init_params={"J": bad})


def test_a_start_without_auxiliary_draws_is_refused():
    strong = Exchange(
        SPINS, {"J": dist.Uniform(0, 9)}, lattice, observed, auxiliary="coupling_from_the_past", max_sweeps=4
    )
    with pytest.raises(UnmetError, match="no auxiliary data at the initial.*not met after 4 sweeps"):
        sampler(strong, 4).run(jax.random.key(0), X, init_params={"J": jnp.float32(6.0)})


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"graph": 3}, TypeError, "Exchange: graph is a FactorGraph, not 3"),
        ({"prior": {}}, ParameterError, "prior is a dict"),
        ({"prior": {"J": 1.0}}, ParameterError, "prior of site 'J' is a NumPyro distribution"),
        ({"prior": {"J": dist.Poisson(1.0)}}, ParameterError, "prior of site 'J' is discrete"),
        ({"params": {}}, TypeError, "params is a function"),
        ({"max_sweeps": 0}, ValueError, "max_sweeps is an int of at least 1, not 0"),
        ({"auxiliary": 0}, ValueError, "auxiliary, .* is an int of at least 1, not 0"),
        ({"auxiliary": "heat"}, ValueError, "method is one of"),
        ({"graph": layered(a=Categorical(2, 3), b=Bernoulli(2)), "auxiliary": "coupling_from_the_past"},
         IntractableError, "block 'a'"),
    ],
)  # fmt: skip
def test_mistakes(options, error, message):
    given = {"graph": SPINS, "prior": PRIOR, "params": lattice, "data": observed} | options
    with warnings.catch_warnings(), pytest.raises(error, match=message):
        Exchange(**given)


@pytest.mark.parametrize(
    ("data", "init", "error", "message"),
    [
        ({"a": np.ones((5, 3))}, None, StateError, r"block 'a' got shape \(5, 3\)"),
        ({"b": np.ones((5, 4))}, None, StateError, "block 'a' is missing"),
        ({"a": np.zeros((5, 4))}, None, StateError, "got 0.0 at index"),
        (X, {"K": np.float32(0.1)}, ParameterError, "init_params has site 'K'"),
        (X, {"J": np.ones(2)}, ParameterError, r"got shape \(2,\), expected \(\)"),
        (X, {"J": np.float32(1.5)}, ParameterError, "not inside the support of its prior"),
    ],
)
def test_mistakes_of_a_run(data, init, error, message):
    with pytest.raises(error, match=message):
        sampler(kernel(), 2).run(jax.random.key(0), data, init_params=init)


def test_more_mistakes_of_a_run():
    deep = layered(a=Spin(2), b=Spin(2), c=Spin(2))
    wrong = Exchange(deep, PRIOR, lambda sites, x: {}, observed)
    with pytest.raises(ParameterError, match="lacks factor"):
        sampler(wrong, 2).run(jax.random.key(0), {"a": np.ones(2)})
    made = Exchange(deep, PRIOR, lambda sites, x: deep.init(jax.random.key(0)), observed)
    with pytest.raises(IntractableError, match="'b' and 'c' interact and data gives neither"):
        sampler(made, 2).run(jax.random.key(0), {"a": np.ones(2)})
