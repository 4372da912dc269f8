# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The engine: many coupled pairs run to their meeting, in slots.

A pair (a *job*) is the chain X, ahead by ``lag`` sweeps, and its follower Y. Meeting times have heavy
tails, so a fixed number of slots is kept busy: a slot whose pair is done takes the next job in the same
loop, and when no jobs wait the live pairs are compacted into ever smaller slots. A job's draws depend on
its own key pair, time, move and trial alone, so results do not depend on slots or order. Every started
job runs to its end: nothing is capped, and a pair that a user's ``max_sweeps`` stops, or a draw that cannot
be made, is flagged.

What is summed, for the estimator H_{k:m} (Jacob, O'Leary, Atchade 2020; lags: Biswas, Jacob, Vanetti
2019), are weighted values of states, ``sum_i w_i f(state_i)`` with whole-number weights.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

from jaxtyping import Integer, UInt32

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random, sharding
from ebmpp.core.types import Chains, Counts, Keys, PerRow, Rows, Scalar, Which
from ebmpp.graph.factors.lateral import each_part
from ebmpp.graph.states import Given
from ebmpp.moves.couplings import MOST_TRIALS, Trial
from ebmpp.moves.move import Flags, Move, agree, compare, copied, draw_sweep, flat, note, offsets
from ebmpp.moves.target import Target
from ebmpp.sampling.slots import Jobs, Packed, Slots, Stage, first_size, stages

#: Trials that a draw may take for each of ``max_sweeps``: a pair that stalls is to be stopped by it too.
_TRIALS_A_SWEEP = 1024
_FLUSH_ROWS = 512  # states a weighted product takes at once: below this it is bound by overhead


class Accumulator(Protocol):
    """Sums weighted values of states; a hashable value."""

    per_job: ClassVar[bool]
    """Whether there is a sum for each job, with a leading axis of jobs, or one over all."""

    def init(self, target: Target, num_jobs: int) -> Any:
        """The empty sum."""

    def add(self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts) -> Any:
        """``total`` plus the weighted values of rows ``x`` that belong to ``jobs``."""


class Window(NamedTuple):
    """Which states of a path count: H_{k:m} with a lag; all may be traced."""

    k: Array
    m: Array
    lag: Array
    max_sweeps: Array
    """Sweeps of the leading chain after which an unmet pair stops; 0 for no limit. Trials of a draw have a
    limit of :data:`~ebmpp.moves.couplings.MOST_TRIALS`, and of 1024 for each of these sweeps."""

    def inside(self, t: Array) -> Array:
        """Weight of f(X_t) in the ergodic average."""
        return ((t >= self.k) & (t <= self.m)).astype(jnp.int32)

    def correction(self, t: Array) -> Array:
        """Weight of f(X_t) - f(Y_{t - lag}) while the pair is unmet."""
        back = jnp.maximum(self.lag, t - self.m)
        # whole and, where they count, not negative: no need of Python's rounding, which takes ten kernels
        count = lax.div(t - self.k, self.lag) - lax.div(back + self.lag - 1, self.lag) + 1
        return jnp.where(t >= self.k + self.lag, count, 0)


class Outcome(NamedTuple):
    """What became of the pairs."""

    total: Any
    """The accumulator's sum, to be divided by ``m - k + 1``."""
    meeting_time: Integer[Array, "jobs"]
    """First t with X_t = Y_{t - lag}; -1 where unmet."""
    trials: Scalar
    """Coupled trials of a move, those of residuals included, over moves done."""
    acceptance: Scalar | None
    """Proposals that a chain took over those it was made; None without Metropolis moves."""
    broken: Scalar | int = 0
    """Pairs that were stopped because a draw could not be made: see
    :class:`~ebmpp.moves.couplings.Attempt`."""


class _Run(NamedTuple):
    slots: Packed
    total: Any
    meeting_time: Array
    taken: Array  # how many jobs of the queue have been started
    count: "_Count"


class _Count(NamedTuple):
    """Sums over the moves of all pairs; floats, since they pass 2**31."""

    attempts: Array
    moves: Array
    proposals: Array
    taken: Array
    broken: Array  # pairs

    def plus(self, tally: "_Count") -> "_Count":
        """With what was counted slot by slot: one reduction for all."""
        counted = jnp.stack([n.astype(jnp.float32) for n in tally]).sum(-1)
        return _Count(*(jnp.stack(self) + counted))


class _Job(NamedTuple):
    """What each job brings, with a leading axis."""

    x: Rows
    y: Rows
    given: Given | None  # of its target, where that is another in each
    weights: PerRow | None


