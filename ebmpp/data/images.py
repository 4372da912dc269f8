# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Images: real digits, and a reader of IDX files."""

from collections.abc import Callable
import gzip
import math
import os
from pathlib import Path
import sys
from typing import Literal, overload
import zlib

import numpy as np

from ebmpp.core import checks
from ebmpp.errors import ArgumentError

Array = np.ndarray
Labelled = tuple[np.ndarray, np.ndarray]
Folder = str | os.PathLike[str] | None

DATA_DIR_VARIABLE = "EBMPP_DATA_DIR"

_MNIST_PREFIX = {"train": "train", "test": "t10k"}
_MNIST_SIDE = 28
_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"
_NUMPY_MAX_DIMS = 64
_CHUNK = 1 << 20


@overload
def digits(labels: Literal[False] = False) -> Array: ...
@overload
def digits(labels: Literal[True]) -> Labelled: ...
def digits(labels: bool = False) -> Array | Labelled:
    """
    The 1797 handwritten digits of 8 by 8 pixels that come with scikit-learn; needs no download.

    :param labels: return the digit of each image too.
    :return: float32 array of shape ``(1797, 64)`` in [0, 1] (sixteenths of full ink); with
        `labels`, also an int32 array of shape ``(1797,)`` with values 0 to 9.

    **Example**

    >>> from ebmpp.data import digits
    >>> images, labels = digits(labels=True)
    >>> images.shape, float(images.max()), labels[:5]
    ((1797, 64), 1.0, array([0, 1, 2, 3, 4], dtype=int32))
    """
    from sklearn.datasets import load_digits  # half a second that other users need not spend

    images, targets = load_digits(return_X_y=True)
    scaled = (images / 16).astype(np.float32)
    return (scaled, targets.astype(np.int32)) if labels else scaled


