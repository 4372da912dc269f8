# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable
import functools

import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Categorical, Exponential, Gaussian, Observed, layered
from ebmpp.errors import StateError
from ebmpp.sampling import completion
from helpers import assert_law, enumerate_numpy, numpy_statistics, pair, random_params

KEY = jax.random.key(3)
DEEP = layered(v=Categorical(4, 3), h1=Bernoulli(2), h2=Bernoulli(2))
PARAMS = random_params(DEEP, seed=1, scale=1.0)
#: a half, a random mask, all but one entry, nothing
TABLE = np.array([[2, 0, np.nan, np.nan], [np.nan, 1, np.nan, 2], [0, 1, np.nan, 2], [np.nan] * 4])


@functools.cache
def complete_table() -> ebmpp.sampling.Completion:
    return ebmpp.complete(
        DEEP,
        PARAMS,
        rng_key=KEY,
        num_chains=400,
        num_warmup=30,
        num_samples=30,
        v=Observed.where_finite(TABLE),
    )


@functools.cache
def law() -> tuple:
    return enumerate_numpy(DEEP, PARAMS)


def given(agrees: Callable[[dict], bool]) -> tuple[list, np.ndarray]:
    """The states that agree, and their probabilities."""
    states, probs, _ = law()
    kept = [(x, p) for x, p in zip(states, probs, strict=True) if agrees(x)]
    weight = np.array([p for _, p in kept])
    return [x for x, _ in kept], weight / weight.sum()


def of_row(row: int) -> tuple[list, np.ndarray]:
    known = np.isfinite(TABLE[row])
    return given(lambda x: (x["v"][known] == TABLE[row][known]).all())


@pytest.mark.parametrize("row", range(len(TABLE)))
def test_means_and_draws_have_the_law_given_what_is_known(row: int) -> None:
    made, (states, probs) = complete_table(), of_row(row)
    known = np.isfinite(TABLE[row])
    for b, family in DEEP.families.items():
        exact = np.einsum("s,s...->...", probs, [numpy_statistics(family, x[b]) for x in states])
        assert_law(made.mean[b][row], exact, made.standard_error[b][row], 4 * 16)
        drawn = numpy_statistics(family, made.draws[b][:, row])
        error = drawn.std(0, ddof=1) / np.sqrt(len(drawn))
        # a value that no draw takes has no error to see: then that of its probability
        bound = np.sqrt(np.abs(exact * (1 - exact)) / len(drawn))
        assert_law(drawn.mean(0), exact, np.maximum(error, bound), 4 * 16)
    assert (made.draws["v"][:, row][:, known] == TABLE[row][known]).all()
    np.testing.assert_array_equal(made.standard_error["v"][row][known], 0)
    np.testing.assert_array_equal(made.mean["v"][row][known].argmax(-1), TABLE[row][known])


def test_means_are_less_noisy_than_draws_and_errors_are_as_told() -> None:
    made = complete_table()
    free = ~np.isfinite(TABLE)
    drawn = numpy_statistics(DEEP.families["v"], made.draws["v"]).std(0, ddof=1) / np.sqrt(400)
    assert (made.standard_error["v"][free].mean(0) < 0.5 * drawn[free].mean(0)).all()
    assert made.r_hat.shape == (4,) and (made.r_hat < 1.05).all()


@pytest.mark.parametrize("method", ["posterior", "local_mode"])
def test_the_mode_is_the_most_probable_state(method: str) -> None:
    made = complete_table()
    if method == "local_mode":
        made = ebmpp.complete(
            DEEP, PARAMS, rng_key=KEY, method=method, num_chains=50, v=Observed.where_finite(TABLE)
        )
        assert made.standard_error is None and made.r_hat is None
        density = DEEP.log_density(PARAMS, {b: jnp.asarray(v) for b, v in made.draws.items()})
        np.testing.assert_allclose(density.max(0), made.log_density, rtol=1e-5)
    for row in range(len(TABLE)):
        states, probs = of_row(row)
        best = states[int(probs.argmax())]
        for b in DEEP.families:
            np.testing.assert_array_equal(made.mode[b][row], best[b])
    value = DEEP.log_density(PARAMS, {b: jnp.asarray(v) for b, v in made.mode.items()})
    np.testing.assert_allclose(made.log_density, value, rtol=1e-5)


