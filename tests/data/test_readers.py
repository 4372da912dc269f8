# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Readers of public data sets return the images, labels and counts of small files, and
name faulty ones.

Tests contrib/readers.py.
"""

import bz2
from collections.abc import Mapping
import gzip
from pathlib import Path
import re
import struct

import numpy as np
import pytest
import scipy.io

from ebmpp import data
from ebmpp.contrib import readers
from ebmpp.errors import ArgumentError

RNG = np.random.default_rng(0)
GREY = RNG.random((3, 28, 28))  # image, row, column
INK = np.round(RNG.uniform(-1, 1, (2, 256)), 3)
PHOTOS = RNG.integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)
COUNTS = np.array([[0, 3, 0, 1], [0, 0, 0, 0], [2, 1, 0, 1]])
OMNIGLOT, CALTECH = "chardata.mat", "caltech101_silhouettes_28_split1.mat"


def write(folder: Path, name: str, content: bytes | Mapping[str, np.ndarray]) -> Path:
    """Write bytes, or the variables of a MATLAB file."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        scipy.io.savemat(path, dict(content))
    return path


def idx_images(images: np.ndarray) -> bytes:
    return struct.pack(">HBB3I", 0, 8, 3, *images.shape) + images.tobytes()


def usps_text(ink: np.ndarray, labels: tuple[int, ...]) -> bytes:
    line = lambda y, x: (
        f"{y} " + " ".join(f"{i}:{v:g}" for i, v in enumerate(x, 1)) + "\n"
    )
    return "".join(map(line, labels, ink)).encode()


