# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Patterns, digits, IDX files, MNIST and binarisation.

Tests data/files.py, data/images.py, data/patterns.py.
"""

from collections.abc import Callable
import gzip
from pathlib import Path
import re
import struct
import tracemalloc

from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

import jax

from ebmpp.data import bars_and_stripes, binarize, digits, idx, mnist, shifting_bar
from ebmpp.errors import ArgumentError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
LABELS = np.array([7, 2, 1], np.uint8)
IMAGES = np.random.default_rng(1).integers(0, 256, (3, 28, 28), dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    """The IDX file of an array, written from the description of the format."""
    header = struct.pack(">HBB", 0, CODES[array.dtype.str[1:]], array.ndim)
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return header + shape + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(content: bytes, name: str = "file") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize("n", [1, 2, 4])
def test_bars_and_stripes(n: int) -> None:
    rows = bars_and_stripes(n)
    assert rows.shape == (2 ** (n + 1), n * n) and rows.dtype == np.float32
    # for one pixel the bars are the stripes; otherwise only the blank and the full
    # image are
    assert len(np.unique(rows, axis=0)) == (2 if n == 1 else 2 ** (n + 1) - 2)
    bars, stripes = np.split(rows.reshape(-1, n, n), 2)
    assert (bars == bars[:, :1, :]).all() and (stripes == stripes[:, :, :1]).all()
    with pytest.raises(ArgumentError, match="n.*0"):
        bars_and_stripes(0)


@pytest.mark.parametrize(("n", "length"), [(1, 1), (5, 2), (6, 6)])
def test_shifting_bar(n: int, length: int) -> None:
    rows = shifting_bar(n, length)
    assert rows.shape == (n, n) and rows.dtype == np.float32
    for i in range(n):
        np.testing.assert_array_equal(
            rows[i], np.roll([1.0] * length + [0.0] * (n - length), i)
        )
    for wrong in (0, n + 1):
        with pytest.raises(ArgumentError, match=str(wrong)):
            shifting_bar(n, wrong)


def test_digits() -> None:
    images, labels = digits(labels=True)
    assert images.shape == (1797, 64) and images.dtype == np.float32
    assert (
        images.min() == 0
        and images.max() == 1
        and (images * 16 == np.round(images * 16)).all()
    )
    assert (
        labels.shape == (1797,)
        and labels.dtype == np.int32
        and set(labels.tolist()) == set(range(10))
    )
    assert (digits() == images).all()


arrays = st.sampled_from(sorted(CODES)).flatmap(
    lambda code: hnp.arrays(
        code, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4)
    )
)


@settings(max_examples=30)
@given(array=arrays, zipped=st.booleans())
def test_idx_round_trip(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, zipped: bool
) -> None:
    content = idx_bytes(array)
    # a wrong suffix half of the time
    path = tmp_path_factory.getbasetemp() / "round-trip.gz"
    path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    result = idx(path)
    assert (
        result.dtype == array.dtype and result.dtype.isnative and result.flags.writeable
    )
    np.testing.assert_array_equal(result, array)


FILE, MAX_UINT = idx_bytes(LABELS), 0xFFFFFFFF
BAD_FILES = {
    "empty": (b"", "IDX"),
    "short": (b"\0\0\x08", "00 00 08"),
    "magic": (b"PK\x03\x04rest", "50 4b 03 04"),
    "no dimensions": (b"\0\0\x08\0\x05", "dimensions"),
    "type": (b"\0\0\x0a\x01" + FILE[4:], "00 00 0a"),
    "half a header": (FILE[:6], "truncated"),
    "truncated": (FILE[:-1], "3 bytes.* 2"),
    "trailing": (FILE + b"\n", "more than 3"),
    "promise": (
        b"\0\0\x08\x01" + struct.pack(">I", MAX_UINT) + b"abc",
        f"{MAX_UINT} bytes",
    ),
    "too large": (
        b"\0\0\x0e\x02" + struct.pack(">2I", MAX_UINT, MAX_UINT),
        f"{MAX_UINT}, {MAX_UINT}",
    ),
    "empty and too large": (
        b"\0\0\x08\x04" + struct.pack(">4I", 0, *[MAX_UINT] * 3),
        f"0, {MAX_UINT}",
    ),
    "many dimensions": (
        b"\0\0\x08\xff" + struct.pack(">255I", *[1] * 255) + b"a",
        "dimensions",
    ),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_invalid_idx_files(
    write: Callable[..., Path], content: bytes, message: str, zipped: bool
) -> None:
    path = write(gzip.compress(content) if zipped else content)
    tracemalloc.start()
    try:
        with pytest.raises(ArgumentError, match=f"{re.escape(str(path))}.*{message}"):
            idx(path)
        # a header may promise 4 GiB
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_missing_and_damaged_files(write: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="idx: path .*nowhere"):
        idx(tmp_path / "nowhere")
    rng = np.random.default_rng(0)
    content = gzip.compress(idx_bytes(rng.integers(0, 256, (50, 50), dtype=np.uint8)))
    long = np.arange(3 << 18, dtype=np.int32).reshape(3, -1)  # longer than a chunk
    assert (idx(write(idx_bytes(long))) == long).all()
    flipped = bytearray(content)
    flipped[-8] ^= 1  # the check sum, which is seen only at the end of the file
    garbled = content[:10] + b"\xff" * 20 + content[30:]
    for damaged in (
        content[:1000],
        content[:5],
        content[:-4],
        bytes(flipped),
        garbled,
        content + b"junk",
    ):
        with pytest.raises(ArgumentError, match="gzip"):
            idx(write(damaged))


@pytest.mark.parametrize(
    ("split", "prefix", "folder", "zipped"),
    [("train", "train", ".", False), ("test", "t10k", "mnist", True)],
)
def test_mnist_reads_its_files(
    write: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    split: str,
    prefix: str,
    folder: str,
    zipped: bool,
) -> None:
    for kind, array in [("images-idx3", IMAGES), ("labels-idx1", LABELS)]:
        name = f"{folder}/{prefix}-{kind}-ubyte{'.gz' if zipped else ''}"
        write(gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array), name)
    # an explicit directory precedes that of the environment
    for directory, variable in ((tmp_path, tmp_path / "other"), (None, tmp_path)):
        monkeypatch.setenv("EBMPP_DATA_DIR", str(variable))
        images, labels = mnist(directory, split, labels=True)
        assert images.dtype == np.float32 and labels.dtype == np.int32
        np.testing.assert_array_equal(
            images, IMAGES.reshape(3, 784).astype(np.float32) / 255
        )
        assert labels.tolist() == LABELS.tolist()
        np.testing.assert_array_equal(mnist(directory, split), images)


def test_mnist_names_the_folders_that_it_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FileNotFoundError, match="EBMPP_DATA_DIR.*" + re.escape(str(tmp_path / "mnist"))
    ):
        mnist(tmp_path, "test")
    with pytest.raises(ArgumentError, match="split.*'valid'"):
        mnist(tmp_path, "valid")
    monkeypatch.delenv("EBMPP_DATA_DIR", raising=False)
    with pytest.raises(FileNotFoundError, match="EBMPP_DATA_DIR"):
        mnist()


@pytest.mark.parametrize(
    "array", [IMAGES[:, :8, :8], IMAGES.astype(np.float32), LABELS]
)
def test_mnist_refuses_other_images_and_labels(
    write: Callable[..., Path], array: np.ndarray
) -> None:
    path = write(idx_bytes(array), "train-images-idx3-ubyte")
    with pytest.raises(ArgumentError, match=re.escape(str(path))):
        mnist(path.parent)
    write(idx_bytes(IMAGES), path.name)
    labels = write(idx_bytes(LABELS[:2]), "train-labels-idx1-ubyte")
    with pytest.raises(ArgumentError, match=re.escape(str(labels))):
        mnist(path.parent, labels=True)


def test_binarize_by_a_threshold() -> None:
    x = np.array([[0.0, 0.5], [0.51, 1.0]])
    result = binarize(x)
    assert result.dtype == np.float32 and result.tolist() == [[0, 0], [1, 1]]
    assert binarize(np.array([3, 200], np.uint8), threshold=127).tolist() == [0, 1]
    assert binarize(jax.numpy.asarray(x), threshold=0.2).tolist() == [[0, 1], [1, 1]]
    with pytest.raises(ArgumentError, match=r"nan.*\(2,\)"):
        binarize([0.1, 300.0, np.nan])
    with pytest.raises(ArgumentError, match="'round'"):
        binarize([0.1], method="round")


def test_binarize_draws_bernoulli_pixels() -> None:
    p = np.array([0.0, 0.1, 0.5, 0.9, 1.0])
    x = np.broadcast_to(p, (40_000, 5))
    first, repeated, other = (
        binarize(x, method="bernoulli", rng_key=jax.random.key(seed))
        for seed in (0, 0, 1)
    )
    assert first.dtype == np.float32 and set(np.unique(first)) == {0.0, 1.0}
    assert (np.abs(first.mean(0) - p) <= 4 * np.sqrt(p * (1 - p) / 40_000)).all()
    assert (first == repeated).all() and (first != other).any()
    with pytest.raises(ArgumentError, match="key"):
        binarize([0.5], method="bernoulli")
    for invalid in (-0.1, np.nan):
        with pytest.raises(ArgumentError, match=str(invalid) + r".*\(0, 1\)"):
            binarize([[0.0, invalid]], method="bernoulli", rng_key=jax.random.key(0))
