# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Ensembles: replicas of a target at rungs from hot to cold, and swaps of their states."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import TypeVar

from jaxtyping import Bool, Float, Int32, PyTree, Shaped, UInt32

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Eta,
    Keys,
    Params,
    Rows,
    State,
    expand,
    merge_axes,
    num_rows,
    random,
)
from ebmpp.moves.move import Move, draw_sweep
from ebmpp.moves.rungs import (
    Place,
    Tempering,
    add_normalizers,
    evaluate,
    reference_of,
)
from ebmpp.moves.target import Target

#: The replica whose state each replica gets.
Order = Int32[Array, "rows replicas"]
#: One number per pair of neighbours.
PerPair = Float[Array, "rows pairs"]
T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ensemble(Target):
    """Target of replicas, ordered from hot (the smallest beta) to cold (the model).

    A state has an axis of replicas after that of the rows: ``(rows, replicas, *shape)``
    for each block, clamped ones included. Clamped values and masks belong to one
    replica.

    :param betas: inverse temperatures of the replicas.
    :param reference: natural parameters of the independent units at beta = 0.
    :param knots: params of each replica, with a leading axis of replicas; None where
        all have the model's.
    """

    betas: Float[Array, "replicas"]
    reference: Eta
    knots: Params | None = None

    @classmethod
    def at_betas(cls, target: Target, betas: Array) -> "Ensemble":
        """Return replicas whose energies have the interactions multiplied by ``betas``."""
        reference = reference_of(target.graph, target.params)
        return cls(**vars(target), betas=jnp.asarray(betas), reference=reference)

    @classmethod
    def along(
        cls, target: Target, betas: Array, params: Params, reference: Eta
    ) -> "Ensemble":
        """Return replicas at the knots of a path, and one at the target, its end."""

        def append(a, b):
            return jnp.concatenate([a, jnp.asarray(b, a.dtype)[None]])

        return cls(
            **vars(target),
            betas=append(betas, 1),
            reference=reference,
            knots=jax.tree.map(append, params, target.params),
        )

    @property
    def model(self) -> Target:
        return Target(self.graph, self.params, self.fixed)

    def shape(self, block: str) -> tuple[int, ...]:
        return (len(self.betas), *super().shape(block))

    def coldest(self, x: Rows) -> Rows:
        return {b: v[:, -1] for b, v in x.items()}

    def to_rows(self, z: State) -> Blocks:
        rows = {b: v.reshape(self.num_rows, *self.shape(b)) for b, v in z.items()}
        return self._over_replicas(Target.to_rows, rows)

    def map(self, fn: Callable[..., T], *rows: PyTree) -> T:
        """Return ``fn(target, *rows)``, whose rows are the replicas of all rows.

        Where replicas share their params, ``fn`` gets the replicas of all rows as rows.
        """
        if self.knots is not None:
            return self._over_replicas(fn, *rows)
        num = len(self.betas)

        def repeat(v):
            return v if len(v) == 1 else jnp.repeat(v, num, axis=0)

        def split(v):
            return v.reshape(-1, num, *v.shape[1:])

        count = len(jax.tree.leaves(rows)[0])
        target = Target(
            self.graph,
            self.params,
            jax.tree.map(repeat, self.fixed),
            tempering=Tempering(jnp.tile(self.betas, count), self.reference),
        )
        return jax.tree.map(split, fn(target, *merge_axes(rows)))

    def _over_replicas(self, fn: Callable[..., T], *rows: PyTree) -> T:
        """Apply ``fn(target, *rows)`` replica by replica, over the second axis of all arrays."""

        def at_replica(beta, params, *rows):
            tempering = Tempering(beta, self.reference)
            target = Target(self.graph, params, self.fixed, tempering=tempering)
            return fn(target, *rows)

        is_shared = self.knots is None
        params = self.params if is_shared else self.knots
        axes = (0, None if is_shared else 0, *(1,) * len(rows))
        return jax.vmap(at_replica, axes, 1)(self.betas, params, *rows)

    def replica_keys(self, keys: Keys) -> UInt32[Array, "rows replicas 2"]:
        """Return a key for each replica of each row."""
        return random.fold_in(keys[:, None], jnp.arange(len(self.betas)))

    def starts(self, draw: Callable[[Target, Keys], Blocks], keys: Keys) -> Blocks:
        return self._over_replicas(draw, self.replica_keys(keys))

    def sweep(self, x: Rows, moves: Sequence[Move], keys: Keys) -> Blocks:
        """Make one sweep of every replica by these moves."""

        def sweep_once(target, x, keys):
            return draw_sweep(target, x, moves, keys)[0]

        return self.map(sweep_once, x, self.replica_keys(keys))


