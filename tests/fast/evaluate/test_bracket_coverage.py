# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The bracket of log Z covers the exact value as often as it says, on the models of the benchmark."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

import ebmpp

FILE = Path(__file__).parents[3] / "benchmarks" / "bracket.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bracket", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_default_reference_suits_a_trained_machine(bench) -> None:
    options = {"keys": range(4), "num_temperatures": 1000}
    made = bench.called(0, **options)
    assert max(abs(p["error"]) / p["standard_error"] for p in made) < stats.norm.isf(1e-4 / 8)
    assert min(p["effective"] for p in made) > 50 and not any(p["warned"] for p in made)
    biases = bench.own_biases(*bench.model("trained by PCD, 16x16", 0))
    far = bench.called(0, reference=biases, **options)
    assert max(p["effective"] for p in far) < 25 and all(p["warned"] for p in far)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trained by PCD, 16x16", "trained by CD-1, 16x16"])
def test_the_default_call_is_right_on_trained_machines(bench, kind: str) -> None:
    points = []
    for seed in range(5):  # forty keys in all, as the benchmark has them
        points += bench.called(seed, range(8 * seed, 8 * seed + 8), kind=kind)
    told = bench.in_short(points)
    assert told["keys"] == 40 and told["within_two"] >= 36 and told["warned"] == 0, told
    assert told["root_mean_square_error"] < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("temperatures", [20, 300])
def test_exact_values_are_covered_as_often_as_stated(bench, temperatures: int) -> None:
    args = bench.parse(["--repeats", "10"])
    kinds = [(kind, seed) for kind in bench.KINDS for seed in range(bench.MODELS)]
    models = [bench.brackets(kind, seed, temperatures, args) for kind, seed in kinds]
    assert len(models) == 20
    hits = {name: [bench.covered(m)[name] for m in models] for name in ("bracket", "lower", "upper")}
    for name, each in hits.items():
        count, total = int(np.sum(each)), np.size(each)
        assert total == 200
        # were the rate as stated, so few would be seen once in 10,000 times; one side's own interval is that
        # of a normal law, which few temperatures are not near enough to
        if name == "bracket" or temperatures == 300:
            assert count >= stats.binom(total, bench.LEVEL).ppf(1e-4), (name, count)
    # the intervals of a side are no wider than they need be
    assert np.sum(hits["lower"]) < 200 and np.sum(hits["upper"]) < 200


@pytest.mark.slow
def test_brackets_of_trained_machines_hold_the_exact_value(bench) -> None:
    args = bench.parse(["--repeats", "10"])
    models = [bench.brackets(kind, seed, 300, args) for kind in bench.TRAINED for seed in range(bench.MODELS)]
    count = int(np.sum([bench.covered(m)["bracket"] for m in models]))
    assert count >= stats.binom(100, bench.LEVEL).ppf(1e-4)


@pytest.mark.slow
def test_the_bracket_exposes_what_chains_from_the_rows_flatter(bench) -> None:
    points = bench.diverge(bench.parse(["--steps", "20000", "--points", "10"]))
    exact = np.array([point["exact"] for point in points])
    assert exact[-1] < exact.max() - 20  # it has diverged
    last = points[-1]
    assert last["below"] - 4 * last["below_error"] <= last["exact"] <= last["above"] + 4 * last["above_error"]
    assert last["above_error"] < 6 and last["below_error"] < 6
    assert last["from_the_rows"] > bench._BEST  # which no model has


@pytest.mark.slow
def test_chains_from_the_rows_are_right_where_they_mix(bench) -> None:
    rbm, rows = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3)), jnp.asarray([[0.0, 1, 1, 0]])
    params = bench.random_params(rbm, 0.5, 0)
    estimate = bench.from_the_rows(rbm, params, rows, jax.random.key(0), 20_000)
    assert float(estimate[0]) == pytest.approx(
        float(ebmpp.exact.log_likelihood(rbm, params, rows)[0]), abs=0.02
    )
