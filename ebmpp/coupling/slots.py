# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Inputs and outcome of a run of coupled pairs, and the slots in which they run."""

from collections.abc import Callable, Mapping
import dataclasses
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Bool, Int32, Integer
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Chains,
    Counts,
    Keys,
    PerRow,
    RowMask,
    Rows,
    Scalar,
    State,
    backend,
    checks,
)
from ebmpp.graph.states import Clamped
from ebmpp.moves import Target, search
from ebmpp.moves.couplings import where_rows
from ebmpp.moves.move import Flags

#: Pairs that run at once on a CPU; 64 to 256 are within 10 % of each other.
_SLOTS = 64
_MEETING_QUANTILE = 0.95
#: Up to this number of pairs one chunk of slots runs, in one loop, which compiles in
#: 0.65 of the time of two, and gives gradients by 100 pairs in 0.67 to 1.15 of the time
#: with 64 slots.
_FEW_JOBS = 100
#: Slots that the tail sweeps together on a CPU: see :func:`slot_loops`.
_CHUNK = 8
# On an accelerator a sweep of fewer than about 500 rows is bound by kernel launches.
_ACCELERATED_SLOTS = 4096
_ACCELERATED_STOP = 256


class Window(NamedTuple):
    """Window of states that the estimator :math:`H_{k:m}` averages, and the lag; may be traced."""

    k: Any
    m: Any
    lag: Any
    max_sweeps: Any
    """Sweeps of the leading chain after which an unmet pair stops; 0 for no limit.
    A draw may take at most ``MOST_TRIALS`` trials, and at
    most 1024 times this limit."""

    def after(
        self,
        tau: Integer[np.ndarray, "pairs"],
        level: float = _MEETING_QUANTILE,
        length: int = 2,
    ) -> tuple["Window", int]:
        """Return the window of k = lag and m = length * lag, by the meeting times of a pilot.

        The lag is a quantile of them, which is returned too, but leaves the longest of
        them until ``max_sweeps``, or half of these sweeps if a pair is unmet.

        :param tau: meeting times; -1 if unmet.
        :param level: probability of the quantile.
        """
        times = np.where(tau < 0, self.max_sweeps or tau.max(), tau) - self.lag
        quantile = int(np.quantile(times, level, method="inverted_cdf"))
        lag = quantile
        if self.max_sweeps:
            longest = int(times.max()) + 1 if tau.min() >= 0 else self.max_sweeps / 2
            lag = min(lag, int(self.max_sweeps - longest))
        lag = max(1, lag)
        return self._replace(k=lag, m=length * lag, lag=lag), quantile

    def inside(self, t: Array) -> Array:
        """Return the weight of f(X_t) in the ergodic average."""
        return ((t >= self.k) & (t <= self.m)).astype(jnp.int32)

    def correction(self, t: Array) -> Array:
        """Return the weight of f(X_t) - f(Y_{t - lag}) while the pair is unmet."""
        first = jnp.maximum(self.lag, t - self.m)
        # Not negative where they count, so truncation equals floor division, which
        # takes ten kernels.
        before = lax.div(first + self.lag - 1, self.lag)
        count = lax.div(t - self.k, self.lag) - before + 1
        return jnp.where(t >= self.k + self.lag, count, 0)


def check_window(
    who: str, k: int | None, m: int | None, lag: int | None, max_sweeps: int | None
) -> Window:
    """Return a checked window, with None as 1 for k and for lag.

    See :func:`~ebmpp.unbiased_expectation`.
    """
    k = 1 if k is None else checks.count(f"{who}: k", k, least=0)
    m = k if m is None else checks.count(f"{who}: m", m, least=k)
    lag = 1 if lag is None else checks.count(f"{who}: lag", lag)
    limit = checks.optional_count(f"{who}: max_sweeps", max_sweeps, lag + 1)
    return Window(k, m, lag, limit or 0)


