# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A two-layer model as a scikit-learn transformer, a replacement of ``BernoulliRBM``."""

from collections.abc import Callable
import dataclasses
from functools import partial
import math
import time
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data
import xarray as xr

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from ebmpp import exact
from ebmpp.core import Numbers, checks, random
from ebmpp.errors import DivergenceError
from ebmpp.estimators import PCD, Estimator
from ebmpp.graph import layered, normalization
from ebmpp.moves import gibbs
from ebmpp.sklearn import harmonium
from ebmpp.training import fit

#: Rows of numbers, of any type that scikit-learn accepts.
Matrix = ArrayLike | sparse.spmatrix


@dataclasses.dataclass(eq=False, repr=False)
class HarmoniumTransformer(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator
):
    """Features learned by an exponential-family harmonium: mean statistics of latent units.

    It replaces :class:`sklearn.neural_network.BernoulliRBM`, for visible and latent
    units of any family, any gradient estimator and any optimiser. It computes and
    returns JAX's floats, float32 unless ``jax_enable_x64`` is set. Sparse input is made
    dense.

    Rows must have values in the support of the visible units, with one exception: for
    bounded values that are their own statistic (Bernoulli, Spin, Binomial) a value in
    between, such as a grey level in [0, 1], is taken as the unit's *mean statistic*.
    This is common practice, but not the likelihood of binary rows, which
    ``ebmpp.data.binarize(X, "bernoulli", rng_key=...)`` draws.

    :param n_components: number of latent units.
    :param visible: "auto", the name of a family ("bernoulli", "spin", "gaussian",
        "poisson" or "exponential"), a function of the number of units such as
        ``ebmpp.Poisson`` or ``functools.partial(ebmpp.Binomial, total_count=3)``, or a
        family with one unit per column. "auto" depends on the first rows: Bernoulli
        units if all values are in [0, 1], otherwise Gaussian units of variance 1 for
        columns standardised by ``scaler_``, which then stays fixed. Where columns are
        correlated, the density may stay below that of one Gaussian, of which
        :meth:`score` warns. ``visible="gaussian"`` does not standardise.
    :param latent: as ``visible``, without "auto".
    :param estimator: gradient estimator. None is ``PCD(num_chains=batch_size)``, the
        estimator of ``BernoulliRBM``, which is cheap but biased. ``ebmpp.UCD()`` is
        unbiased.
    :param optimizer: None for stochastic gradient steps, a function of the learning
        rate such as ``optax.adam``, or an optax transformation, which has its own rate
        and cannot be pickled.
    :param learning_rate: rate of the optimiser. "auto" is 0.1, or 0.01 if the
        statistics of visible or latent units are unbounded, as for Gaussian units
        (Hinton 2012, section 13.2).
    :param batch_size: rows per step, by default as few as for ``BernoulliRBM``, so that
        ten epochs suffice. The last batch of an epoch may be smaller.
    :param n_iter: number of epochs of :meth:`fit`; each permutes the rows.
    :param verbose: print one line per epoch.
    :param random_state: an int, a ``RandomState`` or None, as elsewhere in
        scikit-learn.

    Fitted attributes:

    - **graph_** - the :class:`~ebmpp.FactorGraph`, with blocks "v" and "h".
    - **params_** - a dict of NumPy arrays: "v", "h" and "v:h".
    - **components_**, **intercept_hidden_**, **intercept_visible_** - the params with
      the names and shapes of ``BernoulliRBM``, for units with one statistic each.
    - **scaler_** - a ``StandardScaler``, or None without standardisation.
    - **history_** - an ``xarray.Dataset``: gradient norm and the estimator's metrics
      per ``step``.
    - **n_iter_**, **n_steps_** - numbers of epochs and steps.
    - **n_features_in_**, **feature_names_in_** - as elsewhere in scikit-learn.

    **References**

    1. Welling, Rosen-Zvi, Hinton (2005), *Exponential family harmoniums with an
       application to information retrieval*.
    2. Tieleman (2008), *Training restricted Boltzmann machines using approximations to
       the likelihood gradient*.
    3. Hinton (2012), *A practical guide to training restricted Boltzmann machines*.

    **Example**

    >>> from sklearn.datasets import load_digits
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import MinMaxScaler
    >>> from ebmpp.sklearn import HarmoniumTransformer
    >>> X, _ = load_digits(return_X_y=True)
    >>> harmonium = HarmoniumTransformer(16, n_iter=2, random_state=0)
    >>> model = make_pipeline(MinMaxScaler(clip=True), harmonium)
    >>> model.fit_transform(X).shape
    (1797, 16)
    """

    n_components: int = 256
    _: dataclasses.KW_ONLY
    visible: harmonium.UnitsLike = "auto"
    latent: harmonium.UnitsLike = "bernoulli"
    estimator: Estimator | None = None
    optimizer: Callable[[float], harmonium.Optimizer] | harmonium.Optimizer | None = (
        None
    )
    learning_rate: float | str = "auto"
    batch_size: int = 10
    n_iter: int = 10
    verbose: int = 0
    random_state: int | np.random.RandomState | None = None

    def fit(
        self, X: Matrix, y: object = None, sample_weight: ArrayLike | None = None
    ) -> "HarmoniumTransformer":
        """Learn from the rows of ``X``, from new params.

        :param X: shape ``(rows, columns)``.
        :param y: ignored.
        :param sample_weight: nonnegative, one per row. A row of weight 2 counts as two
            rows in the initial biases and in ``scaler_``, and on average over batches
            in the gradient. Rows of weight 0 are left out. Weights do not change the
            number of steps per epoch.
        :raises ArgumentError: options out of range, or values outside the support of
            the units.
        :raises DivergenceError: params that are not finite after an epoch; ``params_``
            keeps the ones before.
        """
        rows = self._start(X, sample_weight)
        for _ in range(self.n_iter):
            self._epoch(*rows)
        return self

    def partial_fit(
        self, X: Matrix, y: object = None, sample_weight: ArrayLike | None = None
    ) -> "HarmoniumTransformer":
        """Train for one more epoch, with the state of params, optimiser and estimator.

        ``fit`` with ``n_iter=3`` equals ``fit`` with ``n_iter=1`` and two calls of
        this, bitwise.

        :param X: shape ``(rows, columns)``; the first call's rows determine "auto" and
            the initial biases.
        :param y: ignored.
        :param sample_weight: see :meth:`fit`.
        """
        if not hasattr(self, "params_"):
            self._epoch(*self._start(X, sample_weight))
            return self
        values, weights = harmonium.weighted_rows(self._values(X), sample_weight)
        self._epoch(harmonium.as_units(self, values), weights)
        return self

    def _start(
        self, X: Matrix, sample_weight: ArrayLike | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Check options and rows, declare the model and initialise its params."""
        self._check_options()
        values, weights = harmonium.weighted_rows(
            self._values(X, reset=True), sample_weight
        )
        is_share = bool(((values >= 0) & (values <= 1)).all())
        visible, self.scaler_ = harmonium.visible_family(
            self.visible, values, weights, is_share
        )
        latent = harmonium.family_of("latent", self.latent, int(self.n_components))
        self.graph_ = layered(v=visible, h=latent)
        self._n_features_out = math.prod(latent.statistic_shape)
        rows = harmonium.as_units(self, values)
        self.random_state_ = check_random_state(self.random_state)
        self._seed = self._new_seed()
        key = jax.random.key(self._seed)
        self.params_ = jax.device_get(
            harmonium.init_params(self.graph_, key, rows, weights)
        )
        self._fit = None
        self.history_ = xr.Dataset(coords={"step": np.arange(0)})
        self.n_iter_ = self.n_steps_ = 0
        return rows, weights

    def _check_options(self) -> None:
        """Check the options, which scikit-learn allows to be set without checks."""
        name = type(self).__name__
        for option, least in (("n_components", 1), ("batch_size", 1), ("n_iter", 0)):
            checks.count(f"{name}: {option}", getattr(self, option), least)
        if self.learning_rate != "auto":
            checks.number(f"{name}: learning_rate", self.learning_rate, above=0)
        if self.estimator is not None:
            checks.instance(
                f"{name}: estimator",
                self.estimator,
                Estimator,
                "None or an estimator such as ebmpp.UCD()",
            )
        optimizer = self.optimizer
        is_optimizer = callable(optimizer) or hasattr(optimizer, "update")
        if optimizer is not None and not is_optimizer:
            raise checks.error(
                f"{name}: optimizer",
                "None, a function such as optax.adam, or an optax transformation",
                optimizer,
            )

    # rows may be means, which are not exact in bfloat16
    @jax.default_matmul_precision("float32")
    def _epoch(self, rows: np.ndarray, weights: np.ndarray | None) -> None:
        """Train for one pass over the rows, from the state of the last pass."""
        begin = time.monotonic()
        estimator = self.estimator or PCD(num_chains=int(self.batch_size))
        first = self.n_steps_ // estimator.steps_per_batch
        seed = [self._seed, self.n_iter_]
        source = harmonium.Epoch(rows, weights, int(self.batch_size), seed, first)
        optimizer: Any = optax.sgd if self.optimizer is None else self.optimizer
        if callable(optimizer):
            rate = 0.1 if normalization.is_bounded(self.graph_) else 0.01
            if self.learning_rate != "auto":
                rate = float(self.learning_rate)
            optimizer = optimizer(rate)
        last = self._fit and dataclasses.replace(self._fit, params=self.params_)
        try:
            self._fit = fit(
                self.graph_,
                source,
                params=None if last else self.params_,
                start=last,
                estimator=estimator,
                optimizer=optimizer,
                epochs=1,
                rng_key=jax.random.key(self._seed),
                progress_bar=False,
            )
        except DivergenceError as error:
            error.add_note(
                f"{type(self).__name__}: this was epoch {self.n_iter_ + 1}. Lower "
                "learning_rate; params_ and history_ keep their values before that "
                "epoch."
            )
            raise
        steps = np.arange(self.n_steps_, self._fit.num_steps)
        metrics = self._fit.history.assign_coords(step=steps)
        parts = [self.history_, metrics] if self.n_steps_ else [metrics]
        self.history_ = xr.concat(parts, "step")
        self.params_ = jax.device_get(self._fit.params)
        self.n_steps_ = self._fit.num_steps
        self.n_iter_ += 1
        if self.verbose:
            seconds = time.monotonic() - begin
            norm = metrics.gradient_norm.values.mean()
            print(
                f"[{type(self).__name__}] epoch {self.n_iter_}: gradient norm "
                f"{norm:.4g}, {seconds:.2f} s"
            )

    def transform(self, X: Matrix) -> np.ndarray:
        """Return mean statistics of the latent units given each row, such as probabilities.

        :param X: shape ``(rows, columns)``.
        :return: shape ``(rows, n_components)``, with more columns for units of several
            statistics.
        """
        return self._by_chunks(harmonium.latent_means, self._rows(X))

    def score_samples(self, X: Matrix) -> np.ndarray:
        """Return log p(x) + log Z of each row, minus the free energy.

        As log Z is common to all rows, differences between rows are log density ratios,
        but values of two models cannot be compared. With ``scaler_`` the density is
        that of the original columns. For grey levels in Bernoulli units it is the
        formula at mean statistics, a lower bound on its mean over binary rows drawn
        from them.

        :param X: shape ``(rows, columns)``.
        :return: shape ``(rows,)``.
        """
        value = self._by_chunks(harmonium.log_density, self._rows(X))
        if self.scaler_ is None:
            return value
        log_volume = np.log(np.asarray(self.scaler_.scale_)).sum()
        return value - log_volume.astype(value.dtype)

    def _tractable(self) -> bool:
        """Return True if log Z can be computed, or if there is no model yet.

        :raises IntractableError: a model that is too large, with the reason.
        """
        if hasattr(self, "params_"):
            # plans the sum only
            jax.eval_shape(partial(exact.log_partition, self.graph_), self.params_)
        return True

    @available_if(_tractable)
    def score(self, X: Matrix, y: object = None) -> float:
        """Return the exact mean log-likelihood of the rows, which compares models.

        The method exists only for models that :func:`ebmpp.exact.log_partition`
        supports. For other models estimate log Z of ``graph_`` and ``params_`` and
        subtract it from :meth:`score_samples`.

        :param X: shape ``(rows, columns)``.
        :param y: ignored.
        :warns UserWarning: columns with ``scaler_`` that one Gaussian fits better by
            more than a nat; looked at with ten rows per column or more, and at most
            1000 columns.
        """
        mean = self.score_samples(X).mean(dtype=float)
        if self.scaler_ is not None:
            harmonium.warn_of_correlations(self._rows(X).astype(float))
        return float(mean - exact.log_partition(self.graph_, self.params_))

    def gibbs(self, v: Matrix, n_sweeps: int = 1) -> np.ndarray:
        """Run Gibbs sweeps from the rows ``v``.

        A sweep draws latents, then visibles. Each call advances ``random_state_``.

        :param v: shape ``(rows, columns)``.
        :param n_sweeps: number of sweeps, at least 1.
        :return: new rows in the shape of ``v``.
        """
        checks.count("n_sweeps", n_sweeps)
        return self._sweep(self._rows(v), random.key_pair(self._key()), n_sweeps)

    def sample(self, n_samples: int = 1, n_sweeps: int = 1000) -> np.ndarray:
        """Draw rows of the model: last states of independent Gibbs chains.

        The chains may not have mixed after ``n_sweeps`` sweeps;
        :func:`ebmpp.unbiased_expectation` with ``graph_`` and ``params_`` measures
        their meeting times.

        :param n_samples: number of rows.
        :param n_sweeps: sweeps per chain, at least 1.
        :return: shape ``(n_samples, columns)``.
        """
        check_is_fitted(self)
        checks.count("n_samples", n_samples)
        checks.count("n_sweeps", n_sweeps)
        first = random.fold_in(random.key_pair(self._key()), 0)
        key = random.fold_in(random.key_pair(self._key()), 1)
        keys = random.fold_in(first, np.arange(n_samples))
        start = gibbs.initial_rows(self.graph_, ("v",), keys)["v"]
        return self._sweep(start, key, n_sweeps)

    @jax.default_matmul_precision("float32")
    def _sweep(self, rows: Numbers, key: Array, n_sweeps: int) -> np.ndarray:
        count = int(n_sweeps)
        samples = harmonium.gibbs(self.graph_, self.params_, rows, key, count)
        samples = np.asarray(samples).reshape(len(samples), -1)
        if self.scaler_ is None:
            return samples
        return self.scaler_.inverse_transform(samples)

    @property
    def components_(self) -> np.ndarray:
        """Weights, shape ``(n_components, columns)``."""
        return self._array("components_", "v:h", "v", "h").T

    @property
    def intercept_visible_(self) -> np.ndarray:
        """Biases of the visible units, shape ``(columns,)``."""
        return self._array("intercept_visible_", "v", "v")

    @property
    def intercept_hidden_(self) -> np.ndarray:
        """Biases of the latent units, shape ``(n_components,)``."""
        return self._array("intercept_hidden_", "h", "h")

    def _array(self, name: str, factor: str, *blocks: str) -> np.ndarray:
        """Return params of a factor as an array over units, if these have one statistic each."""
        sizes = self.graph_.sizes(blocks)
        if self.params_[factor].size != math.prod(sizes):
            raise AttributeError(
                f"no {name}: units have several statistics each. Use params_"
            )
        return self.params_[factor].reshape(sizes)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        if isinstance(self.visible, str) and self.visible in harmonium.FAMILIES:
            low, _ = harmonium.FAMILIES[self.visible].bounds
            tags.input_tags.positive_only = low >= 0
        tags.transformer_tags.preserves_dtype = [str(jnp.result_type(float))]
        return tags

    def _values(self, X: Matrix, reset: bool = False) -> np.ndarray:
        """Return a dense array of floats in the right shape."""
        checks.refuse_mask(f"{type(self).__name__}: X", X)
        X = validate_data(
            self, X, accept_sparse="csr", dtype=(np.float64, np.float32), reset=reset
        )
        return X.toarray() if sparse.issparse(X) else X

    def _rows(self, X: Matrix) -> np.ndarray:
        check_is_fitted(self)
        return harmonium.as_units(self, self._values(X))

    @jax.default_matmul_precision("float32")
    def _by_chunks(self, fn: Callable[..., Array], rows: np.ndarray) -> np.ndarray:
        params = jax.tree.map(jnp.asarray, self.params_)
        return harmonium.by_chunks(partial(fn, self.graph_, params), rows)

    def _key(self) -> Array:
        return jax.random.key(self._new_seed())

    def _new_seed(self) -> int:
        return self.random_state_.randint(np.iinfo(np.int32).max)
