# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks that follow from a NumPyro model: a mixture, a hidden Markov chain, spike and slab, and others.

``python benchmarks/from_model.py`` makes each block with ``GibbsBlock.from_model``, tells how long that takes
and how long a draw of all units takes (compiled, minimum of several), and checks the draws: the chain against
its exact smoother, spike and slab against NumPyro's DiscreteHMCGibbs, an image whose prior is a Boltzmann
machine against the block that is declared by hand.
"""

import argparse
from collections.abc import Callable, Sequence
import importlib.util
import time
from typing import Any

import arviz_base
import arviz_stats
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, DiscreteGibbs, DiscreteHMCGibbs, Gibbs

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp

COMPONENTS, STATES = 5, 5


def mixture(y: Array) -> None:
    """Gaussians in the plane; the assignments are one layer."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(COMPONENTS)))
    means = numpyro.sample("means", dist.Normal(0, 5).expand([COMPONENTS, 2]).to_event(2))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Categorical(weights))
        numpyro.sample("y", dist.Normal(means[z], scale).to_event(1), obs=y)


def summed_mixture(y: Array) -> None:
    """The same, with the assignments summed out by hand."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(COMPONENTS)))
    means = numpyro.sample("means", dist.Normal(0, 5).expand([COMPONENTS, 2]).to_event(2))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    parts = dist.Normal(means, scale).to_event(1)
    with numpyro.plate("points", len(y)):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), parts), obs=y)


def chain(y: Array, log_rows: Array) -> None:
    """A hidden Markov chain with known transitions; two layers."""
    z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(STATES)).expand([len(y)]).to_event(1))
    numpyro.factor("moves", log_rows[z[:-1], z[1:]].sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)


def spike_and_slab(y: Array) -> None:
    """Indicators under an Ising chain, each of which switches its own effect; two layers."""
    with numpyro.plate("units", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        b = numpyro.sample("b", dist.Normal(0, 2))
        numpyro.sample("y", dist.Normal(z * b, 0.5), obs=y)
    numpyro.factor("chain", 0.6 * (z[1:] == z[:-1]).sum())


def points(count: int) -> Array:
    """Around five places."""
    rng = np.random.default_rng(0)
    places = rng.normal(0, 5, (COMPONENTS, 2))
    return jnp.asarray(places[rng.integers(COMPONENTS, size=count)] + rng.normal(size=(count, 2)))


def chain_data(count: int) -> tuple[Array, Array]:
    """Observations, and log transitions."""
    rng = np.random.default_rng(1)
    rows = 0.8 * np.eye(STATES) + 0.2 * rng.dirichlet(np.ones(STATES), STATES)
    z = np.zeros(count, int)
    for t in range(1, count):
        z[t] = rng.choice(STATES, p=rows[z[t - 1]])
    return jnp.asarray(z + rng.normal(size=count)), jnp.log(jnp.asarray(rows))


def smoother(y: np.ndarray, log_rows: np.ndarray) -> np.ndarray:
    """P(z_t | y) of all t, forward and backward, in numpy."""
    rows, likely = np.exp(log_rows), np.exp(-0.5 * (y[:, None] - np.arange(STATES)) ** 2)
    ahead, back = np.ones_like(likely), np.ones_like(likely)
    for t in range(len(y)):
        ahead[t] = likely[t] * (ahead[t - 1] @ rows if t else 1 / STATES)
        ahead[t] /= ahead[t].sum()
    for t in range(len(y) - 2, -1, -1):
        back[t] = rows @ (likely[t + 1] * back[t + 1])
        back[t] /= back[t].sum()
    return ahead * back / (ahead * back).sum(1, keepdims=True)


# -- measuring -------------------------------------------------------------------------------------


def declared(model: Callable, *args: Any) -> Any:
    """The block, and how long it took."""
    begin = time.perf_counter()
    block = ebmpp.GibbsBlock.from_model(model, ["z"], *args)
    spent = time.perf_counter() - begin
    size = block.layers["z"].size
    print(f"  declared in {spent:.2f} s: {size} units in {block.layers['z'].max() + 1} layers", flush=True)
    return block


def started(model: Callable, *args: Any) -> dict[str, Array]:
    """A draw of the prior."""
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(*args)
    drawn = (n for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"])
    return {name: jnp.asarray(trace[name]["value"]) for name in drawn}


def draw_time(block: Any, model: Callable, args: tuple, repeats: int) -> None:
    """Print the milliseconds of a draw of all units; a call each: a loop would hoist the laws."""
    values = started(model, *args)
    siblings = {name: v for name, v in values.items() if name != "z"}
    state = block.init(jax.random.key(0), 0, {"z": values["z"]}, args, {"_gibbs_sites": siblings})
    step = jax.jit(lambda state, siblings: block.sample(state, args, {"_gibbs_sites": siblings}))
    state, times = jax.block_until_ready(step(state, siblings)), []
    for _ in range(20 * repeats):
        begin = time.perf_counter()
        state = jax.block_until_ready(step(state, siblings))
        times.append(time.perf_counter() - begin)
    print(
        f"  a draw of all units: {1e3 * min(times):.3f} ms (median {1e3 * np.median(times):.3f})", flush=True
    )


def sampled(
    name: str,
    kernel: Any,
    args: tuple,
    warmup: int,
    samples: int,
    sites: list[str],
    beside: Sequence[str] = (),
) -> dict:
    """Draws, with the effective sample size of ``sites`` a second, compilation left out, printed."""
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=1, progress_bar=False)
    mcmc.run(jax.random.key(0), *args)
    start = mcmc.last_state
    one = lambda s, _: (s := kernel.sample(s, args, {}), {site: s.z[site] for site in (*sites, *beside)})
    loop = jax.jit(lambda s: jax.lax.scan(one, s, None, samples)[1])
    jax.block_until_ready(loop(start))
    begin = time.perf_counter()
    draws = {site: np.asarray(v, float) for site, v in loop(start).items()}
    spent = time.perf_counter() - begin
    sorted_up = {site: np.sort(v, -2) if site == "means" else v for site, v in draws.items() if site in sites}
    ess = arviz_stats.ess(arviz_base.from_dict({"posterior": {s: v[None] for s, v in sorted_up.items()}}))
    least = min(float(v.min()) for v in ess.data_vars.values())
    print(
        f"  {name:22} {1e3 * spent / samples:8.2f} ms a step, ESS a second {least / spent:8.1f}", flush=True
    )
    return draws


def agreement(first: np.ndarray, second: np.ndarray) -> str:
    """Means of two runs in standard errors of their difference, from batches."""
    means = [a.reshape(20, -1, a.shape[-1]).mean(1) for a in (first, second)]
    error = np.sqrt(sum(m.var(0, ddof=1) / len(m) for m in means)) + 1e-9
    z = (means[0].mean(0) - means[1].mean(0)) / error
    return f"z rms {np.sqrt((z**2).mean()):.2f}, largest {np.abs(z).max():.1f} of {len(z)}"


def mixtures(args: argparse.Namespace) -> None:
    """A mixture of 5 Gaussians: 20,000 points by the block; 100 and 1000 beside NumPyro's kernels."""
    print("mixture, 20,000 points")
    y = points(20_000)
    draw_time(declared(mixture, y), mixture, (y,), args.repeats)
    for size in (100, 1000):
        print(f"mixture, {size} points: the least ESS of the sorted means and scale")
        y, sites = points(size), ["means", "scale"]
        block = ebmpp.GibbsBlock.from_model(mixture, ["z"], y)
        init = numpyro.infer.init_to_value(values={"means": jnp.asarray(centres(y)), "scale": 1.0})
        nuts = lambda model, init=init: NUTS(model, init_strategy=init)
        kernels = {
            "from_model and NUTS": Gibbs([(block, ["z"]), (nuts(mixture), None)]),
            "NUTS, summed by hand": nuts(summed_mixture),
        }
        if importlib.util.find_spec("funsor") is not None:
            enumerated = importlib.import_module("numpyro.contrib.funsor").config_enumerate(mixture)
            kernels["NUTS, enumerated"] = nuts(enumerated)
        if (
            size == 100
        ):  # one point at a time: of 1000 a step takes ten times as many evaluations of ten times
            kernels["DiscreteHMCGibbs"] = DiscreteHMCGibbs(nuts(mixture))
        for name, kernel in kernels.items():
            sampled(name, kernel, (y,), 300, args.samples, sites)


