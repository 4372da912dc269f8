# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a release must pass: it builds, installs, and does what its pages say, away from the repository.

``make release-check`` builds the sdist and, from it, the wheel; resolves every extra, and the package for
Pythons that are not here, too; and in a fresh environment of each Python runs README, docstrings and
``python -m ebmpp`` from the installed wheel. It ends with a table of what passed, what failed and what was
skipped, and why. It needs a package index, and minutes for each Python.
"""

import argparse
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

from page_blocks import python_blocks
import release_files

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
INSIDE = ("install", "readme", "main", "doctests")
CHECKS = ("build", "extras", "resolve", *INSIDE)
_SHOWN = 30  # lines of what a failed command said


class CheckFailed(Exception):
    """A check found a fault."""


@dataclasses.dataclass
class Row:
    """One check on one Python."""

    check: str
    python: str
    result: str
    seconds: float = 0.0
    note: str = ""


class Table:
    """What was checked, and what came of it."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    @contextlib.contextmanager
    def row(self, check: str, python: str, note: str = "") -> Iterator[Row]:
        """A check: what fails inside stands in the table, and the next one is tried."""
        row, begin = Row(check, python, "ok", note=note), time.monotonic()
        self.rows.append(row)
        print(f"== {check}, Python {python} {note}".rstrip(), flush=True)
        try:
            yield row
        except Exception as error:  # whatever it is: what other checks found must be told
            row.result, told = "FAILED", str(getattr(error, "stderr", None) or error)
            print(told, flush=True)
            last = told.strip().splitlines()[-1] if told.strip() else repr(error)
            row.note = f"{note}: {last}" if note else last
        row.seconds = time.monotonic() - begin

    def skip(self, check: str, python: str, why: str) -> None:
        self.rows.append(Row(check, python, "skipped", note=why))

    @property
    def failed(self) -> bool:
        return any(row.result == "FAILED" for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'check':<10}{'Python':<9}{'result':<9}{'seconds':>8}  note"]
        for r in self.rows:
            seconds = f"{r.seconds:.0f}" if r.seconds else ""
            lines.append(f"{r.check:<10}{r.python:<9}{r.result:<9}{seconds:>8}  {r.note}".rstrip())
        return "\n".join(lines)


# -- running things ------------------------------------------------------------------------------------


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """What a command printed, in a folder outside the repository, which it must not see.

    :raises CheckFailed: with the end of what it said, when it fails.
    """
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    env |= {"MPLBACKEND": "agg", "JAX_PLATFORMS": env.get("JAX_PLATFORMS", "cpu"), "COLUMNS": "110"}
    made = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True)
    if made.returncode:
        told = (made.stdout + made.stderr).strip().splitlines()[-_SHOWN:]
        raise CheckFailed("\n".join([" ".join(map(str, command)), *told]))
    return made.stdout


def interpreter(version: str) -> str | None:
    """A Python of that version that starts and makes environments: one on PATH may be a shim of nothing."""
    candidates = [f"python{version}"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        asked = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True)
        candidates += sorted(map(str, Path(asked.stdout.strip()).glob(f"versions/{version}.*/bin/python")))
    probe = "import sys, venv, ensurepip, ssl; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        with contextlib.suppress(OSError):
            told = subprocess.run([candidate, "-c", probe], capture_output=True, text=True)
            if told.returncode == 0 and told.stdout.strip() == version:
                return candidate
    return None


# -- the checks ----------------------------------------------------------------------------------------


def build(table: Table, out: Path) -> Path | None:
    """The sdist, the wheel made from it, and whether that is the wheel of the repository."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with table.row("build", here) as row:
        sdist = release_files.build("sdist", out / "sdist")
        wheel = release_files.build("wheel", out / "checkout")
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        run([*pip, "--wheel-dir", out / "wheel", sdist], out)
        (made,) = (out / "wheel").glob("*.whl")
        faults = release_files.sdist_faults(sdist) + release_files.wheel_faults(made)
        if release_files.payload(made) != release_files.payload(wheel):
            faults.append("the wheel made from the sdist is not the wheel of the repository")
        if faults:
            raise CheckFailed("\n".join(faults))
        size = lambda path: f"{path.name} {path.stat().st_size / 1e6:.1f} MB"
        row.note = f"{size(sdist)}, {size(made)} from it"
        return made
    return None


def _packages(pip: Sequence[str | Path], out: Path, *what: str) -> list[str]:
    """What pip would install, as name and version, for what was asked; nothing is installed."""
    report = out / "report.json"
    said = ["--quiet", "--dry-run", "--ignore-installed", "--report", report]
    run([*pip, "-m", "pip", "install", *said, *what], out)
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [f"{each['metadata']['name']} {each['metadata']['version']}" for each in found]


def extras(table: Table, wheel: Path, out: Path) -> None:
    """Each extra resolves; those for GPUs are not installed, nor are others here."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for extra in release_files.PROJECT["optional-dependencies"]:
        with table.row("extras", here, extra) as row:
            count = len(_packages([sys.executable], out, f"{wheel}[{extra}]"))
            row.note = f"{extra}: {count} packages, by dry run"


