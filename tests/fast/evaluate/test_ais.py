# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import math
from typing import Any

from annealing_tools import GRAPHS, KEY, NUM, PAIR, RING, model, uniform
import numpy as np
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Factor,
    FactorGraph,
    Gaussian,
    Poisson,
    exact,
    layered,
)
from ebmpp.errors import IntractableError, StateError
from ebmpp.moves import Target
from ebmpp.sampling import annealing_path
from ebmpp.sampling.path import summed_blocks
from helpers import assert_law, assert_rows_law, often, random_params

# -- the law of the weights ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    often(GRAPHS, *(n for n in GRAPHS if n not in ("exponential", "learned variance"))),
)
@pytest.mark.filterwarnings("ignore:the effective sample size")
def test_weights_are_unbiased_in_both_directions(name: str) -> None:
    # few temperatures, many particles and a far start: a draw at the wrong temperature, or before its weight,
    # shows
    graph, params, log_z = model(name, 1)
    options = {"num_particles": NUM, "ladder": [0, 0.2, 1], "reference": uniform(graph)}
    above = ebmpp.evaluate.reverse_ais(graph, params, rng_key=KEY, **options)
    below = ebmpp.ais(graph, params, rng_key=KEY, **options)
    assert_rows_law(np.exp(below.log_weights - log_z), 1.0)
    assert_rows_law(np.exp(above.log_weights + log_z), 1.0)
    # and by Jensen one particle alone is on the side that it says, far beyond its error
    for made, sign in ((below, 1), (above, -1)):
        gap = log_z - sign * made.log_weights
        assert sign * gap.mean() > 3 * gap.std() / math.sqrt(len(gap))
    assert (below.bound, above.bound, above.sound) == ("lower", "upper", True)


def test_a_step_leaves_the_law_at_its_end() -> None:
    # in one great step from 0 to 1, draws at the wrong beta, of a wrong order or of shared words are seen
    graph = RING
    params = random_params(graph, 1, 2.0)
    x = ebmpp.perfect_sample(graph, params, jax.random.key(3), NUM)
    summed, betas = summed_blocks(graph), np.float32([0] + [1] * 100)
    keys = ebmpp.core.random.fold_in(jnp.zeros(2, jnp.uint32), jnp.arange(NUM))
    x = {b: v for b, v in x.items() if b not in summed}
    eta = annealing_path.reference(graph, params, PAIR)
    made, _, _ = annealing_path._carry(Target(graph, params), eta, betas, 1, x, keys)
    moments = exact.moments(graph, params)
    assert set(made) == {"b", "c"}
    for b, v in made.items():
        assert (v != x[b]).any()
        assert_rows_law(graph.families[b].statistics(v), moments[b], comparisons=8)


@pytest.mark.parametrize("name", ["rbm", "dbm", "categorical", "gaussian", "harmonium"])
def test_estimates_within_their_errors(name: str) -> None:
    z = []
    for seed in range(4):
        graph, params, log_z = model(name, seed)
        options = {"num_particles": NUM, "num_temperatures": 25}
        made = ebmpp.bracket(graph, params, rng_key=jax.random.key(seed), **options)
        assert made.exact == pytest.approx(log_z)
        assert made.lower.effective_sample_size > NUM / 4
        z += [(side.log_partition - log_z) / side.standard_error for side in (made.lower, made.upper)]
        assert abs(made.gap) < 4 * made.standard_error
    # standard errors that are twice too small or too large are seen in eight numbers
    assert stats.chi2(8).ppf(1e-3) < np.square(z).sum() < stats.chi2(8).isf(1e-3)


def test_any_reference_is_right() -> None:
    graph, params, log_z = model("rbm", 2)
    rows = np.float32([[1, 1, 1, 0, 0, 0, 1], [1, 0, 1, 0, 1, 0, 1]])
    far = {"v": jnp.linspace(-1, 1, 7), "h": jnp.full(5, 0.5)}
    for given in ({}, {"data": rows}, {"reference": far}, {"data": rows, "reference": {"h": far["h"]}}):
        made = ebmpp.ais(graph, params, rng_key=KEY, num_particles=NUM, num_temperatures=4, **given)
        assert_rows_law(np.exp(made.log_weights - log_z), 1.0, comparisons=4)


