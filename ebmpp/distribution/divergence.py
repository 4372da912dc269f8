# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Kullback-Leibler divergences of energy models, in NumPyro's registry."""

from typing import cast

from jaxtyping import Float
import numpyro.distributions as dist

from jax import Array
import jax.numpy as jnp

from ebmpp.distribution.energy_distribution import EnergyDistribution
from ebmpp.errors import ParameterError

Enumerable = EnergyDistribution | dist.Independent


@dist.kl_divergence.register(EnergyDistribution, EnergyDistribution)
@dist.kl_divergence.register(EnergyDistribution, dist.Independent)
@dist.kl_divergence.register(dist.Independent, EnergyDistribution)
def _divergence(p: Enumerable, q: Enumerable) -> Float[Array, "*batch"]:
    """Return KL(p || q) of energy models, or of one and independent units, summed over all joint values."""
    model = p if isinstance(p, EnergyDistribution) else cast(EnergyDistribution, q)
    if p.event_shape != q.event_shape or p.support != q.support:
        raise ParameterError(
            f"kl_divergence needs two distributions of the same values, got shapes {p.event_shape} and "
            f"{q.event_shape}, and supports {p.support} and {q.support}"
        )
    batch = (1,) * max(len(p.batch_shape), len(q.batch_shape))
    values = model.enumerate_support(expand=False)
    values = values.reshape(len(values), *batch, *model.event_shape)
    log_probs = lambda d: d.log_probs(values) if isinstance(d, EnergyDistribution) else d.log_prob(values)
    log_p, log_q = jnp.asarray(log_probs(p)), jnp.asarray(log_probs(q))
    return (jnp.exp(log_p) * jnp.where(log_p > -jnp.inf, log_p - log_q, 0.0)).sum(0)
