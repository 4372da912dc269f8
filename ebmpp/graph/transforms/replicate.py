# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The graph of all replicas: one model at several inverse temperatures, or several models, as one model.

Replica r has the energy "factors in which no units interact, plus beta_r times the others", all with the same
params. Or each has its own: beta_r times all factors at its params, plus 1 - beta_r times a reference, which
all share: independent units. Every block has one more axis, that of the replicas, so that whatever is derived
from an energy is derived for them too.
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

from ebmpp.core import sharding
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
    :param own: whether each replica has params of its own, and beta weighs this factor whatever it is.
    """

    factor: Factor
    num: int
    own: bool = False

    def __init__(self, factor: Factor, num: int, own: bool = False) -> None:
        lateral = dict(factor.lateral)  # of one replica; `edges` are those of all
        super().__init__(*factor.blocks, energy=factor.energy, name=factor.name, lateral=lateral)
        object.__setattr__(self, "factor", factor)
        object.__setattr__(self, "num", num)
        object.__setattr__(self, "own", own)

    def __repr__(self) -> str:
        return f"Replicated({self.factor!r}, {self.num}{', own=True' if self.own else ''})"

    @property
    def tempered(self) -> bool:
        """Whether beta weighs it."""
        return self.own or self.factor.interacts

    def energies(
        self, params: Any, *statistics: Array, families: tuple[Family, ...]
    ) -> Float[Array, "replicas"]:
        """The factor's energy in each replica, beta left out."""
        params = params[1] if self.tempered else params
        single = tuple(map(_single, families))
        one = lambda p, *t: self.factor.evaluate(p, *t, families=single)
        if self.own:
            return jax.vmap(one)(params, *statistics)
        return jax.vmap(lambda *t: one(params, *t))(*statistics)

    def weighted(
        self, params: Any, *statistics: Array, families: tuple[Family, ...]
    ) -> Float[Array, "replicas"]:
        """The factor's energy in each replica, beta included."""
        energies = self.energies(params, *statistics, families=families)
        return params[0] * energies if self.tempered else energies

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
        return None if own is None else _EachReplica(own, split, single, self.num, self.own)

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Any:
        single = {b: _single(families[b]) for b in self.blocks}
        made = self.factor.init_params(rng_key, single)
        if self.own:
            made = jax.tree.map(lambda a: jnp.repeat(jnp.asarray(a)[None], self.num, axis=0), made)
        return (jnp.linspace(0.0, 1.0, self.num), made) if self.tempered else made


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Reference(Factor):
    """``-(1 - beta_r) <eta_0, t_r>`` in every replica r: what independent units have their say by.

    Its params are the betas, and eta_0, a natural parameter of one replica's block.

    :param block: its name.
    :param num: how many replicas.
    """

    num: int

    def __init__(self, block: str, num: int, name: str) -> None:
        super().__init__(block, energy=_reference_energy, name=name)
        object.__setattr__(self, "num", num)

    def weighted(
        self, params: Any, *statistics: Array, families: tuple[Family, ...]
    ) -> Float[Array, "replicas"]:
        """The energy in each replica."""
        del families
        return _reference_energies(params, *statistics)

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Any:
        del rng_key
        return jnp.linspace(0.0, 1.0, self.num), _single(families[self.blocks[0]]).default_eta()


def _reference_energies(params: tuple[Array, Array], t: Array) -> Array:
    betas, eta0 = params
    return -(1 - betas) * (t.reshape(len(t), -1) @ eta0.ravel())


def _reference_energy(params: tuple[Array, Array], t: Array) -> Array:
    return _reference_energies(params, t).sum()


def _single(family: Family) -> Family:
    return dataclasses.replace(family, shape=family.shape[1:])


