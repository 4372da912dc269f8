# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Readers of other people's files: small ones made here, whole and damaged."""

import bz2
from collections.abc import Callable
import gzip
from pathlib import Path
import re
import struct

import numpy as np
import pytest
import scipy.io

from ebmpp import data
from ebmpp.errors import ArgumentError

RNG = np.random.default_rng(0)
GREY = RNG.random((3, 28, 28))  # image, line, column
BYTES = RNG.integers(0, 256, (3, 28, 28), dtype=np.uint8)
INK = np.round(RNG.uniform(-1, 1, (2, 256)), 3)
PHOTOS = RNG.integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)
COUNTS = np.array([[0, 3, 0, 1], [0, 0, 0, 0], [2, 1, 0, 1]])


def idx_images(images: np.ndarray) -> bytes:
    return struct.pack(">HBB3I", 0, 8, 3, *images.shape) + images.tobytes()


def usps_text(ink: np.ndarray, labels: tuple[int, ...]) -> bytes:
    line = lambda y, x: f"{y} " + " ".join(f"{i}:{v:g}" for i, v in enumerate(x, 1)) + "\n"
    return "".join(map(line, labels, ink)).encode()


def docword(counts: np.ndarray) -> bytes:
    entries = np.argwhere(counts)
    lines = [*counts.shape, len(entries), *(f"{d + 1} {w + 1} {counts[d, w]}" for d, w in entries)]
    return "".join(f"{line}\n" for line in lines).encode()


def cifar(labels: tuple[int, ...] = (7, 0), photos: np.ndarray = PHOTOS) -> bytes:
    return b"".join(bytes([y]) + x.tobytes() for y, x in zip(labels, photos, strict=True))


def silhouettes(**changed: np.ndarray) -> dict[str, np.ndarray]:
    made = {}
    for n, split in enumerate(("train", "val", "test"), 1):
        # the pixels of an image go down its columns
        made[f"{split}_data"] = (GREY[:n] > 0.5).transpose(0, 2, 1).reshape(n, 784).astype(np.uint8)
        made[f"{split}_labels"] = np.arange(1, n + 1)[:, None]
    return made | changed


def characters(**changed: np.ndarray) -> dict[str, np.ndarray]:
    member = np.zeros((50, 3))
    member[[4, 0, 49], [0, 1, 2]] = 1
    columns = GREY.transpose(0, 2, 1).reshape(3, 784).T
    made = {"data": columns, "target": member, "testdata": columns[:, 1:], "testtarget": member[:, 1:]}
    return made | changed


OMNIGLOT, CALTECH = "chardata.mat", "caltech101_silhouettes_28_split1.mat"


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Path]:
    def place(content: bytes | dict, name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, dict):
            scipy.io.savemat(path, content)
        else:
            path.write_bytes(content)
        return path

    return place


# --- whole files --------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [".", "omniglot"])
def test_omniglot_is_upright(place, tmp_path, monkeypatch, folder):
    place(characters(), f"{folder}/{OMNIGLOT}")
    monkeypatch.setenv("EBMPP_DATA_DIR", str(tmp_path))
    images, alphabets = data.omniglot(labels=True)
    assert images.dtype == np.float32 and alphabets.dtype == np.int32
    np.testing.assert_array_equal(images.reshape(3, 28, 28), GREY.astype(np.float32))
    assert alphabets.tolist() == [4, 0, 49]
    images, alphabets = data.omniglot(tmp_path, "test", labels=True)
    np.testing.assert_array_equal(images.reshape(2, 28, 28), GREY[1:].astype(np.float32))
    assert alphabets.tolist() == [0, 49]


@pytest.mark.parametrize("split, size", [("train", 1), ("validation", 2), ("test", 3)])
def test_silhouettes_are_upright(place, split, size):
    path = place(silhouettes(), f"caltech101/{CALTECH}")
    images, classes = data.caltech101_silhouettes(path.parents[1], split, labels=True)
    np.testing.assert_array_equal(images.reshape(size, 28, 28), GREY[:size] > 0.5)
    assert images.dtype == np.float32 and classes.tolist() == list(range(size))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("split, name", [("train", "usps"), ("test", "usps.t")])
def test_usps(place, split, name, packed):
    content = usps_text(INK, (10, 1))
    path = place(bz2.compress(content) if packed else content, name + ".bz2" * packed)
    images, labels = data.usps(path.parent, split, labels=True)
    np.testing.assert_allclose(images, (INK + 1) / 2, atol=1e-6)
    assert images.dtype == np.float32 and labels.tolist() == [9, 0]


