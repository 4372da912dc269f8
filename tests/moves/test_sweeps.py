# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sweeps of every move, alone and in coupled pairs, against exact draws made in NumPy.

A sweep must keep the distribution of exact draws, in both chains of a pair, and must
reach it from any state.

Tests moves/gibbs.py, moves/mixture.py, moves/sweeps.py.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from network_graphs import enumerated, factor
import networkx as nx
import numpy as np
from oracle import Oracle, numpy_statistics
import pytest
import zoo

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Binomial,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    Observed,
    Pairwise,
    Spin,
    Table,
)
from ebmpp.contrib import GibbsWithGradients, metropolis_sweep, metropolized_sweep
from ebmpp.core import random
from ebmpp.graph.states import as_clamped
from ebmpp.moves import (
    Hamiltonian,
    Layer,
    Mixture,
    cluster_sweep,
    forest_sweep,
    gibbs_sweep,
    informed_sweep,
    mixture_sweep,
)
from ebmpp.moves.ensemble import Ensemble
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.mixture import make_pool
from ebmpp.moves.move import coupled_sweep, draw_sweep
from ebmpp.moves.sweeps import resolve_moves, single_moves
from ebmpp.moves.target import Target
from ebmpp.moves.tempering import tempered_sweep
from helpers import assert_law, often, random_params, random_state

ROWS, REFERENCE_ROWS = 4000, 40_000
ROOT_KEY = np.array([0, 5], np.uint32)
BETAS = (0.0, 0.5, 1.0)


def _learned(size: int) -> Gaussian:
    return Gaussian(size, "learned")


def _three_way(weight: Any, a: Any, c: Any, g: Any) -> Any:
    return -weight @ g * a[0] * c[0]


def _transitions(weight: Any, h: Any) -> Any:
    return -jnp.einsum("tij,ti,tj", weight, h[:-1], h[1:])


def tree_of_blocks() -> FactorGraph:
    """Units of all finite families in one tree, a pair of which interacts by way of real units."""
    blocks = {
        "a": Spin(1),
        "b": Categorical(1, 3),
        "c": Binomial(1, 3),
        "d": Bernoulli(3),
        "g": Gaussian(2),
    }
    three_way = Factor("a", "c", "g", energy=_three_way, init=np.zeros(2))
    pairs = [Bilinear("a", "b"), Bilinear("b", "d"), Bilinear("a", "g"), three_way]
    return FactorGraph(blocks, factors=[*map(Bias, blocks), *pairs])


def hidden_chain() -> FactorGraph:
    chain = Factor(
        "h",
        energy=_transitions,
        init=np.zeros((3, 3, 3)),
        lateral={"h": [(0, 1), (1, 2), (2, 3)]},
        name="h:h",
    )
    return FactorGraph(
        {"v": Bernoulli(3)},
        {"h": Categorical(4, 3)},
        [Bias("v"), Bias("h"), Bilinear("v", "h"), chain],
    )


_OTHER_GRAPHS = {
    "potts": lambda: FactorGraph.from_networkx(
        nx.cycle_graph(4), lambda n: Categorical(n, 3)
    ),
    "complete": lambda: FactorGraph.from_networkx(nx.complete_graph(5), Bernoulli),
    "gaussian lattice": lambda: FactorGraph.from_networkx(nx.cycle_graph(4), _learned),
    "semi-restricted": lambda: FactorGraph(
        {"v": Bernoulli((2, 2))},
        {"h": Spin(2)},
        [
            Bias("v"),
            Bias("h"),
            Bilinear("v", "h"),
            Pairwise("v", nx.grid_2d_graph(2, 2)),
        ],
    ),
    "tree of blocks": tree_of_blocks,
    "hidden chain": hidden_chain,
}
#: scale of the params, where strong ones would leave the domain of a family
_SCALE = {
    "poisson": 0.4,
    "gaussian": 0.7,
    "learned": 0.4,
    "mixed": 0.7,
    "tree of blocks": 0.7,
    "gaussian lattice": 0.2,
}


@functools.cache
def graph_of(name: str) -> FactorGraph:
    return _OTHER_GRAPHS[name]() if name in _OTHER_GRAPHS else zoo.graph(name)


