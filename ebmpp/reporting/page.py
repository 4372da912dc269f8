# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sections of text, tables and figures, rendered to one self-contained HTML file."""

import base64
from collections.abc import Sequence
import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A table, or its rows.
Rows = pd.DataFrame | list[dict[str, Any]]


@dataclasses.dataclass
class Section:
    """Part of the page, filled in order.

    :param parts: kind ("text", "note", "code", "table" or "figure"), content and
        caption.
    """

    title: str
    parts: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    figures: dict[str, bytes] = dataclasses.field(default_factory=dict)
    tables: dict[str, pd.DataFrame] = dataclasses.field(default_factory=dict)
    facts: list[str] = dataclasses.field(default_factory=list)
    confirmed: list[str] = dataclasses.field(default_factory=list)
    doubts: list[str] = dataclasses.field(default_factory=list)

    def text(self, words: str) -> None:
        """Add a paragraph."""
        self.parts.append(("text", words, ""))

    def note(self, words: str) -> None:
        """Add a highlighted paragraph: a limitation of the numbers around it."""
        self.parts.append(("note", words, ""))

    def missing(self, what: str, why: object) -> None:
        """Note a result that could not be computed."""
        self.note(f"Not computed: {what}. {why}")

    def fact(self, words: str) -> None:
        """Add a line to the summary at the top of the page."""
        self.facts.append(words)

    def judge(self, is_confirmed: bool, words: str) -> None:
        """Add a check and its outcome to the verdict at the top of the page."""
        (self.confirmed if is_confirmed else self.doubts).append(words)

    def table(
        self, name: str, rows: Rows, caption: str = "", max_rows: int = 40
    ) -> None:
        """Add a table; the page shows its first rows, ``tables`` has all of them."""
        frame = self.tables[name] = pd.DataFrame(rows)
        index = not isinstance(frame.index, pd.RangeIndex)
        html = frame.head(max_rows).to_html(
            border=0, float_format="{:.4g}".format, na_rep="-", index=index
        )
        if len(frame) > max_rows:
            caption += f" (the first {max_rows} of {len(frame)} rows)"
        self.parts.append(("table", html, caption))

    def figure(self, name: str, figure: "Figure", caption: str = "") -> None:
        """Add a picture."""
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=110)
        self.figures[name] = stream.getvalue()
        self.parts.append(("figure", name, caption))


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Return the page: verdict, lead, facts of all sections, sections."""
    from jinja2 import Environment  # of the extra plots, like matplotlib

    environment = Environment(autoescape=True)
    environment.filters["base64"] = lambda png: base64.b64encode(png).decode()
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = environment.from_string(template)
    return page.render(title=title, lead=lead, sections=sections)
