# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a long computation: written whole or not at all, checked when they are read."""

from collections.abc import Generator, Mapping, Sequence
import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path
import re
import socket
from typing import Any, NamedTuple
import warnings

import numpy as np

from ebmpp.core import archive, checks, identity
from ebmpp.errors import ArgumentError, CheckpointError

_KEPT = 3  # the newest, and two to fall back on
MARKER, _LOCK = "ebmpp-checkpoints.json", "ebmpp-checkpoints.lock"
_NAME = re.compile(r"checkpoint-(\d{6,})\.zip")
_HALF = re.compile(r"\.checkpoint-\d{6,}\.zip\.\w+\.tmp")  # what a killed process was writing


class Caller(NamedTuple):
    """Who keeps checkpoints, in its errors' words."""

    kind: archive.Kind
    """Of its files; one kind does not read another's."""
    function: str
    """What the user calls."""
    argument: str
    """What the user gives the directory as."""
    steps: str
    """What the user gives the number of steps as."""


class Checkpoint(NamedTuple):
    """What one holds."""

    step: int
    """Steps done."""
    told: dict[str, Any]
    """What was told of the arrays: JSON values."""
    arrays: list[np.ndarray]


class Checkpoints:
    """The checkpoints of one run in a directory: one file each, ``checkpoint-000500.zip`` after 500 steps.

    ``ebmpp-checkpoints.json`` says that the directory is of such a run, and a lock on
    ``ebmpp-checkpoints.lock``, which ends with the process that holds it however that ends, keeps a second
    run out. Nothing else in the directory is read, written or removed, and of files with these names none
    where the first is missing. A file is put in its place at once, so a process that is killed leaves no half
    of a checkpoint; every byte of it is checked before anybody uses it.

    Subclasses say who calls, and what makes two runs one.

    :param directory: where; made if it is not there.
    :param run: what identifies the run, JSON values by name; a checkpoint of another is refused.
    :param resume: whether to go on where a run stopped.
    :raises CheckpointError: for a directory that another run is using, that holds checkpoints already
        without ``resume``, or files of our names that are not ours; for one that cannot be read or written.
    """

    caller: Caller

    def __init__(self, directory: str | os.PathLike[str], run: Mapping[str, Any], resume: bool) -> None:
        self.directory = _path(self.caller, directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is a file: give a directory for the checkpoints")
        self.run = json.loads(json.dumps(run))  # as it comes back from a file
        self._lock: int | None = None
        self._damaged: set[int] = set()
        try:
            with self._telling("cannot be used for checkpoints"):
                self.directory.mkdir(parents=True, exist_ok=True)
                self._refuse_others()
                self._lock = self._locked()
                self._begin(resume)
        except BaseException:
            self.close()
            raise

    def fingerprint(self) -> str:
        """A hash of what identifies the run."""
        return archive.hashed(self.run)

    def differences(self, there: Mapping[str, Any]) -> list[str]:
        """In words, what a saved run and this one differ in; empty for one run."""
        return identity.differences(there, self.run)

    def _begin(self, resume: bool) -> None:
        steps = self.steps()
        if steps and not resume:
            raise CheckpointError(
                f"{self.directory} holds checkpoints of steps {steps}: pass resume=True to go on from the "
                "last one, or give another directory"
            )
        for path in self.directory.iterdir():
            if _HALF.fullmatch(path.name):
                path.unlink(missing_ok=True)
        marker = self.directory / MARKER
        if not marker.exists() or not steps:
            told = {
                "format": self.caller.kind.format,
                "version": self.caller.kind.version,
                "run": self.fingerprint(),
            }
            archive.write_once(marker, lambda file: file.write(json.dumps(told, indent=1).encode()))

    def steps(self) -> list[int]:
        """Of the checkpoints that were finished."""
        found = map(_NAME.fullmatch, os.listdir(self.directory))
        return sorted(int(name[1]) for name in found if name)

    def close(self) -> None:
        """Let another run use the directory."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked process may hold the file open still
                os.close(self._lock)
            self._lock = None

    def write(self, step: int, told: Mapping[str, Any], arrays: Sequence[Any]) -> None:
        """Write the state after ``step`` steps, and remove what is older than the newest three.

        :param told: JSON values, whatever the reader needs to know of the arrays.
        :raises OSError: where the disk does not take it; checkpoints that were there are there still.
        """
        body = {"run": self.run, "step": step, **told}
        archive.write(self._file(step), self.caller.kind, body, [np.asarray(a) for a in arrays])
        self._damaged.discard(step)
        before = [n for n in self.steps() if n <= step]
        good = [n for n in before if n not in self._damaged]
        for old in {*before} - {*good[-_KEPT:]}:
            self._file(old).unlink(missing_ok=True)

    def read(self, depth: int = 4) -> Checkpoint | None:
        """The newest checkpoint that is whole; None in an empty directory.

        A damaged one is told by a warning and stays where it is until a later one is written.

        :param depth: how many calls above, this one counted, the user is whom to warn.
        :raises CheckpointError: when all are damaged, the newest whole one is another run's, or the disk
            fails.
        """
        steps = self.steps()[::-1]
        for step in steps:
            with self._telling(f"cannot be read at checkpoint {step}, so nothing was changed"):
                data = self._file(step).read_bytes()
            try:
                return self._read(step, data)
            except archive.ArchiveError as error:
                warnings.warn(f"checkpoint {step} in {self.directory} is damaged: {error}", stacklevel=depth)
                self._damaged.add(step)
        if steps:
            raise CheckpointError(
                f"all checkpoints in {self.directory} (steps {steps}) are damaged; start anew in another "
                "directory"
            )
        return None

    def _read(self, step: int, data: bytes) -> Checkpoint:
        name = self._file(step).name
        body, arrays = archive.read(data, self.caller.kind, name)
        if body["step"] != step:
            raise archive.ArchiveError(f"{name} is of step {body['step']}: the file was renamed")
        differences = self.differences(body["run"])
        if differences:
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} is of another run: {'; '.join(differences)}. Call "
                f"{self.caller.function} as that run was called, or give another directory"
            )
        return Checkpoint(step, body, arrays)

    def bytes_of(self, step: int) -> bytes:
        """The file of a checkpoint."""
        return self._file(step).read_bytes()

    def check_length(self, step: int, total: int) -> None:
        """:raises CheckpointError: for a checkpoint of more steps than the run has."""
        check_length(self.caller, self.directory, step, total)

    def _file(self, step: int) -> Path:
        return self.directory / f"checkpoint-{step:06}.zip"

    def _refuse_others(self) -> None:
        """:raises CheckpointError: where files that we did not write have names of ours."""
        names = os.listdir(self.directory)
        if MARKER in names:
            return self._check_marker()
        ours = sorted(filter(_NAME.fullmatch, names))
        if ours:
            raise CheckpointError(
                f"{self.directory} holds {ours[0]!r} and no {MARKER}, so no run of ebmpp is known to have "
                "written it: give another directory"
            )
        if any(_is_old(self.directory / name) for name in names if re.fullmatch(r"\d+\.json", name)):
            raise CheckpointError(
                f"{self.directory} holds checkpoints in the format of an earlier ebmpp, which this one does "
                "not read: finish that run with the version that began it, or give another directory"
            )

    def _check_marker(self) -> None:
        try:
            told = json.loads((self.directory / MARKER).read_bytes())
            kind, version = told["format"], told["version"]
        except (ValueError, TypeError, KeyError):
            return  # ours and damaged: each checkpoint says itself what it is
        if (kind, version) != (self.caller.kind.format, self.caller.kind.version):
            raise CheckpointError(
                f"{self.directory}: {MARKER} says {kind!r}, version {version!r}, and this ebmpp reads "
                f"{self.caller.kind.format!r}, version {self.caller.kind.version}: give another directory"
            )

    def _locked(self) -> int:
        """The lock's file, open.

        :raises CheckpointError: where another run holds it.
        """
        handle = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                holder = os.read(handle, 200).decode(errors="replace")
                os.close(handle)
                raise CheckpointError(
                    f"{self.directory} is in use by another run ({holder or 'unknown'}): wait until it ends, "
                    "or give another directory"
                ) from None
            warnings.warn(
                f"{self.directory} is on a disk without locks ({error}): see to it that no two runs use it",
                stacklevel=5,
            )
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError:
            os.close(handle)
            raise
        return handle

    @contextlib.contextmanager
    def _telling(self, what: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} {what}: {error}. Mend the disk and call again, or give another directory"
            ) from error


def check_length(caller: Caller, directory: str | os.PathLike[str], step: int, total: int) -> None:
    """:raises CheckpointError: for a checkpoint of more steps than the run has."""
    if step > total:
        raise CheckpointError(
            f"{directory} holds {step} steps, and this run has {total}: give {caller.steps} of at least as "
            "many, or another directory"
        )


def _path(caller: Caller, directory: Any) -> Path:
    name = f"{caller.function}: {caller.argument}"
    if not isinstance(directory, str | os.PathLike):
        raise ArgumentError(f"{name} is a path, not {checks.tell(directory)}")
    if not os.fspath(directory):
        raise ArgumentError(f'{name} is the path of a directory, not "": give "." for the working directory')
    if "\0" in str(directory):
        raise ArgumentError(f"{name} is a path, and none holds a zero byte: {str(directory)!r}")
    return Path(directory).absolute()


def _is_old(path: Path) -> bool:
    """Whether it is a checkpoint of the first format: arrays in a folder, and this file beside it."""
    try:
        told = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(told, dict) and told.keys() == {"body", "digest"}