def params_of(name: str) -> dict[str, Any]:
    params = random_params(graph_of(name), seed=3, scale=_SCALE.get(name, 1.0))
    if name == "potts":  # clusters of categories need weights of at least 0
        params["x:x"] = np.abs(params["x:x"])
    return params


@dataclasses.dataclass(frozen=True)
class Case:
    """A sweep of a graph.

    :param graph: a name of the zoo or of this file.
    :param moves: from a graph to the moves of its sweep.
    :param clamped: clamped blocks and observed units.
    :param acceptance: bounds of the acceptance rate of a sweep that proposes.
    """

    graph: str
    moves: Callable[[FactorGraph], Any] = lambda graph: resolve_moves(graph, None)
    clamped: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    acceptance: tuple[float, float] = (0.0, 0.0)
    num_sweeps: int = 20
    pool_size: int = 0
    is_tempered: bool = False


def kinds(*names: str) -> Callable[[FactorGraph], Any]:
    return lambda graph: resolve_moves(graph, names if len(names) > 1 else names[0])


def mixture(graph: FactorGraph) -> Any:
    """The proposal and the draw of the blocks that it summed out."""
    return mixture_sweep(graph)[:2]


def field_mixture(graph: FactorGraph) -> Any:
    """Two proposals from first-order fields, after which the blocks summed out are drawn."""
    moves = mixture_sweep(graph)
    index = next(i for i, move in enumerate(moves) if isinstance(move, Mixture))
    return dataclasses.replace(moves[index], tries=2), *moves[index + 1 :]


def few_components(graph: FactorGraph) -> Any:
    move, layer = mixture(graph)
    return dataclasses.replace(move, components=2), layer


def metropolized(graph: FactorGraph) -> Any:
    """Gibbs draws, without which pairs rarely meet, precede the move that is tested."""
    return *gibbs_sweep(graph), *metropolized_sweep(graph)


def informed(rule: str, step_size: float | None = None) -> Callable[[Any], Any]:
    return lambda graph: informed_sweep(graph, (), rule, step_size, 4)


def with_gradients(graph: FactorGraph) -> Any:
    return (GibbsWithGradients(("x",), num_steps=4),)


def hamiltonian(graph: FactorGraph) -> Any:
    """A trajectory and a walk of the real-valued block, and draws of the others."""
    return Hamiltonian(("v",), 0.5, 3), *gibbs_sweep(graph, ["v"])


def lattice_hamiltonian(graph: FactorGraph) -> Any:
    return (Hamiltonian(("x",), 0.5, 3),)


def gaussian_mixture(graph: FactorGraph) -> Any:
    return Mixture(("v",), ("h",), 3), Layer(("h",), "maximal")


def tempered(graph: FactorGraph) -> Any:
    return (tempered_sweep(graph),)


HALF = Observed(
    np.array([1.0, 0.0, 0.0, 0.0], np.float32), np.array([True, False, False, True])
)
FIRST = Observed(np.float32([1, 0, 0]), np.array([True, False, False]))
CORNERS = Observed(
    np.float32([1, 0, -1, 0, 0, 0, 0, 0, 1]), np.isin(np.arange(9), [0, 2, 8])
)
PROPOSES = {"acceptance": (0.1, 0.99)}

