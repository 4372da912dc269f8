# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a long computation: written atomically, and validated when they are read."""

from collections.abc import Callable, Generator, Mapping, Sequence
import contextlib
import fcntl
import hashlib
from importlib import metadata
import json
import os
from pathlib import Path
import re
import socket
from typing import Any, ClassVar, NamedTuple
import warnings

from jaxtyping import PyTree
import numpy as np

import jax
import jax.numpy as jnp
from jax.stages import Lowered
from jax.typing import ArrayLike

from ebmpp.core import VERSION, archive, checks, random
from ebmpp.core.types import Numbers
from ebmpp.errors import CheckpointError

#: What all calls of a run have in common: JSON values by name.
Identity = Mapping[str, object]
_KEPT = 3  # the newest, and two to fall back on
LOCK = "ebmpp-checkpoints.lock"
_NAME = re.compile(r"checkpoint-(\d{6,})\.zip")
_PARTIAL = re.compile(r"\.checkpoint-\d{6,}\.zip\.\w+\.tmp")  # left by a killed process


class Checkpoint(NamedTuple):
    """Contents of a checkpoint."""

    step: int
    """Number of steps done."""
    body: dict[str, Any]
    """JSON values that describe the arrays."""
    arrays: list[np.ndarray]


class Checkpoints:
    """Checkpoints of one run in a directory: ``checkpoint-000500.zip`` after 500 steps.

    A lock on ``ebmpp-checkpoints.lock``, which ends with the process that holds it,
    keeps a second run out. Files of other names are never read, written or removed. A
    file is written atomically, so a killed process leaves no partial checkpoint; every
    byte is validated before it is used.

    A subclass names the function that writes the files, its argument for the directory,
    the one for the number of steps, and entries of the identity that depend on
    :func:`versions`.

    :param run: identity of the run, JSON values by name; checkpoints of another run are
        refused.
    :param resume: continue the run whose checkpoints are there.
    :raises CheckpointError: for a directory in use, one with checkpoints without
        ``resume``, or one that cannot be read or written.
    """

    kind: ClassVar[archive.Kind]
    function: ClassVar[str]
    argument: ClassVar[str]
    total: ClassVar[str]
    compiled: ClassVar[tuple[str, ...]]

    def __init__(
        self, directory: str | os.PathLike[str], run: Identity, resume: bool
    ) -> None:
        self.directory = checks.path(
            f"{self.function}: {self.argument}", directory, "the path of a directory"
        ).absolute()
        self.run = json.loads(json.dumps(run))  # as it is read from a file
        self._lock: int | None = None
        self._damaged: set[int] = set()
        try:
            with self.disk_errors("cannot be used for checkpoints"):
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = self._locked()
                if (steps := self.steps()) and not resume:
                    raise CheckpointError(
                        f"{self.directory} has checkpoints of steps {steps}. Pass "
                        "resume=True to continue from the last one, or give another "
                        "directory."
                    )
                for path in self.directory.iterdir():
                    if _PARTIAL.fullmatch(path.name):
                        path.unlink(missing_ok=True)
        except BaseException:
            self.close()
            raise

    def differences(self, saved: Identity) -> list[str]:
        """Return the differences to a saved run; code of other versions is not compared."""
        ignored = {"versions"}
        if saved.get("versions") != self.run["versions"]:
            ignored.update(self.compiled)
        return _differences(saved, self.run, ignored)

    @classmethod
    def check_length(
        cls, directory: str | os.PathLike[str], step: int, total: int
    ) -> None:
        """Raise CheckpointError for a checkpoint of more steps than the run has."""
        if step > total:
            raise CheckpointError(
                f"{directory} has {step} steps, and this run {total}. Give {cls.total} "
                "of at least as many, or another directory."
            )

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints in the directory."""
        names = map(_NAME.fullmatch, os.listdir(self.directory))
        return sorted(int(name[1]) for name in names if name)

    def close(self) -> None:
        """Release the directory."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                # a forked process may still hold the file open
                fcntl.flock(self._lock, fcntl.LOCK_UN)
                os.close(self._lock)
            self._lock = None

    def write(
        self, step: int, body: Mapping[str, object], arrays: Sequence[ArrayLike]
    ) -> None:
        """Write the state after ``step`` steps; remove all but three valid checkpoints."""
        body = {"run": self.run, "step": step, **body}
        archive.write(self._file(step), self.kind, body, list(map(np.asarray, arrays)))
        self._damaged.discard(step)
        before = [n for n in self.steps() if n <= step]
        valid = [n for n in before if n not in self._damaged]
        for old in {*before} - {*valid[-_KEPT:]}:
            self._file(old).unlink(missing_ok=True)

    def read(self, depth: int = 4) -> Checkpoint | None:
        """Return the newest valid checkpoint; None in an empty directory.

        A damaged one causes a warning, and stays until a later one is written.

        :param depth: stack level of the user's call, for the warning.
        :raises CheckpointError: if all are damaged, the newest valid one is of another
            run, or a disk fails.
        """
        steps = self.steps()[::-1]
        for step in steps:
            with self.disk_errors(
                f"cannot be read at checkpoint {step}, and was not changed"
            ):
                data = self.bytes_of(step)
            try:
                return self._read(step, data)
            except archive.ArchiveError as error:
                warnings.warn(
                    f"checkpoint {step} in {self.directory} is damaged: {error}",
                    stacklevel=depth,
                )
                self._damaged.add(step)
        if steps:
            raise CheckpointError(
                f"all checkpoints in {self.directory} (steps {steps}) are damaged. "
                "Give another directory."
            )
        return None

    def _read(self, step: int, data: bytes) -> Checkpoint:
        name = self._file(step).name
        body, arrays = archive.read(data, self.kind, name)
        if body["step"] != step:
            raise archive.ArchiveError(
                f"{name} is of step {body['step']}: the file was renamed"
            )
        if changed := self.differences(body["run"]):
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} is of another run: "
                f"{'; '.join(changed)}. Call {self.function} as that run was called, "
                "or give another directory."
            )
        return Checkpoint(step, body, arrays)

    def bytes_of(self, step: int) -> bytes:
        """Return the file of a checkpoint."""
        return self._file(step).read_bytes()

    def _file(self, step: int) -> Path:
        return self.directory / f"checkpoint-{step:06}.zip"

    def _locked(self) -> int:
        """Return the open file of the lock; raise CheckpointError if another run holds it."""
        handle = os.open(
            self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.read(handle, 200).decode(errors="replace")
                raise CheckpointError(
                    f"{self.directory} is in use by another run "
                    f"({holder or 'unknown'}). Wait until it ends, or give another "
                    "directory."
                ) from None
            except OSError as error:
                warnings.warn(
                    f"{self.directory} is on a disk without locks ({error}): do not "
                    "use it for two runs",
                    stacklevel=5,
                )
            os.ftruncate(handle, 0)
            os.pwrite(
                handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0
            )
        except BaseException:
            os.close(handle)
            raise
        return handle

    @contextlib.contextmanager
    def disk_errors(self, what: str) -> Generator[None]:
        """Turn an OSError into a CheckpointError that says what the directory cannot do."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} {what}: {error}. Free disk space or fix the "
                "permissions, or give another directory."
            ) from error


def _differences(saved: Identity, run: Identity, ignored: set[str]) -> list[str]:
    """Return in words how two identities differ; digests last, shortened."""

    def is_digest(value):
        return bool(re.fullmatch("[0-9a-f]{64,}", str(value)))

    def short(value):
        text = f"{value[:8]}..." if is_digest(value) else repr(value)
        return text if len(text) <= 400 else f"{text[:400]}..."

    def difference(name):
        there = saved.get(name)
        here = run.get(name)
        are_dicts = isinstance(there, dict) and isinstance(here, dict)
        if are_dicts and there.keys() == here.keys():
            key = next(key for key in here if there[key] != here[key])
            return f"{name}: {key!r} differs"
        return f"{name}: {short(there)} there, {short(here)} here"

    changed = [
        name
        for name in {**saved, **run}
        if name not in ignored and saved.get(name) != run.get(name)
    ]
    changed.sort(key=lambda name: is_digest(run.get(name)))
    return list(map(difference, changed))


def versions() -> list[str]:
    """Return the versions and the platform on which the code of a program depends."""
    numpyro = metadata.version("numpyro")
    return [jax.__version__, numpyro, VERSION, jax.default_backend()]


def computation(fn: Callable, *args: PyTree) -> str:
    """Return a digest of a function's code for such arguments, and of arrays that it holds."""
    return text_digest(code(jax.jit(fn).lower(*args)))


def text_digest(text: str) -> str:
    """Return a digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def code(lowered: Lowered) -> str:
    """Return lowered code without its header, which names function and number of devices."""
    return lowered.as_text().partition("\n")[2]


def as_numbers(leaf: ArrayLike) -> ArrayLike:
    """Return a leaf of a state as numbers, a jax key as its words."""
    return jax.random.key_data(leaf) if random.is_typed(leaf) else leaf


def from_numbers(numbers: Numbers, template: ArrayLike) -> Numbers:
    """Invert :func:`as_numbers` for a leaf like ``template``."""
    if not random.is_typed(template):
        return numbers
    return jax.random.wrap_key_data(
        jnp.asarray(numbers), impl=jax.random.key_impl(template)
    )


def without_addresses(text: str) -> str:
    """Remove memory addresses, which differ between processes, from a repr."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
