# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Marginalisation of a block into a factor between its neighbours."""

import numpy as np
import pytest
from surgery_tools import STARS, check_marginal, star
import zoo

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Exponential,
    FactorGraph,
    Gaussian,
    Spin,
    marginalize,
)
from ebmpp.errors import DeclarationError, IntractableError, StateError
from ebmpp.graph.transforms import marginalize as elimination
from helpers import random_params


def test_density_and_gradient_of_the_rest() -> None:
    check_marginal(star(*STARS["finite"]), scale=0.8)


def test_block_without_neighbours_leaves_its_normaliser() -> None:
    graph = FactorGraph({"a": Spin(2)}, {"h": Exponential(2)}, [Bias("a"), Bias("h", name="rate")])
    params = random_params(graph)
    rest, theirs = marginalize(graph, "h", params=params)
    assert set(theirs) == {"a", "h"} and rest.edges == set()
    bias, rate = np.asarray(params["a"]), np.asarray(params["rate"])
    expected = np.logaddexp(bias, -bias).sum() - np.log(-rate).sum()
    np.testing.assert_allclose(-rest.free_energy(theirs, {}), expected, rtol=1e-6)


def test_marginals_without_a_closed_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rbm = zoo.graph("rbm")
    with pytest.raises(IntractableError, match="block 'h' depends on 4 units of block 'v'"):
        marginalize(rbm, "h")
    with pytest.raises(IntractableError, match="'h' .Gaussian.2.*not affine .*'b': Gaussian.1.*learned"):
        marginalize(star(Gaussian(2), Spin(1), Gaussian(1)), "h")
    monkeypatch.setattr(elimination, "_MOST_ENTRIES", 17)
    blocks = {b: Categorical(1, 3) for b in "ab"}
    wide = FactorGraph(blocks, {"h": Bernoulli(2)}, [Bilinear("a", "h"), Bilinear("b", "h")])
    with pytest.raises(IntractableError, match="table of 18 entries"):
        marginalize(wide, "h")


def test_wrong_arguments() -> None:
    rbm = zoo.graph("rbm")
    with pytest.raises(DeclarationError, match="'a' is the last block"):
        marginalize(FactorGraph({"a": Spin(1)}, factors=[Bias("a")]), "a")
    with pytest.raises(StateError, match="unknown block 'w'"):
        marginalize(rbm, "w")
    with pytest.raises(DeclarationError, match="name is that of one factor"):
        marginalize(rbm, ["v", "h"], name="x")
    with pytest.raises(DeclarationError, match="two factors are named 'a'"):
        marginalize(star(Bernoulli(1), Spin(1)), "h", name="a")
