# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Models of data frames: columns of numbers, booleans and categories as units, and back."""

from collections.abc import Mapping
import dataclasses
from functools import partial
import math
from typing import TYPE_CHECKING, Any
import warnings

import numpy as np
from numpy.typing import ArrayLike

from jax import Array

from ebmpp.core import Params, checks
from ebmpp.evaluate.completion import complete
from ebmpp.families import Bernoulli, Categorical, Family, Gaussian
from ebmpp.families.family import Families
from ebmpp.graph import Bias, Bilinear, FactorGraph, Observed, states

if TYPE_CHECKING:
    import pandas as pd

_FEW = 10  # different integers that may be codes of categories
_KINDS = {
    "boolean": "booleans",
    "categorical": "categories",
    "string": "categories",
    "integer": "numbers",
    "floating": "numbers",
    "mixed-integer-float": "numbers",
    "empty": "numbers",  # no known cell
}
_EXPECTED = "of numbers, booleans, strings or categories"


#: Encoded cells by block; :class:`~ebmpp.Observed` where some are missing.
EncodedRows = dict[str, np.ndarray | Observed]


@dataclasses.dataclass(frozen=True)
class Column:
    """Encoding of a column as a unit of a block.

    :param index: number of the unit.
    :param dtype: the column's dtype, which decoded values have.
    :param levels: ``pandas.CategoricalDtype`` of categories; units are numbers of
        levels.
    :param mean: of the known cells of a column of numbers, with standard deviation
        ``scale``.
    """

    name: Any
    block: str
    index: int
    dtype: Any
    levels: Any = None
    mean: float = 0.0
    scale: float = 1.0

    def encode(self, cells: "pd.Series") -> np.ndarray:
        """Return the unit's values, nan where a cell is missing.

        :raises StateError: for invalid cells.
        """
        name = f"column {self.name!r} of df"
        if self.levels is None:
            return _numbers(name, cells, self.mean, self.scale)
        known = cells.notna().to_numpy()
        x = self.levels.categories.get_indexer(cells.astype(object))
        wrong = list(cells[known & (x < 0)])
        if wrong:
            raise checks.state_error(
                name, f"of the categories {list(self.levels.categories)}", wrong[:1]
            )
        return np.where(known, x, np.nan)

    def decode(self, x: np.ndarray) -> "pd.Series":
        """Return cells in the column's dtype; numbers are rounded in a column of integers."""
        import pandas as pd

        if self.levels is not None:
            codes = x.astype(int)
            cells = pd.Series(pd.Categorical.from_codes(codes, dtype=self.levels))
        elif self.block == "booleans":
            cells = pd.Series(x > 0.5)
        else:
            x = self.mean + self.scale * x.astype(float)
            if pd.api.types.is_integer_dtype(self.dtype):
                limits = np.iinfo(getattr(self.dtype, "numpy_dtype", self.dtype))
                # the largest 64-bit integers round up to floats out of range
                x = np.rint(np.clip(x, limits.min, np.nextafter(limits.max, 0)))
            cells = pd.Series(x)
        return cells.astype(self.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class TableModel:
    """Graph of a data frame, and the encoding of its columns: see :func:`from_dataframe`.

    :param graph: its visible blocks are "numbers", "booleans", and "categories_3" and
        so on, by the number of levels, as far as there are such columns.
    :param columns: the encoding of each column, in order.
    :param rows: the encoded frame by block, ``(rows, columns of the block)``: the data
        of :func:`ebmpp.fit`. Blocks with missing cells are :class:`~ebmpp.Observed`.
    """

    graph: FactorGraph
    columns: tuple[Column, ...] = dataclasses.field(repr=False)
    rows: EncodedRows = dataclasses.field(default_factory=dict, repr=False)

    def encode(self, df: "pd.DataFrame") -> EncodedRows:
        """Return rows of another frame with these columns, such as held-out ones.

        :raises StateError: for a missing column, or cells of another kind.
        """
        _check_frame("df", df)
        absent = [column.name for column in self.columns if column.name not in df]
        if absent:
            raise checks.state_error(
                "df", f"a frame with the columns {absent}", list(df)
            )
        units = {}
        for column in self.columns:
            units.setdefault(column.block, []).append(column.encode(df[column.name]))
        rows = {}
        for block, values in units.items():
            x = np.stack(values, 1)
            rows[block] = Observed.where_finite(x) if np.isnan(x).any() else x
        return rows

    def to_dataframe(self, samples: Mapping[str, ArrayLike]) -> "pd.DataFrame":
        """Return samples of the model as a frame with the columns and dtypes of the original one.

        Numbers of a column of integers are rounded, and **clipped** to its dtype: draws
        below 0 of an unsigned column become 0. To see these, declare the model of a
        column of floats.

        :param samples: the visible blocks, ``(*batch, columns of the block)``, such as
            ``mcmc.get_samples()``; other blocks are ignored.
        :raises StateError: for a missing block.
        """
        import pandas as pd

        checks.instance("samples", samples, Mapping, "a dict of the visible blocks")
        states.check_present(samples, self.graph.visible)
        units = {
            b: np.asarray(samples[b]).reshape(-1, family.size).T
            for b, family in self.graph.visible.items()
        }
        cells = [
            column.decode(units[column.block][column.index]) for column in self.columns
        ]
        return pd.concat(cells, axis=1, keys=[column.name for column in self.columns])

    def fill_missing(
        self,
        df: "pd.DataFrame",
        params: Params,
        *,
        rng_key: Array,
        draw: bool = False,
        **options: Any,
    ) -> "pd.DataFrame":
        """Return a copy of a frame with missing cells filled in given the others of their row.

        Numbers are conditional means, booleans and categories the most probable values.

        :param df: the frame, or another one with its columns.
        :param params: params of ``graph``.
        :param draw: fill in one joint draw per row instead, for multiple imputation.
        :param options: options of :func:`ebmpp.complete`: ``num_chains``,
            ``num_warmup``, ``num_samples``.
        :raises StateError: as :meth:`encode` does.
        """
        import pandas as pd

        checks.flag("fill_missing: draw", draw)
        rows = self.encode(df)
        result = df.copy()
        holes = {column: df[column.name].isna().to_numpy() for column in self.columns}
        index = np.flatnonzero(np.any([*holes.values()], axis=0))
        if not len(index):
            return result
        known = {b: v[index] for b, v in rows.items()}
        completion = complete(self.graph, params, rng_key=rng_key, **options, **known)
        for column, hole in holes.items():
            if not hole.any():
                continue
            values = completion.mean[column.block]
            if draw:
                values = completion.draws[column.block][0]
            x = values[hole[index], column.index]
            if not draw and x.ndim == 2:  # mean statistics
                x = x[:, 0] if column.levels is None else x.argmax(1)
            filled = column.decode(x).set_axis(np.flatnonzero(hole))
            known = result[column.name].reset_index(drop=True)[~hole]
            # the dtype of cells that are all missing says nothing
            parts = [known, filled] if len(known) else [filled]
            result[column.name] = pd.concat(parts).sort_index().array
        return result


def from_dataframe(df: "pd.DataFrame", latent: int | Families) -> TableModel:
    """Declare a model of a table, and encode its rows.

    Each column is one unit: numbers are standardised and Gaussian with a learned
    variance, booleans are Bernoulli, and strings and categories, ordered or not, are
    Categorical with one block per number of levels. Each visible block interacts with
    each latent block. Integers are numbers; those with at most 10 different values
    raise a warning, as they may be codes. Missing cells (None, nan, NA) are summed out
    in training.

    :param df: a pandas frame with at least one row, and unique column names.
    :param latent: number of Bernoulli units of the block "latent", or a dict of names
        to families.
    :return: a :class:`TableModel`: ``graph`` and ``rows`` for :func:`ebmpp.fit`,
        ``to_dataframe`` and ``fill_missing`` for its results.
    :raises StateError: for an empty frame, or a column of another dtype, without a
        known cell, with only one value, or with numbers that are infinite or spread
        beyond 1e-150 to 1e150; the message names the column.
    :raises ArgumentError: for another ``latent``, or a ``df`` that is no frame.

    **Example**

    >>> import pandas as pd, ebmpp
    >>> df = pd.DataFrame({"size": [1.0, 2.5, None, 4.0], "colour": ["red", "blue", "red", None]})
    >>> table = ebmpp.from_dataframe(df, latent=2)
    >>> dict(table.graph.visible)
    {'numbers': Gaussian(1, variance='learned'), 'categories_2': Categorical(1, num_categories=2)}
    >>> table.rows["categories_2"].known[:, 0].tolist()
    [True, True, True, False]
    >>> table.to_dataframe({"numbers": [[0.0]], "categories_2": [[1]]})["colour"].tolist()
    ['red']
    """
    _check_frame("from_dataframe: df", df)
    if not df.size:
        expected = "a frame with rows and columns"
        raise checks.state_error("from_dataframe: df", expected, df.shape)
    columns, families = _columns(df)
    if not isinstance(latent, Mapping):
        latent = {"latent": Bernoulli(checks.count("from_dataframe: latent", latent))}
    for name, family in latent.items():
        argument = f"from_dataframe: latent[{name!r}]"
        checks.instance(argument, family, Family, "a family such as Bernoulli(20)")
        if name in families:
            expected = f"named unlike {[*families]}"
            raise checks.error("from_dataframe: latent", expected, name)
    biases = [Bias(b) for b in (*families, *latent)]
    weights = [Bilinear(v, h) for v in families for h in latent]
    graph = FactorGraph(families, dict(latent), [*biases, *weights])
    table = TableModel(graph, columns)
    return dataclasses.replace(table, rows=table.encode(df))


def _check_frame(name: str, df: "pd.DataFrame") -> None:
    import pandas as pd

    checks.instance(name, df, pd.DataFrame, "a pandas frame")
    repeated = list(df.columns[df.columns.duplicated()])
    if repeated:
        raise checks.state_error(name, "a frame of unique columns", repeated)


def _numbers(
    name: str, cells: "pd.Series", mean: float = 0.0, scale: float = 1.0
) -> np.ndarray:
    if _kind(name, cells) == "categories":
        raise checks.state_error(name, "numbers or booleans", cells.dtype)
    with np.errstate(over="ignore"):
        x = (cells.to_numpy(float, na_value=np.nan) - mean) / scale
    if np.isinf(x).any():
        raise checks.state_error(name, "finite", np.inf)
    return x


def _kind(name: str, cells: "pd.Series") -> str:
    from pandas.api.types import infer_dtype

    inferred = infer_dtype(cells, skipna=True)
    if inferred not in _KINDS:
        hint = "Convert it by df.astype, or drop it."
        dtype = f"{cells.dtype} ({inferred})"
        raise checks.state_error(name, _EXPECTED, dtype, hint=hint)
    return _KINDS[inferred]


def _columns(df: "pd.DataFrame") -> tuple[tuple[Column, ...], dict[str, Family]]:
    """Return the columns' encodings, and the families of the visible blocks."""
    import pandas as pd

    columns = []
    sizes = {}
    codes = []
    makers = {"booleans": Bernoulli, "numbers": partial(Gaussian, variance="learned")}
    for label, cells in df.items():
        name = f"column {label!r} of df"
        known = cells.dropna()
        if not len(known):
            expected = "a column with a known cell"
            raise checks.state_error(name, expected, "none", hint="Drop it.")
        block = _kind(name, cells)
        values = known.unique()
        if len(values) < 2:
            expected = "a column of at least two different values"
            raise checks.state_error(name, expected, values[0], hint="Drop it.")
        levels = None
        mean = 0.0
        scale = 1.0
        if block == "categories":
            levels = cells.dtype
            if not isinstance(levels, pd.CategoricalDtype):
                levels = pd.CategoricalDtype(sorted(values))
            block = f"categories_{len(levels.categories)}"
            makers[block] = partial(Categorical, num_categories=len(levels.categories))
        elif block == "numbers":
            x = _numbers(name, known)
            with np.errstate(over="ignore", invalid="ignore"):
                mean = float(x.mean())
                scale = float(x.std())
            if not 0 < scale < math.inf:
                expected = "a column that spreads by 1e-150 to 1e150"
                raise checks.state_error(name, expected, scale, hint="Rescale it.")
            if len(values) <= _FEW and pd.api.types.is_integer_dtype(cells.dtype):
                codes.append(label)
        index = sizes.get(block, 0)
        sizes[block] = index + 1
        columns.append(Column(label, block, index, cells.dtype, levels, mean, scale))
    if codes:
        warnings.warn(
            f"from_dataframe: columns {codes} are integers with at most {_FEW} "
            "different values, and are treated as numbers. "
            f"df.astype(dict.fromkeys({codes}, 'category')) makes them categories.",
            stacklevel=3,
        )
    return tuple(columns), {block: makers[block](size) for block, size in sizes.items()}
