# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Model with one visible and one latent block, and checks of the transformer."""

from collections.abc import Callable
from functools import partial
import math
from typing import Any
import warnings

import numpy as np
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_non_negative

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from ebmpp.core import Params, checks, random
from ebmpp.errors import ArgumentError
from ebmpp.families import Bernoulli, Exponential, Family, Gaussian, Poisson, Spin
from ebmpp.families.values import describe
from ebmpp.graph import FactorGraph, energy, initialization, tables
from ebmpp.moves import Layer, Target
from ebmpp.training.batches import BatchSource, RowWeights, Selection

UnitsLike = str | Family | Callable[[int], Family]
Optimizer = optax.GradientTransformation

# columns of a covariance matrix whose eigenvalues take a tenth of a second
_MAX_COLUMNS = 1000
_MAX_ROWS = 4096  # rows per call outside training
_ROWS_PER_COLUMN = 10  # that determine eigenvalues
_MAX_LOSS = 1.0  # nats per row

FAMILIES = {
    kind.__name__.lower(): kind
    for kind in (Bernoulli, Spin, Gaussian, Poisson, Exponential)
}


def family_of(name: str, units: UnitsLike, size: int) -> Family:
    """Return the family of ``size`` units that the argument ``name`` describes."""
    if isinstance(units, str):
        return FAMILIES[checks.choice(name, units, FAMILIES)](size)
    expected = (
        f"a name, a family of {size} units such as ebmpp.Poisson({size}), or a "
        "function that makes one"
    )
    family = checks.instance(
        name, units(size) if callable(units) else units, Family, expected
    )
    if family.size != size:
        raise checks.error(name, expected, units)
    return family


def visible_family(
    units: UnitsLike, values: np.ndarray, weights: RowWeights, is_bernoulli: bool
) -> tuple[Family, StandardScaler | None]:
    """Return the family of the visible units, and the scaler of columns for "auto".

    :param is_bernoulli: whether "auto" is Bernoulli units.
    """
    scaler = None
    if isinstance(units, str) and units == "auto":
        units = "bernoulli"
        if not is_bernoulli:
            units = "gaussian"
            scaler = StandardScaler().fit(values, sample_weight=weights)
    return family_of("visible", units, values.shape[1]), scaler


def warn_of_correlations(values: np.ndarray) -> None:
    """Warn if units of variance 1 given the latents lose much against one Gaussian.

    No eigenvalue of this model's covariance is below 1, as an eigenvalue l of
    standardised columns may be. A Gaussian with each such l raised to 1 loses half of
    ``l - 1 - log(l)`` per row.
    """
    rows, columns = values.shape
    if not (1 < columns <= _MAX_COLUMNS and rows >= _ROWS_PER_COLUMN * columns):
        return
    below = np.clip(np.linalg.eigvalsh(np.cov(values, rowvar=False)), 1e-12, 1)
    loss = 0.5 * (below - 1 - np.log(below)).sum()
    # eight times the mean loss of independent columns
    if loss > max(_MAX_LOSS, columns**2 / rows):
        warnings.warn(
            "HarmoniumTransformer: the columns are correlated, and units of variance 1 "
            f"given the latents may have a density {loss:.1f} nats per row below that "
            "of one Gaussian. For features this does not matter; for a density take "
            "visible=functools.partial(ebmpp.Gaussian, variance='learned').",
            stacklevel=3,
        )


@partial(jax.jit, static_argnums=0)  # one program instead of about eighty
def init_params(
    graph: FactorGraph, rng_key: Array, rows: Array, weights: Array | None = None
) -> Params:
    """Return initial params; in base rates a row of weight 2 counts as two rows."""
    mean = initialization.mean_statistics(graph.families["v"], rows, None, weights)
    if weights is not None:
        mean = mean._replace(rows=weights.sum())
    return initialization.init_params(graph, rng_key, "gaussian", {"v": mean})


