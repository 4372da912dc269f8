# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Hamiltonian moves of fields and angles on small lattices, against quadrature.

Tests moves/gradients/hamiltonian.py.
"""

from functools import cache
import itertools
from typing import Any

from mcmc_tools import run_mcmc, samples
import networkx as nx
import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Factor,
    FactorGraph,
    Gaussian,
    Observed,
    VonMises,
)
from ebmpp.core import random
from ebmpp.errors import ArgumentError
from ebmpp.graph.states import as_clamped
from ebmpp.moves import (
    Hamiltonian,
    Informed,
    Layer,
    Target,
    gibbs_sweep,
    informed_sweep,
)
from ebmpp.moves.move import coupled_sweep, draw_sweep
from ebmpp.moves.rungs import Tempering
from helpers import assert_law, assert_rows_law, nightly

ROWS = 2000
RING = [(0, 1), (1, 2), (2, 0)]
KEYS = random.fold_in(np.zeros(2, np.uint32), np.arange(ROWS))


def phi4(params: Any, phi: jax.Array) -> jax.Array:
    """A ring of the field theory; the base measure of a Gaussian block is the mass term."""
    gradient = ((phi - jnp.roll(phi, 1)) ** 2).sum()
    return (
        0.5 * gradient
        + params["quartic"] * (phi**2 - 1) @ (phi**2 - 1)
        - params["field"] * phi.sum()
    )


def coupled_fields(strength: jax.Array, phi: jax.Array, s: jax.Array) -> jax.Array:
    return strength * (phi**4).sum() - (phi @ s) ** 2


def nematic(strength: jax.Array, t: jax.Array) -> jax.Array:
    """A ring of angles that align up to half a turn, and a field."""
    overlaps = (t * jnp.roll(t, 1, axis=0)).sum(-1)
    return -strength * (overlaps**2).sum() - 0.7 * t[:, 0].sum()


CASES = {
    "phi4": (
        lambda: FactorGraph(
            {"x": Gaussian(3)},
            factors=[
                Factor(
                    "x",
                    energy=phi4,
                    init={"quartic": 1.0, "field": 0.4},
                    affine=False,
                )
            ],
        ),
        {"x": {"quartic": np.float32(1.0), "field": np.float32(0.4)}},
    ),
    "xy": (
        lambda: FactorGraph.from_networkx(nx.Graph(RING), VonMises, shared=True),
        {
            "x": np.float32([[1.0, 0.3], [-0.5, 0.8], [0, 0]]),
            "x:x": np.float32(1.5),
        },
    ),
    "nematic": (
        lambda: FactorGraph(
            {"x": VonMises(3)},
            factors=[Factor("x", energy=nematic, init=1.0, affine=False)],
        ),
        {"x": np.float32(1.4)},
    ),
}


@cache
def problem(name: str) -> tuple[FactorGraph, Any, np.ndarray, np.ndarray]:
    """A graph, params, the points of a grid and their probabilities."""
    make, params = CASES[name]
    graph = make()
    line = (
        np.linspace(-4, 4, 49) if name == "phi4" else np.arange(48) * np.pi / 24 - np.pi
    )
    points = np.float32(list(itertools.product(line, repeat=3)))
    log_p = np.asarray(graph_log_density(graph, params, points), float)
    p = np.exp(log_p - np.logaddexp.reduce(log_p))
    return graph, params, points, p


def graph_log_density(graph: FactorGraph, params: Any, points: np.ndarray) -> Any:
    base = graph.families["x"].log_base_measure(points).sum(-1)
    return base - graph.energy(params, {"x": points})


def features(x: Any) -> np.ndarray:
    """Periodic and polynomial functions of the units and of pairs."""
    x = np.asarray(x, float)
    differences = x - np.roll(x, 1, axis=1)
    parts = [
        np.cos(x),
        np.sin(x),
        np.cos(2 * x),
        np.cos(differences),
        np.sin(2 * differences),
    ]
    return np.concatenate(parts, 1)


def draws(name: str, seed: int) -> np.ndarray:
    _, _, points, p = problem(name)
    generator = np.random.default_rng(seed)
    x = points[generator.choice(len(p), ROWS, p=p)]
    width = 8 / 48 if name == "phi4" else np.pi / 24
    return np.float32(x + generator.uniform(-0.5, 0.5, x.shape) * width)


@pytest.mark.parametrize("name", ["phi4", nightly("xy"), nightly("nematic")])
@pytest.mark.parametrize("num_steps", [6, nightly(1)])
def test_moves_reach_the_distribution_and_pairs_meet(name, num_steps):
    graph, params, points, p = problem(name)
    exact = p @ features(points)
    moves = (Hamiltonian(("x",), 0.3, num_steps, 0.4),)

    @jax.jit
    def alone(x, t):
        return draw_sweep(Target(graph, params), x, moves, random.fold_in(KEYS, t))

    @jax.jit
    def coupled(z, t):
        return coupled_sweep(Target(graph, params), z, moves, random.fold_in(KEYS, t))

    x = {"x": np.zeros((ROWS, 3), np.float32)}
    num_sweeps = 25 if name == "phi4" and num_steps > 1 else 100
    for t in range(num_sweeps):
        x, accepted = alone(x, np.uint32(t))
    assert 0.5 < np.mean(accepted) < 1
    assert_rows_law(features(x["x"]), exact, 60)
    z = {"x": np.stack([draws(name, 1), np.asarray(x["x"])])}
    has_met = np.zeros(ROWS, bool)
    for t in range(num_sweeps):
        z, met, broken, _ = coupled(z, np.uint32(1000 + t))
        met = np.asarray(met)
        assert not np.asarray(broken).any() and met[has_met].all()
        assert (np.asarray(z["x"][0] == z["x"][1]).all(1) == met).all()
        has_met = met
    assert has_met.mean() > 0.6
    for chain in np.asarray(z["x"]):
        assert_rows_law(features(chain), exact, 60)
        if name != "phi4":
            assert (np.abs(chain) <= np.pi * (1 + 1e-6)).all()


@pytest.mark.nightly
def test_angles_are_drawn_from_their_conditionals():
    graph, params, points, p = problem("xy")
    moves = gibbs_sweep(graph)

    @jax.jit
    def sweep(x, t):
        keys = random.fold_in(KEYS, t)
        return draw_sweep(Target(graph, params), x, moves, keys)[0]

    x = {"x": np.zeros((ROWS, 3), np.float32)}
    for t in range(20):
        x = sweep(x, np.uint32(t))
    assert_rows_law(features(x["x"]), p @ features(points), 60)


@pytest.mark.nightly
def test_observed_units_stay_and_latents_are_drawn_beside_a_tempered_field():
    """Beside the reference, at half the inverse temperature."""
    graph = FactorGraph(
        {"x": Gaussian(3)},
        {"h": Bernoulli(2)},
        [
            Bilinear("x", "h"),
            Bias("h"),
            Factor(
                "x", energy=phi4, init=CASES["phi4"][1]["x"], name="phi4", affine=False
            ),
        ],
    )
    assert informed_sweep(graph) == (Hamiltonian(("x",)), Layer(("h",), "maximal"))
    assert informed_sweep(graph, ("x",)) == (Layer(("h",), "maximal"),)
    weights = np.float32([[1, -1], [0.5, 0.2], [-0.7, 1.2]])
    params = {
        "x:h": weights,
        "h": np.float32([0.2, -0.4]),
        "phi4": CASES["phi4"][1]["x"],
    }
    reference = {"x": np.float32([0.3, 0, -0.2]), "h": np.float32([1, 0])}
    observed = Observed(np.float32([0.8, 0, 0]), np.array([True, False, False]))
    fixed = as_clamped(graph.families, {"x": observed})
    target = Target(
        graph, params, fixed, tempering=Tempering(jnp.asarray(0.5), reference)
    )
    moves = (Hamiltonian(("x",), 0.3, 5), Layer(("h",)))

    @jax.jit
    def sweep(x, t):
        return draw_sweep(target, x, moves, random.fold_in(KEYS, t))[0]

    x = target.with_observed(
        {b: np.zeros((ROWS, f.size), np.float32) for b, f in graph.families.items()}
    )
    for t in range(25):
        x = sweep(x, np.uint32(t))
    assert (np.asarray(x["x"])[:, 0] == np.float32(0.8)).all()
    line = np.linspace(-4, 4, 81)
    grid = np.float32(list(itertools.product([0.8], line, line)))
    eta = 0.5 * (grid @ weights + params["h"]) + 0.5 * reference["h"]
    log_p = graph.families["x"].log_base_measure(grid).sum(-1)
    log_p = np.asarray(log_p + 0.5 * grid @ reference["x"], float)
    log_p -= 0.5 * np.asarray(jax.vmap(lambda v: phi4(params["phi4"], v))(grid), float)
    log_p += np.logaddexp(0, eta).sum(1)
    p = np.exp(log_p - np.logaddexp.reduce(log_p))
    assert_rows_law(features(x["x"])[:, 1:3], p @ features(grid)[:, 1:3], 4)
    assert_rows_law(np.asarray(x["h"]), p @ (1 / (1 + np.exp(-eta))), 4)


@pytest.mark.parametrize("name", ["phi4", nightly("xy"), nightly("nematic")])
@pytest.mark.parametrize("kind", ["ais", nightly("smc"), nightly("bracket")])
def test_log_z_is_that_of_quadrature(kind, name):
    """Moves and the reference, with the means of a pilot, are defaults."""
    graph, params, points, _ = problem(name)
    exact = np.asarray(graph_log_density(graph, params, points), float)
    width = points[1, 2] - points[0, 2]
    exact = np.logaddexp.reduce(exact) + 3 * np.log(width)
    options = {} if kind == "smc" else {"num_temperatures": 50}
    call = getattr(ebmpp, kind)
    result = call(graph, params, rng_key=zoo.KEY, num_particles=1000, **options)
    sides = [result.lower, result.upper] if kind == "bracket" else [result]
    for side in sides:
        assert side.doubt is None
        assert_law(side.log_partition, exact, side.standard_error, len(sides))
        assert side.standard_error < 0.05


def test_settings_of_a_sweep_reach_trajectories():
    graph, *_ = problem("phi4")
    assert informed_sweep(graph) == (Hamiltonian(("x",)),)
    expected = (Hamiltonian(("x",), 0.05, 3),)
    assert informed_sweep(graph, step_size=0.05, num_steps=3) == expected
    mixed = FactorGraph(
        {"x": Gaussian(3), "s": ebmpp.Spin(3)},
        factors=[Factor("x", "s", energy=coupled_fields, init=1.0, affine=False)],
    )
    assert [type(move) for move in informed_sweep(mixed)[1:]] == [Informed, Hamiltonian]
    assert informed_sweep(mixed, ["s"], step_size=0.05) == (Hamiltonian(("x",), 0.05),)
    message = r"None where finite .*'s'.* and real-valued .*'x'.* both move, got 0.05"
    with pytest.raises(ArgumentError, match=message):
        informed_sweep(mixed, step_size=0.05)
    for name, value in {"step_size": 0.0, "num_steps": 0}.items():
        with pytest.raises(ArgumentError, match=name):
            informed_sweep(graph, **{name: value})


def test_kernels_report_trajectories_that_end_too_high():
    """Rows of known units alone have nothing to reject."""
    graph, params, *_ = problem("phi4")
    moves = (Hamiltonian(("x",), 3.0, 3),)
    known = np.array([[False] * 3, [True] * 3])
    observed = Observed(np.where(known, 0.3, np.nan), known)
    options = {"num_samples": 100, "num_chains": 2, "num_warmup": 0}
    kernel = ebmpp.BlockedGibbs(graph, moves=moves)
    mcmc = run_mcmc(kernel, params, clamped={"x": observed}, **options)
    np.testing.assert_array_equal(
        mcmc.last_state.acceptance < 0.05, [[True, False]] * 2
    )
    with pytest.warns(
        UserWarning, match="to_datatree: 2 of 4 chains accept less than 5%"
    ):
        ebmpp.to_datatree(mcmc)
    pairs = ebmpp.MaximalCoupling(graph, coupling=moves)
    state = run_mcmc(pairs, params, **options).last_state
    assert (state.acceptance < 0.05).all()
    assert ", acceptance 0" in pairs.get_diagnostics_str(state)


@pytest.mark.parametrize("outside", [np.inf, np.nan])
def test_energies_that_are_nan_are_reported_and_infinite_ones_are_rejected(outside):
    def energy(height, x):
        return jnp.where(x[0] > 0.5, height, 0.0)

    factor = Factor("x", energy=energy, init=0.0, affine=False)
    graph = FactorGraph({"x": Gaussian(3)}, factors=[factor])
    moves = (Hamiltonian(("x",), 0.3, 3),)
    x = {"x": np.zeros((ROWS, 3), np.float32)}

    @jax.jit
    def run(height):
        target = Target(graph, {"x": height})
        z = {"x": np.stack([x["x"], x["x"]])}
        alone, _ = draw_sweep(target, x, moves, KEYS)
        return alone["x"], coupled_sweep(target, z, moves, KEYS)[2]

    alone, broken = map(np.asarray, run(np.float32(outside)))
    is_nan = np.isnan(alone).all(1)
    assert (is_nan == broken).all()
    assert (0.05 < broken.mean() < 0.9) if np.isnan(outside) else not broken.any()
    valid = alone[~is_nan]
    assert (valid[:, 0] <= 0.5).all() and (valid != 0).mean() > 0.5


@pytest.mark.nightly
def test_tempered_chains_take_moves():
    graph, params, points, p = problem("phi4")
    moves = (Hamiltonian(("x",), 0.3, 4),)
    kernel = ebmpp.ParallelTempering(graph, [0.0, 0.3, 1.0], moves=moves)
    x = run_mcmc(kernel, params, num_samples=10, num_chains=ROWS, num_warmup=0)
    last = samples(x)["x"][:, -1]
    assert_rows_law(features(last), p @ features(points), 60)
