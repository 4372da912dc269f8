# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Signatures with the annotations of the source: ``params: Params``, where Sphinx would write it out."""

import ast
from collections.abc import Iterator
import inspect
import textwrap
from typing import Any

from sphinx.application import Sphinx


def _definition(made: Any) -> Any:
    """Its syntax tree."""
    return ast.parse(textwrap.dedent(inspect.getsource(made))).body[0]


def _bare(annotation: ast.expr | None) -> str:
    """An annotation, without the quotes of names that come later in their file."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation) if annotation else ""


def _of_function(function: Any, bound: bool) -> tuple[str, str | None]:
    tree = _definition(inspect.unwrap(function))
    every = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
    for argument in [*every, tree.args.vararg, tree.args.kwarg]:
        if argument and argument.annotation:
            argument.annotation = ast.parse(_bare(argument.annotation), mode="eval").body
    if bound:
        del tree.args.args[0]
    return f"({ast.unparse(tree.args)})", _bare(tree.returns) or None


def _fields(made: type) -> Iterator[tuple[str, str]]:
    """Names and annotations in the bodies of a class and of those that it inherits from, these first."""
    for base in reversed(made.__mro__):
        if base.__module__.startswith("ebmpp"):
            for node in _definition(base).body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    yield node.target.id, _bare(node.annotation)


def _of_fields(made: type) -> str:
    """Of a dataclass or a NamedTuple, whose ``__init__`` nobody wrote."""
    annotated, told, starred = dict(_fields(made)), [], False
    for name, parameter in inspect.signature(made).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            told.append("*")
            starred = True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        told.append(f"{name}: {annotated[name]}{default if '<' not in default else ' = ...'}")
    return f"({', '.join(told)})"


def _written(
    app: Sphinx, what: str, name: str, made: Any, options: Any, signature: str, returned: str
) -> tuple[str, str | None] | None:
    """For ``autodoc-process-signature``."""
    if what == "class":
        own = next(base for base in made.__mro__ if "__init__" in vars(base))
        if issubclass(made, tuple):
            return _of_fields(made), None
        if not own.__module__.startswith("ebmpp"):
            return None
        if own.__init__.__code__.co_filename == "<string>":  # a dataclass made it
            return _of_fields(made), None
        return _of_function(own.__init__, True)[0], None
    if what in ("function", "method"):
        function = inspect.unwrap(getattr(made, "__func__", made))
        held = what == "method" and list(inspect.signature(function).parameters)[:1] in (["self"], ["cls"])
        return _of_function(function, held)
    return None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", _written)