def resolve(table: Table, wheel: Path, out: Path) -> None:
    """For each Python, whether wheels exist for it of everything needed.

    Conditions on the version in others' requirements are read for the Python that runs this.
    """
    for version in VERSIONS:
        with table.row("resolve", version) as row:
            other = ["--python-version", version, "--only-binary", ":all:", "--target", str(out / "none")]
            found = _packages([sys.executable], out, *other, f"{wheel}[plots]")
            main = sorted(p for p in found if p.split()[0] in ("jax", "jaxlib", "numpyro"))
            row.note = f"{len(found)} packages have wheels: {', '.join(main)}"


def bare(python: Path, out: Path, wheel: Path) -> str:
    """Without extras: imports, is what was built, and says what the pictures need."""
    run([python, "-m", "pip", "install", "--quiet", wheel], out)
    told = run([python, "-c", "import ebmpp; print(ebmpp.__version__); print(ebmpp.__file__)"], out)
    version, place = told.split("\n")[:2]
    if version != release_files.VERSION or not Path(place).is_relative_to(python.parents[1]):
        raise CheckFailed(f"ebmpp {version} at {place}, expected {release_files.VERSION}, installed")
    try:
        run([python, "-m", "ebmpp", "--steps", "1"], out)
    except CheckFailed as error:
        if "ebmpp[plots]" not in str(error):
            raise
    else:
        raise CheckFailed("python -m ebmpp draws without matplotlib")
    return f"ebmpp {version}"


def readme(python: Path, out: Path) -> str:
    """The blocks of README, as one program."""
    blocks = python_blocks((release_files.ROOT / "README.md").read_text(encoding="utf-8"))
    (out / "readme.py").write_text("\n".join(block.lstrip("\n") for block in blocks), encoding="utf-8")
    run([python, "readme.py"], out)
    return f"{len(blocks)} blocks"


def main_job(python: Path, out: Path, steps: int) -> str:
    """``python -m ebmpp`` as a stranger would call it, but shorter."""
    folder = out / "digits"
    told = run([python, "-m", "ebmpp", "--steps", str(steps), "--out", folder], out)
    pictures = {f"{n}.png" for n in ("learning_curve", "filters", "samples", "meeting_times")}
    lacking = pictures | {"draws.nc", "history.nc", "digits.ebmpp"}
    lacking -= {p.name for p in folder.iterdir() if p.stat().st_size}
    if lacking:
        raise CheckFailed(f"python -m ebmpp did not write {sorted(lacking)}")
    scored = next(line for line in told.splitlines() if line.startswith("log-likelihood, held out"))
    return f"{steps} steps; {' '.join(scored.split())}"


def doctests(python: Path, out: Path) -> str:
    """The docstrings' examples, of the installed package; one needs ArviZ, which is no dependency."""
    tested = release_files.PROJECT["optional-dependencies"]["test"]
    needed = [each for each in tested if each.startswith(("arviz", "pytest>"))]
    run([python, "-m", "pip", "install", "--quiet", *needed], out)
    settings = tomllib.loads((release_files.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    flags = " ".join(settings["pytest"]["ini_options"]["doctest_optionflags"])
    (out / "pytest.ini").write_text(f"[pytest]\ndoctest_optionflags = {flags}\n", encoding="utf-8")
    told = run([python, "-m", "pytest", "-q", "--doctest-modules", "--pyargs", "ebmpp"], out)
    return told.strip().splitlines()[-1]


def inside(table: Table, version: str, wheel: Path, checks: Sequence[str], steps: int, out: Path) -> None:
    """All that is asked of an installed package, on one Python."""
    found = interpreter(version)
    if found is None:
        for check in checks:
            table.skip(check, version, "no such interpreter here; `resolve` tells whether wheels exist")
        return
    place = out / f"python{version}"
    place.mkdir()
    python = place / "env" / "bin" / "python"
    with table.row("install", version) as row:
        run([found, "-m", "venv", place / "env"], out)
        row.note = f"{bare(python, place, wheel)} without extras, then with plots"
        run([python, "-m", "pip", "install", "--quiet", f"{wheel}[plots]"], place)
    calls = {
        "readme": lambda: readme(python, place),
        "main": lambda: main_job(python, place, steps),
        "doctests": lambda: doctests(python, place),
    }
    installed = table.rows[-1].result == "ok"
    for check in [check for check in calls if check in checks]:
        if not installed:
            table.skip(check, version, "the package was not installed")
            continue
        with table.row(check, version) as row:
            row.note = calls[check]()
    shutil.rmtree(place)  # an environment is half a gigabyte


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--checks", nargs="+", choices=CHECKS, default=CHECKS, help="only these, and the build")
    add("--pythons", nargs="+", choices=VERSIONS, default=VERSIONS, help="only in environments of these")
    add("--steps", type=int, default=100, help="of python -m ebmpp")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Check, tell, and fail where a check did."""
    args, table = parse(argv), Table()
    with tempfile.TemporaryDirectory(prefix="ebmpp-release-") as folder:
        out = Path(folder)
        wheel = build(table, out)
        if wheel is not None and "extras" in args.checks:
            extras(table, wheel, out)
        if wheel is not None and "resolve" in args.checks:
            resolve(table, wheel, out)
        wanted = [check for check in INSIDE if check in args.checks]
        for version in args.pythons if wheel is not None and wanted else ():
            inside(table, version, wheel, wanted, args.steps, out)
    print(f"\n{table}")
    if wheel is None:
        print("nothing else was checked: there is no wheel")
    sys.exit(table.failed)


if __name__ == "__main__":
    main()
