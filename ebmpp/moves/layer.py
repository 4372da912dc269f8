# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The Gibbs move: a layer redrawn from its conditionals."""

import dataclasses
from typing import Any

from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Keep, Rows
from ebmpp.errors import ArgumentError, IntractableError, clash
from ebmpp.graph import FactorGraph, parts
from ebmpp.graph.energy import natural_rows
from ebmpp.graph.factors.lateral import Split
from ebmpp.moves.couplings import KINDS, Attempt, Trial, attempt, stalls
from ebmpp.moves.gibbs import draw_layer, hold
from ebmpp.moves.move import Drawn


@dataclasses.dataclass(frozen=True)
class Layer:
    """Blocks of one layer, redrawn from their conditionals.

    :param blocks: blocks that do not interact.
    :param kind: a coupling, one of :data:`ebmpp.moves.couplings.KINDS`.
    """

    blocks: tuple[str, ...]
    kind: str = "common"
    proposes = False

    @property
    def stalls(self) -> bool:
        return stalls(self.kind)

    def check(self, graph: FactorGraph) -> None:
        """Check blocks and kind.

        :raises ArgumentError: for an unknown kind.
        :raises IntractableError: for blocks that interact.
        """
        if self.kind not in KINDS:
            raise ArgumentError(f"coupling {self.kind!r} is unknown; choose among {KINDS}")
        for a, b in graph.interacting(self.blocks):
            if len(self.blocks) > 1:
                raise IntractableError(f"{clash(a, b)}, so they cannot be drawn as one layer")

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        inside = tuple(b for b in self.blocks if b in graph.splits)
        return graph.neighbours(self.blocks) + inside

    def draw(self, graph: FactorGraph, params: Any, x: Rows, pairs: Array, keep: Keep) -> Drawn:
        return draw_layer(graph, params, x, self.blocks, pairs, keep), jnp.zeros(len(pairs), jnp.int32)

    def num_parts(self, graph: FactorGraph) -> int:
        split = graph.splits.get(self.blocks[0])
        return 1 if split is None else split.num_parts

    def prepare(self, graph: FactorGraph, params: Any, z: Rows, keep: Keep) -> Any:
        """Natural parameters, ``(2 rows, *shape, *stat_shape)`` a block; or what surrounds its parts."""
        flat = _flat(z)
        if self.blocks[0] in graph.splits:
            return params, parts.surround(graph, params, flat, self.blocks[0])
        return natural_rows(graph, params, flat, self.blocks)

    def focus(self, graph: FactorGraph, prepared: Any, z: Rows, keep: Keep, part: Any) -> Any:
        """Natural parameters of both chains, ``(2, rows, *shape, *stat_shape)``."""
        rows = next(iter(z.values())).shape[1]
        apart = lambda e: e.reshape(2, rows, *e.shape[1:])
        (block, *_), held = self.blocks, {b: ~k for b, k in keep.items() if b in self.blocks}
        if block not in graph.splits:
            silent = lambda b, e: parts.silence(graph.families[b], held.get(b), apart(e))
            return {b: silent(b, e) for b, e in prepared.items()}
        (params, around), split, flat = prepared, graph.splits[block], _flat(z)
        units = parts.to_units(flat[block], split.family)
        eta = apart(parts.natural_part(graph, params, flat, units, block, around, part))
        real = split.take(parts.to_units(held[block], split.family), part).T if held else None
        return {block: parts.silence(split.part_family(part), real, eta)}

    def attempt(self, graph: FactorGraph, focused: Any, z: Rows, keep: Keep, trial: Trial) -> Attempt:
        """See :class:`~ebmpp.moves.Move`.

        Units that are held have one law in both chains, and so no say in whether the chains meet.
        """
        (block, *_), etas = self.blocks, tuple({b: e[i] for b, e in focused.items()} for i in range(2))
        split = graph.splits.get(block)
        view = graph if split is None else parts.view(graph, block, trial.part)
        made = attempt(view, self.blocks, self.kind, etas, trial)
        x, y = ({b: z[b][i] for b in self.blocks} for i in range(2))
        if split is not None:
            made = made._replace(x=_put(split, x, trial.part, made.x), y=_put(split, y, trial.part, made.y))
        return made._replace(x=hold(keep, x, made.x), y=hold(keep, y, made.y))


def _flat(z: Rows) -> Rows:
    """Both chains as rows."""
    return {b: v.reshape(-1, *v.shape[2:]) for b, v in z.items()}


def _put(split: Split, x: Rows, part: Any, new: Rows) -> Rows:
    """``x`` with the values of a part in their places."""
    units = parts.to_units(x[split.block], split.family)
    return {split.block: parts.to_rows(split.put(units, part, new[split.block].T), split.family)}
