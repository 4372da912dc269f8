# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What is sampled: a graph with params, and what is held fixed."""

from collections.abc import Mapping
import dataclasses
from functools import partial
import math
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import Blocks, Eta, Keep, Keys, Numbers, Params, PerRow, Rows, Schedule
from ebmpp.graph import FactorGraph
from ebmpp.graph.declaration import schedule
from ebmpp.graph.states import Clamped


class Pool(NamedTuple):
    """Conditionals to propose from: see :func:`ebmpp.coupling.mixture_pool`."""

    eta: Eta
    """Natural parameters of the blocks that are proposed, ``(components, *shape, *stat_shape)`` each."""
    log_normalizer: PerRow
    """Of each component, over all units."""


@partial(jax.tree_util.register_dataclass, data_fields=["params", "given", "pool"], meta_fields=["graph"])
@dataclasses.dataclass(frozen=True)
class Target:
    """The law that moves leave as it is: the model's, or its conditional given what is held.

    A pytree whose graph is static, so that it is an argument of compiled functions.

    :param graph: the declaration.
    :param params: a dict keyed by factor name.
    :param given: clamped blocks and observed units, as rows; nothing by default.
    :param pool: what a :class:`~ebmpp.moves.mixture.Mixture` proposes from. It is no part of the law.
    """

    graph: FactorGraph
    params: Params
    given: Clamped = dataclasses.field(default_factory=Clamped)
    pool: Pool | None = None

    @property
    def clamped(self) -> Blocks:
        """Values of the clamped blocks, ``(rows, *shape)`` each."""
        return self.given.whole

    @property
    def keep(self) -> Keep:
        """Which units of free blocks are observed, ``(rows, *shape)`` each."""
        return self.given.keep

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading axes of what is given, ``rows`` being their product."""
        return self.given.batch

    @property
    def num_rows(self) -> int:
        """Rows of one chain: 1 unless the clamped values have leading axes."""
        return math.prod(self.batch)

    @property
    def free(self) -> tuple[str, ...]:
        """The blocks that are sampled."""
        return tuple(b for b in self.graph.families if b not in self.clamped)

    @property
    def layers(self) -> Schedule:
        """The layers of a sweep over the free blocks."""
        return schedule(self.graph, self.clamped)

    def num_parts(self, block: str) -> int:
        """In how many parts a block is drawn: more than one where its units interact."""
        return self.graph.splits[block].num_parts if block in self.graph.splits else 1

    def is_discrete(self, block: str) -> bool:
        """Whether values of a block compare exactly, however they were made."""
        return bool(self.graph.families[block].support.is_discrete)

    # -- rows ------------------------------------------------------------------------------------

    def keys(self, rng_key: Array, index: Array | int) -> Keys:
        """Keys of step ``index``, one a row; step 0 draws the initial state.

        :param rng_key: one jax key; or one a row, where rows are chains.
        :param index: of all, or of each chain.
        """
        key = random.key_pair(rng_key)
        number = jnp.arange(1 if key.ndim > 1 else self.num_rows, dtype=jnp.uint32)
        return random.fold_in(key, index, number)

    def hold(self, x: Rows) -> Blocks:
        """Rows with the observed units in their places."""
        return {**x, **{b: jnp.where(k, self.given.partial[b], x[b]) for b, k in self.keep.items()}}

    def to_rows(self, z: Mapping[str, Array]) -> Blocks:
        """A full state as rows: the free blocks of ``z`` and what is given."""
        shape = lambda b: (self.num_rows, *self.graph.families[b].shape)
        return self.hold({b: v.reshape(shape(b)) for b, v in z.items()} | self.clamped)

    def from_rows(self, x: Rows) -> Blocks:
        """The free blocks of a full state, ``(*batch, *shape)`` each."""
        return {b: x[b].reshape(self.batch + self.graph.families[b].shape) for b in self.free}

    def take(self, rows: Numbers) -> "Target":
        """The target of some rows, by their numbers."""
        return dataclasses.replace(self, given=self.given.take(rows))

    def twice(self) -> "Target":
        """The target of both chains of a pair, one's rows after the other's."""
        keep = {b: jnp.concatenate([k, k]) if len(k) > 1 else k for b, k in self.keep.items()}
        return dataclasses.replace(self, given=dataclasses.replace(self.given, keep=keep))
