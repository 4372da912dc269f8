# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Graphs with a small network as a factor, and exact sums over their states in float64."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, Categorical, Factor, FactorGraph, Spin

Array = np.ndarray
#: largest to smallest probability of the states of each graph, at least
RATIO = 40.0
#: noise of the params; more makes states so rare that few samples show them
SCALES = {"categories": 0.8}


def network(p: dict[str, jax.Array], *statistics: jax.Array) -> jax.Array:
    """A layer of tanh units; at module level, so that graphs compare equal and pickle."""
    x = jnp.concatenate([t.ravel() for t in statistics])
    return -jnp.tanh(x @ p["w"] + p["b"]) @ p["u"]


def factor(*blocks: str, inputs: int, width: int = 5) -> Factor:
    """A network of some blocks, with zero params."""
    init = {
        "w": np.zeros((inputs, width)),
        "b": np.zeros(width),
        "u": np.zeros(width),
    }
    return Factor(*blocks, energy=network, init=init, name="net", affine=False)


def _graphs() -> dict[str, FactorGraph]:
    return {
        "visible": FactorGraph(
            {"v": Bernoulli(8)}, factors=[Bias("v"), factor("v", inputs=8)]
        ),
        "ordinary latents": FactorGraph(
            {"v": Bernoulli(6)},
            {"h": Bernoulli(3)},
            [Bias("v"), Bias("h"), Bilinear("v", "h"), factor("v", inputs=6)],
        ),
        "latents inside": FactorGraph(
            {"v": Bernoulli(5)},
            {"h": Spin(3)},
            [Bias("v"), Bias("h"), factor("v", "h", inputs=8)],
        ),
        "categories": FactorGraph(
            {"v": Categorical(4, num_categories=3)},
            {"h": Bernoulli(2)},
            [Bias("v"), Bias("h"), Bilinear("v", "h"), factor("v", inputs=12)],
        ),
    }


NAMES = ("visible", "ordinary latents", "latents inside", "categories")


class Enumerated(NamedTuple):
    """All joint states of a graph, and what follows from their sum.

    :param gradients: dE/dparams at each state.
    """

    graph: FactorGraph
    params: dict[str, Any]
    states: dict[str, Array]
    log_z: float
    probs: Array
    gradients: dict[str, Any]

    @property
    def rows(self) -> dict[str, Array]:
        """Four visible rows that differ from the model's distribution."""
        index = np.argsort(self.probs)[[-1, -20, 7, 0]]
        return {b: self.states[b][index] for b in self.graph.visible}

    def mean(self, values: Any, where: Array | None = None) -> Any:
        """Return the expectation of values per state, given that ``where`` holds."""
        weights = self.probs if where is None else self.probs * where
        weights = weights / weights.sum()
        return jax.tree.map(
            lambda a: np.tensordot(weights, np.asarray(a, float), 1), values
        )

    def shows(self, row: dict[str, Array]) -> Array:
        """Return True at the states whose visible blocks have these values."""
        size = len(self.probs)
        agree = [(self.states[b] == v).reshape(size, -1).all(1) for b, v in row.items()]
        return np.all(agree, 0)

    def log_likelihood(self, row: dict[str, Array]) -> float:
        """Return log p of visible values."""
        return float(np.log(self.probs[self.shows(row)].sum()))

    def loss_gradient(self) -> Any:
        """Return the gradient of minus the mean log-likelihood of :attr:`rows`."""
        rows = [{b: v[i] for b, v in self.rows.items()} for i in range(4)]
        clamped = [self.mean(self.gradients, self.shows(row)) for row in rows]
        model = self.mean(self.gradients)
        return jax.tree.map(lambda m, *g: np.mean(g, 0) - m, model, *clamped)


@cache
def enumerated(name: str) -> Enumerated:
    """Return a graph with random params and the sums over its states."""
    graph = _graphs()[name]
    scale = SCALES.get(name, 1.1)
    generator = np.random.default_rng(4)
    started = graph.init(jax.random.key(0), scheme={"weight": "zero", "bias": "zero"})
    params = jax.tree.map(
        lambda a: jnp.asarray(scale * generator.normal(size=a.shape), jnp.float32),
        started,
    )
    units = [
        np.arange(len(np.asarray(f.states())))
        for f in graph.families.values()
        for _ in range(f.size)
    ]
    flat = np.stack([a.ravel() for a in np.meshgrid(*units, indexing="ij")], -1)
    states = {}
    start = 0
    for b, family in graph.families.items():
        values = np.asarray(family.states())
        states[b] = values[flat[:, start : start + family.size]].astype(family.dtype)
        start += family.size
    gradient = jax.vmap(jax.grad(lambda p, x: graph.energy(p, x)), (None, 0))
    log_weights = -np.asarray(jax.jit(graph.energy)(params, states), float)
    log_z = float(np.logaddexp.reduce(log_weights))
    probs = np.exp(log_weights - log_z)
    assert probs.max() / probs.min() > RATIO
    gradients = jax.device_get(jax.jit(gradient)(params, states))
    return Enumerated(graph, params, states, log_z, probs, gradients)
