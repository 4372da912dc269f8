# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's BernoulliRBM, in and out."""

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.neural_network import BernoulliRBM

from ebmpp import Bernoulli, Bias, FactorGraph, Pairwise, Spin, exact, layered
from ebmpp.errors import ArgumentError
from ebmpp.sklearn import from_bernoulli_rbm, to_bernoulli_rbm
from helpers import random_params

ROWS = np.random.default_rng(0).integers(0, 2, (12, 5)).astype(float)


def test_a_fitted_machine_is_the_same_law_here() -> None:
    machine = BernoulliRBM(3, learning_rate=0.5, n_iter=5, random_state=0).fit(ROWS)
    graph, params = from_bernoulli_rbm(machine)
    np.testing.assert_allclose(graph.mean(params, {"v": ROWS}, "h"), machine.transform(ROWS), rtol=1e-5)
    np.testing.assert_allclose(graph.free_energy(params, {"v": ROWS}), machine._free_energy(ROWS), rtol=1e-5)
    likelihood = exact.log_likelihood(graph, params, ROWS)
    assert np.isfinite(likelihood).all()


def test_and_back() -> None:
    graph = layered(x=Bernoulli(5), z=Bernoulli(3))
    params = random_params(graph, 1)
    machine = to_bernoulli_rbm(graph, params, learning_rate=0.01, random_state=0)
    np.testing.assert_allclose(machine.transform(ROWS), graph.mean(params, {"x": ROWS}, "z"), rtol=1e-5)
    np.testing.assert_allclose(machine._free_energy(ROWS), graph.free_energy(params, {"x": ROWS}), rtol=1e-5)
    again = from_bernoulli_rbm(machine)[1]
    np.testing.assert_allclose(again["v:h"], params["x:z"], rtol=1e-6)
    assert set(np.unique(machine.gibbs(ROWS))) <= {0, 1}
    assert list(machine.get_feature_names_out()) == [f"bernoullirbm{i}" for i in range(3)]
    before = machine.components_.copy()
    machine.partial_fit(ROWS[:10])
    assert not np.array_equal(machine.components_, before)


def test_what_is_refused() -> None:
    with pytest.raises(NotFittedError):
        from_bernoulli_rbm(BernoulliRBM())
    with pytest.raises(ArgumentError, match="a fitted BernoulliRBM"):
        from_bernoulli_rbm(3)
    lateral = FactorGraph(
        {"v": Bernoulli(3)}, {"h": Bernoulli(2)}, [Bias("v"), Bias("h"), Pairwise("v", [(0, 1)])]
    )
    for graph in (layered(v=Spin(2), h=Bernoulli(2)), layered(v=Bernoulli(2)), lateral):
        with pytest.raises(ArgumentError, match="one visible and one latent block of Bernoulli units"):
            to_bernoulli_rbm(graph, random_params(graph))
    rbm = layered(v=Bernoulli(3), h=Bernoulli(2))
    with pytest.raises(ArgumentError, match="n_components=7, and the graph has 2"):
        to_bernoulli_rbm(rbm, random_params(rbm), n_components=7)
