# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The window and limits of an estimate, and their choice from the meeting times of a pilot run."""

from typing import NamedTuple

from jaxtyping import Integer
import numpy as np

import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.coupling.slots import Window

_QUANTILE = 0.95  # of a pilot's meeting times
_NEVER = 2**30  # first sweep that counts in a pilot, which sums nothing


class Request(NamedTuple):
    """The window and limits of an estimate."""

    k: int
    m: int
    lag: int
    max_sweeps: int | None
    unmet: str

    def window(self) -> Window:
        """Return the window of the engine."""
        numbers = (self.k, self.m, self.lag, self.max_sweeps or 0)
        return Window(*(jnp.asarray(n, jnp.int32) for n in numbers))

    def pilot(self) -> Window:
        """Return the window of a pilot: no state counts, and pairs stop when they have met."""
        return self._replace(k=_NEVER).window()

    def after(self, tau: Integer[np.ndarray, "pairs"]) -> "Request":
        """Return k = lag = the 0.95 quantile of a pilot's meeting times, and m = 2 lag.

        The lag leaves the longest of these times until ``max_sweeps``.

        :param tau: meeting times at the lag of this request; -1 if unmet.
        """
        times = np.where(tau < 0, self.max_sweeps or tau.max(), tau) - self.lag
        lag = int(np.quantile(times, _QUANTILE, method="inverted_cdf"))
        if self.max_sweeps is not None:
            lag = min(lag, self.max_sweeps - int(times.max()) - 1)
        lag = max(1, lag)
        return self._replace(k=lag, m=2 * lag, lag=lag)


def check_request(
    who: str, k: int | None, m: int | None, lag: int | None, max_sweeps: int | None, unmet: str
) -> Request:
    """Check the window and limits; see :func:`~ebmpp.unbiased_expectation`.

    :param k: None for 1, as for ``lag``.
    """
    k = 1 if k is None else checks.count(f"{who}: k", k, least=0)
    m = k if m is None else checks.count(f"{who}: m", m, least=k)
    lag = 1 if lag is None else checks.count(f"{who}: lag", lag)
    limit = checks.optional_count(f"{who}: max_sweeps", max_sweeps, lag + 1)
    return Request(k, m, lag, limit, checks.choice(f"{who}: unmet", unmet, ("raise", "drop")))
