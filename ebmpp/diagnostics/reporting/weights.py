# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What units do to one another: the weights between blocks, by autodiff of the energy, and their spectrum."""

from functools import partial
import math
from typing import TYPE_CHECKING

from jaxtyping import Float
import numpy as np
import pandas as pd

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Params
from ebmpp.diagnostics.reporting.page import Section
from ebmpp.diagnostics.reporting.subject import Subject
from ebmpp.diagnostics.style import grid, look, tidy
from ebmpp.graph import FactorGraph, energy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NUMBERS = 2**21  # of a matrix whose singular values are computed: seconds


def response(
    graph: FactorGraph, params: Params, block: str, other: str, most: int
) -> Float[np.ndarray, "others units statistics"]:
    """d eta / d t(other), by autodiff, all other statistics 0: for a bilinear factor its weights.

    :param most: so many of the other block's statistics, the first ones.
    :return: for the other block's statistics, the block's units and their statistics.
    """
    count = min(math.prod(graph.families[other].statistic_shape), most)
    made = np.asarray(_response(graph, block, other, params, jnp.arange(count)))
    return made.reshape(count, graph.families[block].size, -1)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _response(graph: FactorGraph, block: str, other: str, params: Params, index: Array) -> Array:
    zero = {b: jnp.zeros(f.statistic_shape, jnp.result_type(float)) for b, f in graph.families.items()}
    at = lambda t: energy.natural(graph, params, zero | {other: t}, [block])[block]

    def one(i: Array) -> Array:
        unit = jnp.zeros(zero[other].size).at[i].set(1.0).reshape(zero[other].shape)
        return jax.jvp(at, (zero[other],), (unit,))[1]

    return jax.lax.map(one, index, batch_size=64)


def coupled(graph: FactorGraph) -> list[tuple[str, str]]:
    """Blocks that act on one another, each two once, and those whose own units do."""
    order = list(graph.families)
    pairs = [(a, b) for a in order for b in graph.neighbours([a]) if order.index(a) < order.index(b)]
    return pairs + [(b, b) for b in graph.splits]


def singular_values(subject: Subject) -> Section:
    """Of the weights between every two blocks that act on one another."""
    section, graph = Section("Singular values of the weights"), subject.graph
    section.text(
        "Of the matrix of what a statistic of one block adds to the natural parameters of another, all "
        "others at 0. Dashed: numbers of the same sizes at random places and of random signs, which have no "
        "structure: what stands above their largest is what the model has learned, and what lies below could "
        "be noise. One value far above all others is often the mean of the data, which belongs in the biases."
    )
    curves, rows = {}, []
    for a, b in coupled(graph):
        name = f"{a}, {b}" if a != b else f"{a}, within"
        numbers = math.prod(graph.families[a].statistic_shape) * math.prod(graph.families[b].statistic_shape)
        if numbers > _MOST_NUMBERS:
            section.missing(f"singular values of {name}", f"{numbers} numbers, of at most {_MOST_NUMBERS}")
            continue
        matrix = response(graph, subject.params, a, b, _MOST_NUMBERS)
        matrix = matrix.reshape(len(matrix), -1).astype(float)
        if not matrix.any():
            why = "a factor of more blocks than these couples them, and at 0 of the others it does nothing"
            section.missing(f"singular values of {name}", why)
            continue
        own, random = (_spectrum(m) for m in (matrix, _shuffled(matrix)))
        curves[name] = own, random
        rows.append(_row(name, matrix, own, random))
    if curves:
        section.figure("singular_values", _draw(curves))
        section.table("singular_values", pd.DataFrame(rows), _CAPTION)
    elif not coupled(graph):
        section.missing("singular values", "no two blocks of the model act on one another")
    return section


_CAPTION = (
    "Effective rank: (sum of squares)^2 / sum of fourth powers; the number of equal values that would be as "
    "spread. Above noise: those larger than the largest without structure."
)


def _spectrum(matrix: np.ndarray) -> np.ndarray:
    return np.linalg.svd(matrix, compute_uv=False)


def _shuffled(matrix: np.ndarray) -> np.ndarray:
    generator = np.random.default_rng(0)
    signed = generator.permutation(matrix.ravel()) * generator.choice([-1, 1], matrix.size)
    return signed.reshape(matrix.shape)


def _row(name: str, matrix: np.ndarray, own: np.ndarray, random: np.ndarray) -> dict[str, object]:
    squares = own**2
    return {
        "blocks": name,
        "matrix": f"{matrix.shape[0]} x {matrix.shape[1]}",
        "largest": own[0],
        "median": np.median(own),
        "smallest": own[-1],
        "effective rank": squares.sum() ** 2 / (squares**2).sum(),
        "above noise": int((own > random[0]).sum()),
    }


def _draw(curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> "Figure":
    figure, panels = grid(len(curves), (4.2, 2.9), ncols=2)
    for ax, (name, (own, random)) in zip(panels, curves.items(), strict=True):
        ax.plot(np.arange(1, len(random) + 1), random, **look(1))
        ax.plot(np.arange(1, len(own) + 1), own, ".-", markersize=4, linewidth=1, color=look(0)["color"])
        ax.set(xlabel="number, by size", ylabel="singular value", title=name, ylim=(0, None))
        ax.title.set_fontsize(10)
        tidy(ax)
    return figure
