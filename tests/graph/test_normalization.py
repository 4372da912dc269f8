# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Params at which a model does not normalise are refused, those at which it does are accepted.

Tests graph/normalization.py.
"""

from contextlib import nullcontext
from functools import cache
from typing import Any

import networkx as nx
import numpy as np
from own_families import Geometric, Loss, Narrow, Ordinal
import pytest

import jax
from jax import Array

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Exponential,
    Factor,
    FactorGraph,
    Family,
    Gaussian,
    Poisson,
    Spin,
)
from ebmpp.errors import DomainError
from helpers import pair

declared = cache(pair)


def params(graph: FactorGraph, weight: float, **biases: Any) -> dict[str, np.ndarray]:
    """Default biases except those given, and one weight everywhere."""
    result = {}
    for factor in graph.factors:
        family = graph.families[factor.blocks[0]]
        shape = graph.param_shapes[factor.name].shape
        default = (
            np.asarray(family.default_eta())
            if factor.role == "bias"
            else np.float32(weight)
        )
        value = biases.get(factor.name, default)
        result[factor.name] = np.broadcast_to(np.asarray(value, np.float32), shape)
    return result


def expect(message: str | None) -> Any:
    """A refusal with this message, or none."""
    return (
        nullcontext() if message is None else pytest.raises(DomainError, match=message)
    )


PAIRS = [
    (Poisson(2), Poisson(3), 0.1, "at most 0, and 6 are not.*'a:b'"),
    (Poisson(2), Poisson(3), -0.1, None),
    (Poisson(2), Gaussian(2), -0.1, "exactly zero, and 4 are not.*'a:b'"),
    (Poisson(2), Bernoulli(3), 5.0, None),
    (Gaussian(2), Bernoulli(3), 5.0, None),
    (Gaussian(2), Gaussian(2), 0.4, None),  # eigenvalues 1 +- 2 * 0.4
    (
        Gaussian(2),
        Gaussian(2),
        0.6,
        r"\['a', 'b'\].* smallest eigenvalue is between -0.2.*'a:b'",
    ),
    # the rate is 1, and three neighbours add up to 3 times the weight, in either sign
    # for spins
    (Exponential(2), Bernoulli(3), 0.3, None),
    (Exponential(2), Bernoulli(3), -10.0, None),
    (
        Exponential(2),
        Bernoulli(3),
        0.4,
        r"block 'a' .* negative, and at unit \(0,\) it reaches 0.2",
    ),
    (Exponential(2), Spin(3), -0.4, "reaches 0.2"),
    # custom families
    (
        Narrow(2),
        Gaussian(2),
        0.9,
        None,
    ),  # precisions 4 and 1, coupled by 2 * 0.9 in one direction
    (Narrow(2), Gaussian(2), 1.1, "smallest eigenvalue is between -0.16"),
    (Loss(1), Poisson(2), -0.1, "at least 0, and 2 are not"),
    (Loss(1), Poisson(2), 0.1, None),
    (Geometric(1), Ordinal(1), 0.08, None),  # -1 + 0.08 * (3 + 9)
    (Geometric(1), Ordinal(1), 0.1, "it reaches 0.2"),
]


@pytest.mark.parametrize(("first", "second", "weight", "message"), PAIRS)
def test_two_blocks(
    first: Family, second: Family, weight: float, message: str | None
) -> None:
    graph = declared(first, second)
    with expect(message):
        graph.check(params(graph, weight))


def test_block_without_neighbours() -> None:
    graph = FactorGraph({"x": Exponential(2)}, factors=[Bias("x")])
    graph.check({"x": np.float32([-1.0, -0.1])})
    with pytest.raises(DomainError, match=r"at unit \(1,\) it reaches 0.5"):
        graph.check({"x": np.float32([-1.0, 0.5])})


@pytest.mark.nightly
def test_learned_variances() -> None:
    graph = declared(Gaussian(2, "learned"), Bernoulli(1))
    graph.check(params(graph, 3.0))
    with pytest.raises(DomainError, match=r"negative in its second entry .* \(1,\)"):
        graph.check(params(graph, 3.0, a=[[0.0, -0.5], [0.0, 0.0]]))
    # precision [[4, -w], [-w, 1]]
    graph = declared(Gaussian(1, "learned"), Gaussian(1))
    graph.check(params(graph, 1.9, a=[[0.0, -2.0]]))
    with pytest.raises(DomainError, match="smallest eigenvalue"):
        graph.check(params(graph, 2.1, a=[[0.0, -2.0]]))


@pytest.mark.parametrize(
    ("family", "good", "bad", "message"),
    [
        (Gaussian(3), [0.6, 0.6], [0.9, 0.9], "precision"),
        (Poisson(3), [-0.2, -0.1], [0.1, -0.1], "blocks 'x'.*at most 0"),
    ],
)
def test_units_of_one_block(
    family: Family, good: list, bad: list, message: str
) -> None:
    graph = FactorGraph(
        {"x": family}, factors=[Bias("x"), ebmpp.Pairwise("x", nx.path_graph(3))]
    )
    graph.check(params(graph, 0) | {"x:x": np.float32(good)})
    with pytest.raises(DomainError, match=message):
        graph.check(params(graph, 0) | {"x:x": np.float32(bad)})


def test_third_order_factor_is_checked_at_states() -> None:
    energy = lambda w, x, y, z: -w * x.sum() * y.sum() * z.sum()
    gate = Factor("x", "y", "z", energy=energy, init=np.zeros(()))
    blocks = {"x": Exponential(1), "y": Bernoulli(1), "z": Bernoulli(1)}
    graph = FactorGraph(
        blocks, factors=[*map(Bias, "xyz"), gate, ebmpp.Bilinear("y", "z")]
    )
    graph.check(params(graph, 0.0) | {"x:y:z": np.float32(0.4)})
    with pytest.raises(DomainError, match="it reaches 0.1"):
        graph.check(params(graph, 0.0) | {"x:y:z": np.float32(1.1)})


def test_traced_params_are_not_checked() -> None:
    graph = declared(Poisson(2), Poisson(3))
    jax.eval_shape(graph.check, params(graph, 1.0))


def coupled(size: int, strength: float) -> tuple[FactorGraph, dict[str, np.ndarray]]:
    """Two blocks of ``size`` units, whose precision has eigenvalues 1 +- strength and 1."""
    graph = declared(Gaussian(size), Gaussian(size))
    first, second = (np.random.default_rng(i).normal(size=size) for i in range(2))
    weight = (
        strength
        * np.outer(first, second)
        / np.linalg.norm(first)
        / np.linalg.norm(second)
    )
    return graph, params(graph, 0.0) | {"a:b": weight.astype(np.float32)}


def test_precision_of_many_units() -> None:
    graph, good = coupled(300, 0.97)
    graph.check(good)
    graph, bad = coupled(300, 1.03)
    with pytest.raises(
        DomainError, match=r"smallest eigenvalue is between .* and -0.0\d+.*'a:b'"
    ):
        graph.check(bad)
    graph, near = coupled(300, 1 - 1e-6)
    with pytest.warns(RuntimeWarning, match=r"may not normalise: .*'a:b'"):
        graph.check(near)


def curvature(w: Array, v: Array, h: Array) -> Array:
    return -v[:, 1].sum() * (w * h).sum()


def switched(switch: Family) -> FactorGraph:
    """Two coupled Gaussian blocks, and a block that changes the precision of one."""
    factor = Factor(
        "v", "h", energy=curvature, init=np.zeros(switch.statistic_shape), name="curve"
    )
    factors = [*map(Bias, "vuh"), ebmpp.Bilinear("v", "u"), factor]
    return FactorGraph(
        {"v": Gaussian(1, "learned"), "u": Gaussian(1)}, {"h": switch}, factors
    )


@pytest.mark.nightly
def test_precision_that_another_block_lowers() -> None:
    graph = switched(Bernoulli(1))
    values = params(graph, 0.8)
    # precision [[1 - 2 w t, -0.8], [-0.8, 1]] at t = 1: positive definite below w =
    # 0.18
    graph.check(values | {"curve": np.float32([0.17])})
    with pytest.raises(DomainError, match=r"-0.0122\d* at a state of blocks \['h'\]"):
        graph.check(values | {"curve": np.float32([0.19])})


def test_precision_is_checked_at_states_only() -> None:
    """At zero statistics, which one-hot units never have, this model would not normalise."""
    graph = switched(ebmpp.Categorical(1, 2))
    graph.check(
        params(graph, 0.8, v=[[0.0, -0.1]])
        | {"curve": np.full((1, 2), -2.0, np.float32)}
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("reach", "message"), [(0.95, None), (1.05, r"-0.05 at a state of blocks \['h'\]")]
)
def test_worst_of_many_states_is_searched(reach: float, message: str | None) -> None:
    """One of 2**30 states, in which half of the units must be 1 and half of them 0."""
    energy = lambda w, a, b, h: -a[0] * b[0] * (w @ h)
    gate = Factor("a", "b", "h", energy=energy, init=np.zeros(30))
    blocks = {"a": Gaussian(1), "b": Gaussian(1)}
    graph = FactorGraph(blocks, {"h": Bernoulli(30)}, [*map(Bias, "abh"), gate])
    signs = np.random.default_rng(3).permutation(np.repeat([1, -1], 15))
    with expect(message):
        graph.check(
            params(graph, 0) | {"a:b:h": (signs * reach / 15).astype(np.float32)}
        )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("weight", "message"), [(-0.2, None), (0.2, "at most 0, and 1 are not")]
)
def test_gated_coupling_of_counts_is_checked_at_states(
    weight: float, message: str | None
) -> None:
    """At zero statistics of the gate, which it never has, the coupling of the counts is
    positive."""
    couple = Factor("a", "b", energy=lambda _, a, b: -0.3 * a[0] * b[0], name="up")
    energy = lambda w, a, b, c: -a[0] * b[0] * (c[0] @ (w - 0.3))
    gate = Factor("a", "b", "c", energy=energy, init=np.zeros(2))
    blocks = {"a": Poisson(1), "b": Poisson(1), "c": ebmpp.Categorical(1, 2)}
    graph = FactorGraph(blocks, factors=[*map(Bias, "abc"), couple, gate])
    values = {"a": [0], "b": [0], "c": [[0, 0]], "a:b:c": [-0.1, weight]}
    with expect(message):
        graph.check(
            {n: np.asarray(v, np.float32) for n, v in values.items()} | {"up": ()}
        )
