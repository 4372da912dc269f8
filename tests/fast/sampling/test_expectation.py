# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased estimates against enumeration, and what they say of themselves."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.errors import StateError, UnmetError
from ebmpp.sampling.engine import run_pairs

DBM = ebmpp.layered(v=ebmpp.Bernoulli(3), h1=ebmpp.Spin(2), h2=ebmpp.Categorical(2, 3))
PARAMS = jax.tree.map(
    lambda a: 0.8 * jax.random.normal(jax.random.key(a.size), a.shape), DBM.init(jax.random.key(0))
)


def everything(x: dict) -> dict:
    """Sufficient statistics of every block."""
    return DBM.statistics(x)


def estimate(**options: object) -> ebmpp.sampling.expectation.UnbiasedEstimate:
    """4000 pairs unless told otherwise."""
    given = {"rng_key": jax.random.key(1), "num_pairs": 4000, **options}
    return ebmpp.unbiased_expectation(DBM, PARAMS, everything, **given)


@pytest.mark.parametrize(("k", "m", "lag"), [(0, 0, 1), (1, 1, 1), (2, 6, 3), (5, 5, 5), (3, 4, 2)])
def test_estimates_are_unbiased(k: int, m: int, lag: int) -> None:
    made = estimate(k=k, m=m, lag=lag)
    exact = ebmpp.exact.moments(DBM, PARAMS)
    z = [(made.value[b] - exact[b]) / made.standard_error[b] for b in exact]
    z = np.concatenate([np.ravel(a) for a in z])
    assert np.abs(z).max() < stats.norm.isf(1e-4 / (2 * 5 * len(z)))
    assert made.met.all()
    assert (made.cost == np.maximum(m, made.meeting_time) + made.meeting_time - lag).all()


@pytest.mark.slow
def test_chains_that_start_apart_estimate_the_same_and_show_that_modes_are_not_left() -> None:
    made = estimate(k=1, lag=1, independent_starts=True)
    exact = ebmpp.exact.moments(DBM, PARAMS)
    z = np.concatenate([np.ravel((made.value[b] - exact[b]) / made.standard_error[b]) for b in exact])
    assert np.abs(z).max() < stats.norm.isf(1e-4 / (2 * len(z)))
    weight = jnp.full((9, 3), 9.0)  # all units on, or all off
    magnet = {"v:h": weight, "v": -0.5 * weight.sum(1), "h": -0.5 * weight.sum(0)}
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(3))
    options = {"rng_key": jax.random.key(5), "num_pairs": 1000, "max_sweeps": 30, "unmet": "drop"}
    ink = lambda x: x["v"].sum()
    together = ebmpp.unbiased_expectation(rbm, magnet, ink, **options)
    assert together.met.all()  # both chains of a pair are in the mode that they started in
    with pytest.warns(UserWarning, match="of 1000 pairs had not met and were dropped"):
        apart = ebmpp.unbiased_expectation(rbm, magnet, ink, independent_starts=True, **options)
    assert 400 < (~apart.met).sum() < 600  # two modes of equal weight, which chains do not leave


@pytest.mark.slow
def test_a_clamped_block_gives_posterior_expectations() -> None:
    v = jnp.array([1.0, 0.0, 1.0])
    made = ebmpp.unbiased_expectation(
        DBM, PARAMS, lambda x: x["h1"], rng_key=jax.random.key(4), num_pairs=4000, v=v
    )
    states, weights = ebmpp.exact.probabilities(DBM, PARAMS)
    here = weights * (states["v"] == v).all(1)
    exact = (here[:, None] * states["h1"]).sum(0) / here.sum()
    z = np.asarray((made.value - exact) / made.standard_error)
    assert np.abs(z).max() < stats.norm.isf(1e-4 / (2 * len(z)))


def test_a_pair_depends_on_its_number_and_not_on_how_many_run() -> None:
    few, many = (estimate(num_pairs=n) for n in (8, 40))
    assert (few.meeting_time == many.meeting_time[:8]).all()


def test_starts_are_used_and_checked() -> None:
    ones = {"v": jnp.ones(3)}
    same = estimate(num_pairs=16, num_slots=4, init=lambda key: ones)
    assert (same.meeting_time == estimate(num_pairs=16, num_slots=4, init=ones).meeting_time).all()
    with pytest.raises(StateError, match=r"block 'v'.*values in \{0, 1\}"):
        estimate(num_pairs=16, num_slots=4, init={"v": jnp.full(3, 2.0)})
    with pytest.raises(StateError, match=r"leading axes \(5,\), expected none or \(16,\)"):
        estimate(num_pairs=16, num_slots=4, init={"v": jnp.ones((5, 3))})
    with pytest.raises(StateError, match="every block is clamped"):
        estimate(num_pairs=16, num_slots=4, v=jnp.ones(3), h1=jnp.ones(2), h2=jnp.zeros(2, int))


