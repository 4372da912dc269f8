# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Initial weights and biases by scheme."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Params, checks, compiled, expand, random
from ebmpp.families import Family
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Bias, Factor

# standard deviations between the data and the row that stands for the default
# distribution
_NEAR = 3.0
_TINY = 1e-30  # a divisor of sums over no rows


class Mean(NamedTuple):
    """Mean statistics of a block, and the number of rows: one for all, or one per statistic."""

    statistics: Array
    rows: Array | int


class Moments(NamedTuple):
    """Mean, variance and number of rows of each unit, in double precision on the host."""

    mean: np.ndarray
    variance: np.ndarray
    rows: np.ndarray

    def with_default_row(self, family: Family) -> Any:
        """Return mean statistics of the rows and one more, of variance 1 and near 0.

        A row at 0 would widen columns of mean 10,000 and standard deviation 3 to 224.
        """
        mean, variance, count = self
        reach = _NEAR * np.sqrt(variance if family.stat_shape else 1.0)
        near = np.where(count > 0, np.clip(0.0, mean - reach, mean + reach), 0.0)
        moved = (mean - near) / (count + 1)
        centre = mean - moved
        spread = count * (variance + moved**2) + 1 + (near - centre) ** 2
        square = spread / (count + 1) + centre**2
        return np.stack([centre, square], -1) if family.stat_shape else centre


Scheme = str | Mapping[str, str]

SCHEMES: dict[str, dict[str, str]] = {
    "gaussian": {"weight": "gaussian", "bias": "base_rate"},
    "orthogonal": {"weight": "orthogonal", "bias": "logistic"},
}
_ROLES = {
    "weight": ("gaussian", "orthogonal", "zero"),
    "bias": ("base_rate", "logistic", "zero"),
}


def resolve(scheme: Scheme) -> dict[str, str]:
    """Return a scheme as a dict with keys "weight" and "bias"."""
    choices = SCHEMES.get(scheme) if isinstance(scheme, str) else scheme
    resolved = (
        {**SCHEMES["gaussian"], **choices} if isinstance(choices, Mapping) else {}
    )
    if resolved.keys() != _ROLES.keys() or not all(
        resolved[r] in names for r, names in _ROLES.items()
    ):
        raise checks.parameter_error(
            "scheme", f"one of {sorted(SCHEMES)} or a dict of choices {_ROLES}", scheme
        )
    return resolved


def init_params(
    graph: Declaration,
    rng_key: Array,
    scheme: Scheme,
    means: Mapping[str, Mean | Moments],
) -> Params:
    """Return initial params by factor, given :func:`mean_statistics` of the blocks with data."""
    factors = graph.factors
    families = graph.families
    choices = resolve(scheme)
    keys = random.split(rng_key, max(1, len(factors)))

    def init_factor(factor: Factor, key: Array) -> PyTree:
        start = factor.init_params(key, families)
        if factor.role == "weight":
            return _weight(choices["weight"], key, start, factor.row_axes(families))
        if factor.init is not None:
            return start
        if factor.role == "lateral" and choices["weight"] != "zero":
            return _weight("gaussian", key, start, 1)
        if isinstance(factor, Bias):
            (block,) = factor.blocks
            family = families[block]
            mean = _pooled(factor, family, means[block]) if block in means else None
            return _bias(choices["bias"], key, start, family, mean)
        return start

    return {f.name: init_factor(f, key) for f, key in zip(factors, keys, strict=False)}


def mean_statistics(
    family: Family, x: Array, known: Array | None, weights: Array | None
) -> Mean:
    """Return mean statistics of weighted rows, and numbers of rows, per statistic if some miss."""
    statistics = family.statistics(x)
    if known is None:
        return Mean(jnp.average(statistics, axis=0, weights=weights), len(x))
    mask = expand(known, target=statistics).astype(statistics.dtype)
    weighted = mask
    if weights is not None:
        weighted = mask * expand(jnp.asarray(weights), target=mask)
    total = weighted.sum(0)
    mean = (weighted * statistics).sum(0) / jnp.where(total > 0, total, 1)
    return Mean(mean, jnp.where(total > 0, mask.sum(0), 0))


def _pooled(factor: Bias, family: Family, mean: Mean | Moments) -> Mean | Moments:
    """Pool the units that share a bias, each of which has its own rows."""
    if not factor.shared:
        return mean
    values: Any = mean[0]
    rows: Any = mean.rows
    if isinstance(rows, int):
        rows = jnp.full(values.shape, rows, values.dtype)
    share: Any = factor.pool(rows, family)
    total = share * (rows.size // share.size)

    def average(a: Any) -> Any:
        return factor.pool(rows * a, family) / share.clip(_TINY)

    centre = average(values)
    if isinstance(mean, Mean):
        return Mean(centre, total)
    return Moments(centre, average(mean.variance + (values - centre) ** 2), total)


def _weight(choice: str, rng_key: Array, start: Array, row_axes: int | None) -> Array:
    if choice == "zero":
        return start
    if choice == "gaussian":  # standard deviation 0.01: Hinton (2012), section 8
        return _gaussian(start.shape, start.dtype, rng_key)
    rows = math.prod(start.shape[:row_axes])
    matrix = jax.nn.initializers.orthogonal()(
        rng_key, (rows, start.size // rows), start.dtype
    )
    return matrix.reshape(start.shape)


@compiled(statics=2)
def _gaussian(shape: tuple[int, ...], dtype: jnp.dtype, rng_key: Array) -> Array:
    noise = jax.random.normal(rng_key, shape, dtype)
    # bitwise equal to two separate programs
    return 0.01 * jax.lax.optimization_barrier(noise)


def _bias(
    choice: str,
    rng_key: Array,
    start: Array,
    family: Family,
    mean: Mean | Moments | None,
) -> Array:
    if choice == "logistic":  # Logistic(0, 0.5): Taniguchi et al. (2023), section 5
        noise = 0.5 * jax.random.logistic(rng_key, start.shape, start.dtype)
        # a second statistic (a precision) or a rate must stay in its domain: only free
        # ones move
        free = family.in_domain(start + noise) & family.in_domain(start - noise)
        return jnp.where(expand(free, target=start), start + noise, start)
    if choice == "base_rate" and mean is not None:
        return base_rate(family, mean, start)
    return start


def base_rate(family: Family, mean: Mean | Moments, start: Array) -> Array:
    """Return the natural parameter of units with these means.

    One pseudo-row with the mean at the natural parameter ``start`` keeps constant units
    inside the domain.
    """
    if isinstance(mean, Moments):
        centre = mean.with_default_row(family)
        return jnp.asarray(family.from_mean(centre), start.dtype)
    try:
        return _compiled_rate(family, *mean, start)
    except jax.errors.JAXTypeError:  # a custom from_mean in numpy, or with Python's if
        return _rate(family, *mean, start)


def _rate(family: Family, mean: Array, rows: Array | int, start: Array) -> Array:
    total = jax.lax.optimization_barrier(rows * mean)  # rounded before the sum
    return family.from_mean((total + family.mean(start)) / (rows + 1))


# op by op a first `fit` compiled a dozen programs for it
_compiled_rate = compiled(_rate, statics=1)
