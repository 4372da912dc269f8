# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The root, the faces of the rooms, and one version everywhere."""

import ast
from collections import Counter
from collections.abc import Iterator
import functools
import importlib
import inspect
from pathlib import Path
import re
import subprocess
import sys
import tomllib

import networkx as nx
import pytest

import ebmpp

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "ebmpp").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
ROOMS = sorted(
    p.name for p in (ROOT / "ebmpp").iterdir() if (p / "__init__.py").exists()
)


def test_the_root_is_small_and_true() -> None:
    assert len(ebmpp.__all__) <= 67
    assert len(set(ebmpp.__all__)) == len(ebmpp.__all__)
    assert not [name for name in ebmpp.__all__ if not hasattr(ebmpp, name)]


def test_what_shows_results_is_imported_when_somebody_looks() -> None:
    """They would take two fifths of the time of ``import ebmpp``."""
    code = """
import sys
import ebmpp
late = {"ebmpp.diagnostics", "ebmpp.reporting", "pandas", "xarray", "scipy.stats", "matplotlib"}
late |= {"arviz_base", "sklearn"}
assert not late & set(sys.modules), late & set(sys.modules)
names = {"diagnostics", "plots", "report", "reporting", "to_datatree", "tv_upper_bound"}
assert names <= set(dir(ebmpp))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    names: dict = {}
    exec("from ebmpp import *", names)
    assert all(
        names[name] is getattr(ebmpp.diagnostics, name)
        for name in ("plots", "to_datatree")
    )
    assert names["report"] is ebmpp.reporting.report


@pytest.mark.parametrize("room", ROOMS)
def test_a_module_is_not_called_like_a_name_of_its_room(room: str) -> None:
    """Else the name would be one thing or the other, by what was imported before."""
    face = importlib.import_module(f"ebmpp.{room}")
    modules = {
        p.stem
        for p in (ROOT / "ebmpp" / room).iterdir()
        if p.suffix == ".py" or p.is_dir()
    }
    functions = {n for n in getattr(face, "__all__", ()) if callable(getattr(face, n))}
    assert not modules & functions


def test_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (
        re.search(
            r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
        )[1]
        == version
    )


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path: Path) -> Iterator[str]:
    """Yield the modules and names that a file imports."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            yield from (
                str(node.module),
                *(f"{node.module}.{alias.name}" for alias in node.names),
            )


@pytest.mark.parametrize(
    "room", [str(p.parent.relative_to(ROOT)) for p in FILES if p.stem == "__init__"]
)
def test_a_room_has_at_most_12_files_and_5_floors(room: str) -> None:
    """Floors are counted by the longest chain of imports among the files of one folder."""
    names = {
        p: f"{room}.{p.stem}".replace("/", ".")
        for p in (ROOT / room).glob("*.py")
        if p.stem[0] != "_"
    }
    edges = [
        (name, other)
        for p, name in names.items()
        for other in imported(p)
        if other in names.values()
    ]
    assert len(names) <= 12 and nx.dag_longest_path_length(nx.DiGraph(edges)) <= 5


def test_docstrings_say_first_what_something_is_or_does() -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [
        (p.name, ast.get_docstring(n) or "")
        for p in FILES
        for n in nodes(p)
        if isinstance(n, kinds)
    ]
    assert [
        hit for hit in texts if re.match(r"(What|Whether|Of|How|Where)\b", hit[1])
    ] == []


def test_every_public_method_has_a_docstring() -> None:
    """An override inherits that of its base class; ruff's D102 does not know that."""
    modules = [importlib.import_module(f"ebmpp.{room}") for room in ROOMS]
    kinds = {
        c
        for m in modules
        for c in vars(m).values()
        if isinstance(c, type) and "ebmpp" in c.__module__
    }
    methods = [
        (c, n)
        for c in kinds
        for n, m in vars(c).items()
        if n[0] != "_" and inspect.isfunction(m)
    ]
    assert [
        (c, name) for c, name in methods if not inspect.getdoc(getattr(c, name))
    ] == []


def test_each_module_is_named_by_the_file_that_tests_it() -> None:
    heads = [ast.get_docstring(ast.parse(p.read_text())) for p in TESTS]
    sentences = re.findall(r"^Tests ((?:[^.]|\.py)+)", "\n".join(heads), re.MULTILINE)
    named = Counter(re.findall(r"[\w/]+\.py", " ".join(sentences)))
    modules = [p.relative_to(ROOT / "ebmpp") for p in FILES if p.stem != "__init__"]
    assert named == Counter(map(str, modules))
