# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The experiments of the papers, from one place.

``python benchmarks/papers.py --list`` tells every figure and table of the four papers, the command that makes
it, its time and what became of it; ``--only u5 d4`` runs some rows, and without it all of them run that need
no file of their own but MNIST's. ``--settings quick`` ends in minutes and shows only that everything runs,
``--settings paper`` has the papers' own sizes. Figures and tables go to ``--out``. Every row is a program of
its own, with options of its own, and all that take images take ``--data``.
"""

import argparse
from collections.abc import Sequence
import importlib
from pathlib import Path
import sys
import time
from types import ModuleType

from paper_rows import ROWS
from row import Row

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("quick", "small", "paper")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="run nothing; tell every row")
    parser.add_argument("--only", nargs="+", choices=tuple(ROWS))
    parser.add_argument("--settings", choices=SETTINGS, default="small")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/report"))
    args = parser.parse_args(argv)
    every = [name for name, row in ROWS.items() if row.state.kind != "needs data"]
    args.only = args.only or (list(ROWS) if args.list or args.settings == "quick" else every)
    return args


def program(row: Row) -> ModuleType:
    """Of a row."""
    folder, name = row.script.split("/")
    for path in (ROOT, ROOT / folder):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    return importlib.import_module(name)


def told(row: Row, settings: str) -> str:
    """A row as text."""
    printed = f", {', '.join(row.printed)}" if row.printed else ""
    lines = [f"{row.name}: {row.paper}{printed}", f"    {row.what}", f"    {row.state}; {row.time}"]
    lines += [f"    {row.script}.py {' '.join(options)}".rstrip() for options in row.options(settings)]
    return "\n".join(lines)


def run(row: Row, settings: str, out: Path) -> None:
    """All runs of a row, one after another."""
    module, begin = program(row), time.monotonic()
    for options in row.options(settings):
        print(f"{row.name}: {row.script}.py {' '.join(options)}", flush=True)
        module.main([*options, "--out", str(out)])
    print(f"{row.name}: {time.monotonic() - begin:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """One row after another."""
    args = parse(argv)
    for name in args.only:
        if args.list:
            print(told(ROWS[name], args.settings))
        else:
            run(ROWS[name], args.settings, args.out)
    if args.list and args.settings == "small":
        known = [ROWS[name].minutes or 0 for name in args.only]
        print(f"in all {sum(known) / 60:.1f} hours on one or two cores, other programs beside")


if __name__ == "__main__":
    main()
