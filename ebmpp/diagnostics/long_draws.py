# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a long run returns as a DataTree: moments, and draws that stay in their files."""

import dataclasses
from typing import Any

import numpy as np
import xarray as xr

from ebmpp.core.names import leaves_by_name
from ebmpp.diagnostics.naming import Kernel, attributes, coords_of, dims_of, statistics
from ebmpp.errors import ArgumentError
from ebmpp.kernels import LongDraws, Moments, RowKernel

_LEFT_OUT = "chain_means"  # has one axis more than the rest


def tree(made: LongDraws, dims: dict[str, Any], coords: dict[str, Any]) -> xr.DataTree:
    """Groups ``moments``, and ``posterior`` and ``sample_stats`` where draws were kept.

    :raises ArgumentError: for dims and coords that do not fit.
    """
    kernel = made.mcmc.sampler
    graph = kernel.graph if isinstance(kernel, RowKernel) else None
    attrs = attributes(graph, kernel if isinstance(kernel, Kernel) else None)
    values = _by_statistic(made.moments)
    # as draws, with two axes before their own
    shapes = {name: np.broadcast_to(0.0, (1, 1, *x.shape[1:])) for name, x in values.items()}
    named = _names(kernel, shapes, dims)
    along = coords_of(kernel, shapes, named, coords)
    kept = made.draws() if made.num_kept else xr.DataTree()
    groups = {"/": xr.Dataset(attrs=attrs), "moments": _moments(values, named, along, attrs)}
    for group in kept.children:
        groups[group] = _draws(kept[group].to_dataset(), group, named, along, attrs)
    return xr.DataTree.from_dict(groups)


def _by_statistic(moments: Moments) -> dict[str, np.ndarray]:
    """By name of a value, what is told of it, one after the other."""
    each = [leaves_by_name(getattr(moments, name), "value") for name in _statistics()]
    return {name: np.stack([np.asarray(one[name]) for one in each]) for name in each[0]}


def _statistics() -> list[str]:
    return [f.name for f in dataclasses.fields(Moments) if f.name != _LEFT_OUT]


def _moments(
    values: dict[str, np.ndarray], named: dict[str, list[str]], along: dict[str, Any], attrs: dict[str, str]
) -> xr.Dataset:
    variables = {name: (["statistic", *named[name]], x) for name, x in values.items()}
    made = xr.Dataset(variables, {"statistic": _statistics()}, attrs)
    return made.assign_coords({d: v for d, v in along.items() if d in made.dims})


def _names(kernel: Any, shapes: dict[str, np.ndarray], given: dict[str, Any]) -> dict[str, list[str]]:
    """Names of the dimensions of values; those of the graph's blocks where they are such."""
    families = kernel.graph.families if isinstance(kernel, RowKernel) else {}
    blocks = {name: x for name, x in shapes.items() if name in families and _fits(families[name].shape, x)}
    unknown = [name for name in given if name not in shapes]
    if unknown:
        raise ArgumentError(f"dims names {unknown[0]!r}, and the moments are of {list(shapes)}")
    made = {}
    for name, x in shapes.items():
        own = {name: given[name]} if name in given else {}
        made |= dims_of(kernel if name in blocks else None, {name: x}, own, xr.DataTree())
    return made


def _fits(shape: tuple[int, ...], x: np.ndarray) -> bool:
    """Whether values are of a block's shape: not so where ``fn`` made something else by its name."""
    return x.shape[x.ndim - len(shape) :] == shape and x.ndim >= 2 + len(shape)


def _draws(
    data: xr.Dataset, group: str, named: dict[str, list[str]], along: dict[str, Any], attrs: dict[str, str]
) -> xr.Dataset:
    """Draws under the names that their moments have."""
    if group == "sample_stats":
        return xr.Dataset(statistics({str(name): x for name, x in data.data_vars.items()}), attrs=attrs)
    renamed = {}
    for name, x in data.data_vars.items():
        own = named.get(str(name), [])
        if len(own) == x.ndim - 2:
            renamed |= dict(zip(x.dims[2:], own, strict=True))
    made = data.rename(renamed).assign_attrs(attrs)
    return made.assign_coords({d: v for d, v in along.items() if d in made.dims})
