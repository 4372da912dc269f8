# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Graph of replicas: one model at several inverse temperatures, or several models, as one model.

With shared params, replica r has the energy of the factors without interactions, plus beta_r times the
others. With params of its own, it has beta_r times all factors, plus 1 - beta_r times a shared reference of
independent units. Every block gets a leading axis of replicas, so everything derived from an energy is
derived for them too.
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

from ebmpp.core import Eta, Params, checks, sharding
from ebmpp.errors import DeclarationError
from ebmpp.families.family import Family
from ebmpp.graph.factors import Factor
from ebmpp.graph.factors.lateral import Field, Local, Split, StatisticsAt
from ebmpp.graph.graph import FactorGraph

PerReplica = Float[Array, "replicas"]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Replicated(Factor):
    """A factor in ``num`` replicas, multiplied by the replica's beta if units interact in it.

    :param separate: True if each replica has its own params; beta then multiplies this
        factor in any case.
    """

    factor: Factor
    num: int
    separate: bool = False

    def __init__(self, factor: Factor, num: int, separate: bool = False) -> None:
        # of one replica; `edges` returns the pairs of all
        lateral = dict(factor.lateral)
        super().__init__(
            *factor.blocks, energy=factor.energy, name=factor.name, lateral=lateral
        )
        for name, value in (("factor", factor), ("num", num), ("separate", separate)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return (
            f"Replicated({self.factor!r}, "
            f"{self.num}{', separate=True' if self.separate else ''})"
        )

    @property
    def tempered(self) -> bool:
        """True if beta multiplies it."""
        return self.separate or self.factor.interacts

    @property
    def is_affine(self) -> bool:
        """True if the factor is: energies are summed over replicas."""
        return self.factor.is_affine

    def energies(
        self, params: Any, *statistics: Array, families: tuple[Family, ...]
    ) -> PerReplica:
        """Return the factor's energy in each replica without beta."""
        params = params[1] if self.tempered else params
        single = tuple(map(_single, families))

        def energy(p, *t):
            return self.factor.evaluate(p, *t, families=single)

        if self.separate:
            return jax.vmap(energy)(params, *statistics)
        return jax.vmap(lambda *t: energy(params, *t))(*statistics)

    def weighted(
        self, params: Any, *statistics: Array, families: tuple[Family, ...]
    ) -> PerReplica:
        """Return the factor's energy in each replica, multiplied by beta."""
        energies = self.energies(params, *statistics, families=families)
        return params[0] * energies if self.tempered else energies

    def evaluate(
        self, params: Any, *statistics: Array, families: tuple[Family, ...]
    ) -> Array:
        energies = self.energies(params, *statistics, families=families)
        return params[0] @ energies if self.tempered else energies.sum()

    def edges(self, families: Mapping[str, Family]) -> dict[str, np.ndarray]:
        """Return the pairs of every replica; units of different replicas do not interact."""
        single = {b: _single(families[b]) for b in self.blocks}
        number = np.arange(self.num)[:, None, None]
        pairs = self.factor.edges(single).items()
        return {
            b: (edges + single[b].size * number).reshape(-1, 2) for b, edges in pairs
        }

    def local(self, families: Mapping[str, Family], split: Split) -> Local | None:
        single = of_one_replica(split, self.num)
        local = self.factor.local({b: _single(f) for b, f in families.items()}, single)
        return (
            None
            if local is None
            else _LocalOfReplicas(local, split, single, self.num, self.separate)
        )

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Any:
        params = self.factor.init_params(
            rng_key, {b: _single(families[b]) for b in self.blocks}
        )
        if self.separate:
            params = jax.tree.map(
                lambda a: jnp.repeat(jnp.asarray(a)[None], self.num, axis=0), params
            )
        return (jnp.linspace(0.0, 1.0, self.num), params) if self.tempered else params


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Reference(Factor):
    """``-(1 - beta_r) <eta_0, t_r>`` in every replica r, the reference of independent units.

    Its params are the betas and eta_0, a natural parameter of one replica's block.
    """

    num: int

    is_affine = True

    def __init__(self, block: str, num: int, name: str) -> None:
        super().__init__(block, energy=_reference_energies, name=name)
        object.__setattr__(self, "num", num)

    def weighted(
        self, params: Any, *statistics: Array, families: tuple[Family, ...]
    ) -> PerReplica:
        """Return the energy in each replica."""
        return self.energy(params, *statistics)

    def evaluate(
        self, params: Any, *statistics: Array, families: tuple[Family, ...]
    ) -> Array:
        return self.weighted(params, *statistics, families=families).sum()

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Any:
        return jnp.linspace(0.0, 1.0, self.num), _single(
            families[self.blocks[0]]
        ).default_eta()


def _reference_energies(params: tuple[Array, Array], t: Array) -> Array:
    betas, eta0 = params
    return -(1 - betas) * (t.reshape(len(t), -1) @ eta0.ravel())


def _single(family: Family) -> Family:
    return dataclasses.replace(family, shape=family.shape[1:])


class _LocalOfReplicas:
    """The :class:`~ebmpp.graph.factors.lateral.Local` of a replicated factor, by that of one replica."""

    def __init__(
        self, local: Local, split: Split, single: Split, num: int, separate: bool
    ) -> None:
        self.single = local
        self.num = num
        self.size = single.family.size
        self.separate = separate

        # of each unit of a part of all replicas in the replicas' concatenated parts
        def width(units):
            return len(units) if single.unrolled else single.table.shape[1]

        places = [
            (width(u) * np.arange(num)[:, None] + np.arange(len(u))).ravel()
            for u in single.units
        ]
        self.places = tuple(places) if split.unrolled else split.padded(places, 0)

    def prepare(self, params: Any) -> Any:
        """Return betas and prepared params."""
        betas, inner = params
        return betas, (
            jax.vmap(self.single.prepare) if self.separate else self.single.prepare
        )(inner)

    def field(self, prepared: Any, statistics_at: StatisticsAt, part: Any) -> Field:
        """Return natural parameters of the units of ``part`` in all replicas."""
        betas, inner = prepared

        def of_all(numbers: Any) -> Array:
            """Return statistics of units of one replica, with the replicas among the rows."""
            t = statistics_at(
                jnp.asarray(numbers)[..., None] + self.size * np.arange(self.num)
            )
            axis = jnp.ndim(numbers)
            return t.reshape(*t.shape[:axis], -1, *t.shape[axis + 2 :])

        if self.separate:
            first = jnp.arange(self.num, dtype=int) * self.size

            def of_one(p, n):
                return self.single.field(
                    p, lambda i: statistics_at(jnp.asarray(i) + n), part
                )

            field = jax.vmap(of_one)(inner, first)
        else:
            field = self.single.field(inner, of_all, part)
            field = jnp.moveaxis(
                field.reshape(len(field), self.num, -1, *field.shape[2:]), 1, 0
            )
        field = field * betas.reshape(-1, *(1,) * (field.ndim - 1))
        return jnp.take(
            field.reshape(-1, *field.shape[2:]), select(self.places, part), axis=0
        )


def select(table: np.ndarray | tuple[np.ndarray, ...], part: Any) -> Any:
    """Return the row of a part, whose number may be traced if all rows have one length."""
    return table[part] if isinstance(table, tuple) else jnp.asarray(table)[part]


def of_one_replica(split: Split, num: int) -> Split:
    """Return the split of one replica; all replicas have the same colours."""
    family = _single(split.family)
    colors = split.colors.reshape(num, family.size)
    assert (colors == colors[0]).all()  # color_units colours equal components equally
    return Split(split.block, family, colors[0])


def joined_places(
    split: Split, single: Split, num: int
) -> np.ndarray | tuple[np.ndarray, ...]:
    """Return the position of each unit of a replica's part in the part of all replicas, ``(num, units)``."""
    places = [
        (len(units) * np.arange(num)[:, None] + np.arange(len(units)))
        for units in single.units
    ]
    return (
        tuple(places)
        if split.unrolled
        else split.padded([p.T for p in places], 0).swapaxes(1, 2)
    )


@lru_cache(maxsize=32)
def replicate(graph: FactorGraph, num: int, separate: bool = False) -> FactorGraph:
    """Return ``num`` replicas as one graph with blocks of shape ``(num, *shape)``.

    :param separate: give each replica its own params, and a reference whose weight is 1 - beta.
    """
    if not any(f.interacts for f in graph.factors):
        raise checks.error(
            "graph of tempering",
            "such that units interact",
            graph,
            DeclarationError,
            "BlockedGibbs draws independent units exactly.",
        )

    def grow(f):
        return dataclasses.replace(f, shape=(num, *f.shape))

    visible, latent = (
        {b: grow(f) for b, f in side.items()} for side in (graph.visible, graph.latent)
    )
    references = (
        [Reference(b, num, name) for b, name in _reference_names(graph).items()]
        if separate
        else []
    )
    with sharding.eager():  # a declaration looks at values, also under jit
        replicas = [Replicated(f, num, separate) for f in graph.factors]
        return FactorGraph(visible, latent, [*replicas, *references])


def _reference_names(graph: FactorGraph) -> dict[str, str]:
    """Return names of the reference factors, by block, that no factor of the model has."""
    names = {f.name for f in graph.factors}
    name = "reference"
    while any(f"{name} {b}" in names for b in graph.families):
        name = f"_{name}"
    return {b: f"{name} {b}" for b in graph.families}


def tempered_params(graph: FactorGraph, params: Params, betas: Array) -> Params:
    """Return params of :func:`replicate` with shared params, and one beta per replica."""
    return {
        f.name: (betas, params[f.name]) if f.interacts else params[f.name]
        for f in graph.factors
    }


def separate_params(
    graph: FactorGraph, params: Params, betas: Array, eta0: Eta
) -> Params:
    """Return params of :func:`replicate` with params of each replica: ``params`` with a leading axis."""
    references = {name: (betas, eta0[b]) for b, name in _reference_names(graph).items()}
    return {f.name: (betas, params[f.name]) for f in graph.factors} | references
