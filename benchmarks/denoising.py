# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Denoising a 16x16 image under an Ising prior: GibbsBlock against NumPyro's DiscreteHMCGibbs.

``python benchmarks/denoising.py`` samples one posterior with both, NUTS moving the noise's scale in each,
and prints how far their means are apart in standard errors, effective sample sizes, and the time of a step
(compiled loops of the warmed-up kernels, interleaved, minimum of several).
"""

import argparse
from functools import partial
from pathlib import Path
import sys
import time

import arviz_base
import arviz_stats
from handwritten import interleaved
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs, Gibbs
from scipy import stats

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp

root = Path(__file__).parents[1]
sys.path += [str(root), str(root / "models")]
from models.denoising import Prior, ising, noisy  # noqa: E402 - where models/ is


def model(prior: Prior, y: Array) -> None:
    """The model of models/denoising.py for one image, its prior written so that NumPyro can enumerate."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    height, width = prior.layout.shape
    with numpyro.plate("rows", height, dim=-2), numpyro.plate("columns", width, dim=-1):
        x = numpyro.sample("x", dist.Bernoulli(0.5))  # an event of two axes has no enumeration
    numpyro.factor("prior", -prior.graph.energy(prior.params, prior.layout.split(1.0 * x)))
    numpyro.sample("y", dist.Normal(1.0 * x, scale).to_event(2), obs=y)


def runs(prior: Prior, warmup: int, samples: int, chains: int) -> dict[str, MCMC]:
    """Both samplers."""
    bound = partial(model, prior)
    block = prior.block()
    kernels = {
        "GibbsBlock": Gibbs([(block, ["x"]), (NUTS(bound), None)]),
        "DiscreteHMCGibbs": DiscreteHMCGibbs(NUTS(bound)),
    }
    make = partial(MCMC, num_warmup=warmup, num_samples=samples, num_chains=chains, progress_bar=False)
    return {name: make(kernel, chain_method="sequential") for name, kernel in kernels.items()}


def step_times(prior: Prior, y: Array, repeats: int, steps: int = 500) -> dict[str, float]:
    """Seconds a step of each kernel, warmed up, in a compiled loop."""
    tasks = {}
    for name, mcmc in runs(prior, 300, 1, 1).items():
        mcmc.run(jax.random.key(0), y)
        one = lambda _, state, kernel=mcmc.sampler: kernel.sample(state, (y,), {})
        loop = jax.jit(lambda state, one=one: jax.lax.fori_loop(0, steps, one, state))
        tasks[name] = partial(loop, mcmc.last_state)
    return {name: spent / steps for name, (_, spent) in interleaved(tasks, repeats).items()}


def agreement(prior: Prior, y: Array, warmup: int, samples: int, chains: int) -> None:
    """Means of both, in standard errors of their difference, where a pixel is in doubt."""
    found = {}
    for name, mcmc in runs(prior, warmup, samples, chains).items():
        begin = time.perf_counter()
        mcmc.run(jax.random.key(1), y)
        draws = {k: np.asarray(v, float) for k, v in mcmc.get_samples(group_by_chain=True).items()}
        spent = time.perf_counter() - begin
        both = {"scale": draws["scale"], "ink": draws["x"].mean((2, 3))}
        ess = arviz_stats.ess(arviz_base.from_dict({"posterior": both}))
        found[name] = {"scale": draws["scale"], "x": draws["x"].reshape(*draws["x"].shape[:2], -1)}
        told = f"ESS of the scale {float(ess.scale):.0f}, of the ink {float(ess.ink):.0f}"
        print(f"{name:17} {spent:6.1f} s, {told}", flush=True)
    ours, theirs = found.values()
    mean = np.concatenate([ours["x"], theirs["x"]]).mean((0, 1))
    doubtful = (mean > 0.02) & (mean < 0.98)
    stacks = [np.concatenate([r["x"][..., doubtful], r["scale"][..., None]], -1) for r in (ours, theirs)]
    z = difference(*stacks)
    bound = stats.norm.isf(1e-4 / (2 * len(z)))
    print(
        f"{doubtful.sum()} pixels in doubt and the scale: z rms {np.sqrt((z**2).mean()):.2f}, max |z| "
        f"{np.abs(z).max():.2f} (a correct pair exceeds {bound:.1f} once in 10,000)"
    )


def difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """z of the difference of means, from batches of 100 draws: shape ``(quantities,)``."""
    means = [a.reshape(-1, 100, a.shape[-1]).mean(1) for a in (first, second)]
    error = np.sqrt(sum(m.var(0, ddof=1) / len(m) for m in means))
    return (means[0].mean(0) - means[1].mean(0)) / error


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    prior = ising()
    image = ebmpp.data.binarize(ebmpp.data.digits()[:1]).reshape(8, 8)
    y = jnp.asarray(noisy(np.kron(image, np.ones((2, 2))), 0))
    prior.block().verify(partial(model, prior), y)
    agreement(prior, y, args.warmup, args.samples, args.chains)
    seconds = step_times(prior, y, args.repeats)
    ours, theirs = seconds.values()
    print(f"a step: {1e3 * ours:.2f} ms, DiscreteHMCGibbs {1e3 * theirs:.2f} ms, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
