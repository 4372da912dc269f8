# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Features of images, in whose space :func:`frechet_distance` compares samples."""

from collections.abc import Callable
import dataclasses
from functools import lru_cache
import math
from typing import Any
import warnings

from jaxtyping import Float, Shaped
import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.contrib.sample_quality.rows import as_rows
from ebmpp.data import binarize, digits
from ebmpp.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class ClassifierFeatures:
    """Hidden layer of a small classifier of digits, for :func:`frechet_distance`.

    **This is not the Inception network**, so its distances are not the FID of the
    literature. Compare two distances only if they come from the same network: the same
    images, seed and number of units.

    Call it with rows to get features of shape ``(rows, num_units)``; :meth:`predict`
    returns labels.
    """

    network: Any = dataclasses.field(repr=False)
    """A :class:`sklearn.neural_network.MLPClassifier`."""
    accuracy: float
    """Accuracy on the tenth of the rows that was held out."""

    @staticmethod
    def fit(
        images: Any = None,
        labels: Any = None,
        *,
        num_units: int = 64,
        num_epochs: int = 30,
        seed: int = 0,
    ) -> "ClassifierFeatures":
        """Train the network, which takes some seconds; equal arguments give equal networks.

        :param images: shape ``(rows, *shape)``; by default scikit-learn's digits,
            thresholded at 1/2.
        :param labels: one label per row.
        :param num_units: units of the hidden layer.
        :param num_epochs: passes over the rows.
        :param seed: seed of the initial weights, of the order, and of the rows held
            out.
        :raises ArgumentError: arrays that do not fit.

        **Example**

        >>> import ebmpp
        >>> features = ClassifierFeatures.fit(num_epochs=10)
        >>> features.accuracy > 0.8, features(ebmpp.data.digits()).shape
        (True, (1797, 64))
        """
        from sklearn.exceptions import ConvergenceWarning  # half a second to import
        from sklearn.neural_network import MLPClassifier

        if (images is None) != (labels is None):
            raise ArgumentError(
                "ClassifierFeatures.fit needs both images and labels, or neither"
            )
        if images is None:
            images, labels = digits(labels=True)
            images = binarize(images)
        (rows,) = as_rows(images=images)
        labels = np.asarray(labels)
        if labels.shape != (len(rows),) or len(rows) < 20:
            raise ArgumentError(
                f"labels must have shape ({len(rows)},), one per image of at least 20, "
                f"got {labels.shape}"
            )
        order = np.random.default_rng(seed).permutation(len(rows))
        held_out, train = np.split(order, [len(rows) // 10])
        network = MLPClassifier((num_units,), max_iter=num_epochs, random_state=seed)
        with warnings.catch_warnings():
            # the number of epochs is fixed
            warnings.simplefilter("ignore", ConvergenceWarning)
            network.fit(rows[train], labels[train])
        return ClassifierFeatures(
            network, float(network.score(rows[held_out], labels[held_out]))
        )

    @staticmethod
    @lru_cache(maxsize=1)
    def of_digits() -> "ClassifierFeatures":
        """Return the network of ``fit()``, trained once per process."""
        return ClassifierFeatures.fit()

    def __call__(self, rows: Any) -> Float[np.ndarray, "rows num_units"]:
        """Return activations of the hidden layer."""
        (rows,) = as_rows(rows=rows)
        return np.maximum(
            rows @ self.network.coefs_[0] + self.network.intercepts_[0], 0
        )

    def predict(self, rows: Any) -> Shaped[np.ndarray, "rows"]:
        """Return the most likely label of each row."""
        return self.network.predict(as_rows(rows=rows)[0])


@dataclasses.dataclass(frozen=True)
class ImageFeatures:
    """Features of grey images by a network for photographs, for :func:`frechet_distance`.

    The package ships no network. With the Inception network of the literature, the
    distance of its last pooled features is the FID. Distances of other networks, or of
    other ways of resizing, compare among themselves only. Images are resized by linear
    interpolation, with antialiasing where they shrink.

    :param network: maps images ``(batch, height, width, channels)`` to features
        ``(batch, d)``.
    :param shape: height and width of a row.
    :param size: height and width that the network expects.
    :param channels: channels that the network expects; all get the same grey.
    :param bounds: the network's values for black (0 in the rows) and white (1).
    :raises ArgumentError: sizes that are not positive ints; when called, rows that do
        not have ``shape`` or are not within [0, 1].

    **References**

    1. Heusel et al. (2017), *GANs trained by a two time-scale update rule converge to a
       local Nash equilibrium*.
    2. Parmar, Zhang, Zhu (2022), *On aliased resizing and surprising subtleties in GAN
       evaluation*.

    **Example**

    >>> import ebmpp
    >>> colour = lambda images: images.mean((1, 2))  # stands for a network
    >>> ImageFeatures(colour, (8, 8), size=(32, 32))(ebmpp.data.digits()).shape
    (1797, 3)
    """

    network: Callable[[jax.Array], Any]
    shape: tuple[int, int]
    size: tuple[int, int] = (299, 299)
    channels: int = 3
    bounds: tuple[float, float] = (-1.0, 1.0)

    def __post_init__(self) -> None:
        numbers = (*self.shape, *self.size, self.channels)
        if len(numbers) != 5 or not all(isinstance(n, int) and n > 0 for n in numbers):
            raise ArgumentError(
                "ImageFeatures: shape and size must be (height, width) and channels a "
                f"positive int, got {self.shape}, {self.size}, {self.channels}"
            )

    def __call__(self, rows: Any) -> Shaped[np.ndarray, "rows d"]:
        """Return the network's features of each row."""
        (rows,) = as_rows(rows=rows)
        if rows.shape[1] != math.prod(self.shape) or rows.min() < 0 or rows.max() > 1:
            raise ArgumentError(
                f"rows must be images of shape {self.shape} with values in [0, 1], got "
                f"{rows.shape[1]} values from {rows.min():.3g} to {rows.max():.3g}"
            )
        images = jnp.asarray(rows).reshape(-1, *self.shape, 1)
        images = jax.image.resize(images, (len(rows), *self.size, 1), "linear")
        black, white = self.bounds
        images = jnp.repeat(black + (white - black) * images, self.channels, axis=-1)
        return np.asarray(self.network(images))
