# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What ``print`` and notebooks show of an object: tables as text and as HTML, from the same rows, and curves.

HTML takes its colours from the page around it, so it can be read on light and on dark ones.
"""

from collections.abc import Iterator, Sequence
from html import escape
import math
from typing import NamedTuple

from jaxtyping import Float, Integer, Real
import numpy as np

_MOST_ROWS = 24
_BINS = 120  # of a curve: a pixel or two each
_WIDTH, _HEIGHT = 240, 64
_LINE = "#2b8cbe"  # told from white and from black
_BOX = "display:inline-block;vertical-align:top;margin:0 1.5em .8em 0"


class Measured(NamedTuple):
    """A value and its standard error.

    >>> str(Measured(-19.34567, 0.0312)), str(Measured(123456.0, 2345.0)), str(Measured(3.2e-12, 1e-13))
    ('-19.346 +- 0.031', '123500 +- 2300', '(3.20 +- 0.10)e-12')
    """

    value: float
    error: float

    def __str__(self) -> str:
        """The error to two digits, the value as far as these."""
        value, error = float(self.value), float(self.error)
        if not (math.isfinite(value) and math.isfinite(error)) or error <= 1e-9 * abs(value):
            return f"{value:.7g} +- {error:.2g}"  # no error, or less of one than a float may have
        power = math.floor(math.log10(max(abs(value), error)))
        power = power if not -6 < power < 9 else 0
        value, error = value / 10.0**power, error / 10.0**power
        places = 1 - int(f"{error:.1e}".partition("e")[2])
        told = " +- ".join(f"{round(a, places):.{max(places, 0)}f}" for a in (value, error))
        return f"({told})e{power}" if power else told


Cell = str | float | Measured


def _word(cell: Cell) -> str:
    return f"{cell:.4g}" if isinstance(cell, float | np.floating) else str(cell)


class Grid(NamedTuple):
    """A table: a head, and rows of words and numbers, of which long tables show the first and say so."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def _words(self) -> Iterator[list[str]]:
        if any(self.head):
            yield list(self.head)
        for row in self.rows[:_MOST_ROWS]:
            yield list(map(_word, row))

    def _left(self) -> list[bool]:
        """The columns of words; numbers stand to the right."""
        return [i == 0 or any(isinstance(row[i], str) for row in self.rows) for i in range(len(self.head))]

    def _more(self) -> str:
        left = len(self.rows) - _MOST_ROWS
        return f"... and {left} more row{'s' * (left > 1)}" if left > 0 else ""

    def text(self) -> str:
        """In columns."""
        words, left = list(self._words()), self._left()
        widths = [max(map(len, column)) for column in zip(*words, strict=True)]
        sides = [str.ljust if is_left else str.rjust for is_left in left]
        place = lambda row: "  ".join(s(w, n) for s, w, n in zip(sides, row, widths, strict=True)).rstrip()
        return "\n".join([*map(place, words), *filter(None, [self._more()])])

    def html(self) -> str:
        """As a table."""
        sides = ["left" if left else "right" for left in self._left()]
        style = "padding:.1em .7em .1em 0;border:none;background:none;color:inherit;text-align:"

        def row(tag: str, words: Sequence[str]) -> str:
            cells = zip(sides, words, strict=True)
            told = (
                f'<{tag} style="{style}{s}">{escape(w).replace(" +- ", " &#177; ")}</{tag}>' for s, w in cells
            )
            return f'<tr style="background:none">{"".join(told)}</tr>'

        rows = list(self._words())
        head = f"<thead>{row('th', rows.pop(0))}</thead>" if any(self.head) else ""
        more = f"<div>{self._more()}</div>" if self._more() else ""
        body = "".join(row("td", words) for words in rows)
        table = '<table style="border-collapse:collapse;margin:0;border:none;color:inherit">'
        return f'<div style="{_BOX}">{table}{head}<tbody>{body}</tbody></table>{more}</div>'


