# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Rows of training steps: arrays on the device, files on the host, or a stream."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
import contextlib
import dataclasses
from functools import lru_cache
import hashlib
import itertools
import json
import math
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

import jax
from jax import Array
from jax.typing import ArrayLike

from ebmpp.core import (
    Blocks,
    Key,
    Numbers,
    StateLike,
    checks,
    merge_axes,
    num_rows,
    random,
    sharding,
)
from ebmpp.core.archive import digest
from ebmpp.errors import StateError
from ebmpp.graph import FactorGraph, Observed, tables

RowWeights = np.ndarray | None
T = TypeVar("T")

_DEFAULT_SIZE = 100
_SAMPLE_ROWS = 4096
_SAMPLE_BYTES = 2**26
# seconds that the end of a run waits for a batch that is being read
_PATIENCE = 1.0
#: Largest number of steps in one program, and of bytes of the batches that are copied
#: for it.
CHUNK = 50
_MAX_BYTES = 2**22


class Selection(NamedTuple):
    """Rows, and which of them are selected.

    :param rows: the visible blocks, ``(rows, *shape)`` each.
    :param index: numbers of the selected rows; None for all, in order.
    :param weights: one per selected row, of mean 1 over the data; None for equal ones.
    :param known: masks of known entries, ``(rows, *shape)``, of the blocks that have
        missing ones.
    """

    rows: Blocks
    index: Numbers | None = None
    weights: Numbers | None = None
    known: Blocks = {}

    @property
    def table(self) -> tables.Table:
        """All rows, with their missing entries."""
        return tables.Table(self.rows, self.known, (num_rows(self.rows),))


@runtime_checkable
class BatchSource(Protocol):
    """Batches of rows, by number."""

    batch_size: int

    def sample(self) -> Selection:
        """Return rows for base rates and an estimator's first state."""

    def batch(self, number: int) -> Selection:
        """Return a batch; numbers count from 0, never decrease, and may be skipped."""

    def batches_in(self, epochs: int) -> int:
        """Return the number of batches in so many passes over the data.

        :raises ArgumentError: for a stream without a length, or more than one pass
            over it.
        """
        ...

    def identity(self) -> dict[str, str | None]:
        """Return JSON values that identify the data in checkpoints."""
        return {}


#: Rows, batches of rows, a function that returns these, or a source of them.
TrainingData = (
    StateLike | Iterable[StateLike] | Callable[[], Iterable[StateLike]] | BatchSource
)


def chunk_size(batch: Selection) -> int:
    """Return how many steps with such batches fit into one program.

    It is 1 over a mesh, and where the copies would be large.
    """
    if not sharding.is_single_device():
        return 1
    size = CHUNK * sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
    return CHUNK if batch.index is not None or size <= _MAX_BYTES else 1


def as_source(
    graph: FactorGraph,
    data: TrainingData,
    weights: ArrayLike | None,
    batch_size: int | None,
    rng_key: Array,
) -> BatchSource:
    """Make the source of ``data``: see :func:`ebmpp.fit`.

    :param rng_key: determines the order of the rows.
    """
    if isinstance(data, BatchSource):
        return data
    key = random.key_pair(rng_key)
    count = sharding.processes()
    if count == 1:
        return _local_source(graph, data, weights, batch_size, key)
    size = batch_size
    if size is None and not is_stream(data):
        size = _DEFAULT_SIZE
    if size is not None and size % count != 0:
        raise checks.error(
            "fit: batch_size",
            f"a multiple of the {count} processes",
            size,
            hint="It is the size of all parts together.",
        )

    def make_local():
        local_size = None if size is None else size // count
        local_key = random.fold_in(key, jax.process_index())
        return _local_source(graph, data, weights, local_size, local_key, on_host=True)

    is_read_later = is_stream(data) or _is_mapped(data)
    return ProcessRows(make_local, weights, is_read_later)


