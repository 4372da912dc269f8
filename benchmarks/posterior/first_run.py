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
- ``diabetes``: ten regressors with an indicator each; the scale of the errors, and the
  indicator with the fewest effective draws.
- ``classes``, ``mixture``: two latent classes and three components; sorted shares, and
  sorted means. Both are simulated in ``speed/collapsed.py``.
"""

import argparse
from collections.abc import Callable, Iterator
from operator import itemgetter
import os
from pathlib import Path
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
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
sys.path.append(str(Path(__file__).parents[1] / "speed"))
import collapsed
import published_data as data

MODELS = ("occupancy", "hearts", "diabetes", "classes", "mixture")


class Problem(NamedTuple):
    """A model with its data, and values of its draws."""

    model: Callable[..., None]
    args: tuple[Array, ...]
    sites: list[str]
    """All sites; ``z`` are discrete."""
    values: dict[str, Callable[[dict], np.ndarray]]
    """By name, from draws to ``(chains, draws, ...)``."""


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


def problem(name: str) -> Problem:
    if name == "occupancy":
        seen = jnp.asarray(data.SALAMANDERS.sum(1))
        sites = ["z", "occupied", "detected"]
        return Problem(occupancy, (seen,), sites, at_sites(sites[1:]))
    if name == "hearts":
        args = jnp.asarray(data.HEARTS_AFTER), jnp.asarray(data.HEARTS_TOTAL)
        sites = ["z", "alpha", "delta"]
        return Problem(hearts, args, sites, at_sites(sites[1:]))
    case = collapsed.cases()[name]
    watched = {"indicators" if name == "diabetes" else "sorted": case.watched}
    if name == "diabetes":
        watched["scale"] = lambda draws: draws["variance"] ** 0.5
    args = tuple(map(jnp.asarray, case.args))
    return Problem(case.model, args, case.sites.split(), watched)


def at_sites(names: list[str]) -> dict[str, Callable[[dict], np.ndarray]]:
    return {name: itemgetter(name) for name in names}


# -- methods -------------------------------------------------------------------------


def all_sites(
    problem: Problem,
    sites: list[str] | None = None,
    collapse: bool = False,
    num_sweeps: int = 1,
) -> MCMCKernel:
    model, args, names, _ = problem
    return ebmpp.GibbsBlock.from_model(
        model,
        sites or names,
        *args,
        sequential=True,
        collapse=collapse,
        num_sweeps=num_sweeps,
    )


def many_sweeps(problem: Problem) -> MCMCKernel:
    return all_sites(problem, num_sweeps=20)


def collapsed_sites(problem: Problem) -> MCMCKernel:
    return all_sites(problem, collapse=True)


def block_and_nuts(problem: Problem) -> MCMCKernel:
    block = all_sites(problem, ["z"])
    return Gibbs([(block, ["z"]), (NUTS(problem.model), None)])


def enumerated(problem: Problem) -> MCMCKernel:
    marks = {"z": {"enumerate": "parallel"}}
    marked = numpyro.handlers.infer_config(
        problem.model, lambda site: marks.get(site["name"], {})
    )
    return NUTS(marked)


def on_the_sum(problem: Problem) -> MCMCKernel:
    return NUTS(all_sites(problem, ["z"]).marginal_model())


def hmc_gibbs(problem: Problem) -> MCMCKernel:
    return DiscreteHMCGibbs(NUTS(problem.model))


METHODS = {
    "all sites by the block": all_sites,
    "all sites, 20 sweeps per draw": many_sweeps,
    "all sites, collapsed": collapsed_sites,
    "block and NUTS": block_and_nuts,
    "enumerated NUTS": enumerated,
    "NUTS on marginal_model": on_the_sum,
    "DiscreteHMCGibbs": hmc_gibbs,
}
#: logits are not conjugate, and indicators of a regression are not summed out
EXCLUDED = {
    ("hearts", "all sites by the block"),
    ("hearts", "all sites, 20 sweeps per draw"),
    ("hearts", "all sites, collapsed"),
    ("diabetes", "enumerated NUTS"),
    ("diabetes", "NUTS on marginal_model"),
}


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
    """Print a row for each watched value: CPU times, worst effective number and R-hat."""
    case = problem(name)
    jax.block_until_ready(case.args)
    start = time.process_time()
    kernel = METHODS[method](case)
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=1000,
        num_chains=4,
        chain_method=jax.vmap if isinstance(kernel, Gibbs) else "vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), *case.args)
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    first = time.process_time() - start
    alone = draws_alone(mcmc, case.args)
    draws = jax.tree.map(np.asarray, draws)
    for label, watched in case.values.items():
        values = watched(draws).astype(float)
        values = values[..., values.std((0, 1)) > 0]
        effective = effective_sample_size(values).min()
        rhat = split_gelman_rubin(values).max()
        means = " ".join(f"{mean:.3f}" for mean in np.atleast_1d(values.mean((0, 1))))
        print(
            f"| {name}, {label} | {method} | {seed} | {effective / alone:.0f} "
            f"| {effective / first:.1f} | {effective:.0f} | {rhat:.3f} | {means} "
            f"| {alone:.2f} | {first:.2f} |",
            flush=True,
        )


def rows(
    names: list[str], methods: list[str], seeds: int
) -> Iterator[tuple[str, str, int]]:
    for seed in range(seeds):
        for name in names or MODELS:
            for method in methods:
                if (name, method) not in EXCLUDED:
                    yield name, method, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models; all by default")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--row", nargs=3, metavar=("MODEL", "METHOD", "SEED"))
    options = parser.parse_args()
    if options.row:
        name, method, seed = options.row
        measure(name, method, int(seed))
        return
    print(
        "| model, value | method | seed | draws alone | first run | effective | R-hat "
        "| means | CPU s, draws alone | CPU s, first run |\n" + "|---" * 10 + "|",
        flush=True,
    )
    environment = {
        key: value
        for key, value in os.environ.items()
        if key != "JAX_COMPILATION_CACHE_DIR"
    }
    for row in rows(options.names, options.methods, options.seeds):
        command = [sys.executable, __file__, "--row", *map(str, row)]
        subprocess.run(command, env=environment, check=False)


if __name__ == "__main__":
    main()
