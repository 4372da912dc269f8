# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""MaximalCoupling and MetropolisCoupling: meetings, the distribution of both chains, chain methods."""

import pickle

from mcmc_tools import METHODS, TWO_MODES, assert_same, fields, run_mcmc, samples, strong_params
from metropolis_tools import Chain, Law
import numpy as np
import pytest
from scipy import stats
import zoo

import jax

import ebmpp
from ebmpp import Bernoulli, Categorical, Gaussian, MaximalCoupling, Observed, Spin
from ebmpp.contrib import MetropolisCoupling
from ebmpp.coupling import mixture_pool
from ebmpp.errors import ArgumentError, StateError
from ebmpp.moves import mixture_sweep
from helpers import assert_rows_law, pair, random_params, slow

LAG, CHAINS, SAMPLES = 5, 4000, 40


@pytest.fixture(scope="module")
def model():
    return Law(zoo.graph("rbm"), TWO_MODES)


@pytest.fixture(scope="module")
def pairs(model):
    """Pairs that start in the distribution of the model."""
    index = np.random.default_rng(0).choice(len(model.states), CHAINS, p=model.target)
    init = {b: np.array([model.states[i][b] for i in index]) for b in ("v", "h")}
    return run_mcmc(
        MaximalCoupling(zoo.graph("rbm"), lag=LAG), TWO_MODES, key=3, init_params=init,
        num_chains=CHAINS, num_samples=SAMPLES, extra_fields=("y", "met", "meeting_time"),
    )  # fmt: skip


def test_pairs_meet_and_stay_together(pairs):
    z, extra = samples(pairs), fields(pairs)
    met, time = extra["met"], extra["meeting_time"][:, -1]
    equal = np.all([(z[b] == extra["y"][b]).all(-1) for b in z], axis=0)
    assert (equal == met).all()
    assert (np.diff(met.astype(int), axis=1) >= 0).all()
    assert met[:, 0].mean() < 0.8 and met[:, -1].mean() > 0.9
    sweeps = LAG + 1 + np.arange(SAMPLES)  # of the leading chain, at each draw
    seen = met[:, -1] & ~met[:, 0]
    np.testing.assert_array_equal(time[seen], sweeps[met.argmax(1)][seen])
    assert (time[~met[:, -1]] == sweeps[-1]).all()
    state, energy = pairs.last_state, zoo.graph("rbm").energy
    for i, x in enumerate((state.z, state.y)):
        np.testing.assert_allclose(state.energies[:, i], energy(TWO_MODES, x), atol=1e-4)


@pytest.mark.parametrize("sweep", [0, 1, 3])
def test_both_chains_keep_the_distribution_of_the_model_while_they_differ(pairs, model, sweep):
    for chain in (samples(pairs), fields(pairs)["y"]):
        drawn = {b: chain[b][:, sweep] for b in ("v", "h")}
        model.assert_law(drawn, model.target, 6 * len(model.states))


# NumPyro donates its collection of scalars and cannot always use it under vmap
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("method", ["sequential", slow("parallel")])
def test_chain_methods_give_the_same_draws(method):
    kernel = MaximalCoupling(zoo.graph("rbm"), coupling="common")  # compiles fastest
    options = {"num_chains": 2, "extra_fields": ("y", "met", "meeting_time")}
    runs = (run_mcmc(kernel, strong_params(), chain_method=m, **options) for m in ("vectorized", method))
    assert_same(*({**samples(mcmc), **fields(mcmc)} for mcmc in runs))


def test_kernel_describes_itself_and_refuses_wrong_options():
    kernel = MaximalCoupling(zoo.graph("rbm"), lag=3, coupling=("maximal", "common"))
    assert repr(pickle.loads(pickle.dumps(kernel))) == repr(kernel)
    state = kernel.init(zoo.KEY, 0, None, (strong_params(),), {})
    assert kernel.get_diagnostics_str(state).startswith("0 of 1 pairs met")
    with pytest.raises(ValueError, match="lag.*0"):
        MaximalCoupling(zoo.graph("rbm"), lag=0)
    with pytest.raises(ValueError, match="coupling.*'best'"):
        MaximalCoupling(zoo.graph("rbm"), coupling="best")


