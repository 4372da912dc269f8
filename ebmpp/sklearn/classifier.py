# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A Boltzmann machine with a label as a scikit-learn classifier."""

from collections.abc import Callable
import dataclasses

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

import jax
from jax.typing import ArrayLike
import optax

from ebmpp.core import checks
from ebmpp.errors import ArgumentError
from ebmpp.estimators import Discriminative, Estimator
from ebmpp.estimators.discriminative import label_log_probabilities
from ebmpp.families import Bernoulli, Categorical, Family
from ebmpp.graph import Bias, Bilinear, FactorGraph
from ebmpp.sklearn import harmonium
from ebmpp.training import fit


def _labelled(visible: Family, num_latent: int, num_classes: int) -> FactorGraph:
    """Return the graph of rows, a label, and latents that interact with both."""
    return FactorGraph(
        {"v": visible, "label": Categorical(1, num_classes)},
        {"h": Bernoulli(num_latent)},
        [
            Bias("v"),
            Bias("label"),
            Bias("h"),
            Bilinear("v", "h"),
            Bilinear("label", "h"),
        ],
    )


@dataclasses.dataclass(eq=False, repr=False)
class HarmoniumClassifier(ClassifierMixin, BaseEstimator):
    """Classifier by a harmonium whose visible units are a row and its label.

    It maximises log p(label given row), which is exact, since log Z cancels. With
    ``generative`` it also maximises the joint log-likelihood.

    :param n_components: number of latent Bernoulli units, at least 1.
    :param visible: "auto", or as in :class:`HarmoniumTransformer`. "auto" is Bernoulli
        units if all values of the first rows are 0 or 1, otherwise Gaussian units of
        variance 1 for columns standardised by ``scaler_``.
    :param generative: None, or an estimator of the joint gradient such as
        ``ebmpp.PCD()``.
    :param weight: weight of the generative loss, not negative.
    :param optimizer: None for ``optax.adam``, or another function of the learning rate.
    :param learning_rate: above 0.
    :param batch_size: rows per step, at most all rows.
    :param n_iter: number of epochs, at least 1.
    :param random_state: an int, a ``RandomState`` or None.

    Fitted attributes:

    - **classes_** - the labels.
    - **graph_**, **params_** - a graph with blocks "v", "label" and "h", and its params.
    - **scaler_** - a ``StandardScaler``, or None without standardisation.
    - **history_** - an ``xarray.Dataset`` with metrics per ``step``.
    - **n_features_in_**, **feature_names_in_** - as elsewhere in scikit-learn.

    **References**

    1. Larochelle, Bengio (2008), *Classification using discriminative restricted
       Boltzmann machines*.

    **Example**

    >>> from sklearn.datasets import load_iris
    >>> from ebmpp.sklearn import HarmoniumClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> HarmoniumClassifier(8, random_state=0).fit(X, y).score(X, y) > 0.9
    True
    """

    n_components: int = 100
    _: dataclasses.KW_ONLY
    visible: harmonium.UnitsLike = "auto"
    generative: Estimator | None = None
    weight: float = 0.1
    optimizer: Callable[[float], optax.GradientTransformation] | None = None
    learning_rate: float = 0.02
    batch_size: int = 100
    n_iter: int = 30
    random_state: int | np.random.RandomState | None = None

    def fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> "HarmoniumClassifier":
        """Learn from rows and labels, from new params.

        :param X: shape ``(rows, columns)``.
        :param y: labels, one per row, of at least two classes.
        :param sample_weight: nonnegative, one per row; rows of weight 0 are left out.
        :raises ArgumentError: options out of range, labels of one class, or values
            outside the support of the units.
        """
        name = type(self).__name__
        for option in ("n_components", "batch_size", "n_iter"):
            checks.count(f"{name}: {option}", getattr(self, option))
        checks.number(f"{name}: learning_rate", self.learning_rate, above=0)
        estimator = Discriminative("label", self.generative, self.weight)
        values, y = validate_data(self, X, y, dtype=(np.float64, np.float32))
        check_classification_targets(y)
        values, weights = harmonium.weighted_rows(values, sample_weight)
        if weights is not None:
            y = y[np.asarray(sample_weight) > 0]
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ArgumentError(
                f"{name}: y must have at least 2 classes, got 1 class, "
                f"{self.classes_[0]!r}. Add rows of another class."
            )
        is_binary = bool(((values == 0) | (values == 1)).all())
        visible, self.scaler_ = harmonium.visible_family(
            self.visible, values, weights, is_binary
        )
        self.graph_ = _labelled(visible, int(self.n_components), len(self.classes_))
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        key = jax.random.key(seed)
        optimizer = self.optimizer or optax.adam
        rows = harmonium.as_units(self, values)
        result = fit(
            self.graph_,
            {"v": rows, "label": labels[:, None]},
            weights=weights,
            params=harmonium.init_params(self.graph_, key, rows, weights),
            estimator=estimator,
            optimizer=optimizer(float(self.learning_rate)),
            epochs=int(self.n_iter),
            batch_size=min(int(self.batch_size), len(values)),
            rng_key=key,
            progress_bar=False,
        )
        self.params_ = jax.device_get(result.params)
        self.history_ = result.history
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Return p(label given row), exactly.

        :param X: shape ``(rows, columns)``.
        :return: shape ``(rows, classes)``, in the order of ``classes_``.
        """
        check_is_fitted(self)
        values = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        return np.exp(
            harmonium.by_chunks(
                self._log_probabilities, harmonium.as_units(self, values)
            )
        )

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the most probable label of each row.

        :param X: shape ``(rows, columns)``.
        """
        index = self.predict_proba(X).argmax(1)
        return self.classes_[index]

    def _log_probabilities(self, rows: np.ndarray) -> jax.Array:
        return label_log_probabilities(self.graph_, self.params_, {"v": rows}, "label")