class Outcome(NamedTuple):
    """Sums, meeting times and counts of a run."""

    total: Any  # sum of the accumulator, to be divided by `m - k + 1`
    meeting_time: Integer[Array, "jobs"]
    """First t with X_t = Y_{t - lag}; -1 if unmet, or if a draw before m failed."""
    trials: Scalar
    """Mean number of coupled trials per move, trials of residuals included."""
    acceptance: Scalar | None
    """Acceptance in the leading chains' first ``lag`` sweeps; None without Metropolis moves."""
    broken: Scalar | int = 0
    """Number of pairs stopped by a failed draw: see :class:`~ebmpp.moves.Attempt`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fresh:
    """Starting states that are drawn when needed, to save memory.

    See :func:`ebmpp.moves.search.initial_states`.

    :param init: values of some blocks, ``(rows, *shape)`` or one row for all states.
    :param kind: one of :data:`~ebmpp.moves.search.STARTS`.
    """

    keys: Keys
    init: State
    kind: str = dataclasses.field(metadata={"static": True})

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, target: Target) -> Blocks:
        """Draw the states."""

        def draw(target, keys):
            return search.initial_states(target, keys, self.init, self.kind)

        return target.starts(draw, self.keys)


def start_rows(starts: Rows | Fresh, target: Target) -> Blocks:
    """Return starting states as rows, drawn if need be."""
    return starts.rows(target) if isinstance(starts, Fresh) else dict(starts)


class Job(NamedTuple):
    """Inputs of the jobs, each with a leading axis."""

    number: Counts
    x: Rows | Fresh
    y: Rows | Fresh | None  # None: the start of the leading chain
    clamped: Clamped | None  # values that differ between jobs
    weights: PerRow | None

    def slice(self, first: Array | int, size: int) -> "Job":
        """Return ``size`` jobs from ``first`` on; arrays of one row are shared by all jobs."""
        num_jobs = len(self.number)

        def cut(a):
            return lax.dynamic_slice_in_dim(a, first, size) if len(a) == num_jobs else a

        return self if size == num_jobs else jax.tree.map(cut, self)


class Jobs(NamedTuple):
    """Consecutive pairs that are ready to run."""

    starts: Chains  # states of both chains
    same: Flags  # parts of each block on which the chains agree
    queue: Counts  # indices into `starts`, waiting pairs first
    waiting: Array  # number of waiting pairs
    first: Array | int  # number of the first job


class Slots(NamedTuple):
    """The pair that runs in each slot."""

    z: Chains  # states of both chains
    # parts of each block on which the chains agree: see :func:`update_flags` of
    # :mod:`ebmpp.moves.move`
    same: Flags
    job: Counts
    t: Counts  # time of the leading chain
    move: Counts  # next part of a move, counted over all moves
    trial: Counts
    accepted: Bool[Array, "2 rows"]  # chains that have completed this part
    active: RowMask

    def pack(self) -> "Packed":
        """Return the same in fewer arrays, for a loop to carry."""
        fields = (self.job, self.t, self.move, self.trial, *self.accepted, self.active)
        numbers = jnp.stack([field.astype(jnp.int32) for field in fields])
        return Packed(self.z, self.same, numbers)

    def fill(self, jobs: Jobs, started: Array, lag: Array) -> tuple["Slots", Array]:
        """Start the next jobs in idle slots, at time ``lag``.

        :return: the slots, and the number of jobs started so far.
        """
        idle = ~self.active
        position = started + jnp.cumsum(idle) - 1
        take = idle & (position < jobs.waiting)
        begun = jnp.minimum(position[-1] + 1, jobs.waiting)

        def load(slots):
            place = jobs.queue[jnp.where(take, position, 0)]
            z = {}
            same = {}
            for b, start in jobs.starts.items():
                z[b] = where_rows(take[None], start[:, place], slots.z[b])
                same[b] = jnp.where(take[:, None], jobs.same[b][place], slots.same[b])
            return Slots(
                z,
                same,
                job=jnp.where(take, jobs.first + place, slots.job),
                t=jnp.where(take, lag, slots.t),
                move=jnp.where(take, 0, slots.move),
                trial=jnp.where(take, 0, slots.trial),
                accepted=slots.accepted & ~take[None],
                active=slots.active | take,
            )

        if backend.accelerated():
            return load(self), begun  # where a branch synchronises with the host
        return lax.cond(begun > started, load, lambda slots: slots, self), begun


class Packed(NamedTuple):
    """Slots with their numbers in one array.

    Each array that a loop carries is a kernel to compile.
    """

    z: Chains
    same: Flags
    numbers: Int32[Array, "7 rows"]

    @classmethod
    def empty(
        cls,
        rows: Mapping[str, jax.ShapeDtypeStruct],
        parts: Mapping[str, int],
        size: int,
    ) -> "Packed":
        """Return ``size`` idle slots for states like ``rows`` and ``parts`` flags per block."""
        z = {b: jnp.zeros((2, size, *v.shape[1:]), v.dtype) for b, v in rows.items()}
        same = {b: jnp.zeros((size, parts[b]), bool) for b in rows}
        return cls(z, same, jnp.zeros((7, size), jnp.int32))

    def unpack(self) -> Slots:
        """Return the slots."""
        job, t, move, trial, *flags = self.numbers
        *accepted, active = (flag > 0 for flag in flags)
        accepted = jnp.stack(accepted)
        return Slots(self.z, self.same, job, t, move, trial, accepted, active)

    def live(self) -> Array:
        """Return the number of active slots."""
        return self.numbers[-1].sum(dtype=jnp.int32)

    def compact(self, size: int) -> "Packed":
        """Return ``size`` slots, the active ones first."""
        keep = jnp.argsort(1 - self.numbers[-1], stable=True)[:size]
        return self._map(lambda axis, a: jnp.take(a, keep, axis=axis))

    def part(self, start: Array, size: int) -> "Packed":
        """Return ``size`` slots from ``start`` on."""
        return self._map(lambda axis, a: lax.dynamic_slice_in_dim(a, start, size, axis))

    def put(self, start: Array, part: "Packed") -> "Packed":
        """Replace the slots from ``start`` on."""
        return self._map(
            lambda axis, a, b: lax.dynamic_update_slice_in_dim(a, b, start, axis), part
        )

    def _map(self, change: Callable[..., Array], *others: "Packed") -> "Packed":
        """Return ``change(axis of the slots, array, ...)`` of all arrays."""
        trees = zip(_SLOT_AXES, self, *others)
        return Packed(
            *(jax.tree.map(partial(change, axis), *arrays) for axis, *arrays in trees)
        )


_SLOT_AXES = (1, 0, 1)  # in the arrays of the fields of Packed


def slots_for(num_jobs: int) -> int:
    """Return the default number of slots per device for ``num_jobs`` jobs on all devices."""
    if backend.accelerated():
        return _ACCELERATED_SLOTS
    return _CHUNK if num_jobs <= _FEW_JOBS else _SLOTS


class SlotLoop(NamedTuple):
    """A loop over slots that runs while more than ``until`` of them are active."""

    size: int
    # slots swept together; if fewer than `size`, chunks without active slots are
    # skipped
    chunk: int
    until: int


def slot_loops(size: int) -> list[SlotLoop]:
    """Return the consecutive loops over ever fewer slots; only the first starts new pairs.

    On a CPU each loop takes more than a second to compile, so there are two: all slots
    together, and, once half of them are idle, the active ones in chunks. On an
    accelerator a nested loop would synchronise with the host, so each loop has a
    quarter of the slots of the one before.
    """
    if backend.accelerated():
        sizes = [size]
        while sizes[-1] >= 4 * _ACCELERATED_STOP:
            sizes.append(sizes[-1] // 4)
        ends = [*sizes[1:], 0]
        return [SlotLoop(n, n, end) for n, end in zip(sizes, ends)]
    if size <= _CHUNK:
        return [SlotLoop(size, size, 0)]
    half = -(-size // (2 * _CHUNK)) * _CHUNK
    return [SlotLoop(size, size, half), SlotLoop(half, _CHUNK, 0)]
