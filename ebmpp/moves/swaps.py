# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Swaps of neighbouring replicas: acceptance ratios, permutations, and ladders of equal rejection."""

from jaxtyping import Bool, Float, Int32, Shaped

from jax import Array
import jax.numpy as jnp

from ebmpp.core.rows import num_rows
from ebmpp.core.types import Eta, PerRow, Rows
from ebmpp.moves import rungs
from ebmpp.moves.ensemble import Ensemble
from ebmpp.moves.rungs import Place
from ebmpp.moves.target import Target

#: The replica whose state each replica gets.
Order = Int32[Array, "rows replicas"]
#: One number per pair of neighbours.
PerPair = Float[Array, "rows pairs"]


def take(v: Shaped[Array, "rows replicas ..."], order: Order) -> Array:
    """Permute the replicas of every row."""
    index = order.reshape(order.shape + (1,) * (v.ndim - 2))
    return jnp.take_along_axis(v, index, axis=1)


def new_order(accept: Bool[Array, "rows pairs"], parity: Array | int) -> Order:
    """Return the order in which accepted neighbours of this parity have swapped."""
    num_pairs = accept.shape[1]
    has_parity = jnp.arange(num_pairs) % 2 == parity
    swaps = (accept & has_parity).astype(jnp.int32)
    goes_up = jnp.pad(swaps, ((0, 0), (0, 1)))
    goes_down = jnp.pad(swaps, ((0, 0), (1, 0)))
    return jnp.arange(num_pairs + 1, dtype=jnp.int32) + goes_up - goes_down


def log_ratio(
    ensemble: Ensemble, x: Rows, parity: Array | int, summed: tuple[str, ...] = ()
) -> PerPair:
    """Return the log of the acceptance ratio of every pair of neighbours.

    :param parity: of the pairs that are needed. Where replicas have their own params
        the others get 0: a pair then takes the energies of two models, whereas one
        energy is enough where only the betas differ.
    :param summed: blocks that are summed out of the densities.
    """
    rest = {b: v for b, v in x.items() if b not in summed}
    if ensemble.knots is None:

        def log_density_above_reference(target: Target, x: Rows) -> PerRow:
            at = rungs.evaluate(target.graph, target.params, ensemble.reference, x, ())
            return at.model - at.reference

        gap = ensemble.map(log_density_above_reference, rest)
        return -jnp.diff(ensemble.betas) * jnp.diff(gap, axis=1)
    num_pairs = len(ensemble.betas) - 1
    partner = new_order(jnp.ones((num_rows(x), num_pairs), bool), parity)
    swapped = {b: take(v, partner) for b, v in rest.items()}

    def gain(target: Target, *ends: Rows) -> PerRow:
        return _log_density_gain(target, ensemble.reference, summed, *ends)

    gains = ensemble.map(gain, rest, swapped)
    has_parity = jnp.arange(num_pairs) % 2 == parity
    return jnp.where(has_parity, gains[:, :-1] + gains[:, 1:], 0)


def _log_density_gain(
    target: Target, reference: Eta, summed: tuple[str, ...], before: Rows, after: Rows
) -> PerRow:
    """Return by how much a rung's log density is larger at ``after``, some blocks summed out."""
    low, high = (
        Place(
            target.beta,
            rungs.evaluate(target.graph, target.params, reference, x, summed),
        )
        for x in (before, after)
    )
    gain = high.at.log_density(high.beta) - low.at.log_density(low.beta)
    return rungs.add_normalizers(gain, target.graph, reference, summed, low, high)


def equalize(betas: Array, rejection: Array) -> Array:
    """Return betas between which swaps would be rejected equally often, given the rates of neighbours.

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
