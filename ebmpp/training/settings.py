# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Validation of the arguments of a training run."""

from collections.abc import Mapping, Sequence
from typing import Any

from ebmpp.core import checks
from ebmpp.graph import FactorGraph
from ebmpp.training.callbacks import Callback
from ebmpp.training.history import MonitorFn
from ebmpp.training.result import Fit
from ebmpp.training.steps import Stage

_DEFAULT_STEPS = 1000


def resolve_stages(
    schedule: Sequence[Stage] | None,
    start: Fit | None,
    max_seconds: float | None,
    **arguments: Any,
) -> tuple[Stage, ...]:
    """Return the stages of a run; the arguments of a run of one stage become the only one.

    :param arguments: fields of that stage, None where they were not given.
    :raises ArgumentError: for invalid arguments.
    """
    options = {name: value for name, value in arguments.items() if value is not None}
    if max_seconds is not None:
        checks.number("fit: max_seconds", max_seconds, above=0)
    if schedule is None:
        return (_one_stage(options, start, max_seconds is not None),)
    if options:
        raise checks.error(
            "fit: arguments beside schedule",
            "in its stages",
            list(options),
            hint="Pass them to the stages of schedule.",
        )
    stages = checks.sequence("fit: schedule", schedule, "stages")
    checks.count("fit: number of stages in schedule", len(stages))
    for stage in stages:
        checks.instance("fit: schedule's entry", stage, Stage, "an ebmpp.Stage")
    return tuple(stages)


def _one_stage(options: dict[str, Any], start: Fit | None, has_limit: bool) -> Stage:
    """Return the stage of the arguments, which ``start`` completes."""
    if start is not None:
        options.setdefault("estimator", start.past.estimator or start.estimator)
        if options.setdefault("optimizer", start.optimizer) is None:
            raise checks.error(
                "fit: optimizer", "given, since start was copied without it", None
            )
    if "epochs" not in options:
        default = checks.LARGEST if has_limit else _DEFAULT_STEPS
        options.setdefault("num_steps", default)
    elif "num_steps" in options:
        raise checks.error("fit: epochs", "None with num_steps", options["epochs"])
    return Stage(**options)


def check_start(graph: FactorGraph, start: Fit, stage: Stage) -> None:
    """Raise ArgumentError if a run whose first stage is ``stage`` cannot continue ``start``."""
    hint = "Pass params=start.params to begin with new chains."
    if start.graph != graph:
        expected = f"a Fit of {graph!r}"
        raise checks.error("fit: start", expected, start.graph, hint=hint)
    if type(start.estimator) is not type(stage.estimator):
        expected = f"a Fit by an estimator like {stage.estimator!r}"
        raise checks.error("fit: start", expected, start.estimator, hint=hint)


def check_functions(
    monitors: Mapping[str, MonitorFn], callbacks: Sequence[Callback]
) -> None:
    """Raise ArgumentError for monitors and callbacks that are no functions."""
    checks.instance(
        "fit: monitors", monitors, Mapping, "a dict of functions of the params"
    )
    for name, fn in monitors.items():
        checks.instance("fit: a monitor's name", name, str, "a string")
        checks.function(f"fit: monitor {name!r}", fn, "the params")
    checks.sequence("fit: callbacks", callbacks, "functions of a Progress")
    for i, fn in enumerate(callbacks):
        checks.function(f"fit: callbacks[{i}]", fn, "a Progress")
