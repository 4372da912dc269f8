# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Parallel tempering and coupled pairs of it: laws, meetings, estimates, NumPyro's contract."""

from functools import cache, partial
import pickle

import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Categorical, Gaussian, Observed, Spin, layered
from ebmpp.errors import StateError
from ebmpp.kernels import ParallelTempering, TemperingCoupling, tempered_expectation
from ebmpp.sampling.engine import run_pairs
from helpers import assert_law, assert_rows_law, random_params, slow

BETAS = (0.0, 0.5, 1.0)
GRAPHS = {
    "bernoulli": layered(v=Bernoulli(3), h=Bernoulli(2)),
    "spin": layered(v=Spin(3), h1=Spin(2), h2=Spin(2)),
    "categorical": layered(v=Categorical(2, 3), h=Categorical(2, 3)),
    "gaussian": layered(v=Gaussian(2, "learned"), h=Bernoulli(2)),
}
RBM = GRAPHS["bernoulli"]
PARAMS = {name: random_params(graph, seed=3, scale=2.0) for name, graph in GRAPHS.items()}
PARAMS["gaussian"]["v"] = jnp.array([[0.3, -0.4], [-0.2, -0.6]])

#: two modes, all up and all down, that Gibbs sweeps do not leave
MAGNET = layered(v=Spin(6), h=Spin(6))
COUPLED = {"v": jnp.full(6, 0.05), "h": jnp.zeros(6), "v:h": jnp.full((6, 6), 0.9)}
WEAKER = COUPLED | {"v:h": jnp.full((6, 6), 0.3)}
STATES = np.stack(np.meshgrid(*[[-1.0, 1.0]] * 6, indexing="ij"), -1).reshape(-1, 6)
LADDER = (0.0, 0.16, 0.25, 0.4, 1.0)


#: compiles in half the time, having no trials
LIGHT = TemperingCoupling(RBM, BETAS, lag=2, coupling="common")


