# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The README's python blocks run, in order, as one program."""

from pathlib import Path
import re

import pytest

README = Path(__file__).parents[1] / "README.md"
FENCE = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[str]:
    """The code of each ```python block, padded with newlines to keep its line numbers."""
    return ["\n" * text.count("\n", 0, m.start(1)) + m.group(1) for m in FENCE.finditer(text)]


def test_python_blocks_are_found_with_their_lines() -> None:
    text = "# t\n```python\nx = 1\n```\n```bash\nls\n```\n\n```python\ny = x\n\nz = y\n```\n"
    assert python_blocks(text) == ["\n\nx = 1\n", "\n" * 9 + "y = x\n\nz = y\n"]


def test_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = python_blocks(README.read_text(encoding="utf-8")) if README.exists() else []
    if not blocks:
        pytest.skip("README.md has no python block")
    monkeypatch.chdir(tmp_path)  # what the README writes does not land in the repository
    namespace = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
