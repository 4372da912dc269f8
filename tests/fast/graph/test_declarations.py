# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random declarations: log Z, likelihood, gradient, natural parameters and a sweep against enumeration."""

import os
from typing import Any

from declarations import declarations, params_of
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
import numpy as np
from oracle import Oracle, check_natural_parameters, log_weight, statistics_of
import pytest
import zoo

import jax
import jax.numpy as jnp

from ebmpp import FactorGraph, Observed, exact
from ebmpp.core import random
from ebmpp.graph import states
from ebmpp.moves.layer import gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target
from helpers import assert_law, slow

ROWS = 3000
# most of the time is compilation
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def derive(graph: FactorGraph, masks: dict[str, np.ndarray], params: Any, x: dict, start: dict) -> dict:
    """Everything that is compared, in one program."""

    def mean_log_likelihood(p: Any) -> tuple:
        rows = exact.log_likelihood(graph, p, {"a": x["a"]})
        return rows.mean(), rows

    (_, rows), gradient = jax.value_and_grad(mean_log_likelihood, has_aux=True)(params)
    result = {"log_likelihood": rows, "gradient": gradient, "log_z": exact.log_partition(graph, params)}
    result["log_density"] = graph.log_density(params, x)
    result["eta"] = {b: graph.natural_parameters(params, x, b) for b in graph.families}
    if not graph.interacting(graph.latent):
        result["free_energy"] = graph.free_energy(params, {"a": x["a"]})
    held = states.as_clamped(graph.families, {b: Observed(start[b], mask) for b, mask in masks.items()})
    keys = random.fold_in(random.key_pair(zoo.KEY), jnp.arange(ROWS))
    result["swept"] = draw_sweep(Target(graph, params, held), start, gibbs_sweep(graph), keys)[0]
    return result


def check(graph: FactorGraph, number: int, partly_observed: bool) -> None:
    params, generator = params_of(graph, number), np.random.default_rng(number)
    graph.check(params)
    joint = Oracle(graph, params, {})
    x, start = joint.draw(generator, 3), joint.draw(generator, ROWS)
    masks = {}
    if partly_observed:
        masks = {b: generator.random(f.shape) < 0.5 for b, f in graph.families.items()}
    result = jax.device_get(
        jax.jit(lambda *args: derive(graph, masks, *args), compiler_options=FAST_COMPILE)(params, x, start)
    )
    close = lambda actual, expected: np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=3e-4)

    close(result["log_z"], joint.log_z)
    wide = {b: np.asarray(v, float) for b, v in x.items()}
    close(result["log_density"], log_weight(graph, joint.params, wide))
    check_natural_parameters(graph, joint, wide, result["eta"], generator, close)
    sums = [Oracle(graph, params, {"a": v}).log_z for v in wide["a"]]
    close(result["log_likelihood"], np.array(sums) - joint.log_z)
    if "free_energy" in result:
        close(-result["free_energy"], sums)
    direction = {name: generator.normal(size=np.shape(w)) for name, w in joint.params.items()}
    along = sum(float((result["gradient"][name] * d).sum()) for name, d in direction.items())
    close(along, slope_of_log_likelihood(graph, joint.params, direction, wide["a"]))
    check_sweep(graph, start, result["swept"], masks)


def slope_of_log_likelihood(graph: FactorGraph, params: dict, direction: dict, rows: np.ndarray) -> float:
    """Central difference of the exact mean log-likelihood along a direction."""
    values = []
    for step in (1e-5, -1e-5):
        moved = {name: w + step * direction[name] for name, w in params.items()}
        sums = [Oracle(graph, moved, {"a": v}).log_z for v in rows]
        values.append(np.mean(sums) - Oracle(graph, moved, {}).log_z)
    return float(values[0] - values[1]) / 2e-5


def check_sweep(graph: FactorGraph, start: dict, swept: dict, masks: dict) -> None:
    """A sweep keeps the model's distribution and the observed units."""
    for b, mask in masks.items():
        np.testing.assert_array_equal(swept[b][:, mask], start[b][:, mask])

    def features(x: dict) -> np.ndarray:
        # bounded, so that a mean is nearly normal whatever the tails
        wide = {b: np.asarray(v, float) for b, v in x.items()}
        statistics = [np.tanh(statistics_of(f, wide[b]) / 2) for b, f in graph.families.items()]
        t = np.concatenate([np.ones((ROWS, 1)), *statistics], 1)
        return (t[:, :, None] * t[:, None, :])[:, *np.triu_indices(t.shape[1], 1)]

    change = features(swept) - features(start)
    # 1000 examples, of which none may fail by chance
    error = change.std(0, ddof=1) / ROWS**0.5
    assert_law(change.mean(0), 0.0, error, comparisons=1000 * change.shape[1])


@pytest.mark.parametrize("num_examples", [2, slow(int(os.environ.get("EXAMPLES", "200")))])
def test_random_declarations_match_enumeration(num_examples: int) -> None:
    run = given(declarations(), st.integers(0, 999), st.booleans())(check)
    if num_examples == 2:
        run = seed(10)(run)  # a third-order factor, interacting units and observed units
    options = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    options["phases"] = [Phase.generate]  # to shrink a failure would compile hundreds of programs
    settings(max_examples=num_examples, **options)(run)()
