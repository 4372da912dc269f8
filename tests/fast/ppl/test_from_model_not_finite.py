# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of models with infinite numbers in branches that are not taken, and with units that have no law."""

from collections.abc import Callable
from typing import Any

from model_cases import Y5, Case, X, brute_force, latents
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.core import random
from ebmpp.errors import StateError
from ebmpp.ppl.sites import Call
from helpers import assert_law


def latent(y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(logits=a))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def vector(y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 1).expand([len(y)]).to_event(1))
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(logits=a))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def argument(y: Any, x: Any) -> None:
    z = numpyro.sample("z", dist.Bernoulli(logits=x).to_event(1))
    numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)


def slope(y: Any, x: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("n", len(y), dim=-2):
        z = numpyro.sample("z", dist.Bernoulli(logits=a * x[:, None]))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y[:, None])


def own_groups(y: Any) -> None:
    with numpyro.plate("g", 2):
        h = numpyro.sample("h", dist.Bernoulli(0.5))
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(logits=2.0 * h[jnp.array([0, 0, 1, 1, 1])] - 1))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def branches(y: Any) -> None:
    """Not taken: infinite multiples, logarithms of 0, a matrix with infinite columns, quotients by 0."""
    s = numpyro.sample("s", dist.Normal(0, 1))
    r = jnp.array([0.0, -1.0, 2.0, 0.5, 0.0])
    z = numpyro.sample("z", dist.Categorical(jnp.array([0.5, 0.3, 0.2])).expand([5]).to_event(1))
    numpyro.factor("multiple", jnp.where(s < 10, 0.3 * z, jnp.inf * z).sum())
    numpyro.factor("logarithm", jnp.where(r > 0, z * jnp.log(jnp.maximum(r, 0)), 0.0).sum())
    numpyro.factor("quotient", jnp.where(r == 0, 0.2 * z, z / r).sum())
    matrix = jnp.ones((2, 5)).at[0].set(jnp.array([jnp.inf, 1.0, -jnp.inf, jnp.nan, s]))
    numpyro.factor("matrix", jnp.where(jnp.array([False, True]), matrix @ z, 0.0).sum())
    numpyro.factor("never", jnp.where((z[1:] == 2) & (z[:-1] == 2), -jnp.inf, 0.0).sum())
    numpyro.sample("y", dist.Normal(z, 2.0).to_event(1), obs=y)


