# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Discrete sites drawn with conjugate continuous sites integrated out.

Tests traced/sweep/collapsed.py.
"""

import itertools
import pickle
from typing import Any

from model_cases import Call, advance
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
import pytest
from scipy.special import betaln, gammaln, softmax
from scipy.stats import multivariate_normal

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.errors import IntractableError
from ebmpp.traced.sweep import sweep
from helpers import assert_rows_law, nightly

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 3)).astype(np.float32)
X[:, 1] += 2 * X[:, 0]
Y = (X @ [0.6, 0.4, 0.0] + RNG.normal(size=12)).astype(np.float32)
SLAB, NOISE = 0.8, 1.1
Z3 = np.array(list(itertools.product([0, 1], repeat=3)))

#: one observation per unit and family
MIXED = {
    "normal": np.array([0.4, -1.0, 2.1], np.float32),
    "count": np.array([3, 0, 1]),
    "spread": np.array([0.3, -0.8, 1.5], np.float32),
    "far": np.array([0.7, 0.2, -1.9], np.float32),
    "coin": np.array([1, 0, 1]),
    "die": np.array([2, 0, 2]),
}


def regression(x: Any, y: Any) -> None:
    z = numpyro.sample("z", dist.Bernoulli(0.4).expand([3]).to_event(1))
    beta = numpyro.sample("beta", dist.Normal(0, SLAB).expand([3]).to_event(1))
    shift = numpyro.sample("shift", dist.Normal(0.5, 2.0))
    mean = x @ (z * beta) + shift
    numpyro.sample("y", dist.Normal(mean, NOISE).to_event(1), obs=y)


def mixed(data: Any) -> None:
    """Every family, each of two values that one binary unit per column selects."""
    priors = {
        "normal": dist.Normal(0.3, 2.0),
        "count": dist.Gamma(0.7, 0.5),
        "spread": dist.Gamma(1.5, 2.0),
        "far": dist.InverseGamma(0.9, 0.8),
        "coin": dist.Beta(0.4, 2.0),
        "die": dist.Dirichlet(jnp.array([0.3, 1.0, 2.0])),
    }
    likelihoods = {
        "normal": lambda x: dist.Normal(x, 1.5),
        "count": dist.Poisson,
        "spread": lambda x: dist.Normal(0.4, x**-0.5),
        "far": lambda x: dist.Normal(0.4, jnp.sqrt(x)),
        "coin": dist.Bernoulli,
        "die": dist.Categorical,
    }
    z = numpyro.sample("z", dist.Bernoulli(0.4).expand([3]).to_event(1))
    for name, prior in priors.items():
        pair = numpyro.sample("x_" + name, prior.expand([2]).to_event(1))
        likelihood = likelihoods[name](pair[z])
        numpyro.sample(name, likelihood.to_event(1), obs=data[name])


def log_evidence(name: str, values: np.ndarray) -> float:
    """Return log p(observations of one value), the value integrated out."""
    n = len(values)
    total = values.sum()
    square = ((values - 0.4) ** 2).sum() / 2
    if name == "normal":
        covariance = 1.5**2 * np.eye(n) + 2.0**2
        return multivariate_normal(0.3 * np.ones(n), covariance).logpdf(values)
    if name == "count":
        fixed = 0.7 * np.log(0.5) - gammaln(0.7) - gammaln(values + 1).sum()
        return fixed + gammaln(0.7 + total) - (0.7 + total) * np.log(0.5 + n)
    if name in ("spread", "far"):
        a, b = (1.5, 2.0) if name == "spread" else (0.9, 0.8)
        fixed = a * np.log(b) - gammaln(a) - n / 2 * np.log(2 * np.pi)
        return fixed + gammaln(a + n / 2) - (a + n / 2) * np.log(b + square)
    if name == "coin":
        return betaln(0.4 + total, 2.0 + n - total) - betaln(0.4, 2.0)
    prior = np.array([0.3, 1.0, 2.0])
    counts = prior + np.bincount(values, minlength=3)
    ratio = gammaln(counts).sum() - gammaln(prior).sum()
    return ratio + gammaln(prior.sum()) - gammaln(counts.sum())


def exact_mixed() -> np.ndarray:
    """Return p(z | data) of all eight states."""
    log_prob = []
    for z in Z3:
        total = np.log([0.6, 0.4])[z].sum()
        for name, values in MIXED.items():
            for k in range(2):
                if (z == k).any():
                    total += log_evidence(name, values[z == k])
        log_prob.append(total)
    return softmax(log_prob)


def exact_regression() -> np.ndarray:
    log_prob = []
    for z in Z3:
        columns = X[:, z == 1]
        covariance = NOISE**2 * np.eye(12) + SLAB**2 * columns @ columns.T + 2.0**2
        normal = multivariate_normal(0.5 * np.ones(12), covariance)
        log_prob.append(np.log([0.6, 0.4])[z].sum() + normal.logpdf(Y))
    return softmax(log_prob)


def with_z(block: Any, z: np.ndarray) -> dict:
    """Return states of the block, in which continuous sites have any possible values."""
    values = {"z": jnp.asarray(z)}
    for name, value in block.info.latent.items():
        if name != "z":
            values[name] = jnp.broadcast_to(value, (len(z), *value.shape))
    return values


def assert_invariant(model: Any, args: tuple, exact: np.ndarray, **options: Any) -> Any:
    """Assert that one sweep from exact states of z keeps them, and forgets other sites."""
    block = GibbsBlock.from_model(model, *args, **options)
    states = np.random.default_rng(1).choice(8, size=20_000, p=exact)
    _, *arguments = args
    call = Call({}, tuple(arguments), {})
    after = advance(block, with_z(block, Z3[states]), call, 20_000, rows=True)
    assert not after.degenerate.any()
    numbers = after.z["z"] @ [4, 2, 1]
    assert_rows_law(numbers[:, None] == np.arange(8), exact)
    return after.z


@pytest.fixture
def is_sequential(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``sequential=True`` draw three units sequentially, as it draws nine or more."""
    monkeypatch.setattr(sweep, "_FEW_LAYERS", 2)


