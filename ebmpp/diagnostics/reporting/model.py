# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What the model is: its declaration, its sizes, and what its latent units do."""

import numpy as np
import pandas as pd

import jax

from ebmpp.diagnostics.reporting.page import Section
from ebmpp.diagnostics.reporting.subject import Subject
from ebmpp.diagnostics.style import COLORS, grid, tidy
from ebmpp.evaluate.activity import unit_activity

_COLORS = {"active": COLORS[0], "constant": COLORS[5], "off": COLORS[1], "on": COLORS[3]}


def declaration(subject: Subject) -> Section:
    """The declaration, its drawing, and how large everything is."""
    graph, section = subject.graph, Section("The model")
    section.code(repr(graph))
    tallest = max(map(len, graph.block_layers)) + 0.4
    figure, (ax,) = grid(1, (2.7 * max(1, len(graph.block_layers)) + 0.6, 1.9 * tallest))
    graph.draw(ax)
    caption = "Blocks by layer, visible ones shaded, with the factors between them."
    section.figure("declaration", figure, caption)
    blocks = []
    for b, known in graph.to_networkx().nodes(data=True):
        family, role = known["family"], "visible" if known["visible"] else "latent"
        blocks.append((b, repr(family), family.size, role, known["layer"], known["parts"]))
    columns = ["block", "family", "units", "", "layer", "parts"]
    caption = "Blocks; a layer is drawn at once, or in so many parts."
    section.table("blocks", pd.DataFrame(blocks, columns=columns), caption)
    rows, count = [], 0
    for name, tree in subject.params.items():
        leaves = [np.asarray(leaf, float).ravel() for leaf in jax.tree.leaves(tree)]
        values = np.concatenate(leaves) if leaves else np.zeros(0)
        numbers = (values.mean(), values.std(), np.abs(values).max()) if values.size else (np.nan,) * 3
        named = dict(zip(("mean", "sd", "largest size"), numbers, strict=True))
        rows.append({"factor": name, "params": values.size, **named})
        count += values.size
    section.table("factors", pd.DataFrame(rows), "Factors.")
    units = sum(f.size for f in graph.families.values())
    told = f"{units} units in {len(graph.families)} blocks"
    section.fact(f"{told}, {count} params, {len(graph.layers)} layers.")
    return section


def units(subject: Subject) -> Section:
    """Dead, saturated and constant latent units."""
    section = Section("Latent units over the training rows")
    if not subject.graph.latent:
        section.missing("activity of latent units", "the model has no latent units")
        return section
    made = unit_activity(subject.graph, subject.params, subject.train, rng_key=subject.key(4))
    section.text(
        "A unit is off or on where its mean over the rows is within a fiftieth of an end of its range, and "
        "constant where the rows explain less than a thousandth of its variance; such a unit tells nothing "
        "of the data."
        + ("" if subject.closed else " Latent blocks interact, so posterior means are those of Gibbs chains.")
    )
    blocks = list(dict.fromkeys(made["block"]))
    counts = pd.crosstab(made["block"], made["status"]).loc[blocks]
    counts = counts.reindex(columns=list(_COLORS), fill_value=0).rename_axis(index=None, columns=None)
    section.table("unit_counts", counts, "Statistics of units by status.")
    figure, panels = grid(2 * len(blocks), (3.8, 2.8), ncols=2)
    for block, pair in zip(blocks, panels.reshape(-1, 2), strict=True):
        _histograms(made[made["block"] == block], block, pair)
    caption = "Left: means over the rows. Right: share of the variance that rows explain."
    section.figure("units", figure, caption)
    idle = made[made["status"] != "active"]
    if len(idle):
        section.table("idle_units", idle, "Units that are not active.", most=15)
    section.tables["units"] = made
    section.fact(f"{len(idle)} of {len(made)} statistics of latent units are off, on or constant.")
    return section


def _histograms(made: pd.DataFrame, block: str, panels: np.ndarray) -> None:
    for ax, column in zip(panels, ("mean", "varies"), strict=True):
        there = [s for s in _COLORS if (made["status"] == s).any()]
        low, high = made[column].min(), made[column].max()
        span = (0.0, 1.0) if column == "varies" or (low >= 0 and high <= 1) else (low - 1e-6, high + 1e-6)
        values = [made[column][made["status"] == s] for s in there]
        ax.hist(values, bins=25, range=span, stacked=True, color=[_COLORS[s] for s in there], label=there)
        ax.set(xlabel={"mean": "mean", "varies": "explained share"}[column], ylabel=f"units of {block}")
        tidy(ax, legend=ax is panels[1])
