# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Steps of ``fit``, one by one and several in one program, interleaved in one process.

``python benchmarks/steps.py`` prints the least time of a step of several runs, compilation left out.
"""

import time

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp.estimators import Estimator
from ebmpp.training.batches import as_source
from ebmpp.training.loop import Loop
from ebmpp.training.schedule import Stage, Stages

KEY = jax.random.key(0)
ALONE, TOGETHER = 10**9, 0  # from which step on
RUNS = 5
OPTIMIZER = optax.sgd(0.1)


def run(sizes: tuple[int, int], estimator: Estimator, rows: np.ndarray, steps: int, alone: int) -> float:
    """Milliseconds a step."""
    v, h = sizes
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(v), h=ebmpp.Bernoulli(h))
    params = rbm.init(KEY, rows)
    stages = Stages([Stage(num_steps=steps, estimator=estimator, optimizer=OPTIMIZER)], scheduled=False)
    words: Array = jnp.array([1, 2], jnp.uint32)
    loop = Loop(rbm, stages, as_source(rbm, rows, None, 100, KEY), words, params, alone=alone)
    start = loop.begin(0, params)
    begin = time.perf_counter()
    jax.block_until_ready(loop.run(0, start, progress_bar=False))
    return (time.perf_counter() - begin) / steps * 1e3


def main() -> None:
    """A line a size and estimator."""
    generator = np.random.default_rng(0)
    for sizes, steps in (((64, 16), 1000), ((784, 500), 150)):
        rows = (generator.random((5000, sizes[0])) < 0.3).astype(np.float32)
        for estimator in (ebmpp.CD(k=1), ebmpp.PCD(k=1, num_chains=100)):
            least = {ALONE: np.inf, TOGETHER: np.inf}
            for alone in [ALONE, TOGETHER] * (RUNS + 1):  # the first ones compile
                least[alone] = min(least[alone], run(sizes, estimator, rows, steps, alone))
            one, several = least[ALONE], least[TOGETHER]
            name = type(estimator).__name__
            print(f"{sizes} {name}: {one:.3f} ms, {several:.3f} ms, ratio {several / one:.2f}", flush=True)


if __name__ == "__main__":
    main()
