# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Files of data sets: their location, decompression, and IDX, the format of MNIST."""

import bz2
from collections.abc import Generator, Sequence
import contextlib
import gzip
import io
import math
import os
from pathlib import Path
import sys
from typing import BinaryIO, cast
import zlib

import numpy as np

from ebmpp.core import checks
from ebmpp.errors import ArgumentError

Labelled = tuple[np.ndarray, np.ndarray]
Folder = str | os.PathLike[str] | None

DATA_DIR_VARIABLE = "EBMPP_DATA_DIR"

#: by a file's first bytes: its format, the function that opens it, and the errors of
#: damaged data
_PACKED = {
    b"\x1f\x8b": ("gzip", gzip.open, (EOFError, gzip.BadGzipFile, zlib.error)),
    b"BZh": ("bzip2", bz2.open, (EOFError, OSError)),
}
_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_DIMS = 64  # of a NumPy array
_CHUNK = 1 << 20
#: Unpacked bytes per packed byte: photographs, text and digits take 1 to 10.
_MAX_RATIO = 100
#: Unpacked bytes that a file of any size may hold.
_ALWAYS_ALLOWED = 1 << 26


def find(
    reader: str,
    directory: Folder,
    name: str,
    folders: Sequence[str],
    source: str,
    packed: str = "",
) -> Path:
    """Return the path of a file of a data set, packed or not.

    :param reader: name of the reader, for error messages.
    :param directory: a folder; None for the environment variable.
    :param folders: subfolders to search in order; "." is the folder itself.
    :param source: where the file can be had.
    :param packed: suffix of its packed form.
    :raises FileNotFoundError: if it is in none of them, with the source.
    """
    root = os.environ.get(DATA_DIR_VARIABLE) if directory is None else directory
    places = []
    if root:
        top = checks.path(f"{reader}: directory", root, "the path of a directory")
        places = [top / folder for folder in folders]
    for place in places:
        for path in (place / name, place / f"{name}{packed}"):
            if path.is_file():
                return path
    searched = " or ".join(map(str, places)) or "no directory"
    raise FileNotFoundError(
        f"{reader}: {name}{f'[{packed}]' if packed else ''} must be in the folder "
        f"given by directory=... or by the environment variable {DATA_DIR_VARIABLE}, "
        f"got {searched}. ({source})"
    )


@contextlib.contextmanager
def unpacked(path: Path) -> Generator[BinaryIO]:
    """Open a file, decompressing gzip and bzip2 recognised by its first bytes.

    :raises ArgumentError: for damaged compressed data, or far more than such data sets
        hold.
    """
    with open(path, "rb") as raw:
        first = raw.read(max(map(len, _PACKED)))
        raw.seek(0)
        magic = next(filter(first.startswith, _PACKED), None)
        if magic is None:
            yield raw
            return
        kind, open_packed, damaged = _PACKED[magic]
        most = most_unpacked(path)
        try:
            with open_packed(raw) as file:
                data = read_up_to(cast(BinaryIO, file), most + 1)
        except damaged as error:
            raise ArgumentError(
                f"{path}: damaged {kind} ({error}); fetch the file again"
            ) from error
    if len(data) > most:
        expected = f"at most {most} bytes"
        raise checks.error(str(path), expected, "more", hint="Unpack it to a file.")
    yield io.BytesIO(data)


def most_unpacked(path: Path) -> int:
    """Return the number of bytes that a packed file of this size may plausibly hold."""
    return max(_ALWAYS_ALLOWED, _MAX_RATIO * path.stat().st_size)


def read_up_to(file: BinaryIO, size: int) -> bytearray:
    """Read up to ``size`` bytes in chunks; one call would allocate them first."""
    data = bytearray()
    while len(data) < size and (chunk := file.read(min(_CHUNK, size - len(data)))):
        data += chunk
    return data


def idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Read an IDX file, gzipped or not.

    Memory grows with the content of the file, not with the size that its header claims.

    :param path: the file.
    :return: array in native byte order, with the file's shape and dtype: uint8, int8,
        int16, int32, float32 or float64.
    :raises FileNotFoundError: if there is no such file.
    :raises ArgumentError: for a directory, or a file that is not IDX, truncated, too
        long, or damaged gzip.

    **Example**

    >>> import pathlib, tempfile, ebmpp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "labels-idx1-ubyte")
    ...     _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([7, 2, 1]))
    ...     ebmpp.data.idx(file)
    array([7, 2, 1], dtype=uint8)
    """
    path = checks.input_file("idx: path", path)
    with unpacked(path) as file:
        return _parse(path, file)


def _parse(path: Path, file: BinaryIO) -> np.ndarray:
    magic = read_up_to(file, 4)
    codes = [f"{c:02x}" for c in _DTYPES]
    is_idx = len(magic) == 4 and magic[:2] == b"\0\0" and magic[3] > 0
    if not is_idx or magic[2] not in _DTYPES:
        raise checks.error(
            f"{path}: first bytes of an IDX file",
            f"00 00, a type code of {codes} and a number of dimensions > 0",
            magic.hex(" ") or "nothing",
        )
    dtype = np.dtype(_DTYPES[magic[2]])
    ndim = magic[3]
    header = read_up_to(file, 4 * ndim)
    shape = tuple(np.frombuffer(header[: len(header) // 4 * 4], ">u4").tolist())
    # NumPy refuses too large a shape even where one of its dimensions is 0.
    capacity = math.prod(d or 1 for d in shape) * dtype.itemsize
    fits = ndim <= _MAX_DIMS and capacity <= sys.maxsize
    expected = math.prod(shape) * dtype.itemsize
    # One byte more than expected shows trailing bytes, and makes gzip verify its
    # checksum.
    data = read_up_to(file, expected + 1)
    if not fits or len(header) != 4 * ndim or len(data) != expected:
        raise checks.error(
            str(path),
            f"{expected} bytes of {ndim} dimensions {shape[:6]} of {dtype.name}",
            f"more than {expected}" if len(data) > expected else len(data),
            hint="The file is truncated or damaged.",
        )
    array = np.frombuffer(data, dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)
