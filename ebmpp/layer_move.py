# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The Gibbs move: a layer redrawn from its conditionals."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jax import Array
import jax.numpy as jnp

from ebmpp.couplings import KINDS, Attempt, attempt, stalls
from ebmpp.errors import IntractableError
from ebmpp.moves import Drawn
from ebmpp.sweeps import Keep, Rows, draw_layer, hold, natural_rows

if TYPE_CHECKING:
    from ebmpp.graph import FactorGraph


@dataclasses.dataclass(frozen=True)
class Layer:
    """Blocks of one layer, redrawn from their conditionals.

    :param blocks: blocks that do not interact.
    :param kind: a coupling, one of :data:`ebmpp.couplings.KINDS`.
    """

    blocks: tuple[str, ...]
    kind: str = "common"
    proposes = False

    @property
    def stalls(self) -> bool:
        return stalls(self.kind)

    def check(self, graph: "FactorGraph") -> None:
        """Check blocks and kind.

        :raises ValueError: for an unknown kind.
        :raises IntractableError: for blocks that interact.
        """
        if self.kind not in KINDS:
            raise ValueError(f"coupling {self.kind!r} is unknown; choose among {KINDS}")
        for a, b in graph.interacting(self.blocks):
            raise IntractableError(f"blocks {a!r} and {b!r} interact, so they cannot be drawn as one layer")

    def reads(self, graph: "FactorGraph") -> tuple[str, ...]:
        return graph.neighbours(self.blocks)

    def draw(self, graph: "FactorGraph", params: Any, x: Rows, pairs: Array, keep: Keep) -> Drawn:
        return draw_layer(graph, params, x, self.blocks, pairs, keep), jnp.zeros(len(pairs), jnp.int32)

    def prepare(self, graph: "FactorGraph", params: Any, z: Rows, keep: Keep) -> Any:
        """Natural parameters, ``(2, rows, *shape, *stat_shape)`` a block."""
        rows = next(iter(z.values())).shape[1]
        flat = {b: v.reshape(2 * rows, *v.shape[2:]) for b, v in z.items()}
        eta = natural_rows(graph, params, flat, self.blocks)
        return {b: _silence(graph, b, e.reshape(2, rows, *e.shape[1:]), keep) for b, e in eta.items()}

    def attempt(
        self,
        graph: "FactorGraph",
        prepared: Any,
        z: Rows,
        pairs: Array,
        keep: Keep,
        first: Array,
        same: Array,
    ) -> Attempt:
        etas = tuple({b: e[i] for b, e in prepared.items()} for i in range(2))
        made = attempt(graph, self.blocks, self.kind, etas, pairs, first, same)
        x, y = ({b: z[b][i] for b in self.blocks} for i in range(2))
        return made._replace(x=hold(keep, x, made.x), y=hold(keep, y, made.y))


def _silence(graph: "FactorGraph", block: str, eta: Array, keep: Keep) -> Array:
    """Held units get one law in both chains, so that they have no say in whether the chains meet."""
    if block not in keep:
        return eta
    family = graph.families[block]
    held = keep[block].reshape(keep[block].shape + (1,) * len(family.stat_shape))
    return jnp.where(held, family.default_eta(), eta)
