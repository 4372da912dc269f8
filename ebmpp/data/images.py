# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Images of bytes: real digits, MNIST and its relatives, CIFAR-10."""

from pathlib import Path
from typing import Literal, overload

import numpy as np

from ebmpp.core import checks
from ebmpp.data import files
from ebmpp.data.files import Array, Folder, Labelled
from ebmpp.data.idx_files import idx
from ebmpp.errors import ArgumentError

_PREFIX = {"train": "train", "test": "t10k"}
_SIDE = 28
_CIFAR = {"train": tuple(f"data_batch_{n}.bin" for n in range(1, 6)), "test": ("test_batch.bin",)}
_CIFAR_BYTES = 3 * 32 * 32
_CIFAR_LABELS = 10


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
    source = "from http://yann.lecun.com/exdb/mnist or a copy of it"
    return _pairs("mnist", directory, (".", "mnist"), source, split, labels)


@overload
def fashion_mnist(
    directory: Folder = None, split: str = "train", labels: Literal[False] = False
) -> Array: ...
@overload
def fashion_mnist(directory: Folder = None, split: str = "train", *, labels: Literal[True]) -> Labelled: ...
def fashion_mnist(directory: Folder = None, split: str = "train", labels: bool = False) -> Array | Labelled:
    """
    Fashion-MNIST: ten kinds of clothes, in files that are called as those of :func:`mnist` are.

    :param directory: the folder above its ``fashion-mnist`` folder, or the folder of the files
        itself; the default is the environment variable ``EBMPP_DATA_DIR``, under which it must be in
        a ``fashion-mnist`` folder: files that lie there themselves are taken for MNIST's.
    :param split: "train" or "test".
    :param labels: return the kind of each image too.
    :return: as :func:`mnist`.
    :raises FileNotFoundError: if a file is not found; the text says where it was looked for.
    :raises ArgumentError: if `split` is neither, or a file is not what its name says.

    **Example** (the folder here holds one blank image)

    >>> import pathlib, tempfile, ebmpp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "train-images-idx3-ubyte")
    ...     shape = [0, 0, 0, 1, 0, 0, 0, 28, 0, 0, 0, 28]
    ...     _ = file.write_bytes(bytes([0, 0, 8, 3] + shape + [0] * 784))
    ...     ebmpp.data.fashion_mnist(folder).shape
    (1, 784)
    """
    source = "from https://github.com/zalandoresearch/fashion-mnist"
    places = ("fashion-mnist",) if directory is None else ("fashion-mnist", ".")
    return _pairs("fashion_mnist", directory, places, source, split, labels)


def _pairs(
    who: str, directory: Folder, folders: tuple[str, ...], source: str, split: str, labels: bool
) -> Array | Labelled:
    """Images of 28x28 bytes, and a byte each that says what they are."""
    prefix = _PREFIX[checks.choice(f"{who}: split", split, _PREFIX)]
    path = files.find(who, directory, f"{prefix}-images-idx3-ubyte", folders, source, ".gz")
    images = idx(path)
    if images.dtype != np.uint8 or images.shape[1:] != (_SIDE, _SIDE):
        raise ArgumentError(
            f"{path}: {images.dtype} of shape {images.shape}; MNIST's images are uint8 of shape "
            f"(N, {_SIDE}, {_SIDE}). Read other files with ebmpp.data.idx."
        )
    pixels = images.reshape(len(images), _SIDE**2).astype(np.float32) / 255
    if not labels:
        return pixels

    path = files.find(who, directory, f"{prefix}-labels-idx1-ubyte", folders, source, ".gz")
    targets = idx(path)
    if targets.dtype != np.uint8 or targets.shape != (len(images),):
        raise ArgumentError(
            f"{path}: {targets.dtype} of shape {targets.shape}; one uint8 label for each of the "
            f"{len(images)} images is expected. Are the two files of one data set?"
        )
    return pixels, targets.astype(np.int32)


@overload
def cifar10(directory: Folder = None, split: str = "train", labels: Literal[False] = False) -> Array: ...
@overload
def cifar10(directory: Folder = None, split: str = "train", *, labels: Literal[True]) -> Labelled: ...
def cifar10(directory: Folder = None, split: str = "train", labels: bool = False) -> Array | Labelled:
    """
    CIFAR-10, colour photographs of ten kinds, from the files of its binary version.

    These are ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``.

    :param directory: the folder of the files, or the one above its ``cifar-10-batches-bin`` folder;
        the default is the environment variable ``EBMPP_DATA_DIR``.
    :param split: "train" or "test".
    :param labels: return the kind of each image too.
    :return: float32 array of shape ``(N, 3072)`` in [0, 1] (N is 50000 or 10000): 32x32 pixels of
        red, then of green and of blue, so that ``reshape(-1, 3, 32, 32)`` has the planes; with
        `labels`, also an int32 array of shape ``(N,)`` with values 0 to 9.
    :raises FileNotFoundError: if a file is not found; the text says where it was looked for.
    :raises ArgumentError: if `split` is neither, or a file is cut or not what its name says.

    **Example** (the folder here holds one black image)

    >>> import pathlib, tempfile, ebmpp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "test_batch.bin").write_bytes(bytes([3] + [0] * 3072))
    ...     images, labels = ebmpp.data.cifar10(folder, "test", labels=True)
    >>> images.shape, labels.tolist()
    ((1, 3072), [3])
    """
    source = "from https://www.cs.toronto.edu/~kriz/cifar.html, the binary version"
    checks.choice("cifar10: split", split, _CIFAR)
    folders = (".", "cifar-10-batches-bin")
    paths = [files.find("cifar10", directory, name, folders, source, ".gz") for name in _CIFAR[split]]
    records = np.concatenate([_cifar_batch(path) for path in paths])
    pixels = records[:, 1:].astype(np.float32)
    pixels /= 255  # in place: the training images take 600 MB
    return (pixels, records[:, 0].astype(np.int32)) if labels else pixels


def _cifar_batch(path: Path) -> Array:
    """Rows of a label and 3072 bytes."""
    with files.unpacked(path) as file:
        data = np.frombuffer(file.read(), np.uint8)
    size = 1 + _CIFAR_BYTES
    if not len(data) or len(data) % size:
        raise ArgumentError(
            f"{path}: {len(data)} bytes, where images of {size} bytes each are expected; the file is cut, "
            "or not of CIFAR-10's binary version: fetch it again."
        )
    records = data.reshape(-1, size)
    wrong = np.flatnonzero(records[:, 0] >= _CIFAR_LABELS)
    if len(wrong):
        raise ArgumentError(
            f"{path}: image {wrong[0]} has the label {records[wrong[0], 0]}, and CIFAR-10's are from 0 to 9; "
            "the file is damaged, or of CIFAR-100: fetch it again."
        )
    return records
