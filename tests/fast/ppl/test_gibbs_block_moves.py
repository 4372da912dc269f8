# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of Gibbs with moves of their own, and with tempered transitions: laws, and what is refused."""

from collections.abc import Callable
from typing import Any

import block_tools
import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Categorical, Factor, FactorGraph, Gaussian, GibbsBlock, Pairwise, layered
from ebmpp.errors import ArgumentError, IntractableError, ParameterError
from ebmpp.moves import Clusters, Layer, cluster_sweep, langevin_sweep
from ebmpp.ppl import CoupledComposite
from helpers import assert_rows_law

EDGES = np.array([[0, 1], [1, 2], [0, 3], [1, 4], [2, 5], [3, 4], [4, 5]])
POTTS = FactorGraph({"z": Categorical(6, 3)}, factors=[Bias("z"), Pairwise("z", EDGES)])
PAIRS = 1.3 * jnp.ones(len(EDGES))
FIELD = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)


def field(sites: dict) -> Any:
    """Of strength that another site decides."""
    return sites["strength"] * FIELD


def potts(**options: Any) -> GibbsBlock:
    return GibbsBlock(POTTS, ["z"], {"z": field, "z:z": PAIRS}, **options)


def exact_potts(strength: float) -> np.ndarray:
    states = np.stack(np.unravel_index(np.arange(3**6), (3,) * 6), 1)
    log = 1.3 * (states[:, EDGES[:, 0]] == states[:, EDGES[:, 1]]).sum(1)
    log = log + strength * np.asarray(FIELD)[np.arange(6), states].sum(1)
    weight = np.exp(log - log.max())
    return np.einsum("n,nik->ik", weight / weight.sum(), states[..., None] == np.arange(3))


def last(block: GibbsBlock, start: dict, siblings: dict, steps: int, chains: int, seed: int = 0) -> Any:
    """Last states of chains of their own keys."""
    kwargs = {"_gibbs_sites": siblings}

    def chain(key: Any) -> Any:
        state = block.init(key, 0, start, (), kwargs)
        return jax.lax.fori_loop(0, steps, lambda _, s: block.sample(s, (), kwargs), state)

    return jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(seed), chains))


