# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Difference-of-convex programming: exact log-likelihood along training on two small data sets.

Four latent units, all rows per step, plain gradient steps, the same starts for every
method: CD, PCD and the centered gradient with 12 sweeps per step against S-DCP and
CS-DCP with 3 inner steps of 4 sweeps each. An epoch is one pass over the data and costs
12 sweeps for every method. CD-4 with three plain steps per epoch is the control. The
log-likelihood is the exact mean over rows. Two more methods run the batch algorithms as
they are printed: Algorithm 3 adds up its step over the inner steps, unlike Algorithm 2.
Algorithm 4 takes its batch means of the latents once for all inner steps, but its
gradients relative to offsets that move between them.

``python benchmarks/papers/dc_programming.py`` takes a few minutes;
``--trials 25 --epochs 50000`` is the paper's setting. Trials run side by side in one
compiled loop.

**References**

1. Upadhya, Sastry (2017), *Learning RBM with a DC programming approach*, section 4,
   figures 1 and 2.
"""

import argparse
from collections.abc import Sequence
import dataclasses
from functools import partial
import time
from typing import Any, NamedTuple

import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row

import jax
from jax import Array, lax
import jax.numpy as jnp

import ebmpp
from ebmpp import CD, PCD, Bernoulli, FactorGraph, exact
from ebmpp.contrib import CSDCP, SDCP
from ebmpp.core import random
from ebmpp.estimators import Batch, Centered, Estimator
from ebmpp.estimators.base import Estimate


class Panel(NamedTuple):
    """A data set and a learning rate."""

    title: str
    rows: np.ndarray
    rate: float

    @property
    def best(self) -> float:
        """The highest mean log-likelihood: minus the entropy of the rows."""
        count = np.unique(self.rows, axis=0, return_counts=True)[1]
        return float((count * np.log(count / count.sum())).sum() / count.sum())


_BAS = ebmpp.data.bars_and_stripes(3)
_BAR = ebmpp.data.shifting_bar(9, 1)
PANELS = {
    "bas": Panel("bars and stripes 3x3, 16 rows, rate 0.3", _BAS, 0.3),
    "bas14": Panel(
        "bars and stripes 3x3, 14 distinct rows, rate 0.3", np.unique(_BAS, axis=0), 0.3
    ),
    "bar3": Panel("shifting bar (9, 1), rate 0.3", _BAR, 0.3),
    "bar5": Panel("shifting bar (9, 1), rate 0.5", _BAR, 0.5),
}
_TICKS = (-2.2, -2.3, -2.4, -2.6, -2.8, -3, -3.5, -4, -5, -6, -8, -12)


@dataclasses.dataclass(frozen=True)
class Algorithm3(SDCP):
    """S-DCP whose step is the sum of the batch's gradients up to its inner step."""

    def init_state(
        self, graph: FactorGraph, params: Any, data: Any, batch: int, key: Array
    ) -> Any:
        """Start with an empty sum."""
        return super().init_state(graph, params, data, batch, key), jax.tree.map(
            jnp.zeros_like, params
        )

    def estimate(
        self, graph: FactorGraph, params: Any, state: Any, batch: Batch, key: Array
    ) -> Estimate:
        """Return the sum that includes this inner step."""
        inner, total = state
        step = super().estimate(graph, params, inner, batch, key)
        first = inner.inner == 0
        total = jax.tree.map(
            lambda s, g: jnp.where(first, g, s + g), total, step.gradient
        )
        return Estimate(total, (step.state, total), step.metrics)