@partial(jax.jit, static_argnums=(0, 3, 4))
def simulate(kernel, params, clamped, chains, sweeps):
    """The last state of many chains, and every ``met`` with whether the replicas are equal."""
    keys = jax.random.split(jax.random.key(11), chains)
    state = kernel.init(keys, sweeps // 2, None, (params,), clamped)

    def step(state, _):
        state = kernel.sample(state, (params,), clamped)
        if not hasattr(state, "met"):
            return state, ()
        same = [(state.replicas[b] == state.followers[b]).reshape(chains, -1).all(-1) for b in state.z]
        return state, (state.met, jnp.stack(same).all(0))

    return jax.lax.scan(step, state, length=sweeps)


@cache
def kernels():
    """One object each, so that a compiled run serves several tests."""
    return {name: TemperingCoupling(graph, BETAS, lag=2) for name, graph in GRAPHS.items()}


def run(kernel, params, num_samples=6, num_chains=2, method="vectorized", num_warmup=0, key=3, **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(key), params, **kwargs)
    return mcmc


# -- laws --------------------------------------------------------------------------------------------


@pytest.mark.slow  # each compiles for many seconds; that estimates from such pairs are unbiased is not
@pytest.mark.parametrize("name", GRAPHS)
def test_both_chains_of_a_pair_have_the_law_of_the_model(name):
    graph = GRAPHS[name]
    state, (met, same) = simulate(kernels()[name], PARAMS[name], {}, 3000, 20)
    exact = ebmpp.exact.moments(graph, PARAMS[name])
    for chain in (state.z, state.y):
        for b, statistics in graph.statistics(chain).items():
            assert_rows_law(statistics, exact[b], comparisons=40)
    assert (met == same).all()
    assert (np.diff(met.astype(int), axis=0) >= 0).all()
    assert met[-1].mean() > 0.9 and not met[0].all()
    assert (state.meeting_time[met[-1]] >= 2).all()


def test_every_replica_has_the_law_of_its_temperature():
    state, _ = simulate(ParallelTempering(RBM, BETAS), PARAMS["bernoulli"], {}, 4000, 20)
    for r, beta in enumerate(BETAS):
        warm = PARAMS["bernoulli"] | {"v:h": beta * PARAMS["bernoulli"]["v:h"]}
        for b, exact in ebmpp.exact.moments(RBM, warm).items():
            assert_rows_law(state.replicas[b][:, r], exact, comparisons=15)
    assert (state.z["v"] == state.replicas["v"][:, -1]).all()
    # origins are a permutation that has left its start
    assert (np.sort(state.origin, axis=-1) == np.arange(3)).all()
    assert (np.bincount(state.origin[:, -1], minlength=3) > 1000).all()


def test_held_values_are_held_in_every_replica():
    values, known = jnp.array([[1.0, 0.0, 0.0], [0.0] * 3]), jnp.array([[True, False, True], [False] * 3])
    state, _ = simulate_held(values, known)
    assert state.z["v"].shape == (3000, 2, 3) and state.replicas["v"].shape == (3000, 2, 3, 3)
    assert (state.replicas["v"][:, 0, :, 0] == 1).all() and (state.replicas["v"][:, 0, :, 2] == 0).all()
    all_v = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    weight = np.exp(np.asarray(ebmpp.exact.log_likelihood(RBM, PARAMS["bernoulli"], {"v": all_v})))
    assert_rows_law(state.z["v"][:, 0, 1], weight[1] / weight.sum())
    assert_rows_law(state.z["v"][:, 1], ebmpp.exact.moments(RBM, PARAMS["bernoulli"])["v"])


@jax.jit
def simulate_held(values, known):
    clamped = {"v": Observed(values, known)}
    kernel, keys = ParallelTempering(RBM, BETAS), jax.random.split(jax.random.key(1), 3000)
    state = kernel.init(keys, 0, None, (PARAMS["bernoulli"],), clamped)
    step = lambda s, _: (kernel.sample(s, (PARAMS["bernoulli"],), clamped), None)
    return jax.lax.scan(step, state, length=12)


@pytest.mark.parametrize("make", [ParallelTempering, TemperingCoupling])
def test_a_state_keeps_its_shapes(make):
    """With rows of held values: what a loop carries cannot change."""
    kernel, args = make(RBM, BETAS), ((PARAMS["bernoulli"],), {"h": jnp.ones((4, 5, 2))})
    start = jax.eval_shape(lambda key: kernel.init(key, 3, None, *args), jax.random.key(0))
    then = jax.eval_shape(lambda state: kernel.sample(state, *args), start)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), start) == jax.tree.map(
        lambda a: (a.shape, a.dtype), then
    )
    assert start.z["v"].shape == (4, 5, 3) and start.replicas["v"].shape == (4, 5, 3, 3)
    assert list(start.z) == ["v"]


# -- two modes ---------------------------------------------------------------------------------------


def up_weight():
    """P(the mean spin is positive), by enumeration."""
    log_p = np.asarray(ebmpp.exact.log_likelihood(MAGNET, COUPLED, {"v": STATES}))
    return np.exp(log_p)[STATES.sum(-1) > 0].sum()


@pytest.mark.slow
def test_tempering_finds_both_modes_with_their_weights():
    kernel = ParallelTempering(MAGNET, num_temperatures=5)
    mcmc = run(kernel, COUPLED, 400, 30, num_warmup=256, extra_fields=("betas", "rejection"))
    up = (mcmc.get_samples(group_by_chain=True)["v"].sum(-1) > 0).mean(1)
    assert_rows_law(up, up_weight())
    assert 0.55 < up_weight() < 0.75
    state, betas = mcmc.last_state, mcmc.get_extra_fields(group_by_chain=True)["betas"]
    assert (betas == state.betas[:, None]).all()  # fixed after the warm-up
    assert (betas[:, 0] != np.linspace(0, 1, 5, dtype=np.float32)).any()
    assert (state.round_trips > 20).all() and (state.count == 400).all()
    rejection = np.asarray(state.rejection).mean(0)
    assert np.ptp(rejection) < 0.25 < rejection.min(), rejection
    assert "656 sweeps of 5 temperatures, swaps accepted 0." in kernel.get_diagnostics_str(state)


