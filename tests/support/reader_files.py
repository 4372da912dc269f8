# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Small files in the formats of public data sets, and where their readers look for them."""

from collections.abc import Mapping
from pathlib import Path
import struct

import numpy as np
import scipy.io

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
    line = lambda y, x: f"{y} " + " ".join(f"{i}:{v:g}" for i, v in enumerate(x, 1)) + "\n"
    return "".join(map(line, labels, ink)).encode()


def docword(counts: np.ndarray) -> bytes:
    entries = np.argwhere(counts)
    lines = [*counts.shape, len(entries), *(f"{d + 1} {w + 1} {counts[d, w]}" for d, w in entries)]
    return "".join(f"{line}\n" for line in lines).encode()


def cifar(labels: tuple[int, ...] = (7, 0)) -> bytes:
    return b"".join(bytes([y]) + x.tobytes() for y, x in zip(labels, PHOTOS, strict=True))


def silhouettes(**replaced: np.ndarray) -> dict[str, np.ndarray]:
    """Splits of 1, 2 and 3 images; the pixels of an image go down its columns."""
    variables = {}
    for n, split in enumerate(("train", "val", "test"), 1):
        variables[f"{split}_data"] = (GREY[:n] > 0.5).transpose(0, 2, 1).reshape(n, 784).astype(np.uint8)
        variables[f"{split}_labels"] = np.arange(1, n + 1)[:, None]
    return variables | replaced


def characters(**replaced: np.ndarray) -> dict[str, np.ndarray]:
    """Three training images, of which the last two are test images."""
    alphabet = np.zeros((50, 3))
    alphabet[[4, 0, 49], [0, 1, 2]] = 1
    columns = GREY.transpose(0, 2, 1).reshape(3, 784).T
    variables = {"data": columns, "target": alphabet}
    return variables | {"testdata": columns[:, 1:], "testtarget": alphabet[:, 1:]} | replaced
