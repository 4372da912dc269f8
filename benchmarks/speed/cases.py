# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Speed comparisons: our call and other calls of the same task, in groups.

``test_speed.py`` times every call by pytest-benchmark, to compare commits;
``ratios.py`` interleaves the calls of a group and prints ratios. Every call blocks
until its result is ready. 784x500 units and 1,000 rows or chains, if a group does not
say otherwise.
"""

from collections.abc import Callable
from functools import cache, partial
import os
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs, Gibbs

import jax
from jax import Array
import jax.numpy as jnp
import optax

from benchmarks.speed import by_hand, peers
from benchmarks.speed.engine import Pairs
import ebmpp
from ebmpp import Bernoulli, FactorGraph
from ebmpp.core import random
from ebmpp.estimators import Batch, Estimator

ROWS = 1000
SWEEPS = 10
RATE = 0.01
# of the convolutional machine
_FEW_ROWS = 100
_FILTERS = 32
# of the Ising torus
_SIDE = 64
_CHAINS = 100
_COUPLING = 0.4

Params = dict[str, Array]
Call = Callable[[], Any]


class Group(NamedTuple):
    """One task."""

    ours: Call
    others: dict[str, Call]
    targets: dict[str, float] = {}
    """Largest accepted ratio of our time to another's."""


@cache
def rbm() -> tuple[FactorGraph, Params]:
    """Return a machine with weights of the size of trained ones."""
    graph = ebmpp.layered(v=Bernoulli(784), h=Bernoulli(500))
    weights = 0.05 * jax.random.normal(jax.random.key(1), (784, 500))
    return graph, graph.init(jax.random.key(0)) | {"v:h": weights}


@cache
def convolution() -> tuple[FactorGraph, Params]:
    """Return 28x28 units under 32 filters of 7x7, with one bias per map."""
    side = 28 - by_hand.WINDOW + 1
    factors = [
        ebmpp.Bias("v"),
        ebmpp.Bias("h", shared=(1, 2)),
        ebmpp.Convolution("v", "h", window=(by_hand.WINDOW, by_hand.WINDOW)),
    ]
    graph = FactorGraph(
        {"v": Bernoulli((28, 28))}, {"h": Bernoulli((_FILTERS, side, side))}, factors
    )
    filters = 0.05 * jax.random.normal(
        jax.random.key(1), (_FILTERS, 1, by_hand.WINDOW, by_hand.WINDOW)
    )
    return graph, graph.init(jax.random.key(0)) | {"v:h": filters}


def _ready(fn: Callable[..., Any], *args: Any, **options: Any) -> Call:
    return lambda: jax.block_until_ready(fn(*args, **options))


def _random_bits(*shape: int) -> Array:
    return jax.random.bernoulli(jax.random.key(2), 0.5, shape).astype(jnp.float32)


def _sweeps(graph: FactorGraph, params: Params, state: dict[str, Array]) -> Call:
    """Return ten Gibbs sweeps of chains that start at ``state``, by the kernel's public methods."""
    kernel = ebmpp.BlockedGibbs(graph)
    chains = len(next(iter(state.values())))
    keys = jax.random.split(jax.random.key(4), chains)
    first = kernel.init(keys, 0, state, (params,), {})

    def body(_, s, params):
        return kernel.sample(s, (params,), {})

    loop = jax.jit(
        lambda s, p: jax.lax.fori_loop(0, SWEEPS, partial(body, params=p), s).z
    )
    return _ready(loop, first, params)


def _gradient(graph: FactorGraph, params: Params, data: Array) -> Call:
    """Return the CD-1 gradient from ``data``."""
    estimator = ebmpp.CD(k=1)
    key = random.key_pair(jax.random.key(4))
    run = jax.jit(
        lambda p, v, key: (
            estimator.estimate(graph, p, (), Batch.uniform({"v": v}), key).gradient
        )
    )
    return _ready(run, params, data, key)


# -- hand-written JAX ----------------------------------------------------------------


def gibbs() -> Group:
    """Ten Gibbs sweeps."""
    graph, params = rbm()
    v = _random_bits(ROWS, 784)
    key = jax.random.key(4)
    h = _random_bits(ROWS, 500)
    hand = _ready(jax.jit(by_hand.gibbs, static_argnums=4), params, v, h, key, SWEEPS)
    return Group(
        _sweeps(graph, params, {"v": v, "h": h}), {"by hand": hand}, {"by hand": 1.1}
    )


