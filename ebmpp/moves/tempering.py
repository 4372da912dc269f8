# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tempering: replicas of one model at inverse temperatures, and sweeps that swap their states.

Replica r has the energy "factors without interactions, plus beta_r times the others":
at beta = 0 the units are independent under their biases, at beta = 1 it is the model.
Or replicas are the knots of a path of models, from independent units to the model. All
replicas together are a graph (every block has one more axis), so that everything
derived from an energy is derived for them too.

Replicas are ordered from hot (the smallest beta) to cold (beta = 1).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
from typing import Any, TypeVar

from jaxtyping import Bool
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Blocks, Chains, Keys, Params, Rows
from ebmpp.errors import DomainError
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.graph.states import Clamped, as_rows
from ebmpp.graph.transforms.replicate import (
    joined_places,
    of_one_replica,
    replicate,
    select,
    tempered_params,
)
from ebmpp.moves import move
from ebmpp.moves.couplings import Attempt, Trial, resolve
from ebmpp.moves.move import Drawn, Layer, Move
from ebmpp.moves.swaps import log_ratio, new_order, take
from ebmpp.moves.target import Target

T = TypeVar("T")
#: :data:`ebmpp.moves.move.Flags` in which each replica is a row.
_Flags = Mapping[str, Bool[Array, "replicas ..."]]
#: Both chains, and where their replicas agree.
_Carry = tuple[Blocks, _Flags]


def check_betas(
    betas: Any, name: str = "betas", positive: bool = False
) -> tuple[float, ...]:
    """Return at least two inverse temperatures, increasing from 0 or more to 1, as floats."""
    try:
        values = np.asarray(betas, float)
    except (TypeError, ValueError):
        values = np.zeros(())
    # not with nan
    increases = values.ndim == 1 and len(values) >= 2 and (np.diff(values) > 0).all()
    if (
        not increases
        or values[-1] != 1
        or not (values[0] > 0 if positive else values[0] >= 0)
    ):
        raise checks.error(
            name,
            "inverse temperatures that increase from "
            f"{'more than 0' if positive else '0 or more'} to 1",
            betas,
            hint=""
            if positive
            else "Of chains that adapted a ladder each, use one: last_state.betas[0].",
        )
    return tuple(values.tolist())


def check_hot(graph: FactorGraph, params: Params, beta: float) -> None:
    """Check that the hottest replica normalises; all others then do."""
    try:
        replicate(graph, 1).check(tempered_params(graph, params, jnp.full(1, beta)))
    except DomainError as error:
        raise DomainError(
            f"at beta = {beta:g}: {error} Start the ladder at a larger beta."
        ) from None


@dataclasses.dataclass(frozen=True)
class Tempered:
    """Coupling of ensembles of replicas at inverse temperatures; made by :func:`tempered`."""

    betas: tuple[float, ...]
    coupling: str | tuple[str, ...] | None = None

    def replicate(
        self, target: Target, fn: Callable[..., Any], init: Any
    ) -> tuple[Target, Any, Any, Any]:
        """Return target, coupling, function and starts of pairs of ensembles."""
        check_hot(target.graph, target.params, self.betas[0])
        sweep = tempered_sweep(target.graph, self.coupling, target.clamped)
        starts = _starts_of_all(target.graph, len(self.betas), init)
        return at_betas(target, self.betas), sweep, OfColdest(fn), starts


def tempered(
    betas: Sequence[float], coupling: str | Sequence[str] | None = None
) -> Tempered:
    """Return a coupling of tempered ensembles, for models in which pairs of Gibbs chains do not meet.

    Each replica of one ensemble is coupled with its counterpart in the other, and swaps
    use the same uniforms. A pair has met when all replicas have. A sweep is that of
    :class:`~ebmpp.ParallelTempering`: two passes over the layers of every replica.

    :param betas: inverse temperatures that increase from 0 or more to 1; a run of
        :class:`~ebmpp.ParallelTempering` finds good ones.
    :param coupling: "maximal" (the default), "maximal_independent", "common",
        "reflection" or "independent" for every layer, or one per layer.
    :raises ArgumentError: for invalid betas.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with
       couplings*.
    2. Syed, Bouchard-Cote, Deligiannidis, Doucet (2022), *Non-reversible parallel
       tempering*.

    **Example**

    >>> import jax, ebmpp
    >>> magnet = ebmpp.layered(v=ebmpp.Spin(4), h=ebmpp.Spin(4))
    >>> params = {"v": jax.numpy.full(4, 0.1), "h": jax.numpy.zeros(4), "v:h": jax.numpy.ones((4, 4))}
    >>> est = ebmpp.unbiased_expectation(magnet, params, lambda x: x["v"].mean(), rng_key=jax.random.key(1),
    ...                                  num_pairs=4, coupling=ebmpp.moves.tempered([0, 0.15, 0.3, 1]))
    >>> est.value.shape, est.met.all().item()
    ((), True)
    """
    single = coupling is None or isinstance(coupling, str)
    return Tempered(check_betas(betas), coupling if single else tuple(coupling))


