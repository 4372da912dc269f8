# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Validation of the arguments of :func:`ebmpp.fit`."""

from collections.abc import Mapping, Sequence
from typing import Any

from ebmpp.core import checks
from ebmpp.graph import FactorGraph
from ebmpp.training.result import Fit
from ebmpp.training.steps import Stage

_DEFAULT_STEPS = 1000


def stages_of(
    schedule: Sequence[Stage] | None,
    start: Fit | None,
    has_deadline: bool,
    **options: Any,
) -> tuple[Stage, ...]:
    """Return the stages of a schedule, or one stage of the options, which ``start`` completes.

    :raises ArgumentError: for a schedule with options or without stages, or invalid
        ones.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if schedule is not None:
        if options:
            raise checks.error(
                "fit: arguments beside schedule",
                "in its stages",
                list(options),
                hint="Pass them to the stages of schedule.",
            )
        checks.sequence("fit: schedule", schedule, "stages")
        checks.count("fit: number of stages in schedule", len(schedule))
        for stage in schedule:
            checks.instance("fit: schedule's entry", stage, Stage, "an ebmpp.Stage")
        return tuple(schedule)
    if start is not None:
        options.setdefault("estimator", start.estimator)
        if options.setdefault("optimizer", start.optimizer) is None:
            raise checks.error(
                "fit: optimizer", "given, since start was copied without it", None
            )
    if "epochs" not in options:
        options.setdefault(
            "num_steps", checks.LARGEST if has_deadline else _DEFAULT_STEPS
        )
    elif "num_steps" in options:
        raise checks.error("fit: epochs", "None with num_steps", options["epochs"])
    return (Stage(**options),)


def check_start(start: Fit, graph: FactorGraph, stage: Stage) -> None:
    """Raise ArgumentError if a run cannot continue ``start`` in its first stage."""
    hint = "Pass params=start.params to begin with new chains."
    if start.graph != graph:
        raise checks.error("fit: start", f"a Fit of {graph!r}", start.graph, hint=hint)
    if type(start.estimator) is not type(stage.estimator):
        expected = f"a Fit by an estimator like {stage.estimator!r}"
        raise checks.error("fit: start", expected, start.estimator, hint=hint)


def check_functions(monitors: object, callbacks: object) -> None:
    """Raise ArgumentError for monitors and callbacks that are no functions."""
    expected = "a dict of functions of the params"
    named = checks.instance("fit: monitors", monitors, Mapping, expected)
    for name, fn in named.items():
        checks.instance("fit: a monitor's name", name, str, "a string")
        checks.function(f"fit: monitor {name!r}", fn, "the params")
    functions = checks.sequence("fit: callbacks", callbacks, "functions of a Progress")
    for i, fn in enumerate(functions):
        checks.function(f"fit: callbacks[{i}]", fn, "a Progress")