@partial(jax.jit, static_argnames=("moves", "accumulator", "num_slots"))
def run_pairs(
    target: Target,
    moves: tuple[Move, ...],
    accumulator: Accumulator,
    num_slots: int | None,
    x: Rows,
    y: Rows,
    key: UInt32[Array, "2"],
    window: Window,
    job_weights: PerRow | None = None,
) -> Outcome:
    """Run every job to its meeting and to time ``m``; each device of a mesh runs its share of them.

    :param target: units are held in all pairs alike (one row), or in each its own (a row a job).
    :param moves: of a sweep; blocks of ``x`` that they do not change stay as they are.
    :param num_slots: on each device; None for as many as suit it.
    :param x: starts of the leading chains, ``(jobs, *shape)`` a block.
    :param y: starts of the following chains.
    :param key: of the run, ``(2,)``; job j draws from ``fold_in(key, j)``.
    :param job_weights: what a job counts in the sum, ``(jobs,)``; 1 each by default.
    """
    num_jobs = len(next(iter(x.values())))
    own = target.given if target.num_rows > 1 else None
    shared = target if own is None else dataclasses.replace(target, given=Given())

    def some(jobs: _Job, alike: tuple, first: Array, meant: Which | None) -> tuple[Any, Any]:
        target, key, window = alike
        mine = target if jobs.given is None else dataclasses.replace(target, given=jobs.given)
        engine = _Engine(mine, moves, accumulator, window, jobs.weights, meant)
        keys = random.fold_in(key, first + jnp.arange(len(next(iter(jobs.x.values())))))
        run = engine.run(jobs.x, jobs.y, keys, num_slots)
        of_each, of_all = (run.total, ()) if accumulator.per_job else ((), run.total)
        return (run.meeting_time, of_each), (run.count, of_all)

    jobs = _Job(x, y, own, job_weights)
    (time, of_each), (count, of_all) = sharding.apart(some, jobs, (shared, key, window), num_jobs)
    trials = count.attempts / jnp.maximum(count.moves, 1)
    acceptance = count.taken / count.proposals if any(move.proposes for move in moves) else None
    total = of_each if accumulator.per_job else of_all
    return Outcome(total, sharding.everywhere(time), trials, acceptance, count.broken)


