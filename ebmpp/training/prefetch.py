# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Batches from files and streams, read ahead by a thread."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax

from ebmpp.core import sharding
from ebmpp.training.batches import HostRows, Selection, Source, Stream, chunk_size

_PATIENCE = 1.0  # seconds that the end of a run waits for a batch that is being read


class Prefetch:
    """Batches of a run in order, up to ``last``, of which files and streams are read ahead by a thread.

    Rows on the device and batches of several processes are made when they are requested.
    """

    def __init__(self, source: Source, last: int) -> None:
        self._source, self._last = source, last
        self._threaded = isinstance(source, HostRows | Stream) and sharding.is_single_device()
        self._pending: deque[tuple[int, Future[Selection]]] = deque()
        self._executor: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *raised: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            running = [future for _, future in self._pending if not future.cancelled()]
            if wait(running, _PATIENCE).not_done:  # its reader may wait for someone else
                return
            self._executor.shutdown()
        if isinstance(self._source, Stream):
            self._source.close()

    def batch(self, number: int) -> Selection:
        """Return a batch as :meth:`Source.batch` does; the same number may be requested again."""
        if not self._threaded:
            return self._source.batch(number)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "ebmpp batches")
        while self._pending and self._pending[0][0] < number:
            self._pending.popleft()
        self._submit(number, 1)
        batch = self._pending[0][1].result()
        # one more than a program takes, so that the next program's batches are read while this one runs
        self._submit(number, chunk_size(batch) + 1)
        return batch

    def _submit(self, number: int, depth: int) -> None:
        # jax keeps what a caller set by a context to the caller's thread
        config: Any = jax.config
        wide, device = config.jax_enable_x64, config.jax_default_device

        def read(number: int) -> Selection:
            with jax.enable_x64(wide), jax.default_device(device):
                return self._source.batch(number)

        assert self._executor is not None
        first = self._pending[-1][0] + 1 if self._pending else number
        for i in range(first, min(number + depth, self._last + 1)):
            self._pending.append((i, self._executor.submit(read, i)))