def _local_source(
    graph: FactorGraph,
    data: TrainingData,
    weights: ArrayLike | None,
    batch_size: int | None,
    key: Key,
    on_host: bool = False,
) -> BatchSource:
    """Make the source of this process's data; ``on_host`` leaves arrays on the host."""
    if is_stream(data):
        if weights is not None:
            raise checks.state_error(
                "fit: weights",
                "None for a stream of batches, which has no row numbers",
                weights,
            )
        return Stream(graph, data, batch_size)
    table = tables.as_table(graph, data)
    size = tables.one_axis(graph, table)
    order = RowOrder(key, size, batch_size or _DEFAULT_SIZE)
    weights = None if weights is None else tables.check_weights(weights, size)
    is_mapped = _is_mapped(data)
    if not is_mapped and not on_host:
        table = sharding.place(jax.device_put(tables.check_table(graph, table)))
        return DeviceRows(graph, table, weights, order)
    if not is_mapped:
        tables.check_table(graph, table)  # at once: later, one process would fail alone
    return HostRows(graph, table, weights, order)


def is_stream(data: object) -> bool:
    """Return True for data that are batches in place of rows."""
    if (
        isinstance(data, Mapping | Observed)
        or hasattr(data, "__array__")
        or hasattr(data, "shape")
    ):
        return False
    if isinstance(data, list | tuple):  # rows of numbers, or batches
        return bool(data) and isinstance(data[0], Mapping | Observed)
    return callable(data) or (
        isinstance(data, Iterable) and not isinstance(data, str | bytes)
    )


def _is_mapped(data: object) -> bool:
    return any(isinstance(v, np.memmap) for v in jax.tree.leaves(data))


class RowOrder:
    """Row numbers of each batch: consecutive permutations, cut into batches."""

    def __init__(self, key: Key, size: int, batch_size: int) -> None:
        self.key = np.asarray(key).tolist()
        self.size = size
        self.batch_size = min(size, batch_size)

        @lru_cache(maxsize=2)  # a batch may span two epochs
        def permutation(epoch):
            return np.random.default_rng([*self.key, epoch]).permutation(size)

        self._permutation = permutation

    def batch(self, number: int) -> np.ndarray:
        """Return row numbers, ``(batch_size,)``."""
        if self.batch_size == self.size:
            return np.arange(self.size)
        epoch, start = divmod(number * self.batch_size, self.size)
        stop = start + self.batch_size
        rows = self._permutation(epoch)[start:stop]
        if stop <= self.size:
            return rows
        return np.concatenate([rows, self._permutation(epoch + 1)[: stop - self.size]])


