# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Link names in docstrings and pages to the reference, whatever path the name is written with.

A docstring may write :class:`PCD` or `ebmpp.estimators.PCD`; the reference describes `ebmpp.PCD`. A name that
the reference lacks is an error in a docstring, and plain text in a signature. In Markdown pages inline code
is linked if it is a public name.
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

#: Rooms whose names may be written without the room.
ROOMS = (
    "annealing",
    "coupling",
    "exact",
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
    "sklearn",
    "training",
)


def _resolve(path: str) -> Any:
    """Return the object at a dotted path, or None."""
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            value = getattr(value, part, None)
        return value
    return None


def _home(path: str) -> str:
    """Return the full name of an object in the file that defines it."""
    value = _resolve(path)
    if inspect.ismodule(value):
        return value.__name__
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', path)}"


def _reference_names(env: BuildEnvironment) -> dict[str, str]:
    """Return the names of the reference by the full name of their definition."""
    if not hasattr(env, "ebmpp_homes"):
        objects = env.domains.python_domain.objects
        kinds = {n: e.objtype for n, e in objects.items() if not e.aliased}
        env.ebmpp_homes = {_home(name): name for name, kind in kinds.items() if kind != "data"}
    return env.ebmpp_homes


def _reference_name(env: BuildEnvironment, node: pending_xref) -> str | None:
    """Return the only name of the reference that a node can refer to, or None."""
    target, homes = node["reftarget"].removesuffix("()"), _reference_names(env)
    if (home := _home(target)) in homes:
        return homes[home]
    ends = {name for name in homes.values() if name.endswith("." + target)}
    return min(ends) if len(ends) == 1 else None


def _link(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Element) -> nodes.Node | None:
    """Resolve a reference that Sphinx did not find (event ``missing-reference``)."""
    if node.get("refdomain") != "py":
        return None
    if name := _reference_name(env, node):
        entry = env.domains.python_domain.objects[name]
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, text, name)
    in_text = isinstance(text, nodes.literal)
    elsewhere = "." in node["reftarget"] and not node["reftarget"].startswith("ebmpp")
    return None if in_text and not elsewhere else text


class CodeLinks(SphinxPostTransform):
    """Link inline code such as `UCD(k=1)` in pages if it is a public name."""

    default_priority = 900

    def run(self, **kwargs: Any) -> None:
        if self.env.docname.startswith("docs/reference/"):
            return
        for node in list(self.document.findall(nodes.literal)):
            match = re.fullmatch(r"([\w.]+)(?:\(.*\))?", node.astext(), re.DOTALL)
            if not match or isinstance(node.parent, nodes.reference | nodes.title):
                continue
            if name := self._full_name(match[1].removeprefix("ebmpp.")):
                entry = self.env.domains.python_domain.objects[name]
                link = make_refnode(
                    self.app.builder, self.env.docname, entry.docname, entry.node_id, [], name
                )
                node.replace_self(link)
                link += node

    def _full_name(self, name: str) -> str | None:
        """Return the full name: at the root, in a room, or in a module named with it."""
        objects = self.env.domains.python_domain.objects
        for path in (f"ebmpp.{name}", *(f"ebmpp.{room}.{name}" for room in ROOMS)):
            if path in objects and objects[path].objtype not in ("data", "module"):
                return path
        return None


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", _link)
    app.add_post_transform(CodeLinks)