class Card(NamedTuple):
    """A title, tables, and for notebooks pictures, in SVG."""

    title: str
    grids: Sequence[Grid]
    pictures: Sequence[str] = ()

    def text(self) -> str:
        """The tables one below the other."""
        return "\n\n".join([self.title, *(grid.text() for grid in self.grids)])

    def html(self) -> str:
        """Pictures, and the tables side by side where there is room."""
        title = f'<div style="font-weight:bold;margin-bottom:.5em">{escape(self.title)}</div>'
        drawn = "".join(f'<div style="{_BOX}">{picture}</div>' for picture in self.pictures)
        tables = "".join(grid.html() for grid in self.grids)
        return f'<div class="ebmpp">{title}<div>{drawn}</div><div>{tables}</div></div>'


class Shown:
    """What shows itself as a :class:`Card`; its ``repr`` stays a line."""

    def _card(self) -> Card:
        raise NotImplementedError(f"{type(self).__name__} must define _card")

    def __str__(self) -> str:
        return self._card().text()

    def _repr_html_(self) -> str:
        """For notebooks."""
        return self._card().html()


def svg(box: tuple[float, float, float, float], body: str, label: str) -> str:
    """A picture in SVG, text in the page's colour.

    :param box: its left and upper ends, width and height, in pixels.
    """
    left, top, width, height = box
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="{left:.0f} {top:.0f} {width:.0f} {height:.0f}" '
        f'style="max-width:100%;height:auto" font-family="sans-serif" fill="currentColor">{body}</svg>'
    )


def words(x: float, y: float, told: str, size: float = 11, more: str = "") -> str:
    """Text in a picture."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" {more}>{escape(told)}</text>'


def curve(title: str, along: str, x: Real[np.ndarray, "points"], y: Real[np.ndarray, "points"]) -> str:
    """A small curve with its ends told; gaps where ``y`` is not finite, which no bin hides.

    :param along: what ``x`` counts.
    """
    y = np.where(np.isfinite(y), y, np.nan).astype(float)
    if not np.isfinite(y).any():
        return ""
    low, high, last = np.nanmin(y), np.nanmax(y), y[np.isfinite(y)][-1]
    at = _corners(y)
    across = lambda v: 4 + (_WIDTH - 8) * (v - x[0]) / max(float(x[-1] - x[0]), 1e-30)
    up = lambda v: 24 + _HEIGHT * ((high - v) / (high - low) if high > low else 0.5 + 0 * v)
    path, pen = "", "M"
    for a, b in zip(across(x[at].astype(float)), up(y[at]), strict=True):
        seen = np.isfinite(b)
        path += f"{pen}{a:.1f} {b:.1f}{'h0' if pen == 'M' else ''}" if seen else ""
        pen = "L" if seen else "M"
    below, end = 24 + _HEIGHT + 16, 'text-anchor="end" '
    body = (
        words(4, 13, title, more='font-weight="bold"')
        + words(_WIDTH - 4, 13, f"last {last:.4g}", more=end)
        + f'<path d="{path}" fill="none" stroke="{_LINE}" stroke-width="1.6" stroke-linecap="round"/>'
        + words(4, below, f"{along} {x[0]:g} to {x[-1]:g}", 10)
        + words(_WIDTH - 4, below, f"{low:.4g} to {high:.4g}", 10, end)
    )
    return svg((0, 0, _WIDTH, below + 6), body, title)


def _corners(y: Float[np.ndarray, "points"]) -> Integer[np.ndarray, "corners"]:
    """Which points to draw of many: the highest and the lowest of each bin, and one of what is not finite."""
    if len(y) <= 2 * _BINS:
        return np.arange(len(y))
    found = set()
    for part in np.array_split(np.arange(len(y)), _BINS):
        there, missing = part[np.isfinite(y[part])], part[np.isnan(y[part])]
        found |= {there[y[there].argmin()], there[y[there].argmax()]} if len(there) else set()
        found |= set(missing[:1])
    return np.array(sorted(found))
