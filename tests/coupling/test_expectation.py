# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased expectations against enumeration, starts, clamped blocks, unmet pairs and arguments.

Tests coupling/expectation.py.
"""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import numpyro.distributions as dist
from pair_tools import graph_of, params_of
import pytest
from ucd_tools import exact_means, flat, problem, two_modes
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, FactorGraph, Spin, layered
from ebmpp.contrib import metropolis_sweep
from ebmpp.coupling import accumulators
from ebmpp.coupling.expectation import UnbiasedEstimate
from ebmpp.errors import ArgumentError, StateError, UnmetError
from ebmpp.ppl import Conjugate, CoupledComposite, composite_expectation
from helpers import assert_law, random_params

PAIRS = 2000
WINDOWS = [(0, 0, 1), (2, 6, 3), (5, 5, 5)]


def statistics(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"h": x["h"], "v": x["v"], "v:h": jnp.outer(x["v"], x["h"])}


def estimate(seed: int = 1, **options: Any) -> UnbiasedEstimate:
    graph, params, _ = problem("rbm")
    options = {"rng_key": jax.random.key(seed), "num_pairs": PAIRS, **options}
    return ebmpp.unbiased_expectation(graph, params, statistics, **options)


def exact() -> np.ndarray:
    joint = zoo.Oracle(*problem("rbm")[:2], {})
    weights = np.exp(joint.log_weights - joint.log_z)
    both = np.einsum("s,si,sj->ij", weights, joint.x["v"], joint.x["h"])
    return flat({"h": weights @ joint.x["h"], "v": weights @ joint.x["v"], "v:h": both})


@pytest.mark.parametrize(("k", "m", "lag"), WINDOWS)
def test_estimates_are_unbiased(k: int, m: int, lag: int) -> None:
    result = estimate(k=k, m=m, lag=lag)
    assert_law(
        flat(result.value),
        exact(),
        flat(result.standard_error),
        exact().size * len(WINDOWS),
    )
    assert result.met.all() and result.meeting_time.max() > lag + 1
    assert (
        result.cost == np.maximum(m, result.meeting_time) + result.meeting_time - lag
    ).all()


@pytest.mark.nightly
def test_standard_errors_match_the_spread_of_estimates() -> None:
    results = [estimate(seed, k=0, m=2) for seed in range(30)]
    spread = np.std([flat(r.value) for r in results], axis=0, ddof=1)
    errors = np.mean([flat(r.standard_error) for r in results], axis=0)
    assert (np.abs(np.log(spread / errors)) < 0.45).all()  # 0.13 is one standard error


def test_starts_are_used_and_checked() -> None:
    ones = {"v": jnp.ones(4)}
    first = estimate(init=lambda key: ones)
    rows = {"v": np.ones((PAIRS, 4), np.float32)}
    np.testing.assert_array_equal(first.meeting_time, estimate(init=rows).meeting_time)
    assert (first.meeting_time != estimate().meeting_time).any()
    for init, message in (
        ({"v": jnp.full(4, 2.0)}, "block 'v'.*0, 1"),
        ({"v": jnp.ones((5, 4))}, r"\(2000,\).*\(5,\)"),
        ({"w": jnp.ones(4)}, "'w'"),
        (3, "dict.*3"),
    ):
        with pytest.raises(StateError, match=message):
            estimate(init=init)


#: "k", "fn" and "init" are arguments of unbiased_expectation
NAMES = ("k", "init")


@pytest.mark.nightly
def test_clamped_blocks_give_posterior_expectations() -> None:
    graph = FactorGraph(
        {"k": Bernoulli(2), "init": Bernoulli(2)},
        {"fn": Bernoulli(2)},
        [*map(Bias, (*NAMES, "fn")), *(Bilinear(name, "fn") for name in NAMES)],
    )
    params, clamped = random_params(graph, 1, scale=2.0), {"k": np.float32([1, 0])}
    posterior = zoo.Oracle(graph, params, clamped)
    weights = np.exp(posterior.log_weights - posterior.log_z)
    result = ebmpp.unbiased_expectation(
        graph,
        params,
        lambda x: x["fn"],
        rng_key=zoo.KEY,
        num_pairs=PAIRS,
        clamped=clamped,
    )
    assert result.meeting_time.max() > 1
    assert_law(result.value, weights @ posterior.x["fn"], result.standard_error)
    search = ebmpp.local_search(graph, params, rng_key=zoo.KEY, clamped=clamped)
    assert search.state["k"].tolist() == [1, 0]
    run = lambda **options: ebmpp.local_search(
        graph, params, rng_key=zoo.KEY, **options
    )
    for options, message in (
        ({"k": clamped["k"], "clamped": clamped}, "clamped .*'k'"),
        ({"clamped": 3}, "clamped .*3"),
        ({"clamped": {"z": clamped["k"]}}, "'z'"),
    ):
        with pytest.raises(StateError, match=message):
            run(**options)
    with pytest.raises(StateError, match="clamped"):
        estimate(v=jnp.ones(4), h=jnp.ones(3))


def test_unmet_pairs_raise_or_are_dropped_with_a_warning() -> None:
    with pytest.raises(UnmetError, match="of 2000 pairs .*max_sweeps"):
        estimate(max_sweeps=2)
    with pytest.warns(UserWarning, match="biased"):
        result = estimate(k=1, max_sweeps=2, unmet="drop")
    free = estimate(k=1)
    assert result.num_unmet == (~result.met).sum() == (free.meeting_time > 2).sum() > 0
    assert (
        np.isinf(result.meeting_time[~result.met]).all()
        and np.isinf(result.cost[~result.met]).all()
    )
    np.testing.assert_array_equal(
        result.meeting_time[result.met], free.meeting_time[result.met]
    )
    assert result.late == free.late  # unmet pairs are late
    # means of the pairs that met alone
    early = (free.meeting_time <= 2).mean()
    assert 0.1 < early < 0.95
    assert (
        np.abs(flat(result.value) - exact()).max()
        > 5 * flat(result.standard_error).min()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pairs": 0}, "num_pairs .*0"),
        ({"k": 3, "m": 2}, "m .*3.*2"),
        ({"lag": 0}, "lag .*0"),
        ({"lag": 3, "max_sweeps": 3}, "max_sweeps .*3"),
        ({"max_sweeps": 2.0}, "max_sweeps .*2.0"),
        ({"unmet": "ignore"}, "unmet .*'ignore'"),
        ({"coupling": "best"}, "'best'"),
        ({"mesh": 8}, "mesh .*Mesh"),
    ],
)
def test_invalid_arguments_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        estimate(**options)


def test_repr_shows_values_and_errors() -> None:
    result = estimate()
    scalar = dataclasses.replace(
        result, value=jnp.float32(0.51234), standard_error=jnp.float32(0.00456)
    )
    assert repr(scalar).startswith(
        "UnbiasedEstimate(0.5123 +- 0.0046; 2000 pairs, 0 unmet, "
    )
    assert repr(result).startswith("UnbiasedEstimate(19 numbers from ")


def estimate_of(
    name: str, fn: Any, seed: int = 1, params: Any = None, **options: Any
) -> UnbiasedEstimate:
    options = {
        "rng_key": jax.random.key(seed),
        "num_pairs": 6000,
        "num_slots": 4,
        **options,
    }
    params = params_of(name) if params is None else params
    return ebmpp.unbiased_expectation(graph_of(name), params, fn, **options)


def units(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return dict(x)


@pytest.mark.nightly
def test_independent_starts_show_modes_that_chains_do_not_leave() -> None:
    graph, params, _ = problem("rbm")
    result = estimate_of(
        "rbm", graph.statistics, params=params, independent_starts=True
    )
    exact = exact_means(graph, params)
    assert_law(flat(result.value), flat(exact), flat(result.standard_error))
    options = {
        "params": two_modes(8.0, 0.0),
        "num_pairs": 1000,
        "max_sweeps": 30,
        "unmet": "drop",
    }
    with pytest.warns(UserWarning, match="overlap z"):
        same = estimate_of("rbm", lambda x: x["v"].sum(), **options)
    assert same.met.all()  # both chains of a pair are in the mode that they started in
    with (
        pytest.warns(UserWarning, match="cut the window"),
        pytest.warns(UserWarning, match="of 1000 pairs did not meet; 8 of them"),
    ):
        separate = estimate_of(
            "rbm", lambda x: x["v"].sum(), independent_starts=True, **options
        )
    assert 300 < (~separate.met).sum() < 700


@pytest.mark.nightly
def test_estimates_without_any_correction_give_a_warning() -> None:
    graph = layered(v=Spin(30), h=Spin(30))
    scheme = {"weight": "orthogonal", "bias": "logistic"}
    params = {n: 2 * a for n, a in graph.init(jax.random.key(3), scheme=scheme).items()}
    options = {
        "rng_key": zoo.KEY,
        "num_pairs": 400,
        "num_slots": 4,
        "init": "local_mode",
    }
    with pytest.warns(UserWarning, match="all 400 pairs met at the first"):
        result = ebmpp.unbiased_expectation(
            graph,
            params,
            lambda x: graph.energy(params, x),
            coupling=metropolis_sweep,
            **options,
        )
    assert (
        result.late == 0
        and result.acceptance < 0.01
        and (result.meeting_time == 1).all()
    )
    # the rule of three, exactly
    assert result.late_upper == pytest.approx(1 - 0.05 ** (1 / 400))
    frozen = {"a": 40 * jnp.ones(2), "b": 40 * jnp.ones(2), "a:b": jnp.zeros((2, 2))}
    ones = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.warns(UserWarning, match="a block is where it started in all chains"):
        result = estimate_of("tiny", units, params=frozen, init=ones)
    assert result.late == 0


def products(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"both": jnp.outer(x["a"], x["b"]), "a": x["a"]}


@pytest.mark.nightly
def test_block_sums_have_the_same_means_and_similar_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"num_pairs": 700, "k": 0, "m": 2}
    by_pair = estimate_of("tiny", lambda x: products(x), **options)
    monkeypatch.setattr(accumulators, "_MAX_VALUES", 1000)
    result = estimate_of("tiny", lambda x: products(x), **options)
    np.testing.assert_array_equal(result.meeting_time, by_pair.meeting_time)
    np.testing.assert_allclose(
        flat(result.value), flat(by_pair.value), rtol=1e-5, atol=1e-6
    )
    ratio = flat(result.standard_error) / flat(by_pair.standard_error)
    assert 0.7 < ratio.min() < ratio.max() < 1.4 and not np.allclose(
        ratio, 1, rtol=1e-4
    )
    with pytest.warns(UserWarning, match="dropped"):
        dropped = estimate_of(
            "tiny", lambda x: jnp.ones(3), max_sweeps=3, unmet="drop", **options
        )
    assert 0 < dropped.num_unmet < 700
    # weights of pairs that met sum to 1
    np.testing.assert_allclose(dropped.value, 1, rtol=1e-6)


@pytest.mark.nightly
def test_a_pair_that_fails_after_it_has_met_is_unmet() -> None:
    unit = dist.Normal(0.0, 1.0)
    broken = lambda s: dist.Normal(0.0, jnp.where(s["a"] > 2, jnp.nan, 1.0))
    kernel = CoupledComposite(
        [Conjugate("a", lambda s: unit, unit), Conjugate("b", broken, unit)]
    )
    run = partial(
        composite_expectation,
        kernel,
        lambda s: s["a"],
        rng_key=zoo.KEY,
        num_pairs=50,
        k=1,
    )
    with pytest.raises(UnmetError, match=r"(\d+) of 50 pairs .*\1 because"):
        run(m=100)
    with pytest.warns(UserWarning, match="biased"):
        result = run(m=20, unmet="drop")
    assert (
        0 < result.num_unmet < 50 and np.isinf(result.meeting_time[~result.met]).all()
    )


def particle_estimate(**options: Any) -> UnbiasedEstimate:
    options = {"rng_key": zoo.KEY, "num_particles": 2, "ladder": [0, 1], **options}
    return ebmpp.particle_expectation(
        zoo.graph("rbm"), two_modes(), lambda x: x["v"], **options
    )


@pytest.mark.nightly
def test_unmet_and_long_pairs_of_systems_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnmetError, match="of 60 pairs .* 3 systems"):
        particle_estimate(num_pairs=60, max_systems=3)
    with pytest.warns(UserWarning, match="biased"):
        result = particle_estimate(num_pairs=60, max_systems=3, unmet="drop")
    assert result.num_unmet == (~result.met).sum() > 0
    monkeypatch.setattr(ebmpp.annealing.particle_pairs, "LONG_STAY", 3)
    with pytest.warns(UserWarning, match="heavy"):
        long = particle_estimate(num_pairs=60)
    first = particle_estimate(num_pairs=1, m=0)
    assert first.meeting_time[0] == long.meeting_time[0] and long.meeting_time.max() > 3
