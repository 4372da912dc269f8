# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Gibbs blocks inside NumPyro models beside NumPyro's own kernels: speed and agreement.

``python benchmarks/speed/inside_numpyro.py`` derives the block of a mixture, of a
hidden Markov chain and of spike-and-slab indicators by ``GibbsBlock.from_model``. It
prints how long the declaration and a draw of all units take, effective draws per
second, and the agreement with the exact smoother, with enumeration and with
``DiscreteHMCGibbs``. ``switching`` draws a hidden Markov chain with its means and
transitions. ``denoising`` compares the posterior of a declared block with that of
``DiscreteHMCGibbs``; the time of its step is in ``ratios.py``.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
import importlib
import importlib.util
import math
from pathlib import Path
import sys
import time
from typing import Any

import arviz_base
import arviz_stats
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import NUTS, DiscreteHMCGibbs, Gibbs

import jax
from jax import Array
import jax.numpy as jnp

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "models")]
import ebmpp  # noqa: E402
from models.denoising import Prior, ising, noisy  # noqa: E402

COMPONENTS = 5
STATES = 5


# -- models --------------------------------------------------------------------------


def mixture(y: Array, summed: bool = False) -> None:
    """Gaussians in the plane; the assignments are one layer, or summed out."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(COMPONENTS)))
    means = numpyro.sample(
        "means", dist.Normal(0, 5).expand([COMPONENTS, 2]).to_event(2)
    )
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("points", len(y)):
        if summed:
            components = dist.Normal(means, scale).to_event(1)
            density = dist.MixtureSameFamily(dist.Categorical(weights), components)
        else:
            z = numpyro.sample("z", dist.Categorical(weights))
            density = dist.Normal(means[z], scale).to_event(1)
        numpyro.sample("y", density, obs=y)


def chain(y: Array, log_rows: Array) -> None:
    """Hidden Markov chain with known transitions; two layers."""
    z = numpyro.sample(
        "z", dist.Categorical(logits=jnp.zeros(STATES)).expand([len(y)]).to_event(1)
    )
    numpyro.factor("transitions", log_rows[z[:-1], z[1:]].sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)


def switching(y: Array, enumerated: bool = False) -> None:
    """Hidden Markov chain with unknown means and transitions."""
    rows = numpyro.sample(
        "rows", dist.Dirichlet(jnp.ones(STATES)).expand([STATES]).to_event(1)
    )
    means = numpyro.sample("means", dist.Normal(0, 10).expand([STATES]).to_event(1))

    def step(last: Array, y: Array) -> tuple[Array, None]:
        infer = {"enumerate": "parallel"} if enumerated else None
        z = numpyro.sample("z", dist.Categorical(rows[last]), infer=infer)
        numpyro.sample("y", dist.Normal(means[z], 1.0), obs=y)
        return z, None

    scan(step, 0, y)


def switching_by_unit(y: Array) -> None:
    """Return the same chain as a plate, whose units DiscreteHMCGibbs can draw."""
    rows = numpyro.sample(
        "rows", dist.Dirichlet(jnp.ones(STATES)).expand([STATES]).to_event(1)
    )
    means = numpyro.sample("means", dist.Normal(0, 10).expand([STATES]).to_event(1))
    with numpyro.plate("steps", len(y)):
        z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(STATES)))
        numpyro.sample("y", dist.Normal(means[z], 1.0), obs=y)
    path = jnp.concatenate([jnp.zeros_like(z[:1]), z])
    numpyro.factor("transitions", jnp.log(rows)[path[:-1], path[1:]].sum())


def spike_and_slab(y: Array) -> None:
    """Spike-and-slab indicators under an Ising chain; two layers."""
    with numpyro.plate("units", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        b = numpyro.sample("b", dist.Normal(0, 2))
        numpyro.sample("y", dist.Normal(z * b, 0.5), obs=y)
    numpyro.factor("chain", 0.6 * (z[1:] == z[:-1]).sum())


def denoising_problem() -> tuple[Prior, Callable[[Array], None], Array]:
    """Return an Ising prior of 16x16 pixels, a model that NumPyro can enumerate, and an
    image in noise."""
    prior = ising()

    def model(y: Array) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        height, width = prior.layout.shape
        with (
            numpyro.plate("rows", height, dim=-2),
            numpyro.plate("columns", width, dim=-1),
        ):
            # an event of two axes has no enumeration
            x = numpyro.sample("x", dist.Bernoulli(0.5))
        numpyro.factor(
            "prior", -prior.graph.energy(prior.params, prior.layout.split(1.0 * x))
        )
        numpyro.sample("y", dist.Normal(1.0 * x, scale).to_event(2), obs=y)

    image = ebmpp.data.binarize(ebmpp.data.digits()[:1]).reshape(8, 8)
    return prior, model, jnp.asarray(noisy(np.kron(image, np.ones((2, 2))), 0))


# -- data and exact answers ----------------------------------------------------------


def points(count: int) -> tuple[Array, np.ndarray]:
    """Return points around five centres, and the centres."""
    rng = np.random.default_rng(0)
    centres = rng.normal(0, 5, (COMPONENTS, 2))
    return jnp.asarray(
        centres[rng.integers(COMPONENTS, size=count)] + rng.normal(size=(count, 2))
    ), centres


def chain_data(count: int, gap: float = 1.0) -> tuple[Array, Array]:
    """Return observations, of means ``gap`` apart, and log transition probabilities."""
    rng = np.random.default_rng(1)
    rows = 0.8 * np.eye(STATES) + 0.2 * rng.dirichlet(np.ones(STATES), STATES)
    z = np.zeros(count, int)
    for t in range(1, count):
        z[t] = rng.choice(STATES, p=rows[z[t - 1]])
    return jnp.asarray(gap * z + rng.normal(size=count)), jnp.log(jnp.asarray(rows))


def smoother(y: np.ndarray, log_rows: np.ndarray) -> np.ndarray:
    """Return P(z_t | y) for all t by the forward-backward recursion."""
    rows = np.exp(log_rows)
    likelihood = np.exp(-0.5 * (y[:, None] - np.arange(STATES)) ** 2)
    forward = np.ones_like(likelihood)
    backward = np.ones_like(likelihood)
    for t in range(len(y)):
        forward[t] = likelihood[t] * (forward[t - 1] @ rows if t else 1 / STATES)
        forward[t] /= forward[t].sum()
    for t in range(len(y) - 2, -1, -1):
        backward[t] = rows @ (likelihood[t + 1] * backward[t + 1])
        backward[t] /= backward[t].sum()
    return forward * backward / (forward * backward).sum(1, keepdims=True)


def exact_indicators(y: np.ndarray) -> np.ndarray:
    """Return P(z = 1 | y) of spike and slab by enumeration, with the effects integrated out."""
    states = (np.arange(2 ** len(y))[:, None] >> np.arange(len(y))) & 1
    variance = 0.25 + 4.0 * states
    log = 0.6 * (states[:, 1:] == states[:, :-1]).sum(1) - 0.5 * (
        y**2 / variance + np.log(variance)
    ).sum(1)
    weight = np.exp(log - log.max())
    return weight @ states / weight.sum()


# -- measurements --------------------------------------------------------------------


def declare(model: Callable, *args: Any) -> ebmpp.GibbsBlock:
    """Derive the block of ``z`` and print how long that takes."""
    start = time.perf_counter()
    block = ebmpp.GibbsBlock.from_model(model, ["z"], *args)
    layers = block.layers["z"]
    seconds = time.perf_counter() - start
    print(
        f"  declared in {seconds:.2f} s: {layers.size} units in {layers.max() + 1} layers",
        flush=True,
    )
    return block


def print_draw_time(block: Any, model: Callable, args: tuple, repeats: int) -> None:
    """Print the time of a draw of all units; separate calls, as a loop would hoist the
    conditionals."""
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(*args)
    sites = {
        n: jnp.asarray(s["value"])
        for n, s in trace.items()
        if s["type"] == "sample" and not s["is_observed"]
    }
    z = sites.pop("z")
    state = block.init(jax.random.key(0), 0, {"z": z}, args, {"_gibbs_sites": sites})
    step = jax.jit(
        lambda state, sites: block.sample(state, args, {"_gibbs_sites": sites})
    )
    state = jax.block_until_ready(step(state, sites))
    times = []
    for _ in range(20 * repeats):
        start = time.perf_counter()
        state = jax.block_until_ready(step(state, sites))
        times.append(time.perf_counter() - start)
    print(
        f"  draw of all units: {1e3 * min(times):.3f} ms (median {1e3 * np.median(times):.3f})",
        flush=True,
    )


def run(
    name: str,
    kernel: Any,
    args: tuple,
    samples: int,
    sites: Sequence[str],
    warmup: int = 300,
    init: dict | None = None,
    seed: int = 0,
    seconds: float = math.inf,
) -> dict[str, np.ndarray]:
    """Return draws of ``sites``; print times and the smallest ESS per CPU second of
    each site, after warm-up.

    :param seconds: stop after this time, with the draws so far.
    """
    length = math.gcd(warmup, samples, 20)
    start = time.perf_counter()

    def is_key(a):
        return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)

    # as the loop returns it
    def strong(a):
        return a if is_key(a) else jnp.asarray(a, a.dtype)

    state = jax.tree.map(
        strong, kernel.init(jax.random.key(seed), warmup, init, args, {})
    )

    def body(state: Any, _: None) -> tuple[Any, tuple[dict, Array]]:
        state = kernel.sample(state, args, {})
        gradients = getattr(getattr(state, "hmc_state", state), "num_steps", 0)
        return state, ({site: state.z[site] for site in sites}, jnp.asarray(gradients))

    loop = jax.jit(lambda s: jax.lax.scan(body, s, None, length)).lower(state).compile()

    def clocks():
        return np.array([time.perf_counter(), time.process_time()])

    compiled = time.perf_counter() - start
    used = np.zeros((2, 2))
    parts = []
    while len(parts) * length < warmup + samples and used[:, 0].sum() < seconds:
        is_warm = int(len(parts) * length >= warmup)
        started = clocks()
        state, part = jax.block_until_ready(loop(state))
        used[is_warm] += clocks() - started
        parts.append(jax.tree.map(np.asarray, part))
    draws, gradients = jax.tree.map(lambda *a: np.concatenate(a), *parts)
    draws = {site: v[warmup:].astype(float) for site, v in draws.items()}
    print(
        f"  {name:22} compiled in {compiled:.0f} s, {used[0, 1]:.1f} s of warm-up",
        end="",
    )
    print(
        f", {len(gradients)} of {warmup}+{samples} steps, {gradients.mean():.1f} gradients a step",
        end="",
    )
    if len(gradients) >= warmup + 20:
        components = ("means", "weights")  # whose order may change
        ordered = {
            site: np.sort(v, 1) if site in components else v
            for site, v in draws.items()
        }
        ess = arviz_stats.ess(
            arviz_base.from_dict(
                {"posterior": {s: v[None] for s, v in ordered.items()}}
            )
        )
        times = 1e3 * used[1] / (len(gradients) - warmup)
        print("; {:.2f} ms a step, CPU {:.2f}, ESS a CPU second".format(*times), end="")
        print(
            *(
                f" {s} {float(v.min()) / used[1, 1]:.1f}"
                for s, v in ess.data_vars.items()
            ),
            sep=",",
            end="",
        )
    print(flush=True)
    return draws


def z_scores(draws: np.ndarray, reference: np.ndarray) -> str:
    """Describe how far means are from exact values or from another run, in standard errors.

    :param reference: draws of the same shape but for their number, or exact means of
        one axis.
    """
    batches = draws.reshape(50, -1, draws.shape[-1]).mean(1)
    mean = batches.mean(0)
    variance = batches.var(0, ddof=1) / 50
    if reference.ndim > 1:
        other = reference.reshape(50, -1, reference.shape[-1]).mean(1)
        reference = other.mean(0)
        variance = variance + other.var(0, ddof=1) / 50
    # a unit that never changes has no variance
    z = (mean - reference) / (np.sqrt(variance) + 1e-6)
    return (
        f"z rms {np.sqrt((z**2).mean()):.2f}, largest {np.abs(z).max():.1f} of {len(z)}"
    )


def mixtures(args: argparse.Namespace) -> None:
    """Mixture of 5 Gaussians: 20,000 points by the block alone, 100 and 1,000 beside
    NumPyro's kernels."""
    if not args.only:
        print("mixture, 20,000 points")
        y, _ = points(20_000)
        print_draw_time(declare(mixture, y), mixture, (y,), args.repeats)
    for size in args.points:
        print(
            f"mixture, {size} points: the smallest ESS of the sorted means and "
            "weights, and the scale"
        )
        y, centres = points(size)
        block = ebmpp.GibbsBlock.from_model(mixture, ["z"], y)
        along = ebmpp.GibbsBlock.from_model(mixture, ["z", "weights", "means"], y)
        values = {"means": jnp.asarray(centres.astype(y.dtype)), "scale": 1.0}
        nuts = nuts_from(args, values)
        kernels = {
            "from_model and NUTS": Gibbs([(block, ["z"]), (nuts(mixture), None)]),
            "weights, means along": Gibbs(
                [(along, list(along.sites)), (nuts(mixture), None)]
            ),
            "NUTS, summed by hand": nuts(partial(mixture, summed=True)),
        }
        if importlib.util.find_spec("funsor") is not None:
            funsor = importlib.import_module("numpyro.contrib.funsor")
            kernels["NUTS, enumerated"] = nuts(funsor.config_enumerate(mixture))
        # point by point: at 1,000 points a step takes a hundred times as long
        if size == 100 or args.only:
            kernels["DiscreteHMCGibbs"] = DiscreteHMCGibbs(nuts(mixture))
        for name, kernel in kernels.items():
            if args.only in name:
                counts = args.samples, ["means", "weights", "scale"], args.warmup, None
                run(name, kernel, (y,), *counts, args.seed, args.seconds)