def add_axis(graph: FactorGraph, x: Mapping[str, Array] | None) -> dict[str, Array]:
    """Insert an axis of replicas, of length 1, before the blocks' axes."""
    axes = {b: len(graph.families[b].shape) for b in x or {}}
    return {b: jnp.expand_dims(v, v.ndim - axes[b]) for b, v in (x or {}).items()}


def at_betas(base: Target, betas: Any) -> Target:
    """Return the target of replicas at ``betas``, with the same clamped values in each."""
    betas = jnp.asarray(betas)
    params = tempered_params(base.graph, base.params, betas)
    return Target(
        replicate(base.graph, len(betas)), params, in_replicas(base.fixed, len(betas))
    )


def in_replicas(rows: T, num: int) -> T:
    """Repeat each row in all replicas, ``(rows, num, *shape)``."""
    return jax.tree.map(lambda v: jnp.repeat(v[:, None], num, axis=1), rows)


def _starts_of_all(graph: FactorGraph, num: int, init: Any) -> Any:
    """Return starts of ``num`` replicas, from the argument ``init`` of ``unbiased_expectation``."""
    if init is None or isinstance(init, str):
        return init
    if callable(init):
        return lambda key: jax.vmap(init)(jax.random.split(key, num))
    rows, batch = as_rows(graph.families, init)  # errors name the shapes of one replica
    return {
        b: v.reshape(batch + v.shape[1:]) for b, v in in_replicas(rows, num).items()
    }


@dataclasses.dataclass(frozen=True)
class OfColdest:
    """Function of the coldest replica's state; compared by value, so that it is compiled once."""

    fn: Callable[[dict[str, Array]], Any]

    def __call__(self, x: dict[str, Array]) -> Any:
        """Call the function."""
        return self.fn({b: v[-1] for b, v in x.items()})


