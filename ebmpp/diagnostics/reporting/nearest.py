# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Samples beside the training rows that are nearest to them: whether a model repeats its data."""

from collections.abc import Iterator, Mapping
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np
import pandas as pd

from ebmpp.core.types import Rows
from ebmpp.diagnostics.plots import plot_units
from ebmpp.diagnostics.reporting.page import Section
from ebmpp.diagnostics.reporting.subject import Subject
from ebmpp.diagnostics.style import grid
from ebmpp.families import Family
from ebmpp.graph import tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS = 4096  # compared at a time
_SHOWN = 10
_EACH = 3  # states of a chain


class Nearest(NamedTuple):
    """Of each row, the training row that is nearest."""

    distance: Float[np.ndarray, "rows"]
    index: Int[np.ndarray, "rows"]


def grey(family: Family, values: Any) -> Float[np.ndarray, "count units"]:
    """Values over their family's range, so within [0, 1]; as they are where it has none."""
    values = np.asarray(values, float).reshape(len(values), -1)
    states = family.states()
    low, high = family.bounds if states is None else (float(min(states)), float(max(states)))
    return (values - low) / (high - low) if np.isfinite(high - low) else values


def nearest_rows(subject: Subject, shapes: Mapping[str, tuple[int, int]]) -> Section:
    """Distances to the nearest training row, and pictures of it."""
    section = Section("Samples beside the nearest training rows")
    drawn = {
        f"{name} samples": _last(subject, chains.draws) for name, chains in subject.chains(section).items()
    }
    section.text(
        "The distance is the sum over units of squared differences, a unit's values over their range: for "
        "units of two values, or of categories, how many differ. Samples that lie much "
        "nearer to training rows than held-out rows do repeat them; samples much farther off are unlike them."
    )
    sets = drawn | {f"{name} rows": rows for name, rows in subject.data.items() if name != _first(subject)}
    found = {name: nearest(subject, rows) for name, rows in sets.items()}
    found[f"{_first(subject)} rows (without themselves)"] = nearest(subject, subject.train, alone=True)
    section.table("nearest", _table(found), f"Nearest of {subject.count} training rows.")
    _tell(section, found, list(drawn))
    for b, shape in shapes.items():
        if drawn and subject.graph.families[b].interaction_shape == subject.graph.families[b].shape:
            figure = _draw(subject, b, shape, {n: (drawn[n], found[n].index) for n in drawn})
            told = "States of ten chains, as drawn (no means), each above the training row that is nearest."
            section.figure(f"nearest_{b}", figure, told)
    return section


def _first(subject: Subject) -> str:
    return next(iter(subject.data))


def _last(subject: Subject, draws: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The visibles of every chain's last draw, then of some earlier ones."""
    sweeps = subject.work.sweeps
    place = [max(0, sweeps - 1 - i * sweeps // _EACH) for i in range(_EACH)]
    pick = lambda v: np.moveaxis(v[:, place], 1, 0).reshape(-1, *v.shape[2:])
    return {b: pick(draws[b]) for b in subject.graph.visible}


def features(subject: Subject, rows: Mapping[str, Any]) -> Float[np.ndarray, "rows features"]:
    """What distances are taken of: values over their range, and indicators of categories over sqrt(2)."""
    made = []
    for b, family in subject.graph.visible.items():
        v = np.asarray(rows[b])
        states = family.states()
        if family.stat_shape and states is not None:  # categories have no order
            each = v.reshape(len(v), -1, 1) == np.asarray(states)
            made.append(each.reshape(len(v), -1) / math.sqrt(2))
        else:
            made.append(grey(family, v))
    return np.concatenate(made, 1)


def _training(subject: Subject) -> Iterator[tuple[int, Rows]]:
    """All training rows, some at a time."""
    if subject.table is None:
        yield 0, subject.train
        return
    for begin in range(0, subject.count, _ROWS):
        chosen = np.arange(begin, min(begin + _ROWS, subject.count))
        yield begin, tables.check_table(subject.graph, subject.table.take(chosen)).rows


def nearest(subject: Subject, rows: Mapping[str, Any], alone: bool = False) -> Nearest:
    """The nearest of all training rows.

    :param alone: whether the rows are training rows themselves, each of which is left out once: rows that
        occur twice are at distance 0.
    """
    own = features(subject, rows)
    keep = 2 if alone else 1
    best = np.full((len(own), keep), np.inf)
    where = np.zeros((len(own), keep), int)
    squares = (own**2).sum(1)[:, None]
    for begin, some in _training(subject):
        theirs = features(subject, some)
        d = np.maximum(squares + (theirs**2).sum(1) - 2 * own @ theirs.T, 0.0)
        place = np.broadcast_to(begin + np.arange(len(theirs)), d.shape)
        d, place = np.concatenate([best, d], 1), np.concatenate([where, place], 1)
        order = np.argsort(d, 1, kind="stable")[:, :keep]
        best, where = np.take_along_axis(d, order, 1), np.take_along_axis(place, order, 1)
    return Nearest(best[:, -1], where[:, -1])


def _table(found: Mapping[str, Nearest]) -> pd.DataFrame:
    rows = {}
    for name, made in found.items():
        low, middle, high = np.quantile(made.distance, [0.1, 0.5, 0.9])
        told = {"count": len(made.distance), "10 %": low, "median": middle, "90 %": high}
        rows[name] = told | {"the same": int((made.distance < 1e-6).sum())}
    return pd.DataFrame.from_dict(rows, orient="index")


def _tell(section: Section, found: Mapping[str, Nearest], samples: list[str]) -> None:
    others = [n for n in found if n not in samples]
    if samples:
        told = "; ".join(f"of {n} {np.median(found[n].distance):.3g}" for n in [samples[-1], *others])
        section.fact(f"Median distance to the nearest training row: {told}.")


def _draw(subject: Subject, block: str, shape: tuple[int, int], found: Mapping) -> "Figure":
    family = subject.graph.families[block]
    figure, axes = grid(len(found), (7.0, 0.5 + 1.4 * shape[0] / shape[1]), ncols=1)
    for ax, (name, (rows, index)) in zip(axes, found.items(), strict=True):
        index = index[:_SHOWN]
        theirs = _rows(subject, index)[block]
        both = np.concatenate([grey(family, rows[block][:_SHOWN]), grey(family, theirs)])
        plot_units(both, shape, ncols=len(index), ax=ax)
        ax.set_title(f"{name}, and the nearest training row below each", fontsize=10)
    return figure


def _rows(subject: Subject, index: np.ndarray) -> Rows:
    if subject.table is None:
        return {b: v[index] for b, v in subject.train.items()}
    return tables.check_table(subject.graph, subject.table.take(index)).rows
