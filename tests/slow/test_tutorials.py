# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Every tutorial runs from beginning to end."""

from pathlib import Path

import nbformat
import pytest

from helpers import often

TUTORIALS = sorted((Path(__file__).parents[2] / "tutorials").glob("*.ipynb"))
# The others take two minutes and more from nothing: run by `make slow`.
SHORT = ("01_from_declaration_to_trained_model",)
CELL_SECONDS = 600  # a slow machine under load is no failure; a hang is


def test_there_are_tutorials() -> None:
    assert TUTORIALS


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_kept_with_its_outputs_and_small(path: Path) -> None:
    assert path.stat().st_size < 400_000
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells), "execute it before it is committed"


@pytest.mark.notebook
# The kernel is a process of its own: what its plumbing says here is not the tutorial's.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", often([path.stem for path in TUTORIALS], *SHORT))
def test_a_tutorial_executes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", str(root))  # also from a source tree that is not installed
    notebook = nbformat.read(root / f"tutorials/{name}.ipynb", as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},  # what a tutorial writes stays here
    )
    client.execute()
