# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Interface of the observers of a training run."""

from ebmpp.core import checks
from ebmpp.training.steps import TrainState


class Observer:
    """Part of a run that looks at its state between programs of steps.

    A program ends at the nearest stop of any observer. Then all observers look at the
    state, in their order.

    :param period: steps between the observer's stops; by default it has none.
    """

    period: int = checks.LARGEST

    def next_stop(self, step: int) -> int:
        """Return the first step after ``step`` at which a program must end."""
        return step + self.period - step % self.period

    def is_due(self, step: int, is_last: bool) -> bool:
        """Return True at the multiples of ``period``, and at the end of the run."""
        return is_last or step % self.period == 0

    def at(self, step: int, state: TrainState, is_last: bool) -> bool | None:
        """Look at the state after ``step`` steps; return True to end the run.

        It is called at the start of a run and after each program.

        :param is_last: True if the run ends here, also by an observer before this one.
        """
        raise NotImplementedError
