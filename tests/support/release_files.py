# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The two files of a release, their expected contents, and the programs in pages."""

from email import message_from_bytes
from email.message import Message
from pathlib import Path, PurePosixPath
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
VERSION = PROJECT["version"]
#: contents of an sdist: the package, and everything that its tests read
FOLDERS = ("ebmpp", "tests", "models", "docs", "tutorials", "benchmarks")
SINGLE = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "Makefile",
    "conftest.py",
    "pyproject.toml",
    "PKG-INFO",
)
_STRAY = {"__pycache__", ".ipynb_checkpoints", "build", "dist", ".venv", ".git"}


def build(target: str, out: Path) -> Path:
    """Build "wheel" or "sdist" of this source tree, by hatchling as the build backend.

    :raises CalledProcessError: if the build fails.
    """
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        target,
        "--directory",
        str(out),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (file,) = out.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return file


def sources() -> set[str]:
    """Return the files of the package, as paths from the root: its modules, py.typed
    and a template."""
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "ebmpp").rglob("*.py")}
    return modules | {"ebmpp/py.typed", "ebmpp/reporting/page.html"}


def wheel_faults(wheel: Path) -> list[str]:
    """Return the faults of a wheel, which must hold the whole package and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"ebmpp-{VERSION}.dist-info"
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
    records = {
        f"{info}/{n}" for n in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")
    }
    return [
        *(f"lacks {n}" for n in sorted((sources() | records) - names)),
        *(
            f"has {n}, which is no part of the package"
            for n in sorted(names - sources() - records)
        ),
        *_metadata_faults(metadata),
    ]


def _metadata_faults(metadata: Message) -> list[str]:
    expected = {
        "Version": VERSION,
        "Requires-Python": PROJECT["requires-python"],
        "License-Expression": PROJECT["license"],
    }
    wrong = [
        f"{name} is {metadata[name]}, expected {value}"
        for name, value in expected.items()
        if metadata[name] != value
    ]
    extras = set(metadata.get_all("Provides-Extra", []))
    if extras != set(PROJECT["optional-dependencies"]):
        wrong.append(
            f"extras are {sorted(extras)}, expected {sorted(PROJECT['optional-dependencies'])}"
        )
    return wrong


def sdist_faults(sdist: Path) -> list[str]:
    """Return the faults of an sdist, which must hold the package, its tests and all
    that these read."""
    with tarfile.open(sdist) as archive:
        top = f"ebmpp-{VERSION}"
        paths = [
            PurePosixPath(m.name).relative_to(top)
            for m in archive.getmembers()
            if m.isfile()
        ]
    names = {str(p) for p in paths} - {".gitignore"}  # hatchling adds it
    tests = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("*.py")}
    strangers = {n for n in names - set(SINGLE) if n.split("/")[0] not in FOLDERS}
    strays = {str(p) for p in paths if _STRAY & set(p.parts)}
    return [
        *(f"lacks {n}" for n in sorted((sources() | tests | set(SINGLE)) - names)),
        *(
            f"has nothing of {f}/"
            for f in FOLDERS
            if not any(n.startswith(f"{f}/") for n in names)
        ),
        *(f"has {n}, which is no part of it" for n in sorted(strangers | strays)),
    ]


def payload(wheel: Path) -> dict[str, bytes]:
    """Return the package's files in a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            n: archive.read(n) for n in archive.namelist() if n.startswith("ebmpp/")
        }


_FENCE = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[str]:
    """Return the code of each Python block of a page, padded with newlines to keep its
    line numbers."""
    return [
        "\n" * text.count("\n", 0, m.start(1)) + m.group(1)
        for m in _FENCE.finditer(text)
    ]


def outputs(text: str) -> dict[int, str]:
    """Return the text blocks that stand directly below a Python block of a page, by its number."""
    ends = {m.end(): number for number, m in enumerate(_FENCE.finditer(text))}
    return {
        ends[end]: m.group(1)
        for m in re.finditer(r"\n*^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if (end := m.start()) in ends
    }
