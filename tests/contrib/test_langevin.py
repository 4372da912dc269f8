# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Gibbs-Langevin sweeps, single and coupled, against an exact mixture of Gaussians, and refusals.

Tests contrib/gibbs_langevin.py, contrib/langevin.py.
"""

from functools import cache
import pickle
from typing import Any

from mcmc_tools import METHODS, fields, run_mcmc, samples
import numpy as np
from oracle import Oracle
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import PCD, UCD, Observed, core
from ebmpp.contrib import GibbsLangevin, langevin_sweep
from ebmpp.errors import DeclarationError, IntractableError
from ebmpp.moves.move import coupled_sweep, rows_equal
from ebmpp.moves.target import Target
from helpers import assert_law, assert_rows_law, nightly

PARAMS = {
    "v": np.array([[0.3, -2.0], [0.1, -0.1]], np.float32),  # variances 1/4 and 5
    "h": np.array([-0.3, 0.2], np.float32),
    "v:h": np.array([[1.5, -1.0], [-0.4, 0.3]], np.float32),
}
VARIANCE = np.array([0.25, 5.0])


@cache
def oracle() -> Oracle:
    return Oracle(zoo.graph("learned"), PARAMS, {})


def mixture() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every h, its probability, and the mean of v given it."""
    exact = oracle()
    return exact.x["h"], np.exp(exact.log_weights - exact.log_z), exact.mean


def moments(v: Any, h: Any) -> np.ndarray:
    """First and second moments of v, and of v with h; ``(rows, 10)``."""
    v, h = np.asarray(v, float), np.asarray(h, float)
    second = (v[:, :, None] * v[:, None]).reshape(len(v), -1)
    return np.concatenate(
        [v, second, (v[:, :, None] * h[:, None]).reshape(len(v), -1)], 1
    )


def exact_moments() -> np.ndarray:
    h, p, mean = mixture()
    conditional = moments(mean, h)
    conditional[:, 2:6] += np.diag(VARIANCE).reshape(-1)
    return p @ conditional