OPTIONS: dict[str, dict[str, Any]] = {
    "clusters": {"moves": Clusters("z")},
    "clusters_and_layers": {"moves": (*cluster_sweep(POTTS), Layer(("z",)))},
    "tempering": {"tempering": [0.3, 0.6, 0.8, 1.0]},
    "both": {"moves": Clusters("z"), "tempering": [0.5, 1.0], "num_sweeps": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_law_of_a_block_is_left_as_it_is(name: str) -> None:
    """A chain from one mode, with a field that a sibling scales, against enumeration."""
    block = potts(**OPTIONS[name])
    state = last(block, {"z": jnp.zeros(6, int)}, {"strength": jnp.float32(0.7)}, 30, 3000)
    hot = np.asarray(jax.nn.one_hot(state.z["z"], 3))
    assert_rows_law(hot, exact_potts(0.7))
    taken = float(state.transitions.mean()) / 30
    assert 0.1 < taken < 1 if "tempering" in OPTIONS[name] else taken == 0
    told = block.get_diagnostics_str(jax.tree.map(lambda a: a[0], state))
    assert ("tempered transitions taken" in told) == ("tempering" in OPTIONS[name])


def test_a_transition_alone_leaves_the_law_as_it_is() -> None:
    """States drawn exactly stay so; few, hot rungs and many rows, each of which is taken by itself."""
    graph = FactorGraph({"z": Categorical(2, 3)}, factors=[Bias("z"), Pairwise("z", np.array([[0, 1]]))])
    bias = jnp.array([[[0.0, 1.0, -1.0], [0.5, 0.0, 0.0]], [[1.0, 0.0, 0.0], [0.0, -0.5, 2.0]]])
    block = GibbsBlock(graph, ["z"], {"z": bias, "z:z": jnp.array([2.0])}, tempering=[0.2, 1.0])
    a, b = np.divmod(np.arange(9), 3)
    log = np.asarray(bias)[:, 0, a] + np.asarray(bias)[:, 1, b] + 2.0 * (a == b)
    weight = np.exp(log) / np.exp(log).sum(1, keepdims=True)
    start = np.random.default_rng(0)
    drawn = np.stack([start.choice(9, 6000, p=p) for p in weight], 1)

    def one(key: Any, number: Any) -> Any:
        z = {"z": jnp.stack(jnp.divmod(number, 3), -1)}
        return block.sample(block.init(key, 0, z, (), {}), (), {})

    keys = jax.random.split(jax.random.key(1), 6000)
    state = jax.jit(jax.vmap(one))(keys, jnp.asarray(drawn))
    numbers = state.z["z"][..., 0] * 3 + state.z["z"][..., 1]
    assert_rows_law(np.asarray(jax.nn.one_hot(numbers, 9)), weight)
    taken = np.asarray(state.transitions)
    assert taken.shape == (6000, 2) and 0 < taken.mean() < 1
    assert (taken[:, 0] != taken[:, 1]).any()


def _quadratic(params: Any, z: Any, m: Any) -> Any:
    """-log N(y; m_z, 1), in the statistics of a mean, m and m^2."""
    y = params["y"]
    return (z * (0.5 * m[:, 1] - y[:, None] * m[:, 0])).sum()


@pytest.mark.slow
def test_real_valued_sites_and_latent_blocks_are_heated_along() -> None:
    """A mixture whose means are in the block; labels switch in transitions, and hardly in sweeps."""
    y = jnp.array([-2.0, -1.6, 1.7, 2.1, 2.4])
    graph = FactorGraph(
        {"z": Categorical(5, 2), "m": Gaussian(2, variance="learned")},
        factors=[
            Bias("m"),
            Factor("z", "m", energy=_quadratic, init=lambda *_: {"y": jnp.zeros(5)}, name="likelihood"),
        ],
    )
    prior = jnp.broadcast_to(jnp.array([0.0, -0.5 / 9]), (2, 2))
    params = {"m": prior, "likelihood": {"y": y}}
    start = {"z": jnp.array([0, 0, 1, 1, 1]), "m": jnp.array([-1.8, 2.0])}
    block = GibbsBlock(graph, ["z", "m"], params, tempering=np.linspace(0.1, 1, 8))
    state = last(block, start, {}, 40, 2000)
    # labels are exchangeable, so every point is of either component as often
    assert_rows_law(np.asarray(state.z["z"], float), np.full(5, 0.5), comparisons=7)
    assert_rows_law(state.z["m"], np.full(2, np.asarray(mixture_mean(np.asarray(y)))), comparisons=7)


def mixture_mean(y: np.ndarray) -> float:
    """E(m_0 | y) by a sum over all assignments."""
    states = (np.arange(32)[:, None] >> np.arange(5)) & 1
    log, means = 0.0, []
    for k in range(2):
        own = states == k
        precision = 1 / 9 + own.sum(1)
        mean = own @ y / precision
        log = log + 0.5 * precision * mean**2 - 0.5 * np.log(precision)
        means.append(mean)
    weight = np.exp(log - np.max(log))
    return float(weight / weight.sum() @ means[0])


def test_latents_are_drawn_before_the_moves() -> None:
    """A latent block beside a site that moves by clusters, with params that a sibling changes."""
    graph = FactorGraph(
        {"z": Bernoulli(3)},
        {"h": Bernoulli(1)},
        [
            Bias("z"),
            Bias("h"),
            Pairwise("z", np.array([[0, 1], [1, 2]])),
            Factor("z", "h", energy=_joined, init=_none),
        ],
    )
    params = {
        "z": lambda sites: sites["field"] * jnp.array([1.0, -1.0, 0.5]),
        "h": jnp.array([0.3]),
        "z:z": jnp.array([1.0, 0.8]),
        "z:h": jnp.array([1.5, -1.0, 0.7]),
    }
    block = GibbsBlock(graph, ["z"], params, moves=Clusters("z"))
    state = last(block, {"z": jnp.zeros(3, int)}, {"field": jnp.float32(0.6)}, 20, 4000)
    states = (np.arange(16)[:, None] >> np.arange(4)) & 1
    z, h = states[:, :3], states[:, 3]
    log = (
        0.6 * z @ [1, -1, 0.5]
        + 0.3 * h
        + z[:, 0] * z[:, 1]
        + 0.8 * z[:, 1] * z[:, 2]
        + h * (z @ [1.5, -1, 0.7])
    )
    weight = np.exp(log) / np.exp(log).sum()
    assert_rows_law(np.asarray(state.z["z"], float), weight @ z)


def _joined(weight: Any, z: Any, h: Any) -> Any:
    return -(weight @ z) * h[0]


def _none(*_: Any) -> Any:
    return jnp.zeros(3)


def test_a_log_weight_is_heated_too() -> None:
    weight = lambda x, sites: 2.0 * jnp.cos(x["z"].sum())
    graph = FactorGraph({"z": Bernoulli(4)}, factors=[Bias("z")])
    bias = jnp.array([0.5, -0.5, 0.0, 1.0])
    block = GibbsBlock(graph, ["z"], {"z": bias}, log_weight=weight, fraction=0.5, tempering=[0.4, 0.7, 1.0])
    state = last(block, {"z": jnp.zeros(4, int)}, {}, 40, 4000)
    states = (np.arange(16)[:, None] >> np.arange(4)) & 1
    log = states @ np.asarray(bias) + 2.0 * np.cos(states.sum(1))
    p = np.exp(log) / np.exp(log).sum()
    assert_rows_law(np.asarray(state.z["z"], float), p @ states)


def test_chain_methods_agree_and_a_second_call_does_not_retrace() -> None:
    block = potts(moves=Clusters("z"), tempering=[0.5, 1.0])
    kwargs = {"_gibbs_sites": {"strength": jnp.float32(0.7)}}
    keys = jax.random.split(jax.random.key(3), 3)
    start = lambda key: block.init(key, 0, {"z": jnp.zeros(6, int)}, (), kwargs)
    step = jax.jit(lambda s: block.sample(s, (), kwargs))
    many = jax.jit(jax.vmap(lambda s: block.sample(s, (), kwargs)))
    batch = jax.vmap(start)(keys)
    for _ in range(4):
        batch = many(batch)
    for number, key in enumerate(keys):
        state = start(key)
        for _ in range(4):
            state = step(state)
        assert (state.z["z"] == batch.z["z"][number]).all()
    assert step._cache_size() == 1 and many._cache_size() == 1


RBM = layered(x=Bernoulli(3), h=Bernoulli(2))
REAL = layered(v=Gaussian(2), h=Bernoulli(2))


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (
            lambda: GibbsBlock(RBM, ["x"], moves=Clusters("x")),
            IntractableError,
            "'x' .* no units that interact",
        ),
        (
            lambda: GibbsBlock(RBM, ["x"], moves=Clusters("h")),
            ArgumentError,
            r"\['h'\], and the free blocks are \['x'\]",
        ),
        (lambda: potts(moves="clusters"), ArgumentError, "GibbsBlock: moves"),
        (lambda: potts(moves=[3]), ArgumentError, "a move"),
        (
            lambda: potts(moves=Clusters("z"), log_weight=lambda x, sites: 0.0),
            ArgumentError,
            "moves and log_weight",
        ),
        (
            lambda: GibbsBlock(REAL, ["v"], moves=langevin_sweep(REAL, "h", adjust=False)),
            ArgumentError,
            "does not leave the law of the sites",
        ),
        (lambda: potts(tempering=[0.0, 1.0]), ArgumentError, "tempering is .* begins at 0"),
        (lambda: potts(tempering=[0.5, 0.4, 1.0]), ArgumentError, "tempering is increasing inverse"),
        (lambda: potts(tempering=3), ArgumentError, "tempering is increasing inverse"),
        (
            lambda: GibbsBlock(POTTS, ["z"], {"z": FIELD, "z:z": -PAIRS}, moves=Clusters("z")).init(
                jax.random.key(0), 0, {"z": jnp.zeros(6, int)}, (), {}
            ),
            ParameterError,
            "weights of at least 0",
        ),
        (lambda: CoupledComposite([potts(moves=Clusters("z"))]), ArgumentError, "has moves"),
        (lambda: CoupledComposite([potts(tempering=[0.5, 1])]), ArgumentError, "has tempering"),
        (lambda: CoupledComposite([segments_block()]), ArgumentError, r"continuous sites \['precision'\]"),
    ],
)
def test_what_does_not_hold_is_refused_by_name(make: Callable[[], Any], error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        make()


def segments_block() -> Any:
    return GibbsBlock.from_model(block_tools.spin_model, ["x", "precision"], jnp.asarray(block_tools.NOISY))
