# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of NumPyro's Gibbs declared as graphs: posterior, moves, tempering and refusals.

Tests ppl/binding.py, ppl/bound.py, ppl/gibbs_block.py.
"""

import pickle
from typing import Any

from block_tools import (
    EVEN,
    NOISY,
    WEIGHTS,
    assert_posterior,
    lattice,
    run_chains,
    short_hmc,
    spin_block,
    spin_model,
)
from model_cases import Call, run_alone
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS, Gibbs, HMCGibbs
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Categorical,
    Factor,
    FactorGraph,
    GibbsBlock,
    Pairwise,
    layered,
)
from ebmpp.errors import IntractableError, StateError
from ebmpp.moves import Clusters, Layer, cluster_sweep
from ebmpp.ppl import gibbs_fn
from helpers import assert_rows_law, nightly, often


@pytest.mark.nightly
def test_verify_refuses_another_posterior() -> None:
    graph, layout = lattice()
    params = spin_block().binding.params
    with pytest.raises(StateError, match="log density changes by"):
        doubled = params | {"even:odd": 2 * params["even:odd"]}
        GibbsBlock(graph, {"x": layout}, doubled).verify(spin_model, NOISY)
    with pytest.raises(StateError, match="latent sample site"):
        GibbsBlock(graph, {"z": layout}, params).verify(spin_model, NOISY)


def test_rows_of_a_plate_have_their_own_params() -> None:
    y = np.float32([[0.3, -0.2], [1.0, 0.1], [-0.5, 0.0]])
    graph = FactorGraph({"x": Bernoulli(2)}, factors=[Bias("x")])
    block = GibbsBlock(graph, ["x"], {"x": lambda sites, y: 2 * y * sites["precision"]})
    state = run_alone(
        block,
        {"x": np.zeros((3, 2), np.float32)},
        1,
        4000,
        (y,),
        precision=np.float32(1.5),
    )
    assert_rows_law(state.z["x"], 1 / (1 + np.exp(-3.0 * y)))


@pytest.mark.nightly
def test_given_blocks_are_held() -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    block = GibbsBlock(
        graph, ["h"], params, clamped={"v": lambda sites: sites["pixels"]}
    )
    pixels = np.float32([1.0, 0.0, 1.0, 1.0])
    draws = run_alone(block, {"h": np.zeros(3, np.float32)}, 1, 4000, pixels=pixels).z[
        "h"
    ]
    logits = np.asarray(params["h"]) + pixels @ np.asarray(params["v:h"])
    assert_rows_law(draws, 1 / (1 + np.exp(-logits)))


@pytest.mark.nightly
@pytest.mark.parametrize("coupling", [40.0, 0.0])
def test_sites_that_never_moved_are_reported(coupling: float) -> None:
    params = {"x": np.zeros(9, np.float32), "x:x": np.full(12, coupling, np.float32)}
    block = GibbsBlock(zoo.graph("lattice"), ["x"], params)
    state = block.init(jax.random.key(0), 0, {"x": np.ones(9, np.float32)}, (), {})
    for _ in range(3):
        state = block.sample(state, (), {})
    assert state.still["x"] == (coupling > 0)
    assert ("['x'] NOT MOVED" in block.get_diagnostics_str(state)) == (coupling > 0)


def test_few_units_are_proposed_by_default() -> None:
    """A fraction of the largest layer, where there is a weight."""
    factors = [Bias("a"), Bias("b"), ebmpp.Bilinear("a", "b")]
    graph = FactorGraph({"a": Bernoulli(40), "b": Bernoulli(8)}, factors=factors)
    sizes = lambda **options: (lambda b: (b.fraction, b.num_sweeps))(
        GibbsBlock(graph, ["a", "b"], **options)
    )
    weight = lambda x, sites: 0.0
    assert sizes() == (1, 1)
    assert sizes(log_likelihood=weight) == (0.05, 20)
    assert sizes(log_likelihood=weight, fraction=0.1) == (0.1, 10)
    assert sizes(log_likelihood=weight, num_sweeps=1) == (0.05, 1)


def test_interacting_latents_need_params_that_do_not_change() -> None:
    deep, params = zoo.graph("deep"), zoo.params("deep")
    scaled = GibbsBlock(
        deep, ["v"], params | {"v:h1": lambda sites: sites["beta"] * params["v:h1"]}
    )
    around = Call({"beta": 1.0}, (), {})
    with pytest.raises(IntractableError, match="'v:h1' depend on sibling sites"):
        scaled.binding.bind({"v": np.zeros(3)}, around)
    GibbsBlock(deep, ["v"], params).binding.bind({"v": np.zeros(3)}, around)


# -- moves and tempering
# ---------------------------------------------------------------------------

EDGES = np.array([[0, 1], [1, 2], [0, 3], [1, 4], [2, 5], [3, 4], [4, 5]])
PAIRS = np.full(len(EDGES), 1.3, np.float32)
FIELD = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def potts(**options: Any) -> GibbsBlock:
    """Six units of three values, in a field whose strength a sibling decides."""
    graph = FactorGraph(
        {"z": Categorical(6, 3)}, factors=[Bias("z"), Pairwise("z", EDGES)]
    )
    if options.get("moves") == "sweep":
        options["moves"] = (*cluster_sweep(graph), Layer(("z",)))
    return GibbsBlock(
        graph,
        ["z"],
        {"z": lambda sites: sites["strength"] * FIELD, "z:z": PAIRS},
        **options,
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "clusters": {"moves": Clusters("z")},
    "clusters_and_layers": {"moves": "sweep"},
    "tempering": {"tempering": [0.3, 0.6, 0.8, 1.0]},
    "both": {"moves": Clusters("z"), "tempering": [0.5, 1.0], "num_sweeps": 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", often(OPTIONS, "clusters"))
def test_moves_and_tempering_have_the_posterior(name: str) -> None:
    block = potts(**OPTIONS[name])
    state = run_alone(
        block, {"z": np.zeros(6, int)}, 30, 3000, strength=np.float32(0.7)
    )
    states = np.stack(np.unravel_index(np.arange(3**6), (3,) * 6), 1)
    log = 1.3 * (states[:, EDGES[:, 0]] == states[:, EDGES[:, 1]]).sum(1)
    log = log + 0.7 * FIELD[np.arange(6), states].sum(1)
    weight = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
    one_hot = lambda z: (np.asarray(z)[..., None] == np.arange(3)).astype(float)
    assert_rows_law(
        one_hot(state.z["z"]), np.einsum("n,nik->ik", weight, one_hot(states))
    )
    accepted = float(np.mean(state.transitions)) / 30
    assert 0.1 < accepted < 1 if "tempering" in OPTIONS[name] else accepted == 0


@pytest.mark.nightly
def test_tempered_transition_preserves_the_distribution_row_by_row() -> None:
    graph = FactorGraph(
        {"z": Categorical(2, 3)}, factors=[Bias("z"), Pairwise("z", np.array([[0, 1]]))]
    )
    bias = np.float32(
        [[[0.0, 1.0, -1.0], [0.5, 0.0, 0.0]], [[1.0, 0.0, 0.0], [0.0, -0.5, 2.0]]]
    )
    block = GibbsBlock(
        graph, ["z"], {"z": bias, "z:z": np.float32([2.0])}, tempering=[0.2, 1.0]
    )
    a, b = np.divmod(np.arange(9), 3)
    log = bias[:, 0, a] + bias[:, 1, b] + 2.0 * (a == b)
    weight = np.exp(log) / np.exp(log).sum(1, keepdims=True)
    generator = np.random.default_rng(0)
    drawn = np.stack([generator.choice(9, 6000, p=p) for p in weight], 1)

    def step(key: Any, z: Any) -> Any:
        return block.sample(block.init(key, 0, {"z": z}, (), {}), (), {})

    keys, start = (
        jax.random.split(jax.random.key(1), 6000),
        np.stack(np.divmod(drawn, 3), -1),
    )
    state = jax.tree.map(
        np.asarray, jax.jit(jax.vmap(step))(keys, start)._replace(rng_key=0)
    )
    numbers = state.z["z"][..., 0] * 3 + state.z["z"][..., 1]
    assert_rows_law(numbers[..., None] == np.arange(9), weight)
    assert state.transitions.shape == (6000, 2) and 0 < state.transitions.mean() < 1
    assert (state.transitions[:, 0] != state.transitions[:, 1]).any()


def test_log_likelihood_is_corrected_by_metropolis() -> None:
    graph = FactorGraph({"z": Bernoulli(4)}, factors=[Bias("z")])
    bias, weight = (
        np.float32([0.5, -0.5, 0.0, 1.0]),
        lambda x, sites: 2.0 * jnp.cos(x["z"].sum()),
    )
    block = GibbsBlock(graph, ["z"], {"z": bias}, log_likelihood=weight, fraction=0.5)
    state = run_alone(block, {"z": np.zeros(4, int)}, 40, 4000)
    states = (np.arange(16)[:, None] >> np.arange(4)) & 1
    log = states @ bias + 2.0 * np.cos(states.sum(1))
    assert_rows_law(state.z["z"], np.exp(log) @ states / np.exp(log).sum())


def composite(block: GibbsBlock | None = None) -> Gibbs:
    return Gibbs([(block or spin_block(), ["x"]), (short_hmc(spin_model), None)])


@pytest.mark.parametrize("kind", ["gibbs", nightly("nuts"), nightly("function")])
def test_kernels_have_the_posterior(kind: str) -> None:
    graph, layout = lattice()
    params = {
        "even": lambda sites: NOISY[EVEN] - sites["offset"],
        "odd": lambda sites: NOISY[~EVEN] - sites["offset"],
        "even:odd": WEIGHTS,
    }
    update = gibbs_fn(graph, {"x": layout}, params)  # HMCGibbs passes no arguments on
    # compiles faster
    fixed = {
        "step_size": 0.4,
        "adapt_step_size": False,
        "adapt_mass_matrix": False,
    }
    kernels = {
        "gibbs": composite,
        "nuts": lambda: Gibbs(
            [(spin_block(), ["x"]), (NUTS(spin_model, max_tree_depth=3, **fixed), None)]
        ),
        "function": lambda: HMCGibbs(short_hmc(spin_model), update, ["x"]),
    }
    mcmc = run_chains(kernels[kind](), draws=20, num_warmup=20)
    assert_posterior(mcmc)
    assert set(np.unique(mcmc.get_samples()["x"])) == {-1.0, 1.0}


# NumPyro's own, of any extra field under jax.vmap
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_likelihood_as_a_weight_is_corrected_by_metropolis() -> None:
    graph, layout = lattice()
    params = {"even": np.zeros(3), "odd": np.zeros(3), "even:odd": WEIGHTS}

    def likelihood(x: dict, sites: dict, y: jax.Array) -> jax.Array:
        return dist.Normal(x["x"] + sites["offset"], 1.0).log_prob(y).sum()

    block = GibbsBlock(
        graph, {"x": layout}, params, log_likelihood=likelihood, fraction=0.5
    )
    block.verify(spin_model, NOISY)
    mcmc = run_chains(composite(block), extra_fields=("block_states.0.accepted",))
    assert_posterior(mcmc)
    accepted = mcmc.get_extra_fields()["block_states.0.accepted"]
    assert block.num_sweeps == 2  # as many as propose every unit once
    assert 0 < np.mean(accepted) < 2 * 2 * 70
    assert "acceptance" in block.get_diagnostics_str(mcmc.last_state.block_states[0])


@pytest.mark.nightly
@pytest.mark.parametrize("init", ["uniform", "local_mode"])
def test_latent_blocks_are_sampled_along(init: str) -> None:
    graph = layered(x=Bernoulli(3), h=Bernoulli(2))
    params = {"x": np.zeros(3, np.float32), "h": np.zeros(2, np.float32)}
    params |= {"x:h": 1.5 * np.float32([[1.0, -1], [0.5, 1], [-1, 0.2]])}

    def model(y: jax.Array) -> None:
        x = numpyro.sample("x", dist.Bernoulli(0.5).expand((3,)).to_event(1))
        numpyro.factor("prior", -graph.free_energy(params, {"x": 1.0 * x}))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(1.0 * x, scale).to_event(1), obs=y)

    y = np.float32([0.9, 0.2, 0.4])
    field = lambda sites, y: params["x"] + (y - 0.5) / sites["scale"] ** 2
    block = GibbsBlock(graph, ["x"], params | {"x": field}, init=init)
    block.verify(model, y)
    draws = run_alone(
        block, {"x": np.zeros(3)}, 30, 4000, (y,), scale=np.float32(0.8)
    ).z["x"]
    states = np.array([[i & 1, i >> 1 & 1, i >> 2] for i in range(8)], float)
    log = (
        np.logaddexp(0, states @ params["x:h"]).sum(1)
        - 0.5 * ((y - states) ** 2).sum(1) / 0.8**2
    )
    assert_rows_law(draws, np.exp(log) @ states / np.exp(log).sum())


@pytest.mark.nightly
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_latent_blocks_start_given_the_sites(value: float) -> None:
    graph = layered(x=Bernoulli(3), h=Bernoulli(2))
    params = {"x": np.zeros(3), "h": np.full(2, -90.0), "x:h": np.full((3, 2), 60.0)}
    for h in (params["h"], lambda sites: jnp.full(2, -90.0) * sites["scale"]):
        block = GibbsBlock(graph, ["x"], params | {"h": h})
        kwargs = {"_gibbs_sites": {"scale": np.float32(1.0)}}
        x = {"x": np.full(3, value)}
        state = block.init(jax.random.key(0), 0, x, (), kwargs)
        assert (state.latents["h"] == value).all()


@pytest.mark.nightly
def test_copy_resumes_exactly_and_takes_legacy_keys() -> None:
    kernel = pickle.loads(pickle.dumps(composite()))
    options = {"chains": 1, "key": jax.random.key(4), "chain_method": "sequential"}
    long, short = (
        run_chains(kernel, draws=12, **options),
        run_chains(kernel, draws=6, **options),
    )
    first = np.asarray(short.get_samples()["x"])
    short.post_warmup_state = short.last_state
    short.run(short.post_warmup_state.rng_key, jnp.asarray(NOISY))
    resumed = np.concatenate([first, short.get_samples()["x"]])
    assert (resumed == np.asarray(long.get_samples()["x"])).all()
    legacy = run_chains(
        composite(), draws=12, **options | {"key": jax.random.PRNGKey(4)}
    )
    assert (legacy.get_samples()["x"] == long.get_samples()["x"]).all()


def joint_energy(weight: Any, z: Any, h: Any) -> Any:
    return -(weight @ z) * h[0]


@pytest.mark.nightly
def test_latents_are_drawn_before_the_moves() -> None:
    """A latent block beside a site that moves by clusters, with params that a sibling changes."""
    joint = Factor("z", "h", energy=joint_energy, init=lambda *_: jnp.zeros(3))
    factors = [Bias("z"), Bias("h"), Pairwise("z", np.array([[0, 1], [1, 2]])), joint]
    graph = FactorGraph({"z": Bernoulli(3)}, {"h": Bernoulli(1)}, factors)
    field, weights = np.float32([1.0, -1.0, 0.5]), np.float32([1.5, -1.0, 0.7])
    params = {"h": np.float32([0.3]), "z:z": np.float32([1.0, 0.8]), "z:h": weights}
    params |= {"z": lambda sites: sites["field"] * field}
    block = GibbsBlock(graph, ["z"], params, moves=Clusters("z"))
    state = run_alone(block, {"z": np.zeros(3, int)}, 20, 4000, field=np.float32(0.6))
    states = (np.arange(16)[:, None] >> np.arange(4)) & 1
    z, h = states[:, :3], states[:, 3]
    log = (
        0.6 * z @ field
        + 0.3 * h
        + z[:, 0] * z[:, 1]
        + 0.8 * z[:, 1] * z[:, 2]
        + h * (z @ weights)
    )
    assert_rows_law(state.z["z"], np.exp(log) @ z / np.exp(log).sum())
