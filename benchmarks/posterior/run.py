# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Meeting times and unbiased estimates of NumPyro posteriors, against long runs of NUTS.

python benchmarks/posterior/run.py [--pairs 200] [--only NAME ...]
"""

import argparse
from collections.abc import Callable
import json
import time
from typing import Any

import arviz_stats
import numpy as np
from numpyro.infer import MCMC, NUTS, Gibbs
from posteriors import POSTERIORS, Posterior

import jax

import ebmpp
from ebmpp.ppl import CoupledComposite, composite_expectation

_CHAINS = 4


def timed(fn: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, and the seconds that it took."""
    start = time.perf_counter()
    result = jax.block_until_ready(fn())
    return result, time.perf_counter() - start


def reference(
    posterior: Posterior, num_samples: int
) -> tuple[np.ndarray, np.ndarray, dict]:
    """Return means of a long run, their standard errors, and its cost."""
    model, args, fn, discrete, is_summed_out = posterior
    if not discrete:
        kernel = NUTS(model)
    else:
        block = ebmpp.GibbsBlock.from_model(model, discrete, *args, sequential=True)
        kernel = (
            NUTS(block.marginal_model())
            if is_summed_out
            else Gibbs([(block, discrete), (NUTS(model), None)])
        )
    method = "sequential" if discrete and not is_summed_out else "vectorized"
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=num_samples,
        num_chains=_CHAINS,
        chain_method=method,
        progress_bar=False,
    )
    extra = ("num_steps",) if method == "vectorized" else ()
    _, warm = timed(lambda: mcmc.run(jax.random.key(10), *args, extra_fields=extra))
    _, seconds = timed(lambda: mcmc.run(jax.random.key(11), *args, extra_fields=extra))
    samples = mcmc.get_samples(group_by_chain=True)
    if discrete and is_summed_out:
        samples |= {name: np.zeros((_CHAINS, num_samples), int) for name in discrete}
    values = jax.vmap(jax.vmap(fn))(samples)
    flat = np.concatenate(
        [np.reshape(v, (_CHAINS, num_samples, -1)) for v in jax.tree.leaves(values)], -1
    ).astype(float)
    ess = np.array(
        [
            float(arviz_stats.base.array_stats.ess(flat[..., i], method="mean"))
            for i in range(flat.shape[-1])
        ]
    )
    spread = flat.std((0, 1))
    cost = {"reference ess": ess.min(), "reference seconds": seconds}
    if extra:
        cost["reference gradients"] = int(mcmc.get_extra_fields()["num_steps"].sum())
    return flat.mean((0, 1)), spread / np.sqrt(ess), cost | {"spread": spread}


def measure(
    name: str, posterior: Posterior, num_pairs: int, num_samples: int
) -> dict[str, Any]:
    """Return a row of the table."""
    kernel, pilot = timed(
        lambda: CoupledComposite.from_model(posterior.model, *posterior.args)
    )

    def estimate(seed):
        return composite_expectation(
            kernel,
            posterior.fn,
            rng_key=jax.random.key(seed),
            num_pairs=num_pairs,
            max_sweeps=2000,
            unmet="drop",
        )

    _, first = timed(lambda: estimate(1).value)
    result, seconds = timed(lambda: estimate(2))
    mean, error, cost = reference(posterior, num_samples)
    spread = cost.pop("spread")
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(result.value)]
    errors = [np.ravel(leaf) for leaf in jax.tree.leaves(result.standard_error)]
    value = np.concatenate(leaves)
    error_of_pairs = np.concatenate(errors)
    z = np.abs(value - mean) / np.hypot(error_of_pairs, error)
    tau = result.meeting_time[result.met] - result.lag
    draws = (spread / error_of_pairs) ** 2
    return {
        "posterior": name,
        "steps": repr(kernel),
        "tau": [float(tau.mean()), float(np.median(tau)), float(tau.max())],
        "unmet": result.num_unmet,
        "k, m, lag": [result.k, result.m, result.lag],
        "largest z": float(z.max()),
        "coordinates": len(z),
        "seconds of pilot, first call, later call": [pilot, first, seconds],
        "effective draws": float(draws.min()),
        "sweeps": float(result.cost[result.met].sum()),
        "seconds per draw, ours over reference": seconds
        / draws.min()
        / (cost["reference seconds"] / cost["reference ess"]),
        **cost,
    }


def main() -> None:
    """Print one row per posterior, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--only", nargs="*", default=list(POSTERIORS))
    options = parser.parse_args()
    for name in options.only:
        row = measure(name, POSTERIORS[name](), options.pairs, options.samples)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
