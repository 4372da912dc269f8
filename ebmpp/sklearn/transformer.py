# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A two-layer model as a scikit-learn transformer, where a pipeline takes ``BernoulliRBM``."""

from collections.abc import Callable
from functools import partial
import math
import time
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, check_non_negative, validate_data
import xarray as xr

import jax
from jax import Array
import jax.numpy as jnp
import optax

from ebmpp import exact
from ebmpp.core import checks, random
from ebmpp.errors import DivergenceError, NormalizationError
from ebmpp.estimators import PCD, Estimator
from ebmpp.moves import gibbs
from ebmpp.sklearn import harmonium
from ebmpp.training.loop import Loop
from ebmpp.training.steps import Stage, Stages

_MOST_ROWS = 4096  # rows in flight outside training


class HarmoniumTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Features learned by an exponential-family harmonium: mean statistics of latent units.

    It stands where :class:`sklearn.neural_network.BernoulliRBM` stands, for visible and latent units of any
    family, any gradient estimator and any optimiser. It computes in JAX's floats, float32 unless
    ``jax_enable_x64`` is set, and returns these; sparse input is made dense.

    **What the rows may be.** Values outside the support of the units are refused. One exception, which
    ``BernoulliRBM`` makes silently for all values: for units of bounded values that are their own statistic
    (Bernoulli, Spin, Binomial) a value in between, such as a grey level in [0, 1], stands for the unit's
    *mean statistic*. Then the positive phase and the features are taken at these means; that is the usual
    practice, and not the likelihood of binary rows. ``ebmpp.data.binarize(X, "bernoulli", rng_key=...)``
    draws such rows.

    :param n_components: number of latent units.
    :param visible: "auto", the name of a family ("bernoulli", "spin", "gaussian", "poisson" or
        "exponential"), a function of the number of units such as
        ``ebmpp.Poisson`` or ``functools.partial(ebmpp.Binomial, total_count=3)``, or a family of as many
        units as X has columns. "auto" looks at the first rows: Bernoulli units where all values are in
        [0, 1]; else Gaussian units of variance 1 for columns standardised by ``scaler_``, which stays as the
        first rows made it. The Gaussians of ``visible="gaussian"`` take X as it is.
    :param latent: likewise, without "auto".
    :param estimator: of the gradient. None is ``PCD(num_chains=batch_size)``, what ``BernoulliRBM`` does: it
        costs no more than CD and compiles in a second, and its gradient is biased. ``ebmpp.UCD()``'s is not.
    :param optimizer: None (gradient steps), a function of the learning rate such as ``optax.adam``, or an
        optax transformation, which then has its own rate and cannot be pickled.
    :param learning_rate: of the optimiser; "auto" is 0.1, and 0.01 where the statistics of visible or latent
        units have no bounds, such as Gaussian units (Hinton 2012, section 13.2).
    :param batch_size: rows a step, as few as ``BernoulliRBM`` takes: ten epochs are then enough. The last
        batch of an epoch may have fewer.
    :param n_iter: epochs that :meth:`fit` makes; rows are permuted in each.
    :param verbose: print a line an epoch.
    :param random_state: an int, a ``RandomState`` or None, as everywhere in scikit-learn.

    Fitted attributes:

    - **graph_** - the :class:`~ebmpp.FactorGraph`, with blocks "v" and "h".
    - **params_** - its params, a dict of NumPy arrays: "v", "h" and "v:h".
    - **components_**, **intercept_hidden_**, **intercept_visible_** - the same under ``BernoulliRBM``'s
      names and shapes, for units of one statistic each.
    - **scaler_** - a ``StandardScaler``, or None where columns are taken as they are.
    - **history_** - an ``xarray.Dataset``: per ``step`` the gradient norm and the estimator's metrics.
    - **n_iter_**, **n_steps_** - epochs and steps made.
    - **n_features_in_**, **feature_names_in_** - as usual.

    **References**

    1. Welling, Rosen-Zvi, Hinton (2005), *Exponential family harmoniums with an application to information
       retrieval*.
    2. Tieleman (2008), *Training restricted Boltzmann machines using approximations to the likelihood
       gradient*.
    3. Hinton (2012), *A practical guide to training restricted Boltzmann machines*.

    **Example**

    >>> from sklearn.datasets import load_digits
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import MinMaxScaler
    >>> from ebmpp.sklearn import HarmoniumTransformer
    >>> X, _ = load_digits(return_X_y=True)
    >>> model = make_pipeline(MinMaxScaler(clip=True), HarmoniumTransformer(16, n_iter=2, random_state=0))
    >>> model.fit_transform(X).shape
    (1797, 16)
    """

    def __init__(
        self,
        n_components: int = 256,
        *,
        visible: harmonium.Units = "auto",
        latent: harmonium.Units = "bernoulli",
        estimator: Estimator | None = None,
        optimizer: Callable[[float], harmonium.Optimizer] | harmonium.Optimizer | None = None,
        learning_rate: float | str = "auto",
        batch_size: int = 10,
        n_iter: int = 10,
        verbose: int = 0,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_components = n_components
        self.visible = visible
        self.latent = latent
        self.estimator = estimator
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.n_iter = n_iter
        self.verbose = verbose
        self.random_state = random_state

    # -- training --------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> "HarmoniumTransformer":
        """Learn from the rows of ``X``, from the beginning.

        :param X: shape ``(rows, columns)``.
        :param y: ignored.
        :param sample_weight: one a row, not negative: a row of weight 2 is two rows in the initial biases
            and in ``scaler_``, and in the gradient on average over batches; one of weight 0 is left out.
            An epoch has as many steps as without.
        :raises ArgumentError: for params out of range, and values that the units do not take.
        :raises DivergenceError: when an epoch ends with params that are not finite; ``params_`` are those
            before it.
        """
        rows = self._start(X, sample_weight)
        for _ in range(self.n_iter):
            self._epoch(*rows)
        return self

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> "HarmoniumTransformer":
        """One more epoch, over the rows of ``X``: params, optimiser and estimator go on from where they are.

        ``fit`` with ``n_iter=3`` is ``fit`` with ``n_iter=1`` and two of these, bitwise.

        :param X: shape ``(rows, columns)``; on the first call the rows that decide what "auto" decides, and
            the initial biases.
        :param y: ignored.
        :param sample_weight: see :meth:`fit`.
        """
        if not hasattr(self, "params_"):
            self._epoch(*self._start(X, sample_weight))
            return self
        values, weights = harmonium.weighted(self._values(X), sample_weight)
        self._epoch(self._as_units(values), weights)
        return self

    def _start(self, X: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Check everything, declare the model and put its params where training starts."""
        harmonium.check_params(self)
        values, weights = harmonium.weighted(self._values(X, reset=True), sample_weight)
        units, self.scaler_ = self.visible, None
        if isinstance(units, str) and units == "auto":
            within = bool(((values >= 0) & (values <= 1)).all())
            units = "bernoulli" if within else "gaussian"
            self.scaler_ = None if within else StandardScaler().fit(values, sample_weight=weights)
        visible = harmonium.family_of("visible", units, values.shape[1])
        latent = harmonium.family_of("latent", self.latent, int(self.n_components))
        self.graph_ = harmonium.harmonium(visible, latent)
        self._n_features_out = math.prod(latent.statistic_shape)
        rows = self._as_units(values)
        self.random_state_ = check_random_state(self.random_state)
        key = self._key()
        self._words = np.asarray(random.key_pair(key))
        self.params_ = jax.device_get(harmonium.start(self.graph_, key, rows, weights))
        self._carried = None
        self.history_ = xr.Dataset(coords={"step": np.arange(0)})
        self.n_iter_ = self.n_steps_ = 0
        return rows, weights

    def _epoch(self, rows: np.ndarray, weights: np.ndarray | None) -> None:
        """One pass over the rows, which goes on from where the last one ended."""
        begin = time.monotonic()
        estimator = PCD(num_chains=int(self.batch_size)) if self.estimator is None else self.estimator
        seed = [*self._words.tolist(), self.n_iter_]
        each = estimator.steps_per_batch
        source = harmonium.Epoch(rows, weights, int(self.batch_size), seed, self.n_steps_ // each)
        end = self.n_steps_ + source.num_batches * each
        stage = Stage(num_steps=end, estimator=estimator, optimizer=self._optimizer())
        stages = Stages([stage], scheduled=False)
        loop = Loop(self.graph_, stages, source, jnp.asarray(self._words), self.params_)
        if self._carried is None:
            self._carried = loop.begin(0, self.params_)
        try:
            state = loop.run(self.n_steps_, self._carried._replace(params=self.params_), progress_bar=False)
        except NormalizationError:
            raise
        except DivergenceError as error:
            raise DivergenceError(
                f"{type(self).__name__}: gradient or params were not finite after epoch {self.n_iter_ + 1} "
                f"(step {self.n_steps_ + error.step}): lower learning_rate. params_ and history_ are those "
                "before that epoch",
                self.params_,
                self.history_,
                self.n_steps_,
            ) from error
        made = loop.log.dataset().assign_coords(step=np.arange(self.n_steps_, end))
        self.history_ = xr.concat([self.history_, made], "step") if self.n_steps_ else made
        self._carried = jax.device_get(state)
        self.params_, self.n_steps_ = self._carried.params, end
        self.n_iter_ += 1
        if self.verbose:
            seconds, norm = time.monotonic() - begin, made.gradient_norm.values.mean()
            print(f"[{type(self).__name__}] epoch {self.n_iter_}: gradient norm {norm:.4g}, {seconds:.2f} s")

    # -- what a fitted model tells ---------------------------------------------------------------

    def transform(self, X: Any) -> np.ndarray:
        """Mean statistics of the latent units given each row: probabilities for Bernoulli units.

        :param X: shape ``(rows, columns)``.
        :return: shape ``(rows, n_components)``, or more columns where a unit has several statistics.
        """
        check_is_fitted(self)
        return self._by_chunks(harmonium.latent_means, self._rows(X))

    def score_samples(self, X: Any) -> np.ndarray:
        """log p(x) + log Z, row by row: minus the free energy.

        Exact and deterministic, up to the constant log Z, which is the same for all rows: differences
        between rows are log ratios of their densities, and values of two models cannot be compared
        (``BernoulliRBM`` returns a random pseudo-likelihood, which can). With ``scaler_`` the density is that
        of the original columns. For grey levels in Bernoulli units: the same formula at mean statistics, a
        lower bound of its mean over binary rows drawn from them.

        :param X: shape ``(rows, columns)``.
        :return: shape ``(rows,)``.
        """
        check_is_fitted(self)
        inner = self._by_chunks(harmonium.log_density, self._rows(X))
        # log of the volume that standardising divides by
        scale = np.zeros(()) if self.scaler_ is None else np.log(self.scaler_.scale_).sum()
        return inner - scale.astype(inner.dtype)

    def _tractable(self) -> bool:
        """Whether log Z can be computed; True before there is a model to ask.

        :raises IntractableError: says why not.
        """
        if hasattr(self, "params_"):
            jax.eval_shape(partial(exact.log_partition, self.graph_), self.params_)  # plans, and sums nothing
        return True

    @available_if(_tractable)
    def score(self, X: Any, y: Any = None) -> float:
        """Mean log-likelihood of the rows, exactly: what models may be compared by.

        The method is there only for models small enough for :func:`ebmpp.exact.log_partition`. For others
        estimate log Z of ``graph_`` and ``params_`` and subtract it from :meth:`score_samples`.

        :param X: shape ``(rows, columns)``.
        :param y: ignored.
        """
        mean = self.score_samples(X).mean(dtype=float)
        return float(mean - exact.log_partition(self.graph_, self.params_))

    def gibbs(self, v: Any, n_sweeps: int = 1) -> np.ndarray:
        """Sweeps of Gibbs sampling from the rows ``v``: latents given visibles, then visibles given latents.

        Random words come from ``random_state_``, which goes on from call to call.

        :param v: shape ``(rows, columns)``.
        :param n_sweeps: how many, at least 1.
        :return: new rows, of the shape of ``v``.
        """
        check_is_fitted(self)
        checks.count("n_sweeps", n_sweeps)
        rows, key = self._rows(v), random.key_pair(self._key())
        made = harmonium.gibbs(self.graph_, self.params_, rows, key, int(n_sweeps))
        return self._as_columns(np.asarray(made))

    def sample(self, n_samples: int = 1, n_sweeps: int = 1000) -> np.ndarray:
        """Rows of the model: the ends of independent Gibbs chains from initial draws.

        As good as ``n_sweeps`` sweeps mix; :func:`ebmpp.unbiased_expectation` with ``graph_`` and
        ``params_`` tells how well that is.

        :param n_samples: rows.
        :param n_sweeps: sweeps of each chain, at least 1.
        :return: shape ``(n_samples, columns)``.
        """
        check_is_fitted(self)
        checks.count("n_samples", n_samples)
        checks.count("n_sweeps", n_sweeps)
        first, key = (random.fold_in(random.key_pair(self._key()), i) for i in range(2))
        start = gibbs.initial_rows(self.graph_, ("v",), random.fold_in(first, np.arange(n_samples)))["v"]
        made = harmonium.gibbs(self.graph_, self.params_, start, key, int(n_sweeps))
        return self._as_columns(np.asarray(made))

    @property
    def components_(self) -> np.ndarray:
        """The weights, shape ``(n_components, columns)``."""
        v, h = (self.graph_.families[b] for b in "vh")
        harmonium.check_one_statistic("components_", math.prod(v.interaction_shape) == v.size, v)
        harmonium.check_one_statistic("components_", math.prod(h.interaction_shape) == h.size, h)
        return self.params_["v:h"].reshape(v.size, h.size).T

    @property
    def intercept_visible_(self) -> np.ndarray:
        """Biases of the visible units, shape ``(columns,)``."""
        return self._intercept("v", "intercept_visible_")

    @property
    def intercept_hidden_(self) -> np.ndarray:
        """Biases of the latent units, shape ``(n_components,)``."""
        return self._intercept("h", "intercept_hidden_")

    def _intercept(self, block: str, name: str) -> np.ndarray:
        family = self.graph_.families[block]
        harmonium.check_one_statistic(name, not family.stat_shape, family)
        return self.params_[block].reshape(-1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        named = harmonium.NAMES.get(self.visible) if isinstance(self.visible, str) else None
        tags.input_tags.positive_only = named is not None and named.bounds[0] >= 0
        tags.transformer_tags.preserves_dtype = [str(jnp.result_type(float))]
        return tags

    # -- rows ------------------------------------------------------------------------------------

    def _values(self, X: Any, reset: bool = False) -> np.ndarray:
        """Numbers in shape, not yet looked at."""
        X = validate_data(self, X, accept_sparse="csr", dtype=(np.float64, np.float32), reset=reset)
        return X.toarray() if sparse.issparse(X) else X

    def _rows(self, X: Any) -> np.ndarray:
        return self._as_units(self._values(X))

    def _as_units(self, values: np.ndarray) -> np.ndarray:
        """Rows of the visible block, checked."""
        family = self.graph_.families["v"]
        if self.scaler_ is not None:
            values = self.scaler_.transform(values)
        # first the dtype: a scaler's 1.0000000000000002 is a 1
        values = values.astype(jnp.result_type(float))
        if family.bounds[0] >= 0:
            check_non_negative(values, type(self).__name__)
        harmonium.check_values(self, family, values)
        return values.reshape(-1, *family.shape).astype(family.dtype)

    def _as_columns(self, rows: np.ndarray) -> np.ndarray:
        rows = rows.reshape(len(rows), -1)
        return rows if self.scaler_ is None else self.scaler_.inverse_transform(rows)

    def _by_chunks(self, fn: Callable[..., Array], rows: np.ndarray) -> np.ndarray:
        """Rows through ``fn``, in chunks of a power of two, the last filled up: few shapes are compiled."""
        enough = 1 << max(0, len(rows) - 1).bit_length()
        params, size = jax.tree.map(jnp.asarray, self.params_), min(_MOST_ROWS, enough)
        parts = (rows[first : first + size] for first in range(0, len(rows), size))
        fill = lambda part: np.pad(part, [(0, size - len(part)), *[(0, 0)] * (part.ndim - 1)])
        return np.concatenate([np.asarray(fn(self.graph_, params, fill(p)))[: len(p)] for p in parts])

    # -- params ----------------------------------------------------------------------------------

    def _optimizer(self) -> harmonium.Optimizer:
        make = optax.sgd if self.optimizer is None else self.optimizer
        if not callable(make):
            return make
        rate = self.learning_rate
        if rate == "auto":
            bounded = all(np.isfinite(family.bounds).all() for family in self.graph_.families.values())
            rate = 0.1 if bounded else 0.01
        return harmonium.make_optimizer(make, float(rate))

    def _key(self) -> Array:
        return jax.random.key(self.random_state_.randint(np.iinfo(np.int32).max))
