# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Data in text files: the digits of USPS, and counts of words."""

import itertools
from pathlib import Path
from typing import BinaryIO, Literal, overload
import warnings

import numpy as np

from ebmpp.core import checks
from ebmpp.data import files
from ebmpp.data.files import Array, Folder, Labelled
from ebmpp.errors import ArgumentError

Worded = tuple[np.ndarray, list[str]]

_USPS = {"train": "usps", "test": "usps.t"}
_USPS_PIXELS = 256
_USPS_LABELS = range(1, 11)


@overload
def usps(directory: Folder = None, split: str = "train", labels: Literal[False] = False) -> Array: ...
@overload
def usps(directory: Folder = None, split: str = "train", *, labels: Literal[True]) -> Labelled: ...
def usps(directory: Folder = None, split: str = "train", labels: bool = False) -> Array | Labelled:
    """
    USPS, digits of 16x16 pixels from envelopes, from the text files of LIBSVM's page.

    The files are ``usps`` and ``usps.t``, with ``.bz2`` as they come or unpacked: a line an image, of a
    label from 1 to 10 and pixels ``1:-0.3 ... 256:1`` from -1 to 1.

    :param directory: the folder of the files, or the one above its ``usps`` folder; the default is the
        environment variable ``EBMPP_DATA_DIR``.
    :param split: "train" or "test".
    :param labels: return the digit of each image too.
    :return: float32 array of shape ``(N, 256)`` in [0, 1] (N is 7291 or 2007); with `labels`, also an int32
        array of shape ``(N,)`` with values 0 to 9.
    :raises FileNotFoundError: if a file is not found; the text says where it was looked for.
    :raises ArgumentError: if `split` is neither, or a file is damaged, cut or not of that form.

    **Example** (the file here holds one image of full ink)

    >>> import pathlib, tempfile, ebmpp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     line = "8 " + " ".join(f"{i}:1" for i in range(1, 257))
    ...     _ = pathlib.Path(folder, "usps").write_text(line + chr(10))
    ...     images, labels = ebmpp.data.usps(folder, labels=True)
    >>> images.shape, float(images.min()), labels.tolist()
    ((1, 256), 1.0, [7])
    """
    checks.choice("usps: split", split, _USPS)
    source = "from https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps"
    path = files.find("usps", directory, _USPS[split], (".", "usps"), source, ".bz2")
    with files.unpacked(path) as file:
        lines = file.read().splitlines(keepends=True)
    if not lines or not lines[-1].endswith(b"\n"):
        told = "its last line has no end" if lines else "it is empty"
        raise ArgumentError(f"{path}: {told}; the file is cut: fetch it again.")
    rows = np.stack([_usps_line(path, number, line) for number, line in enumerate(lines, 1)])
    pixels = ((rows[:, 1:] + 1) / 2).astype(np.float32)
    return (pixels, rows[:, 0].astype(np.int32) - 1) if labels else pixels


def _usps_line(path: Path, number: int, line: bytes) -> Array:
    """A label and the pixels."""
    try:
        label, *fields = line.split()
        places, pixels = zip(*(field.split(b":") for field in fields), strict=True)
        whole = [int(p) for p in places] == list(range(1, _USPS_PIXELS + 1))
        made = np.array([label, *pixels]).astype(float)
    except ValueError:
        whole, made = False, np.zeros(1)
    if not whole or made[0] not in _USPS_LABELS or not (np.abs(made[1:]) <= 1).all():
        raise ArgumentError(
            f"{path}: line {number} is {line[:40]!r}...; a label from 1 to 10 and {_USPS_PIXELS} pixels from "
            "-1 to 1, numbered from 1 on, are expected. Fetch the file again."
        )
    return made


