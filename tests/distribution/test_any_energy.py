# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Graphs with a network as a factor in NumPyro models, with the network's weights as sites."""

from network_graphs import NAMES, enumerated
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import EnergyDistribution
from ebmpp.errors import IntractableError
from helpers import assert_rows_law, often

KEY = jax.random.key(2)


@pytest.mark.parametrize("name", often(NAMES, "visible"))
def test_log_prob_is_that_of_the_summed_states(name: str) -> None:
    case = enumerated(name)
    blocks = "all" if name == "latents inside" else None
    prior = EnergyDistribution(
        case.graph, case.params, blocks=blocks, log_partition=case.log_z
    )
    if blocks == "all":
        value = prior.layout.join({b: v[:40] for b, v in case.states.items()})
        expected = np.log(case.probs[:40])
    else:
        value = prior.layout.join(case.rows)
        rows = [{b: v[i] for b, v in case.rows.items()} for i in range(4)]
        expected = [case.log_likelihood(row) for row in rows]
    np.testing.assert_allclose(prior.log_prob(value), expected, atol=1e-4)


def weights_model(rows: np.ndarray, is_normalized: bool) -> None:
    """The last layer's weights are sites, the others are fixed."""
    case = enumerated("visible")
    u = numpyro.sample("u", dist.Normal(0, 1).expand([5]).to_event(1))
    params = case.params | {"net": case.params["net"] | {"u": u}}
    log_z = None
    if is_normalized:
        log_z = lambda p: ebmpp.exact.log_partition(case.graph, p)
    prior = EnergyDistribution(case.graph, params, log_partition=log_z)
    with numpyro.plate("rows", len(rows)):
        numpyro.sample("v", prior, obs=rows)


def test_weights_are_sites_where_log_z_is_exact() -> None:
    case = enumerated("visible")
    rows = np.repeat(case.rows["v"], 3, 0)
    u = case.params["net"]["u"]

    def joint(u: jax.Array) -> jax.Array:
        return log_density(weights_model, (rows, True), {}, {"u": u})[0]

    value, gradient = jax.value_and_grad(joint)(u)
    data = sum(case.log_likelihood({"v": row}) for row in rows)
    expected = data + float(dist.Normal(0, 1).log_prob(u).sum())
    assert value == pytest.approx(expected, abs=1e-3)
    exact = -12 * case.loss_gradient()["net"]["u"] - np.asarray(u)
    np.testing.assert_allclose(gradient, exact, atol=1e-3)


def test_weights_are_no_sites_without_log_z() -> None:
    rows = enumerated("visible").rows["v"]
    with pytest.raises(IntractableError, match=r"'v' depend on the latent sites \['u'"):
        ebmpp.ppl.check_tractable(weights_model, rows, False)
    with pytest.raises(IntractableError, match="differentiated in its params"):
        MCMC(NUTS(weights_model), num_warmup=2, num_samples=2, progress_bar=False).run(
            KEY, rows, False
        )


@pytest.mark.nightly
def test_nuts_samples_the_weights() -> None:
    """The score of the posterior has mean 0 under it."""
    rows = np.repeat(enumerated("visible").rows["v"], 3, 0)
    mcmc = MCMC(
        NUTS(weights_model),
        num_warmup=100,
        num_samples=100,
        num_chains=30,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(KEY, rows, True)
    u = mcmc.get_samples(group_by_chain=True)["u"]
    score = jax.vmap(
        jax.vmap(
            jax.grad(
                lambda u: log_density(weights_model, (rows, True), {}, {"u": u})[0]
            )
        )
    )(u)
    assert_rows_law(score.mean(1), 0.0)
    # and so has u_i d/du_i + 1
    assert_rows_law((score * u + 1).mean(1), 0.0)


def observed_model(y: jax.Array) -> None:
    case = enumerated("categories")
    x = numpyro.sample("x", EnergyDistribution(case.graph, case.params))
    numpyro.sample("y", dist.Normal(x.astype(float), 1.0).to_event(1), obs=y)


@pytest.mark.nightly
def test_a_network_is_a_prior_of_categories() -> None:
    case = enumerated("categories")
    y = jnp.array([0.3, 1.9, -0.2, 1.2])
    block = ebmpp.GibbsBlock.from_model(observed_model, ["x"], y, sequential=True)
    mcmc = MCMC(
        block,
        num_warmup=30,
        num_samples=1,
        num_chains=2000,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(KEY, y)
    x = np.asarray(mcmc.get_samples()["x"])
    values = case.states["v"]
    log_like = -0.5 * ((values - np.asarray(y)) ** 2).sum(1)
    weights = case.probs * np.exp(log_like)
    indicators = lambda v: (v[..., None] == np.arange(3)).reshape(len(v), -1)
    exact = (weights / weights.sum()) @ indicators(values)
    assert_rows_law(indicators(x), exact)