def permute(v: Shaped[Array, "rows replicas ..."], order: Order) -> Array:
    """Permute the replicas of every row."""
    return jnp.take_along_axis(v, expand(order, v), axis=1)


def new_order(accept: Bool[Array, "rows pairs"], parity: Array | int) -> Order:
    """Return the order in which accepted neighbours of this parity have swapped."""
    num_pairs = accept.shape[1]
    has_parity = jnp.arange(num_pairs)[None] % 2 == parity
    swaps = (accept & has_parity).astype(jnp.int32)
    goes_up = jnp.pad(swaps, ((0, 0), (0, 1)))
    goes_down = jnp.pad(swaps, ((0, 0), (1, 0)))
    return jnp.arange(num_pairs + 1, dtype=jnp.int32)[None] + goes_up - goes_down


def log_ratio(
    ensemble: Ensemble, x: Rows, parity: Array | int, summed: tuple[str, ...] = ()
) -> PerPair:
    """Return the log of the acceptance ratio of every pair of neighbours.

    :param parity: of the pairs that are needed. Where replicas have their own params
        the others get 0: a pair then takes the energies of two models, whereas one
        energy is enough where only the betas differ.
    :param summed: blocks that are summed out of the densities.
    """
    reference = ensemble.reference
    rest = {b: v for b, v in x.items() if b not in summed}
    if ensemble.knots is None:

        def log_density_above_reference(target, x):
            at = evaluate(target.graph, target.params, reference, x, ())
            return at.model - at.reference

        gap = ensemble.map(log_density_above_reference, rest)
        return -jnp.diff(ensemble.betas)[None] * jnp.diff(gap, axis=1)
    num_pairs = len(ensemble.betas) - 1
    partner = new_order(jnp.ones((num_rows(x), num_pairs), bool), parity)
    swapped = {b: permute(v, partner) for b, v in rest.items()}

    def log_density_gain(target, *ends):
        """Return by how much a rung's log density is larger at the second state."""
        low, high = (
            Place(
                target.beta,
                evaluate(target.graph, target.params, reference, x, summed),
            )
            for x in ends
        )
        gain = high.at.log_density(high.beta) - low.at.log_density(low.beta)
        return add_normalizers(gain, target.graph, reference, summed, low, high)

    gains = ensemble.map(log_density_gain, rest, swapped)
    has_parity = jnp.arange(num_pairs)[None] % 2 == parity
    return jnp.where(has_parity, gains[:, :-1] + gains[:, 1:], 0)


def equalize(betas: Array, rejection: Array) -> Array:
    """Return betas between which swaps are rejected equally often, from neighbours' rates.

    The rejection rates, summed from hot to cold, estimate the communication barrier as
    a function of beta; the new betas divide it into equal parts: Syed, Bouchard-Cote,
    Deligiannidis, Doucet (2022), *Non-reversible parallel tempering*, section 5.

    >>> equalize(jnp.array([0, 0.5, 1]), jnp.array([0.1, 0.3])).round(2).tolist()
    [0.0, 0.67, 1.0]
    """
    # neighbours whose swaps are never rejected must not coincide
    barrier = jnp.cumsum(jnp.concatenate([jnp.zeros(1), rejection + 1e-4]))
    levels = jnp.linspace(0.0, 1.0, len(betas)) * barrier[-1]
    return jnp.interp(levels, barrier, betas).at[0].set(betas[0]).at[-1].set(betas[-1])
