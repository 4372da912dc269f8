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

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

from jaxtyping import Bool, Float, Integer
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Blocks, Keys, Params, RowMask, Scalar, random
from ebmpp.errors import IntractableError
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.factors import pairwise
from ebmpp.moves.clusters import components, spin_scale
from ebmpp.moves.target import Target

_Chains = TypeVar("_Chains")


def couple_from_the_past(
    step: Callable[[Array, _Chains], _Chains],
    met: Callable[[_Chains], Bool[Array, "rows"]],
    start: _Chains,
    max_sweeps: int,
    is_worthwhile: Array | bool = True,
) -> _Chains:
    """Return the state at time 0 of runs from ``start``, until all rows have met.

    Runs take 1, 2, 4, ... sweeps. Rows that have met run again with the others, with
    the same result.

    :param step: one sweep at a given time before 0, with random words of that time, so
        that a longer run ends with the sweeps of the shorter one.
    :param is_worthwhile: False to skip the runs; may be traced.
    """

    def longer(length):
        return jnp.maximum(1, 2 * length)

    def is_running(carry):
        length, x = carry
        return is_worthwhile & ~met(x).all() & (longer(length) <= max_sweeps)

    def run(carry):
        length = longer(carry[0])
        x = lax.fori_loop(0, length, lambda i, x: step(length - i, x), start)
        return length, x

    # starts at length 0, where no row has met, so that the run is compiled once
    _, x = lax.while_loop(is_running, run, (jnp.int32(0), start))
    return x


def check_graph(
    graph: FactorGraph,
    method: str,
    expected: str,
    accepted: Collection[str],
    products: bool = False,
) -> None:
    """Refuse other blocks, and factors of more than two blocks or units of a block.

    :param accepted: blocks that the method takes.
    :param products: True if it takes increasing factors of more units of a block.
    """
    wide = [factor for factor in graph.factors if len(factor.blocks) > 2]
    for split in graph.splits.values():
        wide += [
            factor
            for factor in split.inner_factors
            if not factor.has_pair_weights
            and not (products and factor.is_increasing(graph.families))
        ]
    wrong = [
        f"block {b!r} ({family!r})"
        for b, family in graph.families.items()
        if b not in accepted
    ]
    wrong += [f"factor {factor.name!r} ({factor!r})" for factor in wide]
    if wrong:
        raise IntractableError(
            f"{method} takes {expected}, factors of one or two blocks, and "
            f"Pairwise factors inside a block, got {wrong[0]}."
        )


def slopes(
    graph: FactorGraph, params: Params, edges: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Float[Array, "..."]]:
    """Return the derivative of natural parameters in another block's statistics, by edge."""
    # constant in the state: the energy is affine in each unit and factors join two
    # blocks at most
    zero = energy.zero_statistics(graph, graph.families)
    return {(a, b): energy.slope(graph, a, b, params, zero) for a, b in edges}


def check_two_values(graph: FactorGraph) -> None:
    """Check that the units have two values and the factors join pairs."""
    method = "random-cluster sampling"
    accepted = {b for b, family in graph.families.items() if family.is_two_valued}
    check_graph(graph, method, "Bernoulli and Spin units", accepted)


def check_ferromagnetic(graph: FactorGraph, params: Params) -> None:
    """Check that interactions are not negative and fields have one sign."""
    for violation, holds in _conditions(graph, params).items():
        if not holds:
            raise IntractableError(
                f"{violation}, so the bonds are not monotone and cannot be coupled "
                "from the past. method='coupling_from_the_past' takes fields of both "
                "signs, and 'enumerate' a small model."
            )


