# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A row of ``papers.py``: figures or tables of a paper, the program that makes them, and its outcome."""

import dataclasses
from typing import Literal

Options = tuple[str, ...]
"""One string of options per run."""


@dataclasses.dataclass(frozen=True)
class State:
    """The outcome of a row and its reason."""

    kind: Literal["ran as printed", "ran smaller", "needs data"]
    why: str = ""

    def __post_init__(self) -> None:
        if (self.kind == "ran as printed") == bool(self.why):
            raise ValueError(f"{self.kind}: {self.why!r}. Give a reason, unless it ran as printed.")

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.why else self.kind


AS_PRINTED = State("ran as printed")
NEEDS_DATA = State("needs data", "reader tested")


def smaller(why: str) -> State:
    """Return the state of a smaller run."""
    return State("ran smaller", why)


@dataclasses.dataclass(frozen=True)
class Row:
    """One or several figures or tables that one program makes."""

    name: str
    paper: str
    printed: tuple[str, ...]
    """Figures and tables as the paper calls them; empty for our own experiments."""
    what: str
    script: str
    """Path under the root of the repository, without its ending."""
    short: Options
    small: Options
    """The default."""
    paper_options: Options
    """The paper's own size."""
    state: State
    minutes: float | None = None
    """Time of the default settings on one or two cores, beside other programs."""
    estimated: bool = False
    """True if the time was extrapolated from a part of the run."""

    def options(self, settings: str) -> list[list[str]]:
        """Return the arguments of each run for quick, small or paper settings."""
        selected = {"quick": self.short, "small": self.small, "paper": self.paper_options}[settings]
        return [options.split() for options in selected]

    @property
    def time(self) -> str:
        """Time of the default settings, as text."""
        if self.minutes is None:
            return "no time without its files"
        return f"{self.minutes:g} min" + (", estimated from a part" if self.estimated else "")
