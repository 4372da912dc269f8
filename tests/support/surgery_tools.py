# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Small random graphs, for tests of what is made of graphs."""

import itertools

from hypothesis import strategies as st

from ebmpp import Bernoulli, Bias, Bilinear, Binomial, Categorical, FactorGraph, Family, Spin, layered
from helpers import random_params

RBM = layered(v=Bernoulli(3), h=Bernoulli(2))
PARAMS = random_params(RBM, seed=1)


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
