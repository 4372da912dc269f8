# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of which some units are observed: the law of the others, for kernels and for estimates."""

import functools
from typing import Any

from metropolis_tools import Law
import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Categorical, Gaussian, Observed, layered
from ebmpp.errors import StateError
from helpers import assert_law, numpy_statistics, pair, random_params, slow

GRAPH = layered(v=Bernoulli(3), h=Categorical(2, 3))
PARAMS = random_params(GRAPH, seed=5, scale=1.2)

#: rows with masks of their own: some of both blocks, nothing, all of one block
ROWS = {
    "v": Observed(
        np.array([[1.0, np.nan, 0.0], [np.nan] * 3, [0.0, 1.0, 1.0]]),
        np.array([[True, False, True], [False] * 3, [True] * 3]),
    ),
    "h": Observed(
        np.array([[-1, 2], [-1, -1], [-1, 0]]), np.array([[False, True], [False, False], [False, True]])
    ),
}


@functools.cache
def law(row: int) -> Law:
    """The model given what is observed in a row."""
    given = {b: (seen.values[row], seen.known[row]) for b, seen in ROWS.items()}
    return Law(GRAPH, PARAMS, lambda x: all((x[b] == v)[k].all() for b, (v, k) in given.items()))


def run(kernel: Any, chains: int, samples: int, num_warmup: int = 0) -> MCMC:
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=samples,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    extra = ("y", "met") if isinstance(kernel, ebmpp.MaximalCoupling) else ()
    mcmc.run(jax.random.key(6), PARAMS, extra_fields=extra, **ROWS)
    return mcmc


def assert_held(draws: dict) -> None:
    """Observed units are as observed, in draws of shape ``(..., rows, units)``."""
    for b, seen in ROWS.items():
        assert ((np.asarray(draws[b]) == seen.values) | ~seen.known).all()


def assert_laws(draws: dict, comparisons: int = 1) -> None:
    """Rows of independent chains against enumeration, shape ``(chains, rows, units)``."""
    states = [law(row).states for row in range(3)]
    assert [len(listed) for listed in states] == [6, 72, 3]
    for row in range(3):
        drawn = {b: np.asarray(v)[:, row] for b, v in draws.items()}
        law(row).assert_law(drawn, law(row).target, comparisons * sum(map(len, states)))


def test_gibbs_draws_have_the_law_given_the_observed_units() -> None:
    draws = run(ebmpp.BlockedGibbs(GRAPH), 10_000, 1, num_warmup=30).get_samples()
    assert draws["v"].shape == (10_000, 3, 3) and draws["h"].dtype == jnp.int32
    assert_held(draws)
    assert_laws(draws)


@pytest.mark.slow
def test_pairs_meet_stay_together_and_have_the_law() -> None:
    mcmc = run(ebmpp.MaximalCoupling(GRAPH, lag=2), 5000, 30)
    z, extra = mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(group_by_chain=True)
    y, met = extra["y"], np.asarray(extra["met"])
    assert_held(z)
    assert_held(y)
    equal = np.all([np.asarray(z[b] == y[b]).all(-1) for b in z], axis=0)
    assert (equal == met).all() and (np.diff(met.astype(int), axis=1) >= 0).all()
    assert met[:, -1].all() and not met[:, 0, :2].all()
    assert met[:, 0, 2].all()  # the free unit's neighbours are known, so its laws are equal
    for chain in (z, y):
        assert_laws({b: v[:, -1] for b, v in chain.items()}, 2)


# -- estimates -----------------------------------------------------------------------------------


def statistics(x: dict) -> dict:
    return GRAPH.statistics(x)


def estimate(
    coupling: str, row: int, seed: int = 2, **options: Any
) -> ebmpp.sampling.expectation.UnbiasedEstimate:
    """Given what is observed in a row; a mask is an argument, so all rows share what is compiled."""
    key = jax.random.key(seed)
    given = {"rng_key": key, "num_pairs": 6000, "num_slots": 4, "coupling": coupling, **options}
    seen = {b: Observed(o.values[row], o.known[row]) for b, o in ROWS.items()}
    return ebmpp.unbiased_expectation(GRAPH, PARAMS, statistics, **given, **seen)


@pytest.mark.parametrize("coupling", ["maximal", slow("metropolis")])
def test_estimates_are_unbiased_given_the_observed_units(coupling: str) -> None:
    start = "local_mode" if coupling == "maximal" else "uniform"
    cases = [{"row": 0}, {"row": 1, "k": 2, "m": 6, "lag": 3}, {"row": 0, "init": start, "seed": 3}]
    for options in cases:
        made = estimate(coupling, **options)
        known = law(options["row"])
        for b, family in GRAPH.families.items():
            exact = known.target @ np.array([numpy_statistics(family, x[b]).ravel() for x in known.states])
            mean, error = np.ravel(made.value[b]), np.ravel(made.standard_error[b])
            assert_law(mean, exact, error, 9 * len(cases))
        assert (made.meeting_time > 2).any()


