# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random declarations of every family and kind of factor, and what they are, computed in float64 another way.

Every factor is a tensor of coefficients of products of statistics. Units of finitely many values are
enumerated, and counts up to 29 (rates are below 6: what is beyond weighs less than 1e-11); Exponential units
are integrated in closed form, and Gaussian ones jointly.
"""

from collections.abc import Callable, Mapping
import dataclasses
import itertools
import math
from typing import Any

from hypothesis import strategies as st
import numpy as np
from own_families import Ordinal, Ternary
from scipy.special import gammaln

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Binomial,
    Categorical,
    Convolution,
    Exponential,
    Factor,
    FactorGraph,
    Family,
    Gaussian,
    Pairwise,
    Poisson,
    Spin,
)
from ebmpp.graph import Linear
from helpers import numpy_statistics

COUNTS = 30
_MOST_STATES = 6000

# -- declarations ----------------------------------------------------------------------------------

FINITE = {
    "bernoulli": Bernoulli,
    "spin": Spin,
    "categorical": lambda n: Categorical(n, 3),
    "binomial": lambda n: Binomial(n, 2),
    "ternary": Ternary,
    "ordinal": Ordinal,
}
UNBOUNDED = {
    "poisson": lambda n: Poisson(1),  # a second unit has too many states
    "exponential": Exponential,
    "gaussian": Gaussian,
    "learned": lambda n: Gaussian(n, "learned"),
}


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of a :class:`Linear`: the sum of one block on all of the other, unit by unit, and a constant."""

    shape: tuple[int, ...]

    def __call__(self, w: jax.Array, t: jax.Array) -> jax.Array:
        return w[0] * t.sum() + w[1] * jnp.resize(t, self.shape) + w[2]


def gate(w: jax.Array, *statistics: jax.Array) -> jax.Array:
    """Third order."""
    return -jnp.einsum("ijk,i,j,k", w, *(t.ravel() for t in statistics))


def first_two(w: jax.Array, t: jax.Array) -> jax.Array:
    """The first two units interact."""
    return -w * jnp.vdot(t[0], t[1])


@st.composite
def declarations(draw: st.DrawFn) -> FactorGraph:
    """Two to four blocks; those of unbounded statistics meet finite ones, and Gaussian ones each other."""
    names = "abcd"[: draw(st.integers(2, 4))]
    blocks: dict[str, Family] = {}
    for b in names:
        kinds = FINITE if sum(f.states() is None for f in blocks.values()) == 2 else FINITE | UNBOUNDED
        blocks[b] = kinds[draw(st.sampled_from(sorted(kinds)))](draw(st.sampled_from([2, 1, 3])))
    while math.prod(len(values(f)) ** f.size for f in blocks.values() if values(f)) > _MOST_STATES:
        listed = [b for b in blocks if values(blocks[b])]
        largest = max(listed, key=lambda b: blocks[b].size * len(values(blocks[b])))
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
    """Whether anything may happen to its natural parameter."""
    return family.states() is not None or family == Gaussian(family.size)


def _may_meet(blocks: Mapping[str, Family], a: str, b: str) -> bool:
    unbounded = [blocks[n] for n in (a, b) if blocks[n].states() is None]
    return len(unbounded) < 2 or all(isinstance(f, Gaussian) for f in unbounded)


def _joint(draw: st.DrawFn, blocks: Mapping[str, Family], a: str, b: str) -> Factor:
    kind = draw(st.sampled_from(["bilinear", "linear", "convolution"]))
    if kind == "convolution" and blocks[a].size != blocks[b].size + 1:
        a, b = b, a
    if kind == "convolution" and blocks[a].size == blocks[b].size + 1:
        return Convolution(a, b, window=(2,))
    if kind == "linear":
        return Linear(a, b, forward=Spread(blocks[b].interaction_shape), shape=(3,))
    return Bilinear(a, b)


def _lateral(draw: st.DrawFn, blocks: Mapping[str, Family], block: str) -> Factor:
    if draw(st.booleans()):
        return Factor(block, energy=first_two, init=np.zeros(()), lateral={block: [(0, 1)]}, name="lateral")
    pairs = list(itertools.pairwise(range(blocks[block].size)))
    return Pairwise(block, pairs, shared=draw(st.booleans()), name="lateral")


def _reach(family: Family) -> float:
    """How large the statistics of all its units can be together, where that is bounded."""
    states = family.states()
    each = np.zeros(1) if states is None else np.abs(np.asarray(family.statistics(states)))
    return max(1.0, family.size * float(each.reshape(len(each), -1).max(0).sum()))


