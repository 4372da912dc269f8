# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Picture of likelihoods along training."""

from typing import Any

from matplotlib import pyplot as plt
import numpy as np

from ebmpp.contrib import figures
from ebmpp.diagnostics import style

_TICKS = (-82, -84, -86, -90, -95, -100, -110, -120, -150, -200, -250, -300, -400, -500)


def draw(
    curve: list[dict[str, float]], numbers: dict[str, Any], epochs_per_step: float
) -> Any:
    """Draw likelihoods of training and held-out rows along training, and of the final
    mean of iterates.

    :param curve: points with step, seconds, likelihoods and the standard error of log
        Z.
    :param numbers: numbers of :func:`shared.rbm_likelihood.evaluate`.
    """
    figure, ax = plt.subplots(figsize=(7, 4.8), layout="constrained")
    epochs = np.array([p["step"] for p in curve]) * epochs_per_step
    errors = [2 * p["standard_error"] for p in curve]
    last = numbers["particles"]
    marks = {"capsize": 2, "linewidth": 1.4, "markersize": 4}
    for index, (part, label) in enumerate(
        (("train", "training rows"), ("held_out", "held-out rows"))
    ):
        values = [p[part] for p in curve]
        look = style.look(index) | {"marker": style.marker(index)} | marks
        ax.errorbar(epochs, values, errors, label=label, **look)
    beyond = epochs[-1] * np.array([1.04, 1.08, 1.12])
    sides = [numbers[side]["pooled"] for side in ("forward", "reverse")]
    methods = ("annealed forward", "by particle systems", "annealed in reverse")
    for x, method, value, mark in zip(
        beyond, methods, (sides[0], last, sides[1]), "vo^", strict=True
    ):
        look = {
            "color": style.COLORS[3],
            "linestyle": "none",
            "marker": mark,
            "markerfacecolor": "none",
        }
        label = f"held out, mean of iterates, {method}: {value['held_out']:.2f}"
        ax.errorbar(
            x,
            value["held_out"],
            2 * value["standard_error"],
            label=label,
            capsize=2,
            **look,
        )
    values = [p[part] for p in curve for part in ("train", "held_out")]
    top = max(*values, last["held_out"]) + 2
    low = min(values)
    figures.below(ax, top, [t for t in _TICKS if low <= t < top])
    ax.set_ylim(top - 1.15 * (top - low), top - 1)
    ax.set(
        xlabel="epoch",
        ylabel=f"log-likelihood per image (nats),\nlogarithmic below {top:.0f}",
    )
    title = "along training: by small particle systems, too large on average;"
    ax.set_title(
        f"{title}\nbeyond it the model itself; bars: two standard errors of log Z",
        fontsize=9,
    )
    minutes = curve[-1]["seconds"] / 60 / epochs[-1]
    above = ax.secondary_xaxis(
        "top", functions=(lambda x: x * minutes, lambda x: x / minutes)
    )
    above.set_xlabel("minutes, with the time of these points", fontsize=9)
    style.tidy(ax, legend=True, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    return figure
