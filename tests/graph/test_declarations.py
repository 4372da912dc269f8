# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random declarations: log Z, likelihood, gradient, natural parameters and a sweep
against enumeration.

Tests graph/declaration.py, graph/factors/factor.py.
"""

from collections.abc import Mapping
import dataclasses
import itertools
import math
import os
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings, strategies as st
import numpy as np
from oracle import (
    Oracle,
    check_natural_parameters,
    log_weight,
    statistics_of,
    unit_values,
)
from own_families import Ordinal, Ternary
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Categorical,
    Factor,
    FactorGraph,
    Family,
    Gaussian,
    Observed,
    exact,
)
from ebmpp.core import random
from ebmpp.graph import Linear, states
from ebmpp.moves import gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target
from helpers import assert_law

_MOST_STATES = 6000

FINITE = {
    "bernoulli": Bernoulli,
    "spin": ebmpp.Spin,
    "categorical": lambda n: Categorical(n, 3),
    "binomial": lambda n: ebmpp.Binomial(n, 2),
    "ternary": Ternary,
    "ordinal": Ordinal,
}
UNBOUNDED = {
    "poisson": lambda n: ebmpp.Poisson(1),  # a second unit has too many states
    "exponential": ebmpp.Exponential,
    "gaussian": Gaussian,
    "learned": lambda n: Gaussian(n, "learned"),
}


@dataclasses.dataclass(frozen=True)
class Spread:
    """The forward map of a :class:`Linear`: the sum of a block, each of its units, and
    a constant."""

    shape: tuple[int, ...]

    def __call__(self, w: jax.Array, t: jax.Array) -> jax.Array:
        return w[0] * t.sum() + w[1] * jnp.resize(t, self.shape) + w[2]


def gate(w: jax.Array, *statistics: jax.Array) -> jax.Array:
    """Return a third-order energy."""
    return -jnp.einsum("ijk,i,j,k", w, *(t.ravel() for t in statistics))


def first_two(w: jax.Array, t: jax.Array) -> jax.Array:
    """Return the energy of the first two units."""
    return -w * jnp.vdot(t[0], t[1])


@st.composite
def declarations(draw: st.DrawFn) -> FactorGraph:
    """Draw two to four blocks; unbounded ones interact with finite ones, Gaussian ones
    with each other."""
    names = "abcd"[: draw(st.integers(2, 4))]
    blocks: dict[str, Family] = {}
    for b in names:
        kinds = (
            FINITE
            if sum(f.states() is None for f in blocks.values()) == 2
            else FINITE | UNBOUNDED
        )
        blocks[b] = kinds[draw(st.sampled_from(sorted(kinds)))](
            draw(st.sampled_from([2, 1, 3]))
        )
    while (
        math.prod(
            len(unit_values(f)) ** f.size for f in blocks.values() if unit_values(f)
        )
        > _MOST_STATES
    ):
        listed = [b for b in blocks if unit_values(blocks[b])]
        largest = max(
            listed, key=lambda b: blocks[b].size * len(unit_values(blocks[b]))
        )
        blocks[largest] = Bernoulli(
            blocks[largest].size if blocks[largest].size < 3 else 2
        )
    factors: list[Factor] = [
        Bias(b, shared=(0,) if draw(st.booleans()) else ()) for b in names
    ]
    joined = draw(
        st.sets(st.sampled_from(list(itertools.combinations(names, 2))), min_size=1)
    )
    factors += [
        _joint(draw, blocks, *edge)
        for edge in sorted(joined)
        if _may_meet(blocks, *edge)
    ]
    third = [
        c
        for c in itertools.combinations(names, 3)
        if all(_is_tame(blocks[b]) for b in c)
    ]
    if third and draw(st.booleans()):
        scope = draw(st.sampled_from(third))
        if sum(blocks[b].states() is None for b in scope) < 2:
            init = np.zeros(tuple(math.prod(blocks[b].statistic_shape) for b in scope))
            factors.append(Factor(*scope, energy=gate, init=init))
    wide = [b for b in names if blocks[b].size > 1 and _is_tame(blocks[b])]
    if wide and draw(st.booleans()):
        factors.append(_lateral(draw, blocks, draw(st.sampled_from(wide))))
    return FactorGraph(
        {"a": blocks["a"]}, {b: f for b, f in blocks.items() if b != "a"}, factors
    )


def _is_tame(family: Family) -> bool:
    """Return True if every natural parameter is legal."""
    return family.states() is not None or family == Gaussian(family.size)


def _may_meet(blocks: Mapping[str, Family], a: str, b: str) -> bool:
    unbounded = [blocks[n] for n in (a, b) if blocks[n].states() is None]
    return len(unbounded) < 2 or all(isinstance(f, Gaussian) for f in unbounded)


def _joint(draw: st.DrawFn, blocks: Mapping[str, Family], a: str, b: str) -> Factor:
    kind = draw(st.sampled_from(["bilinear", "linear", "convolution"]))
    if kind == "convolution" and blocks[a].size != blocks[b].size + 1:
        a, b = b, a
    if kind == "convolution" and blocks[a].size == blocks[b].size + 1:
        return ebmpp.Convolution(a, b, window=(2,))
    if kind == "linear":
        return Linear(a, b, forward=Spread(blocks[b].interaction_shape), shape=(3,))
    return ebmpp.Bilinear(a, b)


def _lateral(draw: st.DrawFn, blocks: Mapping[str, Family], block: str) -> Factor:
    if draw(st.booleans()):
        return Factor(
            block,
            energy=first_two,
            init=np.zeros(()),
            lateral={block: [(0, 1)]},
            name="lateral",
        )
    pairs = list(itertools.pairwise(range(blocks[block].size)))
    return ebmpp.Pairwise(block, pairs, shared=draw(st.booleans()), name="lateral")


def _reach(family: Family) -> float:
    """Return the largest sum of all units' statistics, where it is bounded, else 1."""
    states = family.states()
    t = np.zeros(1) if states is None else np.abs(np.asarray(family.statistics(states)))
    return max(1.0, family.size * float(t.reshape(len(t), -1).max(0).sum()))


