# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Every tutorial runs from its first cell to its last, and prints what it stores."""

from pathlib import Path

import nbformat
import pytest

from helpers import assert_like, often

pytestmark = pytest.mark.nightly

TUTORIALS = sorted((Path(__file__).parents[1] / "tutorials").glob("*.ipynb"))
# The others take two minutes or more with an empty cache.
SHORT = ("01_from_declaration_to_trained_model",)
CELL_SECONDS = 600  # long enough for a busy machine; only a hang fails


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_are_small_and_have_outputs(path: Path) -> None:
    assert path.stat().st_size < 400_000
    cells = [
        cell
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
    ]
    assert all(cell.execution_count for cell in cells), (
        "execute the notebook before you commit it"
    )


def text(cell: nbformat.NotebookNode) -> str:
    """Return what a cell prints and shows as text; no warnings, and no values of single
    steps or sweeps."""
    outputs = [
        output for output in cell.get("outputs", ()) if output.get("name") != "stderr"
    ]
    texts = [output.get("text") or output.data["text/plain"] for output in outputs]
    return "".join(text.split("\nData variables")[0] for text in texts)


# The kernel is a separate process: warnings of the client are not the tutorial's.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", often([path.stem for path in TUTORIALS], *SHORT))
def test_tutorials_execute(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbclient import NotebookClient

    root = Path(__file__).parents[1]
    # also from a source tree that is not installed
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own shows figures
    notebook = nbformat.read(root / f"tutorials/{name}.ipynb", as_version=4)
    stored = [text(cell) for cell in notebook.cells]
    folder = {"metadata": {"path": str(tmp_path)}}  # where a tutorial writes its files
    NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", resources=folder
    ).execute()
    for cell, expected in zip(notebook.cells, stored, strict=True):
        assert_like(text(cell), expected)
