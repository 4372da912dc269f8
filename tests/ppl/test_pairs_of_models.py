# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Composites derived from a model: kinds of sites, unbiased estimates, starts, refusals.

Tests ppl/pilot.py, traced/sweep/kinds.py.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.coupling.expectation import PairRun
from ebmpp.coupling.slots import Outcome, Window
from ebmpp.errors import IntractableError, StateError, UnmetError
from ebmpp.ppl import CoupledComposite, CoupledHMC, composite_expectation
from ebmpp.traced.block import Call
from ebmpp.traced.sweep.kinds import kinds_of_sites
from helpers import assert_law

SHORT = {"num_warmup": 100, "num_samples": 100}
Y = jnp.array([1.4, 0.2, 2.3])


def two_kinds(y: jax.Array) -> None:
    """A finite, a Gaussian and a positive site."""
    z = numpyro.sample("z", dist.Bernoulli(0.3))
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.deterministic("variance", scale**2)
    numpyro.sample("y", dist.Normal(mean + 2 * z, scale), obs=y)


def by_quadrature() -> dict[str, float]:
    """Exact means of the sites."""
    mean = np.linspace(-5, 5, 401)[:, None, None]
    scale = np.linspace(1e-3, 6, 600)[None, :, None]
    z = np.arange(2.0)
    log_prob = -(mean**2) / 2 - scale**2 / 2 + np.log(np.where(z, 0.3, 0.7))
    for y in np.asarray(Y):
        log_prob = log_prob - (y - mean - 2 * z) ** 2 / (2 * scale**2) - np.log(scale)
    weight = np.exp(log_prob - log_prob.max())
    weight /= weight.sum()
    sites = {"z": z, "mean": mean, "scale": scale}
    return {name: float((weight * v).sum()) for name, v in sites.items()}


@pytest.fixture(scope="module")
def kernel() -> CoupledComposite:
    return CoupledComposite.from_model(two_kinds, Y, **SHORT)


def test_the_composite_says_what_it_does_with_each_site(
    kernel: CoupledComposite,
) -> None:
    block, hmc = kernel.steps
    assert block.sites == ("z", "mean") and hmc.sites == ("scale",)
    lines = repr(kernel).splitlines()
    assert "Gaussian 'mean'" in lines[1] and "CoupledHMC(['scale'])" in lines[2]


@pytest.mark.nightly
def test_estimates_are_those_of_quadrature(kernel: CoupledComposite) -> None:
    options = {"rng_key": jax.random.key(1), "num_pairs": 2000}
    result = composite_expectation(kernel, lambda sites: sites, **options)
    assert result.num_unmet == 0 and result.m == 5 * result.k == 5 * result.lag
    for site, exact in by_quadrature().items():
        assert_law(
            result.value[site], exact, result.standard_error[site], comparisons=3
        )


@pytest.mark.nightly
def test_runs_have_draws_meeting_times_and_deterministic_sites(
    kernel: CoupledComposite,
) -> None:
    options = {"num_warmup": 0, "num_samples": 40, "num_chains": 10}
    pairs = MCMC(kernel, chain_method="vectorized", progress_bar=False, **options)
    pairs.run(jax.random.key(2))
    tree = ebmpp.to_datatree(pairs)
    posterior = tree["posterior"]
    assert np.allclose(posterior["variance"], posterior["scale"] ** 2)
    assert tree["meeting"]["met"].all()
    state = kernel.init(jax.random.split(jax.random.key(3), 500), 0, {}, (), {})
    assert not (state.y["mean"] == state.z["mean"]).any()  # independent starts
    spread = np.log(state.y["scale"]).std() / np.log(posterior["scale"]).std()
    assert 1.2 < spread < 4  # wider than the posterior


def every_kind(size: int) -> None:
    numpyro.sample("count", dist.DiscreteUniform(0, 3))
    numpyro.sample("real", dist.Normal(0.0, 1.0))
    numpyro.sample("heavy", dist.StudentT(3.0, 0.0, 1.0))
    numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("scale", dist.HalfCauchy(1.0))
    numpyro.sample("rows", dist.Dirichlet(jnp.ones(size)))
    prior = dist.TransformedDistribution(
        dist.Normal(0.0, 1.0).expand([2]).to_event(1),
        dist.transforms.OrderedTransform(),
    )
    numpyro.sample("ordered", prior)


