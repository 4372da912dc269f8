# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conversion from and to scikit-learn's BernoulliRBM."""

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.neural_network import BernoulliRBM
import zoo

from ebmpp import Bernoulli, Bias, FactorGraph, Pairwise, layered
from ebmpp.errors import ArgumentError
from ebmpp.sklearn import from_bernoulli_rbm, to_bernoulli_rbm

ROWS = np.random.default_rng(0).integers(0, 2, (12, 4)).astype(float)


def test_a_fitted_bernoulli_rbm_becomes_an_equal_graph() -> None:
    machine = BernoulliRBM(3, learning_rate=0.5, n_iter=5, random_state=0).fit(ROWS)
    graph, params = from_bernoulli_rbm(machine)
    np.testing.assert_allclose(graph.mean(params, {"v": ROWS}, "h"), machine.transform(ROWS), rtol=1e-5)
    np.testing.assert_allclose(graph.free_energy(params, {"v": ROWS}), machine._free_energy(ROWS), rtol=1e-5)


def test_a_graph_becomes_an_equal_bernoulli_rbm() -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    machine = to_bernoulli_rbm(graph, params, learning_rate=0.01, random_state=0)
    np.testing.assert_allclose(machine.transform(ROWS), graph.mean(params, {"v": ROWS}, "h"), rtol=1e-5)
    np.testing.assert_allclose(machine._free_energy(ROWS), graph.free_energy(params, {"v": ROWS}), rtol=1e-5)
    np.testing.assert_allclose(from_bernoulli_rbm(machine)[1]["v:h"], params["v:h"], rtol=1e-6)
    assert set(np.unique(machine.gibbs(ROWS))) <= {0, 1} and len(machine.get_feature_names_out()) == 3
    before = machine.components_.copy()
    machine.partial_fit(ROWS[:10])
    assert not np.array_equal(machine.components_, before)


def test_other_models_are_refused() -> None:
    with pytest.raises(NotFittedError):
        from_bernoulli_rbm(BernoulliRBM())
    with pytest.raises(ArgumentError, match="BernoulliRBM"):
        from_bernoulli_rbm(3)
    factors = [Bias("v"), Bias("h"), Pairwise("v", [(0, 1)])]
    lateral = FactorGraph({"v": Bernoulli(3)}, {"h": Bernoulli(2)}, factors)
    for graph in (zoo.graph("spin"), layered(v=Bernoulli(2)), lateral):
        params = {name: np.zeros(a.shape) for name, a in graph.param_shapes.items()}
        with pytest.raises(ArgumentError, match="Bernoulli units"):
            to_bernoulli_rbm(graph, params)
    with pytest.raises(ArgumentError, match="n_components=7"):
        to_bernoulli_rbm(zoo.graph("rbm"), zoo.params("rbm"), n_components=7)
