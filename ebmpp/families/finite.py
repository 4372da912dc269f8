# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units of finitely many values: what a list of these says, for families that do not say it themselves."""

from jaxtyping import Float, Real
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core.precision import full_precision

_MOST_STEPS = 200  # means a millionth from an end take about 20
_LENGTHS = 2.0 ** np.arange(3, -12, -1)  # of a step, tried beside the one that is safe
_IN_FLIGHT = 2**22  # numbers


#: Of each state of a unit.
Statistics = Float[Array, "values statistics"]
Numbers = Float[Array, "values"]


@full_precision
def mode(
    eta: Float[Array, "units statistics"],
    states: Real[Array, "values"],
    statistics: Statistics,
    log_base: Numbers,
) -> Real[Array, "units"]:
    """The most probable state, unit by unit; of equally probable ones the first."""
    return states[(eta @ statistics.T + log_base[None]).argmax(-1)]


def from_mean(
    mean: Float[Array, "units statistics"], statistics: Statistics, log_base: Numbers
) -> Float[Array, "units statistics"]:
    """The natural parameter at which the mean statistics are ``mean``, by damped Newton steps.

    They minimise A(eta) - <eta, mean>, which is convex. Along a step whose range over the states is r the
    third derivative is at most r times the second, so a length of log(1 + r) / r does not overshoot. Of a
    single statistic longer ones are tried, and the longest that does not is taken. Where natural parameters
    are not unique, as with one-hot statistics, one of them is found.

    :return: infinite for a mean at an end of a single statistic; nan where no natural
        parameter has this mean to the floats' precision, such as outside the hull of the statistics.

    **References**

    1. Sun, Tran-Dinh (2019), *Generalized self-concordant functions: a recipe for Newton-type methods*,
       section 4.
    """
    each = max(1, _IN_FLIGHT // (len(_LENGTHS) * statistics.size))
    found = lax.map(lambda m: _from_mean(m, statistics, log_base), mean, batch_size=each)
    if statistics.shape[1] > 1:
        return found
    found = jnp.where(mean == statistics.min(), -jnp.inf, found)
    return jnp.where(mean == statistics.max(), jnp.inf, found)


@full_precision
def _from_mean(
    mean: Float[Array, "statistics"], statistics: Statistics, log_base: Numbers
) -> Float[Array, "statistics"]:
    """Of one unit."""
    around = statistics - mean[None]  # before anything is summed, so that the tails keep their digits
    varies, largest = jnp.ptp(statistics, axis=0) > 0, jnp.abs(statistics).max(0)
    reach = lambda step: jnp.ptp(around @ step)
    probs_at = lambda eta: jax.nn.softmax(around @ eta + log_base)

    def fits(eta: Array, step: Array, tolerance: Array) -> Array:
        """Whether the mean at ``eta`` is right, relative to the terms that it is a sum of."""
        probs = probs_at(eta)
        off, size = jnp.abs(probs @ around), probs @ jnp.abs(around)
        # rounding may put a mean beside the plane that one-hot statistics lie in, which no step can mend
        beside = (off <= 8 * jnp.finfo(mean.dtype).eps * largest).all() & (reach(step) <= tolerance)
        return ((off <= tolerance * size).all() | beside) & ((size > 0) | ~varies).all()

    def newton(eta: Array) -> Array:
        probs = probs_at(eta)
        gradient = probs @ around
        centred = around - gradient[None]
        covariance = centred.T @ (probs[:, None] * centred)
        scale = jnp.sqrt(jnp.diagonal(covariance))
        scale = jnp.where(scale > 0, scale, 1.0)
        # of the correlations: a rare category's small variance is not that of a superfluous statistic
        inverse = jnp.linalg.pinv(covariance / jnp.outer(scale, scale), hermitian=True)
        return -(inverse @ (gradient / scale)) / scale

    def length(eta: Array, step: Array) -> Array:
        safe = jnp.log1p(reach(step)) / reach(step)
        if statistics.shape[1] > 1:  # a longer one may end where statistics are no longer told apart
            return safe
        along, lengths = around @ step, jnp.asarray(_LENGTHS, eta.dtype)
        slope_at = lambda length: probs_at(eta + length * step) @ along
        # slopes and not values, whose differences are lost in rounding where the mean is near an end
        short = jax.vmap(slope_at)(lengths) <= -0.1 * slope_at(0.0)
        return jnp.maximum(safe, jnp.where(short, lengths, 0.0).max())

    def go(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        eta, step, count = carry
        eta = eta + length(eta, step) * step
        return eta, newton(eta), count + 1

    fine = jnp.sqrt(jnp.finfo(mean.dtype).eps)
    goes_on = lambda c: ~fits(c[0], c[1], fine) & (reach(c[1]) > 0) & (c[2] < _MOST_STEPS)
    start = jnp.zeros_like(mean)
    eta, step, _ = lax.while_loop(goes_on, go, (start, newton(start), jnp.int32(0)))
    eta = eta + step  # quadratic from here: half the digits become all
    # a step beyond the hull, or to its boundary, stays as long as 1; what rounding leaves is short of this
    return jnp.where(fits(eta, newton(eta), jnp.sqrt(fine)), eta, jnp.nan)