@dataclasses.dataclass(frozen=True)
class Algorithm4(Centered):
    r"""CS-DCP of a restricted Boltzmann machine whose positive phase keeps the offsets
    of inner step 0.

    Those of the negative phase move. With :math:`m = E[v]` and :math:`n = E[h]` given
    the rows, the centered gradient of the weights differs from that of
    :class:`Centered` by the difference of :math:`(m - \mu)(n - \lambda)^T` at the
    offsets of this inner step and of the first. The biases follow.
    """

    def init_state(
        self, graph: FactorGraph, params: Any, data: Any, batch: int, key: Array
    ) -> Any:
        """Start with the offsets of inner step 0."""
        state = super().init_state(graph, params, data, batch, key)
        return state, state.offsets

    def estimate(
        self, graph: FactorGraph, params: Any, state: Any, batch: Batch, key: Array
    ) -> Estimate:
        """Return the direction of :class:`Centered`, corrected by the old offsets."""
        inner, first = state
        step = super().estimate(graph, params, inner, batch, key)
        now = step.state.offsets
        first = jax.tree.map(lambda a, b: jnp.where(inner.step == 0, a, b), now, first)
        mean = {b: -step.state.inner.positive[b] for b in ("v", "h")}

        def product(o):
            return jnp.outer(mean["v"] - o["v"], mean["h"] - o["h"])

        extra = product(now) - product(first)
        gradient = dict(step.gradient)
        gradient["v:h"] = gradient["v:h"] + extra
        gradient["v"] = gradient["v"] - extra @ now["h"]
        gradient["h"] = gradient["h"] - extra.T @ now["v"]
        return Estimate(gradient, (step.state, first), step.metrics)


class Method(NamedTuple):
    """A way to train."""

    label: str
    estimator: Estimator
    steps: int
    """Steps per epoch."""


METHODS = {
    "cd": Method("CD-12", CD(k=12), 1),
    "cd4": Method("CD-4, 3 steps per epoch", CD(k=4), 3),
    "pcd": Method("PCD-12", PCD(k=12), 1),  # as many chains as rows
    "cg": Method("centered gradient, CD-12", Centered(CD(k=12)), 1),
    "sdcp": Method("S-DCP, d = 3, K' = 4", SDCP(d=3, k=4), 3),
    "csdcp": Method("CS-DCP, d = 3, K' = 4", CSDCP(d=3, k=4), 3),
    "alg3": Method("S-DCP, Algorithm 3 as printed", Algorithm3(d=3, k=4), 3),
    "alg4": Method("CS-DCP, Algorithm 4 as printed", Algorithm4(SDCP(d=3, k=4)), 3),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__, METHODS)
    add = parser.add_argument
    add("--panels", nargs="+", choices=tuple(PANELS), default=["bas", "bar3", "bar5"])
    add("--trials", type=int, default=5)
    add("--epochs", type=int, default=10_000, help="cut to a multiple of --points")
    add(
        "--points",
        type=int,
        default=200,
        help="values of the exact log-likelihood along the way",
    )
    args = records.parse(parser, argv, "trials", "epochs", "points")
    args.points = min(args.points, args.epochs)
    args.records = Records(args.out, "dc_programming", args.name)
    return args


def declare() -> FactorGraph:
    """Return a 9-4 restricted Boltzmann machine."""
    return ebmpp.layered(v=Bernoulli(9), h=Bernoulli(4))


@partial(jax.jit, static_argnums=(0, 1, 4, 5))
def train(
    rbm: FactorGraph,
    estimator: Estimator,
    rows: Array,
    rate: Array,
    points: int,
    spacing: int,
    keys: Array,
) -> Array:
    """Return the rows' mean log-likelihood at the start and after each ``every`` steps,
    a row per trial.

    Weights start at N(0, 0.01^2), visible biases at the rows' base rates, latent ones
    at 0.
    """
    batch = Batch.uniform({"v": rows})

    def mean(params):
        return exact.log_likelihood(rbm, params, rows).mean()

    def step(carry: Any, index: Array, key: Array) -> tuple[Any, None]:
        params, state = carry
        result = estimator.estimate(
            rbm, params, state, batch, random.fold_in(key, index, 2)
        )
        return (
            jax.tree.map(lambda p, g: p - rate * g, params, result.gradient),
            result.state,
        ), None

    def trial(rng_key: Array) -> Array:
        key = random.key_pair(jax.random.fold_in(rng_key, 1))
        params = {**rbm.init(rng_key, rows), "v": jax.scipy.special.logit(rows.mean(0))}
        state = estimator.init_state(
            rbm, params, batch.rows, len(rows), random.fold_in(key, 0, 1)
        )

        def interval(carry: Any, start: Array) -> tuple[Any, Array]:
            carry, _ = lax.scan(
                lambda c, i: step(c, i, key), carry, start + jnp.arange(spacing)
            )
            return carry, mean(carry[0])

        _, values = lax.scan(interval, (params, state), spacing * jnp.arange(points))
        return jnp.concatenate([mean(params)[None], values])

    return jax.vmap(trial)(keys)


