# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Formulas as MathML, which browsers read: no script, and nothing from another server."""

from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx


def _mathml(node: nodes.Element, as_block: bool) -> str:
    """Return a formula as MathML, with a space between the name of a function and its argument."""
    applied = "&ApplyFunction;</mo>"
    text = latex2mathml.tex2mathml(node.astext(), as_block=as_block)
    return text.replace(applied, applied + '<mspace width="0.17em"/>')


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(_mathml(node, False))
    raise nodes.SkipNode


def _display(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{_mathml(node, True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