@overload
def bag_of_words(
    directory: Folder = None,
    name: str = "kos",
    num_words: int | None = None,
    words: Literal[False] = False,
) -> Array: ...
@overload
def bag_of_words(
    directory: Folder = None, name: str = "kos", num_words: int | None = None, *, words: Literal[True]
) -> Worded: ...
def bag_of_words(
    directory: Folder = None, name: str = "kos", num_words: int | None = None, words: bool = False
) -> Array | Worded:
    """
    Counts of words in documents, from files in the form of UCI's bags of words.

    ``docword.<name>.txt``, with ``.gz`` as it comes or unpacked, begins with three lines: the numbers of
    documents, of words and of counts above zero; each of these is a line of its document, its word (both
    counted from 1) and the count.

    :param directory: the folder of the files, or the one above its ``bag-of-words`` folder; the default
        is the environment variable ``EBMPP_DATA_DIR``.
    :param name: which collection: "kos", "nips", "enron", "nytimes", "pubmed", or one of your own.
    :param num_words: keep so many words, those that occur most, in the file's order; by default all.
    :param words: return the words too, from ``vocab.<name>.txt``.
    :return: float32 array of counts, ``(documents, words)``, documents without a word included; with
        `words`, also the list of words. ``counts > 0`` tells presence.
    :raises FileNotFoundError: if a file is not found; the text says where it was looked for.
    :raises ArgumentError: if a file is damaged, cut or not of that form, there are fewer words than
        `num_words`, or the array does not fit into memory.

    **Example**

    >>> import pathlib, tempfile, ebmpp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "docword.own.txt")
    ...     _ = file.write_text(chr(10).join(["2", "3", "3", "1 1 5", "1 3 2", "2 3 1"]))
    ...     ebmpp.data.bag_of_words(folder, "own")
    array([[5., 0., 2.],
           [0., 0., 1.]], dtype=float32)
    """
    num_words = checks.optional_count("bag_of_words: num_words", num_words)
    source = "from https://archive.ics.uci.edu/dataset/164/bag+of+words"
    folders = (".", "bag-of-words")
    path = files.find("bag_of_words", directory, f"docword.{name}.txt", folders, source, ".gz")
    with files.unpacked(path) as file:
        (documents, size), entries = _word_counts(path, file)
    kept = np.arange(size)
    if num_words is not None:
        if num_words > size:
            raise ArgumentError(f"bag_of_words: num_words is at most {size}, as {path} has, not {num_words}")
        often = np.bincount(entries[:, 1] - 1, entries[:, 2], minlength=size)
        kept = np.sort(np.argsort(-often, stable=True)[:num_words])
    counts = _table(path, documents, kept, entries)
    if not words:
        return counts

    path = files.find("bag_of_words", directory, f"vocab.{name}.txt", folders, source, ".gz")
    with files.unpacked(path) as file:
        listed = file.read().decode("utf-8", "replace").split()
    if len(listed) != size:
        raise ArgumentError(
            f"{path}: {len(listed)} words, where the counts have {size}. Are the two files of one collection?"
        )
    return counts, [listed[i] for i in kept]


def _word_counts(path: Path, file: BinaryIO) -> tuple[tuple[int, int], Array]:
    """Numbers of documents and words, and rows of a document, a word and a count."""
    header = [line.strip() for line in itertools.islice(file, 3)]
    if len(header) < 3 or not all(line.isdigit() for line in header):
        raise ArgumentError(
            f"{path}: it begins with {[line[:20] for line in header]}, where three lines with the numbers of "
            "documents, words and counts are expected; is it a docword file?"
        )
    documents, size, total = map(int, header)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of no lines at all, which is said below
        try:
            entries = np.loadtxt(file, np.int64, comments=None, ndmin=2)
            if entries.size and entries.shape[1] != 3:
                raise ValueError(f"{entries.shape[1]} numbers a line")
        except ValueError as error:
            raise ArgumentError(
                f"{path}: after the header, {error}; lines of a document, a word and a count are expected. "
                "The file is cut or damaged: fetch it again."
            ) from error
    entries = entries.reshape(-1, 3)
    if len(entries) != total:
        raise ArgumentError(f"{path}: {len(entries)} counts, where {total} are announced; fetch it again.")
    outside = (entries < 1).any(1) | (entries[:, 0] > documents) | (entries[:, 1] > size)
    if outside.any():
        line = int(outside.argmax())
        raise ArgumentError(
            f"{path}: line {line + 4} is {' '.join(map(str, entries[line]))}; documents are from 1 to "
            f"{documents}, words from 1 to {size}, counts from 1 on. Fetch it again."
        )
    return (documents, size), entries


def _table(path: Path, documents: int, kept: Array, entries: Array) -> Array:
    """Counts of the words that are kept."""
    try:
        counts = np.zeros((documents, len(kept)), np.float32)
    except (MemoryError, ValueError) as error:
        raise ArgumentError(
            f"{path}: {documents} documents of {len(kept)} words each do not fit into memory; keep fewer by "
            "num_words=..."
        ) from error
    column = np.searchsorted(kept, entries[:, 1] - 1)
    there = kept[np.minimum(column, len(kept) - 1)] == entries[:, 1] - 1
    np.add.at(counts, (entries[there, 0] - 1, column[there]), entries[there, 2])
    return counts
