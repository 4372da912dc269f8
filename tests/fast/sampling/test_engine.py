# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable
import functools
import importlib.util
import itertools
import math
import threading
from typing import Any

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Categorical, FactorGraph, Gaussian, Poisson, Spin, exact, layered
from ebmpp.core import backend, random
from ebmpp.moves.couplings import resolve
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.layer import gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from ebmpp.sampling import engine, slots
from ebmpp.sampling.accumulators import EnergyGradient, Function
from ebmpp.sampling.engine import Outcome, Window, run_pairs
from helpers import (
    assert_law,
    enumerate_numpy,
    gated,
    numpy_statistics,
    often,
    pair as pair_of,
    random_params,
)

JOBS, BATCHES = 500, 40

MODELS: dict[str, Callable[[], FactorGraph]] = {
    "rbm": lambda: pair_of(Bernoulli(2), Bernoulli(2)),
    "spin": lambda: pair_of(Spin(2), Spin(2)),
    "categorical": lambda: pair_of(Categorical(2, num_categories=3), Bernoulli(2)),
    "gaussian": lambda: pair_of(Gaussian(2), Bernoulli(2)),
    "gaussian_learned": lambda: pair_of(Gaussian(2, variance="learned"), Bernoulli(2)),
    "poisson": lambda: pair_of(Poisson(1), Bernoulli(2)),
    "deep": lambda: layered(v=Bernoulli(2), h1=Bernoulli(2), h2=Bernoulli(2)),
    "gated": lambda: gated((2, 2, 1)),
}
COUPLINGS = (None, "maximal", "maximal_independent", "common")
WINDOWS = [(0, 0, 1), (1, 1, 1), (2, 5, 1), (3, 3, 3), (2, 6, 3), (5, 5, 2)]


@functools.cache
def model(name: str) -> tuple[FactorGraph, dict[str, Any]]:
    """A graph with params strong enough for meeting times above 1."""
    graph = MODELS[name]()
    scale = {"rbm": 2.5, "poisson": 0.5, "gaussian_learned": 0.4}.get(name, 1.2)
    return graph, random_params(graph, seed=4, scale=scale)


@functools.cache
def start(graph: FactorGraph, jobs: int, seed: int = 1) -> dict[str, jax.Array]:
    """Initial draws, far from the model's law."""
    made = initial_rows(graph, graph.families, random.fold_in(key(seed), jnp.arange(jobs)))
    binary = {b: isinstance(f, Bernoulli) for b, f in graph.families.items()}
    return {b: jnp.ones_like(v) if binary[b] else v for b, v in made.items()}


def key(seed: int) -> jax.Array:
    return random.key_pair(jax.random.key(seed))


def run(
    graph: FactorGraph,
    params: Any,
    seed: int = 0,
    window: tuple[int, int, int] = (1, 1, 1),
    coupling: str | None = None,
    jobs: int = JOBS,
    num_slots: int = 16,
    max_sweeps: int = 0,
    accumulator: Any = EnergyGradient(),
    x: dict[str, jax.Array] | None = None,
) -> Outcome:
    """All pairs from x = y."""
    x = start(graph, jobs) if x is None else x
    window = Window(*(jnp.int32(n) for n in (*window, max_sweeps)))
    moves = resolve_moves(graph, coupling)
    return run_pairs(Target(graph, params), moves, accumulator, num_slots, x, x, key(seed), window)


def expected_gradient(graph: FactorGraph, params: Any) -> dict[str, np.ndarray]:
    """E[dE/dparams]: by enumeration in numpy, or from the exact log Z where units are real."""
    if any(isinstance(f, Gaussian) for f in graph.families.values()):
        return jax.tree.map(
            lambda g: -np.asarray(g), jax.grad(lambda p: exact.log_partition(graph, p))(params)
        )
    states, probs, _ = enumerate_numpy(graph, params, most=30)
    made = {factor.name: np.zeros(params[factor.name].shape) for factor in graph.factors}
    for x, p in zip(states, probs, strict=True):
        for factor in graph.factors:
            ts = [numpy_statistics(graph.families[b], x[b]) for b in factor.blocks]
            made[factor.name] -= p * functools.reduce(np.multiply.outer, ts)
    return made


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, float).ravel() for leaf in jax.tree.leaves(tree)])


