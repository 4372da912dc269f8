# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The transformer: features, scores and draws against enumeration, training, and BernoulliRBM.

Tests sklearn/conversion.py, sklearn/harmonium.py, sklearn/transformer.py.
"""

import dataclasses
from functools import cache, partial
import pickle
from typing import Any

import numpy as np
from oracle import enumerate_numpy
from own_families import Ordinal, Ternary
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.neural_network import BernoulliRBM
from sklearn.utils.estimator_checks import parametrize_with_checks
import zoo

import jax
import jax.numpy as jnp
import optax

from ebmpp import (
    PCD,
    UCD,
    Bernoulli,
    Bias,
    Binomial,
    Categorical,
    FactorGraph,
    Pairwise,
    Poisson,
    exact,
    layered,
)
from ebmpp.errors import ArgumentError, DivergenceError, IntractableError
from ebmpp.estimators import ucd
from ebmpp.estimators.base import Estimate, Estimator
from ebmpp.sklearn import HarmoniumTransformer, from_bernoulli_rbm, to_bernoulli_rbm
from helpers import assert_rows_law, nightly

X = np.array(
    [[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 1, 0]], np.float32
)
WEIGHTS = np.array([1, 2, 3, 1, 0, 2])


def small(**options: Any) -> HarmoniumTransformer:
    defaults = {
        "n_components": 2,
        "visible": "bernoulli",
        "batch_size": 4,
        "n_iter": 1,
        "random_state": 3,
    }
    return HarmoniumTransformer(**defaults | options)


def with_random_params(
    model: HarmoniumTransformer, seed: int = 0
) -> HarmoniumTransformer:
    generator = np.random.default_rng(seed)
    draw = lambda a: (0.7 * generator.normal(size=a.shape)).astype(a.dtype)
    model.params_ = {name: draw(a) for name, a in model.params_.items()}
    return model


@cache
def fitted() -> HarmoniumTransformer:
    return with_random_params(small().fit(X))


def leaves(model: HarmoniumTransformer) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model.params_)])


def sigmoid(a: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-a))


def test_features_are_means_of_the_latent_units() -> None:
    model = fitted()
    for rows in (X, np.array([[0.5, 0.2, 1.0]])):  # grey levels stand for means
        means = sigmoid(rows @ model.components_.T + model.intercept_hidden_)
        np.testing.assert_allclose(model.transform(rows), means, rtol=1e-5)
    assert list(model.get_feature_names_out()) == [
        "harmoniumtransformer0",
        "harmoniumtransformer1",
    ]


@pytest.mark.parametrize(
    ("visible", "latent", "rows"),
    [
        ("bernoulli", "bernoulli", X),
        ("spin", partial(Categorical, num_categories=3), 2 * X - 1),
        nightly(Binomial(3, total_count=2), "spin", 2 * X),
    ],
)
def test_scores_agree_with_enumeration(
    visible: Any, latent: Any, rows: np.ndarray
) -> None:
    model = with_random_params(
        small(visible=visible, latent=latent, n_iter=0).fit(rows), seed=1
    )
    states, probs, _ = enumerate_numpy(model.graph_, model.params_)
    total = [
        sum(p for x, p in zip(states, probs, strict=True) if (x["v"] == row).all())
        for row in rows
    ]
    scores = model.score_samples(rows)
    np.testing.assert_allclose(np.diff(scores), np.diff(np.log(total)), atol=2e-5)
    assert model.score(rows) == pytest.approx(np.mean(np.log(total)), abs=2e-5)


def test_standardised_columns_have_the_density_of_the_columns() -> None:
    rows = np.random.default_rng(0).normal(5, 3, (40, 1))
    model = with_random_params(small(visible="auto", n_iter=0).fit(rows))
    assert model.scaler_ is not None and model.graph_.families["v"].size == 1
    grid = np.linspace(-40, 50, 4001)[:, None]
    log_density = model.score_samples(grid) - float(
        exact.log_partition(model.graph_, model.params_)
    )
    assert np.exp(log_density).sum() * (grid[1, 0] - grid[0, 0]) == pytest.approx(
        1, abs=1e-3
    )


def test_a_score_needs_a_tractable_model() -> None:
    # so that a search over parameters accepts it
    assert hasattr(HarmoniumTransformer(), "score")
    model = HarmoniumTransformer(30, n_iter=0).fit(np.tile(X, 10))
    with pytest.raises(AttributeError) as caught:
        model.score(np.tile(X, 10))
    assert isinstance(caught.value.__cause__, IntractableError)


def test_a_gibbs_step_has_the_exact_distribution() -> None:
    model = fitted()
    on = sigmoid(X[3] @ model.components_.T + model.intercept_hidden_)
    mean = np.zeros(3)
    for h in np.array([[0, 0], [0, 1], [1, 0], [1, 1]]):
        weight = np.prod(np.where(h == 1, on, 1 - on))
        mean += weight * sigmoid(h @ model.components_ + model.intercept_visible_)
    rows = np.tile(X[3], (20_000, 1))
    first, second = model.gibbs(rows), model.gibbs(rows)
    assert_rows_law(first, mean)
    assert (first != second).any()  # random words advance


@pytest.mark.nightly
def test_samples_have_the_distribution_of_the_model() -> None:
    samples = fitted().sample(20_000, n_sweeps=50)
    assert_rows_law(samples, exact.moments(fitted().graph_, fitted().params_)["v"])
    assert samples.shape == (20_000, 3) and set(np.unique(samples)) == {0, 1}


@pytest.mark.parametrize("optimizer", [optax.adam, nightly(None)])
def test_partial_fit_continues_where_fit_stopped(optimizer: Any) -> None:
    three = small(n_iter=3, optimizer=optimizer).fit(X)
    continued = small(n_iter=1, optimizer=optimizer).fit(X)
    parts = pickle.loads(pickle.dumps(continued.partial_fit(X))).partial_fit(X)
    np.testing.assert_array_equal(leaves(three), leaves(parts))
    assert (
        three.history_.identical(parts.history_)
        and three.n_steps_ == parts.n_steps_ == 6
    )
    fresh = small(optimizer=optimizer).partial_fit(X).partial_fit(X).partial_fit(X)
    np.testing.assert_array_equal(leaves(three), leaves(fresh))


@pytest.mark.nightly
@pytest.mark.nightly
def test_epochs_choose_the_method_by_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ucd, "_WORK", 0.0)
    monkeypatch.setattr(ucd, "_LONG", -np.inf)
    rows = np.tile(X, (4, 1))
    model = small(estimator=UCD(num_pairs=8), n_iter=6).fit(rows)
    assert {"mixture", "particles"} < set(model.history_["method"].values[11:])


@pytest.mark.nightly
def test_training_raises_the_likelihood() -> None:
    rows = np.repeat([[1, 1, 1], [0, 0, 0]], 4, axis=0)
    options = {"estimator": PCD(num_chains=50), "learning_rate": 0.2}
    start, model = (small(n_iter=n, **options).fit(rows) for n in (0, 200))
    assert start.score(rows) == pytest.approx(-3 * np.log(2), abs=0.01)
    # minus the entropy of the data
    assert -1.5 < model.score(rows) <= -np.log(2) + 1e-5


@dataclasses.dataclass(frozen=True)
class Mean(Estimator):
    """Its gradient is minus the mean row of the batch; it uses each batch twice."""

    steps_per_batch = 2

    def init_state(
        self, graph: Any, params: Any, data: Any, batch: int, key: Any
    ) -> tuple:
        return ()

    def estimate(
        self, graph: Any, params: Any, state: Any, batch: Any, key: Any
    ) -> Estimate:
        gradient = jax.tree.map(jnp.zeros_like, params) | {
            "v": -batch.weights @ batch.rows["v"]
        }
        return Estimate(
            gradient,
            state,
            {"rows": (batch.weights > 0).sum(), "total": batch.weights.sum()},
        )


def test_an_epoch_has_every_row_once_and_a_short_last_batch() -> None:
    rows = np.eye(6, dtype=np.float32)
    start, model = (
        small(n_iter=n, estimator=Mean(), learning_rate=1.0).fit(rows) for n in (0, 1)
    )
    np.testing.assert_array_equal(model.history_["rows"], [4, 4, 2, 2])
    np.testing.assert_allclose(model.history_["total"], 1)
    change = np.sort(model.params_["v"] - start.params_["v"])
    # two steps of 1/4, or of 1/2
    np.testing.assert_allclose(change, [0.5] * 4 + [1.0] * 2, rtol=1e-5)


@pytest.mark.parametrize("visible", [nightly("bernoulli"), "auto"])
def test_a_row_of_weight_n_counts_as_n_rows(visible: str) -> None:
    rows = (
        X if visible == "bernoulli" else np.random.default_rng(0).normal(2, 3, X.shape)
    )
    repeated_rows = np.repeat(rows, WEIGHTS, axis=0)
    options = {
        "visible": visible,
        "estimator": Mean(),
        "learning_rate": 0.5,
        "n_iter": 2,
    }
    weighted = small(batch_size=len(rows), **options).fit(rows, sample_weight=WEIGHTS)
    repeated = small(batch_size=len(repeated_rows), **options).fit(repeated_rows)
    np.testing.assert_allclose(leaves(weighted), leaves(repeated), rtol=1e-5, atol=1e-6)
    if visible == "auto":
        np.testing.assert_allclose(weighted.scaler_.scale_, repeated.scaler_.scale_)


def test_weights_scale_the_rows_of_an_epoch_and_drop_those_of_weight_0() -> None:
    rows, weights = np.eye(6, dtype=np.float32), WEIGHTS + 1
    options = {"estimator": Mean(), "learning_rate": 1.0, "batch_size": 3}
    start, model = (
        small(n_iter=n, **options).fit(rows, sample_weight=weights) for n in (0, 1)
    )
    change = model.params_["v"] - start.params_["v"]
    # each batch twice
    np.testing.assert_allclose(change, 2 * weights / weights.mean() / 3, rtol=1e-5)
    positive = WEIGHTS > 0
    model = small().fit(X, sample_weight=WEIGHTS).partial_fit(X, sample_weight=WEIGHTS)
    rows, weights = X[positive], WEIGHTS[positive]
    other = (
        small()
        .fit(rows, sample_weight=weights)
        .partial_fit(rows, sample_weight=weights)
    )
    np.testing.assert_array_equal(leaves(model), leaves(other))


def test_params_that_are_not_finite_stop_training() -> None:
    model = small(visible="gaussian", learning_rate=1e30, n_iter=4)
    with pytest.raises(DivergenceError, match=r"epoch \d.*learning_rate"):
        model.fit(X)
    assert np.isfinite(leaves(model)).all()


def test_auto_chooses_the_family_from_the_first_rows() -> None:
    assert small(visible="auto", n_iter=0).fit(X / 3).graph_.families["v"] == Bernoulli(
        3
    )
    reals = small(visible="auto", n_iter=0).fit(X - 0.5)
    np.testing.assert_allclose(reals.scaler_.mean_, X.mean(0) - 0.5, rtol=1e-6)
    assert small(visible="gaussian", n_iter=0).fit(X).scaler_ is None
    columns = np.random.default_rng(0).normal(size=(500, 2))
    small(visible="auto", n_iter=0).fit(columns).score(columns)
    columns = columns @ [[1, 4], [0, 1]]
    # one Gaussian gains half of -log(0.03) - 0.97 by the correlation 0.97
    with pytest.warns(UserWarning, match=r"correlated.* 1\.\d nats per row below"):
        small(visible="auto", n_iter=0).fit(columns).score(columns)


def test_units_of_several_statistics_have_a_column_per_statistic() -> None:
    model = small(latent=partial(Categorical, num_categories=3), n_iter=0).fit(X)
    features = model.transform(X)
    assert features.shape == (6, 6) and len(model.get_feature_names_out()) == 6
    np.testing.assert_allclose(features.reshape(6, 2, 3).sum(2), 1, rtol=1e-5)
    with pytest.raises(AttributeError, match="components_"):
        _ = model.components_


@pytest.mark.parametrize(
    ("options", "rows", "match"),
    [
        ({"weights": np.ones(5)}, X, r"\(5,\)"),
        ({"weights": WEIGHTS - 1}, X, "weights .*-1"),
        ({}, 2 * X, r"2 at row 0, column 0 \(11 such values\)"),
        ({"weights": np.ma.array(WEIGHTS, mask=WEIGHTS > 1)}, X, "weights .*mask"),
        ({}, np.ma.array(X, mask=X > 0), "X .*mask"),
        ({"visible": "poisson"}, X / 2, "0.5 at row 0"),
        ({"visible": "bernouli"}, X, "'bernouli'"),
        ({"visible": Poisson(4)}, X, r"Poisson\(4\)"),
        ({"latent": 7}, X, "latent .*7"),
        ({"n_components": 0}, X, "n_components .*0"),
        ({"learning_rate": 0.0}, X, "learning_rate .*0.0"),
        ({"estimator": PCD}, X, "estimator .*class"),
        ({"optimizer": "adam"}, X, "optimizer .*'adam'"),
    ],
)
def test_invalid_arguments_are_refused(
    options: Any, rows: np.ndarray, match: str
) -> None:
    weights = options.pop("weights", None)
    with pytest.raises(ValueError, match=match):
        small(**options).fit(rows, sample_weight=weights)


#: Training is stochastic, and an epoch has a step per batch of rows, not of weights.
EXPECTED = dict.fromkeys(
    (
        "check_sample_weight_equivalence_on_dense_data",
        "check_sample_weight_equivalence_on_sparse_data",
    ),
    "a row of weight 2 is two rows in the base rates, and in the gradient on average only",
)


@pytest.mark.nightly
@parametrize_with_checks(
    [
        HarmoniumTransformer(),
        HarmoniumTransformer(visible="gaussian", learning_rate=1e-5),
    ],
    expected_failed_checks=lambda model: EXPECTED,
)
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.nightly
def test_draws_of_standardised_columns_are_in_their_units() -> None:
    rows = np.random.default_rng(0).normal([5, -2], [3, 0.5], (40, 2))
    model = HarmoniumTransformer(2, random_state=3, n_iter=1).fit(rows)
    mean = exact.moments(model.graph_, model.params_)["v"]
    assert_rows_law(
        model.sample(20_000, n_sweeps=50), model.scaler_.inverse_transform([mean])[0]
    )


@pytest.mark.nightly
def test_means_are_accepted_only_where_values_are_their_own_statistic() -> None:
    half = np.full((6, 3), 0.5)
    with pytest.raises(ValueError, match="X has 0.5 at row 0, column 0"):
        HarmoniumTransformer(2, visible=Ordinal(3), n_iter=1).fit(half)
    HarmoniumTransformer(2, visible=Ternary(3), n_iter=1).fit(half)


ROWS = np.random.default_rng(0).integers(0, 2, (12, 4)).astype(float)


def test_a_fitted_bernoulli_rbm_becomes_an_equal_graph() -> None:
    machine = BernoulliRBM(3, learning_rate=0.5, n_iter=5, random_state=0).fit(ROWS)
    graph, params = from_bernoulli_rbm(machine)
    np.testing.assert_allclose(
        graph.mean(params, {"v": ROWS}, "h"), machine.transform(ROWS), rtol=1e-5
    )
    np.testing.assert_allclose(
        graph.free_energy(params, {"v": ROWS}), machine._free_energy(ROWS), rtol=1e-5
    )


def test_a_graph_becomes_an_equal_bernoulli_rbm() -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    machine = to_bernoulli_rbm(graph, params, learning_rate=0.01, random_state=0)
    np.testing.assert_allclose(
        machine.transform(ROWS), graph.mean(params, {"v": ROWS}, "h"), rtol=1e-5
    )
    np.testing.assert_allclose(
        machine._free_energy(ROWS), graph.free_energy(params, {"v": ROWS}), rtol=1e-5
    )
    np.testing.assert_allclose(
        from_bernoulli_rbm(machine)[1]["v:h"], params["v:h"], rtol=1e-6
    )
    assert (
        set(np.unique(machine.gibbs(ROWS))) <= {0, 1}
        and len(machine.get_feature_names_out()) == 3
    )
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
    with pytest.raises(ArgumentError, match="n_components .*3.*7"):
        to_bernoulli_rbm(zoo.graph("rbm"), zoo.params("rbm"), n_components=7)
