# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draws in a folder: netCDF files of successive draws, written whole, and read where they are looked at."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
import re
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from ebmpp.core import archive
from ebmpp.core.version import VERSION
from ebmpp.errors import CheckpointError

_NAME = re.compile(r"draws-(\d{9,})-(\d{9,})\.nc")
_HALF = re.compile(r"\.draws-\d{9,}-\d{9,}\.nc\.\w+\.tmp")  # what a killed process was writing
_AXIS = 1  # of draws, after that of chains

#: By group ("posterior", "sample_stats"), arrays ``(chains, draws, ...)`` by name.
Groups = Mapping[str, Mapping[str, Any]]


class Part(NamedTuple):
    """A file, and the numbers of its first draw and of the one after its last."""

    path: Path
    start: int
    stop: int


def files(names: Iterable[str]) -> list[str]:
    """Those among them that are of draws, in order."""
    return sorted(filter(_NAME.fullmatch, names))


def clean(folder: Path, num_draws: int) -> None:
    """Remove what a run that goes on after ``num_draws`` draws writes anew."""
    for path in folder.iterdir():
        found = _NAME.fullmatch(path.name)
        if _HALF.fullmatch(path.name) or (found and int(found[1]) >= num_draws):
            path.unlink(missing_ok=True)


def write(folder: Path, start: int, groups: Groups) -> None:
    """One file of draws, the first of which is number ``start``.

    :raises OSError: where the disk does not take it.
    """
    made = {name: _dataset(arrays, start) for name, arrays in groups.items() if arrays}
    stop = start + next(iter(made.values())).sizes["draw"]
    tree = xr.DataTree.from_dict(made)
    path = folder / f"draws-{start:09}-{stop:09}.nc"
    checked = {f"/{g}": {v: {"fletcher32": True} for v in data.data_vars} for g, data in made.items()}
    save = lambda beside: tree.to_netcdf(beside, engine="h5netcdf", encoding=checked)
    archive.write_beside(path, save)


def _dataset(arrays: Mapping[str, np.ndarray], start: int) -> xr.Dataset:
    variables = {name: (_dims(name, x.ndim), x) for name, x in arrays.items()}
    some = next(iter(arrays.values()))
    coords = {"chain": np.arange(len(some)), "draw": np.arange(start, start + some.shape[_AXIS])}
    attrs = {"inference_library": "ebmpp", "inference_library_version": VERSION}
    return xr.Dataset(variables, coords, attrs)


def _dims(name: str, count: int) -> list[str]:
    return ["chain", "draw", *(f"{name}_dim_{i}" for i in range(count - 2))]


def check(folder: Path, num_draws: int) -> list[Part]:
    """The files of the first ``num_draws`` draws, in order.

    :raises CheckpointError: where one is missing.
    """
    found = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()]
    parts = sorted((Part(p, int(m[1]), int(m[2])) for p, m in found if m), key=lambda part: part.start)
    parts, done = [part for part in parts if part.stop <= num_draws], 0
    for part in parts:
        if part.start != done:
            break
        done = part.stop
    if done != num_draws:
        raise CheckpointError(
            f"{folder} lacks the file of draws {done} and after, and the run has {num_draws}: put the files "
            "draws-*.nc back, or begin anew in another directory"
        )
    return parts


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
        self.shape = (*first.shape[:_AXIS], parts[-1].stop, *first.shape[_AXIS + 1 :])

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        support = indexing.IndexingSupport.BASIC
        return indexing.explicit_indexing_adapter(key, self.shape, support, self._read)

    def _read(self, key: tuple[int | slice, ...]) -> np.ndarray:
        """:raises CheckpointError: where a file is missing, or cannot be read."""
        wanted = range(self.shape[_AXIS])[key[_AXIS]]
        if isinstance(wanted, int):
            return np.take(self._rows(range(wanted, wanted + 1), key), 0, self._place(key))
        forward = wanted if wanted.step > 0 else wanted[::-1]
        made = self._rows(forward, key)
        return made if wanted.step > 0 else np.flip(made, self._place(key))

    def _place(self, key: tuple[int | slice, ...]) -> int:
        """Of the axis of draws in what ``_rows`` returns."""
        return sum(isinstance(part, slice) for part in key[:_AXIS])

    def _rows(self, wanted: range, key: tuple[int | slice, ...]) -> np.ndarray:
        read = []
        for path, start, stop in self.parts:
            here = _within(wanted, start, stop)
            if here or (not wanted and not read):
                rows = slice(here.start - start, here.stop - start, here.step) if here else slice(0, 0)
                read.append(self._load(path, (*key[:_AXIS], rows, *key[_AXIS + 1 :])))
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
