# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a training run."""

from collections.abc import Callable
import dataclasses
import math
from typing import TYPE_CHECKING

from jaxtyping import PyTree

from ebmpp.core import Params, checks

if TYPE_CHECKING:
    import xarray as xr

#: By mode, the sign of values of which the largest is the best.
SIGNS = {"max": 1, "min": -1}


@dataclasses.dataclass(frozen=True)
class Progress:
    """State of a run, for a callback of :func:`ebmpp.fit`, before ``step`` is done.

    Callbacks cannot change the run: dicts are copies, and arrays are read-only.

    :param step: number of steps done.
    :param params: params after these steps, as is ``estimator_state``.
    :param history: the history so far, as in :class:`ebmpp.FitResult`, including the
        monitors' values at ``step``.
    """

    step: int
    params: Params
    estimator_state: PyTree
    history: "xr.Dataset"


Callback = Callable[[Progress], bool | None]


@dataclasses.dataclass(frozen=True)
class EarlyStop:
    """Callback that stops a run whose monitor no longer improves.

    :param monitor: name of the monitor.
    :param patience: number of consecutive values without an improvement that stop the
        run.
    :param mode: "max" where larger is better, or "min".
    :param min_delta: smallest improvement that counts, not negative.
    :raises ArgumentError: for invalid arguments, and during the run for an unknown
        monitor.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data = ebmpp.data.bars_and_stripes(3)
    >>> monitors = {"loglik": ebmpp.monitors.log_likelihood(rbm, data)}
    >>> fit = ebmpp.fit(rbm, data, rng_key=jax.random.key(0), estimator=ebmpp.PCD(),
    ...                 monitors=monitors, monitor_every=50, progress_bar=False,
    ...                 callbacks=[ebmpp.training.EarlyStop("loglik", patience=2, min_delta=10.0)])
    >>> fit.history.sizes["step"]
    100
    """

    monitor: str
    patience: int = 5
    mode: str = "max"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        checks.instance("EarlyStop: monitor", self.monitor, str, "a monitor's name")
        checks.count("EarlyStop: patience", self.patience)
        checks.choice("EarlyStop: mode", self.mode, SIGNS)
        checks.number("EarlyStop: min_delta", self.min_delta, least=0)

    def __call__(self, progress: Progress) -> bool:
        """Return True to stop the run."""
        names = [
            str(n)
            for n, v in progress.history.data_vars.items()
            if v.dims == ("monitor_step",)
        ]
        checks.names("monitor of EarlyStop", [self.monitor], names)
        best = -math.inf
        waited = 0
        for value in SIGNS[self.mode] * progress.history[self.monitor].values:
            waited += 1
            if value > best + self.min_delta:  # False for nan
                best = value
                waited = 0
        return waited >= self.patience
