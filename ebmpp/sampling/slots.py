# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Slots: the places in which coupled pairs run, and the queue of pairs that they take from."""

from typing import NamedTuple

from jaxtyping import Bool

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core.types import Chains, Counts, Keys, Which
from ebmpp.moves.move import Flags

# Each stage of the tail takes some 1.6 s to compile. At 784x1000, where a pair takes 37 sweeps and the last
# 1389, stages of 64, 32, 16 and 4 slots take 1.8 s; ending at 8 costs 15 % more, a stage of 8 gains nothing.
_HALVE_ABOVE, _STOP_AT = 16, 4
#: Pairs that run at once. On CPU 64 to 256 are within 10 % of one another, and 64 leave one stage fewer.
_SLOTS = 64
# On an accelerator a sweep of fewer than some 500 rows is all launches: by compiling for one, not measured on
# one, arithmetic of 0.1 ms at 784x500 beside 0.25 ms of launches with 1024 slots.
_ACCELERATED_SLOTS, _ACCELERATED_STOP = 4096, 256
# Stages of 64, 16 and 4 compile in three quarters of the time. They take as long at 200x100 (46.6 ms, 46.2),
# 4 % longer at 784x500, and 2.5 ms longer at 16x16 with a heavy tail: right where a sweep is nearly nothing.
_SMALL = 2**15


class Jobs(NamedTuple):
    """The pairs to be run."""

    starts: Chains
    """Both chains of each."""
    same: Flags
    """On which parts of a block they agree."""
    keys: Keys
    """A key pair each."""
    queue: Counts
    """Numbers of jobs, those that wait first."""
    waiting: Array
    """How many wait."""


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

    @classmethod
    def empty(cls, jobs: Jobs, size: int) -> "Slots":
        """``size`` slots in which nothing runs."""
        zeros, off = jnp.zeros(size, jnp.int32), jnp.zeros(size, bool)
        z = {b: jnp.zeros((2, size, *v.shape[2:]), v.dtype) for b, v in jobs.starts.items()}
        same = {b: jnp.zeros((size, s.shape[1]), bool) for b, s in jobs.same.items()}
        return cls(z, same, zeros, zeros, zeros, zeros, jnp.zeros((2, size), bool), off)

    def fill(self, jobs: Jobs, started: Array, lag: Array) -> tuple["Slots", Array]:
        """Give the next jobs of the queue to idle slots.

        :param started: how many jobs have been started.
        :param lag: the time at which they start.
        :return: the slots, and how many jobs have been started now.
        """
        idle = ~self.active
        position = started + jnp.cumsum(idle) - 1
        take = idle & (position < jobs.waiting)

        def load(slots: Slots) -> Slots:
            job = jnp.where(take, jobs.queue[jnp.where(take, position, 0)], slots.job)
            z, same = {}, {}
            for b, start in jobs.starts.items():
                mask = take.reshape(1, -1, *(1,) * (start.ndim - 2))
                z[b] = jnp.where(mask, start[:, job], slots.z[b])
                same[b] = jnp.where(take[:, None], jobs.same[b][job], slots.same[b])
            zero = lambda a: jnp.where(take, 0, a)
            return Slots(
                z,
                same,
                job,
                jnp.where(take, lag, slots.t),
                zero(slots.move),
                zero(slots.trial),
                slots.accepted & ~take[None],
                slots.active | take,
            )

        # A branch waits for the host there; here it saves a gather a sweep.
        loaded = load(self) if accelerated() else lax.cond(take.any(), load, lambda slots: slots, self)
        return loaded, started + take.sum(dtype=jnp.int32)

    def compact(self, size: int) -> "Slots":
        """The live slots, in ``size`` places."""
        keep = jnp.argsort(~self.active, stable=True)[:size]
        return self._replace(
            z={b: v[:, keep] for b, v in self.z.items()},
            same={b: v[keep] for b, v in self.same.items()},
            job=self.job[keep],
            t=self.t[keep],
            move=self.move[keep],
            trial=self.trial[keep],
            accepted=self.accepted[:, keep],
            active=self.active[keep],
        )


def accelerated() -> bool:
    """Whether programs are for something else than a CPU."""
    return jax.default_backend() != "cpu"


def first_size(num_slots: int | None, num_jobs: int) -> int:
    """How many slots there are at first: no more than there are jobs, but for a power of two.

    :param num_slots: None for as many as suit the device.
    """
    if num_slots is None:
        num_slots = _ACCELERATED_SLOTS if accelerated() else _SLOTS
    return min(num_slots, max(_STOP_AT, 1 << (num_jobs - 1).bit_length()))


def stage_sizes(size: int, work: int) -> list[int]:
    """How many slots run, as fewer and fewer pairs are left.

    :param size: at first.
    :param work: numbers that a sweep of one pair touches, roughly.
    """
    sizes, stop = [size], _ACCELERATED_STOP if accelerated() else _STOP_AT
    if accelerated() or work <= _SMALL:
        while sizes[-1] >= 4 * stop:
            sizes.append(sizes[-1] // 4)
        return sizes
    while sizes[-1] > stop:
        smaller = sizes[-1] // (2 if sizes[-1] > _HALVE_ABOVE else 4)
        sizes.append(max(stop, smaller))
    return sizes
