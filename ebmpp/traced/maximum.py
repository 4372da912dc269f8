# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""The values of a model's continuous sites of the largest density, and their standard errors.

With u the unconstrained values, x(u) the natural ones and H minus the Hessian of the
log density in u at its maximum, the covariance of x is approximately
:math:`J H^{-1} J^\top` with J the derivative of x in u. The density is that of x, so
the mode does not depend on the map.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import constrain_fn
from scipy.optimize import minimize

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import SiteArrays, checks
from ebmpp.traced.block import Call, SiteValues
from ebmpp.traced.model import ModelInfo

_RADIUS = 2.0  # of starts on the unconstrained scale, as NUTS's
_NEWTON_STEPS = 6  # from where float32 ends the search by gradients
_TOLERANCE = 1e-3  # of the log density that a further step would gain
_FLAT = 1e-5  # curvature relative to the largest that rounding would hide
_WORST = 1e30  # in place of an infinite loss
_WIDTH = 0.1  # of a standard error, over which slopes are compared
_WIDTH_STEPS = 3
_SHARE = 1e-3  # of a value, by which it may change along a flat axis


class Maximum(NamedTuple):
    """The result of :meth:`~ebmpp.ppl.ModelBlock.maximise`."""

    values: SiteArrays
    """By site, its natural value."""
    log_density: Array
    """The maximum: of the log likelihood, or of the log density with priors."""
    standard_error: SiteArrays
    """By site; nan where the density is flat, as at the border of a support."""
    converged: bool
    """True at a local maximum, where a further step of Newton's method would gain less
    than 0.001."""


def maximise(
    info: ModelInfo,
    log_density: Callable[..., Array],
    call: Call,
    fixed: SiteValues,
    keys: Array,
) -> Maximum:
    """Return the best of the maxima that are found from one start for each key.

    :param log_density: ``fn(values, *model_args, **model_kwargs)`` of natural values of
        all sites but the ``fixed`` ones.
    """
    others = [name for name in info.latent if name not in fixed]
    discrete = [name for name in others if info.distributions[name].is_discrete]
    if discrete:
        raise checks.state_error(
            "maximise: discrete sites", "among the block's", discrete
        )
    model = handlers.substitute(handlers.seed(info.model, 0), data=dict(fixed))

    def start(number, key):
        """Return a draw from the prior, or within a radius on the unconstrained scale."""
        trace = info.trace(fixed, info.arguments.take(call, set()), key)
        flat, unravel = ravel_pytree(
            {
                name: biject_to(trace[name]["fn"].support).inv(trace[name]["value"])
                for name in others
            }
        )
        spread = jax.random.uniform(key, flat.shape, minval=-_RADIUS, maxval=_RADIUS)
        return flat if number % 2 else spread, unravel

    def natural(u):
        return constrain_fn(model, *call.inputs, unravel(u))

    @jax.jit
    def loss(u):
        args, kwargs = call.inputs
        return jax.value_and_grad(lambda u: -log_density(natural(u), *args, **kwargs))(
            u
        )

    def on_host(u):
        value, slope = jax.device_get(loss(u))
        return (value, slope) if np.isfinite(value) else (_WORST, 0 * u)

    def hessian(u):
        """Return differences of slopes over a tenth of a standard error.

        Second derivatives by autodiff are nan at clipped probabilities of 0.
        """
        widths = np.full(len(u), _WIDTH)
        for _ in range(_WIDTH_STEPS):
            steps = np.diag(widths)
            rows = [loss(u + step)[1] - loss(u - step)[1] for step in steps]
            result = np.stack(rows) / (2 * widths[:, None])
            widths = _WIDTH / np.sqrt(np.abs(np.diag(result)).clip(1))
        return (result + result.T) / 2

    def newton(u):
        """Return the next point, what it gains, and axes scaled to a curvature of 1."""
        curvature, axes = np.linalg.eigh(hessian(u))
        is_flat = curvature < _FLAT * curvature.max()
        scaled = axes / np.sqrt(np.where(is_flat, 1, curvature))
        along = loss(u)[1] @ scaled
        # towards a maximum at infinity, such as a probability of 0, a slope is the gain
        step = scaled @ np.where(is_flat, _RADIUS * np.sign(along), along)
        gain = np.where(is_flat, abs(along), along**2 / 2).sum()
        return u - step, gain, scaled, is_flat

    starts = [start(number, key) for number, key in enumerate(keys)]
    _, unravel = starts[0]
    ends = [minimize(on_host, u, jac=True, method="L-BFGS-B") for u, _ in starts]
    u = jnp.asarray(min(ends, key=lambda end: end.fun).x, float)
    for _ in range(_NEWTON_STEPS):
        moved, *_ = newton(u)
        u = jnp.where(loss(moved)[0] < loss(u)[0], moved, u)
    _, gain, scaled, is_flat = newton(u)
    values, to_sites = ravel_pytree(natural(u))
    loads = jax.jacfwd(lambda u: ravel_pytree(natural(u))[0])(u) @ scaled
    is_lost = is_flat & (abs(loads) > _SHARE * abs(values)[:, None])
    error = jnp.linalg.norm(jnp.where(is_flat, 0, loads), axis=-1)
    error = jnp.where(is_lost.any(-1), jnp.nan, error)
    is_maximum = bool(gain < _TOLERANCE)
    return Maximum(to_sites(values), -loss(u)[0], to_sites(error), is_maximum)