def params_of(graph: FactorGraph, seed: int) -> dict[str, Any]:
    """Random params, inside every domain."""
    generator = np.random.default_rng(seed)
    made = graph.init(jax.random.key(0), scheme={"weight": "zero", "bias": "zero"})
    for factor in graph.factors:
        families = [graph.families[b] for b in factor.blocks]
        held = not all(map(_is_tame, families)) or sum(f.states() is None for f in families) > 1
        # three such factors must leave an Exponential unit's natural parameter, at most -0.7, below 0
        joint = min(0.06, 0.2 / max(map(_reach, families)))
        scale = joint if held and factor.role != "bias" else 0.3 if held or factor.lateral else 0.5
        noise = lambda a, s=scale: s * np.clip(generator.normal(size=np.shape(a)), -1, 1)
        made[factor.name] = jax.tree.map(
            lambda a, n=noise: jnp.asarray(a + n(a), jnp.float32), made[factor.name]
        )
    return made


# -- the same in float64 ---------------------------------------------------------------------------


def values(family: Family) -> list[float] | None:
    """A unit's values; None for reals."""
    if isinstance(family, Gaussian | Exponential):
        return None
    known = {Bernoulli: [0, 1], Spin: [-1, 1], Ternary: [0, 1, 2], Ordinal: [0, 1, 2, 3]}
    if type(family) in known:
        return known[type(family)]
    count = (
        family.num_categories if isinstance(family, Categorical) else getattr(family, "total_count", -1) + 1
    )
    return list(range(count or COUNTS))


def statistics_of(family: Family, x: np.ndarray, interacting: bool = False) -> np.ndarray:
    """Shape ``(rows, statistics)``."""
    t = np.stack([x, x * x], -1) if isinstance(family, Ordinal) else numpy_statistics(family, x)
    if interacting and isinstance(family, Gaussian) and family.learned:
        t = t[..., 0]
    return t.reshape(len(x), -1).astype(float)


def log_base(family: Family, x: np.ndarray) -> np.ndarray:
    """Of each row, shape ``(rows,)``."""
    x = x.reshape(len(x), -1)
    if isinstance(family, Binomial):
        n = family.total_count
        return (gammaln(n + 1) - gammaln(x + 1) - gammaln(n - x + 1)).sum(1)
    if isinstance(family, Gaussian):
        return (-0.5 * math.log(2 * math.pi) - (family.variance == "unit") * 0.5 * x**2).sum(1)
    return {Ordinal: -0.2 * x, Poisson: -gammaln(x + 1)}.get(type(family), 0 * x).sum(1)


def _coefficients(factor: Factor, w: np.ndarray, families: list[Family]) -> np.ndarray:
    """What minus the energy is in the products of (interacting) statistics, one axis a block."""
    sizes = [math.prod(f.interaction_shape) for f in families]
    if isinstance(factor, Convolution):
        (n, m), (to, of, reach) = (f.size for f in families), w.shape
        made = np.zeros((n, of, m, to))
        for i, k, c, d in np.ndindex(m, reach, of, to):
            made[i + k, c, i, d] += w[d, c, k]
        return made.reshape(sizes)
    if isinstance(factor, Linear):
        i, j = np.indices(sizes)
        return w[0] + w[1] * (i == j % sizes[0])
    if factor.lateral:
        each, (block,) = sizes[0] // families[0].size, factor.blocks
        edges = factor.edges({block: families[0]})[block]
        made = np.zeros((families[0].size, each, families[0].size, each))
        for (i, j), weight in zip(edges, np.broadcast_to(w, len(edges)), strict=True):
            made[i, range(each), j, range(each)] += weight
        return made.reshape(sizes * 2)
    return w.reshape(sizes)


def log_weight(
    graph: FactorGraph, params: Mapping[str, np.ndarray], x: Mapping[str, np.ndarray]
) -> np.ndarray:
    """log p(x) + log Z of rows."""
    total = sum(log_base(f, x[b]) for b, f in graph.families.items())
    for factor in graph.factors:
        families, w = [graph.families[b] for b in factor.blocks], params[factor.name]
        if isinstance(factor, Bias):
            t = statistics_of(families[0], x[factor.blocks[0]])
            total = total + t @ np.broadcast_to(w, families[0].statistic_shape).ravel()
            continue
        ts = [statistics_of(f, x[b], True) for b, f in zip(factor.blocks, families, strict=True)]
        ts = ts * 2 if factor.lateral else ts
        axes = "ijk"[: len(ts)]
        spec = f"{axes},{','.join('n' + a for a in axes)}->n"
        total = total + np.einsum(spec, _coefficients(factor, w, families), *ts)
        if isinstance(factor, Linear):
            total = total + w[2] * ts[1].sum(1)
    return total


