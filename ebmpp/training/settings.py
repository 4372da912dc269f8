# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Validated settings of a training run."""

from collections.abc import Mapping, Sequence
import dataclasses
import os
from typing import Any

from jax import Array
import optax

from ebmpp.core import Params, checks
from ebmpp.estimators import Estimator
from ebmpp.graph import FactorGraph
from ebmpp.training.callbacks import Callback
from ebmpp.training.history import MonitorFn
from ebmpp.training.result import Fit
from ebmpp.training.steps import Stage

_DEFAULT_STEPS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of :func:`ebmpp.fit` but the data and their placement, validated.

    The arguments of a run of one stage become the only entry of ``stages``.

    :raises ArgumentError: for invalid arguments.
    """

    graph: FactorGraph
    rng_key: Array
    estimator: Estimator | None
    optimizer: optax.GradientTransformation | None
    num_steps: int | None
    epochs: int | None
    max_seconds: float | None
    schedule: Sequence[Stage] | None
    batch_size: int | None
    params: Params | None
    start: Fit | None
    monitors: Mapping[str, MonitorFn]
    monitor_every: int
    callbacks: Sequence[Callback]
    checkpoint_dir: str | os.PathLike[str] | None
    checkpoint_every: int
    resume: bool
    progress_bar: bool
    stages: tuple[Stage, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        checks.instance("fit: graph", self.graph, FactorGraph, "a FactorGraph")
        checks.flag("fit: progress_bar", self.progress_bar)
        self._set(
            rng_key=checks.key("fit: rng_key", self.rng_key),
            batch_size=checks.optional_count("fit: batch_size", self.batch_size),
            monitor_every=checks.count("fit: monitor_every", self.monitor_every),
            checkpoint_every=checks.count(
                "fit: checkpoint_every", self.checkpoint_every
            ),
        )
        if checks.flag("fit: resume", self.resume) and self.checkpoint_dir is None:
            raise checks.error("fit: checkpoint_dir", "given with resume=True", None)
        if self.max_seconds is not None:
            checks.number("fit: max_seconds", self.max_seconds, above=0)
        if self.start is not None:
            checks.instance("fit: start", self.start, Fit, "a Fit to continue")
            if self.params is not None:
                raise checks.error(
                    "fit: params", "None with start, which has params", self.params
                )
            self._set(params=self.start.params)
        self._set(stages=self._one_stage() if self.schedule is None else self._listed())
        if self.start is not None:
            self._check_start(self.start)
        self._check_functions()

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _one_stage(self) -> tuple[Stage]:
        """Return the stage of the arguments, which ``start`` completes."""
        options = self._stage_options()
        if self.start is not None:
            before = self.start.past.estimator or self.start.estimator
            options.setdefault("estimator", before)
            if options.setdefault("optimizer", self.start.optimizer) is None:
                raise checks.error(
                    "fit: optimizer", "given, since start was copied without it", None
                )
        if "epochs" in options and "num_steps" in options:
            raise checks.error("fit: epochs", "None with num_steps", self.epochs)
        if "epochs" not in options:
            has_limit = self.max_seconds is not None
            default = checks.LARGEST if has_limit else _DEFAULT_STEPS
            options.setdefault("num_steps", default)
        return (Stage(**options),)

    def _listed(self) -> tuple[Stage, ...]:
        """Return the stages of the schedule."""
        options = self._stage_options()
        if options:
            raise checks.error(
                "fit: arguments beside schedule",
                "in its stages",
                list(options),
                hint="Pass them to the stages of schedule.",
            )
        stages = checks.sequence("fit: schedule", self.schedule, "stages")
        checks.count("fit: number of stages in schedule", len(stages))
        for stage in stages:
            checks.instance("fit: schedule's entry", stage, Stage, "an ebmpp.Stage")
        return tuple(stages)

    def _stage_options(self) -> dict[str, Any]:
        """Return the arguments that describe a stage and are given."""
        names = ("estimator", "optimizer", "num_steps", "epochs")
        options = {name: getattr(self, name) for name in names}
        return {name: value for name, value in options.items() if value is not None}

    def _check_start(self, start: Fit) -> None:
        """Raise ArgumentError if this run cannot continue ``start``."""
        estimator = self.stages[0].estimator
        hint = "Pass params=start.params to begin with new chains."
        if start.graph != self.graph:
            expected = f"a Fit of {self.graph!r}"
            raise checks.error("fit: start", expected, start.graph, hint=hint)
        if type(start.estimator) is not type(estimator):
            expected = f"a Fit by an estimator like {estimator!r}"
            raise checks.error("fit: start", expected, start.estimator, hint=hint)

    def _check_functions(self) -> None:
        """Raise ArgumentError for monitors and callbacks that are no functions."""
        expected = "a dict of functions of the params"
        checks.instance("fit: monitors", self.monitors, Mapping, expected)
        for name, fn in self.monitors.items():
            checks.instance("fit: a monitor's name", name, str, "a string")
            checks.function(f"fit: monitor {name!r}", fn, "the params")
        expected = "functions of a Progress"
        checks.sequence("fit: callbacks", self.callbacks, expected)
        for i, fn in enumerate(self.callbacks):
            checks.function(f"fit: callbacks[{i}]", fn, "a Progress")

    @property
    def steps_before(self) -> int:
        """Number of steps of the run that this one continues."""
        return 0 if self.start is None else self.start.num_steps