class _EachReplica:
    """What a factor adds to natural parameters, replica by replica: a
    :class:`~ebmpp.graph.factors.lateral.Local`.

    :param one: what it adds in one replica.
    :param own: whether each replica has params of its own.
    """

    def __init__(self, one: Local, split: Split, single: Split, num: int, own: bool) -> None:
        self.one, self.num, self.size, self.own = one, num, single.family.size, own
        self.places = replica_places(split, single, num)

    def prepare(self, params: Any) -> Any:
        betas, given = params
        return betas, (jax.vmap(self.one.prepare) if self.own else self.one.prepare)(given)

    def field(self, prepared: Any, at: StatisticsAt, part: Any) -> Float[Array, "units rows ..."]:
        """Natural parameters of the units of ``part`` in all replicas."""
        betas, given = prepared
        made = (self._each if self.own else self._alike)(given, at, part)
        made = made * betas.reshape(-1, *(1,) * (made.ndim - 1))
        made = made.reshape(-1, *made.shape[2:])
        return jnp.take(made, select(self.places, part), axis=0)

    def _alike(self, given: Any, at: StatisticsAt, part: Any) -> Float[Array, "replicas units rows ..."]:
        """Of replicas that share their params: as more rows of one."""
        first = self.size * np.arange(self.num)
        rows = 0

        def of_all(numbers: Any) -> Array:
            """The statistics of some units of one replica, the replicas among the rows."""
            nonlocal rows
            found = at(jnp.asarray(numbers)[..., None] + first)
            axis = jnp.ndim(numbers)
            rows = found.shape[axis + 1]
            return found.reshape(*found.shape[:axis], self.num * rows, *found.shape[axis + 2 :])

        made = self.one.field(given, of_all, part)
        return jnp.moveaxis(made.reshape(len(made), self.num, rows, *made.shape[2:]), 1, 0)

    def _each(self, given: Any, at: StatisticsAt, part: Any) -> Float[Array, "replicas units rows ..."]:
        """Of replicas that have their own."""
        first = jnp.arange(self.num, dtype=int) * self.size
        one = lambda p, n: self.one.field(p, lambda numbers: at(jnp.asarray(numbers) + n), part)
        return jax.vmap(one)(given, first)


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
def replicate(graph: FactorGraph, num: int, own: bool = False) -> FactorGraph:
    """``num`` replicas as one graph: the same blocks, of shape ``(num, *shape)``.

    :param graph: the model.
    :param num: how many replicas.
    :param own: whether each has params of its own, and the less of a reference the nearer its beta is to 1.
    :raises DeclarationError: for a graph in which no units interact.
    """
    if not any(f.interacts for f in graph.factors):
        raise DeclarationError(
            "in no factor of this graph do units interact, so they are independent and there is "
            "nothing to temper; BlockedGibbs draws it exactly"
        )
    grow = lambda f: dataclasses.replace(f, shape=(num, *f.shape))
    visible, latent = ({b: grow(f) for b, f in side.items()} for side in (graph.visible, graph.latent))
    shared = [Reference(b, num, name) for b, name in _reference_names(graph).items()] if own else []
    with sharding.at_once():  # the probe looks at values, also when called under jit
        return FactorGraph(visible, latent, [*(Replicated(f, num, own) for f in graph.factors), *shared])


def _reference_names(graph: FactorGraph) -> dict[str, str]:
    """Of the factors of the reference, a block each: names that no factor of the model has."""
    taken = {f.name for f in graph.factors}
    name = "reference"
    while any(f"{name} {b}" in taken for b in graph.families):
        name = f"_{name}"
    return {b: f"{name} {b}" for b in graph.families}


def tempered_params(graph: FactorGraph, params: Mapping[str, Any], betas: Array) -> dict[str, Any]:
    """Params of :func:`replicate`: each factor's own, with the betas if they weigh it.

    :param graph: the model.
    :param params: its params.
    :param betas: one a replica.
    """
    return {f.name: (betas, params[f.name]) if f.interacts else params[f.name] for f in graph.factors}


def own_params(
    graph: FactorGraph, params: Mapping[str, Any], betas: Array, eta0: Mapping[str, Array]
) -> dict[str, Any]:
    """Params of :func:`replicate` whose replicas have their own.

    :param graph: the model.
    :param params: of the replicas, with a leading axis.
    :param betas: one a replica.
    :param eta0: natural parameters of the reference.
    """
    shared = {name: (betas, eta0[b]) for b, name in _reference_names(graph).items()}
    return {f.name: (betas, params[f.name]) for f in graph.factors} | shared
