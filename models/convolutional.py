# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A convolutional restricted Boltzmann machine on handwritten digits, with
probabilistic max-pooling.

``python models/convolutional.py`` trains on scikit-learn's digits;
``--data mnist --filters 32 --window 7`` is the size of the literature. A cell of a
latent map has ``pool * pool + 1`` states: the pixel that is on, or none. This
probabilistic max-pooling (Lee et al. 2009) is a Categorical block and a linear factor.
``--pool 1`` has binary maps without pooling.

Training starts with persistent chains and ends with unbiased contrastive divergence.
The program writes samples, filters, the history of training, and an ArviZ file, and
prints the held-out log-likelihood by annealed importance sampling, from below and from
above.

References: Lee, Grosse, Ranganath, Ng (2009), *Convolutional deep belief networks for
scalable unsupervised learning of hierarchical representations*, sections 3.1 and 3.2.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib import pyplot as plt
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import (
    PCD,
    UCD,
    Bernoulli,
    Bias,
    Categorical,
    Convolution,
    FactorGraph,
    Stage,
)
from ebmpp.graph import Linear
from shared import common, digit_images

_SHOWN = 64
_SWEEPS = 2000


def declare(side: int, filters: int, window: int, pool: int) -> FactorGraph:
    """Declare maps over the positions of a window, pooled ``pool`` by ``pool``, with
    one bias per map."""
    positions = side - window + 1
    if pool == 1:
        latent = Bernoulli((filters, positions, positions))
        weights = Convolution("v", "h", window=(window, window))
    else:
        cells = positions // pool
        latent = Categorical((filters, cells, cells), num_categories=pool**2 + 1)
        forward = partial(pooled, pool=pool)
        weights = Linear("v", "h", forward=forward, shape=(filters, 1, window, window))
    return FactorGraph(
        visible={"v": Bernoulli((side, side))},
        latent={"h": latent},
        factors=[Bias("v"), Bias("h", shared=(1, 2)), weights],
    )


def pooled(filters: Array, image: Array, pool: int) -> Array:
    """Return the natural parameters of each cell's states: filter responses, and 0 for
    "none is on"."""
    maps = lax.conv(image[None, None], filters, (1, 1), "VALID")[0]
    count = len(maps)
    cells = maps.shape[1] // pool
    maps = maps[:, : cells * pool, : cells * pool].reshape(
        count, cells, pool, cells, pool
    )
    states = maps.transpose(0, 1, 3, 2, 4).reshape(count, cells, cells, pool**2)
    return jnp.pad(states, [(0, 0)] * 3 + [(0, 1)])


def evaluate(
    machine: FactorGraph, fit: ebmpp.FitResult, args: argparse.Namespace, samples: Any
) -> None:
    """Print bounds of the held-out log-likelihood, and meeting times."""
    held_out = args.images.held_out
    log_z = ebmpp.bracket(
        machine,
        fit.params,
        rng_key=jax.random.key(args.seed + 2),
        samples=samples,
        num_temperatures=args.temperatures,
        data=args.images.train,
    )
    high, low = (
        z.average_log_likelihood(held_out).value for z in (log_z.lower, log_z.upper)
    )
    common.print_row(
        "log-likelihood, held out",
        f"{low:.2f} to {high:.2f} per image, +- {log_z.standard_error:.2f}; "
        f"{log_z.lower.effective_sample_size:.0f} and {log_z.upper.effective_sample_size:.0f} of "
        f"{len(log_z.lower.log_weights)} particles effective",
    )
    alone = digit_images.independent_pixels(args.images.train, held_out)
    common.print_row("independent pixels", f"{alone:.2f}")

    def ink(x):
        return x["v"].sum()

    pairs = ebmpp.unbiased_expectation(
        machine,
        fit.params,
        ink,
        rng_key=jax.random.key(args.seed + 3),
        num_pairs=args.num_pairs,
    )
    tau = pairs.meeting_time
    common.print_row(
        "meeting times",
        f"mean {tau.mean():.0f}, max {tau.max():.0f} sweeps, from noise",
    )
    error = float(pairs.standard_error)
    observed = args.images.train.sum((1, 2)).mean()
    common.print_row(
        "ink, of model and data",
        f"{float(pairs.value):.2f} +- {error:.2f}, {observed:.2f}",
    )


def pictures(
    machine: FactorGraph, fit: ebmpp.FitResult, args: argparse.Namespace, samples: Any
) -> dict[str, Any]:
    """Draw real images beside samples, the filters, and the history of training."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.9), layout="constrained")
    means = machine.mean(fit.params, samples, "v")[:_SHOWN]
    images = {
        "real images, held out": args.images.held_out[:_SHOWN],
        f"samples: mean of v given h, {_SWEEPS} sweeps from noise": means,
    }
    common.panels(axes, images, ncols=8)
    filters = ebmpp.plots.plot_units(np.asarray(fit.params["v:h"])[:, 0], ncols=8)
    filters.set_title("filters", fontsize=10)
    return {
        "samples": figure,
        "filters": filters.figure,
        "history": common.plot_training(fit),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate, draw, save."""
    parser = common.options(__doc__, "demo")
    common.training_options(parser, steps=1500, rate=0.03)
    digit_images.option(parser)
    parser.add_argument("--filters", type=int, default=40)
    parser.add_argument("--window", type=int, default=5, help="side of a filter")
    parser.add_argument(
        "--pool", type=int, default=2, help="side of a pooled cell; 1 for no pooling"
    )
    parser.add_argument(
        "--unbiased-steps", type=int, default=20, help="final unbiased steps"
    )
    parser.add_argument(
        "--temperatures", type=int, default=2000, help="of annealed importance sampling"
    )
    least = {
        "filters": 1,
        "window": 1,
        "pool": 1,
        "unbiased_steps": 1,
        "temperatures": 1,
    }
    args = common.parse(parser, argv, digit_images.images, **least)
    machine = declare(args.images.train.shape[1], args.filters, args.window, args.pool)
    common.begin(args, machine)
    unbiased = UCD(num_pairs=args.num_pairs, init="persistent")
    last = Stage(
        num_steps=args.unbiased_steps,
        estimator=unbiased,
        optimizer=optax.adam(args.rate / 50),
    )
    fit = common.train(
        machine, args.images.train, args, PCD(num_chains=args.num_pairs), last=[last]
    )
    kernel = ebmpp.BlockedGibbs(machine)
    count = max(_SHOWN, args.num_pairs)
    run = common.chains(
        kernel, fit.params, args.seed + 1, warmup=_SWEEPS - 1, count=count
    )
    samples = run.get_samples()
    evaluate(machine, fit, args, samples)
    common.save_figures(args.out, pictures(machine, fit, args, samples))
    common.save(args.out / "history.nc", fit)


if __name__ == "__main__":
    main()
