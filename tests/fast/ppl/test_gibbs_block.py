# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of NumPyro's Gibbs declared as graphs: posterior, moves, tempering and refusals."""

from typing import Any

from block_tools import NOISY, assert_posterior, lattice, run_chains, spin_block, spin_model
from model_cases import Call, run_alone
import numpy as np
from numpyro.infer import NUTS, Gibbs
import pytest
import zoo

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, Categorical, FactorGraph, GibbsBlock, Pairwise
from ebmpp.errors import IntractableError, StateError
from ebmpp.moves import Clusters, Layer, cluster_sweep
from helpers import assert_rows_law, often


def test_gibbs_with_nuts_has_the_posterior() -> None:
    fixed = {"step_size": 0.4, "adapt_step_size": False, "adapt_mass_matrix": False}  # compiles faster
    kernel = Gibbs([(spin_block(), ["x"]), (NUTS(spin_model, max_tree_depth=3, **fixed), None)])
    mcmc = run_chains(kernel, draws=20, num_warmup=20)
    assert_posterior(mcmc)
    assert set(np.unique(mcmc.get_samples()["x"])) == {-1.0, 1.0}


def test_verify_refuses_another_posterior() -> None:
    graph, layout = lattice()
    params = spin_block().within.params
    with pytest.raises(StateError, match="log density changes by"):
        doubled = params | {"even:odd": 2 * params["even:odd"]}
        GibbsBlock(graph, {"x": layout}, doubled).verify(spin_model, NOISY)
    with pytest.raises(StateError, match="not latent sample sites"):
        GibbsBlock(graph, {"z": layout}, params).verify(spin_model, NOISY)


def test_rows_of_a_plate_have_their_own_params() -> None:
    y = np.float32([[0.3, -0.2], [1.0, 0.1], [-0.5, 0.0]])
    graph = FactorGraph({"x": Bernoulli(2)}, factors=[Bias("x")])
    block = GibbsBlock(graph, ["x"], {"x": lambda sites, y: 2 * y * sites["precision"]})
    state = run_alone(block, {"x": np.zeros((3, 2), np.float32)}, 1, 4000, (y,), precision=np.float32(1.5))
    assert_rows_law(state.z["x"], 1 / (1 + np.exp(-3.0 * y)))


def test_given_blocks_are_held() -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    block = GibbsBlock(graph, ["h"], params, given={"v": lambda sites: sites["pixels"]})
    pixels = np.float32([1.0, 0.0, 1.0, 1.0])
    draws = run_alone(block, {"h": np.zeros(3, np.float32)}, 1, 4000, pixels=pixels).z["h"]
    logits = np.asarray(params["h"]) + pixels @ np.asarray(params["v:h"])
    assert_rows_law(draws, 1 / (1 + np.exp(-logits)))


def test_few_units_are_proposed_by_default() -> None:
    """A fraction of the largest layer, where there is a weight."""
    factors = [Bias("a"), Bias("b"), Bilinear("a", "b")]
    graph = FactorGraph({"a": Bernoulli(40), "b": Bernoulli(8)}, factors=factors)
    sizes = lambda **options: (lambda b: (b.fraction, b.num_sweeps))(GibbsBlock(graph, ["a", "b"], **options))
    weight = lambda x, sites: 0.0
    assert sizes() == (1, 1)
    assert sizes(log_weight=weight) == (0.05, 20)
    assert sizes(log_weight=weight, fraction=0.1) == (0.1, 10)
    assert sizes(log_weight=weight, num_sweeps=1) == (0.05, 1)


def test_interacting_latents_need_params_that_do_not_change() -> None:
    deep, params = zoo.graph("deep"), zoo.params("deep")
    scaled = GibbsBlock(deep, ["v"], params | {"v:h1": lambda sites: sites["beta"] * params["v:h1"]})
    around = Call({"beta": 1.0}, (), {})
    with pytest.raises(IntractableError, match="'v:h1' depend on sibling sites"):
        scaled.within.bind({"v": np.zeros(3)}, around)
    GibbsBlock(deep, ["v"], params).within.bind({"v": np.zeros(3)}, around)


# -- moves and tempering ---------------------------------------------------------------------------

