# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Real numbers with a Gaussian distribution, and a reflection coupling of two of them."""

import dataclasses
import math
from typing import Any

from jaxtyping import Float
import numpy as np
import numpyro.distributions as dist

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Natural, PerRow, PerUnit, UnitMask, Values, Words, checks, random
from ebmpp.families.family import Family, Reflection, as_float


@dataclasses.dataclass(frozen=True, repr=False)
class Gaussian(Family):
    """Real numbers with variance 1 or a learned variance.

    ``variance="unit"`` has the statistic x and eta is the mean. ``variance="learned"``
    has the statistics x and x^2 (last axis), and the natural parameter
    ``(mean / variance, -1 / (2 variance))``. A :func:`~ebmpp.Bilinear` factor couples
    x; the precision then comes from the block's bias.

    :param shape: shape of the block.
    :param variance: "unit" (the default: with discrete latents every value of the params
        has a normalisable density) or "learned" (for standardised columns: their variance
        is 1 in all, and given the latents must be less).
    :raises ArgumentError: for another ``variance``.
    """

    variance: str = "unit"

    num_words = num_couple_words = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("Gaussian: variance", self.variance, ("unit", "learned"))

    @property
    def learned(self) -> bool:
        """True if the variance is a parameter."""
        return self.variance == "learned"

    @property
    def domain(self) -> str:
        if self.learned:
            return "negative in its second entry (-1 / (2 variance))"
        return "any real number"

    @property
    def stat_shape(self) -> tuple[int, ...]:
        return (2,) if self.learned else ()

    @property
    def statistic_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        low = np.array([-math.inf, 0.0]) if self.learned else np.array(-math.inf)
        return low, np.full(self.stat_shape, math.inf)

    @property
    def interaction_shape(self) -> tuple[int, ...]:
        return self.shape

    def interaction(self, statistics: Natural) -> PerUnit:
        return statistics[..., 0] if self.learned else statistics

    def statistics(self, x: Values) -> Natural:
        x = as_float(x)
        return jnp.stack([x, x**2], axis=-1) if self.learned else x

    def log_base_measure(self, x: Values) -> PerUnit:
        """Return the log density of N(0, 1), or its constant with a learned variance."""
        x = as_float(x)
        return -0.5 * math.log(2 * math.pi) - (
            jnp.zeros_like(x) if self.learned else 0.5 * x**2
        )

    def moments(self, eta: Natural) -> tuple[PerUnit, PerUnit]:
        """Return mean and standard deviation of each unit."""
        if not self.learned:
            return eta, jnp.ones_like(eta)
        variance = -0.5 / eta[..., 1]
        return eta[..., 0] * variance, jnp.sqrt(variance)

    def log_normalizer(self, eta: Natural) -> PerUnit:
        if not self.learned:
            return 0.5 * eta**2
        slope = eta[..., 0]
        curve = eta[..., 1]
        return -(slope**2) / (4 * curve) - 0.5 * jnp.log(-2 * curve)

    def unit_log_ratio(
        self, eta: Natural, other: Natural, statistics: Natural
    ) -> PerUnit:
        # in distances from the means: eta * x and A are as large as (mean / sd)**2, and
        # would cancel
        if not self.learned:
            return (other - eta) * (statistics - 0.5 * (eta + other))
        x = statistics[..., 0]
        centre, _ = self.moments(eta)
        to, _ = self.moments(other)
        slope = other[..., 0] - eta[..., 0]
        curve = other[..., 1] - eta[..., 1]
        shift = (slope + 2 * centre * curve) * (x - 0.5 * (centre + to))
        return shift + curve * (x - centre) ** 2 + 0.5 * jnp.log1p(curve / eta[..., 1])

    def in_domain(self, eta: Natural) -> UnitMask:
        is_finite = jnp.isfinite(eta)
        if not self.learned:
            return is_finite
        return is_finite.all(-1) & (eta[..., 1] < 0)

    def default_eta(self) -> Natural:
        zero = super().default_eta()
        return zero.at[..., 1].set(-0.5) if self.learned else zero

    def unit_distribution(self, eta: Natural) -> dist.Distribution:
        return dist.Normal(*self.moments(eta))

    def from_mean(self, mean: Natural) -> Natural:
        """Return the natural parameter with these moments; numpy arrays keep their precision."""
        if not self.learned:
            return mean
        variance = mean[..., 1] - mean[..., 0] ** 2
        stack: Any = np.stack if isinstance(mean, np.ndarray) else jnp.stack
        return stack([mean[..., 0] / variance, -0.5 / variance], axis=-1)

    def mode(self, eta: Natural) -> PerUnit:
        return self.moments(eta)[0]

    def sample(self, words: Words, eta: Natural) -> PerUnit:
        centre, scale = self.moments(eta)
        return centre + scale * jax.scipy.special.ndtri(
            random.open_uniform(words[..., 0])
        )

    def reflect(
        self, words: Words, u: PerRow, eta: Natural, other: Natural
    ) -> Reflection:
        """Return a reflection-maximal pair of draws of the block; see :func:`reflected`."""
        centre, scale = self.moments(eta)
        to, to_scale = self.moments(other)
        noise = jax.scipy.special.ndtri(random.open_uniform(words[..., 0]))
        return reflected(noise, u, centre, scale, to, to_scale)


#: Rows of a block.
Units = Float[Array, "rows *shape"]


def reflected(
    z: Units, u: PerRow, centre: Units, scale: Units, to: Units, to_scale: Units
) -> Reflection:
    """Return two Gaussian draws per row from one noise, equal with the largest probability.

    With means a distance gap apart, y = x with probability min(1, N(z + gap) / N(z));
    otherwise the noise of y is reflected at the plane halfway. Rows with unequal scales
    get the same noise. The third result is True in rows where the draws are equal.

    Jacob, O'Leary, Atchade (2020), section 4.1, after Bou-Rabee, Eberle, Zimmer (2020).
    """
    axes = tuple(range(1, z.ndim))
    gap = (centre - to) / scale
    along, square = ((a * gap).sum(axes, keepdims=True) for a in (z, gap))
    ratio = -along - 0.5 * square
    mirrored = z - 2 * gap * (along / jnp.where(square > 0, square, 1.0))
    x = centre + scale * z
    equal_scales = (scale == to_scale).all(axes, keepdims=True)
    meets = equal_scales & (jnp.log(u).reshape(ratio.shape) <= ratio)
    return (
        x,
        jnp.where(meets, x, to + to_scale * jnp.where(equal_scales, mirrored, z)),
        meets.reshape(-1),
    )
