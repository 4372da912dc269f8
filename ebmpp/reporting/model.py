# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sections on the model itself: declaration, latent units, weights, and training."""

from functools import partial
import math
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
import numpy as np
import pandas as pd

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Params
from ebmpp.diagnostics.plots import panels, plot_history
from ebmpp.diagnostics.style import COLORS, grid, look, tidy
from ebmpp.estimators import Estimator, gradient_bias
from ebmpp.evaluate.activity import unit_activity
from ebmpp.graph import FactorGraph, energy
from ebmpp.reporting.page import Section
from ebmpp.reporting.subject import Subject
from ebmpp.training import Fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STATUS_COLORS = {"active": COLORS[0], "constant": COLORS[5], "off": COLORS[1], "on": COLORS[3]}
_MAX_ENTRIES = 2**21  # of a matrix whose singular values are computed, in seconds


def declaration(section: Section, subject: Subject) -> None:
    """Show the declaration, its drawing, and all sizes."""
    graph = subject.graph
    section.code(repr(graph))
    tallest = max(map(len, graph.block_layers)) + 0.4
    figure, (ax,) = grid(1, (2.7 * max(1, len(graph.block_layers)) + 0.6, 1.9 * tallest))
    graph.draw(ax)
    caption = "Blocks by layer, visible ones shaded, with the factors between them."
    section.figure("declaration", figure, caption)
    blocks = []
    for b, node in graph.to_networkx().nodes(data=True):
        row = {"block": b, "family": repr(node["family"]), "units": node["family"].size}
        row |= {"": "visible" if node["visible"] else "latent", "layer": node["layer"]}
        blocks.append(row | {"parts": node["parts"]})
    caption = "Blocks. Blocks of one layer are drawn together, each in as many parts as given."
    section.table("blocks", pd.DataFrame(blocks), caption)
    factors = []
    for name, tree in subject.params.items():
        leaves = [np.asarray(leaf, float).ravel() for leaf in jax.tree.leaves(tree)]
        values = np.concatenate(leaves) if leaves else np.zeros(0)
        numbers = (values.mean(), values.std(), np.abs(values).max()) if values.size else (np.nan,) * 3
        row = dict(zip(("mean", "sd", "largest size"), numbers, strict=True))
        factors.append({"factor": name, "params": values.size, **row})
    table = pd.DataFrame(factors)
    section.table("factors", table, "Factors.")
    units = sum(f.size for f in graph.families.values())
    section.fact(
        f"{units} units in {len(graph.families)} blocks, {table['params'].sum()} params, "
        f"{len(graph.layers)} layers."
    )


def latent_units(section: Section, subject: Subject) -> None:
    """Report dead, saturated and constant latent units."""
    if not subject.graph.latent:
        section.missing("the activity of latent units", "The model has no latent units.")
        return
    activity = unit_activity(subject.graph, subject.params, subject.train, rng_key=subject.key(4))
    section.text(
        "A unit is off or on if its mean over the rows is within 2 % of an end of its range, and constant if "
        "the rows explain less than 0.1 % of its variance. Such a unit carries no information on the data."
    )
    if not subject.has_free_energy:
        section.text("Latent blocks interact, so posterior means are those of Gibbs chains.")
    blocks = list(dict.fromkeys(activity["block"]))
    counts = pd.crosstab(activity["block"], activity["status"]).loc[blocks]
    counts = counts.reindex(columns=list(_STATUS_COLORS), fill_value=0).rename_axis(index=None, columns=None)
    section.table("unit_counts", counts, "Number of unit statistics by status.")
    figure, axes = grid(2 * len(blocks), (3.8, 2.8), ncols=2)
    for block, pair in zip(blocks, axes.reshape(-1, 2), strict=True):
        _histograms(activity[activity["block"] == block], block, pair)
    caption = "Left: means over the rows. Right: share of the variance that rows explain."
    section.figure("units", figure, caption)
    idle = activity[activity["status"] != "active"]
    if len(idle):
        section.table("idle_units", idle, "Units that are not active.", max_rows=15)
    section.tables["units"] = activity
    section.fact(f"{len(idle)} of {len(activity)} statistics of latent units are off, on or constant.")