def test_plain_gibbs_stays_in_one_mode():
    mcmc = run(ebmpp.BlockedGibbs(MAGNET), COUPLED, 400, 30, num_warmup=256)
    up = (mcmc.get_samples(group_by_chain=True)["v"].sum(-1) > 0).mean(1)
    assert set(np.asarray(up).tolist()) == {0.0, 1.0}


@partial(jax.jit, static_argnums=(0, 1, 2))
def simulate_plain(kernel, chains, sweeps):
    state = kernel.init(jax.random.split(jax.random.key(11), chains), 0, None, (COUPLED,), {})
    return jax.lax.scan(lambda s, _: (kernel.sample(s, (COUPLED,), {}), None), state, length=sweeps)


@pytest.mark.slow
def test_tempered_pairs_meet_where_plain_ones_do_not():
    state, _ = simulate(TemperingCoupling(MAGNET, LADDER), COUPLED, {}, 40, 150)
    assert state.met.all()
    # as many passes over a replica as all tempered ones took; pairs that began in one mode have met
    plain, _ = simulate_plain(ebmpp.MaximalCoupling(MAGNET), 40, 150 * 2 * len(LADDER))
    assert 0.2 < plain.met.mean() < 0.95


# -- estimates ---------------------------------------------------------------------------------------


def all_moments(x):
    return {"v": x["v"], "h": x["h"], "vh": jnp.outer(x["v"], x["h"])}


@cache
def expectation(k, m, lag):
    return tempered_expectation(
        MAGNET, WEAKER, all_moments, betas=LADDER, rng_key=jax.random.key(k), num_pairs=1000,
        k=k, m=m, lag=lag, num_slots=4,
    )  # fmt: skip


@pytest.mark.parametrize("window", [(3, 5, 2), (20, 30, 10)])
def test_estimates_are_unbiased(window):
    estimate = expectation(*window)
    p = np.exp(np.asarray(ebmpp.exact.log_likelihood(MAGNET, WEAKER, {"v": STATES})))
    h = np.asarray(MAGNET.mean(WEAKER, {"v": STATES}, "h"))
    exact = {"v": p @ STATES, "h": p @ h, "vh": (STATES * p[:, None]).T @ h}
    for name, value in exact.items():
        assert_law(estimate.value[name], value, estimate.standard_error[name], comparisons=96)
    assert estimate.met.all() and estimate.meeting_time.min() >= window[-1]


def test_estimates_are_compiled_once():
    expectation(3, 5, 2)
    compiled = run_pairs._cache_size()
    assert expectation(20, 30, 10).standard_error["v"].max() < 0.04
    assert run_pairs._cache_size() == compiled


@pytest.mark.slow
def test_estimates_given_observed_units():
    graph, params = RBM, PARAMS["bernoulli"]
    seen = Observed(np.array([1.0, np.nan, 0.0]), np.array([True, False, True]))
    estimate = tempered_expectation(
        graph, params, lambda x: x["v"], betas=BETAS, rng_key=jax.random.key(2), num_pairs=1500,
        num_slots=4, coupling="common", init={"h": np.ones(2)}, v=seen,
    )  # fmt: skip
    rows = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    weight = np.exp(np.asarray(ebmpp.exact.log_likelihood(graph, params, {"v": rows})))
    assert_law(estimate.value, [1, weight[1] / weight.sum(), 0], estimate.standard_error)


def test_estimates_say_what_is_wrong():
    with pytest.raises(ValueError, match="increasing"):
        tempered_expectation(RBM, PARAMS["bernoulli"], all_moments, betas=[1, 0], rng_key=jax.random.key(0))
    with pytest.raises(StateError, match=r"block 'v' got shape \(4,\), expected \(\.\.\., 3\)"):
        tempered_expectation(
            RBM, PARAMS["bernoulli"], all_moments, betas=BETAS, rng_key=jax.random.key(0), v=np.ones(4)
        )
    with pytest.raises(StateError, match=r"block 'h' got shape \(5,\), expected \(\.\.\., 2\)"):
        tempered_expectation(
            RBM, PARAMS["bernoulli"], all_moments, betas=BETAS, rng_key=jax.random.key(0),
            init={"h": np.ones(5)},
        )  # fmt: skip


