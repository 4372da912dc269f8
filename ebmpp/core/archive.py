# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Arrays and JSON values in one .npz file, written atomically and verified on reading.

The member ``header`` holds the JSON values as bytes. Nothing is pickled, and nothing is
executed on reading.
"""

from collections.abc import Generator, Mapping, Sequence
import contextlib
import hashlib
import io
import json
import os
from pathlib import Path
import secrets
from typing import Any, BinaryIO, NamedTuple

from jaxtyping import PyTree
import numpy as np

import jax.numpy as jnp


class Kind(NamedTuple):
    """A kind of archive."""

    format: str
    """Name in the header."""
    version: int
    """Version of the layout; only this one is read."""
    writer: str
    """Function that writes such files, for error messages."""


class ArchiveError(ValueError):
    """Bytes that are damaged, or an archive of another kind or version."""


def digest(arrays: Mapping[str, PyTree]) -> str:
    """Hash names, shapes, dtypes and bytes of arrays."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        a = np.ascontiguousarray(arrays[name])
        sha.update(f"{name} {np.shape(arrays[name])} {a.dtype}\n".encode())
        sha.update(a.tobytes())
    return sha.hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Yield a file that becomes ``path`` when it is complete and synchronised to disk.

    A process killed on the way leaves ``.<name>.<letters>.tmp`` and nothing else. An
    OSError leaves an existing file unchanged, whose permissions stay.
    """
    path = path.resolve()  # a symbolic link stays, and its target is replaced
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # a new file, or a disk without permissions
            partial.chmod(path.stat().st_mode)
        os.replace(partial, path)
    except BaseException:
        # a failing disk must not hide the first error
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write(
    path: Path, kind: Kind, body: Mapping[str, object], arrays: Sequence[np.ndarray]
) -> None:
    """Write an archive atomically, by :func:`replacing`."""
    header = {"format": kind.format, "version": kind.version, "body": body}
    # numpy's format loses the dtypes of ml_dtypes
    header["dtypes"] = [str(a.dtype) for a in arrays]
    members: dict[str, Any] = {f"array_{i}": a for i, a in enumerate(arrays)}
    encoded = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with replacing(path) as file:
        np.savez(file, header=encoded, **members)


def read(data: bytes, kind: Kind, name: str) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the body and the arrays of an archive; zip verifies a checksum of every member.

    :raises ArchiveError: for damaged data, or an archive of another kind or version.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as members:
            header = json.loads(members["header"].tobytes())
            if (header["format"], header["version"]) == (kind.format, kind.version):
                dtypes = [jnp.dtype(name) for name in header["dtypes"]]
                arrays = [members[f"array_{i}"] for i in range(len(dtypes))]
                viewed = [a.view(dtype) for a, dtype in zip(arrays, dtypes)]
                return header["body"], viewed
            actual = f"{header['format']!r}, version {header['version']!r}"
    except Exception as error:  # zipfile, json and numpy report damage in many ways
        raise ArchiveError(
            f"{name} is damaged, or not a file of {kind.writer} ({error})"
        ) from error
    raise ArchiveError(
        f"{name} is a {actual}; {kind.writer} reads {kind.format!r}, version {kind.version}"
    )
