# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Data frames: encoding, samples as frames, missing cells.

Tests evaluate/tables.py.
"""

from typing import Any
import warnings

import numpy as np
import pandas as pd
import pytest
import zoo

import optax

import ebmpp
from ebmpp import CD, Bernoulli, Categorical, Gaussian, Observed
from ebmpp.errors import ArgumentError, StateError

SIZES = pd.CategoricalDtype(["small", "medium", "large", "huge"], ordered=True)
FRAME = pd.DataFrame(
    {
        "length": [10_000.0, 10_001.5, 9_998.5, 10_003.0],
        "is_new": [True, False, True, True],
        "size": pd.Categorical(["small", "large", "medium", "small"], dtype=SIZES),
        "city": ["Rome", "Oslo", "Rome", "Bonn"],
        "count": pd.array([1, 2**40, 3, 7], "Int64"),
        "short": np.array([0.5, 1.5, 2.5, 0.5], np.float32),
        "shape": pd.Categorical(["a", "b", "c", "a"]),
    },
    index=["w", "x", "y", "y"],
)


def declare(df: Any, latent: Any = 2) -> Any:
    with warnings.catch_warnings(action="ignore"):  # of integers with few values
        return ebmpp.from_dataframe(df, latent)


def with_holes(df: pd.DataFrame) -> pd.DataFrame:
    """One hole in each of the first columns, and one row of holes alone."""
    result = df.copy().astype({"is_new": object})
    for i, name in enumerate(result.columns):
        cells = result[name].copy()
        cells.iloc[(i + 1) % 2] = None
        result[name] = cells
    return result


def test_columns_become_blocks_by_kind_and_number_of_levels() -> None:
    table = declare(FRAME)
    assert table.graph.visible == {
        "numbers": Gaussian(3, "learned"),
        "booleans": Bernoulli(1),
        "categories_4": Categorical(1, 4),
        "categories_3": Categorical(2, 3),
    }
    assert (
        table.graph.latent == {"latent": Bernoulli(2)} and len(table.graph.layers) == 2
    )
    np.testing.assert_allclose(table.rows["numbers"].mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(table.rows["numbers"].std(0), 1)
    np.testing.assert_array_equal(
        table.rows["categories_3"], [[2, 0], [1, 1], [2, 2], [0, 0]]
    )
    deep = declare(FRAME, {"z": Categorical(1, 3), "y": Gaussian(2)})
    assert set(deep.graph.latent) == {"y", "z"}


@pytest.mark.parametrize(
    "df", [FRAME, FRAME.astype({"is_new": object, "city": "string"})]
)
def test_a_frame_comes_back(df: pd.DataFrame) -> None:
    table = declare(df)
    back = table.to_dataframe(table.rows)
    pd.testing.assert_frame_equal(back, df.reset_index(drop=True))
    pd.testing.assert_frame_equal(
        table.to_dataframe(table.encode(df[::-1])), df[::-1].reset_index(drop=True)
    )


def test_missing_cells_are_marked_and_known_ones_do_not_change() -> None:
    df = with_holes(FRAME)
    rows = declare(df).rows
    assert all(isinstance(x, Observed) for x in rows.values())
    assert sum((~x.known).sum() for x in rows.values()) == 7
    table = declare(FRAME)
    for block, x in table.encode(df).items():
        np.testing.assert_array_equal(
            np.where(x.known, x.values, 0), np.where(x.known, table.rows[block], 0)
        )


def test_samples_have_any_batch_and_become_rows_of_the_columns_dtypes() -> None:
    table = declare(FRAME.assign(byte=np.arange(4, dtype=np.uint8)))
    shapes = {b: (2, 3, f.size) for b, f in table.graph.visible.items()}
    frame = table.to_dataframe(
        {b: -np.ones(s) if b == "numbers" else np.zeros(s) for b, s in shapes.items()}
    )
    # mean 1.5, scale 1.1
    assert frame.shape == (6, 8) and frame["byte"].tolist() == [0] * 6
    with pytest.raises(StateError, match="booleans"):
        table.to_dataframe({"numbers": np.zeros((1, 3))})


@pytest.mark.parametrize("missing", [None, np.nan])
def test_a_row_alone_may_lack_any_cells(missing: Any) -> None:
    table = declare(FRAME)
    params = table.graph.init(zoo.KEY)
    row = FRAME.iloc[[0]].assign(is_new=missing, length=missing, shape=missing)
    options = {"num_chains": 2, "num_warmup": 2, "num_samples": 2, "rng_key": zoo.KEY}
    filled = table.fill_missing(row, params, **options)
    names = ["length", "is_new", "shape"]
    assert filled[names].dtypes.equals(FRAME[names].dtypes)
    assert not filled.isna().any(axis=None) and filled.index.tolist() == ["w"]
    others = FRAME.columns.drop(names)
    pd.testing.assert_frame_equal(filled[others], row[others])


@pytest.mark.nightly
def test_filled_numbers_keep_their_digits_beside_other_dtypes() -> None:
    table = declare(pd.DataFrame({"x": [1.0, 2.5, 4.0], "b": [True, False, True]}))
    params = table.graph.init(zoo.KEY)
    df = pd.DataFrame({"x": pd.array([1, None], "Int64"), "b": [1.0, np.nan]})
    options = {"num_chains": 2, "num_warmup": 2, "num_samples": 2, "rng_key": zoo.KEY}
    filled = table.fill_missing(df, params, **options)
    assert filled["x"].dtype == "Float64" and filled["x"][1] % 1 > 0
    assert filled["b"].isin([0, 1]).all()


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int32", "int64", "uint64", "Int64", "UInt64"]
)
def test_integers_out_of_range_are_clipped(dtype: str) -> None:
    limits = np.iinfo(dtype.lower())
    cells = pd.Series([limits.min, limits.max, 5], dtype=dtype)
    table = declare(pd.DataFrame({"n": cells}))
    low, high = table.to_dataframe({"numbers": [[-9.0], [9.0]]})["n"]
    assert low == limits.min
    # floats below 2^63 and 2^64 are 2^10 and 2^11 apart
    assert limits.max - 2048 <= high <= limits.max
    back = table.to_dataframe(table.rows)["n"].astype(float)
    np.testing.assert_allclose(back, cells.astype(float), rtol=1e-15, atol=1024)


@pytest.mark.parametrize(
    "cells", [[1e155, 2e155], [1e308, -1e308], [1e308, 1.5e308], [1e-200, 2e-200]]
)
def test_numbers_whose_spread_is_not_a_float_are_refused(cells: list[float]) -> None:
    with pytest.raises(StateError, match="'x'.*1e-150 to 1e150.*Rescale"):
        declare(pd.DataFrame({"x": cells}))
    table = declare(pd.DataFrame({"x": [0.0, 1e-10, 3e-10]}))
    with pytest.raises(StateError, match="'x'.*finite"):
        table.encode(pd.DataFrame({"x": [None, 1e308]}))


def dependent(num_rows: int, seed: int) -> pd.DataFrame:
    """Columns that nearly determine each other, of which the mode of each is right in
    about half the rows."""
    rng = np.random.default_rng(seed)
    cause = rng.integers(3, size=num_rows)
    flip = rng.random(num_rows) < 0.05
    return pd.DataFrame(
        {
            "level": pd.Categorical.from_codes(
                cause, ["low", "middle", "high"], ordered=True
            ),
            "is_high": np.where(flip, cause < 2, cause == 2),
            "weight": 50.0 + 10 * cause + rng.normal(size=num_rows),
        }
    )


@pytest.mark.nightly
def test_filled_in_cells_are_better_than_the_mode_of_their_column() -> None:
    df = dependent(240, 0)
    # one in each of two thirds of the rows
    holes = np.random.default_rng(1).integers(3, size=len(df))
    missing = df.astype({"is_high": object})
    for i, name in enumerate(["level", "is_high"]):
        missing[name] = missing[name].mask(holes == i)
    table = ebmpp.from_dataframe(missing, latent=6)
    options: dict[str, Any] = {
        "estimator": CD(k=2),
        "optimizer": optax.adam(0.05),
        "progress_bar": False,
    }
    fit = ebmpp.fit(table.graph, table.rows, rng_key=zoo.KEY, num_steps=150, **options)
    filled = table.fill_missing(
        missing, fit.params, rng_key=zoo.KEY, num_samples=100, num_warmup=50
    )
    assert not filled.isna().any().any() and (filled.dtypes == missing.dtypes).all()
    drawn = table.fill_missing(
        missing, fit.params, rng_key=zoo.KEY, draw=True, num_samples=100, num_warmup=50
    )
    for i, name in enumerate(["level", "is_high"]):
        truth, hole = df[name].astype(object), holes == i
        assert (filled[name][~hole] == truth[~hole]).all() and (
            drawn[name][~hole] == truth[~hole]
        ).all()
        mode = (truth[hole] == truth[~hole].mode()[0]).mean()
        assert (filled[name][hole] == truth[hole]).mean() > mode + 0.15
        assert (drawn[name][hole] == truth[hole]).mean() > mode
    assert table.fill_missing(df, fit.params, rng_key=zoo.KEY).equals(df)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"city": "Paris"}, "city"),
        ({"length": "long"}, "length"),
        ({"length": np.inf}, "length"),
    ],
)
def test_other_frames_must_have_the_same_columns(change: dict, word: str) -> None:
    table = declare(FRAME)
    with pytest.raises(StateError, match=word):
        table.encode(FRAME.assign(**change))
    with pytest.raises(StateError, match=word):
        table.encode(FRAME.drop(columns=[word]))


def test_arguments_of_a_table_are_named() -> None:
    table = declare(FRAME)
    for samples in (3, None, np.zeros((2, 3)), [1.0]):
        with pytest.raises(ArgumentError, match="samples must be a dict"):
            table.to_dataframe(samples)  # type: ignore[arg-type]
    for df in (3, {"length": [1.0]}):
        with pytest.raises(ArgumentError, match="df must be a pandas frame"):
            table.encode(df)  # type: ignore[arg-type]
    twice = pd.concat([FRAME, FRAME[["city"]]], axis=1)
    with pytest.raises(StateError, match="unique columns.*city"):
        table.encode(twice)
    with pytest.raises(ArgumentError, match="draw must be True or False, got 'no'"):
        table.fill_missing(FRAME, {}, rng_key=zoo.KEY, draw="no")  # type: ignore[arg-type]


def test_integers_with_few_values_are_numbers_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"\['count'\]"):
        assert ebmpp.from_dataframe(FRAME, 1).graph.visible["numbers"].size == 3
