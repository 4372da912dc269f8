# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The graph of all replicas: one model at several inverse temperatures, as one model.

Replica r has the energy "factors in which no units interact, plus beta_r times the others". Every block has
one more axis, that of the replicas, so that whatever is derived from an energy is derived for them too.
"""

from collections.abc import Mapping
import dataclasses
from functools import lru_cache
from typing import Any

from jaxtyping import Float
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.errors import DeclarationError
from ebmpp.families.family import Family
from ebmpp.graph.factors import Factor
from ebmpp.graph.factors.lateral import Local, Split, StatisticsAt
from ebmpp.graph.graph import FactorGraph


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Replicated(Factor):
    """A factor in every replica, weighted by the replica's beta if units interact in it.

    :param factor: the factor of one replica.
    :param num: how many replicas.
    """

    factor: Factor
    num: int

    def __init__(self, factor: Factor, num: int) -> None:
        lateral = dict(factor.lateral)  # of one replica; `edges` are those of all
        super().__init__(*factor.blocks, energy=factor.energy, name=factor.name, lateral=lateral)
        object.__setattr__(self, "factor", factor)
        object.__setattr__(self, "num", num)

    def __repr__(self) -> str:
        return f"Replicated({self.factor!r}, {self.num})"

    @property
    def tempered(self) -> bool:
        """Whether beta weighs it."""
        return self.factor.interacts

    def energies(
        self, params: Any, *statistics: Array, families: tuple[Family, ...]
    ) -> Float[Array, "replicas"]:
        """The factor's energy in each replica, beta left out."""
        own = params[1] if self.tempered else params
        single = tuple(map(_single, families))
        return jax.vmap(lambda *t: self.factor.evaluate(own, *t, families=single))(*statistics)

    def evaluate(self, params: Any, *statistics: Array, families: tuple[Family, ...]) -> Array:
        energies = self.energies(params, *statistics, families=families)
        return params[0] @ energies if self.tempered else energies.sum()

    def edges(self, families: Mapping[str, Family]) -> dict[str, np.ndarray]:
        single, number = {b: _single(families[b]) for b in self.blocks}, np.arange(self.num)[:, None, None]
        # those of every replica: units of different replicas do not interact
        each = self.factor.edges(single).items()
        return {b: (edges + single[b].size * number).reshape(-1, 2) for b, edges in each}

    def local(self, families: Mapping[str, Family], split: Split) -> Local | None:
        single = of_one_replica(split, self.num)
        own = self.factor.local({b: _single(f) for b, f in families.items()}, single)
        return None if own is None else _EachReplica(own, split, single, self.num)

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Any:
        single = {b: _single(families[b]) for b in self.blocks}
        own = self.factor.init_params(rng_key, single)
        return (jnp.linspace(0.0, 1.0, self.num), own) if self.tempered else own


def _single(family: Family) -> Family:
    return dataclasses.replace(family, shape=family.shape[1:])


class _EachReplica:
    """What a factor adds to natural parameters, replica by replica: a
    :class:`~ebmpp.graph.factors.lateral.Local`.

    :param own: what it adds in one replica.
    """

    def __init__(self, own: Local, split: Split, single: Split, num: int) -> None:
        self.own, self.num, self.size = own, num, single.family.size
        self.places = replica_places(split, single, num)

    def prepare(self, params: Any) -> Any:
        betas, own = params
        return betas, self.own.prepare(own)

    def field(self, prepared: Any, at: StatisticsAt, part: Any) -> Float[Array, "units rows ..."]:
        """Natural parameters of the units of ``part`` in all replicas."""
        betas, own = prepared
        first = self.size * np.arange(self.num)
        rows = 0

        def of_all(numbers: Any) -> Array:
            """The statistics of some units of one replica, the replicas among the rows."""
            nonlocal rows
            found = at(jnp.asarray(numbers)[..., None] + first)
            axis = jnp.ndim(numbers)
            rows = found.shape[axis + 1]
            return found.reshape(*found.shape[:axis], self.num * rows, *found.shape[axis + 2 :])

        made = self.own.field(own, of_all, part)
        made = made.reshape(len(made), self.num, rows, *made.shape[2:])
        made = made * betas.reshape(1, -1, *(1,) * (made.ndim - 2))
        made = jnp.moveaxis(made, 1, 0).reshape(-1, *made.shape[2:])
        return jnp.take(made, select(self.places, part), axis=0)


def select(table: np.ndarray | tuple[np.ndarray, ...], part: Any) -> Any:
    """A part's row; parts may be numbers of a loop where all rows are as long."""
    return table[part] if isinstance(table, tuple) else jnp.asarray(table)[part]


def of_one_replica(split: Split, num: int) -> Split:
    """The split of one replica, whose units have the colours that they have in every other."""
    family = _single(split.family)
    colors = split.colors.reshape(num, family.size)
    if (colors != colors[0]).any():
        raise AssertionError("replicas are coloured alike")  # lateral.split_blocks sees to it
    return Split(split.block, family, colors[0])


def replica_places(split: Split, single: Split, num: int) -> np.ndarray | tuple[np.ndarray, ...]:
    """Where each unit of a part of all replicas stands when the parts of all replicas are joined."""
    made = []
    for part, units in enumerate(single.units):
        width = len(units) if single.unrolled else single.table.shape[1]
        made.append((width * np.arange(num)[:, None] + np.arange(len(units))).ravel())
    return tuple(made) if split.unrolled else split.padded([m[:, None] for m in made], 0)[..., 0]


def joined_places(split: Split, single: Split, num: int) -> np.ndarray | tuple[np.ndarray, ...]:
    """The inverse: where each unit of a replica's part stands in the part of all, ``(num, units)`` a part."""
    made = [(len(units) * np.arange(num)[:, None] + np.arange(len(units))) for units in single.units]
    if split.unrolled:
        return tuple(made)
    most = single.table.shape[1]
    return np.stack([np.pad(m, [(0, 0), (0, most - m.shape[1])]) for m in made])


@lru_cache(maxsize=32)  # a declaration probes its factors, which takes tenths of a second
def replicate(graph: FactorGraph, num: int) -> FactorGraph:
    """``num`` replicas as one graph: the same blocks, of shape ``(num, *shape)``.

    :param graph: the model.
    :param num: how many replicas.
    :raises DeclarationError: for a graph in which no units interact.
    """
    if not any(f.interacts for f in graph.factors):
        raise DeclarationError(
            "in no factor of this graph do units interact, so they are independent and there is "
            "nothing to temper; BlockedGibbs draws it exactly"
        )
    grow = lambda f: dataclasses.replace(f, shape=(num, *f.shape))
    visible, latent = ({b: grow(f) for b, f in side.items()} for side in (graph.visible, graph.latent))
    with jax.ensure_compile_time_eval():  # the probe looks at values, also when called under jit
        return FactorGraph(visible, latent, [Replicated(f, num) for f in graph.factors])


def tempered_params(graph: FactorGraph, params: Mapping[str, Any], betas: Array) -> dict[str, Any]:
    """Params of :func:`replicate`: each factor's own, with the betas if they weigh it.

    :param graph: the model.
    :param params: its params.
    :param betas: one a replica.
    """
    return {f.name: (betas, params[f.name]) if f.interacts else params[f.name] for f in graph.factors}
