# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local informed moves: detailed balance by enumeration, special cases, impossible states.

Tests moves/gradients/density.py, moves/gradients/informed.py.
"""

from functools import cache
import itertools
from typing import Any

import networkx as nx
import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Categorical, Factor, FactorGraph, Spin
from ebmpp.contrib import GibbsWithGradients
from ebmpp.core import random
from ebmpp.moves import Informed, Layer, Target, informed_sweep
from ebmpp.moves.gradients.informed import States, log_ratio
from ebmpp.moves.move import coupled_sweep, draw_sweep
from ebmpp.moves.rungs import Tempering
from helpers import assert_law

STATES = np.array(list(itertools.product((-1, 1), (-1, 1), range(3), range(3))))
BLOCKS = {"v": Spin(2), "c": Categorical(2, 3)}
ROWS = {"v": np.float32(STATES[:, :2]), "c": np.int32(STATES[:, 2:])}
REFERENCE = {"v": np.float32([0.3, -0.5]), "c": np.float32([[0, 1, -1], [2, 0, 0.5]])}


def network(params: Any, v: jax.Array, c: jax.Array) -> jax.Array:
    z = jnp.concatenate([v, c.ravel()])
    hidden = jnp.tanh(jnp.tanh(z @ params["first"]) @ params["second"])
    return -(params["bias"] @ z + hidden @ params["last"])


@cache
def problem() -> tuple[FactorGraph, dict[str, Any]]:
    """A graph of two spins and two units of three categories under a random network."""
    normal = np.random.default_rng(1).standard_normal
    params = {
        "first": 1.5 * normal((8, 7)),
        "second": normal((7, 4)),
        "last": 2 * normal(4),
        "bias": normal(8),
    }
    factor = Factor("v", "c", energy=network, init=params, name="net", affine=False)
    return FactorGraph(BLOCKS, factors=[factor]), {
        "net": jax.tree.map(np.float32, params)
    }


def pairs_of_states(states: States) -> tuple[States, States]:
    """All pairs of states, as rows."""
    count = len(STATES)
    first, second = np.divmod(np.arange(count**2), count)
    at = lambda rows: jax.tree.map(lambda a: a[rows], states)
    return at(first), at(second)


def log_proposals(old: States, new: States) -> np.ndarray:
    terms = [jnp.where(new.here[b], v, 0) for b, v in old.logits.items()]
    logs = sum(np.asarray(t, float).reshape(len(t), -1).sum(1) for t in terms)
    return logs.reshape(len(STATES), -1)


@pytest.mark.parametrize("beta", [None, 0.4])
@pytest.mark.parametrize("step_size", [0.2, 0.9])
@pytest.mark.parametrize("rule", ["dmala", "dlmc", "heat_bath", "gwg"])
def test_transitions_are_in_detailed_balance(rule, step_size, beta):
    graph, params = problem()
    tempering = None if beta is None else Tempering(jnp.asarray(beta), REFERENCE)
    target = Target(graph, params, tempering=tempering)
    is_single = rule == "gwg"
    move = Informed(("v", "c"), "dmala" if is_single else rule, step_size)
    if is_single:
        move = GibbsWithGradients(("v", "c"), step_size=step_size)

    @jax.jit
    def evaluate(x):
        states = move.evaluate(target, x, x)
        old, new = pairs_of_states(states)
        return states, old, new, log_ratio(old, new)

    states, old, new, ratio = jax.device_get(evaluate(ROWS))
    log_density = np.asarray(states.score, float)
    log_q = log_proposals(old, new)
    if is_single:
        flat = [
            np.asarray(v, float).reshape(len(v), -1) for v in states.logits.values()
        ]
        normalizer = np.logaddexp.reduce(np.concatenate(flat, 1), axis=1)
        log_density = log_density + normalizer
        num_changes = (STATES[:, None] != STATES[None]).sum(-1)
        log_q = np.where(num_changes == 1, log_q - normalizer[:, None], -np.inf)
    else:
        np.testing.assert_allclose(np.exp(log_q).sum(1), 1, atol=1e-5)
    energies = np.asarray(graph.energy(params, ROWS), float)
    exact = -energies
    if beta is not None:
        products = [
            (graph.statistics(ROWS)[b] * e).reshape(len(STATES), -1).sum(1)
            for b, e in REFERENCE.items()
        ]
        exact = beta * exact + (1 - beta) * np.asarray(sum(products), float)
    np.testing.assert_allclose(
        log_density - log_density[0], exact - exact[0], atol=2e-5
    )
    p = np.exp(log_density - np.logaddexp.reduce(log_density))
    assert p.max() / p.min() > 100
    ratio = np.asarray(ratio, float).reshape(log_q.shape)
    transition = np.exp(log_q + np.minimum(ratio, 0))
    np.fill_diagonal(transition, 0)
    assert (transition.sum(1) < 1 + 1e-6).all()
    flow = p[:, None] * transition
    np.testing.assert_allclose(flow, flow.T, rtol=1e-4, atol=1e-12)
    assert flow.sum() > 0.1  # share of steps that move


def lattice() -> tuple[FactorGraph, dict[str, Any]]:
    graph = FactorGraph.from_networkx(nx.cycle_graph(6), lambda n: Categorical(n, 3))
    generator = np.random.default_rng(2)
    return graph, {
        "x": np.float32(generator.normal(size=(6, 3))),
        "x:x": np.float32(generator.normal(size=6)),
    }


def test_a_quadratic_energy_is_accepted_by_the_normalisers_alone():
    """DMALA's log-ratio is the sum of log Z_i at the old state less that at the new one."""
    graph, params = lattice()
    target = Target(graph, params)
    move = Informed(("x",), "dmala", 0.7)
    generator = np.random.default_rng(3)
    old, new = ({"x": np.int32(generator.integers(0, 3, (50, 6)))} for _ in range(2))

    @jax.jit
    def evaluate(old, new):
        a, b = (move.evaluate(target, x, x) for x in (old, new))
        return a, b, log_ratio(a, b)

    a, b, ratio = jax.device_get(evaluate(old, new))
    # the log-probability of staying is minus log Z_i, as the gain of staying is 0
    log_z = [-np.where(s.here["x"], s.logits["x"], 0).sum((1, 2)) for s in (a, b)]
    np.testing.assert_allclose(ratio, log_z[0] - log_z[1], atol=2e-4)


