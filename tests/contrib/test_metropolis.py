# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""MetropolisCoupling inside NumPyro, against enumerated chains.

Tests contrib/estimators/local_mode_ucd.py, contrib/metropolis.py.
"""

import pickle

from mcmc_tools import METHODS, assert_same, fields, run_mcmc, samples
from metropolis_tools import Chain
import numpy as np
import pytest
import zoo

import jax

import ebmpp
from ebmpp import (
    Bernoulli,
    Binomial,
    Categorical,
    Gaussian,
    MaximalCoupling,
    Observed,
    Poisson,
    Spin,
)
from ebmpp.contrib import MetropolisCoupling
from ebmpp.errors import DeclarationError, IntractableError
from helpers import assert_law, assert_rows_law, pair, random_params

CHAINS, LAG, SAMPLES = 6000, 2, 6
START = {"a": np.ones(2), "b": np.full(1, 2)}


GRAPH = pair(Bernoulli(2), Categorical(1, 3))
PARAMS = random_params(GRAPH, seed=3, scale=1.5)


@pytest.fixture(scope="module")
def chain():
    """The transition matrix of one chain and of a pair."""
    return Chain(GRAPH, PARAMS)


def run(num_samples, num_chains=CHAINS, clamped=None, method="vectorized", **options):
    free = START.keys() - (clamped or {}).keys()
    init = {b: np.broadcast_to(START[b], (num_chains, *START[b].shape)) for b in free}
    # fmt: skip
    return run_mcmc(
        MetropolisCoupling(GRAPH, **options),
        PARAMS,
        num_samples=num_samples,
        num_chains=num_chains,
        key=3,
        clamped=clamped,
        init_params=init if num_chains == CHAINS else None,
        chain_method=method,
        extra_fields=("y", "met", "meeting_time"),
    )


@pytest.fixture(scope="module")
def pairs():
    return run(SAMPLES, lag=LAG)


@pytest.mark.nightly
def test_pairs_meet_and_stay_together(pairs):
    z, extra = samples(pairs), fields(pairs)
    equal = np.all([(z[b] == extra["y"][b]).all(-1) for b in z], axis=0)
    np.testing.assert_array_equal(equal, extra["met"])
    assert (np.diff(extra["met"].astype(int), axis=1) >= 0).all()
    # categories have no order: they differ or not
    distance = np.abs(z["a"] - extra["y"]["a"]).sum(-1) + (
        z["b"] != extra["y"]["b"]
    ).sum(-1)
    np.testing.assert_array_equal(extra["distance"], distance)
    met_at = LAG + 1 + extra["met"].argmax(1)
    seen = extra["met"][:, -1] & ~extra["met"][:, 0]
    np.testing.assert_array_equal(extra["meeting_time"][seen, -1], met_at[seen])


def test_both_chains_have_the_distribution_of_a_metropolis_chain(pairs, chain):
    start, z, y = chain.at(**START), samples(pairs), fields(pairs)["y"]
    for i in range(SAMPLES):
        for drawn, sweeps in ((z, LAG + 1 + i), (y, 1 + i)):
            exact = chain.law(start, sweeps)
            chain.assert_law(
                {b: v[:, i] for b, v in drawn.items()}, exact, 2 * SAMPLES * len(start)
            )
    # a chain that was stationary at once would fail
    assert 0.5 * np.abs(chain.law(start, 1) - chain.target).sum() > 0.2


def test_pairs_meet_as_often_as_the_enumerated_pair(pairs, chain):
    joint = chain.pairs(chain.at(**START), LAG, SAMPLES + 1)[1:]
    exact = joint.trace(axis1=1, axis2=2)
    assert 0.1 < exact[0] < exact[-1] < 0.99
    assert_law(
        fields(pairs)["met"].mean(0), exact, np.sqrt(exact * (1 - exact) / CHAINS)
    )


def test_acceptance_counts_match_exact_rates(pairs, chain):
    rates = [
        chain.law(chain.at(**START), t) @ chain.accept for t in range(LAG + SAMPLES)
    ]
    # the following chain is LAG sweeps behind
    exact = (sum(rates) + sum(rates[:SAMPLES])) / (LAG + 2 * SAMPLES)
    assert_rows_law(pairs.last_state.acceptance, exact)
    message = pairs.sampler.get_diagnostics_str(pairs.last_state)
    assert float(message.split("acceptance ")[1]) == pytest.approx(exact, rel=0.04)


@pytest.mark.parametrize(
    ("families", "options", "error", "message"),
    [
        (None, {"proposal": "gaussian"}, ValueError, "proposal.*'gaussian'"),
        (None, {"lag": 0}, ValueError, "lag.*0"),
        (None, {"init": "mode"}, ValueError, "init.*'mode'"),
        (None, {"marginalize": ("h1", "w")}, ValueError, "marginalize.*'w'"),
        (None, {"marginalize": ("v", "h1", "h2")}, ValueError, "at least one"),
        (
            None,
            {"marginalize": ("h1", "h2")},
            IntractableError,
            "'h1' and 'h2' interact",
        ),
        ((Gaussian(2), Spin(2)), {}, DeclarationError, "'a' .*Gaussian"),
        ((Spin(2), Poisson(2)), {}, DeclarationError, "'b' .*Poisson"),
        ((Binomial(2, 3), Spin(2)), {}, DeclarationError, "'a' .*Binomial"),
    ],
)
def test_wrong_options_are_refused(families, options, error, message):
    graph = zoo.graph("deep") if families is None else pair(*families)
    with pytest.raises(error, match=message):
        MetropolisCoupling(graph, **options)


def test_kernels_equal_what_their_repr_says():
    deep = zoo.graph("deep")
    for kernel in (
        MetropolisCoupling(
            deep, proposal="initial", lag=3, marginalize=("v", "h2"), init="local_mode"
        ),
        MetropolisCoupling(deep, marginalize="h1"),
        MaximalCoupling(deep, lag=2, coupling=["common", "maximal"], init="local_mode"),
    ):
        for copied in (
            eval(repr(kernel), vars(ebmpp) | vars(ebmpp.contrib)),
            pickle.loads(pickle.dumps(kernel)),
        ):
            assert type(copied) is type(kernel) and vars(copied) == vars(kernel)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (
            {"clamped": {"a": np.array([1.0, 0.0])}},
            {"among": lambda x: (x["a"] == [1, 0]).all()},
        ),
        ({"marginalize": "a"}, {"summed": ("a",)}),
        ({"marginalize": "b"}, {"summed": ("b",)}),
    ],
    ids=["clamped", "without a", "without b"],
)
def test_clamped_and_summed_out_blocks_have_their_conditionals(options, kind):
    chain = Chain(GRAPH, PARAMS, **kind)
    np.testing.assert_allclose(chain.target @ chain.step, chain.target)
    start = chain.at(
        **{b: v for b, v in START.items() if b not in options.get("clamped", {})}
    )
    mcmc = run(2, **options)
    for i in range(2):
        for drawn, sweeps in ((samples(mcmc), 2 + i), (fields(mcmc)["y"], 1 + i)):
            rows = {b: v[:, i] for b, v in drawn.items()}
            chain.assert_law(rows, chain.law(start, sweeps), 8 * len(start))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("method", [m for m in METHODS if m != "vectorized"])
def test_chain_methods_agree_and_rows_keep_their_observed_units(method):
    values = np.array([[1.0, 0.0], [0.0, np.nan], [np.nan, 1.0], [1.0, 0.0]])
    known = ~np.isnan(values)
    first, second = (
        run(40, 2, {"a": Observed(values, known)}, m) for m in ("vectorized", method)
    )
    assert_same(samples(second), samples(first))
    assert_same(fields(second), fields(first))
    assert first.last_state.met.shape == (2, 4) and first.last_state.met.all()
    draws = samples(first)
    assert (draws["a"][..., known] == values[known]).all()
    assert set(draws["a"][..., ~known].ravel()) == {0.0, 1.0}
    # rows of one value have their own keys
    assert (draws["b"][:, :, 0] != draws["b"][:, :, 3]).any()


@pytest.mark.nightly
def test_proposals_from_the_initial_distribution_reach_any_family():
    kernel = MetropolisCoupling(pair(Gaussian(2), Spin(2)), proposal="initial")
    # under these params the model is the distribution of the proposals, so nothing is
    # rejected
    params = {"a": np.zeros(2), "b": np.zeros(2), "a:b": np.zeros((2, 2))}
    keys = jax.random.split(zoo.KEY, 500)
    state = jax.jit(lambda keys: kernel.init(keys, 0, None, (params,), {}))(keys)
    assert (state.acceptance == 1).all() and not state.met.any()
    both = np.stack([state.z["a"], state.y["a"]])
    assert_rows_law(both[0] * both[1], np.zeros(2))
    assert_rows_law(both.swapaxes(0, 1) ** 2, np.ones((2, 2)))
