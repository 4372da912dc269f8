# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Parallel tempering: one chain of it, coupled pairs of it, and unbiased estimates from the pairs."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import Given, Observed, as_given, clamps
from ebmpp.kernels.base import Kwargs, RowKernel, S
from ebmpp.kernels.coupling import CouplingState, MaximalCoupling
from ebmpp.moves import Move, Target, tempering
from ebmpp.sampling.engine import DEFAULT_SLOTS
from ebmpp.sampling.expectation import Estimate, Init, unbiased_expectation


class TemperingState(NamedTuple):
    """The state of :class:`ParallelTempering`.

    - **z** - the draw, that of the coldest replica: a dict of the free blocks, each ``(*batch, *shape)``.
    - **replicas** - all of them from hot to cold, each block ``(*batch, num, *shape)``.
    - **betas** - inverse temperatures, ``(num,)``.
    - **rejection** - probability that neighbours' swap is refused, ``(num - 1,)``: the mean over the present
      round of the warm-up, and over all sweeps after it.
    - **count** - sweeps in that mean.
    - **origin** - which replica's start each replica's state comes from, ``(*batch, num)``.
    - **label** - 1 where that state has been hottest and not been coldest since, 2 where it has been
      coldest since, 0 where it has not been hottest yet, ``(*batch, num)``.
    - **round_trips** - from hottest to coldest and back, of all states, since the warm-up, ``(*batch,)``.
    - **i** - sweeps done since the initial state.
    - **num_warmup** - sweeps after which the betas stay as they are.
    - **rng_key** - the run's key; sweep ``i`` draws from the key and ``i``, so it does not change.
    """

    z: dict[str, Array]
    replicas: dict[str, Array]
    betas: Array
    rejection: Array
    count: Array
    origin: Array
    label: Array
    round_trips: Array
    i: Array
    num_warmup: Array
    rng_key: Array


TemperingCouplingState = CouplingState  # the replicas of both chains included


@dataclasses.dataclass(frozen=True)
class Ensemble(Target):
    """All replicas together.

    :param base: the coldest replica, which is what the user asked for.
    """

    base: Target = dataclasses.field(kw_only=True)

    @staticmethod
    def of(base: Target, betas: Any) -> "Ensemble":
        """Replicas at ``betas``, with the same values held in each."""
        betas, num = jnp.asarray(betas), len(betas)
        spread = lambda rows: {b: jnp.repeat(v[:, None], num, axis=1) for b, v in rows.items()}
        held = base.given
        given = Given(spread(held.whole), spread(held.partial), spread(held.keep), held.batch)
        params = tempering.tempered_params(base.graph, base.params, betas)
        return Ensemble(tempering.replicate(base.graph, num), params, given, base=base)

    def cold(self, replicas: Mapping[str, Array]) -> dict[str, Array]:
        """The coldest replica's blocks."""
        return {b: jnp.moveaxis(v, len(self.batch), 0)[-1] for b, v in replicas.items()}


class _Tempered(RowKernel[S]):
    """What tempered kernels share: the hottest replica is checked as the model is."""

    _hottest = 0.0

    def target(self, model_args: tuple, model_kwargs: Kwargs, check: bool) -> Target:
        made = super().target(model_args, model_kwargs, check)
        if check:
            tempering.check_hot(made.graph, made.params, self._hottest)
        return made


