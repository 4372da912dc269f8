# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The Ising model on a square lattice: energy and magnetisation against Onsager, and meeting times.

``python models/ising.py --out ising`` runs 100 chains on a 64x64 torus at couplings
below and above the critical one, and pairs of coupled chains where they meet. It writes
the curves, states of the chains, the survival of meeting times, and an ArviZ file.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
import networkx as nx
import numpy as np
from scipy.special import ellipk
import xarray as xr

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import FactorGraph, Spin
from ebmpp.contrib import figures
from ebmpp.diagnostics import style
from shared import common

CRITICAL = 0.5 * np.log(1 + np.sqrt(2))
_COUPLINGS = (0.2, 0.3, 0.38, 0.42, 0.46, 0.5, 0.6, 0.7)
_SNAPSHOTS = {"disordered": 0.3, "critical": CRITICAL, "ordered": 0.6}
_COUPLED = (0.1, 0.2, 0.3, 0.36)
_MOST_SWEEPS = 5000


class Estimate(NamedTuple):
    """Means over chains at one coupling, and their standard errors."""

    magnetization: float
    magnetization_error: float
    energy: float
    energy_error: float


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    parser = common.options(__doc__, "ising")
    add = parser.add_argument
    add("--side", type=int, default=64, help="side of the lattice")
    add("--num-chains", type=int, default=100)
    add(
        "--sweeps",
        type=int,
        default=1000,
        help="per coupling; the first half is warm-up",
    )
    add("--num-pairs", type=int, default=100, help="pairs of coupled chains")
    return common.parse(parser, argv, side=3, num_chains=2, sweeps=2, num_pairs=2)


def declare(side: int) -> FactorGraph:
    """Declare a torus of spins with one coupling for all edges and no field."""
    lattice = nx.grid_2d_graph(side, side, periodic=True)
    return FactorGraph.from_networkx(lattice, family=Spin, shared=True, bias=False)


# -- exact results -------------------------------------------------------------------


def spontaneous_magnetization(coupling: Any) -> np.ndarray:
    """Return the magnetisation of the infinite lattice (Yang 1952): 0 below the
    critical coupling."""
    coupling = np.asarray(coupling, float)
    ordered = np.maximum(1 - np.sinh(2 * np.maximum(coupling, CRITICAL)) ** -4.0, 0)
    return np.where(coupling > CRITICAL, ordered ** (1 / 8), 0.0)


def energy_per_spin(coupling: Any) -> np.ndarray:
    """Return the energy of the infinite lattice in units of the coupling constant
    (Onsager 1944)."""
    twice = 2 * np.asarray(coupling, float)
    modulus = 2 * np.sinh(twice) / np.cosh(twice) ** 2
    rest = 2 / np.pi * (2 * np.tanh(twice) ** 2 - 1) * ellipk(modulus**2)
    return -(1 + rest) / np.tanh(twice)


# -- chains --------------------------------------------------------------------------


