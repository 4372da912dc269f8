# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""An Ising model learned from its own configurations, at and below the critical temperature.

A torus of 6x6 spins with one coupling per edge and one field per spin is fitted to
2,000 exact draws. Below the critical temperature the draws have two modes, of either
sign of the magnetisation, and persistent chains stay in one of them. The learned model
is summed exactly over half of the spins: mean log-likelihood of the rows, P(m > 0) and
the Binder cumulant 1 - <m^4> / (3 <m^2>^2) of the magnetisation m. Each run is printed
as JSON.
"""

from collections.abc import Callable, Sequence
import json
import time
from typing import Any

import networkx as nx
import numpy as np
import records
from records import Row
from scipy.special import logsumexp

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, PTT, UCD, FactorGraph, ParticleUCD, Spin, WeightedPCD
from ebmpp.estimators import Batch, Centered, Estimate, Estimator

SIDE = 6
ROWS = 2000
TORUS = nx.grid_2d_graph(SIDE, SIDE, periodic=True)
GRAPH = FactorGraph.from_networkx(TORUS, family=Spin)
EDGES = np.array([[SIDE * r + c for r, c in edge] for edge in TORUS.edges])
WHITE = np.add(*np.indices((SIDE, SIDE))).ravel() % 2 == 1
# All states of the black spins; no two white spins are neighbours.
BLACK = 1.0 - 2.0 * (
    np.arange(2 ** int((~WHITE).sum()))[:, None] >> np.arange((~WHITE).sum()) & 1
)


def exact(params: Any, rows: np.ndarray, draws: int = 20_000) -> Row:
    """Return the mean log-likelihood of rows and the magnetisation of exact draws."""
    fields = np.asarray(params["x"], float).ravel()
    couplings = np.zeros((SIDE**2, SIDE**2))
    couplings[EDGES[:, 0], EDGES[:, 1]] = np.asarray(params["x:x"], float)
    couplings += couplings.T
    at_white = BLACK @ couplings[~WHITE][:, WHITE] + fields[WHITE]
    log_weight = BLACK @ fields[~WHITE] + np.logaddexp(at_white, -at_white).sum(1)
    log_z = logsumexp(log_weight)
    rng = np.random.default_rng(0)
    index = rng.choice(len(BLACK), draws, p=np.exp(log_weight - log_z))
    white = np.where(
        rng.random(at_white[index].shape) < 1 / (1 + np.exp(-2 * at_white[index])),
        1,
        -1,
    )
    m = (BLACK[index].sum(1) + white.sum(1)) / SIDE**2
    density = rows @ fields + 0.5 * np.einsum("ri,ij,rj->r", rows, couplings, rows)
    row = {
        "log_likelihood": density.mean() - log_z,
        "P(m > 0)": (m > 0).mean() + 0.5 * (m == 0).mean(),
    }
    return row | {"binder": 1 - (m**4).mean() / (3 * (m**2).mean() ** 2)}


class Exact(Estimator):
    """The exact gradient, by the same sums in JAX."""

    def init_state(
        self, graph: Any, params: Any, data: Any, batch: int, key: Any
    ) -> tuple:
        """Return an empty state."""
        return ()

    def estimate(
        self, graph: Any, params: Any, state: tuple, batch: Batch, key: Any
    ) -> Estimate:
        """Return the gradient of the mean negative log-likelihood."""

        def loss(params: Any) -> jax.Array:
            fields = params["x"].ravel()
            couplings = jnp.zeros((SIDE**2, SIDE**2))
            couplings = couplings.at[EDGES[:, 0], EDGES[:, 1]].set(params["x:x"])
            couplings += couplings.T
            black = jnp.asarray(BLACK, jnp.float32)
            at_white = black @ couplings[~WHITE][:, WHITE] + fields[WHITE]
            log_weight = black @ fields[~WHITE] + jnp.logaddexp(
                at_white, -at_white
            ).sum(1)
            energy = jax.vmap(lambda x: graph.energy(params, {"x": x}))(batch.rows["x"])
            return batch.weights @ energy + jax.nn.logsumexp(log_weight)

        return Estimate(jax.grad(loss)(params), state, {}, 1)


METHODS: dict[str, Callable[[], Estimator]] = {
    "exact": Exact,
    "PCD": lambda: PCD(num_chains=100),
    "Centered PCD": lambda: Centered(PCD(num_chains=100)),
    "WeightedPCD": lambda: WeightedPCD(num_chains=100),
    "PTT": lambda: PTT(num_chains=100),
    "ParticleUCD": lambda: ParticleUCD(num_particles=200),
    "UCD": UCD,
}


def run(method: str, coupling: float, seed: int, steps: int, seconds: float) -> Row:
    """Fit one model."""
    truth = {"x": jnp.zeros(SIDE**2), "x:x": jnp.full(len(EDGES), coupling)}
    draws = ebmpp.perfect_sample(
        GRAPH, truth, ROWS, rng_key=jax.random.key(100), method="random_cluster"
    )
    rows = np.asarray(draws["x"], float).reshape(ROWS, -1)
    begin = time.monotonic()
    fit = ebmpp.fit(
        GRAPH,
        draws["x"],
        estimator=METHODS[method](),
        optimizer=optax.adam(optax.cosine_decay_schedule(0.01, steps)),
        num_steps=steps,
        max_seconds=seconds,
        batch_size=100,
        rng_key=jax.random.key(seed),
        progress_bar=False,
    )
    took = time.monotonic() - begin
    done = len(fit.history.gradient_norm)
    row = exact(fit.params, rows) | {
        "truth": exact(truth, rows)["log_likelihood"],
        "seconds": took,
        "steps": done,
    }
    return {name: round(float(value), 4) for name, value in row.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print one row per coupling, method and seed."""
    parser = records.parser(__doc__, METHODS, range(3), draws=False)
    parser.add_argument("--couplings", type=float, nargs="+", default=[0.44, 0.6])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of one run")
    args = parser.parse_args(argv)
    for coupling in args.couplings:
        for method in args.only:
            for seed in args.seeds:
                row = {"coupling": coupling, "method": method, "seed": seed}
                print(
                    json.dumps(
                        row | run(method, coupling, seed, args.steps, args.seconds)
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
