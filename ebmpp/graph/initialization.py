# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Where training starts: weights and biases by scheme."""

from collections.abc import Iterable, Mapping, Sequence
import math
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Eta, Params
from ebmpp.core.compile import compiled
from ebmpp.errors import ParameterError
from ebmpp.families import Family
from ebmpp.graph.factors import Bias, Factor

#: Mean statistics, and over how many rows: of the block, or of each statistic.
Mean = tuple[Array, Array | int]

SCHEMES: dict[str, dict[str, str]] = {
    "gaussian": {"weight": "gaussian", "bias": "base_rate"},
    "orthogonal": {"weight": "orthogonal", "bias": "logistic"},
}
_WEIGHTS = ("gaussian", "orthogonal", "zero")
_BIASES = ("base_rate", "logistic", "zero")


def resolve(scheme: str | Mapping[str, str]) -> dict[str, str]:
    """A scheme as a dict with keys "weight" and "bias".

    :raises ParameterError: for an unknown name.
    """
    if isinstance(scheme, str):
        if scheme not in SCHEMES:
            raise ParameterError(f"scheme {scheme!r} is unknown; choose one of {sorted(SCHEMES)}")
        return dict(SCHEMES[scheme])
    if not isinstance(scheme, Mapping):
        raise ParameterError(f"scheme is one of {sorted(SCHEMES)}, or a dict; not {scheme!r}")
    made = {**SCHEMES["gaussian"], **scheme}
    for role, allowed in (("weight", _WEIGHTS), ("bias", _BIASES)):
        if made[role] not in allowed or set(made) != {"weight", "bias"}:
            raise ParameterError(
                f"scheme {dict(scheme)!r} is unknown; give 'weight' as one of {_WEIGHTS} and 'bias' "
                f"as one of {_BIASES}"
            )
    return made


def init_params(
    factors: Sequence[Factor],
    families: Mapping[str, Family],
    rng_key: Array,
    scheme: str | Mapping[str, str],
    means: Mapping[str, Mean],
) -> Params:
    """Initial params of a graph's factors, by their names.

    :param means: of :func:`mean_statistics`, for the blocks that data were given for.
    :raises ParameterError: for an unknown scheme.
    """
    made, keys = resolve(scheme), jax.random.split(rng_key, max(1, len(factors)))
    each = zip(factors, keys, strict=False)
    return {factor.name: init_factor(factor, key, families, made, means) for factor, key in each}


def init_factor(
    factor: Factor,
    rng_key: Array,
    families: Mapping[str, Family],
    scheme: Mapping[str, str],
    means: Mapping[str, Mean],
) -> Any:
    """Initial params of one factor.

    :param means: of :func:`mean_statistics`, for the blocks that data were given for.
    """
    start = factor.init_params(rng_key, families)
    if factor.role == "weight":
        return _weight(scheme["weight"], rng_key, start, factor.row_axes(families))
    if factor.role == "lateral" and factor.init is None and scheme["weight"] != "zero":
        return _weight("gaussian", rng_key, start, 1)
    if isinstance(factor, Bias) and factor.init is None:
        block = factor.blocks[0]
        family, mean = families[block], means.get(block)
        pooled = mean and _pooled(factor, family, *mean)
        return _bias(scheme["bias"], rng_key, start, family, pooled)
    return start


def mean_statistics(family: Family, x: Array, known: Array | None, weights: Array | None) -> Mean:
    """Mean statistics over rows, and how many rows; unit by unit where some are not known.

    :param x: rows of a block.
    :param known: which units are known; None for all.
    :param weights: of the rows; None for equal ones.
    """
    each = family.statistics(x)
    if known is None:
        return jnp.average(each, axis=0, weights=weights), len(x)
    share = known.reshape(known.shape + (1,) * len(family.stat_shape)).astype(each.dtype)
    own = share if weights is None else share * jnp.asarray(weights).reshape(-1, *(1,) * (share.ndim - 1))
    total = own.sum(0)
    return (own * each).sum(0) / jnp.where(total > 0, total, 1), jnp.where(total > 0, share.sum(0), 0)


def _pooled(factor: Bias, family: Family, mean: Array, rows: Array | int) -> Mean:
    if isinstance(rows, int):
        return factor.pool(mean, family), rows
    count = factor.pool(rows, family)
    return factor.pool(rows * mean, family) / jnp.where(count > 0, count, 1), count


