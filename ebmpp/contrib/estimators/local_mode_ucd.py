# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased contrastive divergence from local modes."""

import dataclasses
from typing import Any

from ebmpp.contrib.metropolis import metropolis_sweep
from ebmpp.estimators import UCD
from ebmpp.estimators.pairs import PairInit


@dataclasses.dataclass(frozen=True, repr=False)
class LocalModeUCD(UCD):
    """UCD-LMI: pairs that start one Gibbs sweep from a local mode and move by Metropolis proposals.

    For samples of large deep machines where no likelihood is needed. This is
    :class:`ebmpp.UCD` with ``init="local_mode"``, ``coupling=metropolis_sweep``, k =
    0, lag 1, and gradients with the layers summed out in turn. All arguments of
    :class:`ebmpp.UCD` can be changed.

    **Unbiased in name only.** A uniform proposal is hardly ever accepted at a local
    mode, and two chains that both reject stay where they are, so they meet at once. The
    corrections that would undo the bias of the starts are so rare that no run sees one:
    at 12 units per side one in 10^6 to 10^7 pairs, at 784-784-784 with orthogonal
    weights one in 10^59. What remains is a gradient at one Gibbs sweep from local
    modes. It raises the energy of the modes that a search finds, and is not the
    likelihood's gradient. The history shows it: ``acceptance`` is the share of accepted
    proposals, ``corrected`` the share of pairs with tau > 1, which made a correction.

    **References**

    1. Taniguchi, Suzuki, Iwasawa, Matsuo (2023), *End-to-end training of deep Boltzmann
       machines by unbiased contrastive divergence with local mode initialization*,
       Algorithms 1 to 5 and eq. 27.

    **Example**

    >>> from ebmpp.contrib import LocalModeUCD
    >>> estimator = LocalModeUCD(num_pairs=100)
    >>> estimator.init, estimator.marginalize
    ('local_mode', 'layers')
    """

    k: int | None = 0
    lag: int | None = 1
    coupling: Any = metropolis_sweep
    # Hardly any pair needs a slot, and each halving of 64 slots would compile for a
    # second or two.
    num_slots: int | None = 4
    init: PairInit = "local_mode"
    marginalize: str | tuple[str, ...] = "layers"
