# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Write a complete sample report beside the pages, by the program of docs/howto/report.md."""

import os
from pathlib import Path
import re
import subprocess
import sys

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]


def write_report(app: Sphinx, error: Exception | None) -> None:
    """Run the page's Python blocks in the folder of the site, where they write report.html."""
    if error is None and app.builder.format == "html":
        page = (ROOT / "docs/howto/report.md").read_text(encoding="utf-8")
        code = "".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
        env = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        subprocess.run(command, cwd=app.outdir, env=env, check=True, stdout=subprocess.DEVNULL)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("build-finished", write_report)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
