# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""All replicas of a target as one target, and what kernels of replicas have in common."""

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
from ebmpp.graph.transforms.replicate import own_params
from ebmpp.kernels.base import Kwargs, RowKernel, S
from ebmpp.moves import tempering
from ebmpp.moves.target import Target


class Knots(NamedTuple):
    """The knots of a path before the model: what the replicas but the coldest are at."""

    betas: Float[Array, "knots"]
    params: Params
    """With a leading axis of knots."""
    eta0: Eta
    """Of the reference."""

    @staticmethod
    def before(path: Path, params: Params) -> "Knots":
        """Those of a path, but for its last where that is the model."""
        known = all(map(is_concrete, jax.tree.leaves(params)))
        num = len(path) - (known and path.ends_at(params))
        return Knots(path.betas[:num], jax.tree.map(lambda a: a[:num], path.along()), path.eta0)


@dataclasses.dataclass(frozen=True)
class Ensemble(Target):
    """All replicas together.

    :param base: the coldest replica, which is what the user asked for.
    :param summed: blocks to sum out of swaps.
    """

    base: Target = dataclasses.field(kw_only=True)
    summed: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    @staticmethod
    def of(base: Target, betas: Any) -> "Ensemble":
        """Replicas at ``betas``, with the same values held in each."""
        betas = jnp.asarray(betas)
        params = tempering.tempered_params(base.graph, base.params, betas)
        graph = tempering.replicate(base.graph, len(betas))
        return Ensemble(graph, params, _spread(base.given, len(betas)), base=base)

    @staticmethod
    def along(base: Target, knots: Knots) -> "Ensemble":
        """Replicas at the knots of a path, and one more at the model."""
        join = lambda a, b: jnp.concatenate([a, jnp.asarray(b, a.dtype)[None]])
        params = jax.tree.map(join, knots.params, base.params)
        betas = join(knots.betas, 1)
        whole = own_params(base.graph, params, betas, knots.eta0)
        graph = tempering.replicate(base.graph, len(betas), own=True)
        # a block of which some units are held is swapped as it is
        summed = tuple(b for b in summed_blocks(base.graph) if b in base.free and b not in base.keep)
        return Ensemble(graph, whole, _spread(base.given, len(betas)), base=base, summed=summed)

    def cold(self, replicas: Mapping[str, Array]) -> dict[str, Array]:
        """The coldest replica's blocks."""
        return {b: jnp.moveaxis(v, len(self.batch), 0)[-1] for b, v in replicas.items()}


def _spread(held: Clamped, num: int) -> Clamped:
    spread = lambda rows: {b: jnp.repeat(v[:, None], num, axis=1) for b, v in rows.items()}
    return Clamped(spread(held.whole), spread(held.partial), spread(held.keep), held.batch)


class Tempered(RowKernel[S]):
    """What kernels of inverse temperatures share: the hottest replica is checked as the model is."""

    _hottest: float | None = 0.0  # its beta; None for a reference, which normalises

    def target(self, model_args: tuple, model_kwargs: Kwargs, check: bool) -> Target:
        made = super().target(model_args, model_kwargs, check)
        if check and self._hottest is not None:
            tempering.check_hot(made.graph, made.params, self._hottest)
        return made