def idx(path: str | os.PathLike[str]) -> Array:
    """
    Read an IDX file, the form of MNIST and its relatives, gzipped or not.

    Gzip is told from the file's first bytes, not from its name. Memory grows with what the file
    really holds, never with what its header promises.

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
    with open(path, "rb") as raw:
        zipped = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        raw.seek(0)
        if not zipped:
            return _parse_idx(path, raw.read)
        try:
            with gzip.open(raw) as unzipped:
                return _parse_idx(path, unzipped.read)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ArgumentError(
                f"{path}: damaged gzip ({error}); fetch the file again, or check its checksum."
            ) from error


def _parse_idx(path: Path, read: Callable[[int], bytes]) -> Array:
    """Header, dimensions, data; `read` gives at most the bytes asked for, b"" at the end."""
    magic = _read_up_to(read, 4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[3] == 0:
        raise ArgumentError(
            f"{path}: not an IDX file: it begins with {magic.hex(' ') or 'nothing'}, where "
            "00 00, a type code and a number of dimensions above 0 are expected."
        )
    code, ndim = magic[2], magic[3]
    if code not in _IDX_DTYPES:
        known = ", ".join(f"0x{c:02x} {np.dtype(d).name}" for c, d in _IDX_DTYPES.items())
        raise ArgumentError(f"{path}: unknown IDX type code 0x{code:02x}; the known ones are {known}.")
    dtype = np.dtype(_IDX_DTYPES[code])

    header = _read_up_to(read, 4 * ndim)
    if len(header) < 4 * ndim:
        raise ArgumentError(
            f"{path}: truncated IDX file: {ndim} dimensions take {4 * ndim} bytes, "
            f"found {len(header)}; fetch the file again."
        )
    shape = tuple(np.frombuffer(header, ">u4").tolist())
    # A dimension of 0 counts as 1 here: NumPy refuses such a shape too, less clearly.
    if ndim > _NUMPY_MAX_DIMS or math.prod(d or 1 for d in shape) * dtype.itemsize > sys.maxsize:
        told = " x ".join(map(str, shape[:6])) + (" x ..." if len(shape) > 6 else "")
        raise ArgumentError(
            f"{path}: impossible IDX dimensions: {ndim} of them, {told}; an array "
            f"has at most {_NUMPY_MAX_DIMS} dimensions and {sys.maxsize} bytes."
        )

    expected = math.prod(shape) * dtype.itemsize
    # One byte more than promised: shows trailing bytes, and makes gzip check its sum at the end.
    data = _read_up_to(read, expected + 1)
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


def _read_up_to(read: Callable[[int], bytes], size: int) -> bytearray:
    """Up to `size` bytes, in chunks: asking a reader for them all would allocate them first."""
    data = bytearray()
    while len(data) < size and (chunk := read(min(_CHUNK, size - len(data)))):
        data += chunk
    return data


@overload
def mnist(directory: Folder = None, split: str = "train", labels: Literal[False] = False) -> Array: ...
@overload
def mnist(directory: Folder = None, split: str = "train", *, labels: Literal[True]) -> Labelled: ...
def mnist(directory: Folder = None, split: str = "train", labels: bool = False) -> Array | Labelled:
    """
    MNIST, or a data set of the same form, from files that you have; nothing is downloaded.

    The files are the usual four, ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and
    their ``t10k`` pair, gzipped (``.gz``) or not.

    :param directory: the folder of the files, or the one above its ``mnist`` folder; the default
        is the environment variable ``EBMPP_DATA_DIR``.
    :param split: "train" or "test".
    :param labels: return the digit of each image too.
    :return: float32 array of shape ``(N, 784)`` in [0, 1] (N is 60000 or 10000); with `labels`,
        also an int32 array of shape ``(N,)``.
    :raises FileNotFoundError: if a file is not found; the text says where it was looked for.
    :raises ArgumentError: if `split` is neither, or a file is not what its name says.

    **Example** (the folder here holds one blank image)

    >>> import pathlib, tempfile, ebmpp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "train-images-idx3-ubyte")
    ...     shape = [0, 0, 0, 1, 0, 0, 0, 28, 0, 0, 0, 28]
    ...     _ = file.write_bytes(bytes([0, 0, 8, 3] + shape + [0] * 784))
    ...     ebmpp.data.mnist(folder).shape
    (1, 784)
    """
    checks.choice("mnist: split", split, _MNIST_PREFIX)
    prefix = _MNIST_PREFIX[split]
    path = _find_mnist(directory, f"{prefix}-images-idx3-ubyte")
    images = idx(path)
    if images.dtype != np.uint8 or images.shape[1:] != (_MNIST_SIDE, _MNIST_SIDE):
        raise ArgumentError(
            f"{path}: {images.dtype} of shape {images.shape}; MNIST's images are uint8 of shape "
            f"(N, {_MNIST_SIDE}, {_MNIST_SIDE}). Read other files with ebmpp.data.idx."
        )
    pixels = images.reshape(len(images), _MNIST_SIDE**2).astype(np.float32) / 255
    if not labels:
        return pixels

    path = _find_mnist(directory, f"{prefix}-labels-idx1-ubyte")
    targets = idx(path)
    if targets.dtype != np.uint8 or targets.shape != (len(images),):
        raise ArgumentError(
            f"{path}: {targets.dtype} of shape {targets.shape}; one uint8 label for each of the "
            f"{len(images)} images is expected. Are the two files of one data set?"
        )
    return pixels, targets.astype(np.int32)


def _find_mnist(directory: Folder, name: str) -> Path:
    given = os.environ.get(DATA_DIR_VARIABLE) if directory is None else directory
    if not given:
        raise FileNotFoundError(
            f"mnist: no directory given, and the environment variable {DATA_DIR_VARIABLE} is not "
            f"set. Set it to the folder that holds {name}[.gz], or pass directory=..."
        )
    folders = (Path(given), Path(given) / "mnist")
    for folder in folders:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"mnist: no {name}[.gz] in {folders[0]} or {folders[1]}; pass directory=..., or set "
        f"{DATA_DIR_VARIABLE}, to the folder that holds it."
    )
