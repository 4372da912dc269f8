# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A two-layer network on 8x8 digits by several estimators, with its likelihood from both sides.

python benchmarks/any_energy/digits.py [--only NAME ...] [--steps 4000]

Steps are fixed, not seconds, so that results do not depend on the machine.
"""

import argparse
from collections.abc import Sequence
import json
import time
from typing import Any, NamedTuple

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


class Setting(NamedTuple):
    """An estimator, its largest rate, which falls to 0, and its number of steps."""

    estimator: Any
    rate: float
    steps: int


SETTINGS = {
    "PCD": Setting(PCD(num_chains=100), 2e-3, 15_000),
    "PCD, informed moves": Setting(
        PCD(num_chains=100, moves=ebmpp.moves.informed_sweep(GRAPH)), 2e-3, 15_000
    ),
    "UCD": Setting(UCD(num_pairs=50), 5e-3, 3_000),
    "ParticleUCD": Setting(
        ParticleUCD(num_particles=100, cess_threshold=0.8), 5e-3, 8_000
    ),
}


def rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return binary training rows and held-out rows."""
    digits = ebmpp.data.binarize(ebmpp.data.digits())
    shuffled = digits[np.random.default_rng(seed).permutation(len(digits))]
    return shuffled[HELD_OUT:], shuffled[:HELD_OUT]


def trained(name: str, steps: int | None, seed: int) -> dict[str, Any]:
    """Train for some steps, and bracket the likelihood of held-out rows."""
    train, held_out = rows(seed)
    setting = SETTINGS[name]
    num_steps = steps or setting.steps
    begin = time.process_time()
    fit = ebmpp.fit(
        GRAPH,
        train,
        estimator=setting.estimator,
        optimizer=optax.adam(optax.cosine_decay_schedule(setting.rate, num_steps)),
        num_steps=num_steps,
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
    norms = np.array_split(fit.history.gradient_norm.values, 10)
    return {
        "estimator": name,
        "rate": setting.rate,
        "steps": num_steps,
        "cpu_seconds": round(spent, 1),
        "held_out": {side: round(float(value), 3) for side, value in sides.items()},
        "standard_error": round(float(bracket.standard_error), 3),
        "gradient_norm": [round(float(np.median(part)), 2) for part in norms],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row per estimator and seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    add("--seeds", type=int, nargs="+", default=[0])
    add("--steps", type=int, help="default: that of each setting")
    args = parser.parse_args(argv)
    for name in args.only:
        for seed in args.seeds:
            print(json.dumps(trained(name, args.steps, seed)), flush=True)


if __name__ == "__main__":
    main()
