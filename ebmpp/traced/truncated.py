# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Gaussians, and powers of Gammas, on an interval, drawn by rejection.

With t = x of a Gaussian, and :math:`t = k \log x` where :math:`x^k` is a Gamma, the
density of t is :math:`e^{a t - n B(t)}`, where B(t) is :math:`t^2 / 2` or :math:`e^t`.
It is log-concave.

With m the mode, which may be an end of the interval, and I the integral of
f(s) = p(m + s) / p(m), points (u, v) are uniform over u < 1 and \|v\| < c, and s = I v / u
is accepted if u^2 < f(s). A log-concave density has
:math:`f(s) \le \min(1, e^{1 - |s| / I})`, hence :math:`c = 2 e^{-1/2}`. A fifth of the
trials is accepted, wherever the interval is, as all is relative to the mode.

**References**

1. Devroye (1984), *A simple algorithm for generating random variates with a log-concave
   density*.
2. Kinderman, Monahan (1977), *Computer generation of random variables using the ratio of
   uniform deviates*.
"""

import math

import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import random
from ebmpp.traced.maximal import rounded

_BOUND = 2 * math.exp(-0.5) * 1.001  # of v, with room for rounding
# by which log integrals are right to 1e-5; to 3e-4 where a = 0 and n < 1e-10
_NODES, _WEIGHTS = np.stack(np.polynomial.legendre.leggauss(128)) / 2


#: By family: the derivative of B, and its inverse.
_LINKS = {"Gaussian": (jnp.positive, jnp.positive), "Gamma": (jnp.exp, jnp.log)}


class Truncated(dist.Distribution):
    """A Gaussian, or a Gamma raised to a power, on an interval; nan where improper.

    :param family: "Gaussian" or "Gamma".
    :param power: k, of which a Gaussian's is 1.
    :param params: a, n, and the ends of the interval.
    """

    arg_constraints = {}
    pytree_data_fields = ("a", "n", "bounds", "peak", "ends", "integral")
    pytree_aux_fields = ("family", "power")

    def __init__(self, family: str, power: int, *params: ArrayLike) -> None:
        self.family = family
        self.power = power
        self.a, self.n, *self.bounds = jnp.broadcast_arrays(*params)
        mean, link = _LINKS[family]
        ends = power * link(jnp.stack(self.bounds))
        low, high = ends = ends[:: np.sign(power)]
        inside = link(self.a / self.n)
        # nan of a Gamma's negative a, and of a constant density
        self.peak = jnp.clip(jnp.where(jnp.isnan(inside), low, inside), low, high)
        at_peak, variance = jax.jvp(mean, (self.peak,), (jnp.ones_like(low),))
        rate = abs(self.a - self.n * at_peak) + jnp.sqrt(self.n * variance)
        rate += 1 / (high - low)
        if family == "Gamma":  # flat up to there if a is near 0, such as for one point
            log_scale = jnp.log((abs(self.a) + 1) / abs(self.n))
            rise = jnp.minimum(1 / abs(self.a), self.peak - low)
            rate += 1 / (1 + rise + abs(log_scale - self.peak))
        self.ends = ends - self.peak[None]
        first, last = jnp.arctan(self.ends * rate[None])

        def density(node):
            """Return f times the derivative of s, at an arctangent of s."""
            tangent = jnp.tan((first + last) / 2 + (last - first) * node)
            return jnp.exp(self._gain(tangent / rate)) * (1 + tangent**2) / rate

        mean_density = jnp.tensordot(_WEIGHTS, jax.vmap(density)(_NODES), 1)
        integral = (last - first) * mean_density
        self.integral = jnp.where(integral > 0, integral, jnp.nan)
        super().__init__(rate.shape)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.interval(*self.bounds)

    def _gain(self, shift: Array) -> Array:
        """Return the log of f."""
        growth = shift * (self.peak + shift / 2)  # of B
        if self.family == "Gamma":
            growth = jnp.exp(self.peak) * jnp.expm1(shift)
        return self.a * shift - jnp.where(self.n == 0, 0, self.n * growth)

    def sample(self, key: Array | None, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.draw(random.key_pair(jnp.asarray(key)), sample_shape)

    def draw(self, words: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Return draws by the words of a key, ``(2,)``."""
        shape = self.shape(sample_shape)
        low, high = jnp.clip(self.ends / self.integral[None], -_BOUND, _BOUND)

        def trial(state):
            words, shift = state
            # with words of the next trial, as a hash takes some 25 ms to compile
            words, rest = jnp.split(random.words(words, 2 + 2 * shift.size), [2])
            u, v = random.uniform(rest).reshape(2, *shape)
            new = self.integral * (low + (high - low) * v) / u
            accepted = 2 * jnp.log(u) < self._gain(new)
            accepted &= new == jnp.clip(new, *self.ends)
            return words, jnp.where(jnp.isinf(shift) & accepted, new, shift)

        def is_pending(state):
            return jnp.isinf(state[1]).any()

        # pending, or nan without an integral
        shift = jnp.broadcast_to(jnp.inf + 0 * self.integral, shape)
        _, shift = lax.while_loop(is_pending, trial, (words, shift))
        mean, _ = _LINKS[self.family]
        x = mean((self.peak + shift) / self.power)
        if self.family == "Gamma":  # of small concentrations, which underflow
            x = rounded(x)
        return jnp.clip(x, *self.bounds)  # which rounding may pass

    def log_prob(self, value: ArrayLike, intermediates: object = None) -> Array:
        _, link = _LINKS[self.family]
        at, slope = jax.jvp(link, (value,), (jnp.ones_like(value),))
        log_slope = jnp.log(abs(self.power) * slope / self.integral)
        return log_slope + self._gain(self.power * at - self.peak)
