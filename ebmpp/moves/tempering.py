# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tempering: replicas of one model at inverse temperatures, and sweeps that exchange their states.

Replica r has the energy "factors in which no units interact, plus beta_r times the others": at beta = 0 the
units are independent under their biases, at beta = 1 it is the model. Or replicas are the knots of a path of
models, from independent units to the model. All replicas together are a graph again (every block has one more
axis), so that whatever is derived from an energy is derived for them too.

Replicas go from hot (the first, the smallest beta) to cold (the last, beta = 1).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
from typing import Any

from jaxtyping import Bool
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import Blocks, Chains, Keys, Rows
from ebmpp.errors import ArgumentError, DomainError
from ebmpp.families.values import as_array, settle
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.graph.factors.lateral import each_part
from ebmpp.graph.states import Clamped, Observed, as_observed, as_rows
from ebmpp.graph.transforms.replicate import (
    Replicated,
    joined_places,
    of_one_replica,
    replicate,
    select,
    tempered_params,
)
from ebmpp.moves.couplings import Attempt, Trial, resolve
from ebmpp.moves.layer import Layer
from ebmpp.moves.move import (
    Drawn,
    Move,
    agree,
    compare,
    copied,
    couple_focused,
    draw_sweep,
    equal,
    flat,
    note,
)
from ebmpp.moves.swaps import have_own_params, log_ratio, new_order, take
from ebmpp.moves.target import Target

#: As :data:`ebmpp.moves.move.Flags`, where each replica of a row is a row of its own.
_Flags = Mapping[str, Bool[Array, "replicas ..."]]


def check_betas(betas: Any) -> tuple[float, ...]:
    """Inverse temperatures, checked.

    :param betas: increasing from 0 or more to 1, at least two.
    :raises ArgumentError: for anything else.

    **Example**

    >>> check_betas([0, 0.3, 1])
    (0.0, 0.3, 1.0)
    """
    wanted = "betas are increasing inverse temperatures from 0 or more to 1, such as [0, 0.3, 1]"
    try:
        given = np.asarray(betas, float)
    except (TypeError, ValueError):
        raise ArgumentError(f"{wanted}; got {betas!r}") from None
    if given.ndim != 1 or len(given) < 2:
        told = f"{wanted}; got an array of shape {given.shape}"
        raise ArgumentError(f"{told}. Of chains that adapted a ladder each, take one: last_state.betas[0]")
    if not (np.diff(given) > 0).all() or given[0] < 0 or given[-1] != 1:
        raise ArgumentError(f"{wanted}; got {given.tolist()}")
    return tuple(given.tolist())


def check_hot(graph: FactorGraph, params: Mapping[str, Any], beta: float) -> None:
    """Whether the hottest replica normalises; those between it and the model then do so too.

    :raises DomainError: when it does not.
    """
    try:
        replicate(graph, 1).check(tempered_params(graph, params, jnp.full(1, beta)))
    except DomainError as error:
        raise DomainError(
            f"at beta = {beta:g}, where the factors of one block hold almost or quite alone: {error} "
            "A ladder that starts at a larger beta leaves the other factors more of their say."
        ) from None


def equalized(betas: Array, rejection: Array) -> Array:
    """Betas between which swaps would be refused equally often.

    The rejection rates, summed from hot to cold, estimate the communication barrier as a function of beta;
    the new betas cut it into equal parts.

    :param betas: shape ``(num,)``.
    :param rejection: of neighbours, ``(num - 1,)``.
    :return: shape ``(num,)``, with the ends of ``betas``.

    **References**

    1. Syed, Bouchard-Cote, Deligiannidis, Doucet (2022), *Non-reversible parallel tempering*, section 5.

    **Example**

    >>> equalized(jnp.array([0, 0.5, 1]), jnp.array([0.1, 0.3])).round(2).tolist()
    [0.0, 0.67, 1.0]
    """
    # neighbours that are never refused must not fall together
    cumulated = jnp.cumsum(jnp.concatenate([jnp.zeros(1), rejection + 1e-4]))
    wanted = jnp.linspace(0.0, 1.0, len(betas)) * cumulated[-1]
    made = jnp.interp(wanted, cumulated, betas)
    return made.at[0].set(betas[0]).at[-1].set(betas[-1])


