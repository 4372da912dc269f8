# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Gibbs-Langevin, alone and coupled, against a machine whose law is a mixture of Gaussians."""

import itertools
import pickle
from typing import Any

from gibbs_tools import METHODS
import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, Gaussian, MaximalCoupling, Observed, layered
from ebmpp.errors import DeclarationError, IntractableError
from ebmpp.kernels import GibbsLangevin
from ebmpp.moves.langevin import Langevin
from ebmpp.moves.layer import Layer
from ebmpp.moves.move import coupled_sweep, draw_sweep, equal
from ebmpp.moves.target import Target
from helpers import assert_law, assert_rows_law, slow

GRAPH = layered(v=Gaussian(3, variance="learned"), h=Bernoulli(2))
PARAMS = {
    "v": jnp.array([[0.3, -2.0], [-0.5, -0.5], [0.1, -0.1]]),  # variances 1/4, 1 and 5
    "h": jnp.array([-0.3, 0.2]),
    "v:h": jnp.array([[1.5, -1.0], [0.5, 0.8], [-0.4, 0.3]]),
}
CHAINS = 8000


def mixture(params: Any = PARAMS) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every h, its probability, the means of v given it, and v's variances: float64."""
    v, h, w = (np.asarray(params[name], float) for name in ("v", "h", "v:h"))
    states = np.array(list(itertools.product([0.0, 1.0], repeat=len(h))))
    variance, slope = -0.5 / v[:, 1], v[:, 0] + states @ w.T
    log_weight = states @ h + (0.5 * slope**2 * variance).sum(1)
    return states, np.exp(log_weight - np.logaddexp.reduce(log_weight)), slope * variance, variance


def moments(v: Any, h: Any) -> np.ndarray:
    """What identifies the law: first and second moments of v, and of v with h; ``(rows, 18)``."""
    v, h = np.asarray(v, float), np.asarray(h, float)
    second = (v[:, :, None] * v[:, None]).reshape(len(v), -1)
    return np.concatenate([v, second, (v[:, :, None] * h[:, None]).reshape(len(v), -1)], 1)


def exact_moments(inflated: float = 1.0) -> np.ndarray:
    states, p, centre, variance = mixture()
    each = moments(centre, states)
    each[:, 3:12] += inflated * np.diag(variance).reshape(-1)
    return p @ each


def run(
    kernel: Any, chains: int, samples: int, warmup: int = 0, method: Any = "vectorized", **given: Any
) -> MCMC:
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=samples,
        num_chains=chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(4), given.pop("params", PARAMS), **given)
    return mcmc


def stationary(rows: int, seed: int) -> dict[str, jax.Array]:
    """Independent draws of the model."""
    states, p, centre, variance = mixture()
    rng = np.random.default_rng(seed)
    index = rng.choice(len(p), size=rows, p=p)
    v = centre[index] + np.sqrt(variance) * rng.normal(size=(rows, 3))
    return {"v": jnp.asarray(v, jnp.float32), "h": jnp.asarray(states[index], jnp.float32)}


# -- the law -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step_size", "marginalize"), [slow(0.5, ()), (1.9, "h")], ids=str)
def test_adjusted_steps_keep_the_law_whatever_their_size(step_size: float, marginalize: Any) -> None:
    kernel = GibbsLangevin(GRAPH, step_size, num_steps=3, marginalize=marginalize)
    mcmc = run(kernel, CHAINS, 4, init_params=stationary(CHAINS, 1), extra_fields=("acceptance",))
    last = {b: x[:, -1] for b, x in mcmc.get_samples(group_by_chain=True).items()}
    assert_rows_law(moments(**last), exact_moments())
    moved = last["v"] != stationary(CHAINS, 1)["v"]
    assert moved.mean() > 0.5
    accepted = mcmc.last_state.acceptance.mean()
    assert 0.05 < accepted < 1 if step_size > 1.5 else 0.6 < accepted < 1


def test_from_anywhere_adjusted_steps_reach_the_law() -> None:
    last = run(GibbsLangevin(GRAPH, 0.8, num_steps=5), CHAINS, 1, warmup=60).last_state.z
    assert_rows_law(moments(**last), exact_moments())


def test_the_temperature_is_one_whatever_the_batch() -> None:
    """One chain of a thousand rows, each with its own draw: the spread of one row's law."""
    rows = 1000
    h = jnp.zeros((rows, 2))
    kernel = GibbsLangevin(GRAPH, 1.2, num_steps=25, adjust=False)
    many = run(kernel, 1, 1, h=h).get_samples()["v"][0]
    alone = run(kernel, 1, 1, h=h[:1]).get_samples()["v"][0]
    np.testing.assert_allclose(many[:1], alone, atol=1e-5)  # so a row is what it is without the others
    _, _, centre, variance = mixture()
    assert_rows_law((many - centre[0]) ** 2, variance / (1 - 1.2**2 / 4))