CASES = {
    "maximal": Case("rbm"),
    "three layers": Case("gated", kinds("common")),
    "observed": Case("rbm", kinds("maximal", "common"), {"v": HALF}),
    "lattice": Case("lattice", kinds("common")),
    "observed lattice": Case("lattice", kinds("common"), {"x": CORNERS}),
    "marginal metropolis": Case(
        "rbm", lambda g: metropolis_sweep(g, marginalize="h"), **PROPOSES
    ),
    "mixture": Case("rbm", mixture, pool_size=6, **PROPOSES),
    "metropolized": Case("categorical", metropolized),
    "spin clusters": Case("lattice", cluster_sweep),
    "potts clusters": Case("potts", cluster_sweep),
    "observed forests": Case("lattice", forest_sweep, {"x": CORNERS}),
    "tree of blocks": Case("tree of blocks", forest_sweep),
    "hidden chain": Case("hidden chain", forest_sweep),
    "tempered": Case("spin", tempered, is_tempered=True),
    "informed": Case("lattice", informed("dmala"), {"x": CORNERS}, **PROPOSES),
}
SLOW_CASES = {
    "mixture of few": Case("categorical", few_components, pool_size=6, **PROPOSES),
    "reflection": Case("gaussian", kinds("reflection", "maximal")),
    "maximal three layers": Case("gated"),
    "maximal lattice": Case("lattice"),
    "mixture sweep": Case("rbm", mixture_sweep, pool_size=6, **PROPOSES),
    "deep": Case("deep"),
    "clamped": Case(
        "deep", lambda g: resolve_moves(g, None, ["h2"]), {"h2": np.float32([0, 1])}
    ),
    "mixed": Case("mixed"),
    "binomial": Case("binomial"),
    "poisson": Case("poisson"),
    "learned": Case("learned"),
    "semi-restricted": Case("semi-restricted"),
    "potts": Case("potts"),
    "gaussian lattice": Case("gaussian lattice"),
    "observed metropolis": Case("spin", metropolis_sweep, {"v": FIRST}, **PROPOSES),
    "initial metropolis": Case(
        "poisson", lambda g: metropolis_sweep(g, proposal="initial"), **PROPOSES
    ),
    "gaussian mixture": Case("gaussian", gaussian_mixture, pool_size=6, **PROPOSES),
    "deep mixture": Case("deep", mixture, pool_size=6, **PROPOSES),
    "mixture of three layers": Case("gated", field_mixture, pool_size=6, **PROPOSES),
    "mixture of a lattice": Case("lattice", field_mixture, pool_size=6, **PROPOSES),
    "metropolized counts": Case("binomial", metropolized),
    "observed metropolized lattice": Case("lattice", metropolized, {"x": CORNERS}),
    "bernoulli clusters": Case("complete", cluster_sweep),
    "clusters of one block": Case("semi-restricted", cluster_sweep),
    "observed clusters": Case("lattice", cluster_sweep, {"x": CORNERS}),
    "potts forests": Case("potts", forest_sweep),
    "complete forests": Case("complete", forest_sweep),
    "forests of one block": Case("semi-restricted", forest_sweep),
    "metropolis": Case("spin", metropolis_sweep, **PROPOSES),
    "informed potts": Case("potts", informed("dlmc"), **PROPOSES),
    "hamiltonian": Case("learned", hamiltonian, **PROPOSES),
    "informed one layer": Case("categorical", informed("dmala"), **PROPOSES),
    "informed heat baths": Case(
        "semi-restricted", informed("heat_bath", 0.6), **PROPOSES
    ),
    "gibbs with gradients": Case("potts", with_gradients, num_sweeps=80, **PROPOSES),
    "hamiltonian lattice": Case("gaussian lattice", lattice_hamiltonian, **PROPOSES),
    "tempered lattice": Case("lattice", tempered, is_tempered=True),
}
ALL_CASES = CASES | SLOW_CASES
# forests also draw the hidden chain, and other sweeps observed units and lattices; pairs
# also propose from a mixture, and test_tempering.py tempers
EXPENSIVE = {
    "tree of blocks",
    "observed forests",
    "observed lattice",
    "mixture",
    "tempered",
}
every_case = pytest.mark.parametrize(
    "name", often(ALL_CASES, *(set(CASES) - EXPENSIVE))
)


