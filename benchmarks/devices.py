# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Two devices beside one: a device is a core of the CPU, with one thread for its products.

The same call without ``mesh=`` and with one of two devices, in turns, in one process; the least time of
several. An efficiency of 1 is half the time. Results are compared too: meeting times must be the same.
"""

import argparse
from collections.abc import Callable
import json
import os
from pathlib import Path
import time
from typing import Any

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false "
    + os.environ.get("XLA_FLAGS", "")
)

import numpy as np  # noqa: E402

import jax  # noqa: E402
import optax  # noqa: E402

import ebmpp  # noqa: E402

KEY = jax.random.key(0)
MESH = jax.make_mesh((2,), ("rows",))


def machine(visible: int, latent: int, scale: float) -> tuple[ebmpp.FactorGraph, Any]:
    """Random weights of a size at which pairs meet within some tens of sweeps."""
    graph = ebmpp.layered(v=ebmpp.Bernoulli(visible), h=ebmpp.Bernoulli(latent))
    draw = lambda a: scale * jax.random.normal(jax.random.key(1), a.shape)
    return graph, jax.tree.map(draw, graph.init(KEY))


def pairs(mesh: Any) -> Any:
    """1,000 coupled pairs at 784x500."""
    graph, params = machine(784, 500, 0.02)
    fn = lambda x: x["v"].mean()
    return ebmpp.unbiased_expectation(graph, params, fn, rng_key=KEY, mesh=mesh).meeting_time


def islands(mesh: Any) -> Any:
    """`smc` of ten islands of 50 particles at 784x500."""
    graph, params = machine(784, 500, 0.02)
    options = {"num_particles": 500, "ladder": np.linspace(0, 1, 30), "data": np.eye(784)}
    return ebmpp.smc(graph, params, rng_key=KEY, mesh=mesh, **options).log_z


def annealing(mesh: Any) -> Any:
    """`ais` of 500 particles and 30 temperatures at 784x500."""
    graph, params = machine(784, 500, 0.02)
    options = {"num_particles": 500, "num_temperatures": 30, "data": np.eye(784)}
    return ebmpp.ais(graph, params, rng_key=KEY, mesh=mesh, **options).log_weights


def training(estimator: Any) -> Callable[[Any], Any]:
    """20 steps of 1,000 rows at 784x500."""
    graph, params = machine(784, 500, 0.02)
    rows = np.random.default_rng(0).integers(0, 2, (1000, 784)).astype(np.float32)
    options = {"num_steps": 20, "batch_size": 1000, "progress_bar": False, "optimizer": optax.sgd(0.01)}

    def steps(mesh: Any) -> Any:
        made = ebmpp.fit(graph, rows, rng_key=KEY, params=params, estimator=estimator, mesh=mesh, **options)
        return made.history.gradient_norm.values

    return steps


CASES: dict[str, Callable[[Any], Any]] = {
    "pairs": pairs,
    "smc": islands,
    "ais": annealing,
    "CD-1": training(ebmpp.CD()),
    "PCD-1": training(ebmpp.PCD(num_chains=1000)),
}


def seconds(call: Callable[[], Any]) -> tuple[float, np.ndarray]:
    """How long a call takes, and its value."""
    started = time.perf_counter()
    value = np.asarray(jax.block_until_ready(call()))
    return time.perf_counter() - started, value


def main() -> None:
    """Time each case on one device and on two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CASES)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/report/devices.json"))
    args = parser.parse_args()
    told = []
    for name in args.only or CASES:
        call = CASES[name]
        values = [seconds(lambda mesh=mesh: call(mesh))[1] for mesh in (None, MESH)]  # compiles
        off = float(np.max(np.abs(values[0] - values[1]) / (1e-30 + np.abs(values[0]))))
        times = np.array(
            [[seconds(lambda mesh=mesh: call(mesh))[0] for mesh in (None, MESH)] for _ in range(args.repeats)]
        )
        one, two = times.min(0)
        row = {"case": name, "one": one, "two": two, "efficiency": one / two / 2, "relative_difference": off}
        told.append(row)
        print(json.dumps(row), flush=True)
    args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