@pytest.mark.parametrize("step_size", [0.6, 1.2])
def test_unadjusted_steps_have_the_law_that_is_told(step_size: float) -> None:
    """Given h: the right mean, and a variance too large by 1 / (1 - step_size**2 / 4)."""
    h = jnp.array([1.0, 0.0])
    kernel = GibbsLangevin(GRAPH, step_size, num_steps=25, adjust=False)
    v = np.asarray(run(kernel, CHAINS, 1, h=h).get_samples()["v"], float)
    _, _, centre, variance = mixture()
    wanted = np.concatenate([centre[2], variance / (1 - step_size**2 / 4)])
    assert_rows_law(np.concatenate([v, (v - centre[2]) ** 2], 1), wanted)


def test_observed_units_stay_and_the_others_have_their_law() -> None:
    states, p, centre, variance = mixture()
    known, value = jnp.array([True, False, False]), jnp.array([0.7, jnp.nan, jnp.nan])
    kernel = GibbsLangevin(GRAPH, 0.9, num_steps=3)
    last = run(kernel, CHAINS, 1, warmup=40, v=Observed(value, known)).last_state.z
    np.testing.assert_array_equal(last["v"][:, 0], np.float32(0.7))
    weight = p * np.exp(-0.5 * (0.7 - centre[:, 0]) ** 2 / variance[0])
    weight /= weight.sum()
    wanted = np.concatenate([weight @ centre[:, 1:], weight @ (centre[:, 1:] ** 2 + variance[1:])])
    free = np.asarray(last["v"][:, 1:], float)
    assert_rows_law(np.concatenate([free, free**2], 1), wanted)


# -- NumPyro's contract --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("marginalize", [(), ("h",)], ids=["given", "marginal"])
def test_chain_methods_give_the_same_draws(marginalize: tuple[str, ...]) -> None:
    kernel = GibbsLangevin(GRAPH, 0.9, num_steps=2, marginalize=marginalize)
    methods = METHODS.values() if not marginalize else ("sequential", "vectorized")
    runs = [run(kernel, 2, 4, 0, method).get_samples(group_by_chain=True) for method in methods]
    for other in runs[1:]:
        np.testing.assert_array_equal(other["h"], runs[0]["h"])
        np.testing.assert_allclose(other["v"], runs[0]["v"], rtol=0, atol=2e-5)
    assert not np.array_equal(runs[0]["v"][0], runs[0]["v"][1])


@pytest.mark.slow
def test_acceptance_is_the_mean_over_all_proposals_so_far() -> None:
    kernel = GibbsLangevin(GRAPH, 1.6, num_steps=1)
    start = {"v": jnp.zeros((3, 3)), "h": jnp.zeros((3, 2))}
    mcmc = run(kernel, 3, 20, extra_fields=("acceptance",), init_params=start)
    v = np.asarray(mcmc.get_samples(group_by_chain=True)["v"])
    moved = np.diff(np.concatenate([np.zeros((3, 1, 3)), v], 1), axis=1) != 0
    share = np.cumsum(moved.any(-1), 1) / np.arange(1, 21)
    told = mcmc.get_extra_fields(group_by_chain=True)["acceptance"]
    np.testing.assert_allclose(told, share, atol=1e-6)
    assert kernel.get_diagnostics_str(mcmc.last_state).startswith("20 sweeps, acceptance 0.")


