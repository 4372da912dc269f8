# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import math
import warnings

from annealing_tools import DECAY, GRAPHS, KEY, NUM, model, uniform
import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.errors import DomainError, ParameterError, StateError
from helpers import random_params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_particles": 0}, "num_particles is an int of at least 2, not 0"),
        ({"num_particles": True}, "num_particles is an int of at least 2, not True"),
        ({"num_temperatures": 1}, "num_temperatures is an int of at least 2, not 1"),
        ({"num_temperatures": 2.0}, r"num_temperatures is an int of at least 2, not 2.0 \(give 2\)"),
        ({"rng_key": 0}, r"rng_key is a jax key, not the number 0: give jax.random.key\(0\)"),
        ({"progress_bar": "no"}, "progress_bar is True or False, not 'no'"),
        ({"num_temperatures": 1, "ladder": "adaptive"}, "num_temperatures is an int of at least 2"),
        (
            {"ladder": "cosine"},
            "ladder is one of 'linear', .*, or increasing values from 0 to 1, not 'cosine'",
        ),
        ({"ladder": [0, 0.5]}, "increase from 0 to 1, .*; these go from 0 to 0.5"),
        ({"ladder": [0.1, 1]}, "these go from 0.1 to 1"),
        ({"ladder": [0, 0.6, 0.5, 1]}, "value 2 is 0.5, after 0.6"),
        ({"ladder": [0, math.nan, 1]}, "value 1 is nan, after 0"),
        ({"ladder": [1.0]}, r"got an array of shape \(1,\), and at least 2"),
        ({"ladder": [[0, 1]]}, r"got an array of shape \(1, 2\)"),
        ({"ladder": {"a": 1}}, "got {'a': 1}"),
    ],
)
def test_numbers_out_of_range(options: dict, message: str) -> None:
    graph = GRAPHS["rbm"]
    with pytest.raises(ValueError, match=message):
        ebmpp.ais(graph, random_params(graph), **({"rng_key": KEY} | options))


def test_params_and_references_are_checked() -> None:
    graph = DECAY
    params = random_params(graph, scale=0.2)
    run = lambda p, **given: ebmpp.ais(graph, p, rng_key=KEY, num_temperatures=5, **given)
    with pytest.raises(ParameterError, match="factor 'b': 4 of 4 params are not finite"):
        run(params | {"b": jnp.full(4, jnp.nan)})
    with pytest.raises(DomainError, match="natural parameter of block 'a'"):
        run(params | {"a": jnp.ones(3)})
    with pytest.raises(DomainError, match=r"reference: block 'a' .* does not normalise: its"):
        run(params, reference={"a": jnp.zeros(3)})
    with pytest.raises(ParameterError, match=r"block 'b' .* has shape \(3,\), expected \(4,\)"):
        run(params, reference={"b": jnp.zeros(3)})
    with pytest.raises(ParameterError, match=r"reference has 'c', and the blocks are \['a', 'b'\]"):
        run(params, reference={"c": jnp.zeros(3)})
    with pytest.raises(StateError, match="block 'a' .* got -1"):
        run(params, data=-np.ones((2, 3)))
    with pytest.raises(TypeError, match="cannot be traced: take monitors"):
        jax.jit(run)(params)


def test_few_effective_particles_are_told_once_a_call() -> None:
    graph, params, _ = model("rbm", 0)
    strong = jax.tree.map(lambda a: 12 * a, params)
    options = {"rng_key": KEY, "num_particles": NUM, "num_temperatures": 2, "reference": uniform(graph)}
    words = (
        r"of 2000 particles \(forward, standard error .*\): too small .* Raise num_temperatures \(now 2\), or"
    )
    with pytest.warns(UserWarning, match=words):
        made = ebmpp.ais(graph, strong, **options)
    assert made.effective_sample_size < NUM / 4
    assert f"{made.effective_sample_size:.1f} of 2000 particles effective" in repr(made)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        both = ebmpp.bracket(graph, strong, **options)
    assert len(told) == 1 and told[0].filename == __file__
    for side, words in ((both.lower, "forward"), (both.upper, "in reverse")):
        few = side.effective_sample_size < NUM / 4
        assert (f"({words}, standard error {side.standard_error:.2g})" in str(told[0].message)) == few
        assert f"({side.effective_sample_size:.1f} of 2000 particles effective)" in repr(both)
