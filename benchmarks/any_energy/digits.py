# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A two-layer network on 8x8 digits by several estimators, with its likelihood from both sides.

python benchmarks/any_energy/digits.py [--only NAME ...] [--seconds 60]
"""

import argparse
from collections.abc import Sequence
import json
import time
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, Bias, Factor, FactorGraph, ParticleUCD

WIDTHS = 64, 32
HELD_OUT = 300


def network(p: Any, v: jax.Array) -> jax.Array:
    """Two layers of softplus units and one output."""
    first = jax.nn.softplus(v @ p["w"] + p["b"])
    second = jax.nn.softplus(first @ p["u"] + p["d"])
    return -second @ p["c"]


def init(key: jax.Array) -> Any:
    """Weights of unit gain, and a last layer of zeros."""
    first, second = jax.random.split(key)
    h1, h2 = WIDTHS
    return {
        "w": jax.random.normal(first, (64, h1)) / 8,
        "b": jnp.zeros(h1),
        "u": jax.random.normal(second, (h1, h2)) / h1**0.5,
        "d": jnp.zeros(h2),
        "c": jnp.zeros(h2),
    }


NET = Factor("v", energy=network, init=init, name="net", affine=False)
GRAPH = FactorGraph({"v": Bernoulli(64)}, factors=[Bias("v"), NET])
ESTIMATORS = {
    "PCD": PCD(num_chains=100),
    "PCD, informed moves": PCD(num_chains=100, moves=ebmpp.moves.informed_sweep(GRAPH)),
    "ParticleUCD, informed moves": ParticleUCD(
        num_particles=200, moves=ebmpp.moves.informed_sweep(GRAPH)
    ),
    "UCD": UCD(num_pairs=50),
}


def rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return binary training rows and held-out rows."""
    digits = ebmpp.data.binarize(ebmpp.data.digits())
    shuffled = digits[np.random.default_rng(seed).permutation(len(digits))]
    return shuffled[HELD_OUT:], shuffled[:HELD_OUT]


def trained(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """Train for some seconds, and bracket the likelihood of held-out rows."""
    train, held_out = rows(seed)
    begin = time.process_time()
    fit = ebmpp.fit(
        GRAPH,
        train,
        estimator=ESTIMATORS[name],
        optimizer=optax.adam(2e-3),
        num_steps=20_000,
        max_seconds=seconds,
        batch_size=100,
        rng_key=jax.random.key(seed),
        progress_bar=False,
    )
    spent = time.process_time() - begin
    bracket = ebmpp.bracket(
        GRAPH,
        fit.params,
        rng_key=jax.random.key(seed + 1),
        num_particles=100,
        num_temperatures=1000,
        data=train,
    )
    sides = {
        "log Z at least": bracket.lower.average_log_likelihood(held_out).value,
        "log Z at most": bracket.upper.average_log_likelihood(held_out).value,
    }
    return {
        "estimator": name,
        "steps": fit.history.sizes["step"],
        "cpu_seconds": round(spent, 1),
        "held_out": {side: round(float(value), 3) for side, value in sides.items()},
        "standard_error": round(float(bracket.standard_error), 3),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row per estimator and seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS))
    add("--seeds", type=int, nargs="+", default=[0])
    add("--seconds", type=float, default=60, help="of training")
    args = parser.parse_args(argv)
    for name in args.only:
        for seed in args.seeds:
            print(json.dumps(trained(name, args.seconds, seed)), flush=True)


if __name__ == "__main__":
    main()
