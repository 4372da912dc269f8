# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Names in a DataTree of draws: dimensions, coordinates, sample statistics and attributes."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpyro.infer import Gibbs
import xarray as xr

from ebmpp.core import VERSION, checks
from ebmpp.kernels import RowKernel
from ebmpp.kernels.streaming import variable_name, variable_names
from ebmpp.ppl import CoupledComposite
from ebmpp.ppl.gibbs_block import GraphBlock
from ebmpp.traced.block import SiteKernel

_SAMPLE_DIMS = ("chain", "draw")
#: ArviZ's names of the kernels' fields.
_STATISTICS = {
    "acceptance": "acceptance_rate",
    "accept_prob": "acceptance_rate",
    "num_steps": "n_steps",
    "log_density": "lp",
}

Dims = Mapping[str, Sequence[str]]
Coords = Mapping[str, Sequence[Any]]
#: Values of one field of a kernel's state.
FieldValues = np.ndarray | xr.DataArray
#: Names of a value's dimensions after chain and draw.
DimNames = dict[str, list[str]]
#: Sites of a model by name, from NumPyro.
Trace = Mapping[str, dict[str, Any]]
Samples = Mapping[str, np.ndarray]
Kernel = RowKernel | CoupledComposite | SiteKernel | Gibbs


def attributes(source: object) -> dict[str, str]:
    """Return a tree's attributes: library, version, and graph of a kernel or fit."""
    attrs = {
        "inference_library": "ebmpp",
        "inference_library_version": VERSION,
    }
    graph = getattr(source, "graph", None)
    if graph is not None:
        attrs["graph"] = repr(graph)
    if isinstance(source, Kernel):
        attrs["inference_kernel"] = type(source).__name__
        if isinstance(source, RowKernel) and source.caveat:
            attrs["inference_caveat"] = source.caveat
    return attrs


def statistics(fields: Mapping[str, FieldValues]) -> dict[str, FieldValues]:
    """Return fields under ArviZ's names, which end with the block where two blocks share one."""
    result = {}
    for field, value in fields.items():
        prefix, _, last = field.rpartition(".")
        name = _STATISTICS.get(last, last)
        if last == "potential_energy":
            name = "lp"
            value = -value
        if name in result:
            name = f"{name}_{prefix.removeprefix('block_states.').partition('.')[0]}"
        result[name] = value
    return result


def dims_of(
    kernel: Kernel | None, samples: Samples, dims: Dims, plates: DimNames
) -> DimNames:
    """Return names of the dimensions after chain and draw: axes of rows, then of the block.

    :param dims: the user's names, by block, of its own axes or of all of them.
    :param plates: names of the first axes, by variable.
    """
    checks.names("name in dims", dims, samples)
    variables = variable_names(samples)
    blocks = {}
    if isinstance(kernel, RowKernel):
        blocks = kernel.graph.families
    elif isinstance(kernel, GraphBlock):
        blocks = kernel.binding.layouts
    result = {}
    for name, x in samples.items():
        count = x.ndim - len(_SAMPLE_DIMS)
        shape = blocks[name].shape if name in blocks else x.shape
        is_block = len(shape) <= count and x.shape[x.ndim - len(shape) :] == shape
        block_axes = len(shape) if is_block else count  # after axes of rows
        rows = row_dims(count - block_axes)
        axes = plates.get(variables[name], [])[:block_axes]
        others = range(block_axes - len(axes))
        axes += [f"{variables[name]}_dim_{i}" for i in others]
        axes = list(dims.get(name, axes))
        result[name] = axes if len(axes) == count else rows + axes
        if len(result[name]) != count:
            expected = f"names of its {block_axes} axes"
            if rows:
                expected += f" after {rows}"
            raise checks.error(f"dims of {name!r}", expected, axes)
    used = {dim for names in result.values() for dim in names}
    if same := used.intersection(variables.values()):
        raise checks.error("dims", "names that no site has", sorted(same))
    return result


def plate_dims(trace: Trace) -> DimNames:
    """Return names of the plates' axes, by variable, after the time axis of a scan.

    ArviZ takes a site's first axes for its plates, also where the first one is the
    time.
    """
    result = {}
    for name, site in trace.items():
        if site["type"] in ("sample", "deterministic"):
            variable = variable_name(name)
            frames = sorted(site["cond_indep_stack"], key=lambda frame: frame.dim)
            dims = [frame.name for frame in frames]
            dims += site.get("infer", {}).get("event_dims", [])
            times = [f"{variable}_dim_0"] if site.get("_control_flow_done") else []
            if dims:
                result[variable] = times + list(map(variable_name, dims))
    return result


def row_dims(count: int) -> list[str]:
    """Return names of the leading axes of clamped values."""
    return ["row"] if count == 1 else [f"row_{i}" for i in range(count)]


def coords_of(
    kernel: object, samples: Samples, dims: Dims, coords: Coords
) -> dict[str, Sequence[Any]]:
    """Return the user's coordinates, and by default the names of units."""
    known = [dim for b in samples for dim in dims[b]]
    checks.names("dimension in coords", coords, known)
    result = {}
    for b, names in _labels(kernel).items():
        if b in samples:
            # numbers or strings, which files and ArviZ accept
            is_plain = all(isinstance(name, str) for name in names)
            is_plain |= all(isinstance(name, int | float) for name in names)
            result[dims[b][-1]] = list(names if is_plain else map(str, names))
    return result | dict(coords)


def _labels(kernel: object) -> dict[str, tuple[Hashable, ...]]:
    """Return names of the units of blocks with one axis, or of the sites that are such blocks."""
    if isinstance(kernel, RowKernel):
        families = kernel.graph.families
        labels = kernel.graph.labels
        return {b: v for b, v in labels.items() if len(families[b].shape) == 1}
    labels = {}
    steps = (kernel,)
    if isinstance(kernel, CoupledComposite):
        steps = kernel.steps
    elif isinstance(kernel, Gibbs):
        steps = [block for block, _ in kernel.blocks]
    for step in steps:
        if not isinstance(step, GraphBlock):
            continue
        for site, layout in step.binding.layouts.items():
            block = layout.names[0]
            is_block = layout.flat(step.graph, [block]) == layout
            if is_block and len(layout.shape) == 1 and block in step.graph.labels:
                labels[site] = step.graph.labels[block]
    return labels
