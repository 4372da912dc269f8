# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Peers: PyTorch, scikit-learn's ``BernoulliRBM`` and THRML.

:data:`torch` and :data:`thrml` are ``None`` where these are not installed.
"""

from collections.abc import Callable
from functools import partial
import importlib
import importlib.util
from typing import Any

import networkx as nx
import numpy as np
from sklearn.neural_network import BernoulliRBM

import jax
from jax import Array
import jax.numpy as jnp

torch: Any = (
    importlib.import_module("torch") if importlib.util.find_spec("torch") else None
)
thrml: Any = (
    importlib.import_module("thrml") if importlib.util.find_spec("thrml") else None
)


class Torch:
    """CD-1 or PCD-1 step in PyTorch: in place, without autograd, latent means in both phases."""

    def __init__(
        self, persistent: bool, data: np.ndarray, weights: np.ndarray, rate: float
    ) -> None:
        torch.manual_seed(0)
        visible, latent = weights.shape
        self.data = torch.from_numpy(data)
        self.w = torch.from_numpy(weights.copy())
        self.rate = rate
        self.b = torch.zeros(visible)
        self.c = torch.zeros(latent)
        self.chains = (
            torch.bernoulli(torch.full((len(data), latent), 0.5))
            if persistent
            else None
        )

    def __call__(self) -> Any:
        """Make one step."""
        with torch.inference_mode():
            positive = torch.addmm(self.c, self.data, self.w).sigmoid_()
            h = torch.bernoulli(positive) if self.chains is None else self.chains
            v = torch.addmm(self.b, h, self.w.T).sigmoid_().bernoulli_()
            negative = torch.addmm(self.c, v, self.w).sigmoid_()
            if self.chains is not None:
                torch.bernoulli(negative, out=self.chains)
            step = self.rate / len(self.data)
            self.w.addmm_(self.data.T, positive, alpha=step).addmm_(
                v.T, negative, alpha=-step
            )
            self.b.add_((self.data - v).mean(0), alpha=self.rate)
            self.c.add_((positive - negative).mean(0), alpha=self.rate)
        return self.w


def sklearn_step(
    data: np.ndarray, weights: np.ndarray, rate: float, float32: bool = False
) -> Callable[[], Any]:
    """Return a PCD-1 step of ``BernoulliRBM``, which has as many chains as rows of a batch.

    :param float32: the step inside ``fit``, in the dtype of the data; ``partial_fit``
        computes in float64.
    """
    rows = len(data)
    latent = weights.shape[1]
    model = BernoulliRBM(
        latent, learning_rate=rate, batch_size=rows, random_state=0, n_iter=0
    )
    model.fit(data)  # creates the params, in the dtype of the data
    model.components_[:] = weights.T
    generator = np.random.RandomState(0)
    return (
        partial(model._fit, data, generator)
        if float32
        else partial(model.partial_fit, data)
    )


def thrml_ising(
    lattice: nx.Graph, coupling: float, sweeps: int
) -> Callable[[Array, Array], Any]:
    """Return a function of states and keys: sweeps of an Ising model, one chain per
    lane of ``vmap``."""
    models = importlib.import_module("thrml.models")
    nodes = {node: thrml.SpinNode() for node in lattice.nodes}
    edges = [(nodes[a], nodes[b]) for a, b in lattice.edges]
    units = list(nodes.values())
    model = models.IsingEBM(
        units,
        edges,
        jnp.zeros(len(units)),
        jnp.full(len(edges), coupling),
        jnp.array(1.0),
    )
    parts = [
        [i for i, n in enumerate(lattice.nodes) if sum(n) % 2 == c] for c in range(2)
    ]
    blocks = [thrml.Block([units[i] for i in part]) for part in parts]
    program = models.IsingSamplingProgram(model, blocks, clamped_blocks=[])
    schedule = thrml.SamplingSchedule(
        n_warmup=sweeps - 1, n_samples=1, steps_per_sample=1
    )

    def chain(key: Array, *start: Array) -> Any:
        return thrml.sample_states(
            key, program, schedule, list(start), [], [thrml.Block(units)]
        )

    return jax.jit(
        lambda x, keys: jax.vmap(chain)(keys, *(x[:, np.array(part)] for part in parts))
    )
