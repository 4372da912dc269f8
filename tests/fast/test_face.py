# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What stands at the root, what stands in the rooms' faces, and what one version says everywhere."""

import importlib
from pathlib import Path
import re
import subprocess
import sys
import tomllib

import pytest

import ebmpp

ROOT = Path(__file__).parents[2]
ROOMS = sorted(p.name for p in (ROOT / "ebmpp").iterdir() if (p / "__init__.py").exists())


def test_the_root_is_small_and_true() -> None:
    assert len(ebmpp.__all__) <= 56
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
from ebmpp import *
assert "xarray" in sys.modules
assert all(globals()[name] is getattr(ebmpp.diagnostics, name) for name in ("plots", "to_datatree"))
assert report is ebmpp.reporting.report
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("room", ROOMS)
def test_a_module_is_not_called_like_a_name_of_its_room(room: str) -> None:
    """Else the name would be one thing or the other, by what was imported before."""
    face = importlib.import_module(f"ebmpp.{room}")
    modules = {p.stem for p in (ROOT / "ebmpp" / room).iterdir() if p.suffix == ".py" or p.is_dir()}
    functions = {n for n in getattr(face, "__all__", ()) if callable(getattr(face, n))}
    assert not modules & functions


def test_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == version


def test_files_have_at_most_400_lines() -> None:
    lengths = {p: len(p.read_text().splitlines()) for p in (ROOT / "ebmpp").rglob("*.py")}
    assert [str(p) for p, length in lengths.items() if length > 400] == []