def run(name: str, method: str, args: argparse.Namespace) -> None:
    """Run and store all trials of a method on a panel."""
    panel = PANELS[name]
    label, estimator, steps = METHODS[method]
    start = time.monotonic()
    spacing = args.epochs // args.points
    if isinstance(estimator, PCD):
        estimator = dataclasses.replace(estimator, num_chains=len(panel.rows))
    # the same starts for every method
    keys = jax.random.split(jax.random.key(0), args.trials)
    rows = jnp.asarray(panel.rows)
    curves = np.asarray(
        train(
            declare(), estimator, rows, panel.rate, args.points, spacing * steps, keys
        )
    )
    mean = curves.mean(0)
    last = curves[:, -1]
    epochs = spacing * np.arange(args.points + 1)
    near = np.flatnonzero(mean >= panel.best / 0.9)
    points = np.unique(np.linspace(0, args.points, 60).astype(int))
    row: Row = {
        "panel": name,
        "method": label,
        "trials": args.trials,
        "epochs": int(epochs[-1]),
        "best_possible": round(panel.best, 3),
        "last_mean": round(float(last.mean()), 3),
        "last_std": round(float(last.std()), 3),
        "highest_mean": round(float(mean.max()), 3),
        "epochs_until_mean_within_10_percent": int(epochs[near[0]])
        if len(near)
        else None,
        "seconds": round(time.monotonic() - start, 1),
        "epoch": epochs[points].tolist(),
        "mean": mean[points].round(3).tolist(),
        "std": curves.std(0)[points].round(3).tolist(),
    }
    args.records.save(f"{name}-{method}", 0, row)


# -- the report ----------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """Return the numbers as lines of text."""
    lines = [
        f"{'panel':<7}{'method':<32}{'best':>8}{'last mean':>11}{'std':>7}{'within 10 %':>13}"
    ]
    for row in rows:
        reached = row["epochs_until_mean_within_10_percent"]
        lines.append(
            f"{row['panel']:<7}{row['method']:<32}{row['best_possible']:>8.3f}"
            f"{row['last_mean']:>11.3f}{row['last_std']:>7.3f}"
            f"{'-' if reached is None else reached:>13}"
        )
    return "\n".join(lines)


def draw(rows: list[Row], path: Any) -> None:
    """Draw means over trials with bands of one standard deviation against the epoch."""
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    labels = [method.label for method in METHODS.values()]
    figure, axes = style.grid(len(panels), (4.6, 4.0))
    for ax, name in zip(axes, panels, strict=True):
        panel = PANELS[name]
        subset = [row for row in rows if row["panel"] == name]
        for row in subset:
            epoch, mean, spread = (np.array(row[n]) for n in ("epoch", "mean", "std"))
            look = style.look(labels.index(row["method"])) | {
                "linewidth": 1.3,
                "label": row["method"],
            }
            ax.plot(epoch / 1000, mean, **look)
            band = {"color": look["color"], "alpha": 0.12, "linewidth": 0}
            ax.fill_between(epoch / 1000, mean - spread, mean + spread, **band)
        low = min(min(row["mean"]) for row in subset)
        pictures.likelihoods(ax, panel.best, low, _TICKS, "best possible")
        ax.set(
            xlabel="thousands of epochs, of 12 sweeps each",
            ylabel="log-likelihood per row (nats)",
        )
        ax.set_title(panel.title, fontsize=9)
    title = f"four latent units; means of {rows[0]['trials']} trials, and one standard deviation"
    pictures.save(figure, axes, path, title)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    for name in [] if args.draw else args.panels:
        for method in args.only:
            run(name, method, args)
    result = args.records.summarize(
        f"{panel}-{method}" for panel in PANELS for method in METHODS
    )
    print(table(result["runs"]))
    draw(result["runs"], args.records.summary.with_suffix(".png"))


if __name__ == "__main__":
    main()
