# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Targets of tempering: all replicas of a target as one target."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Float

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.annealing.path import Path, summed_blocks
from ebmpp.core.types import Eta, Params
from ebmpp.graph.states import Clamped, is_concrete
from ebmpp.graph.transforms.replicate import separate_params
from ebmpp.moves import tempering
from ebmpp.moves.target import Target


class Knots(NamedTuple):
    """Knots of a path before the model: the models of all replicas but the coldest."""

    betas: Float[Array, "knots"]
    params: Params
    """With a leading axis of knots."""
    eta0: Eta
    """Natural parameters of the reference."""

    @staticmethod
    def before(path: Path, params: Params) -> "Knots":
        """Return the knots of a path, without the last one if it is the model."""
        known = all(map(is_concrete, jax.tree.leaves(params)))
        num = len(path) - (known and path.ends_at(params))
        return Knots(path.betas[:num], jax.tree.map(lambda a: a[:num], path.along()), path.eta0)


@dataclasses.dataclass(frozen=True)
class Ensemble(Target):
    """Target of all replicas together.

    :param base: the coldest replica.
    :param summed: blocks that are summed out of swaps.
    """

    base: Target = dataclasses.field(kw_only=True)
    summed: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    @staticmethod
    def at_betas(base: Target, betas: Any) -> "Ensemble":
        """Return replicas at ``betas``, with the same clamped values in each."""
        betas = jnp.asarray(betas)
        params = tempering.tempered_params(base.graph, base.params, betas)
        graph = tempering.replicate(base.graph, len(betas))
        return Ensemble(graph, params, _spread(base.given, len(betas)), base=base)

    @staticmethod
    def along(base: Target, knots: Knots) -> "Ensemble":
        """Return replicas at the knots of a path, and one at the model."""
        join = lambda a, b: jnp.concatenate([a, jnp.asarray(b, a.dtype)[None]])
        params = jax.tree.map(join, knots.params, base.params)
        betas = join(knots.betas, 1)
        replicated = separate_params(base.graph, params, betas, knots.eta0)
        graph = tempering.replicate(base.graph, len(betas), separate=True)
        # a block with observed units is swapped as it is
        summed = tuple(b for b in summed_blocks(base.graph) if b in base.free and b not in base.keep)
        return Ensemble(graph, replicated, _spread(base.given, len(betas)), base=base, summed=summed)

    def cold(self, replicas: Mapping[str, Array]) -> dict[str, Array]:
        """Return the blocks of the coldest replica."""
        return {b: jnp.moveaxis(v, len(self.batch), 0)[-1] for b, v in replicas.items()}


def _spread(held: Clamped, num: int) -> Clamped:
    spread = lambda rows: {b: jnp.repeat(v[:, None], num, axis=1) for b, v in rows.items()}
    return Clamped(spread(held.full), spread(held.partial), spread(held.keep), held.batch)
