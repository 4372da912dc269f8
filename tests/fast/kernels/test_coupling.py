# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled chains inside NumPyro."""

import pickle

import numpy as np
from numpyro.infer import MCMC
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.core import random
from ebmpp.moves import gibbs
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from ebmpp.sampling.accumulators import EnergyGradient
from ebmpp.sampling.engine import Window, run_pairs
from helpers import slow

RBM = ebmpp.layered(v=ebmpp.Bernoulli(5), h=ebmpp.Bernoulli(3))
PARAMS = jax.tree.map(
    lambda a: jax.random.normal(jax.random.key(a.size), a.shape), RBM.init(jax.random.key(0))
)


def run(kernel: object, chains: int, samples: int, method: str = "vectorized", **clamped: object) -> MCMC:
    """Pairs from the same key."""
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=samples,
        num_chains=chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(3), PARAMS, extra_fields=("y", "met", "meeting_time"), **clamped)
    return mcmc


@pytest.fixture(scope="module")
def pairs() -> MCMC:
    return run(ebmpp.MaximalCoupling(RBM, lag=2), 2000, 25)


def test_once_met_always_met(pairs: MCMC) -> None:
    z, extra = pairs.get_samples(group_by_chain=True), pairs.get_extra_fields(group_by_chain=True)
    equal = np.all([np.asarray(z[b] == extra["y"][b]).all(-1) for b in z], axis=0)
    met = np.asarray(extra["met"])
    assert (equal == met).all()
    assert (np.diff(met.astype(int), axis=1) >= 0).all()
    assert met[:, -1].mean() > 0.95


def test_each_chain_has_the_law_of_gibbs(pairs: MCMC) -> None:
    exact = np.asarray(ebmpp.exact.moments(RBM, PARAMS)["v"])
    last = {"z": pairs.last_state.z["v"], "y": pairs.last_state.y["v"]}
    for v in last.values():
        v = np.asarray(v)
        z = (v.mean(0) - exact) / np.sqrt(exact * (1 - exact) / len(v))
        assert np.abs(z).max() < stats.norm.isf(1e-4 / (2 * 2 * len(z)))


def test_meeting_times_reach_arviz(pairs: MCMC) -> None:
    tree = ebmpp.to_datatree(pairs)
    meeting = tree["meeting"]
    assert int(meeting["lag"]) == 2
    assert (meeting["meeting_time"].values == np.asarray(pairs.last_state.meeting_time)).all()
    extra = np.asarray(pairs.get_extra_fields(group_by_chain=True)["met"])
    first = 2 + 1 + extra.argmax(1)  # the first kept draw is at t = lag + 1
    met_later = extra[:, -1] & ~extra[:, 0]
    assert (meeting["meeting_time"].values[met_later] == first[met_later]).all()
    bound = ebmpp.tv_upper_bound(tree, num_bootstrap=20)
    assert float(bound.bound[0]) > float(bound.bound[-1]) == 0 or not bool(meeting["met"].all())


@pytest.mark.slow
def test_kernel_and_engine_meet_at_the_same_times() -> None:
    chains = 50
    mcmc = run(ebmpp.MaximalCoupling(RBM), chains, 60)
    keys = jax.random.split(jax.random.key(3), chains)
    rows = random.fold_in(random.key_pair(keys), 0, 0)
    start = gibbs.initial_rows(RBM, RBM.families, rows)
    window = Window(*(jnp.int32(n) for n in (1, 1, 1, 0)))
    engine = run_pairs(
        Target(RBM, PARAMS), resolve_moves(RBM, None), EnergyGradient(), 16, start, start,
        random.key_pair(jax.random.key(0)), window,
    )  # fmt: skip
    ours, theirs = np.asarray(mcmc.last_state.meeting_time), np.asarray(engine.meeting_time)
    assert mcmc.last_state.met.all()
    # other keys, the same law: a two-sample test at a level that a wrong clock would not survive
    assert stats.ks_2samp(ours, theirs).pvalue > 1e-4


# NumPyro donates its collection of scalars and cannot always use it under a vmap of its own
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("method", [*(slow(m) for m in ("sequential", jax.vmap)), "parallel"])
def test_chain_methods_agree_bitwise(method: object) -> None:
    kernel = ebmpp.MaximalCoupling(RBM, coupling="maximal")
    wanted = run(kernel, 2, 8).get_samples()
    given = run(kernel, 2, 8, method).get_samples()
    assert all((wanted[b] == given[b]).all() for b in wanted)


@pytest.mark.slow
def test_gaussian_visibles_meet_in_equal_bits() -> None:
    graph = ebmpp.layered(v=ebmpp.Gaussian(3, "learned"), h=ebmpp.Bernoulli(2))
    params = graph.init(jax.random.key(0)) | {"v:h": jnp.ones((3, 2))}
    mcmc = MCMC(
        ebmpp.MaximalCoupling(graph),
        num_warmup=0,
        num_samples=60,
        num_chains=100,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), params)
    state = mcmc.last_state
    assert state.met.all()
    assert (state.z["v"] == state.y["v"]).all()
    assert np.unique(np.asarray(state.meeting_time)).size > 1


@pytest.mark.slow
def test_clamped_rows_meet_row_by_row() -> None:
    mcmc = run(ebmpp.MaximalCoupling(RBM), 3, 20, v=jnp.ones((4, 5)))
    assert mcmc.last_state.met.shape == (3, 4)
    assert mcmc.last_state.met.all()


def test_kernel_says_what_it_does() -> None:
    kernel = ebmpp.MaximalCoupling(RBM, lag=3, coupling=("maximal", "common"))
    again = pickle.loads(pickle.dumps(kernel))
    assert repr(again) == repr(kernel)
    mcmc = run(again, 4, 40)
    told = again.get_diagnostics_str(mcmc.last_state)
    assert told.startswith("4 of 4 pairs met, mean meeting time")
    with pytest.raises(ValueError, match="lag is an int of at least 1, not 0"):
        ebmpp.MaximalCoupling(RBM, lag=0)
    with pytest.raises(ValueError, match="coupling 'best' is unknown"):
        ebmpp.MaximalCoupling(RBM, coupling="best")
