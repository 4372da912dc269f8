# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""CD-1 and PCD-1 steps of a declared RBM against PyTorch by hand and scikit-learn's ``BernoulliRBM``.

``python benchmarks/peers.py`` prints a row a task and peer: the minimum of interleaved repeats of a whole
step (gradient and update), the ratio to ours (targets: at most 0.8 of PyTorch, 0.4 of scikit-learn), and the
first call, which compiles. 784x500 units, 1000 rows and chains, float32; scikit-learn's ``partial_fit``
computes in float64, so the step inside its ``fit`` stands beside it ("scikit-learn32"). Binarised digits
where EBMPP_DATA_DIR says where they are, else random bits. PyTorch is left out where it is not installed.
"""

import argparse
from collections.abc import Callable
from functools import partial
import os
import time
from typing import Any

import numpy as np
from sklearn.neural_network import BernoulliRBM

import jax
from jax import Array
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp.core import random
from ebmpp.estimators import Estimator
from ebmpp.training.fitting import estimate_step

try:
    import torch
except ImportError:
    torch = None

VISIBLE, LATENT, ROWS, RATE = 784, 500, 1000, 0.01
Task = Callable[[], object]


def rows() -> np.ndarray:
    """Rows in {0, 1}."""
    if os.environ.get(ebmpp.data.files.DATA_DIR_VARIABLE):
        return ebmpp.data.binarize(ebmpp.data.mnist()[:ROWS])
    return np.random.default_rng(0).integers(0, 2, (ROWS, VISIBLE)).astype(np.float32)


class Ours:
    """A declared RBM: the estimator's gradient and optax's update, each a program, as in ``fit``."""

    def __init__(self, estimator: Estimator, data: np.ndarray, weights: np.ndarray) -> None:
        self.graph = ebmpp.layered(v=ebmpp.Bernoulli(VISIBLE), h=ebmpp.Bernoulli(LATENT))
        self.estimator, self.optimizer = estimator, optax.sgd(RATE)
        self.params = self.graph.init(jax.random.key(0)) | {"v:h": jnp.asarray(weights)}
        self.rows, self.index = {"v": jnp.asarray(data)}, jnp.arange(ROWS)
        self.pair, self.step = random.key_pair(jax.random.key(1)), 0
        self.state = estimator.init(self.graph, self.params, self.rows, ROWS, self.pair)
        self.slow = self.optimizer.init(self.params)

    def __call__(self) -> Any:
        args = (self.graph, self.estimator, self.params, self.state, self.rows, self.index, self.pair)
        gradient, self.state, _ = estimate_step(*args, np.uint32(self.step))
        self.params, self.slow = _update(self.optimizer, gradient, self.slow, self.params)
        self.step += 1
        return jax.block_until_ready(self.params)


@partial(jax.jit, static_argnums=0)
def _update(
    optimizer: optax.GradientTransformation, gradient: dict[str, Array], state: Any, params: dict[str, Array]
) -> tuple[dict[str, Array], Any]:
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


class Torch:
    """The same arithmetic by hand: in place, without autograd, latent means in both phases."""

    def __init__(self, persistent: bool, data: np.ndarray, weights: np.ndarray) -> None:
        torch.manual_seed(0)
        self.data, self.w = torch.from_numpy(data), torch.from_numpy(weights.copy())
        self.b, self.c = torch.zeros(VISIBLE), torch.zeros(LATENT)
        self.chains = torch.bernoulli(torch.full((ROWS, LATENT), 0.5)) if persistent else None

    def __call__(self) -> Any:
        with torch.inference_mode():
            mean = torch.addmm(self.c, self.data, self.w).sigmoid_()
            h = torch.bernoulli(mean) if self.chains is None else self.chains
            v = torch.addmm(self.b, h, self.w.T).sigmoid_().bernoulli_()
            again = torch.addmm(self.c, v, self.w).sigmoid_()
            if self.chains is not None:
                torch.bernoulli(again, out=self.chains)
            step = RATE / ROWS
            self.w.addmm_(self.data.T, mean, alpha=step).addmm_(v.T, again, alpha=-step)
            self.b.add_((self.data - v).mean(0), alpha=RATE)
            self.c.add_((mean - again).mean(0), alpha=RATE)
        return self.w


class ScikitLearn:
    """``BernoulliRBM``: PCD-1 with as many chains as ``batch_size``.

    :param public: ``partial_fit``, which turns the rows into float64; or the step inside ``fit``, in float32.
    """

    def __init__(self, public: bool, data: np.ndarray, weights: np.ndarray) -> None:
        model = BernoulliRBM(LATENT, learning_rate=RATE, batch_size=ROWS, random_state=0, n_iter=0)
        self.model = model.fit(data)  # it makes the params, in the dtype of the data
        model.components_[:] = weights.T
        generator = np.random.RandomState(0)
        self.step = partial(model.partial_fit, data) if public else partial(model._fit, data, generator)

    def __call__(self) -> Any:
        self.step()
        return self.model.components_


# Threads of scikit-learn's products wait in a loop for a while after the last one, and would take a core from
# whoever comes next: 34 to 43 ms for our PCD-1 step without a pause, 22 to 24 with one.
_PAUSE = 0.1


def interleaved(tasks: dict[str, Task], repeats: int) -> dict[str, tuple[float, float, float]]:
    """First call, minimum and median of interleaved later calls, in seconds, with a pause between them."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats + 1):
        for name, task in tasks.items():
            time.sleep(_PAUSE)
            start = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - start)
    return {name: (t[0], min(t[1:]), float(np.median(t[1:]))) for name, t in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of PyTorch")
    options = parser.parse_args()
    data = rows()
    weights = (0.05 * np.random.default_rng(1).normal(size=(VISIBLE, LATENT))).astype(np.float32)
    tasks: dict[str, dict[str, Task]] = {
        "CD-1 step": {"ours": Ours(ebmpp.CD(k=1), data, weights)},
        "PCD-1 step": {
            "ours": Ours(ebmpp.PCD(k=1, num_chains=ROWS), data, weights),
            "scikit-learn": ScikitLearn(True, data, weights),
            "scikit-learn32": ScikitLearn(False, data, weights),
        },
    }
    if torch is None:
        print("PyTorch is not installed: its rows are left out (pip install torch brings them)")
    else:
        torch.set_num_threads(options.threads)
        tasks["CD-1 step"]["torch"] = Torch(False, data, weights)
        tasks["PCD-1 step"]["torch"] = Torch(True, data, weights)
    print(f"{'task':12} {'by':14} {'min ms':>8} {'median ms':>10} {'ours / it':>10} {'first call s':>13}")
    for name, peers in tasks.items():
        found = interleaved(peers, options.repeats)
        for peer, (first, least, median) in found.items():
            ratio = found["ours"][1] / least
            print(f"{name:12} {peer:14} {1e3 * least:8.1f} {1e3 * median:10.1f} {ratio:10.2f} {first:13.2f}")


if __name__ == "__main__":
    main()
