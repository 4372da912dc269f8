# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Lateral weights on images of digits: restricted, semi-restricted and fully visible Boltzmann machines.

``python models/semi_restricted.py --out lateral`` trains three machines alike: one whose pixels interact
through latent units alone; the same with weights between neighbouring pixels besides (Osindero and Hinton
2008); and one without latent units, whose pixels interact each with each. All three are declared by their
factors, and the pixels are drawn in as many parts as a colouring of their pairs has colours.

Writes samples, weights, learning curves, meeting times of coupled chains, and ArviZ files; prints the
held-out log-likelihood of each by annealed importance sampling with its error, beside the exact one where the
latent units can be summed.

References: Osindero, Hinton (2008), *Modeling image patches with a directed hierarchy of Markov random
fields*; Ackley, Hinton, Sejnowski (1985), *A learning algorithm for Boltzmann machines*.
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
from ebmpp import PCD, UCD, Bernoulli, Bias, Bilinear, FactorGraph, Pairwise, exact
from ebmpp.diagnostics import style
from shared import common, digit_images

KINDS = ("restricted", "semi-restricted", "fully visible")
_EXACT_UNITS = 20  # latent units whose 2**20 states are summed in seconds
_SHOWN = 40
_MONITORED = 300  # rows of the learning curve


class Machine(NamedTuple):
    """A machine, how it was trained, and what is told of it."""

    graph: FactorGraph
    fit: ebmpp.Fit
    samples: np.ndarray
    meeting: MCMC


# -- declaration -----------------------------------------------------------------------------------


def lattice(side: int, neighbours: int) -> nx.Graph:
    """Pixels and their 4 or 8 nearest neighbours."""
    line = nx.path_graph(side)
    return (nx.cartesian_product if neighbours == 4 else nx.strong_product)(line, line)


def declare(kind: str, side: int, latent: int, neighbours: int) -> FactorGraph:
    """One of :data:`KINDS`."""
    blocks, factors = {"v": Bernoulli((side, side))}, [Bias("v")]
    if kind == "fully visible":
        return FactorGraph(blocks, factors=[*factors, Pairwise("v", nx.complete_graph(side * side))])
    factors += [Bias("h"), Bilinear("v", "h")]
    if kind == "semi-restricted":
        factors.append(Pairwise("v", lattice(side, neighbours)))
    return FactorGraph(blocks, {"h": Bernoulli(latent)}, factors)


# -- training and evaluation -----------------------------------------------------------------------


def make(kind: str, args: argparse.Namespace) -> Machine:
    """Declare, train, draw, couple."""
    side = args.images.train.shape[1]
    graph = declare(kind, side, args.latent, args.neighbours)
    count = sum(np.prod(s.shape, dtype=int) for s in jax.tree.leaves(graph.param_shapes))
    print(f"-- {kind}: {count} params, a sweep in {len(graph.layers)} parts")
    chosen: Any = PCD(num_chains=args.num_pairs, k=args.k)
    if args.estimator == "ucd":
        chosen = UCD(num_pairs=args.num_pairs, start="persistent")
    parts = {"train": args.images.train, "held_out": args.images.held_out}
    units = None if side < 16 else 20  # of each row: a unit costs two free energies
    monitors = {
        f"pseudo_log_likelihood_{part}": ebmpp.monitors.pseudo_log_likelihood(
            graph, rows[:_MONITORED], num_units=units, rng_key=jax.random.key(args.seed)
        )
        for part, rows in parts.items()
    }
    fit = common.train(graph, args.images.train, args, chosen, monitors=monitors)
    evaluate(graph, fit.params, args)
    kernel = ebmpp.BlockedGibbs(graph)
    drawn = common.chains(kernel, fit.params, args.seed + 1, warmup=args.sweeps - 1, count=_SHOWN)
    pairs = meet(graph, fit.params, args)
    met, tau = np.asarray(pairs.last_state.met), np.asarray(pairs.last_state.meeting_time)
    told = f", the mean of these after {tau[met].mean():.0f}" if met.any() else ""
    common.tell("coupled chains", f"{met.sum()} of {len(met)} pairs met within {args.sweeps} sweeps{told}")
    return Machine(graph, fit, np.asarray(drawn.get_samples()["v"]), pairs)


def evaluate(graph: FactorGraph, params: Any, args: argparse.Namespace) -> None:
    """The held-out log-likelihood, with its errors."""
    found = ebmpp.ais(
        graph,
        params,
        rng_key=jax.random.key(args.seed + 2),
        num_particles=args.num_pairs,
        num_temperatures=args.temperatures,
        data=args.images.train,
    )
    told = found.average_log_likelihood(args.images.held_out)
    common.tell(
        "log-likelihood, held out",
        f"{told.value:.2f} an image +- {told.standard_error:.2f} of log Z, "
        f"+- {told.row_error:.2f} of the images; {found.effective_sample_size:.0f} of {args.num_pairs} "
        "particles effective",
    )
    latent = graph.families.get("h")
    if latent is not None and latent.size <= _EXACT_UNITS and not graph.splits:
        value = float(exact.log_likelihood(graph, params, args.images.held_out).mean())
        common.tell("the same, exactly", f"{value:.2f}")


