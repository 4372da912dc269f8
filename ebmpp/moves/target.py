# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Targets of moves: a graph with params, clamped blocks and observed units."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from functools import partial
import math
from typing import NamedTuple, Self, TypeVar

from jaxtyping import PyTree

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Eta,
    Keys,
    Natural,
    Numbers,
    Params,
    PerRow,
    Rows,
    Scalar,
    Schedule,
    State,
    UnitMasks,
    checks,
    random,
    sharding,
)
from ebmpp.errors import StateError
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.graph.states import Clamped, as_clamped
from ebmpp.graph.transforms import batches
from ebmpp.moves.rungs import Tempering

T = TypeVar("T")


class Pool(NamedTuple):
    """Components of proposals, as :func:`ebmpp.coupling.mixture_pool` returns them."""

    eta: Eta
    """Natural parameters of the proposed blocks, ``(components, *shape, *stat_shape)`` each."""
    log_normalizer: PerRow
    """Log-normaliser of each component, summed over all units."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Target:
    """Distribution that moves leave invariant, the model's given any clamped values.

    It is a pytree with a static graph, so it can be an argument of compiled functions.

    :param params: of one model, or of several with a leading axis of parameter sets.
        Moves take one set: :meth:`over_sets`.
    :param fixed: clamped blocks and observed units, as rows; none by default.
    :param pool: proposals of a :class:`~ebmpp.moves.Mixture`. The distribution does not
        depend on it.
    :param tempering: the rung whose distribution it is; None for the model's. Layers
        are drawn at the rung; other moves are the model's.
    """

    graph: FactorGraph = dataclasses.field(metadata={"static": True})
    params: Params
    fixed: Clamped = dataclasses.field(default_factory=Clamped)
    pool: Pool | None = None
    tempering: Tempering | None = None

    @classmethod
    def checked(
        cls,
        who: str,
        graph: FactorGraph,
        params: Params,
        blocks: Mapping[str, object],
        values: bool = True,
        sets: bool = False,
    ) -> Self:
        """Return the target of a call's checked arguments.

        :param blocks: clamped and :class:`~ebmpp.Observed` blocks.
        :param values: False to check names and shapes only.
        :param sets: accept params with a leading axis of parameter sets.
        :raises ParameterError: for params that do not fit the graph.
        :raises StateError: for blocks that do not fit the graph, or if no block is
            free.
        """
        checks.instance(f"{who}: graph", graph, FactorGraph)
        target = cls(graph, params, as_clamped(graph.families, blocks, values))
        if not target.free:
            raise StateError(
                f"{who}: clamped must leave a block free, got all of {[*target.clamped]}."
            )
        batch = target.sets if sets else ()
        if len(batch) > 1:
            raise checks.parameter_error(
                f"{who}: leading axes of params", "one axis of parameter sets", batch
            )
        batches.check_batch(graph, params, batch, values)
        return target

    @property
    def sets(self) -> tuple[int, ...]:
        """The number of parameter sets, as a shape; () for params of one model."""
        return batches.leading_axes(self.graph, self.params)

    def each_set(self) -> list[Self]:
        """Return the target of each parameter set, or its own params' alone."""
        with sharding.eager():
            sets = list(batches.each_set(self.graph, self.params, self.sets))
        return [dataclasses.replace(self, params=params) for params in sets]

    def set_keys(self, rng_key: Array) -> Array:
        """Return a key for each parameter set, ``fold_in(key, set)``, or the key itself."""
        if not self.sets:
            return rng_key
        fold_in = partial(jax.random.fold_in, rng_key)
        return jax.vmap(fold_in)(jnp.arange(self.sets[0]))

    def over_sets(self, fn: Callable[..., T], *args: PyTree, axis: int = 0) -> T:
        """Return ``fn(target, *args)``, mapped over parameter sets where there are any.

        :param axis: number of the axis of sets of all arguments and results.
        """
        if not self.sets:
            return fn(self, *args)

        def at_set(params, *args):
            return fn(dataclasses.replace(self, params=params), *args)

        params, axes = batches.flatten_axes(self.graph, self.params, self.sets)
        return jax.vmap(at_set, (axes, *(axis,) * len(args)), axis)(params, *args)

    @property
    def clamped(self) -> Blocks:
        """Values of the clamped blocks, ``(rows, *shape)`` each."""
        return self.fixed.full

    @property
    def keep(self) -> UnitMasks:
        """Masks of the observed units of free blocks, ``(rows, *shape)`` each."""
        return self.fixed.keep

    @property
    def batch(self) -> tuple[int, ...]:
        """Leading axes of the clamped values; their product is the number of rows."""
        return self.fixed.batch

    @property
    def num_rows(self) -> int:
        """Number of rows of one chain: 1 unless the clamped values have leading axes."""
        return math.prod(self.batch)

    @property
    def free(self) -> tuple[str, ...]:
        """The blocks that are sampled."""
        return tuple(b for b in self.graph.families if b not in self.clamped)

    @property
    def layers(self) -> Schedule:
        """The layers of a sweep over the free blocks."""
        return schedule(self.graph, self.clamped)

    @property
    def model(self) -> "Target":
        """Target of the model's states: itself, or an ensemble's at its coldest replica."""
        return self

    @property
    def beta(self) -> Scalar | float:
        """Inverse temperature of the rung, 1 at the model."""
        return 1.0 if self.tempering is None else self.tempering.beta

    def coldest(self, x: Rows) -> Rows:
        """Return the states of the model: all, or an ensemble's at its coldest replica."""
        return x

    def starts(self, draw: Callable[["Target", Keys], Blocks], keys: Keys) -> Blocks:
        """Return ``draw(target, keys)``, for an ensemble of every replica."""
        return draw(self, keys)

    def natural(self, x: Rows, blocks: Sequence[str]) -> Eta:
        """Return the natural parameters of a layer's blocks for each row."""
        eta = energy.natural_rows(self.graph, self.params, x, blocks)
        if self.tempering is not None:
            eta = {b: self.tempering.temper(b, e) for b, e in eta.items()}
        return energy.saturated(self.graph, eta)

    def natural_part(
        self,
        x: Rows,
        units: Array,
        block: str,
        context: energy.PartContext,
        part: Array | int,
    ) -> tuple[Natural, energy.Advance]:
        """Return what ``natural_part`` of :mod:`ebmpp.graph` does, at the rung."""
        eta, advance = energy.natural_part(
            self.graph, self.params, x, units, block, context, part
        )
        if self.tempering is not None:
            eta = self.tempering.temper(block, eta, self.graph.splits[block], part)
        return energy.saturated(self.graph, {block: eta})[block], advance

    def shape(self, block: str) -> tuple[int, ...]:
        """Return the shape of a block of one row."""
        return self.graph.families[block].shape

    def num_parts(self, block: str) -> int:
        """Return the number of parts of a block."""
        return self.graph.num_parts(block)

    def is_discrete(self, block: str) -> bool:
        """Return True if values of a block compare exactly."""
        return bool(self.graph.families[block].support.is_discrete)

    def keys(self, rng_key: Array, index: Array | int) -> Keys:
        """Return the keys of step ``index``, one per row; step 0 draws the initial state.

        :param rng_key: one jax key, or one per row where rows are chains.
        :param index: one number, or one per row.
        """
        key = random.key_pair(rng_key)
        number = jnp.arange(1 if key.ndim > 1 else self.num_rows, dtype=jnp.uint32)
        return random.fold_in(key, index, number)

    def with_observed(self, x: Rows) -> Blocks:
        """Return rows with the observed units set to their values."""
        partial = self.fixed.partial
        observed = {b: jnp.where(k, partial[b], x[b]) for b, k in self.keep.items()}
        return {**x, **observed}

    def clamped_rows(self, count: int) -> Blocks:
        """Return the clamped values of ``count`` rows, where they have one row or as many."""
        return {
            b: jnp.broadcast_to(v, (count, *v.shape[1:]))
            for b, v in self.clamped.items()
        }

    def to_rows(self, z: State) -> Blocks:
        """Return a full state as rows: the free blocks of ``z`` and the clamped ones."""
        free = {b: v.reshape(self.num_rows, *self.shape(b)) for b, v in z.items()}
        return self.with_observed(free | self.clamped)

    def from_rows(self, x: Rows) -> Blocks:
        """Return the free blocks of a full state, ``(*batch, *shape)`` each."""
        return {b: x[b].reshape(self.batch + self.shape(b)) for b in self.free}

    def take(self, rows: Numbers) -> "Target":
        """Return the target of the rows with these numbers."""
        return dataclasses.replace(self, fixed=self.fixed.take(rows))

    def twice(self) -> "Target":
        """Return the target of both chains of a pair, stacked as rows."""

        def double(mask):
            return jnp.concatenate([mask, mask]) if len(mask) > 1 else mask

        keep = {b: double(mask) for b, mask in self.keep.items()}
        fixed = dataclasses.replace(self.fixed, keep=keep)
        return dataclasses.replace(self, fixed=fixed)
