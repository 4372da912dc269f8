# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Moments of long runs: batches of draws merged in float64 on the host, and errors of the means."""

import dataclasses
from typing import Any

import numpy as np

import jax

from ebmpp.kernels.streaming import RunningMoments


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of a long run: each field is an array of the values' shape, or a tree of such arrays.

    Two estimates of the error of a mean are reported, each with the effective sample size that it implies.
    **Between chains**: from the spread of the chains' means, whatever their autocorrelation; with C chains
    its relative error is about ``1 / sqrt(2 C - 2)``, and it is nan for one chain. **By batches**: from the
    spread of the means of batches of successive draws around the overall mean. It holds where batches are
    much longer than the autocorrelation time, counts disagreement between chains as error, and is nan for
    fewer than two batches per chain. Neither detects modes that no chain has visited.

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

    @classmethod
    def transpose(cls, tree: Any) -> "Moments":
        """Turn a tree of moments into moments that are trees."""
        is_leaf = lambda x: isinstance(x, cls)
        pick = lambda name: jax.tree.map(lambda m: getattr(m, name), tree, is_leaf=is_leaf)
        return cls(*(pick(f.name) for f in dataclasses.fields(cls)))


@dataclasses.dataclass(frozen=True)
class Totals:
    """Moments of ``batches`` batches of ``length`` draws per chain; each field is a tree of arrays.

    :param mean: of each chain, with a leading axis of chains.
    :param within: squared deviations from each batch's mean, summed over batches and chains.
    :param between: squared deviations of the batches' means from each chain's mean, summed.
    """

    length: int
    batches: int
    mean: Any
    within: Any
    between: Any

    @classmethod
    def empty(cls, length: int, moments: RunningMoments) -> "Totals":
        """Return the totals of no batch.

        :param moments: whose shapes are used, with a leading axis of chains.
        """
        zeros = lambda start: jax.tree.map(lambda a: np.zeros(a.shape[start:]), moments.mean)
        return cls(length, 0, zeros(0), zeros(1), zeros(1))

    def add(self, batch: RunningMoments, draws: int) -> "Totals":
        """Merge a batch of ``draws`` draws per chain: Chan, Golub, LeVeque (1983), eq. 2.1.

        A batch shorter than ``length`` must be the last: ``batches`` does not count it.
        """
        before = self.batches * self.length
        share = draws / (before + draws)
        gap = jax.tree.map(np.subtract, batch.mean, self.mean)
        mean = jax.tree.map(lambda m, g: m + share * g, self.mean, gap)
        within = jax.tree.map(lambda w, s: w + s.sum(0), self.within, batch.squares)
        between = jax.tree.map(
            lambda b, g: b + before * share / self.length * (g * g).sum(0), self.between, gap
        )
        return Totals(self.length, self.batches + (draws == self.length), mean, within, between)

    def moments(self, open_batch: RunningMoments, draws: int) -> Any:
        """Return a tree of :class:`Moments`.

        :param open_batch: the draws after the last whole batch.
        :param draws: their number per chain.
        """
        everything = self.add(open_batch, draws) if draws else self
        number = self.batches * self.length + draws
        trees = self.mean, self.between, everything.mean, everything.within, everything.between
        return jax.tree.map(lambda *leaf: self._moments(number, *leaf), *trees)

    def _moments(
        self,
        draws: int,
        batched_mean: np.ndarray,
        batched_between: np.ndarray,
        mean: np.ndarray,
        within: np.ndarray,
        between: np.ndarray,
    ) -> Moments:
        """Moments of all draws; the error by batches is that of the whole batches among them."""
        chains, length, batches = len(mean), self.length, self.batches
        grand = mean.mean(0)
        squares = within + length * between  # around each chain's mean
        spread = ((mean - grand) ** 2).sum(0)
        variance = _divide(squares + draws * spread, draws * chains - 1)
        of_chains = _divide(spread, chains - 1)
        disagreement = batches * ((batched_mean - batched_mean.mean(0)) ** 2).sum(0)
        of_batches = _divide(batched_between + disagreement, batches * chains - 1 if batches > 1 else 0)
        inner = _divide(squares / chains, draws - 1)
        errors = of_chains / chains, length * of_batches / (draws * chains)
        with np.errstate(all="ignore"):
            ess = [variance / error for error in errors]
            r_hat = np.sqrt(((draws - 1) / draws * inner + of_chains) / inner)
            return Moments(grand, variance, *map(np.sqrt, errors), *ess, r_hat, mean)


def _divide(value: np.ndarray, by: int) -> np.ndarray:
    return value / by if by > 0 else np.full_like(value, np.nan)
