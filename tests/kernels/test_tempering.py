# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""ParallelTempering: the distribution of every replica, swap acceptance, adaptation, refusals.

Tests kernels/tempering.py.
"""

import itertools
import pickle

from mcmc_tools import reference, run_mcmc, samples, scan_kernel, strong_params
from metropolis_tools import Law
import numpy as np
from oracle import numpy_energy
import pytest
import zoo

import jax

import ebmpp
from ebmpp import Observed
from ebmpp.annealing import Path
from ebmpp.errors import ArgumentError, StateError
from ebmpp.kernels import ParallelTempering
from ebmpp.kernels.tempering import Knots
from ebmpp.moves.ensemble import Ensemble, log_ratio
from ebmpp.moves.target import Target
from helpers import (
    assert_rows_law,
    nightly,
    often,
    parameter_sets,
    random_params,
    random_state,
)

BETAS = (0.0, 0.5, 1.0)


def make_pairs(graph, betas, kind=None, **options):
    return ebmpp.MaximalCoupling(
        graph, coupling=ebmpp.moves.tempered(betas, kind), **options
    )


def params_at(beta: float) -> dict:
    """Tempering scales the interactions and leaves the biases alone."""
    params = strong_params(scale=2.0)
    return params | {"v:h": beta * params["v:h"]}


def test_every_replica_has_the_distribution_of_its_temperature():
    graph = zoo.graph("rbm")
    options = {"num_chains": 3000, "num_warmup": 10, "num_samples": 10}
    mcmc = run_mcmc(ParallelTempering(graph, BETAS), params_at(1.0), **options)
    state, laws = mcmc.last_state, [Law(graph, params_at(beta)) for beta in BETAS]
    for r, exact in enumerate(laws):
        drawn = {b: np.asarray(x[:, r]) for b, x in state.replicas.items()}
        exact.assert_law(drawn, exact.target, 3 * len(exact.states))
    np.testing.assert_array_equal(samples(mcmc)["v"][:, -1], state.replicas["v"][:, -1])
    # swaps are rejected with their exact probabilities, and states travel
    coupled = params_at(1.0) | {"v": np.zeros(4), "h": np.zeros(3)}
    interaction = np.array([numpy_energy(graph, coupled, x) for x in laws[0].states])
    for low in range(2):
        gain = (BETAS[low + 1] - BETAS[low]) * (
            interaction[None, :] - interaction[:, None]
        )
        accepted = laws[low].target @ np.minimum(1, np.exp(gain)) @ laws[low + 1].target
        assert_rows_law(state.rejection[:, low], 1 - accepted, comparisons=2)
    assert (np.sort(state.origin, axis=-1) == np.arange(3)).all()
    assert (np.bincount(state.origin[:, -1], minlength=3) > 700).all()


@pytest.mark.nightly
def test_observed_units_stay_fixed_in_every_replica():
    graph, params = zoo.graph("rbm"), params_at(1.0)
    known = np.array([[True, False, True, True], [False] * 4])
    observed = Observed(np.array([[1.0, 0.0, 0.0, 1.0], [0.0] * 4]), known)
    kernel = ParallelTempering(graph, BETAS)
    state, *_ = scan_kernel(
        kernel, 12, params, num_chains=2000, clamped={"v": observed}
    )
    assert state.z["v"].shape == (2000, 2, 4) and state.replicas["v"].shape == (
        2000,
        2,
        3,
        4,
    )
    assert (state.replicas["v"][:, 0][..., known[0]] == [1, 0, 1]).all()
    for row, inside in enumerate(
        (lambda x: (x["v"] == [1, x["v"][1], 0, 1]).all(), lambda x: True)
    ):
        exact = Law(graph, params, inside)
        exact.assert_law(
            {b: z[:, row] for b, z in state.z.items()}, exact.target, 2 * 128
        )


@pytest.mark.parametrize("make", [ParallelTempering, make_pairs])
def test_a_state_keeps_its_shapes_with_clamped_rows(make):
    kernel, args = (
        make(zoo.graph("rbm"), BETAS),
        ((strong_params(),), {"h": np.ones((4, 5, 3), np.float32)}),
    )
    start = jax.eval_shape(lambda key: kernel.init(key, 3, None, *args), zoo.KEY)
    after = jax.eval_shape(lambda state: kernel.sample(state, *args), start)
    shapes = lambda state: jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert shapes(start) == shapes(after)
    assert start.z["v"].shape == (4, 5, 4) and start.replicas["v"].shape == (4, 5, 3, 4)


@pytest.mark.parametrize("make", [ParallelTempering, ebmpp.BlockedGibbs])
@pytest.mark.parametrize("num_chains", [1, nightly(2)])
def test_parameter_sets_have_the_draws_of_single_runs(make, num_chains):
    graph = zoo.graph("rbm")
    stacked, sets = parameter_sets(graph)
    options = {
        "num_chains": num_chains,
        "num_warmup": 3,
        "clamped": {"h": np.eye(3, dtype=np.float32)[:2]},
    }
    keys = jax.random.split(zoo.KEY, num_chains)
    run = lambda params, keys: run_mcmc(make(graph), params, key=keys, **options)
    mcmc = run(stacked, keys if num_chains > 1 else keys[0])
    draws = samples(mcmc)["v"]
    assert draws.shape == (num_chains, 8, 3, 2, 4)
    for i, params in enumerate(sets):
        folded = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
        single = run(params, folded if num_chains > 1 else folded[0])
        np.testing.assert_array_equal(draws[:, :, i], samples(single)["v"])


def test_temperatures_adapt_at_the_end_of_rounds_that_double():
    kernel, args = (
        ParallelTempering(zoo.graph("rbm"), num_temperatures=3),
        ((strong_params(),), {}),
    )
    state = kernel.init(zoo.KEY, 13, None, *args)
    step = lambda s, _: (lambda new: (new, (new.betas, new.count)))(
        kernel.sample(s, *args)
    )
    _, (betas, counts) = jax.jit(lambda s: jax.lax.scan(step, s, length=16))(state)
    ladders = np.concatenate([state.betas[None], betas])
    changed = [i for i in range(1, 17) if (ladders[i] != ladders[i - 1]).any()]
    assert changed == [1, 3, 6, 13]
    np.testing.assert_array_equal(
        counts, [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    )


@pytest.mark.nightly
@pytest.mark.parametrize("summed", often([("v", "h2"), ()], ("v", "h2")))
def test_swap_ratios_along_a_path_match_enumeration(summed):
    graph, params = zoo.graph("deep"), strong_params("deep")
    path = Path.through(
        graph,
        reference(graph),
        [random_params(graph, seed=i, scale=1.5) for i in range(2)],
    )
    knots = Knots.before(path, params)
    ensemble = Ensemble.along(Target(graph, params), *knots)
    x = {
        b: random_state(f, i, (3, 4)) for i, (b, f) in enumerate(graph.families.items())
    }
    log_ratio_at = jax.jit(log_ratio, static_argnums=(2, 3))
    ratios = [log_ratio_at(ensemble, x, i, summed) for i in range(2)]
    models, betas = [None, path.params_at(1), path.params_at(2), params], [0, 1, 1, 1]
    inside = [
        {"v": s[:3], "h2": s[3:]}
        for s in np.array(list(itertools.product([0.0, 1], repeat=5)))
    ]

    def log_density(r, x):
        """Return the quantity at knot ``r``, with ``summed`` summed out by enumeration."""
        total = -np.inf
        for values in inside if summed else [{}]:
            state = x | values
            independent = sum(float((path.eta0[b] * state[b]).sum()) for b in state)
            joint = -numpy_energy(graph, models[r], state) if models[r] else 0.0
            total = np.logaddexp(total, betas[r] * joint + (1 - betas[r]) * independent)
        return total

    for row, low in itertools.product(range(3), range(3)):
        a, b = (
            {name: np.asarray(v[row, r], float) for name, v in x.items()}
            for r in (low, low + 1)
        )
        exact = (
            log_density(low, b)
            + log_density(low + 1, a)
            - log_density(low, a)
            - log_density(low + 1, b)
        )
        np.testing.assert_allclose(
            ratios[low % 2][row, low], exact, rtol=1e-4, atol=1e-4
        )
        assert ratios[1 - low % 2][row, low] == 0


def test_starts_are_those_of_init_params():
    v, args = np.array([1.0, 0.0, 1.0, 0.0]), ((strong_params(),), {})
    state = ParallelTempering(zoo.graph("rbm"), BETAS).init(zoo.KEY, 0, {"v": v}, *args)
    assert (state.replicas["v"] == v).all() and (state.z["v"] == v).all()
    with pytest.raises(StateError, match="'v'"):
        ParallelTempering(zoo.graph("rbm")).init(zoo.KEY, 0, {"v": v[:2]}, *args)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (ParallelTempering, {"betas": "hot"}, "betas.*'hot'"),
        (ParallelTempering, {"betas": [0.5, 0.7]}, "to 1"),
        (ParallelTempering, {"num_temperatures": 1}, "num_temperatures.*2"),
        (ParallelTempering, {"path": [1]}, "path"),
        (make_pairs, {"betas": [1.0, 0.0]}, "betas"),
        (make_pairs, {"betas": BETAS, "lag": 0}, "lag"),
        (make_pairs, {"betas": BETAS, "kind": "best"}, "coupling"),
    ],
)
def test_wrong_options_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(zoo.graph("rbm"), **options)


def test_a_path_of_another_graph_or_beside_betas_is_refused():
    graph = zoo.graph("rbm")
    path = Path.through(graph, reference(graph), [strong_params()])
    with pytest.raises(ArgumentError, match="path"):
        ParallelTempering(zoo.graph("deep"), path=path)
    for options in ({"betas": BETAS}, {"num_temperatures": 5}):
        with pytest.raises(ArgumentError, match=next(iter(options))):
            ParallelTempering(graph, path=path, **options)


def test_kernels_print_and_pickle():
    for kernel in (
        ParallelTempering(zoo.graph("rbm"), BETAS),
        make_pairs(zoo.graph("rbm"), BETAS, lag=2),
    ):
        assert repr(pickle.loads(pickle.dumps(kernel))) == repr(kernel)
        assert "betas=(0.0, 0.5, 1.0)" in repr(kernel)


@pytest.mark.nightly
def test_independent_units_are_drawn_from_their_distribution():
    graph = ebmpp.FactorGraph({"x": ebmpp.Bernoulli(1)}, factors=[ebmpp.Bias("x")])
    kernel, params = ParallelTempering(graph, BETAS), {"x": np.float32([0.7])}
    state, *_ = scan_kernel(kernel, 3, params, num_chains=2000)
    assert_rows_law(state.z["x"], 1 / (1 + np.exp(-params["x"])))
    assert (state.rejection == 0).all()
