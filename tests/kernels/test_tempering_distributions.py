# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tempering: coupled ensembles, unbiased estimates, separated modes, paths of models."""

from functools import cache
import pickle

from mcmc_tools import (
    METHODS,
    assert_same,
    make_mcmc,
    reference,
    run_mcmc,
    samples,
    scan_kernel,
    strong_params,
)
from metropolis_tools import Law
import networkx as nx
import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bias,
    Categorical,
    FactorGraph,
    Gaussian,
    MaximalCoupling,
    Observed,
    Pairwise,
    Spin,
    layered,
)
from ebmpp.annealing import Path
from ebmpp.errors import ArgumentError, DomainError
from ebmpp.kernels import ParallelTempering
from ebmpp.kernels.tempering import Knots
from ebmpp.moves import Target, tempered
from ebmpp.moves.ensemble import Ensemble
from helpers import assert_law, assert_rows_law, random_params

pytestmark = pytest.mark.nightly

BETAS = (0.0, 0.5, 1.0)

#: two modes, all up and all down, that Gibbs sweeps do not leave; enumerated by the
#: mean of one block
MAGNET = {
    "v": np.full(6, 0.05, np.float32),
    "h": np.zeros(6, np.float32),
    "v:h": np.full((6, 6), 0.9, np.float32),
}
WEAKER = MAGNET | {"v:h": np.full((6, 6), 0.3, np.float32)}
STATES = np.stack(np.meshgrid(*[[-1.0, 1.0]] * 6, indexing="ij"), -1).reshape(-1, 6)
LADDER = (0.0, 0.16, 0.25, 0.4, 1.0)


@cache
def magnet() -> FactorGraph:
    return layered(v=Spin(6), h=Spin(6))


def visible_distribution(params: dict) -> np.ndarray:
    log_p = STATES @ params["v"] + np.logaddexp(
        field := STATES @ params["v:h"], -field
    ).sum(1)
    return np.exp(log_p - np.logaddexp.reduce(log_p))


@pytest.mark.parametrize("name", ["rbm", "categorical", "learned"])
def test_both_chains_of_a_pair_have_the_distribution_of_the_model(name):
    graph, params = zoo.graph(name), zoo.params(name)
    kernel = MaximalCoupling(graph, lag=2, coupling=tempered(BETAS))
    state, _, met = scan_kernel(kernel, 20, params, num_chains=3000)
    for chain in (state.z, state.y):
        for b, statistics in graph.statistics(chain).items():
            assert_rows_law(statistics, zoo.moments(name)[b], comparisons=40)
    assert (np.diff(met.astype(int), axis=0) >= 0).all()
    assert met[-1].mean() > 0.9 and not met[0].all()
    for b in state.z:
        np.testing.assert_array_equal(
            state.replicas[b][met[-1]], state.followers[b][met[-1]]
        )
    assert (state.meeting_time[met[-1]] >= 2).all()


def test_tempered_pairs_meet_where_plain_pairs_do_not():
    state, *_ = scan_kernel(
        MaximalCoupling(magnet(), coupling=tempered(LADDER)), 150, MAGNET, num_chains=40
    )
    assert state.met.all()
    # as many passes over a replica as all tempered ones took; pairs that began in one
    # mode have met
    plain, *_ = scan_kernel(
        MaximalCoupling(magnet()), 150 * 2 * len(LADDER), MAGNET, num_chains=40
    )
    assert 0.2 < plain.met.mean() < 0.95


def test_coupled_runs_have_a_meeting_group():
    kernel = MaximalCoupling(
        zoo.graph("rbm"), lag=2, coupling=tempered(BETAS, "common")
    )
    options = {"num_samples": 5, "num_chains": 2}
    runs = [
        run_mcmc(kernel, strong_params(), chain_method=m, **options)
        for m in METHODS[:2]
    ]
    assert_same(*map(samples, runs))
    meeting = ebmpp.to_datatree(runs[1])["meeting"]
    assert int(meeting["lag"]) == 2
    assert meeting["distance"].dims == ("chain", "sweep")


def products(x):
    return {"v": x["v"], "vh": jnp.outer(x["v"], x["h"])}


