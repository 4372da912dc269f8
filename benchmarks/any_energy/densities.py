# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Densities in the plane as 32 bits under a network of three layers of 256 units.

python benchmarks/any_energy/densities.py [--only NAME ...] [--steps 30000]

The table of Zhang et al. (2022), *Generative flow networks for discrete probabilistic
modeling*, without its sampler. Its negative log-likelihoods equal the entropies of the
data to 0.01, so no model can be much better. log Z is estimated three times: by uniform
states, whose mean weight is unbiased for Z, and by annealing from below and above.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import json
import math
import time
from typing import Any

import numpy as np
import planar

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, Bernoulli, Factor, FactorGraph

SIZE = 2 * planar.BITS
WIDTH = 256
PUBLISHED = {
    "2spirals": 20.05,
    "8gaussians": 19.98,
    "circles": 20.55,
    "pinwheel": 19.55,
}
BATCH = 256
HELD_OUT = 100_000
UNIFORM = 2**20
_ROWS = 2**13  # states evaluated together
_AVERAGED = 0.2  # share of the steps whose params are averaged


def network(p: Any, x: jax.Array) -> jax.Array:
    """Three layers of ELU units and one output."""
    for w, b in p["layers"]:
        x = jax.nn.elu(x @ w + b)
    return -x @ p["last"]


def init(key: jax.Array) -> Any:
    """Weights of unit gain, and a last layer of zeros: uniform states at first."""
    sizes = [SIZE, WIDTH, WIDTH, WIDTH]
    layers = []
    for number, (rows, columns) in enumerate(zip(sizes, sizes[1:])):
        w = jax.random.normal(jax.random.fold_in(key, number), (rows, columns))
        layers.append((w / math.sqrt(rows), jnp.zeros(columns)))
    return {"layers": layers, "last": jnp.zeros(WIDTH)}


NET = Factor("x", energy=network, init=init, name="net", affine=False)
GRAPH = FactorGraph({"x": Bernoulli(SIZE)}, factors=[NET])

#: Steps are small enough to be accepted when the network has become steep.
MOVES = ebmpp.moves.informed_sweep(GRAPH, rule="dmala", step_size=0.3, num_steps=3)


def stream(name: str, seed: int) -> Callable[[], Iterator[np.ndarray]]:
    """Return an endless stream of fresh batches."""

    def batches() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(seed)
        while True:
            yield planar.rows(name, BATCH, rng)

    return batches


def mean_energy(params: Any, rows: np.ndarray) -> tuple[float, float]:
    """Return the mean energy of rows, and its standard error."""
    parts = [
        np.asarray(energy_at(params, rows[i : i + _ROWS]), float)
        for i in range(0, len(rows), _ROWS)
    ]
    energies = np.concatenate(parts)
    return float(energies.mean()), float(energies.std()) / math.sqrt(len(rows))


@jax.jit
def energy_at(params: Any, rows: jax.Array) -> jax.Array:
    """Return the energies of rows."""
    return GRAPH.energy(params, {"x": rows})


def uniform_log_partition(params: Any, seed: int) -> tuple[float, float]:
    """Return log Z by the mean weight of uniform states, and its standard error."""
    rng = np.random.default_rng(seed)
    log_weights = []
    for _ in range(UNIFORM // _ROWS):
        x = rng.integers(2, size=(_ROWS, SIZE)).astype(np.float32)
        log_weights.append(-np.asarray(energy_at(params, x), float))
    log_weights = np.concatenate(log_weights)
    top = log_weights.max()
    w = np.exp(log_weights - top)
    value = math.log(w.mean()) + top + SIZE * math.log(2)
    return value, float(w.std() / w.mean()) / math.sqrt(len(w))


def fitted(name: str, steps: int, rate: float, seed: int) -> tuple[Any, dict[str, Any]]:
    """Return averaged params, and the run's cost."""
    schedule = optax.cosine_decay_schedule(rate, steps)
    begin = time.process_time()
    fit = ebmpp.fit(
        GRAPH,
        stream(name, seed),
        estimator=PCD(num_chains=BATCH, moves=MOVES),
        optimizer=ebmpp.optimizers.averaged(
            optax.adam(schedule), from_step=math.floor((1 - _AVERAGED) * steps)
        ),
        num_steps=steps,
        batch_size=BATCH,
        rng_key=jax.random.key(seed),
        progress_bar=False,
    )
    params = ebmpp.optimizers.averaged_params(fit.optimizer_state)
    acceptance = float(fit.history.acceptance[-steps // 10 :].mean())
    cost = {"cpu_seconds": round(time.process_time() - begin, 1)}
    return params, cost | {"acceptance": round(acceptance, 2)}


def measured(name: str, params: Any, seed: int) -> dict[str, Any]:
    """Return negative log-likelihoods of fresh rows by three estimates of log Z."""
    held_out = planar.rows(name, HELD_OUT, np.random.default_rng(seed + 10_000))
    energy, row_error = mean_energy(params, held_out.astype(np.float32))
    log_z, error = uniform_log_partition(params, seed)
    bracket = ebmpp.bracket(
        GRAPH,
        params,
        rng_key=jax.random.key(seed + 1),
        num_particles=1000,
        num_temperatures=50,
    )
    sides = bracket.lower.log_partition, bracket.upper.log_partition
    numbers = {
        "nll": energy + log_z,
        "standard_error": math.hypot(row_error, error),
        "nll_annealed": [round(energy + float(side), 4) for side in sides],
        "entropy": planar.entropy(name),
        "published": PUBLISHED[name],
    }
    rounded = {k: round(v, 4) for k, v in numbers.items() if isinstance(v, float)}
    return numbers | rounded


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row per density and seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=planar.NAMES, default=list(planar.NAMES))
    add("--seeds", type=int, nargs="+", default=[0])
    add("--steps", type=int, default=30_000)
    add("--rate", type=float, default=2e-3, help="of Adam, falling to 0 as a cosine")
    args = parser.parse_args(argv)
    for name in args.only:
        for seed in args.seeds:
            params, cost = fitted(name, args.steps, args.rate, seed)
            row = {"density": name, "seed": seed, "steps": args.steps} | cost
            print(json.dumps(row | measured(name, params, seed)), flush=True)


if __name__ == "__main__":
    main()