def assert_unbiased(name: str, coupling: str | None, windows: list[tuple[int, int, int]]) -> None:
    graph, params = model(name)
    wanted = flat(expected_gradient(graph, params))
    for window in windows:
        k, m, _ = window
        means, taus = [], []
        for seed in range(BATCHES):
            made = run(graph, params, seed, window, coupling)
            means.append(flat(made.total) / (JOBS * (m - k + 1)))
            taus.append(made.meeting_time)
        assert (np.stack(taus) >= window[2]).all()
        assert np.max(taus) > window[2] + 1  # there was something to correct
        means = np.stack(means)
        error = means.std(0, ddof=1) / math.sqrt(BATCHES)
        # Student's t of 39 degrees of freedom: its tails at 1e-4 are those of a normal 15 % wider
        assert_law(means.mean(0), wanted, 1.15 * error, wanted.size * len(windows))


@pytest.mark.parametrize("coupling", often(COUPLINGS, None))
def test_total_is_unbiased_for_every_window(coupling: str | None) -> None:
    assert_unbiased("rbm", coupling, WINDOWS if coupling is None else WINDOWS[1:4])


@pytest.mark.parametrize("name", often([n for n in MODELS if n != "rbm"], "categorical"))
def test_total_is_unbiased_for_every_family_and_graph(name: str) -> None:
    assert_unbiased(name, None, [(1, 1, 1), (2, 6, 3)])


def test_three_colours_and_deep_graphs_have_the_layers_they_are_here_for() -> None:
    assert [len(model(name)[0].layers) for name in ("rbm", "deep", "gated")] == [2, 2, 3]


def test_an_uncorrected_chain_would_fail() -> None:
    # one sweep from the start is far from the model's law, so the tests above have power
    graph, params = model("rbm")
    gradient = expected_gradient(graph, params)
    wanted = np.concatenate([gradient["a"], gradient["b"]])
    pairs = random.fold_in(key(0), jnp.arange(JOBS))
    x = draw_sweep(Target(graph, params), start(graph, JOBS), gibbs_sweep(graph), pairs)[0]
    after = np.concatenate([x["a"], x["b"]], -1).mean(0)
    assert np.abs(after + wanted).max() > 0.1


# -- meeting times against the pair chain, solved exactly ----------------------------------------


