# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Names in docstrings lead to where a thing is described, whatever path they take to it.

A docstring says :class:`PCD` as its own file does, or `ebmpp.estimators.PCD`; the reference describes
`ebmpp.PCD`. What is described nowhere is an error in a docstring, and text in a signature. In pages of plain
Markdown, code in a line leads there by itself.
"""

import importlib
import inspect
import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

#: Whose names may stand without them.
ROOMS = (
    "estimators",
    "evaluate",
    "diagnostics",
    "errors",
    "graph",
    "kernels",
    "moves",
    "plots",
    "ppl",
    "reporting",
    "distribution",
    "traced",
    "sampling",
    "sklearn",
    "training",
)


def _found(path: str) -> Any:
    """Return the object at a dotted path, or None."""
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            made = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            made = getattr(made, part, None)
        return made
    return None


def _home(path: str) -> str:
    """A name as the file that defines it would write it."""
    made = _found(path)
    if inspect.ismodule(made):
        return made.__name__
    return f"{getattr(made, '__module__', None)}.{getattr(made, '__qualname__', path)}"


def _described(env: BuildEnvironment) -> dict[str, str]:
    """Names of the reference, by their home."""
    if not hasattr(env, "ebmpp_homes"):
        objects = env.domains.python_domain.objects
        made = {n: e.objtype for n, e in objects.items() if not e.aliased}
        env.ebmpp_homes = {_home(name): name for name, kind in made.items() if kind != "data"}
    return env.ebmpp_homes


def _named(env: BuildEnvironment, node: pending_xref) -> str | None:
    """The one thing of the reference that a node can mean, or None."""
    target, homes = node["reftarget"].removesuffix("()"), _described(env)
    if (home := _home(target)) in homes:
        return homes[home]
    ends = {name for name in homes.values() if name.endswith("." + target)}
    return min(ends) if len(ends) == 1 else None


def _lead(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Element) -> nodes.Node | None:
    """For ``missing-reference``."""
    if node.get("refdomain") != "py":
        return None
    if name := _named(env, node):
        entry = env.domains.python_domain.objects[name]
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, shown, name)
    in_text = isinstance(shown, nodes.literal)
    elsewhere = "." in node["reftarget"] and not node["reftarget"].startswith("ebmpp")
    return None if in_text and not elsewhere else shown


class CodeLinks(SphinxPostTransform):
    """`UCD(k=1)` in a line of a page leads to what it names, if that is a name of a room's face."""

    default_priority = 900

    def run(self, **kwargs: Any) -> None:
        if self.env.docname.startswith("docs/reference/"):
            return
        for node in list(self.document.findall(nodes.literal)):
            named = re.fullmatch(r"([\w.]+)(?:\(.*\))?", node.astext(), re.DOTALL)
            if named and not isinstance(node.parent, nodes.reference | nodes.title):
                if name := self._only(named[1].removeprefix("ebmpp.")):
                    entry = self.env.domains.python_domain.objects[name]
                    link = make_refnode(
                        self.app.builder, self.env.docname, entry.docname, entry.node_id, [], name
                    )
                    node.replace_self(link)
                    link += node

    def _only(self, name: str) -> str | None:
        """What it is called in full: at the root, in a room, or in a module that is named with it."""
        objects = self.env.domains.python_domain.objects
        for path in (f"ebmpp.{name}", *(f"ebmpp.{room}.{name}" for room in ROOMS)):
            if path in objects and objects[path].objtype not in ("data", "module"):
                return path
        return None


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", _lead)
    app.add_post_transform(CodeLinks)
