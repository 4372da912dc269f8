# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random declarations of every family and kind of factor, and params for them."""

from collections.abc import Mapping
import dataclasses
import itertools
import math
from typing import Any

from hypothesis import strategies as st
import numpy as np
from oracle import unit_values
from own_families import Ordinal, Ternary

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Categorical, Factor, FactorGraph, Family, Gaussian
from ebmpp.graph import Linear

_MOST_STATES = 6000

FINITE = {
    "bernoulli": Bernoulli,
    "spin": ebmpp.Spin,
    "categorical": lambda n: Categorical(n, 3),
    "binomial": lambda n: ebmpp.Binomial(n, 2),
    "ternary": Ternary,
    "ordinal": Ordinal,
}
UNBOUNDED = {
    "poisson": lambda n: ebmpp.Poisson(1),  # a second unit has too many states
    "exponential": ebmpp.Exponential,
    "gaussian": Gaussian,
    "learned": lambda n: Gaussian(n, "learned"),
}


@dataclasses.dataclass(frozen=True)
class Spread:
    """The forward map of a :class:`Linear`: the sum of a block, each of its units, and a constant."""

    shape: tuple[int, ...]

    def __call__(self, w: jax.Array, t: jax.Array) -> jax.Array:
        return w[0] * t.sum() + w[1] * jnp.resize(t, self.shape) + w[2]


def gate(w: jax.Array, *statistics: jax.Array) -> jax.Array:
    """Return a third-order energy."""
    return -jnp.einsum("ijk,i,j,k", w, *(t.ravel() for t in statistics))


def first_two(w: jax.Array, t: jax.Array) -> jax.Array:
    """Return the energy of the first two units."""
    return -w * jnp.vdot(t[0], t[1])


@st.composite
def declarations(draw: st.DrawFn) -> FactorGraph:
    """Draw two to four blocks; unbounded ones interact with finite ones, Gaussian ones with each other."""
    names = "abcd"[: draw(st.integers(2, 4))]
    blocks: dict[str, Family] = {}
    for b in names:
        kinds = FINITE if sum(f.states() is None for f in blocks.values()) == 2 else FINITE | UNBOUNDED
        blocks[b] = kinds[draw(st.sampled_from(sorted(kinds)))](draw(st.sampled_from([2, 1, 3])))
    while math.prod(len(unit_values(f)) ** f.size for f in blocks.values() if unit_values(f)) > _MOST_STATES:
        listed = [b for b in blocks if unit_values(blocks[b])]
        largest = max(listed, key=lambda b: blocks[b].size * len(unit_values(blocks[b])))
        blocks[largest] = Bernoulli(blocks[largest].size if blocks[largest].size < 3 else 2)
    factors: list[Factor] = [Bias(b, shared=(0,) if draw(st.booleans()) else ()) for b in names]
    joined = draw(st.sets(st.sampled_from(list(itertools.combinations(names, 2))), min_size=1))
    factors += [_joint(draw, blocks, *edge) for edge in sorted(joined) if _may_meet(blocks, *edge)]
    third = [c for c in itertools.combinations(names, 3) if all(_is_tame(blocks[b]) for b in c)]
    if third and draw(st.booleans()):
        scope = draw(st.sampled_from(third))
        if sum(blocks[b].states() is None for b in scope) < 2:
            init = np.zeros(tuple(math.prod(blocks[b].statistic_shape) for b in scope))
            factors.append(Factor(*scope, energy=gate, init=init))
    wide = [b for b in names if blocks[b].size > 1 and _is_tame(blocks[b])]
    if wide and draw(st.booleans()):
        factors.append(_lateral(draw, blocks, draw(st.sampled_from(wide))))
    return FactorGraph({"a": blocks["a"]}, {b: f for b, f in blocks.items() if b != "a"}, factors)


def _is_tame(family: Family) -> bool:
    """Return True if every natural parameter is legal."""
    return family.states() is not None or family == Gaussian(family.size)


def _may_meet(blocks: Mapping[str, Family], a: str, b: str) -> bool:
    unbounded = [blocks[n] for n in (a, b) if blocks[n].states() is None]
    return len(unbounded) < 2 or all(isinstance(f, Gaussian) for f in unbounded)


def _joint(draw: st.DrawFn, blocks: Mapping[str, Family], a: str, b: str) -> Factor:
    kind = draw(st.sampled_from(["bilinear", "linear", "convolution"]))
    if kind == "convolution" and blocks[a].size != blocks[b].size + 1:
        a, b = b, a
    if kind == "convolution" and blocks[a].size == blocks[b].size + 1:
        return ebmpp.Convolution(a, b, window=(2,))
    if kind == "linear":
        return Linear(a, b, forward=Spread(blocks[b].interaction_shape), shape=(3,))
    return ebmpp.Bilinear(a, b)


def _lateral(draw: st.DrawFn, blocks: Mapping[str, Family], block: str) -> Factor:
    if draw(st.booleans()):
        return Factor(block, energy=first_two, init=np.zeros(()), lateral={block: [(0, 1)]}, name="lateral")
    pairs = list(itertools.pairwise(range(blocks[block].size)))
    return ebmpp.Pairwise(block, pairs, shared=draw(st.booleans()), name="lateral")


def _reach(family: Family) -> float:
    """Return the largest sum of all units' statistics, where it is bounded, else 1."""
    states = family.states()
    t = np.zeros(1) if states is None else np.abs(np.asarray(family.statistics(states)))
    return max(1.0, family.size * float(t.reshape(len(t), -1).max(0).sum()))


def params_of(graph: FactorGraph, seed: int) -> dict[str, Any]:
    """Return random params, inside every domain."""
    generator = np.random.default_rng(seed)
    params = graph.init(jax.random.key(0), scheme={"weight": "zero", "bias": "zero"})
    for factor in graph.factors:
        families = [graph.families[b] for b in factor.blocks]
        held = not all(map(_is_tame, families)) or sum(f.states() is None for f in families) > 1
        # three such factors must leave an ebmpp.Exponential unit's natural parameter, at most -0.7, below 0
        joint = min(0.06, 0.2 / max(map(_reach, families)))
        scale = joint if held and factor.role != "bias" else 0.3 if held or factor.lateral else 0.5
        noise = lambda a, s=scale: s * np.clip(generator.normal(size=np.shape(a)), -1, 1)
        params[factor.name] = jax.tree.map(
            lambda a, n=noise: jnp.asarray(a + n(a), jnp.float32), params[factor.name]
        )
    return params