def crn_table(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Joint law of two vectors of bits drawn from the same uniforms, unit by unit."""
    units = []
    for a, b in zip(p, q, strict=True):
        units.append([[1 - max(a, b), max(b - a, 0)], [max(a - b, 0), min(a, b)]])
    size = 2 ** len(p)
    made = np.zeros((size, size))
    all_bits = list(itertools.product((0, 1), repeat=len(p)))
    for i, left in enumerate(all_bits):
        for j, right in enumerate(all_bits):
            made[i, j] = math.prod(u[c][d] for u, c, d in zip(units, left, right, strict=True))
    return made


def joint_table(kind: str, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Joint law of a coupled layer whose units are on with probabilities p and q."""
    common = crn_table(p, q)
    if kind == "common" or np.array_equal(p, q):
        return common
    left, right = common.sum(1), common.sum(0)
    made = np.diag(np.minimum(left, right))
    missing = 1 - np.trace(made)
    rest_left, rest_right = np.maximum(left - right, 0) / missing, np.maximum(right - left, 0) / missing
    if kind == "maximal_independent":
        return made + missing * np.outer(rest_left, rest_right)
    # Proposals share uniforms until one is kept; the other chain then goes on by itself.
    keep_left = np.maximum(1 - right / left, 0)[:, None]
    keep_right = np.maximum(1 - left / right, 0)[None, :]
    both = common * keep_left * keep_right
    only_left = (common * keep_left * (1 - keep_right)).sum(1)
    only_right = (common * (1 - keep_left) * keep_right).sum(0)
    neither = (common * (1 - keep_left) * (1 - keep_right)).sum()
    residual = both + np.outer(only_left, rest_right) + np.outer(rest_left, only_right)
    return made + missing * residual / (1 - neither)


def exact_tail(params: Any, kinds: tuple[str, str], times: int) -> np.ndarray:
    """P(tau > t) for t = 1, 2, ...: 2x2 units, both chains from all ones, lag 1."""
    bias_a, bias_b, weight = (np.asarray(params[name], float) for name in ("a", "b", "a:b"))
    states = np.array(list(itertools.product((0, 1), repeat=2)), float)
    on = lambda eta: 1 / (1 + np.exp(-eta))
    given_b = on(bias_a + states @ weight.T)  # P(a unit is on) for each b
    given_a = on(bias_b + states @ weight)
    pair_a = np.array([[joint_table(kinds[0], p, q) for q in given_b] for p in given_b])
    pair_b = np.array([[joint_table(kinds[1], p, q) for q in given_a] for p in given_a])
    # X_1 is one sweep from all ones and Y_0 is all ones
    ahead = crn_table(given_b[3], given_b[3]).diagonal()
    joint = np.zeros((4, 4, 4, 4))  # a of X, a of Y, b of X, b of Y
    for a in range(4):
        joint[a, 3, :, 3] = ahead[a] * crn_table(given_a[a], given_a[a]).diagonal()
    tail = []
    for _ in range(times):
        tail.append(1 - np.einsum("iijj", joint))
        joint = np.einsum("kl,klij,ijmn->ijmn", joint.sum((0, 1)), pair_a, pair_b)
    np.testing.assert_allclose(joint.sum(), 1)
    return np.array(tail)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_meeting_times_have_the_law_of_the_pair_chain(coupling: str | None) -> None:
    graph, params = model("rbm")
    wanted = exact_tail(params, resolve(coupling, graph.layers), 8)
    tau = np.concatenate(
        [run(graph, params, seed, coupling=coupling).meeting_time for seed in range(BATCHES)]
    )
    share = (tau[:, None] > np.arange(1, 9)).mean(0)
    assert wanted[0] > 0.5 and wanted[3] > 1e-3
    assert_law(share, wanted, np.sqrt(wanted * (1 - wanted) / len(tau)), 4 * len(wanted))


# -- what a job may depend on --------------------------------------------------------------------


def test_first_two_times_are_the_same_path_by_path_from_one_start() -> None:
    graph, params = model("rbm")
    for coupling in COUPLINGS:
        zero, one = (run(graph, params, 3, (k, k, 1), coupling) for k in (0, 1))
        two = run(graph, params, 3, (2, 2, 1), coupling)
        np.testing.assert_array_equal(flat(zero.total), flat(one.total))
        assert (flat(two.total) != flat(one.total)).any()
        np.testing.assert_array_equal(zero.meeting_time, two.meeting_time)


@pytest.mark.parametrize("window", often([(1, 1, 1), (2, 6, 3)], (2, 6, 3)))
def test_slots_change_nothing(window: tuple[int, int, int]) -> None:
    graph, params = model("rbm")
    made = [run(graph, params, 5, window, num_slots=n) for n in (4, 16, 64)]
    for other in made[1:]:
        np.testing.assert_array_equal(other.meeting_time, made[0].meeting_time)
        np.testing.assert_array_equal(flat(other.total), flat(made[0].total))  # whole numbers


@pytest.mark.parametrize("size", [1, 3, 8, 9, 64, 100])
def test_stages_end_with_every_pair(size: int) -> None:
    sizes = slots.stages(size)
    assert sizes[0].size == size and sizes[-1].until == 0
    for before, after in itertools.pairwise(sizes):
        assert before.until <= after.size and after.size % after.chunk == 0


@pytest.mark.parametrize("chunk", often([2, 32], 2))
def test_chunks_of_the_tail_change_nothing(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    graph, params = model("rbm")
    usual = run(graph, params, 5, (2, 6, 3), num_slots=16)
    monkeypatch.setattr(slots, "_CHUNK", chunk)
    run_pairs.clear_cache()
    other = run(graph, params, 5, (2, 6, 3), num_slots=16)
    run_pairs.clear_cache()
    np.testing.assert_array_equal(usual.meeting_time, other.meeting_time)
    np.testing.assert_array_equal(flat(usual.total), flat(other.total))


def as_users_have_it() -> Any:
    """The slots without what conftest.py sets."""
    made = importlib.util.module_from_spec(slots.__spec__)
    slots.__spec__.loader.exec_module(made)
    return made


def test_many_slots_and_no_small_stage_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, params = model("rbm")
    few = run(graph, params, 5, (2, 6, 3), num_slots=16)
    assert [as_users_have_it().suitable(n) for n in (50, 100, 101, 10**6)] == [8, 8, 64, 64]
    monkeypatch.setattr(backend, "accelerated", lambda: True)
    assert slots.suitable(100) == slots.suitable(10**6) == 4096
    assert [stage[:2] for stage in slots.stages(4096)] == [(4096, 4096), (1024, 1024), (256, 256)]
    run_pairs.clear_cache()
    many = run(graph, params, 5, (2, 6, 3), num_slots=16)  # slots are loaded without a branch
    run_pairs.clear_cache()
    np.testing.assert_array_equal(few.meeting_time, many.meeting_time)
    np.testing.assert_array_equal(flat(few.total), flat(many.total))


def test_a_block_that_ends_when_no_pair_is_left_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, params = model("rbm")
    usual = run(graph, params, 5, (2, 6, 3), num_slots=4)
    monkeypatch.setattr(engine, "_FEW_REPEATS", 10**6)  # idle slots make the rest of 64 sweeps
    run_pairs.clear_cache()
    other = run(graph, params, 5, (2, 6, 3), num_slots=4)
    run_pairs.clear_cache()
    np.testing.assert_array_equal(usual.meeting_time, other.meeting_time)
    np.testing.assert_array_equal(flat(usual.total), flat(other.total))


def test_a_job_does_not_know_how_many_others_run() -> None:
    graph, params = model("rbm")
    many, few = run(graph, params, 5), run(graph, params, 5, jobs=50)
    np.testing.assert_array_equal(few.meeting_time, many.meeting_time[:50])
    assert len(np.unique(many.meeting_time)) > 2


def blocks(graph: FactorGraph) -> tuple:
    return tuple((b, f.shape, str(f.dtype)) for b, f in graph.families.items())


def pair_statistics(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Minus dE/dparams of one state of the pair model, and a constant."""
    return {"a": x["a"], "b": x["b"], "a:b": jnp.outer(x["a"], x["b"]), "one": jnp.ones(())}


def test_sums_of_a_function_add_up_to_the_gradient() -> None:
    graph, params = model("rbm")
    by_pair = Function(pair_statistics, blocks(graph))
    for window in WINDOWS:
        apart = run(graph, params, 2, window, accumulator=by_pair)
        together = run(graph, params, 2, window)
        np.testing.assert_array_equal(apart.meeting_time, together.meeting_time)
        for name, total in together.total.items():
            assert apart.total[name].shape[0] == JOBS
            np.testing.assert_array_equal(-np.asarray(apart.total[name]).sum(0), total)
        # the weights of a pair sum to m - k + 1
        np.testing.assert_array_equal(apart.total["one"], window[1] - window[0] + 1.0)


def test_calls_of_the_same_shapes_do_not_trace_again() -> None:
    graph, params = model("rbm")
    run(graph, params)
    before = run_pairs._cache_size()
    shifted = jax.tree.map(lambda a: a + 0.1, params)
    run(graph, shifted, seed=9, window=(4, 9, 2), max_sweeps=50)
    run(MODELS["rbm"](), params, seed=9, window=(0, 0, 7))  # an equal declaration
    assert run_pairs._cache_size() == before


def test_a_limit_flags_the_unmet_and_leaves_the_others_alone() -> None:
    graph, params = model("rbm")
    free = np.asarray(run(graph, params, 4).meeting_time)
    limit = 3
    held = np.asarray(run(graph, params, 4, max_sweeps=limit).meeting_time)
    assert (free > limit).any() and (free <= limit).any()
    np.testing.assert_array_equal(held, np.where(free > limit, -1, free))
    # those that have met go on to the end of the window, however far it is
    last, window = int(free.max()), (1, int(free.max()) + 9, 1)
    whole, limited = run(graph, params, 4, window), run(graph, params, 4, window, max_sweeps=last)
    jax.tree.map(np.testing.assert_array_equal, limited.total, whole.total)


def in_time(call: Callable[[], Any], seconds: float = 120) -> Any:
    """The result of ``call``, or a failure: a loop on the device cannot be interrupted."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(jax.block_until_ready(call())), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"no result after {seconds} seconds"
    return results[0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["a", "b", "a:b"])
@pytest.mark.parametrize("model_name", ["rbm", "gaussian"])
def test_params_that_are_not_finite_leave_every_pair_unmet(model_name: str, name: str, value: float) -> None:
    graph, params = model(model_name)
    first = (0,) * params[name].ndim
    bad = {**params, name: params[name].at[first].set(value)}
    zeros = {b: jnp.zeros((JOBS, *f.shape), f.dtype) for b, f in graph.families.items()}
    for x in (start(graph, JOBS), zeros):
        made = in_time(functools.partial(run, graph, bad, x=x))
        np.testing.assert_array_equal(made.meeting_time, -1)


@pytest.mark.slow
def test_params_that_overflow_leave_every_pair_unmet() -> None:
    graph, params = model("rbm")
    huge = {**params, "b": jnp.full(2, 3e38), "a:b": jnp.full((2, 2), 3e38)}
    zeros = {b: jnp.zeros((JOBS, 2)) for b in ("a", "b")}  # from all ones, X_1 = Y_0 is right
    made = in_time(functools.partial(run, graph, huge, x=zeros))
    np.testing.assert_array_equal(made.meeting_time, -1)