class ParallelTempering(_Tempered[TemperingState]):
    """Blocked Gibbs in replicas from hot to cold that swap states, for :class:`numpyro.infer.MCMC`.

    For models whose modes :class:`~ebmpp.BlockedGibbs` does not leave. Replica r has the factors of one
    block, and beta_r times the others: at beta = 0 the units are independent, at beta = 1 it is the model,
    whose draws these are. A sweep is all layers in all replicas and a swap of even neighbours, then all
    layers once more and a swap of odd ones: it costs ``2 * num_temperatures`` sweeps of plain Gibbs.

    With ``betas="auto"`` each chain adapts its own ladder during the warm-up, in rounds of doubling length,
    until all neighbours' swaps are refused equally often; afterwards it is fixed. Without a warm-up the
    ladder stays as it starts, in equal steps. ``get_diagnostics_str`` and ``extra_fields=("rejection",
    "round_trips", "betas")`` tell how well states travel: rejection rates near 1 ask for more
    temperatures. Params and clamped blocks are passed as to :class:`~ebmpp.BlockedGibbs`.

    :param graph: the declaration.
    :param betas: "auto", or inverse temperatures increasing from 0 or more to 1.
    :param num_temperatures: how many betas "auto" has, at least 2.
    :param init: see :class:`~ebmpp.kernels.RowKernel`; ``init_params`` are the start of every replica.
    :raises ArgumentError: for betas that do not increase to 1, or too few temperatures.

    **References**

    1. Syed, Bouchard-Cote, Deligiannidis, Doucet (2022), *Non-reversible parallel tempering: a scalable
       highly parallel MCMC scheme*.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> magnet = ebmpp.layered(v=ebmpp.Spin(4), h=ebmpp.Spin(4))
    >>> params = {"v": jax.numpy.full(4, 0.1), "h": jax.numpy.zeros(4), "v:h": jax.numpy.ones((4, 4))}
    >>> mcmc = MCMC(ParallelTempering(magnet, num_temperatures=4), num_warmup=63, num_samples=200,
    ...             progress_bar=False)
    >>> mcmc.run(jax.random.key(1), params)
    >>> mcmc.last_state.betas.shape, bool(mcmc.last_state.round_trips > 0)
    ((4,), True)
    """

    def __init__(
        self,
        graph: FactorGraph,
        betas: str | Sequence[float] = "auto",
        num_temperatures: int = 10,
        init: str = "uniform",
    ) -> None:
        super().__init__(graph, init)
        if isinstance(betas, str):
            checks.choice("ParallelTempering: betas", betas, ("auto",), also="numbers that increase to 1")
        self.num_temperatures = checks.count("ParallelTempering: num_temperatures", num_temperatures, least=2)
        self.betas = betas if isinstance(betas, str) else tempering.check_betas(betas)
        self._hottest = 0.0 if isinstance(self.betas, str) else self.betas[0]

    @property
    def _adapts(self) -> bool:
        return self.betas == "auto"

    def _options(self) -> dict[str, Any]:
        ladder = {} if self._adapts else {"betas": self.betas}
        many = {} if self.num_temperatures == 10 else {"num_temperatures": self.num_temperatures}
        return ladder | many | super()._options()

    def init(self, rng_key: Array, num_warmup: int, *args, **kwargs) -> TemperingState:
        """The initial state; see :meth:`~ebmpp.kernels.RowKernel.init`.

        :param num_warmup: calls of ``sample`` during which the betas adapt.
        """
        state = super().init(rng_key, num_warmup, *args, **kwargs)
        return state._replace(num_warmup=jnp.full_like(state.num_warmup, num_warmup))

    def _init_one(self, rng_key: Array, target: Target, init_params: dict | None) -> TemperingState:
        num = self.num_temperatures if self._adapts else len(self.betas)
        betas = jnp.linspace(0.0, 1.0, num) if self._adapts else jnp.array(self.betas)
        ensemble = Ensemble.of(target, betas)
        given = tempering.add_axis(target.graph, init_params)
        replicas = ensemble.from_rows(self._start(ensemble, rng_key, given))
        shape, zero = (*target.batch, num), jnp.zeros((), jnp.int32)
        origin = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), shape)
        label, trips = jnp.zeros(shape, jnp.int32), jnp.zeros(target.batch, jnp.int32)
        swaps = betas, jnp.zeros(num - 1), zero, origin, label, trips
        return TemperingState(ensemble.cold(replicas), replicas, *swaps, zero, zero, rng_key)

    def _sample_one(self, state: TemperingState, target: Target) -> TemperingState:
        ensemble = Ensemble.of(target, state.betas)
        state = self._at_round_end(_sweep(state, ensemble))
        return state._replace(z=ensemble.cold(state.replicas))

    def _at_round_end(self, state: TemperingState) -> TemperingState:
        """New betas, and counts from zero, where a round of the warm-up is over."""
        # The last round is half of the warm-up, the one before it a quarter: so it ends with the longest.
        over = (state.i == state.num_warmup >> jnp.arange(31)).any()
        made = tempering.equalized(state.betas, state.rejection) if self._adapts else state.betas
        betas, counts = jnp.where(over, made, state.betas), (state.count, state.label, state.round_trips)
        rejection, count, label, trips = (jnp.where(over, 0, a) for a in (state.rejection, *counts))
        return state._replace(betas=betas, rejection=rejection, count=count, label=label, round_trips=trips)

    def get_diagnostics_str(self, state: TemperingState) -> str:
        """Sweeps, temperatures, how often swaps are accepted, and round trips."""
        accepted = 1 - np.asarray(state.rejection)
        barrier = (1 - accepted).sum(-1).mean()
        return (
            f"{int(np.max(state.i))} sweeps of {accepted.shape[-1] + 1} temperatures, swaps accepted "
            f"{accepted.min():.2f} to {accepted.max():.2f}, barrier {barrier:.2f}, "
            f"{int(np.sum(state.round_trips))} round trips"
        )