def centres(y: Array) -> np.ndarray:
    """Means of the components that the points were made with."""
    places = np.random.default_rng(0).normal(0, 5, (COMPONENTS, 2))
    return places.astype(np.asarray(y).dtype)


def chains(args: argparse.Namespace) -> None:
    """A hidden Markov chain of length 2000 against its exact smoother."""
    print("hidden Markov chain, 2000 steps of 5 states")
    y, log_rows = chain_data(2000)
    block = declared(chain, y, log_rows)
    draw_time(block, chain, (y, log_rows), args.repeats)
    exact = smoother(np.asarray(y, float), np.asarray(log_rows, float))
    state = lambda key: block.init(key, 0, {"z": jnp.zeros(2000, int)}, (y, log_rows), {})
    one = lambda s, _: (s := block.sample(s, (y, log_rows), {}), jax.nn.one_hot(s.z["z"], STATES))

    def mean(key: Array) -> Array:
        warm = jax.lax.fori_loop(0, 500, lambda _, s: one(s, None)[0], state(key))
        add = lambda _, carry: (lambda s, hot: (s, carry[1] + hot))(*one(carry[0], None))
        return jax.lax.fori_loop(0, args.samples, add, (warm, jnp.zeros((2000, STATES))))[1] / args.samples

    each = np.asarray(jax.jit(jax.vmap(mean))(jax.random.split(jax.random.key(0), 8)), float)
    error = np.maximum(each.std(0, ddof=1) / np.sqrt(len(each)), 1e-9)
    gap, doubtful = each.mean(0) - exact, (exact > 0.05) & (exact < 0.95)
    rms = np.sqrt(np.median((gap / error)[doubtful] ** 2) / 0.506)  # of t with 7 degrees the median square
    print(
        f"  8 chains of {args.samples} sweeps: largest error of P(z_t = k | y) {np.abs(gap).max():.4f}, rms "
        f"{np.sqrt((gap**2).mean()):.4f}, z by its median {rms:.2f} of {doubtful.sum()} probabilities in "
        "doubt"
    )