def test_heat_baths_of_units_that_do_not_interact_are_always_accepted():
    graph = zoo.graph("categorical")
    params = zoo.params("categorical")
    keys = random.fold_in(np.zeros(2, np.uint32), np.arange(500))
    x = zoo.oracle("categorical").draw(np.random.default_rng(0), 500)
    move = Informed(("v",), "heat_bath", 1.0, 3)
    new, accepted = jax.jit(lambda x: move.draw(Target(graph, params), x, keys))(x)
    assert (np.asarray(accepted) == 3).all()
    assert (np.asarray(new["v"]) != x["v"]).mean() > 0.2


def test_impossible_states_are_never_entered_and_nan_is_reported():
    def energy(scale, v):
        return jnp.where(v.sum() > 0, jnp.inf, 0.0) + scale * v[0]

    graph = FactorGraph(
        {"v": Spin(3)}, factors=[Factor("v", energy=energy, init=0.5, affine=False)]
    )
    keys = random.fold_in(np.zeros(2, np.uint32), np.arange(200))
    z = {"v": np.full((2, 200, 3), -1.0, np.float32)}
    moves = (Informed(("v",), num_steps=4),)

    @jax.jit
    def run(scale, z):
        target = Target(graph, {"v": scale})
        alone, _ = draw_sweep(target, {"v": z["v"][0]}, moves, keys)
        return alone["v"], *coupled_sweep(target, z, moves, keys)[:3]

    alone, both, _, broken = run(np.float32(0.5), z)
    assert (np.asarray(alone).sum(1) <= 0).all() and not np.asarray(broken).any()
    assert (np.asarray(both["v"]).sum(2) <= 0).all() and (np.asarray(alone) > 0).any()
    alone, _, _, broken = run(np.float32(np.nan), z)
    assert np.isnan(alone).all() and np.asarray(broken).all()


def test_sweeps_move_the_blocks_that_no_layer_draws_at_once():
    def moves(block, num_steps):
        first = Informed((block,), "heat_bath", 1.0, 1)
        return first, Informed((block,), num_steps=num_steps)

    assert informed_sweep(zoo.graph("lattice")) == moves("x", 10)
    latents = Layer(("h",), "maximal")
    assert informed_sweep(zoo.graph("rbm")) == (*moves("v", 1), latents)
    only = Informed(("v",), "dlmc", 0.2, 3)
    assert informed_sweep(zoo.graph("rbm"), (), "dlmc", 0.2, 3) == (only, latents)
    assert informed_sweep(zoo.graph("rbm"), ("v",)) == (Layer(("h",), "maximal"),)
    assert informed_sweep(zoo.graph("gaussian")) == (
        Layer(("v",), "maximal"),
        latents,
    )


@pytest.mark.nightly
def test_expectations_under_a_network_are_unbiased():
    graph, params = problem()
    result = ebmpp.unbiased_expectation(
        graph,
        params,
        lambda x: (x["v"], x["c"] == 1),
        rng_key=zoo.KEY,
        num_pairs=zoo.NUM_PAIRS,
        coupling=informed_sweep,
    )
    log_p = -np.asarray(graph.energy(params, ROWS), float)
    p = np.exp(log_p - np.logaddexp.reduce(log_p))
    exact = p @ ROWS["v"], p @ (ROWS["c"] == 1)
    for value, mean, error in zip(
        result.value, exact, result.standard_error, strict=True
    ):
        assert_law(value, mean, error, 4)
    assert result.met.all() and 0.1 < result.acceptance < 1
