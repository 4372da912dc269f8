# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draws of a model by one call: an independent chain per draw."""

import warnings

import numpy as np
from numpyro.infer import MCMC

from jax import Array

from ebmpp.core import Blocks, Params, State, StateLike, checks, omit
from ebmpp.errors import ArgumentError
from ebmpp.graph import FactorGraph, Observed
from ebmpp.kernels.gibbs import BlockedGibbs
from ebmpp.moves.sweeps import MovesLike

#: z-score of the change in log-density between the middle and the end of the chains
#: above which a warning is given.
_MAX_SCORE = 5.0


def sample(
    graph: FactorGraph,
    params: Params,
    num_samples: int = 1000,
    *,
    rng_key: Array,
    num_sweeps: int = 1000,
    init: State | None = None,
    moves: MovesLike = None,
    progress_bar: bool = True,
    **clamped: Array | Observed,
) -> Blocks:
    """Draw states of a model, each the last one of a Gibbs chain of its own.

    The draws are independent. Each has the distribution of a chain after
    ``num_sweeps`` sweeps, which nears the model's as far as chains mix. Where they do
    not, use ``moves``, :class:`~ebmpp.ParallelTempering` or
    :func:`~ebmpp.perfect_sample`, or measure by :func:`~ebmpp.unbiased_expectation`.

    :param num_samples: number of draws.
    :param rng_key: a jax key.
    :param num_sweeps: sweeps per draw, an even number.
    :param init: values of some or all free blocks at which chains start, with a leading
        axis of ``num_samples``; other blocks are drawn, uniformly without any.
    :param moves: moves of a sweep; see :class:`~ebmpp.BlockedGibbs`.
    :param clamped: clamped blocks, with or without leading axes; an
        :class:`~ebmpp.Observed` block is clamped at its known units.
    :return: the free blocks, ``(num_samples, *batch, *shape)`` each, where ``batch``
        are the leading axes of clamped blocks.
    :warns UserWarning: if the mean log-density still changes between the middle and the
        end of the chains, by five standard errors. Chains that stay in different modes
        are not recognised by this, and a single draw is not tested.
    :raises ArgumentError: for numbers out of range, or moves that do not fit.
    :raises ParameterError: for params that do not fit the graph.
    :raises StateError: for values that do not fit the graph, or if no block is free.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> params = rbm.init(jax.random.key(0))
    >>> draws = ebmpp.sample(rbm, params, 50, rng_key=jax.random.key(1), num_sweeps=10,
    ...                      progress_bar=False)
    >>> {block: values.shape for block, values in draws.items()}
    {'h': (50, 3), 'v': (50, 4)}
    """
    rng_key = checks.key("sample: rng_key", rng_key)
    checks.on_host("sample", rng_key, params, clamped)
    num_samples = checks.count("sample: num_samples", num_samples)
    num_sweeps = checks.count("sample: num_sweeps", num_sweeps, least=2)
    if num_sweeps % 2:
        raise ArgumentError(
            f"sample: num_sweeps must be even, got {num_sweeps}: the log-densities in "
            f"the middle and at the end are compared. Give {num_sweeps + 1}."
        )
    mcmc = MCMC(
        BlockedGibbs(graph, moves=moves),
        num_warmup=0,
        num_samples=num_sweeps,
        thinning=num_sweeps // 2,
        num_chains=num_samples,
        chain_method="vectorized",
        progress_bar=checks.flag("sample: progress_bar", progress_bar),
    )
    mcmc.run(rng_key, params, init_params=init, **clamped)
    draws = mcmc.get_samples(group_by_chain=True)
    middle = {block: values[:, 0] for block, values in draws.items()}
    last = {block: values[:, 1] for block, values in draws.items()}
    held = omit(clamped, draws)
    score = _change(graph, params, middle | held, last | held)
    if abs(score) > _MAX_SCORE:
        warnings.warn(
            f"sample: the mean log-density still changes after {num_sweeps // 2} "
            f"sweeps (z = {score:.1f}), so the draws are not of the model. Increase "
            "num_sweeps, or use other moves.",
            stacklevel=2,
        )
    return last


def _change(
    graph: FactorGraph,
    params: Params,
    before: StateLike,
    after: StateLike,
) -> float:
    """Return the z-score of the mean change of log-density; 0 where it is undefined."""
    change = graph.log_density(params, after) - graph.log_density(params, before)
    per_chain = np.asarray(change, float).reshape(len(change), -1).sum(1)
    error = per_chain.std() / np.sqrt(len(per_chain))
    return float(per_chain.mean() / error) if error > 0 else 0.0