def stationary(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Independent draws of the model."""
    return oracle().draw(np.random.default_rng(seed), rows)


ROWS = 4000


@pytest.mark.nightly
@pytest.mark.parametrize("marginalize", [(), nightly(("h",))])
def test_both_chains_of_a_pair_keep_the_distribution_and_pairs_meet(marginalize):
    graph, x, y = zoo.graph("learned"), stationary(ROWS, 5), stationary(ROWS, 6)
    sweep = langevin_sweep(graph, step_size=1.0, num_steps=3, marginalize=marginalize)

    @jax.jit
    def step(z, t):
        pairs = core.random.fold_in(core.random.key_pair(zoo.KEY), t, np.arange(ROWS))
        return coupled_sweep(Target(graph, PARAMS), z, sweep, pairs)

    z, met = {b: np.stack([x[b], y[b]]) for b in x}, np.zeros(ROWS, bool)
    for t in range(5):
        z, _, broken, accepted = step(z, np.uint32(t))
        together = np.asarray(rows_equal(z["v"]) & rows_equal(z["h"]))
        assert not broken.any() and together[met].all()
        met = together
    assert 0.3 < met.mean() < 1
    assert 0.3 < accepted.mean() / 6 < 1  # three proposals of each chain
    for i in range(2):
        assert_rows_law(moments(z["v"][i], z["h"][i]), exact_moments(), comparisons=20)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("learned", {"step_size": 0.0}, ValueError, "step_size.*0.0"),
        ("learned", {"step_size": float("nan")}, ValueError, "step_size.*nan"),
        ("learned", {"step_size": 2.0, "adjust": False}, ValueError, "unadjusted"),
        ("learned", {"num_steps": 0}, ValueError, "num_steps.*0"),
        ("learned", {"marginalize": "w"}, ValueError, "marginalize.*'w'"),
        ("learned", {"marginalize": "v"}, DeclarationError, "v"),
        ("rbm", {}, DeclarationError, "real-valued"),
    ],
)
def test_wrong_options_are_refused(name, options, error, message):
    with pytest.raises(error, match=message):
        GibbsLangevin(zoo.graph(name), **options)


@pytest.mark.nightly
def test_wrong_uses_are_refused():
    observed = {"h": Observed(np.zeros(2), np.array([True, False]))}
    kernel = GibbsLangevin(zoo.graph("learned"), marginalize="h")
    state = kernel.init(zoo.KEY, 0, None, (PARAMS,), observed)
    with pytest.raises(IntractableError, match="observed.*'h'"):
        kernel.sample(state, (PARAMS,), observed)
    unadjusted = UCD(coupling=langevin_sweep(zoo.graph("learned"), adjust=False))
    with pytest.raises(ValueError, match="adjust"):
        unadjusted.init_state(
            zoo.graph("learned"),
            PARAMS,
            {"v": jnp.zeros((2, 2))},
            2,
            np.zeros(2, np.uint32),
        )


CHAINS = 8000


def run(
    step_size,
    num_samples=1,
    num_chains=CHAINS,
    num_steps=3,
    adjust=True,
    marginalize=(),
    **options,
):
    kernel = GibbsLangevin(
        zoo.graph("learned"),
        step_size,
        num_steps,
        adjust=adjust,
        marginalize=marginalize,
    )
    return run_mcmc(
        kernel, PARAMS, key=4, num_samples=num_samples, num_chains=num_chains, **options
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("step_size", "marginalize"), [(0.5, ()), (1.9, "h")])
def test_adjusted_steps_keep_the_distribution_for_any_step_size(step_size, marginalize):
    start = stationary(CHAINS, 1)
    mcmc = run(
        step_size,
        4,
        marginalize=marginalize,
        init_params=start,
        extra_fields=("acceptance",),
    )
    last = {b: x[:, -1] for b, x in samples(mcmc).items()}
    assert_rows_law(moments(**last), exact_moments())
    assert (last["v"] != start["v"]).mean() > 0.5
    accepted = mcmc.last_state.acceptance.mean()
    assert 0.05 < accepted < 1 if step_size > 1.5 else 0.6 < accepted < 1


@pytest.mark.nightly
@pytest.mark.parametrize("step_size", [0.6, 1.2])
def test_unadjusted_steps_have_the_documented_distribution(step_size):
    """Given h: the right mean, and a variance too large by 1 / (1 - step_size**2 / 4)."""
    mcmc = run(
        step_size, num_steps=25, adjust=False, clamped={"h": np.array([1.0, 0.0])}
    )
    assert mcmc.sampler.get_diagnostics_str(mcmc.last_state) == "1 sweeps, unadjusted"
    states, _, centre = mixture()
    mean = centre[(states == [1, 0]).all(1)][0]
    v = np.asarray(mcmc.last_state.z["v"], float)
    exact = np.concatenate([mean, VARIANCE / (1 - step_size**2 / 4)])
    assert_rows_law(np.concatenate([v, (v - mean) ** 2], 1), exact)


@pytest.mark.nightly
def test_observed_units_stay_and_the_others_have_their_distribution():
    """Their distribution is reached from starts far away."""
    observed = Observed(np.array([0.7, np.nan]), np.array([True, False]))
    last = run(0.9, num_warmup=40, clamped={"v": observed}).last_state.z
    np.testing.assert_array_equal(last["v"][:, 0], np.float32(0.7))
    _, p, mean = mixture()
    weight = p * np.exp(-0.5 * (0.7 - mean[:, 0]) ** 2 / VARIANCE[0])
    weight /= weight.sum()
    free = np.asarray(last["v"][:, 1], float)
    exact = [weight @ mean[:, 1], weight @ (mean[:, 1] ** 2 + VARIANCE[1])]
    assert_rows_law(np.stack([free, free**2], 1), exact)


@pytest.mark.nightly
@pytest.mark.parametrize("method", [m for m in METHODS if m != "vectorized"])
@pytest.mark.parametrize("marginalize", [(), ("h",)])
def test_chain_methods_give_the_same_draws(method, marginalize):
    options = {"num_chains": 2, "num_steps": 2, "marginalize": marginalize}
    first, second = (
        samples(run(0.9, 4, chain_method=m, **options)) for m in ("vectorized", method)
    )
    np.testing.assert_array_equal(first["h"], second["h"])
    np.testing.assert_allclose(first["v"], second["v"], rtol=0, atol=2e-5)
    assert (first["v"][0] != first["v"][1]).any()


@pytest.mark.nightly
def test_acceptance_is_the_mean_over_all_proposals():
    start = {"v": np.zeros((3, 2)), "h": np.zeros((3, 2))}
    mcmc = run(1.6, 20, 3, num_steps=1, extra_fields=("acceptance",), init_params=start)
    moved = (
        np.diff(np.concatenate([np.zeros((3, 1, 2)), samples(mcmc)["v"]], 1), axis=1)
        != 0
    )
    share = np.cumsum(moved.any(-1), 1) / np.arange(1, 21)
    np.testing.assert_allclose(fields(mcmc)["acceptance"], share, atol=1e-6)
    kernel = mcmc.sampler
    assert kernel.get_diagnostics_str(mcmc.last_state).startswith(
        "20 sweeps, acceptance 0."
    )
    assert repr(pickle.loads(pickle.dumps(kernel))) == repr(kernel)


@pytest.mark.nightly
@pytest.mark.parametrize("marginalize", [(), ("h",)])
def test_coupled_expectations_are_unbiased(marginalize):
    # fmt: skip
    estimate = ebmpp.unbiased_expectation(
        zoo.graph("learned"),
        PARAMS,
        lambda x: jnp.concatenate(
            [x["v"], *(jnp.outer(x["v"], x[b]).ravel() for b in ("v", "h"))]
        ),
        rng_key=jax.random.key(2),
        num_pairs=6000,
        k=2,
        lag=2,
        coupling=langevin_sweep(
            zoo.graph("learned"), step_size=1.3, num_steps=2, marginalize=marginalize
        ),
    )
    assert_law(estimate.value, exact_moments(), estimate.standard_error)
    assert 0.3 < estimate.acceptance < 1 and estimate.meeting_time.max() > 4


@pytest.mark.nightly
def test_persistent_chains_move_by_langevin_steps():
    estimator = PCD(
        num_chains=CHAINS,
        moves=langevin_sweep(zoo.graph("learned"), step_size=1.5, num_steps=2),
    )
    batch = ebmpp.estimators.Batch.uniform({"v": jnp.zeros((2, 2))})
    pair = jnp.array([3, 4], jnp.uint32)
    step = jax.jit(
        lambda x: estimator.estimate(zoo.graph("learned"), PARAMS, x, batch, pair)
    )
    result = step(stationary(CHAINS, 8))
    assert_rows_law(moments(**result.state), exact_moments())
    assert 0.1 < result.metrics["acceptance"] < 0.9
