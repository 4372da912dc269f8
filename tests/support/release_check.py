# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a release: it builds, installs, and runs its examples outside the repository.

``make release-check`` builds the sdist and, from it, the wheel; resolves every extra,
and the package for every supported Python; and runs README, the docstrings and
``python -m ebmpp`` from the installed wheel in a fresh environment of each Python found
here. It prints a table of passed, failed and skipped checks. It needs a package index,
and minutes per Python.
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

import release_files

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
INSIDE = ("install", "readme", "main", "doctests")
CHECKS = ("build", "extras", "resolve", *INSIDE)
_SHOWN = 30  # lines of a failed command's output


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
    """The checks and their results."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    @contextlib.contextmanager
    def row(self, check: str, python: str, note: str = "") -> Iterator[Row]:
        """Run a check: a failure goes into the table, and the next check runs."""
        row, begin = Row(check, python, "ok", note=note), time.monotonic()
        self.rows.append(row)
        print(f"== {check}, Python {python} {note}".rstrip(), flush=True)
        try:
            yield row
        except (
            Exception
        ) as error:  # of any kind: the table must report the other checks
            row.result, output = "FAILED", str(getattr(error, "stderr", None) or error)
            print(output, flush=True)
            last = output.strip().splitlines()[-1] if output.strip() else repr(error)
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
            lines.append(
                f"{r.check:<10}{r.python:<9}{r.result:<9}{seconds:>8}  {r.note}".rstrip()
            )
        return "\n".join(lines)


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """Run a command in a folder outside the repository, and return its output.

    :raises CheckFailed: if it fails, with the end of its output.
    """
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    env |= {
        "MPLBACKEND": "agg",
        "JAX_PLATFORMS": env.get("JAX_PLATFORMS", "cpu"),
        "COLUMNS": "110",
    }
    process = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    if process.returncode:
        output = (process.stdout + process.stderr).strip().splitlines()[-_SHOWN:]
        raise CheckFailed("\n".join([" ".join(map(str, command)), *output]))
    return process.stdout


def interpreter(version: str) -> str | None:
    """Return a Python of that version that starts and makes environments: one on PATH
    may be a shim."""
    candidates = [f"python{version}"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        root = subprocess.run(
            ["pyenv", "root"], capture_output=True, text=True, check=True
        ).stdout.strip()
        candidates += sorted(
            map(str, Path(root).glob(f"versions/{version}.*/bin/python"))
        )
    probe = "import sys, venv, ensurepip, ssl; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        with contextlib.suppress(OSError):
            process = subprocess.run(
                [candidate, "-c", probe], capture_output=True, text=True
            )
            if process.returncode == 0 and process.stdout.strip() == version:
                return candidate
    return None


def build(table: Table, out: Path) -> Path | None:
    """Build the sdist and a wheel from it, which must equal the wheel built from the repository."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with table.row("build", here) as row:
        sdist = release_files.build("sdist", out / "sdist")
        wheel = release_files.build("wheel", out / "checkout")
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        run([*pip, "--wheel-dir", out / "wheel", sdist], out)
        (from_sdist,) = (out / "wheel").glob("*.whl")
        faults = release_files.sdist_faults(sdist) + release_files.wheel_faults(
            from_sdist
        )
        if release_files.payload(from_sdist) != release_files.payload(wheel):
            faults.append(
                "the wheel made from the sdist is not the wheel of the repository"
            )
        if faults:
            raise CheckFailed("\n".join(faults))
        size = lambda path: f"{path.name} {path.stat().st_size / 1e6:.1f} MB"
        row.note = f"{size(sdist)}, {size(from_sdist)} from it"
        return from_sdist
    return None


def _packages(pip: Sequence[str | Path], out: Path, *requirements: str) -> list[str]:
    """Return the packages that pip would install, as name and version; nothing is installed."""
    report = out / "report.json"
    options = ["--quiet", "--dry-run", "--ignore-installed", "--report", report]
    run([*pip, "-m", "pip", "install", *options, *requirements], out)
    packages = [
        item["metadata"]
        for item in json.loads(report.read_text(encoding="utf-8"))["install"]
    ]
    return [f"{metadata['name']} {metadata['version']}" for metadata in packages]


