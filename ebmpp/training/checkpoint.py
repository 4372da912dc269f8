# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: written whole or not at all, checked when they are read."""

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

from ebmpp.core import archive, checks, sharding
from ebmpp.errors import ArgumentError, CheckpointError
from ebmpp.training import identity

_KEPT = 3  # the newest, and two to fall back on
_KIND = archive.Kind("ebmpp checkpoint", 2, "ebmpp.fit")
_MARKER, _LOCK = "ebmpp-checkpoints.json", "ebmpp-checkpoints.lock"
_NAME = re.compile(r"checkpoint-(\d{6,})\.zip")
_HALF = re.compile(r"\.checkpoint-\d{6,}\.zip\.\w+\.tmp")  # what a killed process was writing


class Saved(NamedTuple):
    """What a checkpoint holds."""

    step: int
    """Steps done."""
    leaves: list[np.ndarray]
    """Of the state, in the order of its pytree."""
    history: dict[str, np.ndarray]


class Checkpoints:
    """The checkpoints of one run in a directory: one file each, ``checkpoint-000500.zip`` after 500 steps.

    ``ebmpp-checkpoints.json`` says that the directory is of such a run, and a lock on
    ``ebmpp-checkpoints.lock``, which ends with the process that holds it however that ends, keeps a second
    run out. Nothing else in the directory is read, written or removed, and of files with these names none
    where the first is missing. A file is put in its place at once, so a process that is killed leaves no half
    of a checkpoint; every byte of it is checked before anybody uses it.

    :param directory: where; made if it is not there.
    :param run: what identifies the run, JSON values by name; a checkpoint of another is refused.
    :param resume: whether to go on where a run stopped.
    :raises CheckpointError: for a directory that another run is using, that holds checkpoints already
        without ``resume``, or files of our names that are not ours; for one that cannot be read or written.
    """

    def __init__(self, directory: str | os.PathLike[str], run: Mapping[str, Any], resume: bool) -> None:
        self.directory = _path(directory)
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
        marker = self.directory / _MARKER
        if not marker.exists() or not steps:
            told = {"format": _KIND.format, "version": _KIND.version, "run": identity.fingerprint(self.run)}
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

    def save(self, step: int, leaves: Sequence[Any], history: Mapping[str, np.ndarray]) -> None:
        """Write the state after ``step`` steps, and remove what is older than the newest three.

        :raises OSError: where the disk does not take it; checkpoints that were there are there still.
        """
        body = {"run": self.run, "step": step, "leaves": len(leaves), "history": list(history)}
        arrays = [np.asarray(a) for a in (*leaves, *history.values())]
        archive.write(self._file(step), _KIND, body, arrays)
        self._damaged.discard(step)
        before = [n for n in self.steps() if n <= step]
        good = [n for n in before if n not in self._damaged]
        for old in {*before} - {*good[-_KEPT:]}:
            self._file(old).unlink(missing_ok=True)

    def restore(self) -> Saved | None:
        """The newest checkpoint that is whole; None in an empty directory.

        A damaged one is told by a warning and stays where it is until a later one is written.

        :raises CheckpointError: when all are damaged, the newest whole one is another run's, or the disk
            fails.
        """
        found = self.newest()
        return None if found is None else read(*found, self.run, self.directory)

    def newest(self) -> tuple[int, bytes] | None:
        """The step and the bytes of that checkpoint."""
        steps = self.steps()[::-1]
        for step in steps:
            with self._telling(f"cannot be read at checkpoint {step}, so nothing was changed"):
                data = self._file(step).read_bytes()
            try:
                read(step, data, self.run, self.directory)
                return step, data
            except archive.ArchiveError as error:
                warnings.warn(f"checkpoint {step} in {self.directory} is damaged: {error}", stacklevel=5)
                self._damaged.add(step)
        if steps:
            raise CheckpointError(
                f"all checkpoints in {self.directory} (steps {steps}) are damaged; start anew in another "
                "directory"
            )
        return None

    def _file(self, step: int) -> Path:
        return self.directory / _name(step)

    def _refuse_others(self) -> None:
        """:raises CheckpointError: where files that we did not write have names of ours."""
        names = os.listdir(self.directory)
        if _MARKER in names:
            return self._check_marker()
        ours = sorted(filter(_NAME.fullmatch, names))
        if ours:
            raise CheckpointError(
                f"{self.directory} holds {ours[0]!r} and no {_MARKER}, so no run of ebmpp is known to have "
                "written it: give another directory"
            )
        if any(_is_old(self.directory / name) for name in names if re.fullmatch(r"\d+\.json", name)):
            raise CheckpointError(
                f"{self.directory} holds checkpoints in the format of an earlier ebmpp, which this one does "
                "not read: finish that run with the version that began it, or give another directory"
            )

    def _check_marker(self) -> None:
        try:
            told = json.loads((self.directory / _MARKER).read_bytes())
            kind, version = told["format"], told["version"]
        except (ValueError, TypeError, KeyError):
            return  # ours and damaged: each checkpoint says itself what it is
        if (kind, version) != (_KIND.format, _KIND.version):
            raise CheckpointError(
                f"{self.directory}: {_MARKER} says {kind!r}, version {version!r}, and this ebmpp reads "
                f"{_KIND.format!r}, version {_KIND.version}: give another directory"
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


def _name(step: int) -> str:
    return f"checkpoint-{step:06}.zip"


def read(step: int, data: bytes, run: Mapping[str, Any], directory: Path) -> Saved:
    """What the bytes of a checkpoint hold.

    :param run: what identifies the run that goes on.
    :raises ArchiveError: for damaged ones.
    :raises CheckpointError: for those of another run.
    """
    name = _name(step)
    body, arrays = archive.read(data, _KIND, name)
    if body["step"] != step:
        raise archive.ArchiveError(f"{name} is of step {body['step']}: the file was renamed")
    differences = identity.differences(body["run"], run)
    if differences:
        raise CheckpointError(
            f"checkpoint {step} in {directory} is of another run: {'; '.join(differences)}. Call "
            "fit as that run was called, or give another directory"
        )
    count = body["leaves"]
    return Saved(step, arrays[:count], dict(zip(body["history"], arrays[count:], strict=True)))


def _path(directory: Any) -> Path:
    if not isinstance(directory, str | os.PathLike):
        raise ArgumentError(f"fit: checkpoint_dir is a path, not {checks.tell(directory)}")
    if not os.fspath(directory):
        raise ArgumentError(
            'fit: checkpoint_dir is the path of a directory, not "": give "." for the working directory'
        )
    if "\0" in str(directory):
        raise ArgumentError(f"fit: checkpoint_dir is a path, and none holds a zero byte: {str(directory)!r}")
    return Path(directory).absolute()


class OfProcesses:
    """The checkpoints of a run of several processes: the first one has the disk, and tells the others."""

    def __init__(self, directory: str | os.PathLike[str], run: Mapping[str, Any], resume: bool) -> None:
        self.directory = _path(directory)
        self.run = json.loads(json.dumps(run))
        self._own = sharding.by_first(lambda: Checkpoints(directory, run, resume))

    def close(self) -> None:
        """Let another run use the directory."""
        if self._own is not None:
            self._own.close()

    def save(self, step: int, leaves: Sequence[Any], history: Mapping[str, np.ndarray]) -> None:
        """By the first process; the others wait for it.

        :raises OSError: in all, where the disk does not take it.
        """
        whole, own = sharding.to_host(list(leaves)), self._own
        sharding.by_first(lambda: None if own is None else own.save(step, whole, history))

    def restore(self) -> Saved | None:
        """The newest checkpoint that is whole, as the first process reads it.

        :raises CheckpointError: as :meth:`Checkpoints.restore` does.
        """
        own = self._own
        found = sharding.by_first(lambda: None if own is None else own.newest())
        step, data = (-1, b"") if found is None else found
        step = int(sharding.shared_bytes(str(step).encode()))
        data = sharding.shared_bytes(data)
        return read(step, data, self.run, self.directory) if data else None


def _is_old(path: Path) -> bool:
    """Whether it is a checkpoint of the first format: arrays in a folder, and this file beside it."""
    try:
        told = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(told, dict) and told.keys() == {"body", "digest"}
