# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What looks on while a model is trained: stopping early, and keeping the best params."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.core import Params, checks
from ebmpp.errors import ArgumentError

if TYPE_CHECKING:
    import xarray as xr

_MODES = ("max", "min")


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a callback of :func:`ebmpp.fit` is given, before ``step`` is done.

    To look at: the dicts are the callback's own, jax arrays cannot be written, and those of the history are
    read-only, so nothing that is done to them changes the run.

    :param step: how many steps are done.
    :param params: after them.
    :param estimator_state: what the estimator carries.
    :param history: as :class:`ebmpp.Fit` has it, so far; the monitors' values at ``step`` included.
    """

    step: int
    params: Params
    estimator_state: Any
    history: "xr.Dataset"


Callback = Callable[[Progress], bool | None]


@dataclasses.dataclass(frozen=True)
class EarlyStop:
    """A callback that stops a run whose monitor gets no better.

    What it decides is a function of the history alone, so a resumed run stops where one that was never
    stopped does.

    :param monitor: its name.
    :param patience: so many values in a row without a better one stop the run.
    :param mode: "max" where more is better, or "min".
    :param min_delta: a value is better only by more than this.
    :raises ArgumentError: for a patience that is not a positive int, another mode, or a negative min_delta.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data = ebmpp.data.bars_and_stripes(3)
    >>> fit = ebmpp.fit(rbm, data, rng_key=jax.random.key(0), estimator=ebmpp.CD(), progress_bar=False,
    ...                 monitors={"loglik": ebmpp.monitors.log_likelihood(rbm, data)}, monitor_every=2,
    ...                 callbacks=[ebmpp.training.EarlyStop("loglik", patience=2, min_delta=10.0)])
    >>> fit.history.sizes["step"]
    4
    """

    monitor: str
    patience: int = 5
    mode: str = "max"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        checks.instance("EarlyStop: monitor", self.monitor, str, "a monitor's name")
        checks.count("EarlyStop: patience", self.patience)
        checks.choice("EarlyStop: mode", self.mode, _MODES)
        checks.number("EarlyStop: min_delta", self.min_delta, least=0)

    def __call__(self, progress: Progress) -> bool:
        """Whether to stop.

        :raises ArgumentError: for a monitor that the run does not have.
        """
        here = [n for n, v in progress.history.data_vars.items() if v.dims == ("monitor_step",)]
        if self.monitor not in here:
            raise ArgumentError(f"EarlyStop: the monitors are {here}, and {self.monitor!r} is not among them")
        best, waited = -math.inf, 0
        for value in _signed(progress.history[self.monitor].values, self.mode):
            better = value > best + self.min_delta  # nan is no better
            best, waited = (value, 0) if better else (best, waited + 1)
        return waited >= self.patience


class Best:
    """The params at the best value of a monitor; the first of equals, and never at nan.

    :param wanted: the monitor's name, or that and "max" or "min".
    :param monitors: the names there are.
    :param params: of the right structure.
    :raises ArgumentError: for another name or mode.
    """

    def __init__(self, wanted: str | tuple[str, str], monitors: Sequence[str], params: Params) -> None:
        wanted = (wanted, "max") if isinstance(wanted, str) else wanted
        if not isinstance(wanted, tuple) or len(wanted) != 2:
            raise ArgumentError(
                'fit: keep_best is the name of a monitor, or that and "min" or "max" in a tuple, not '
                f"{checks.tell(wanted)}"
            )
        self.name, self.mode = wanted
        checks.choice("fit: keep_best's mode", self.mode, _MODES)
        if self.name not in monitors:
            raise ArgumentError(
                f"fit: keep_best={self.name!r} is the name of a monitor, and they are {list(monitors)}"
            )
        self._value, self._step, self._params = -math.inf, -1, params

    @property
    def params(self) -> Params | None:
        """None as long as there is no value."""
        return None if self._step < 0 else self._params

    @property
    def step(self) -> int | None:
        """How many steps had been done."""
        return None if self._step < 0 else self._step

    def see(self, step: int, value: Any, params: Params) -> None:
        """A value of the monitor, and the params it is of."""
        signed = float(_signed(np.asarray(value, float), self.mode))
        if signed > self._value:
            self._value, self._step, self._params = signed, step, params

    def leaves(self) -> list[Any]:
        """For a checkpoint."""
        return [np.array(self._value), np.array(self._step), *jax.tree.leaves(self._params)]

    def load(self, leaves: Sequence[np.ndarray]) -> None:
        """What :meth:`leaves` made."""
        self._value, self._step = float(leaves[0]), int(leaves[1])
        self._params = jax.tree.unflatten(jax.tree.structure(self._params), map(jnp.asarray, leaves[2:]))


def _signed(values: np.ndarray, mode: str) -> np.ndarray:
    return values if mode == "max" else -values
