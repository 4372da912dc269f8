# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draws in a folder: netCDF files of successive draws, written whole."""

from collections.abc import Iterable, Mapping
from pathlib import Path
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ebmpp.core import archive
from ebmpp.core.version import VERSION
from ebmpp.errors import CheckpointError

if TYPE_CHECKING:
    import xarray as xr

_NAME = re.compile(r"draws-(\d{9,})-(\d{9,})\.nc")
_HALF = re.compile(r"\.draws-\d{9,}-\d{9,}\.nc\.\w+\.tmp")  # what a killed process was writing
AXIS = 1  # of draws, after that of chains

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
    import xarray as xr  # with pandas more than a second, for those who keep draws

    made = {name: _dataset(arrays, start) for name, arrays in groups.items() if arrays}
    stop = start + next(iter(made.values())).sizes["draw"]
    tree = xr.DataTree.from_dict(made)
    path = folder / f"draws-{start:09}-{stop:09}.nc"
    checked = {f"/{g}": {v: {"fletcher32": True} for v in data.data_vars} for g, data in made.items()}
    save = lambda beside: tree.to_netcdf(beside, engine="h5netcdf", encoding=checked)
    archive.write_beside(path, save)


def _dataset(arrays: Mapping[str, np.ndarray], start: int) -> "xr.Dataset":
    import xarray as xr

    variables = {name: (_dims(name, x.ndim), x) for name, x in arrays.items()}
    some = next(iter(arrays.values()))
    coords = {"chain": np.arange(len(some)), "draw": np.arange(start, start + some.shape[AXIS])}
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
