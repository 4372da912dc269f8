# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: written whole or not at all, checked when they are read."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import hashlib
import json
import os
from pathlib import Path
import shutil
from typing import Any, NamedTuple
import warnings

import numpy as np

from ebmpp.errors import CheckpointError

_KEPT = 3  # the newest, and two to fall back on


class Saved(NamedTuple):
    """What a checkpoint holds."""

    step: int
    """Steps done."""
    leaves: list[np.ndarray]
    """Of the state, in the order of its pytree."""
    history: dict[str, np.ndarray]


class Checkpoints:
    """The checkpoints of one run in a directory, by orbax.

    The arrays of step n are in the directory ``n``, written by orbax. ``n.json`` is written last, at once: it
    holds what identifies the run and a digest of every file. So a process that is killed leaves no half of a
    checkpoint, and files that change afterwards are found before anybody reads them.

    :param directory: where; made if it is not there.
    :param run: what identifies the run, JSON values by name; a checkpoint of another is refused.
    :param resume: whether to go on where a run stopped.
    :raises CheckpointError: for checkpoints that are there already without ``resume``, a file in the place of
        the directory, or without orbax.
    """

    def __init__(self, directory: str | os.PathLike[str], run: Mapping[str, Any], resume: bool) -> None:
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is a file: give a directory for the checkpoints")
        self.run = json.loads(json.dumps(run))  # as it comes back from a file
        self.orbax = _orbax().StandardCheckpointer()
        if self.steps() and not resume:
            raise CheckpointError(
                f"{self.directory} holds checkpoints of steps {self.steps()}: pass resume=True to go on from "
                "the last one, or give another directory"
            )

    def steps(self) -> list[int]:
        """Of the checkpoints that were finished."""
        found = self.directory.glob("[0-9]*.json") if self.directory.is_dir() else ()
        return sorted(int(path.stem) for path in found if path.stem.isdigit())

    def close(self) -> None:
        """Wait for what is being written."""
        self.orbax.close()

    def save(self, step: int, leaves: Sequence[Any], history: Mapping[str, np.ndarray]) -> None:
        """Write the state after ``step`` steps, and remove what is older than the newest three."""
        arrays = {f"leaf_{i:05d}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        arrays |= {f"history_{name}": np.asarray(v) for name, v in history.items()}
        empty = {name: [list(a.shape), str(a.dtype)] for name, a in arrays.items() if a.size == 0}
        folder = self.directory / str(step)
        self.orbax.save(folder, {name: a for name, a in arrays.items() if a.size}, force=True)
        self.orbax.wait_until_finished()
        body = {"run": self.run, "leaves": len(leaves), "empty": empty, "files": _files(folder)}
        beside = folder.with_suffix(".tmp")
        beside.write_text(json.dumps({"body": body, "digest": _hash(_text(body))}))
        beside.replace(folder.with_suffix(".json"))
        for old in self.steps()[:-_KEPT]:
            (self.directory / f"{old}.json").unlink()
            shutil.rmtree(self.directory / str(old), ignore_errors=True)

    def restore(self) -> Saved | None:
        """The newest checkpoint that is whole; None in an empty directory.

        A damaged one is told by a warning and set aside, and the one before it is taken.

        :raises CheckpointError: when all are damaged, or the newest whole one is another run's.
        """
        steps = self.steps()[::-1]
        for step in steps:
            found = self._read(step)
            if isinstance(found, Saved):
                return found
            warnings.warn(f"checkpoint {step} in {self.directory} is damaged: {found}", stacklevel=4)
            (self.directory / f"{step}.json").replace(self.directory / f"{step}.damaged")
        if steps:
            raise CheckpointError(
                f"all checkpoints in {self.directory} (steps {steps}) are damaged; start anew in another "
                "directory"
            )
        return None

    def _read(self, step: int) -> Saved | str:
        """A checkpoint, or what is wrong with it."""
        folder = self.directory / str(step)
        try:
            made = json.loads(folder.with_suffix(".json").read_text())
            body, wanted = made["body"], made["digest"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{step}.json cannot be read ({type(error).__name__})"
        if _hash(_text(body)) != wanted:
            return f"{step}.json is not what was written"
        there = _files(folder)
        changed = sorted(name for name, v in body["files"].items() if there.get(name) != v)
        if changed:
            return f"file {changed[0]} is not what was written"
        self._check_run(step, body["run"])
        with _quiet():
            arrays = {name: np.asarray(v) for name, v in self.orbax.restore(folder).items()}
        arrays |= {name: np.empty(shape, dtype) for name, (shape, dtype) in body["empty"].items()}
        history = {n.removeprefix("history_"): v for n, v in arrays.items() if n.startswith("history_")}
        return Saved(step, [arrays[f"leaf_{i:05d}"] for i in range(body["leaves"])], history)

    def _check_run(self, step: int, saved: Mapping[str, Any]) -> None:
        """:raises CheckpointError: naming what differs."""
        names = [name for name in {**saved, **self.run} if saved.get(name) != self.run.get(name)]
        if names:
            told = "; ".join(f"{n}: {saved.get(n)!r} there, {self.run.get(n)!r} here" for n in names)
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} is of another run: {told}. Call fit as that run was "
                "called, or give another directory"
            )


def digest(arrays: Mapping[str, Any]) -> str:
    """A hash of names, shapes, dtypes and bytes."""
    made = hashlib.sha256()
    for name in sorted(arrays):
        a = np.ascontiguousarray(arrays[name])
        made.update(f"{name} {np.shape(arrays[name])} {a.dtype}\n".encode())
        made.update(a.tobytes())
    return made.hexdigest()


def _text(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _files(folder: Path) -> dict[str, str]:
    """Digests of all files under a folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _hash(path.read_bytes()) for path in found}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """orbax warns of what is meant: arrays are read without a template."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp  # an extra: seconds to import
    except ImportError as error:
        raise CheckpointError('checkpoints need orbax-checkpoint: pip install "ebmpp[checkpoint]"') from error
    return ocp