def test_a_draw_by_layers_is_from_the_regressions_evidence() -> None:
    sites = ["z", "beta", "shift"]
    assert_invariant(regression, (sites, X, Y), exact_regression())


def test_two_passes_draw_from_the_regressions_evidence(is_sequential: None) -> None:
    sites = ["z", "beta", "shift"]
    drawn = assert_invariant(
        regression, (sites, X, Y), exact_regression(), sequential=True
    )
    # the coefficients are drawn given all of z, jointly with the shift
    z, beta, shift = (drawn[name] for name in sites)
    rows = (z == [1, 1, 0]).all(1)
    design = np.concatenate([X[:, :2], np.ones((12, 1))], 1)
    precision = np.diag([SLAB**-2, SLAB**-2, 0.25]) + design.T @ design / NOISE**2
    covariance = np.linalg.inv(precision)
    mean = covariance @ (design.T @ Y / NOISE**2 + [0, 0, 0.125])
    values = np.concatenate([beta[rows, :2], shift[rows, None]], 1)
    products = (values - mean)[:, :, None] * (values - mean)[:, None]
    assert_rows_law(values, mean)
    assert_rows_law(products, covariance)


def test_the_units_density_is_the_evidence_of_every_family() -> None:
    sites = ["z", *(f"x_{name}" for name in MIXED)]
    assert_invariant(mixed, (sites, MIXED), exact_mixed(), collapse=True)


@pytest.mark.parametrize(
    ("model", "args"), [(regression, (X, Y)), nightly(mixed, (MIXED,))]
)
def test_the_change_of_both_is_that_of_the_joint_density(
    model: Any, args: tuple, is_sequential: None
) -> None:
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(*args)
    sites = [name for name, site in trace.items() if not site["is_observed"]]
    block = GibbsBlock.from_model(model, sites, *args, sequential=True, collapse=True)
    block.verify(model, *args)
    assert "collapsed: " in repr(pickle.loads(pickle.dumps(block)))


def test_chains_that_are_equal_stay_so_and_others_meet(is_sequential: None) -> None:
    sites = ["z", "beta", "shift"]
    block = GibbsBlock.from_model(regression, sites, X, Y, sequential=True)
    assert block.drawn.drawn.num_passes == 2
    call = Call({}, (X, Y), {})
    rows = np.random.default_rng(2).integers(8, size=(2, 2000))
    first, second = (with_z(block, Z3[numbers]) for numbers in rows)

    @jax.jit
    @jax.vmap
    def step(first: Any, second: Any, key: Any) -> Any:
        words = jax.random.key_data(key)
        return block.couple((first, call), (second, call), words)

    keys = jax.random.split(jax.random.key(3), 2000)
    for _ in range(12):
        first, second, broken = step(first, second, keys)
        keys = jax.vmap(jax.random.fold_in)(keys, jnp.arange(2000))
        assert not broken.any()
    same = np.all(
        [(first[name] == second[name]).reshape(2000, -1).all(1) for name in first], 0
    )
    assert same.mean() > 0.5
    for values in (first, second):
        numbers = values["z"] @ np.array([4, 2, 1])
        assert_rows_law(numbers[:, None] == np.arange(8), exact_regression())


def collapsed_sites(block: Any) -> str:
    return repr(block).partition("collapsed: ")[2]


def test_sites_are_collapsed_where_units_are_drawn_one_by_one() -> None:
    sites = ["z", "beta", "shift"]
    assert (
        collapsed_sites(GibbsBlock.from_model(regression, sites, X, Y))
        == "'beta', 'shift'"
    )
    make = lambda **options: GibbsBlock.from_model(regression, sites, X, Y, **options)
    assert (
        collapsed_sites(make(collapse=False))
        == collapsed_sites(make(tempering=[0.5, 1.0]))
        == ""
    )
    assert collapsed_sites(make(collapse="shift")) == "'shift'"
    # three independent units are one layer
    assert not collapsed_sites(GibbsBlock.from_model(mixed, ["z", "x_normal"], MIXED))


def test_a_scale_is_conditioned_on() -> None:
    def model(y: Any) -> None:
        k = numpyro.sample("k", dist.Categorical(jnp.ones(4) / 4))
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        precision = numpyro.sample("precision", dist.Gamma(1.0, 1.0))
        steps = mean * (jnp.arange(len(y)) < k)
        numpyro.sample("y", dist.Normal(steps, precision**-0.5).to_event(1), obs=y)

    y = jnp.array([1.0, 1.2, 0.1, -0.2])
    sites = ["k", "mean", "precision"]
    assert collapsed_sites(GibbsBlock.from_model(model, sites, y)) == "'mean'"
    assert collapsed_sites(
        GibbsBlock.from_model(model, sites, y, collapse=["precision"])
    )
    with pytest.raises(IntractableError, match="'precision'.*jointly conjugate"):
        GibbsBlock.from_model(model, sites, y, collapse=["mean", "precision"])