def test_sites_are_drawn_from_conditionals_where_these_are_known() -> None:
    kinds = kinds_of_sites(every_kind, Call({}, (3,), {}), {"real": "hmc"})
    moved = {name for name, kind in kinds.items() if kind == "hmc"}
    assert moved == {"real", "heavy", "scale", "ordered"}


def two_modes() -> None:
    x = numpyro.sample("x", dist.Normal(0.0, 20.0))
    numpyro.factor("modes", jnp.logaddexp(-50 * (x - 9) ** 2, -50 * (x + 9) ** 2))


@pytest.mark.nightly
def test_pairs_in_different_modes_are_unmet_and_named() -> None:
    kernel = CoupledComposite.from_model(two_modes, rng_key=jax.random.key(5), **SHORT)
    assert isinstance(kernel.steps[0], CoupledHMC)
    options = {"rng_key": jax.random.key(1), "num_pairs": 40, "max_sweeps": 500}
    with pytest.raises(UnmetError, match=r"\['x'\]"):
        composite_expectation(kernel, lambda sites: sites["x"], **options)


def unbounded() -> None:
    count = numpyro.sample("count", dist.Poisson(2.0))
    numpyro.sample("y", dist.Normal(count, 1.0), obs=1.0)


def subsampled(y: jax.Array) -> None:
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y), subsample_size=2) as index:
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y[index])


def test_models_without_such_chains_are_refused() -> None:
    with pytest.raises(IntractableError, match="'count'"):
        CoupledComposite.from_model(unbounded)
    with pytest.raises(StateError, match="subsample_size"):
        CoupledComposite.from_model(subsampled, Y)


def gaussian(mean: jax.Array, covariance: jax.Array) -> None:
    numpyro.sample("x", dist.MultivariateNormal(mean, covariance))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gibbs", "hmc"])
def test_moments_of_a_gaussian(kind: str) -> None:
    rng = np.random.default_rng(0)
    factor = rng.normal(size=(5, 5))
    covariance = factor @ factor.T + np.eye(5)
    args = jnp.arange(5.0), jnp.asarray(covariance, jnp.float32)
    kernel = CoupledComposite.from_model(gaussian, *args, kinds={"x": kind}, **SHORT)

    def moments(sites: dict) -> dict:
        x = sites["x"] - jnp.arange(5.0)
        return {"mean": x, "covariance": jnp.outer(x, x)}

    options = {"rng_key": jax.random.key(1), "k": 15, "m": 30, "lag": 15}
    result = composite_expectation(kernel, moments, num_pairs=1000, **options)
    error = result.standard_error
    assert_law(result.value["mean"], 0, error["mean"], comparisons=30)
    assert_law(
        result.value["covariance"], covariance, error["covariance"], comparisons=30
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["two kinds", "correlated"])
def test_a_pair_depends_on_its_number_alone(
    kernel: CoupledComposite, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, site = (Y,), "scale"
    if name == "correlated":
        covariance = np.fromfunction(lambda i, j: 0.7 ** abs(i - j), (5, 5))
        args, site = (jnp.zeros(5), jnp.asarray(covariance, jnp.float32)), "x"
        step = CoupledHMC(gaussian, ["x"], step_size=0.4, inverse_mass_matrix=args[1])
        kernel = CoupledComposite([step], independent_starts=True)
    totals = []
    outcome = PairRun.outcome

    def recorded(run: PairRun, window: Window) -> Outcome:
        result = outcome(run, window)
        totals.append(np.asarray(result.total))
        return result

    monkeypatch.setattr(PairRun, "outcome", recorded)

    def last_bits(sites: dict) -> jax.Array:
        # integers, whose sum is exact
        return jax.lax.bitcast_convert_type(sites[site], jnp.int32) & 255

    options = {"rng_key": jax.random.key(1), "k": 5, "m": 30, "lag": 5}
    result = composite_expectation(kernel, last_bits, *args, num_pairs=37, **options)
    # 3 pairs run in fewer slots, too
    first = composite_expectation(kernel, last_bits, *args, num_pairs=3, **options)
    assert len(np.unique(result.meeting_time)) > 3
    assert (first.meeting_time == result.meeting_time[:3]).all()
    assert (totals[1] == totals[0][:3]).all()
