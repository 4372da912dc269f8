# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sets of continuous sites that are integrated out as one."""

from collections.abc import Iterable

import numpy as np

from ebmpp.errors import IntractableError
from ebmpp.traced.model import ModelInfo
from ebmpp.traced.sweep.continuous import ContinuousSite, continuous_site
from ebmpp.traced.sweep.posterior import ModelDensity


def conjugate_sets(
    info: ModelInfo, sites: Iterable[ContinuousSite]
) -> list[ContinuousSite]:
    """Return sites in sets that are jointly conjugate, and do not interact."""
    plain = [site for site in sites if not site.is_truncated]
    plain.sort(key=lambda site: site.family != "Gaussian")
    sets: list[ContinuousSite] = []
    for site in plain:
        for number, other in enumerate(sets):
            joined = _joined(info, other, site)
            if joined is not None:
                sets[number] = joined
                break
        else:
            sets.append(site)
    return _independent(info, sets)


def _joined(
    info: ModelInfo, first: ContinuousSite, second: ContinuousSite
) -> ContinuousSite | None:
    """Return two sets as one, if they are jointly conjugate."""
    if first.family != second.family or first.family == "Dirichlet":
        return None
    try:
        joined = continuous_site(info, *first.names, *second.names)
    except IntractableError:
        return None
    return joined if joined.family == first.family else None


def _independent(info: ModelInfo, sets: list[ContinuousSite]) -> list[ContinuousSite]:
    """Return the first sets that do not interact."""
    names = [name for site in sets for name in site.names]
    terms = ModelDensity(info, names).terms()
    member = np.zeros(terms.sets.size, int)
    for number, site in enumerate(sets):
        for name in site.names:
            member[terms.numbers[name]] = number
    result: list[int] = []
    pairs = member[terms.edges]
    for number in range(len(sets)):
        touching = pairs[(pairs == number).any(1)]
        if not np.isin(touching, result).any():
            result.append(number)
    return [sets[number] for number in result]
