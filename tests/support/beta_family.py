# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A family, a factor and an estimator as another package would write them, with public
names only."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from jaxtyping import Float, Shaped
import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.special import betaln, digamma, polygamma

import ebmpp
from ebmpp import Factor, Family
from ebmpp.estimators import Batch, Estimate, Estimator

_NEWTON_STEPS = 30


@dataclasses.dataclass(frozen=True, repr=False)
class Beta(Family):
    """Numbers in (0, 1) with statistics log x and log(1 - x), so that eta is ``(a - 1, b - 1)``.

    :param shape: shape of the block.
    """

    stat_shape = (2,)
    support = constraints.open_interval(0.0, 1.0)
    bounds = (-math.inf, 0.0)
    domain = "above -1"

    def statistics(self, x: Any) -> Array:
        x = jnp.asarray(x, jnp.result_type(float))
        return jnp.stack([jnp.log(x), jnp.log1p(-x)], -1)

    def log_normalizer(self, eta: Array) -> Array:
        return betaln(eta[..., 0] + 1, eta[..., 1] + 1)

    def in_domain(self, eta: Array) -> Array:
        return (jnp.isfinite(eta) & (eta > -1)).all(-1)

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.Beta(eta[..., 0] + 1, eta[..., 1] + 1)

    def sample(self, words: Array, eta: Array) -> Array:
        # draws of small a or b round to 0 or 1
        floats = jnp.finfo(self.dtype)
        return super().sample(words, eta).clip(floats.tiny, 1 - floats.epsneg)

    def from_mean(self, mean: Array) -> Array:
        """Solve digamma(a) - digamma(a + b) = E log x, and likewise for b, by Newton's
        method in logarithms."""

        def step(_: int, log_shapes: Array) -> Array:
            shapes = jnp.exp(log_shapes)
            total = shapes.sum(-1, keepdims=True)
            error = digamma(shapes) - digamma(total) - mean
            curvature = polygamma(1, shapes)
            shared = polygamma(1, total)
            # Sherman-Morrison: the Hessian is diagonal less a constant
            scaled = error / curvature
            rest = 1 / shared - (1 / curvature).sum(-1, keepdims=True)
            newton = scaled + scaled.sum(-1, keepdims=True) / (rest * curvature)
            return log_shapes - jnp.clip(newton / shapes, -1, 1)

        start = jnp.zeros_like(jnp.asarray(mean, self.dtype))
        return jnp.exp(lax.fori_loop(0, _NEWTON_STEPS, step, start)) - 1

    def mode(self, eta: Array) -> Array:
        """Return the mode where a and b exceed 1, else the end with the larger density."""
        floats = jnp.finfo(self.dtype)
        inside = eta[..., 0] / eta.sum(-1)
        end = (eta[..., 0] > eta[..., 1]).astype(self.dtype)
        return jnp.where((eta > 0).all(-1), inside, end).clip(
            floats.tiny, 1 - floats.epsneg
        )


def _ring_energy(weight: Array, statistics: Array) -> Array:
    return -weight * (statistics * jnp.roll(statistics, -1)).sum()


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Ring(Factor):
    """``-w sum_i t_i t_(i+1)`` over the units of one block in a ring, with one weight.

    :param block: name of a block of one axis.
    :param size: number of its units, at least 3.
    """

    size: int

    always_affine = True
    is_pairwise = True

    def __init__(
        self, block: str, size: int, *, init: Any = 0.0, name: str | None = None
    ) -> None:
        pairs = [(i, (i + 1) % size) for i in range(size)]
        super().__init__(
            block, energy=_ring_energy, init=init, name=name, lateral={block: pairs}
        )
        object.__setattr__(self, "size", size)

    def default_name(self, blocks: tuple[str, ...]) -> str:
        return f"ring of {blocks[0]}"

    def pair_weights(self, params: Array) -> Array:
        return jnp.broadcast_to(params, self.size)

    def local(self, families: Mapping[str, Family], split: Any) -> "Sides":
        return Sides(split)


@dataclasses.dataclass(frozen=True, eq=False)
class Sides:
    """Natural parameters of some units of a ring from the two units beside each."""

    split: Any

    def prepare(self, params: Array) -> Array:
        return params

    def field(self, prepared: Array, statistics_at: Any, part: Any) -> Array:
        units = self.split.at(part)
        size = self.split.family.size
        return prepared * sum(statistics_at((units + k) % size) for k in (-1, 1))


@dataclasses.dataclass(frozen=True)
class PseudoLikelihood(Estimator):
    """Ascent of the pseudo-likelihood (Besag 1975) of a graph without latents."""

    def init_state(
        self,
        graph: ebmpp.FactorGraph,
        params: dict[str, Any],
        data: Mapping[str, Shaped[Array, "rows ..."]],
        batch: int,
        key: Any,
    ) -> tuple:
        return ()

    def estimate(
        self,
        graph: ebmpp.FactorGraph,
        params: dict[str, Any],
        state: tuple,
        batch: Batch,
        key: Any,
    ) -> Estimate:
        def value(params: dict[str, Any]) -> Float[Array, ""]:
            total = jnp.zeros(())
            for block, family in graph.visible.items():
                x = batch.rows[block]
                eta = graph.natural_parameters(params, dict(batch.rows), block)
                log_probs = family.unit_log_prob(eta, x).reshape(len(x), -1).sum(1)
                total += log_probs @ batch.weights
            return total

        result, ascent = jax.value_and_grad(value)(params)
        gradient = jax.tree.map(jnp.negative, ascent)
        return Estimate(gradient, state, {"pseudo_likelihood": result})
