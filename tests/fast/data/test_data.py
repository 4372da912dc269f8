# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable
import gzip
import os
from pathlib import Path
import re
import struct
import tracemalloc

from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest

import jax

from ebmpp.data import bars_and_stripes, binarize, digits, idx, mnist, shifting_bar
from ebmpp.errors import ArgumentError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
LABELS = np.array([7, 2, 1], np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    """The IDX file of an array, written from the format's description."""
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


# --- patterns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_bars_and_stripes_counts(n: int) -> None:
    rows = bars_and_stripes(n)
    assert rows.shape == (2 ** (n + 1), n * n) and rows.dtype == np.float32
    assert set(np.unique(rows)) == {0.0, 1.0}
    # For one pixel the bars are the stripes; otherwise only the blank and the full image are.
    assert len(np.unique(rows, axis=0)) == (2 if n == 1 else 2 ** (n + 1) - 2)


def test_bars_come_before_stripes() -> None:
    bars, stripes = np.split(bars_and_stripes(4).reshape(32, 4, 4), 2)
    assert (bars == bars[:, :1, :]).all() and (stripes == stripes[:, :, :1]).all()
    assert len(np.unique(bars, axis=0)) == len(np.unique(stripes, axis=0)) == 16


def test_bars_and_stripes_best_log_likelihood() -> None:
    """Minus the entropy of the 3x3 and 4x4 data: what no model of them can exceed."""
    for n, per_row in [(3, -2.599), (4, -108.13 / 32)]:
        _, counts = np.unique(bars_and_stripes(n), axis=0, return_counts=True)
        p = counts / counts.sum()
        assert (p * np.log(p)).sum() == pytest.approx(per_row, abs=5e-4)


def test_bars_and_stripes_needs_a_pixel() -> None:
    with pytest.raises(ValueError, match="n, the side, is an int from 1 to 20, not 0"):
        bars_and_stripes(0)


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_shifting_bar(size: tuple[int, int]) -> None:
    n, b = size
    rows = shifting_bar(n, b)
    assert rows.shape == (n, n) and rows.dtype == np.float32
    assert rows[0].tolist() == [1.0] * b + [0.0] * (n - b)
    for i in range(n):
        assert (rows[i] == np.roll(rows[0], i)).all()


@pytest.mark.parametrize("n, b", [(4, 0), (4, 5), (0, 0)])
def test_shifting_bar_refuses_lengths(n: int, b: int) -> None:
    told = f"the bar's length, is an int from 1 to {n}, not {b}" if n else "n, the pixels, is an int"
    with pytest.raises(ArgumentError, match=told):
        shifting_bar(n, b)


def test_digits() -> None:
    images, labels = digits(labels=True)
    assert images.shape == (1797, 64) and images.dtype == np.float32
    assert images.min() == 0 and images.max() == 1
    assert (images * 16 == np.round(images * 16)).all()
    assert labels.shape == (1797,) and labels.dtype == np.int32
    assert set(labels.tolist()) == set(range(10))
    assert (digits() == images).all()


# --- IDX files --------------------------------------------------------------------------------

arrays = st.sampled_from(sorted(CODES)).flatmap(
    lambda code: hnp.arrays(code, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
)


@given(array=arrays, zipped=st.booleans())
def test_idx_round_trip(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, zipped: bool) -> None:
    content = idx_bytes(array)
    # The name lies about the compression half of the time.
    path = tmp_path_factory.getbasetemp() / "round-trip.gz"
    path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    back = idx(path)
    assert back.dtype == array.dtype and back.dtype.isnative and back.flags.writeable
    np.testing.assert_array_equal(back, array)


@given(content=st.binary(max_size=64), zipped=st.booleans())
def test_idx_reads_or_explains_any_bytes(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, zipped: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(gzip.compress(content, mtime=0) if zipped else content)
    try:
        array = idx(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert idx_bytes(array) == content or np.isnan(array).any()


def test_idx_longer_than_a_chunk(write: Callable[..., Path]) -> None:
    array = np.arange(3 << 20, dtype=np.int32).reshape(3, -1)
    assert (idx(write(idx_bytes(array))) == array).all()


def test_idx_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such file; give the path"):
        idx(tmp_path / "nowhere")


GOOD = idx_bytes(LABELS)
HUGE = 0xFFFFFFFF
BAD_FILES = {
    "empty": (b"", "not an IDX file: it begins with nothing"),
    "short": (b"\0\0\x08", "not an IDX file: it begins with 00 00 08"),
    "magic": (b"PK\x03\x04rest", "not an IDX file: it begins with 50 4b 03 04"),
    "no dimensions": (b"\0\0\x08\0\x05", "not an IDX file: .* dimensions above 0"),
    "type": (b"\0\0\x0a\x01" + GOOD[4:], "unknown IDX type code 0x0a; .* 0x08 uint8, .* float64"),
    "half a header": (GOOD[:6], "truncated IDX file: 1 dimensions take 4 bytes, found 2"),
    "cut": (GOOD[:-1], r"shape \(3,\) of uint8 takes 3 bytes, found 2"),
    "cut double": (
        idx_bytes(np.ones((2, 2)))[:-9],
        r"shape \(2, 2\) of float64 takes 32 bytes, found 23",
    ),
    "trailing": (GOOD + b"\n", r"trailing bytes after the 3 bytes of shape \(3,\) of uint8"),
    "promise": (b"\0\0\x08\x01" + struct.pack(">I", HUGE) + b"abc", f"takes {HUGE} bytes, found 3"),
    "absurd": (
        b"\0\0\x0e\x02" + struct.pack(">2I", HUGE, HUGE),
        f"impossible IDX dimensions: 2 of them, {HUGE} x {HUGE};",
    ),
    "absurd and empty": (
        b"\0\0\x08\x04" + struct.pack(">4I", 0, HUGE, HUGE, HUGE),
        f"impossible IDX dimensions: 4 of them, 0 x {HUGE}",
    ),
    "many dimensions": (
        b"\0\0\x08\xff" + struct.pack(">255I", *[1] * 255) + b"a",
        r"impossible IDX dimensions: 255 of them, (1 x ){6}\.\.\.; an array has at most 64",
    ),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("content, message", BAD_FILES.values(), ids=BAD_FILES)
def test_idx_refuses(write: Callable[..., Path], content: bytes, message: str, zipped: bool) -> None:
    path = write(gzip.compress(content) if zipped else content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{message}"):
        idx(path)


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_does_not_allocate_what_a_header_promises(write: Callable[..., Path], zipped: bool) -> None:
    content = BAD_FILES["promise"][0]
    path = write(gzip.compress(content) if zipped else content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"takes {HUGE} bytes"):
            idx(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20  # 4 GiB are promised
    finally:
        tracemalloc.stop()


def test_idx_refuses_damaged_gzip(write: Callable[..., Path]) -> None:
    rng = np.random.default_rng(0)
    whole = gzip.compress(idx_bytes(rng.integers(0, 256, (50, 50), dtype=np.uint8)))
    flipped = bytearray(whole)
    flipped[-8] ^= 1  # the check sum: seen only if the file is read to its end
    garbled = whole[:10] + b"\xff" * 20 + whole[30:]
    for content in (whole[:1000], whole[:5], whole[:-4], bytes(flipped), garbled, whole + b"junk"):
        path = write(content)
        with pytest.raises(ValueError, match=f"{re.escape(str(path))}: damaged gzip .*checksum"):
            idx(path)


# --- MNIST ------------------------------------------------------------------------------------

IMAGES = np.random.default_rng(1).integers(0, 256, (3, 28, 28), dtype=np.uint8)


@pytest.mark.parametrize("split, prefix", [("train", "train"), ("test", "t10k")])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("folder", [".", "mnist"])
@pytest.mark.parametrize("by_environment", [False, True])
def test_mnist_finds_its_files(
    write: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    split: str,
    prefix: str,
    zipped: bool,
    folder: str,
    by_environment: bool,
) -> None:
    for kind, array in [("images-idx3", IMAGES), ("labels-idx1", LABELS)]:
        name = f"{folder}/{prefix}-{kind}-ubyte{'.gz' if zipped else ''}"
        write(gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array), name)
    # A directory that is given comes before the environment's.
    monkeypatch.setenv("EBMPP_DATA_DIR", str(tmp_path if by_environment else tmp_path / "other"))
    directory = None if by_environment else tmp_path

    images, labels = mnist(directory, split, labels=True)
    assert images.shape == (3, 784) and images.dtype == np.float32
    np.testing.assert_array_equal(images, IMAGES.reshape(3, 784).astype(np.float32) / 255)
    assert labels.dtype == np.int32 and labels.tolist() == LABELS.tolist()
    np.testing.assert_array_equal(mnist(directory, split), images)


def test_mnist_without_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EBMPP_DATA_DIR", raising=False)
    with pytest.raises(FileNotFoundError, match="EBMPP_DATA_DIR is not set. Set it to the folder"):
        mnist()


def test_mnist_says_where_it_looked(tmp_path: Path) -> None:
    looked = re.escape(f"no t10k-images-idx3-ubyte[.gz] in {tmp_path} or {tmp_path / 'mnist'};")
    with pytest.raises(FileNotFoundError, match=f"{looked} .*EBMPP_DATA_DIR"):
        mnist(tmp_path, "test")


def test_mnist_refuses_a_split(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split is one of 'train', 'test', not 'valid'"):
        mnist(tmp_path, "valid")


@pytest.mark.parametrize("array", [IMAGES[:, :8, :8], IMAGES.astype(np.float32), LABELS])
def test_mnist_refuses_other_images(write: Callable[..., Path], array: np.ndarray) -> None:
    path = write(idx_bytes(array), "train-images-idx3-ubyte")
    with pytest.raises(ValueError, match=re.escape(f"{path}: {array.dtype} of shape")):
        mnist(path.parent)


def test_mnist_refuses_other_labels(write: Callable[..., Path]) -> None:
    write(idx_bytes(IMAGES), "train-images-idx3-ubyte")
    path = write(idx_bytes(LABELS[:2]), "train-labels-idx1-ubyte")
    with pytest.raises(ValueError, match="of shape .2,.; one uint8 label for each of the 3 images"):
        mnist(path.parent, labels=True)


@pytest.mark.skipif(not os.environ.get("EBMPP_DATA_DIR"), reason="EBMPP_DATA_DIR is not set: no real MNIST")
def test_mnist_itself() -> None:
    images, labels = mnist(labels=True)
    assert images.shape == (60000, 784) and images.max() == 1
    assert images.mean() == pytest.approx(0.1307, abs=1e-4)
    assert labels[:5].tolist() == [5, 0, 4, 1, 9] and labels.shape == (60000,)


# --- binarize ---------------------------------------------------------------------------------


def test_binarize_threshold() -> None:
    x = np.array([[0.0, 0.5], [0.51, 1.0]])
    out = binarize(x)
    assert out.dtype == np.float32 and isinstance(out, np.ndarray)
    assert out.tolist() == [[0, 0], [1, 1]]
    assert binarize(np.array([3, 200], np.uint8), threshold=127).tolist() == [0, 1]
    assert binarize(jax.numpy.asarray(x), threshold=0.2).tolist() == [[0, 1], [1, 1]]


def test_binarize_bernoulli_has_the_right_means() -> None:
    p = np.array([0.0, 0.1, 0.5, 0.9, 1.0])
    draws = binarize(np.broadcast_to(p, (40_000, 5)), method="bernoulli", rng_key=jax.random.key(0))
    assert draws.dtype == np.float32 and set(np.unique(draws)) == {0.0, 1.0}
    error = np.sqrt(p * (1 - p) / 40_000)
    assert (np.abs(draws.mean(0) - p) <= 4 * error).all()  # 0 and 1 have no error at all


def test_binarize_bernoulli_depends_on_the_key_alone() -> None:
    x = np.full((10, 10), 0.5)
    one, again, other = (binarize(x, method="bernoulli", rng_key=jax.random.key(seed)) for seed in (1, 1, 2))
    assert (one == again).all() and (one != other).any()


def test_binarize_needs_a_key() -> None:
    with pytest.raises(
        ValueError, match=r"'bernoulli' draws with, is a jax key, such as jax.random.key\(0\)"
    ):
        binarize([0.5], method="bernoulli")


@pytest.mark.parametrize("bad", [-0.1, 1.5, np.nan, np.inf])
def test_binarize_names_the_first_value_that_is_no_probability(bad: float) -> None:
    x = np.zeros((2, 3))
    x[1, 0] = x[1, 2] = bad
    expected = re.escape(f"x at index (1, 0) is {bad}, where a probability in [0, 1] is expected")
    with pytest.raises(ValueError, match=expected + r" \(2 such of 6\)"):
        binarize(x, method="bernoulli", rng_key=jax.random.key(0))


def test_binarize_threshold_refuses_nan() -> None:
    with pytest.raises(ValueError, match=r"x at index \(2,\) is nan, where a finite number"):
        binarize([0.1, 300.0, np.nan])


def test_binarize_refuses_a_method() -> None:
    with pytest.raises(ValueError, match="method is one of 'threshold', 'bernoulli', not 'round'"):
        binarize([0.1], method="round")
