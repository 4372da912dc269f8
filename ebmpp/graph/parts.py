# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Natural parameters of a part: the units of one colour of a block whose units interact.

What the other blocks contribute does not change while the parts of a block are visited, so it is computed
once a visit (:func:`surround`); what units of the block contribute to one another is looked up for the units
of the part alone, where their factor can (:class:`~ebmpp.graph.factors.lateral.Local`), or comes by autodiff.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Shaped

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Natural, Params, Rows
from ebmpp.families.family import Family
from ebmpp.graph import energy
from ebmpp.graph.declaration import Declaration


class View(NamedTuple):
    """A graph's families with that of one part in place of its block's: all that a draw needs of a graph."""

    families: Mapping[str, Family]


class Around(NamedTuple):
    """What the visits of all parts of a block have in common."""

    eta: Float[Array, "size rows_or_1 ..."]
    """What the other factors contribute."""
    own: tuple
    """What each factor in which the units interact has prepared."""


def view(graph: Declaration, block: str, part: Any) -> View:
    """The families of a part."""
    return View({block: graph.splits[block].part_family(part)})


def to_units(values: Shaped[Array, "rows *shape_stats"], family: Family) -> Shaped[Array, "size rows *stats"]:
    """The units first and the rows second."""
    made = values.reshape(len(values), family.size, *values.shape[1 + len(family.shape) :])
    return jnp.moveaxis(made, 1, 0)


def to_rows(values: Shaped[Array, "size rows *stats"], family: Family) -> Shaped[Array, "rows *shape_stats"]:
    """The way back."""
    return jnp.moveaxis(values, 0, 1).reshape(values.shape[1], *family.shape, *values.shape[2:])


def surround(graph: Declaration, params: Params, x: Rows, block: str) -> Around:
    """What does not change while the parts of ``block`` are visited."""
    split = graph.splits[block]
    scope = dict.fromkeys(b for f in split.others for b in f.blocks if b != block)
    t = graph.statistics({b: x[b] for b in scope})
    one = lambda t: energy.natural(graph, params, t, [block], split.others)[block]
    eta = jax.vmap(one)(t) if t else one({})[None]
    each = zip(split.own, split.locals, strict=True)
    prepared = (() if local is None else local.prepare(params[f.name]) for f, local in each)
    return Around(to_units(eta, split.family), tuple(prepared))


def natural_part(
    graph: Declaration,
    params: Params,
    x: Rows,
    units: Shaped[Array, "size rows"],
    block: str,
    around: Around,
    part: Any,
) -> Float[Array, "rows part_units ..."]:
    """Natural parameters of a part given all else.

    :param x: the other blocks.
    :param units: the block's values.
    :param around: of :func:`surround`, for the same ``x``.
    """
    split = graph.splits[block]
    at = lambda numbers: split.family.statistics(units[numbers])
    eta = split.take(around.eta, part)
    for factor, local, prepared in zip(split.own, split.locals, around.own, strict=True):
        if local is not None:
            eta = eta + local.field(prepared, at, part)
            continue
        now = {b: to_rows(units, split.family) if b == block else x[b] for b in factor.blocks}
        one = lambda t, factor=factor: energy.natural(graph, params, t, [block], [factor])[block]
        eta = eta + split.take(to_units(jax.vmap(one)(graph.statistics(now)), split.family), part)
    eta = jnp.broadcast_to(eta, (eta.shape[0], units.shape[1], *eta.shape[2:]))
    return silence(split.part_family(part), split.real(part), jnp.moveaxis(eta, 0, 1))


def silence(family: Family, real: Bool[Array, "..."] | None, eta: Natural) -> Natural:
    """Units that are not ``real`` (those past a part's end, those held) get the law of initial values."""
    if real is None:
        return eta
    real = real.reshape(real.shape + (1,) * len(family.stat_shape))
    return jnp.where(real, eta, family.default_eta())
