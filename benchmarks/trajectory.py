# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How soon samplers have the law of a machine's modes: Gibbs, tempering by beta, and along the training path.

Bars and stripes 4x4 with 16 latent units, trained by PCD, and by the exact gradient nearly as far as can be,
-108.13. The total variation between the law of the patterns (and of whatever is none) over many
independent chains and the exact one, by rounds: from uniform starts, which fall into the modes about evenly,
and from one pattern. A round of tempering is 2 sweeps of every replica,
and both temperings have as many replicas; Gibbs is told by as many sweeps, and by 2 sweeps a round. "exact
draws" is what so many draws come to.

``python benchmarks/trajectory.py`` takes some minutes and writes ``report/trajectory.json``.

**References**

1. Bereux, Decelle, Furtlehner, Rosset, Seoane (2024), *Fast training and sampling of Restricted Boltzmann
   Machines*.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import itertools
import json
from pathlib import Path
import time
from typing import Any, NamedTuple

import numpy as np
from numpyro.infer import MCMC

import jax
import optax

import ebmpp
from ebmpp import PCD, Bernoulli, BlockedGibbs, FactorGraph, ParallelTempering
from ebmpp.estimators.base import Batch, Estimate, Estimator
from ebmpp.training import Fit

RBM = ebmpp.layered(v=Bernoulli(16), h=Bernoulli(16))
DATA = np.unique(np.asarray(ebmpp.data.bars_and_stripes(4)), axis=0)
ROUNDS = (100, 300)


class Run(NamedTuple):
    """What came of one sampler's chains."""

    sampler: str
    start: str
    total_variation: list[float]
    """After each of the rounds."""
    seconds: float
    told: str


@dataclasses.dataclass(frozen=True)
class Exact(Estimator):
    """The gradient by summing over all states: for small machines."""

    def init(self, graph: FactorGraph, params: Any, data: Any, batch: int, key: Any) -> tuple:
        """Nothing is carried."""
        return ()

    def estimate(self, graph: FactorGraph, params: Any, state: Any, batch: Batch, key: Any) -> Estimate:
        """Data minus the model."""
        loss = lambda p: -(ebmpp.exact.log_likelihood(graph, p, batch.rows) @ batch.weights)
        return Estimate(jax.grad(loss)(params), state, {})


class Training(NamedTuple):
    """A way to train a machine."""

    estimator: Estimator
    optimizer: optax.GradientTransformation
    num_steps: int


#: momentum makes a step of the second ten of the first
TRAINED = {
    "PCD": Training(PCD(num_chains=1000), optax.sgd(0.1), 6000),
    "exact gradient": Training(Exact(), optax.sgd(0.1, momentum=0.9), 2000),
}


def trained(way: str = "PCD", seed: int = 0) -> Fit:
    """A machine with the path of its training."""
    return ebmpp.fit(
        RBM,
        ebmpp.data.bars_and_stripes(4),
        rng_key=jax.random.key(seed),
        **TRAINED[way]._asdict(),
        keep_path=True,
        progress_bar=False,
    )


def pattern_law(params: Any) -> np.ndarray:
    """Exact probabilities of the patterns, and of all other images together."""
    p = np.exp(np.asarray(ebmpp.exact.log_likelihood(RBM, params, {"v": DATA}), float))
    return np.append(p, 1 - p.sum())


def total_variation(v: np.ndarray, law: np.ndarray) -> float:
    """Between the frequencies of images ``v``, ``(chains, 16)``, and the law."""
    number = {row.tobytes(): i for i, row in enumerate(DATA.astype(np.int8))}
    found = [number.get(row.tobytes(), len(DATA)) for row in v.astype(np.int8)]
    return float(abs(np.bincount(found, minlength=len(law)) / len(v) - law).sum() / 2)


def floor(law: np.ndarray, chains: int, seed: int = 0) -> float:
    """The mean total variation of so many exact draws."""
    drawn = np.random.default_rng(seed).multinomial(chains, law / law.sum(), 500) / chains
    return float(abs(drawn - law).sum(1).mean() / 2)


def sampled(
    label: str, kernel: Any, params: Any, law: np.ndarray, every: int, chains: int, seed: int, start: str
) -> Run:
    """Chains of a kernel, looked at after the rounds, of ``every`` calls each.

    :param start: "uniform", or "pattern": all replicas at one pattern and its likeliest latents.
    """
    step = every * int(np.gcd.reduce(ROUNDS))
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=every * ROUNDS[-1],
        thinning=step,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    started = time.perf_counter()
    mode = {"v": DATA[1], "h": np.round(np.asarray(RBM.mean(params, {"v": DATA[1]}, "h")))}
    at = {b: np.broadcast_to(x, (chains, 16)) for b, x in mode.items()} if start == "pattern" else None
    mcmc.run(jax.random.key(seed), params, init_params=at)
    v = np.asarray(mcmc.get_samples(group_by_chain=True)["v"])
    seconds = time.perf_counter() - started
    tv = [round(total_variation(v[:, every * rounds // step - 1], law), 4) for rounds in ROUNDS]
    told = kernel.get_diagnostics_str(mcmc.last_state) if isinstance(kernel, ParallelTempering) else ""
    return Run(label, start, tv, round(seconds, 1), told)


def adapted_betas(params: Any, num: int, seed: int) -> np.ndarray:
    """A ladder that 100 chains find, on average."""
    kernel = ParallelTempering(RBM, num_temperatures=num)
    mcmc = MCMC(
        kernel, num_warmup=255, num_samples=1, num_chains=100, chain_method="vectorized", progress_bar=False
    )
    mcmc.run(jax.random.key(seed), params)
    betas = np.asarray(mcmc.last_state.betas, float).mean(0)
    betas[0], betas[-1] = 0.0, 1.0
    return betas


def compared(fit: Fit, chains: int = 1000, seed: int = 0) -> list[Run]:
    """All samplers on one machine."""
    assert fit.path is not None
    law, num = pattern_law(fit.params), len(fit.path)
    ladder = adapted_betas(fit.params, num, seed + 1000)
    kernels = {
        "Gibbs": (BlockedGibbs(RBM), 2),
        "Gibbs, as many sweeps": (BlockedGibbs(RBM), 2 * num),
        "beta": (ParallelTempering(RBM, ladder), 1),
        "trajectory": (ParallelTempering(RBM, path=fit.path), 1),
    }
    return [
        sampled(label, kernel, fit.params, law, every, chains, seed, start)
        for start in ("pattern", "uniform")
        for label, (kernel, every) in kernels.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Train, sample, and write what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "report")
    parser.add_argument("--ways", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--machines", type=int, default=1, help="of each way")
    parser.add_argument("--chains", type=int, default=1000)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    told = []
    for way, seed in itertools.product(args.ways, range(args.machines)):
        fit = trained(way, seed)
        law = pattern_law(fit.params)
        value = float(ebmpp.exact.log_likelihood(RBM, fit.params, ebmpp.data.bars_and_stripes(4)).sum())
        entry = {
            "trained by": way,
            "seed": seed,
            "log_likelihood": round(value, 2),
            "knots": len(fit.path),
            "exact draws": round(floor(law, args.chains), 4),
            "runs": [made._asdict() for made in compared(fit, args.chains, seed)],
        }
        print(json.dumps(entry, indent=1), flush=True)
        told.append(entry)
        made = {"rounds": ROUNDS, "chains": args.chains, "machines": told}
        (args.out / "trajectory.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