def test_it_prints_pickles_and_says_when_it_is_biased() -> None:
    kernel = GibbsLangevin(GRAPH, 0.3, adjust=False)
    assert "step_size=0.3, num_steps=10, adjust=False" in repr(kernel)
    assert repr(pickle.loads(pickle.dumps(kernel))) == repr(kernel)
    state = run(kernel, 1, 2).last_state
    assert kernel.get_diagnostics_str(state) == "2 sweeps, unadjusted"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step_size": 0.0}, ValueError, "step_size, in standard deviations .* is a number above 0, not 0.0"),
        ({"step_size": float("nan")}, ValueError, "step_size, .* is a number above 0"),
        ({"step_size": "auto"}, ValueError, "step_size, .* is a number above 0, not 'auto'"),
        ({"step_size": 2.0, "adjust": False}, ValueError, "from 2 on, unadjusted steps run away"),
        ({"num_steps": 0}, ValueError, "num_steps is an int of at least 1, not 0"),
        ({"marginalize": "w"}, ValueError, r"marginalize names \['w'\]"),
        ({"marginalize": "v"}, DeclarationError, "there is none among"),
    ],
)
def test_wrong_arguments(options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        GibbsLangevin(GRAPH, **options)


def test_graphs_and_blocks_without_a_langevin_step() -> None:
    with pytest.raises(DeclarationError, match="BlockedGibbs draws the others"):
        GibbsLangevin(layered(v=Bernoulli(2), h=Bernoulli(2)))
    with pytest.raises(DeclarationError, match="block 'h' .* is not real-valued"):
        Langevin(("h",)).check(GRAPH)
    with pytest.raises(IntractableError, match="interact"):
        GibbsLangevin(layered(v=Gaussian(2), h1=Bernoulli(2), h2=Bernoulli(2)), marginalize=("h1", "h2"))
    kernel = GibbsLangevin(GRAPH, marginalize="h")
    with pytest.raises(IntractableError, match="block 'h' has observed units"):
        run(kernel, 1, 1, h=Observed(jnp.zeros(2), jnp.array([True, False])))


# -- coupled -------------------------------------------------------------------------------------


def both(moves: Any, z: dict, sweeps: int) -> dict:
    """Pairs after some sweeps."""
    rows = z["v"].shape[1]
    for t in range(sweeps):
        pairs = ebmpp.core.random.fold_in(ebmpp.core.random.key_pair(jax.random.key(9)), t, jnp.arange(rows))
        z, _, broken, _ = SWEEP(Target(GRAPH, PARAMS), z, moves, pairs)
        assert not broken.any()
    return z


SWEEP = jax.jit(coupled_sweep, static_argnums=2)
FIXED = ebmpp.moves.langevin_sweep(GRAPH, step_size=1.0, num_steps=3)
MARGINAL = ebmpp.moves.langevin_sweep(GRAPH, step_size=1.0, num_steps=3, marginalize="h")


@pytest.mark.parametrize("moves", [FIXED, slow(MARGINAL)], ids=["given", "marginal"])
def test_each_chain_of_a_pair_keeps_the_law_and_pairs_meet_and_stay(moves: Any) -> None:
    x, y = stationary(CHAINS, 5), stationary(CHAINS, 6)
    z = both(moves, {b: jnp.stack([x[b], y[b]]) for b in x}, 3)
    for i in range(2):
        assert_rows_law(moments(z["v"][i], z["h"][i]), exact_moments())
    met = np.asarray(equal(z["v"]) & equal(z["h"]))
    assert 0.3 < met.mean() < 1
    later = both(moves, z, 2)
    assert equal(later["v"])[met].all() and equal(later["h"])[met].all()
    assert (later["v"][0] != z["v"][0]).any(-1).mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("moves", [FIXED, MARGINAL], ids=["given", "marginal"])
def test_the_leading_chain_is_the_chain_alone(moves: Any) -> None:
    x, y = stationary(500, 5), stationary(500, 6)
    pairs = ebmpp.core.random.fold_in(ebmpp.core.random.key_pair(jax.random.key(9)), 0, jnp.arange(500))
    z, _, _, taken = SWEEP(Target(GRAPH, PARAMS), {b: jnp.stack([x[b], y[b]]) for b in x}, moves[:1], pairs)
    alone, took = draw_sweep(Target(GRAPH, PARAMS), x, moves[:1], pairs)
    np.testing.assert_allclose(z["v"][0], alone["v"], rtol=0, atol=1e-5)
    assert (taken >= took).all() and (taken <= 2 * moves[0].num_steps).all()


@pytest.mark.slow
def test_a_coupled_kernel_meets_and_tells_acceptance() -> None:
    kernel = MaximalCoupling(GRAPH, coupling=ebmpp.moves.langevin_sweep(GRAPH, num_steps=4))
    state = run(kernel, 50, 60).last_state
    assert state.met.all()
    np.testing.assert_array_equal(state.z["v"], state.y["v"])
    assert (np.asarray(state.accepted) > 60 * 4).all()


@pytest.mark.slow
@pytest.mark.parametrize("marginalize", [(), ("h",)], ids=["given", "marginal"])
def test_coupled_expectations_are_unbiased(marginalize: tuple[str, ...]) -> None:
    moves = ebmpp.moves.langevin_sweep(GRAPH, step_size=1.3, num_steps=2, marginalize=marginalize)
    est = ebmpp.unbiased_expectation(
        GRAPH,
        PARAMS,
        lambda x: jnp.concatenate(
            [x["v"], jnp.outer(x["v"], x["v"]).ravel(), jnp.outer(x["v"], x["h"]).ravel()]
        ),
        rng_key=jax.random.key(2),
        num_pairs=6000,
        k=2,
        lag=2,
        coupling=moves,
    )
    assert_law(est.value, exact_moments(), est.standard_error)
    assert 0.3 < est.acceptance < 1 and est.meeting_time.max() > 4


def test_what_is_unbiased_refuses_unadjusted_moves() -> None:
    moves = ebmpp.moves.langevin_sweep(GRAPH, adjust=False)
    with pytest.raises(ValueError, match="adjust=False.*does not leave the model's law.*give adjust=True"):
        UCD(coupling=moves).init(GRAPH, PARAMS, {"v": jnp.zeros((2, 3))}, 2, jnp.zeros(2, jnp.uint32))


def test_persistent_chains_move_by_langevin_steps() -> None:
    estimator = PCD(num_chains=CHAINS, moves=ebmpp.moves.langevin_sweep(GRAPH, step_size=1.5, num_steps=2))
    batch = ebmpp.estimators.Batch.of({"v": jnp.zeros((2, 3))})
    pair = jnp.array([3, 4], jnp.uint32)
    made = jax.jit(lambda x: estimator.estimate(GRAPH, PARAMS, x, batch, pair))(stationary(CHAINS, 8))
    assert_rows_law(moments(**made.state), exact_moments())
    assert 0.1 < made.metrics["acceptance"] < 0.9
    assert isinstance(estimator.moves[1], Layer) and hash(estimator)