def test_a_mixture_needs_its_pool():
    graph, params = zoo.graph("rbm"), strong_params()
    kernel = MaximalCoupling(graph, coupling="mixture")
    for pool in ({}, {"pool": zoo.rows("rbm")}):
        with pytest.raises(ArgumentError, match="pool"):
            kernel.init(zoo.KEY, 0, None, (params,), pool)
    with pytest.raises(ArgumentError, match="Mixture"):
        mixture_pool(graph, params, zoo.rows("rbm"), rng_key=zoo.KEY, coupling="common")
    kernel = ebmpp.BlockedGibbs(graph, moves=mixture_sweep(graph))
    state = kernel.init(zoo.KEY, 0, None, (params,), {})
    with pytest.raises(StateError, match="pool"):
        kernel.sample(state, (params,), {})


@pytest.mark.slow
def test_meeting_times_of_kernel_and_engine_have_one_distribution():
    params = strong_params()
    mcmc = run_mcmc(MaximalCoupling(zoo.graph("rbm")), params, num_chains=300, num_samples=60)
    estimate = ebmpp.unbiased_expectation(
        zoo.graph("rbm"), params, lambda x: x["v"], rng_key=jax.random.key(1), num_pairs=300, k=1, m=1, lag=1
    )
    assert mcmc.last_state.met.all()
    assert stats.ks_2samp(mcmc.last_state.meeting_time, estimate.meeting_time).pvalue > 1e-4


@pytest.mark.slow
def test_real_units_meet_bit_by_bit():
    params = zoo.params("learned") | {"v:h": np.ones((2, 2), np.float32)}
    state = run_mcmc(MaximalCoupling(zoo.graph("learned")), params, num_chains=100, num_samples=60).last_state
    assert state.met.all()
    np.testing.assert_array_equal(state.z["v"], state.y["v"])
    assert len(np.unique(state.meeting_time)) > 1


@pytest.mark.slow
def test_mixture_proposals_keep_the_distribution_and_pairs_meet():
    graph, params = zoo.graph("rbm"), strong_params()
    pool = mixture_pool(graph, params, zoo.rows("rbm"), rng_key=zoo.KEY)
    kernel = MaximalCoupling(graph, coupling="mixture")
    state = run_mcmc(kernel, params, num_chains=4000, num_samples=20, clamped={"pool": pool}).last_state
    model = Law(graph, params)
    model.assert_law({b: np.asarray(z) for b, z in state.z.items()}, model.target, len(model.states))
    assert state.met.mean() > 0.99
    assert 0.2 < state.accepted.mean() / 41 < 1  # 21 sweeps of one chain, 20 of the other


@pytest.mark.slow
def test_chain_methods_agree_with_mixture_proposals():
    graph, params = zoo.graph("rbm"), strong_params()
    pool = mixture_pool(graph, params, zoo.rows("rbm"), rng_key=zoo.KEY)
    kernel, options = MaximalCoupling(graph, coupling="mixture"), {"num_chains": 3, "clamped": {"pool": pool}}
    runs = [run_mcmc(kernel, params, chain_method=m, **options) for m in ("vectorized", "sequential")]
    assert_same(*map(samples, runs))
    assert_same(*(mcmc.last_state.meeting_time for mcmc in runs))


GRAPH = pair(Bernoulli(2), Categorical(1, 3))
PARAMS = random_params(GRAPH, seed=3, scale=1.5)
METROPOLIS_CHAINS = 20_000
START = {"a": np.ones(2), "b": np.full(1, 2)}


def run_metropolis(num_samples, num_chains=METROPOLIS_CHAINS, clamped=None, method="vectorized", **options):
    free = START.keys() - (clamped or {}).keys()
    init = {b: np.broadcast_to(START[b], (num_chains, *START[b].shape)) for b in free}
    return run_mcmc(
        MetropolisCoupling(GRAPH, **options), PARAMS, num_samples=num_samples, num_chains=num_chains, key=3,
        clamped=clamped, init_params=init if num_chains == METROPOLIS_CHAINS else None, chain_method=method,
        extra_fields=("y", "met", "accepted"),
    )  # fmt: skip