# -- NumPyro's contract ------------------------------------------------------------------------------


# NumPyro donates its collection of scalars and cannot always use it under a vmap of its own
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        slow("adapting", "sequential"),
        slow("coupled", jax.vmap),
    ],
)
def test_chain_methods_give_the_same_draws(name, method):
    wanted, given = (chains(name, m).get_samples() for m in ("vectorized", method))
    assert all((wanted[b] == given[b]).all() for b in wanted)


@cache
def chains(name, method):
    kernel = LIGHT if name == "coupled" else ParallelTempering(RBM, num_temperatures=3)
    return run(kernel, PARAMS["bernoulli"], 5, method=method, num_warmup=0 if name == "coupled" else 6)


@pytest.mark.slow
def test_coupled_runs_have_a_group_of_meetings():
    tree = ebmpp.to_datatree(chains("coupled", "vectorized"))
    assert int(tree["meeting"]["lag"]) == 2
    assert tree["meeting"]["energy"].dims == ("chain", "sweep")
    state = chains("coupled", "vectorized").last_state
    np.testing.assert_allclose(state.energies[:, 0], RBM.energy(PARAMS["bernoulli"], state.z), rtol=1e-5)
    gap = sum(np.abs(np.asarray(state.z[b] - state.y[b])).sum(-1) for b in state.z)
    np.testing.assert_array_equal(state.distance, gap)


def test_rounds_of_the_warm_up_double():
    kernel = ParallelTempering(RBM, num_temperatures=3)
    params = PARAMS["bernoulli"]
    state = kernel.init(jax.random.key(0), 13, None, (params,), {})
    sample, ladders, counts = jax.jit(lambda s: kernel.sample(s, (params,), {})), [state.betas], []
    for _ in range(16):
        state = sample(state)
        ladders.append(state.betas)
        counts.append(int(state.count))
    changed = [i for i in range(1, 17) if (ladders[i] != ladders[i - 1]).any()]
    assert changed == [1, 3, 6, 13]
    assert counts == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]


def test_kernels_are_values():
    tempered = ParallelTempering(RBM, [0, 0.5, 1])
    for kernel in (tempered, ParallelTempering(RBM, num_temperatures=4), kernels()["bernoulli"]):
        assert repr(pickle.loads(pickle.dumps(kernel))) == repr(kernel)
    assert "betas=(0.0, 0.5, 1.0)" in repr(tempered)
    assert "betas=(0.0, 0.5, 1.0), lag=2" in repr(kernels()["bernoulli"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ParallelTempering(RBM, "hot"),
            "betas is one of 'auto', or numbers that increase to 1, not 'hot'",
        ),
        (lambda: ParallelTempering(RBM, [0.5, 0.7]), "from 0 or more to 1"),
        (lambda: ParallelTempering(RBM, num_temperatures=1), "num_temperatures is an int of at least 2"),
        (lambda: TemperingCoupling(RBM, [1.0, 0.0]), "increasing"),
        (lambda: TemperingCoupling(RBM, BETAS, lag=0), "lag is an int of at least 1, not 0"),
        (lambda: TemperingCoupling(RBM, BETAS, coupling="best"), "coupling 'best' is unknown"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_starts_are_those_given():
    v = jnp.array([1.0, 0.0, 1.0])
    state = ParallelTempering(RBM, BETAS).init(jax.random.key(0), 0, {"v": v}, (PARAMS["bernoulli"],), {})
    assert (state.replicas["v"] == v).all() and (state.z["v"] == v).all()
    with pytest.raises(StateError, match="block 'v'"):
        ParallelTempering(RBM).init(jax.random.key(0), 0, {"v": v[:2]}, (PARAMS["bernoulli"],), {})
