# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What sums of draws add up to: batch after batch, in 64 bits on the host, and what follows from it."""

import dataclasses
from typing import Any

import numpy as np

import jax

from ebmpp.kernels.long_runs.chains import Sums


@dataclasses.dataclass
class Totals:
    """Of all whole batches of a run, a leaf each.

    :param length: draws of a batch.
    :param batches: how many are added up.
    :param mean: of their draws, with a leading axis of chains.
    :param within: squares around the mean of each batch, summed over batches and chains.
    :param between: squares of the batches' means around each chain's mean, summed likewise.
    :param products: as ``within``, products of all pairs; or None.
    :param means: as ``between``, products of all pairs; or None.
    """

    length: int
    batches: int
    mean: list[np.ndarray]
    within: list[np.ndarray]
    between: list[np.ndarray]
    products: np.ndarray | None
    means: np.ndarray | None

    @classmethod
    def empty(cls, length: int, sums: Sums) -> "Totals":
        """Of no batch.

        :param sums: whose shapes they have.
        """
        zeros = lambda start: [np.zeros(a.shape[start:]) for a in jax.tree.leaves(sums.pivot)]
        pair = [None, None]
        if sums.products is not None:
            pair = [np.zeros(sums.products.shape[-2:]) for _ in range(2)]
        return cls(length, 0, zeros(0), zeros(1), zeros(1), *pair)

    def arrays(self) -> list[np.ndarray]:
        """To be kept."""
        made = [*self.mean, *self.within, *self.between]
        return made if self.products is None or self.means is None else [*made, self.products, self.means]

    def load(self, batches: int, arrays: list[np.ndarray]) -> None:
        """As they were kept."""
        size, self.batches = len(self.mean), batches
        own = [np.array(a) for a in arrays]  # to write into
        self.mean, self.within, self.between = (own[i * size : (i + 1) * size] for i in range(3))
        if self.products is not None:
            self.products, self.means = own[3 * size :]

    def add(self, sums: Sums) -> None:
        """One batch."""
        self._add(sums, self.length)
        self.batches += 1

    def _add(self, sums: Sums, num: int) -> None:
        """``num`` draws after the whole batches: Chan, Golub, LeVeque (1983), eq. 2.1."""
        before = self.batches * self.length
        share = num / (before + num)
        made = zip(*(map(np.asarray, jax.tree.leaves(t)) for t in sums[:3]), strict=True)
        gaps = []
        for i, (pivot, first, second) in enumerate(
            made
        ):  # in place: these arrays are large, and the run waits
            gap = np.divide(first, num, dtype=float)
            part = np.multiply(gap, first)
            gap += pivot
            gap -= self.mean[i]
            gaps.append(gap)
            self.within[i] += _over_chains(second, self.within[i].ndim) - part.sum(0)
            np.multiply(gap, share, out=part)
            self.mean[i] += part
            part *= gap
            self.between[i] += before / self.length * part.sum(0)
        if self.products is not None and self.means is not None and sums.products is not None:
            first = np.asarray(sums.first["covariance"]).astype(float)
            gap = jax.tree.unflatten(jax.tree.structure(sums.pivot), gaps)["covariance"]
            self.products = self.products + _over_chains(sums.products, 2) - first.T @ first / num
            self.means = self.means + before / self.length * share * gap.T @ gap

    def moments(self, sums: Sums, num: int) -> tuple[Any, np.ndarray | None]:
        """Of all draws: a :class:`Moments` a leaf of the values, and the covariance matrix.

        :param sums: of the batch that is open.
        :param num: its draws.
        """
        copied = {name: [a.copy() for a in getattr(self, name)] for name in ("mean", "within", "between")}
        made = dataclasses.replace(self, **copied)
        if num:
            made._add(sums, num)
        draws = self.batches * self.length + num
        parts = zip(self.mean, self.between, made.mean, made.within, made.between, strict=True)
        each = [_moments(draws, self.batches, self.length, *part) for part in parts]
        tree = jax.tree.unflatten(jax.tree.structure(sums.pivot), each)
        if made.products is None or made.means is None:
            return tree, None
        chain_means = jax.tree.unflatten(jax.tree.structure(sums.pivot), made.mean)["covariance"]
        gap = chain_means - chain_means.mean(0)
        total = made.products + self.length * made.means + draws * gap.T @ gap
        return tree, _divide(total, draws * len(gap) - 1)


@dataclasses.dataclass(frozen=True)
class Moments:
    """What a long run tells of values: each field an array of their shape, or a tree of such.

    There are two estimates of the error of a mean, and an effective sample size by each. **Between chains**:
    the spread of the chains' means, whatever their autocorrelation, but of as many numbers as there are
    chains (of C chains it is off by a share of ``1 / sqrt(2 C - 2)``, and nan for one). **By batches**: the
    spread of the means of batches of successive draws around the mean of all, which holds where batches are
    much longer than the autocorrelation time, and counts chains that disagree as error, too; nan for fewer
    than two batches a chain. Neither knows of modes that no chain has seen.

    :param mean: of all draws of all chains.
    :param variance: likewise, with one less in the denominator.
    :param mcse_chains: standard error of the mean, between chains.
    :param mcse_batches: standard error of the mean, by batches (replicated batch means).
    :param ess_chains: independent draws that have the standard error between chains.
    :param ess_batches: independent draws that have the standard error by batches.
    :param r_hat: Gelman and Rubin's, of whole chains as they are (neither split nor ranked, which takes the
        draws themselves); nan for one chain, and for values that never moved.
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
    def of(cls, tree: Any) -> "Moments":
        """A tree of moments as moments that are trees."""
        is_one = lambda x: isinstance(x, cls)
        pick = lambda name: jax.tree.map(lambda m: getattr(m, name), tree, is_leaf=is_one)
        return cls(*(pick(f.name) for f in dataclasses.fields(cls)))


def _moments(
    draws: int,
    batches: int,
    length: int,
    whole_mean: np.ndarray,
    whole_between: np.ndarray,
    mean: np.ndarray,
    within: np.ndarray,
    between: np.ndarray,
) -> Moments:
    """Of one leaf: of all draws, and errors by the whole batches among them."""
    chains, grand = len(mean), mean.mean(0)
    squares = within + length * between  # around the means of chains
    spread = ((mean - grand) ** 2).sum(0)
    variance = _divide(squares + draws * spread, draws * chains - 1)
    by_chains = _divide(spread, chains - 1)
    apart = batches * ((whole_mean - whole_mean.mean(0)) ** 2).sum(0)
    enough = batches * chains - 1 if batches > 1 else 0
    by_batches = length * _divide(whole_between + apart, enough)
    inner = _divide(squares / chains, draws - 1)
    errors = by_chains / chains, by_batches / (draws * chains)
    with np.errstate(all="ignore"):
        ess = [variance / error for error in errors]
        r_hat = np.sqrt(((draws - 1) / draws * inner + by_chains) / inner)
        return Moments(grand, variance, *map(np.sqrt, errors), *ess, r_hat, mean)


def _divide(value: np.ndarray, by: int) -> np.ndarray:
    return value / by if by > 0 else np.full_like(value, np.nan)


def _over_chains(a: Any, axes: int) -> np.ndarray:
    """Summed over chains where there is a value a chain; ``axes`` is how many a value has."""
    made = np.asarray(a).astype(float)
    return made if made.ndim == axes else made.sum(0)
