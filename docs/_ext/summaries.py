# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A table of contents with first sentences at the top of each reference page."""

import re

from sphinx.application import Sphinx

_ENTRY = re.compile(r"^\.\. auto(?:class|function|exception|data):: (\S+)$", re.MULTILINE)
_START = re.compile(r"^(?:[^\n]+\n-{3,}|\.\. auto(?:class|function|exception|data):: \S+)$", re.MULTILINE)


def insert(app: Sphinx, page: str, source: list[str]) -> None:
    """Insert a summary of all entries of a page before its first section or entry."""
    del app
    names = _ENTRY.findall(source[0])
    start = _START.search(source[0])
    if not page.startswith("docs/reference/") or len(names) < 3 or start is None:
        return
    lines = "".join(f"   ~{name}\n" for name in names)
    modules = re.findall(r"module:: (\S+)$", source[0][: start.start()], re.MULTILINE)
    table = f".. currentmodule:: None\n\n.. autosummary::\n   :nosignatures:\n\n{lines}\n"
    if modules:
        table += f".. currentmodule:: {modules[-1]}\n\n"
    source[0] = source[0][: start.start()] + table + source[0][start.start() :]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", insert)
    return {"parallel_read_safe": True}
