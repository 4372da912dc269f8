# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The means of a 784x500 machine from long runs that keep no draw: memory, and time.

``python benchmarks/long_chains.py`` runs 1,000 chains side by side, each size in a process of its own, whose
peak of memory is told: 10^5 draws (100 sweeps) and 10^6 draws (1,000 sweeps), and 10^6 draws once more with a
checkpoint every 250 sweeps. A loop that looks at nothing tells what of the peak is the machine itself.
Then, interleaved in one process: a run of ``LongRun`` against the same start and sweeps in that loop.
"""

import argparse
from collections.abc import Callable
import json
import multiprocessing
import resource
import tempfile
import time
from typing import Any

import numpy as np
from numpyro.infer import MCMC

import jax
from jax import Array, lax

import ebmpp
from ebmpp.kernels import LongRun

CHAINS, WARMUP = 1000, 20


def model() -> tuple[ebmpp.FactorGraph, dict[str, Array]]:
    """A 784x500 RBM with weights of the size of trained ones."""
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(784), h=ebmpp.Bernoulli(500))
    weights = 0.05 * jax.random.normal(jax.random.key(1), (784, 500))
    return rbm, rbm.init(jax.random.key(0)) | {"v:h": weights}


def chains(rbm: ebmpp.FactorGraph, sweeps: int, warmup: int, count: int = CHAINS) -> MCMC:
    """As NumPyro has them."""
    kernel = ebmpp.BlockedGibbs(rbm)
    return MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=sweeps,
        num_chains=count,
        chain_method="vectorized",
        progress_bar=False,
    )


def means(sweeps: int, kept: bool, count: int = CHAINS) -> dict[str, Any]:
    """A long run in this process, and what it took."""
    rbm, params = model()
    with tempfile.TemporaryDirectory() as folder:
        options = {"directory": folder, "every": 250} if kept else {}
        long = LongRun(chains(rbm, sweeps, WARMUP, count), **options)
        begun = time.perf_counter()
        made = long.run(jax.random.key(2), params)
        seconds = time.perf_counter() - begun
    moments = made.moments
    both = [np.median(moments.mcse_chains["v"]), np.median(moments.mcse_batches["v"])]
    return {
        "draws": sweeps * count,
        "checkpoints": kept,
        "seconds": round(seconds, 1),
        "peak_MB": peak(),
        "mcse_chains_v": float(both[0]),
        "mcse_batches_v": float(both[1]),
        "worst_r_hat": float(np.max(moments.r_hat["v"])),
    }


def bare(mcmc: MCMC) -> Callable[..., Any]:
    """The same start and the same sweeps, whose draws nobody looks at."""
    kernel, sweeps = mcmc.sampler, mcmc.num_samples
    loop = jax.jit(lambda s, p: lax.fori_loop(0, sweeps, lambda i, s: kernel.sample(s, (p,), {}), s))

    def run(key: Array, params: dict[str, Array]) -> Any:
        state = kernel.init(jax.random.split(key, mcmc.num_chains), 0, None, (params,), {})
        return jax.block_until_ready(loop(state, params))

    return run


def peak() -> int:
    """Of this process's memory so far, in megabytes."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def without(sweeps: int) -> dict[str, Any]:
    """The loop that looks at nothing, in this process."""
    rbm, params = model()
    begun = time.perf_counter()
    bare(chains(rbm, sweeps, 0))(jax.random.key(2), params)
    return {"bare sweeps": sweeps, "seconds": round(time.perf_counter() - begun, 1), "peak_MB": peak()}


def times(sweeps: int, repeats: int, count: int = CHAINS) -> dict[str, float]:
    """Seconds of sweeps, the minimum of interleaved repeats: bare, and with moments."""
    rbm, params = model()
    key, mcmc = jax.random.key(3), chains(rbm, sweeps, 0, count)
    loop, long = bare(mcmc), LongRun(mcmc, batch_length=31)  # that of 1,000 sweeps
    ways = {"bare": lambda: loop(key, params), "LongRun": lambda: long.run(key, params)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):  # the first compiles
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - begun)
    return {name: round(min(each[1:]), 2) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweeps", type=int, nargs="*", default=[100, 1000], help="of the runs for memory")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")  # a peak of memory is a process's
    for sweeps, kept in [*((n, False) for n in args.sweeps), *((n, True) for n in args.sweeps[-1:])]:
        with context.Pool(1) as pool:
            print(json.dumps(pool.apply(means, (sweeps, kept))), flush=True)
    with context.Pool(1) as pool:
        print(json.dumps(pool.apply(without, (100,))), flush=True)
    with context.Pool(1) as pool:
        print(json.dumps({"seconds of 124 sweeps": pool.apply(times, (124, args.repeats))}))


if __name__ == "__main__":
    main()