def assert_chain(mcmc, chain, start):
    """Both chains of a pair with lag 1 have the distributions of ``chain`` after each sweep."""
    z, y = samples(mcmc), fields(mcmc)["y"]
    for i in range(2):
        for drawn, sweeps in ((z, 2 + i), (y, 1 + i)):
            chain.assert_law({b: v[:, i] for b, v in drawn.items()}, chain.law(start, sweeps), 8 * len(start))


@pytest.mark.slow
def test_a_clamped_block_is_conditioned_on():
    v = np.array([1.0, 0.0])
    chain = Chain(GRAPH, PARAMS, among=lambda x: (x["a"] == v).all())
    assert_chain(run_metropolis(2, clamped={"a": v}), chain, chain.at(b=[2]))


@pytest.mark.slow
@pytest.mark.parametrize("block", ["a", "b"])
def test_a_summed_out_block_is_drawn_from_its_conditional(block):
    chain = Chain(GRAPH, PARAMS, summed=(block,))
    np.testing.assert_allclose(chain.target @ chain.step, chain.target)
    assert_chain(run_metropolis(2, marginalize=block), chain, chain.at(**START))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("method", [m for m in METHODS if m != "vectorized"])
def test_metropolis_chain_methods_agree_and_rows_meet_one_by_one(method):
    v = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    first, second = (run_metropolis(40, 2, {"a": v}, m) for m in ("vectorized", method))
    assert_same(samples(second), samples(first))
    assert_same(fields(second), fields(first))
    assert first.last_state.met.shape == (2, 4) and first.last_state.met.all()
    draws = samples(first)["b"]
    assert (draws[:, :, 0] != draws[:, :, 3]).any()  # rows clamped to one value have their own keys


@pytest.mark.slow
def test_proposals_from_the_initial_distribution_reach_any_family():
    graph = pair(Gaussian(2), Spin(2))
    kernel = MetropolisCoupling(graph, proposal="initial")
    # under these params the model is the distribution of the proposals, so nothing is rejected
    params = {"a": np.zeros(2), "b": np.zeros(2), "a:b": np.zeros((2, 2))}
    keys = jax.random.split(zoo.KEY, 500)
    state = jax.jit(lambda keys: kernel.init(keys, 0, None, (params,), {}))(keys)
    assert (state.accepted == 1).all() and not state.met.any()
    both = np.stack([state.z["a"], state.y["a"]])
    assert_rows_law(both[0] * both[1], np.zeros(2))
    assert_rows_law(both.swapaxes(0, 1) ** 2, np.ones((2, 2)))


@pytest.mark.slow
def test_pairs_given_observed_units_meet_and_have_the_exact_distribution():
    graph, params = zoo.graph("rbm"), strong_params()
    known = np.array([[True, False, True, False], [False] * 4, [True] * 4])
    observed = Observed(np.where(known, [1.0, 0.0, 0.0, 1.0], np.nan), known)
    options = {"num_samples": 30, "num_chains": 3000, "extra_fields": ("y", "met")}
    mcmc = run_mcmc(MaximalCoupling(graph, lag=2), params, clamped={"v": observed}, **options)
    met = fields(mcmc)["met"]
    assert met[:, -1].all() and not met[:, 0, :2].all()
    for chain in (mcmc.last_state.z, mcmc.last_state.y):
        assert ((chain["v"] == observed.values) | ~known).all()
        for row in range(3):
            values, mask = np.array([1.0, 0.0, 0.0, 1.0]), known[row]
            model = Law(graph, params, lambda x, v=values, m=mask: (x["v"] == v)[m].all())
            drawn = {b: np.asarray(chain[b])[:, row] for b in ("v", "h")}
            model.assert_law(drawn, model.target, 2 * 3 * 128)


@pytest.mark.slow
def test_metropolis_pairs_keep_observed_units_row_by_row():
    values = np.array([[1.0, 0.0], [0.0, np.nan], [np.nan, 1.0]])
    known = ~np.isnan(values)
    mcmc = run_metropolis(40, 3, {"a": Observed(values, known)})
    draws = samples(mcmc)["a"]
    assert (draws[..., known] == values[known]).all()
    assert set(draws[..., ~known].ravel()) == {0.0, 1.0}
    assert mcmc.last_state.met.all()
