# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Observed values that a model makes impossible, which most log densities do not show."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import numpy as np
from numpyro import handlers
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.distribution import Unit
from numpyro.infer.initialization import init_to_sample
from numpyro.primitives import Messenger

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import Numbers, SiteArrays
from ebmpp.distribution import EnergyDistribution
from ebmpp.distribution.tractability import base_of, parts_of, with_base
from ebmpp.traced.rows import all_in_row, is_staged

_ROUNDING = 1e-6  # of values at the edge of their support
#: Values in common supports.
_PROTOTYPES = (
    (constraints.boolean, 0),
    (constraints.real, 0.5),
    (constraints.positive, 0.5),
    (constraints.unit_interval, 0.5),
)
#: What NumPyro records of a site, and a trace of these by name.
Message = dict[str, Any]
Trace = OrderedDict[str, Message]


class Replaced(Distribution):
    """A distribution with another log density, a function of the value."""

    def __init__(
        self, base: Distribution, log_density: Callable[[ArrayLike], Array]
    ) -> None:
        self.base = base
        self.log_density = log_density
        super().__init__(base.batch_shape, base.event_shape, validate_args=False)

    @property
    def support(self) -> constraints.Constraint | None:
        return self.base.support

    def log_prob(self, value: ArrayLike, intermediates: object = None) -> Array:
        return self.log_density(value)


class ArrayData(Messenger):
    """A model with observed values as arrays of jax.

    NumPyro compares others with bounds by numpy.
    """

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["value"] = jnp.asarray(msg["value"])


def names_of(kind: str, trace: Trace) -> list[str]:
    """Return the names of the sites of a type."""
    return [name for name, site in trace.items() if site["type"] == kind]


def values_in(trace: Trace, names: Iterable[str]) -> dict[str, Array]:
    """Return the values of sites in a trace."""
    return {name: jnp.asarray(trace[name]["value"]) for name in names}


class Prototype(Messenger):
    """A model at any values of its latent sites.

    Values of common supports need no sampler, of which that of a gamma distribution
    takes a second to compile.
    """

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and not msg["is_observed"]:
            # numpyro.handlers.seed would split a key for each site
            msg["kwargs"]["rng_key"] = jax.random.key(0)
            msg["value"] = _prototype_value(msg)


def _prototype_value(site: Message) -> ArrayLike:
    support = element_of(site["fn"].support)
    shape = site["fn"].shape(site["kwargs"]["sample_shape"])
    if support == constraints.simplex:
        return jnp.asarray(np.full(shape, 1 / shape[-1]))
    for constraint, value in _PROTOTYPES:
        if support == constraint:
            return jnp.asarray(np.full(shape, value))
    return init_to_sample(site)


def are_valid(trace: Trace) -> bool:
    """Return True if all params of a trace's distributions are valid, by programs of NumPy.

    False for energies, which check their params themselves.
    """
    for site in trace.values():
        for part in parts_of(site["fn"]) if site["type"] == "sample" else ():
            if isinstance(part, EnergyDistribution):
                return False
            for name, constraint in getattr(part, "arg_constraints", {}).items():
                value = vars(part).get(name)  # None if it follows from others
                is_open = value is None or constraints.is_dependent(constraint)
                if not is_open and not np.all(constraint(np.asarray(value))):
                    return False
    return True


def with_deterministic(model: Callable, call: Any, values: SiteArrays) -> SiteArrays:
    """Return the values of all latent sites, and of the deterministic ones that follow."""
    args, kwargs = call.inputs
    model = handlers.substitute(handlers.seed(model, 0), data=values)
    trace = handlers.trace(model).get_trace(*args, **kwargs)
    return values | values_in(trace, names_of("deterministic", trace))


def element_of(support: Any) -> Any:
    """Return the constraint on one unit of a site."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def is_cut_off(value: object) -> TypeGuard[np.ndarray | np.integer]:
    """Return True for whole numbers that jax would wrap to others, as its dtype has fewer bits."""
    is_numpy = isinstance(value, np.ndarray | np.integer)
    if not is_numpy or value.dtype.kind not in "iu" or not value.size:
        return False
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(value.dtype))
    return bool(np.max(value) > limits.max or np.min(value) < limits.min)


def _outside(site: Message) -> Numbers:
    """Return a mask of the rows of an observed site that are outside of their closed support."""
    base = base_of(site["fn"])
    # NumPy compiles no program
    to_array: Any = jnp.asarray if is_staged() else np.asarray
    if isinstance(base, Unit):
        return ~(abs(to_array(base.log_factor)) < np.inf)
    value = to_array(site["value"])
    element = element_of(base.support)

    num_axes = value.ndim - base.event_dim
    is_finite = all_in_row(abs(value) < np.inf, num_axes)
    if isinstance(element, type(constraints.dependent)):
        return ~is_finite
    is_float = jnp.issubdtype(value.dtype, np.floating)
    if not is_float or element.is_discrete:
        return ~(is_finite & all_in_row(element(value), num_axes))
    if element.event_dim:  # rounding moves a simplex, or a matrix, out of its support
        return ~is_finite
    with np.errstate(invalid="ignore"):  # inf - inf
        margin = _ROUNDING * (1 + abs(value))
        is_inside = element(value + margin) | element(value - margin)
    return ~(is_finite & all_in_row(is_inside, num_axes))


def with_log_density(
    fn: Distribution, log_density: Callable[[ArrayLike], Array]
) -> Distribution:
    """Return a site's distribution with another log density of its rows."""
    return with_base(fn, Replaced(base_of(fn), log_density))


def sum_unmasked(site: Message, rows: Array) -> Array:
    """Return the sum of numbers for the unmasked rows of a site."""
    fn = with_log_density(site["fn"], lambda _: rows)
    return jnp.sum(fn.log_prob(site["value"]))


def count_impossible(site: Message) -> Array:
    """Return how many unmasked rows of an observed site are outside of their support."""
    return sum_unmasked(site, jnp.asarray(_outside(site), float))


def impossible_sites(trace: Trace) -> dict[str, str]:
    """Return the observed sites that hold impossible values, with the problem of each."""
    problems = {}
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        base = base_of(site["fn"])
        value = site["value"]
        if is_cut_off(value):
            problems[name] = f"of at most 32 bits, got {np.max(value)}"
            continue
        outside = _outside(site)
        if np.any(outside) and count_impossible(site) > 0:
            value = base.log_factor if isinstance(base, Unit) else value
            rows = np.asarray(value).reshape(*outside.shape, -1)
            row, *_ = rows[outside].tolist()
            values = row if len(row) > 1 else row[0]
            problems[name] = f"in the support {base.support}, got {values}"
    return problems