def test_cifar10(place):
    for n in range(1, 6):
        path = place(cifar((n, 0)), f"cifar-10-batches-bin/data_batch_{n}.bin")
    place(cifar(), "cifar-10-batches-bin/test_batch.bin")
    images, labels = data.cifar10(path.parents[1], labels=True)
    assert images.dtype == np.float32 and labels.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    np.testing.assert_allclose(images.reshape(5, 2, 3, 32, 32)[3], PHOTOS / 255, atol=1e-6)
    images, labels = data.cifar10(path.parent, "test", labels=True)
    assert images.shape == (2, 3072) and labels.tolist() == [7, 0]


@pytest.mark.parametrize("packed", [False, True])
def test_bag_of_words(place, tmp_path, packed):
    content = docword(COUNTS)
    place(gzip.compress(content) if packed else content, "docword.kos.txt" + ".gz" * packed)
    place(b"ant\nbee\ncow\ndog\n", "vocab.kos.txt")
    counts, words = data.bag_of_words(tmp_path, words=True)
    np.testing.assert_array_equal(counts, COUNTS)
    assert counts.dtype == np.float32 and words == ["ant", "bee", "cow", "dog"]
    # bee occurs four times; ant and dog twice, and ant comes first
    counts, words = data.bag_of_words(tmp_path, num_words=2, words=True)
    np.testing.assert_array_equal(counts, COUNTS[:, :2])
    assert words == ["ant", "bee"]
    np.testing.assert_array_equal(data.bag_of_words(tmp_path, num_words=1), COUNTS[:, 1:2])


def test_a_bag_without_a_word(place, tmp_path):
    place(docword(np.zeros((2, 3), int)), "docword.own.txt")
    np.testing.assert_array_equal(data.bag_of_words(tmp_path, "own"), np.zeros((2, 3)))


def test_fashion_mnist_is_not_taken_for_mnist(place, tmp_path, monkeypatch):
    monkeypatch.setenv("EBMPP_DATA_DIR", str(tmp_path))
    place(idx_images(BYTES), "train-images-idx3-ubyte")  # MNIST's, since they lie there themselves
    with pytest.raises(FileNotFoundError, match=r"no train-images-idx3-ubyte\[.gz\] in .*fashion-mnist;"):
        data.fashion_mnist()
    place(idx_images(255 - BYTES), "fashion-mnist/train-images-idx3-ubyte")
    inverted = (255 - BYTES.reshape(3, 784)) / np.float32(255)
    np.testing.assert_array_equal(data.fashion_mnist(), inverted)
    np.testing.assert_array_equal(data.fashion_mnist(tmp_path), inverted)
    np.testing.assert_array_equal(data.fashion_mnist(tmp_path / "fashion-mnist"), inverted)
    np.testing.assert_array_equal(data.mnist(), BYTES.reshape(3, 784) / np.float32(255))


# --- missing files ------------------------------------------------------------------------------

READERS = {
    data.mnist: "train-images-idx3-ubyte",
    data.fashion_mnist: "train-images-idx3-ubyte",
    data.omniglot: OMNIGLOT,
    data.caltech101_silhouettes: CALTECH,
    data.usps: "usps",
    data.cifar10: "data_batch_1.bin",
    data.bag_of_words: "docword.kos.txt",
}


@pytest.mark.parametrize("reader, name", READERS.items(), ids=lambda made: getattr(made, "__name__", ""))
def test_what_is_missing_is_named_with_its_source(tmp_path, monkeypatch, reader, name):
    told = re.escape(f"{reader.__name__}: no {name}") + ".*" + re.escape(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=told + r".*EBMPP_DATA_DIR.*\(from http"):
        reader(tmp_path)
    monkeypatch.delenv("EBMPP_DATA_DIR", raising=False)
    with pytest.raises(FileNotFoundError, match=r"EBMPP_DATA_DIR is not set.*\(from http"):
        reader()


@pytest.mark.parametrize("reader", [r for r in READERS if r is not data.bag_of_words])
def test_a_split_that_is_none(reader, tmp_path):
    with pytest.raises(ValueError, match=f"{reader.__name__}: split is one of 'train', .*not 'all'"):
        reader(tmp_path, "all")


def test_one_of_five_files_is_missing(place):
    for n in (1, 2, 4, 5):
        path = place(cifar(), f"data_batch_{n}.bin")
    with pytest.raises(FileNotFoundError, match="no data_batch_3.bin"):
        data.cifar10(path.parent)


# --- damaged and wrong ones ---------------------------------------------------------------------

