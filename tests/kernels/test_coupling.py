# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""MaximalCoupling: meetings, the distribution of both chains, chain methods.

Tests kernels/coupling.py.
"""

import pickle

from mcmc_tools import TWO_MODES, assert_same, fields, run_mcmc, samples, strong_params
from metropolis_tools import Law
import numpy as np
import pytest
import zoo

import ebmpp
from ebmpp import MaximalCoupling, Observed
from ebmpp.coupling import mixture_pool
from ebmpp.errors import ArgumentError, StateError
from ebmpp.moves import mixture_sweep

LAG, CHAINS, SAMPLES = 5, 2000, 40


@pytest.fixture(scope="module")
def model():
    return Law(zoo.graph("rbm"), TWO_MODES)


@pytest.fixture(scope="module")
def pairs(model):
    """Pairs that start in the distribution of the model."""
    index = np.random.default_rng(0).choice(len(model.states), CHAINS, p=model.target)
    init = {b: np.array([model.states[i][b] for i in index]) for b in ("v", "h")}
    # fmt: skip
    return run_mcmc(
        MaximalCoupling(zoo.graph("rbm"), lag=LAG),
        TWO_MODES,
        key=3,
        init_params=init,
        num_chains=CHAINS,
        num_samples=SAMPLES,
        extra_fields=("y", "met", "meeting_time"),
    )


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


@pytest.mark.parametrize("sweep", [0, 1, 3])
def test_both_chains_keep_the_distribution_of_the_model_while_they_differ(
    pairs, model, sweep
):
    for chain in (samples(pairs), fields(pairs)["y"]):
        drawn = {b: chain[b][:, sweep] for b in ("v", "h")}
        model.assert_law(drawn, model.target, 6 * len(model.states))


# NumPyro donates its collection of scalars and cannot always use it under vmap
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("coupling", "method"),
    [("common", "sequential"), ("common", "parallel"), ("mixture", "sequential")],
)
def test_chain_methods_give_the_same_draws(coupling, method):
    kernel = MaximalCoupling(zoo.graph("rbm"), coupling=coupling)
    options = {"num_chains": 2, "extra_fields": ("y", "met", "meeting_time")}
    if coupling == "mixture":
        pool = mixture_pool(
            zoo.graph("rbm"), strong_params(), zoo.rows("rbm"), rng_key=zoo.KEY
        )
        options["clamped"] = {"pool": pool}
    runs = (
        run_mcmc(kernel, strong_params(), chain_method=m, **options)
        for m in ("vectorized", method)
    )
    assert_same(*({**samples(mcmc), **fields(mcmc)} for mcmc in runs))


@pytest.mark.nightly
def test_kernel_describes_itself_and_refuses_wrong_options():
    kernel = MaximalCoupling(zoo.graph("rbm"), lag=3, coupling=("maximal", "common"))
    assert repr(pickle.loads(pickle.dumps(kernel))) == repr(kernel)
    state = kernel.init(zoo.KEY, 0, None, (strong_params(),), {})
    text = kernel.get_diagnostics_str(state)
    assert text.startswith("0 of 1 pairs met, others differ in")
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


@pytest.mark.nightly
def test_mixture_proposals_keep_the_distribution_and_pairs_meet():
    graph, params = zoo.graph("rbm"), strong_params()
    pool = mixture_pool(graph, params, zoo.rows("rbm"), rng_key=zoo.KEY)
    kernel = MaximalCoupling(graph, coupling="mixture")
    state = run_mcmc(
        kernel, params, num_chains=4000, num_samples=20, clamped={"pool": pool}
    ).last_state
    model = Law(graph, params)
    model.assert_law(
        {b: np.asarray(z) for b, z in state.z.items()}, model.target, len(model.states)
    )
    assert state.met.mean() > 0.99
    assert 0.2 < state.acceptance.mean() < 1
    assert kernel.get_diagnostics_str(state).endswith(f"{state.acceptance.mean():.2g}")


@pytest.mark.nightly
def test_pairs_given_observed_units_meet_and_have_the_exact_distribution():
    graph, params = zoo.graph("rbm"), strong_params()
    known = np.array([[True, False, True, False], [False] * 4, [True] * 4])
    observed = Observed(np.where(known, [1.0, 0.0, 0.0, 1.0], np.nan), known)
    options = {"num_samples": 30, "num_chains": 3000, "extra_fields": ("y", "met")}
    mcmc = run_mcmc(
        MaximalCoupling(graph, lag=2), params, clamped={"v": observed}, **options
    )
    met = fields(mcmc)["met"]
    assert met[:, -1].all() and not met[:, 0, :2].all()
    for chain in (mcmc.last_state.z, mcmc.last_state.y):
        assert ((chain["v"] == observed.values) | ~known).all()
        for row in range(3):
            values, mask = np.array([1.0, 0.0, 0.0, 1.0]), known[row]
            model = Law(
                graph, params, lambda x, v=values, m=mask: (x["v"] == v)[m].all()
            )
            drawn = {b: np.asarray(chain[b])[:, row] for b in ("v", "h")}
            model.assert_law(drawn, model.target, 2 * 3 * 128)
