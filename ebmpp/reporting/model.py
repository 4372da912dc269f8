# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sections on the model itself: declaration, latent units, and training."""

import pandas as pd

from ebmpp.diagnostics.plots import panels, plot_history
from ebmpp.diagnostics.style import COLORS, grid, tidy
from ebmpp.evaluate.activity import unit_activity
from ebmpp.graph.display import card, factor_grid
from ebmpp.reporting.page import Section
from ebmpp.reporting.subject import Subject

_STATUS_COLORS = {
    "active": COLORS[0],
    "constant": COLORS[5],
    "off": COLORS[1],
    "on": COLORS[3],
}


def declaration(section: Section, subject: Subject) -> None:
    """Show the declaration, its drawing, and all sizes."""
    graph = subject.graph
    section.parts.append(("code", repr(graph), ""))
    layers = graph.block_layers
    tallest = max(map(len, layers)) + 0.4
    figure, (ax,) = grid(1, (2.7 * max(1, len(layers)) + 0.6, 1.9 * tallest))
    graph.plot(ax)
    section.figure(
        "declaration",
        figure,
        "Blocks by layer, visible ones shaded, with their factors.",
    )
    title, (blocks, _) = card(graph)
    section.table(
        "blocks", blocks.to_dataframe(), "Blocks of one layer are drawn together."
    )
    section.table(
        "factors", factor_grid(graph, subject.params).to_dataframe(), "Factors."
    )
    section.fact(f"{title}.")


def latent_units(section: Section, subject: Subject) -> None:
    """Report dead, saturated and constant latent units."""
    if not subject.graph.latent:
        section.missing(
            "the activity of latent units", "The model has no latent units."
        )
        return
    activity = unit_activity(
        subject.graph, subject.params, subject.train, rng_key=subject.key(4)
    )
    section.text(
        "A unit is off or on if its mean over the rows is within 2 % of an end of its "
        "range, and constant if the rows explain less than 0.1 % of its variance. Such "
        "a unit carries no information on the data."
    )
    blocks = list(dict.fromkeys(activity["block"]))
    counts = pd.crosstab(activity["block"], activity["status"])
    counts = counts.reindex(index=blocks, columns=list(_STATUS_COLORS), fill_value=0)
    counts = counts.rename_axis(index=None, columns=None)
    section.table("unit_counts", counts, "Number of unit statistics by status.")
    figure, axes = grid(2 * len(blocks), (3.8, 2.8), ncols=2)
    for block, pair in zip(blocks, axes.reshape(-1, 2)):
        units = activity[activity["block"] == block]
        present = [s for s in _STATUS_COLORS if (units["status"] == s).any()]
        colors = [_STATUS_COLORS[s] for s in present]
        labels = {"mean": "mean", "varies": "explained share"}
        for ax, (column, label) in zip(pair, labels.items()):
            low = units[column].min()
            high = units[column].max()
            span = (0.0, 1.0) if low >= 0 and high <= 1 else (low - 1e-6, high + 1e-6)
            values = [units[column][units["status"] == s] for s in present]
            ax.hist(
                values, bins=25, range=span, stacked=True, color=colors, label=present
            )
            ax.set(xlabel=label, ylabel=f"units of {block}")
            tidy(ax, legend=ax is pair[1])
    section.figure(
        "units",
        figure,
        "Left: means over rows. Right: share of the variance that rows explain.",
    )
    idle = activity[activity["status"] != "active"]
    if len(idle):
        section.table("idle_units", idle, "Units that are not active.", max_rows=15)
    section.tables["units"] = activity
    section.fact(
        f"{len(idle)} of {len(activity)} statistics of latent units are off, on or constant."
    )


def training(section: Section, subject: Subject) -> None:
    """Show the history of a fit."""
    if subject.history is None:
        section.missing("the course of training", "No history was given (history=fit).")
        return
    _, variables = panels("history", subject.history)
    figure, axes = grid(len(variables), (3.6, 2.6), ncols=3)
    plot_history(subject.history, axes=axes)
    section.figure("training", figure)
