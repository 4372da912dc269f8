# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of every page run, in order, as one program per page."""

import contextlib
import io
from pathlib import Path
import re

from matplotlib import pyplot as plt
import pytest

import jax

from helpers import assert_like
from release_files import outputs, python_blocks

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / page for page in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")
]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
MAX_README_LINES = 160
MAX_COLUMNS = 88  # of code on a page of the site, which is cut beyond


def test_python_blocks_keep_their_lines() -> None:
    text = "# t\n```python\nx = 1\n```\n```bash\nls\n```\n\n```python\ny = x\n\nz = y\n```\n"
    assert python_blocks(text) == ["\n\nx = 1\n", "\n" * 9 + "y = x\n\nz = y\n"]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix(""))


WITH_CODE = {name(p): p for p in PAGES if python_blocks(p.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("key", WITH_CODE)
def test_a_page_runs(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = WITH_CODE[key]
    monkeypatch.chdir(tmp_path)  # where a page writes its files
    namespace, text = {"__name__": page.stem}, page.read_text(encoding="utf-8")
    stored = outputs(text)
    for number, block in enumerate(python_blocks(text)):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, str(page), "exec"), namespace)
        if number in stored:
            assert_like(printed.getvalue(), stored[number])
    plt.close("all")
    jax.clear_caches()  # pages share few programs, and all of them together take 5 GB


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=name)
def test_code_fits_the_page(page: Path) -> None:
    blocks = python_blocks(page.read_text(encoding="utf-8"))
    assert not [
        line
        for block in blocks
        for line in block.splitlines()
        if len(line) > MAX_COLUMNS
    ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_of_a_page_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert not [
        link
        for link in links
        if "://" not in link and not (page.parent / link).exists()
    ]


def test_readme_is_short() -> None:
    assert (
        len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
        <= MAX_README_LINES
    )
