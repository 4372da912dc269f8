# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Meeting times from common and from independent starts, and what the start-end test
says of each run.

Machines trained by PCD; the Ising torus of 32x32 spins below its critical temperature;
and six bits under a penalty on their sum, where pairs from one state meet in a mode
that they do not leave. Pairs that have not met after ``LIMIT`` sweeps are dropped, and
counted. Each row is printed as JSON.
"""

from collections.abc import Callable, Sequence
import json
import time
from typing import Any
import warnings

from coverage_of_log_z import MACHINES
import networkx as nx
import numpy as np
import records
from records import Row

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import Bernoulli, FactorGraph, Spin

LIMIT = 5_000
PAIRS = 100
Model = tuple[FactorGraph, Any, str]


def trained(name: str) -> Model:
    """Return a machine of ``coverage_of_log_z``."""
    machine = MACHINES[name]()
    return machine.graph, machine.params, "maximal"


def mnist() -> Model:
    """Return a machine of 784x500 units after 3,000 steps of PCD."""
    graph = ebmpp.layered(v=Bernoulli(784), h=Bernoulli(500))
    run = {
        "estimator": ebmpp.PCD(num_chains=1000),
        "optimizer": optax.sgd(0.05),
        "batch_size": 500,
    }
    rows = np.asarray(ebmpp.data.mnist()) > 0.5
    fit = ebmpp.fit(
        graph,
        rows,
        num_steps=3000,
        rng_key=jax.random.key(0),
        progress_bar=False,
        **run,
    )
    return graph, fit.params, "maximal"


def ising(coupling: float) -> Model:
    """Return a torus of spins with one coupling for all edges."""
    torus = nx.grid_2d_graph(32, 32, periodic=True)
    graph = FactorGraph.from_networkx(torus, family=Spin, shared=True, bias=False)
    return (
        graph,
        jax.tree.map(
            lambda a: jnp.full_like(a, coupling), graph.init(jax.random.key(0))
        ),
        "common",
    )


def penalty() -> Model:
    """Return six bits with small fields and energy 50 (sum - 3)^2."""
    graph = FactorGraph.from_networkx(
        nx.complete_graph(6), family=Bernoulli, shared=True
    )
    fields = jnp.asarray([-1, -0.5, 0, 0.5, 1, 1.5])
    return graph, {"x": fields + 250, "x:x": jnp.asarray(-100.0)}, "maximal"


MODELS: dict[str, Callable[[], Model]] = {
    **{name: lambda name=name: trained(name) for name in MACHINES},
    "mnist-784x500": mnist,
    **{f"ising-32x32-{j}": lambda j=j: ising(j) for j in (0.3, 0.4, 0.5, 0.6)},
    "penalty": penalty,
}


def measured(model: Model, seed: int, independent: bool) -> Row:
    """Return the meeting times and the z-score of one run."""
    graph, params, coupling = model
    first = next(iter(graph.visible))
    begin = time.monotonic()
    with warnings.catch_warnings():
        # unmet pairs and the test's own warning: both are shown
        warnings.simplefilter("ignore", UserWarning)
        try:
            run = ebmpp.unbiased_expectation(
                graph,
                params,
                lambda x: x[first].sum(),
                rng_key=jax.random.key(seed),
                num_pairs=PAIRS,
                k=1,
                coupling=coupling,
                independent_starts=independent,
                max_sweeps=LIMIT,
                unmet="drop",
            )
        except ebmpp.errors.UnmetError:
            return {"met": 0}
    tau = run.meeting_time[run.met]
    row = {
        "met": len(tau),
        "mean": float(tau.mean()),
        "max": int(tau.max()),
        "overlap": float(run.overlap),
    }
    return row | {"seconds": time.monotonic() - begin}


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row per model, kind of start and seed."""
    args = records.parser(__doc__, MODELS, range(5), draws=False).parse_args(argv)
    for name in args.only:
        model = MODELS[name]()
        for independent in (False, True):
            for seed in args.seeds:
                row = {"model": name, "independent starts": independent, "seed": seed}
                print(json.dumps(row | measured(model, seed, independent)), flush=True)


if __name__ == "__main__":
    main()
