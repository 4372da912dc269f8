# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""All figures of a GPU in one command of less than ten minutes: correctness first, then speed.

``python benchmarks/speed/gpu.py`` prints one line per figure, beside hand-written JAX
in float32; ``--small`` runs everything at toy sizes, also on a CPU. ``--only products
fit`` takes some parts, and ``--limit`` starts no part after so many seconds. Times are
minima of several calls. A step of ``fit`` is timed twice: over a whole call, with its
fixed costs, and as the difference of two calls.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
import sys
import time
import traceback

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

sys.path[:0] = [str(Path(__file__).parents[2])]
from benchmarks.speed import by_hand, cases, engine  # noqa: E402
import ebmpp  # noqa: E402
from ebmpp import FactorGraph, Spin  # noqa: E402
from ebmpp.core import backend  # noqa: E402
from ebmpp.graph import energy  # noqa: E402

START = time.perf_counter()
KEY = jax.random.key(0)
SWEEPS = 10


def say(*words: object) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.perf_counter() - START:6.1f}]", *words, flush=True)


def best(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the least seconds of some calls after a first one."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)


def bits(*shape: int) -> Array:
    """Return random zeros and ones."""
    return jax.random.bernoulli(jax.random.key(2), 0.5, shape).astype(jnp.float32)


def laws(small: bool) -> None:
    """Errors of products and gradients against float64, and of means against enumeration."""
    rows = 1024
    graph, params = cases.rbm()
    x = {"v": bits(rows, 784), "h": bits(rows, 500)}
    w = np.asarray(params["v:h"], float)
    exact = {"h": np.asarray(x["v"], float) @ w, "v": np.asarray(x["h"], float) @ w.T}
    for precision in (None, "float32", "tensorfloat32"):
        with jax.default_matmul_precision(precision):
            # a function of its own, since the precision is no argument
            natural = jax.jit(
                lambda p, x: {
                    b: energy.natural_rows(graph, p, x, [b])[b] for b in ("v", "h")
                }
            )
            eta = natural(params, x)
            gradient = jax.jit(
                jax.grad(lambda p: energy.summed_out(graph, p, x, ("h",)).sum())
            )(params)["v:h"]
        bias = {b: np.asarray(params[b], float) for b in exact}
        errors = {
            b: np.sqrt(np.mean((np.asarray(eta[b], float) - exact[b] - bias[b]) ** 2))
            for b in exact
        }
        means = 1 / (1 + np.exp(-exact["h"] - bias["h"]))
        want = np.asarray(x["v"], float).T @ means
        off = np.abs(np.asarray(gradient, float) - want).max() / np.abs(want).max()
        say(
            f"precision {precision}: rms error of natural parameters given v "
            f"{errors['h']:.2e}, given h {errors['v']:.2e}; gradient {off:.1e}"
        )
    for family in (ebmpp.Bernoulli, ebmpp.Spin):
        machine = ebmpp.layered(v=family(4), h=family(3))
        machine_params = jax.tree.map(
            lambda a: a + 0.3 * jax.random.normal(KEY, a.shape), machine.init(KEY)
        )
        count = 2000 if small else 100_000
        draws = ebmpp.sample(
            machine,
            machine_params,
            num_samples=count,
            rng_key=jax.random.key(5),
            progress_bar=False,
        )
        exact_means = ebmpp.exact.moments(machine, machine_params)
        for b, values in draws.items():
            values = np.asarray(values).reshape(-1, machine.families[b].size)
            error = values.std(0) / np.sqrt(len(values))
            z = (values.mean(0) - np.asarray(exact_means[b])) / error
            say(f"means of {machine.families[b]!r}: largest |z| {np.abs(z).max():.1f}")


def products(small: bool) -> None:
    """One product of states and weights, 784x500."""
    _, params = cases.rbm()
    w = params["v:h"]
    ways = {
        "ours": (jax.vmap(backend.product, (0, None)), jnp.bfloat16),
        "float32": (partial(jnp.matmul, precision="highest"), jnp.float32),
        "six products": (
            partial(jnp.matmul, precision="BF16_BF16_F32_X6"),
            jnp.float32,
        ),
        "one in bfloat16": (
            lambda x, w: lax.dot(
                x, w.astype(jnp.bfloat16), preferred_element_type=jnp.float32
            ),
            jnp.bfloat16,
        ),
    }
    for rows in (64,) if small else (256, 512, 1000, 10_000, 100_000):
        for name, (product, dtype) in ways.items():
            x = bits(rows, 784).astype(dtype)
            try:
                seconds = best(partial(jax.jit(product), x, w), 10)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                say(f"product, {rows} rows, {name}: {str(error)[:90]}")
                continue
            rate = 2 * rows * w.size / seconds / 1e12
            say(
                f"product, {rows} rows, {name}: {1e3 * seconds:.3f} ms, {rate:.1f} TFLOP/s"
            )


def gibbs(small: bool) -> None:
    """Ten Gibbs sweeps, 784x500."""
    graph, params = cases.rbm()
    for rows in (100,) if small else (100, 1000, 10_000, 100_000):
        v, h = bits(rows, 784), bits(rows, 500)
        ours = best(cases._sweeps(graph, params, {"v": v, "h": h}))
        with jax.default_matmul_precision("float32"):
            plain = best(cases._sweeps(graph, params, {"v": v, "h": h}))
        with jax.default_matmul_precision("highest"):
            run = jax.jit(by_hand.gibbs, static_argnums=4)
            hand = best(partial(run, params, v, h, KEY, SWEEPS))
        say(
            f"Gibbs, {rows} chains: {1e3 * ours:.3f} ms, in float32 {1e3 * plain:.3f}, "
            f"by hand {1e3 * hand:.3f}; ratio {ours / hand:.2f}"
        )


def gradient(small: bool) -> None:
    """CD-1 gradient, 784x500."""
    graph, params = cases.rbm()
    v = bits(100 if small else 1000, 784)
    ours = best(cases._gradient(graph, params, v), 20)
    with jax.default_matmul_precision("highest"):
        run = jax.jit(by_hand.cd_gradient)
        hand = best(lambda: run(params, v, KEY), 20)
    say(
        f"CD-1 gradient, {len(v)} rows: {1e3 * ours:.3f} ms, by hand {1e3 * hand:.3f}; "
        f"ratio {ours / hand:.2f}"
    )


def pcd_by_hand(rows: int, steps: int) -> Callable[..., Array]:
    """Return a function of weights, chains and data: PCD-1 steps in a scan."""

    def step(data, carry, i):
        w, b, c, v = carry
        first, second = jax.random.split(jax.random.fold_in(KEY, i))
        batch = lax.dynamic_slice_in_dim(data, i % (len(data) // rows) * rows, rows)
        h = jax.random.bernoulli(first, jax.nn.sigmoid(v @ w + c)).astype(jnp.float32)
        v = jax.random.bernoulli(second, jax.nn.sigmoid(h @ w.T + b))
        v = v.astype(jnp.float32)
        positive, negative = jax.nn.sigmoid(batch @ w + c), jax.nn.sigmoid(v @ w + c)
        w = w + 0.05 * (batch.T @ positive - v.T @ negative) / rows
        b = b + 0.05 * (batch.mean(0) - v.mean(0))
        c = c + 0.05 * (positive.mean(0) - negative.mean(0))
        return (w, b, c, v), None

    def run(w, v, data):
        start = w, jnp.zeros(w.shape[0]), jnp.zeros(w.shape[1]), v
        return lax.scan(partial(step, data), start, jnp.arange(steps))[0]

    return jax.jit(run)


def fit(small: bool) -> None:
    """Steps of ``fit``, 784x500, batches of 1,000."""
    rows, steps = (50, 100) if small else (1000, 2000)
    data = np.asarray(bits(20 * rows, 784))
    graph, params = cases.rbm()
    with jax.default_matmul_precision("highest"):
        run = pcd_by_hand(rows, steps)
        hand = best(lambda: run(params["v:h"], data[:rows], data), 3) / steps
    say(f"PCD-1 step in a scan by hand: {1e3 * hand:.4f} ms")
    for estimator in (ebmpp.CD(), ebmpp.PCD(num_chains=rows)):

        def call(count, estimator=estimator):
            result = ebmpp.fit(
                graph,
                data,
                rng_key=KEY,
                estimator=estimator,
                optimizer=optax.sgd(0.05),
                num_steps=count,
                batch_size=rows,
                progress_bar=False,
            )
            return result.params

        short, full = best(partial(call, steps // 2), 3), best(partial(call, steps), 3)
        say(
            f"fit, {type(estimator).__name__}: {1e3 * full / steps:.4f} ms per step of "
            f"a call of {steps}, {2e3 * (full - short) / steps:.4f} ms per further step"
        )


def pairs(small: bool) -> None:
    """Coupled pairs, 784x500."""
    times = {}
    for count in (20,) if small else (1000, 20_000, 100_000):
        run = engine.Pairs("784x500", count)
        tau = np.asarray(run.engine()[1])
        seconds = best(run.engine, 3)
        rate = 8 * 784 * 500 * float((tau - 1).sum()) / seconds / 1e12
        times[count] = tau
        say(
            f"{count} pairs, meeting time {tau.mean():.1f}, at most {tau.max()}: "
            f"{1e3 * seconds:.1f} ms, {rate:.1f} TFLOP/s of the four products"
        )
    first, *others = times.values()
    # a pair depends on its number alone; starts repeat the data's rows
    same = [float((first == other[: len(first)]).mean()) for other in others]
    say("share of equal meeting times among the first pairs:", same)


def lattices(small: bool) -> None:
    """Ising tori, in flips per nanosecond."""
    for side, counts in ((16, (4,)),) if small else ((64, (100,)), (1024, (1, 64))):
        lattice = cases.torus(side)
        graph = FactorGraph.from_networkx(lattice, family=Spin, shared=True, bias=False)
        params = {"x:x": jnp.asarray(0.4)}
        by_index = jax.jit(by_hand.ising(lattice, SWEEPS))
        for chains in counts:
            x = 2 * bits(chains, side**2) - 1
            flips = SWEEPS * side**2 * chains / 1e9
            ours = flips / best(cases._sweeps(graph, params, {"x": x}), 3)
            hand = flips / best(partial(by_index, params["x:x"], x, KEY), 3)
            say(f"Ising {side}x{side}, {chains} chains: {ours:.2f}, by hand {hand:.2f}")


PARTS: dict[str, Callable[[bool], None]] = {
    "laws": laws,
    "products": products,
    "gibbs": gibbs,
    "gradient": gradient,
    "fit": fit,
    "pairs": pairs,
    "lattices": lattices,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=480)
    args = parser.parse_args(argv)
    say(f"jax {jax.__version__}, ebmpp {ebmpp.__version__}, {jax.devices()[0]}")
    for name in args.only:
        if time.perf_counter() - START > args.limit:
            say(f"no time left for {name}")
            continue
        try:
            PARTS[name](args.small)
        except Exception:  # the other parts still run
            traceback.print_exc()
            say(f"{name} failed")


if __name__ == "__main__":
    main()
