# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A hard posterior: an image of three grey levels that are not known, under a Potts prior, in noise.

``python benchmarks/segmentation.py`` runs four chains a sampler from default starts, some seeds of each, and
tells how far the chains agree. Levels are exchangeable, so that chains differ in what they call which: the
R-hat of the levels as they are tells that, and is large for every sampler that does not change the names; the
R-hat of the levels in rising order, which does not depend on names, tells whether the segmentation is found.
"""

import argparse
import time
from typing import Any

import networkx as nx
import numpy as np
import numpyro
from numpyro.diagnostics import split_gelman_rubin
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp

SIZE, LEVELS, NOISE, WIDE = 32, 3, 0.5, 10.0


def image() -> tuple[np.ndarray, np.ndarray]:
    """Regions, and what is seen of them: levels -1, 0 and 1 in noise."""
    rng = np.random.default_rng(0)
    fields = rng.normal(size=(LEVELS, SIZE, SIZE))
    for _ in range(12):
        fields = sum((np.roll(fields, s, a) for s in (1, -1) for a in (1, 2)), fields) / 5
    labels = fields.argmax(0)
    return labels, (labels - 1 + NOISE * rng.normal(size=labels.shape)).astype(np.float32)


def model(y: Array, coupling: float) -> None:
    """Labels of pixels that like to be their neighbours', and a level for each."""
    means = numpyro.sample("means", dist.Normal(0, WIDE).expand([LEVELS]).to_event(1))
    z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(LEVELS)).expand(y.shape).to_event(2))
    alike = (z[1:] == z[:-1]).sum() + (z[:, 1:] == z[:, :-1]).sum()
    numpyro.factor("prior", coupling * alike)
    numpyro.sample("y", dist.Normal(means[z], NOISE).to_event(2), obs=y)


def clusters() -> ebmpp.GibbsBlock:
    """The labels by hand: a graph, the field of the likelihood, and Swendsen and Wang's moves."""
    lattice = nx.convert_node_labels_to_integers(nx.grid_2d_graph(SIZE, SIZE))
    pairs = ebmpp.Pairwise("z", np.array(lattice.edges), shared=True)
    graph = ebmpp.FactorGraph(
        {"z": ebmpp.Categorical((SIZE, SIZE), LEVELS)}, factors=[ebmpp.Bias("z"), pairs]
    )

    def field(sites: dict, y: Array, coupling: float) -> Array:
        return -0.5 * ((y[..., None] - sites["means"]) / NOISE) ** 2

    params = {"z": field, "z:z": lambda sites, y, coupling: jnp.asarray(coupling)}
    return ebmpp.GibbsBlock(
        graph, ["z"], params, moves=(*ebmpp.moves.cluster_sweep(graph), ebmpp.moves.Layer(("z",)))
    )


def near(seed: int) -> dict[str, Array]:
    """Starts as NUTS has them: levels between -2 and 2, labels as they fall."""
    labels, levels = jax.random.split(jax.random.key(1000 + seed))
    return {
        "z": jax.random.randint(labels, (4, SIZE, SIZE), 0, LEVELS),
        "means": jax.random.uniform(levels, (4, LEVELS), minval=-2, maxval=2),
    }


def samplers(y: Array, coupling: float, betas: np.ndarray) -> dict[str, tuple[Any, int, Any]]:
    """Kernels, how many steps of each, and starts that are not the kernel's own."""
    block = lambda sites, **options: ebmpp.GibbsBlock.from_model(model, sites, y, coupling, **options)
    nuts = lambda labels: Gibbs([(labels, ["z"]), (NUTS(model), None)])
    both, heated = block(["z", "means"]), block(["z", "means"], tempering=betas)
    return {
        "labels, NUTS": (nuts(block(["z"])), 500, None),
        "labels by clusters, NUTS": (nuts(clusters()), 500, None),
        "both, from the prior": (both, 1000, None),
        "both, from near 0": (both, 1000, near),
        f"both, {len(betas)} betas, from the prior": (heated, 300, None),
        f"both, {len(betas)} betas, from near 0": (heated, 300, near),
    }


def judged(draws: dict[str, Array], labels: np.ndarray) -> tuple[float, float, np.ndarray]:
    """R-hat of the levels, and of the levels in order; the share of right pixels of each chain."""
    means, z = (np.asarray(draws[name]) for name in ("means", "z"))
    order = np.argsort(means, -1)
    rank = np.argsort(order, -1)
    named = np.take_along_axis(rank[:, :, None, None], z[..., None], -1)[..., 0]
    guess = np.stack([(named == k).mean(1) for k in range(LEVELS)]).argmax(0)
    worst = lambda a: max(float(split_gelman_rubin(a[..., k])) for k in range(LEVELS))
    ranked = np.take_along_axis(means, order, -1)
    return worst(means), worst(ranked), (guess == labels).mean((1, 2))


def run(name: str, made: tuple[Any, int, Any], args: tuple, seed: int, labels: np.ndarray) -> None:
    """One line of the table."""
    kernel, steps, starts = made
    mcmc = MCMC(
        kernel, num_warmup=steps, num_samples=steps, num_chains=4, chain_method=jax.vmap, progress_bar=False
    )
    begin = time.perf_counter()
    mcmc.run(jax.random.key(seed), *args, init_params=starts(seed) if starts else None)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    spent = time.perf_counter() - begin
    raw, ordered, right = judged(draws, labels)
    state = mcmc.last_state
    taken = np.asarray(getattr(state, "transitions", 0)).mean() / (2 * steps)
    print(
        f"  {name:34} seed {seed}: {spent:5.1f} s, R-hat {raw:6.2f}, in order {ordered:6.3f}, right "
        f"{right.min():.3f} to {right.max():.3f}, transitions taken {taken:.3f}",
        flush=True,
    )


def main() -> None:
    """Print a line for each sampler and seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--couplings", type=float, nargs="*", default=[1.0, 2.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--betas", type=int, default=51)
    parser.add_argument("--hottest", type=float, default=0.3)
    args = parser.parse_args()
    labels, y = image()
    alone = np.abs(y[..., None] - np.arange(-1, 2)).argmin(-1)
    print(f"pixel by pixel, levels known: {(alone == labels).mean():.3f} right", flush=True)
    betas = np.linspace(args.hottest, 1, args.betas)
    for coupling in args.couplings:
        print(f"coupling {coupling:g}", flush=True)
        made = samplers(jnp.asarray(y), coupling, betas)
        for name in made:
            for seed in range(args.seeds):
                run(name, made[name], (jnp.asarray(y), coupling), seed, labels)


if __name__ == "__main__":
    main()
