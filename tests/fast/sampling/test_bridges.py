# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""log Z at every knot of a path, against the exact one."""

from functools import cache
import math

import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Gaussian, Spin
from ebmpp.core import random
from ebmpp.errors import ArgumentError, DomainError
from ebmpp.sampling import Path, bridges, knot_partitions, ladders
from helpers import assert_law, often, pair, random_params

GRAPHS = {
    "bernoulli": ebmpp.layered(v=Bernoulli(5), h=Bernoulli(4)),
    "three layers": ebmpp.layered(v=Spin(3), h1=Spin(3), h2=Spin(2)),
}


def path_of(graph, scale=1.0):
    """A beta between the reference and the first model, and three models that have little in common."""
    eta0 = {b: jnp.linspace(-0.5, 0.5, f.size).reshape(f.shape) for b, f in graph.families.items()}
    whole = Path.through(graph, eta0, [random_params(graph, seed=i, scale=scale) for i in range(3)])
    return whole.cut(jnp.array([0.0, 0.4, 1.0, 2.0, 3.0]), jnp.array(5))


def exact(path):
    """Biases and couplings are linear in the params, so the reference is some biases more."""
    made = []
    for i in range(len(path)):
        beta, params = float(path.betas[i]), jax.tree.map(lambda a: path.betas[i] * a, path.params_at(i))
        params |= {b: params[b] + (1 - beta) * path.eta0[b] for b in path.graph.families}
        made.append(float(ebmpp.exact.log_partition(path.graph, params)))
    return np.array(made)


@cache
def made(name):
    return bridges(path_of(GRAPHS[name]), rng_key=jax.random.key(0), num_particles=4000, num_islands=40)


@pytest.mark.parametrize("name", often(GRAPHS, "three layers"))
def test_log_z_at_every_knot(name):
    found, truth = made(name), exact(path_of(GRAPHS[name]))
    assert found.log_z.shape == (40, 5) and found.num_rungs > 8
    assert (found.standard_error < 0.05).all()
    np.testing.assert_allclose(found.log_partition[0], truth[0], rtol=1e-5)  # nothing is drawn for that
    ratio = np.exp(found.log_z - truth)
    error = ratio.std(0, ddof=1) / math.sqrt(40)
    assert_law(ratio.mean(0)[1:], 1, error[1:])
    assert_law(found.log_partition[1:], truth[1:], found.standard_error[1:])


@pytest.mark.parametrize("name", GRAPHS)
def test_log_z_between_knots(name):
    found, truth = made(name), exact(path_of(GRAPHS[name]))
    for first, last in ((1, 2), (2, 4), (0, -1)):
        value, error = found.difference(first, last)
        assert_law(value, truth[last] - truth[first], error, comparisons=6)
    value, error = found.difference(0, 4)
    np.testing.assert_allclose(error, found.standard_error[4], rtol=1e-6)
    assert found.difference(3, 3) == (0.0, 0.0)


@pytest.mark.slow
def test_standard_errors_are_those_of_repetitions():
    path = path_of(GRAPHS["bernoulli"])
    each = [bridges(path, rng_key=jax.random.key(i), num_particles=200) for i in range(40)]
    spread = np.std([m.log_partition[1:] for m in each], axis=0, ddof=1)
    told = np.sqrt(np.mean([m.standard_error[1:] ** 2 for m in each], axis=0))
    assert (abs(np.log(spread / told)) < 0.5).all(), (spread, told)  # 0.11 is one standard error of spread


def test_another_path_of_its_shape_needs_no_other_program():
    bridges(path_of(GRAPHS["bernoulli"]), rng_key=jax.random.key(0), num_particles=200)
    before = knot_partitions._cross._cache_size()
    bridges(path_of(GRAPHS["bernoulli"], 0.5), rng_key=jax.random.key(5), num_particles=200)
    assert knot_partitions._cross._cache_size() == before > 0


def test_it_tells_itself():
    assert "at the last of 5 knots, from 40 islands," in repr(made("bernoulli"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_islands": 9}, "bridges: num_islands is an int of at least 10, not 9"),
        ({"num_particles": 101}, "multiple of num_islands; got 101 particles in 10 islands"),
        ({"evenness": 1.0}, "bridges: evenness"),
        ({"num_sweeps": 0}, "bridges: num_sweeps is an int of at least 1, not 0"),
        ({"rng_key": 3}, "bridges: rng_key is a jax key"),
        ({"path": "line"}, r"bridges: path is a Path, such as fit\(..., keep_path=True\) has, not 'line'"),
    ],
)
def test_wrong_arguments(options, message):
    options = {"path": path_of(GRAPHS["bernoulli"]), "rng_key": jax.random.key(0)} | options
    with pytest.raises(ArgumentError, match=message):
        bridges(options.pop("path"), **options)


def test_a_model_that_does_not_normalise_is_told():
    graph = pair(Gaussian(1, "learned"), Bernoulli(1))
    good = random_params(graph) | {"a": jnp.array([[0.0, -0.5]])}
    eta0 = {b: f.default_eta() for b, f in graph.families.items()}
    path = Path.through(graph, eta0, [good, good | {"a": jnp.array([[0.0, 0.5]])}])
    with pytest.raises(DomainError, match="bridges: knot 2 of the path: .*'a'"):
        bridges(path, rng_key=jax.random.key(0), num_particles=40)
    with pytest.raises(DomainError, match="weights are not finite from knot 1 on"):
        knot_partitions._combined(np.array([[0.0, math.nan, 1.0]] * 10), 3)


@pytest.mark.parametrize("most", [None, 300])
def test_a_ladder_that_gets_nowhere_is_told(most):
    """Where weights are not finite, whoever asks."""
    graph = pair(Gaussian(1), Bernoulli(1))
    params = [{"a": jnp.zeros(1), "b": jnp.zeros(1), "a:b": jnp.full((1, 1), w)} for w in (0.0, math.inf)]
    path, key = (
        Path.through(graph, {b: jnp.zeros(1) for b in "ab"}, params),
        random.key_pair(jax.random.key(0)),
    )
    if most is not None:
        assert not ladders.adaptive(path, key, 20, 0.9, most=most).whole()
        return
    with pytest.raises(DomainError, match="at place 1.0.* of the path, however short a step is"):
        ladders.adaptive(path, key, 20, 0.9)


def test_few_islands_are_told():
    log_z = np.zeros((10, 2))
    log_z[0, 1] = 20.0
    with pytest.warns(UserWarning, match="at knot 1 1.0 of 10 islands make the mean"):
        knot_partitions._combined(log_z, 3)
