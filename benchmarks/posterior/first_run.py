# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Effective draws per CPU-second of models with discrete latents, compilation included.

``python benchmarks/posterior/first_run.py [names]`` runs each method, by several seeds,
in a fresh process without a cache of programs: 4 chains of 1,000 draws after 500 steps
of warm-up. "First run" divides the smallest effective number of draws by the CPU time
from the declaration of the kernel to the last draw. "Draws alone" divides it by that of
1,000 further steps of each chain in a compiled loop that stores no draws, the minimum
of three loops.

Enumerated NUTS needs ``funsor``; install it beside the project.

- ``occupancy``: salamanders at 39 places of 5 visits each; occupied share and detection
  probability.
- ``hearts``: of the examples of BUGS, with 12 patients who are cured or not.
"""

import argparse
from collections.abc import Callable, Iterator
import os
from pathlib import Path
import subprocess
import sys
import time

import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs, Gibbs
from numpyro.infer.mcmc import MCMCKernel

import jax
from jax import Array, lax
import jax.numpy as jnp

import ebmpp

sys.path.append(str(Path(__file__).parents[1] / "published"))
import published_data as data

MODELS = ("occupancy", "hearts")


def occupancy(seen: Array) -> None:
    """Places that are occupied or not, and detections where they are."""
    occupied = numpyro.sample("occupied", dist.Beta(1, 1))
    detected = numpyro.sample("detected", dist.Beta(1, 1))
    with numpyro.plate("places", len(seen)):
        z = numpyro.sample("z", dist.Bernoulli(occupied))
        numpyro.sample("seen", dist.Binomial(5, z * detected), obs=seen)


def hearts(after: Array, total: Array) -> None:
    """Contractions of the heart after a drug: some patients are cured."""
    alpha = numpyro.sample("alpha", dist.Normal(0, 100))
    delta = numpyro.sample("delta", dist.Normal(0, 100))
    with numpyro.plate("patients", len(after)):
        z = numpyro.sample("z", dist.Bernoulli(jax.nn.sigmoid(delta)))
        rate = (1 - z) * jax.nn.sigmoid(alpha)
        numpyro.sample("after", dist.Binomial(total, rate), obs=after)


def problem(name: str) -> tuple[Callable[..., None], tuple[Array, ...], list[str]]:
    """Return a model, its arguments, and its continuous sites."""
    if name == "occupancy":
        seen = jnp.asarray(data.SALAMANDERS.sum(1))
        return occupancy, (seen,), ["occupied", "detected"]
    args = jnp.asarray(data.HEARTS_AFTER), jnp.asarray(data.HEARTS_TOTAL)
    return hearts, args, ["alpha", "delta"]


# -- methods -------------------------------------------------------------------------


def all_sites(model: Callable, args: tuple, continuous: list[str]) -> MCMCKernel:
    return ebmpp.GibbsBlock.from_model(model, ["z", *continuous], *args)


def block_and_nuts(model: Callable, args: tuple, continuous: list[str]) -> MCMCKernel:
    block = ebmpp.GibbsBlock.from_model(model, ["z"], *args)
    return Gibbs([(block, ["z"]), (NUTS(model), None)])


def enumerated(model: Callable, args: tuple, continuous: list[str]) -> MCMCKernel:
    marks = {"z": {"enumerate": "parallel"}}
    marked = numpyro.handlers.infer_config(
        model, lambda site: marks.get(site["name"], {})
    )
    return NUTS(marked)


def on_the_sum(model: Callable, args: tuple, continuous: list[str]) -> MCMCKernel:
    block = ebmpp.GibbsBlock.from_model(model, ["z"], *args)
    return NUTS(block.marginal_model())


def hmc_gibbs(model: Callable, args: tuple, continuous: list[str]) -> MCMCKernel:
    return DiscreteHMCGibbs(NUTS(model))


METHODS = {
    "all sites by the block": all_sites,
    "block and NUTS": block_and_nuts,
    "enumerated NUTS": enumerated,
    "NUTS on marginal_model": on_the_sum,
    "DiscreteHMCGibbs": hmc_gibbs,
}
EXCLUDED = {("hearts", "all sites by the block")}  # logits are not conjugate


# -- measurement ---------------------------------------------------------------------


def draws_alone(mcmc: MCMC, args: tuple) -> float:
    """Return CPU seconds of 1,000 steps of each chain in a loop compiled before."""

    def step(state: object) -> object:
        return mcmc.sampler.sample(state, args, {})

    if mcmc.chain_method is jax.vmap:
        step = jax.vmap(step)

    @jax.jit
    def loop(state: object) -> object:
        return lax.fori_loop(0, 1000, lambda _, state: step(state), state)

    times = []
    for _ in range(4):
        start = time.process_time()
        jax.block_until_ready(loop(mcmc.last_state))
        times.append(time.process_time() - start)
    return min(times[1:])


def measure(name: str, method: str, seed: int) -> None:
    """Print CPU times and the worst site's effective number of draws and R-hat."""
    model, args, continuous = problem(name)
    jax.block_until_ready(args)
    start = time.process_time()
    kernel = METHODS[method](model, args, continuous)
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=1000,
        num_chains=4,
        chain_method=jax.vmap if isinstance(kernel, Gibbs) else "vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), *args)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    first = time.process_time() - start
    alone = draws_alone(mcmc, args)
    effective = min(effective_sample_size(draws[site]) for site in continuous)
    rhat = max(split_gelman_rubin(draws[site]) for site in continuous)
    means = ", ".join(f"{draws[site].mean():.3f}" for site in continuous)
    print(
        f"| {name} | {method} | {seed} | {effective / alone:.0f} "
        f"| {effective / first:.1f} | {effective:.0f} | {rhat:.3f} | {means} "
        f"| {alone:.2f} | {first:.2f} |",
        flush=True,
    )


def rows(names: list[str], seeds: int) -> Iterator[tuple[str, str, int]]:
    for seed in range(seeds):
        for name in names or MODELS:
            for method in METHODS:
                if (name, method) not in EXCLUDED:
                    yield name, method, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models; all by default")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--row", nargs=3, metavar=("MODEL", "METHOD", "SEED"))
    options = parser.parse_args()
    if options.row:
        name, method, seed = options.row
        measure(name, method, int(seed))
        return
    print(
        "| model | method | seed | draws alone | first run | effective | R-hat | means "
        "| CPU s, draws alone | CPU s, first run |\n" + "|---" * 10 + "|",
        flush=True,
    )
    environment = {
        key: value
        for key, value in os.environ.items()
        if key != "JAX_COMPILATION_CACHE_DIR"
    }
    for row in rows(options.names, options.seeds):
        command = [sys.executable, __file__, "--row", *map(str, row)]
        subprocess.run(command, env=environment, check=False)


if __name__ == "__main__":
    main()
