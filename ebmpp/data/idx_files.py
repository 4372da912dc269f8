# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""IDX files, the form of MNIST and its relatives."""

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
    """
    Read an IDX file, the form of MNIST and its relatives, packed by gzip or not.

    Whether it is packed is told from the file's first bytes, not from its name. Memory grows with what
    the file really holds, never with what its header promises.

    :param path: the file.
    :return: array in the machine's byte order, with the file's own shape and type: uint8, int8,
        int16, int32, float32 or float64.
    :raises FileNotFoundError: if there is no such file.
    :raises ArgumentError: if the file is not IDX, has an unknown type code or impossible dimensions,
        is cut short, goes on after its data, or is damaged gzip; the text names the file.

    **Example**

    >>> import pathlib, tempfile, ebmpp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "labels-idx1-ubyte")
    ...     _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([7, 2, 1]))
    ...     ebmpp.data.idx(file)
    array([7, 2, 1], dtype=uint8)
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; give the path of an IDX file.")
    with files.unpacked(path) as file:
        return _parse(path, file)


def _parse(path: Path, file: BinaryIO) -> Array:
    """Header, dimensions, data."""
    magic = files.read_up_to(file, 4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[3] == 0:
        raise ArgumentError(
            f"{path}: not an IDX file: it begins with {magic.hex(' ') or 'nothing'}, where "
            "00 00, a type code and a number of dimensions above 0 are expected."
        )
    code, ndim = magic[2], magic[3]
    if code not in _DTYPES:
        known = ", ".join(f"0x{c:02x} {np.dtype(d).name}" for c, d in _DTYPES.items())
        raise ArgumentError(f"{path}: unknown IDX type code 0x{code:02x}; the known ones are {known}.")
    dtype = np.dtype(_DTYPES[code])

    header = files.read_up_to(file, 4 * ndim)
    if len(header) < 4 * ndim:
        raise ArgumentError(
            f"{path}: truncated IDX file: {ndim} dimensions take {4 * ndim} bytes, "
            f"found {len(header)}; fetch the file again."
        )
    shape = tuple(np.frombuffer(header, ">u4").tolist())
    # A dimension of 0 counts as 1 here: NumPy refuses such a shape too, less clearly.
    if ndim > _MAX_DIMS or math.prod(d or 1 for d in shape) * dtype.itemsize > sys.maxsize:
        told = " x ".join(map(str, shape[:6])) + (" x ..." if len(shape) > 6 else "")
        raise ArgumentError(
            f"{path}: impossible IDX dimensions: {ndim} of them, {told}; an array "
            f"has at most {_MAX_DIMS} dimensions and {sys.maxsize} bytes."
        )

    expected = math.prod(shape) * dtype.itemsize
    # One byte more than promised: shows trailing bytes, and makes gzip check its sum at the end.
    data = files.read_up_to(file, expected + 1)
    if len(data) < expected:
        raise ArgumentError(
            f"{path}: truncated IDX file: shape {shape} of {dtype.name} takes {expected} bytes, "
            f"found {len(data)}; fetch the file again."
        )
    if len(data) > expected:
        raise ArgumentError(
            f"{path}: trailing bytes after the {expected} bytes of shape {shape} of {dtype.name}; "
            "the header or the file is damaged: fetch the file again."
        )
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)
