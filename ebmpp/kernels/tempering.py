# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Parallel tempering: replicas from hot to cold that swap their states."""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.annealing.path import Path, check_models, summed_blocks
from ebmpp.core import Blocks, Counts, Eta, Params, at_index, checks, is_concrete
from ebmpp.graph import FactorGraph
from ebmpp.kernels.base import InitParams, RowKernel, all_still, describe_still
from ebmpp.moves import Move, Target, sweeps, tempering
from ebmpp.moves.ensemble import Ensemble, Order, equalize, permute
from ebmpp.moves.sweeps import MovesLike


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
        known = is_concrete(params)
        num = len(path) - (known and path.ends_at(params))
        return Knots(path.betas[:num], at_index(path.along(), slice(num)), path.eta0)


class TemperingState(NamedTuple):
    """State of :class:`ParallelTempering`.

    - **z** - the draw, of the coldest replica: the free blocks, each
      ``(*batch, *shape)``.
    - **replicas** - all replicas from hot to cold, each block
      ``(*batch, num, *shape)``.
    - **betas** - inverse temperatures, with a path those at its knots, ``(num,)``.
    - **rejection** - probability that a swap of neighbours is rejected, ``(num - 1,)``:
      the mean over the present round of the warm-up, and over all sweeps after the
      warm-up.
    - **count** - sweeps in that mean.
    - **origin** - the replica from whose start each replica's state comes,
      ``(*batch, num)``.
    - **label** - of each state: 0 if it has not been hottest yet, 1 if it has been
      hottest and not coldest since, 2 if it has been coldest since, ``(*batch, num)``.
    - **round_trips** - of all states from hottest to coldest and back, since the
      warm-up, ``(*batch,)``.
    - **i** - sweeps since the initial state.
    - **num_warmup** - sweeps after which the betas are fixed.
    - **rng_key** - the run's key; sweep ``i`` draws from the key and ``i``, so it does
      not change.
    - **still** - by block, True while no sweep has changed ``z``.
    - **knots** - with a path its knots before the model, shared by all chains; else
      None.
    """

    z: Blocks
    replicas: Blocks
    betas: Array
    rejection: Array
    count: Array
    origin: Array
    label: Array
    round_trips: Array
    i: Array
    num_warmup: Array
    rng_key: Array
    still: Blocks
    knots: Knots | None = None