EDGES = np.array([[0, 1], [1, 2], [0, 3], [1, 4], [2, 5], [3, 4], [4, 5]])
PAIRS = np.full(len(EDGES), 1.3, np.float32)
FIELD = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def potts(**options: Any) -> GibbsBlock:
    """Six units of three values, in a field whose strength a sibling decides."""
    graph = FactorGraph({"z": Categorical(6, 3)}, factors=[Bias("z"), Pairwise("z", EDGES)])
    if options.get("moves") == "sweep":
        options["moves"] = (*cluster_sweep(graph), Layer(("z",)))
    return GibbsBlock(graph, ["z"], {"z": lambda sites: sites["strength"] * FIELD, "z:z": PAIRS}, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "clusters": {"moves": Clusters("z")},
    "clusters_and_layers": {"moves": "sweep"},
    "tempering": {"tempering": [0.3, 0.6, 0.8, 1.0]},
    "both": {"moves": Clusters("z"), "tempering": [0.5, 1.0], "num_sweeps": 2},
}


@pytest.mark.parametrize("name", often(OPTIONS, "clusters"))
def test_moves_and_tempering_have_the_posterior(name: str) -> None:
    block = potts(**OPTIONS[name])
    state = run_alone(block, {"z": np.zeros(6, int)}, 30, 3000, strength=np.float32(0.7))
    states = np.stack(np.unravel_index(np.arange(3**6), (3,) * 6), 1)
    log = 1.3 * (states[:, EDGES[:, 0]] == states[:, EDGES[:, 1]]).sum(1)
    log = log + 0.7 * FIELD[np.arange(6), states].sum(1)
    weight = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
    one_hot = lambda z: (np.asarray(z)[..., None] == np.arange(3)).astype(float)
    assert_rows_law(one_hot(state.z["z"]), np.einsum("n,nik->ik", weight, one_hot(states)))
    accepted = float(np.mean(state.transitions)) / 30
    assert 0.1 < accepted < 1 if "tempering" in OPTIONS[name] else accepted == 0


def test_tempered_transition_preserves_the_distribution_row_by_row() -> None:
    graph = FactorGraph({"z": Categorical(2, 3)}, factors=[Bias("z"), Pairwise("z", np.array([[0, 1]]))])
    bias = np.float32([[[0.0, 1.0, -1.0], [0.5, 0.0, 0.0]], [[1.0, 0.0, 0.0], [0.0, -0.5, 2.0]]])
    block = GibbsBlock(graph, ["z"], {"z": bias, "z:z": np.float32([2.0])}, tempering=[0.2, 1.0])
    a, b = np.divmod(np.arange(9), 3)
    log = bias[:, 0, a] + bias[:, 1, b] + 2.0 * (a == b)
    weight = np.exp(log) / np.exp(log).sum(1, keepdims=True)
    generator = np.random.default_rng(0)
    drawn = np.stack([generator.choice(9, 6000, p=p) for p in weight], 1)

    def step(key: Any, z: Any) -> Any:
        return block.sample(block.init(key, 0, {"z": z}, (), {}), (), {})

    keys, start = jax.random.split(jax.random.key(1), 6000), np.stack(np.divmod(drawn, 3), -1)
    state = jax.tree.map(np.asarray, jax.jit(jax.vmap(step))(keys, start)._replace(rng_key=0))
    numbers = state.z["z"][..., 0] * 3 + state.z["z"][..., 1]
    assert_rows_law(numbers[..., None] == np.arange(9), weight)
    assert state.transitions.shape == (6000, 2) and 0 < state.transitions.mean() < 1
    assert (state.transitions[:, 0] != state.transitions[:, 1]).any()


def test_log_weight_is_corrected_by_metropolis() -> None:
    graph = FactorGraph({"z": Bernoulli(4)}, factors=[Bias("z")])
    bias, weight = np.float32([0.5, -0.5, 0.0, 1.0]), lambda x, sites: 2.0 * jnp.cos(x["z"].sum())
    block = GibbsBlock(graph, ["z"], {"z": bias}, log_weight=weight, fraction=0.5)
    state = run_alone(block, {"z": np.zeros(4, int)}, 40, 4000)
    states = (np.arange(16)[:, None] >> np.arange(4)) & 1
    log = states @ bias + 2.0 * np.cos(states.sum(1))
    assert_rows_law(state.z["z"], np.exp(log) @ states / np.exp(log).sum())
