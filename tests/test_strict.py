# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Short runs of all samplers and estimators under jax's strict settings, for `make test-strict`."""

from pathlib import Path
from typing import Any

from mcmc_tools import make_mcmc, run_mcmc
import numpy as np
from own_families import Ternary
import pytest
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import (
    Bernoulli,
    Categorical,
    FactorGraph,
    Gaussian,
    Observed,
    Spin,
    contrib,
    exact,
    layered,
)
from ebmpp.kernels import LongRun

pytestmark = pytest.mark.nightly

KEY, RBM = zoo.KEY, zoo.graph("rbm")
GRAPHS = {
    **{name: zoo.graph(name) for name in ("rbm", "lattice", "poisson")},
    "deep": layered(v=Spin(3), h1=Categorical(2, 3), h2=Bernoulli(2)),
    "gaussian": layered(v=Gaussian(3, "learned"), h=Ternary(2)),
}
DATA = np.random.default_rng(0).integers(0, 2, (12, 4)).astype(float)


def params_of(graph: FactorGraph) -> dict[str, Any]:
    generator = np.random.default_rng(1)
    noisy = lambda a: a + jnp.asarray(0.2 * generator.uniform(-1, 1, a.shape), a.dtype)
    return jax.tree.map(noisy, graph.init(KEY))


def draws(kernel: Any, *args: Any, **clamped: Any) -> dict:
    return run_mcmc(
        kernel, *args, num_warmup=2, num_samples=3, num_chains=2, clamped=clamped
    ).get_samples()


def assert_finite(tree: Any) -> None:
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_draws_and_exact_sums(name: str) -> None:
    graph, params = GRAPHS[name], params_of(GRAPHS[name])
    graph.check(params)
    assert_finite(draws(ebmpp.BlockedGibbs(graph), params))
    assert_finite((exact.log_partition(graph, params), exact.moments(graph, params)))
    pairs = ebmpp.unbiased_expectation(
        graph, params, lambda x: x, rng_key=KEY, num_pairs=8, k=1, m=2, lag=1
    )
    assert_finite((pairs.value, pairs.standard_error))


KERNELS = {
    "tempering": lambda: ebmpp.ParallelTempering(RBM),
    "clusters": lambda: ebmpp.SwendsenWang(GRAPHS["lattice"]),
    "langevin": lambda: contrib.GibbsLangevin(GRAPHS["gaussian"], step_size=0.1),
    "coupled": lambda: ebmpp.MaximalCoupling(RBM, lag=2),
    "metropolis": lambda: contrib.MetropolisCoupling(RBM, lag=1),
}


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernels(name: str) -> None:
    kernel = KERNELS[name]()
    assert_finite(draws(kernel, params_of(kernel.graph)))


def test_long_runs(tmp_path: Path) -> None:
    mcmc = make_mcmc(ebmpp.BlockedGibbs(RBM), 12, 2, num_warmup=2, thinning=3)
    long = LongRun(mcmc, directory=tmp_path, keep=True, checkpoint_every=5)
    result = long.run(KEY, params_of(RBM), extra_fields=("i",))
    assert_finite((result.moments.mean, result.moments.variance))
    assert result.draws().posterior["v"].shape == (2, 4, 4)


def test_missing_entries_may_be_nan() -> None:
    params, v = params_of(RBM), np.where(DATA[:3] > 0, 1.0, np.nan)
    observed = Observed.where_finite(v)
    assert_finite(draws(ebmpp.BlockedGibbs(RBM), params, v=observed))
    assert_finite(ebmpp.local_search(RBM, params, rng_key=KEY, v=observed).state)
    result = ebmpp.complete(
        RBM, params, rng_key=KEY, v=observed, num_samples=4, num_warmup=2, num_chains=2
    )
    assert_finite(result.mean)


@pytest.mark.parametrize(
    "estimator",
    [
        ebmpp.UCD(num_pairs=8),
        ebmpp.CD(k=1),
        ebmpp.PCD(num_chains=8),
        ebmpp.TemperedPCD(num_chains=4),
        ebmpp.ParticleUCD(num_particles=10, max_rungs=8),
        ebmpp.ParticleUCD(num_particles=10, max_rungs=8, path="training"),
        ebmpp.WeightedPCD(num_chains=10, num_watchers=20),
    ],
    ids=lambda e: type(e).__name__,
)
def test_training(estimator: Any) -> None:
    fit = ebmpp.fit(
        RBM,
        DATA,
        estimator=estimator,
        optimizer=optax.sgd(0.1),  # optax.adam mixes dtypes
        num_steps=2,
        batch_size=6,
        rng_key=KEY,
        progress_bar=False,
    )
    assert_finite(fit.params)


@pytest.mark.parametrize("name", ["rbm", "lattice"])
def test_paths(name: str) -> None:
    graph, params = GRAPHS[name], params_of(GRAPHS[name])
    eta0 = {b: f.default_eta() for b, f in graph.families.items()}
    path = ebmpp.annealing.Path.through(graph, eta0, [params])
    other = jax.tree.map(lambda a: 2 * a, params)
    assert_finite(draws(ebmpp.ParallelTempering(graph, path=path), other))
    assert_finite(
        ebmpp.smc(graph, other, rng_key=KEY, num_particles=200, path=path).log_partition
    )
    if name == "rbm":
        fit = ebmpp.fit(
            RBM,
            DATA,
            num_steps=3,
            rng_key=KEY,
            estimator=ebmpp.CD(),
            optimizer=optax.sgd(0.1),
            keep_path=2,
            progress_bar=False,
        )
        assert fit.path is not None and fit.path.ends_at(fit.params)


def test_annealing() -> None:
    result = ebmpp.ais(
        RBM, params_of(RBM), rng_key=KEY, num_particles=30, num_temperatures=50
    )
    assert_finite((result.log_partition, result.standard_error))
    perfect = ebmpp.perfect_sample(RBM, params_of(RBM), 3, rng_key=KEY)
    assert_finite(perfect)
