# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Points in the plane as 32 bits: four densities, their encoding and their entropy.

Each coordinate becomes a sign and the Gray code of its magnitude in 15 bits. The scale
is that of Zhang et al. (2022), *Generative flow networks for discrete probabilistic
modeling*: the largest of 5,000 draws, plus two, becomes 2**15.
"""

import numpy as np

BITS = 16  # per coordinate
#: Largest coordinate of 5,000 draws by ``np.random.RandomState(1)``, in the order of
#: draws of the published program.
LARGEST = {
    "2spirals": 3.480986,
    "8gaussians": 4.194777,
    "circles": 3.780578,
    "pinwheel": 3.946060,
}
NAMES = tuple(LARGEST)
_MAGNITUDES = 2 ** (BITS - 1)
_CELL = 0.03  # of the histogram whose entropy is computed
_CHUNK = 1_000_000


def _turned(angle: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angle), np.sin(angle)], 1)


def points(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw points of one of the densities, ``(count, 2)``."""
    noise = rng.standard_normal((count, 2))
    if name == "8gaussians":
        centers = 4 * _turned(np.pi / 4 * rng.integers(8, size=count))
        return (centers + 0.5 * noise) / 1.414
    if name == "circles":
        radius = rng.choice([1.0, 0.5], size=(count, 1))
        circle = radius * _turned(2 * np.pi * rng.random(count))
        return 3 * (circle + 0.08 * noise)
    if name == "2spirals":
        turn = 3 * np.pi * np.sqrt(rng.random(count))
        spiral = turn[:, None] * _turned(turn) * [-1, 1] + 0.5 * rng.random((count, 2))
        return rng.choice([-1, 1], size=(count, 1)) * spiral / 3 + 0.1 * noise
    along, across = (noise * [0.3, 0.1] + [1, 0]).T
    angle = 2 * np.pi / 5 * rng.integers(5, size=count) + 0.25 * np.exp(along)
    turned = _turned(angle)
    x = along * turned[:, 0] + across * turned[:, 1]
    y = across * turned[:, 0] - along * turned[:, 1]
    return 2 * np.stack([x, y], 1)


def scale(name: str) -> float:
    """Return the number of cells per unit of length."""
    return _MAGNITUDES / (LARGEST[name] + 2)


def encode(name: str, xy: np.ndarray) -> np.ndarray:
    """Return the bits of points inside of the square, ``(count, 32)``."""
    magnitude = (np.abs(xy) * scale(name)).astype(np.int64)
    gray = magnitude ^ (magnitude >> 1)
    places = np.arange(BITS - 2, -1, -1)
    bits = (gray[..., None] >> places) & 1
    signs = (xy < 0)[..., None]
    return np.concatenate([signs, bits], -1).reshape(len(xy), 2 * BITS)


def rows(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw points inside of the square, as bits."""
    xy = points(name, count, rng)
    inside = np.abs(xy).max(1) * scale(name) < _MAGNITUDES
    bits = encode(name, xy[inside])
    missing = count - len(bits)
    return np.concatenate([bits, rows(name, missing, rng)]) if missing else bits


def entropy(name: str, count: int = 8_000_000, seed: int = 0) -> float:
    """Return the entropy of the bits in nats, to about 0.002: no model can have less.

    By a histogram with the correction of Miller and Madow; the bits of a cell are taken
    as uniform.
    """
    rng = np.random.default_rng(seed)
    edges = np.arange(-9, 9 + _CELL, _CELL)
    counts = np.zeros((len(edges) - 1, len(edges) - 1))
    for _ in range(count // _CHUNK):
        xy = points(name, _CHUNK, rng)
        counts += np.histogram2d(*xy.T, bins=[edges, edges])[0]
    filled = counts[counts > 0] / counts.sum()
    value = -(filled * np.log(filled)).sum() + (len(filled) - 1) / (2 * counts.sum())
    return float(value + 2 * np.log(_CELL * scale(name)))