class Problem:
    """A case with its target, its moves and exact draws."""

    def __init__(self, name: str) -> None:
        self.case = ALL_CASES[name]
        graph, params = graph_of(self.case.graph), params_of(self.case.graph)
        self.moves = tuple(self.case.moves(graph))
        clamped = {
            b: v for b, v in self.case.clamped.items() if not isinstance(v, Observed)
        }
        self.observed = {
            b: v for b, v in self.case.clamped.items() if isinstance(v, Observed)
        }
        if self.case.is_tempered:
            interacting = [f.name for f in graph.factors if f.interacts]
            at = lambda beta: params | {f: beta * params[f] for f in interacting}
            self.oracles = [Oracle(graph, at(beta), clamped) for beta in BETAS]
        else:
            self.oracles = [Oracle(graph, params, clamped)]
        for block, value in self.observed.items():
            self._condition(
                block, np.asarray(value.values, float), np.asarray(value.known)
            )
        target_values = as_clamped(graph.families, self.case.clamped)
        self.target = Target(graph, params, target_values)
        if self.case.is_tempered:
            self.target = Ensemble.at_betas(self.target, jnp.asarray(BETAS))
        if self.case.pool_size:
            move, keys = (
                self.moves[0],
                random.fold_in(ROOT_KEY, 8, np.arange(self.case.pool_size)),
            )
            pool_rows = initial_rows(graph, move.pool_blocks(graph), keys)
            pool = make_pool(self.target, move, pool_rows)
            self.target = dataclasses.replace(self.target, pool=pool)
        self.blocks = tuple(graph.families)

    def _condition(self, block: str, values: np.ndarray, known: np.ndarray) -> None:
        for oracle in self.oracles:
            agrees = (oracle.x[block] == values)[:, known].all(1)
            oracle.log_weights = np.where(agrees, oracle.log_weights, -np.inf)
            oracle.log_z = float(np.logaddexp.reduce(oracle.log_weights))

    def exact(self, seed: int, rows: int = ROWS) -> dict[str, np.ndarray]:
        """Independent draws of the distribution that the sweep must keep."""
        generator = np.random.default_rng(seed)
        draws = [oracle.draw(generator, rows) for oracle in self.oracles]
        if not self.case.is_tempered:
            return {b: draws[0][b] for b in self.blocks}
        return {b: np.stack([x[b] for x in draws], 1) for b in self.blocks}

    def features(self, x: Mapping[str, Any]) -> np.ndarray:
        """Statistics of all units and their products, one row per state."""
        graph = self.target.graph
        columns = [
            numpy_statistics(graph.families[b], np.asarray(x[b])) for b in self.blocks
        ]
        t = np.concatenate([c.reshape(len(c), -1) for c in columns], 1)
        first, second = np.triu_indices(t.shape[1])
        return np.concatenate([t, t[:, first] * t[:, second]], 1)

    @functools.cached_property
    def reference(self) -> tuple[np.ndarray, np.ndarray | float]:
        """Means and standard errors of the features: by enumeration, or from many exact draws."""
        oracle = self.oracles[0]
        if not (self.case.is_tempered or oracle.reals):
            return np.exp(oracle.log_weights - oracle.log_z) @ self.features(
                oracle.x
            ), 0.0
        features = self.features(self.exact(1, REFERENCE_ROWS))
        return features.mean(0), features.std(0) / REFERENCE_ROWS**0.5

    def assert_exact(self, x: Mapping[str, Any], num_tests: int) -> None:
        features, (mean, error) = self.features(x), self.reference
        total = np.hypot(error, features.std(0, ddof=1) / len(features) ** 0.5)
        # a feature that differs in less than ten rows is not normal
        differs = (
            np.minimum(*(((features - mean) * s > 0).sum(0) for s in (1, -1))) >= 10
        )
        assert_law(
            features.mean(0)[differs],
            mean[differs],
            total[differs],
            num_tests * differs.sum(),
        )

    def assert_given_units_stay(self, x: Mapping[str, Any]) -> None:
        for block, value in self.observed.items():
            known = np.asarray(value.known)
            expected = np.broadcast_to(
                np.asarray(value.values)[known], (ROWS, known.sum())
            )
            np.testing.assert_array_equal(np.asarray(x[block])[:, known], expected)


problem = functools.cache(Problem)
_coupled = jax.jit(coupled_sweep, static_argnums=2)
_alone = jax.jit(draw_sweep, static_argnums=2)
_keys = jax.jit(lambda number: random.fold_in(ROOT_KEY, number, jnp.arange(ROWS)))


def assert_acceptance(case: Case, accepted: Any, num_proposals: int) -> None:
    low, high = case.acceptance
    rate = np.mean(np.asarray(accepted)) / max(1, num_proposals)
    assert low <= rate <= high, rate