def exact_indicators(y: np.ndarray) -> np.ndarray:
    """P(z = 1) of spike and slab by enumeration, with the effects integrated out."""
    states = (np.arange(2 ** len(y))[:, None] >> np.arange(len(y))) & 1
    variance = 0.25 + 4.0 * states
    log = 0.6 * (states[:, 1:] == states[:, :-1]).sum(1) - 0.5 * (y**2 / variance + np.log(variance)).sum(1)
    weight = np.exp(log - log.max())
    return weight @ states / weight.sum()


def against(draws: np.ndarray, exact: np.ndarray) -> str:
    """Means of a run in standard errors from what is exact, from batches."""
    means = draws.reshape(50, -1, draws.shape[-1]).mean(1)
    # 1e-6: a unit that is certain but for less than any run could see
    z = (means.mean(0) - exact) / (means.std(0, ddof=1) / np.sqrt(len(means)) + 1e-6)
    return f"z rms {np.sqrt((z**2).mean()):.2f}, largest {np.abs(z).max():.1f} of {len(z)}"


def indicators(args: argparse.Namespace) -> None:
    """Spike and slab: 500 indicators by both, and agreement on ten, also with what is exact."""
    for size in (10, 500):
        print(f"spike and slab, {size} indicators under an Ising chain")
        y = jnp.asarray(np.random.default_rng(2).normal(0, 1.5, size))
        block = declared(spike_and_slab, y)
        draw_time(block, spike_and_slab, (y,), args.repeats)
        whole = ebmpp.GibbsBlock.from_model(spike_and_slab, ["z", "b"], y)
        ours = Gibbs([(block, ["z"]), (NUTS(spike_and_slab), None)])
        kernels = {
            "from_model and NUTS": ours,
            "from_model of both": whole,
            "DiscreteHMCGibbs": DiscreteHMCGibbs(NUTS(spike_and_slab)),
        }
        count = 50 * args.samples if size == 10 else args.samples // 5
        found = {n: sampled(n, k, (y,), 200, count, ["z"])["z"] for n, k in kernels.items()}
        theirs = found.pop("DiscreteHMCGibbs")
        for name, draws in found.items():
            print(f"  P(z = 1), {name}, and DiscreteHMCGibbs: {agreement(draws, theirs)}")
        if size == 10:
            exact = exact_indicators(np.asarray(y, float))
            for name, draws in {**found, "DiscreteHMCGibbs": theirs}.items():
                print(f"  P(z = 1), {name}, and enumeration: {against(draws, exact)}")