def _histograms(activity: pd.DataFrame, block: str, axes: np.ndarray) -> None:
    for ax, column in zip(axes, ("mean", "varies"), strict=True):
        present = [s for s in _STATUS_COLORS if (activity["status"] == s).any()]
        low, high = activity[column].min(), activity[column].max()
        span = (0.0, 1.0) if column == "varies" or (low >= 0 and high <= 1) else (low - 1e-6, high + 1e-6)
        values = [activity[column][activity["status"] == s] for s in present]
        colors = [_STATUS_COLORS[s] for s in present]
        ax.hist(values, bins=25, range=span, stacked=True, color=colors, label=present)
        ax.set(xlabel={"mean": "mean", "varies": "explained share"}[column], ylabel=f"units of {block}")
        tidy(ax, legend=ax is axes[1])


# -- weights ---------------------------------------------------------------------------------------


def weights(
    graph: FactorGraph, params: Params, block: str, other: str, most: int
) -> Float[np.ndarray, "others units statistics"]:
    """Return the derivative of a block's natural parameters in another block's statistics, at 0.

    For a bilinear factor these are its weights.

    :param most: maximal number of the other block's statistics; the first ones are used.
    """
    count = min(math.prod(graph.families[other].statistic_shape), most)
    jacobian = np.asarray(_weights(graph, block, other, params, jnp.arange(count)))
    return jacobian.reshape(count, graph.families[block].size, -1)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _weights(graph: FactorGraph, block: str, other: str, params: Params, index: Array) -> Array:
    zero = {b: jnp.zeros(f.statistic_shape, jnp.result_type(float)) for b, f in graph.families.items()}
    natural = lambda t: energy.natural(graph, params, zero | {other: t}, [block])[block]

    def row(i: Array) -> Array:
        direction = jnp.zeros(zero[other].size).at[i].set(1.0).reshape(zero[other].shape)
        return jax.jvp(natural, (zero[other],), (direction,))[1]

    return jax.lax.map(row, index, batch_size=64)


def singular_values(section: Section, subject: Subject) -> None:
    """Report singular values of the weights between every two blocks that interact."""
    graph, order = subject.graph, list(subject.graph.families)
    section.text(
        "Weights: derivatives of one block's natural parameters in another block's statistics, at 0. Dashed: "
        "the same weights at random places with random signs, a baseline without structure. Values above the "
        "baseline's largest are learned; values below may be noise. A single value far above the others is "
        "often the mean of the data, which belongs in the biases."
    )
    pairs = [(a, b) for a in order for b in graph.neighbours([a]) if order.index(a) < order.index(b)]
    pairs += [(b, b) for b in graph.splits]
    curves, rows = {}, []
    for a, b in pairs:
        name = f"{a}, {b}" if a != b else f"{a}, within"
        entries = math.prod(graph.families[a].statistic_shape) * math.prod(graph.families[b].statistic_shape)
        if entries > _MAX_ENTRIES:
            section.missing(f"singular values of {name}", f"{entries} entries, more than {_MAX_ENTRIES}.")
            continue
        matrix = weights(graph, subject.params, a, b, _MAX_ENTRIES)
        matrix = matrix.reshape(len(matrix), -1).astype(float)
        if not matrix.any():
            reason = "Only factors of more than two blocks couple them, which vanish at 0 of the others."
            section.missing(f"singular values of {name}", reason)
            continue
        values, baseline = (np.linalg.svd(m, compute_uv=False) for m in (matrix, _shuffled(matrix)))
        curves[name] = values, baseline
        row = {"blocks": name, "matrix": f"{matrix.shape[0]} x {matrix.shape[1]}"}
        row |= {"largest": values[0], "median": np.median(values), "smallest": values[-1]}
        row |= {"effective rank": (values**2).sum() ** 2 / (values**4).sum()}
        rows.append(row | {"above baseline": int((values > baseline[0]).sum())})
    if curves:
        section.figure("singular_values", _draw(curves))
        section.table(
            "singular_values",
            pd.DataFrame(rows),
            "Effective rank: (sum of squares)^2 / sum of fourth powers. Above baseline: number of values "
            "above the baseline's largest.",
        )
    elif not pairs:
        section.missing("singular values", "No two blocks of the model interact.")