def meet(graph: FactorGraph, params: Any, args: argparse.Namespace) -> MCMC:
    """Pairs of coupled chains from noise, for as many sweeps as the samples took."""
    kernel = ebmpp.MaximalCoupling(graph)
    return common.chains(kernel, params, args.seed + 3, warmup=args.sweeps - 2, count=args.num_pairs)


# -- pictures --------------------------------------------------------------------------------------


def lateral_fields(machine: Machine) -> np.ndarray:
    """For each pixel an image of its weights to all others, ``(pixels, side, side)``."""
    family = machine.graph.families["v"]
    (factor,) = (f for f in machine.graph.factors if isinstance(f, Pairwise))
    edges = factor.edges(machine.graph.families)["v"]
    fields = np.zeros((family.size, family.size))
    fields[edges[:, 0], edges[:, 1]] = fields[edges[:, 1], edges[:, 0]] = machine.fit.params["v:v"]
    return fields.reshape(-1, *family.shape)


def weights(machine: Machine) -> Any:
    """Filters of the latent units beside the weights between pixels, as far as there are such."""
    shown = {}
    if "h" in machine.graph.families:
        filters = np.moveaxis(np.asarray(machine.fit.params["v:h"]), -1, 0)
        shown["weights of the latent units"] = filters[:64]
    if machine.graph.splits:
        fields = lateral_fields(machine)
        if len(fields) > 64:  # every so many pixels
            side, step = fields.shape[1], fields.shape[1] // 7
            fields = fields.reshape(side, side, side, side)[1::step, 1::step].reshape(-1, side, side)
        shown["weights of each pixel to the others"] = fields
    figure, axes = plt.subplots(
        1, len(shown), figsize=(5 * len(shown), 4.8), layout="constrained", squeeze=False
    )
    for ax, (title, images) in zip(axes[0], shown.items(), strict=True):
        ebmpp.plots.plot_units(images, ncols=5 if len(images) <= 25 else 8, ax=ax)
        ax.set_title(title, fontsize=10)
    return figure


def compare(machines: dict[str, Machine], args: argparse.Namespace) -> dict[str, Any]:
    """Samples, learning curves and meeting times of all machines."""
    samples, axes = plt.subplots(2, 2, figsize=(8, 5.6), layout="constrained")
    shown = {"real images, held out": args.images.held_out[:_SHOWN]}
    shown |= {f"{kind}: states, {args.sweeps} sweeps from noise": m.samples for kind, m in machines.items()}
    common.panels(axes.flat, shown, fontsize=9, ncols=8)
    curves, axes = plt.subplots(1, 3, figsize=(11, 3.3), layout="constrained", sharey=True)
    for ax, (kind, m) in zip(axes, machines.items(), strict=True):
        for index, (part, label) in enumerate((("train", "training"), ("held_out", "held out"))):
            curve = m.fit.history[f"pseudo_log_likelihood_{part}"]
            ax.plot(m.fit.history.monitor_step, curve, label=label, **style.look(index))
        ax.set_title(kind, fontsize=10)
        ax.set_xlabel("step")
        style.tidy(ax)
    axes[0].set_ylabel("pseudo-log-likelihood an image (nats)")
    style.legend_below(curves, axes, ncols=2)
    meeting, ax = plt.subplots(figsize=(6.6, 3.6), layout="constrained")
    for kind, m in machines.items():
        state = m.meeting.last_state
        ebmpp.plots.plot_meeting_times(state.meeting_time, 1, state.met, ax=ax, label=kind)
    ax.set_title("share of coupled pairs that have not met", fontsize=10)
    return {"samples": samples, "learning_curves": curves, "meeting_times": meeting}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = common.options(__doc__, "demo")
    common.training_options(parser, steps=2500, rate=0.015)
    digit_images.option(parser)
    add = parser.add_argument
    add("--latent", type=int, default=20, help=f"latent units; up to {_EXACT_UNITS} evaluate exactly too")
    add("--neighbours", type=int, choices=(4, 8), default=8, help="of a pixel, in the semi-restricted one")
    add("--estimator", choices=("pcd", "ucd"), default="pcd")
    add("--k", type=int, default=1, help="sweeps a step of pcd")
    add("--sweeps", type=int, default=1000, help="before a sample is shown")
    add("--temperatures", type=int, default=1000, help="of annealed importance sampling")
    args = common.parse(parser, argv, latent=1, k=1, sweeps=3, temperatures=3, num_pairs=3)
    with common.refusals(parser):
        args.images = digit_images.images(args.data, args.seed)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate, draw, save."""
    args = parse(argv)
    machines = {kind: make(kind, args) for kind in KINDS}
    for kind, m in machines.items():
        folder = args.out / kind.replace(" ", "_")
        common.save_figures(folder, {"weights": weights(m)})
        common.save(folder / "history.nc", m.fit)
    common.save_figures(args.out, compare(machines, args))


if __name__ == "__main__":
    main()
