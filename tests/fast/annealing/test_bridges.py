# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""log Z at every knot of a path against exact sums."""

from functools import cache
import math
from typing import Any

import numpy as np
import pytest
import zoo

import jax.numpy as jnp

from ebmpp import Bernoulli, Gaussian
from ebmpp.annealing import Bridges, Path, bridges, knot_partitions
from ebmpp.errors import ArgumentError, DomainError
from helpers import assert_law, often, pair, random_params


@cache
def path_of(name: str) -> Path:
    """A beta between the reference and the first model, and three models that have little in common."""
    graph = zoo.graph(name)
    eta0 = {
        b: jnp.asarray(np.linspace(-0.5, 0.5, f.size, dtype=np.float32)).reshape(f.shape)
        for b, f in graph.families.items()
    }
    models = [random_params(graph, seed=i, scale=1.0) for i in range(3)]
    return Path.through(graph, eta0, models).cut(jnp.array([0.0, 0.4, 1.0, 2.0, 3.0]), jnp.array(5))


def exact(name: str) -> np.ndarray:
    """Biases are linear in the params, so the reference adds to the biases."""
    path, log_z = path_of(name), []
    for i in range(len(path)):
        beta = float(path.betas[i])
        params = {n: beta * np.asarray(a, float) for n, a in path.params_at(i).items()}
        params |= {b: params[b] + (1 - beta) * np.asarray(path.eta0[b], float) for b in path.graph.families}
        log_z.append(zoo.Oracle(path.graph, params, {}).log_z)
    return np.array(log_z)


@cache
def run(name: str) -> Bridges:
    return bridges(path_of(name), rng_key=zoo.KEY, num_particles=4000, num_islands=40)


@pytest.mark.parametrize("name", often(["deep", "rbm"], "deep"))
def test_log_partitions_match_exact_sums_at_and_between_knots(name: str) -> None:
    result, log_z = run(name), exact(name)
    assert result.log_z.shape == (40, 5) and result.num_rungs > 8
    assert (result.standard_error < 0.05).all()
    np.testing.assert_allclose(result.log_partition[0], log_z[0], rtol=1e-5)
    ratio = np.exp(result.log_z - log_z)
    error = ratio.std(0, ddof=1) / math.sqrt(40)
    assert_law(ratio.mean(0)[1:], 1, error[1:])
    assert_law(result.log_partition[1:], log_z[1:], result.standard_error[1:])
    for first, last in ((1, 2), (2, 4), (0, -1)):
        value, error = result.difference(first, last)
        assert_law(value, log_z[last] - log_z[first], error, comparisons=6)
    np.testing.assert_allclose(result.difference(0, 4)[1], result.standard_error[4], rtol=1e-6)
    assert result.difference(3, 3) == (0.0, 0.0)
    assert "5 knots, from 40 islands" in repr(result)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_islands": 9}, "num_islands .*9"),
        ({"num_particles": 101}, "num_islands; .*101"),
        ({"evenness": 1.0}, "evenness"),
        ({"num_sweeps": 0}, "num_sweeps .*0"),
        ({"rng_key": 3}, "rng_key"),
        ({"path": "line"}, "path .*'line'"),
    ],
)
def test_invalid_arguments_raise(options: dict[str, Any], message: str) -> None:
    options = {"path": path_of("rbm"), "rng_key": zoo.KEY} | options
    with pytest.raises(ArgumentError, match=message):
        bridges(options.pop("path"), **options)


def test_models_that_do_not_normalise_and_few_islands_are_reported() -> None:
    graph = pair(Gaussian(1, "learned"), Bernoulli(1))
    good = random_params(graph) | {"a": jnp.array([[0.0, -0.5]])}
    eta0 = {b: f.default_eta() for b, f in graph.families.items()}
    path = Path.through(graph, eta0, [good, good | {"a": jnp.array([[0.0, 0.5]])}])
    with pytest.raises(DomainError, match="knot 2 .*'a'"):
        bridges(path, rng_key=zoo.KEY, num_particles=40)
    with pytest.raises(DomainError, match="knot 1"):
        knot_partitions._combined(np.array([[0.0, math.nan, 1.0]] * 10), 3)
    log_z = np.zeros((10, 2))
    log_z[0, 1] = 20.0
    with pytest.warns(UserWarning, match="knot 1 1.0 of 10 islands"):
        knot_partitions._combined(log_z, 3)