class _Engine:
    """The loops of one run; params and window are traced."""

    def __init__(
        self,
        target: Target,
        moves: tuple[Move, ...],
        accumulator: Accumulator,
        window: Window,
        job_weights: PerRow | None,
        meant: Which | None = None,
    ) -> None:
        self.target, self.moves, self.meant = target, moves, meant
        if meant is not None:
            job_weights = jnp.where(meant, 1.0 if job_weights is None else job_weights, 0.0)
        self.job_weights = job_weights
        self.accumulator, self.window = accumulator, window
        self.free = tuple({b: None for move in moves for b in move.blocks})
        self.offsets = offsets(target.graph, moves)
        self.proposes = sum(move.proposes for move in moves)
        limit = jnp.minimum(window.max_sweeps, MOST_TRIALS // _TRIALS_A_SWEEP) * _TRIALS_A_SWEEP
        self.most_trials = jnp.where(window.max_sweeps > 0, limit, MOST_TRIALS)

    def run(self, x: Rows, y: Rows, keys: Keys, num_slots: int | None) -> _Run:
        """All jobs to their ends: those that do not count are never started."""
        total = self.accumulator.init(self.target, len(keys))
        x, total, count = self.advance(x, keys, total)
        starts = {b: jnp.stack([x[b], y[b]]) for b in x}
        same = compare(self.target, starts)
        total, met = self.load(starts, same, total)
        met &= _finite(self.target.params)  # draws of params that are not finite can agree, and mean nothing
        done = met & (self.window.lag >= self.window.m)
        if self.meant is not None:
            done |= ~self.meant
        queue = jnp.argsort(done, stable=True).astype(jnp.int32)  # also where jax counts in 64 bits
        meeting_time = jnp.where(met, self.window.lag, -1)
        jobs = Jobs(starts, same, keys, queue, (~done).sum(dtype=jnp.int32))
        return self.in_slots(jobs, total, meeting_time, count, first_size(num_slots, len(keys)))

    # -- before the slots: the leading chains run ahead ------------------------------------------

    def advance(self, x: Rows, keys: Keys, total: Any) -> tuple:
        """``lag`` sweeps of every leading chain, those at times k to m counted."""
        jobs = jnp.arange(len(keys))

        def one(t: Array, carry: tuple) -> tuple:
            x, total, taken = carry
            weights = jnp.broadcast_to(self.window.inside(t), jobs.shape)
            add = lambda total: self._add(total, x, weights, jobs)
            total = lax.cond(weights[0] > 0, add, lambda total: total, total)
            x, took = draw_sweep(self.target, x, self.moves, random.fold_in(keys, t + 1))
            took = took if self.meant is None else jnp.where(self.meant, took, 0)
            return x, total, taken + took.sum().astype(taken.dtype)

        zero = jnp.zeros((), jnp.float32)
        x, total, taken = lax.fori_loop(0, self.window.lag, one, (x, total, zero))
        made = self.proposes * (len(keys) if self.meant is None else self.meant.sum())
        proposals = (self.window.lag * made).astype(jnp.float32)
        return x, total, _Count(zero, zero, proposals, taken, zero)

    def load(self, starts: Chains, same: Flags, total: Any) -> tuple[Any, Which]:
        """Count the pairs (X_lag, Y_0); which of them are equal already."""
        met = agree(same, self.free, len(same[self.free[0]]))
        weights = self._weights(jnp.broadcast_to(self.window.lag, met.shape), met)
        jobs = jnp.arange(len(met))
        add = lambda total: self._add(total, flat(starts), weights.reshape(-1), jnp.tile(jobs, 2))
        return lax.cond((weights != 0).any(), add, lambda total: total, total), met

    def _weights(self, t: Counts, met: Which) -> Integer[Array, "2 rows"]:
        """Weights of the two chains at time t."""
        correction = jnp.where(met, 0, self.window.correction(t))
        return jnp.stack([self.window.inside(t) + correction, -correction])

    def _add(self, total: Any, x: Rows, weights: Counts, jobs: Counts) -> Any:
        weights = weights.astype(jnp.result_type(float))
        if self.job_weights is not None:
            weights = weights * self.job_weights[jobs]
        return self.accumulator.add(self.target, total, x, weights, jobs)

    # -- slots -----------------------------------------------------------------------------------

    def in_slots(self, jobs: Jobs, total: Any, meeting_time: Array, count: _Count, size: int) -> _Run:
        """All jobs through slots of ``size``, then through fewer and fewer when few are left."""
        slots, taken = Slots.empty(jobs, size).fill(jobs, jnp.zeros((), jnp.int32), self.window.lag)
        run = _Run(slots.pack(), total, meeting_time, taken, count)
        for number, stage in enumerate(stages(size)):
            # only the first stage takes new jobs: it ends when none waits
            run = self._stage(run, jobs, stage, refills=number == 0)
        return run

    def _stage(self, run: _Run, jobs: Jobs, stage: Stage, refills: bool) -> _Run:
        def going(run: _Run) -> Array:
            waits = refills & (run.taken < jobs.waiting)
            return waits | (run.slots.live() > stage.until)

        def chunks(run: _Run) -> _Run:
            run = run._replace(slots=run.slots.compact(stage.size))
            count = (run.slots.live() + stage.chunk - 1) // stage.chunk
            return lax.fori_loop(0, count, chunk, run)

        def chunk(number: Array, run: _Run) -> _Run:
            slots, start = run.slots, number * stage.chunk
            part = self._block(run._replace(slots=slots.part(start, stage.chunk)), jobs, refills=False)
            return part._replace(slots=slots.put(start, part.slots))

        if len(run.slots.numbers[0]) > stage.size:
            run = run._replace(slots=run.slots.compact(stage.size))
        if stage.chunk < stage.size:
            return lax.while_loop(going, chunks, run)
        return lax.while_loop(going, lambda run: self._block(run, jobs, refills), run)

    def _block(self, run: _Run, jobs: Jobs, refills: bool) -> _Run:
        """As many sweeps as a weighted product takes well, and their states added to the sum."""
        repeats = max(1, _FLUSH_ROWS // (2 * len(run.slots.numbers[0])))
        run, states, weights, owners = self._sweeps(run, jobs, repeats, refills)
        return run._replace(total=self._add(run.total, states, weights, owners))

    def _sweeps(self, run: _Run, jobs: Jobs, repeats: int, refills: bool) -> tuple:
        """``repeats`` sweeps, and their states, weights and numbers of jobs as rows."""

        def one(run: _Run, _: None) -> tuple[_Run, tuple]:
            slots, tally = self._sweep(run.slots.unpack(), jobs.keys)
            slots, meeting_time, weights, moves = self._book(slots, run.meeting_time)
            # the states that count are those before a slot takes its next job
            counted = slots.z, weights, jnp.stack([slots.job, slots.job])
            slots, taken = slots.fill(jobs, run.taken, self.window.lag) if refills else (slots, run.taken)
            count = run.count.plus(tally._replace(moves=moves))
            return _Run(slots.pack(), run.total, meeting_time, taken, count), counted

        if repeats == 1:
            run, counted = one(run, None)
            states, weights, owners = counted
            return run, flat(states), weights.reshape(-1), owners.reshape(-1)
        run, (states, weights, owners) = lax.scan(one, run, None, length=repeats)
        rows = {b: v.reshape(-1, *v.shape[3:]) for b, v in states.items()}
        return run, rows, weights.reshape(-1), owners.reshape(-1)

    def _sweep(self, slots: Slots, keys: Array) -> tuple[Slots, _Count]:
        """One attempt at each part of each move, in order; a row that is refused stalls at its part.

        :return: the slots, and what is to be counted, slot by slot.
        """
        keys = random.fold_in(keys[slots.job], slots.t + 1)
        # from what the loop carries, which has the same bits wherever it is read
        slots = slots._replace(z=copied(slots.z, slots.same))
        target, tally = self.target.take(slots.job), _Count(*(jnp.zeros_like(slots.job),) * 5)
        for start, move in zip(self.offsets, self.moves, strict=False):
            prepared = move.prepare(target, slots.z)
            step = partial(self._step, target=target, move=move, prepared=prepared, start=start, keys=keys)
            slots, tally = each_part(move.num_parts(target.graph), step, (slots, tally))
        return slots, tally

    def _step(
        self,
        part: Any,
        carry: tuple[Slots, _Count],
        target: Target,
        move: Move,
        prepared: Any,
        start: int,
        keys: Keys,
    ) -> tuple[Slots, _Count]:
        (slots, tally), index = carry, start + part
        at = slots.active & (slots.move == index)
        trial = Trial(
            random.fold_in(keys, index, slots.trial),
            slots.trial == 0,
            agree(slots.same, move.reads(target.graph), len(at)),
            part,
            slots.same,
            self.most_trials,
        )
        focused = move.focus(target, prepared, slots.z, part)
        tried = move.attempt(target, focused, slots.z, trial)
        take = at[None] & ~slots.accepted & jnp.stack([tried.accept_x, tried.accept_y])
        accepted = slots.accepted | take
        ready = at & accepted[0] & accepted[1]
        late = at & ~ready & (slots.trial + 1 >= self.most_trials)
        broken = at & (tried.broken | late)
        z = dict(slots.z)
        for b in move.blocks:
            proposed = jnp.stack([tried.x[b], tried.y[b]])
            z[b] = jnp.where(take.reshape(take.shape + (1,) * (proposed.ndim - 2)), proposed, z[b])
        now = tried._replace(accept_x=take[0], accept_y=take[1])
        slots = slots._replace(
            z=z,
            same=note(target, move, slots.same, z, part, now, ready),
            move=jnp.where(ready, index + 1, slots.move),
            trial=jnp.where(ready, 0, jnp.where(at, slots.trial + 1, slots.trial)),
            accepted=jnp.where(ready, False, accepted),
            active=slots.active & ~broken,
        )
        plus = lambda counted, some: counted + some.astype(counted.dtype)
        tally = tally._replace(attempts=plus(tally.attempts, at), broken=plus(tally.broken, broken))
        if move.proposes:
            tally = tally._replace(
                proposals=tally.proposals + jnp.where(at, 2 * move.proposes, 0),
                taken=tally.taken + jnp.where(at, tried.taken, 0),
            )
        return slots, tally

    def _book(self, slots: Slots, meeting_time: Array) -> tuple[Slots, Array, Array, Array]:
        """Advance the clock of finished sweeps, weigh their states, and retire pairs that are done.

        :return: the slots, the meeting times, the weights, and the moves that each slot has made.
        """
        moved = slots.active & (slots.move == self.offsets[-1])
        t = slots.t + moved.astype(slots.t.dtype)
        met = agree(slots.same, self.free, len(t))
        weights = jnp.where(moved, self._weights(t, met), 0)
        newly = moved & met & (meeting_time[slots.job] < 0)
        where = jnp.where(newly, slots.job, len(meeting_time))  # out of range: dropped
        meeting_time = meeting_time.at[where].set(t, mode="drop")
        late = (self.window.max_sweeps > 0) & (t >= self.window.max_sweeps)
        # a pair that has met goes on to m: stopped before, it would lack what the window still counts
        done = moved & jnp.where(met, t >= self.window.m, late)
        slots = slots._replace(t=t, move=jnp.where(moved, 0, slots.move), active=slots.active & ~done)
        return slots, meeting_time, weights, jnp.where(moved, self.offsets[-1], 0)


def _finite(params: Any) -> Array:
    # 0 times what is not finite is not a number
    return jnp.isfinite(sum((0 * leaf).sum() for leaf in jax.tree.leaves(params)))
