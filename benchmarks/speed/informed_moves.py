# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Meeting times of local informed moves, and their time per gradient beside hand-written JAX.

    python benchmarks/speed/informed_moves.py [network] [rbm] [time]

A step costs one gradient. Pairs start from independent states after a burn-in.
"""

import argparse
from collections.abc import Callable
from functools import partial
import time
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import jax
from jax import lax
import jax.numpy as jnp

import ebmpp
from ebmpp import PCD, Bernoulli, Factor, FactorGraph
from ebmpp.contrib import GibbsWithGradients
from ebmpp.core import random
from ebmpp.moves import Informed, Layer, Move, Target, gibbs_sweep
from ebmpp.moves.move import coupled_sweep, draw_sweep

STEPS = 10  # per move
KEY = np.array([7, 1], np.uint32)


def network(params: dict, v: jax.Array) -> jax.Array:
    """Return the energy of a tanh network of two layers."""
    hidden = jnp.tanh(jnp.tanh((2 * v - 1) @ params["a"]) @ params["b"])
    return -(v @ params["bias"] + hidden @ params["u"])


def random_network(units: int, first: int, second: int, scale: float, seed: int) -> Any:
    """Return random params of :func:`network`."""
    normal = np.random.default_rng(seed).standard_normal
    params = {
        "a": scale * normal((units, first)) / np.sqrt(units),
        "b": normal((first, second)) / np.sqrt(first),
        "u": scale * normal(second),
        "bias": 0.3 * normal(units),
    }
    return jax.tree.map(np.float32, params)


def free_energy(params: dict, v: jax.Array) -> jax.Array:
    """Return the energy of an RBM with its latents summed out."""
    inputs = v @ params["v:h"] + params["h"]
    return -(v @ params["v"] + jax.nn.softplus(inputs).sum())


def black_box(energy: Callable, units: int, params: Any) -> FactorGraph:
    """Return a graph of bits under any energy."""
    factor = Factor("v", energy=energy, init=params, name="f", affine=False)
    return FactorGraph({"v": Bernoulli(units)}, factors=[factor])


def meet(
    target: Target,
    moves: tuple[Move, ...],
    num_pairs: int,
    most: int,
    burn_in: int = 30,
) -> str:
    """Return acceptance, and mean meeting time in sweeps and in gradients."""
    families = target.graph.families

    @jax.jit
    def alone(target, x, number):
        keys = random.fold_in(KEY, number, jnp.arange(num_pairs))
        return draw_sweep(target, x, moves, keys)

    @jax.jit
    def coupled(target, z, number):
        keys = random.fold_in(KEY, number, jnp.arange(num_pairs))
        return coupled_sweep(target, z, moves, keys)[:2]

    generator = np.random.default_rng(0)
    x = {
        b: np.float32(generator.integers(0, 2, (num_pairs, *f.shape)))
        for b, f in families.items()
    }
    total = 0.0
    for t in range(burn_in):
        x, accepted = alone(target, x, np.uint32(t))
        total += float(accepted.mean())
    order = generator.permutation(num_pairs)
    z = {b: jnp.stack([v, v[order]]) for b, v in x.items()}
    times = np.full(num_pairs, np.inf)
    for t in range(1, most + 1):
        z, met = coupled(target, z, np.uint32(10_000 + t))
        times[np.isinf(times) & np.asarray(met)] = t
        if np.isfinite(times).all():
            break
    proposals = sum(move.proposes for move in moves)
    share = total / burn_in / proposals if proposals else 1.0
    mean = times[np.isfinite(times)].mean()
    gradients = f"{mean * proposals:6.0f} steps" if proposals else ""
    unmet = int(np.isinf(times).sum())
    return f"acceptance {share:.2f}  {mean:6.1f} sweeps {gradients}  unmet {unmet}"


def moves_of(names: tuple[tuple[str, float], ...]) -> dict[str, Move]:
    """Return moves by rule and step size."""
    moves: dict[str, Move] = {
        f"{rule} {size}": Informed(("v",), rule, size, STEPS) for rule, size in names
    }
    return moves


NAMES = (
    ("dmala", 0.3),
    ("dmala", 0.4),
    ("dmala", 0.6),
    ("dlmc", 0.3),
    ("dlmc", 0.6),
    ("heat_bath", 0.4),
    ("heat_bath", 0.7),
)


def networks() -> None:
    """Print meeting times under tanh networks of 64 units."""
    moves = moves_of(NAMES)
    moves["gibbs with gradients"] = GibbsWithGradients(("v",), num_steps=STEPS)
    for seed in range(2):
        params = random_network(64, 64, 32, 1.0, seed)
        target = Target(black_box(network, 64, params), {"f": params})
        for name, move in moves.items():
            print(
                f"network {seed}  {name:22s}",
                meet(target, (move,), 60, 150),
                flush=True,
            )


def rbms() -> None:
    """Print meeting times of a trained RBM, with latents drawn or summed out, and a residual."""
    bits = np.float32(load_digits().data > 8)
    graph = ebmpp.layered(v=Bernoulli(64), h=Bernoulli(20))
    params = ebmpp.fit(
        graph,
        bits,
        estimator=PCD(num_chains=200),
        num_steps=3000,
        batch_size=100,
        rng_key=jax.random.key(0),
        progress_bar=False,
    ).params
    target = Target(graph, params)
    print("rbm  gibbs", meet(target, gibbs_sweep(graph), 60, 300), flush=True)
    summed = Target(black_box(free_energy, 64, params), {"f": params})
    latents = Layer(("h",), "maximal")
    for name, move in moves_of(NAMES[1:4:2] + (("heat_bath", 1.0),)).items():
        print(f"rbm, latents summed out  {name:14s}", meet(summed, (move,), 60, 150))
        for steps in (1, 3):
            drawn = (Informed(("v",), move.rule, move.step_size, steps), latents)
            print(
                f"rbm, latents drawn, {steps}  {name:14s}",
                meet(target, drawn, 60, 400),
                flush=True,
            )


def by_hand(params: Any, x: jax.Array, key: jax.Array, steps: int) -> jax.Array:
    """Run Gibbs with gradients in plain JAX: Grathwohl et al. (2021), Algorithm 1."""
    value_and_grad = jax.vmap(jax.value_and_grad(lambda x: -network(params, x)))

    def step(carry, key):
        x, value, grad = carry
        flip_key, accept_key = jax.random.split(key)
        logits = 0.5 * (1 - 2 * x) * grad
        unit = jax.random.categorical(flip_key, logits)
        new = jnp.abs(x - jax.nn.one_hot(unit, x.shape[1], dtype=x.dtype))
        new_value, new_grad = value_and_grad(new)
        back = jax.nn.log_softmax(0.5 * (1 - 2 * new) * new_grad)
        forth = jax.nn.log_softmax(logits)
        at = partial(jnp.take_along_axis, indices=unit[:, None], axis=1)
        ratio = new_value - value + (at(back) - at(forth))[:, 0]
        accept = jnp.log(jax.random.uniform(accept_key, ratio.shape)) < ratio

        def pick(a, b):
            return jnp.where(accept.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

        return jax.tree.map(pick, (new, new_value, new_grad), (x, value, grad)), None

    start = (x, *value_and_grad(x))
    return lax.scan(step, start, jax.random.split(key, steps))[0][0]


def times() -> None:
    """Print times per gradient, minima of interleaved rounds, and ratios to hand-written JAX."""
    for units, width, rows in ((64, 64, 100), (784, 256, 100)):
        params = random_network(units, width, width // 2, 1.0, 0)
        graph = black_box(network, units, params)
        x = np.float32(np.random.default_rng(0).integers(0, 2, (rows, units)))
        keys = random.fold_in(KEY, 0, np.arange(rows))
        steps = 50
        calls: dict[str, Callable] = {
            "by hand": jax.jit(partial(by_hand, steps=steps)),
        }
        arguments: dict[str, tuple] = {"by hand": (params, x, jax.random.key(0))}
        ours = {
            "gibbs with gradients": GibbsWithGradients(("v",), num_steps=steps),
            **moves_of((("dmala", 0.4), ("dlmc", 0.3), ("heat_bath", 0.4))),
        }
        for name, move in ours.items():
            if name != "gibbs with gradients":
                move = Informed(("v",), move.rule, move.step_size, steps)
            calls[name] = jax.jit(lambda t, x, k, m=move: m.draw(t, x, k)[0])
            arguments[name] = (Target(graph, {"f": params}), {"v": x}, keys)
        best = dict.fromkeys(calls, np.inf)
        for _ in range(9):
            for name, call in calls.items():
                began = time.perf_counter()
                jax.block_until_ready(call(*arguments[name]))
                best[name] = min(best[name], time.perf_counter() - began)
        for name, seconds in best.items():
            ratio = seconds / best["by hand"]
            figure = f"{seconds / steps * 1e3:.3f} ms per gradient, ratio {ratio:.2f}"
            print(f"{units} units, {rows} chains  {name:22s} {figure}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    tables = {"network": networks, "rbm": rbms, "time": times}
    parser.add_argument("tables", nargs="*", default=list(tables))
    for table in parser.parse_args().tables:
        tables[table]()