def _weight(how: str, rng_key: Array, start: Array, row_axes: int | None) -> Array:
    if how == "zero":
        return start
    if how == "gaussian":  # standard deviation 0.01: Hinton (2012), section 8
        return _gaussian(start.shape, start.dtype, rng_key)
    rows = math.prod(start.shape[:row_axes])
    matrix = jax.nn.initializers.orthogonal()(rng_key, (rows, start.size // rows), start.dtype)
    return matrix.reshape(start.shape)


@compiled(statics=2)
def _gaussian(shape: tuple[int, ...], dtype: jnp.dtype, rng_key: Array) -> Array:
    drawn = jax.random.normal(rng_key, shape, dtype)
    return 0.01 * jax.lax.optimization_barrier(drawn)  # bitwise what they are one after the other


def _bias(how: str, rng_key: Array, start: Array, family: Family, mean: Mean | None) -> Array:
    if how == "logistic":  # Logistic(0, 0.5): Taniguchi et al. (2023), section 5
        noise = 0.5 * jax.random.logistic(rng_key, start.shape, start.dtype)
        # a second statistic (a precision) or a rate must stay in its domain: only free ones move
        free = family.in_domain(start + noise) & family.in_domain(start - noise)
        return jnp.where(free.reshape(free.shape + (1,) * (start.ndim - free.ndim)), start + noise, start)
    if how == "base_rate" and mean is not None:
        return base_rate(family, *mean, start)
    return start


def base_rate(family: Family, mean: Array, rows: Array | int, start: Array) -> Array:
    """The natural parameter of a block that has the mean statistics of data.

    One pseudo-row of the law at ``start`` keeps units that never change inside the domain.

    :param family: the block's.
    :param mean: statistics averaged over rows.
    :param rows: how many there are, or of each statistic.
    :param start: a natural parameter.
    """
    try:
        return _rate_at_once(family, mean, rows, start)
    except jax.errors.JAXTypeError:  # a from_mean of one's own in numpy, or with Python's if
        return _rate(family, mean, rows, start)


def _rate(family: Family, mean: Array, rows: Array | int, start: Array) -> Array:
    total = jax.lax.optimization_barrier(rows * mean)  # rounded before the sum
    return family.from_mean((total + family.mean(start)) / (rows + 1))


_rate_at_once = compiled(statics=1)(_rate)  # op by op a first `fit` compiled a dozen programs for it


def random_statistics(families: Mapping[str, Family], blocks: Iterable[str], rows: int) -> Eta:
    """Statistics of a few states: the same ones in every call.

    Units of finitely many values take them with shares that differ from row to row; in every second row
    nearly all are alike. Others are as chains begin, and in every second row ten times as far where they have
    no end.
    """
    generator = np.random.default_rng(0)
    scope = tuple((b, families[b]) for b in blocks)
    return _statistics_of(scope, {b: _numbers(f, rows, generator) for b, f in scope})


def _numbers(family: Family, rows: int, generator: np.random.Generator) -> np.ndarray:
    """Of states; random words where there are infinitely many."""
    states = family.states()
    if states is None:
        shape = (rows, *family.shape, family.num_words)
        return generator.integers(0, 2**32, shape, np.uint32)
    shares = generator.dirichlet(np.full(len(states), 0.5), rows)
    shares[::2] = 0.05 * shares[::2] + 0.95 * np.eye(len(states))[np.arange(0, rows, 2) // 2 % len(states)]
    each = [generator.choice(len(states), family.shape, p=share) for share in shares]
    return np.stack(each).astype(np.int32)


@compiled(statics=1)
def _statistics_of(scope: tuple[tuple[str, Family], ...], numbers: dict[str, Array]) -> Eta:
    made = {}
    for b, family in scope:
        states = family.states()
        x = family.initial(numbers[b]) if states is None else states[numbers[b]]
        if np.isinf(family.statistic_bounds).any():
            far = jnp.where(jnp.arange(len(x)) % 2, 10, 1).reshape(-1, *(1,) * (x.ndim - 1))
            x = (x * far.astype(x.dtype)).astype(x.dtype)
        made[b] = family.statistics(x)
    return made