def chains(args: argparse.Namespace) -> None:
    """Hidden Markov chain of 2,000 steps against its exact smoother."""
    print("hidden Markov chain, 2,000 steps of 5 states")
    y, log_rows = chain_data(2000)
    block = declare(chain, y, log_rows)
    print_draw_time(block, chain, (y, log_rows), args.repeats)

    def step(_: Any, carry: tuple) -> tuple:
        state, total = carry
        state = block.sample(state, (y, log_rows), {})
        return state, total + jax.nn.one_hot(state.z["z"], STATES)

    def mean(key: Array) -> Array:
        state = block.init(key, 0, {"z": jnp.zeros(2000, int)}, (y, log_rows), {})
        zero = jnp.zeros((2000, STATES))
        state, _ = jax.lax.fori_loop(0, 500, step, (state, zero))
        return jax.lax.fori_loop(0, args.samples, step, (state, zero))[1] / args.samples

    means = np.asarray(
        jax.jit(jax.vmap(mean))(jax.random.split(jax.random.key(0), 8)), float
    )
    gap = means.mean(0) - smoother(np.asarray(y, float), np.asarray(log_rows, float))
    print(
        f"  P(z_t = k | y), 8 chains: largest error {np.abs(gap).max():.4f}, rms "
        f"{(gap**2).mean() ** 0.5:.4f}"
    )


