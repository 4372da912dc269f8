# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draws in a folder, read where they are looked at."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from ebmpp.errors import CheckpointError
from ebmpp.kernels.long_runs.drawn import AXIS, Part, check


def opened(folder: Path, num_draws: int) -> xr.DataTree:
    """All draws as one tree, none of them in memory: a selection reads the files that it needs.

    :raises CheckpointError: where a file is missing, or cannot be read.
    """
    parts = check(folder, num_draws)
    try:
        with xr.open_datatree(parts[0].path, engine="h5netcdf") as first:
            groups = {name: group.to_dataset() for name, group in first.children.items()}
    except OSError as error:
        raise CheckpointError(f"{parts[0].path} cannot be read: {error}") from error
    made = {}
    for group, dataset in groups.items():
        variables = {
            str(name): (x.dims, indexing.LazilyIndexedArray(_Chunked(parts, group, str(name), x)))
            for name, x in dataset.data_vars.items()
        }
        coords = {"chain": dataset["chain"].values, "draw": np.arange(num_draws)}
        made[group] = xr.Dataset(variables, coords, dataset.attrs)
    return xr.DataTree.from_dict(made)


class _Chunked(BackendArray):
    """One variable over the files of a run."""

    def __init__(self, parts: Sequence[Part], group: str, name: str, first: xr.DataArray) -> None:
        self.parts, self.group, self.name = parts, group, name
        self.dtype = first.dtype
        self.shape = (*first.shape[:AXIS], parts[-1].stop, *first.shape[AXIS + 1 :])

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        support = indexing.IndexingSupport.BASIC
        return indexing.explicit_indexing_adapter(key, self.shape, support, self._read)

    def _read(self, key: tuple[int | slice, ...]) -> np.ndarray:
        """:raises CheckpointError: where a file is missing, or cannot be read."""
        wanted = range(self.shape[AXIS])[key[AXIS]]
        if isinstance(wanted, int):
            return np.take(self._rows(range(wanted, wanted + 1), key), 0, self._place(key))
        forward = wanted if wanted.step > 0 else wanted[::-1]
        made = self._rows(forward, key)
        return made if wanted.step > 0 else np.flip(made, self._place(key))

    def _place(self, key: tuple[int | slice, ...]) -> int:
        """Of the axis of draws in what ``_rows`` returns."""
        return sum(isinstance(part, slice) for part in key[:AXIS])

    def _rows(self, wanted: range, key: tuple[int | slice, ...]) -> np.ndarray:
        read = []
        for path, start, stop in self.parts:
            here = _within(wanted, start, stop)
            if here or (not wanted and not read):
                rows = slice(here.start - start, here.stop - start, here.step) if here else slice(0, 0)
                read.append(self._load(path, (*key[:AXIS], rows, *key[AXIS + 1 :])))
        return np.concatenate(read, self._place(key))

    def _load(self, path: Path, key: tuple[int | slice, ...]) -> np.ndarray:
        try:
            with xr.open_dataset(path, group=self.group, engine="h5netcdf") as dataset:
                return dataset[self.name][key].values
        except OSError as error:
            raise CheckpointError(f"{path}, which holds draws of the run, cannot be read: {error}") from error


def _within(wanted: range, start: int, stop: int) -> range:
    """The part of an ascending range that is from ``start`` to before ``stop``."""
    first = max(0, -(-(start - wanted.start) // wanted.step))
    last = max(first, -(-(stop - wanted.start) // wanted.step))
    return wanted[first:last]