def tied(y: Any, x: Any) -> None:
    """All units interact, so that they are drawn one by one, each a layer where they are few."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    z = numpyro.sample("z", dist.Bernoulli(logits=b * x[0]).to_event(1))
    numpyro.factor("some", jnp.where(b < 10, 0.3 * z, jnp.inf * z).sum())
    numpyro.sample("y", dist.Normal(x @ z, 1.0).to_event(1), obs=y)


CASES = [
    (Case(latent, ("z",), (Y5,), 1), {}),
    (Case(latent, ("z",), (Y5,), 1), {"tempering": [0.5, 1.0]}),
    (Case(vector, ("z",), (Y5,), 1), {}),
    (Case(argument, ("z",), (Y5, np.linspace(-1, 2, 5)), 1), {}),
    (Case(slope, ("z",), (Y5, np.linspace(-1, 2, 5)), 1), {}),
    (Case(own_groups, ("h", "z"), (Y5,), 2), {}),
    (Case(branches, ("z",), (Y5,), 2), {}),
    (Case(tied, ("z",), (Y5, X[:, :5]), 5), {}),
    (Case(tied, ("z",), (Y5, X), 12), {"unit_by_unit": True}),
]


@pytest.mark.parametrize(("case", "options"), CASES, ids=[f"{c.model.__name__} {o}" for c, o in CASES])
def test_what_is_not_taken_does_not_count(case: Case, options: dict[str, Any]) -> None:
    """Conditionals against the density, and that draws go where these say: some are elsewhere each time."""
    block = GibbsBlock.from_model(case.model, list(case.sites), *case.args, **options)
    assert block.conditionals.num_layers == case.layers
    values = latents(case.model, case.args, 1)
    values["z"] = jnp.zeros_like(values["z"])
    exact, found = brute_force(case, block, values), block.log_conditionals(values, *case.args)
    for site in case.sites:
        np.testing.assert_allclose(np.exp(found[site]), np.exp(exact[site]), atol=1e-5, err_msg=site)
    own = {site: values[site] for site in case.sites}
    call = Call({n: v for n, v in values.items() if n not in own}, case.args, {})
    step = jax.jit(jax.vmap(lambda key: block.advance(own, call, random.key_pair(key))))
    made = step(jax.random.split(jax.random.key(0), 4000))
    assert not made.kept.any()
    site, first = next((s, at == 0) for s, at in block.layers.items() if (at == 0).any())
    if "tempering" not in options:  # units of the first layer are drawn given the state as it is
        law = np.exp(exact[site])[first]
        table = block.posterior.values[site].table.ravel()
        hits = (np.asarray(made.z[site])[:, first][..., None] == table).mean(0)
        assert_law(hits, law, np.sqrt(law * (1 - law) / 4000))


def test_the_posterior_with_inferred_logits() -> None:
    """Beside NUTS, against quadrature: 100 chains, whose means are independent."""
    y = jnp.array([0.3, -1.0, 2.0])

    def model(y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("n", 3):
            z = numpyro.sample("z", dist.Bernoulli(logits=a))
            numpyro.sample("y", dist.Normal(3.0 * z, 1.0), obs=y)

    block = GibbsBlock.from_model(model, ["z"], y)
    block.verify(model, y)
    chains = {"num_chains": 100, "chain_method": jax.vmap, "progress_bar": False}
    mcmc = MCMC(Gibbs([(block, ["z"]), (NUTS(model), None)]), num_warmup=100, num_samples=50, **chains)
    mcmc.run(jax.random.key(0), y)
    draws = mcmc.get_samples(group_by_chain=True)
    means = np.concatenate([np.asarray(draws["z"]).mean(1), np.asarray(draws["a"]).mean(1)[:, None]], 1)
    a = np.linspace(-6, 6, 2001)
    up = np.exp(-0.5 * (np.asarray(y)[:, None] - 3) ** 2) / (1 + np.exp(-a))
    down = np.exp(-0.5 * np.asarray(y)[:, None] ** 2) / (1 + np.exp(a))
    weight = np.exp(-a * a / 2) * (up + down).prod(0)
    weight /= weight.sum()
    exact = np.append((weight * up / (up + down)).sum(1), (weight * a).sum())
    assert_law(means.mean(0), exact, means.std(0) / 10)


def masked(y: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("n", len(y)), handlers.mask(mask=~jnp.isnan(y)):
        numpyro.sample("y", dist.Normal(m, 1.0), obs=y)


def infinite_rows(y: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0, 1).expand([2]).to_event(1))
    rows = jnp.array([[1.0, 1.0], [jnp.inf, jnp.nan]]) * (1 + 0 * y[:2, None])
    numpyro.factor("f", jnp.where(jnp.array([True, False]), rows @ m, 0.0).sum())


def test_continuous_sites_too() -> None:
    """Data that are missing under a mask, and what a matrix makes of rows that are not used."""
    law = lambda model, y, m: GibbsBlock.from_model(model, ["m"], y).conditional("m", {"m": m})
    found = law(masked, jnp.array([1.0, jnp.nan, 2.0]), jnp.array(0.4))
    np.testing.assert_allclose((found.loc, found.scale), (1.0, 3**-0.5), rtol=1e-5)
    found = law(infinite_rows, Y5, jnp.ones(2))
    np.testing.assert_allclose((found.loc, found.scale), np.ones((2, 2)), rtol=1e-5)


# -- units that have no law ------------------------------------------------------------------------


def rooted(y: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0, 1))
    z = numpyro.sample("z", dist.Categorical(jnp.ones(3) / 3).expand([2, len(y)]).to_event(2))
    loc = m * z[0] + jnp.where(z[1] == 2, jnp.sqrt(y), 0.0)
    numpyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=jnp.abs(y))


def observed(y: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(m, 1.0).to_event(1), obs=y)


def together(y: Any) -> None:
    z = numpyro.sample("z", dist.Bernoulli(0.4).expand([6]).to_event(1))
    numpyro.factor("f", jnp.where(z.sum() > 0, -((z.sum() - jnp.sqrt(y)) ** 2).sum(), 0.0))


def logarithm(y: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.factor("f", (m * jnp.log(y)).sum())


@pytest.mark.parametrize(
    ("model", "sites", "options", "told"),
    [
        (rooted, ["z", "m"], {}, r"unit \(1, 1\) of site 'z' is nan where it is 2"),
        (logarithm, ["m"], {}, r"unit \(1,\) of site 'm' is nan, expected"),
        (observed, ["m"], {}, r"argument args\[0\] of the model holds nan"),
        (together, ["z"], {"unit_by_unit": True}, r"unit \(0,\) of site 'z' is nan where it is 1"),
    ],
)
def test_a_run_does_not_begin_where_units_have_no_law(
    model: Callable, sites: list[str], options: dict[str, Any], told: str
) -> None:
    good, bad = jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, -2.0, 3.0])
    bad = bad.at[1].set(jnp.nan) if model is observed else bad
    block = GibbsBlock.from_model(model, sites, good, **options)
    start = {"z": jnp.zeros(6, int)} if model is together else {}
    begin = lambda y: block.init(jax.random.key(0), 0, start, (y,), {})
    assert int(begin(good).kept) == 0
    with pytest.raises(StateError, match=told):
        begin(bad)
    begin(good)


def test_impossible_values_are_no_fault() -> None:
    """A unit may begin where nothing is possible for it, until others have moved."""

    def model() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([3]).to_event(1))
        numpyro.factor("alike", jnp.where(z[1:] == z[:-1], 0.0, -jnp.inf).sum())

    block = GibbsBlock.from_model(model, ["z"])
    assert block.init(jax.random.key(0), 0, {"z": jnp.array([0, 1, 0])}, (), {}).i == 0
    assert block.init(jax.random.key(0), 0, {"z": jnp.array([0, 0, 1])}, (), {}).i == 0
