# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Start-end test of pairs: resemblance of the leading chains' ends to their starts.

Two chains that start together may meet in the same one of many modes at once, so that
short meeting times hide a sampler that does not mix. A pair that has met by T claims
that X_T does not depend on X_0. If so, the end of a chain resembles its own start no
more than it resembles the start of another chain.
"""

from collections.abc import Mapping
import math
from typing import Any

import numpy as np
from scipy.spatial import distance

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Key,
    Keys,
    Rows,
    at_index,
    compiled,
    num_rows,
    random,
    sharding,
)
from ebmpp.coupling.slots import Fresh, start_rows
from ebmpp.moves.mixture import largest_weight
from ebmpp.moves.move import Move, draw_sweep, num_proposals
from ebmpp.moves.sweeps import mixture_of
from ebmpp.moves.target import Target

#: z-score above which pairs are reported. Sound runs gave -1.7 to 3.4, frozen chains 16
#: and more.
THRESHOLD = 5.0
# n chains have a z-score of at most n - 1
_MAX_CHAINS = 200
_LEAST_CHAINS = 7
# Units of all chains from which on it is no chance that all of them are where they
# started: as many fair coins are with probability 1e-6.
_LEAST_UNITS = 20
_LEAST_SWEEPS = 20  # of which half measure the acceptance


def overlap(first: Mapping[str, np.ndarray], last: Mapping[str, np.ndarray]) -> float:
    """Return the z-score of the overlap of starts and ends.

    Its null distribution permutes the ends between chains. The overlap of two states is
    the number of equal values of integer blocks, plus the inner product of real blocks
    with each unit scaled to variance 1. Permutations of the chains turn its total into
    the sum of a doubly centred matrix along a random permutation, whose mean and
    variance are known (Hoeffding 1951).

    :return: near a standard normal if ends do not depend on starts; inf if a block of
        20 or more units in all chains did not change; nan if all starts or all ends are
        equal, or for fewer than 7 chains.
    """
    chains = num_rows(first)
    for b, start in first.items():
        if start.size >= _LEAST_UNITS and np.array_equal(start, last[b]):
            return math.inf
    if chains < _LEAST_CHAINS:
        return math.nan
    counts = [b for b, v in first.items() if not np.issubdtype(v.dtype, np.floating)]
    real = [b for b in first if b not in counts]
    x = _standardized([first[b] for b in real], chains)
    y = _standardized([last[b] for b in real], chains)
    if counts or x.shape[1] > chains:
        total = _product(x.T, y.T) + sum(_equal(first[b], last[b]) for b in counts)
        trace = np.trace(total)
        square = (total**2).sum()
    else:  # the same numbers from smaller matrices
        trace = (x * y).sum()
        square = (_product(x, x) * _product(y, y)).sum()
    spread = math.sqrt(max(square, 0.0) / max(chains - 1, 1))
    return float(trace / spread) if spread > 1e-7 * chains else math.nan


def _standardized(blocks: list[np.ndarray], chains: int) -> np.ndarray:
    """Return all units of the blocks as columns of mean 0 and variance 1."""
    columns = [v.reshape(chains, -1) for v in blocks]
    units = np.concatenate([np.zeros((chains, 0)), *columns], axis=1)
    # a unit that is constant becomes 0, without rounding
    units = units - units[0]
    spread = np.maximum(units.std(0), np.finfo(float).tiny)
    return (units - units.mean(0)) / spread


def _product(x: np.ndarray, y: np.ndarray) -> Any:
    """Return ``x.T @ y`` from parts that OpenBLAS multiplies in one thread.

    On a busy machine its threads waited 16 ms for one another.
    """
    rows = max(1, 2**18 // (x.shape[1] * y.shape[1]))
    return sum(x[i : i + rows].T @ y[i : i + rows] for i in range(0, len(x), rows))


def _equal(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the number of equal values for each pair of chains, doubly centred."""
    share = distance.cdist(x.reshape(len(x), -1), y.reshape(len(y), -1), "hamming")
    total = -x[0].size * share
    return total - total.mean(0) - total.mean(1, keepdims=True) + total.mean()