def cd_gradient() -> Group:
    """CD-1 gradient."""
    graph, params = rbm()
    v = _random_bits(ROWS, 784)
    hand = _ready(jax.jit(by_hand.cd_gradient), params, v, jax.random.key(4))
    return Group(_gradient(graph, params, v), {"by hand": hand}, {"by hand": 1.1})


def gibbs_convolution() -> Group:
    """Ten Gibbs sweeps of the convolutional machine, 100 chains."""
    graph, params = convolution()
    v = _random_bits(_FEW_ROWS, 28, 28)
    key = jax.random.key(4)
    h = jnp.zeros((_FEW_ROWS, *graph.families["h"].shape))
    hand = _ready(
        jax.jit(by_hand.convolution_gibbs, static_argnums=4), params, v, h, key, SWEEPS
    )
    return Group(
        _sweeps(graph, params, {"v": v, "h": h}), {"by hand": hand}, {"by hand": 1.1}
    )


def cd_convolution() -> Group:
    """CD-1 gradient of the convolutional machine, 100 rows."""
    graph, params = convolution()
    v = _random_bits(_FEW_ROWS, 28, 28)
    hand = _ready(
        jax.jit(by_hand.convolution_cd_gradient), params, v, jax.random.key(4)
    )
    return Group(_gradient(graph, params, v), {"by hand": hand}, {"by hand": 1.1})


# -- peers ---------------------------------------------------------------------------


class Step:
    """A training step as in ``fit``: an estimator's gradient and an optimiser's update,
    one program."""

    def __init__(
        self, estimator: Estimator, data: np.ndarray, weights: np.ndarray
    ) -> None:
        graph, params = rbm()
        optimizer = optax.sgd(RATE)
        key = random.key_pair(jax.random.key(1))
        batch = Batch.uniform({"v": data})
        params = params | {"v:h": jnp.asarray(weights)}

        @jax.jit
        def step(
            params: Params, state: Any, slow: Any, batch: Batch, number: Array
        ) -> tuple:
            result = estimator.estimate(
                graph, params, state, batch, random.fold_in(key, number)
            )
            updates, slow = optimizer.update(result.gradient, slow, params)
            return optax.apply_updates(params, updates), result.state, slow

        state = estimator.init_state(graph, params, batch.rows, len(data), key)
        self.batch = batch
        self.number = 0
        self._step = step
        self.carry = params, state, optimizer.init(params)

    def __call__(self) -> Params:
        """Make one step."""
        self.carry = self._step(*self.carry, self.batch, np.uint32(self.number))
        self.number += 1
        return jax.block_until_ready(self.carry[0])


def _data() -> tuple[np.ndarray, np.ndarray]:
    """Return rows, binarised digits where there are files of MNIST, and first weights."""
    weights = (0.05 * np.random.default_rng(1).normal(size=(784, 500))).astype(
        np.float32
    )
    if os.environ.get("EBMPP_DATA_DIR"):
        return ebmpp.data.binarize(ebmpp.data.mnist()[:ROWS]), weights
    return np.random.default_rng(0).integers(0, 2, (ROWS, 784)).astype(
        np.float32
    ), weights


def cd_step() -> Group:
    """CD-1 step."""
    data, weights = _data()
    others: dict[str, Call] = {}
    if peers.torch is not None:
        others["PyTorch"] = peers.Torch(False, data, weights, RATE)
    return Group(Step(ebmpp.CD(k=1), data, weights), others, {"PyTorch": 0.8})


def pcd_step() -> Group:
    """PCD-1 step."""
    data, weights = _data()
    others: dict[str, Call] = {
        "scikit-learn": peers.sklearn_step(data, weights, RATE),
        "scikit-learn, float32": peers.sklearn_step(data, weights, RATE, float32=True),
    }
    if peers.torch is not None:
        others["PyTorch"] = peers.Torch(True, data, weights, RATE)
    ours = Step(ebmpp.PCD(k=1, num_chains=ROWS), data, weights)
    return Group(ours, others, {"scikit-learn": 0.4, "PyTorch": 0.8})