# -- what is given, in every replica ---------------------------------------------------------------


def add_axis(graph: FactorGraph, x: Mapping[str, Array] | None) -> dict[str, Array]:
    """An axis of replicas, of length 1, before the blocks' own."""
    own = {b: len(graph.families[b].shape) for b in x or {}}
    return {b: jnp.expand_dims(v, v.ndim - own[b]) for b, v in (x or {}).items()}


def _spread(graph: FactorGraph, num: int, block: str, value: Any) -> Array:
    """``num`` times, of values that were checked before."""
    given = settle(block, graph.families[block], as_array(block, value), check=False)
    return _repeat(graph, num, block, given)


def _repeat(graph: FactorGraph, num: int, block: str, value: Array) -> Array:
    made = add_axis(graph, {block: value})[block]
    return jnp.repeat(made, num, axis=made.ndim - len(graph.families[block].shape) - 1)


def spread_given(graph: FactorGraph, num: int, block: str, value: Any) -> Array | Observed:
    """A clamped block or an observed one, held alike in ``num`` replicas."""
    if not isinstance(value, Observed):
        return _spread(graph, num, block, value)
    values, known = as_observed(block, graph.families[block], value)
    return Observed(_spread(graph, num, block, values), _repeat(graph, num, block, jnp.asarray(known)))


def spread_init(graph: FactorGraph, num: int, init: Any) -> Any:
    """Starts of ``num`` replicas, from what :func:`~ebmpp.unbiased_expectation` takes as ``init``."""
    if init is None or isinstance(init, str):
        return init
    if callable(init):
        return lambda key: jax.vmap(init)(jax.random.split(key, num))
    as_rows(graph.families, init)  # its errors speak of shapes that the user knows
    return {b: _spread(graph, num, b, v) for b, v in init.items()}


@dataclasses.dataclass(frozen=True)
class OfColdest:
    """A function of a state, as one of all replicas; compared by value, so that it is compiled once."""

    fn: Callable[[dict[str, Array]], Any]

    def __call__(self, x: dict[str, Array]) -> Any:
        return self.fn({b: v[-1] for b, v in x.items()})