def run(
    ising: FactorGraph, coupling: float, args: argparse.Namespace
) -> tuple[Estimate, Any]:
    """Run chains from all spins up: below the critical temperature domains grow very slowly."""
    half = args.sweeps // 2
    params = {"x:x": jnp.asarray(coupling)}
    up = {"x": jnp.ones((args.num_chains, args.side**2))}
    mcmc = common.chains(
        ebmpp.BlockedGibbs(ising),
        params,
        args.seed,
        warmup=args.sweeps - half,
        samples=half,
        count=args.num_chains,
        init=up,
        thinning=max(1, half // 50),
        progress_bar=not args.no_progress,
    )
    x = mcmc.get_samples(group_by_chain=True)["x"]
    # one number per chain: the numbers are independent
    magnetization = jnp.abs(x.mean(-1)).mean(1)
    energy = (
        jax.lax.map(
            lambda chain: ising.energy({"x:x": jnp.ones(())}, {"x": chain}).mean(), x
        )
        / args.side**2
    )

    def error(a):
        return float(a.std(ddof=1) / np.sqrt(len(a)))

    estimate = Estimate(
        float(magnetization.mean()),
        error(magnetization),
        float(energy.mean()),
        error(energy),
    )
    return estimate, np.asarray(x[:, -1])


# a function of the module, which is compiled once
def _mean_spin(x):
    return x["x"].mean()


def meet(
    ising: FactorGraph, coupling: float, kind: str, args: argparse.Namespace
) -> Any:
    """Run pairs of coupled chains from random spins."""
    return ebmpp.unbiased_expectation(
        ising,
        {"x:x": jnp.asarray(coupling)},
        _mean_spin,
        rng_key=jax.random.key(args.seed + 1),
        num_pairs=args.num_pairs,
        coupling=kind,
        max_sweeps=_MOST_SWEEPS,
    )


# -- report --------------------------------------------------------------------------


_LABELS = {"magnetization": "magnetisation", "energy": "energy, in couplings,"}


def pictures(
    estimates: dict, states: dict, met: dict, args: argparse.Namespace
) -> dict[str, Any]:
    """Draw the curves, the states, and the meeting times."""
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.3), layout="constrained")
    fine = np.linspace(0.15, 0.75, 400)
    for ax, curve, name in (
        (axes[0], spontaneous_magnetization, "magnetization"),
        (axes[1], energy_per_spin, "energy"),
    ):
        ax.plot(
            fine,
            curve(fine),
            color=style.INK,
            linewidth=1,
            label="infinite lattice, exact",
        )
        values = [getattr(m, name) for m in estimates.values()]
        errors = [3 * getattr(m, f"{name}_error") for m in estimates.values()]
        label = f"{args.side}x{args.side}, three standard errors"
        dots = {"fmt": "o", "markersize": 4, "capsize": 2, "color": style.COLORS[1]}
        ax.errorbar(list(estimates), values, errors, label=label, **dots)
        ax.axvline(
            CRITICAL,
            color=style.FAINT,
            linewidth=0.9,
            linestyle=":",
            label="critical coupling",
        )
        ax.set_xlabel("coupling constant")
        ax.set_ylabel(f"{_LABELS[name]} per spin")
        style.tidy(ax)
    figures.legend_below(figure, axes, ncols=3)
    survival, ax = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    couplings, kinds = (list(dict.fromkeys(names)) for names in zip(*met, strict=True))
    # colours by coupling constant, dashes by coupling
    for (
        coupling,
        kind,
    ), pairs in met.items():
        look: dict[str, Any] = {"color": style.COLORS[couplings.index(coupling)]}
        look["linestyle"] = style.dashes(kinds.index(kind))
        label = f"{coupling:g}, {kind}"
        ebmpp.plots.plot_meeting_times(
            pairs.meeting_time, pairs.lag, pairs.met, ax=ax, label=label, **look
        )
    ax.set_xlim(1, None)
    ax.set_xscale("log")
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "title_fontsize": 8}
    style.tidy(ax, legend=True, title="coupling constant,\npairs coupled by", **beside)
    ax.set_title(f"share of {args.num_pairs} pairs that have not met", fontsize=10)
    return {
        "onsager": figure,
        "states": snapshots(states, args.side),
        "meeting_times": survival,
    }


def snapshots(states: dict, side: int) -> Any:
    """Draw one state at each of three couplings."""
    figure, axes = plt.subplots(1, 3, figsize=(8.6, 3.1), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    for ax, (name, coupling) in zip(axes, _SNAPSHOTS.items(), strict=True):
        state = states[coupling][0].reshape(side, side)
        ax.imshow(state, cmap="gray", vmin=-1, vmax=1)
        ax.set_title(f"coupling {coupling:.4g}, {name}", fontsize=10)
        ax.set(xticks=[], yticks=[])
    return figure


def tree(estimates: dict, met: dict) -> xr.DataTree:
    """Return the estimates and the meeting times, for ArviZ."""
    couplings = list(estimates)
    columns = {
        name: ("coupling", [getattr(m, name) for m in estimates.values()])
        for name in Estimate._fields
    }
    result = xr.DataTree(xr.Dataset(columns, {"coupling": couplings}))
    cases = [f"{c:g} {kind}" for c, kind in met]
    times = np.stack([np.asarray(pairs.meeting_time) for pairs in met.values()])
    result["meeting"] = xr.DataTree(
        xr.Dataset({"meeting_time": (("case", "pair"), times)}, {"case": cases})
    )
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Sample, couple, draw, save."""
    args = parse(argv)
    ising = declare(args.side)
    common.begin(args, ising)
    estimates = {}
    states = {}
    print("coupling  magnetisation (infinite lattice)  energy (infinite lattice)")
    for coupling in _COUPLINGS:
        estimate, states[coupling] = run(ising, coupling, args)
        estimates[coupling] = estimate
        print(
            f"{coupling:8.2f}  {estimate.magnetization:.4f} +- "
            f"{estimate.magnetization_error:.4f} "
            f"({spontaneous_magnetization(coupling):.4f})      {estimate.energy:.4f} "
            f"+- {estimate.energy_error:.4f} ({energy_per_spin(coupling):.4f})"
        )
    states[CRITICAL] = run(ising, CRITICAL, args)[1]
    met = {
        (c, kind): meet(ising, c, kind, args)
        for c in _COUPLED
        for kind in ("maximal", "common")
    }
    for (coupling, kind), pairs in met.items():
        times = pairs.meeting_time[pairs.met]
        mean = (
            f"mean {times.mean():.1f}, max {times.max():.0f}" if len(times) else "none"
        )
        print(
            f"coupling {coupling:g}, {kind}: {int(pairs.met.sum())} of "
            f"{args.num_pairs} pairs met, {mean}"
        )
    common.save_figures(args.out, pictures(estimates, states, met, args))
    common.save(args.out / "ising.nc", tree(estimates, met))


if __name__ == "__main__":
    main()
