# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Stages of a training run: which estimator and which optimiser, for how many steps."""

from bisect import bisect_right
from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import optax

from ebmpp.core import checks
from ebmpp.core.identity import without_addresses
from ebmpp.errors import ArgumentError
from ebmpp.estimators import UCD, Estimator
from ebmpp.training import identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a run with its own estimator and optimiser: see ``schedule`` of :func:`ebmpp.fit`.

    Params go on from the stage before; the optimiser starts anew, and so does the estimator, unless its
    ``adopt(before, fresh)`` makes its first state of what the estimator before carried: persistent chains
    continue.

    :param num_steps: gradient steps.
    :param estimator: :class:`UCD` (default) or another.
    :param optimizer: any optax transformation; default ``optax.sgd(0.1)``.
    :raises ArgumentError: for a num_steps that is not a positive int, or an estimator or an optimizer that is
        none.

    **References**

    1. Qiu, Zhang, Wang (2020), section 5: PCD for 500 steps, then UCD at a smaller rate.

    **Example**

    >>> import jax, optax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fast = ebmpp.Stage(num_steps=3, estimator=ebmpp.PCD(num_chains=20), optimizer=optax.sgd(0.1))
    >>> slow = ebmpp.Stage(num_steps=2, estimator=ebmpp.CD(k=2), optimizer=optax.sgd(0.01))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0),
    ...                 schedule=[fast, slow], progress_bar=False)
    >>> fit.history.stage.values.tolist()
    [0, 0, 0, 1, 1]
    """

    num_steps: int
    estimator: Estimator = UCD()
    optimizer: optax.GradientTransformation = optax.sgd(0.1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_steps", checks.count("Stage: num_steps", self.num_steps))
        checks.instance("Stage: estimator", self.estimator, Estimator, "one such as UCD() or CD(k=1)")
        if not all(callable(getattr(self.optimizer, name, None)) for name in ("init", "update")):
            raise ArgumentError(
                "optimizer is an optax transformation such as optax.sgd(0.1), not "
                f"{checks.tell(self.optimizer)}"
            )


class Stages:
    """The stages of one run, and what each step belongs to.

    :param stages: in order.
    :param scheduled: whether somebody wrote a schedule; else there is one stage, the whole run.
    :raises ArgumentError: for something that is not a :class:`Stage`, none at all, or a ``steps_per_batch``
        that is not a positive int.
    """

    def __init__(self, stages: Sequence[Stage], scheduled: bool) -> None:
        self.stages, self.scheduled = tuple(checks.sequence("fit: schedule", stages, "stages")), scheduled
        if not self.stages:
            raise ArgumentError("fit: schedule needs at least one Stage")
        self._each = []
        for stage in self.stages:
            checks.instance("fit: schedule's entry", stage, Stage, "an ebmpp.Stage")
            name = f"{type(stage.estimator).__name__}: steps_per_batch"
            self._each.append(checks.count(name, stage.estimator.steps_per_batch))
        lengths = [stage.num_steps for stage in self.stages]
        *self.first, self.num_steps = itertools.accumulate(lengths, initial=0)
        used = [-(-length // each) for length, each in zip(lengths, self._each, strict=True)]
        self._batches = list(itertools.accumulate(used, initial=0))

    def __getitem__(self, number: int) -> Stage:
        return self.stages[number]

    def at(self, step: int) -> int:
        """The number of the stage of a step."""
        return bisect_right(self.first, step) - 1

    def end(self, number: int) -> int:
        """The step after the last one of a stage."""
        return self.first[number] + self.stages[number].num_steps

    def batch(self, step: int) -> int:
        """The number of the batch of a step: an estimator may want one for several steps."""
        number = self.at(step)
        return self._batches[number] + (step - self.first[number]) // self._each[number]

    def identity(self, params: Any) -> dict[str, Any]:
        """What a resumed run must have too; the last stage may be longer.

        :param params: of the shapes that are trained.
        """
        moves = {"optimizer": [identity.optimizer_moves(stage.optimizer, params) for stage in self.stages]}
        told = [_told(stage.estimator) for stage in self.stages]
        if not self.scheduled:
            return {"estimator": told[0], **moves}
        lengths = [stage.num_steps for stage in self.stages[:-1]]
        return {"schedule": [*map(list, zip(lengths, told, strict=False)), ["the rest", told[-1]]], **moves}


def _told(estimator: Estimator) -> str:
    """Its fields too; of functions among them the names, for they stand elsewhere in the next process."""
    if not dataclasses.is_dataclass(estimator):
        return type(estimator).__qualname__
    return without_addresses(repr(estimator))
