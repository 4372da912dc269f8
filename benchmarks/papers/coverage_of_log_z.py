# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coverage of the stated errors of log Z on trained machines.

The machines learned by PCD: bars and stripes 4x4 (16x16 units), and 8x8 digits (64x16),
whose log Z is exact, and MNIST (784x500, centered PCD; its log Z is a long annealing
run). On each, with one key per seed, the 95 % interval of every estimate (by the t
quantile of its islands or particles) either holds log Z or does not. An estimate that
is nan counts as warned. Each row is printed as JSON.
"""

from collections.abc import Callable, Sequence
from functools import partial
import json
from typing import Any, NamedTuple
import warnings

import numpy as np
import records
from records import Row

import jax
import optax

import ebmpp
from ebmpp import PCD, Bernoulli, FactorGraph, WeightedPCD
from ebmpp.annealing.log_partition import t_quantile
from ebmpp.estimators import Centered


class Machine(NamedTuple):
    """A trained machine, its rows, and its log Z."""

    graph: FactorGraph
    rows: np.ndarray
    params: Any
    log_z: float


def trained(rows: np.ndarray, rate: float, **options: Any) -> Machine:
    """Train a machine of 16 latent units by PCD."""
    graph = ebmpp.layered(v=Bernoulli(rows.shape[1]), h=Bernoulli(16))
    run = {
        "optimizer": optax.sgd(rate),
        "rng_key": jax.random.key(0),
        "progress_bar": False,
    } | options
    params = ebmpp.fit(graph, rows, **run).params
    return Machine(graph, rows, params, float(ebmpp.exact.log_partition(graph, params)))


def bars() -> Machine:
    """Return a machine of bars and stripes."""
    rows = ebmpp.data.bars_and_stripes(4)
    estimator = PCD(num_chains=1000)
    return trained(rows, 0.1, estimator=estimator, num_steps=5000, batch_size=len(rows))


def digits() -> Machine:
    """Return a machine of digits, at a rate so large that its chains mix slowly."""
    rows = ebmpp.data.binarize(ebmpp.data.digits())
    return trained(
        rows, 0.3, estimator=PCD(num_chains=100), num_steps=2000, batch_size=100
    )


def mnist() -> Machine:
    """Return a machine of MNIST; log Z is printed with the half width of its 95 % interval."""
    rows = ebmpp.data.binarize(ebmpp.data.mnist())
    graph = ebmpp.layered(v=Bernoulli(784), h=Bernoulli(500))
    averaged = ebmpp.optimizers.averaged
    optimizer = averaged(
        optax.sgd(optax.linear_schedule(0.2, 0.01, 4000)), from_step=3500
    )
    run = {
        "estimator": Centered(PCD(num_chains=400)),
        "num_steps": 4000,
        "batch_size": 400,
    }
    fit = ebmpp.fit(
        graph,
        rows,
        optimizer=optimizer,
        rng_key=jax.random.key(0),
        progress_bar=False,
        **run,
    )
    params = ebmpp.optimizers.averaged_params(fit.optimizer_state)
    options = {
        "rng_key": jax.random.key(1),
        "data": rows,
        "num_particles": 100,
        "ladder": "adaptive",
    }
    result = ebmpp.ais(graph, params, num_temperatures=30_000, **options)
    low, high = result.interval()
    print(
        json.dumps({"log_z": result.log_partition, "half_width": (high - low) / 2}),
        flush=True,
    )
    return Machine(graph, rows, params, result.log_partition)


MACHINES: dict[str, Callable[[], Machine]] = {
    "bars-16x16": bars,
    "digits-64x16": digits,
    "mnist-784x500": mnist,
}


def public(
    name: str, machine: Machine, key: jax.Array, **options: Any
) -> tuple[float, float, float]:
    """Return a public function's log Z (the middle of a bracket), and its interval."""
    result = getattr(ebmpp, name)(machine.graph, machine.params, rng_key=key, **options)
    sides = (result.lower, result.upper) if name == "bracket" else (result,)
    return float(np.mean([s.log_partition for s in sides])), *result.interval()


def monitored(machine: Machine, key: jax.Array) -> tuple[float, float, float]:
    """Return the estimate inside the monitor of the likelihood."""
    return public(
        "ais", machine, key, num_temperatures=1000, ladder="adaptive", data=machine.rows
    )


def weighted(machine: Machine, key: jax.Array) -> tuple[float, float, float]:
    """Return the first log Z of a run from the trained params."""
    run = {
        "params": machine.params,
        "num_steps": 1,
        "optimizer": optax.sgd(0.0),
        "progress_bar": False,
    }
    fit = ebmpp.fit(
        machine.graph,
        machine.rows,
        estimator=WeightedPCD(),
        rng_key=key,
        batch_size=100,
        **run,
    )
    value, error = (
        float(fit.history[f"log_partition{end}"][0]) for end in ("", "_error")
    )
    width = t_quantile(0.95, 10) * error
    return value, value - width, value + width


METHODS: dict[str, Callable[[Machine, jax.Array], tuple[float, float, float]]] = {
    "smc": partial(public, "smc"),
    "ais": partial(public, "ais", num_temperatures=1000),
    "bracket": partial(public, "bracket", num_temperatures=1000),
    "WeightedPCD": weighted,
    "monitor": monitored,
}


def covered(machine: Machine, method: str, seeds: Sequence[int]) -> Row:
    """Return how many intervals hold the exact log Z or come with a warning, and the errors."""
    hits = 0
    warned = 0
    errors = []
    for seed in seeds:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value, low, high = METHODS[method](machine, jax.random.key(seed))
        doubtful = bool(caught) or np.isnan(value)
        warned += doubtful
        hits += doubtful or low <= machine.log_z <= high
        errors.append(value - machine.log_z)
    row = {"covered or warned": int(hits), "warned": int(warned), "of": len(seeds)}
    row |= {
        "mean": float(np.nanmean(errors)),
        "rms": float(np.sqrt(np.nanmean(np.square(errors)))),
    }
    return row | {"worst": float(np.nanmax(np.abs(errors)))}


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row per machine and method."""
    parser = records.parser(__doc__, METHODS, range(20), draws=False)
    parser.add_argument(
        "--machines", nargs="+", choices=MACHINES, default=list(MACHINES)
    )
    args = parser.parse_args(argv)
    for name in args.machines:
        machine = MACHINES[name]()
        for method in args.only:
            print(
                json.dumps(
                    {"machine": name, "method": method}
                    | covered(machine, method, args.seeds)
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
