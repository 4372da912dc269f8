# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tempering: sweeps of replicas at inverse temperatures that swap their states.

Replica r has the energy "factors without interactions, plus beta_r times the others":
at beta = 0 the units are independent under their biases, at beta = 1 it is the model.
Or replicas are the knots of a path of models, from independent units to the model.
Either way they are an :class:`~ebmpp.moves.ensemble.Ensemble`, in whose replicas the
layers of a sweep are drawn as in single chains.
"""

from collections.abc import Iterable, Sequence
import dataclasses
from functools import lru_cache
from typing import Any, NamedTuple

from jaxtyping import Bool
import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Chains,
    Keys,
    Params,
    RowMask,
    Rows,
    checks,
    is_concrete,
    random,
    select,
    sharding,
)
from ebmpp.errors import ArgumentError, DomainError
from ebmpp.graph import FactorGraph
from ebmpp.graph.declaration import schedule
from ebmpp.graph.normalization import is_bounded
from ebmpp.graph.transforms.rewire import rewire, unchanged
from ebmpp.moves.couplings import KINDS, Attempt, Trial, resolve
from ebmpp.moves.ensemble import (
    Ensemble,
    Order,
    PerPair,
    log_ratio,
    new_order,
    permute,
)
from ebmpp.moves.move import (
    Drawn,
    Layer,
    Move,
    both_as_rows,
    coupled_sweep,
    final_attempt,
    split_chains,
    stack_chains,
)
from ebmpp.moves.rungs import reference_of
from ebmpp.moves.target import Target

#: Replicas, one mask per row.
_ReplicaMask = Bool[Array, "rows replicas"]
# folded into the keys of half a sweep
_LAYERS, _SWAPS, _SUMMED = range(3)


def check_betas(
    betas: Any, name: str = "betas", positive: bool = False
) -> tuple[float, ...]:
    """Return at least two inverse temperatures, increasing from 0 or more to 1, as floats."""
    try:
        values = np.asarray(betas, float)
    except (TypeError, ValueError):
        values = np.zeros(())
    # False with nan
    increases = values.ndim == 1 and len(values) >= 2 and (np.diff(values) > 0).all()
    is_valid = increases and values[-1] == 1
    if is_valid and (values[0] > 0 if positive else values[0] >= 0):
        return tuple(values.tolist())
    start = "more than 0" if positive else "0 or more"
    hint = "Of chains that adapted a ladder each, use one: last_state.betas[0]."
    raise checks.error(
        name,
        f"inverse temperatures that increase from {start} to 1",
        betas,
        hint="" if positive else hint,
    )


def check_hot(graph: FactorGraph, params: Params, beta: float) -> None:
    """Check that the hottest replica normalises, unless params are traced; all others then do."""
    if not is_concrete(params) or is_bounded(graph):
        return
    with sharding.eager():  # under jit, concrete params would be staged
        reference = reference_of(graph, params)
        inside = [graph.families[b].in_domain(e).all() for b, e in reference.items()]
        if all(map(bool, inside)):  # between the reference and the model all normalise
            return
        try:
            _at_beta(graph, beta).check(params)
        except DomainError as error:
            message = f"at beta = {beta:g}: {error} Start the ladder at a larger beta."
            raise DomainError(message) from None


@lru_cache(maxsize=32)
def _at_beta(graph: FactorGraph, beta: float) -> FactorGraph:
    """Return the graph with its interactions multiplied by beta."""
    parts = unchanged(graph.families)
    factors = [
        rewire(f, parts, f.blocks[0], scale=beta) if f.interacts else f
        for f in graph.factors
    ]
    return FactorGraph(graph.visible, graph.latent, factors)


@dataclasses.dataclass(frozen=True)
class Tempered:
    """Coupling of ensembles of replicas at inverse temperatures; made by :func:`tempered`."""

    betas: tuple[float, ...]
    coupling: str | tuple[str, ...] | None = None

    def __call__(
        self, graph: FactorGraph, clamped: Iterable[str] = ()
    ) -> tuple["TemperedSweep"]:
        """Return the moves of a sweep."""
        return (tempered_sweep(graph, self.coupling, clamped, hottest=self.betas[0]),)


def tempered(
    betas: Sequence[float], coupling: str | Sequence[str] | None = None
) -> Tempered:
    """Return a coupling of tempered ensembles, where pairs of Gibbs chains do not meet.

    Each replica of one ensemble is coupled with its counterpart in the other, and swaps
    use the same uniforms. A pair has met when all replicas have. A sweep is that of
    :class:`~ebmpp.ParallelTempering`: two passes over the layers of every replica.

    :param betas: inverse temperatures that increase from 0 or more to 1; a run of
        :class:`~ebmpp.ParallelTempering` finds good ones.
    :param coupling: "maximal" (the default), "maximal_independent", "common",
        "reflection" or "independent" for every layer, or one per layer.
    :raises ArgumentError: for invalid betas, or an unknown coupling.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with
       couplings*.
    2. Syed, Bouchard-Cote, Deligiannidis, Doucet (2022), *Non-reversible parallel
       tempering*.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> magnet = ebmpp.layered(v=ebmpp.Spin(4), h=ebmpp.Spin(4))
    >>> params = {"v": jnp.full(4, 0.1), "h": jnp.zeros(4), "v:h": jnp.ones((4, 4))}
    >>> coupling = ebmpp.moves.tempered([0, 0.15, 0.3, 1])
    >>> est = ebmpp.unbiased_expectation(magnet, params, lambda x: x["v"].mean(),
    ...                                  rng_key=jax.random.key(1), num_pairs=4, coupling=coupling)
    >>> est.value.shape, est.met.all().item()
    ((), True)
    """
    if coupling is not None and not isinstance(coupling, str):
        coupling = tuple(coupling)
    for kind in (coupling,) if isinstance(coupling, str) else coupling or ():
        checks.choice("coupling", kind, KINDS)
    return Tempered(check_betas(betas), coupling)


def states_of(coupling: object, target: Target) -> Target:
    """Return the target of the states that a coupling moves: replicas for :func:`tempered`."""
    if isinstance(coupling, Tempered):
        return Ensemble.at_betas(target, jnp.asarray(coupling.betas))
    return target


class Half(NamedTuple):
    """Outcome of half a sweep: all layers of all replicas, and the swaps of one parity."""

    x: Blocks
    order: Order
    log_ratio: PerPair
    """Log of the acceptance ratios; see :func:`ebmpp.moves.ensemble.log_ratio`."""


@dataclasses.dataclass(frozen=True)
class TemperedSweep(Move[None]):
    """Sweep of all replicas: all layers and even swaps, then all layers and odd swaps.

    Neighbouring replicas exchange states, accepted by their energies. Even swaps (of
    replicas 0 and 1, 2 and 3, ...) alternate with odd ones deterministically, which
    carries states from hot to cold and back without turning at every step: the
    non-reversible scheme.

    In a pair, each replica is coupled with its counterpart separately: a joint coupling
    of all replicas would be accepted as rarely as the worst of them. All trials are
    made within one attempt, so nothing stalls.

    Where replicas have their own params, swaps are accepted more often with some blocks
    ``summed`` out. These are not swapped but drawn afterwards.

    :param layers: the moves of a sweep of one replica, such as layers with their
        couplings, without the summed-out layer.
    :param hottest: the smallest inverse temperature, at which params are checked.
    """

    layers: tuple[Move, ...]
    summed: tuple[str, ...] = ()
    hottest: float = 1.0

    @property
    def blocks(self) -> tuple[str, ...]:
        return (*self.swapped, *self.summed)

    @property
    def swapped(self) -> tuple[str, ...]:
        """The blocks that are exchanged."""
        blocks = [b for layer in self.layers for b in layer.blocks]
        return tuple(dict.fromkeys(blocks))

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        return tuple(graph.families)

    def check(self, graph: FactorGraph) -> None:
        # Pairs of such ensembles never stay together, and a run would not end.
        if self.summed:
            raise checks.error("summed", "empty in a sweep of pairs", self.summed)

    def check_params(self, graph: FactorGraph, params: Params) -> None:
        check_hot(graph, params, self.hottest)

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        ensemble = _as_ensemble(target)

        def half(x, parity):
            return self.half(ensemble, x, keys, parity).x, None

        x, _ = lax.scan(half, dict(x), jnp.arange(2))
        return select(x, self.blocks), 0

    def half(self, ensemble: Ensemble, x: Rows, keys: Keys, parity: Array) -> Half:
        """Draw all layers, and make the swaps of one parity: 0 for even ones, 1 for odd ones."""
        keys = random.fold_in(keys, parity)
        x = ensemble.sweep(x, self.layers, random.fold_in(keys, _LAYERS))
        ratio = log_ratio(ensemble, x, parity, self.summed)
        order = new_order(_log_uniforms(keys, ratio) < ratio, parity)
        x |= {b: permute(x[b], order) for b in self.swapped}
        if self.summed:
            layer = Layer(self.summed)
            x = ensemble.sweep(x, (layer,), random.fold_in(keys, _SUMMED))
        return Half(x, order, ratio)

    def attempt(
        self, target: Target, focused: None, z: Chains, trial: Trial
    ) -> Attempt:
        ensemble = _as_ensemble(target)

        def half(z, parity):
            keys = random.fold_in(trial.keys, parity)
            z, agree, broken = self._couple(ensemble, z, keys, trial.most)
            z, has_nan = self._swap_both(ensemble, z, agree, keys, parity)
            return z, broken.any(-1) | has_nan

        z, broken = lax.scan(half, dict(z), jnp.arange(2))
        moved = select(z, self.blocks)
        return final_attempt(moved, trial, broken.any(0))

    def _couple(
        self, ensemble: Ensemble, z: Chains, keys: Keys, most: Array | int
    ) -> tuple[Blocks, _ReplicaMask, _ReplicaMask]:
        """Draw all layers in both chains; return where replicas agree and are broken."""

        def couple(target, x, y, keys):
            z, agree, broken, _ = coupled_sweep(
                target, stack_chains(x, y), self.layers, keys, most
            )
            return *split_chains(z), agree, broken

        keys = ensemble.replica_keys(random.fold_in(keys, _LAYERS))
        x, y, agree, broken = ensemble.map(couple, *split_chains(z), keys)
        return stack_chains(x, y), agree, broken

    def _swap_both(
        self,
        ensemble: Ensemble,
        z: Chains,
        agree: _ReplicaMask,
        keys: Keys,
        parity: Array,
    ) -> tuple[Blocks, RowMask]:
        """Swap in both chains from the same uniforms; return where a ratio is nan."""
        flat = both_as_rows(z)
        ratio = log_ratio(ensemble, flat, parity).reshape(2, len(keys), -1)
        # equal states must be moved alike, even where their energies differ in the last
        # bits
        neighbours_agree = agree[:, :-1] & agree[:, 1:]
        ratio = ratio.at[1].set(jnp.where(neighbours_agree, ratio[0], ratio[1]))
        accepted = _log_uniforms(keys, ratio) < ratio
        order = new_order(accepted.reshape(-1, ratio.shape[-1]), parity)
        swapped = {b: permute(flat[b], order).reshape(z[b].shape) for b in self.blocks}
        return dict(z) | swapped, jnp.isnan(ratio).any((0, 2))


def _as_ensemble(target: Target) -> Ensemble:
    if not isinstance(target, Ensemble):
        raise ArgumentError(
            "a tempered sweep must move an ensemble, got single states. Pass "
            "coupling=ebmpp.moves.tempered(betas)."
        )
    return target


def _log_uniforms(keys: Keys, ratio: Array) -> PerPair:
    """Return the logs of the uniforms by which swaps are accepted."""
    return jnp.log(random.uniforms(random.fold_in(keys, _SWAPS), ratio.shape[-1]))


def tempered_sweep(
    graph: FactorGraph,
    coupling: str | Sequence[str] | None = None,
    clamped: Iterable[str] = (),
    summed: tuple[str, ...] = (),
    hottest: float = 1.0,
) -> TemperedSweep:
    """Return the move of :class:`~ebmpp.ParallelTempering`, and of pairs with :func:`tempered`.

    :param coupling: see :func:`ebmpp.moves.resolve_moves`.
    :param hottest: see :class:`TemperedSweep`.
    """
    blocks = schedule(graph, (*clamped, *summed))
    kinds = resolve(coupling, blocks)
    layers = tuple(Layer(*layer) for layer in zip(blocks, kinds, strict=True))
    return TemperedSweep(layers, summed, hottest)
