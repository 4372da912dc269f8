# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Splits of graphs into induced forests, and forest moves in kernels, expectations and training.

Agreement of the sweeps with enumeration, coupled marginals included, is tested in
test_sweeps.py.

Tests moves/forest_moves.py, moves/forests/layers.py, moves/forests/tables.py.
"""

import networkx as nx
import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
import optax

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    FactorGraph,
    Pairwise,
    Poisson,
    Spin,
)
from ebmpp.core.types import HashableArray
from ebmpp.errors import IntractableError
from ebmpp.moves import Forests, Layer, Target, forest_sweep
from helpers import assert_law, random_params

LINE = nx.path_graph(4)


def chain_machine() -> FactorGraph:
    """An RBM with a chain among its latents."""
    factors = [Bias("v"), Bias("h"), Bilinear("v", "h"), Pairwise("h", LINE)]
    return FactorGraph({"v": Bernoulli(3)}, {"h": Categorical(4, 3)}, factors)


def units_of(move: Forests) -> dict[str, list[int]]:
    return {b: numbers.array.tolist() for b, numbers in move.units}


@pytest.mark.parametrize("side", [4, 16])
def test_a_torus_takes_two_forests(side: int) -> None:
    torus = nx.convert_node_labels_to_integers(
        nx.grid_2d_graph(side, side, periodic=True)
    )
    moves = forest_sweep(
        FactorGraph.from_networkx(torus, Spin, shared=True, bias=False)
    )
    layers = [units_of(move)["x"] for move in moves]
    assert len(layers) == 2
    assert sorted(layers[0] + layers[1]) == list(torus)
    assert all(nx.is_forest(torus.subgraph(units)) for units in layers)
    assert len(layers[0]) > 0.55 * len(torus)


def test_trees_are_one_draw_and_other_blocks_keep_their_layers() -> None:
    (tree,) = forest_sweep(
        FactorGraph.from_networkx(nx.random_labeled_tree(30, seed=0), Spin)
    )
    assert units_of(tree) == {"x": list(range(30))}
    assert not tree.reads(
        FactorGraph.from_networkx(nx.random_labeled_tree(30, seed=0), Spin)
    )
    machine = chain_machine()
    chain, layer = forest_sweep(machine)
    assert layer == Layer(("v",), "maximal")
    assert units_of(chain) == {"h": [0, 1, 2, 3]}
    assert chain.reads(machine) == ("v",)
    assert forest_sweep(machine, ["v"]) == (chain,)
    star = forest_sweep(ebmpp.layered(a=Spin(1), b=Bernoulli(5), c=Poisson(2)))
    assert [move.blocks for move in star] == [("a", "b"), ("c",)]


def test_three_units_of_one_term_are_never_in_one_forest() -> None:
    blocks = {b: Bernoulli(1) for b in "abc"}
    energy = lambda params, a, b, c: -(params * a * b * c).sum()
    gate = ebmpp.Factor("a", "b", "c", energy=energy, init=np.zeros(1))
    moves = forest_sweep(FactorGraph(blocks, factors=[*map(Bias, blocks), gate]))
    assert [move.blocks for move in moves] == [("a", "b"), ("c",)]


def test_graphs_without_forests_and_cycles_are_refused_by_name() -> None:
    counts = FactorGraph(
        {"n": Poisson(3)}, factors=[Bias("n"), Pairwise("n", nx.path_graph(3))]
    )
    with pytest.raises(IntractableError, match="'n'"):
        forest_sweep(counts)
    with pytest.raises(IntractableError, match="'v'"):
        forest_sweep(ebmpp.layered(v=Poisson(3), h=Spin(2)), ["h"])
    ring = FactorGraph.from_networkx(nx.cycle_graph(4), Spin)
    with pytest.raises(IntractableError, match="'x'"):
        Forests((("x", HashableArray.copy(np.arange(4))),)).check(ring)
    with pytest.raises(IntractableError, match="'n'"):
        Forests((("n", HashableArray.copy(np.arange(3))),)).check(counts)
    machine = chain_machine()
    units = tuple(
        (b, HashableArray.copy(np.arange(f.size))) for b, f in machine.families.items()
    )
    with pytest.raises(IntractableError, match="factor"):
        Forests(units).check(machine)


@pytest.mark.nightly
def test_a_hidden_chain_is_one_exact_draw_per_sweep() -> None:
    machine = chain_machine()
    params, v = random_params(machine, seed=2, scale=1.0), np.float32([1, 0, 1])
    kernel = ebmpp.BlockedGibbs(machine, moves=forest_sweep(machine, ["v"]))
    mcmc = MCMC(
        kernel,
        num_warmup=1,
        num_samples=2000,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), params, v=v)
    drawn = np.eye(3)[np.asarray(mcmc.get_samples(group_by_chain=True)["h"])]
    exact = np.asarray(ebmpp.exact.moments(ebmpp.condition(machine, v=v), params)["h"])
    flat = drawn.reshape(-1, 4, 3)
    assert_law(flat.mean(0), exact, flat.std(0) / np.sqrt(len(flat)))
    centred = drawn - exact  # draws are independent
    states = np.stack(np.unravel_index(np.arange(81), (3,) * 4), 1)
    energy = machine.energy(params, {"v": np.tile(v, (81, 1)), "h": states})
    hot, weights = np.eye(3)[states], np.asarray(jax.nn.softmax(-energy))
    single, pairs = kernel.moves[0].marginals(
        Target(machine, params), {"v": v[None], "h": states[:1]}
    )
    np.testing.assert_allclose(single["h"][0], exact, atol=1e-5)
    joint = np.einsum("s,sei,sej->eij", weights, hot[:, :-1], hot[:, 1:])
    np.testing.assert_array_equal(pairs["h", "h"].units, [[0, 1], [1, 2], [2, 3]])
    np.testing.assert_allclose(pairs["h", "h"].probabilities[0], joint, atol=1e-5)
    product = (centred[:, 1:] * centred[:, :-1]).reshape(-1, 4, 3)
    assert_law(product.mean(0), 0.0, product.std(0) / np.sqrt(len(product)))


@pytest.mark.nightly
def test_expectations_are_unbiased_and_a_tree_meets_at_once() -> None:
    machine = chain_machine()
    params = random_params(machine, seed=2, scale=1.0)
    options = {
        "rng_key": jax.random.key(1),
        "num_pairs": 500,
        "k": 1,
        "m": 4,
        "coupling": forest_sweep,
    }
    result = ebmpp.unbiased_expectation(machine, params, lambda x: x, **options)
    assert result.met.all()
    exact = np.asarray(ebmpp.exact.moments(machine, params)["v"])
    assert_law(result.value["v"], exact, result.standard_error["v"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ucd", "pcd"])
def test_machines_with_chains_are_trained(name: str) -> None:
    """Chains among the latents, for which PCD has no positive phase, or among the visible units."""
    visible = FactorGraph(
        {"v": Bernoulli(3)}, factors=[Bias("v"), Pairwise("v", nx.path_graph(3))]
    )
    machine = chain_machine() if name == "ucd" else visible
    ucd = ebmpp.UCD(num_pairs=20, coupling=forest_sweep)
    rows = (np.random.default_rng(0).random((16, 3)) < [0.8, 0.8, 0.2]).astype(
        np.float32
    )
    start = machine.init(jax.random.key(0))
    fit = ebmpp.fit(
        machine,
        {"v": rows},
        estimator=ucd
        if name == "ucd"
        else ebmpp.PCD(num_chains=20, moves=forest_sweep(machine)),
        optimizer=optax.sgd(0.2),
        num_steps=8,
        batch_size=16,
        rng_key=jax.random.key(0),
        params=start,
        progress_bar=False,
    )
    likelihood = lambda params: float(
        ebmpp.exact.log_likelihood(machine, params, {"v": rows}).mean()
    )
    assert likelihood(fit.params) > likelihood(start) + 0.1