@pytest.mark.parametrize(("k", "m", "lag"), [(3, 5, 2), (20, 30, 10)])
def test_estimates_are_unbiased(k, m, lag):
    options = {
        "rng_key": jax.random.key(k),
        "num_pairs": 1000,
        "k": k,
        "m": m,
        "lag": lag,
    }
    estimate = ebmpp.unbiased_expectation(
        magnet(), WEAKER, products, coupling=tempered(LADDER), **options
    )
    p = visible_distribution(WEAKER)
    exact = {
        "v": p @ STATES,
        "vh": (STATES * p[:, None]).T @ np.tanh(STATES @ WEAKER["v:h"]),
    }
    for name, value in exact.items():
        assert_law(
            estimate.value[name], value, estimate.standard_error[name], comparisons=84
        )
    assert estimate.met.all() and estimate.meeting_time.min() >= lag


def test_tempering_visits_both_modes_with_their_weights():
    options = {"num_samples": 400, "num_chains": 30, "num_warmup": 256}
    share_up = lambda mcmc: (samples(mcmc)["v"].sum(-1) > 0).mean(1)
    kernel = ParallelTempering(magnet(), num_temperatures=5)
    mcmc = run_mcmc(kernel, MAGNET, extra_fields=("betas",), **options)
    up = visible_distribution(MAGNET)[STATES.sum(-1) > 0].sum()
    assert_rows_law(share_up(mcmc), up)
    assert 0.55 < up < 0.75
    state = mcmc.last_state
    betas = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["betas"])
    assert (betas == state.betas[:, None]).all()  # fixed after the warm-up
    assert (betas[:, 0] != np.linspace(0, 1, 5, dtype=np.float32)).any()
    assert (state.round_trips > 20).all() and (state.count == 400).all()
    rejection = np.asarray(state.rejection).mean(0)
    assert np.ptp(rejection) < 0.25 < rejection.min()
    assert kernel.get_diagnostics_str(state).startswith(
        "656 sweeps of 5 temperatures, swaps accepted 0."
    )
    assert set(share_up(run_mcmc(ebmpp.BlockedGibbs(magnet()), MAGNET, **options))) == {
        0.0,
        1.0,
    }


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("method", [m for m in METHODS if m != "vectorized"])
@pytest.mark.parametrize("along_path", [False, True])
def test_chain_methods_give_the_same_draws(method, along_path):
    graph = zoo.graph("rbm")
    kernel = ParallelTempering(
        graph, **({"path": path_of(graph)} if along_path else {"num_temperatures": 3})
    )
    options = {"num_samples": 5, "num_chains": 2, "num_warmup": 6}
    runs = [
        run_mcmc(kernel, strong_params(), chain_method=m, **options)
        for m in ("vectorized", method)
    ]
    assert_same(*map(samples, runs))
    assert_same(*(mcmc.last_state.origin for mcmc in runs))


def path_of(graph, num=2, scale=1.5):
    """Models that have little to do with one another."""
    models = [random_params(graph, seed=i, scale=scale) for i in range(num)]
    return Path.through(graph, reference(graph), models)


def potts() -> FactorGraph:
    ladder = nx.circular_ladder_graph(3)
    return FactorGraph(
        {"x": Categorical(6, 3)}, factors=[Bias("x"), Pairwise("x", ladder)]
    )


@pytest.mark.parametrize("name", ["rbm", "deep", "potts"])
def test_every_replica_has_the_distribution_of_its_knot(name):
    graph = potts() if name == "potts" else zoo.graph(name)
    path, params = path_of(graph), random_params(graph, seed=9, scale=1.5)
    state, *_ = scan_kernel(
        ParallelTempering(graph, path=path), 12, params, num_chains=4000
    )
    assert (state.betas[0] == [0, 1, 1, 1]).all()
    models = [path.params_at(1), path.params_at(2), params]
    for r, model in enumerate(models, 1):
        exact = Law(graph, model)
        drawn = {b: x[:, r] for b, x in state.replicas.items()}
        exact.assert_law(drawn, exact.target, len(models) * len(exact.states))
    for b, eta0 in path.eta0.items():  # independent units
        drawn = graph.families[b].statistics(state.replicas[b][:, 0])
        assert_rows_law(drawn, graph.families[b].mean(eta0))
    assert_same(state.z, {b: x[:, -1] for b, x in state.replicas.items()})
    assert (np.bincount(state.origin[:, -1], minlength=4) > 20).all()


