# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Rows in memory, in files and in streams, their weights and their order.

Tests training/batches.py.
"""

import asyncio
import dataclasses
import itertools
import threading
from typing import Any

import numpy as np
import pytest
from training_tools import (
    ROWS,
    Recorder,
    as_memmap,
    assert_same_run,
    leaves,
    rows_seen,
    train,
    weights_seen,
)
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import exact
from ebmpp.errors import DataError, StateError
from ebmpp.estimators.base import Estimate, Estimator
from ebmpp.training import batches as batches_module

BATCHES = [ROWS[i : i + 2] for i in range(0, 10, 2)]
SEEN = np.arange(10).reshape(5, 2)


@dataclasses.dataclass(frozen=True)
class Exact(Estimator):
    """The exact gradient, with log Z by enumeration."""

    def init_state(
        self, graph: Any, params: Any, data: Any, batch: int, key: Any
    ) -> tuple:
        return ()

    def estimate(
        self, graph: Any, params: Any, state: Any, batch: Any, key: Any
    ) -> Estimate:
        energy = lambda p: batch.weights @ graph.free_energy(p, batch.rows)
        loss = lambda p: energy(p) + batch.weights.sum() * exact.log_partition(graph, p)
        return Estimate(jax.grad(loss)(params), (), {})


def test_a_row_of_weight_n_counts_as_n_rows() -> None:
    graph, params, rows = zoo.graph("rbm"), zoo.params("rbm"), zoo.rows("rbm", 6)["v"]
    counts = np.array([3, 0, 1, 2, 5, 1])
    options = {
        "rng_key": zoo.KEY,
        "estimator": Exact(),
        "optimizer": optax.sgd(1.0),
        "params": params,
    }
    options |= {"num_steps": 1, "weights": 0.01 * counts, "progress_bar": False}
    fit = ebmpp.fit(graph, rows, **options)
    gradient = exact.grad_log_likelihood(graph, params, np.repeat(rows, counts, axis=0))
    np.testing.assert_allclose(
        leaves(fit.params) - leaves(params), leaves(gradient), atol=1e-6
    )


def test_weights_in_small_batches_have_mean_one_per_row() -> None:
    weights = np.arange(10)
    weighted = train(num_steps=5, weights=weights)
    np.testing.assert_allclose(
        weights_seen(weighted), rows_seen(weighted) / 4.5 / 4, rtol=1e-6
    )
    plain = train(num_steps=5)
    np.testing.assert_array_equal(weights_seen(plain), 1 / 4)
    assert_same_run(train(num_steps=5, weights=np.full(10, 7)), plain)


def test_initial_biases_are_those_of_weighted_rows() -> None:
    graph, rows = zoo.graph("binomial"), ROWS[[0, 1, 4, 6, 8] * 2]
    weights = np.isin(np.arange(10), [0, 1, 4, 6, 8])
    fit = train(weights=weights, params=None, num_steps=1, estimator=Recorder())
    start = graph.init(jax.random.split(zoo.KEY, 3)[0], rows)
    np.testing.assert_allclose(
        fit.params["v"], start["v"] + 0.5 * (1 - start["v"]), rtol=1e-5
    )


def test_a_memory_mapped_file_trains_like_an_array(tmp_path: Any) -> None:
    options = {"weights": np.arange(10), "num_steps": 6}
    file = as_memmap(ROWS.astype(np.uint8), tmp_path / "rows")
    fit = train(file, **options)
    assert_same_run(fit, train(**options))


def test_an_invalid_row_of_a_file_is_named_when_its_step_comes(
    tmp_path: Any, monkeypatch: Any
) -> None:
    # rows 0, 3, 6, 9 are checked at the start
    monkeypatch.setattr(batches_module, "_SAMPLE_ROWS", 4)
    data = ROWS.copy()
    data[7] = np.nan
    with pytest.raises(
        DataError, match="row 7 of the data: block 'v' .* got nan"
    ) as error:
        train(as_memmap(data, tmp_path / "rows"))
    # an epoch has 2.5 steps
    assert error.value.step == error.value.history.sizes["step"] <= 2
    data[7], data[3] = 1, np.nan
    with pytest.raises(StateError, match="row 3 of the data"):
        train(as_memmap(data, tmp_path / "other"))


def one_buffer() -> Any:
    """Batches in one array that is overwritten."""
    buffer = np.empty((2, 2), np.float32)
    for batch in BATCHES:
        buffer[:] = batch
        yield buffer


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(BATCHES),
        lambda: one_buffer,
        lambda: [{"v": batch} for batch in BATCHES],
    ],
    ids=["iterator", "function", "dicts"],
)
def test_a_stream_is_used_in_its_order(make: Any) -> None:
    fit = train(make(), num_steps=5)
    np.testing.assert_array_equal(rows_seen(fit), SEEN)
    assert fit.estimator_state["batch_size"] == 2


def test_a_stream_that_ends_keeps_what_was_trained() -> None:
    options = {"monitors": {"v": lambda p: p["v"].sum()}, "monitor_every": 2}
    with pytest.raises(DataError, match=r"step 5: .*itertools\.cycle") as error:
        train(iter(BATCHES), num_steps=8, **options)
    stream = iter([*BATCHES, *BATCHES])
    complete = train(stream, num_steps=5)
    assert len(list(stream)) == 5  # no batch is read after the last step
    assert error.value.step == 5
    np.testing.assert_array_equal(leaves(error.value.params), leaves(complete.params))
    np.testing.assert_array_equal(
        error.value.history["gradient_norm"], complete.history["gradient_norm"]
    )


@pytest.mark.parametrize(
    ("batches", "options", "match"),
    [
        (ROWS, {"weights": np.ones(9)}, r"\(9,\)"),
        (ROWS, {"weights": [1, -2] + 8 * [1]}, "-2"),
        ([], {}, "batch 0"),
        (
            [ROWS[:2], ROWS[:3]],
            {},
            "step 1: rows of batch 1 of the stream must be 2 .* got 3",
        ),
        (
            [ROWS[:2]] * 3 + [ROWS[:2] * np.nan],
            {},
            "step 3: batch 3 of the stream: block 'v' .* got nan",
        ),
        ([ROWS[:2]], {"batch_size": 3}, "must be 3 .batch_size"),
        ([ROWS], {"weights": np.ones(10)}, "weights"),
    ],
)
def test_invalid_streams_and_weights_are_refused(
    batches: Any, options: dict, match: str
) -> None:
    threads = threading.enumerate()
    with pytest.raises(StateError, match=match):
        train(batches if batches is ROWS else iter(batches), **options)
    assert threading.enumerate() == threads


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_stream_is_read_by_a_thread_that_ends_with_the_run(error: Any) -> None:
    readers, threads = [], threading.enumerate()

    def endless() -> Any:
        try:
            for batch in itertools.cycle(BATCHES):
                readers.append(threading.get_ident())
                yield batch
        finally:
            readers.append("closed")

    def stop(progress: Any) -> bool:
        if progress.step == 4 and error is not None:
            raise error
        return progress.step == 4

    options = {"num_steps": 10**6, "monitor_every": 2, "callbacks": [stop]}
    if error is None:
        assert train(endless, **options).history.sizes["step"] == 4
    else:
        with pytest.raises(error):
            train(endless, **options)
    main = threading.get_ident()
    assert readers[0] == main and main not in readers[1:] and readers[-1] == "closed"
    assert threading.enumerate() == threads


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError("stop"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("fails_at", [0, 3])
def test_any_exception_of_a_stream_ends_the_run(
    error: BaseException, fails_at: int
) -> None:
    def stream() -> Any:
        yield from BATCHES[:fails_at]
        raise error

    threads = threading.enumerate()
    with pytest.raises(type(error)) as caught:
        train(stream, num_steps=30)
    assert caught.value is error and threading.enumerate() == threads
    assert not fails_at or 0 < error.step == error.history.sizes["step"] <= 3


@pytest.mark.nightly
def test_the_reading_thread_uses_the_precision_of_the_caller() -> None:
    with jax.enable_x64(True):
        fit = train((batch.astype(float) for batch in BATCHES), num_steps=2)
    assert (
        fit.history["row 1"].dtype == np.float64
        and jnp.asarray(1.0).dtype == np.float32
    )
