# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Bias and spread of gradients through a Boltzmann layer, at equal CPU seconds.

``python benchmarks/gradients/boltzmann_layer.py`` takes the loss of the autoencoder of
docs/howto/boltzmann_layer.md, with 8 latent units beside 6 hidden ones, at random
params, for 16 digits. The exact gradient in the layer's params and in the encoder's
outputs is a sum over all states. The table compares coupled pairs (``expectation``) with
the sample covariance of plain chains, the straight-through estimator and Gumbel-softmax
at the last draw of such chains.
"""

import argparse
from collections.abc import Callable
from functools import partial
import time
from typing import Any

import numpy as np

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, Factor, FactorGraph, Gaussian

_UNITS = 8
_HIDDEN = 6
_ROWS = 16

LAYER = FactorGraph(
    visible={"c": Gaussian(_UNITS)},
    latent={"z": Bernoulli(_UNITS), "h": Bernoulli(_HIDDEN)},
    factors=[
        Bias("z"),
        Bias("h"),
        Bilinear("z", "h"),
        Factor("c", "z", energy=lambda params, c, z: -c @ z),
    ],
)

Model = tuple[dict[str, Any], Array]


def observe(decoder: tuple[Array, Array], x: dict[str, Array]) -> tuple:
    """Return what the loss reads of a state, which may be a relaxed one."""
    weight, bias = decoder
    logits = x["z"] @ weight + bias
    t = {"z": x["z"], "h": x["h"], "z:h": jnp.outer(x["z"], x["h"])}
    return logits, jax.nn.softplus(logits).sum(), t


def loss(means: tuple, model: Model, images: Array) -> Array:
    """Return the loss of means given the encoder's outputs, and given 0."""
    params, c = model
    logits, log_norm, t = means
    count = len(images)
    distortion = log_norm[:count] - (images * logits[:count]).sum(-1)
    rate = (lax.stop_gradient(c) * t["z"][:count]).sum(-1)
    gap = jax.tree.map(lambda t: lax.stop_gradient(t[count:] - t[:count]).mean(0), t)
    weights = {name: params[name] for name in gap}
    return (distortion + rate).mean() + optax.tree.vdot(gap, weights)


def by_expectation(
    model: Model, key: Array, images: Array, decoder: tuple, **options: Any
) -> Array:
    params, c = model
    rows = jnp.concatenate([c, 0 * c])
    fn = partial(observe, decoder)
    means = ebmpp.expectation(LAYER, params, fn, rng_key=key, c=rows, **options)
    return loss(means, model, images)


def chains(model: Model, key: Array, num_chains: int, num_sweeps: int) -> tuple:
    """Return last states of plain chains, and the natural parameters of the last z."""
    params, c = jax.tree.map(lax.stop_gradient, model)
    rows = jnp.concatenate([c, 0 * c])[:, None]
    start, *keys = jax.random.split(key, 3)
    z = jax.random.bernoulli(start, 0.5, (len(rows), num_chains, _UNITS)).astype(float)

    def draw(key, eta):
        return jax.random.bernoulli(key, jax.nn.sigmoid(eta)).astype(float)

    def sweep(i, state):
        z, _ = state
        keys = jax.random.split(jax.random.fold_in(key, i))
        h = draw(keys[0], params["h"] + z @ params["z:h"])
        z = draw(keys[1], params["z"] + rows + h @ params["z:h"].T)
        return z, h

    empty = jnp.zeros((*z.shape[:2], _HIDDEN))
    return lax.fori_loop(0, num_sweeps, sweep, (z, empty))


def fields(model: Model, h: Array) -> Array:
    """Return natural parameters of z given h, which are differentiated."""
    params, c = model
    rows = jnp.concatenate([c, 0 * c])[:, None]
    return params["z"] + rows + h @ params["z:h"].T


def mean_loss(z: Array, h: Array, model: Model, images: Array, decoder: tuple) -> Array:
    """Return the loss of sample means."""
    values = jax.vmap(jax.vmap(lambda z, h: observe(decoder, {"z": z, "h": h})))(z, h)
    return loss(jax.tree.map(lambda v: v.mean(1), values), model, images)


