# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Discrete sites drawn with conjugate sites integrated out, beside draws given these.

``python benchmarks/speed/collapsed.py [names]`` runs each model with and without
``collapse`` in one process. It prints the probabilities beside the exact ones, R-hat,
the smallest effective number of 4 x 1,000 draws, CPU time per sweep of one chain in a
compiled loop, and CPU time of the first run with compilation.

- ``diabetes``: ten regressors of scikit-learn's data, each with an indicator; exact by
  enumeration of 1,024 models and quadrature over the variance.
- ``stagnant``: a change point of two lines that meet, BUGS Examples volume 2, with one
  chain from each of its 29 values; exact by quadrature over the precision.
- ``mixture``, ``classes``, ``occupancy``: many independent units in one layer, which
  ``collapse="auto"`` leaves as they are.
"""

import argparse
from collections.abc import Callable
import itertools
import time
from typing import Any, NamedTuple

import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
import numpyro.distributions as dist
from numpyro.infer import MCMC
from scipy.special import logsumexp, softmax
from sklearn.datasets import load_diabetes

import jax
from jax import Array, lax
import jax.numpy as jnp

import ebmpp

SLAB = 0.5
#: logarithm of the height of a stagnant layer of water, and of its flow rate (Bacon and
#: Watts 1971)
HEIGHT = np.array(
    "1.12 1.12 .99 1.03 .92 .90 .81 .83 .65 .67 .60 .59 .51 .44 .43 .43 .33 .30 .25 .24 "
    ".13 -.01 -.13 -.14 -.30 -.33 -.46 -.43 -.65".split(),
    float,
)
FLOW = np.array(
    "-1.39 -1.39 -1.08 -1.08 -.94 -.80 -.63 -.63 -.25 -.25 -.12 -.12 .01 .11 .11 .11 .25 "
    ".25 .34 .34 .44 .59 .70 .70 .85 .85 .99 .99 1.19".split(),
    float,
)


class Case(NamedTuple):
    """A model with its data, and a function of its draws whose mean is known."""

    model: Callable[..., None]
    args: tuple
    sites: str
    watched: Callable[[dict], np.ndarray]
    """From draws to ``(chains, draws, values)``."""
    exact: np.ndarray | None = None
    starts: dict[str, Array] | None = None


# -- models --------------------------------------------------------------------------


def spike_and_slab(x: Array, y: Array) -> None:
    """Regressors that take part or do not."""
    count = x.shape[1]
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.0))
    z = numpyro.sample("z", dist.Bernoulli(0.5).expand([count]).to_event(1))
    beta = numpyro.sample("beta", dist.Normal(0, SLAB).expand([count]).to_event(1))
    mean = x @ (z * beta)
    numpyro.sample("y", dist.Normal(mean, jnp.sqrt(variance)).to_event(1), obs=y)


def stagnant(x: Array, y: Array) -> None:
    """Two lines that meet at one of the design points."""
    count = len(x)
    k = numpyro.sample("k", dist.Categorical(jnp.ones(count) / count))
    alpha = numpyro.sample("alpha", dist.Normal(0, 1000.0))
    beta = numpyro.sample("beta", dist.Normal(0, 1000.0).expand([2]).to_event(1))
    precision = numpyro.sample("precision", dist.Gamma(0.001, 0.001))
    slope = jnp.where(jnp.arange(count) <= k, beta[0], beta[1])
    mean = alpha + slope * (x - x[k])
    numpyro.sample("y", dist.Normal(mean, precision**-0.5).to_event(1), obs=y)


def mixture(y: Array) -> None:
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    means = numpyro.sample("means", dist.Normal(0, 5).expand([3]).to_event(1))
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Categorical(share))
        numpyro.sample("y", dist.Normal(means[z], 1.0), obs=y)


def classes(y: Array) -> None:
    """Latent classes: binary answers, independent given the class of a respondent."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("class", 2, dim=-2), numpyro.plate("item", y.shape[1], dim=-1):
        p = numpyro.sample("p", dist.Beta(1, 1))
    with numpyro.plate("respondents", len(y)):
        z = numpyro.sample("z", dist.Categorical(share))
        numpyro.sample("y", dist.Bernoulli(p[z]).to_event(1), obs=y)


def occupancy(seen: Array) -> None:
    occupied = numpyro.sample("occupied", dist.Beta(1, 1))
    detected = numpyro.sample("detected", dist.Beta(1, 1))
    with numpyro.plate("sites", len(seen)):
        z = numpyro.sample("z", dist.Bernoulli(occupied))
        numpyro.sample("seen", dist.Binomial(5, z * detected), obs=seen)


# -- exact answers -------------------------------------------------------------------


