# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Detection of chains that stand still, and words for the reader of their draws."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar
import warnings

from jaxtyping import Shaped
import numpy as np

T = TypeVar("T")

#: Draws of a run from which on its blocks are looked at: a coin shows one side with
#: probability 2e-6.
FEWEST = 20
# probability that a chain stands still although it samples what the others sample
_CHANCE = 1e-5
# draws from which on a chain that moved only in their first half stands still
_HALVED = 50
# states at which chains stand still that are compared with the other chains
_MAX_STATES = 10

_ADVICE = (
    "Try tempering (ParallelTempering, or tempering= of a GibbsBlock), a joint draw of "
    "the units that hold each other, or another block"
)
_WORDS = {
    "apart": f"chains are stuck at different values. {_ADVICE}",
    "beside": f"some chains stand still while others move, so they are stuck. {_ADVICE}",
    "agree": "all chains agree: the unit is nearly certain, or all chains are stuck at "
    "one place. Start several chains from overdispersed states to distinguish "
    "these",
}


class Stillness(NamedTuple):
    """Chains of one value, or of one block, that stand still.

    :param kind: "apart": all stand still, at different values; "beside": some do, and
        the others show that this is not chance; "agree": all are constant at one value;
        "": otherwise.
    :param chains: number of chains that stand still.
    """

    kind: str
    chains: int


def stillness(draws: Shaped[np.ndarray, "chains draws units"]) -> Stillness:
    """Return how many chains stand still, and whether this can be chance.

    A chain stands still if it is constant, or from 50 draws on if the second half of
    its draws is. Let r be the share of their draws at its state after which the other
    chains leave it: a sound chain of n such draws stays there with probability
    :math:`(1 - r)^{n-1}`, and ``beside`` takes less than 1e-5.

    **Example**

    >>> coin = np.random.default_rng(0).integers(0, 2, (3, 100))
    >>> stillness(np.vstack([coin, np.ones((1, 100))])[..., None])
    Stillness(kind='beside', chains=1)
    """
    count = draws.shape[1]
    tail = draws[:, count // 2 if count >= _HALVED else 0 :]
    still = (tail[:, 0] == tail[:, -1]).all(-1)
    still[still] = [(tail[i] == tail[i, -1]).all() for i in np.flatnonzero(still)]
    states = np.unique(draws[still, -1], axis=0) if still.any() else []
    length = tail.shape[1]
    kind = ""
    if still.all():
        if len(states) > 1:
            kind = "apart"
        elif (draws == states[0]).all():
            kind = "agree"
    elif len(states) > 1 and length >= FEWEST:
        kind = "beside"
    else:
        rates = (_staying_rate(draws[~still], state) for state in states[:_MAX_STATES])
        if any(rate ** (length - 1) < _CHANCE for rate in rates):
            kind = "beside"
    return Stillness(kind, int(still.sum()))


def _staying_rate(
    draws: Shaped[np.ndarray, "chains draws units"], state: Shaped[np.ndarray, "units"]
) -> float:
    """Return the share of draws at a state after which the chains stay there."""
    is_there = (draws == state).all(-1)
    before = is_there[:, :-1]
    visits = before.sum()
    stays = (before & is_there[:, 1:]).sum()
    return stays / visits if visits else 0.0


def warn_still(kinds: Mapping[T, str], noun: str, stacklevel: int) -> None:
    """Warn of the values or blocks whose kind of stillness is not "", kind by kind."""
    for kind, words in _WORDS.items():
        names = [str(name) for name, k in kinds.items() if k == kind]
        if names:
            listed = ", ".join(names[:3])
            if len(names) > 3:
                listed += ", ..."
            warnings.warn(
                f"{len(names)} of {len(kinds)} {noun} have no effective sample size "
                f"({listed}): {words}",
                stacklevel=stacklevel + 1,
            )
