# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupling from the past: chains that start ever earlier, until all of them agree at time 0.

Also perfect draws of ferromagnets, by coupling the bonds of their random-cluster model.
Units of two values whose interactions all have one sign are drawn in two steps: bonds
between pairs, with a factor of two per cluster, then one value per cluster. Given all
other bonds, a bond is open with probability p if its ends are joined without it, and p
/ (2 - p) otherwise; p = 1 - exp(-gain) of the pair. The probability increases with the
other bonds, so chains from no bonds and from all bonds enclose all others. A field is a
bond to an additional unit, which is up. Where couplings are strong the bonds agree
after a few sweeps, while single units, which would have to cross from one phase to the
other, never do.

**References**

1. Fortuin, Kasteleyn (1972), *On the random-cluster model I*.
2. Propp, Wilson (1996), *Exact sampling with coupled Markov chains and applications to
   statistical mechanics*, section 4.2.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from jaxtyping import Bool, Float, Integer
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import Blocks, Keys, Params, RowMask, Scalar
from ebmpp.errors import IntractableError
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.factors import pairwise
from ebmpp.moves.clusters import components, spin_scale
from ebmpp.moves.target import Target

State = TypeVar("State")


def couple_from_the_past(
    step: Callable[[Array, State], State],
    met: Callable[[State], Bool[Array, "rows"]],
    start: State,
    max_sweeps: int,
    is_worthwhile: Any = True,
) -> State:
    """Return the state at time 0 of runs from ``start``, of 1, 2, 4, ... sweeps, until all rows have met.

    Rows that have met run again with the others, with the same result.

    :param step: one sweep at a given time before 0, with random words of that time, so
        that a longer run ends with the sweeps of the shorter one.
    :param is_worthwhile: False to skip the runs; may be traced.
    """

    def run(length):
        return jax.lax.fori_loop(0, length, lambda i, x: step(length - i, x), start)

    def longer(length):
        return jnp.maximum(1, 2 * length)

    def is_running(c):
        return is_worthwhile & ~met(c[1]).all() & (longer(c[0]) <= max_sweeps)

    def body(c):
        return (longer(c[0]), run(longer(c[0])))

    # starts at length 0, where no row has met, so that the run is compiled once
    return jax.lax.while_loop(is_running, body, (jnp.int32(0), start))[1]


def check_graph(
    graph: FactorGraph, method: str, expected: str, accepts: Callable[[str], bool]
) -> None:
    """Refuse other blocks, and factors that join more than two blocks, or more than two units of a block."""
    lateral = [
        factor for split in graph.splits.values() for factor in split.inner_factors
    ]
    wide = [factor for factor in graph.factors if len(factor.blocks) > 2]
    wide += [factor for factor in lateral if not factor.has_pair_weights]
    wrong = [
        f"block {b!r} ({family!r})"
        for b, family in graph.families.items()
        if not accepts(b)
    ]
    wrong += [f"factor {factor.name!r} ({factor!r})" for factor in wide]
    if wrong:
        raise IntractableError(
            f"{method} takes {expected} units, factors of one or two blocks, and "
            f"Pairwise factors inside a block, got {wrong[0]}."
        )


def slopes(
    graph: FactorGraph, params: Params, edges: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Float[Array, "..."]]:
    """Return the derivative of one block's natural parameters in another's statistics, for every edge."""
    zero = {
        b: jnp.zeros(f.statistic_shape, jnp.result_type(float))
        for b, f in graph.families.items()
    }

    def natural(a, b, t):
        return energy.natural(graph, params, zero | {b: t}, [a])[a]

    # constant in the state: the energy is affine in each unit and factors join two
    # blocks at most
    return {(a, b): jax.jacobian(partial(natural, a, b))(zero[b]) for a, b in edges}


def check_two_values(graph: FactorGraph) -> None:
    """Check that the units have two values and the factors join pairs."""

    def accepts(b):
        return graph.families[b].is_two_valued

    check_graph(graph, "random-cluster sampling", "Bernoulli and Spin", accepts)


def check_ferromagnetic(graph: FactorGraph, params: Any) -> None:
    """Check that interactions are not negative and fields have one sign."""
    for violation, holds in _conditions(graph, params).items():
        if not bool(holds):
            raise IntractableError(
                f"{violation}, so the bonds are not monotone and cannot be coupled "
                "from the past. method='coupling_from_the_past' takes fields of both "
                "signs, and 'enumerate' a small model."
            )


