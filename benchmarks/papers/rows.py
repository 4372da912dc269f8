# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Rows of ``papers.py``: figures or tables of a paper, the program that makes them, and
its outcome."""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
import tomllib

Options = Sequence[str]
"""One string of options per run."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One or several figures or tables that one program makes."""

    name: str
    paper: str
    what: str
    script: str
    """Path under the root of the repository, without its ending."""
    minimal: Options
    small: Options
    """The default."""
    full: Options
    """The paper's own size."""
    state: str
    """The outcome: "ran as printed", "ran smaller: <how>" or "needs data: <what was tested>"."""
    printed: Sequence[str] = ()
    """Figures and tables as the paper calls them; empty for our own experiments."""
    minutes: float | None = None
    """Time of the default settings on one or two cores, beside other programs."""
    estimated: bool = False
    """True if the time was extrapolated from a part of the run."""

    def options(self, settings: str) -> list[list[str]]:
        """Return the arguments of each run for quick, small or paper settings."""
        selected = {"quick": self.minimal, "small": self.small, "paper": self.full}[
            settings
        ]
        return [options.split() for options in selected]

    @property
    def needs_data(self) -> bool:
        """True if the data were not available."""
        return self.state.startswith("needs data")

    @property
    def time(self) -> str:
        """Time of the default settings, as text."""
        if self.minutes is None:
            return "no time without its files"
        return f"{self.minutes:g} min" + (
            ", estimated from a part" if self.estimated else ""
        )


def _read() -> dict[str, Row]:
    """Return the rows of rows.toml, by name."""
    papers = tomllib.loads(
        Path(__file__).with_name("rows.toml").read_text(encoding="utf-8")
    )
    fields = {
        name: (paper, values)
        for paper, rows in papers.items()
        for name, values in rows.items()
    }
    return {
        name: Row(name=name, paper=paper, **values)
        for name, (paper, values) in fields.items()
    }


ROWS = _read()
