# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draws of a model by one call: an independent chain per draw."""

from functools import partial
import warnings

from jaxtyping import Float
import numpy as np
from tqdm.auto import tqdm

import jax
from jax import Array, lax

from ebmpp.core import Blocks, Params, State, checks, compiled
from ebmpp.errors import ArgumentError
from ebmpp.graph import FactorGraph, Observed
from ebmpp.kernels.base import warn_acceptance
from ebmpp.kernels.gibbs import BlockedGibbs, GibbsState
from ebmpp.moves import Move, Target, search
from ebmpp.moves.sweeps import MovesLike

#: z-score of the change in log-density between the middle and the end of the chains
#: above which a warning is given.
_MAX_SCORE = 5.0
#: Parts of each half of the chains, after which the progress bar moves.
_PARTS = 10


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

    :param params: of one model; or with a leading axis of parameter sets, of several in
        one program. Set i then has the draws of a call with the key
        ``jax.random.fold_in(rng_key, i)``, up to rounding.
    :param num_samples: number of draws.
    :param rng_key: a jax key.
    :param num_sweeps: sweeps per draw, an even number.
    :param init: values of some or all free blocks at which chains start, with a leading
        axis of ``num_samples``, after that of the sets; other blocks are drawn,
        uniformly without any.
    :param moves: moves of a sweep; see :class:`~ebmpp.BlockedGibbs`.
    :param clamped: clamped blocks, with or without leading axes; an
        :class:`~ebmpp.Observed` block is clamped at its known units.
    :return: the free blocks, ``(num_samples, *batch, *shape)`` each, where ``batch``
        are the leading axes of clamped blocks; after an axis of sets, if there is one.
    :warns UserWarning: if the mean log-density still changes between the middle and the
        end of the chains, by five standard errors. Chains that stay in different modes
        are not recognised by this, and a single draw is not tested. From 100 sweeps
        on, also if chains accept less than 5 % of the proposals of ``moves``.
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
    checks.flag("sample: progress_bar", progress_bar)
    kernel = BlockedGibbs(graph, moves=moves)
    half = num_sweeps // 2
    target = kernel.target((params,), clamped, check=True)
    keys = target.set_keys(rng_key)
    split = partial(jax.random.split, num=num_samples)
    keys = jax.vmap(split)(keys) if target.sets else split(keys)
    state = kernel.init_sets(target, keys, init)
    values = []
    lengths = np.diff(np.linspace(0, half, _PARTS + 1, dtype=int))
    bar = tqdm(desc="sample", total=num_sweeps, unit="sweep", disable=not progress_bar)
    with bar:
        for _ in range(2):
            for length in lengths:
                state = _run(kernel.moves, target, state, length)
                bar.update(length)
            values.append(np.asarray(_log_densities(target, state.z), float))
    change = (values[1] - values[0]).sum(-1)
    error = change.std(-1) / np.sqrt(num_samples)
    warn_acceptance("sample", state, stacklevel=2)
    score = np.divide(change.mean(-1), error, out=np.zeros_like(error), where=error > 0)
    if (worst := abs(score).max()) > _MAX_SCORE:
        warnings.warn(
            f"sample: the mean log-density still changes after {half} sweeps (|z| = "
            f"{worst:.1f}), so the draws are not of the model. Increase num_sweeps, or "
            "use other moves.",
            stacklevel=2,
        )
    return state.z


@compiled(statics=1, key=lambda moves, target, *_: target.graph, unbounded=True)
def _run(
    moves: tuple[Move, ...] | None, target: Target, state: GibbsState, count: Array
) -> GibbsState:
    """Return the state after ``count`` sweeps of all chains of all parameter sets."""
    kernel = BlockedGibbs(target.graph, moves=moves)

    def at_set(target, state):
        return lax.fori_loop(0, count, lambda _, s: kernel.step(target, s), state)

    return target.over_sets(at_set, state)


@compiled
def _log_densities(target: Target, z: Blocks) -> Float[Array, "*sets chains rows"]:
    def at_set(target, z):
        rows = jax.vmap(target.to_rows)(z)
        return jax.vmap(partial(search.log_density, target))(rows)

    return target.over_sets(at_set, z)