def by_sample_covariance(
    model: Model, key: Array, images: Array, decoder: tuple, **options: int
) -> Array:
    z, h = chains(model, key, **options)
    params, c = model
    rows = jnp.broadcast_to(jnp.concatenate([c, 0 * c])[:, None], z.shape)
    energies = LAYER.energy(params, {"c": rows, "z": z, "h": h})
    baseline = energies.mean(1, keepdims=True)
    # by the sample covariance, whose derivative this weight has
    weight = -(energies - baseline) * z.shape[1] / (z.shape[1] - 1)
    weight = weight - lax.stop_gradient(weight)

    def surrogate(values):
        w = weight.reshape(*weight.shape, *(1,) * (values.ndim - 2))
        centred = values - values.mean(1, keepdims=True)
        return values.mean(1) + (w * lax.stop_gradient(centred)).mean(1)

    values = jax.vmap(jax.vmap(lambda z, h: observe(decoder, {"z": z, "h": h})))(z, h)
    return loss(jax.tree.map(surrogate, values), model, images)


def by_straight_through(
    model: Model, key: Array, images: Array, decoder: tuple, **options: int
) -> Array:
    z, h = chains(model, key, **options)
    p = jax.nn.sigmoid(fields(model, h))
    return mean_loss(z + p - lax.stop_gradient(p), h, model, images, decoder)


def by_gumbel_softmax(
    model: Model, key: Array, images: Array, decoder: tuple, **options: int
) -> Array:
    _, h = chains(model, key, **options)
    noise = jax.random.logistic(jax.random.fold_in(key, 0), (*h.shape[:2], _UNITS))
    z = jax.nn.sigmoid((fields(model, h) + noise) / 0.5)
    return mean_loss(z, h, model, images, decoder)


def problem(scale: float) -> tuple[Model, Array, tuple[Array, Array]]:
    """Return params, fields and decoder, of independent normal entries, and digits."""
    generator = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(generator.normal(size=shape), jnp.float32)

    params = LAYER.init(jax.random.key(0))
    params |= {"z": normal(_UNITS) / 2, "h": normal(_HIDDEN) / 2}
    params["z:h"] = scale * normal(_UNITS, _HIDDEN)
    # biases at which states and their complements balance, so that modes compete
    params["z"] = params["z"] - params["z:h"].sum(1) / 2
    params["h"] = params["h"] - params["z:h"].sum(0) / 2
    images = jnp.asarray(ebmpp.data.digits()[:_ROWS] > 0.5, jnp.float32)
    decoder = normal(_UNITS, 64) / 2, normal(64) - 1
    return (params, normal(_ROWS, _UNITS)), images, decoder


def measure(gradient: Callable[[Array], Any], repeats: int) -> tuple[np.ndarray, float]:
    """Return gradients by independent keys, and the CPU seconds of one, the least of ten."""
    keys = jax.random.split(jax.random.key(1), repeats)
    jax.block_until_ready(gradient(keys[0]))
    results = []
    seconds = []
    for part in np.array_split(np.arange(repeats), 10):
        start = time.process_time()
        results += [jax.block_until_ready(gradient(keys[i])) for i in part]
        seconds.append((time.process_time() - start) / len(part))
    return np.stack(results).astype(float), min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--scale", type=float, default=2.0, help="of the weights")
    options = parser.parse_args()
    model, images, decoder = problem(options.scale)

    def gradient_of(fn, **settings):
        def flat(model, key):
            g = jax.grad(fn)(model, key, images, decoder, **settings)
            return ravel_pytree(g)[0]

        return partial(jax.jit(flat), model)

    exact = gradient_of(by_expectation, method="exact")(jax.random.key(0))
    exact = np.asarray(exact, float)
    norm = np.linalg.norm(exact)
    rows = {"pairs, 8 per row": gradient_of(by_expectation, num_pairs=8)}
    for sweeps in (1, 10, 100):
        plain = {"num_chains": 8, "num_sweeps": sweeps}
        rows[f"sample covariance, {sweeps} sweeps"] = gradient_of(
            by_sample_covariance, **plain
        )
    rows["straight-through, 100 sweeps"] = gradient_of(by_straight_through, **plain)
    rows["Gumbel-softmax, 100 sweeps"] = gradient_of(by_gumbel_softmax, **plain)
    print("| gradient by | CPU ms | bias | spread | error of the mean in 1 CPU-s |")
    print("|---|---|---|---|---|")
    for name, gradient in rows.items():
        values, seconds = measure(gradient, options.repeats)
        spread = np.sqrt(values.var(0, ddof=1).sum())
        noise = spread**2 / len(values)
        square = ((values.mean(0) - exact) ** 2).sum() - noise
        error = np.sqrt(max(square, 0) + spread**2 * seconds)
        bias = f"{np.sqrt(square) / norm:.3f}" if square > 2 * noise else "none seen"
        print(
            f"| {name} | {1e3 * seconds:.2f} | {bias} | {spread / norm:.2f} | "
            f"{error / norm:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
