# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Contrastive divergence, plain and persistent: a negative phase of fixed length, hence biased."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jax import Array, lax

from ebmpp import bits
from ebmpp.errors import IntractableError
from ebmpp.estimators.base import (
    Estimate,
    Params,
    Rows,
    row_pairs,
    sample_latents,
    tractable_posterior,
    two_phases,
)
from ebmpp.sweeps import initial_rows, schedule, sweep_rows

if TYPE_CHECKING:
    from ebmpp.graph import FactorGraph


def _sweeps(graph: "FactorGraph", params: Params, x: Rows, count: int, pair: Array) -> Rows:
    rows = len(next(iter(x.values())))

    def one(i: Array, x: Rows) -> Rows:
        return sweep_rows(graph, params, x, schedule(graph), row_pairs(bits.fold_in(pair, i), rows))

    # One sweep is not worth a loop: without it XLA drops the last latent draw, which nothing reads.
    return one(0, x) if count == 1 else lax.fori_loop(0, count, one, x)


def _check(graph: "FactorGraph", name: str) -> None:
    if not tractable_posterior(graph):
        a, b = graph.interacting(graph.latent)[0]
        raise IntractableError(
            f"{name} needs an exact positive phase, and latent blocks {a!r} and {b!r} interact given the "
            "visible ones; UCD() runs a second set of coupled chains on the posterior"
        )


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a positive int, not {value!r}")


@dataclasses.dataclass(frozen=True)
class CD:
    """CD-k: chains of k sweeps from the data rows. Biased, and the more so the slower the chain mixes.

    :param k: sweeps, at least 1.
    :raises ValueError: for another k.

    **References**

    1. Hinton (2002); Qiu et al. (2020), eq. 3.
    """

    k: int = 1

    def __post_init__(self) -> None:
        _positive("k", self.k)

    def init(self, graph: "FactorGraph", params: Params, data: Rows, batch: int, pair: Array) -> tuple:
        """Nothing is carried."""
        _check(graph, "CD")
        return ()

    def estimate(
        self, graph: "FactorGraph", params: Params, state: tuple, batch: Rows, pair: Array
    ) -> Estimate:
        """Data minus their k-sweep reconstructions."""
        start = sample_latents(graph, params, batch, bits.fold_in(pair, 0))
        model = _sweeps(graph, params, start, self.k, bits.fold_in(pair, 1))
        return Estimate(two_phases(graph, params, batch, model), state, {})


@dataclasses.dataclass(frozen=True)
class PCD:
    """Persistent CD: chains that go on from step to step while the params move. Biased likewise.

    :param k: sweeps a step, at least 1.
    :param num_chains: persistent chains.
    :raises ValueError: for a k or num_chains that is not a positive int.

    **References**

    1. Tieleman (2008), *Training restricted Boltzmann machines using approximations to the likelihood
       gradient*.
    """

    k: int = 1
    num_chains: int = 1000

    def __post_init__(self) -> None:
        _positive("k", self.k)
        _positive("num_chains", self.num_chains)

    def init(self, graph: "FactorGraph", params: Params, data: Rows, batch: int, pair: Array) -> Rows:
        """Chains at initial draws of every block."""
        _check(graph, "PCD")
        return initial_rows(graph, graph.families, row_pairs(pair, self.num_chains))

    def estimate(
        self,
        graph: "FactorGraph",
        params: Params,
        state: Any,
        batch: Rows,
        pair: Array,
    ) -> Estimate:
        """Data minus the chains, k sweeps on."""
        model = _sweeps(graph, params, state, self.k, pair)
        return Estimate(two_phases(graph, params, batch, model), model, {})
