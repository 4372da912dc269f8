# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Description of pairs that did not meet, from another run of some of them."""

from functools import partial

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Chains, Key, Keys, Rows, compiled, random, sharding
from ebmpp.coupling.slots import Fresh, Window, start_rows
from ebmpp.graph import energy
from ebmpp.moves.move import Move, coupled_sweep, draw_sweep, one_chain, stack_chains
from ebmpp.moves.target import Target

_MOST_PAIRS = 8


def describe_unmet(
    target: Target,
    moves: tuple[Move, ...],
    x: Rows | Fresh,
    y: Rows | Fresh | None,
    key: Key,
    window: Window,
    met: np.ndarray,
) -> str:
    """Say in which blocks, and at which energies, the chains of unmet pairs end.

    The pairs run again, with the draws of
    :func:`~ebmpp.coupling.engine.run_pairs`, whose arguments these are.

    :return: the end of a sentence; empty where all have met, or there is no limit.
    """
    rows = np.flatnonzero(~met)[:_MOST_PAIRS]
    if not len(rows) or not window.max_sweeps:
        return ""

    def of_rows(a):
        return a[rows] if len(a) == len(met) else a

    x, y = jax.tree.map(of_rows, (x, y))
    target = target.take(rows)
    keys = random.fold_in(key, rows)
    limits = np.array([window.lag, window.max_sweeps], np.uint32)
    z = sharding.to_host(_ends(target, moves, x, y, keys, limits))
    names = [b for b, v in z.items() if (v[0] != v[1]).any()]
    text = f"; {len(rows)} of them end with other values of {names}"
    if target.graph is None:
        return text
    graph = target.model.graph
    chains = [target.coldest(one_chain(z, chain)) for chain in (0, 1)]
    energy_of = partial(energy.energy, graph, target.params)
    means = [jax.vmap(energy_of)(graph.statistics(x)).mean() for x in chains]
    return f"{text}, the two chains at mean energies {means[0]:.4g} and {means[1]:.4g}"


@compiled(statics=(1,), key=lambda target, *_: target.graph, unbounded=True)
def _ends(
    target: Target,
    moves: tuple[Move, ...],
    x: Rows | Fresh,
    y: Rows | Fresh | None,
    keys: Keys,
    limits: Array,
) -> Chains:
    """Return both chains of pairs when the leading ones have made ``limits[1]`` sweeps."""
    start = start_rows(x, target)
    follower = start if y is None else start_rows(y, target)
    lag, most = limits

    def lead(t, x):
        return draw_sweep(target, x, moves, random.fold_in(keys, t + 1))[0]

    def couple(t, z):
        return coupled_sweep(target, z, moves, random.fold_in(keys, t + 1))[0]

    leader = lax.fori_loop(jnp.uint32(0), lag, lead, start)
    return lax.fori_loop(lag, most, couple, stack_chains(leader, follower))
