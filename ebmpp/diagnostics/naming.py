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
from ebmpp.ppl import CoupledComposite
from ebmpp.ppl.gibbs_block import GraphBlock
from ebmpp.traced.block import SiteKernel

_SAMPLE_DIMS = ("chain", "draw")
#: ArviZ's names of the kernels' fields.
_STATISTICS = dict.fromkeys(("acceptance", "accept_prob"), "acceptance_rate")
_STATISTICS |= {"num_steps": "n_steps", "log_density": "lp"}

Dims = Mapping[str, Sequence[str]]
Coords = Mapping[str, Sequence[Any]]
Names = dict[str, list[str]]
Samples = Mapping[str, np.ndarray]
Kernel = RowKernel | CoupledComposite | SiteKernel | Gibbs


def attributes(graph: object, kernel: Kernel | None = None) -> dict[str, str]:
    """Return a tree's attributes: library, version, graph and kernel."""
    attrs: dict[str, str] = {
        "inference_library": "ebmpp",
        "inference_library_version": VERSION,
    }
    if graph is not None:
        attrs["graph"] = repr(graph)
    if kernel is not None:
        attrs["inference_kernel"] = type(kernel).__name__
        if isinstance(kernel, RowKernel) and kernel.caveat:
            attrs["inference_caveat"] = kernel.caveat
    return attrs


def statistics(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields under ArviZ's names, numbered by block where two blocks of Gibbs share a name."""
    result: dict[str, Any] = {}
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
    kernel: Kernel | None, samples: Samples, dims: Dims, arviz_tree: xr.DataTree
) -> Names:
    """Return names of the dimensions after chain and draw: axes of rows, then axes of the block or value.

    :param dims: the user's names, by block, of its own axes or of all of them.
    :param arviz_tree: ArviZ's tree of a model's run, which has the names of plates.
    """
    checks.names("name in dims", dims, samples)
    blocks: Mapping[str, Any] = (
        kernel.graph.families if isinstance(kernel, RowKernel) else {}
    )
    blocks = kernel.binding.layouts if isinstance(kernel, GraphBlock) else blocks
    result = {}
    for name, x in samples.items():
        count = x.ndim - len(_SAMPLE_DIMS)
        shape = blocks[name].shape if name in blocks else x.shape
        is_block = len(shape) <= count and x.shape[x.ndim - len(shape) :] == shape
        block_axes = len(shape) if is_block else count  # after axes of rows
        rows = row_dims(count - block_axes)
        if name in dims:
            result[name] = [*([] if len(dims[name]) == count else rows), *dims[name]]
            if len(result[name]) != count:
                raise checks.error(
                    f"dims of {name!r}",
                    f"names of its {block_axes} axes{f' after {rows}' if rows else ''}",
                    list(dims[name]),
                )
        elif arviz_tree.children:
            names = arviz_tree["posterior"].to_dataset()[name].dims
            result[name] = [str(d) for d in names[len(_SAMPLE_DIMS) :]]
        else:
            result[name] = rows + [f"{name}_dim_{i}" for i in range(block_axes)]
    return result


def plate_dims(trace: Mapping[str, Any]) -> Names:
    """Return names of the plates' axes in a model's trace, by site, after the time axis of a scan.

    ArviZ takes a site's first axes for its plates, also where the first one is the
    time.
    """
    result = {}
    for name, site in trace.items():
        if site["type"] in ("sample", "deterministic"):
            plates = [
                frame.name
                for frame in sorted(
                    site["cond_indep_stack"], key=lambda frame: frame.dim
                )
            ]
            events = list(site.get("infer", {}).get("event_dims", []))
            times = [f"{name}_dim_0"] if site.get("_control_flow_done") else []
            if plates or events:
                result[name] = times + plates + events
    return result


def row_dims(count: int) -> list[str]:
    """Return names of the leading axes of clamped values."""
    return ["row"] if count == 1 else [f"row_{i}" for i in range(count)]


def coords_of(
    kernel: Any, samples: Samples, dims: Dims, coords: Coords
) -> dict[str, Sequence[Any]]:
    """Return the user's coordinates, and by default the names of units; refuse an unknown dimension."""
    sizes = {
        d: n
        for b, x in samples.items()
        for d, n in zip(dims[b], x.shape[2:], strict=True)
    }
    checks.names("dimension in coords", coords, sizes)

    # numbers or strings, which files and ArviZ accept
    def is_plain(x):
        return all(isinstance(n, str) for n in x) or all(
            isinstance(n, int | float) for n in x
        )

    labels = {
        dims[b][-1]: names for b, names in _labels(kernel).items() if b in samples
    }
    return {
        d: list(x) if is_plain(x) else list(map(str, x)) for d, x in labels.items()
    } | dict(coords)


def _labels(kernel: Any) -> dict[str, tuple[Hashable, ...]]:
    """Return names of the units of blocks with one axis, or of the sites that are such blocks."""
    if isinstance(kernel, RowKernel):
        families = kernel.graph.families
        return {
            b: names
            for b, names in kernel.graph.labels.items()
            if len(families[b].shape) == 1
        }
    steps = kernel.steps if isinstance(kernel, CoupledComposite) else (kernel,)
    steps = (
        [block for block, _ in kernel.blocks] if isinstance(kernel, Gibbs) else steps
    )
    labels = {}
    for step in (s for s in steps if isinstance(s, GraphBlock)):
        for site, layout in step.binding.layouts.items():
            block = layout.names[0]
            is_block = (
                layout.flat(step.graph, [block]) == layout and len(layout.shape) == 1
            )
            if is_block and block in step.graph.labels:
                labels[site] = step.graph.labels[block]
    return labels