@dataclasses.dataclass(frozen=True)
class TemperedSweep(Move):
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

    :param graph: the graph of one replica.
    :param layers: the layers of a sweep of one replica, with their couplings, without
        the summed-out layer.
    """

    graph: FactorGraph
    layers: tuple[Layer, ...]
    summed: tuple[str, ...] = ()
    proposes = 0  # swaps are not counted with Metropolis proposals

    @property
    def blocks(self) -> tuple[str, ...]:
        return (*self.swapped, *self.summed)

    @property
    def swapped(self) -> tuple[str, ...]:
        """The blocks that are exchanged."""
        return tuple(b for layer in self.layers for b in layer.blocks)

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        return tuple(graph.families)

    def check(self, graph: FactorGraph) -> None:
        # Pairs of such ensembles never stay together, and a run would not end.
        if self.summed:
            raise checks.error("summed", "empty in a sweep of pairs", self.summed)

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        def half(x, parity):
            return (self.half(target, x, keys, parity)[0], None)

        x, _ = lax.scan(half, dict(x), jnp.arange(2))
        return {b: x[b] for b in self.blocks}, jnp.zeros(len(keys), jnp.int32)

    def half(
        self, target: Target, x: Rows, keys: Keys, parity: Array
    ) -> tuple[Blocks, Array, Array]:
        """Draw all layers, and make the swaps of one parity: 0 for even ones, 1 for odd ones.

        :return: the replicas; the replica whose state each now has, ``(rows, num)``;
            and the log of the acceptance ratio of all neighbours, ``(rows, num - 1)``.
            Where replicas have their own params it is 0 for neighbours of the other
            parity.
        """
        keys = random.fold_in(keys, parity)
        x, _ = move.draw_sweep(target, x, self.layers, keys)
        ratio = log_ratio(target, x, parity, self.summed)
        order = new_order(self._log_uniforms(keys, ratio) < ratio, parity)
        x = x | {b: take(x[b], order) for b in self.swapped}
        if self.summed:
            keys = random.fold_in(keys, len(self.layers) + 1)
            x, _ = move.draw_sweep(target, x, (Layer(self.summed),), keys)
        return x, order, ratio

    def _log_uniforms(self, keys: Keys, ratio: Array) -> Array:
        return jnp.log(
            random.uniform(
                random.words(random.fold_in(keys, len(self.layers)), ratio.shape[-1])
            )
        )

    def attempt(self, target: Target, focused: Any, z: Chains, trial: Trial) -> Attempt:
        rows, num = next(iter(z.values())).shape[1:3]
        keep = {b: jnp.broadcast_to(k, z[b].shape[1:]) for b, k in target.keep.items()}
        held = Clamped(keep={b: k.reshape(-1, *k.shape[2:]) for b, k in keep.items()})
        single = Target(self.graph, {}, held)
        flat = {b: _replica_rows(v) for b, v in z.items()}

        def half(carry: _Carry, parity: Array) -> tuple[_Carry, Array]:
            flat, flags = carry
            keys = random.fold_in(trial.keys, parity)
            broken = jnp.zeros(rows, bool)
            for index, layer in enumerate(self.layers):
                of_replicas = random.fold_in(
                    random.fold_in(keys, index)[:, None], jnp.arange(num)
                )
                by_row = _LayerOfReplicas(layer.blocks, layer.kind, ensemble=target)
                inputs = by_row, of_replicas.reshape(-1, 2), 0, trial.most
                flat, flags, failed, _ = move.couple_move(single, flat, flags, *inputs)
                broken |= failed.reshape(rows, num).any(-1)
            carry, failed = self._swap(target, (flat, flags), keys, parity)
            return carry, broken | failed

        (flat, flags), broken = lax.scan(
            half, (flat, move.block_flags(single, flat)), jnp.arange(2)
        )
        # replicas that agree get the same bits, by which the next sweep recognises them
        z = {
            b: v.reshape(z[b].shape)
            for b, v in move.with_equal_copies(flat, flags).items()
        }
        x, y = ({b: z[b][i] for b in self.blocks} for i in range(2))
        accepted = jnp.ones(rows, bool)
        together = {b: flags[b].reshape(rows, -1).all(-1) for b in self.blocks}
        return Attempt(x, y, accepted, accepted, broken.any(0), together)

    def _swap(
        self, target: Target, carry: _Carry, keys: Keys, parity: Array
    ) -> tuple[_Carry, Array]:
        """Swap in both chains; return broken rows too."""
        flat, flags = carry
        rows = len(keys)
        z = {b: v.reshape(2, rows, -1, *v.shape[2:]) for b, v in flat.items()}
        ratio = log_ratio(target, move.both_as_rows(z), parity)
        ratio = ratio.reshape(2, rows, -1)
        # equal states must be moved alike, even where their energies differ in the last
        # bits
        agreed = move.rows_agree(
            flags, tuple(z), flat[self.blocks[0]].shape[1]
        ).reshape(rows, -1)
        ratio = ratio.at[1].set(
            jnp.where(agreed[:, :-1] & agreed[:, 1:], ratio[0], ratio[1])
        )
        log_u = self._log_uniforms(keys, ratio)
        orders = [new_order(log_u < r, parity) for r in ratio]
        swapped = {
            b: jnp.stack([take(v, o) for v, o in zip(z[b], orders, strict=True)])
            for b in self.blocks
        }
        swapped = {b: _replica_rows(v) for b, v in swapped.items()}
        return (flat | swapped, self._swap_flags(flags, swapped, orders)), jnp.isnan(
            ratio
        ).any((0, 2))

    def _swap_flags(
        self, flags: _Flags, swapped: Blocks, orders: list[Array]
    ) -> _Flags:
        """Permute flags; states from different replicas do not agree."""
        result = dict(flags)
        same_order = (orders[0] == orders[1])[..., None]
        for b in self.blocks:
            permuted = (
                take(flags[b].reshape(*same_order.shape[:2], -1), orders[0])
                & same_order
            )
            result[b] = permuted.reshape(flags[b].shape)
            if self.graph.families[b].support.is_discrete:
                result[b] |= move.rows_equal(swapped[b])[:, None]
        return result


def tempered_sweep(
    graph: FactorGraph,
    coupling: Any = None,
    clamped: Iterable[str] = (),
    summed: tuple[str, ...] = (),
) -> TemperedSweep:
    """Return the move of :class:`~ebmpp.ParallelTempering`, and of pairs with :func:`tempered`.

    :param coupling: see :func:`ebmpp.moves.couplings.resolve`.
    """
    layers = schedule(graph, (*clamped, *summed))
    kinds = resolve(coupling, layers)
    return TemperedSweep(
        graph,
        tuple(Layer(b, kind) for b, kind in zip(layers, kinds, strict=True)),
        summed,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _LayerOfReplicas(Layer):
    """Layer of all replicas of an ensemble, for chains in which each replica is a row."""

    ensemble: Target = dataclasses.field(kw_only=True)

    def _stack(self, z: Chains) -> Blocks:
        families = self.ensemble.graph.families
        return {b: v.reshape(2, -1, *families[b].shape) for b, v in z.items()}

    def prepare(self, target: Target, z: Chains) -> Any:
        return super().prepare(self.ensemble, self._stack(z))

    def focus(
        self, target: Target, prepared: Any, z: Chains, part: Any
    ) -> dict[str, Array]:
        """Return natural parameters of both chains, ``(2, rows * num, units, *stat_shape)``."""
        focused = super().focus(self.ensemble, prepared, self._stack(z), part)
        graph = self.ensemble.graph
        block = self.blocks[0]
        if block not in graph.splits:
            return {b: _replica_rows(e) for b, e in focused.items()}
        split = graph.splits[block]
        num = graph.families[block].shape[0]
        single = of_one_replica(split, num)
        eta = jnp.take(
            focused[block], select(joined_places(split, single, num), part), axis=2
        )
        return {
            block: energy.mask_natural(
                single.part_family(part), single.mask(part), _replica_rows(eta)
            )
        }


def _replica_rows(v: Array) -> Array:
    """Return both chains of a block with every replica as a row: ``(2, rows * num, *shape)``."""
    return v.reshape(2, -1, *v.shape[3:])