@every_case
def test_sweep_keeps_and_reaches_the_distribution(name: str) -> None:
    p = problem(name)
    x, accepted = _alone(p.target, p.exact(2), p.moves, _keys(np.uint32(0)))
    p.assert_exact(x, 2)
    assert_acceptance(p.case, accepted, sum(move.proposes for move in p.moves))
    state = {b: random_state(f, 7) for b, f in p.target.graph.families.items()}
    x = start(p, state)
    for t in range(p.case.num_sweeps):
        x, _ = _alone(p.target, x, p.moves, _keys(np.uint32(t)))
    p.assert_exact(x, 2)
    p.assert_given_units_stay(x)


def start(p: Problem, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows that are all in one state, with the given values in their places."""
    rows = {b: np.broadcast_to(v, (ROWS, *p.target.shape(b))) for b, v in state.items()}
    rows |= {b: np.broadcast_to(v, rows[b].shape) for b, v in p.target.clamped.items()}
    return {b: np.asarray(v) for b, v in p.target.with_observed(rows).items()}


# the others are expensive to compile, and covered by single chains
COUPLED = ("maximal", "mixture", "lattice", "spin clusters")


@pytest.mark.parametrize("name", often(ALL_CASES, *COUPLED))
def test_coupled_chains_keep_their_distribution_and_stay_together(name: str) -> None:
    """From independent exact draws: both chains stay exact at every sweep, and meetings last."""
    p = problem(name)
    leader, follower = p.exact(2), p.exact(3)
    z = {b: np.stack([leader[b], follower[b]]) for b in p.blocks}
    twice = {b: np.stack([leader[b], leader[b]]) for b in p.blocks}
    equal, agrees, *_ = _coupled(p.target, twice, p.moves, _keys(np.uint32(0)))
    assert np.asarray(agrees).all() and all(
        (v[0] == v[1]).all() for v in map(np.asarray, equal.values())
    )
    has_met, times = np.zeros(ROWS, bool), (0, 1, p.case.num_sweeps - 1)
    for t in range(p.case.num_sweeps):
        z, agrees, broken, accepted = _coupled(
            p.target, z, p.moves, _keys(np.uint32(t))
        )
        z, agrees = {b: np.asarray(v) for b, v in z.items()}, np.asarray(agrees)
        assert not np.asarray(broken).any()
        is_equal = np.all(
            [(v[0] == v[1]).reshape(ROWS, -1).all(1) for v in z.values()], axis=0
        )
        assert is_equal[agrees].all() and agrees[has_met].all()
        has_met = agrees
        for chain in range(2) if t in times else ():
            x = {b: v[chain] for b, v in z.items()}
            p.assert_exact(x, 2 * len(times))
            p.assert_given_units_stay(x)
        if t == 0:
            # the leader ignores the follower, unless trials of a coupling can fail
            may_fail = p.case.is_tempered or any(move.stalls for move in p.moves)
            if not may_fail:
                for b, v in z.items():
                    np.testing.assert_allclose(v[0], equal[b][0], rtol=1e-4, atol=1e-5)
            assert_acceptance(
                p.case, accepted, 2 * sum(move.proposes for move in p.moves)
            )
            assert not agrees.all()
    assert has_met.mean() > 0.6


def test_costly_gibbs_sweeps_are_replaced_in_annealing() -> None:
    """By gradients of the energy, for 20 units that all interact, but not for 8."""
    factors = [factor("v", inputs=20)]
    graph = FactorGraph({"v": Bernoulli(20)}, factors=factors)
    expected = informed_sweep(graph, num_steps=4)
    assert single_moves("ais", graph, None) == expected
    assert single_moves("ais", graph, gibbs_sweep(graph)) == gibbs_sweep(graph)
    assert single_moves("ais", enumerated("visible").graph, None) is None
    table = Table("v", units=[(0, 1)], log_weights=[[0, 0], [0, -np.inf]])
    constrained = FactorGraph({"v": Bernoulli(20)}, factors=[*factors, table])
    assert single_moves("ais", constrained, None) is None