def switchings(args: argparse.Namespace) -> None:
    """Means and transitions of a hidden Markov chain of 2,000 steps, drawn with the
    chain or by NUTS."""
    print(
        "hidden Markov chain, 2,000 steps of 5 states: the smallest ESS of means and transitions"
    )
    y, log_rows = chain_data(2000, 3.0)
    block = ebmpp.GibbsBlock.from_model(switching, ["z", "rows", "means"], y)
    summed = ebmpp.GibbsBlock.from_model(switching, ["z"], y).marginal_model()
    values = {"means": 3.0 * jnp.arange(STATES), "rows": jnp.exp(log_rows)}
    nuts = nuts_from(args, values)
    kernels = {"from_model, all sites": block, "NUTS on marginal()": nuts(summed)}
    if importlib.util.find_spec("funsor") is not None:
        kernels["NUTS, enumerated scan"] = nuts(partial(switching, enumerated=True))
    kernels["DiscreteHMCGibbs"] = DiscreteHMCGibbs(nuts(switching_by_unit))
    for name, kernel in kernels.items():
        if args.only in name:
            init = values if kernel is block else None
            counts = args.samples, ["means", "rows"], args.warmup, init
            run(name, kernel, (y,), *counts, args.seed, args.seconds)


def nuts_from(args: argparse.Namespace, values: dict) -> Callable[..., NUTS]:
    """Return NUTS that starts at these values."""
    start = numpyro.infer.init_to_value(values=values)
    return partial(NUTS, init_strategy=start, max_tree_depth=args.depth)


