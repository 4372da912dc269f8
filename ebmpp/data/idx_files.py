# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""IDX files, the format of MNIST."""

import math
import os
from pathlib import Path
import sys
from typing import BinaryIO

import numpy as np

from ebmpp.core import checks
from ebmpp.data import files
from ebmpp.data.files import Array

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
    is_idx = len(magic) == 4 and magic[:2] == b"\0\0" and magic[3] > 0 and magic[2] in _DTYPES
    codes, value = [f"{c:02x}" for c in _DTYPES], magic.hex(" ") or "nothing"
    expected = f"00 00, a type code of {codes} and a number of dimensions > 0"
    checks.require(is_idx, f"{path}: first bytes of an IDX file", expected, value)
    dtype, ndim = np.dtype(_DTYPES[magic[2]]), magic[3]
    header = files.read_up_to(file, 4 * ndim)
    shape = tuple(np.frombuffer(header[: len(header) // 4 * 4], ">u4").tolist())
    # NumPy refuses too large a shape even where one of its dimensions is 0.
    fits = ndim <= _MAX_DIMS and math.prod(d or 1 for d in shape) * dtype.itemsize <= sys.maxsize
    expected = math.prod(shape) * dtype.itemsize
    # One byte more than expected shows trailing bytes, and makes gzip verify its checksum.
    data = files.read_up_to(file, expected + 1)
    is_valid = fits and len(header) == 4 * ndim and len(data) == expected
    size = f"more than {expected}" if len(data) > expected else len(data)
    text = f"{expected} bytes of {ndim} dimensions {shape[:6]} of {dtype.name}"
    checks.require(is_valid, str(path), text, size, hint="The file is truncated or damaged.")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)