class ParallelTempering(RowKernel[TemperingState]):
    """Parallel tempering of blocked Gibbs chains, a kernel for :class:`numpyro.infer.MCMC`.

    For models whose modes :class:`~ebmpp.BlockedGibbs` does not leave. Replica r has
    the factors of one block, and beta_r times the others: at beta = 0 the units are
    independent, at beta = 1 it is the model, whose draws these are. A sweep is all
    layers in all replicas and a swap of even neighbours, then all layers once more and
    a swap of odd ones: it costs ``2 * num_temperatures`` sweeps of plain Gibbs.

    With ``betas="auto"`` each chain adapts its own ladder during the warm-up, in rounds
    of doubling length, until the swaps of all neighbours are rejected equally often;
    without a warm-up the steps stay equal. :func:`ebmpp.diagnostics.ladder` returns
    energies, heat capacities and log Z of all temperatures. ``get_diagnostics_str`` and
    ``extra_fields=("rejection", "round_trips", "betas")`` report how well states
    travel: rejection rates near 1 call for more temperatures. Params, of one model or of
    several parameter sets, and clamped blocks are passed as to
    :class:`~ebmpp.BlockedGibbs`; each set has a ladder of its own.

    With a ``path``, such as ``fit(..., keep_path=True)`` records, the replicas are at
    its knots (trajectory tempering), for machines that lose their modes when they are
    heated: the first is the path's reference of independent units, the coldest the
    model of ``mcmc.run``'s params (one set), which replaces the path's last knot if that is the
    same model. Nothing adapts. Swaps have the blocks summed out that :func:`ebmpp.ais`
    sums out, except clamped and observed ones.

    :param betas: "auto", or inverse temperatures increasing from 0 or more to 1.
    :param num_temperatures: number of betas of "auto", at least 2.
    :param init: see :class:`~ebmpp.kernels.RowKernel`; ``init_params`` are the start of
        every replica.
    :param path: a :class:`ebmpp.annealing.Path` of this graph, in place of betas and
        num_temperatures.
    :param moves: moves of a sweep in place of draws of all layers; see
        :class:`~ebmpp.BlockedGibbs`. With a path no block is then summed out.
    :raises ArgumentError: for betas that do not increase to 1, too few temperatures, a
        path of another graph, or a path together with betas or num_temperatures.
    :raises DomainError: for a path on which a model does not normalise.

    **References**

    1. Syed, Bouchard-Cote, Deligiannidis, Doucet (2022), *Non-reversible parallel
       tempering: a scalable highly parallel MCMC scheme*.
    2. Bereux, Decelle, Furtlehner, Rosset, Seoane (2024), *Fast training and sampling
       of Restricted Boltzmann Machines*: replicas along the path of training.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> magnet = ebmpp.layered(v=ebmpp.Spin(4), h=ebmpp.Spin(4))
    >>> params = {"v": jax.numpy.full(4, 0.1), "h": jax.numpy.zeros(4)}
    >>> params["v:h"] = jax.numpy.ones((4, 4))
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
        path: Path | None = None,
        moves: MovesLike = None,
    ) -> None:
        super().__init__(graph, init)
        self.moves: Any = sweeps.as_moves("ParallelTempering: moves", moves)
        if isinstance(betas, str):
            checks.choice(
                "ParallelTempering: betas",
                betas,
                ("auto",),
                also="numbers that increase to 1",
            )
        if path is not None and (not isinstance(betas, str) or num_temperatures != 10):
            raise checks.error(
                "ParallelTempering: path", "None with betas or num_temperatures", path
            )
        self.num_temperatures = checks.count(
            "ParallelTempering: num_temperatures", num_temperatures, least=2
        )
        self.betas = betas if isinstance(betas, str) else tempering.check_betas(betas)
        self.path = path
        self._takes_sets = path is None  # a path ends at one model
        if path is not None:
            checks.instance(
                "ParallelTempering: path",
                path,
                Path,
                "a Path, as fit(..., keep_path=True) has",
            )
            if path.graph != graph:
                raise checks.error(
                    "ParallelTempering: graph of path", f"{graph!r}", path.graph
                )
            check_models(
                "ParallelTempering",
                graph,
                [path.params_at(i) for i in range(1, len(path))],
            )

    def _moves(self, target: Target) -> tuple[Move, ...]:
        if self.path is not None:
            return super()._moves(target)
        hottest = 0.0 if isinstance(self.betas, str) else self.betas[0]
        return tempering.Tempered((hottest, 1.0))(target.graph, target.clamped)

    def init_all(
        self,
        target: Target,
        rng_key: Array,
        init_params: InitParams,
        num_warmup: int = 0,
    ) -> TemperingState:
        """Return the initial states; the betas adapt during ``num_warmup`` steps."""
        knots = None if self.path is None else Knots.before(self.path, target.params)
        target = _along(target, knots)
        state = super().init_all(target, rng_key, init_params, num_warmup)
        return state._replace(
            num_warmup=jnp.full_like(state.num_warmup, num_warmup), knots=knots
        )

    def step(self, target: Target, state: TemperingState) -> TemperingState:
        knots = state.knots
        # knots have no axis of chains
        chains = state._replace(knots=None)
        return super().step(_along(target, knots), chains)._replace(knots=knots)

    def _init_one(
        self, rng_key: Array, target: Target, init_params: InitParams
    ) -> TemperingState:
        if isinstance(self.betas, str):
            betas = jnp.linspace(0.0, 1.0, self.num_temperatures)
        else:
            betas = jnp.array(self.betas)
        ensemble = _replicas_of(target, betas)
        num = len(ensemble.betas)
        x = self._start(ensemble, rng_key, init_params)
        z = ensemble.model.from_rows(ensemble.coldest(x))
        shape = (*target.batch, num)
        zero = jnp.int32(0)
        return TemperingState(
            z=z,
            replicas=ensemble.from_rows(x),
            betas=ensemble.betas,
            rejection=jnp.zeros(num - 1),
            count=zero,
            origin=jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), shape),
            label=jnp.zeros(shape, jnp.int32),
            round_trips=jnp.zeros(target.batch, jnp.int32),
            i=zero,
            num_warmup=zero,
            rng_key=rng_key,
            still=all_still(z),
        )

    def _sample_one(self, state: TemperingState, target: Target) -> TemperingState:
        state = _sweep(state, _replicas_of(target, state.betas), self.moves)
        # Where a round of the warm-up ends, betas adapt and counts start again. The
        # last round is half of the warm-up, the one before a quarter.
        is_over = (state.i == state.num_warmup >> jnp.arange(31)).any()
        betas = state.betas
        if self.path is None and self.betas == "auto":
            betas = jnp.where(is_over, equalize(betas, state.rejection), betas)
        counts: dict[str, Any] = {
            name: jnp.where(is_over, 0, getattr(state, name))
            for name in ("rejection", "count", "label", "round_trips")
        }
        return state._replace(betas=betas, **counts)

    def get_diagnostics_str(self, state: TemperingState) -> str:
        """Return numbers of sweeps and temperatures, acceptance of swaps, and round trips."""
        accepted = 1 - np.asarray(state.rejection)
        barrier = (1 - accepted).sum(-1).mean()
        kind = "temperatures" if state.knots is None else "knots"
        return (
            f"{int(np.max(state.i))} sweeps of {accepted.shape[-1] + 1} {kind}, swaps accepted "
            f"{accepted.min():.2f} to {accepted.max():.2f}, barrier {barrier:.2f}, "
            f"{int(np.sum(state.round_trips))} round trips{describe_still(state, state.i)}"
        )


def _along(target: Target, knots: Knots | None) -> Target:
    """Return replicas at the knots of a path and at the model; the target without a path."""
    if knots is None:
        return target
    return Ensemble.along(target, *knots)


def _replicas_of(target: Target, betas: Array) -> Ensemble:
    """Return the target of replicas at ``betas``; one along a path has its own."""
    return target if isinstance(target, Ensemble) else Ensemble.at_betas(target, betas)


class _Travel(NamedTuple):
    """States of ensembles, one per row, and their ways; see :class:`TemperingState`."""

    x: Blocks
    origin: Order
    label: Order
    round_trips: Counts

    def after(self, half: tempering.Half) -> "_Travel":
        """Follow the swaps of half a sweep."""
        label = permute(self.label, half.order)
        returned = (label[:, 0] == 2).astype(jnp.int32)
        arrived = jnp.where(label[:, -1] == 1, 2, label[:, -1])
        return _Travel(
            half.x,
            permute(self.origin, half.order),
            label.at[:, 0].set(1).at[:, -1].set(arrived),
            self.round_trips + returned,
        )


def _sweep(
    state: TemperingState, ensemble: Ensemble, moves: tuple[Move, ...] | None
) -> TemperingState:
    """Make one sweep of all replicas, and count swaps."""
    summed = ()
    if (
        ensemble.knots is not None and moves is None
    ):  # a block with observed units is swapped as it is
        fixed = {*ensemble.clamped, *ensemble.keep}
        summed = tuple(b for b in summed_blocks(ensemble.graph) if b not in fixed)
    clamped = ensemble.clamped
    sweep = tempering.tempered_sweep(ensemble.graph, None, clamped, summed)
    if moves is not None:
        layers = sweeps.resolve_moves(ensemble.graph, moves, clamped, exact=False)
        sweep = dataclasses.replace(sweep, layers=layers)
    keys = ensemble.keys(state.rng_key, (state.i + 1).astype(jnp.uint32))

    def half(travel, parity):
        outcome = sweep.half(ensemble, travel.x, keys, parity)
        rejected = -jnp.expm1(jnp.minimum(outcome.log_ratio, 0)).mean(0)
        return travel.after(outcome), rejected

    rows = (ensemble.num_rows, len(ensemble.betas))
    start = _Travel(
        ensemble.to_rows(state.replicas),
        state.origin.reshape(rows),
        state.label.reshape(rows),
        state.round_trips.reshape(rows[0]),
    )
    end, rejected = lax.scan(half, start, jnp.arange(2))
    low = jnp.arange(len(ensemble.betas) - 1)
    count = state.count + 1
    change = rejected[low % 2, low] - state.rejection
    return state._replace(
        z=ensemble.model.from_rows(ensemble.coldest(end.x)),
        replicas=ensemble.from_rows(end.x),
        rejection=state.rejection + change / count.astype(change.dtype),
        count=count,
        origin=end.origin.reshape(state.origin.shape),
        label=end.label.reshape(state.label.shape),
        round_trips=end.round_trips.reshape(state.round_trips.shape),
        i=state.i + 1,
    )
