# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tests graph/factors/evaluation.py, graph/factors/interactions.py: factors of any energy."""

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Categorical, Factor, FactorGraph, Spin, exact
from ebmpp.graph import energy


def network(params, *statistics):
    x = jnp.concatenate([t.ravel() for t in statistics])
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def initial(size, hidden=8, scale=1.5):
    def init(rng_key):
        keys = jax.random.split(rng_key, 3)
        return {
            "w": jax.random.normal(keys[0], (size, hidden)),
            "b": jax.random.normal(keys[1], (hidden,)),
            "v": scale * jax.random.normal(keys[2], (hidden,)),
        }

    return init


def declare(**blocks):
    size = sum(np.prod(f.statistic_shape) for f in blocks.values())
    factor = Factor(*blocks, energy=network, init=initial(size), affine=False)
    return FactorGraph(blocks, factors=[factor])


GRAPHS = {
    "bits": declare(v=Bernoulli(6)),
    "spins": declare(v=Spin(5)),
    "categories": declare(v=Categorical(4, 3)),
    "two blocks": declare(v=Bernoulli(4), c=Categorical((2,), 3)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_conditionals_are_those_of_enumeration(name):
    graph = GRAPHS[name]
    params = graph.init(jax.random.key(1))
    states, probs = exact.probabilities(graph, params)
    assert probs.max() > 40 * probs.min()
    rows = {b: v[:5] for b, v in states.items()}
    for block, family in graph.families.items():
        values = np.asarray(family.states())
        eta = graph.natural_parameters(params, rows, block)
        context = energy.part_context(graph, params, rows, block)
        units = energy.to_units(rows[block], family)
        for unit in range(family.size):
            part = energy.natural_part(graph, params, rows, units, block, context, unit)
            np.testing.assert_allclose(part[:, 0], eta[:, unit], atol=1e-5)
            repeated = {b: np.repeat(v, len(values), 0) for b, v in rows.items()}
            repeated[block] = np.array(repeated[block])
            repeated[block].reshape(-1, family.size)[:, unit] = np.tile(values, 5)
            log_density = graph.log_density(params, repeated).reshape(5, -1)
            unit_distribution = family.unit_distribution(eta[:, unit][:, None])
            np.testing.assert_allclose(
                jax.nn.softmax(log_density),
                jnp.exp(unit_distribution.log_prob(values[None])),
                atol=1e-5,
            )