USPS = usps_text(INK, (1, 2))
DOCWORD = docword(COUNTS)
WRONG = {
    "mat, empty": (data.omniglot, OMNIGLOT, b"", "no whole MATLAB file"),
    "mat, a page": (data.omniglot, OMNIGLOT, b"<html>" + b" " * 600, "no whole MATLAB file"),
    "mat, other": (data.omniglot, OMNIGLOT, {"x": GREY[0]}, "called 'data' is expected, and there is none"),
    "mat, text": (data.omniglot, OMNIGLOT, characters(data="abc"), "'data' is expected, and there is <U3"),
    "mat, shape": (
        data.omniglot,
        OMNIGLOT,
        characters(data=GREY[0]),
        r"data has shape \(28, 28\) an image a row; images of 28x28",
    ),
    "mat, bytes": (
        data.omniglot,
        OMNIGLOT,
        characters(data=2 * np.ones((784, 3))),
        "data has numbers from 2.0 to 2.0; images of 28x28 pixels in .0, 1.",
    ),
    "mat, alphabets": (
        data.omniglot,
        OMNIGLOT,
        characters(target=np.ones((50, 3))),
        r"target of shape \(50, 3\); a column with a single 1",
    ),
    "mat, classes": (
        data.caltech101_silhouettes,
        CALTECH,
        silhouettes(train_labels=np.ones((2, 1))),
        r"train_labels of shape \(2, 1\); a class from 1 on is expected for each of the 1 images",
    ),
    "usps, empty": (data.usps, "usps", b"", "it is empty; the file is cut"),
    "usps, cut": (data.usps, "usps", USPS[:-1], "its last line has no end; the file is cut"),
    "usps, short": (data.usps, "usps", USPS[:900] + b"\n", "line 1 is b'1 1:.*256 pixels from -1 to 1"),
    "usps, words": (data.usps, "usps", b"a line\n", "line 1 is b'a line.n'"),
    "usps, range": (data.usps, "usps", usps_text(2 + INK, (1, 2)), "line 1 is .* from -1 to 1"),
    "usps, labels": (data.usps, "usps", usps_text(INK, (1, 11)), "line 2 is b'11 1:.* a label from 1 to 10"),
    "usps, bz2": (data.usps, "usps.bz2", bz2.compress(USPS)[:-20], "damaged bzip2 .*fetch the file again"),
    "usps, garbled": (
        data.usps,
        "usps.bz2",
        bz2.compress(USPS)[:40] + b"\0" * 40 + bz2.compress(USPS)[80:],
        "damaged bzip2",
    ),
    "cifar, empty": (data.cifar10, "data_batch_1.bin", b"", "0 bytes, where images of 3073 bytes each"),
    "cifar, cut": (data.cifar10, "data_batch_1.bin", cifar()[:-1], "6145 bytes, where .* the file is cut"),
    "cifar, labels": (data.cifar10, "data_batch_1.bin", cifar((1, 10)), "image 1 has the label 10"),
    "words, header": (data.bag_of_words, "docword.kos.txt", b"1 2 3\n", "begins with .b'1 2 3'., where"),
    "words, cut": (data.bag_of_words, "docword.kos.txt", DOCWORD[:-6], "4 counts, where 5 are announced"),
    "words, half a line": (data.bag_of_words, "docword.kos.txt", DOCWORD[:-3], "after the header, .*column"),
    "words, pairs": (data.bag_of_words, "docword.kos.txt", b"2\n2\n3\n1 1\n1 2\n2 1\n", "2 numbers a line"),
    "words, no numbers": (
        data.bag_of_words,
        "docword.kos.txt",
        b"1\n1\n1\n1 1 x\n",
        "header, .*'x'",
    ),
    "words, outside": (
        data.bag_of_words,
        "docword.kos.txt",
        b"1\n2\n2\n1 1 1\n1 3 1\n",
        "line 5 is 1 3 1; documents are from 1 to 1, words from 1 to 2",
    ),
    "words, too many": (
        data.bag_of_words,
        "docword.kos.txt",
        b"9999999999999\n9999999\n1\n1 1 1\n",
        "do not fit into memory; keep fewer by num_words",
    ),
    "words, gzip": (data.bag_of_words, "docword.kos.txt.gz", gzip.compress(DOCWORD)[:-9], "damaged gzip"),
}


@pytest.mark.parametrize("reader, name, content, message", WRONG.values(), ids=WRONG)
def test_a_file_that_is_not_right_is_named(place, reader, name, content, message):
    if reader is data.cifar10:
        for n in range(2, 6):
            place(cifar(), f"data_batch_{n}.bin")
    path = place(content, name)
    labelled = {} if reader is data.bag_of_words else {"labels": True}
    with pytest.raises(ArgumentError, match=f"(?s){re.escape(str(path))}: .*{message}"):
        reader(path.parent, **labelled)


def test_words_that_do_not_belong_to_the_counts(place, tmp_path):
    place(DOCWORD, "docword.kos.txt")
    path = place(b"ant\nbee\n", "vocab.kos.txt")
    with pytest.raises(ArgumentError, match=re.escape(f"{path}: 2 words, where the counts have 4")):
        data.bag_of_words(tmp_path, words=True)
    with pytest.raises(ArgumentError, match="num_words is at most 4, as .* has, not 5"):
        data.bag_of_words(tmp_path, num_words=5)
    with pytest.raises(ArgumentError, match="num_words is an int of at least 1, not 0"):
        data.bag_of_words(tmp_path, num_words=0)
