# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""One netCDF file of a run's draws, written block by block.

All draws have their places in the file from the beginning, so a block is written
without touching the file's structure: a process that is killed leaves a file that can
be opened and written again. The file is called ``draws.partial.nc`` until the run is
complete, and ``draws.nc`` then.
"""

from collections.abc import Mapping
import os
from pathlib import Path
import shutil
from typing import Any

import h5netcdf
import h5py
import numpy as np

import jax

from ebmpp.core import VERSION, num_rows
from ebmpp.errors import CheckpointError
from ebmpp.kernels.streaming import variable_names

#: By group ("posterior", "sample_stats") and name, arrays ``(chains, draws, ...)``.
Groups = Mapping[str, Mapping[str, Any]]

_COPIED = 100  # draws at a time
_OVERHEAD = 2**16  # bytes of a group without its values


class DrawFile:
    """Draws of one run in an existing directory.

    :param num_draws: draws of each chain, once the run is complete.
    :param done: how many of them an earlier call has written.
    :raises CheckpointError: if these are not there, or a complete file is and none of
        them is done.
    """

    def __init__(self, directory: Path, num_draws: int, done: int) -> None:
        self.path = directory / "draws.nc"
        self._partial = directory / "draws.partial.nc"
        self._num_draws = num_draws
        if not done:
            if self.path.exists():
                raise CheckpointError(
                    f"{self.path} exists already. Give another directory."
                )
            self._partial.unlink(missing_ok=True)
            return
        source = self._partial if self._partial.exists() else self.path
        try:
            with h5py.File(source, "r") as file:
                there = file["posterior/draw"]
                there[done - 1]  # an error if it has fewer
                is_extended = len(there) != num_draws
                if is_extended:
                    self._extend(file, done)
        except (OSError, LookupError, ValueError) as error:
            raise CheckpointError(
                f"{source} cannot be read, and the run's checkpoint counts {done} "
                f"draws in it: {error}. Put the file back, or start in another "
                "directory."
            ) from error
        if source == self.path and num_draws > done and not is_extended:
            os.replace(self.path, self._partial)

    def write(self, start: int, groups: Groups) -> None:
        """Write successive draws, the first of which is number ``start``."""
        groups = {name: _variables(arrays) for name, arrays in groups.items() if arrays}
        if start == 0 and not self._partial.exists():
            self._create(self._partial, groups)
        with h5py.File(self._partial, "r+") as file:
            _write(file, start, groups)
        with open(self._partial, "rb") as file:
            os.fsync(file.fileno())  # before the checkpoint that counts on them

    def finish(self) -> None:
        """Give the complete file its name."""
        if self._partial.exists():
            os.replace(self._partial, self.path)

    def _extend(self, file: h5py.File, done: int) -> None:
        """Make a file of more draws, with the first ``done`` of ``file``."""

        def draws(start, stop):
            groups = {}
            for name, group in file.items():
                arrays = {n: x[:, start:stop] for n, x in group.items() if x.ndim >= 2}
                groups[name] = arrays
            return groups

        larger = self._partial.with_suffix(".tmp")
        self._create(larger, draws(0, 1))
        with h5py.File(larger, "r+") as target:
            for start in range(0, done, _COPIED):
                _write(target, start, draws(start, min(done, start + _COPIED)))
        shutil.copymode(file.filename, larger)
        os.replace(larger, self._partial)

    def _create(self, path: Path, groups: Groups) -> None:
        """Make a file with places for all draws.

        Space is reserved, as HDF5 dies where it cannot write.
        """
        size = len(groups) * (16 * self._num_draws + _OVERHEAD)
        for x in jax.tree.leaves(groups):
            size += x[:, :1].nbytes * self._num_draws
        _reserve(path, size)
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with h5netcdf.File(path, "w") as file:
            for name, arrays in groups.items():
                group = file.create_group(name)
                group.attrs.update(
                    {"inference_library": "ebmpp", "inference_library_version": VERSION}
                )
                axes = {"chain": num_rows(arrays), "draw": self._num_draws}
                for dim, size in axes.items():
                    group.dimensions[dim] = size
                    group.create_variable(dim, (dim,), data=np.arange(size))
                for variable, x in arrays.items():
                    dims = [f"{variable}_dim_{i}" for i in range(x.ndim - 2)]
                    for dim, size in zip(dims, x.shape[2:]):
                        group.dimensions[dim] = size
                    is_bool = x.dtype == bool
                    dtype = np.int8 if is_bool else x.dtype
                    stored = group.create_variable(
                        variable, ("chain", "draw", *dims), dtype, dcpl=layout
                    )
                    if is_bool:
                        stored.attrs["dtype"] = "bool"  # as xarray stores it
        _reserve(path, path.stat().st_size)


def _variables(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    names = variable_names(arrays)
    return {names[name]: np.asarray(x) for name, x in arrays.items()}


def _reserve(path: Path, size: int) -> None:
    """Reserve space on the disk for a file; raise OSError if there is too little."""
    with open(path, "ab") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _write(file: h5py.File, start: int, groups: Groups) -> None:
    """Write draws from number ``start`` on."""
    for name, arrays in groups.items():
        for variable, x in arrays.items():
            file[name][variable][:, start : start + x.shape[1]] = x
