# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Slots: the places in which coupled pairs run, and the queue of pairs that they take from."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxtyping import Bool, Int32

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import backend
from ebmpp.core.types import Chains, Counts, Which
from ebmpp.moves.move import Flags

#: Pairs that run at once, of many. On CPU 64 to 256 are within 10 % of one another.
_SLOTS = 64
#: Of so few pairs a chunk runs at once, in one loop, which compiles in 0.65 of the time of two. Gradients by
#: 100 pairs take 0.67 to 0.98 of what 64 slots take where k is 1, and 0.9 to 1.15 where it is 20 or 100, and
#: all slots are busy for long; those by 128 pairs 0.78 to 0.98, and 0.98 to 1.34.
_FEW_JOBS = 100
#: Pairs whose starts are held at once: more would be most of what 10^6 pairs of a large model take.
_READY = 16384
#: Slots that the tail sweeps at a time, on a CPU: see :func:`stages`.
_CHUNK = 8
# On an accelerator a sweep of fewer than some 500 rows is all launches: by compiling for one, not measured on
# one, arithmetic of 0.1 ms at 784x500 beside 0.25 ms of launches with 1024 slots.
_ACCELERATED_SLOTS, _ACCELERATED_STOP = 4096, 256


class Jobs(NamedTuple):
    """Pairs that are ready to be run: all, or some of them that follow one another."""

    starts: Chains
    """Both chains of each."""
    same: Flags
    """On which parts of a block they agree."""
    queue: Counts
    """Their places here, those that wait first."""
    waiting: Array
    """How many wait."""
    first: Array | int
    """The number of the first job."""


class Slots(NamedTuple):
    """What runs in each slot."""

    z: Chains
    """Both chains."""
    same: Flags
    """On which parts of a block the two chains agree: see :func:`ebmpp.moves.note`."""
    job: Counts
    t: Counts
    """Time of the leading chain."""
    move: Counts
    """The next part of a move to make, counted through all moves."""
    trial: Counts
    accepted: Bool[Array, "2 rows"]
    """Which chain has made it."""
    active: Which

    def pack(self) -> "Packed":
        """What a loop carries, in few arrays."""
        numbers = (self.job, self.t, self.move, self.trial, *self.accepted, self.active)
        return Packed(self.z, self.same, jnp.stack([n.astype(jnp.int32) for n in numbers]))

    def fill(self, jobs: Jobs, started: Array, lag: Array) -> tuple["Slots", Array]:
        """Give the next jobs of the queue to idle slots.

        :param started: how many jobs have been started.
        :param lag: the time at which they start.
        :return: the slots, and how many jobs have been started now.
        """
        idle = ~self.active
        position = started + jnp.cumsum(idle) - 1
        take = idle & (position < jobs.waiting)
        begun = jnp.minimum(position[-1] + 1, jobs.waiting)

        def load(slots: Slots) -> Slots:
            place = jobs.queue[jnp.where(take, position, 0)]
            z, same = {}, {}
            for b, start in jobs.starts.items():
                mask = take.reshape(1, -1, *(1,) * (start.ndim - 2))
                z[b] = jnp.where(mask, start[:, place], slots.z[b])
                same[b] = jnp.where(take[:, None], jobs.same[b][place], slots.same[b])
            zero = lambda a: jnp.where(take, 0, a)
            return Slots(
                z,
                same,
                jnp.where(take, jobs.first + place, slots.job),
                jnp.where(take, lag, slots.t),
                zero(slots.move),
                zero(slots.trial),
                slots.accepted & ~take[None],
                slots.active | take,
            )

        if backend.accelerated():
            return load(self), begun  # a branch waits for the host there; here it saves a gather a sweep
        return lax.cond(begun > started, load, lambda slots: slots, self), begun


