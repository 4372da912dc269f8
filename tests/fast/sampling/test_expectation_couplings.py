# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased estimates for every coupling, against exact moments."""

from collections.abc import Callable
import functools
from typing import Any

from metropolis_tools import Chain
import numpy as np
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Categorical, FactorGraph, Gaussian, Poisson, Spin, layered
from ebmpp.errors import DeclarationError
from ebmpp.moves import metropolis_sweep
from ebmpp.moves.metropolis import Metropolis
from helpers import (
    assert_law,
    assert_rows_law,
    enumerate_numpy,
    gated,
    numpy_statistics,
    pair,
    random_params,
    slow,
)

PAIRS = 6000
WINDOWS = [(1, 1, 1), (2, 6, 3), (5, 5, 2)]

GRAPHS: dict[str, Callable[[], FactorGraph]] = {
    "rbm": lambda: pair(Bernoulli(2), Bernoulli(2)),
    "spin": lambda: pair(Spin(2), Spin(2)),
    "categorical": lambda: pair(Categorical(2, num_categories=3), Bernoulli(2)),
    "gaussian": lambda: pair(Gaussian(2), Bernoulli(2)),
    "gaussian_learned": lambda: pair(Gaussian(2, variance="learned"), Bernoulli(2)),
    "poisson": lambda: pair(Poisson(1), Bernoulli(2)),
    "deep": lambda: layered(v=Bernoulli(2), h1=Bernoulli(2), h2=Spin(2)),
    "gated": lambda: gated((2, 2, 1)),
}
#: strong enough for meeting times above 1; in the last two the tails are below those of initial draws
PARAMS: dict[str, Callable[[FactorGraph], dict[str, Any]]] = {
    "rbm": lambda graph: random_params(graph, seed=4, scale=2.5),
    "gaussian_learned": lambda graph: {
        "a": jnp.array([[0.6, -0.8], [-0.4, -1.0]]),
        "b": jnp.array([0.5, -0.7]),
        "a:b": jnp.array([[1.5, -1.2], [0.8, 1.6]]),
    },
    "poisson": lambda graph: {
        "a": jnp.array([-1.0]),
        "b": jnp.array([0.5, -0.7]),
        "a:b": jnp.array([[0.6, 0.3]]),
    },
}