def inclusion_probabilities(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the posterior probability that each regressor takes part."""
    subsets = np.array(list(itertools.product([0, 1], repeat=x.shape[1])), bool)
    variances = np.exp(np.linspace(np.log(0.3), np.log(1.0), 200))
    # of the prior, the measure of log variance, and the density of y without regressors
    fixed = -(2.0 + len(y) / 2) * np.log(variances) - (1.0 + y @ y / 2) / variances
    log_prob = []
    for subset in subsets:
        rates, vectors = np.linalg.eigh(x[:, subset].T @ x[:, subset])
        slope = (vectors.T @ x[:, subset].T @ y)[:, None] / variances
        precision = rates[:, None] / variances + SLAB**-2
        gain = (slope**2 / precision - np.log(precision * SLAB**2)).sum(0) / 2
        log_prob.append(logsumexp(gain + fixed))
    return softmax(log_prob) @ subsets


def change_probabilities(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the posterior probability of each change point."""
    precisions = np.exp(np.linspace(0, np.log(1e5), 2000))
    shape = 0.001 + len(y) / 2
    fixed = shape * np.log(precisions) - (0.001 + y @ y / 2) * precisions
    log_prob = []
    for k in range(len(x)):
        before = np.arange(len(x)) <= k
        gap = x - x[k]
        design = np.stack([np.ones(len(x)), gap * before, gap * ~before], 1)
        precision = precisions[:, None, None] * (design.T @ design) + 1e-6 * np.eye(3)
        slope = precisions[:, None] * (design.T @ y)
        mean = np.linalg.solve(precision, slope[..., None])[..., 0]
        gain = (slope * mean).sum(-1) - np.linalg.slogdet(precision)[1]
        log_prob.append(logsumexp(gain / 2 + fixed))
    return softmax(log_prob)


def cases() -> dict[str, Case]:
    rng = np.random.default_rng(0)
    x, y = load_diabetes(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    y = (y - y.mean()) / y.std()
    points = np.repeat([-2.0, 0.0, 2.0], [30, 60, 90]) + rng.normal(size=180)
    rates = np.where(
        rng.random((216, 1)) < 0.3, [0.9, 0.8, 0.7, 0.9], [0.1, 0.3, 0.4, 0.2]
    )
    answers = (rng.random((216, 4)) < rates).astype(np.int32)
    seen = np.where(rng.random(39) < 0.6, rng.binomial(5, 0.26, 39), 0)
    starts = {
        "k": jnp.arange(29),
        "alpha": jnp.zeros(29),
        "beta": jnp.zeros((29, 2)),
        "precision": jnp.ones(29),
    }
    return {
        "diabetes": Case(
            spike_and_slab,
            (x, y),
            "z beta variance",
            lambda draws: draws["z"],
            inclusion_probabilities(x, y),
        ),
        "stagnant": Case(
            stagnant,
            (FLOW, HEIGHT),
            "k alpha beta precision",
            lambda draws: draws["k"][..., None] == [12, 13],
            change_probabilities(FLOW, HEIGHT)[12:14],
            starts,
        ),
        "mixture": Case(
            mixture, (points,), "z share means", lambda draws: np.sort(draws["means"])
        ),
        "classes": Case(
            classes, (answers,), "z share p", lambda draws: np.sort(draws["share"])
        ),
        "occupancy": Case(
            occupancy,
            (seen,),
            "z occupied detected",
            lambda draws: np.stack([draws["occupied"], draws["detected"]], -1),
        ),
    }


# -- measurement ---------------------------------------------------------------------


def seconds(fn: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    return jax.block_until_ready(fn()), time.process_time() - start


def run(block: Any, case: Case, num_samples: int, num_chains: int) -> dict:
    """Return draws, ``(chains, draws, ...)``; of ``case.starts`` one chain from each."""
    mcmc = MCMC(
        block,
        num_warmup=100,
        num_samples=num_samples,
        num_chains=len(case.starts["k"]) if case.starts else num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    args = map(jnp.asarray, case.args)
    mcmc.run(jax.random.key(0), *args, init_params=case.starts)
    return mcmc.get_samples(group_by_chain=True)


def time_per_sweep(block: Any, case: Case, draws: dict) -> float:
    """Return CPU seconds of a sweep in a compiled loop, the minimum of five loops."""
    last = {name: jnp.asarray(values[0, -1]) for name, values in draws.items()}
    args = tuple(map(jnp.asarray, case.args))
    state = block.init(jax.random.key(0), 0, last, args, {})

    @jax.jit
    def loop(state: Any, args: tuple) -> Any:
        def sweep(_: Array, state: Any) -> Any:
            return block.sample(state, args, {})

        return lax.fori_loop(0, 1000, sweep, state)

    times = [seconds(lambda: loop(state, args))[1] for _ in range(6)]
    return min(times[1:]) / 1000


def measure(name: str, case: Case) -> None:
    for collapse in (False, True):
        start = time.process_time()
        block = ebmpp.GibbsBlock.from_model(
            case.model,
            case.sites.split(),
            *map(jnp.asarray, case.args),
            sequential=True,
            collapse=collapse,
        )
        draws = jax.tree.map(np.asarray, run(block, case, 1000, 4))
        first = time.process_time() - start
        values = np.asarray(case.watched(draws), float)
        varying = values.std((0, 1)) > 0
        rhat = split_gelman_rubin(values[..., varying]).max()
        count = values.shape[0] * values.shape[1]
        effective = effective_sample_size(values[..., varying]).min() * 4000 / count
        per_sweep = time_per_sweep(block, case, draws)
        print(f"{name}, collapse={collapse}: {block!r}")
        print("  means", values.mean((0, 1)).round(3))
        if case.exact is not None:
            print("  exact", case.exact.round(3))
        print(
            f"  R-hat {rhat:.3f}, effective draws {effective:.0f} of 4,000, "
            f"{1e6 * per_sweep:.0f} us per sweep, "
            f"{effective / 4000 / per_sweep:.0f} effective draws per CPU-second, "
            f"first run {first:.1f} CPU-seconds"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models; all by default")
    names = parser.parse_args().names
    for name, case in cases().items():
        if not names or name in names:
            measure(name, case)


if __name__ == "__main__":
    main()
