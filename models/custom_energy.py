# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A custom energy: a digit's label selects one of ten weight matrices.

``python models/custom_energy.py``. The energy is a function of sufficient statistics,

    -sum_k z_k (h' W_k v + b_k' v + c_k' h)

with z the one-hot label: an implicit mixture of restricted Boltzmann machines (Nair,
Hinton 2008). The components share one log Z, so that the model gives a probability of
each label. With z visible the model is a generative classifier, with z latent
(``--unsupervised``) a clustering. Evaluation is exact. At the end the program prints
the error of an energy that cannot be sampled layer by layer.

References: Nair, Hinton (2008), *Implicit mixtures of restricted Boltzmann machines*.
"""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np
from sklearn.metrics import adjusted_rand_score

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Categorical, Factor, FactorGraph
from ebmpp.errors import NotMultiAffineError
from ebmpp.estimators import MeanField
from shared import common, digit_images

_SWEEPS = 1000
_MOST_LATENT = 14  # exact evaluation sums over labels and latent states


def select(p: dict[str, Array], v: Array, z: Array, h: Array) -> Array:
    """Return the energy of the component that z selects; z has statistics of shape (1,
    components)."""
    w, b, c = (jnp.tensordot(z[0], p[name], 1) for name in ("w", "b", "c"))
    return -(v @ w @ h + b @ v + c @ h)


def declare(pixels: int, components: int, latent: int, supervised: bool) -> FactorGraph:
    """Declare three blocks in one factor, with the label visible or latent."""

    def init(key: Array) -> dict[str, Array]:
        sizes = {
            "w": (components, pixels, latent),
            "b": (components, pixels),
            "c": (components, latent),
        }
        keys = dict(zip(sizes, jax.random.split(key, 3), strict=True))
        return {
            n: 0.01 * jax.random.normal(keys[n], shape) for n, shape in sizes.items()
        }

    blocks = {
        "v": Bernoulli(pixels),
        "z": Categorical(1, components),
        "h": Bernoulli(latent),
    }
    visible = ("v", "z") if supervised else ("v",)
    return FactorGraph(
        visible={b: blocks[b] for b in visible},
        latent={b: f for b, f in blocks.items() if b not in visible},
        factors=[Bias("v"), Bias("z"), Factor("v", "z", "h", energy=select, init=init)],
    )


def rejected_energy() -> str:
    """Return the error of an energy that makes every pair of units of v interact."""
    ink = Factor(
        "v",
        energy=lambda strength, v: strength * (v.sum() - 20) ** 2,
        init=jnp.ones(()),
    )
    try:
        FactorGraph(visible={"v": Bernoulli(64)}, factors=[ink])
    except NotMultiAffineError as error:
        return str(error)
    raise AssertionError("an energy that is not multi-affine was accepted")


def log_joint(model: FactorGraph, params: Any, v: np.ndarray) -> Array:
    """Return log p(v, z) + log Z of each label z: rows by components."""
    labels = range(model.families["z"].num_categories)

    def log_prob(k):
        return model.log_marginal(params, {"v": v, "z": jnp.full((len(v), 1), k)}, "h")

    return jnp.stack([log_prob(k) for k in labels], 1)


def report(
    model: FactorGraph, params: Any, v: np.ndarray, labels: np.ndarray, supervised: bool
) -> None:
    """Print the held-out log-likelihood, and scores of the predicted labels."""
    joint = log_joint(model, params, v)
    log_z = ebmpp.exact.log_partition(model, params)
    likelihood = jax.nn.logsumexp(joint, axis=1).mean() - log_z
    common.print_row(
        "log-likelihood, held out", f"{float(likelihood):.2f} per image, exact"
    )
    predicted = np.asarray(joint.argmax(1))
    if supervised:
        common.print_row(
            "label, by p(z | v)",
            f"{(predicted == labels).mean():.3f} right of {len(v)} held-out images",
        )
    else:
        common.print_row(
            "clusters",
            f"{adjusted_rand_score(labels, predicted):.2f} adjusted Rand index",
        )


def pictures(model: FactorGraph, params: Any, labels: int, seed: int) -> dict[str, Any]:
    """Draw samples of each component: chains with a clamped label, one row per label."""
    count = 12
    z = jnp.repeat(jnp.arange(labels), count)[:, None]
    run = common.chains(
        ebmpp.BlockedGibbs(model), params, seed + 1, warmup=_SWEEPS - 1, z=z
    )
    means = model.mean(params, {"z": z, "h": run.get_samples()["h"][0]}, "v")
    side = math.isqrt(means.shape[1])
    axes = ebmpp.plots.plot_units(means.reshape(-1, side, side), ncols=count)
    title = f"samples, one component per row: mean of v given the rest, {_SWEEPS} sweeps from noise"
    axes.set_title(title, fontsize=9)
    return {"samples": axes.figure}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate, draw, save, and print a rejected energy."""
    parser = common.options(__doc__, "demo")
    common.training_options(parser, steps=2000, rate=0.01)
    digit_images.option(parser)
    parser.add_argument(
        "--latent", type=int, default=12, help=f"units of h, at most {_MOST_LATENT}"
    )
    parser.add_argument(
        "--components",
        type=int,
        default=10,
        help="number of components with --unsupervised",
    )
    parser.add_argument(
        "--unsupervised", action="store_true", help="the label is latent"
    )
    parser.add_argument("--estimator", choices=("pcd", "ucd"), default="pcd")
    args = common.parse(parser, argv, digit_images.images, latent=1, components=1)
    if args.latent > _MOST_LATENT:
        parser.error(
            f"--latent must be at most {_MOST_LATENT} for exact evaluation, got {args.latent}."
        )
    images = args.images
    supervised = not args.unsupervised
    components = 10 if supervised else args.components
    rows = {
        "v": images.train.reshape(len(images.train), -1),
        "z": images.train_labels[:, None],
    }
    model = declare(rows["v"].shape[1], components, args.latent, supervised)
    common.begin(args, model)
    # given v alone, label and latents interact
    posterior = None if supervised else MeanField()
    estimator = common.pcd_or_ucd(args, k=5, posterior=posterior)
    fit = common.train(model, {b: rows[b] for b in model.visible}, args, estimator)
    held_out = images.held_out.reshape(len(images.held_out), -1)
    report(model, fit.params, held_out, images.held_out_labels, supervised)
    common.save_figures(args.out, pictures(model, fit.params, components, args.seed))
    common.save(args.out / "history.nc", fit)
    print(f"\nRejected, as intended:\n{rejected_energy()}")


if __name__ == "__main__":
    main()