def draw(target: Target, keys: Keys, max_sweeps: int) -> tuple[Blocks, RowMask]:
    """Return perfect draws, and which rows are; see :func:`ebmpp.exact.perfect.draw_rows`."""
    graph = target.graph
    rows = len(keys)
    edges, gains, up, conditions = _bonds(graph, target.params)
    size = sum(f.size for f in graph.families.values())
    neighbours = pairwise.table(size + 1, edges)
    is_monotone = jnp.stack(list(conditions.values())).all()
    ends = jnp.asarray(edges)
    joined = -jnp.expm1(-gains)
    separate = joined / (2 - joined)

    def sweep(time: Array, opened: Array) -> Array:
        """Redraw each bond given all others, in both chains by the same uniforms."""
        u = jnp.tile(
            random.uniform(random.words(random.fold_in(keys, time), len(edges))).T, 2
        )

        def redraw(e: Array, opened: Array) -> Array:
            without = opened.at[e].set(False)

            def are_joined(without: Array) -> Array:
                label = components(neighbours, without)
                return label[ends[e, 0]] == label[ends[e, 1]]

            # clusters matter only between the two probabilities: 1 in 10 at a gain of
            # 2, 1 in 30 at 3
            matters = ((u[e] >= separate[e]) & (u[e] < joined[e])).any()
            connected = lax.cond(
                matters, are_joined, lambda without: jnp.zeros(2 * rows, bool), without
            )
            return without.at[e].set(
                u[e] < jnp.where(connected, joined[e], separate[e])
            )

        return lax.fori_loop(0, len(edges), redraw, opened)

    def met(opened):
        return (opened[:, :rows] == opened[:, rows:]).all(0)

    # no bonds, and all
    start = jnp.broadcast_to(jnp.arange(2 * rows) >= rows, (len(edges), 2 * rows))
    opened = couple_from_the_past(sweep, met, start, max_sweeps, is_monotone)
    label = components(neighbours, opened[:, :rows])
    words = random.words(random.fold_in(keys, 0), size + 1)  # times before 0 begin at 1
    coin = random.uniform(words).T < 0.5
    spin = jnp.where(jnp.take_along_axis(coin, label, 0), 1.0, -1.0)
    spin = jnp.where(label == label[size], up, spin)
    return _to_blocks(graph, spin[:size].T), met(opened) & is_monotone


def _bonds(
    graph: FactorGraph, params: Any
) -> tuple[Integer[np.ndarray, "bonds 2"], Float[Array, "bonds"], Scalar, Blocks]:
    """Return bonds, their gains, the sign of the fields, and conditions on the params.

    Bonds are pairs of units by number, inside blocks first; then fields, as pairs with
    the extra unit. Gains are in the log-density of units that agree. Conditions have
    the text of their violation as a key.
    """
    start = graph.unit_offsets
    pairs = [np.zeros((0, 2), np.int64)]
    gains = [jnp.zeros(0)]
    up = jnp.ones(())
    conditions = {"": jnp.bool_(True)}
    for block, split in graph.splits.items():
        for factor in split.inner_factors:
            weights = factor.pair_weights(params[factor.name])
            conditions[f"factor {factor.name!r} has weights below 0"] = (
                weights >= 0
            ).all()
            pairs.append(factor.edges(graph.families)[block] + start[block])
            gains.append(2 * spin_scale(split.family)[1] ** 2 * weights)
    for (a, b), slope in slopes(graph, params, sorted(graph.edges)).items():
        conditions[f"blocks {a!r} and {b!r} have interactions below 0"] = (
            slope >= 0
        ).all()
        ends = np.indices((graph.families[a].size, graph.families[b].size)).reshape(
            2, -1
        )
        pairs.append((ends + np.array([[start[a]], [start[b]]])).T)
        gains.append(
            2
            * spin_scale(graph.families[a])[1]
            * spin_scale(graph.families[b])[1]
            * slope.reshape(-1)
        )
    # no field is possible for spins without factors of single units
    is_alone = any(len(f.blocks) == 1 and not f.lateral for f in graph.factors)
    if is_alone or any(spin_scale(f)[0] != 0 for f in graph.families.values()):
        middle = {
            b: jnp.full(f.shape, spin_scale(f)[0]) for b, f in graph.families.items()
        }
        eta = {
            b: energy.natural(graph, params, middle, [b])[b].reshape(-1) for b in middle
        }
        field = jnp.concatenate(
            [spin_scale(f)[1] * eta[b] for b, f in graph.families.items()]
        )
        up = jnp.where((field >= 0).all(), 1.0, -1.0)
        one_sign = (up * field >= 0).all()
        conditions[
            "the fields have both signs (those of units in {0, 1} are taken at 1/2)"
        ] = one_sign
        pairs.append(
            np.stack([np.arange(len(field)), np.full(len(field), len(field))], 1)
        )
        gains.append(2 * jnp.abs(field))
    return np.concatenate(pairs), jnp.concatenate(gains), up, conditions


_conditions = jax.jit(lambda graph, params: _bonds(graph, params)[3], static_argnums=0)


def _to_blocks(graph: FactorGraph, spin: Float[Array, "rows units"]) -> Blocks:
    """Return units in -1 and 1 as values of the blocks."""
    x = {}
    start = graph.unit_offsets
    for b, family in graph.families.items():
        middle, half = spin_scale(family)
        units = spin[:, start[b] : start[b] + family.size].reshape(-1, *family.shape)
        x[b] = (middle + half * units).astype(family.dtype)
    return x