def draw_by_bonds(
    target: Target, keys: Keys, max_sweeps: int
) -> tuple[Blocks, RowMask]:
    """Return perfect draws, and which rows are; see :func:`ebmpp.exact.perfect.draw_perfect`."""
    graph = target.graph
    rows = len(keys)
    bonds = _bonds(graph, target.params)
    size = graph.num_units
    num_bonds = len(bonds.ends)
    neighbours = pairwise.table(size + 1, bonds.ends)
    is_monotone = jnp.stack(list(bonds.conditions.values())).all()
    ends = jnp.asarray(bonds.ends)
    joined = -jnp.expm1(-bonds.gains)
    separate = joined / (2 - joined)

    def sweep(time, opened):
        """Redraw each bond given all others, in both chains by the same uniforms."""
        u = jnp.tile(random.uniforms(random.fold_in(keys, time), num_bonds).T, 2)

        def redraw(e, opened):
            without = opened.at[e].set(False)

            def are_joined(without):
                label = components(neighbours, without)
                return label[ends[e, 0]] == label[ends[e, 1]]

            # clusters matter only between the two probabilities: 1 in 10 at a gain of
            # 2, 1 in 30 at 3
            matters = ((u[e] >= separate[e]) & (u[e] < joined[e])).any()
            connected = lax.cond(
                matters, are_joined, lambda without: jnp.zeros(2 * rows, bool), without
            )
            probability = jnp.where(connected, joined[e], separate[e])
            return without.at[e].set(u[e] < probability)

        return lax.fori_loop(0, num_bonds, redraw, opened)

    def met(opened):
        return (opened[:, :rows] == opened[:, rows:]).all(0)

    # no bonds, and all
    start = jnp.broadcast_to(jnp.arange(2 * rows) >= rows, (num_bonds, 2 * rows))
    opened = couple_from_the_past(sweep, met, start, max_sweeps, is_monotone)
    label = components(neighbours, opened[:, :rows])
    # times before 0 begin at 1
    coin = random.uniforms(random.fold_in(keys, 0), size + 1).T < 0.5
    spin = jnp.where(jnp.take_along_axis(coin, label, 0), 1.0, -1.0)
    spin = jnp.where(label == label[size], bonds.up, spin)
    return _to_blocks(graph, spin[:size].T), met(opened) & is_monotone


class _Bonds(NamedTuple):
    ends: Integer[np.ndarray, "bonds 2"]
    """Pairs of units by number, inside blocks first; then fields, as pairs with the
    extra unit."""
    gains: Float[Array, "bonds"]
    """Gains in the log-density of units that agree."""
    up: Scalar
    """Sign of the fields."""
    conditions: Blocks
    """Conditions on the params, by the text of their violation."""


def _bonds(graph: FactorGraph, params: Params) -> _Bonds:
    start = graph.unit_offsets
    families = graph.families
    middle = {}
    half = {}
    for b, family in families.items():
        middle[b], half[b] = spin_scale(family)
    ends = [np.zeros((0, 2), np.int64)]
    gains = [jnp.zeros(0)]
    up = jnp.ones(())
    conditions = {"": jnp.bool_(True)}
    for b, split in graph.splits.items():
        for factor in split.inner_factors:
            weights = factor.pair_weights(params[factor.name])
            violation = f"factor {factor.name!r} has weights below 0"
            conditions[violation] = (weights >= 0).all()
            ends.append(factor.edges(families)[b] + start[b])
            gains.append(2 * half[b] ** 2 * weights)
    for (a, b), slope in slopes(graph, params, sorted(graph.edges)).items():
        violation = f"blocks {a!r} and {b!r} have interactions below 0"
        conditions[violation] = (slope >= 0).all()
        units = np.indices((families[a].size, families[b].size)).reshape(2, -1)
        ends.append((units + np.array([[start[a]], [start[b]]])).T)
        gains.append(2 * half[a] * half[b] * slope.reshape(-1))
    # no field is possible for spins without factors of single units
    is_alone = any(len(f.blocks) == 1 and not f.lateral for f in graph.factors)
    if is_alone or any(middle.values()):
        x = {b: jnp.full(family.shape, middle[b]) for b, family in families.items()}
        etas = {b: energy.natural(graph, params, x, [b])[b] for b in families}
        field = jnp.concatenate([half[b] * eta.ravel() for b, eta in etas.items()])
        up = jnp.where((field >= 0).all(), 1.0, -1.0)
        violation = (
            "the fields have both signs (those of units in {0, 1} are taken at 1/2)"
        )
        conditions[violation] = (up * field >= 0).all()
        numbers = np.arange(len(field))
        ends.append(np.stack([numbers, np.full_like(numbers, len(field))], 1))
        gains.append(2 * jnp.abs(field))
    return _Bonds(np.concatenate(ends), jnp.concatenate(gains), up, conditions)


@partial(jax.jit, static_argnums=0)
def _conditions(graph: FactorGraph, params: Params) -> Blocks:
    return _bonds(graph, params).conditions


def _to_blocks(graph: FactorGraph, spin: Float[Array, "rows units"]) -> Blocks:
    """Return units in -1 and 1 as values of the blocks."""
    x = {}
    start = graph.unit_offsets
    for b, family in graph.families.items():
        middle, half = spin_scale(family)
        units = spin[:, start[b] : start[b] + family.size].reshape(-1, *family.shape)
        x[b] = (middle + half * units).astype(family.dtype)
    return x