class Epoch(BatchSource):
    """Batches of one pass over the rows in a random order, for the training loop.

    All batches have the same size; rows that pad the last one have weight 0. ``first``
    is the number of the first batch.
    """

    def __init__(
        self,
        rows: np.ndarray,
        weights: RowWeights,
        size: int,
        seed: list[int],
        first: int,
    ) -> None:
        self.batch_size = size
        self.first = first
        self.num_batches = math.ceil(len(rows) / size)
        shape = (self.num_batches, size)
        is_row = (np.arange(math.prod(shape)) < len(rows)).reshape(shape)
        index = np.resize(np.random.default_rng(seed).permutation(len(rows)), shape)
        shares = is_row * size / is_row.sum(1, keepdims=True)
        if weights is not None:
            shares *= (weights / weights.mean())[index]
        self._rows = {"v": jnp.asarray(rows)}
        self._index = index.astype(np.int32)
        self._shares = shares.astype(jnp.result_type(float))

    def sample(self) -> Selection:
        return Selection(self._rows)

    def batch(self, number: int) -> Selection:
        at = number - self.first
        return Selection(self._rows, self._index[at], self._shares[at])

    def batches_in(self, epochs: int) -> int:
        return epochs * self.num_batches


@partial(jax.jit, static_argnums=0)
def latent_means(graph: FactorGraph, params: Params, v: Array) -> Array:
    """Return mean statistics of the latents given visible rows, ``(rows, statistics)``."""
    eta = energy.natural_rows(graph, params, {"v": v}, ("h",))["h"]
    return graph.families["h"].mean(eta).reshape(len(v), -1)


@partial(jax.jit, static_argnums=0)
def log_density(graph: FactorGraph, params: Params, v: Array) -> Array:
    """Return log p(v) + log Z of each row."""
    return energy.summed_out(graph, params, {"v": v}, ("h",))


@partial(jax.jit, static_argnums=0)
def gibbs(
    graph: FactorGraph, params: Params, v: Array, key: Array, count: Array
) -> Array:
    """Return visible rows after ``count`` sweeps: latents first, then visibles."""
    keys = random.fold_in(key, jnp.arange(len(v)))

    def sweep(i, v):
        x = {"v": v}
        for index, block in enumerate(("h", "v")):
            x |= Layer((block,)).draw(
                Target(graph, params), x, random.fold_in(keys, i, index)
            )[0]
        return x["v"]

    return lax.fori_loop(0, count, sweep, v)


def check_values(model: object, family: Family, values: np.ndarray) -> None:
    """Check that values are in the support, or means where a value is its own statistic."""
    low, high = family.bounds
    accepts_means = not family.stat_shape and math.isfinite(high - low)
    if accepts_means:  # where values are their own statistic
        states = family.states()
        states = np.linspace(low, high, 5) if states is None else np.asarray(states)
        accepts_means = np.array_equal(family.statistics(states), states)
    if accepts_means:
        is_valid = (values >= low) & (values <= high)
        expected = f"values from {low:g} to {high:g}"
    else:
        is_valid = np.asarray(family.in_support(values))
        expected = describe(family)
    if not is_valid.all():
        row, column = np.argwhere(~is_valid)[0].tolist()
        raise ArgumentError(
            f"{type(model).__name__}: X has {values[row, column]:g} at row {row}, column {column} "
            f"({(~is_valid).sum()} such values), but units {family!r} need "
            f"{expected}. Scale X, for example "
            "by MinMaxScaler(clip=True), or choose another family, such as "
            'visible="gaussian" for reals'
        )


def as_units(model: Any, values: np.ndarray) -> np.ndarray:
    """Return checked rows of the visible block."""
    family = model.graph_.families["v"]
    if model.scaler_ is not None:
        values = model.scaler_.transform(values)
    # before the check: a scaler's 1.0000000000000002 is 1 in float32
    values = values.astype(jnp.result_type(float))
    if family.bounds[0] >= 0:
        check_non_negative(values, type(model).__name__)
    check_values(model, family, values)
    return values.reshape(-1, *family.shape).astype(family.dtype)


def by_chunks(fn: Callable[[np.ndarray], Array], rows: np.ndarray) -> np.ndarray:
    """Apply ``fn`` to chunks of rows, padded so that few shapes are compiled."""
    size = min(_MAX_ROWS, 1 << max(0, len(rows) - 1).bit_length())
    results = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        padded = np.resize(part, (size, *part.shape[1:]))
        results.append(np.asarray(fn(padded))[: len(part)])
    return np.concatenate(results)


def weighted_rows(
    values: np.ndarray, sample_weight: ArrayLike | None
) -> tuple[np.ndarray, RowWeights]:
    """Return the rows with positive weights, and their weights; None without weights."""
    if sample_weight is None:
        return values, None
    tables.check_weights(sample_weight, len(values))
    weights = np.asarray(sample_weight, float)
    return values[weights > 0], weights[weights > 0]
