# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Gibbs-Langevin: real-valued blocks by Langevin steps, the others from their conditionals."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ebmpp.graph import FactorGraph
from ebmpp.kernels.gibbs import BlockedGibbs, GibbsState
from ebmpp.moves import Move, Target, sweeps

LangevinState = GibbsState  # its acceptance is 1 where no proposal is made


class GibbsLangevin(BlockedGibbs):
    """Sweeps in which real-valued blocks make Langevin steps, a kernel for :class:`numpyro.infer.MCMC`.

    The other blocks are drawn from their conditionals. Params and clamped blocks are passed as to
    :class:`BlockedGibbs`. The temperature is 1, however many chains or rows there are.

    A real-valued block that is one layer has a Gaussian conditional which :class:`BlockedGibbs` draws
    outright; Langevin steps with the rest fixed are a slower road to the same draw. With ``marginalize`` they
    follow the gradient of the marginal density instead, and are another sampler.

    The same sweep, coupled: ``MaximalCoupling(graph, coupling=ebmpp.moves.langevin_sweep(graph))``; likewise
    :class:`~ebmpp.UCD`, and :class:`~ebmpp.PCD` with ``moves``.

    :param graph: the declaration.
    :param step_size: in standard deviations of each unit given the rest. With d units, adjusted steps are
        mostly taken up to about ``1.7 * d ** (-1 / 6)``.
    :param num_steps: Langevin steps a sweep.
    :param adjust: accept or refuse each step, so that the model's law is left as it is. False takes every
        step, and **samples another law**: the variances given the rest are too large by the factor
        ``1 / (1 - step_size**2 / 4)``.
    :param marginalize: blocks that are summed out while real-valued ones move, and drawn afterwards.
    :param init: "uniform", or "local_mode": one Gibbs sweep from the local mode that a search finds.
    :raises ArgumentError: for numbers out of range, or an unknown block or start.
    :raises DeclarationError: for a graph without real-valued blocks.
    :raises IntractableError: for two blocks that cannot be summed out together.

    **References**

    1. Liao, Kornblith, Ren, Fleet, Hinton (2022), *Gaussian-Bernoulli RBMs without tears*; theirs is
       unadjusted unless one asks, and has one step size for units of all variances.

    **Example**

    >>> import jax
    >>> from numpyro.infer import MCMC
    >>> from ebmpp import Bernoulli, Gaussian, layered
    >>> from ebmpp.kernels import GibbsLangevin
    >>> rbm = layered(v=Gaussian(4), h=Bernoulli(3))
    >>> mcmc = MCMC(GibbsLangevin(rbm, num_steps=3), num_warmup=5, num_samples=20, num_chains=2,
    ...             chain_method="vectorized", progress_bar=False)
    >>> mcmc.run(jax.random.key(1), rbm.init(jax.random.key(0)), extra_fields=("acceptance",))
    >>> bool(mcmc.last_state.acceptance.min() > 0.8)
    True
    """

    _proposes = True  # acceptance is told also where it is 1 by decree

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
        self.step_size, self.num_steps, self.adjust = step_size, num_steps, adjust
        self.marginalize = (marginalize,) if isinstance(marginalize, str) else tuple(marginalize)
        self._sweep(())

    def _sweep(self, clamped: Iterable[str]) -> tuple[Move, ...]:
        options = self.step_size, self.num_steps, self.marginalize, self.adjust
        return sweeps.langevin_sweep(self.graph, clamped, *options)

    def _moves(self, target: Target) -> tuple[Move, ...]:
        return self._sweep(target.clamped)

    def _options(self) -> dict[str, Any]:
        named = {"step_size": self.step_size, "num_steps": self.num_steps}
        named |= {} if self.adjust else {"adjust": False}
        return named | ({"marginalize": self.marginalize} if self.marginalize else {}) | super()._options()

    def get_diagnostics_str(self, state: GibbsState) -> str:
        """Sweeps done, and the share of proposals that were taken."""
        told = f"acceptance {np.asarray(state.acceptance).mean():.2g}" if self.adjust else "unadjusted"
        return f"{int(np.max(state.i))} sweeps, {told}"