def params_of(graph: FactorGraph, seed: int) -> dict[str, Any]:
    """Return random params, inside every domain."""
    generator = np.random.default_rng(seed)
    params = graph.init(jax.random.key(0), scheme={"weight": "zero", "bias": "zero"})
    for factor in graph.factors:
        families = [graph.families[b] for b in factor.blocks]
        held = (
            not all(map(_is_tame, families))
            or sum(f.states() is None for f in families) > 1
        )
        # three such factors must leave an ebmpp.Exponential unit's natural parameter,
        # at most -0.7, below 0
        joint = min(0.06, 0.2 / max(map(_reach, families)))
        scale = (
            joint
            if held and factor.role != "bias"
            else 0.3
            if held or factor.lateral
            else 0.5
        )
        noise = lambda a, s=scale: (
            s * np.clip(generator.normal(size=np.shape(a)), -1, 1)
        )
        moved = lambda a, n=noise: jnp.asarray(a + n(a), jnp.float32)
        params[factor.name] = jax.tree.map(moved, params[factor.name])
    return params


ROWS = 3000
# most of the time is compilation
FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def derive(
    graph: FactorGraph, masks: dict[str, np.ndarray], params: Any, x: dict, start: dict
) -> dict:
    """Everything that is compared, in one program."""

    def mean_log_likelihood(p: Any) -> tuple:
        rows = exact.log_likelihood(graph, p, {"a": x["a"]})
        return rows.mean(), rows

    (_, rows), gradient = jax.value_and_grad(mean_log_likelihood, has_aux=True)(params)
    result = {
        "log_likelihood": rows,
        "gradient": gradient,
        "log_z": exact.log_partition(graph, params),
    }
    result["log_density"] = graph.log_density(params, x)
    result["eta"] = {b: graph.natural_parameters(params, x, b) for b in graph.families}
    if not graph.interacting(graph.latent):
        result["free_energy"] = graph.free_energy(params, {"a": x["a"]})
    held = states.as_clamped(
        graph.families, {b: Observed(start[b], mask) for b, mask in masks.items()}
    )
    keys = random.fold_in(random.key_pair(zoo.KEY), jnp.arange(ROWS))
    result["swept"] = draw_sweep(
        Target(graph, params, held), start, gibbs_sweep(graph), keys
    )[0]
    return result


def check(graph: FactorGraph, number: int, partly_observed: bool) -> None:
    params, generator = params_of(graph, number), np.random.default_rng(number)
    graph.check(params)
    joint = Oracle(graph, params, {})
    x, start = joint.draw(generator, 3), joint.draw(generator, ROWS)
    observed = graph.families if partly_observed else {}
    masks = {b: generator.random(f.shape) < 0.5 for b, f in observed.items()}
    run = jax.jit(
        lambda *args: derive(graph, masks, *args), compiler_options=FAST_COMPILE
    )
    result = jax.device_get(run(params, x, start))
    close = lambda actual, expected: np.testing.assert_allclose(
        actual, expected, rtol=2e-4, atol=3e-4
    )

    close(result["log_z"], joint.log_z)
    wide = {b: np.asarray(v, float) for b, v in x.items()}
    close(result["log_density"], log_weight(graph, joint.params, wide))
    check_natural_parameters(graph, joint, wide, result["eta"], generator, close)
    sums = [Oracle(graph, params, {"a": v}).log_z for v in wide["a"]]
    close(result["log_likelihood"], np.array(sums) - joint.log_z)
    if "free_energy" in result:
        close(-result["free_energy"], sums)
    direction = {
        name: generator.normal(size=np.shape(w)) for name, w in joint.params.items()
    }
    along = sum(
        float((result["gradient"][name] * d).sum()) for name, d in direction.items()
    )
    close(along, slope_of_log_likelihood(graph, joint.params, direction, wide["a"]))
    check_sweep(graph, start, result["swept"], masks)


def slope_of_log_likelihood(
    graph: FactorGraph, params: dict, direction: dict, rows: np.ndarray
) -> float:
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
        statistics = [
            np.tanh(statistics_of(f, wide[b]) / 2) for b, f in graph.families.items()
        ]
        t = np.concatenate([np.ones((ROWS, 1)), *statistics], 1)
        return (t[:, :, None] * t[:, None, :])[:, *np.triu_indices(t.shape[1], 1)]

    change = features(swept) - features(start)
    # 1000 examples, of which none may fail by chance
    error = change.std(0, ddof=1) / ROWS**0.5
    assert_law(change.mean(0), 0.0, error, comparisons=1000 * change.shape[1])


@pytest.mark.nightly
def test_random_declarations_match_enumeration() -> None:
    options = {
        "deadline": None,
        "database": None,
        "suppress_health_check": list(HealthCheck),
    }
    # to shrink a failure would compile hundreds of programs
    options["phases"] = [Phase.generate]
    # The same examples each time, whose programs are in the cache; EXAMPLES=1000 tries
    # others.
    options["derandomize"] = "EXAMPLES" not in os.environ
    run = given(declarations(), st.integers(0, 999), st.booleans())(check)
    settings(max_examples=int(os.environ.get("EXAMPLES", "60")), **options)(run)()
