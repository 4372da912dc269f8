# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""IDX files, the format of MNIST."""

import math
import os
from pathlib import Path
import sys
from typing import BinaryIO

import numpy as np

from ebmpp.data import files
from ebmpp.data.files import Array
from ebmpp.errors import ArgumentError

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_DIMS = 64  # of a NumPy array


def idx(path: str | os.PathLike[str]) -> Array:
    """Read an IDX file, gzipped or not.

    Memory grows with the content of the file, not with the size that its header claims.

    :param path: the file.
    :return: array in native byte order, with the file's shape and dtype: uint8, int8, int16, int32, float32
        or float64.
    :raises FileNotFoundError: if there is no such file.
    :raises ArgumentError: if the file is not IDX, truncated, too long, or damaged gzip.

    **Example**

    >>> import pathlib, tempfile, ebmpp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "labels-idx1-ubyte")
    ...     _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([7, 2, 1]))
    ...     ebmpp.data.idx(file)
    array([7, 2, 1], dtype=uint8)
    """
    path = Path(path)
    with files.unpacked(path) as file:
        return _parse(path, file)


def _parse(path: Path, file: BinaryIO) -> Array:
    magic = files.read_up_to(file, 4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[3] == 0 or magic[2] not in _DTYPES:
        raise ArgumentError(
            f"{path}: an IDX file must start with 00 00, a type code of {[f'{c:02x}' for c in _DTYPES]} and "
            f"a number of dimensions > 0, got {magic.hex(' ') or 'nothing'}"
        )
    dtype, ndim = np.dtype(_DTYPES[magic[2]]), magic[3]
    header = files.read_up_to(file, 4 * ndim)
    shape = tuple(np.frombuffer(header[: len(header) // 4 * 4], ">u4").tolist())
    # NumPy refuses too large a shape even where one of its dimensions is 0.
    fits = ndim <= _MAX_DIMS and math.prod(d or 1 for d in shape) * dtype.itemsize <= sys.maxsize
    expected = math.prod(shape) * dtype.itemsize
    # One byte more than expected shows trailing bytes, and makes gzip verify its checksum.
    data = files.read_up_to(file, expected + 1)
    if not fits or len(header) < 4 * ndim or len(data) != expected:
        size = f"more than {expected}" if len(data) > expected else len(data)
        raise ArgumentError(
            f"{path}: {ndim} dimensions {shape[:6]} of {dtype.name} must fit an array and take {expected} "
            f"bytes, got {size}; the file is truncated or damaged"
        )
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)
