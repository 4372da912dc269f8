# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Initial weights and biases by scheme."""

from collections.abc import Mapping
import math

from jaxtyping import PyTree

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Natural, Params, checks
from ebmpp.core.compile import compiled
from ebmpp.core.rows import expand
from ebmpp.families import Family
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Bias, Factor

#: Mean statistics, and the number of rows they average: one for the block, or one per
#: statistic. None: the mean is in double precision on the host, and that of the data
#: and a row of the default distribution.
Mean = tuple[PyTree, Array | int | None]
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
    graph: Declaration, rng_key: Array, scheme: Scheme, means: Mapping[str, Mean]
) -> Params:
    """Return initial params by factor, given :func:`mean_statistics` of the blocks with data."""
    factors = graph.factors
    families = graph.families
    choices = resolve(scheme)
    keys = jax.random.split(rng_key, max(1, len(factors)))

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
            mean = _pooled(factor, family, *means[block]) if block in means else None
            return _bias(choices["bias"], key, start, family, mean)
        return start

    return {f.name: init_factor(f, key) for f, key in zip(factors, keys, strict=False)}


def mean_statistics(
    family: Family, x: Array, known: Array | None, weights: Array | None
) -> Mean:
    """Return mean statistics of weighted rows, and numbers of rows, per statistic if some miss."""
    statistics = family.statistics(x)
    if known is None:
        return jnp.average(statistics, axis=0, weights=weights), len(x)
    mask = expand(known, target=statistics).astype(statistics.dtype)
    weighted = mask
    if weights is not None:
        weighted = mask * expand(jnp.asarray(weights), target=mask)
    total = weighted.sum(0)
    mean = (weighted * statistics).sum(0) / jnp.where(total > 0, total, 1)
    return mean, jnp.where(total > 0, mask.sum(0), 0)


def _pooled(
    factor: Bias, family: Family, mean: Natural, rows: Array | int | None
) -> Mean:
    if rows is None or isinstance(rows, int):
        return factor.pool(mean, family), rows
    count = factor.pool(rows, family)
    return factor.pool(rows * mean, family) / jnp.where(count > 0, count, 1), count


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
    choice: str, rng_key: Array, start: Array, family: Family, mean: Mean | None
) -> Array:
    if choice == "logistic":  # Logistic(0, 0.5): Taniguchi et al. (2023), section 5
        noise = 0.5 * jax.random.logistic(rng_key, start.shape, start.dtype)
        # a second statistic (a precision) or a rate must stay in its domain: only free
        # ones move
        free = family.in_domain(start + noise) & family.in_domain(start - noise)
        return jnp.where(expand(free, target=start), start + noise, start)
    if choice == "base_rate" and mean is not None:
        return base_rate(family, *mean, start)
    return start


def base_rate(
    family: Family, mean: Natural, rows: Array | int | None, start: Array
) -> Array:
    """Return the natural parameter of a block with mean statistics; see :data:`Mean`.

    One pseudo-row with the mean at the natural parameter ``start`` keeps constant units
    inside the domain.
    """
    if rows is None:
        return jnp.asarray(family.from_mean(mean), start.dtype)
    try:
        return _compiled_rate(family, mean, rows, start)
    except jax.errors.JAXTypeError:  # a custom from_mean in numpy, or with Python's if
        return _rate(family, mean, rows, start)


def _rate(family: Family, mean: Array, rows: Array | int, start: Array) -> Array:
    total = jax.lax.optimization_barrier(rows * mean)  # rounded before the sum
    return family.from_mean((total + family.mean(start)) / (rows + 1))


# op by op a first `fit` compiled a dozen programs for it
_compiled_rate = compiled(_rate, statics=1)