def test_unmet_pairs_are_never_averaged_unseen() -> None:
    with pytest.raises(UnmetError, match=r"of 4000 pairs had not met: raise max_sweeps"):
        estimate(max_sweeps=2)
    with pytest.warns(UserWarning, match="were dropped: the estimate is biased"):
        made = estimate(max_sweeps=2, unmet="drop")
    free = estimate()
    assert made.num_unmet == (~made.met).sum() == (free.meeting_time > 2).sum()
    assert np.isinf(made.meeting_time[~made.met]).all()
    assert (made.meeting_time[made.met] == free.meeting_time[made.met]).all()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_pairs": 0}, "num_pairs is an int of at least 1, not 0"),
        ({"k": 3, "m": 2}, "m is an int of at least 3, not 2"),
        ({"lag": 0}, "lag is an int of at least 1"),
        ({"unmet": "ignore"}, "unmet is one of 'raise', 'drop', not 'ignore'"),
        ({"coupling": "best"}, "coupling 'best' is unknown"),
    ],
)
def test_bad_numbers_are_refused(options: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        estimate(**options)


def test_total_variation_bound_is_above_the_truth() -> None:
    made = estimate(lag=4, k=4, init={"v": jnp.ones(3), "h1": jnp.ones(2), "h2": jnp.zeros(2, int)})
    bound = ebmpp.tv_upper_bound(made, t=[0, 1, 2, 3, 4])
    states, weights = ebmpp.exact.probabilities(DBM, PARAMS)
    at_start = (states["v"] == 1).all(1) & (states["h1"] == 1).all(1) & (states["h2"] == 0).all(1)
    assert float(bound.upper[0]) >= 1 - float(weights[np.flatnonzero(at_start)[0]])
    assert (np.diff(bound.bound) <= 0).all()
    assert float(bound.bound[-1]) < 0.5
    assert ((bound.lower <= bound.bound) & (bound.bound <= bound.upper)).all()


def test_censored_pairs_never_lower_the_bound() -> None:
    free = estimate()
    with pytest.warns(UserWarning, match="biased"):
        cut = estimate(max_sweeps=3, unmet="drop")
    tree = ebmpp.to_datatree(cut)
    assert int((~tree["meeting"]["met"]).sum()) == cut.num_unmet > 0
    t = np.arange(6)
    known = ebmpp.tv_upper_bound(free, t=t, num_bootstrap=10).bound.values
    assert (ebmpp.tv_upper_bound(tree, t=t, num_bootstrap=10).bound.values >= known - 1e-12).all()


def test_an_estimate_prints_its_value_and_error() -> None:
    several = estimate(num_pairs=50)
    one = dataclasses.replace(several, value=jnp.float32(0.51234), standard_error=jnp.float32(0.00456))
    assert repr(one).startswith("UnbiasedEstimate(0.5123 +- 0.0046; 50 pairs, 0 unmet, ")
    assert repr(several).startswith(
        "UnbiasedEstimate(11 numbers from "
    ) and "standard errors at most 0." in repr(several)
    few = {b: v[:2] for b, v in several.value.items() if b != "h2"}
    error = {b: v[:2] for b, v in several.standard_error.items() if b != "h2"}
    told = repr(dataclasses.replace(several, value=few, standard_error=error))
    assert f"['v']: [{few['v'][0]:.4g}, {few['v'][1]:.4g}] +- [{error['v'][0]:.2g}, " in told


def test_one_pair_alone_has_no_error() -> None:
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    made = ebmpp.unbiased_expectation(
        rbm, rbm.init(jax.random.key(0)), lambda x: x["v"], rng_key=jax.random.key(1), num_pairs=1
    )
    assert np.isfinite(np.asarray(made.value)).all() and np.isnan(np.asarray(made.standard_error)).all()


def test_programs_of_functions_made_anew_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = ebmpp.layered(v=ebmpp.Bernoulli(2), h=ebmpp.Bernoulli(2))
    params = graph.init(jax.random.key(0))
    monkeypatch.setattr(run_pairs, "_kept", 2)
    run_pairs.clear_cache()
    for power in (1, 2, 3):
        fn = lambda x, power=power: x["v"] ** power
        ebmpp.unbiased_expectation(graph, params, fn, rng_key=jax.random.key(0), num_pairs=4)
        assert len(run_pairs) == run_pairs._cache_size() == min(power, 2)
