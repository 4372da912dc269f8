# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The progress bar of a run: neither compiling nor what is only dispatched counts as a step."""

from collections.abc import Callable, Hashable, Mapping
import time
from typing import Any

from tqdm.auto import tqdm

import jax

# Seconds a step from which to wait for each costs nothing. Else many steps of seconds are dispatched in a
# moment: the bar shows them as made, and then stands still, deaf to Ctrl-C, until they are.
_LONG = 0.05


class Bar:
    """Steps of a run, and how long the programs of a stage take to compile.

    :param total: steps of the run.
    :param start: those that were done before.
    :param hidden: show nothing.
    """

    def __init__(self, total: int, start: int, hidden: bool) -> None:
        self.shown = not hidden
        self._bar = tqdm(total=total, initial=start, disable=hidden, desc="training", unit="step")
        self._seen: set[Hashable] = set()  # programs
        self._began: float | None = None  # to compile
        self._waits, self._last = False, 0.0

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.close()

    def begin(self, program: Hashable) -> None:
        """Before steps by a program of a stage, whose first ones compile it.

        :param program: what tells it from others of the run.
        """
        if not self.shown or program in self._seen:
            return
        self._seen.add(program)
        self._began = time.monotonic()
        self._bar.set_description("compiling")

    def made(self, count: int, state: Any) -> None:
        """After so many steps, which made this state."""
        if self._waits:
            jax.block_until_ready(state)
            now = time.monotonic()
            self._waits, self._last = now - self._last > count * _LONG, now
        if self._began is None:
            self._bar.update(count)
            return
        jax.block_until_ready(state)
        now = time.monotonic()
        told, done = f"{now - self._began:.1f} s", self._bar.n + count
        self._began, self._waits, self._last = None, True, now
        self._bar.reset(self._bar.total)  # the clock too: what is left is told by the time of steps alone
        self._bar.n = self._bar.initial = self._bar.last_print_n = done
        self._bar.set_description("training", refresh=False)
        self._bar.set_postfix({"compiled": told})

    def tell(self, latest: Callable[[], Mapping[str, Any]]) -> None:
        """What stands beside the bar.

        :param latest: waits for the last step.
        """
        begin = time.monotonic()
        self._bar.set_postfix(dict(latest()), refresh=False)
        self._last = time.monotonic()
        self._waits |= self.shown and self._last - begin > _LONG
