# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A page of text, tables and pictures in one HTML file that refers to no other."""

import base64
from collections.abc import Sequence
import dataclasses
from html import escape
import io
from string import Template
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
.ebmpp { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; max-width: 62rem;
  margin: auto; padding: 0 1rem 3rem; }
.ebmpp h1 { font-size: 1.6rem; margin: 1.5rem 0 .3rem; }
.ebmpp h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid #cbd2d9; }
.ebmpp table { border-collapse: collapse; margin: .7rem 0; font-size: .88rem; }
.ebmpp .told { color: #52606d; font-size: .88rem; margin: 1rem 0 -.5rem; }
.ebmpp th, .ebmpp td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #e4e7eb; }
.ebmpp th:first-child, .ebmpp td:first-child { text-align: left; padding-left: 0; }
.ebmpp pre { white-space: pre-wrap; background: #f5f7fa; padding: .6rem .8rem; font-size: .85rem; }
.ebmpp img { max-width: max(100%, 34rem); height: auto; }
.ebmpp figure { margin: .8rem 0; overflow-x: auto; } .ebmpp figcaption { color: #52606d; font-size: .88rem; }
.ebmpp .wide { overflow-x: auto; }
.ebmpp .caveat, .ebmpp .missing, .ebmpp .verdict { border-left: 4px solid; padding: .4rem .8rem;
  margin: .6rem 0; }
.ebmpp .caveat { border-color: #dd8e2c; background: #fdf6ec; }
.ebmpp .sound { border-color: #2f855a; background: #eff8f2; }
.ebmpp .doubt { border-color: #dd8e2c; background: #fdf6ec; }
.ebmpp .missing { border-color: #9aa5b1; background: #f5f7fa; }
"""

_PAGE = Template(
    """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title><style>$style</style></head>
<body><main class="ebmpp"><h1>$title</h1>
$body
</main></body></html>
"""
)


@dataclasses.dataclass
class Section:
    """A part of the page, filled in order."""

    title: str
    parts: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, bytes] = dataclasses.field(default_factory=dict)
    tables: dict[str, pd.DataFrame] = dataclasses.field(default_factory=dict)
    facts: list[str] = dataclasses.field(default_factory=list)
    sound: list[str] = dataclasses.field(default_factory=list)
    doubts: list[str] = dataclasses.field(default_factory=list)

    def text(self, words: str) -> None:
        """A paragraph."""
        self.parts.append(f"<p>{escape(words)}</p>")

    def code(self, words: str) -> None:
        """Preformatted text."""
        self.parts.append(f"<pre>{escape(words)}</pre>")

    def caveat(self, words: str) -> None:
        """What to beware of."""
        self.parts.append(f'<p class="caveat">{escape(words)}</p>')

    def missing(self, what: str, why: object) -> None:
        """What is not there, and why."""
        self.parts.append(f'<p class="missing"><b>Not computed: {escape(what)}.</b> {escape(str(why))}</p>')

    def fact(self, words: str) -> None:
        """A line of the summary at the top of the page."""
        self.facts.append(words)

    def judge(self, sound: bool, words: str) -> None:
        """A part of the verdict at the top of the page: what was looked at, and what came of it."""
        (self.sound if sound else self.doubts).append(words)

    def table(self, name: str, frame: pd.DataFrame, caption: str = "", most: int = 40) -> None:
        """A table, whole in ``tables``; on the page its first ``most`` rows."""
        self.tables[name] = frame
        shown = frame.head(most)
        numbered = isinstance(frame.index, pd.RangeIndex)
        made = shown.to_html(border=0, float_format="{:.4g}".format, na_rep="-", index=not numbered)
        told = escape(caption)
        if len(frame) > most:
            told += f" (the first {most} of {len(frame)} rows)"
        self.parts.append(f'<p class="told">{told}</p>' if told else "")
        self.parts.append(f'<div class="wide">{made}</div>')  # a narrow screen scrolls it, not the page

    def figure(self, name: str, figure: "Figure", caption: str = "") -> None:
        """A picture."""
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=110)
        self.figures[name] = stream.getvalue()
        data = base64.b64encode(stream.getvalue()).decode()
        told = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        image = f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">'
        self.parts.append(f"<figure>{image}{told}</figure>")

    def html(self) -> str:
        """The section as HTML."""
        return f"<section><h2>{escape(self.title)}</h2>\n" + "\n".join(self.parts) + "</section>"


def verdict(sections: Sequence[Section]) -> str:
    """The verdict of all sections, as HTML: what is to be doubted, and else what is in order."""
    doubts = [words for section in sections for words in section.doubts]
    sound = [words for section in sections for words in section.sound]
    told = []
    if doubts:
        told.append(f"<b>To be doubted:</b> {escape('; '.join(doubts))}.")
    if sound:
        told.append(f"<b>{'Else in order' if doubts else 'In order'}:</b> {escape('; '.join(sound))}.")
    kind = "doubt" if doubts else "sound"
    return f'<p class="verdict {kind}">{" ".join(told)}</p>\n' if told else ""


def page(title: str, verdict: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page: a verdict in HTML, a lead, the facts of all sections, and the sections."""
    facts = "".join(f"<li>{escape(fact)}</li>" for section in sections for fact in section.facts)
    body = f"{verdict}<p>{escape(lead)}</p>\n<ul>{facts}</ul>\n" + "\n".join(s.html() for s in sections)
    return _PAGE.substitute(title=escape(title), style=_STYLE, body=body)