def _sweep(state: TemperingState, ensemble: Ensemble) -> TemperingState:
    """One sweep of all replicas, with the swaps booked."""
    num, rows = len(state.betas), ensemble.num_rows
    sweep = tempering.tempered_sweep(ensemble.base.graph, clamped=ensemble.clamped)
    keys = ensemble.keys(state.rng_key, (state.i + 1).astype(jnp.uint32))

    def half(carry: tuple, parity: Array) -> tuple[tuple, Array]:
        x, origin, label, trips = carry
        x, order, log_ratio = sweep.half(ensemble, x, keys, parity)
        label, came = _relabel(tempering.take(label, order))
        refused = -jnp.expm1(jnp.minimum(log_ratio, 0)).mean(0)
        return (x, tempering.take(origin, order), label, trips + came), refused

    origin, label = (a.reshape(rows, num) for a in (state.origin, state.label))
    start = ensemble.to_rows(state.replicas), origin, label, state.round_trips.reshape(rows)
    (x, origin, label, trips), refused = lax.scan(half, start, jnp.arange(2))
    low, count = jnp.arange(num - 1), state.count + 1
    rejection = state.rejection + (refused[low % 2, low] - state.rejection) / count.astype(refused.dtype)
    state = state._replace(replicas=ensemble.from_rows(x), rejection=rejection, count=count, i=state.i + 1)
    origin, label = origin.reshape(state.origin.shape), label.reshape(state.label.shape)
    return state._replace(origin=origin, label=label, round_trips=trips.reshape(state.round_trips.shape))


def _relabel(label: Array) -> tuple[Array, Array]:
    """Labels after a swap, and how many round trips it completed, row by row."""
    came = (label[:, 0] == 2).astype(jnp.int32)
    label = label.at[:, 0].set(1)
    return label.at[:, -1].set(jnp.where(label[:, -1] == 1, 2, label[:, -1])), came


class TemperingCoupling(_Tempered[CouplingState], MaximalCoupling):
    """Pairs of tempered ensembles that meet exactly, a kernel for :class:`numpyro.infer.MCMC`.

    For models on which pairs of plain Gibbs chains (:class:`~ebmpp.MaximalCoupling`) stay in modes of their
    own. Each replica of an ensemble is coupled with its like in the other, swaps get the same uniforms, and
    a pair has met when all replicas have. The draws are those of the leading ensemble's coldest replica. A
    sweep is that of :class:`ParallelTempering`.

    :param graph: the declaration.
    :param betas: inverse temperatures increasing from 0 or more to 1; a run of :class:`ParallelTempering`
        finds good ones.
    :param lag: sweeps that the leading ensemble is ahead, at least 1.
    :param coupling: a kind for every layer, or one a layer; see :func:`ebmpp.moves.couplings.resolve`.
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
    num_slots: int = DEFAULT_SLOTS,
    **clamped: Array | Observed | Mapping[str, Array | Observed],
) -> Estimate:
    """E[fn(state)] under the model, without bias, from pairs of tempered ensembles.

    :func:`~ebmpp.unbiased_expectation` where pairs of plain Gibbs chains do not meet. Meeting times and costs
    are in the sweeps of :class:`TemperingCoupling`, of which each takes two passes of every replica.

    :param graph: the model.
    :param params: its params.
    :param fn: from one state (a dict of blocks, without batch axes) to a pytree of numbers.
    :param betas: inverse temperatures increasing from 0 or more to 1.
    :param coupling: a kind for every layer, or one a layer; see :func:`ebmpp.moves.couplings.resolve`.
    :param init: as there; values are the start of every replica, a function's key is a replica's own.
    :return: an :class:`~ebmpp.sampling.expectation.Estimate`. All other arguments are as there.
    :raises UnmetError: when pairs are unmet and ``unmet`` is "raise".
    :raises ArgumentError: for wrong betas, or numbers out of range.
    :raises StateError: for states or clamped values that do not fit the graph.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with couplings*.

    **Example**

    >>> import jax, ebmpp
    >>> magnet = ebmpp.layered(v=ebmpp.Spin(4), h=ebmpp.Spin(4))
    >>> params = {"v": jax.numpy.full(4, 0.1), "h": jax.numpy.zeros(4), "v:h": jax.numpy.ones((4, 4))}
    >>> est = tempered_expectation(magnet, params, lambda x: x["v"].mean(), betas=[0, 0.15, 0.3, 1],
    ...                            rng_key=jax.random.key(1), num_pairs=4)
    >>> est.value.shape, est.met.all().item()
    ((), True)
    """
    checks.instance("tempered_expectation: graph", graph, FactorGraph, "a FactorGraph")
    betas = tempering.check_betas(betas)
    graph.check(params)
    clamped = clamps(clamped)
    held = as_given(graph.families, clamped)  # its errors speak of shapes that the user knows
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