def test_base_rates_are_the_reference() -> None:
    graph = GRAPHS["rbm"]
    rows = np.float32([[1, 1, 1, 0, 0, 0, 1], [1, 0, 1, 0, 1, 0, 1], [1, 0, 0, 0, 1, 0, 1]])
    eta = annealing_path.reference(graph, random_params(graph), PAIR, rows)
    np.testing.assert_allclose(jax.nn.sigmoid(eta["v"]), (rows.sum(0) + 0.5) / 4, rtol=1e-5)
    assert not eta["h"].any()


@pytest.mark.parametrize("name", ["categorical", "harmonium", "three layers"])
def test_without_data_the_reference_has_the_models_means(name: str) -> None:
    graph, params, _ = model(name, 1)
    eta, exactly = annealing_path.reference(graph, params, PAIR), exact.moments(graph, params)
    for b, family in graph.families.items():
        spread = family.mean(eta[b]) - exactly[b]
        assert np.abs(spread).max() < 5 * float(jnp.sqrt(_variance(family, eta[b])).max()) / math.sqrt(200)
    far = jax.tree.map(jnp.ones_like, eta)
    given = annealing_path.reference(graph, params, PAIR, given={next(iter(eta)): far[next(iter(eta))]})
    for number, b in enumerate(eta):  # what is given goes before, and the others are as they were
        np.testing.assert_array_equal(given[b], far[b] if number == 0 else eta[b])


def _variance(family: Any, eta: jax.Array) -> jax.Array:
    return (
        jax.jvp(family.mean, (eta,), (jnp.ones_like(eta),))[1] if not family.stat_shape else jnp.ones(1) / 4
    )


class Plain(Bernoulli):
    """A family without an inverse mean map."""

    def from_mean(self, mean: jax.Array) -> jax.Array:
        raise NotImplementedError


def test_a_family_without_an_inverse_mean_map_is_annealed() -> None:
    graph = layered(v=Plain(7), h=Bernoulli(5))
    params = random_params(graph, 2)
    made = ebmpp.ais(graph, params, rng_key=KEY, num_particles=NUM, num_temperatures=4)
    log_z = float(exact.log_partition(graph, params))
    assert_rows_law(np.exp(made.log_weights - log_z), 1.0)
    eta = annealing_path.reference(graph, params, PAIR)["v"]
    means = exact.moments(graph, params)["v"]
    assert np.corrcoef(jax.nn.sigmoid(eta), means)[0, 1] > 0.9


def test_both_sides_of_a_bracket_share_a_reference_of_draws_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, params, _ = model("rbm", 1)
    given, keys, anneal, pilot = [], [], annealing_path.anneal, annealing_path._pilot

    def watched(graph: FactorGraph, params: dict, eta0: dict, betas: Any, pair: jax.Array, *rest: Any) -> Any:
        given.append(eta0)
        keys.append(pair)
        return anneal(graph, params, eta0, betas, pair, *rest)

    def piloted(target: Target, key: jax.Array) -> dict:
        keys.append(key)
        return pilot(target, key)

    monkeypatch.setattr(annealing_path, "anneal", watched)
    monkeypatch.setattr(annealing_path, "_pilot", piloted)
    ebmpp.bracket(graph, params, rng_key=KEY, num_particles=NUM, num_temperatures=4)
    assert len(given) == 2 and given[0] is given[1]
    assert len({tuple(map(int, key)) for key in keys}) == 3


def test_independent_blocks_are_exact() -> None:
    graph = FactorGraph({"a": Poisson(3)}, {"b": Gaussian(2)}, [Bias("a"), Bias("b")])
    params = random_params(graph)
    made = ebmpp.ais(graph, params, rng_key=KEY, num_particles=3, num_temperatures=5)
    assert made.log_partition == pytest.approx(float(exact.log_partition(graph, params)), rel=1e-6)
    assert made.effective_sample_size == pytest.approx(3)


def test_as_many_units_as_can_be_are_summed_out() -> None:
    assert summed_blocks(GRAPHS["rbm"]) == ("v",)
    assert summed_blocks(GRAPHS["dbm"]) == ("v", "h2")
    assert summed_blocks(layered(v=Bernoulli(2), h1=Bernoulli(9), h2=Bernoulli(2))) == ("h1",)
    assert summed_blocks(RING) == ("a",)


# -- ladders ---------------------------------------------------------------------------------------


