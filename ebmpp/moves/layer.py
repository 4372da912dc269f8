# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The Gibbs move: a layer redrawn from its conditionals."""

from collections.abc import Iterable
import dataclasses
from typing import Any

import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import Blocks, Chains, Eta, Keys, Rows
from ebmpp.errors import ArgumentError, IntractableError, clash
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.graph.energy import natural_rows
from ebmpp.moves import gibbs
from ebmpp.moves.couplings import KINDS, Attempt, Trial, attempt, stalls
from ebmpp.moves.move import Drawn, Move, flat
from ebmpp.moves.target import Target


@dataclasses.dataclass(frozen=True)
class Layer(Move):
    """Blocks of one layer, redrawn from their conditionals.

    :param blocks: blocks that do not interact.
    :param kind: a coupling of pairs: "maximal", "maximal_independent", "common", "reflection" or
        "independent", see :mod:`ebmpp.moves.couplings`.
    """

    blocks: tuple[str, ...]
    kind: str = "common"

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

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        def new(eta: Eta, view: gibbs.Families, part: Any) -> Blocks:
            if part is None:
                return gibbs.draw(view, eta, eta, keys)
            return gibbs.draw_part(view, eta, random.fold_in(keys, 0, part))

        return gibbs.visit(target, x, self.blocks, new), jnp.zeros(len(keys), jnp.int32)

    def num_parts(self, graph: FactorGraph) -> int:
        split = graph.splits.get(self.blocks[0])
        return 1 if split is None else split.num_parts

    def prepare(self, target: Target, z: Chains) -> Any:
        """Natural parameters, ``(2 rows, *shape, *stat_shape)`` a block; or what surrounds its parts."""
        if self.blocks[0] in target.graph.splits:
            return energy.part_context(target.graph, target.params, flat(z), self.blocks[0])
        return natural_rows(target.graph, target.params, flat(z), self.blocks)

    def focus(self, target: Target, prepared: Any, z: Chains, part: Any) -> Any:
        """Natural parameters of both chains, ``(2, rows, *shape, *stat_shape)``."""
        graph, rows = target.graph, next(iter(z.values())).shape[1]
        apart = lambda e: e.reshape(-1, rows, *e.shape[1:])
        (block, *_), held = self.blocks, {b: ~k for b, k in target.keep.items() if b in self.blocks}
        if block not in graph.splits:
            silent = lambda b, e: energy.mask_natural(graph.families[b], held.get(b), apart(e))
            return {b: silent(b, e) for b, e in prepared.items()}
        split, x = graph.splits[block], flat(z)
        units = energy.to_units(x[block], split.family)
        eta = apart(energy.natural_part(graph, target.params, x, units, block, prepared, part))
        real = split.take(energy.to_units(held[block], split.family), part).T if held else None
        return {block: energy.mask_natural(split.part_family(part), real, eta)}

    def attempt(self, target: Target, focused: Any, z: Chains, trial: Trial) -> Attempt:
        """See :class:`~ebmpp.moves.Move`.

        Units that are held have one law in both chains, and so no say in whether the chains meet.
        """
        graph, (eta, other) = target.graph, ({b: e[i] for b, e in focused.items()} for i in range(2))
        made = attempt(self.view(graph, trial.part), self.blocks, self.kind, (eta, other), trial)
        x, y = ({b: z[b][i] for b in self.blocks} for i in range(2))
        new = lambda x, drawn: gibbs.hold(target.keep, x, self.put(graph, x, trial.part, drawn))
        return made._replace(x=new(x, made.x), y=new(y, made.y))

    def view(self, graph: FactorGraph, part: Any) -> gibbs.Families:
        """The families of what is drawn at once."""
        block = self.blocks[0]
        return energy.part_view(graph, block, part) if block in graph.splits else graph

    def put(self, graph: FactorGraph, x: Rows, part: Any, new: Blocks) -> Blocks:
        """``x`` with the values of a part in their places; ``new`` where it is the whole."""
        block = self.blocks[0]
        if block not in graph.splits:
            return new
        split = graph.splits[block]
        units = split.put(energy.to_units(x[block], split.family), part, new[block].T)
        return {block: energy.to_rows(units, split.family)}


def gibbs_sweep(graph: FactorGraph, clamped: Iterable[str] = ()) -> tuple[Layer, ...]:
    """All free blocks, layer after layer: blocked Gibbs.

    :param clamped: blocks that are held.
    """
    return tuple(Layer(blocks) for blocks in schedule(graph, clamped))
