# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Images of 28x28 pixels in MATLAB files: OMNIGLOT, and the silhouettes of Caltech-101."""

from pathlib import Path
from typing import Literal, overload

import numpy as np

from ebmpp.core import checks
from ebmpp.data import files
from ebmpp.data.files import Array, Folder, Labelled
from ebmpp.errors import ArgumentError

_SIDE = 28
_OMNIGLOT = {"train": ("data", "target"), "test": ("testdata", "testtarget")}
_CALTECH = {"train": "train", "validation": "val", "test": "test"}
_CALTECH_FILE = "caltech101_silhouettes_28_split1.mat"


@overload
def omniglot(directory: Folder = None, split: str = "train", labels: Literal[False] = False) -> Array: ...
@overload
def omniglot(directory: Folder = None, split: str = "train", *, labels: Literal[True]) -> Labelled: ...
def omniglot(directory: Folder = None, split: str = "train", labels: bool = False) -> Array | Labelled:
    """
    OMNIGLOT, handwritten characters of fifty alphabets, as Burda et al. (2016) cut and scaled them.

    :param directory: the folder of the file ``chardata.mat``, or the one above its ``omniglot``
        folder; the default is the environment variable ``EBMPP_DATA_DIR``.
    :param split: "train" or "test".
    :param labels: return the alphabet of each image too.
    :return: float32 array of shape ``(N, 784)`` in [0, 1], row by row from the top (the file has columns;
        N is 24345 or 8070); with `labels`, also an int32 array of shape ``(N,)`` with values 0 to 49.
    :raises FileNotFoundError: if the file is not found; the text says where it was looked for.
    :raises ArgumentError: if `split` is neither, or the file is damaged or holds something else.

    **Example** (the file here holds two blank images)

    >>> import pathlib, tempfile, numpy as np, scipy.io, ebmpp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     scipy.io.savemat(pathlib.Path(folder, "chardata.mat"), {"data": np.zeros((784, 2))})
    ...     ebmpp.data.omniglot(folder).shape
    (2, 784)
    """
    checks.choice("omniglot: split", split, _OMNIGLOT)
    source = "from https://github.com/yburda/iwae, datasets/OMNIGLOT"
    path = files.find("omniglot", directory, "chardata.mat", (".", "omniglot"), source)
    data, target = _OMNIGLOT[split]
    found = _variables(path, [data, target] if labels else [data])
    pixels = _upright(path, data, found[data].T)
    if not labels:
        return pixels
    member = found[target]  # alphabets by images: 1 in each column
    if member.shape[1:] != (len(pixels),) or not (member.astype(bool).sum(0) == 1).all():
        raise ArgumentError(
            f"{path}: {target} of shape {member.shape}; a column with a single 1 is expected for each of "
            f"the {len(pixels)} images. Fetch the file again."
        )
    return pixels, member.argmax(0).astype(np.int32)


@overload
def caltech101_silhouettes(
    directory: Folder = None, split: str = "train", labels: Literal[False] = False
) -> Array: ...
@overload
def caltech101_silhouettes(
    directory: Folder = None, split: str = "train", *, labels: Literal[True]
) -> Labelled: ...
def caltech101_silhouettes(
    directory: Folder = None, split: str = "train", labels: bool = False
) -> Array | Labelled:
    """
    Silhouettes of the objects of Caltech-101, in the split of Marlin et al. (2010).

    Pixels are as in the file; ``1 - images`` is the negative.

    :param directory: the folder of ``caltech101_silhouettes_28_split1.mat``, or the one above its
        ``caltech101`` folder; the default is the environment variable ``EBMPP_DATA_DIR``.
    :param split: "train", "validation" or "test".
    :param labels: return the class of each image too.
    :return: float32 array of shape ``(N, 784)`` of zeros and ones, row by row from the top (the file has
        columns; N is 4100, 2264 or 2307); with `labels`, also an int32 array of shape ``(N,)`` with
        values 0 to 100.
    :raises FileNotFoundError: if the file is not found; the text says where it was looked for.
    :raises ArgumentError: if `split` is none of them, or the file is damaged or holds something else.

    **Example** (the file here holds two blank images)

    >>> import pathlib, tempfile, numpy as np, scipy.io, ebmpp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "caltech101_silhouettes_28_split1.mat")
    ...     scipy.io.savemat(file, {"train_data": np.zeros((2, 784), np.uint8)})
    ...     ebmpp.data.caltech101_silhouettes(folder).shape
    (2, 784)
    """
    checks.choice("caltech101_silhouettes: split", split, _CALTECH)
    source = f"from https://people.cs.umass.edu/~marlin/data/{_CALTECH_FILE}"
    folders = (".", "caltech101")
    path = files.find("caltech101_silhouettes", directory, _CALTECH_FILE, folders, source)
    data, target = (f"{_CALTECH[split]}_{what}" for what in ("data", "labels"))
    found = _variables(path, [data, target] if labels else [data])
    pixels = _upright(path, data, found[data])
    if not labels:
        return pixels
    classes = found[target].reshape(-1)
    if len(classes) != len(pixels) or not (classes >= 1).all():
        raise ArgumentError(
            f"{path}: {target} of shape {found[target].shape}; a class from 1 on is expected for each of "
            f"the {len(pixels)} images. Fetch the file again."
        )
    return pixels, classes.astype(np.int32) - 1


def _variables(path: Path, names: list[str]) -> dict[str, Array]:
    """Matrices of numbers in a MATLAB file."""
    from scipy.io import loadmat  # a tenth of a second that other users need not spend

    try:
        found = loadmat(path, variable_names=names)
    except Exception as error:  # scipy says that a file is damaged in a dozen ways
        raise ArgumentError(f"{path}: no whole MATLAB file ({error}); fetch it again.") from error
    for name in names:
        made = found.get(name)
        if not isinstance(made, np.ndarray) or made.ndim != 2 or made.dtype.kind not in "buif":
            told = "none" if made is None else f"{made.dtype} of shape {np.shape(made)}"
            raise ArgumentError(
                f"{path}: a matrix of numbers called {name!r} is expected, and there is {told}; is it "
                "another file of that name?"
            )
    return found


def _upright(path: Path, name: str, rows: Array) -> Array:
    """Images whose pixels go down the columns, as MATLAB has them, row by row."""
    if rows.shape[1] != _SIDE**2 or not ((rows >= 0) & (rows <= 1)).all():
        given = f"shape {rows.shape} an image a row"
        if rows.shape[1] == _SIDE**2:
            given = f"numbers from {rows.min()} to {rows.max()}"
        raise ArgumentError(
            f"{path}: {name} has {given}; images of {_SIDE}x{_SIDE} pixels in [0, 1] are expected."
        )
    turned = rows.reshape(-1, _SIDE, _SIDE).transpose(0, 2, 1)
    return turned.reshape(len(rows), -1).astype(np.float32)