class Oracle:
    """The joint law of the blocks that are not ``given``.

    :param given: one row of each.
    """

    def __init__(
        self, graph: FactorGraph, params: Mapping[str, Any], given: Mapping[str, np.ndarray]
    ) -> None:
        self.graph, self.params = graph, {n: np.asarray(w, float) for n, w in params.items()}
        free = {b: f for b, f in graph.families.items() if b not in given}
        listed = {b: f for b, f in free.items() if values(f)}
        units = [values(f) for f in listed.values() for _ in range(f.size)]
        listing = list(itertools.product(*units))
        states = np.array(listing, float).reshape(len(listing), len(units))
        self.x, start = {b: np.repeat(v[None], len(states), 0) for b, v in given.items()}, 0
        for b, f in listed.items():
            self.x[b] = states[:, start : (start := start + f.size)].reshape(-1, *f.shape)
        self.reals = {b: f for b, f in free.items() if b not in listed}
        self.x |= {b: np.zeros((len(states), *f.shape)) for b, f in self.reals.items()}
        self.waiting = [
            (b, u) for b, f in self.reals.items() if isinstance(f, Exponential) for u in range(f.size)
        ]
        self.normal = [
            (b, u) for b, f in self.reals.items() if isinstance(f, Gaussian) for u in range(f.size)
        ]
        self._integrate()
        self.log_z = float(np.logaddexp.reduce(self.log_weights))

    def _at(self, *moved: tuple[str, int, float]) -> np.ndarray:
        """Log weights of the listed states, with some real units moved from 0."""
        x = dict(self.x)
        for b, unit, value in moved:
            x[b] = x[b].copy()
            x[b].reshape(len(x[b]), -1)[:, unit] = value
        return log_weight(self.graph, self.params, x)

    def _integrate(self) -> None:
        """The log weight is affine in the Exponential units and quadratic in the Gaussian ones."""
        zero, n = self._at(), len(self.normal)
        self.rates = [zero - self._at((*unit, 1.0)) for unit in self.waiting]
        up, down = ([self._at((*unit, s)) for unit in self.normal] for s in (1.0, -1.0))
        self.slope = np.zeros((len(zero), n))
        self.precision = np.zeros((len(zero), n, n))
        for i in range(n):
            self.slope[:, i] = (up[i] - down[i]) / 2
            self.precision[:, i, i] = 2 * zero - up[i] - down[i]
            for j in range(i):
                both = self._at((*self.normal[i], 1.0), (*self.normal[j], 1.0))
                self.precision[:, i, j] = self.precision[:, j, i] = up[i] + up[j] - both - zero
        assert all((r > 0).all() for r in self.rates), "these params do not normalise"
        assert (np.linalg.eigvalsh(self.precision) > 0).all(), "these params do not normalise"
        self.mean = np.linalg.solve(self.precision, self.slope[..., None])[..., 0]
        gaussian = 0.5 * (self.slope * self.mean).sum(1) + 0.5 * n * math.log(2 * math.pi)
        gaussian -= 0.5 * np.linalg.slogdet(self.precision)[1]
        self.log_weights = zero + gaussian - sum(np.log(r) for r in self.rates)

    def draw(self, generator: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        """Rows of the law."""
        which = generator.choice(len(self.log_weights), rows, p=np.exp(self.log_weights - self.log_z))
        x = {b: v[which] for b, v in self.x.items()}
        flat = {b: x[b].reshape(rows, -1) for b in self.reals}
        for (b, unit), rate in zip(self.waiting, self.rates, strict=True):
            flat[b][:, unit] = generator.exponential(size=rows) / rate[which]
        if self.normal:
            root = np.linalg.cholesky(np.linalg.inv(self.precision))[which]
            z = self.mean[which] + np.einsum(
                "nij,nj->ni", root, generator.normal(size=(rows, len(self.normal)))
            )
            for i, (b, unit) in enumerate(self.normal):
                flat[b][:, unit] = z[:, i]
        return {b: v.astype(self.graph.families[b].dtype) for b, v in x.items()}


def check_natural_parameters(
    graph: FactorGraph,
    joint: Oracle,
    x: Mapping[str, np.ndarray],
    eta: Mapping[str, Any],
    generator: np.random.Generator,
    close: Callable[[Any, Any], None],
) -> None:
    """<eta, t(x) - t(x')> and the base measures equal the change of the log weight, unit by unit.

    :param x: rows in float64, with the natural parameters ``eta`` of each unit given the others.
    """
    rows = len(next(iter(x.values())))
    other = {b: np.asarray(v, float) for b, v in joint.draw(generator, rows).items()}
    before = log_weight(graph, joint.params, x)
    for b, family in graph.families.items():
        slope = np.asarray(eta[b], float).reshape(rows, family.size, -1)
        t, moved = (statistics_of(family, v[b]).reshape(slope.shape) for v in (x, other))
        for unit in range(family.size):
            new = x[b].copy()
            new.reshape(rows, -1)[:, unit] = other[b].reshape(rows, -1)[:, unit]
            change = log_base(family, new) - log_base(family, x[b])
            change = change + (slope[:, unit] * (moved - t)[:, unit]).sum(-1)
            close(change, log_weight(graph, joint.params, {**x, b: new}) - before)
