# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Whether the model has the moments of its data, which is what the likelihood's gradient equates."""

from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float
import numpy as np
import pandas as pd

import jax.numpy as jnp

from ebmpp.diagnostics.reporting.page import Section
from ebmpp.diagnostics.reporting.subject import Chains, Subject
from ebmpp.diagnostics.style import COLORS, INK, grid, tidy
from ebmpp.evaluate.activity import conditional_moments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_PAIRS = 3000  # of statistics, drawn at random where there are more
_SEEN = 3.0  # root mean square differences, in their errors
_WORST = 8  # statistics that are named


class Compared(NamedTuple):
    """Moments of the data and of the model, and the standard error of their differences."""

    names: list[str]
    data: Float[np.ndarray, "moments"]
    model: Float[np.ndarray, "moments"]
    error: Float[np.ndarray, "moments"]

    @property
    def off(self) -> float:
        """Root mean square of the differences."""
        return float(np.sqrt(np.mean((self.data - self.model) ** 2)))

    @property
    def stated(self) -> float:
        """Root mean square of their errors."""
        return float(np.sqrt(np.mean(self.error**2)))


def moments(subject: Subject) -> Section:
    """Means and covariances of the visible statistics, and means of the latent ones."""
    section = Section("Moments of data against model")
    made = subject.chains(section)
    if not made:
        section.missing("moments of the model", "there are no chains to take them from")
        return section
    name = list(made)[-1]  # the tempered ones, where there are
    section.text(
        f"Each dot is a moment: across, that of the training rows; up, that of the {name} chains "
        f"({len(next(iter(made[name].draws.values())))} from noise). Where training has come to an end they "
        "lie on the line, but for their errors. Means of latents of the data are those given the rows."
    )
    compared = _visible(subject, made[name]) | _latent(subject, made[name])
    rows = [_row(what, each) for what, each in compared.items()]
    section.figure("moments", _draw(compared), "The bar on the left is two standard errors of a difference.")
    section.table("moments", pd.DataFrame(rows), "Root mean squares over all moments of a kind.")
    section.table("moments_worst", _worst(compared), "The means that are farthest off, in standard errors.")
    for what in ("visible means", "covariances"):
        if what in compared:
            each = compared[what]
            errors = f"where errors alone make {each.stated:.2g}"
            section.fact(f"Model less data, {what}: {each.off:.2g} rms, {errors}.")
    _judge(section, compared)
    return section


def _judge(section: Section, compared: dict[str, Compared]) -> None:
    off = [what for what, each in compared.items() if each.off > _SEEN * each.stated]
    if off:
        section.judge(False, f"{' and '.join(off)} of model and data differ by more than their errors")
    else:
        section.judge(True, "moments of model and data agree within their errors")


def _flat(subject: Subject, block: str, values: np.ndarray) -> np.ndarray:
    """Statistics of a block, ``(*batch, statistics)``."""
    family = subject.graph.families[block]
    batch = values.shape[: values.ndim - len(family.shape)]
    return np.asarray(family.statistics(jnp.asarray(values)), np.float64).reshape(*batch, -1)


def _labels(subject: Subject, block: str) -> list[str]:
    shape = subject.graph.families[block].statistic_shape
    return [f"{block}{list(index)}" for index in np.ndindex(*shape)]


def _visible(subject: Subject, chains: Chains) -> dict[str, Compared]:
    blocks = list(subject.graph.visible)
    data = np.concatenate([_flat(subject, b, np.asarray(subject.train[b])) for b in blocks], -1)
    model = np.concatenate([_flat(subject, b, chains.draws[b]) for b in blocks], -1)
    names = [name for b in blocks for name in _labels(subject, b)]
    made = {"visible means": compare(names, data, model, subject.share)}
    size = data.shape[1]
    if size > 1:
        first, second = np.triu_indices(size, 1) if size <= 2000 else _some_pairs(size)
        if len(first) > _MOST_PAIRS:
            chosen = np.random.default_rng(0).choice(len(first), _MOST_PAIRS, replace=False)
            first, second = first[chosen], second[chosen]
        pairs = [f"{names[i]}, {names[j]}" for i, j in zip(first, second, strict=True)]
        product = lambda x, mean: (x[..., first] - mean[first]) * (x[..., second] - mean[second])
        own = product(data, data.mean(0))
        drawn = np.stack([product(c, model.mean((0, 1))) for c in model])
        made["covariances"] = compare(pairs, own, drawn, subject.share)
    return made