def test_clamped_and_observed_units_along_a_path():
    graph, params = zoo.graph("rbm"), strong_params()
    kernel = ParallelTempering(graph, path=path_of(graph))
    h = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    state, *_ = scan_kernel(kernel, 12, params, num_chains=4000, clamped={"h": h})
    assert state.z.keys() == {"v"} and state.replicas["v"].shape == (4000, 2, 4, 4)
    for row in range(2):
        assert_rows_law(
            state.z["v"][:, row], graph.mean(params, {"h": h}, "v")[row], comparisons=8
        )
    # nothing is left to swap: h is clamped and v summed out
    assert (state.rejection < 1e-3).all()
    known = np.array([True, False, False, True])
    observed = Observed(np.array([1.0, 0.0, 0.0, 0.0]), known)
    state, *_ = scan_kernel(
        kernel, 12, params, num_chains=4000, clamped={"v": observed}
    )
    exact = Law(graph, params, lambda x: x["v"][0] == 1 and x["v"][3] == 0)
    exact.assert_law(state.z, exact.target, len(exact.states))


def constants_of(closed):
    constants = list(closed.consts)
    for equation in closed.jaxpr.eqns:
        for value in equation.params.values():
            if isinstance(value, jax.extend.core.ClosedJaxpr):
                constants += constants_of(value)
    return constants


def test_the_path_is_an_argument_and_no_constant_of_the_program():
    graph = layered(v=ebmpp.Bernoulli(30), h=ebmpp.Bernoulli(20))
    kernel, params = (
        ParallelTempering(graph, path=path_of(graph, 3, 0.1)),
        random_params(graph, seed=9),
    )
    state = kernel.init(jax.random.split(zoo.KEY, 2), 0, None, (params,), {})
    program = jax.make_jaxpr(lambda s, p: kernel.sample(s, (p,), {}))(state, params)
    assert all(np.size(c) < 600 for c in constants_of(program))
    assert state.knots.params["v:h"].shape == (4, 30, 20)  # shared by all chains


def test_the_model_is_one_more_knot_unless_it_is_the_last():
    graph = zoo.graph("rbm")
    path = path_of(graph)
    start = lambda params: (
        ParallelTempering(graph, path=path).init(zoo.KEY, 0, None, (params,), {}).betas
    )
    assert start(path.params_at(-1)).shape == (3,)
    assert start(strong_params()).shape == (4,)
    # traced params cannot be compared
    assert jax.eval_shape(start, path.params_at(-1)).shape == (4,)


def test_a_run_along_a_path_resumes_pickles_and_has_a_tree():
    graph, params = zoo.graph("rbm"), strong_params()
    kernel = ParallelTempering(graph, path=path_of(graph))
    mcmc = make_mcmc(kernel, 10, 2, num_warmup=5)
    mcmc.run(zoo.KEY, params, extra_fields=("rejection", "round_trips"))
    assert kernel.get_diagnostics_str(mcmc.last_state).startswith(
        "15 sweeps of 4 knots"
    )
    assert ebmpp.to_datatree(mcmc)["posterior"].sizes["draw"] == 10
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, params)
    assert int(mcmc.last_state.i[0]) == 25 and mcmc.last_state.knots.betas.shape == (3,)
    assert "path=Path(3 knots" in repr(kernel)
    assert_same(pickle.loads(pickle.dumps(kernel)).path.along(), kernel.path.along())


def test_a_path_that_does_not_normalise_is_refused():
    graph = layered(v=Gaussian(1, "learned"), h=ebmpp.Bernoulli(1))
    models = [
        random_params(graph),
        random_params(graph) | {"v": np.array([[0.0, 0.5]])},
    ]
    with pytest.raises(DomainError, match="knot 2.*'v'"):
        ParallelTempering(graph, path=Path.through(graph, reference(graph), models))


def test_pairs_are_not_coupled_along_a_path():
    graph, params = zoo.graph("rbm"), strong_params()
    ensemble = Ensemble.along(
        Target(graph, params), *Knots.before(path_of(graph), params)
    )
    move = ebmpp.moves.tempering.tempered_sweep(graph, summed=("v",))
    options = {"rng_key": zoo.KEY, "coupling": move}
    with pytest.raises(ArgumentError, match="summed"):
        ebmpp.unbiased_expectation(
            ensemble.graph, ensemble.params, lambda x: x["v"], **options
        )
