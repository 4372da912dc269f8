# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of models with infinite numbers in branches that are not taken, and degenerate
conditionals."""

from typing import Any

from model_cases import Y5, Case, X, advance, compare
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.errors import StateError
from helpers import assert_law, often


def latent(y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(logits=a))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def branches(y: Any) -> None:
    """Not taken: infinite multiples, logarithms of 0, a matrix with infinite columns,
    quotients by 0."""
    s = numpyro.sample("s", dist.Normal(0, 1))
    r = jnp.array([0.0, -1.0, 2.0, 0.5, 0.0])
    z = numpyro.sample(
        "z", dist.Categorical(jnp.array([0.5, 0.3, 0.2])).expand([5]).to_event(1)
    )
    numpyro.factor("multiple", jnp.where(s < 10, 0.3 * z, jnp.inf * z).sum())
    numpyro.factor(
        "logarithm", jnp.where(r > 0, z * jnp.log(jnp.maximum(r, 0)), 0.0).sum()
    )
    numpyro.factor("quotient", jnp.where(r == 0, 0.2 * z, z / r).sum())
    matrix = jnp.ones((2, 5)).at[0].set(jnp.array([jnp.inf, 1.0, -jnp.inf, jnp.nan, s]))
    numpyro.factor("matrix", jnp.where(jnp.array([False, True]), matrix @ z, 0.0).sum())
    numpyro.factor(
        "never", jnp.where((z[1:] == 2) & (z[:-1] == 2), -jnp.inf, 0.0).sum()
    )
    numpyro.sample("y", dist.Normal(z, 2.0).to_event(1), obs=y)


def tied(y: Any, x: Any) -> None:
    """All units interact, so they are drawn sequentially."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    z = numpyro.sample("z", dist.Bernoulli(logits=b * x[0]).to_event(1))
    numpyro.factor("some", jnp.where(b < 10, 0.3 * z, jnp.inf * z).sum())
    numpyro.sample("y", dist.Normal(x @ z, 1.0).to_event(1), obs=y)


CASES = {
    "latent": Case(latent, ("z",), (Y5,), 1),
    "tempered": Case(latent, ("z",), (Y5,), 1, {"tempering": [0.5, 1.0]}),
    "branches": Case(branches, ("z",), (Y5,), 2),
    "many": Case(tied, ("z",), (Y5, X), 12, {"sequential": True}),
}


@pytest.mark.parametrize("name", often(CASES, "branches"))
def test_branches_not_taken_do_not_count(name: str) -> None:
    case = compare(CASES[name], z=np.zeros(12 if name == "many" else 5, np.int32))
    case.check()
    result = advance(case.block, *case.around())
    assert not result.degenerate.any()
    if name == "tempered":
        return
    first = case.block.layers["z"] == 0
    exact = np.exp(case.exact["z"][0])[first]
    table = np.ravel(case.block.posterior.values["z"].table)
    shares = (result.z["z"][:, first][..., None] == table).mean(0)
    assert_law(shares, exact, np.sqrt(exact * (1 - exact) / 4000))


def test_missing_data_under_a_mask_do_not_count() -> None:
    def model(y: Any) -> None:
        m = numpyro.sample("m", dist.Normal(0, 1))
        with numpyro.plate("n", len(y)), handlers.mask(mask=~jnp.isnan(y)):
            numpyro.sample("y", dist.Normal(m, 1.0), obs=y)

    y = np.array([1.0, np.nan, 2.0], np.float32)
    block = GibbsBlock.from_model(model, ["m"], y)
    ask = jax.jit(
        lambda m: (lambda law: (law.loc, law.scale))(block.conditional("m", {"m": m}))
    )
    np.testing.assert_allclose(ask(0.4), (1.0, 3**-0.5), rtol=1e-5)


@pytest.mark.nightly
def test_nan_is_an_equal_argument() -> None:
    def model(y: Any, missing: float) -> None:
        m = numpyro.sample("m", dist.Normal(0, 1).expand([3]).to_event(1))
        # which reads the values, so that they may not change
        with handlers.mask(mask=~np.isnan(y)):
            numpyro.sample("y", dist.Normal(m, 1.0), obs=y)

    y, values = np.array([1.0, np.nan, 2.0], np.float32), {"m": np.zeros(3)}
    block = GibbsBlock.from_model(model, ["m"], y, float("nan"))
    assert block.conditional("m", values, y.copy(), float("nan")).loc[0] == 0.5
    with pytest.raises(StateError, match="another value"):
        block.conditional("m", values, y + 1, float("nan"))


# -- degenerate conditionals
# -----------------------------------------------------------------------


def rooted(y: Any) -> None:
    z = numpyro.sample(
        "z", dist.Categorical(jnp.ones(3) / 3).expand([2, len(y)]).to_event(2)
    )
    loc = z[0] + jnp.where(z[1] == 2, jnp.sqrt(y), 0.0)
    numpyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=jnp.abs(y))


def observed(y: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(m, 1.0).to_event(1), obs=y)


def together(y: Any) -> None:
    z = numpyro.sample("z", dist.Bernoulli(0.4).expand([6]).to_event(1))
    numpyro.factor(
        "f", jnp.where(z.sum() > 0, -((z.sum() - jnp.sqrt(y)) ** 2).sum(), 0.0)
    )


def logarithm(y: Any) -> None:
    m = numpyro.sample("m", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.factor("f", (m * jnp.log(y)).sum())


REFUSED = {
    "rooted": (rooted, {}, r"unit \(1, 1\) of site 'z' is nan where it is 2"),
    "logarithm": (logarithm, {}, r"unit \(1,\) of site 'm' is nan"),
    "observed": (observed, {}, r"args\[0\] of the model holds nan"),
    "together": (
        together,
        {"sequential": True},
        r"unit \(0,\) of site 'z' is nan where it is 1",
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", often(REFUSED, "rooted", "observed"))
def test_start_with_degenerate_conditionals_is_refused(name: str) -> None:
    model, options, message = REFUSED[name]
    good = np.array([1.0, 2.0, 3.0], np.float32)
    bad = np.array([1.0, np.nan if name == "observed" else -2.0, 3.0], np.float32)
    site = "z" if name in ("rooted", "together") else "m"
    block = GibbsBlock.from_model(model, [site], good, **options)
    start = {"z": jnp.zeros(6, int)} if name == "together" else {}
    begin = lambda y: block.init(jax.random.key(0), 0, start, (y,), {})
    assert int(begin(good).degenerate) == 0
    with pytest.raises(StateError, match=message):
        begin(bad)
    begin(good)
