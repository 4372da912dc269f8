# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Moments of long runs: batches of draws merged in float64 on the host, and errors of the means."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from ebmpp.kernels.streaming import RunningMoments


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of a long run: each field is an array of the values' shape, or a tree of such arrays.

    There are two estimates of the error of a mean. **Between chains**: from the spread of the chains' means,
    whatever their autocorrelation; with C chains its relative error is about ``1 / sqrt(2 C - 2)``, and it is
    nan for one chain. **By batches**: from the spread of the means of batches of successive draws around the
    overall mean. It holds where batches are much longer than the autocorrelation time, and is nan for fewer
    than two batches per chain. Neither detects modes that no chain has visited.

    :param mean: over all draws of all chains.
    :param variance: over all draws of all chains, unbiased for independent draws.
    :param mcse_chains: standard error of the mean, between chains.
    :param mcse_batches: standard error of the mean, by batches (replicated batch means).
    :param ess_chains: effective sample size between chains.
    :param ess_batches: effective sample size by batches.
    :param r_hat: Gelman and Rubin's, of whole chains (neither split nor ranked, which takes the draws
        themselves); nan for one chain, and for values that never changed.
    :param chain_means: with a leading axis of chains.

    **References**

    1. Gelman, Rubin (1992), *Inference from iterative simulation using multiple sequences*.
    2. Argon, Andradottir (2006), *Replicated batch means for steady-state simulations*.
    3. Gupta, Vats (2020), *Estimating Monte Carlo variance from multiple Markov chains*.
    """

    mean: Any
    variance: Any
    mcse_chains: Any
    mcse_batches: Any
    ess_chains: Any
    ess_batches: Any
    r_hat: Any
    chain_means: Any

    def map(self, fn: Callable[[Any], Any]) -> "Moments":
        """Apply a function to each field."""
        return Moments(*map(fn, vars(self).values()))


class Totals(NamedTuple):
    """Moments of ``batches`` batches of ``length`` draws per chain.

    - **mean** - of each chain, ``(chains, numbers)``.
    - **within** - squared deviations from each batch's mean, summed over batches and chains, ``(numbers,)``.
    - **between** - squared deviations of the batches' means from each chain's mean, summed, ``(numbers,)``.
    """

    length: int
    batches: int
    mean: np.ndarray
    within: np.ndarray
    between: np.ndarray

    @classmethod
    def empty(cls, length: int, chains: int, numbers: int) -> "Totals":
        """Return the totals of no batch."""
        return cls(length, 0, np.zeros((chains, numbers)), np.zeros(numbers), np.zeros(numbers))

    def add(self, batch: RunningMoments, draws: int) -> "Totals":
        """Merge a batch of ``draws`` draws per chain: Chan, Golub, LeVeque (1983), eq. 2.1.

        A batch shorter than ``length`` must be the last: ``batches`` does not count it.
        """
        before = self.batches * self.length
        share = draws / (before + draws)
        gap = batch.mean - self.mean
        within = self.within + batch.squares.sum(0)
        between = self.between + before * share / self.length * (gap * gap).sum(0)
        batches = self.batches + (draws == self.length)
        return Totals(self.length, batches, self.mean + share * gap, within, between)

    def moments(self, open_batch: RunningMoments, open_draws: int) -> Moments:
        """Return moments of all draws, of which the last ``open_draws`` of each chain make no whole batch."""
        _, _, mean, within, between = self.add(open_batch, open_draws) if open_draws else self
        chains, length, batches = len(mean), self.length, self.batches
        draws, grand = batches * length + open_draws, mean.mean(0)
        squares = within + length * between  # around each chain's mean
        spread = ((mean - grand) ** 2).sum(0)
        variance = _divide(squares + draws * spread, draws * chains - 1)
        of_chains = _divide(spread, chains - 1)
        disagreement = batches * ((self.mean - self.mean.mean(0)) ** 2).sum(0)
        of_batches = _divide(self.between + disagreement, batches * chains - 1 if batches > 1 else 0)
        inner = _divide(squares / chains, draws - 1)
        errors = of_chains / chains, length * of_batches / (draws * chains)
        with np.errstate(all="ignore"):
            ess = [variance / error for error in errors]
            r_hat = np.sqrt(((draws - 1) / draws * inner + of_chains) / inner)
            return Moments(grand, variance, *map(np.sqrt, errors), *ess, r_hat, mean)


def _divide(value: np.ndarray, by: int) -> np.ndarray:
    return value / by if by > 0 else np.full_like(value, np.nan)