def test_ladders() -> None:
    np.testing.assert_allclose(annealing_path.ladder("linear", 5), [0, 0.25, 0.5, 0.75, 1])
    logistic = 1 / (1 + np.exp(-4 * np.linspace(-1, 1, 9)))
    expected = (logistic - logistic[0]) / (logistic[-1] - logistic[0])
    np.testing.assert_allclose(annealing_path.ladder("sigmoid", 9), expected, atol=1e-6)


def test_an_adaptive_ladder_has_even_steps() -> None:
    graph, params, log_z = model("rbm", 3)
    params = jax.tree.map(lambda a: 2 * a, params)
    eta = uniform(graph)
    options = {"rng_key": KEY, "num_particles": NUM, "num_temperatures": 60, "reference": eta}
    made = ebmpp.ais(graph, params, ladder="adaptive", **options)
    assert made.betas[0] == 0 and made.betas[-1] == 1 and (np.diff(made.betas) > 0).all()
    assert len(made.betas) == 60
    uneven = []
    for betas in (annealing_path.ladder("linear", 60), made.betas):
        _, spread = annealing_path.anneal(graph, params, eta, betas, jnp.zeros(2, jnp.uint32), NUM)
        uneven.append(spread.std() / spread.mean())
    assert uneven[1] < 0.5 * uneven[0]
    log_z = float(exact.log_partition(graph, params))
    assert_law(made.log_partition, log_z, made.standard_error)


# -- programs --------------------------------------------------------------------------------------


def test_a_key_decides() -> None:
    graph, params, _ = model("rbm", 0)
    run = lambda key, num: ebmpp.ais(graph, params, rng_key=key, num_particles=num, num_temperatures=150)
    first = run(KEY, NUM).log_weights
    np.testing.assert_array_equal(first, run(KEY, NUM).log_weights)
    assert (first != run(jax.random.key(1), NUM).log_weights).all()
    # a particle is its own number's
    np.testing.assert_allclose(run(KEY, 9).log_weights, first[:9], rtol=1e-5)


