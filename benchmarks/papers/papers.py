# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The experiments of the papers, from one place.

``python benchmarks/papers/papers.py --list`` prints every figure and table of the four
papers with its command, its time and its outcome. ``--only u5 d4`` runs some rows;
without it all rows run whose data are available (MNIST at most). ``--settings quick``
takes minutes and shows only that everything runs; ``--settings paper`` has the papers'
sizes. The rows are in rows.toml; each is a program with its own options.
"""

import argparse
from collections.abc import Sequence
import importlib
from pathlib import Path
import sys
import time
from types import ModuleType

from rows import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("quick", "small", "paper")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--list", action="store_true", help="run nothing; print every row"
    )
    parser.add_argument("--only", nargs="+", choices=tuple(ROWS))
    parser.add_argument("--settings", choices=SETTINGS, default="small")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/report"))
    args = parser.parse_args(argv)
    available = [name for name, row in ROWS.items() if not row.needs_data]
    args.only = args.only or (
        list(ROWS) if args.list or args.settings == "quick" else available
    )
    return args


def program(row: Row) -> ModuleType:
    """Import the program of a row."""
    folder, name = row.script.rsplit("/", 1)
    for path in (ROOT, ROOT / folder):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    return importlib.import_module(name)


def describe(row: Row, settings: str) -> str:
    """Return a row as text."""
    printed = f", {', '.join(row.printed)}" if row.printed else ""
    lines = [
        f"{row.name}: {row.paper}{printed}",
        f"    {row.what}",
        f"    {row.state}; {row.time}",
    ]
    lines += [
        f"    {row.script}.py {' '.join(options)}".rstrip()
        for options in row.options(settings)
    ]
    return "\n".join(lines)


def run(row: Row, settings: str, out: Path) -> None:
    """Run a row's program with each of its options."""
    module = program(row)
    start = time.monotonic()
    for options in row.options(settings):
        print(f"{row.name}: {row.script}.py {' '.join(options)}", flush=True)
        module.main([*options, "--out", str(out)])
    print(f"{row.name}: {time.monotonic() - start:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run or list the rows."""
    args = parse(argv)
    for name in args.only:
        if args.list:
            print(describe(ROWS[name], args.settings))
        else:
            run(ROWS[name], args.settings, args.out)
    if args.list and args.settings == "small":
        minutes = sum(ROWS[name].minutes or 0 for name in args.only)
        print(
            f"in all {minutes / 60:.1f} hours on one or two cores, beside other programs"
        )


if __name__ == "__main__":
    main()
