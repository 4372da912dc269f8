# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Sites of probabilities, whose conditional is a Dirichlet or Beta distribution.

Where a model's log density is a sum of log x of a site's rows on the simplex, the rows given everything else
are Dirichlet; where it is one of log x and log(1 - x), units are Beta. With L the log density, its
coefficients are :math:`x_k \partial L / \partial x_k` at any x. They are taken in the middle of the simplex,
and at the two ends of the interval, and so do not depend on the present value.
"""

from typing import Any, NamedTuple

from numpyro.distributions import Beta, Dirichlet, Distribution, constraints
from numpyro.distributions.distribution import validation_enabled

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.traced.block import Sites
from ebmpp.traced.dependence import run_guarded
from ebmpp.traced.model import Context, ModelInfo
from ebmpp.traced.sweep.continuous import ContinuousSite

_EDGE = 2.0**-20  # distance from the ends of the interval; 1 - x is exact there
_SCALE = 2.0**-24  # of the log density, so that counts / tiny, the slope of a clipped log 0, are finite


class Counts(NamedTuple):
    """The coefficients of the logarithms, and the present value."""

    x: Array
    counts: Array  # `(*rows, K)`, for a Beta `(*shape, 2)`


class Probabilities(ContinuousSite):
    """A site of probabilities with a Dirichlet or Beta conditional.

    :raises IntractableError: where the conditional is no such distribution.
    """

    def __init__(self, info: ModelInfo, name: str) -> None:
        with validation_enabled(False):  # values are inside of their supports, for which masks would stand
            super().__init__(info, name)
            if info.support(name) not in (constraints.simplex, constraints.unit_interval):
                self.posterior.check_bounds(name)

    def derivatives(self, values: Sites, context: Context) -> Counts:
        program, inputs = self.posterior.program, self.posterior.inputs(values, context)
        slot = program.sites[self.name]
        at = lambda x: _SCALE * run_guarded(program, {**inputs, slot: x}, program.output)
        slope = lambda x: jax.grad(at)(x) / _SCALE
        fill = lambda x: jnp.full(self.shape, x, program.dtypes[slot])
        if self.family == "Dirichlet":
            middle = 1 / self.shape[-1]
            return Counts(values[self.name], middle * slope(fill(middle)))
        low, high = _EDGE * jax.vmap(slope)(jnp.stack([fill(_EDGE), fill(1 - _EDGE)]))
        ratio = _EDGE / (1 - _EDGE)  # low is a - b ratio, and high is a ratio - b
        ones, zeros = low - ratio * high, ratio * low - high
        return Counts(values[self.name], jnp.stack([ones, zeros], -1) / (1 - ratio**2))

    def draw(self, at: Counts, keys: Array, beta: Array | float = 1.0) -> tuple[Array, Array]:
        concentration = beta * at.counts + 1
        drawn = jax.random.dirichlet(jax.random.wrap_key_data(keys), concentration)
        limits = jnp.finfo(drawn.dtype)
        # A draw that rounds to 0 or 1 becomes the nearest float inside, where log x is finite, as in NumPyro.
        drawn = jnp.clip(drawn, limits.tiny, 1 - limits.eps)
        valid = ((concentration > 0) & jnp.isfinite(drawn)).all(-1)
        is_beta = self.family == "Beta"
        new = jnp.where(valid, drawn[..., 0], at.x) if is_beta else jnp.where(valid[..., None], drawn, at.x)
        return new, (~valid).sum(dtype=jnp.int32)

    def distribution(self, at: Counts) -> Distribution:
        concentration = at.counts + 1
        if self.family == "Dirichlet":
            return Dirichlet(concentration, validate_args=False)  # rounding moves rows off the simplex
        return Beta(concentration[..., 0], concentration[..., 1])

    def invalid(self, at: Any) -> Array:
        return jnp.isnan(at.counts).reshape(len(at.x.ravel()), -1).any(-1)