def test_units_that_are_held_cost_no_trials() -> None:
    assert estimate("maximal", row=1).trials > 1.1
    made = estimate("maximal", row=2)  # v is known: neither layer has anything to refuse
    assert made.trials == 1 and (made.meeting_time <= 2).all()


def test_reals_are_held_and_the_others_follow() -> None:
    graph = pair(Gaussian(2), Bernoulli(2))
    params = random_params(graph, seed=4, scale=1.2)
    first = 0.7
    made = ebmpp.unbiased_expectation(
        graph,
        params,
        lambda x: x,
        rng_key=jax.random.key(1),
        num_pairs=6000,
        num_slots=4,
        coupling=("reflection", "common"),
        a=Observed(jnp.array([first, jnp.inf]), jnp.array([True, False])),
    )
    bias, other, weight = (np.asarray(params[name], float) for name in ("a", "b", "a:b"))
    states = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], float)
    eta = bias + states @ weight.T
    log_weight = states @ other + first * eta[:, 0] + 0.5 * eta[:, 1] ** 2
    probs = np.exp(log_weight - log_weight.max())
    probs /= probs.sum()
    assert made.value["a"][0] == pytest.approx(first, abs=1e-6)
    assert_law(made.value["a"][1], probs @ eta[:, 1], made.standard_error["a"][1], 3)
    assert_law(made.value["b"], probs @ states, made.standard_error["b"], 3)


# -- what is refused -----------------------------------------------------------------------------

KERNELS = (
    ebmpp.BlockedGibbs,
    ebmpp.MaximalCoupling,
    ebmpp.kernels.MetropolisCoupling,
    ebmpp.kernels.LocalSearch,
)
SOME = np.array([True, False, True])
WRONG = [
    ("v", Observed(np.ones(3), np.array([1, 0, 1])), "block 'v': known is an array of booleans, not of int"),
    ("v", Observed(np.ones(4), np.ones(4, bool)), r"block 'v' got shape \(4,\), expected \(..., 3\)"),
    ("v", Observed(np.ones(3), np.ones(2, bool)), r"known has shape \(2,\), which does not.*\(3,\)"),
    ("v", Observed(np.ones(3), np.ones((5, 3), bool)), r"known has shape \(5, 3\), which does not"),
    ("v", Observed(np.array([1, 0, 2.0]), SOME), r"block 'v'.* got 2.0 at index \(2,\).*in \{0, 1\}"),
    ("v", Observed(np.array([1, 0, np.nan]), SOME), r"got nan at index \(2,\)"),
    ("h", Observed(np.array([3, 0]), SOME[:2]), r"block 'h'.* got 3 at index \(0,\)"),
    ("v", Observed("ones", SOME), "block 'v': expected an array of numbers, got 'ones'"),
    ("w", Observed(np.ones(3), SOME), "unknown block 'w'"),
]


@pytest.mark.parametrize(("block", "given", "message"), WRONG)
def test_wrong_observations(block: str, given: Observed, message: str) -> None:
    for kernel in KERNELS:
        with pytest.raises(StateError, match=message):
            kernel(GRAPH).init(jax.random.key(0), 0, None, (PARAMS,), {block: given})
    for function in (ebmpp.local_search, functools.partial(ebmpp.unbiased_expectation, fn=statistics)):
        with pytest.raises(StateError, match=message):
            function(GRAPH, PARAMS, rng_key=jax.random.key(0), **{block: given})


def test_estimates_take_one_observation_for_all_pairs() -> None:
    given = Observed(np.ones((6, 3)), SOME)
    for pairs, message in ((6, "give Observed without leading axes"), (7, r"leading axes \(6,\), expected")):
        with pytest.raises(StateError, match=message):
            ebmpp.unbiased_expectation(
                GRAPH, PARAMS, statistics, rng_key=jax.random.key(0), num_pairs=pairs, v=given
            )


@pytest.mark.parametrize("ignored", [np.nan, np.inf, -7.5])
def test_what_stands_at_unknown_units_is_ignored(ignored: float) -> None:
    init = {"v": np.array([0.0, 1.0, 1.0])}  # the observed units win
    given = {"v": Observed(np.array([1, ignored, 0]), SOME)}
    z = ebmpp.BlockedGibbs(GRAPH).init(jax.random.key(0), 0, init, (PARAMS,), given).z
    np.testing.assert_array_equal(z["v"], [1, 1, 0])
    free = ebmpp.BlockedGibbs(GRAPH).init(jax.random.key(0), 0, None, (PARAMS,), given).z
    assert free["v"][1] in (0, 1) and free["h"].dtype == jnp.int32
