# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Options that the experiments share, and their runs as JSON files."""

import argparse
from collections.abc import Iterable
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def parser(
    description: str,
    methods: Iterable[str] = (),
    seeds: Iterable[int] = (0,),
    draws: bool = True,
) -> argparse.ArgumentParser:
    """Return a parser with ``--only``, ``--seeds``, ``--name``, ``--out`` and ``--draw``.

    :param description: a module's docstring, of which the first line is shown.
    :param methods: what ``--only`` chooses from; all are the default.
    :param draws: False for an experiment without ``--draw``.
    """
    result = argparse.ArgumentParser(description=description.splitlines()[0])
    add = result.add_argument
    methods = list(methods)
    if methods:
        add(
            "--only", nargs="+", choices=methods, default=methods, help="methods to run"
        )
    add(
        "--seeds",
        type=int,
        nargs="+",
        default=list(seeds),
        help="one run per method and seed",
    )
    add("--name", default="", help="suffix of this version's files")
    add(
        "--out",
        type=Path,
        default=Path("benchmarks/report"),
        help="folder for tables and pictures",
    )
    if draws:
        add("--draw", action="store_true", help="run nothing; draw the stored runs")
    return result


def parse(
    result: argparse.ArgumentParser, argv: Any, *positive: str
) -> argparse.Namespace:
    """Return the options; a value of ``positive`` that is not ends the program."""
    args = result.parse_args(argv)
    for name in positive:
        if not getattr(args, name) > 0:
            result.error(
                f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}."
            )
    return args


class Records:
    """Runs of one experiment: one file per run under ``raw/``, and all of them in ``<stem>.json``.

    :param out: the folder.
    :param stem: name of the experiment and of its version.
    """

    def __init__(self, out: Path, *stem: str) -> None:
        self.out = out
        self.stem = "_".join(filter(None, stem))

    @property
    def summary(self) -> Path:
        """The file of all runs; the picture has the same name."""
        return self.out / f"{self.stem}.json"

    def save(self, name: str, seed: int, row: Row) -> None:
        """Write one run."""
        path = self.out / "raw" / f"{self.stem}-{name}-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")

    def load(self, names: Iterable[str]) -> list[Row]:
        """Return the stored runs, in the order of ``names`` and by seed."""
        rows: list[Row] = []
        for name in names:
            files = (self.out / "raw").glob(f"{self.stem}-{name}-*.json")
            files = [
                f
                for f in files
                if f.stem.removeprefix(f"{self.stem}-{name}-").isdigit()
            ]
            rows += [
                json.loads(f.read_text(encoding="utf-8"))
                for f in sorted(files, key=_seed)
            ]
        return rows

    def summarize(self, names: Iterable[str], **known: Any) -> Row:
        """Write and return all runs with what is known of the experiment.

        Without files under ``raw/`` the summary that was written before is returned.

        :raises SystemExit: if there are neither.
        """
        if rows := self.load(names):
            self.write(known | {"runs": rows})
        elif not self.summary.exists():
            raise SystemExit(
                f"There are no runs in {self.out / 'raw'}. Run some first, without --draw."
            )
        return json.loads(self.summary.read_text(encoding="utf-8"))

    def write(self, summary: Row) -> None:
        """Write the summary."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.summary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _seed(file: Path) -> int:
    return int(file.stem.rsplit("-", 1)[1])


def rounded(value: float, digits: int = 3) -> float:
    """Round to significant digits."""
    return float(f"{float(value):.{digits}g}")
