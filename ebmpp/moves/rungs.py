# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Rungs: distributions between a reference of independent units and a model.

At the inverse temperature :math:`\beta` the energy is
:math:`(1 - \beta) E_0 + \beta E`, where E_0 is the energy of the reference. Natural
parameters are affine in :math:`\beta` as well:

.. math::

    \eta_\beta = (1 - \beta) \eta_0 + \beta \eta.

A layer at a rung is therefore drawn like one of the model. Wherever both ends
normalise, so does everything between them (Hoelder's inequality).
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Eta,
    Natural,
    Params,
    PerRow,
    Rows,
    Scalar,
    expand,
    full_precision,
)
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.factors.lateral import Split


def between(eta0: Natural, eta: Natural, beta: Array | float) -> Natural:
    """Return natural parameters at ``beta``, given rows ``eta`` of the model."""
    eta0 = lax.broadcast_to_rank(eta0, eta.ndim)
    return (1 - beta) * eta0 + beta * eta  # exact at both ends


class Tempering(NamedTuple):
    """Inverse temperature of a rung, or of each row, and the reference."""

    beta: Scalar | PerRow
    """Rows that are a multiple of these, such as both chains of pairs, repeat them."""
    reference: Eta | None = None
    """Natural parameters of the reference, ``statistic_shape`` each; None where its energy is 0."""

    def _beta_of(self, eta: Natural) -> Array:
        """Return beta in a shape that broadcasts against rows of natural parameters."""
        if jnp.ndim(self.beta) == 0:
            return self.beta
        return expand(jnp.tile(self.beta, len(eta) // len(self.beta)), eta)

    def temper(
        self,
        block: str,
        eta: Natural,
        split: Split | None = None,
        part: Array | int = 0,
    ) -> Natural:
        """Return natural parameters of rows at the rung, given those under the model.

        :param split: of a block whose units interact, if ``eta`` is of a part.
        """
        if self.reference is None:
            return self._beta_of(eta) * eta
        eta0 = self.reference[block]
        if split is not None:
            units = eta0.reshape(split.family.size, *split.family.stat_shape)
            eta0 = split.take(units, part)
        return between(eta0, eta, self._beta_of(eta))


def reference_of(graph: FactorGraph, params: Params) -> Eta:
    """Return the natural parameters of units under the factors without interactions."""
    separate = [f for f in graph.factors if not f.interacts]
    return energy.natural(graph, params, {}, tuple(graph.families), separate)


class Evaluation(NamedTuple):
    """Log densities of a model and of the reference at rows, before blocks are summed out."""

    reference: PerRow
    """<eta_0, t> of the kept blocks."""
    model: PerRow
    """-E at zero statistics of the summed blocks."""
    eta: Eta
    """Natural parameters of the summed blocks, ``(rows, *shape, *stat_shape)`` each."""

    def log_density(self, beta: Scalar | float) -> PerRow:
        """Return the log density at a rung, at zero statistics of the summed blocks."""
        return self.reference + beta * (self.model - self.reference)


@full_precision
def evaluate(
    graph: FactorGraph, params: Params, reference: Eta, x: Rows, summed: Iterable[str]
) -> Evaluation:
    """Evaluate a model at rows of the blocks that are not ``summed`` out."""
    t = graph.statistics(dict(x))

    def units(a):
        return a.reshape(len(a), -1)

    products = (units(t[b]) @ reference[b].ravel() for b in t if b in reference)
    model, eta = jax.vmap(lambda t: energy.affine(graph, params, t, summed))(t)
    return Evaluation(jnp.asarray(sum(products)), model, eta)


class Place(NamedTuple):
    """Rows at a rung: its inverse temperature, and the evaluation of its model."""

    beta: Scalar | float
    at: Evaluation


def add_normalizers(
    gain: PerRow,
    graph: FactorGraph,
    reference: Eta,
    summed: Iterable[str],
    low: Place,
    high: Place,
) -> PerRow:
    """Add the increase of the log-normalisers of the summed blocks from ``low`` to ``high``."""
    for b in summed:
        ends = (between(reference[b], p.at.eta[b], p.beta) for p in (low, high))
        units = graph.families[b].log_normalizer_difference(*ends)
        gain = gain + units.reshape(len(units), -1).sum(-1)
    return gain
