# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""MetropolisCoupling inside NumPyro, against enumerated chains."""

import pickle

from mcmc_tools import fields, run_mcmc, samples
from metropolis_tools import Chain
import numpy as np
import pytest
import zoo

import ebmpp
from ebmpp import Bernoulli, Binomial, Categorical, Gaussian, MaximalCoupling, Poisson, Spin
from ebmpp.contrib import MetropolisCoupling
from ebmpp.errors import DeclarationError, IntractableError
from helpers import assert_law, assert_rows_law, pair, random_params

CHAINS, LAG, SAMPLES = 20_000, 2, 6
START = {"a": np.ones(2), "b": np.full(1, 2)}


@pytest.fixture(scope="module")
def chain():
    """The transition matrix of one chain and of a pair."""
    graph = pair(Bernoulli(2), Categorical(1, 3))
    return Chain(graph, random_params(graph, seed=3, scale=1.5))


@pytest.fixture(scope="module")
def pairs():
    graph = pair(Bernoulli(2), Categorical(1, 3))
    return run_mcmc(
        MetropolisCoupling(graph, lag=LAG), random_params(graph, seed=3, scale=1.5), key=3, num_chains=CHAINS,
        num_samples=SAMPLES, extra_fields=("y", "met", "meeting_time"),
        init_params={b: np.broadcast_to(v, (CHAINS, *v.shape)) for b, v in START.items()},
    )  # fmt: skip


def test_pairs_meet_and_stay_together(pairs):
    z, extra = samples(pairs), fields(pairs)
    equal = np.all([(z[b] == extra["y"][b]).all(-1) for b in z], axis=0)
    np.testing.assert_array_equal(equal, extra["met"])
    assert (np.diff(extra["met"].astype(int), axis=1) >= 0).all()
    # categories have no order: they differ or not
    distance = np.abs(z["a"] - extra["y"]["a"]).sum(-1) + (z["b"] != extra["y"]["b"]).sum(-1)
    np.testing.assert_array_equal(extra["distance"], distance)
    met_at = LAG + 1 + extra["met"].argmax(1)
    seen = extra["met"][:, -1] & ~extra["met"][:, 0]
    np.testing.assert_array_equal(extra["meeting_time"][seen, -1], met_at[seen])


def test_both_chains_have_the_distribution_of_a_metropolis_chain(pairs, chain):
    start, z, y = chain.at(**START), samples(pairs), fields(pairs)["y"]
    for i in range(SAMPLES):
        for drawn, sweeps in ((z, LAG + 1 + i), (y, 1 + i)):
            exact = chain.law(start, sweeps)
            chain.assert_law({b: v[:, i] for b, v in drawn.items()}, exact, 2 * SAMPLES * len(start))
    # a chain that was stationary at once would fail
    assert 0.5 * np.abs(chain.law(start, 1) - chain.target).sum() > 0.2


def test_pairs_meet_as_often_as_the_enumerated_pair(pairs, chain):
    joint = chain.pairs(chain.at(**START), LAG, SAMPLES + 1)[1:]
    exact = joint.trace(axis1=1, axis2=2)
    assert 0.1 < exact[0] < exact[-1] < 0.99
    assert_law(fields(pairs)["met"].mean(0), exact, np.sqrt(exact * (1 - exact) / CHAINS))


def test_acceptance_counts_match_exact_rates(pairs, chain):
    rates = [chain.law(chain.at(**START), t) @ chain.accept for t in range(LAG + SAMPLES)]
    exact = sum(rates) + sum(rates[:SAMPLES])  # the following chain is LAG sweeps behind
    assert_rows_law(pairs.last_state.accepted, exact)
    message = pairs.sampler.get_diagnostics_str(pairs.last_state)
    assert float(message.split("acceptance ")[1]) == pytest.approx(exact / (LAG + 2 * SAMPLES), rel=0.04)


@pytest.mark.parametrize(
    ("families", "options", "error", "message"),
    [
        (None, {"proposal": "gaussian"}, ValueError, "proposal.*'gaussian'"),
        (None, {"lag": 0}, ValueError, "lag.*0"),
        (None, {"init": "mode"}, ValueError, "init.*'mode'"),
        (None, {"marginalize": ("h1", "w")}, ValueError, "marginalize.*'w'"),
        (None, {"marginalize": ("v", "h1", "h2")}, ValueError, "at least one"),
        (None, {"marginalize": ("h1", "h2")}, IntractableError, "'h1' and 'h2' interact"),
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
        MetropolisCoupling(deep, proposal="initial", lag=3, marginalize=("v", "h2"), init="local_mode"),
        MetropolisCoupling(deep, marginalize="h1"),
        MaximalCoupling(deep, lag=2, coupling=["common", "maximal"], init="local_mode"),
    ):
        for copied in (
            eval(repr(kernel), vars(ebmpp) | vars(ebmpp.contrib)),
            pickle.loads(pickle.dumps(kernel)),
        ):
            assert type(copied) is type(kernel) and vars(copied) == vars(kernel)
