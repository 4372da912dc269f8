# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How many units to propose at a time where a ``log_weight`` decides: an image behind a blur that saturates.

``python benchmarks/log_weight.py`` runs four chains for each share of a layer and number of sweeps a step and
tells how far they agree on the image's ink and misfit, and effective draws of the misfit a second.
"""

import argparse
import time

import networkx as nx
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp

SIZE, COUPLING, NOISE = 16, 0.35, 0.5
KERNEL = jnp.array([[0.05, 0.1, 0.05], [0.1, 0.4, 0.1], [0.05, 0.1, 0.05]])[None, None]
#: Shares of a layer (128 units), and sweeps a step; None for the defaults.
PLANS = [(1.0, 1), (1.0, 30), (0.1, 1), (0.1, 10), (0.1, 30), (4 / 128, 32), (1 / 128, 128), (None, None)]


def blurred(x: Array) -> Array:
    """What is seen of an image, but for the noise."""
    around = jax.lax.conv((2.0 * x - 1)[None, None], KERNEL, (1, 1), "SAME")
    return jnp.tanh(2 * around[0, 0])


def model(y: Array) -> None:
    """An Ising prior, and noise of unknown scale."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    x = numpyro.sample("x", dist.Bernoulli(0.5).expand([SIZE, SIZE]).to_event(2))
    spins = 2.0 * x - 1
    alike = (spins[1:] * spins[:-1]).sum() + (spins[:, 1:] * spins[:, :-1]).sum()
    numpyro.factor("prior", COUPLING * alike)
    numpyro.sample("y", dist.Normal(blurred(x), scale).to_event(2), obs=y)


def block(fraction: float | None, num_sweeps: int | None) -> ebmpp.GibbsBlock:
    """The prior as a graph, the likelihood as a weight beside it."""
    lattice = nx.convert_node_labels_to_integers(nx.grid_2d_graph(SIZE, SIZE))
    edges = np.array(lattice.edges)
    graph = ebmpp.FactorGraph(
        {"x": ebmpp.Bernoulli((SIZE, SIZE))},
        factors=[ebmpp.Bias("x"), ebmpp.Pairwise("x", edges, shared=True)],
    )
    degree = np.bincount(edges.ravel(), minlength=SIZE**2).reshape(SIZE, SIZE)
    params = {"x": jnp.asarray(-2.0 * COUPLING * degree), "x:x": jnp.asarray(4.0 * COUPLING)}
    weight = lambda x, sites, y: dist.Normal(blurred(x["x"]), sites["scale"]).log_prob(y).sum()
    return ebmpp.GibbsBlock(graph, ["x"], params, log_weight=weight, fraction=fraction, num_sweeps=num_sweeps)


def image() -> tuple[np.ndarray, Array]:
    """Regions, and what is seen of them."""
    rng = np.random.default_rng(0)
    field = rng.normal(size=(SIZE, SIZE))
    for _ in range(6):
        field = sum((np.roll(field, s, a) for s in (1, -1) for a in (0, 1)), field) / 5
    x = (field > 0).astype(np.float32)
    return x, jnp.asarray(np.asarray(blurred(jnp.asarray(x))) + NOISE * rng.normal(size=x.shape))


def main() -> None:
    """Print a line for each plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    truth, y = image()
    block(None, None).verify(model, y)
    for fraction, sweeps in PLANS:
        made = block(fraction, sweeps)
        kernel = Gibbs([(made, ["x"]), (NUTS(model, max_tree_depth=4), None)])
        mcmc = MCMC(
            kernel,
            num_warmup=args.steps,
            num_samples=args.steps,
            num_chains=4,
            chain_method=jax.vmap,
            progress_bar=False,
        )
        begin = time.perf_counter()
        mcmc.run(jax.random.key(0), y)
        x = jax.block_until_ready(mcmc.get_samples(group_by_chain=True)["x"])
        spent = time.perf_counter() - begin
        ink = np.asarray(x, float).mean((2, 3))
        misfit = ((np.asarray(jax.vmap(jax.vmap(blurred))(x)) - np.asarray(y)) ** 2).mean((2, 3))
        ess = float(effective_sample_size(misfit)) / spent
        wrong = ((np.asarray(x).mean((0, 1)) > 0.5) != truth).mean()
        print(
            f"  share {made.fraction:.4f}, {made.num_sweeps:3} sweeps: {spent:5.1f} s, R-hat of the ink "
            f"{split_gelman_rubin(ink):.3f}, of the misfit {split_gelman_rubin(misfit):.3f}, effective draws "
            f"a second {ess:.2f}, wrong {wrong:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