def docword(counts: np.ndarray) -> bytes:
    entries = np.argwhere(counts)
    lines = [
        *counts.shape,
        len(entries),
        *(f"{d + 1} {w + 1} {counts[d, w]}" for d, w in entries),
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def cifar(labels: tuple[int, ...] = (7, 0)) -> bytes:
    return b"".join(
        bytes([y]) + x.tobytes() for y, x in zip(labels, PHOTOS, strict=True)
    )


def silhouettes(**replaced: np.ndarray) -> dict[str, np.ndarray]:
    """Splits of 1, 2 and 3 images; the pixels of an image go down its columns."""
    variables = {}
    for n, split in enumerate(("train", "val", "test"), 1):
        variables[f"{split}_data"] = (
            (GREY[:n] > 0.5).transpose(0, 2, 1).reshape(n, 784).astype(np.uint8)
        )
        variables[f"{split}_labels"] = np.arange(1, n + 1)[:, None]
    return variables | replaced


def characters(**replaced: np.ndarray) -> dict[str, np.ndarray]:
    """Three training images, of which the last two are test images."""
    alphabet = np.zeros((50, 3))
    alphabet[[4, 0, 49], [0, 1, 2]] = 1
    columns = GREY.transpose(0, 2, 1).reshape(3, 784).T
    variables = {"data": columns, "target": alphabet}
    return (
        variables
        | {"testdata": columns[:, 1:], "testtarget": alphabet[:, 1:]}
        | replaced
    )


def test_omniglot(tmp_path, monkeypatch):
    write(tmp_path, f"omniglot/{OMNIGLOT}", characters())
    monkeypatch.setenv("EBMPP_DATA_DIR", str(tmp_path))
    images, alphabets = readers.omniglot(labels=True)
    assert images.dtype == np.float32 and alphabets.tolist() == [4, 0, 49]
    np.testing.assert_array_equal(images.reshape(3, 28, 28), GREY.astype(np.float32))


def test_caltech101_silhouettes(tmp_path):
    write(tmp_path, f"caltech101/{CALTECH}", silhouettes())
    images, classes = readers.caltech101_silhouettes(
        tmp_path, "validation", labels=True
    )
    assert images.dtype == np.float32 and classes.tolist() == [0, 1]
    np.testing.assert_array_equal(images.reshape(2, 28, 28), GREY[:2] > 0.5)


def test_usps(tmp_path):
    write(tmp_path, "usps.bz2", bz2.compress(usps_text(INK, (10, 1))))
    images, labels = readers.usps(tmp_path, labels=True)
    assert images.dtype == np.float32 and labels.tolist() == [9, 0]
    np.testing.assert_allclose(images, (INK + 1) / 2, atol=1e-6)


def test_cifar10(tmp_path):
    for n in range(1, 6):
        write(tmp_path, f"cifar-10-batches-bin/data_batch_{n}.bin", cifar((n, 0)))
    images, labels = readers.cifar10(tmp_path, labels=True)
    assert images.dtype == np.float32 and labels.tolist() == [
        1,
        0,
        2,
        0,
        3,
        0,
        4,
        0,
        5,
        0,
    ]
    np.testing.assert_allclose(
        images.reshape(5, 2, 3, 32, 32)[3], PHOTOS / 255, atol=1e-6
    )


@pytest.mark.parametrize("packed", [False, True])
def test_bag_of_words(tmp_path, packed):
    content = docword(COUNTS)
    write(
        tmp_path,
        "docword.kos.txt" + ".gz" * packed,
        gzip.compress(content) if packed else content,
    )
    write(tmp_path, "vocab.kos.txt", b"ant\nbee\ncow\ndog\n")
    counts, words = readers.bag_of_words(tmp_path, words=True)
    assert counts.dtype == np.float32 and words == ["ant", "bee", "cow", "dog"]
    np.testing.assert_array_equal(counts, COUNTS)
    # the two most frequent words; ties go to the first
    counts, words = readers.bag_of_words(tmp_path, num_words=2, words=True)
    np.testing.assert_array_equal(counts, COUNTS[:, :2])
    assert words == ["ant", "bee"]


def test_fashion_mnist_is_not_confused_with_mnist(tmp_path, monkeypatch):
    monkeypatch.setenv("EBMPP_DATA_DIR", str(tmp_path))
    pixels = (255 * GREY).astype(np.uint8)
    write(tmp_path, "train-images-idx3-ubyte", idx_images(pixels))
    with pytest.raises(FileNotFoundError, match="fashion-mnist"):
        data.fashion_mnist()
    write(tmp_path, "fashion-mnist/train-images-idx3-ubyte", idx_images(255 - pixels))
    expected = (255 - pixels.reshape(3, 784)) / np.float32(255)
    for folder in (None, tmp_path, tmp_path / "fashion-mnist"):
        np.testing.assert_array_equal(data.fashion_mnist(folder), expected)
    np.testing.assert_array_equal(
        data.mnist(), pixels.reshape(3, 784) / np.float32(255)
    )


def test_labels_out_of_range_are_refused(tmp_path):
    write(
        tmp_path, "train-images-idx3-ubyte", idx_images((255 * GREY).astype(np.uint8))
    )
    write(
        tmp_path,
        "train-labels-idx1-ubyte",
        struct.pack(">HBBI", 0, 8, 1, 3) + bytes([9, 0, 10]),
    )
    write(tmp_path, OMNIGLOT, characters(target=np.eye(60)[:, [4, 0, 59]]))
    images = len(silhouettes()["train_data"])
    for labels in (102, 1.5, 0):
        write(tmp_path, CALTECH, silhouettes(train_labels=np.full((images, 1), labels)))
        with pytest.raises(ArgumentError, match="train_labels.*101"):
            readers.caltech101_silhouettes(tmp_path, labels=True)
    for reader in (data.mnist, data.fashion_mnist, readers.omniglot):
        with pytest.raises(ArgumentError, match=re.escape(str(tmp_path))):
            reader(tmp_path, labels=True)


def test_unpacked_data_are_bounded(tmp_path, monkeypatch):
    """Files of megabytes became gigabytes."""
    monkeypatch.setattr(data.files, "_ALWAYS_ALLOWED", 1000)
    monkeypatch.setattr(readers, "_MOST_ENTRIES", 784)
    monkeypatch.setattr(data.files, "_MAX_RATIO", 5)
    line = usps_text(INK, (1, 2))
    write(tmp_path, "usps.bz2", bz2.compress(50 * line))
    write(
        tmp_path,
        "docword.kos.txt.gz",
        gzip.compress(b"1\n1\n5000\n" + 5000 * b"1 1 1\n"),
    )
    write(tmp_path, OMNIGLOT, characters())
    for reader in (readers.usps, readers.bag_of_words, readers.omniglot):
        with pytest.raises(ArgumentError, match=r"at most \d+"):
            reader(tmp_path)
    write(tmp_path, "usps.bz2", b"1 " * 10**5)  # one endless line
    with pytest.raises(ArgumentError, match="line 1"):
        readers.usps(tmp_path)
    monkeypatch.setattr(readers, "_CIFAR_BATCH", 1)
    write(tmp_path, "test_batch.bin", cifar())
    with pytest.raises(ArgumentError, match="more than 3073"):
        readers.cifar10(tmp_path, "test")


READERS = {
    data.mnist: "train-images-idx3-ubyte",
    data.fashion_mnist: "train-images-idx3-ubyte",
    readers.omniglot: OMNIGLOT,
    readers.caltech101_silhouettes: CALTECH,
    readers.usps: "usps",
    readers.cifar10: "data_batch_1.bin",
    readers.bag_of_words: "docword.kos.txt",
}


@pytest.mark.nightly
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_missing_files_are_named_with_their_source(tmp_path, monkeypatch, reader):
    with pytest.raises(FileNotFoundError, match=re.escape(READERS[reader]) + ".*http"):
        reader(tmp_path)
    monkeypatch.delenv("EBMPP_DATA_DIR", raising=False)
    with pytest.raises(FileNotFoundError, match="EBMPP_DATA_DIR.*http"):
        reader()
    if reader is not readers.bag_of_words:
        with pytest.raises(ArgumentError, match="split.*'all'"):
            reader(tmp_path, "all")


WRONG = [
    (readers.omniglot, OMNIGLOT, b"<html>" + b" " * 600, "MATLAB"),
    (readers.omniglot, OMNIGLOT, {"x": GREY[0]}, "'data'"),
    (readers.omniglot, OMNIGLOT, characters(data=GREY[0]), r"\(28, 28\)"),
    (readers.omniglot, OMNIGLOT, characters(target=np.ones((50, 3))), r"\(50, 3\)"),
    (
        readers.caltech101_silhouettes,
        CALTECH,
        silhouettes(train_labels=np.ones((2, 1))),
        r"\(2, 1\)",
    ),
    (
        readers.caltech101_silhouettes,
        CALTECH,
        silhouettes(train_data=np.full((2, 784), 0.5)),
        "zeros and ones",
    ),
    (readers.usps, "usps", b"", "truncated"),
    (readers.usps, "usps", usps_text(2 + INK, (1, 2)), "line 1"),
    (readers.usps, "usps", usps_text(INK, (1, 11)), "line 2"),
    (readers.usps, "usps.bz2", bz2.compress(usps_text(INK, (1, 2)))[:-20], "bzip2"),
    (readers.cifar10, "data_batch_1.bin", cifar()[:-1], "6145"),
    (readers.cifar10, "data_batch_1.bin", cifar((1, 10)), "10"),
    (readers.bag_of_words, "docword.kos.txt", b"1 2 3\n", "1 2 3"),
    (readers.bag_of_words, "docword.kos.txt", docword(COUNTS)[:-6], "4 counts"),
    (readers.bag_of_words, "docword.kos.txt", b"1\n2\n2\n1 1 1\n1 3 1\n", "line 5"),
    (
        readers.bag_of_words,
        "docword.kos.txt",
        b"9999999999999\n9999999\n1\n1 1 1\n",
        "memory",
    ),
    (readers.bag_of_words, "docword.kos.txt", b"1\n999999999\n1\n1 1 1\n", "words"),
    (readers.bag_of_words, "docword.kos.txt", 5000 * b"9" + b"\n1\n1\n", "three lines"),
    (readers.bag_of_words, "docword.kos.txt", b"1\n1\n1\n1 1 16777217\n", "line 4"),
    (
        readers.bag_of_words,
        "docword.kos.txt",
        b"1\n1\n1\n" + 9 * b"1 1 1\n",
        "more than 1",
    ),
    (
        readers.bag_of_words,
        "docword.kos.txt",
        b"1\n1\n2\n1 1 16777215\n1 1 2\n",
        "sum to at most",
    ),
    (
        readers.bag_of_words,
        "docword.kos.txt.gz",
        gzip.compress(docword(COUNTS), mtime=0)[:-9],
        "gzip",
    ),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("reader", "name", "content", "message"), WRONG)
def test_invalid_files_are_named(tmp_path, reader, name, content, message):
    if reader is readers.cifar10:
        for n in range(2, 6):
            write(tmp_path, f"data_batch_{n}.bin", cifar())
    path = write(tmp_path, name, content)
    options = {} if reader is readers.bag_of_words else {"labels": True}
    with pytest.raises(ArgumentError, match=f"(?s){re.escape(str(path))}.*{message}"):
        reader(tmp_path, **options)
