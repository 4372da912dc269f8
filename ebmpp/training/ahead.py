# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Batches from files and streams, read by a thread while those before them are trained on."""

from collections import deque
import threading
from typing import Any

import jax

from ebmpp.core import sharding
from ebmpp.training.batches import HostRows, Selection, Source, Stream
from ebmpp.training.steps import chunk_size

NAME = "ebmpp batches"
_LONG = 1.0  # seconds for which an end waits for a batch that is being read


class Ahead:
    """The batches of a run, in their order; what goes wrong with one is raised when it is asked for.

    Rows on the device need no reading, and the batches of several processes are put together by all of
    them, each in its own turn: there is no thread for these.

    :param source: what makes them.
    :param last: the number of the last one of the run, after which nothing is read.
    """

    def __init__(self, source: Source, last: int) -> None:
        self._source, self._last = source, last
        self._apart = isinstance(source, HostRows | Stream) and sharding.alone()
        self._made: deque[tuple[int, Selection | Exception]] = deque()
        self._change, self._closed = threading.Condition(), False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *raised: object) -> None:
        """Read no more. A batch that takes long is not waited for: its reader may wait for somebody else."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(_LONG)
        if isinstance(self._source, Stream) and (self._thread is None or not self._thread.is_alive()):
            self._source.close()

    def batch(self, number: int) -> Selection:
        """As :meth:`Source.batch` does; the same number may be asked for again.

        :raises StateError: for a wrong batch, each time.
        """
        if not self._apart:
            return self._source.batch(number)
        if self._thread is None:
            # jax keeps what a caller has set by a context to the caller's own thread
            config: Any = jax.config
            settings = (config.jax_enable_x64, config.jax_default_device)
            self._thread = threading.Thread(
                target=self._read, args=(number, *settings), name=NAME, daemon=True
            )
            self._thread.start()
        with self._change:
            while not self._made or self._made[0][0] < number:
                if self._made:
                    self._made.popleft()
                    self._change.notify_all()
                else:
                    self._change.wait()
            made = self._made[0][1]
        if isinstance(made, Exception):
            raise made
        return made

    # -- the thread ------------------------------------------------------------------------------

    def _read(self, first: int, wide: bool, device: jax.Device | None) -> None:
        with jax.enable_x64(wide), jax.default_device(device):
            for number in range(first, self._last + 1):
                made = self._one(number)
                with self._change:
                    self._made.append((number, made))
                    self._change.notify_all()
                    if isinstance(made, Exception):
                        return
                    # one more than a program takes: the next program's are read while this one runs
                    while len(self._made) > chunk_size(made) and not self._closed:
                        self._change.wait()
                    if self._closed:
                        return

    def _one(self, number: int) -> Selection | Exception:
        try:
            return self._source.batch(number)
        except Exception as error:
            return error
