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


WRONG = [
    (data.omniglot, OMNIGLOT, b"<html>" + b" " * 600, "MATLAB"),
    (data.omniglot, OMNIGLOT, {"x": GREY[0]}, "'data'"),
    (data.omniglot, OMNIGLOT, characters(data=GREY[0]), r"\(28, 28\)"),
    (data.omniglot, OMNIGLOT, characters(target=np.ones((50, 3))), r"\(50, 3\)"),
    (data.caltech101_silhouettes, CALTECH, silhouettes(train_labels=np.ones((2, 1))), r"\(2, 1\)"),
    (data.usps, "usps", b"", "empty"),
    (data.usps, "usps", usps_text(2 + INK, (1, 2)), "line 1"),
    (data.usps, "usps", usps_text(INK, (1, 11)), "line 2"),
    (data.usps, "usps.bz2", bz2.compress(usps_text(INK, (1, 2)))[:-20], "bzip2"),
    (data.cifar10, "data_batch_1.bin", cifar()[:-1], "6145"),
    (data.cifar10, "data_batch_1.bin", cifar((1, 10)), "10"),
    (data.bag_of_words, "docword.kos.txt", b"1 2 3\n", "1 2 3"),
    (data.bag_of_words, "docword.kos.txt", docword(COUNTS)[:-6], "4 counts"),
    (data.bag_of_words, "docword.kos.txt", b"1\n2\n2\n1 1 1\n1 3 1\n", "line 5"),
    (data.bag_of_words, "docword.kos.txt", b"9999999999999\n9999999\n1\n1 1 1\n", "memory"),
    (data.bag_of_words, "docword.kos.txt.gz", gzip.compress(docword(COUNTS))[:-9], "gzip"),
]


@pytest.mark.parametrize(("reader", "name", "content", "message"), WRONG)
def test_invalid_files_are_named(tmp_path, reader, name, content, message):
    if reader is data.cifar10:
        for n in range(2, 6):
            write(tmp_path, f"data_batch_{n}.bin", cifar())
    path = write(tmp_path, name, content)
    options = {} if reader is data.bag_of_words else {"labels": True}
    with pytest.raises(ArgumentError, match=f"(?s){re.escape(str(path))}.*{message}"):
        reader(tmp_path, **options)