class Proposals:
    """A Metropolis sweep with these options, made when the graph is known."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __repr__(self) -> str:
        return f"metropolis, {self.options}"


#: the default coupling of the other models is the engine's own test; each compiles for seconds, so that
#: what others come close to is slow
CASES = [
    ("rbm", None),
    slow("rbm", "maximal_independent"),
    slow("rbm", "common"),
    slow("rbm", ("maximal", "common")),
    slow("rbm", ("common", "maximal")),
    slow("rbm", ("maximal", "independent")),
    ("rbm", "metropolis"),
    slow("rbm", Proposals(marginalize=("b",))),
    slow("spin", Proposals(proposal="initial")),
    slow("categorical", Proposals(marginalize=("a",))),
    ("gaussian", "reflection"),
    slow("gaussian_learned", Proposals(proposal="initial")),
    slow("poisson", Proposals(proposal="initial", marginalize=("b",))),
    slow("deep", "maximal_independent"),
    slow("deep", Proposals(marginalize=("v", "h2"))),
    ("gated", ("common", "maximal", "independent")),
    slow("gated", "metropolis"),
]


@functools.cache
def model(name: str) -> tuple[FactorGraph, dict[str, Any]]:
    graph = GRAPHS[name]()
    default = lambda graph: random_params(graph, seed=4, scale=1.2)
    return graph, PARAMS.get(name, default)(graph)


@functools.cache
def everything(name: str) -> Callable[[dict], dict]:
    """Sufficient statistics of every block; one function a model, so that a coupling compiles once."""
    return lambda x: model(name)[0].statistics(x)


def estimate(
    name: str, coupling: Any, seed: int = 1, params: Any = None, **options: Any
) -> ebmpp.sampling.expectation.UnbiasedEstimate:
    graph, usual = model(name)
    coupling = metropolis_sweep(graph, **coupling.options) if isinstance(coupling, Proposals) else coupling
    given = {"rng_key": jax.random.key(seed), "num_pairs": PAIRS, "num_slots": 4, **options}
    params = usual if params is None else params
    return ebmpp.unbiased_expectation(graph, params, everything(name), coupling=coupling, **given)


@functools.cache
def moments(name: str) -> np.ndarray:
    """Means of the statistics: by enumeration in numpy, or from the exact log Z."""
    graph, params = model(name)
    if name in ("gated", "gaussian", "gaussian_learned"):
        return flat(ebmpp.exact.moments(graph, params))
    states, weights, _ = enumerate_numpy(graph, params, most=25)
    of_state = [{b: numpy_statistics(f, x[b]) for b, f in graph.families.items()} for x in states]
    return weights @ np.array([flat(t) for t in of_state])


def flat(tree: dict) -> np.ndarray:
    return np.concatenate([np.ravel(tree[b]) for b in sorted(tree)])


@pytest.mark.parametrize(("name", "coupling"), CASES, ids=lambda value: str(value))
def test_every_coupling_is_unbiased(name: str, coupling: Any) -> None:
    exact = moments(name)
    for k, m, lag in WINDOWS:
        made = estimate(name, coupling, k=k, m=m, lag=lag)
        assert_law(flat(made.value), exact, flat(made.standard_error), exact.size * len(WINDOWS))
        assert (made.meeting_time > lag + 1).mean() > 0.03  # there was something to correct
        assert (made.cost == np.maximum(m, made.meeting_time) + made.meeting_time - lag).all()
        proposes = coupling == "metropolis" or isinstance(coupling, Proposals)
        assert (0 < made.acceptance < 1) if proposes else np.isnan(made.acceptance)


def test_without_corrections_these_tests_would_fail() -> None:
    # the means of X_1, one Metropolis sweep from uniform starts, are far outside the errors above
    graph, params = model("rbm")
    chain = Chain(graph, params)
    after = chain.law(np.full(len(chain.states), 1 / len(chain.states)), 1)
    table = np.array([np.concatenate([x["a"], x["b"]]) for x in chain.states])
    made = estimate("rbm", "metropolis")
    assert (np.abs((after - chain.target) @ table) / flat(made.standard_error)).max() > 10


# -- Metropolis: what an estimate says of itself -------------------------------------------------


def test_acceptance_and_late_pairs_are_those_of_the_enumerated_pair() -> None:
    chain = Chain(*model("rbm"))
    start = chain.at(a=[1, 1], b=[1, 1])
    joint = chain.pairs(start, 1, 400)
    apart = joint * (1 - np.eye(len(start)))
    assert apart[-1].sum() < 1e-9
    # the leading chain's first proposal, and two a sweep while the pair is apart
    both = chain.accept[:, None] + chain.accept[None, :]
    accepted = start @ chain.accept + (apart * both).sum()
    share = accepted / (1 + 2 * apart.sum())
    ones = {"a": jnp.ones(2), "b": jnp.ones(2)}
    runs = [estimate("rbm", "metropolis", seed, init=ones) for seed in range(10)]
    assert_rows_law([run.acceptance for run in runs], share)
    tau = np.concatenate([run.meeting_time for run in runs])
    tail = apart.sum((1, 2))[:6]
    assert 0.1 < tail[0] < 0.9
    later = (tau[:, None] > np.arange(1, 7)).mean(0)
    assert_law(later, tail, np.sqrt(tail * (1 - tail) / len(tau)))
    for run in runs:
        assert run.late == (run.meeting_time > 1).mean()
        count = int((run.meeting_time > 1).sum())
        interval = stats.binomtest(count, PAIRS, alternative="less").proportion_ci(0.95, "exact")
        assert run.late_upper == pytest.approx(interval.high)
    assert f"acceptance {runs[0].acceptance:.3g}, P(tau > 1) {runs[0].late:.3g}" in repr(runs[0])


def test_late_pairs_are_counted_from_the_lag_and_unmet_ones_are_late() -> None:
    # stopped after as many sweeps as the lag: whoever has not met by then is unmet
    made = estimate("rbm", "metropolis", lag=3, k=3)
    assert made.late == (made.meeting_time > 3).mean() < (made.meeting_time > 1).mean() == 1
    with pytest.warns(UserWarning, match="were dropped"):
        cut = estimate("rbm", "metropolis", lag=3, k=3, max_sweeps=4, unmet="drop")
    assert cut.late == made.late and cut.num_unmet == (made.meeting_time > 4).sum() > 0


BIG = layered(v=Spin(30), h=Spin(30))


def energy(x: dict) -> dict:
    return {"energy": BIG.energy(BIG_PARAMS, x)}


BIG_PARAMS = jax.tree.map(
    lambda a: 2 * a, BIG.init(jax.random.key(3), scheme={"weight": "orthogonal", "bias": "logistic"})
)


def of_big_model(**options: Any) -> ebmpp.sampling.expectation.UnbiasedEstimate:
    given = {"rng_key": jax.random.key(1), "num_pairs": 400, "num_slots": 4, "init": "local_mode"}
    return ebmpp.unbiased_expectation(BIG, BIG_PARAMS, energy, **{**given, **options})


def energies_at_start(kernel: ebmpp.BlockedGibbs, keys: jax.Array) -> np.ndarray:
    start = lambda keys: BIG.energy(BIG_PARAMS, kernel.init(keys, 0, None, (BIG_PARAMS,), {}).z)
    return np.asarray(jax.jit(start)(keys))


def test_unbiased_in_name_is_told() -> None:
    with pytest.warns(UserWarning, match=r"all 400 pairs met at once.*unbiased in name"):
        made = of_big_model(coupling="metropolis")
    assert made.late == 0 and made.acceptance < 0.01 and (made.meeting_time == 1).all()
    assert made.late_upper == pytest.approx(1 - 0.05 ** (1 / 400))  # the rule of three, exactly
    # refused proposals leave the starts: their energies are those of one Gibbs sweep from a mode
    keys = jax.random.split(jax.random.key(5), 400)
    drawn = energies_at_start(ebmpp.BlockedGibbs(BIG, init="local_mode"), keys)
    error = np.hypot(made.standard_error["energy"], drawn.std(ddof=1) / 20)
    assert_law(made.value["energy"], drawn.mean(), error)
    assert made.value["energy"] < -20  # of uniform draws the mean is 0


def test_pairs_that_all_meet_at_once_are_told_of_metropolis_alone() -> None:
    ones = {"a": jnp.ones(2), "b": jnp.ones(2)}
    frozen = {"a": 40 * jnp.ones(2), "b": 40 * jnp.ones(2), "a:b": jnp.zeros((2, 2))}
    assert estimate("rbm", "maximal", params=frozen, init=ones).late == 0  # warnings are errors
    with pytest.warns(UserWarning, match=r"all 6000 .*is what 3 Metropolis steps make of the starts"):
        made = estimate("rbm", "metropolis", params=frozen, init=ones, k=3, lag=3)
    assert made.late == 0 < made.late_upper < 1e-3
    # of 16 proposals one is the start, and is taken
    assert_law(made.acceptance, 1 / 16, np.sqrt(15 / 16**2 / (3 * PAIRS)))


# -- moves of one's own --------------------------------------------------------------------------


def test_metropolis_is_a_move_of_all_blocks_and_slots_change_nothing() -> None:
    named = estimate("rbm", "metropolis", k=2, m=4)
    for coupling, slots in ((Metropolis(("a", "b")), 4), ([Metropolis(("a", "b"))], 16)):
        given = estimate("rbm", coupling, k=2, m=4, num_slots=slots)
        np.testing.assert_array_equal(given.meeting_time, named.meeting_time)
        np.testing.assert_array_equal(flat(given.value), flat(named.value))
        assert given.acceptance == pytest.approx(named.acceptance, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "coupling", "clamped", "error", "message"),
    [
        ("rbm", Proposals(), {"a": [1.0, 0.0]}, ValueError, r"change blocks \['a', 'b'\].* are \['b'\]"),
        ("rbm", Metropolis(("a",)), {}, ValueError, r"change blocks \['a'\].* are \['a', 'b'\]"),
        ("rbm", (), {}, ValueError, r"change blocks \[\]"),
        ("rbm", ("metropolis", "common"), {}, ValueError, "coupling 'metropolis' is unknown"),
        ("gaussian", "metropolis", {}, DeclarationError, r"block 'a' \(Gaussian\(2, .*no uniform law"),
        ("poisson", "metropolis", {}, DeclarationError, r"block 'a' \(Poisson\(1\)\) has no uniform law"),
    ],
)
def test_moves_that_do_not_fit(
    name: str, coupling: Any, clamped: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        estimate(name, coupling, **{b: jnp.array(v) for b, v in clamped.items()})
