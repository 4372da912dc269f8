# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Rows on the device, in files and in streams, and their weights."""

import dataclasses
import itertools

import numpy as np
import pytest
from training_tools import NUMBERED, ROWS, assert_same_run, leaves, mapped, numbered, rows_seen, weights_seen

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, FactorGraph, exact
from ebmpp.errors import DataError, StateError
from ebmpp.estimators.base import Estimate, Estimator
from ebmpp.estimators.phases import signed_gradient
from ebmpp.training import batches
from ebmpp.training.fitting import estimate_step
from helpers import pair, random_params

KEY = jax.random.key(0)
RBM = pair(Bernoulli(3), Bernoulli(2))
DATA = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 1], [0, 1, 1], [1, 0, 1]], np.float32)


# -- weights -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Exact(Estimator):
    """The loss's gradient, log Z by enumeration."""

    def init(self, graph, params, data, batch, key):
        return ()

    def estimate(self, graph, params, state, batch, key):
        data = signed_gradient(graph, params, batch.rows, batch.weights)
        model = jax.grad(lambda p: exact.log_partition(graph, p))(params)
        share = batch.weights.sum()
        return Estimate(jax.tree.map(lambda d, m: d + share * m, data, model), (), {"share": share})


def gradients(weights, batch_size, count):
    """Of the first batches, at given params."""
    source = batches.as_source(RBM, DATA, weights, batch_size, KEY)
    params = random_params(RBM)
    made = []
    for s in map(source.batch, range(count)):
        given = (s.rows, s.index, jnp.zeros(2, jnp.uint32), jnp.uint32(0), s.weights)
        made.append(leaves(estimate_step(RBM, Exact(), params, (), *given)[0]))
    return made


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_whole_numbers_as_weights_are_rows_repeated(scale):
    """In a full batch, and on average over the batches of an epoch."""
    counts = np.array([3, 0, 1, 2, 5, 1])
    wanted = -leaves(exact.grad_log_likelihood(RBM, random_params(RBM), np.repeat(DATA, counts, axis=0)))
    (whole,) = gradients(scale * counts, None, 1)
    np.testing.assert_allclose(whole, wanted, atol=1e-6)
    parts = gradients(scale * counts, 2, 3)
    np.testing.assert_allclose(np.mean(parts, 0), wanted, atol=1e-6)
    assert np.abs(parts - wanted).max() > 0.1  # the batches differ


def test_equal_weights_are_no_weights():
    (weighted,), (plain,) = gradients(np.full(6, 7), 6, 1), gradients(None, 6, 1)
    np.testing.assert_array_equal(weighted, plain)


def test_rows_of_weight_zero_do_not_move_the_start():
    weights = np.array([1, 1, 0, 0, 1, 0])
    wanted = RBM.init(KEY, DATA[[0, 1, 4] * 2])
    jax.tree.map(np.testing.assert_array_equal, RBM.init(KEY, DATA, weights=weights), wanted)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(9), r"one number a row of the data, shape \(10,\); got shape \(9,\)"),
        (np.ones((10, 1)), r"got shape \(10, 1\)"),
        (np.array(["a"] * 10), "got shape .* of <U1"),
        ([1, -2] + 8 * [1], "finite and not negative; got -2.0 at row 1"),
        ([1, 1, np.nan] + 7 * [np.inf], r"got nan at row 2 \(8 such\)"),
        (np.zeros(10), "weights are all zero"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    with pytest.raises(StateError, match=message):
        numbered(weights=weights)


def test_streams_have_no_weights():
    with pytest.raises(StateError, match="a stream of batches has none"):
        numbered(iter([ROWS]), weights=np.ones(10))


# -- the order -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "batch_size"), [(10, 4), (7, 7), (5, 3), (6, 2)])
def test_a_batch_is_a_function_of_its_number(size, batch_size):
    order = lambda: batches.Order(jnp.array([1, 2], jnp.uint32), size, batch_size)
    one = order()
    forward = [one.batch(i) for i in range(2 * size)]
    for i in (2 * size - 1, 0, size):
        np.testing.assert_array_equal(order().batch(i), forward[i])
    epochs = np.concatenate(forward).reshape(-1, size)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(size), (len(epochs), 1)))


# -- files ---------------------------------------------------------------------------------------


def test_rows_in_a_file_train_as_rows_in_memory(tmp_path):
    options = {"batch_size": 4, "weights": np.arange(10), "num_steps": 6}
    plain, read = (numbered(data, **options) for data in (ROWS, mapped(ROWS, tmp_path / "rows")))
    assert_same_run(read, plain)
    np.testing.assert_allclose(weights_seen(read), rows_seen(read) / 4.5 / 4, rtol=1e-6)  # w_i / batch size
    np.testing.assert_array_equal(weights_seen(numbered(ROWS, batch_size=4)), 0.25)


TWO = FactorGraph(
    {"u": Bernoulli(2), "v": Bernoulli(3)},
    {"h": Bernoulli(2)},
    [*map(Bias, "uvh"), Bilinear("u", "h"), Bilinear("v", "h")],
)