def test_means_of_local_modes_are_those_given_the_rest() -> None:
    observed = Observed.where_finite(TABLE)
    made = ebmpp.complete(DEEP, PARAMS, rng_key=KEY, method="local_mode", num_chains=50, v=observed)
    mode = {b: jnp.asarray(v) for b, v in made.mode.items()}
    for b in DEEP.families:
        mean = np.array(DEEP.mean(PARAMS, mode, b))
        if b == "v":
            known = np.isfinite(TABLE)
            mean[known] = numpy_statistics(DEEP.families["v"], TABLE[known])
        np.testing.assert_allclose(made.mean[b], mean, atol=1e-6)


def test_one_free_layer_is_exact_and_axes_are_kept() -> None:
    graph = pair(Gaussian(3), Bernoulli(2))
    params = random_params(graph, 2)
    a = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    made = ebmpp.complete(graph, params, rng_key=KEY, num_chains=2, num_warmup=0, num_samples=1, a=a)
    np.testing.assert_allclose(made.mean["b"], graph.mean(params, {"a": a}, "b"), rtol=1e-5)
    assert (
        set(made.mean) == {"b"}
        and made.draws["b"].shape == (2, 2, 5, 2)
        and made.mode["b"].shape == (2, 5, 2)
    )
    np.testing.assert_allclose(made.standard_error["b"], 0, atol=1e-7)


@pytest.mark.slow
def test_rows_do_not_depend_on_the_rows_beside_them(monkeypatch) -> None:
    run = functools.partial(
        ebmpp.complete, DEEP, PARAMS, rng_key=KEY, num_chains=3, num_warmup=2, num_samples=2
    )
    whole, first = (run(v=Observed.where_finite(t)) for t in (TABLE, TABLE[:1]))
    monkeypatch.setattr(completion, "_MOST_CHAINS", 9)  # three rows a chunk, the last one filled up
    chunks = run(v=Observed.where_finite(TABLE))
    for b in DEEP.families:
        np.testing.assert_array_equal(whole.draws[b], chunks.draws[b])
        np.testing.assert_array_equal(whole.draws[b][:, :1], first.draws[b])
        np.testing.assert_allclose(whole.mean[b], chunks.mean[b], atol=1e-6)


@pytest.mark.slow
def test_chains_that_disagree_are_warned_of() -> None:
    stuck = layered(v=Bernoulli(4), h=Bernoulli(4))
    params = {"v": jnp.full(4, -30.0), "h": jnp.full(4, -30.0), "v:h": jnp.full((4, 4), 16.0)}
    observed = Observed(np.zeros(4), np.zeros(4, bool))
    with pytest.warns(
        UserWarning, match=r"chains of 1 of 1 rows disagree \(R-hat above 1.1.*raise num_warmup"
    ):
        ebmpp.complete(stuck, params, rng_key=KEY, num_samples=20, v=observed)


@pytest.mark.slow
def test_a_family_without_a_mode() -> None:
    class Ternary(ebmpp.Bernoulli):
        def mode(self, eta: jax.Array) -> jax.Array:
            raise NotImplementedError("Ternary has no mode")

    graph = layered(v=Ternary(3), h=Bernoulli(2))
    params, observed = random_params(graph), Observed.where_finite([1.0, np.nan, np.nan])
    options = {"rng_key": KEY, "num_chains": 2, "v": observed}
    made = ebmpp.complete(graph, params, num_samples=4, **options)
    assert made.mode is None and made.log_density is None and made.mean["v"].shape == (3,)
    with pytest.raises(NotImplementedError, match="no mode"):
        ebmpp.complete(graph, params, method="local_mode", **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "map"}, ValueError, "method is one of 'posterior', 'local_mode', not 'map'"),
        ({"num_chains": 0}, ValueError, "num_chains is an int of at least 1, not 0"),
        ({"num_samples": True}, ValueError, "num_samples is an int of at least 1, not True"),
        ({"w": np.zeros(3)}, StateError, "unknown block 'w'"),
        ({"v": np.zeros(4), "h1": np.zeros(2), "h2": np.zeros(2)}, StateError, "nothing is missing"),
        ({"v": TABLE[:1]}, StateError, "block 'v'.*got nan|expected"),
    ],
)
def test_wrong_arguments(options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ebmpp.complete(DEEP, PARAMS, rng_key=KEY, **options)


@pytest.mark.slow
def test_exponential_units_are_completed() -> None:
    graph = pair(Exponential(2), Bernoulli(2))
    params = random_params(graph, 3, 0.2)
    made = ebmpp.complete(
        graph, params, rng_key=KEY, num_chains=2, num_samples=4, a=Observed([1.5, np.nan], [True, False])
    )
    assert made.mean["a"][0] == 1.5 and made.draws["a"][:, 1].min() > 0
