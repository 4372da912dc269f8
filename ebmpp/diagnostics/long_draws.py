# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""DataTree of a long run: moments, and draws that are read from their file when they are selected."""

import dataclasses
from typing import Any

import numpy as np
import xarray as xr

from ebmpp.core import checks
from ebmpp.diagnostics.naming import Kernel, attributes, coords_of, dims_of, statistics
from ebmpp.diagnostics.stillness import warn_still
from ebmpp.kernels import LongDraws, Moments, RowKernel
from ebmpp.kernels.streaming import leaves_by_name

#: The statistics of a value; ``chain_means`` has one axis more.
_STATISTICS = [f.name for f in dataclasses.fields(Moments) if f.name != "chain_means"]


def tree(result: LongDraws, dims: dict[str, Any], coords: dict[str, Any]) -> xr.DataTree:
    """Return groups ``moments``, and ``posterior`` and ``sample_stats`` where draws were kept."""
    kernel = result.mcmc.sampler
    graph = kernel.graph if isinstance(kernel, RowKernel) else None
    attrs = attributes(graph, kernel if isinstance(kernel, Kernel) else None)
    columns = [leaves_by_name(getattr(result.moments, name), "value") for name in _STATISTICS]
    values = {name: np.stack([column[name] for column in columns]) for name in columns[0]}
    r_hats = columns[_STATISTICS.index("r_hat")]
    warn_still({name: "apart" * bool(np.isinf(r).any()) for name, r in r_hats.items()}, "values", 3)
    shapes = {name: np.broadcast_to(0.0, (1, 1, *x.shape[1:])) for name, x in values.items()}  # as draws
    names = _names(kernel, shapes, dims)
    labels = coords_of(kernel, shapes, names, coords)
    variables = {name: (["statistic", *names[name]], x) for name, x in values.items()}
    groups = {"/": xr.Dataset(), "moments": xr.Dataset(variables, {"statistic": _STATISTICS})}
    for group, data in (result.draws().children if result.num_kept else {}).items():
        dataset = data.to_dataset()
        if group == "sample_stats":
            named = statistics({str(name): x for name, x in dataset.data_vars.items()})
            groups[group] = xr.Dataset(named)
            continue
        renamed = {}
        for name, x in dataset.data_vars.items():
            if len(names.get(str(name), ())) == x.ndim - 2:
                renamed |= dict(zip(x.dims[2:], names[str(name)], strict=True))
        groups[group] = dataset.rename(renamed)
    label = lambda data: data.assign_coords({d: v for d, v in labels.items() if d in data.dims})
    return xr.DataTree.from_dict({g: label(data).assign_attrs(attrs) for g, data in groups.items()})


def _names(kernel: Any, shapes: dict[str, np.ndarray], dims: dict[str, Any]) -> dict[str, list[str]]:
    """Return the dimensions of each value, named as a block's where the value is of its shape."""
    families = kernel.graph.families if isinstance(kernel, RowKernel) else {}
    checks.names("name in dims", dims, shapes)
    names = {}
    for name, x in shapes.items():
        shape = families[name].shape if name in families else None
        is_block = shape is not None and x.ndim >= 2 + len(shape) and x.shape[x.ndim - len(shape) :] == shape
        named = {name: dims[name]} if name in dims else {}
        names |= dims_of(kernel if is_block else None, {name: x}, named, xr.DataTree())
    return names
