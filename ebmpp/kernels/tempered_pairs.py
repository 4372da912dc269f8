# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled pairs of tempered ensembles, and unbiased estimates from them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.coupling.expectation import Init, UnbiasedEstimate, unbiased_expectation
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import Observed, as_clamped, merge_clamped
from ebmpp.kernels.coupling import CouplingState, MaximalCoupling
from ebmpp.kernels.replicas import Ensemble, Tempered
from ebmpp.moves import tempering
from ebmpp.moves.move import Move
from ebmpp.moves.target import Target

TemperingCouplingState = CouplingState  # the replicas of both chains included


class TemperingCoupling(Tempered[CouplingState], MaximalCoupling):
    """Pairs of tempered ensembles that meet exactly, a kernel for :class:`numpyro.infer.MCMC`.

    For models on which pairs of plain Gibbs chains (:class:`~ebmpp.MaximalCoupling`) stay in modes of their
    own. Each replica of an ensemble is coupled with its like in the other, swaps get the same uniforms, and
    a pair has met when all replicas have. The draws are those of the leading ensemble's coldest replica. A
    sweep is that of :class:`ParallelTempering`.

    :param graph: the declaration.
    :param betas: inverse temperatures increasing from 0 or more to 1; a run of :class:`ParallelTempering`
        finds good ones.
    :param lag: sweeps that the leading ensemble is ahead, at least 1.
    :param coupling: "maximal" (the default), "maximal_independent", "common", "reflection" or "independent"
        for every layer, or a sequence of these, one a layer; see :func:`ebmpp.moves.couplings.resolve`.
    :param init: "uniform", or "local_mode": one sweep from the local mode that a search finds.
    :raises ArgumentError: for wrong betas, a lag below 1, or an unknown coupling or start.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with couplings*.
    2. Syed, Bouchard-Cote, Deligiannidis, Doucet (2022), *Non-reversible parallel tempering*.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> magnet = ebmpp.layered(v=ebmpp.Spin(4), h=ebmpp.Spin(4))
    >>> params = {"v": jax.numpy.full(4, 0.1), "h": jax.numpy.zeros(4), "v:h": jax.numpy.ones((4, 4))}
    >>> pairs = MCMC(TemperingCoupling(magnet, [0, 0.15, 0.3, 1]), num_warmup=0, num_samples=100,
    ...              num_chains=5, chain_method="vectorized", progress_bar=False)
    >>> pairs.run(jax.random.key(1), params)
    >>> pairs.last_state.met.all().item()
    True
    """

    _as_rows = False  # rows are replicas

    def __init__(
        self,
        graph: FactorGraph,
        betas: Sequence[float],
        lag: int = 1,
        coupling: str | Sequence[str] | None = None,
        init: str = "uniform",
    ) -> None:
        super().__init__(graph, lag, coupling, init)
        self.betas = tempering.check_betas(betas)
        self._hottest = self.betas[0]

    def _options(self) -> dict[str, Any]:
        return {"betas": self.betas} | super()._options()

    def _moves(self, target: Target) -> tuple[Move, ...]:
        return (tempering.tempered_sweep(self.graph, self.coupling, target.clamped),)

    def _init_one(self, rng_key: Array, target: Target, init_params: dict | None) -> CouplingState:
        many = tempering.add_axis(target.graph, init_params)
        return super()._init_one(rng_key, Ensemble.of(target, self.betas), many)

    def _sample_one(self, state: CouplingState, target: Target) -> CouplingState:
        assert state.replicas is not None and state.followers is not None  # as `_state` made it
        whole = state._replace(z=state.replicas, y=state.followers)
        return super()._sample_one(whole, Ensemble.of(target, self.betas))

    def _state(
        self, target: Any, z: dict[str, Array], t: Array, rng_key: Array, *rows: Array
    ) -> CouplingState:
        """The state of all replicas, and what is told of the coldest."""
        whole = super()._state(target, z, t, rng_key, *rows)
        told = super()._state(target.base, {b: v[:, :, -1] for b, v in z.items()}, t, rng_key, *rows)
        told = told._replace(met=whole.met, meeting_time=whole.meeting_time)
        return told._replace(replicas=whole.z, followers=whole.y)


def tempered_expectation(
    graph: FactorGraph,
    params: Any,
    fn: Callable[[dict[str, Array]], Any],
    *,
    betas: Sequence[float],
    rng_key: Array,
    num_pairs: int = 1000,
    k: int = 1,
    m: int | None = None,
    lag: int = 1,
    coupling: str | Sequence[str] | None = None,
    init: Init = None,
    max_sweeps: int | None = None,
    unmet: str = "raise",
    num_slots: int | None = None,
    **clamped: Array | Observed | Mapping[str, Array | Observed],
) -> UnbiasedEstimate:
    """E[fn(state)] under the model, without bias, from pairs of tempered ensembles.

    :func:`~ebmpp.unbiased_expectation` where pairs of plain Gibbs chains do not meet. Meeting times and costs
    are in the sweeps of :class:`TemperingCoupling`, of which each takes two passes of every replica.

    :param graph: the model.
    :param params: its params.
    :param fn: from one state (a dict of blocks, without batch axes) to a pytree of numbers.
    :param betas: inverse temperatures increasing from 0 or more to 1.
    :param coupling: "maximal" (the default), "maximal_independent", "common", "reflection" or "independent"
        for every layer, or a sequence of these, one a layer; see :func:`ebmpp.moves.couplings.resolve`.
    :param init: as there; values are the start of every replica, a function's key is a replica's own.
    :return: an :class:`~ebmpp.coupling.expectation.UnbiasedEstimate`. All other arguments are as there.
    :raises UnmetError: when pairs are unmet and ``unmet`` is "raise".
    :raises ArgumentError: for wrong betas, numbers out of range, or under ``jit``.
    :raises StateError: for states or clamped values that do not fit the graph.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with couplings*.

    **Example**

    >>> import jax
    >>> from ebmpp import Spin, layered
    >>> magnet = layered(v=Spin(4), h=Spin(4))
    >>> params = {"v": jax.numpy.full(4, 0.1), "h": jax.numpy.zeros(4), "v:h": jax.numpy.ones((4, 4))}
    >>> est = tempered_expectation(magnet, params, lambda x: x["v"].mean(), betas=[0, 0.15, 0.3, 1],
    ...                            rng_key=jax.random.key(1), num_pairs=4)
    >>> est.value.shape, est.met.all().item()
    ((), True)
    """
    checks.instance("tempered_expectation: graph", graph, FactorGraph, "a FactorGraph")
    betas = tempering.check_betas(betas)
    graph.check(params)
    clamped = merge_clamped(clamped)
    held = as_clamped(graph.families, clamped)  # its errors speak of shapes that the user knows
    tempering.check_hot(graph, params, betas[0])
    num = len(betas)
    return unbiased_expectation(
        tempering.replicate(graph, num),
        tempering.tempered_params(graph, params, jnp.array(betas)),
        tempering.OfColdest(fn),
        rng_key=rng_key,
        num_pairs=num_pairs,
        k=k,
        m=m,
        lag=lag,
        coupling=tempering.tempered_sweep(graph, coupling, held.whole),
        init=tempering.spread_init(graph, num, init),
        max_sweeps=max_sweeps,
        unmet=unmet,
        num_slots=num_slots,
        clamped={b: tempering.spread_given(graph, num, b, v) for b, v in clamped.items()},
    )
