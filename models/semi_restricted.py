# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Lateral weights on images of digits: restricted, semi-restricted and fully visible
Boltzmann machines.

``python models/semi_restricted.py --out lateral`` trains three machines by the same
options: a restricted one, a semi-restricted one with weights between neighbouring
pixels (Osindero and Hinton 2008), and a fully visible one with weights between all
pixels and no latent units. Pixels are drawn in as many parts as the colouring of their
pairs has colours.

The program writes samples, weights, learning curves, meeting times of coupled chains,
and ArviZ files. It prints the held-out log-likelihood by annealed importance sampling
with its error, beside the exact one if the latent units can be summed.

References: Osindero, Hinton (2008), *Modeling image patches with a directed hierarchy
of Markov random fields*; Ackley, Hinton, Sejnowski (1985), *A learning algorithm for
Boltzmann machines*.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
import networkx as nx
import numpy as np
from numpyro.infer import MCMC

import jax

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, FactorGraph, Pairwise, exact
from ebmpp.contrib import figures
from ebmpp.diagnostics import style
from shared import common, digit_images

KINDS = ("restricted", "semi-restricted", "fully visible")
_EXACT_UNITS = 20  # latent units whose 2**20 states are summed in seconds
_SHOWN = 40
_MONITORED = 300  # rows of the learning curve


class Machine(NamedTuple):
    """A trained machine, its held-out log-likelihood, samples and coupled chains."""

    graph: FactorGraph
    fit: ebmpp.FitResult
    log_likelihood: float
    samples: np.ndarray
    meeting: MCMC


# -- declaration ---------------------------------------------------------------------


def lattice(side: int, neighbours: int) -> nx.Graph:
    """Return the lattice of pixels and their 4 or 8 nearest neighbours."""
    line = nx.path_graph(side)
    return (nx.cartesian_product if neighbours == 4 else nx.strong_product)(line, line)


def declare(kind: str, side: int, latent: int, neighbours: int) -> FactorGraph:
    """Declare one of :data:`KINDS`."""
    blocks = {"v": Bernoulli((side, side))}
    factors = [Bias("v")]
    if kind == "fully visible":
        return FactorGraph(
            blocks, factors=[*factors, Pairwise("v", nx.complete_graph(side * side))]
        )
    factors += [Bias("h"), Bilinear("v", "h")]
    if kind == "semi-restricted":
        factors.append(Pairwise("v", lattice(side, neighbours)))
    return FactorGraph(blocks, {"h": Bernoulli(latent)}, factors)


# -- training and evaluation ---------------------------------------------------------


def build(kind: str, args: argparse.Namespace) -> Machine:
    """Declare, train, sample and couple a machine."""
    side = args.images.train.shape[1]
    graph = declare(kind, side, args.latent, args.neighbours)
    count = sum(
        np.prod(s.shape, dtype=int) for s in jax.tree.leaves(graph.param_shapes)
    )
    print(f"-- {kind}: {count} params, a sweep in {len(graph.layers)} parts")
    estimator = common.pcd_or_ucd(args, "persistent", k=args.k)
    parts = {"train": args.images.train, "held_out": args.images.held_out}
    # a unit of a row costs two free energies
    num_rows = _MONITORED if side < 16 else _MONITORED // 10
    monitors = {
        f"pseudo_log_likelihood_{part}": ebmpp.monitors.pseudo_log_likelihood(
            graph, rows[:num_rows]
        )
        for part, rows in parts.items()
    }
    fit = common.train(graph, args.images.train, args, estimator, monitors=monitors)
    value = evaluate(graph, fit.params, args)
    kernel = ebmpp.BlockedGibbs(graph)
    samples = common.chains(
        kernel, fit.params, args.seed + 1, warmup=args.sweeps - 1, count=_SHOWN
    )
    pairs = meet(graph, fit.params, args)
    met = np.asarray(pairs.last_state.met)
    tau = np.asarray(pairs.last_state.meeting_time)
    mean = f", after {tau[met].mean():.0f} on average" if met.any() else ""
    common.print_row(
        "coupled chains",
        f"{met.sum()} of {len(met)} pairs met within {args.sweeps} sweeps{mean}",
    )
    return Machine(graph, fit, value, np.asarray(samples.get_samples()["v"]), pairs)


def evaluate(graph: FactorGraph, params: Any, args: argparse.Namespace) -> float:
    """Print the held-out log-likelihood with its errors, and return it."""
    ais = ebmpp.ais(
        graph,
        params,
        rng_key=jax.random.key(args.seed + 2),
        num_particles=args.num_pairs,
        num_temperatures=args.temperatures,
        data=args.images.train,
    )
    value = ais.average_log_likelihood(args.images.held_out)
    common.print_row(
        "log-likelihood, held out",
        f"{value.value:.2f} per image, +- {value.row_error:.2f} of the images, "
        f"{common.describe_ais(ais)}",
    )
    latent = graph.families.get("h")
    if latent is not None and latent.size <= _EXACT_UNITS and not graph.splits:
        exact_value = float(
            exact.log_likelihood(graph, params, args.images.held_out).mean()
        )
        common.print_row("the same, exactly", f"{exact_value:.2f}")
    return value.value


