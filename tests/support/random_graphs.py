# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random small graphs of all families, with params that normalise and exact gradients."""

from collections.abc import Iterable
import contextlib
import itertools
from typing import Any

import numpy as np
from oracle import COUNTS, Oracle, unit_values

import jax

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Binomial,
    Categorical,
    Exponential,
    Factor,
    FactorGraph,
    Family,
    Gaussian,
    Pairwise,
    Poisson,
    Spin,
)
from ebmpp.errors import ParameterError
from helpers import random_params, three_way_energy

#: by name: a family of so many units
KINDS: dict[str, Any] = {
    "bernoulli": Bernoulli,
    "spin": Spin,
    "categorical": lambda size: Categorical(size, 3),
    "binomial": lambda size: Binomial(size, 3),
    "poisson": Poisson,
    "exponential": Exponential,
    "gaussian": Gaussian,
    "learned": lambda size: Gaussian(size, "learned"),
}
_UNBOUNDED = ("poisson", "exponential", "gaussian", "learned")
#: pairs of unbounded blocks that may interact, and the sign of their weights
_SIGNS = {
    frozenset(["poisson"]): -1,
    frozenset(["poisson", "exponential"]): -1,
    frozenset(["gaussian"]): 0,
    frozenset(["learned"]): 0,
    frozenset(["gaussian", "learned"]): 0,
}
_MOST_STATES = 4000


def random_graph(seed: int, *required: str) -> tuple[FactorGraph, dict[str, Any]]:
    """Return a connected graph of two or three blocks, and params under which it normalises.

    :param required: kinds of the first blocks.
    """
    generator = np.random.default_rng(seed)
    while True:
        kinds = [*required]
        while len(kinds) < generator.integers(2, 4):
            kinds.append(str(generator.choice(list(KINDS))))
        sizes = generator.integers(1, 4, len(kinds))
        blocks = {
            name: KINDS[kind](int(size))
            for name, kind, size in zip("abcd", kinds, sizes)
        }
        edges = _edges(generator, kinds)
        num_states = np.prod(
            [float(len(unit_values(f) or [0])) ** f.size for f in blocks.values()]
        )
        if edges is not None and num_states <= _MOST_STATES:
            break
    names = list(blocks)
    order = generator.permutation(len(names))
    num_visible = int(generator.integers(1, len(names) + 1))
    visible = [names[i] for i in sorted(order[:num_visible])]
    factors = [Bias(name) for name in names]
    factors += [Bilinear(names[i], names[j]) for i, j in edges]
    factors += _lateral(generator, blocks, kinds)
    factors += _three_way(generator, blocks, kinds)
    graph = FactorGraph(
        {b: f for b, f in blocks.items() if b in visible},
        {b: f for b, f in blocks.items() if b not in visible},
        factors,
    )
    kind_of = dict(zip(blocks, kinds))
    params = random_params(graph, seed, scale=1.0)
    for factor in graph.factors:
        sign = _SIGNS.get(frozenset(kind_of[b] for b in factor.blocks), 0)
        if factor.interacts and sign:
            params[factor.name] = sign * abs(params[factor.name])
    return graph, _inside(graph, params)


def _edges(
    generator: np.random.Generator, kinds: list[str]
) -> list[tuple[int, int]] | None:
    """Return a random connected set of pairs of blocks that may interact, or None."""
    allowed = [
        (i, j)
        for i, j in itertools.combinations(range(len(kinds)), 2)
        if {kinds[i], kinds[j]} - set(_UNBOUNDED)
        or frozenset([kinds[i], kinds[j]]) in _SIGNS
    ]
    edges = [edge for edge in allowed if generator.random() < 0.7]
    linked = {0}
    for _ in kinds:
        linked |= {i for edge in edges if linked & {*edge} for i in edge}
    return edges if len(linked) == len(kinds) else None


def _lateral(
    generator: np.random.Generator, blocks: dict[str, Family], kinds: list[str]
) -> Iterable[Factor]:
    """Yield weights between units of some blocks."""
    for (name, family), kind in zip(blocks.items(), kinds):
        pairs = list(itertools.combinations(range(family.size), 2))
        interacts = kind not in ("poisson", "exponential") and family.size > 1
        if interacts and generator.random() < 0.5:
            count = int(generator.integers(1, len(pairs) + 1))
            yield Pairwise(
                name, [pairs[i] for i in generator.permutation(len(pairs))[:count]]
            )


def _three_way(
    generator: np.random.Generator, blocks: dict[str, Family], kinds: list[str]
) -> Iterable[Factor]:
    """Yield an energy of three blocks of scalar statistics, of which two are bounded."""
    scalar = [b for b, k in zip(blocks, kinds) if k != "categorical" and k != "learned"]
    bounded = [b for b, k in zip(blocks, kinds) if b in scalar and k not in _UNBOUNDED]
    for scope in itertools.combinations(scalar, 3):
        if len(set(scope) & set(bounded)) >= 2 and generator.random() < 0.5:
            shape = tuple(blocks[b].size for b in scope)
            yield Factor(
                *scope,
                energy=three_way_energy,
                init=np.zeros(shape),
                name=":".join(scope),
            )


def _inside(graph: FactorGraph, params: Any) -> dict[str, Any]:
    """Return params moved towards independent units until the model normalises, with a
    margin, and counts are small."""
    start = random_params(graph, scale=0.0)
    nearer = lambda a, b: np.asarray(0.3 * a + 0.7 * b, np.float32)
    for _ in range(20):
        params = jax.tree.map(nearer, start, last := params)
        with contextlib.suppress(ParameterError, AssertionError):
            graph.check(last)
            if _last_count(Oracle(graph, last, {})) < 1e-7:
                return params
    raise AssertionError(f"no params of {graph!r} normalise")


def _last_count(joint: Oracle) -> float:
    """Return the probability that a count reaches the end of the oracle's list."""
    counts = [b for b, f in joint.graph.families.items() if isinstance(f, Poisson)]
    ends = [
        (joint.x[b] == COUNTS - 1).reshape(len(joint.log_weights), -1).any(1)
        for b in counts
    ]
    weights = np.exp(joint.log_weights - joint.log_z)
    return max((float(weights[end].sum()) for end in ends), default=0.0)
