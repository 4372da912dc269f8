# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Where a training step's rows come from: the device, files on the host, or a stream of batches."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
import contextlib
from functools import lru_cache
import hashlib
import itertools
import json
import math
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

import jax
from jax import Array

from ebmpp.core import Blocks, Key, Numbers, checks, random, sharding
from ebmpp.core.archive import digest
from ebmpp.errors import ArgumentError, StateError
from ebmpp.graph import FactorGraph, Observed, tables

Data = Mapping[str, Any] | Array | np.ndarray | Iterable[Any] | Callable[[], Iterable[Any]]

T = TypeVar("T")

DEFAULT_BATCH = 100
_SAMPLE_ROWS = 4096
_SAMPLE_BYTES = 2**26
_END = object()  # of a stream


class Selection(NamedTuple):
    """Rows, and which of them are meant."""

    rows: Blocks
    """The visible blocks, ``(rows, *shape)`` each."""
    index: Numbers | None = None
    """Which rows; None for all, as they are."""
    weights: Numbers | None = None
    """One a row that is meant, of mean 1 over the data; None for equal ones."""
    known: Blocks = {}
    """Of the blocks that lack units, which are known, ``(rows, *shape)``."""

    def observed(self) -> dict[str, Any]:
        """All rows, block by block, with what is known of those that lack units."""
        return tables.Data(self.rows, self.known, ()).observed()


class Source(Protocol):
    """Rows, batch by batch."""

    batch_size: int

    def sample(self) -> Selection:
        """All rows of a selection to start from: base rates, and an estimator's first state."""

    def batch(self, number: int) -> Selection:
        """The batch of this number, from 0. Numbers never go down, and may be skipped.

        :raises StateError: for rows that are wrong, or where there are no more.
        """

    def identity(self) -> dict[str, Any]:
        """What tells these data from others, JSON values by name."""


def as_source(graph: FactorGraph, data: Data, weights: Any, batch_size: int | None, rng_key: Array) -> Source:
    """The source that ``data`` are: see :func:`ebmpp.fit`.

    :param weights: one a row, or None.
    :param batch_size: None for the default, 100, or the stream's own.
    :param rng_key: a jax key for the order of the rows.
    :raises StateError: for data or weights that do not fit.
    """
    if (others := sharding.processes()) > 1:
        return Parts(graph, data, weights, batch_size, rng_key, others)
    return _own_source(graph, data, weights, batch_size, random.key_pair(rng_key))


def _own_source(
    graph: FactorGraph, data: Data, weights: Any, batch_size: int | None, key: Key, on_host: bool = False
) -> Source:
    """Of this process's data.

    :param on_host: leave arrays there, where memory-mapped ones stay anyway.
    """
    if _is_stream(data):
        if weights is not None:
            raise StateError("weights are one a row of data in arrays; a stream of batches has none")
        return Stream(graph, data, batch_size)
    table = tables.as_table(graph, data)
    size = tables.one_axis(graph, table)
    order = Order(key, size, DEFAULT_BATCH if batch_size is None else batch_size)
    mapped = _is_mapped(data)
    if on_host and not mapped:
        tables.check_table(graph, table)  # all at once: later one process would fail alone
    return (HostRows if mapped or on_host else DeviceRows)(graph, table, weights, order)


def _is_stream(data: object) -> bool:
    if isinstance(data, Mapping | Observed) or hasattr(data, "__array__") or hasattr(data, "shape"):
        return False
    if isinstance(data, list | tuple):  # rows of numbers, or batches
        return bool(data) and isinstance(data[0], Mapping | Observed)
    return callable(data) or (isinstance(data, Iterable) and not isinstance(data, str | bytes))


def _is_mapped(data: object) -> bool:
    return any(isinstance(v, np.memmap) for v in jax.tree.leaves(data))


class Order:
    """Which rows a batch holds: permutation after permutation, cut into batches; no row is left out.

    A batch is a function of its number, so a resumed run goes on at once.
    """

    def __init__(self, key: Key, size: int, batch_size: int) -> None:
        self.key, self.size, self.batch_size = np.asarray(key).tolist(), size, min(size, batch_size)
        self._epoch = lru_cache(maxsize=2)(self._permutation)  # a batch may run across the end of one

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([*self.key, epoch]).permutation(self.size)

    def batch(self, number: int) -> np.ndarray:
        """Row numbers, ``(batch_size,)``."""
        if self.batch_size == self.size:
            return np.arange(self.size)
        first = number * self.batch_size
        epoch, start = divmod(first, self.size)
        stop = start + self.batch_size
        found = self._epoch(epoch)[start:stop]
        if stop <= self.size:
            return found
        return np.concatenate([found, self._epoch(epoch + 1)[: stop - self.size]])