def extras(table: Table, wheel: Path, out: Path) -> None:
    """Resolve every extra, without installing it."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for extra in release_files.PROJECT["optional-dependencies"]:
        with table.row("extras", here, extra) as row:
            count = len(_packages([sys.executable], out, f"{wheel}[{extra}]"))
            row.note = f"{extra}: {count} packages, by dry run"


def resolve(table: Table, wheel: Path, out: Path) -> None:
    """Check that every requirement has a wheel for each Python.

    Version conditions in the requirements of other packages are evaluated for the
    Python that runs this.
    """
    for version in VERSIONS:
        with table.row("resolve", version) as row:
            other = [
                "--python-version",
                version,
                "--only-binary",
                ":all:",
                "--target",
                str(out / "none"),
            ]
            packages = _packages([sys.executable], out, *other, f"{wheel}[plots]")
            main = sorted(
                p for p in packages if p.split()[0] in ("jax", "jaxlib", "numpyro")
            )
            row.note = f"{len(packages)} packages have wheels: {', '.join(main)}"


def bare(python: Path, out: Path, wheel: Path) -> str:
    """Install without extras: it imports, is the built version, and names the extra
    that plots need."""
    run([python, "-m", "pip", "install", "--quiet", wheel], out)
    output = run(
        [python, "-c", "import ebmpp; print(ebmpp.__version__); print(ebmpp.__file__)"],
        out,
    )
    version, place = output.split("\n")[:2]
    if version != release_files.VERSION or not Path(place).is_relative_to(
        python.parents[1]
    ):
        raise CheckFailed(
            f"ebmpp {version} at {place}, expected {release_files.VERSION}, installed"
        )
    try:
        run([python, "-m", "ebmpp", "--steps", "1"], out)
    except CheckFailed as error:
        if "ebmpp[plots]" not in str(error):
            raise
    else:
        raise CheckFailed("python -m ebmpp draws without matplotlib")
    return f"ebmpp {version}"


def readme(python: Path, out: Path) -> str:
    """Run the blocks of README as one program."""
    blocks = release_files.python_blocks(
        (release_files.ROOT / "README.md").read_text(encoding="utf-8")
    )
    (out / "readme.py").write_text(
        "\n".join(block.lstrip("\n") for block in blocks), encoding="utf-8"
    )
    run([python, "readme.py"], out)
    return f"{len(blocks)} blocks"


def main_job(python: Path, out: Path, steps: int) -> str:
    """Run ``python -m ebmpp`` with fewer steps."""
    folder = out / "digits"
    output = run([python, "-m", "ebmpp", "--steps", str(steps), "--out", folder], out)
    pictures = {
        f"{n}.png" for n in ("learning_curve", "filters", "samples", "meeting_times")
    }
    missing = pictures | {"draws.nc", "history.nc", "digits.ebmpp"}
    missing -= {p.name for p in folder.iterdir() if p.stat().st_size}
    if missing:
        raise CheckFailed(f"python -m ebmpp did not write {sorted(missing)}")
    score = next(
        line
        for line in output.splitlines()
        if line.startswith("log-likelihood, held out")
    )
    return f"{steps} steps; {' '.join(score.split())}"


def doctests(python: Path, out: Path) -> str:
    """Run the docstrings' examples in the installed package; one needs ArviZ, which is optional."""
    extras = release_files.PROJECT["optional-dependencies"]
    requirements = [
        *extras["arviz"],
        *(name for name in extras["test"] if name.startswith("pytest>")),
    ]
    run([python, "-m", "pip", "install", "--quiet", *requirements], out)
    settings = tomllib.loads(
        (release_files.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )["tool"]
    flags = " ".join(settings["pytest"]["ini_options"]["doctest_optionflags"])
    (out / "pytest.ini").write_text(
        f"[pytest]\ndoctest_optionflags = {flags}\n", encoding="utf-8"
    )
    output = run(
        [python, "-m", "pytest", "-q", "--doctest-modules", "--pyargs", "ebmpp"], out
    )
    return output.strip().splitlines()[-1]


def inside(
    table: Table,
    version: str,
    wheel: Path,
    checks: Sequence[str],
    steps: int,
    out: Path,
) -> None:
    """Run the checks of an installed package on one Python."""
    interpreter_path = interpreter(version)
    if interpreter_path is None:
        for check in checks:
            table.skip(
                check,
                version,
                "no such interpreter here; `resolve` reports whether wheels exist",
            )
        return
    place = out / f"python{version}"
    place.mkdir()
    python = place / "env" / "bin" / "python"
    with table.row("install", version) as row:
        run([interpreter_path, "-m", "venv", place / "env"], out)
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
    """Return the parsed options."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add(
        "--checks",
        nargs="+",
        choices=CHECKS,
        default=CHECKS,
        help="only these, and the build",
    )
    add(
        "--pythons",
        nargs="+",
        choices=VERSIONS,
        default=VERSIONS,
        help="only in environments of these",
    )
    add("--steps", type=int, default=100, help="of python -m ebmpp")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the checks, print the table, and exit with 1 if one failed."""
    args, table = parse(argv), Table()
    with tempfile.TemporaryDirectory(prefix="ebmpp-release-") as folder:
        out = Path(folder)
        wheel = build(table, out)
        if wheel is not None and "extras" in args.checks:
            extras(table, wheel, out)
        if wheel is not None and "resolve" in args.checks:
            resolve(table, wheel, out)
        installed_checks = [check for check in INSIDE if check in args.checks]
        for version in args.pythons if wheel is not None and installed_checks else ():
            inside(table, version, wheel, installed_checks, args.steps, out)
    print(f"\n{table}")
    if wheel is None:
        print("nothing else was checked: there is no wheel")
    sys.exit(table.failed)


if __name__ == "__main__":
    main()
