# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Images of handwritten digits and clothes."""

from typing import Literal, overload

import numpy as np

from ebmpp.core import checks
from ebmpp.data import files
from ebmpp.data.files import Folder, Labelled, idx

_PREFIX = {"train": "train", "test": "t10k"}
_SIDE = 28
_CLASSES = 10
_OTHER_FILES = "ebmpp.data.idx reads other files."


@overload
def digits(labels: Literal[False] = ...) -> np.ndarray: ...
@overload
def digits(labels: Literal[True]) -> Labelled: ...
def digits(labels: bool = False) -> np.ndarray | Labelled:
    """Return the 1797 handwritten digits of 8x8 pixels that come with scikit-learn.

    :param labels: return the digit of each image too.
    :return: float32 array of shape ``(1797, 64)`` in [0, 1]; with ``labels``, also an
        int32 array of shape ``(1797,)`` with values 0 to 9.

    **Example**

    >>> from ebmpp.data import digits
    >>> images, labels = digits(labels=True)
    >>> images.shape, float(images.max()), labels[:5]
    ((1797, 64), 1.0, array([0, 1, 2, 3, 4], dtype=int32))
    """
    checks.flag("digits: labels", labels)
    from sklearn.datasets import load_digits  # half a second to import

    images, targets = load_digits(return_X_y=True)
    scaled = (images / 16).astype(np.float32)
    return (scaled, targets.astype(np.int32)) if labels else scaled


@overload
def mnist(
    directory: Folder = None, split: str = "train", labels: Literal[False] = ...
) -> np.ndarray: ...
@overload
def mnist(
    directory: Folder = None, split: str = "train", *, labels: Literal[True]
) -> Labelled: ...
def mnist(
    directory: Folder = None, split: str = "train", labels: bool = False
) -> np.ndarray | Labelled:
    """Read MNIST, or a data set of the same format; nothing is downloaded.

    The files are ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and their
    ``t10k`` pair, gzipped (``.gz``) or not.

    :param directory: folder of the files, or the one above their ``mnist`` folder; by
        default the environment variable ``EBMPP_DATA_DIR``.
    :param split: "train" or "test".
    :param labels: return the digit of each image too.
    :return: float32 array of shape ``(N, 784)`` in [0, 1] (N is 60000 or 10000); with
        ``labels``, also an int32 array of shape ``(N,)``.
    :raises FileNotFoundError: if a file is missing.
    :raises ArgumentError: for an unknown ``split``, or a file of other content.

    **Example** (the folder here holds one blank image)

    >>> import pathlib, tempfile, ebmpp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "train-images-idx3-ubyte")
    ...     shape = [0, 0, 0, 1, 0, 0, 0, 28, 0, 0, 0, 28]
    ...     _ = file.write_bytes(bytes([0, 0, 8, 3] + shape + [0] * 784))
    ...     ebmpp.data.mnist(folder).shape
    (1, 784)
    """
    return _images(
        "mnist",
        directory,
        (".", "mnist"),
        "from http://yann.lecun.com/exdb/mnist or a copy of it",
        split,
        labels,
    )


@overload
def fashion_mnist(
    directory: Folder = None, split: str = "train", labels: Literal[False] = ...
) -> np.ndarray: ...
@overload
def fashion_mnist(
    directory: Folder = None, split: str = "train", *, labels: Literal[True]
) -> Labelled: ...
def fashion_mnist(
    directory: Folder = None, split: str = "train", labels: bool = False
) -> np.ndarray | Labelled:
    """Read Fashion-MNIST, ten classes of clothes, in files named as for :func:`mnist`.

    :param directory: the folder above their ``fashion-mnist`` folder, or the folder of
        the files. By default ``$EBMPP_DATA_DIR/fashion-mnist``: files in
        ``EBMPP_DATA_DIR`` itself are MNIST's.
    :param split: "train" or "test".
    :param labels: return the class of each image too.
    :return: see :func:`mnist`.
    :raises FileNotFoundError: if a file is missing.
    :raises ArgumentError: for an unknown ``split``, or a file of other content.
    """
    source = "from https://github.com/zalandoresearch/fashion-mnist"
    folders = ("fashion-mnist",) if directory is None else ("fashion-mnist", ".")
    return _images("fashion_mnist", directory, folders, source, split, labels)


def _images(
    reader: str,
    directory: Folder,
    folders: tuple[str, ...],
    source: str,
    split: str,
    labels: bool,
) -> np.ndarray | Labelled:
    """Return images of 28x28 bytes as floats, and a label per image."""
    checks.flag(f"{reader}: labels", labels)
    prefix = _PREFIX[checks.choice(f"{reader}: split", split, _PREFIX)]

    def find(suffix):
        return files.find(
            reader, directory, f"{prefix}-{suffix}", folders, source, ".gz"
        )

    images = _bytes(find("images-idx3-ubyte"), (None, _SIDE, _SIDE))
    pixels = images.reshape(len(images), _SIDE**2).astype(np.float32) / 255
    if not labels:
        return pixels
    path = find("labels-idx1-ubyte")
    classes = _bytes(path, (len(images),)).astype(np.int32)
    if not (classes < _CLASSES).all():
        raise checks.error(
            str(path), f"labels from 0 to {_CLASSES - 1}", classes, hint=_OTHER_FILES
        )
    return pixels, classes


def _bytes(path: files.Path, shape: tuple[int | None, ...]) -> np.ndarray:
    """Return an IDX array of bytes whose shape is known but for None."""
    array = idx(path)
    fits = array.ndim == len(shape) and all(
        e in (None, n) for n, e in zip(array.shape, shape)
    )
    expected = str(shape).replace("None", "N")
    if not fits or array.dtype != np.uint8:
        raise checks.error(
            str(path), f"uint8 of shape {expected}", array, hint=_OTHER_FILES
        )
    return array
