# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Names in a tree of draws: of dimensions, along them, and of what kernels tell beside the draws."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpyro.infer import Gibbs
import xarray as xr

from ebmpp.core.version import VERSION
from ebmpp.errors import ArgumentError
from ebmpp.kernels import RowKernel
from ebmpp.ppl import CoupledComposite, GibbsBlock
from ebmpp.traced.block import SiteKernel

_SAMPLE_DIMS = ("chain", "draw")
#: ArviZ's names of what kernels call otherwise.
_STATS = {
    "acceptance": "acceptance_rate",
    "accept_prob": "acceptance_rate",
    "num_steps": "n_steps",
    "log_density": "lp",
}

Dims = Mapping[str, Sequence[str]]
Coords = Mapping[str, Sequence[Any]]
Kernel = RowKernel | CoupledComposite | SiteKernel | Gibbs


def attributes(graph: object, kernel: Kernel | None = None) -> dict[str, str]:
    """Of a tree: who made it, and of what."""
    attrs: dict[str, str] = {"inference_library": "ebmpp", "inference_library_version": VERSION}
    if graph is not None:
        attrs["graph"] = repr(graph)
    if kernel is not None:
        attrs["inference_kernel"] = type(kernel).__name__
        if isinstance(kernel, RowKernel) and kernel.caveat:
            attrs["inference_caveat"] = kernel.caveat
    return attrs


def statistics(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields under ArviZ's names; where two blocks of Gibbs have one of the same name, with their numbers."""
    made: dict[str, Any] = {}
    for field, value in fields.items():
        within, _, last = field.rpartition(".")
        name = _STATS.get(last, last)
        if last == "potential_energy":
            name, value = "lp", -value
        if name in made:
            name = f"{name}_{within.removeprefix('block_states.').partition('.')[0]}"
        made[name] = value
    return made


def dims_of(
    kernel: Kernel | None, samples: Mapping[str, np.ndarray], given: Dims, theirs: xr.DataTree
) -> dict[str, list[str]]:
    """Names of the dimensions after chain and draw: the rows' axes first, then the block's own.

    :param theirs: what ArviZ makes of a model's run, which knows the names of plates.
    :raises ArgumentError: for names of a block that there is not, or of another number of axes.
    """
    unknown = [name for name in given if name not in samples]
    if unknown:
        raise ArgumentError(f"dims names {unknown[0]!r}, and the draws are of {list(samples)}")
    made = {}
    for name, x in samples.items():
        count = x.ndim - len(_SAMPLE_DIMS)
        own = _own_axes(kernel, name, count)
        if name in given:
            outer = [] if len(given[name]) == count else row_dims(count - own)
            made[name] = [*outer, *given[name]]
            if len(made[name]) != count:
                after = f" after {outer}" if outer else ""
                raise ArgumentError(
                    f"dims of {name!r} are {list(given[name])}, and it has {own} axes of its own{after}"
                )
        elif theirs.children:
            made[name] = [str(d) for d in theirs["posterior"].to_dataset()[name].dims[len(_SAMPLE_DIMS) :]]
        else:
            made[name] = row_dims(count - own) + [f"{name}_dim_{i}" for i in range(own)]
    return made


def _own_axes(kernel: Kernel | None, name: str, count: int) -> int:
    """How many of a block's or a site's axes are not those of rows."""
    if isinstance(kernel, RowKernel):
        return len(kernel.graph.families[name].shape)
    return len(kernel.binding.layouts[name].shape) if isinstance(kernel, GibbsBlock) else count


def row_dims(count: int) -> list[str]:
    """Names of the leading axes that clamped values had."""
    return ["row"] if count == 1 else [f"row_{i}" for i in range(count)]


def coords_of(
    kernel: Any, samples: Mapping[str, np.ndarray], dims: Dims, given: Coords
) -> dict[str, Sequence[Any]]:
    """What was given, and the names of units where they have some.

    :raises ArgumentError: for a dimension that there is not, or one of another length.
    """
    sizes = {d: n for b, x in samples.items() for d, n in zip(dims[b], x.shape[2:], strict=True)}
    for name, values in given.items():
        if name not in sizes:
            raise ArgumentError(f"coords names dimension {name!r}, and the draws have {list(sizes)}")
        if len(values) != sizes[name]:
            raise ArgumentError(
                f"coords of {name!r} are {len(values)} names, and it has length {sizes[name]}"
            )
    units = {dims[b][-1]: _as_coordinate(labels) for b, labels in _labels(kernel).items() if b in samples}
    return units | dict(given)


def _labels(kernel: Any) -> dict[str, tuple[Hashable, ...]]:
    """Names of the units, by block of one axis; or by site that is such a block."""
    if isinstance(kernel, RowKernel):
        families = kernel.graph.families
        return {b: names for b, names in kernel.graph.labels.items() if len(families[b].shape) == 1}
    steps = kernel.steps if isinstance(kernel, CoupledComposite) else (kernel,)
    steps = [block for block, _ in kernel.blocks] if isinstance(kernel, Gibbs) else steps
    made = {}
    for step in (s for s in steps if isinstance(s, GibbsBlock)):
        for site, layout in step.binding.layouts.items():
            first = layout.names[0]
            if layout.of(step.graph, [first]) == layout and len(layout.shape) == 1:
                made |= {site: step.graph.labels[first]} if first in step.graph.labels else {}
    return made


def _as_coordinate(labels: Sequence[Hashable]) -> list[Any]:
    """As a file and ArviZ take them: numbers or strings."""
    plain = all(isinstance(x, str) for x in labels) or all(isinstance(x, int | float) for x in labels)
    return list(labels) if plain else list(map(str, labels))
