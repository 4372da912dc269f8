# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exact distributions of small graphs, computed in float64 without the package's own sums.

Every factor is a tensor of coefficients of products of statistics. Units with finitely
many values are enumerated, and counts up to 29 (with rates below 6, larger counts have
probability below 1e-11); Exponential units are integrated in closed form, and Gaussian
ones jointly.
"""

from collections.abc import Callable, Mapping
import itertools
import math
from typing import Any

import numpy as np
from own_families import Ordinal, Ternary
from scipy.special import gammaln

import ebmpp
from ebmpp import (
    Categorical,
    Convolution,
    Exponential,
    Factor,
    FactorGraph,
    Family,
    Gaussian,
    Poisson,
    Spin,
    VonMises,
)
from ebmpp.graph import Linear

COUNTS = 30


def unit_values(family: Family) -> list[float] | None:
    """Return the values of a unit; None for real numbers."""
    if isinstance(family, Gaussian | Exponential):
        return None
    known = {
        ebmpp.Bernoulli: [0, 1],
        Spin: [-1, 1],
        Ternary: [0, 1, 2],
        Ordinal: [0, 1, 2, 3],
    }
    if type(family) in known:
        return known[type(family)]
    count = (
        family.num_categories
        if isinstance(family, Categorical)
        else getattr(family, "total_count", -1) + 1
    )
    return list(range(count or COUNTS))


def numpy_statistics(family: Family, x: np.ndarray) -> np.ndarray:
    """Return t(x) in float64, shape ``(*x.shape, *statistics of a unit)``."""
    x = np.asarray(x, float)
    if isinstance(family, Categorical):
        return (x[..., None] == np.arange(family.num_categories)).astype(float)
    if isinstance(family, Ordinal) or (isinstance(family, Gaussian) and family.learned):
        return np.stack([x, x * x], -1)
    if isinstance(family, VonMises):
        return np.stack([np.cos(x), np.sin(x)], -1)
    return x


def statistics_of(
    family: Family, x: np.ndarray, interacting: bool = False
) -> np.ndarray:
    """Return the statistics of rows, or the interacting ones, shape ``(rows, statistics)``."""
    t = numpy_statistics(family, x)
    if interacting and isinstance(family, Gaussian) and family.learned:
        t = t[..., 0]
    return t.reshape(len(x), -1)


def log_base(family: Family, x: np.ndarray) -> np.ndarray:
    """Return the log base measure of each row."""
    x = np.asarray(x, float).reshape(len(x), -1)
    if isinstance(family, ebmpp.Binomial):
        n = family.total_count
        return (gammaln(n + 1) - gammaln(x + 1) - gammaln(n - x + 1)).sum(1)
    if isinstance(family, Gaussian):
        return (
            -0.5 * math.log(2 * math.pi) - (family.variance == "unit") * 0.5 * x**2
        ).sum(1)
    return {Ordinal: -0.2 * x, Poisson: -gammaln(x + 1)}.get(type(family), 0 * x).sum(1)


def _coefficients(factor: Factor, w: np.ndarray, families: list[Family]) -> np.ndarray:
    """Return the coefficients of minus the energy in products of statistics, one axis per block."""
    sizes = [math.prod(f.interaction_shape) for f in families]
    if isinstance(factor, Convolution):
        (n, m), (to, channels, reach) = (f.size for f in families), w.shape
        result = np.zeros((n, channels, m, to))
        for i, k, c, d in np.ndindex(m, reach, channels, to):
            result[i + k, c, i, d] += w[d, c, k]
        return result.reshape(sizes)
    if isinstance(factor, Linear):
        i, j = np.indices(sizes)
        return w[0] + w[1] * (i == j % sizes[0])
    if factor.lateral:
        count, (block,) = sizes[0] // families[0].size, factor.blocks
        edges = factor.edges({block: families[0]})[block]
        result = np.zeros((families[0].size, count, families[0].size, count))
        w = (
            w
            if w.ndim == 3
            else np.broadcast_to(w, len(edges))[:, None, None] * np.eye(count)
        )
        for (i, j), weight in zip(edges, w, strict=True):
            result[i, :, j] += weight
        return result.reshape(sizes * 2)
    return w.reshape(sizes)


def energy(
    graph: FactorGraph, params: Mapping[str, Any], x: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return the energy of each row."""
    total = np.zeros(len(next(iter(x.values()))))
    for factor in graph.factors:
        families, w = (
            [graph.families[b] for b in factor.blocks],
            np.asarray(params[factor.name], float),
        )
        if isinstance(factor, ebmpp.Bias):
            t = statistics_of(families[0], x[factor.blocks[0]])
            total -= t @ np.broadcast_to(w, families[0].statistic_shape).ravel()
            continue
        ts = [
            statistics_of(f, x[b], True)
            for b, f in zip(factor.blocks, families, strict=True)
        ]
        ts = ts * 2 if factor.lateral else ts
        axes = "ijk"[: len(ts)]
        spec = f"{axes},{','.join('n' + a for a in axes)}->n"
        total -= np.einsum(spec, _coefficients(factor, w, families), *ts)
        if isinstance(factor, Linear):
            total -= w[2] * ts[1].sum(1)
    return total