def meet(graph: FactorGraph, params: Any, args: argparse.Namespace) -> MCMC:
    """Run pairs of coupled chains from noise for as many sweeps as the samples took."""
    kernel = ebmpp.MaximalCoupling(graph)
    return common.chains(
        kernel, params, args.seed + 3, warmup=args.sweeps - 2, count=args.num_pairs
    )


# -- pictures ------------------------------------------------------------------------


def lateral_fields(machine: Machine) -> np.ndarray:
    """Return an image of each pixel's weights to all others, ``(pixels, side, side)``."""
    family = machine.graph.families["v"]
    (factor,) = (f for f in machine.graph.factors if isinstance(f, Pairwise))
    edges = factor.edges(machine.graph.families)["v"]
    fields = np.zeros((family.size, family.size))
    fields[edges[:, 0], edges[:, 1]] = fields[edges[:, 1], edges[:, 0]] = (
        machine.fit.params["v:v"]
    )
    return fields.reshape(-1, *family.shape)


def weights(machine: Machine) -> Any:
    """Draw the weights of latent units and between pixels."""
    images = {}
    if "h" in machine.graph.families:
        filters = np.moveaxis(np.asarray(machine.fit.params["v:h"]), -1, 0)
        images["weights of the latent units"] = filters[:64]
    if machine.graph.splits:
        fields = lateral_fields(machine)
        if len(fields) > 64:  # a part of the pixels
            side = fields.shape[1]
            step = fields.shape[1] // 7
            fields = fields.reshape(side, side, side, side)[1::step, 1::step].reshape(
                -1, side, side
            )
        images["weights of each pixel to the others"] = fields
    figure, axes = plt.subplots(
        1,
        len(images),
        figsize=(5 * len(images), 4.8),
        layout="constrained",
        squeeze=False,
    )
    for ax, (title, rows) in zip(axes[0], images.items(), strict=True):
        ebmpp.plots.plot_units(rows, ncols=5 if len(rows) <= 25 else 8, ax=ax)
        ax.set_title(title, fontsize=10)
    return figure


def compare(machines: dict[str, Machine], args: argparse.Namespace) -> dict[str, Any]:
    """Draw samples, learning curves and meeting times of all machines."""
    samples, axes = plt.subplots(2, 2, figsize=(8, 5.6), layout="constrained")
    images = {"real images, held out": args.images.held_out[:_SHOWN]}
    images |= {
        f"{kind}: {m.log_likelihood:.1f} nats per held-out image": m.samples
        for kind, m in machines.items()
    }
    common.panels(axes.flat, images, fontsize=9, ncols=8)
    curves, axes = plt.subplots(
        1, 3, figsize=(11, 3.3), layout="constrained", sharey=True
    )
    for ax, (kind, m) in zip(axes, machines.items(), strict=True):
        for index, (part, label) in enumerate(
            (("train", "training"), ("held_out", "held out"))
        ):
            curve = m.fit.history[f"pseudo_log_likelihood_{part}"]
            ax.plot(m.fit.history.monitor_step, curve, label=label, **style.look(index))
        ax.set_title(kind, fontsize=10)
        ax.set_xlabel("step")
        style.tidy(ax)
    axes[0].set_ylabel("pseudo-log-likelihood per image (nats)")
    figures.legend_below(curves, axes, ncols=2)
    meeting, ax = plt.subplots(figsize=(6.6, 3.6), layout="constrained")
    for kind, m in machines.items():
        state = m.meeting.last_state
        ebmpp.plots.plot_meeting_times(
            state.meeting_time, 1, state.met, ax=ax, label=kind
        )
    ax.set_title("share of coupled pairs that have not met", fontsize=10)
    return {"samples": samples, "learning_curves": curves, "meeting_times": meeting}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    parser = common.options(__doc__, "demo")
    common.training_options(parser, steps=2500, rate=0.015)
    digit_images.option(parser)
    add = parser.add_argument
    add(
        "--latent",
        type=int,
        default=20,
        help=f"latent units; up to {_EXACT_UNITS} evaluate exactly too",
    )
    add(
        "--neighbours",
        type=int,
        choices=(4, 8),
        default=8,
        help="neighbours of a pixel in the semi-restricted machine",
    )
    add("--estimator", choices=("pcd", "ucd"), default="pcd")
    add("--k", type=int, default=1, help="sweeps per step of pcd")
    add("--sweeps", type=int, default=1000, help="sweeps of a sample")
    add(
        "--temperatures", type=int, default=1000, help="of annealed importance sampling"
    )
    least = {"latent": 1, "k": 1, "sweeps": 3, "temperatures": 3, "num_pairs": 3}
    return common.parse(parser, argv, digit_images.images, **least)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate, draw, save."""
    args = parse(argv)
    machines = {kind: build(kind, args) for kind in KINDS}
    for kind, m in machines.items():
        folder = args.out / kind.replace(" ", "_")
        common.save_figures(folder, {"weights": weights(m)})
        common.save(folder / "history.nc", m.fit)
    common.save_figures(args.out, compare(machines, args))


if __name__ == "__main__":
    main()
