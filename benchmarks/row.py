# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A row of ``papers.py``: figures or tables, their program, and what became of it."""

import dataclasses
from typing import Literal

Options = tuple[tuple[str, ...], ...]
"""A tuple of options a run."""


def words(text: str) -> tuple[str, ...]:
    """Options, as one writes them."""
    return tuple(text.split())


@dataclasses.dataclass(frozen=True)
class State:
    """What became of a row: one of three things, and why."""

    kind: Literal["ran as printed", "ran smaller", "needs data"]
    why: str = ""

    def __post_init__(self) -> None:
        if (self.kind == "ran as printed") == bool(self.why):
            raise ValueError(f"{self.kind}: {self.why!r}: a reason, unless it ran as printed")

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.why else self.kind


AS_PRINTED = State("ran as printed")
NEEDS_DATA = State("needs data", "reader tested")


def smaller(why: str) -> State:
    """Ran smaller."""
    return State("ran smaller", why)


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure or table, or several that one program makes."""

    name: str
    paper: str
    printed: tuple[str, ...]
    """Figures and tables, as the paper calls them; none for what is ours."""
    what: str
    script: str
    """Under the root of the repository, without its ending."""
    quick: Options
    small: Options
    """The default."""
    paper_options: Options
    """The paper's own size."""
    state: State
    minutes: float | None = None
    """Of the default settings on one or two cores, other programs beside."""
    estimated: bool = False
    """Whether from a part of them."""

    def options(self, settings: str) -> Options:
        """Of quick, small or paper settings."""
        return {"quick": self.quick, "small": self.small, "paper": self.paper_options}[settings]

    @property
    def time(self) -> str:
        """Of the default settings."""
        if self.minutes is None:
            return "no time without its files"
        return f"{self.minutes:g} min" + (", estimated from a part" if self.estimated else "")