def log_weight(
    graph: FactorGraph, params: Mapping[str, Any], x: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return log p(x) + log Z of each row."""
    return sum(log_base(f, x[b]) for b, f in graph.families.items()) - energy(
        graph, params, x
    )


def numpy_energy(
    graph: FactorGraph, params: Mapping[str, Any], x: Mapping[str, np.ndarray]
) -> float:
    """Return the energy of one state."""
    return float(
        energy(graph, params, {b: np.asarray(v)[None] for b, v in x.items()})[0]
    )


class Oracle:
    """The joint distribution of the blocks that are not ``fixed``.

    :param fixed: one row of each fixed block.
    """

    def __init__(
        self,
        graph: FactorGraph,
        params: Mapping[str, Any],
        fixed: Mapping[str, np.ndarray],
    ) -> None:
        self.graph, self.params = (
            graph,
            {n: np.asarray(w, float) for n, w in params.items()},
        )
        free = {b: f for b, f in graph.families.items() if b not in fixed}
        listed = {b: f for b, f in free.items() if unit_values(f)}
        units = [unit_values(f) for f in listed.values() for _ in range(f.size)]
        listing = list(itertools.product(*units))
        states = np.array(listing, float).reshape(len(listing), len(units))
        self.x, start = (
            {b: np.repeat(v[None], len(states), 0) for b, v in fixed.items()},
            0,
        )
        for b, f in listed.items():
            self.x[b] = states[:, start : (start := start + f.size)].reshape(
                -1, *f.shape
            )
        self.reals = {b: f for b, f in free.items() if b not in listed}
        self.x |= {b: np.zeros((len(states), *f.shape)) for b, f in self.reals.items()}
        self.waiting = [
            (b, u)
            for b, f in self.reals.items()
            if isinstance(f, Exponential)
            for u in range(f.size)
        ]
        self.normal = [
            (b, u)
            for b, f in self.reals.items()
            if isinstance(f, Gaussian)
            for u in range(f.size)
        ]
        self._integrate()
        self.log_z = float(np.logaddexp.reduce(self.log_weights))

    def _at(self, *moved: tuple[str, int, float]) -> np.ndarray:
        """Return log weights of the listed states, with some real units moved from 0."""
        x = dict(self.x)
        for b, unit, value in moved:
            x[b] = x[b].copy()
            x[b].reshape(len(x[b]), -1)[:, unit] = value
        return log_weight(self.graph, self.params, x)

    def _integrate(self) -> None:
        """Integrate real units: the log weight is affine in Exponential and quadratic
        in Gaussian ones."""
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
                self.precision[:, i, j] = self.precision[:, j, i] = (
                    up[i] + up[j] - both - zero
                )
        assert all((r > 0).all() for r in self.rates), "these params do not normalise"
        assert (np.linalg.eigvalsh(self.precision) > 0).all(), (
            "these params do not normalise"
        )
        self.mean = np.linalg.solve(self.precision, self.slope[..., None])[..., 0]
        gaussian = 0.5 * (self.slope * self.mean).sum(1) + 0.5 * n * math.log(
            2 * math.pi
        )
        gaussian -= 0.5 * np.linalg.slogdet(self.precision)[1]
        self.log_weights = zero + gaussian - sum(np.log(r) for r in self.rates)

    def draw(self, generator: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        """Return independent rows."""
        which = generator.choice(
            len(self.log_weights), rows, p=np.exp(self.log_weights - self.log_z)
        )
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
    """Check that <eta, t(x') - t(x)> and the base measures equal the change of the log
    weight, per unit.

    :param x: rows in float64, with the natural parameters ``eta`` of each unit given
        the others.
    """
    rows = len(next(iter(x.values())))
    other = {b: np.asarray(v, float) for b, v in joint.draw(generator, rows).items()}
    before = log_weight(graph, joint.params, x)
    for b, family in graph.families.items():
        slope = np.asarray(eta[b], float).reshape(rows, family.size, -1)
        t, moved = (
            statistics_of(family, v[b]).reshape(slope.shape) for v in (x, other)
        )
        for unit in range(family.size):
            new = x[b].copy()
            new.reshape(rows, -1)[:, unit] = other[b].reshape(rows, -1)[:, unit]
            change = log_base(family, new) - log_base(family, x[b])
            change = change + (slope[:, unit] * (moved - t)[:, unit]).sum(-1)
            close(change, log_weight(graph, joint.params, {**x, b: new}) - before)


def enumerate_numpy(
    graph: FactorGraph, params: Mapping[str, Any]
) -> tuple[list[dict[str, np.ndarray]], np.ndarray, float]:
    """Return every joint state, its probability, and log Z; units need finitely many
    values, or counts."""
    joint = Oracle(graph, params, {})
    x = {b: v.astype(graph.families[b].dtype) for b, v in joint.x.items()}
    states = [
        dict(zip(x, values, strict=True)) for values in zip(*x.values(), strict=True)
    ]
    return states, np.exp(joint.log_weights - joint.log_z), joint.log_z