class Packed(NamedTuple):
    """Slots, their numbers in one array: each that a loop carries or compacts is a kernel to compile."""

    z: Chains
    same: Flags
    numbers: Int32[Array, "7 rows"]

    @classmethod
    def empty(cls, rows: Mapping[str, jax.ShapeDtypeStruct], parts: Mapping[str, int], size: int) -> "Packed":
        """``size`` slots in which nothing runs, for chains like ``rows`` with so many flags a block."""
        z = {b: jnp.zeros((2, size, *v.shape[1:]), v.dtype) for b, v in rows.items()}
        same = {b: jnp.zeros((size, parts[b]), bool) for b in rows}
        return cls(z, same, jnp.zeros((7, size), jnp.int32))

    def unpack(self) -> Slots:
        """The slots."""
        job, t, move, trial, *truths = self.numbers
        accepted_x, accepted_y, active = (n > 0 for n in truths)
        return Slots(self.z, self.same, job, t, move, trial, jnp.stack([accepted_x, accepted_y]), active)

    def live(self) -> Array:
        """How many run."""
        return self.numbers[-1].sum(dtype=jnp.int32)

    def compact(self, size: int) -> "Packed":
        """The live slots, in the first of ``size`` places."""
        keep = jnp.argsort(1 - self.numbers[-1], stable=True)[:size]
        return self._each(lambda a, axis: jnp.take(a, keep, axis=axis))

    def part(self, start: Array, size: int) -> "Packed":
        """``size`` slots from ``start`` on."""
        return self._each(lambda a, axis: lax.dynamic_slice_in_dim(a, start, size, axis))

    def put(self, start: Array, part: "Packed") -> "Packed":
        """All slots, those from ``start`` on replaced."""
        update = lambda a, b, axis: lax.dynamic_update_slice_in_dim(a, b, start, axis)
        z = {b: update(v, part.z[b], 1) for b, v in self.z.items()}
        same = {b: update(s, part.same[b], 0) for b, s in self.same.items()}
        return Packed(z, same, update(self.numbers, part.numbers, 1))

    def _each(self, change: Callable[[Array, int], Array]) -> "Packed":
        z = {b: change(v, 1) for b, v in self.z.items()}
        return Packed(z, {b: change(s, 0) for b, s in self.same.items()}, change(self.numbers, 1))


def suitable(num_jobs: int) -> int:
    """How many slots suit a device, where so many jobs are run on all of them together."""
    if backend.accelerated():
        return _ACCELERATED_SLOTS
    return _CHUNK if num_jobs <= _FEW_JOBS else _SLOTS


def first_size(num_slots: int, num_jobs: int) -> int:
    """How many slots there are at first: no more than there are jobs, but for a power of two."""
    return min(num_slots, 1 << (num_jobs - 1).bit_length())


def ready_at_once(num_jobs: int) -> int:
    """How many pairs are made ready before they run."""
    return min(num_jobs, _READY)


class Stage(NamedTuple):
    """A loop over slots, as long as more than ``until`` of them are live."""

    size: int
    chunk: int
    """How many are swept at once; fewer than ``size``: only as many chunks as are live."""
    until: int


def stages(size: int) -> list[Stage]:
    """The loops that pairs go through; only the first takes new ones.

    On a CPU each loop takes more than a second to compile, so there are two: all slots at once, and, when
    half of them are idle, the live ones in chunks, of which there are fewer and fewer. On an accelerator a
    loop within a loop would wait for the host; there each is a quarter of the one before.

    :param size: slots at first.
    """
    if backend.accelerated():
        sizes = [size]
        while sizes[-1] >= 4 * _ACCELERATED_STOP:
            sizes.append(sizes[-1] // 4)
        return [Stage(n, n, until) for n, until in zip(sizes, (*sizes[1:], 0), strict=True)]
    if size <= _CHUNK:
        return [Stage(size, size, 0)]
    half = -(-size // (2 * _CHUNK)) * _CHUNK
    return [Stage(size, size, half), Stage(half, _CHUNK, 0)]
