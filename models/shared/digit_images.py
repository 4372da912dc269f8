# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Images: scikit-learn's digits, MNIST from local files, or any IDX file."""

import argparse
from collections.abc import Callable, Iterator
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

import jax

import ebmpp


class Images(NamedTuple):
    """Binary images of shape ``(rows, side, side)`` and their digits."""

    train: np.ndarray
    train_labels: np.ndarray
    held_out: np.ndarray
    held_out_labels: np.ndarray


def option(parser: argparse.ArgumentParser) -> None:
    """Add ``--data``."""
    parser.add_argument(
        "--data",
        choices=("digits", "mnist"),
        default="digits",
        help="mnist is read from EBMPP_DATA_DIR",
    )


def shuffled(name: str, rng: np.random.Generator) -> np.ndarray:
    """Return the intensities of all training images in a random order."""
    rows = ebmpp.data.digits() if name == "digits" else ebmpp.data.mnist()
    return rows[rng.permutation(len(rows))]


def images(name: str, seed: int) -> Images:
    """Return digits in two levels, one in six held out."""
    pixels, labels = (ebmpp.data.digits if name == "digits" else ebmpp.data.mnist)(
        labels=True
    )
    side = math.isqrt(pixels.shape[1])
    train, held_out = _split(ebmpp.data.binarize(pixels).reshape(-1, side, side), seed)
    train_labels, held_out_labels = _split(labels, seed)
    return Images(train, train_labels, held_out, held_out_labels)


def _split(rows: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    held_out = -(-len(rows) // 6)
    return rows[held_out:], rows[:held_out]


def independent_pixels(train: np.ndarray, held_out: np.ndarray) -> float:
    """Return the held-out mean log-likelihood of independent pixels, which a model must exceed."""
    rate = (train.sum(0) + 1) / (len(train) + 2)
    log_prob = held_out * np.log(rate) + (1 - held_out) * np.log1p(-rate)
    return float(log_prob.reshape(len(log_prob), -1).sum(1).mean())


# -- augmented batches ---------------------------------------------------------------

_MOVED = 0.1  # share of the rows of a batch
_SHIFTS = np.array([(0, 1), (0, -1), (1, 0), (-1, 0)])


def moved(
    rows: np.ndarray, shape: tuple[int, int], generator: np.random.Generator
) -> np.ndarray:
    """Shift some rows' images by a pixel up, down, left or right; pixels that enter are dark."""
    which = np.flatnonzero(generator.random(len(rows)) < _MOVED)
    corners = 1 - _SHIFTS[generator.integers(len(_SHIFTS), size=len(which))]
    padded = np.pad(rows[which].reshape(-1, *shape), ((0, 0), (1, 1), (1, 1)))
    result = rows.copy()
    for row, image, (top, left) in zip(which, padded, corners, strict=True):
        result[row] = image[top : top + shape[0], left : left + shape[1]].ravel()
    return result


def batches(
    grey: np.ndarray, size: int, seed: int, shape: tuple[int, int]
) -> Callable[[], Iterator[np.ndarray]]:
    """Return an endless stream of batches: rows in random order, some shifted, pixels
    drawn at random."""

    def stream() -> Iterator[np.ndarray]:
        generator = np.random.default_rng(seed)
        while True:
            order = generator.permutation(len(grey))
            for first in range(0, len(order) - size + 1, size):
                rows = moved(grey[order[first : first + size]], shape, generator)
                yield generator.random(rows.shape, np.float32) < rows

    return stream


# -- images of any kind --------------------------------------------------------------


class Rows(NamedTuple):
    """Binary images as rows, and the shape of an image."""

    train: np.ndarray
    held_out: np.ndarray
    shape: tuple[int, int]
    grey: np.ndarray | None = None
    """Intensities of the training rows, if pixels are 1 with that probability."""
    origin: str = ""
    """Held-out rows and binarisation, as text: likelihoods depend on both."""


def read(source: str, folder: str | None, binarize: str, seed: int) -> Rows:
    """Read binarised images; one in six is held out if there is no test set.

    :param source: "digits", "mnist", an IDX file, or a folder of MNIST's files.
    :param folder: folder of "mnist"; None for the environment variable EBMPP_DATA_DIR.
    :param binarize: "threshold", or "bernoulli": draws with the intensities as
        probabilities.
    :raises OSError: if a file is missing.
    :raises ValueError: if a file holds something else.
    """
    if source == "digits":
        parts = _split(ebmpp.data.digits(), seed)
        return _binary(
            *parts,
            (8, 8),
            binarize,
            seed,
            _share(*parts, "scikit-learn's digits", seed),
        )
    path = Path(source)
    if source == "mnist" or path.is_dir():
        folder = folder if source == "mnist" else path
        train = ebmpp.data.mnist(folder, "train")
        try:
            parts = train, ebmpp.data.mnist(folder, "test")
            origin = f"the {len(parts[1])} rows of the test file"
        except (
            FileNotFoundError
        ):  # only the training file: 10,000 of its 60,000 images are held out
            parts = _split(train, seed)
            origin = _share(*parts, "the training file", seed)
        return _binary(*parts, (28, 28), binarize, seed, origin)
    rows = ebmpp.data.idx(path)
    if rows.ndim not in (2, 3) or len(rows) < 2 or not rows.size:
        raise ValueError(
            f"{path} must hold at least two images, (N, height, width), got shape {rows.shape}."
        )
    shape = rows.shape[1:] if rows.ndim == 3 else (1, rows.shape[1])
    scale = 255 if rows.dtype == np.uint8 else 1
    parts = _split(rows.reshape(len(rows), -1) / scale, seed)
    return _binary(*parts, shape, binarize, seed, _share(*parts, path.name, seed))


def _share(train: np.ndarray, held_out: np.ndarray, name: str, seed: int) -> str:
    return (
        f"{len(held_out)} of the {len(train) + len(held_out)} rows of {name}, drawn "
        f"with seed {seed}"
    )


def _binary(
    train: np.ndarray,
    held_out: np.ndarray,
    shape: tuple[int, int],
    binarize: str,
    seed: int,
    origin: str,
) -> Rows:
    if binarize == "threshold":
        binary = (ebmpp.data.binarize(rows) for rows in (train, held_out))
        return Rows(*binary, shape, origin=f"{origin}; a pixel is 1 above 1/2")
    first, second = jax.random.split(jax.random.key(seed + 5))
    return Rows(
        ebmpp.data.binarize(train, "bernoulli", rng_key=first),
        ebmpp.data.binarize(held_out, "bernoulli", rng_key=second),
        shape,
        train,
        f"{origin}; pixels drawn once with their intensities as probabilities, seed {seed}",
    )