def indicators(args: argparse.Namespace) -> None:
    """Spike and slab: ten indicators against enumeration, 500 beside ``DiscreteHMCGibbs``."""
    for size in (10, 500):
        print(f"spike and slab, {size} indicators under an Ising chain")
        y = jnp.asarray(np.random.default_rng(2).normal(0, 1.5, size))
        block = declare(spike_and_slab, y)
        print_draw_time(block, spike_and_slab, (y,), args.repeats)
        kernels = {
            "from_model and NUTS": Gibbs(
                [(block, ["z"]), (NUTS(spike_and_slab), None)]
            ),
            "from_model of z and b": ebmpp.GibbsBlock.from_model(
                spike_and_slab, ["z", "b"], y
            ),
            "DiscreteHMCGibbs": DiscreteHMCGibbs(NUTS(spike_and_slab)),
        }
        count = 50 * (args.samples if size == 10 else max(1, args.samples // 250))
        draws = {n: run(n, k, (y,), count, ["z"])["z"] for n, k in kernels.items()}
        exact = (
            exact_indicators(np.asarray(y, float))
            if size == 10
            else draws["DiscreteHMCGibbs"]
        )
        for name, z in draws.items():
            if z is not exact:
                print(f"  P(z = 1) by {name}: {z_scores(z, exact)}")


def denoising(args: argparse.Namespace) -> None:
    """Posterior of 16x16 pixels and of the noise's scale, by both kernels."""
    print("denoising, 16x16 pixels")
    prior, model, y = denoising_problem()
    prior.block().verify(model, y)
    kernels = {
        "GibbsBlock": Gibbs([(prior.block(), ["x"]), (NUTS(model), None)]),
        "DiscreteHMCGibbs": DiscreteHMCGibbs(NUTS(model)),
    }
    draws = []
    for name, kernel in kernels.items():
        result = run(
            name, kernel, (y,), 50 * max(2, args.samples // 50), ["scale", "x"]
        )
        draws.append(
            np.concatenate(
                [result["x"].reshape(len(result["x"]), -1), result["scale"][:, None]], 1
            )
        )
    mean = np.concatenate(draws).mean(0)
    uncertain = (mean > 0.02) & (mean < 0.98)
    print(
        f"  uncertain pixels and the scale: {z_scores(*(d[:, uncertain] for d in draws))}"
    )


PARTS = {
    "mixture": mixtures,
    "chain": chains,
    "switching": switchings,
    "indicators": indicators,
    "denoising": denoising,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print all parts, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--points", type=int, nargs="+", default=[100, 1000], help="of mixture"
    )
    parser.add_argument(
        "--only",
        default="",
        help="part of the name of kernels, of mixture and switching",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=int, default=10, help="max_tree_depth of NUTS")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="of a kernel without compilation",
    )
    args = parser.parse_args(argv)
    for part in args.parts:
        PARTS[part](args)


if __name__ == "__main__":
    main()
