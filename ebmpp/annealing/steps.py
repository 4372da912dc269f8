# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Steps of annealing: particles that follow a line of models, in either direction, without interacting."""

from typing import Any

import numpy as np
from tqdm.auto import tqdm

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.annealing.path import Path, draw_reference
from ebmpp.core import random, sharding
from ebmpp.core.compile import Compiled
from ebmpp.core.types import Blocks

_STEPS = 100  # per call of the device, after which a progress bar is updated


@Compiled
def _take_steps(
    path: Path, betas: Array, count: Array, x: Blocks, keys: Array
) -> tuple[Blocks, Array, Array]:
    """Take ``count`` steps from one beta to the next; one evaluation of the model at a state serves each.

    :param betas: shape ``(_STEPS + 1,)``, of which the first ``count + 1`` are used.
    :return: the kept blocks; the increment of the log-weights; its standard deviation at each step.
    """

    def run(jobs: tuple[Blocks, Array], shared: tuple, *_: Any) -> tuple[tuple, tuple]:
        (x, keys), (path, betas, count) = jobs, shared

        def step(i: Array, carry: tuple) -> tuple:
            x, log_weight, gains = carry
            low, high = path.at(betas[i]), path.at(betas[i + 1])
            here = path.slope(low.params, x)
            gain = path.gain(low, high, here, here)
            x = path.sweep(high, x, here.eta, random.fold_in(keys, i))
            return x, log_weight + gain, gains.at[i].set(gain)

        start = x, jnp.zeros(len(keys)), jnp.zeros((len(betas) - 1, len(keys)))
        x, log_weight, gains = jax.lax.fori_loop(0, count, step, start)
        return (x, log_weight, gains.T), ()

    (x, log_weight, gains), _ = sharding.shard_jobs(run, (x, keys), (path, betas, count), len(keys))
    return x, *sharding.everywhere((log_weight, gains.std(0)))


def anneal(
    path: Path, betas: np.ndarray, key: Array, num: int, x: Blocks | None = None, progress_bar: bool = False
) -> tuple[np.ndarray, np.ndarray, Blocks]:
    """Carry ``num`` particles along a line, in the direction of ``betas``.

    :param x: their state at ``betas[0]``; None for draws of the reference.
    :return: the log-weights, float64, ``(num,)``; their standard deviation by step; and the kept blocks.
    """
    keys = random.fold_in(key, np.arange(num))
    if x is None:
        x = draw_reference(path.graph, path.sampled, path.eta0, random.fold_in(keys, 0))
    x = {b: x[b] for b in path.sampled}
    # summed on the host in float64: ten thousand small gains would lose digits in float32
    total, spreads = np.zeros(num), []
    hidden = not (progress_bar and sharding.is_first())
    with tqdm(total=len(betas) - 1, disable=hidden, desc="annealing", unit="step") as bar:
        for first in range(0, len(betas) - 1, _STEPS):
            chunk = betas[first : first + _STEPS + 1]
            count = len(chunk) - 1
            padded = np.pad(chunk, (0, _STEPS - count), mode="edge")
            x, gain, spread = _take_steps(path, padded, np.int32(count), x, random.fold_in(keys, 1, first))
            total += np.asarray(gain, float)
            spreads.append(np.asarray(spread, float)[:count])
            bar.update(count)
    return total, np.concatenate(spreads), x