def warning_of(who: str, z: float) -> str:
    """Return the warning for an overlap above :data:`THRESHOLD`."""
    if math.isinf(z):
        return (
            f"{who}: a block is where it started in all chains after twice the longest "
            "meeting time (overlap z = inf). Unless its units are nearly certain, no "
            "move changes them, and means are those of the start. Start from several "
            "states, with a sampler that leaves them: coupling=ebmpp.moves.tempered(...) "
            'or "mixture", or a joint move.'
        )
    return (
        f"{who}: chains still resemble their starts after twice the longest meeting "
        f"time (overlap z = {z:.1f}, limit {THRESHOLD:g}). Pairs that start together "
        "met in one of several modes, so meeting times are too short and means may be "
        "wrong. Pass independent_starts=True, which shows such modes, and a sampler "
        'that leaves them: coupling=ebmpp.moves.tempered(...) or "mixture", or a joint '
        "move."
    )


def run_leading_chains(
    target: Target,
    moves: tuple[Move, ...],
    x: Rows | Fresh,
    key: Key,
    longest: int,
    total_sweeps: float,
    compare: bool = True,
) -> tuple[float, float, float]:
    """Run up to 200 leading chains, and compare their ends with ``x``.

    They run for twice the longest meeting time, but make at most ten times
    ``total_sweeps``, the number of all pairs. Where that is too few (a few very late
    pairs), or pairs have clamped values of their own, nothing is compared. Chains whose
    moves read none of the blocks that they change are independent draws, and do not
    run.

    :param x: starts of the pairs.
    :param key: of the run of the pairs: chain j draws from ``fold_in(key, j)``.
    :param compare: False to measure the acceptance only.
    :return: z-score of :func:`overlap`, accepted proposals over all proposals of the
        second half, and the :func:`~ebmpp.moves.mixture.largest_weight` of the ends;
        nan where it was not measured.
    """
    num_pairs = len(jax.tree.leaves(x)[0])
    changed = {b for move in moves for b in move.blocks}
    chains = min(num_pairs, _MAX_CHAINS)
    proposals = num_proposals(moves)
    limit = int(10 * total_sweeps / chains)
    num_sweeps = 2 * longest
    reads = {b for move in moves for b in move.reads(target.graph)}
    compare &= target.num_rows == 1 and not reads.isdisjoint(changed)
    compare &= num_sweeps <= limit
    if proposals:
        num_sweeps = max(_LEAST_SWEEPS, min(num_sweeps, limit))
    elif not compare:
        return math.nan, math.nan, math.nan
    keys = random.fold_in(key, np.arange(chains))
    *states, accepted = sharding.to_host(
        _run(target, moves, x, keys, np.uint32(num_sweeps))
    )
    weight = math.nan
    if move := mixture_of(moves):
        weight = float(largest_weight(target, move, states[1], keys))
    keep = sharding.to_host(target.keep)

    def free_units(state):
        """Leave out units that are observed, which are where they started."""
        free = {b: v[:, ~keep[b][0]] if b in keep else v for b, v in state.items()}
        return {b: v for b, v in free.items() if b in changed and v.size}

    first, last = map(free_units, states)
    share = (
        float(accepted) / (chains * (num_sweeps - num_sweeps // 2) * proposals)
        if proposals
        else math.nan
    )
    return overlap(first, last) if compare else math.nan, share, weight


@compiled(statics=(1,), key=lambda target, *_: target.graph, unbounded=True)
def _run(
    target: Target,
    moves: tuple[Move, ...],
    x: Rows | Fresh,
    keys: Keys,
    num_sweeps: Array,
) -> tuple[Blocks, Blocks, Array]:
    """Return starts and ends of the first chains, and their number of accepted proposals.

    Proposals of the second half are counted.
    """
    target = target.take(np.arange(len(keys)))
    start = start_rows(at_index(x, slice(len(keys))), target)

    def sweep(t, carry):
        x, total = carry
        x, accepted = draw_sweep(target, x, moves, random.fold_in(keys, t + 1))
        late = jnp.where(t >= num_sweeps // 2, accepted.sum(), 0)
        return x, total + late.astype(total.dtype)

    zero = jnp.float32(0)
    return start, *lax.fori_loop(jnp.uint32(0), num_sweeps, sweep, (start, zero))