def _shuffled(matrix: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng(0)
    signed = generator.permutation(matrix.ravel()) * generator.choice([-1, 1], matrix.size)
    return signed.reshape(matrix.shape)


def _draw(curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> "Figure":
    figure, axes = grid(len(curves), (4.2, 2.9), ncols=2)
    for ax, (name, (values, baseline)) in zip(axes, curves.items(), strict=True):
        ax.plot(np.arange(1, len(baseline) + 1), baseline, **look(1))
        ax.plot(
            np.arange(1, len(values) + 1), values, ".-", markersize=4, linewidth=1, color=look(0)["color"]
        )
        ax.set(xlabel="rank", ylabel="singular value", title=name, ylim=(0, None))
        ax.title.set_fontsize(10)
        tidy(ax)
    return figure


# -- training --------------------------------------------------------------------------------------


def training(section: Section, subject: Subject) -> None:
    """Show the history of a fit and the bias of its last gradient."""
    if subject.history is None:
        section.missing("the course of training", "No history was given (history=fit).")
        return
    data = getattr(subject.history, "history", subject.history)
    figure, axes = grid(max(1, len(panels(data))), (3.6, 2.6), ncols=3)
    plot_history(data, axes=axes)
    section.figure("training", figure)
    fit = subject.history
    if not isinstance(fit, Fit) or fit.estimator is None:
        reason = "The history lacks the estimator; give the fit."
    elif not subject.budget.references:
        reason = 'It takes many particle systems; request it by budget="thorough" or Budget(references=20).'
    elif not all(jax.tree.leaves(jax.tree.map(np.array_equal, dict(subject.params), dict(fit.params)))):
        reason = "The params are not the last ones of the fit, which its estimator's state belongs to."
    else:
        _bias(section, subject, fit.estimator, fit.estimator_state)
        return
    section.missing("the bias of the gradient that trained the model", reason)


def _bias(section: Section, subject: Subject, estimator: Estimator, state: Any) -> None:
    """Compare the run's estimator with an unbiased one, at the last params."""
    count, name = subject.budget.references, type(estimator).__name__
    result = gradient_bias(
        subject.graph,
        subject.params,
        subject.train,
        estimator,
        state,
        rng_key=subject.key(9),
        num_references=count,
    )
    section.text(
        f"Mean gradient of {result.estimator!r} over {result.conditioning}, minus the mean of {count} "
        "unbiased gradients by coupled particle systems, at the last params and the same rows. Squared norms "
        "are products of different repeats, so noise does not add to them; without bias they are as often "
        "negative as positive."
    )
    if result.chains is not None:
        section.text(
            "The last chains are treated as independent given the params' history. What they have in common "
            "counts as bias."
        )
    rows = [
        {
            "factor": factor,
            "squared bias": squares.squared_bias,
            "standard error": squares.standard_error,
            "squared gradient": squares.squared_gradient,
            "its error": squares.gradient_error,
        }
        for factor, squares in [*result.factors.items(), ("all", result.total)]
    ]
    section.table("gradient_bias", pd.DataFrame(rows), "By factor, and over all params.")
    total = result.total
    is_seen = total.squared_bias > 3 * total.standard_error
    section.fact(
        f"Bias of the gradient of {name}: {'significant' if is_seen else 'not significant'}; its squared "
        f"norm is {total.squared_bias:.3g} +- {total.standard_error:.2g}, that of the gradient "
        f"{total.squared_gradient:.3g} +- {total.gradient_error:.2g}."
    )
    section.note(
        "A mode that all particle systems miss is missing in the reference too. Near an optimum the gradient "
        "is small, and its bias may be larger."
    )
