# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sweeps with Langevin moves of real-valued blocks, and a kernel of them."""

from collections.abc import Iterable, Sequence

import numpy as np

from ebmpp.contrib.langevin import Langevin, is_real
from ebmpp.core import checks
from ebmpp.errors import ArgumentError, DeclarationError
from ebmpp.graph import FactorGraph
from ebmpp.graph.declaration import schedule
from ebmpp.kernels.gibbs import BlockedGibbs, GibbsState
from ebmpp.moves.move import Layer, Move
from ebmpp.moves.target import Target


def langevin_sweep(
    graph: FactorGraph,
    clamped: Iterable[str] = (),
    step_size: float = 0.5,
    num_steps: int = 10,
    marginalize: str | Sequence[str] = (),
    adjust: bool = True,
) -> tuple[Move, ...]:
    """Return Langevin moves of the real-valued blocks of each layer, and draws of the others.

    With ``marginalize``, the steps follow the density with those blocks summed out,
    which are drawn afterwards.

    :param graph: the declaration.
    :param clamped: names of clamped blocks.
    :param step_size: see :class:`Langevin`, as for the arguments after it.
    :raises ArgumentError: for numbers out of range, or an unknown block.
    :raises DeclarationError: for a graph without real-valued blocks.
    :raises IntractableError: for two blocks that cannot be summed out together.
    """
    checks.instance("langevin_sweep: graph", graph, FactorGraph)
    marginalize = (marginalize,) if isinstance(marginalize, str) else tuple(marginalize)
    unknown = [b for b in marginalize if b not in graph.families]
    real = tuple(
        b for b, f in graph.families.items() if is_real(f) and b not in marginalize
    )
    if unknown:
        raise ArgumentError(
            f"marginalize must name some of {list(graph.families)}, got {unknown}."
        )
    if not real:
        raise DeclarationError(
            "langevin_sweep: some block outside marginalize must be real-valued, got "
            f"{dict(graph.families)}."
        )
    layers = schedule(graph, clamped)
    free = [b for layer in layers for b in layer]
    real = tuple(b for b in real if b in free)
    summed = tuple(b for b in marginalize if b in free)

    def move(blocks, summed=()):
        return Langevin(blocks, step_size, num_steps, summed, adjust)

    moves: list[Move] = []
    for layer in layers:
        steps = tuple(b for b in layer if b in real)
        if steps and not summed:
            moves.append(move(steps))
        rest = tuple(b for b in layer if b not in real and not (real and b in summed))
        if rest:
            moves.append(Layer(rest, "maximal"))
    if real and summed:
        moves += [move(real, summed), Layer(summed, "maximal")]
    for step in moves:
        step.check(graph)
    return tuple(moves)


class GibbsLangevin(BlockedGibbs):
    """Sweeps with Langevin steps of real-valued blocks, a kernel for :class:`numpyro.infer.MCMC`.

    For real-valued blocks that mix better with others summed out (``marginalize``):
    without, Langevin steps reach more slowly what :class:`~ebmpp.BlockedGibbs` draws at
    once. The other blocks are drawn from their conditionals. Params and clamped blocks
    are passed as to :class:`~ebmpp.BlockedGibbs`. Coupled, the sweep is
    ``MaximalCoupling(graph, coupling=langevin_sweep(graph))``.

    :param graph: the declaration.
    :param step_size: see :class:`Langevin`, as for ``num_steps``. With d units, most
        adjusted steps are accepted up to about ``1.7 * d ** (-1 / 6)``.
    :param num_steps: Langevin steps per sweep.
    :param adjust: False **samples another distribution**; see :class:`Langevin`.
    :param marginalize: blocks that are summed out while real-valued ones move, and
        drawn afterwards.
    :param init: "uniform", or "local_mode": one Gibbs sweep from a local mode.
    :raises ArgumentError: for numbers out of range, or an unknown block or start.
    :raises DeclarationError: for a graph without real-valued blocks.
    :raises IntractableError: for blocks that cannot be summed out together.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import GibbsLangevin
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Gaussian(4), h=ebmpp.Bernoulli(3))
    >>> mcmc = MCMC(GibbsLangevin(rbm, num_steps=3), num_warmup=5, num_samples=20, num_chains=2,
    ...             chain_method="vectorized", progress_bar=False)
    >>> mcmc.run(jax.random.key(1), rbm.init(jax.random.key(0)), extra_fields=("acceptance",))
    >>> bool(mcmc.last_state.acceptance.min() > 0.8)
    True
    """

    def __init__(
        self,
        graph: FactorGraph,
        step_size: float = 0.5,
        num_steps: int = 10,
        adjust: bool = True,
        marginalize: str | Sequence[str] = (),
        init: str = "uniform",
    ) -> None:
        super().__init__(graph, init)
        self.step_size = step_size
        self.num_steps = num_steps
        self.adjust = adjust
        self.marginalize = (
            (marginalize,) if isinstance(marginalize, str) else tuple(marginalize)
        )
        self._sweep(())

    def _sweep(self, clamped: Iterable[str]) -> tuple[Move, ...]:
        return langevin_sweep(
            self.graph,
            clamped,
            self.step_size,
            self.num_steps,
            self.marginalize,
            self.adjust,
        )

    def _moves(self, target: Target) -> tuple[Move, ...]:
        return self._sweep(target.clamped)

    def get_diagnostics_str(self, state: GibbsState) -> str:
        """Return the number of sweeps, and the acceptance."""
        mean = 1.0 if state.acceptance is None else np.asarray(state.acceptance).mean()
        text = f"acceptance {mean:.2g}" if self.adjust else "unadjusted"
        return f"{int(np.max(state.i))} sweeps, {text}"