def test_a_dict_may_hold_files_and_arrays(tmp_path):
    file = mapped(DATA.astype(np.uint8), tmp_path / "v")
    source = batches.as_source(TWO, {"v": file, "u": DATA[:, :2]}, None, 4, KEY)
    plain = batches.as_source(TWO, {"v": DATA, "u": DATA[:, :2]}, None, 4, KEY)
    assert isinstance(source, batches.HostRows) and isinstance(plain, batches.DeviceRows)
    for number in (0, 2):
        got, whole = source.batch(number), plain.batch(number)
        for b in "uv":
            assert got.rows[b].dtype == np.float32
            np.testing.assert_array_equal(got.rows[b], whole.rows[b][whole.index])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:0], r"at least one row; got leading axes \(0,\)"),
        (lambda d: d[0], r"got leading axes \(\)"),
        (lambda d: d[None], r"got leading axes \(1, 6\)"),
        (lambda d: d[:, :2], r"block 'a' got shape \(6, 2\), expected \(\.\.\., 3\)"),
        (lambda d: {"w": d}, "unknown visible block 'w'"),
        (lambda d: {"b": d}, "unknown visible block 'b'"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, message):
    with pytest.raises(StateError, match=message):
        batches.as_source(RBM, change(mapped(DATA, tmp_path / "rows")), None, 4, KEY)


def test_files_of_several_blocks_have_one_length(tmp_path):
    file = mapped(DATA, tmp_path / "v")
    with pytest.raises(StateError, match=r"'u': \(5,\), 'v': \(6,\)|'v': \(6,\), 'u': \(5,\)"):
        batches.as_source(TWO, {"v": file, "u": DATA[:5, :2]}, None, 4, KEY)
    with pytest.raises(StateError, match="block 'u' is missing"):
        batches.as_source(TWO, {"v": file}, None, 4, KEY)


def test_a_wrong_row_in_a_file_is_named_when_its_step_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "_SAMPLE_ROWS", 4)  # rows 0, 3, 6, 9 are looked at before the first step
    data = ROWS.copy()
    data[7] = np.nan
    file = mapped(data, tmp_path / "rows")
    with pytest.raises(
        DataError, match="stopped at step .: row 7 of the data: block 'a' .* got nan"
    ) as error:
        numbered(file, batch_size=2)
    assert 1 <= error.value.step == error.value.history.sizes["step"] <= 4  # an epoch has five steps
    assert np.isfinite(leaves(error.value.params)).all()
    data[7], data[3] = 7, np.nan
    with pytest.raises(StateError, match="row 3 of the data") as early:
        numbered(mapped(data, tmp_path / "other"), batch_size=2)
    assert not isinstance(early.value, DataError)  # there is nothing to carry yet


# -- streams -------------------------------------------------------------------------------------

BATCHES = [ROWS[i : i + 2] for i in range(0, 10, 2)]


class Loader:
    """Iterable and nothing else, as loaders are."""

    def __iter__(self):
        return iter(BATCHES)


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(BATCHES),
        Loader,
        lambda: lambda: iter(BATCHES),
        lambda: Loader,
        lambda: ({"a": jnp.asarray(b)} for b in BATCHES),
    ],
    ids=["iterator", "iterable", "function", "function of an iterable", "dicts on the device"],
)
def test_a_streams_batches_are_used_in_order(make):
    made = numbered(make())
    np.testing.assert_array_equal(rows_seen(made), ROWS.reshape(5, 2))
    assert made.estimator_state == 2  # the batch size is the stream's


def test_lists_are_arrays():
    made = numbered(ROWS.tolist(), batch_size=10)
    np.testing.assert_array_equal(np.sort(rows_seen(made)[0]), np.arange(10))


def test_a_loader_may_use_its_memory_again():
    def reused():
        buffer = np.empty((2, 1), np.float32)
        for batch in BATCHES:
            buffer[:] = batch
            yield buffer

    np.testing.assert_array_equal(rows_seen(numbered(reused)), ROWS.reshape(5, 2))


def test_a_stream_makes_the_first_biases_from_its_first_batch():
    made = numbered(iter(BATCHES), num_steps=1)
    source = batches.as_source(NUMBERED, iter(BATCHES), None, None, KEY)
    np.testing.assert_array_equal(source.sample().rows["a"], BATCHES[0])
    np.testing.assert_array_equal(source.batch(3).rows["a"], BATCHES[3])  # two are passed over
    np.testing.assert_array_equal(source.sample().rows["a"], BATCHES[0])
    assert made.history.sizes["step"] == 1


def test_a_stream_that_ends_says_when_and_loses_nothing():
    with pytest.raises(
        DataError, match=r"stopped at step 5: .*ended before batch 5 .*itertools\.cycle"
    ) as error:
        numbered(iter(BATCHES), num_steps=8, monitors={"a": lambda p: p["a"].sum()}, monitor_every=2)
    whole = numbered(iter(BATCHES), num_steps=5)
    jax.tree.map(np.testing.assert_array_equal, error.value.params, whole.params)
    np.testing.assert_array_equal(error.value.history["gradient_norm"], whole.history["gradient_norm"])
    assert error.value.step == 5
    made = numbered(itertools.cycle(BATCHES), num_steps=8)
    np.testing.assert_array_equal(rows_seen(made)[5:], rows_seen(made)[:3])


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "ended before batch 0"),
        ([ROWS[:2], ROWS[:3]], {}, "stopped at step 1: batch 1 of the stream has 3 rows, .* before have 2"),
        ([ROWS[:2], ROWS[:2] * np.nan], {}, "stopped at step 1: batch 1 of the stream: block 'a' .* got nan"),
        ([ROWS[0]], {}, "batch 0 of the stream: data need one leading axis"),
        ([ROWS[:2]], {"batch_size": 3}, "batches have 2 rows, and batch_size=3: leave batch_size out"),
    ],
)
def test_streams_that_do_not_fit_are_refused(batches, options, message):
    with pytest.raises(StateError, match=message):
        numbered(iter(batches), **options)