def test_a_second_call_does_not_trace_again() -> None:
    traces = []

    def counted(weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        traces.append(None)
        return -weight * a.sum() * b.sum()

    factor = Factor("a", "b", energy=counted, init=jnp.ones(()))
    graph = FactorGraph({"a": Bernoulli(2)}, {"b": Bernoulli(2)}, [factor])
    options = {"rng_key": KEY, "num_particles": 4}
    ebmpp.ais(graph, {"a:b": jnp.ones(())}, num_temperatures=5, **options)
    before = len(traces)
    ebmpp.ais(graph, {"a:b": jnp.float32(0.5)}, num_temperatures=230, ladder="sigmoid", **options)
    ebmpp.ais(graph, {"a:b": jnp.float32(0.1)}, num_temperatures=20, data=np.zeros((3, 2)), **options)
    assert len(traces) == before


def test_a_progress_bar(capsys: pytest.CaptureFixture) -> None:
    graph, params, _ = model("rbm", 0)
    options = {"rng_key": KEY, "num_particles": NUM, "num_temperatures": 151}
    shown = ebmpp.ais(graph, params, progress_bar=True, **options)
    assert "150/150" in capsys.readouterr().err
    np.testing.assert_array_equal(shown.log_weights, ebmpp.ais(graph, params, **options).log_weights)
    assert capsys.readouterr().err == ""


# -- rows ------------------------------------------------------------------------------------------


def test_log_likelihood_of_rows() -> None:
    graph, params, log_z = model("gaussian", 0)
    rows = np.random.default_rng(0).normal(size=(3, 2, 5)).astype(np.float32)
    made = ebmpp.ais(graph, params, rng_key=KEY, num_particles=NUM, num_temperatures=20)
    ours, truth = made.log_likelihood(rows), exact.log_likelihood(graph, params, rows)
    assert ours.shape == (3, 2)
    np.testing.assert_allclose(ours + (made.log_partition - log_z), truth, rtol=1e-5)
    mean = made.average_log_likelihood(rows)
    assert mean.value == pytest.approx(float(ours.mean()))
    assert mean.standard_error == made.standard_error
    assert mean.row_error == pytest.approx(float(ours.std(ddof=1)) / math.sqrt(6), rel=1e-4)
    assert_law(mean.value, truth.mean(), mean.standard_error)
    with pytest.raises(StateError, match="unknown visible block 'h'"):
        made.log_likelihood({"h": rows})


def test_rows_of_a_deep_model() -> None:
    graph, params, _ = model("dbm", 0)
    made = ebmpp.ais(graph, params, rng_key=KEY, num_particles=NUM, num_temperatures=20)
    with pytest.raises(IntractableError, match="'h1' and 'h2' interact given the visible ones"):
        made.average_log_likelihood(np.zeros((2, 5)))


# -- samples of the user's own ---------------------------------------------------------------------


def test_given_samples() -> None:
    graph, params, log_z = model("rbm", 1)
    x = ebmpp.perfect_sample(graph, params, jax.random.key(5), NUM)
    options = {"rng_key": KEY, "num_temperatures": 10}
    chain = ebmpp.evaluate.reverse_ais(graph, params, samples=x, **options)
    assert not chain.sound and "from approximate samples: no bound" in repr(chain)
    assert len(chain.log_weights) == NUM
    for kept in ("v", "h"):  # the other one is drawn given it
        given = {kept: x[kept]}
        made = ebmpp.evaluate.reverse_ais(graph, params, samples=given, samples_are_exact=True, **options)
        assert made.sound and "upper bound on average" in repr(made)
        assert_rows_law(np.exp(made.log_weights + log_z), 1.0, comparisons=2)
    both = ebmpp.bracket(graph, params, samples={"v": x["v"]}, **options)
    assert len(both.lower.log_weights) == NUM
    assert "upper from approximate samples" in repr(both)


def test_samples_that_do_not_fit() -> None:
    graph, params, _ = model("dbm", 0)
    options = {"rng_key": KEY, "num_temperatures": 5}
    with pytest.raises(IntractableError, match="leave out blocks 'h1' and 'h2', which interact"):
        ebmpp.evaluate.reverse_ais(graph, params, samples={"v": np.zeros((4, 5))}, **options)
    with pytest.raises(StateError, match=r"samples have leading axes \(\), expected \(num_particles,\)"):
        ebmpp.evaluate.reverse_ais(graph, params, samples={"h1": np.ones(3)}, **options)
    with pytest.raises(StateError, match=r"leading axes \(4,\), expected \(7,\), one a particle"):
        ebmpp.evaluate.reverse_ais(graph, params, samples={"h1": np.ones((4, 3))}, num_particles=7, **options)
    with pytest.raises(StateError, match="block 'h1' .* got 0"):
        ebmpp.evaluate.reverse_ais(graph, params, samples={"h1": np.zeros((4, 3))}, **options)
    large = layered(v=Bernoulli(40), h=Bernoulli(30))
    params = random_params(large)
    with pytest.raises(IntractableError, match="there are no perfect ones: .* Give samples=..., the last"):
        ebmpp.evaluate.reverse_ais(large, params, **options)


# -- longer ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_errors_of_larger_models_are_honest() -> None:
    graph, z, bound = layered(v=Bernoulli(100), h=Bernoulli(16)), [], []
    for seed in range(20):
        params = random_params(graph, seed, 0.7)
        made = ebmpp.bracket(graph, params, rng_key=jax.random.key(seed), num_temperatures=3000)
        sides = made.lower, made.upper
        z.append([(side.log_partition - made.exact) / side.standard_error for side in sides])
        bound.append(made.upper.log_partition - made.lower.log_partition)
    z = np.array(z)
    inside = (np.abs(z) < 2).mean(0)
    assert (inside >= 0.75).all(), z
    assert (np.abs(z) < 5).all(), z
    assert np.mean(bound) > -3 * np.std(bound) / math.sqrt(20)


@pytest.mark.parametrize("family", [ebmpp.Bernoulli, ebmpp.Spin])
def test_many_small_steps_add_up(family):
    # 3,000 steps of 60 units whose gains are some 1e-5 each: a rounding that leans to one side shows
    graph = ebmpp.layered(v=family(60), h=family(8))
    params = graph.init(jax.random.key(0))
    made = ebmpp.ais(graph, params, rng_key=KEY, num_particles=50, num_temperatures=3000)
    truth = float(ebmpp.exact.log_partition(graph, params))
    assert abs(made.log_partition - truth) < 5 * made.standard_error + 2e-5