@dataclasses.dataclass
class _TableRows:
    """Rows of a table in a random order."""

    graph: FactorGraph
    table: tables.Table
    weights: RowWeights
    order: RowOrder

    def __post_init__(self) -> None:
        self.batch_size = self.order.batch_size

    def batches_in(self, epochs: int) -> int:
        return -(-epochs * self.order.size // self.batch_size)

    def _weights_at(self, index: np.ndarray) -> RowWeights:
        return None if self.weights is None else self.weights[index]


class DeviceRows(_TableRows):
    """All rows on the device; a batch is an index into them."""

    def sample(self) -> Selection:
        return Selection(self.table.rows, None, self.weights, self.table.known)

    def batch(self, number: int) -> Selection:
        # transferred as an argument, which costs less
        index = self.order.batch(number).astype(np.int32)
        return self.sample()._replace(index=index, weights=self._weights_at(index))

    def identity(self) -> dict[str, str | None]:
        """Return a digest of every byte."""
        return _identity(self.weights, self.table.rows, self.table.known)


class HostRows(_TableRows):
    """Rows in memory-mapped arrays, read and checked when a batch is requested."""

    def _sample_index(self) -> np.ndarray:
        """Return evenly spaced row numbers, limited in number and bytes."""
        row = sum(v.itemsize * math.prod(v.shape[1:]) for v in self.table.rows.values())
        count = min(self.order.size, _SAMPLE_ROWS, max(1, _SAMPLE_BYTES // max(1, row)))
        return np.linspace(0, self.order.size - 1, count).astype(np.int64)

    def sample(self) -> Selection:
        """Return a few thousand rows, evenly spaced."""
        return self._read(self._sample_index())

    def batch(self, number: int) -> Selection:
        return self._read(self.order.batch(number))

    def identity(self) -> dict[str, str | None]:
        """Return a digest of shapes, types and a few thousand rows."""
        sample = self.table.take(self._sample_index())
        count = {"number of rows": np.array(self.order.size)}
        return _identity(self.weights, {**sample.rows, **count}, sample.known)

    def _read(self, index: np.ndarray) -> Selection:
        with _on_host():
            try:
                rows, known, _ = tables.check_table(self.graph, self.table.take(index))
            except StateError:
                for row in index:  # the first one that is invalid
                    try:
                        tables.check_table(self.graph, self.table.take(np.array([row])))
                    except StateError as error:
                        raise StateError(f"row {row} of the data: {error}") from None
                raise
        return jax.device_put(Selection(rows, None, self._weights_at(index), known))


class Stream:
    """Batches from an iterable, each used once, in order."""

    def __init__(
        self, graph: FactorGraph, data: TrainingData, batch_size: int | None
    ) -> None:
        self.graph = graph
        batches = data() if callable(data) else data
        self._owned = callable(data)
        if not isinstance(batches, Iterable):
            raise checks.state_error(
                "fit: value of data, a function,", "batches", batches
            )
        self._length = len(batches) if isinstance(batches, Sized) else None
        self._batches: Iterator[StateLike] = iter(batches)
        self._number = -1
        self.batch_size = batch_size or 0  # 0 until the first batch determines it
        self._first = self.batch(0)

    def sample(self) -> Selection:
        return self._first

    def batch(self, number: int) -> Selection:
        """Return a batch; those before it that were not requested are skipped unchecked."""
        if number > self._number:
            skipped = number - self._number - 1
            batches = itertools.islice(self._batches, skipped, None)
            try:
                batch = next(batches)
            except StopIteration:
                raise checks.state_error(
                    "stream of batches",
                    f"long enough for batch {number} (counted from 0)",
                    "its end",
                    hint="Give a longer one, such as itertools.cycle(batches).",
                ) from None
            self._last = self._check(number, batch)
            self._number = number
        return self._last

    def batches_in(self, epochs: int) -> int:
        if self._length is None or epochs > 1:
            expected = "1 for a stream, whose batches are used once"
            if self._length is None:
                expected = "None for a stream without a length"
            raise checks.error(
                "fit: epochs",
                expected,
                epochs,
                hint="Give num_steps, and a stream that is long enough.",
            )
        return self._length

    def close(self) -> None:
        """Close a generator of the user's function; an iterator is the user's."""
        if self._owned and isinstance(self._batches, Generator):
            self._batches.close()

    def identity(self) -> dict[str, str | None]:
        """Return a digest of the first batch."""
        return _identity(None, self._first.rows, self._first.known)

    def _check(self, number: int, batch: StateLike) -> Selection:
        try:
            with _on_host():
                table = tables.as_table(self.graph, batch)
                size = tables.one_axis(self.graph, table)
                rows, known, _ = tables.check_table(self.graph, table)
        except StateError as error:
            raise StateError(f"batch {number} of the stream: {error}") from None
        if self.batch_size not in (0, size):
            raise checks.state_error(
                f"rows of batch {number} of the stream",
                f"{self.batch_size} (batch_size, or those of the first batch)",
                size,
                hint="Drop an incomplete last batch.",
            )
        self.batch_size = size

        # A loader may reuse the memory of a batch: values were converted into new
        # arrays, masks are copied.
        rows = jax.tree.map(np.asarray, rows)
        known = jax.tree.map(np.array, known)
        return jax.device_put(Selection(rows, known=known))


class ProcessRows:
    """Batches of which each process has a part. All processes raise the error of one."""

    def __init__(
        self,
        make_local: Callable[[], BatchSource],
        weights: ArrayLike | None,
        is_read_later: bool,
    ) -> None:
        def make():
            source = make_local()
            return source, num_rows(source.sample().rows)

        self._local, rows = _in_all_processes(make)
        sizes = sharding.gather(np.array([rows, self._local.batch_size]))
        if not (sizes == sizes[0]).all():
            raise checks.state_error(
                "fit: rows of samples and of batches",
                "of one size in all processes",
                sizes.tolist(),
            )
        self.batch_size = int(sizes[:, 1].sum())
        self._scale = 1.0
        self._is_read_later = is_read_later
        if weights is not None:  # mean weight of this process relative to that of all
            mean = float(np.mean(np.asarray(weights, float)))
            self._scale = mean / float(sharding.gather(np.array(mean)).mean())

    def sample(self) -> Selection:
        """Return the samples of all processes."""
        parts = sharding.gather(self._scaled(self._local.sample()))
        return merge_axes(parts)

    def batch(self, number: int) -> Selection:
        """Return the parts of all processes, sharded over the devices."""

        def read():
            return self._local.batch(number)

        local = _in_all_processes(read) if self._is_read_later else read()
        return sharding.concatenate_processes(self._scaled(local))

    def batches_in(self, epochs: int) -> int:
        return self._local.batches_in(epochs)

    def identity(self) -> dict[str, str | None]:
        """Return a digest of the parts' identities."""
        local = hashlib.sha256(
            json.dumps(self._local.identity(), sort_keys=True).encode()
        ).digest()
        digests = sharding.gather(np.frombuffer(local, np.uint8))
        return {"data": digests.tobytes().hex()}

    def _scaled(self, local: Selection) -> Selection:
        """Return a selection with weights relative to the mean over all processes."""
        if local.weights is None:
            return local
        weights = np.asarray(local.weights) * np.float32(self._scale)
        return local._replace(weights=weights)


def _in_all_processes(make: Callable[[], T]) -> T:
    """Return the result of ``make``, or raise StateError in all processes if it fails in one."""
    result = None
    error = None
    try:
        result = make()
    except BaseException as raised:  # SystemExit too: the others would wait for ever
        error = raised
    failed = np.flatnonzero(sharding.gather(np.array(error is not None)))
    if len(failed) or result is None:
        raise error or StateError(
            f"the data of process {failed[0]} are invalid: see its error"
        )
    return result


def _identity(
    weights: RowWeights, rows: Mapping[str, Numbers], known: Mapping[str, Numbers]
) -> dict[str, str | None]:
    data = jax.device_get({**rows, **{f"known of {b}": k for b, k in known.items()}})
    return {
        "data": digest(data),
        "weights": None if weights is None else digest({"weights": weights}),
    }


def _on_host() -> contextlib.AbstractContextManager:
    """Check values on the CPU, so that they do not wait for the accelerator's queue."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS may exclude the CPU
        return contextlib.nullcontext()


class Prefetch(contextlib.AbstractContextManager["Prefetch"]):
    """Batches of a run in order, up to ``last``.

    A thread reads files and streams ahead. Rows on the device and batches of several
    processes are made when they are requested.
    """

    def __init__(self, source: BatchSource, last: int) -> None:
        self._source = source
        self._last = last
        self._pending: deque[tuple[int, Future[Selection]]] = deque()
        is_threaded = (
            isinstance(source, HostRows | Stream) and sharding.is_single_device()
        )
        self._executor = ThreadPoolExecutor(1, "ebmpp batches") if is_threaded else None

    def __exit__(self, *raised: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            running = [future for _, future in self._pending if not future.cancelled()]
            # its reader may wait for someone else
            if wait(running, _PATIENCE).not_done:
                return
            self._executor.shutdown()
        if isinstance(self._source, Stream):
            self._source.close()

    def batch(self, number: int) -> Selection:
        """Return a batch, as :meth:`BatchSource.batch` does; a number may be repeated."""
        if self._executor is None:
            return self._source.batch(number)
        while self._pending and self._pending[0][0] < number:
            self._pending.popleft()
        self._submit(self._executor, number, 1)
        batch = self._pending[0][1].result()
        # one more than a program takes, so that the next program's batches are read
        # while this one runs
        self._submit(self._executor, number, chunk_size(batch) + 1)
        return batch

    def _submit(self, executor: ThreadPoolExecutor, number: int, depth: int) -> None:
        # jax keeps what a caller set by a context to the caller's thread
        config: Any = jax.config
        wide = config.jax_enable_x64
        device = config.jax_default_device

        def read(number):
            with jax.enable_x64(wide), jax.default_device(device):
                return self._source.batch(number)

        first = self._pending[-1][0] + 1 if self._pending else number
        for i in range(first, min(number + depth, self._last + 1)):
            self._pending.append((i, executor.submit(read, i)))
