# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Features of images, which samples are compared by."""

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

from ebmpp.data import binarize, digits
from ebmpp.errors import ArgumentError
from ebmpp.evaluate.rows import as_rows


@dataclasses.dataclass(frozen=True)
class ClassifierFeatures:
    """The hidden layer of a small network that tells digits apart, for :func:`frechet_distance`.

    **Not the Inception network**, so its distances are not the FID of the literature, and two of them compare
    only if they are of the same network: same images, seed and number of units.

    Called with rows it returns ``(rows, num_units)``; :meth:`predict` returns labels.
    """

    network: Any = dataclasses.field(repr=False)
    """A :class:`sklearn.neural_network.MLPClassifier`."""
    accuracy: float
    """On a tenth of the rows, held out."""

    @staticmethod
    def fit(
        images: Any = None, labels: Any = None, *, num_units: int = 64, num_epochs: int = 30, seed: int = 0
    ) -> "ClassifierFeatures":
        """Train the network; the same arguments give the same network (and some seconds of waiting).

        :param images: shape ``(rows, *shape)``; by default scikit-learn's digits, thresholded at 1/2.
        :param labels: one a row.
        :param num_units: of the hidden layer.
        :param num_epochs: passes over the rows.
        :param seed: of the start, the order and the rows held out.
        :raises ArgumentError: for arrays that do not fit.

        **Example**

        >>> import ebmpp
        >>> made = ClassifierFeatures.fit(num_epochs=10)
        >>> made.accuracy > 0.8, made(ebmpp.data.digits()).shape
        (True, (1797, 64))
        """
        from sklearn.exceptions import ConvergenceWarning  # half a second that other users need not spend
        from sklearn.neural_network import MLPClassifier

        if (images is None) != (labels is None):
            raise ArgumentError("ClassifierFeatures.fit takes images and labels, or neither")
        if images is None:
            images, labels = digits(labels=True)
            images = binarize(images)
        (rows,), labels = as_rows(images=images), np.asarray(labels)
        if labels.shape != (len(rows),) or len(rows) < 20:
            raise ArgumentError(
                f"at least 20 images and a label each; got {len(rows)} and shape {labels.shape}"
            )
        order = np.random.default_rng(seed).permutation(len(rows))
        held_out, train = np.split(order, [len(rows) // 10])
        network = MLPClassifier((num_units,), max_iter=num_epochs, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # epochs are what was asked for
            network.fit(rows[train], labels[train])
        return ClassifierFeatures(network, float(network.score(rows[held_out], labels[held_out])))

    @staticmethod
    @lru_cache(maxsize=1)
    def of_digits() -> "ClassifierFeatures":
        """The network that ``fit()`` makes, trained once a process."""
        return ClassifierFeatures.fit()

    def __call__(self, rows: Any) -> Float[np.ndarray, "rows num_units"]:
        """Activations of the hidden layer."""
        (rows,) = as_rows(rows=rows)
        return np.maximum(rows @ self.network.coefs_[0] + self.network.intercepts_[0], 0)

    def predict(self, rows: Any) -> Shaped[np.ndarray, "rows"]:
        """The most likely label of each row."""
        return self.network.predict(as_rows(rows=rows)[0])


@dataclasses.dataclass(frozen=True)
class ImageFeatures:
    """Features by a network for photographs, of rows that are grey images; for :func:`frechet_distance`.

    The package ships no network. With the weights of the Inception network that the literature uses, the
    distance of its last pooled features is the FID; with another network, or another way of resizing, figures
    compare among themselves alone. Images are resized by linear interpolation and smoothed where they shrink.

    Called with rows it returns what the network does.

    :param network: from images ``(batch, height, width, channels)`` to features ``(batch, d)``.
    :param shape: height and width of a row.
    :param size: those that the network takes.
    :param channels: how many it takes; all get the same grey.
    :param bounds: its values for black (0 in the rows) and white (1).
    :raises ArgumentError: for numbers that are no image's; when called, for rows not of ``shape`` or not
        within [0, 1].

    **References**

    1. Heusel et al. (2017), *GANs trained by a two time-scale update rule converge to a local Nash
       equilibrium*.
    2. Parmar, Zhang, Zhu (2022), *On aliased resizing and surprising subtleties in GAN evaluation*.

    **Example**

    >>> import ebmpp
    >>> colour = lambda images: images.mean((1, 2))  # a network of little depth
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
                "ImageFeatures: shape and size are a height and a width each, channels a positive int; got "
                f"{self.shape}, {self.size}, {self.channels}"
            )

    def __call__(self, rows: Any) -> Shaped[np.ndarray, "rows d"]:
        """Features."""
        (rows,) = as_rows(rows=rows)
        if rows.shape[1] != math.prod(self.shape) or rows.min() < 0 or rows.max() > 1:
            raise ArgumentError(
                f"ImageFeatures takes images of shape {self.shape} with values in [0, 1]; got rows of "
                f"{rows.shape[1]} values from {rows.min():.3g} to {rows.max():.3g}"
            )
        images = jnp.asarray(rows).reshape(-1, *self.shape, 1)
        images = jax.image.resize(images, (len(rows), *self.size, 1), "linear")
        black, white = self.bounds
        images = jnp.repeat(black + (white - black) * images, self.channels, axis=-1)
        return np.asarray(self.network(images))
