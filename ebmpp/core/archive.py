# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Arrays and what is said of them in one file: written whole or not at all, checked when it is read.

A zip archive that is not compressed: ``header.json``, and one ``.npy`` file an array. Nothing in it is
executed when it is read, and nothing is pickled. Saved models (:mod:`ebmpp.graph.saving`) and checkpoints
(:mod:`ebmpp.core.checkpoints`) are such files.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
import contextlib
import hashlib
import io
import json
import os
from pathlib import Path
import tempfile
from typing import Any, BinaryIO, NamedTuple
import zipfile

import numpy as np

import jax.numpy as jnp

_HEADER = "header.json"


class Kind(NamedTuple):
    """A kind of file."""

    format: str
    """Its name, in the header."""
    version: int
    """The newest that can be read."""
    writer: str
    """What writes such files, for errors."""


class ArchiveError(ValueError):
    """Bytes that are not what was written, or of another kind."""


def digest(arrays: Mapping[str, Any]) -> str:
    """A hash of names, shapes, dtypes and bytes."""
    made = hashlib.sha256()
    for name in sorted(arrays):
        a = np.ascontiguousarray(arrays[name])
        made.update(f"{name} {np.shape(arrays[name])} {a.dtype}\n".encode())
        made.update(a.tobytes())
    return made.hexdigest()


def hashed(body: Any) -> str:
    """A hash of JSON values."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write(path: Path, kind: Kind, body: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """One file, whole or not at all; one that is there is replaced.

    :param body: JSON values; ``arrays`` among its names is ours.
    :raises OSError: where it cannot be written; what was there before is there still.
    """
    body = {**body, "arrays": [{"dtype": str(a.dtype), "shape": list(a.shape)} for a in arrays]}
    header = {"format": kind.format, "version": kind.version, "sha256": hashed(body), "body": body}

    def fill(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            # without dates: equal values, equal files
            archive.writestr(zipfile.ZipInfo(_HEADER), json.dumps(header, indent=1).encode())
            for i, array in enumerate(arrays):
                archive.writestr(zipfile.ZipInfo(_member(i)), _npy(array))

    write_once(path, fill)


def write_once(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Beside the file first, then on the disk, and then in its place at once.

    A process that is killed on the way leaves ``.<name>.<letters>.tmp``, and nothing else.

    :param fill: writes into an open file.
    :raises OSError: where that cannot be.
    """
    with _replacing(path) as (handle, _), os.fdopen(handle, "wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """:func:`write_once` by what takes a path.

    :param write: writes a file there; an empty one is there already.
    :raises OSError: where that cannot be.
    """
    with _replacing(path) as (handle, beside):
        try:
            write(beside)
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _replacing(path: Path) -> Generator[tuple[int, Path]]:
    """A file beside another, whose place it takes in the end."""
    path = path.absolute()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    beside = Path(name)
    try:
        yield handle, beside
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):  # a disk that is gone must not hide what went wrong
            beside.unlink(missing_ok=True)
        raise


def read(data: bytes, kind: Kind, name: str) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The body and the arrays of a file; of every byte zip's own checksum is compared.

    :param data: the whole file: so a disk that fails is told from a file that is wrong.
    :param name: of the file, for errors.
    :raises ArchiveError: for what is not a file of this kind as it was written.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ArchiveError(f"{name} is a compressed archive: {kind.writer} did not write it")
            body = _body(archive, kind, name)
            made = [_array(archive.read(_member(i)), told) for i, told in enumerate(body["arrays"])]
            return body, made
    except ArchiveError:
        raise
    except Exception as error:  # of damaged bytes zipfile, json and numpy complain in many ways
        raise ArchiveError(
            f"{name} is no file that {kind.writer} wrote, or is cut off or damaged ({error})"
        ) from error


def _body(archive: zipfile.ZipFile, kind: Kind, name: str) -> dict[str, Any]:
    if _HEADER not in archive.namelist():
        raise ArchiveError(f"{name} is an archive without {_HEADER}: {kind.writer} did not write it")
    header = json.loads(archive.read(_HEADER))
    if not isinstance(header, dict) or header.get("format") != kind.format:
        raise ArchiveError(f"{name}: its header is not that of a file that {kind.writer} wrote")
    if header["version"] != kind.version:
        raise ArchiveError(
            f"{name} is of version {header['version']!r} of the format, and this ebmpp reads version "
            f"{kind.version}: a newer ebmpp wrote it, and reads it"
        )
    if hashed(header["body"]) != header["sha256"]:
        raise ArchiveError(f"{name}: the declaration is not what was written; the file was changed")
    return header["body"]


def _member(number: int) -> str:
    return f"arrays/{number}.npy"


def _npy(array: np.ndarray) -> bytes:
    """An array as a .npy file; dtypes that numpy itself does not have are stored as their bits."""
    if array.dtype.kind == "V":
        array = array.view(f"u{array.dtype.itemsize}")
    made = io.BytesIO()
    np.lib.format.write_array(made, array, allow_pickle=False)
    return made.getvalue()


def _array(data: bytes, told: Mapping[str, Any]) -> np.ndarray:
    """:raises ValueError: for another array than the header tells of."""
    made = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    dtype = jnp.dtype(told["dtype"])  # jax's own also, such as bfloat16
    if dtype.kind == "V" and made.dtype == np.dtype(f"u{dtype.itemsize}"):
        made = made.view(dtype)
    if (list(made.shape), made.dtype) != (told["shape"], dtype):
        raise ValueError(f"an array is {made.dtype}{made.shape}, and the header says {told}")
    return made