class DeviceRows:
    """All rows on the device; a batch is an index into them."""

    def __init__(self, graph: FactorGraph, table: tables.Table, weights: Any, order: Order) -> None:
        checked = tables.check_table(graph, table)
        self.rows, self.known, _ = sharding.place(jax.device_put(checked))
        self.order, self.batch_size = order, order.batch_size
        self.weights = None if weights is None else tables.check_weights(weights, order.size)

    def sample(self) -> Selection:
        """All of them."""
        return Selection(self.rows, None, self.weights, self.known)

    def batch(self, number: int) -> Selection:
        """An index."""
        index = self.order.batch(number).astype(np.int32)  # as an argument it costs less than on its own
        weights = None if self.weights is None else self.weights[index]
        return Selection(self.rows, index, weights, self.known)

    def identity(self) -> dict[str, Any]:
        """A digest of every byte."""
        return _identity(self.weights, self.rows, self.known)


class HostRows:
    """Memory-mapped arrays: a batch's rows are read and checked when they are asked for."""

    def __init__(self, graph: FactorGraph, table: tables.Table, weights: Any, order: Order) -> None:
        self.graph, self.table, self.order, self.batch_size = graph, table, order, order.batch_size
        self.weights = None if weights is None else tables.check_weights(weights, order.size)

    def _chosen(self) -> np.ndarray:
        """Numbers of some thousand rows, evenly spread, and not too many bytes."""
        row = sum(v.itemsize * math.prod(v.shape[1:]) for v in self.table.values.values())
        count = min(self.order.size, _SAMPLE_ROWS, max(1, _SAMPLE_BYTES // max(1, row)))
        return np.linspace(0, self.order.size - 1, count).astype(np.int64)

    def sample(self) -> Selection:
        """Some thousand rows, evenly spread."""
        return self._read(self._chosen())

    def batch(self, number: int) -> Selection:
        """The rows themselves."""
        return self._read(self.order.batch(number))

    def identity(self) -> dict[str, Any]:
        """A digest of shapes, types and some thousand rows."""
        some = self.table.take(self._chosen())
        count = {"number of rows": np.array(self.order.size)}
        return _identity(self.weights, {**some.values, **count}, some.known)

    def _read(self, index: np.ndarray) -> Selection:
        some = self.table.take(index)
        with _on_host():
            try:
                rows, known, _ = tables.check_table(self.graph, some)
            except StateError:
                self._refuse(some, index)
                raise
        weights = None if self.weights is None else jax.device_put(self.weights[index])
        return Selection(jax.device_put(rows), None, weights, jax.device_put(known))

    def _refuse(self, read: tables.Table, index: np.ndarray) -> None:
        """:raises StateError: for the first wrong row, with its number in the data."""
        for at, number in enumerate(index):
            try:
                tables.check_table(self.graph, read.take(np.array([at])))
            except StateError as error:
                raise StateError(f"row {number} of the data: {error}") from None


class Stream:
    """Batches that somebody else makes, each used once, in their order."""

    def __init__(self, graph: FactorGraph, data: Any, batch_size: int | None) -> None:
        self.graph = graph
        batches = data() if callable(data) else data
        self._own = callable(data)
        if not isinstance(batches, Iterable):
            raise StateError(f"data is a function, and made no batches: it returned {checks.tell(batches)}")
        self._batches: Iterator[Any] = iter(batches)
        self._number = -1
        self.batch_size = 0  # until there is a batch
        self._first = self.batch(0)
        if batch_size not in (None, self.batch_size):
            raise StateError(
                f"the stream's batches have {self.batch_size} rows, and batch_size={batch_size}: leave "
                "batch_size out, it is the stream's"
            )

    def sample(self) -> Selection:
        """The first batch."""
        return self._first

    def batch(self, number: int) -> Selection:
        """The rows; batches before it that nobody asked for are passed over unseen."""
        if number > self._number:
            passed = number - self._number - 1
            given = next(itertools.islice(self._batches, passed, None), _END)
            if given is _END:
                raise StateError(
                    f"the stream of batches ended before batch {number} (counted from 0); give one that goes "
                    "on, such as itertools.cycle(batches), or a generator function with a loop over epochs"
                )
            self._number, self._last = number, self._check(number, given)
        return self._last

    def close(self) -> None:
        """Let go of what a function has made; an iterator that was given is its owner's."""
        if self._own and isinstance(self._batches, Generator):
            self._batches.close()

    def identity(self) -> dict[str, Any]:
        """A digest of the first batch."""
        return _identity(None, self._first.rows, self._first.known)

    def _check(self, number: int, given: Any) -> Selection:
        try:
            with _on_host():
                table = tables.as_table(self.graph, given)
                size = tables.one_axis(self.graph, table)
                rows, known, _ = tables.check_table(self.graph, table)
        except StateError as error:
            raise StateError(f"batch {number} of the stream: {error}") from None
        if self.batch_size not in (0, size):
            raise StateError(
                f"batch {number} of the stream has {size} rows, and those before have {self.batch_size}: "
                "all batches need one size (drop an incomplete last one)"
            )
        self.batch_size = size
        # A loader may write its next batch where this one stands: values were narrowed into arrays of our
        # own, what is known of them is copied.
        put = lambda x, how: {b: jax.device_put(how(v)) for b, v in x.items()}
        return Selection(put(rows, np.asarray), known=put(known, np.array))


class Parts:
    """A source of several processes, each of which has a part of the rows and makes its part of a batch.

    What every process has as an array is the rows of all: one process's after the other's.

    :param processes: how many there are.
    :raises ArgumentError: for a batch that they do not divide.
    :raises StateError: in all, where the rows of one are wrong, or parts are not of one size. Of rows that
        are read later (memory maps, streams) the processes tell one another batch by batch.
    """

    def __init__(
        self,
        graph: FactorGraph,
        data: Data,
        weights: Any,
        batch_size: int | None,
        rng_key: Array,
        processes: int,
    ) -> None:
        size = DEFAULT_BATCH if batch_size is None else batch_size
        if size % processes and not (batch_size is None and _is_stream(data)):
            raise ArgumentError(
                f"fit: batch_size is that of all {processes} processes together, a multiple of their number; "
                f"got {size}"
            )
        own = None if batch_size is None and _is_stream(data) else size // processes
        key = random.fold_in(random.key_pair(rng_key), jax.process_index())
        made, rows = _tried(lambda: _with_sample(_own_source(graph, data, weights, own, key, True)))
        sizes = sharding.gathered(np.array([rows, made.batch_size]))
        if (sizes != sizes[0]).any():
            raise StateError(
                f"the processes have samples of {sizes[:, 0].tolist()} rows and batches of "
                f"{sizes[:, 1].tolist()}: each has a part of the data of one size"
            )
        self._own, self.batch_size = made, int(sizes[:, 1].sum())
        self._read_later = _is_stream(data) or _is_mapped(data)
        self._scale = 1.0 if weights is None else _share(weights)

    def sample(self) -> Selection:
        """Those of all processes."""
        own = self._own.sample()
        rows, known, weights = sharding.gathered((own.rows, own.known, self._weights(own)))
        flat = lambda tree: jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), tree)
        return Selection(flat(rows), None, flat(weights), flat(known))

    def batch(self, number: int) -> Selection:
        """The part of each, side by side over the devices."""
        make = lambda: self._own.batch(number)
        own = _tried(make) if self._read_later else make()
        rows, known, weights = sharding.together((own.rows, own.known, self._weights(own)))
        return Selection(rows, None, weights, known)

    def identity(self) -> dict[str, Any]:
        """A digest of what tells the parts."""
        told = hashlib.sha256(json.dumps(self._own.identity(), sort_keys=True).encode()).digest()
        return {"data": sharding.gathered(np.frombuffer(told, np.uint8)).tobytes().hex()}

    def _weights(self, own: Selection) -> np.ndarray | None:
        return None if own.weights is None else np.asarray(own.weights) * np.float32(self._scale)


def _tried(make: Callable[[], T]) -> T:
    """:raises StateError: in all processes, where one fails."""
    made, error = None, None
    try:
        made = make()
    except Exception as raised:
        error = raised
    failed = np.flatnonzero(sharding.gathered(np.array(error is not None)))
    if error is not None:
        raise error
    if len(failed) or made is None:
        raise StateError(f"the data of process {failed[0]} are wrong: see its error")
    return made


def _with_sample(source: Source) -> tuple[Source, int]:
    """A source, and how many rows its sample has."""
    return source, len(next(iter(source.sample().rows.values())))


def _share(weights: Any) -> float:
    """What the mean weight of this process is of that of all."""
    mean = float(np.mean(np.asarray(weights, float)))
    return mean / float(sharding.gathered(np.array(mean)).mean())


def _identity(weights: np.ndarray | None, rows: Mapping[str, Any], known: Mapping[str, Any]) -> dict:
    data = jax.device_get({**rows, **{f"known of {b}": k for b, k in known.items()}})
    return {"data": digest(data), "weights": None if weights is None else digest({"weights": weights})}


def _on_host() -> contextlib.AbstractContextManager:
    """A look at values must not wait for the accelerator, which has steps to do."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS may leave the host out
        return contextlib.nullcontext()
