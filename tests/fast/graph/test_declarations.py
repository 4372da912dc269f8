# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Any declaration: its conditionals, free energy, log Z, gradient and sweeps, against float64 enumeration."""

import os
from typing import Any

from declarations import Oracle, declarations, log_base, log_weight, params_of, statistics_of
from hypothesis import HealthCheck, given, settings, strategies as st
import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import FactorGraph, Observed, exact
from ebmpp.core import random
from ebmpp.graph import states
from ebmpp.moves.layer import gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target
from helpers import assert_law

ROWS = 3000
ANY = given(declarations(), st.integers(0, 999), st.booleans())


def derive(graph: FactorGraph, observed: dict[str, np.ndarray], params: Any, x: dict, start: dict) -> dict:
    """All that is compared, in one program."""

    def mean_log_likelihood(p: Any) -> tuple:
        each = exact.log_likelihood(graph, p, {"a": x["a"]})
        return each.mean(), each

    (_, each), gradient = jax.value_and_grad(mean_log_likelihood, has_aux=True)(params)
    made = {"log_likelihood": each, "gradient": gradient, "log_z": exact.log_partition(graph, params)}
    made["log_density"] = graph.log_density(params, x)
    made["eta"] = {b: graph.natural_parameters(params, x, b) for b in graph.families}
    if not graph.interacting(graph.latent):
        made["free_energy"] = graph.free_energy(params, {"a": x["a"]})
    held = states.as_given(graph.families, {b: Observed(start[b], k) for b, k in observed.items()})
    pairs = random.fold_in(random.key_pair(jax.random.key(0)), jnp.arange(ROWS))
    made["swept"] = draw_sweep(Target(graph, params, held), start, gibbs_sweep(graph), pairs)[0]
    return made


def check(graph: FactorGraph, seed: int, partly: bool) -> None:
    params, generator = params_of(graph, seed), np.random.default_rng(seed)
    graph.check(params)
    whole = Oracle(graph, params, {})
    x, start = whole.draw(generator, 3), whole.draw(generator, ROWS)
    known = {b: generator.random(f.shape) < 0.5 for b, f in graph.families.items()} if partly else {}
    made = jax.jit(lambda *args: derive(graph, known, *args))(params, x, start)
    close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=3e-4)

    close(made["log_z"], whole.log_z)
    wide = {b: np.asarray(v, float) for b, v in x.items()}
    close(made["log_density"], log_weight(graph, whole.params, wide))
    check_conditionals(graph, whole, wide, made["eta"], generator, close)
    sums = [Oracle(graph, params, {"a": v}).log_z for v in wide["a"]]
    close(made["log_likelihood"], np.array(sums) - whole.log_z)
    if "free_energy" in made:
        close(-made["free_energy"], sums)
    check_gradient(graph, whole.params, wide["a"], made["gradient"], generator, close)
    check_sweep(graph, start, made["swept"], known)


def check_conditionals(
    graph: FactorGraph, whole: Oracle, x: dict, eta: dict, generator: np.random.Generator, close: Any
) -> None:
    """<eta, t(x) - t(x')> and the base measures are what the log weight changes by, unit by unit."""
    other = {b: np.asarray(v, float) for b, v in whole.draw(generator, 3).items()}
    before = log_weight(graph, whole.params, x)
    for b, family in graph.families.items():
        at = np.asarray(eta[b], float).reshape(3, family.size, -1)
        t, moved = (statistics_of(family, v[b]).reshape(at.shape) for v in (x, other))
        for unit in range(family.size):
            new = x[b].copy()
            new.reshape(3, -1)[:, unit] = other[b].reshape(3, -1)[:, unit]
            change = log_base(family, new) - log_base(family, x[b])
            change = change + (at[:, unit] * (moved - t)[:, unit]).sum(-1)
            close(change, log_weight(graph, whole.params, x | {b: new}) - before)


def check_gradient(
    graph: FactorGraph,
    params: dict,
    rows: np.ndarray,
    gradient: dict,
    generator: np.random.Generator,
    close: Any,
) -> None:
    """Along a random direction, by central differences of the oracle."""
    direction = {name: generator.normal(size=np.shape(w)) for name, w in params.items()}
    value = []
    for step in (1e-5, -1e-5):
        moved = {name: w + step * direction[name] for name, w in params.items()}
        each = [Oracle(graph, moved, {"a": v}).log_z for v in rows]
        value.append(np.mean(each) - Oracle(graph, moved, {}).log_z)
    along = sum(float((np.asarray(gradient[name], float) * d).sum()) for name, d in direction.items())
    close(along, (value[0] - value[1]) / 2e-5)


def check_sweep(graph: FactorGraph, start: dict, swept: dict, known: dict) -> None:
    """A sweep leaves the law as it is, and what is observed."""
    for b, keep in known.items():
        np.testing.assert_array_equal(np.asarray(swept[b])[:, keep], start[b][:, keep])

    def features(x: dict) -> np.ndarray:
        # bounded, so that a mean is nearly normal whatever the tails
        wide = {b: np.asarray(v, float) for b, v in x.items()}
        each = [np.tanh(statistics_of(f, wide[b]) / 2) for b, f in graph.families.items()]
        t = np.concatenate([np.ones((ROWS, 1)), *each], 1)
        return (t[:, :, None] * t[:, None, :])[:, *np.triu_indices(t.shape[1], 1)]

    change = features(swept) - features(start)
    # 1000 examples, of which none may fail by chance
    error = change.std(0, ddof=1) / ROWS**0.5
    assert_law(change.mean(0), 0.0, error, comparisons=1000 * change.shape[1])


UNHURRIED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=6, derandomize=True, **UNHURRIED)  # the same each time: most of it is compilation
@ANY
def test_any_declaration(graph: FactorGraph, seed: int, partly: bool) -> None:
    check(graph, seed, partly)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("EXAMPLES", "200")), **UNHURRIED)
@ANY
def test_many_declarations(graph: FactorGraph, seed: int, partly: bool) -> None:
    check(graph, seed, partly)
