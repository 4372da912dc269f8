# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A pilot run of NumPyro's chains, which tunes a composite before its pairs start.

Estimates from the pairs are unbiased given the pilot, as its chains are independent of
theirs.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple
import warnings

import numpy as np
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import MCMC, NUTS, Gibbs
from numpyro.infer.gibbs import (
    conditioned,
    latent_sample_sites,
    prototype_trace,
    with_conditioning,
)
from numpyro.infer.hmc_util import HMCAdaptState
from numpyro.infer.util import unconstrain_fn

import jax
from jax import Array
from jax.flatten_util import ravel_pytree

from ebmpp.core import SiteArrays, at_index, select
from ebmpp.distribution.tractability import base_of
from ebmpp.traced.block import Call, SiteValues
from ebmpp.traced.data import values_in
from ebmpp.traced.model_block import ModelKernel
from ebmpp.traced.start import Strategy
from ebmpp.traced.sweep.kinds import is_continuous

_NUM_CHAINS = 4
#: Acceptance that NumPyro's warm-up aims at. Coupled chains need shorter steps than one
#: chain: with the step size of 0.8, pairs of eight schools take 133 sweeps to meet, and
#: 17 with a third of it.
_TARGET_ACCEPTANCE = 0.95
#: Standard deviation of starts, in standard deviations of the pilot's chains.
_SPREAD = 2.0


class Tuning(NamedTuple):
    """Settings of Hamiltonian Monte Carlo."""

    step_size: float
    inverse_mass_matrix: np.ndarray


@dataclasses.dataclass(frozen=True)
class Starts:
    """Overdispersed starting values of a model's sites.

    A start is near one of the pilot's chains, at random, so that starts are in all
    modes that the pilot found: a Gaussian around the chain's mean in unconstrained
    space, with twice the standard deviation within the chains. Discrete sites are drawn
    from the model's prior given these.

    :param means: by continuous site, means of the pilot's chains in unconstrained
        space, ``(chains, *shape)``.
    :param scales: standard deviations within chains, ``(*shape,)``.
    """

    model: Callable
    means: SiteArrays
    scales: SiteArrays

    def draw(self, values: SiteValues, call: Call, key: Array) -> SiteArrays:
        """Draw values of all latent sites but those given."""
        chain_key, noise_key, model_key = jax.random.split(key, 3)
        chain = jax.random.randint(chain_key, (), 0, _NUM_CHAINS)
        flat, unravel = ravel_pytree(self.scales)
        center, _ = ravel_pytree(at_index(self.means, chain))
        noise = jax.random.normal(noise_key, flat.shape, flat.dtype)
        position = unravel(center + _SPREAD * flat * noise)

        def value_of(site):
            name = site["name"]
            if site["type"] == "sample" and name in position and name not in values:
                return biject_to(site["fn"].support)(position[name])
            return None

        model = handlers.substitute(self.model, data=dict(values))
        model = handlers.substitute(model, substitute_fn=value_of)
        model = handlers.seed(model, model_key)
        trace = handlers.trace(model).get_trace(*call.args, **call.kwargs)
        return values_in(trace, latent_sample_sites(trace))


def run_pilot(
    model: Callable,
    call: Call,
    block: ModelKernel | None,
    sites: Sequence[str],
    *,
    init_strategy: Strategy,
    rng_key: Array,
    num_warmup: int,
    num_samples: int,
    progress_bar: bool,
) -> tuple[Starts, Tuning | None]:
    """Run NumPyro's chains: the block, and NUTS for the other sites.

    :param sites: latent sites that NUTS moves.
    :return: starts, and the tuning of these sites, if there are any.
    """
    nuts = NUTS(
        model,
        target_accept_prob=_TARGET_ACCEPTANCE,
        init_strategy=init_strategy,
    )
    if block is None:
        kernel = nuts
    elif not sites:
        kernel = block
    else:
        kernel = Gibbs([(block, block.sites), (nuts, list(sites))])
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=_NUM_CHAINS,
        chain_method="vectorized" if block is None else "sequential",
        progress_bar=progress_bar,
    )
    args, kwargs = call.inputs
    with warnings.catch_warnings():
        # of the block's sites, which NUTS does not initialise
        warnings.filterwarnings("ignore", "init_to_uniform", UserWarning)
        mcmc.run(rng_key, *args, **kwargs)
    starts = _starts(model, call, mcmc.get_samples(group_by_chain=True))
    if not sites:
        return starts, None
    state = mcmc.last_state if block is None else mcmc.last_state.block_states[1]
    return starts, _tuning(state.adapt_state)


def _starts(model: Callable, call: Call, draws: SiteArrays) -> Starts:
    """Return starts around the draws, ``(chains, draws, *shape)`` by site."""
    trace = prototype_trace(model, jax.random.key(0), *call.inputs)
    latent = latent_sample_sites(trace)
    continuous = [name for name in latent if is_continuous(base_of(trace[name]["fn"]))]
    others = [name for name in latent if name not in continuous]
    args, kwargs = call.inputs

    @jax.jit
    def over_draws(draws):
        def of_draw(values):
            fixed = with_conditioning(kwargs, select(values, others))
            free = select(values, continuous)
            return unconstrain_fn(conditioned(model), args, fixed, free)

        return jax.vmap(jax.vmap(of_draw))(draws)

    points = over_draws(select(draws, latent))
    means = {}
    scales = {}
    for name, z in points.items():
        # draws on the edge of their support are infinite
        z = np.where(np.isfinite(z), z, np.nan)
        means[name] = np.nan_to_num(np.nanmean(z, 1))
        scales[name] = np.nan_to_num(np.nanstd(z, 1).mean(0), nan=1)
    return Starts(model, *jax.device_put((means, scales)))


def _tuning(adapted: HMCAdaptState) -> Tuning:
    """Return the mean covariance of the pilot's chains, and the smallest of their step sizes."""
    (matrices,) = adapted.inverse_mass_matrix.values()
    return Tuning(float(np.min(adapted.step_size)), np.mean(matrices, 0))