def regression(y: Array, x: Array) -> None:
    """Indicators that all interact, through the sum of what they switch on."""
    b = numpyro.sample("b", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("columns", x.shape[1]):
        z = numpyro.sample("z", dist.Bernoulli(0.1))
    numpyro.sample("y", dist.Normal(x @ (z * b), 0.5).to_event(1), obs=y)


def regressions(args: argparse.Namespace) -> None:
    """500 indicators one by one: a sweep of the block, and of NumPyro's DiscreteGibbs."""
    print("regression, 500 rows and 500 indicators, one by one")
    rng = np.random.default_rng(0)
    x, on, b = rng.normal(size=(500, 500)), rng.random(500) < 0.1, 2 * rng.normal(size=500)
    data = jnp.asarray(x @ (on * b) + 0.5 * rng.normal(size=500)), jnp.asarray(x)
    block = ebmpp.GibbsBlock.from_model(regression, ["z"], *data, unit_by_unit=True)
    given = {"_gibbs_sites": {"b": jnp.asarray(b)}}
    steps, states = {}, {}
    for name, kernel in {"from_model": block, "DiscreteGibbs": DiscreteGibbs(regression)}.items():
        states[name] = kernel.init(jax.random.key(0), 0, {"z": jnp.zeros(500, int)}, data, given)
        steps[name] = jax.jit(lambda state, given, kernel=kernel: kernel.sample(state, data, given))
        states[name] = jax.block_until_ready(steps[name](states[name], given))
    times = {name: [] for name in steps}
    for _ in range(10 * args.repeats):
        for name, step in steps.items():
            begin = time.perf_counter()
            states[name] = jax.block_until_ready(step(states[name], given))
            times[name].append(time.perf_counter() - begin)
    for name, spent in times.items():
        right = (np.asarray(states[name].z["z"]) == on).mean()
        print(
            f"  {name:16} {1e3 * min(spent):6.2f} ms a sweep (median {1e3 * np.median(spent):.2f}), "
            f"right {right:.3f}"
        )


def in_noise(graph: ebmpp.FactorGraph, params: dict) -> Callable:
    """An image in noise of unknown scale, its prior a Boltzmann machine."""

    def model(y: Array) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        z = numpyro.sample("z", ebmpp.EnergyDistribution(graph, params, num_sweeps=1))
        numpyro.sample("y", dist.Normal(z, scale).to_event(1), obs=y)

    return model


def priors(args: argparse.Namespace) -> None:
    """Machines as priors, their latents drawn along: by the block that follows, and by hand."""
    rng, digits = np.random.default_rng(0), ebmpp.data.binarize(ebmpp.data.digits())
    small = ebmpp.layered(v=ebmpp.Bernoulli(64), h=ebmpp.Bernoulli(64))
    options = {"num_steps": 3000, "rng_key": jax.random.key(0), "progress_bar": False}
    trained = ebmpp.fit(small, digits, estimator=ebmpp.PCD(), **options).params
    large = ebmpp.layered(v=ebmpp.Bernoulli(784), h=ebmpp.Bernoulli(500))
    images = {
        "trained on digits": (small, trained, digits[0]),
        "not trained": (large, large.init(jax.random.key(1)), rng.random(784) < 0.2),
    }
    for told, (graph, params, image) in images.items():
        print(f"a machine of {image.size} pixels as prior, {told}")
        y = jnp.asarray(image + 0.5 * rng.normal(size=image.size))
        model = in_noise(graph, params)
        field = lambda sites, y, params=params: params["v"] + (y - 0.5) / sites["scale"] ** 2
        by_hand = ebmpp.GibbsBlock(graph, {"z": "v"}, params | {"v": field})
        blocks = {"from_model": declared(model, y), "by hand": by_hand}
        for name, block in blocks.items():
            print(f"  {name}:")
            draw_time(block, model, (y,), args.repeats)
        if graph is small:
            found = {
                name: sampled(
                    f"{name} and NUTS",
                    Gibbs([(block, ["z"]), (NUTS(model), None)]),
                    (y,),
                    500,
                    10 * args.samples,
                    ["scale"],
                    ["z"],
                )["z"]
                for name, block in blocks.items()
            }
            mean = np.mean([draws.mean(0) for draws in found.values()], 0)
            doubtful = (mean > 0.02) & (mean < 0.98)
            both = [draws[:, doubtful] for draws in found.values()]
            print(f"  pixels in doubt, by both: {agreement(*both)}")


def main() -> None:
    """Print all parts, or those that are named."""
    parts = {"mixture": mixtures, "chain": chains, "indicators": indicators}
    parts |= {"regression": regressions, "prior": priors}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(parts), help=f"of {', '.join(parts)}")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for part in args.parts:
        parts[part](args)


if __name__ == "__main__":
    main()
