# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Observed values that a model's distributions make impossible, which most log densities do not show."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.distribution import Unit
from numpyro.primitives import Messenger

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.distribution.tractability import base_of, with_base
from ebmpp.traced.rows import is_staged

_ROUNDING = 1e-6  # of values at the edge of their support


class Replaced(Distribution):
    """A distribution with another log density, a function of the value."""

    def __init__(self, base: Distribution, log_density: Callable[[Any], Array]) -> None:
        self.base = base
        self.log_density = log_density
        super().__init__(base.batch_shape, base.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return self.base.support

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        return self.log_density(value)


class ArrayData(Messenger):
    """A model with observed values as arrays of jax; NumPyro compares others with bounds by numpy."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["value"] = jnp.asarray(msg["value"])


def element_of(support: Any) -> Any:
    """Return the constraint on one unit of a site."""
    while isinstance(support, type(constraints.independent(constraints.real, 1))):
        support = support.base_constraint
    return support


def is_cut_off(value: Any) -> bool:
    """Return True for whole numbers that jax would wrap to others, as its dtype has fewer bits."""
    if (
        not isinstance(value, np.ndarray | np.integer)
        or value.dtype.kind not in "iu"
        or not value.size
    ):
        return False
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(value.dtype))
    return bool(np.max(value) > limits.max or np.min(value) < limits.min)


def _outside(site: Mapping[str, Any]) -> Any:
    """Return a mask of the rows of an observed site that are outside of their closed support."""
    base = base_of(site["fn"])

    def is_finite(a):
        return abs(a) < np.inf

    # with which no program is compiled
    to_array = jnp.asarray if is_staged() else np.asarray
    if isinstance(base, Unit):
        return ~is_finite(to_array(base.log_factor))
    value: Any = to_array(site["value"])
    element = element_of(base.support)

    def by_row(a):
        return a.reshape(*a.shape[: value.ndim - base.event_dim], -1).all(-1)

    inside = by_row(is_finite(value))
    is_float = jnp.issubdtype(value.dtype, np.floating)
    if isinstance(element, type(constraints.dependent)):
        return ~inside
    if not is_float or element.is_discrete:
        return ~(inside & by_row(element(value)))
    if element.event_dim:  # rounding moves a simplex, or a matrix, out of its support
        return ~inside
    with np.errstate(invalid="ignore"):  # inf - inf
        room = _ROUNDING * (1 + abs(value))
        return ~(inside & by_row(element(value + room) | element(value - room)))


def count_impossible(site: Mapping[str, Any]) -> Array:
    """Return how many rows of an observed site are outside of their support, masked ones excluded."""
    outside = jnp.asarray(_outside(site), float)
    counted = with_base(site["fn"], Replaced(base_of(site["fn"]), lambda _: outside))
    return jnp.sum(counted.log_prob(site["value"]))


def impossible_sites(trace: Mapping[str, Any]) -> dict[str, str]:
    """Return the observed sites that hold impossible values, at a trace's latent values, with the problem."""
    problems = {}
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        base = base_of(site["fn"])
        value = site["value"]
        outside = _outside(site)
        if is_cut_off(value):
            problems[name] = f"of at most 32 bits, got {np.max(value)}"
        elif np.any(outside) and count_impossible(site) > 0:
            value = base.log_factor if isinstance(base, Unit) else value
            row = np.asarray(value).reshape(*outside.shape, -1)[outside][0].tolist()
            problems[name] = (
                f"in the support {base.support}, got {row if len(row) > 1 else row[0]}"
            )
    return problems