# -- the sweep -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TemperedSweep(Move):
    """All layers of all replicas and even swaps, then all layers once more and odd swaps: one move.

    Neighbouring replicas exchange states, accepted by their energies. Even swaps (of replicas 0 and 1, 2 and
    3...) that alternate with odd ones, without drawing which, carry states from hot to cold and back without
    turning at every step: the non-reversible scheme.

    Coupled, each replica of a pair's one ensemble is coupled with its like in the other, on its own: a joint
    coupling of all replicas would be accepted as rarely as the worst of them. It is tried until accepted
    within one attempt, so nothing stalls. Swaps get the same uniforms in both.

    Where replicas have params of their own some blocks may be summed out of the swaps, which are then
    accepted more often: these are not swapped but drawn, given what was.

    :param graph: the graph of one replica.
    :param layers: those of a sweep of one replica, with their couplings, but for the last.
    :param summed: the last layer's blocks, where they are summed out of the swaps, as they are then drawn
        after these.

    **References**

    1. Syed, Bouchard-Cote, Deligiannidis, Doucet (2022), *Non-reversible parallel tempering*.
    """

    graph: FactorGraph
    layers: tuple[Layer, ...]
    summed: tuple[str, ...] = ()
    proposes = 0  # rates of swaps would drown in the acceptance of Metropolis moves

    @property
    def blocks(self) -> tuple[str, ...]:
        return (*self.swapped, *self.summed)

    @property
    def swapped(self) -> tuple[str, ...]:
        """The blocks that are exchanged."""
        return tuple(b for layer in self.layers for b in layer.blocks)

    def check(self, graph: FactorGraph) -> None:
        """:raises ArgumentError: for a graph that is not one of replicas, or is one of different models."""
        if have_own_params(graph):
            raise ArgumentError(
                "pairs of tempered chains are coupled at inverse temperatures, not along a path of models"
            )
        if not any(isinstance(f, Replicated) and f.tempered for f in graph.factors):
            raise ArgumentError("a tempered sweep is one of replicas: take the graph that replicate makes")

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        return tuple(graph.families)

    # -- one chain -------------------------------------------------------------------------------

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        half = lambda x, parity: (self.half(target, x, keys, parity)[0], None)
        x, _ = lax.scan(half, dict(x), jnp.arange(2))
        return {b: x[b] for b in self.blocks}, jnp.zeros(len(keys), jnp.int32)

    def half(
        self, target: Target, x: Rows, keys: Keys, parity: Array
    ) -> tuple[dict[str, Array], Array, Array]:
        """All layers, and the swaps of one parity.

        :param keys: of the sweep, ``(rows, 2)``.
        :param parity: 0 for even swaps, 1 for odd ones.
        :return: the replicas; whose state each of them now has, ``(rows, num)``; and the log of the
            acceptance ratio of all neighbours, ``(rows, num - 1)``: those of the other parity too, unless
            replicas have params of their own, whence it is 0.
        """
        keys = random.fold_in(keys, parity)
        x, _ = draw_sweep(target, x, self.layers, keys)
        ratio = log_ratio(target, x, parity, self.summed)
        order = new_order(self._log_uniforms(keys, ratio) < ratio, parity)
        x = x | {b: take(x[b], order) for b in self.swapped}
        if self.summed:
            x, _ = draw_sweep(target, x, (Layer(self.summed),), random.fold_in(keys, len(self.layers) + 1))
        return x, order, ratio

    def _log_uniforms(self, keys: Keys, ratio: Array) -> Array:
        words = random.words(random.fold_in(keys, len(self.layers)), ratio.shape[-1])
        return jnp.log(random.uniform(words))

    # -- a coupled pair --------------------------------------------------------------------------

    def attempt(self, target: Target, focused: Any, z: Chains, trial: Trial) -> Attempt:
        # the layers depend on one another: nothing could be prepared
        def half(carry: tuple[Blocks, _Flags], parity: Array) -> tuple[tuple[Blocks, _Flags], Array]:
            own, broken = random.fold_in(trial.keys, parity), jnp.zeros(rows, bool)
            for index, layer in enumerate(self.layers):
                draw = trial._replace(keys=random.fold_in(own, index))
                carry, wrong = self._couple(target, carry, layer, draw)
                broken |= wrong
            carry, wrong = self._swap(target, carry, own, parity)
            return carry, broken | wrong

        rows = len(trial.keys)
        start = dict(z), compare(Target(self.graph, {}), {b: _apart(v) for b, v in z.items()})
        (z, flags), broken = lax.scan(half, start, jnp.arange(2))
        # the two chains of a replica that are one get the same bits, which is how the next sweep knows of it
        z = {b: v.reshape(z[b].shape) for b, v in copied({b: _apart(v) for b, v in z.items()}, flags).items()}
        x, y = ({b: z[b][i] for b in self.blocks} for i in range(2))
        every = jnp.ones(rows, bool)
        together = {b: flags[b].reshape(rows, -1).all(-1) for b in self.blocks}
        return Attempt(x, y, every, every, broken.any(0), together)

    def _couple(
        self, target: Target, carry: tuple[Blocks, _Flags], layer: Layer, draw: Trial
    ) -> tuple[tuple[Blocks, _Flags], Array]:
        """A layer of both chains, every replica a row of its own; and which rows are broken."""
        (z, _), graph = carry, target.graph
        rows, num = next(iter(z.values())).shape[1:3]
        together = lambda v: v.reshape(rows, num, *v.shape[1:])
        keys = random.fold_in(draw.keys[:, None], jnp.arange(num)).reshape(-1, 2)
        held = {
            b: jnp.broadcast_to(k, z[b].shape[1:]).reshape(-1, *k.shape[2:]) for b, k in target.keep.items()
        }
        prepared, single = layer.prepare(target, z), Target(self.graph, {}, Clamped(keep=held))

        def step(part: Any, carry: tuple[Blocks, _Flags, Array]) -> tuple[Blocks, _Flags, Array]:
            z, flags, broken = carry
            focused = self._focus(target, layer, prepared, z, part)
            flat = {b: _apart(v) for b, v in z.items()}
            every, same = jnp.ones(rows * num, bool), agree(flags, layer.reads(graph), rows * num)
            own = Trial(keys, every, same, part, flags, draw.most)
            made = couple_focused(single, focused, flat, layer, part, own)
            new = {b: jnp.stack([together(made.x[b]), together(made.y[b])]) for b in layer.blocks}
            flat = {b: _apart(new[b]) for b in layer.blocks}
            flags = note(single, layer, flags, flat, part, made, every)
            return z | new, flags, broken | together(made.broken).any(-1)

        *new, broken = each_part(layer.num_parts(graph), step, (*carry, jnp.zeros(rows, bool)))
        return tuple(new), broken

    def _focus(self, target: Target, layer: Layer, prepared: Any, z: Chains, part: Any) -> dict[str, Array]:
        """Natural parameters of both chains, each replica a row: ``(2, rows * num, units, *stat_shape)``."""
        graph, focused = target.graph, layer.focus(target, prepared, z, part)
        (block, *_), num = layer.blocks, next(iter(z.values())).shape[2]
        if block not in graph.splits:
            return {b: e.reshape(2, -1, *e.shape[3:]) for b, e in focused.items()}
        split = graph.splits[block]
        single = of_one_replica(split, num)
        eta = jnp.take(focused[block], select(joined_places(split, single, num), part), axis=2)
        eta = eta.reshape(2, -1, *eta.shape[3:])
        return {block: energy.mask_natural(single.part_family(part), single.mask(part), eta)}

    def _swap(
        self, target: Target, carry: tuple[Blocks, _Flags], keys: Keys, parity: Array
    ) -> tuple[tuple[Blocks, _Flags], Array]:
        """Swaps in both chains; and which rows are broken."""
        z, flags = carry
        rows, num = next(iter(z.values())).shape[1:3]
        ratio = log_ratio(target, flat(z), parity)
        ratio = ratio.reshape(2, -1, ratio.shape[-1])
        # Equal states must be moved alike, whatever the last bits of their energies say.
        alike = agree(flags, tuple(z), rows * num).reshape(rows, num)
        ratio = ratio.at[1].set(jnp.where(alike[:, :-1] & alike[:, 1:], ratio[0], ratio[1]))
        log_u = self._log_uniforms(keys, ratio)
        orders = [new_order(log_u < r, parity) for r in ratio]
        swapped = {b: jnp.stack([take(v, o) for v, o in zip(z[b], orders, strict=True)]) for b in self.blocks}
        return (z | swapped, self._swap_flags(flags, swapped, orders)), jnp.isnan(ratio).any((0, 2))

    def _swap_flags(self, flags: _Flags, swapped: Blocks, orders: list[Array]) -> _Flags:
        """_Flags of states that moved: two that come from different replicas are not one."""
        moved, alike = dict(flags), (orders[0] == orders[1])[..., None]
        for b in self.blocks:
            own = take(flags[b].reshape(*alike.shape[:2], -1), orders[0]) & alike
            moved[b] = own.reshape(flags[b].shape)
            if self.graph.families[b].support.is_discrete:
                moved[b] |= equal(_apart(swapped[b]))[:, None]
        return moved


def tempered_sweep(
    graph: FactorGraph,
    coupling: str | Sequence[Any] | None = None,
    clamped: Iterable[str] = (),
    summed: tuple[str, ...] = (),
) -> TemperedSweep:
    """The move of :class:`TemperingCoupling` and :class:`ParallelTempering`.

    :param graph: the graph of one replica.
    :param coupling: a kind for every layer, or one a layer; see :func:`ebmpp.moves.couplings.resolve`.
    :param clamped: blocks that are held.
    :param summed: free blocks that do not interact, to sum out of the swaps.
    :raises ArgumentError: for an unknown coupling.
    """
    layers = schedule(graph, (*clamped, *summed))
    kinds = resolve(coupling, layers)
    return TemperedSweep(graph, tuple(Layer(b, kind) for b, kind in zip(layers, kinds, strict=True)), summed)


def _apart(v: Array) -> Array:
    """Both chains of a block, every replica a row: ``(2, rows * num, *shape)``."""
    return v.reshape(2, -1, *v.shape[3:])