def torus(side: int = _SIDE) -> nx.Graph:
    """Return a square lattice without edges."""
    return nx.grid_2d_graph(side, side, periodic=True)


def ising() -> Group:
    """Ten sweeps of an Ising torus of 64x64, 100 chains."""
    lattice = torus()
    graph = FactorGraph.from_networkx(
        lattice, family=ebmpp.Spin, shared=True, bias=False
    )
    x = 2 * _random_bits(_CHAINS, _SIDE**2) - 1
    params = {"x:x": jnp.asarray(_COUPLING)}
    hand = jax.jit(by_hand.ising(lattice, SWEEPS))
    others = {"by hand": _ready(hand, params["x:x"], x, jax.random.key(1))}
    if peers.thrml is not None:
        run = peers.thrml_ising(lattice, _COUPLING, SWEEPS)
        keys = jax.random.split(jax.random.key(1), _CHAINS)
        others["THRML"] = _ready(run, x > 0, keys)
    return Group(
        _sweeps(graph, params, {"x": x}), others, {"by hand": 1.0, "THRML": 1.0}
    )


def mcmc() -> Group:
    """100 draws of an Ising torus of 64x64 inside NumPyro's ``MCMC``, which keeps them;
    100 chains."""
    graph = FactorGraph.from_networkx(
        torus(), family=ebmpp.Spin, shared=True, bias=False
    )
    run = MCMC(
        ebmpp.BlockedGibbs(graph),
        num_warmup=0,
        num_samples=100,
        num_chains=_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )

    def call() -> Any:
        run.run(jax.random.key(1), {"x:x": jnp.asarray(_COUPLING)})
        return jax.block_until_ready(run.last_state)

    return Group(call, {})


# -- coupled pairs -------------------------------------------------------------------


def pairs(name: str, **targets: float) -> Group:
    """Gradient from 1,000 coupled pairs of a machine of ``engine.py``.

    :param targets: largest accepted ratios to masked ``lockstep`` and to the ``bound``
        of the products alone.
    """
    run = Pairs(name)
    others = {"lockstep": _ready(run.lockstep), "bound": _ready(run.bound)}
    return Group(_ready(run.engine), others, targets)


# -- NumPyro -------------------------------------------------------------------------


def denoising(steps: int = 100) -> Group:
    """Hundred steps on 16x16 pixels in noise of unknown scale; NUTS moves the scale for both."""
    from benchmarks.speed.inside_numpyro import denoising_problem

    prior, model, y = denoising_problem()
    kernels = {
        "ours": Gibbs([(prior.block(), ["x"]), (NUTS(model), None)]),
        "DiscreteHMCGibbs": DiscreteHMCGibbs(NUTS(model)),
    }
    calls: dict[str, Call] = {}
    for name, kernel in kernels.items():
        warm = MCMC(kernel, num_warmup=300, num_samples=1, progress_bar=False)
        warm.run(jax.random.key(0), y)

        def body(_, state, kernel=kernel):
            return kernel.sample(state, (y,), {})

        loop = jax.jit(
            lambda state, body=body: jax.lax.fori_loop(0, steps, body, state)
        )
        calls[name] = _ready(loop, warm.last_state)
    return Group(calls.pop("ours"), calls, {"DiscreteHMCGibbs": 0.5})


#: Builders of the groups by name; a group trains its machine when it is built.
GROUPS: dict[str, Callable[[], Group]] = {
    "gibbs": gibbs,
    "cd_gradient": cd_gradient,
    "gibbs_convolution": gibbs_convolution,
    "cd_convolution": cd_convolution,
    "cd_step": cd_step,
    "pcd_step": pcd_step,
    "ising": ising,
    "mcmc": mcmc,
    "pairs_16x16": partial(pairs, "16x16"),
    "pairs_16x16_heavy": partial(pairs, "16x16 heavy", lockstep=1 / 30),
    "pairs_200x100": partial(pairs, "200x100", lockstep=1 / 7, bound=1 / 0.08),
    "pairs_784x500": partial(pairs, "784x500", lockstep=1 / 5, bound=1 / 0.3),
    "denoising": denoising,
}
