# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Readers of public data sets: OMNIGLOT, Caltech-101 silhouettes, USPS, CIFAR-10 and bags of words.

They read files as their authors publish them, packed or not, and return one row per
observation. Nothing is downloaded. ``directory`` is the folder of the files, or the one
above their usual folder; by default it is the environment variable ``EBMPP_DATA_DIR``.
"""

from collections.abc import Iterator
import itertools
import math
from pathlib import Path
from typing import Any, BinaryIO
import warnings

import numpy as np

from ebmpp.core import checks
from ebmpp.data import files
from ebmpp.data.files import Folder, Labelled
from ebmpp.errors import ArgumentError

_SIDE = 28
_OMNIGLOT = {"train": ("data", "target"), "test": ("testdata", "testtarget")}
_CALTECH = {"train": "train", "validation": "val", "test": "test"}
_CALTECH_FILE = "caltech101_silhouettes_28_split1.mat"
_USPS = {"train": "usps", "test": "usps.t"}
_USPS_PIXELS = 256
_USPS_LABELS = range(1, 11)
_CIFAR = {
    "train": tuple(f"data_batch_{n}.bin" for n in range(1, 6)),
    "test": ("test_batch.bin",),
}
_CIFAR_BYTES = 1 + 3 * 32 * 32
_CIFAR_LABELS = 10
_CIFAR_BATCH = 10_000
_MOST_ENTRIES = 28**2 * 2**16  # of a matrix; the largest has 24,345 images
_ALPHABETS = 50
_CLASSES = 101
# bytes of a line or a word; memory stays bounded where the content is something else
_LONGEST = 1 << 14
_DIGITS = 18  # of a number in a header
_MOST_WORDS = 1 << 24
_LARGEST_COUNT = (1 << 24) - 1  # larger ones may be no float32

# -- MATLAB files ---------------------------------------------------------------------


def omniglot(
    directory: Folder = None, split: str = "train", labels: bool = False
) -> np.ndarray | Labelled:
    """Read OMNIGLOT, characters of fifty alphabets as cut and scaled by Burda et al. (2016).

    :param directory: folder of ``chardata.mat``, or the one above its ``omniglot``
        folder.
    :param split: "train" or "test".
    :param labels: return the alphabet of each image too.
    :return: float32 array of shape ``(N, 784)`` in [0, 1] in row-major order (N is
        24345 or 8070); with ``labels``, also an int32 array of shape ``(N,)`` with
        values 0 to 49.
    :raises FileNotFoundError: if the file is missing.
    :raises ArgumentError: for an unknown ``split``, or a file that is damaged or holds
        something else.

    **Example** (the file here holds two blank images)

    >>> import pathlib, tempfile, numpy as np, scipy.io
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     scipy.io.savemat(pathlib.Path(folder, "chardata.mat"), {"data": np.zeros((784, 2))})
    ...     omniglot(folder).shape
    (2, 784)
    """
    checks.flag("omniglot: labels", labels)
    checks.choice("omniglot: split", split, _OMNIGLOT)
    source = "from https://github.com/yburda/iwae, datasets/OMNIGLOT"
    path = files.find("omniglot", directory, "chardata.mat", (".", "omniglot"), source)
    data, target = _OMNIGLOT[split]
    variables = _variables(path, [data, target] if labels else [data])
    pixels = _upright(path, data, variables[data].T)
    if not labels:
        return pixels
    member = variables[target]  # alphabets by images: 1 in each column
    is_one_hot = (
        member.shape[1] == len(pixels) and ((member == 0) | (member == 1)).all()
    )
    if not is_one_hot or len(member) > _ALPHABETS or not (member.sum(0) == 1).all():
        raise ArgumentError(
            f"{path}: {target} must have one 1 in each of {len(pixels)} columns, and "
            f"at most {_ALPHABETS} rows, got {checks.tell(member)}"
        )
    return pixels, member.argmax(0).astype(np.int32)


def caltech101_silhouettes(
    directory: Folder = None, split: str = "train", labels: bool = False
) -> np.ndarray | Labelled:
    """Read the silhouettes of the objects of Caltech-101, in the split of Marlin et al. (2010).

    Pixels are as in the file; ``1 - images`` is the negative.

    :param directory: folder of ``caltech101_silhouettes_28_split1.mat``, or the one
        above its ``caltech101`` folder.
    :param split: "train", "validation" or "test".
    :param labels: return the class of each image too.
    :return: float32 array of shape ``(N, 784)`` of zeros and ones in row-major order (N
        is 4100, 2264 or 2307); with ``labels``, also an int32 array of shape ``(N,)``
        with values 0 to 100.
    :raises FileNotFoundError: if the file is missing.
    :raises ArgumentError: for an unknown ``split``, or a file that is damaged or holds
        something else.

    **Example** (the file here holds two blank images)

    >>> import pathlib, tempfile, numpy as np, scipy.io
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "caltech101_silhouettes_28_split1.mat")
    ...     scipy.io.savemat(file, {"train_data": np.zeros((2, 784), np.uint8)})
    ...     caltech101_silhouettes(folder).shape
    (2, 784)
    """
    checks.flag("caltech101_silhouettes: labels", labels)
    checks.choice("caltech101_silhouettes: split", split, _CALTECH)
    source = f"from https://people.cs.umass.edu/~marlin/data/{_CALTECH_FILE}"
    folders = (".", "caltech101")
    path = files.find(
        "caltech101_silhouettes", directory, _CALTECH_FILE, folders, source
    )
    data, target = (f"{_CALTECH[split]}_{kind}" for kind in ("data", "labels"))
    variables = _variables(path, [data, target] if labels else [data])
    pixels = _upright(path, data, variables[data])
    if not ((pixels == 0) | (pixels == 1)).all():
        raise ArgumentError(
            f"{path}: {data} must hold silhouettes of zeros and ones, got grey pixels"
        )
    if not labels:
        return pixels
    classes = variables[target].reshape(-1)
    if (
        len(classes) != len(pixels)
        or not np.isin(classes, np.arange(1, _CLASSES + 1)).all()
    ):
        raise ArgumentError(
            f"{path}: {target} must have a class from 1 to {_CLASSES} for each of "
            f"{len(pixels)} images, got {checks.tell(variables[target])}"
        )
    return pixels, classes.astype(np.int32) - 1


def _variables(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Return matrices of numbers of a MATLAB file."""
    from scipy.io import loadmat, whosmat  # a tenth of a second

    try:
        sizes = [math.prod(shape) for name, shape, _ in whosmat(path) if name in names]
        most = min(_MOST_ENTRIES, files.most_unpacked(path) // 8)
        is_small = sum(sizes) <= most
        variables = loadmat(path, variable_names=names) if is_small else {}
    except Exception as error:  # scipy reports damage in a dozen ways
        raise ArgumentError(
            f"{path}: damaged, or not a MATLAB file ({error})"
        ) from error
    if not is_small:
        raise ArgumentError(
            f"{path}: {names} must have at most {most} entries, got {sum(sizes)}"
        )
    for name in names:
        value = variables.get(name)
        if (
            not isinstance(value, np.ndarray)
            or value.ndim != 2
            or value.dtype.kind not in "buif"
        ):
            raise ArgumentError(
                f"{path}: {name!r} must be a matrix of numbers, got {checks.tell(value)}"
            )
    return variables


def _upright(path: Path, name: str, rows: np.ndarray) -> np.ndarray:
    """Return images in row-major order; MATLAB's are column-major."""
    if rows.shape[1] != _SIDE**2 or not ((rows >= 0) & (rows <= 1)).all():
        raise ArgumentError(
            f"{path}: {name} must hold images of 28x28 pixels in [0, 1], got {checks.tell(rows)}"
        )
    images = rows.reshape(-1, _SIDE, _SIDE).transpose(0, 2, 1)
    return images.reshape(len(rows), -1).astype(np.float32)


# -- binary and text files -----------------------------------------------------------


def cifar10(
    directory: Folder = None, split: str = "train", labels: bool = False
) -> np.ndarray | Labelled:
    """Read CIFAR-10, colour photographs of ten classes, from its binary version.

    :param directory: folder of ``data_batch_1.bin`` to ``data_batch_5.bin`` and
        ``test_batch.bin``, or the one above their ``cifar-10-batches-bin`` folder.
    :param split: "train" or "test".
    :param labels: return the class of each image too.
    :return: float32 array of shape ``(N, 3072)`` in [0, 1] (N is 50000 or 10000):
        ``reshape(-1, 3, 32, 32)`` has the planes red, green and blue; with ``labels``,
        also an int32 array of shape ``(N,)`` with values 0 to 9.
    :raises FileNotFoundError: if a file is missing.
    :raises ArgumentError: for an unknown ``split``, or a file that is damaged or holds
        something else.

    **Example** (the folder here holds one black image)

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "test_batch.bin").write_bytes(bytes([3] + [0] * 3072))
    ...     images, labels = cifar10(folder, "test", labels=True)
    >>> images.shape, labels.tolist()
    ((1, 3072), [3])
    """
    source = "from https://www.cs.toronto.edu/~kriz/cifar.html, the binary version"
    checks.flag("cifar10: labels", labels)
    checks.choice("cifar10: split", split, _CIFAR)
    folders = (".", "cifar-10-batches-bin")
    paths = [
        files.find("cifar10", directory, name, folders, source, ".gz")
        for name in _CIFAR[split]
    ]
    records = np.concatenate([_cifar_batch(path) for path in paths])
    pixels = records[:, 1:].astype(np.float32)
    pixels /= 255  # in place: the training images take 600 MB
    return (pixels, records[:, 0].astype(np.int32)) if labels else pixels


def _cifar_batch(path: Path) -> np.ndarray:
    """Return rows of a label and 3072 bytes."""
    with files.unpacked(path) as file:
        most = _CIFAR_BATCH * _CIFAR_BYTES
        data = np.frombuffer(files.read_up_to(file, most + 1), np.uint8)
    if not len(data) or len(data) % _CIFAR_BYTES:
        size = f"more than {most}" if len(data) > most else len(data)
        raise ArgumentError(
            f"{path}: must hold images of {_CIFAR_BYTES} bytes each, got {size} bytes"
        )
    records = data.reshape(-1, _CIFAR_BYTES)
    if records[:, 0].max() >= _CIFAR_LABELS:
        raise ArgumentError(
            f"{path}: labels must be from 0 to 9, got {records[:, 0].max()}; is it CIFAR-100?"
        )
    return records


def usps(
    directory: Folder = None, split: str = "train", labels: bool = False
) -> np.ndarray | Labelled:
    """Read USPS, digits of 16x16 pixels from envelopes, from the text files of LIBSVM.

    A line holds a label from 1 to 10 and pixels ``1:-0.3 ... 256:1`` from -1 to 1.

    :param directory: folder of ``usps`` and ``usps.t`` (or ``.bz2``), or the one above
        their ``usps`` folder.
    :param split: "train" or "test".
    :param labels: return the digit of each image too.
    :return: float32 array of shape ``(N, 256)`` in [0, 1] (N is 7291 or 2007); with
        ``labels``, also an int32 array of shape ``(N,)`` with values 0 to 9.
    :raises FileNotFoundError: if a file is missing.
    :raises ArgumentError: for an unknown ``split``, or a file that is damaged or of
        another format.

    **Example** (the file here holds one image of full ink)

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     line = "8 " + " ".join(f"{i}:1" for i in range(1, 257))
    ...     _ = pathlib.Path(folder, "usps").write_text(line + chr(10))
    ...     images, labels = usps(folder, labels=True)
    >>> images.shape, float(images.min()), labels.tolist()
    ((1, 256), 1.0, [7])
    """
    checks.flag("usps: labels", labels)
    checks.choice("usps: split", split, _USPS)
    source = "from https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"
    path = files.find("usps", directory, _USPS[split], (".", "usps"), source, ".bz2")
    with files.unpacked(path) as file:
        listed = [
            _usps_line(path, number, line)
            for number, line in enumerate(_lines(file), 1)
        ]
    if not listed:
        raise ArgumentError(
            f"{path}: must hold lines of pixels, got a file that is truncated to nothing"
        )
    rows = np.stack(listed)
    pixels = ((rows[:, 1:] + 1) / 2).astype(np.float32)
    return (pixels, rows[:, 0].astype(np.int32) - 1) if labels else pixels


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines, and longer ones in pieces."""
    return iter(lambda: file.readline(_LONGEST), b"")


def _usps_line(path: Path, number: int, line: bytes) -> np.ndarray:
    """Return a label and the pixels."""
    try:
        label, *fields = line.split()
        places, pixels = zip(*(field.split(b":") for field in fields), strict=True)
        is_complete = line.endswith(b"\n") and [int(p) for p in places] == list(
            range(1, _USPS_PIXELS + 1)
        )
        row = np.array([label, *pixels]).astype(float)
    except ValueError:
        is_complete = False
        row = np.zeros(1)
    if (
        not is_complete
        or row[0] not in _USPS_LABELS
        or not (np.abs(row[1:]) <= 1).all()
    ):
        raise ArgumentError(
            f"{path}: line {number} must hold a label from 1 to 10 and {_USPS_PIXELS} "
            f"numbered pixels from -1 to 1, got {line[:40]!r}..."
        )
    return row


# -- bags of words -------------------------------------------------------------------


def bag_of_words(
    directory: Folder = None,
    name: str = "kos",
    num_words: int | None = None,
    words: bool = False,
) -> Any:
    """Read counts of words in documents, in the format of UCI's bags of words.

    ``docword.<name>.txt`` (or ``.gz``) starts with three lines, the numbers of
    documents, words and nonzero counts; each further line holds a document, a word
    (both counted from 1) and a count.

    :param directory: folder of the files, or the one above their ``bag-of-words``
        folder.
    :param name: name of the collection: "kos", "nips", "enron", "nytimes", "pubmed", or
        a custom one.
    :param num_words: keep this many of the most frequent words, in the file's order;
        all by default.
    :param words: return the words too, from ``vocab.<name>.txt``.
    :return: float32 array of counts, ``(documents, words)``, including documents
        without words; with ``words``, also the list of words. ``counts > 0`` is
        presence.
    :raises FileNotFoundError: if a file is missing.
    :raises ArgumentError: for a file that is damaged or of another format, too large a
        ``num_words``, or an array that does not fit into memory.

    **Example**

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "docword.own.txt")
    ...     _ = file.write_text(chr(10).join(["2", "3", "3", "1 1 5", "1 3 2", "2 3 1"]))
    ...     bag_of_words(folder, "own")
    array([[5., 0., 2.],
           [0., 0., 1.]], dtype=float32)
    """
    source = "from https://archive.ics.uci.edu/dataset/164/bag+of+words"
    folders = (".", "bag-of-words")
    path = files.find(
        "bag_of_words", directory, f"docword.{name}.txt", folders, source, ".gz"
    )
    with files.unpacked(path) as file:
        (documents, size), entries = _word_counts(path, file)
    columns = np.arange(size)
    if num_words is not None:
        num_words = checks.count("bag_of_words: num_words", num_words, most=size)
        totals = np.bincount(entries[:, 1] - 1, entries[:, 2], minlength=size)
        columns = np.sort(np.argsort(-totals, stable=True)[:num_words])
    counts = _table(path, documents, columns, entries)
    if not words:
        return counts
    path = files.find(
        "bag_of_words", directory, f"vocab.{name}.txt", folders, source, ".gz"
    )
    with files.unpacked(path) as file:
        vocabulary = (
            files.read_up_to(file, _LONGEST * size).decode("utf-8", "replace").split()
        )
    if len(vocabulary) != size:
        raise ArgumentError(
            f"{path}: must hold the {size} words of the counts, got {len(vocabulary)}"
        )
    return counts, [vocabulary[i] for i in columns]


def _word_counts(path: Path, file: BinaryIO) -> tuple[tuple[int, int], np.ndarray]:
    """Return the numbers of documents and words, and rows of a document, a word and a count."""
    header = [line.strip() for line in itertools.islice(_lines(file), 3)]
    is_number = [line.isdigit() and len(line) <= _DIGITS for line in header]
    if len(header) < 3 or not all(is_number):
        raise ArgumentError(
            f"{path}: must start with three lines, the numbers of documents, words and "
            f"counts, got {[line[:20] for line in header]}"
        )
    documents, size, total = map(int, header)
    if size > _MOST_WORDS:
        raise ArgumentError(
            f"{path}: must have at most {_MOST_WORDS} words, got {size}"
        )
    # one more than there should be shows that there are too many
    lines = itertools.islice(_lines(file), total + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of an empty file
        try:
            entries = np.loadtxt(lines, np.int64, comments=None, ndmin=2)
            entries = entries.reshape(-1, 3)
        except ValueError as error:
            raise ArgumentError(
                f"{path}: lines must hold a document, a word and a count ({error})"
            ) from error
    outside = (entries < 1).any(1) | (entries > [documents, size, _LARGEST_COUNT]).any(
        1
    )
    if len(entries) != total or outside.any():
        first = (
            f", of which line {int(outside.argmax()) + 4} is out of range"
            if outside.any()
            else ""
        )
        raise ArgumentError(
            f"{path}: must hold {total} counts up to {_LARGEST_COUNT} of documents 1 to "
            f"{documents} and words 1 to {size}, got "
            f"{f'more than {total}' if len(entries) > total else len(entries)} "
            f"counts{first}"
        )
    return (documents, size), entries


def _table(
    path: Path, documents: int, columns: np.ndarray, entries: np.ndarray
) -> np.ndarray:
    """Return the counts of the words that are columns."""
    try:
        counts = np.zeros((documents, len(columns)), np.float32)
    except (MemoryError, ValueError) as error:
        raise ArgumentError(
            f"{path}: {documents} documents of {len(columns)} words must fit into "
            "memory; keep fewer by num_words=..."
        ) from error
    column = np.searchsorted(columns, entries[:, 1] - 1)
    is_selected = columns[np.minimum(column, len(columns) - 1)] == entries[:, 1] - 1
    np.add.at(
        counts,
        (entries[is_selected, 0] - 1, column[is_selected]),
        entries[is_selected, 2],
    )
    if counts.max(initial=0) > _LARGEST_COUNT:
        raise ArgumentError(
            f"{path}: counts of one word must sum to at most {_LARGEST_COUNT} in a "
            f"document, got {counts.max():.0f}"
        )
    return counts