def _some_pairs(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of so many statistics that listing all would take too much memory."""
    drawn = np.random.default_rng(0).integers(size, size=(2, 2 * _MOST_PAIRS))
    drawn = drawn[:, drawn[0] != drawn[1]]
    return drawn[0], drawn[1]


def _latent(subject: Subject, chains: Chains) -> dict[str, Compared]:
    """Means of latents, where those of the data have a closed form."""
    graph = subject.graph
    if not graph.latent or not subject.closed:
        return {}
    found = conditional_moments(graph, tuple(graph.latent), subject.params, dict(subject.train))
    data = [np.asarray(found[b][0], np.float64).reshape(len(found[b][0]), -1) for b in graph.latent]
    model = [_flat(subject, b, chains.draws[b]) for b in graph.latent]
    names = [name for b in graph.latent for name in _labels(subject, b)]
    return {
        "latent means": compare(names, np.concatenate(data, -1), np.concatenate(model, -1), subject.share)
    }


def compare(names: list[str], data: np.ndarray, model: np.ndarray, share: float) -> Compared:
    """Means of rows, and of chains.

    :param data: ``(rows, moments)``.
    :param model: ``(chains, draws, moments)``; chains are independent, so their means tell the error.
    :param share: of all training rows that ``data`` is: with all of them their means have no error.
    """
    each = model.mean(1)
    own = data.std(0, ddof=1) / np.sqrt(len(data)) if len(data) > 1 else np.zeros(data.shape[1])
    drawn = each.std(0, ddof=1) / np.sqrt(len(each))
    return Compared(names, data.mean(0), each.mean(0), np.hypot(np.sqrt(1 - share) * own, drawn))


def _row(what: str, made: Compared) -> dict[str, object]:
    spread = made.data.std() * made.model.std()
    centred = (made.data - made.data.mean()) * (made.model - made.model.mean())
    return {
        "moments": what,
        "number": len(made.data),
        "model less data": made.off,
        "of errors alone": made.stated,
        "correlation": centred.mean() / spread if spread else np.nan,
    }


def _worst(compared: dict[str, Compared]) -> pd.DataFrame:
    rows = []
    for what, made in compared.items():
        if what == "covariances":
            continue
        error = np.where(made.error > 0, made.error, np.inf)
        z = (made.model - made.data) / error
        for i in np.argsort(-np.abs(z), kind="stable")[:_WORST]:
            told = {"statistic": made.names[i], "data": made.data[i], "model": made.model[i]}
            rows.append(told | {"error": made.error[i], "in errors": z[i]})
    frame = pd.DataFrame(rows)
    order = frame["in errors"].abs().sort_values(ascending=False, kind="stable").index
    return frame.loc[order].head(_WORST).reset_index(drop=True)


def _draw(compared: dict[str, Compared]) -> "Figure":
    figure, panels = grid(len(compared), (3.5, 3.3), ncols=3)
    for ax, (what, made) in zip(panels, compared.items(), strict=True):
        both = np.concatenate([made.data, made.model])
        low, high = both.min(), both.max()
        margin = 0.06 * (high - low) + 1e-9
        ends = low - margin, high + margin
        ax.plot(ends, ends, color=INK, linewidth=0.8, linestyle="--")
        ax.plot(made.data, made.model, "o", color=COLORS[0], markersize=3, alpha=0.45, markeredgewidth=0)
        typical = float(np.median(made.error))
        at = low + 0.05 * (high - low), high - 0.05 * (high - low) - 2 * typical
        ax.errorbar(*at, 2 * typical, color=COLORS[1], capsize=3, linewidth=1.4)
        ax.set(xlim=ends, ylim=ends, xlabel="training rows", ylabel="model", title=what, aspect="equal")
        ax.title.set_fontsize(10)
        tidy(ax)
    return figure
