# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tables that ``print`` and notebooks show for an object."""

from collections.abc import Callable, Sequence
from html import escape
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_MAX_ROWS = 24


class Measured(NamedTuple):
    """A value and its standard error.

    >>> str(Measured(-19.34567, 0.0312)), str(Measured(123456.0, 2345.0))
    ('-19.346 +- 0.031', '123500 +- 2300')
    >>> str(Measured(3.2e-12, 1e-13))
    '(3.20 +- 0.10)e-12'
    """

    value: float
    error: float

    def __str__(self) -> str:
        """Show two digits of the error, and the value to the same precision."""
        value = float(self.value)
        error = float(self.error)
        is_finite = math.isfinite(value) and math.isfinite(error)
        if not is_finite or error <= 1e-9 * abs(value):
            return f"{value:.7g} +- {error:.2g}"
        power = math.floor(math.log10(max(abs(value), error)))
        power = power if not -6 < power < 9 else 0
        places = 1 - int(f"{error / 10.0**power:.1e}".partition("e")[2])
        rounded = [round(a / 10.0**power, places) for a in (value, error)]
        text = " +- ".join(f"{a:.{max(places, 0)}f}" for a in rounded)
        return f"({text})e{power}" if power else text


Cell = str | float | Measured


class Grid(NamedTuple):
    """A table of words and numbers; long ones show their first rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def to_dataframe(self) -> "pd.DataFrame":
        """Return the table as a data frame."""
        import pandas as pd  # takes most of a second

        return pd.DataFrame(self.rows, columns=list(self.head))

    def __str__(self) -> str:
        def word(cell):
            return f"{cell:.4g}" if isinstance(cell, float | np.floating) else str(cell)

        lines = [list(self.head)] if any(self.head) else []
        lines += [list(map(word, row)) for row in self.rows[:_MAX_ROWS]]
        padded = []
        for i, column in enumerate(zip(*lines)):
            is_text = i == 0 or any(isinstance(row[i], str) for row in self.rows)
            pad = str.ljust if is_text else str.rjust
            width = max(map(len, column))
            padded.append([pad(cell, width) for cell in column])
        text = ["  ".join(line).rstrip() for line in zip(*padded)]
        more = len(self.rows) - _MAX_ROWS
        return "\n".join([*text, f"... and {more} more rows"] if more > 0 else text)


class Card(NamedTuple):
    """A title and tables."""

    title: str
    grids: Sequence[Grid]

    def __str__(self) -> str:
        return "\n\n".join([self.title, *map(str, self.grids)])


class Shown:
    """Mixin for objects whose ``_card`` is what they print; their ``repr`` stays one line."""

    _card: Callable[[], Card]

    def __str__(self) -> str:
        return str(self._card())

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"
