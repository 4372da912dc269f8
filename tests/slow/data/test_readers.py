# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Readers name files that are missing, damaged or of another content."""

import bz2
import gzip
import re

import numpy as np
import pytest
from reader_files import (
    CALTECH,
    COUNTS,
    GREY,
    INK,
    OMNIGLOT,
    characters,
    cifar,
    docword,
    silhouettes,
    usps_text,
    write,
)

from ebmpp import data
from ebmpp.errors import ArgumentError

READERS = {
    data.mnist: "train-images-idx3-ubyte",
    data.fashion_mnist: "train-images-idx3-ubyte",
    data.omniglot: OMNIGLOT,
    data.caltech101_silhouettes: CALTECH,
    data.usps: "usps",
    data.cifar10: "data_batch_1.bin",
    data.bag_of_words: "docword.kos.txt",
}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_missing_files_are_named_with_their_source(tmp_path, monkeypatch, reader):
    with pytest.raises(FileNotFoundError, match=re.escape(READERS[reader]) + ".*http"):
        reader(tmp_path)
    monkeypatch.delenv("EBMPP_DATA_DIR", raising=False)
    with pytest.raises(FileNotFoundError, match="EBMPP_DATA_DIR.*http"):
        reader()
    if reader is not data.bag_of_words:
        with pytest.raises(ArgumentError, match="split.*'all'"):
            reader(tmp_path, "all")


USPS, DOCWORD = usps_text(INK, (1, 2)), docword(COUNTS)
WRONG = {
    "mat, a page": (data.omniglot, OMNIGLOT, b"<html>" + b" " * 600, "MATLAB"),
    "mat, other": (data.omniglot, OMNIGLOT, {"x": GREY[0]}, "'data'"),
    "mat, text": (data.omniglot, OMNIGLOT, characters(data="abc"), "<U3"),
    "mat, shape": (data.omniglot, OMNIGLOT, characters(data=GREY[0]), r"\(28, 28\)"),
    "mat, range": (data.omniglot, OMNIGLOT, characters(data=2 * np.ones((784, 3))), "2.0"),
    "mat, alphabets": (data.omniglot, OMNIGLOT, characters(target=np.ones((50, 3))), r"\(50, 3\)"),
    "mat, classes": (
        data.caltech101_silhouettes,
        CALTECH,
        silhouettes(train_labels=np.ones((2, 1))),
        r"\(2, 1\)",
    ),
    "usps, empty": (data.usps, "usps", b"", "empty"),
    "usps, truncated": (data.usps, "usps", USPS[:-1], "last line"),
    "usps, short": (data.usps, "usps", USPS[:900] + b"\n", "line 1"),
    "usps, range": (data.usps, "usps", usps_text(2 + INK, (1, 2)), "line 1"),
    "usps, labels": (data.usps, "usps", usps_text(INK, (1, 11)), "line 2"),
    "usps, bz2": (data.usps, "usps.bz2", bz2.compress(USPS)[:-20], "bzip2"),
    "cifar, truncated": (data.cifar10, "data_batch_1.bin", cifar()[:-1], "6145"),
    "cifar, labels": (data.cifar10, "data_batch_1.bin", cifar((1, 10)), "10"),
    "words, header": (data.bag_of_words, "docword.kos.txt", b"1 2 3\n", "1 2 3"),
    "words, truncated": (data.bag_of_words, "docword.kos.txt", DOCWORD[:-6], "4 counts"),
    "words, pairs": (data.bag_of_words, "docword.kos.txt", b"2\n2\n3\n1 1\n1 2\n2 1\n", "2 numbers"),
    "words, text": (data.bag_of_words, "docword.kos.txt", b"1\n1\n1\n1 1 x\n", "'x'"),
    "words, outside": (data.bag_of_words, "docword.kos.txt", b"1\n2\n2\n1 1 1\n1 3 1\n", "line 5"),
    "words, memory": (data.bag_of_words, "docword.kos.txt", b"9999999999999\n9999999\n1\n1 1 1\n", "memory"),
    "words, gzip": (data.bag_of_words, "docword.kos.txt.gz", gzip.compress(DOCWORD)[:-9], "gzip"),
}


@pytest.mark.parametrize(("reader", "name", "content", "message"), WRONG.values(), ids=WRONG)
def test_invalid_files_are_named(tmp_path, reader, name, content, message):
    if reader is data.cifar10:
        for n in range(2, 6):
            write(tmp_path, f"data_batch_{n}.bin", cifar())
    path = write(tmp_path, name, content)
    options = {} if reader is data.bag_of_words else {"labels": True}
    with pytest.raises(ArgumentError, match=f"(?s){re.escape(str(path))}.*{message}"):
        reader(tmp_path, **options)


def test_vocabularies_of_another_size_are_refused(tmp_path):
    write(tmp_path, "docword.kos.txt", DOCWORD)
    path = write(tmp_path, "vocab.kos.txt", b"ant\nbee\n")
    with pytest.raises(ArgumentError, match=re.escape(str(path))):
        data.bag_of_words(tmp_path, words=True)
    for num_words in (5, 0):
        with pytest.raises(ArgumentError, match=f"num_words.*{num_words}"):
            data.bag_of_words(tmp_path, num_words=num_words)
