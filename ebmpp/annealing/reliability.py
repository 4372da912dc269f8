# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""One rule for estimates of log Z that cannot be trusted, shared by annealing, particle systems and training.

An estimate is doubtful if few particles are effective, if its independent parts (particles or islands) differ
so much that the error of a log by the delta method fails, if sweeps leave particles near their old states, or
if forward and reverse runs contradict each other.
"""

import warnings

import numpy as np
from scipy.special import stdtrit

MAX_ERROR = 0.3
"""Standard error of log Z (nats) above which it is doubtful; ten islands then differ by about 1 each."""
MIN_SHARE = 0.25
"""Share of effective particles below which a weighted mean is doubtful."""
MAX_CORRELATION, ENOUGH_SWEEPS = 0.6, 20
"""Correlation of log-densities before and after the sweeps of a rung above which modes are found late, and a
number of sweeps that accepts it, as particles that are in all modes need not change them."""
_MAX_Z = 4.0  # standard errors by which an upper estimate may be below a lower one


def t_quantile(level: float, count: int) -> float:
    """Return the standard errors on either side of a mean of ``count`` values that hold its expectation.

    >>> round(t_quantile(0.95, 10), 3), round(t_quantile(0.95, 1000), 3)
    (2.262, 1.962)
    """
    return float(stdtrit(count - 1, 0.5 + level / 2))


def doubt(
    standard_error: float,
    effective: float = np.inf,
    count: int = 0,
    correlation: float = 0.0,
    sweeps: int = 1,
) -> str | None:
    """Return why an estimate of log Z is doubtful, or None.

    :param effective: effective sample size of ``count`` particles.
    :param correlation: of the particles' log-densities before and after the ``sweeps`` of a rung.
    """
    if effective < max(2.0, MIN_SHARE * count):
        return (
            f"the effective sample size is {effective:.1f} of {count} particles (standard error "
            f"{standard_error:.2g}): too small for the standard error to be trusted."
        )
    if standard_error > MAX_ERROR:
        return f"the standard error of log Z is {standard_error:.2g}, above {MAX_ERROR}: not to be trusted."
    if correlation > MAX_CORRELATION and sweeps < ENOUGH_SWEEPS:
        return (
            f"{sweeps} sweeps per rung leave log-densities correlated by {correlation:.2f}: modes are found "
            "late, and log Z and its stated error may be too small."
        )
    return None


def contradiction(gap: float, standard_error: float) -> str | None:
    """Return that an upper estimate of log Z is below a lower one beyond their errors, or None."""
    if gap >= -_MAX_Z * standard_error:
        return None
    return (
        f"the reverse estimate of log Z is {-gap:.3g} below the forward one, beyond their errors "
        f"({standard_error:.2g}): the draws that it starts from miss a part of the model."
    )


def warn(advice: str, *doubts: str | None) -> None:
    """Warn once of the doubts of a public function, if there are any, with advice in the imperative."""
    messages = dict.fromkeys(message for message in doubts if message is not None)
    if messages:
        warnings.warn(f"{' '.join(messages)} {advice}", stacklevel=3)
