# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Validation of data: array types, ranges, precision, numbers of rows, and partly observed blocks.

Tests graph/tables.py.
"""

from collections.abc import Callable
from functools import cache
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    BlockedGibbs,
    FactorGraph,
    Observed,
    Poisson,
    evaluate,
    exact,
    local_search,
)
from ebmpp.errors import IntractableError, ParameterError, StateError
from ebmpp.graph.factors import Bias, Bilinear
from ebmpp.training import batches, monitors
from helpers import Tensor, alone, nightly, often, pair, random_params

V = np.array([[1, 0, 0, 1], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]])
declared = cache(pair)


@cache
def two_visible() -> tuple[FactorGraph, dict]:
    factors = [*map(Bias, "uvh"), Bilinear("u", "h"), Bilinear("v", "h")]
    graph = FactorGraph(
        {"u": Bernoulli(2), "v": Bernoulli(4)}, {"h": Bernoulli(2)}, factors
    )
    return graph, random_params(graph)


def in_file(path: Path, values: np.ndarray) -> np.ndarray:
    """A copy of an array in a memory-mapped file."""
    copy = np.memmap(path, mode="w+", dtype=values.dtype, shape=values.shape)
    copy[:] = values
    return copy


def read(graph: FactorGraph, data: Any) -> dict[str, np.ndarray]:
    """The rows of the first batch of a training run."""
    batch = batches.as_source(graph, data, None, 4, zoo.KEY).batch(0)
    return {
        b: np.asarray(v if batch.index is None else v[batch.index])
        for b, v in batch.rows.items()
    }


def anneal(graph: FactorGraph, params: dict, data: Any) -> Any:
    options = {"num_particles": 30, "num_temperatures": 3, "progress_bar": False}
    return ebmpp.ais(graph, params, rng_key=zoo.KEY, data=data, **options).log_partition


#: functions that take data
FUNCTIONS: dict[str, Callable[[FactorGraph, dict, Any], Any]] = {
    "fit": lambda graph, params, data: read(graph, data),
    "stream": lambda graph, params, data: batches.as_source(
        graph, iter([data]), None, None, zoo.KEY
    ),
    "init": lambda graph, params, data: graph.init(zoo.KEY, data),
    "log_likelihood": exact.log_likelihood,
    "gradient": exact.grad_log_likelihood,
    "pseudo": evaluate.pseudo_log_likelihood,
    "bound": evaluate.mean_field_bound,
    "activity": lambda graph, params, data: evaluate.unit_activity(
        graph, params, data, rng_key=zoo.KEY
    ),
    "ais": anneal,
    "monitor": lambda graph, params, data: monitors.reconstruction(
        graph, data, rng_key=zoo.KEY
    )(params),
}
#: functions that take a state of the visible blocks, whose axes broadcast
OF_STATES: dict[str, Callable[[FactorGraph, dict, Any], Any]] = {
    "free_energy": lambda graph, params, data: graph.free_energy(params, data),
    "conditional": lambda graph, params, data: (
        graph.conditional(params, data, "h").mean
    ),
}
CHEAP = ("fit", "init", "log_likelihood", "free_energy")
every_function = pytest.mark.parametrize(
    "function", often(FUNCTIONS | OF_STATES, *CHEAP)
)

TYPES = {
    "int64": V,
    "bool": V.astype(bool),
    "float16": V.astype(np.float16),
    "bfloat16": V,
    "list": V.tolist(),
    "tensor": Tensor(V),
    "frame": pd.DataFrame(V, columns=["c", "a", "b", "d"]),
    "nullable frame": pd.DataFrame(V).astype("Int64"),
    "mixed frame": pd.DataFrame(
        {"x": V[:, 0], "y": V[:, 1] > 0, "z": V[:, 2] / 1.0, "w": V[:, 3]}
    ),
    "observed": Observed(V, np.ones(4, bool)),
    "masked": np.ma.array(V),
}


@every_function
def test_array_types_give_equal_results(function: str, tmp_path: Path) -> None:
    call = (FUNCTIONS | OF_STATES)[function]
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    expected = jax.tree.leaves(call(rbm, params, V.astype(np.float32)))
    types = TYPES | {
        "bfloat16": jnp.asarray(V, jnp.bfloat16),
        "file": in_file(tmp_path / "v", V),
    }
    for name, data in types.items():
        if name in ("observed", "masked") and function == "conditional":
            continue  # a state, of which every unit is needed
        for a, b in zip(
            jax.tree.leaves(call(rbm, params, data)), expected, strict=True
        ):
            if hasattr(b, "dtype"):
                np.testing.assert_array_equal(a, b, err_msg=name)


WRONG = {
    "text": ("abc", "numbers.*'abc'"),
    "objects": (V.astype(object), "dtype object"),
    "ragged": ([[1, 0, 0, 1], [1, 0]], "inhomogeneous"),
    "complex": (V + 0j, "complex"),
    "masked rows": ([np.ma.masked_array(row, row == 0) for row in V], "mask"),
    "tuple": ((V, V > 0), "mask"),
    "text frame": (
        pd.DataFrame({"a": [1], "b": ["x"], "c": [2], "d": [0]}),
        "column 'b'",
    ),
    "missing": (
        np.where(V == 0, np.nan, V),
        "got nan at index .*Observed.where_finite",
    ),
    "missing in a frame": (
        pd.DataFrame(V).astype("Int64").replace(0, pd.NA),
        "Observed.where_finite",
    ),
    "shape": (V[:, :2], r"shape.*\(4, 2\)"),
    "outside": (2 * V, r"got 2 at index \(0, 0\)"),
    "infinite": (np.where(V == 0, np.inf, V), "got inf at index"),
    "block": ({"w": V}, "unknown .*block 'w'"),
}


@every_function
@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG)
def test_wrong_data_are_refused(function: str, data: Any, message: str) -> None:
    with pytest.raises(StateError, match=message) as error:
        (FUNCTIONS | OF_STATES)[function](zoo.graph("rbm"), zoo.params("rbm"), data)
    assert "'v'" in str(error.value) or "'w'" in str(error.value)


WIDE = [
    (np.array([[2**32 + 3]]), "4294967299"),
    (np.array([[2**24 + 1]], np.int32), "16777217"),
    (np.array([[2**24 + 0.5]]), "16777216.5"),
    (np.array([[2**64 - 1]], np.uint64), "18446744073709551615"),
    (np.array([[1e39]]), r"1e\+39"),
    (pd.DataFrame({"a": [2**40 + 1]}), "1099511627777"),
    (
        pd.DataFrame({"a": [2**53 + 1]}).astype("Int64"),
        "9007199254740992|got 9007199254740993",
    ),
]


@pytest.mark.parametrize(("values", "number"), WIDE, ids=[number for _, number in WIDE])
def test_counts_that_float32_cannot_hold_are_refused(
    values: Any, number: str, tmp_path: Path
) -> None:
    counts = declared(Poisson(1), Bernoulli(1))
    ways = [values, {"a": values}]
    if isinstance(values, np.ndarray):
        ways += [
            in_file(tmp_path / "v", values),
            Observed(values, np.ones((1, 1), bool)),
        ]
    for data in ways:
        with pytest.raises(
            StateError, match=rf"block 'a' \(Poisson\(1\)\).*got {number}"
        ):
            read(counts, data)
    with pytest.raises(StateError, match=number):
        local_search(counts, random_params(counts), rng_key=zoo.KEY, a=values)


@pytest.mark.nightly
def test_numbers_that_float32_holds_are_read() -> None:
    counts = declared(Poisson(1), Bernoulli(1))
    values = np.array([[2**24], [2**24 + 2], [2**40], [3]])
    np.testing.assert_array_equal(
        np.sort(read(counts, values)["a"], axis=0), np.sort(values, axis=0)
    )
    # values of unknown units are ignored
    observed = Observed(np.array([[2**32 + 3], [4]]), np.array([[False], [True]]))
    assert set(read(counts, observed)["a"].ravel()) <= {0.0, 4.0}
    # as doubles 2**53, which float32 holds
    frame = pd.DataFrame({"a": [2**53 + 1], "b": [0.0]})
    with pytest.raises(StateError, match=r"float32.*at index \(0, 0\)"):
        read(declared(Poisson(2), Bernoulli(1)), frame)


@pytest.mark.parametrize("family", [ebmpp.Gaussian(1), ebmpp.Exponential(1)], ids=repr)
def test_real_numbers_are_rounded(family: ebmpp.Family) -> None:
    graph = declared(family, Bernoulli(1))
    values = read(graph, np.array([[0.1], [2.0**24 + 1]]))["a"].ravel()
    assert sorted(values.tolist()) == [pytest.approx(0.1, abs=1e-8), 2.0**24]
    with pytest.raises(StateError, match=r"float32.*got 1e\+39"):
        read(graph, np.array([[1e39]]))


def test_categories_are_integers() -> None:
    graph = zoo.graph("categorical")
    assert read(graph, np.array([[0.0, 2.0]]))["v"].dtype == np.int32
    with pytest.raises(StateError, match="got 1.5 at index"):
        read(graph, np.array([[0.0, 1.5]]))


@pytest.mark.parametrize("function", often(FUNCTIONS, *CHEAP[:3]))
def test_rows_of_data_are_not_broadcast(function: str) -> None:
    graph, params = two_visible()
    for u in (np.zeros(2), np.zeros((1, 2)), np.zeros((3, 2))):
        with pytest.raises(StateError, match=r"{'u': \(.*\), 'v': \(4,\)}"):
            FUNCTIONS[function](graph, params, {"u": u, "v": V})
    with pytest.raises(StateError, match="'u' is missing"):
        FUNCTIONS[function](graph, params, {"v": V})


def test_bare_array_is_the_only_visible_block() -> None:
    single, params = alone(Bernoulli(4)), {"a": np.float32([0.1, 0.2, -0.3, 0])}
    for method in (single.energy, single.log_density, single.free_energy):
        np.testing.assert_array_equal(method(params, V), method(params, {"a": V}))
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    for method in (rbm.natural_parameters, rbm.mean, rbm.mode, rbm.log_marginal):
        np.testing.assert_array_equal(
            method(params, V, "h"), method(params, {"v": V}, "h")
        )
    for call in (
        lambda: rbm.energy(params, V),
        lambda: rbm.conditional(params, V, "v"),
    ):
        with pytest.raises(StateError, match="'h' is missing"):
            call()
    with pytest.raises(StateError, match=r"\['u', 'v'\]"):
        two_visible()[0].free_energy(two_visible()[1], V)
    with pytest.raises(StateError, match="init"):
        local_search(rbm, params, rng_key=zoo.KEY, init=V)


def test_rows_of_observed_blocks() -> None:
    observed = Observed.where_finite(pd.DataFrame(np.where(V == 0, np.nan, V)))
    for rows in (slice(1, 3), np.array([2, 0]), np.arange(len(V)) % 2 == 0):
        part = observed[rows]
        np.testing.assert_array_equal(part.known, (V != 0)[rows])
        np.testing.assert_array_equal(part.values, np.where(V == 0, np.nan, V)[rows])
    part = Observed(V, np.arange(4) < 1)[:2]  # the same units of every row
    assert part.values.shape == (2, 4) and part.known.shape == (4,)


def test_partly_observed_rows_are_refused_where_all_units_are_needed() -> None:
    rbm, params, observed = zoo.graph("rbm"), zoo.params("rbm"), Observed(V, V > 0)
    for data in (observed, np.ma.array(V, mask=V == 0)):
        for name in ("pseudo", "bound", "activity", "monitor"):
            with pytest.raises(StateError, match="block 'v'"):
                FUNCTIONS[name](rbm, params, data)
        with pytest.raises(StateError, match="block 'v'"):
            rbm.conditional(params, data, "h")
    with pytest.raises(StateError, match="known"):
        rbm.init(zoo.KEY, Observed(V, V))
    with pytest.raises(StateError, match=r"known.*\(2,\)"):
        exact.log_likelihood(rbm, params, Observed(V, np.ones(2, bool)))
    with pytest.raises(StateError, match="mask"):
        BlockedGibbs(rbm).init(zoo.KEY, 0, None, (params,), {"v": (V[0], V[0] > 0)})


@pytest.mark.parametrize("function", ["init", nightly("log_likelihood")])
def test_masked_entries_are_missing(function: str) -> None:
    call, masked = FUNCTIONS[function], np.ma.array(V, mask=V == 0)
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    results = (call(rbm, params, data) for data in (masked, Observed(V, V > 0)))
    jax.tree.map(np.testing.assert_array_equal, *results)
    sources = (
        batches.as_source(rbm, data, None, 4, zoo.KEY)
        for data in (masked, {"v": masked}, iter([masked]))
    )
    for source in sources:
        np.testing.assert_array_equal(source.batch(0).known["v"], V > 0)


def test_masks_where_nothing_may_be_missing_are_refused() -> None:
    """Weights, params, initial values and pairs, which numpy would convert without the mask."""
    rbm, masked = zoo.graph("rbm"), np.ma.array(np.ones(4), mask=[1, 0, 0, 0])
    calls = (
        lambda: rbm.init(zoo.KEY, V, weights=masked),
        lambda: batches.as_source(rbm, V, masked, 4, zoo.KEY),
        lambda: rbm.check(zoo.params("rbm") | {"v": masked}),
        lambda: Bias("v", init=masked),
        lambda: ebmpp.Pairwise("v", np.ma.array([[0, 1]], mask=True)),
    )
    for call in calls:
        with pytest.raises(ValueError, match="without a mask"):
            call()


def test_free_energy_sums_out_unknown_units() -> None:
    """The latents must be given; otherwise it is refused."""
    rbm, params = (
        zoo.graph("rbm"),
        {n: np.asarray(p, float) for n, p in zoo.params("rbm").items()},
    )
    h, known = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1]]), V > 0
    result = rbm.free_energy(zoo.params("rbm"), {"v": Observed(V, known), "h": h})
    states = np.array(list(itertools.product([0, 1], repeat=4)))
    for row, mask, latent, value in zip(V, known, h, result, strict=True):
        v = states[(states[:, mask] == row[mask]).all(1)]
        log_weights = (
            v @ params["v"] + latent @ params["h"] + v @ params["v:h"] @ latent
        )
        np.testing.assert_allclose(value, -np.logaddexp.reduce(log_weights), rtol=1e-5)
    with pytest.raises(IntractableError, match="'v'.*exact.log_likelihood"):
        rbm.free_energy(zoo.params("rbm"), Observed(V, known))


def test_array_types_of_params() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    wide = {name: np.asarray(a, float) for name, a in params.items()}
    np.testing.assert_allclose(
        rbm.free_energy(wide, V), rbm.free_energy(params, V), rtol=1e-6
    )
    with pytest.raises(ParameterError, match="Tensor"):
        rbm.free_energy({name: Tensor(a) for name, a in wide.items()}, V)
