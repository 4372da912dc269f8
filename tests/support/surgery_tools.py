# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Small random graphs, and checks of conditioned and marginalised graphs against enumeration."""

import itertools
from typing import Any

from hypothesis import strategies as st
import numpy as np

import jax

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Binomial,
    Categorical,
    FactorGraph,
    Family,
    Gaussian,
    Observed,
    Poisson,
    Spin,
    condition,
    marginalize,
)
from helpers import random_params, random_state


def families(most_units: int = 2) -> st.SearchStrategy[Family]:
    """Families of finitely many values."""
    units = st.integers(1, most_units)
    return st.one_of(
        st.builds(Bernoulli, units),
        st.builds(Spin, units),
        st.builds(lambda n: Categorical(n, num_categories=3), st.just(1)),
        st.builds(lambda n: Binomial(n, total_count=2), units),
    )


@st.composite
def graphs(draw: st.DrawFn) -> FactorGraph:
    """Two or three blocks with biases, some of them coupled, the first visible."""
    names = "abc"[: draw(st.integers(2, 3))]
    blocks = {b: draw(families()) for b in names}
    pairs = list(itertools.combinations(names, 2))
    edges = draw(st.sets(st.sampled_from(pairs), min_size=1))
    factors = [*map(Bias, names), *(Bilinear(*e) for e in sorted(edges))]
    latent = {b: f for b, f in blocks.items() if b != "a"}
    return FactorGraph({"a": blocks["a"]}, latent, factors)


#: a latent block, and its visible neighbours
STARS = {
    "finite": (Bernoulli(2), Spin(1), Categorical(1, 3)),
    "counts": (Poisson(2), Binomial(1, total_count=1), Bernoulli(1)),
    "gaussian": (Gaussian(2), Gaussian(1, variance="learned"), Gaussian(1, variance="learned"), Spin(1)),
}


def star(hidden: Family, *leaves: Family) -> FactorGraph:
    """A latent block ``h`` and visible blocks around it."""
    visible = dict(zip("abcd", leaves, strict=False))
    factors = [*map(Bias, [*visible, "h"]), *(Bilinear(b, "h") for b in visible)]
    return FactorGraph(visible, {"h": hidden}, factors)


def check_marginal(graph: FactorGraph, seed: int = 0, scale: float = 0.4) -> None:
    """The density of the rest and its gradient are those of the graph with h summed out."""
    params = random_params(graph, seed, scale)
    rest, theirs = marginalize(graph, "h", params=params)
    x = {b: random_state(f, seed=i, rows=(16,)) for i, (b, f) in enumerate(rest.families.items())}

    @jax.jit
    def derive(params: dict, theirs: dict) -> tuple:
        expected = lambda p: graph.marginal(p, x, "h")
        actual = lambda p: rest.log_density(p, x)
        slopes = [jax.grad(lambda p, f=f: f(p).sum())(p) for f, p in ((actual, theirs), (expected, params))]
        return actual(theirs), expected(params), *slopes

    actual, expected, slope, expected_slope = jax.device_get(derive(params, theirs))
    size = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(actual, expected, atol=1e-5 * size)
    slope = {**{n: v for n, v in slope.items() if n != "h"}, **slope["h"]}
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * size)
    jax.tree.map(close, slope, dict(expected_slope))


def check_condition(graph: FactorGraph, seed: int, partial: bool) -> None:
    """Conditioning on the first block, and on a unit of the second, keeps the joint density."""
    params = random_params(graph, seed)
    first, second, *_ = graph.families
    x = {b: random_state(f, seed + i, (4,)) for i, (b, f) in enumerate(graph.families.items())}
    x[first] = np.repeat(x[first][:1], 4, 0)
    given: dict[str, Any] = {first: x[first][0]}
    rest = {b: v for b, v in x.items() if b != first}
    if partial and graph.families[second].size > 1:
        x[second][:, 0] = x[second][0, 0]
        given[second] = Observed(x[second][0], np.arange(graph.families[second].size) == 0)
        rest[second] = x[second][:, 1:]
    conditioned = condition(graph, **given)
    derive = jax.jit(lambda p: (conditioned.log_density(p, rest), graph.log_density(p, x)))
    np.testing.assert_allclose(*derive(params), rtol=1e-5, atol=1e-5)
