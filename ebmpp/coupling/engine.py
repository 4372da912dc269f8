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
from functools import partial, reduce
from typing import Any, NamedTuple

from jaxtyping import Integer, UInt32

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import backend, random, sharding
from ebmpp.core.compile import compiled
from ebmpp.core.types import Blocks, Chains, Counts, Key, Keys, PerRow, Rows, Which
from ebmpp.coupling.pairs import Accumulator, Fresh, Job, Outcome, Starts, Window, quick
from ebmpp.coupling.slots import Jobs, Packed, Slots, Stage, first_size, ready_at_once, stages, suitable
from ebmpp.graph.factors.lateral import each_part
from ebmpp.graph.states import Clamped
from ebmpp.moves.couplings import MOST_TRIALS, Trial
from ebmpp.moves.move import Flags, Move, agree, compare, copied, draw_sweep, flat, note, offsets
from ebmpp.moves.target import Target

#: Trials that a draw may take for each of ``max_sweeps``: a pair that stalls is to be stopped by it too.
_TRIALS_A_SWEEP = 1024
_NEVER = 2**31 - 1  # the time of a pair that has not met
_FLUSH_ROWS = 512  # states a weighted product takes at once: below this it is bound by overhead
_FEW_REPEATS = 8  # sweeps that idle slots may make before they are looked at


class _Run(NamedTuple):
    slots: Packed
    total: Any
    meeting_time: Array
    taken: Array  # how many jobs of the queue have been started
    count: Array  # the sums of a _Count over all pairs; floats, since they pass 2**31


class _Count(NamedTuple):
    """What is counted, slot by slot."""

    attempts: Array
    moves: Array
    proposals: Array
    taken: Array
    broken: Array  # pairs

    def sums(self) -> Array:
        """One reduction for all."""
        return jnp.stack([n.astype(jnp.float32) for n in self]).sum(-1)


# An accumulator of a caller's function is another one each time that the function is made anew.
@compiled(
    statics=(1, 2, 3),
    size=64,
    fast_compile=lambda target, moves, accumulator, *_, **__: quick(target.graph, moves, accumulator),
    key=lambda target, *_, **__: target.graph,
)
def run_pairs(
    target: Target,
    moves: tuple[Move, ...],
    accumulator: Accumulator,
    num_slots: int | None,
    x: Starts,
    y: Starts | None,
    key: UInt32[Array, "2"],
    window: Window,
    job_weights: PerRow | None = None,
) -> Outcome:
    """Run every job to its meeting and to time ``m``; each device of a mesh runs its share of them.

    :param target: units are held in all pairs alike (one row), or in each its own (a row a job).
    :param moves: of a sweep; blocks of ``x`` that they do not change stay as they are.
    :param num_slots: on each device; None for as many as suit it.
    :param x: starts of the leading chains, ``(jobs, *shape)`` a block, or how they are made.
    :param y: starts of the following chains; None for those of ``x``.
    :param key: of the run, ``(2,)``; job j draws from ``fold_in(key, j)``.
    :param job_weights: what a job counts in the sum, ``(jobs,)``; 1 each by default.
    """
    num_jobs = len(x) if isinstance(x, Fresh) else len(next(iter(x.values())))
    own = target.given if target.num_rows > 1 else None
    shared = target if own is None else dataclasses.replace(target, given=Clamped())
    size = suitable(num_jobs) if num_slots is None else num_slots

    def some(jobs: Job, alike: tuple, first: Array, meant: Which | None) -> tuple[Any, Any]:
        target, key, window = alike
        del first  # a job knows its number
        run = _Engine(target, moves, accumulator, window, jobs, meant, key).run(size)
        of_each, of_all = (run.total, ()) if accumulator.per_job else ((), run.total)
        time = jnp.where(run.meeting_time == _NEVER, -1, run.meeting_time)
        return (time, of_each), (run.count, of_all)

    jobs = Job(jnp.arange(num_jobs), x, y, own, job_weights)
    (time, of_each), (sums, of_all) = sharding.apart(some, jobs, (shared, key, window), num_jobs)
    count = _Count(*sums)
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
        jobs: Job,
        meant: Which | None,
        key: Key,
    ) -> None:
        self.target = target if jobs.given is None else dataclasses.replace(target, given=jobs.given)
        self.moves, self.jobs, self.meant = moves, jobs, meant
        self.keys = random.fold_in(key, jobs.number)
        self.accumulator, self.window = accumulator, window
        self.free = tuple({b: None for move in moves for b in move.blocks})
        self.offsets = offsets(target.graph, moves)
        self.proposes = sum(move.proposes for move in moves)
        limit = jnp.minimum(window.max_sweeps, MOST_TRIALS // _TRIALS_A_SWEEP) * _TRIALS_A_SWEEP
        self.most_trials = jnp.where(window.max_sweeps > 0, limit, MOST_TRIALS)

    def run(self, num_slots: int) -> _Run:
        """All jobs through slots, then through fewer and fewer when few are left.

        They are made ready some at a time, and slots go on from those of before to those of after. Jobs that
        are not meant are never started.
        """
        every = len(self.keys)
        first, *rest = stages(first_size(num_slots, every))
        size = ready_at_once(every)
        parts = -(-every // size)
        like = jax.eval_shape(lambda: self._starts(self.jobs.some(0, size))[0])
        slots = Packed.empty(like, {b: self.target.num_parts(b) for b in like}, first.size)
        zero = jnp.zeros((), jnp.int32)
        total = self.accumulator.init(self.target, every)
        start = _Run(slots, total, jnp.full(every, _NEVER, jnp.int32), zero, jnp.zeros(5))

        def some(number: Array | int, run: _Run) -> _Run:
            run, jobs = self.ready(run, number, size)
            slots, taken = run.slots.unpack().fill(jobs, zero, self.window.lag)
            run = run._replace(slots=slots.pack(), taken=taken)
            # only this stage takes new jobs: it ends when none waits
            return self._stage(run, first, jobs, last=True if parts == 1 else number == parts - 1)

        run = some(0, start) if parts == 1 else lax.fori_loop(0, parts, some, start)
        return reduce(self._stage, rest, run)

    # -- before the slots: the leading chains run ahead ------------------------------------------

    def ready(self, run: _Run, number: Array | int, size: int) -> tuple[_Run, Jobs]:
        """Part ``number`` of the jobs, ``size`` of them, ready to run."""
        every, meant = len(self.keys), self.meant
        # the last part begins earlier where there are too few: those were in the part before
        first = 0 if size == every else jnp.minimum(number * size, every - size)
        numbers = first + jnp.arange(size)
        if size < every:
            meant = (numbers >= number * size) & (True if meant is None else meant[numbers])
        x, y = self._starts(self.jobs.some(first, size))
        x, run = self.advance(run, x, numbers, meant)
        starts = {b: jnp.stack([x[b], y[b]]) for b in x}
        same = compare(self.target, starts)
        run, met = self.load(run, starts, same, numbers, meant)
        met &= _finite(self.target.params)  # draws of params that are not finite can agree, and mean nothing
        done = met & (self.window.lag >= self.window.m)
        if meant is not None:
            met, done = met & meant, done | ~meant
        queue = jnp.argsort(done, stable=True).astype(jnp.int32)  # also where jax counts in 64 bits
        time = run.meeting_time.at[numbers].min(jnp.where(met, self.window.lag, _NEVER))
        jobs = Jobs(starts, same, queue, (~done).sum(dtype=jnp.int32), first)
        return run._replace(meeting_time=time), jobs

    def _starts(self, jobs: Job) -> tuple[Blocks, Blocks]:
        """Of both chains."""
        target = self.target if jobs.given is None else dataclasses.replace(self.target, given=jobs.given)
        made = lambda start: start.rows(target) if isinstance(start, Fresh) else dict(start)
        x = made(jobs.x)
        return x, x if jobs.y is None else made(jobs.y)

    def advance(self, run: _Run, x: Rows, numbers: Counts, meant: Which | None) -> tuple[Rows, _Run]:
        """``lag`` sweeps of the leading chains, those at times k to m counted."""
        keys, target = self.keys[numbers], self.target.take(numbers)
        counts = lambda a: a if meant is None else jnp.where(meant, a, 0)

        def one(t: Array, carry: tuple) -> tuple:
            x, total, taken = carry
            inside = self.window.inside(t)
            weights = counts(jnp.broadcast_to(inside, numbers.shape))
            add = lambda total: self._add(total, x, weights, numbers)
            total = lax.cond(inside > 0, add, lambda total: total, total)
            x, took = draw_sweep(target, x, self.moves, random.fold_in(keys, t + 1))
            return x, total, taken + counts(took).sum().astype(taken.dtype)

        zero = jnp.zeros((), jnp.float32)
        x, total, taken = lax.fori_loop(0, self.window.lag, one, (x, run.total, zero))
        made = self.proposes * (len(numbers) if meant is None else meant.sum())
        proposals = (self.window.lag * made).astype(jnp.float32)
        count = jnp.stack(_Count(zero, zero, proposals, taken, zero))
        return x, run._replace(total=total, count=run.count + count)

    def load(
        self, run: _Run, starts: Chains, same: Flags, numbers: Counts, meant: Which | None
    ) -> tuple[_Run, Which]:
        """Count the pairs (X_lag, Y_0); which of them are equal already."""
        met = agree(same, self.free, len(same[self.free[0]]))
        weights = self._weights(jnp.broadcast_to(self.window.lag, met.shape), met)
        if meant is not None:
            weights = jnp.where(meant, weights, 0)
        add = lambda total: self._add(total, flat(starts), weights.reshape(-1), jnp.tile(numbers, 2))
        counted = (self.window.inside(self.window.lag) != 0) | (self.window.correction(self.window.lag) != 0)
        total = lax.cond(counted, add, lambda total: total, run.total)
        return run._replace(total=total), met

    def _weights(self, t: Counts, met: Which) -> Integer[Array, "2 rows"]:
        """Weights of the two chains at time t."""
        correction = jnp.where(met, 0, self.window.correction(t))
        return jnp.stack([self.window.inside(t) + correction, -correction])

    def _add(self, total: Any, x: Rows, weights: Counts, numbers: Counts) -> Any:
        weights = weights.astype(jnp.result_type(float))
        if self.jobs.weights is not None:
            weights = weights * self.jobs.weights[numbers]
        return self.accumulator.add(self.target, total, x, weights, numbers)

    # -- slots -----------------------------------------------------------------------------------

    def _stage(self, run: _Run, stage: Stage, jobs: Jobs | None = None, last: Array | bool = True) -> _Run:
        """One loop over slots.

        :param jobs: that slots take; None where all have been started.
        :param last: whether no jobs come after these: else those that run may go on with the next.
        """

        def going(run: _Run) -> Array:
            more = run.slots.live() > stage.until
            return more if jobs is None else (run.taken < jobs.waiting) | (last & more)

        def chunks(run: _Run) -> _Run:
            run = run._replace(slots=run.slots.compact(stage.size))
            count = (run.slots.live() + stage.chunk - 1) // stage.chunk
            return lax.fori_loop(0, count, chunk, run)

        def chunk(number: Array, run: _Run) -> _Run:
            slots, start = run.slots, number * stage.chunk
            part = self._block(run._replace(slots=slots.part(start, stage.chunk)), None)
            return part._replace(slots=slots.put(start, part.slots))

        if len(run.slots.numbers[0]) > stage.size:
            run = run._replace(slots=run.slots.compact(stage.size))
        if stage.chunk < stage.size:
            return lax.while_loop(going, chunks, run)
        return lax.while_loop(going, lambda run: self._block(run, jobs), run)

    def _block(self, run: _Run, jobs: Jobs | None) -> _Run:
        """As many sweeps as a weighted product takes well, and their states added to the sum."""
        repeats = max(1, _FLUSH_ROWS // (2 * len(run.slots.numbers[0])))
        run, states, weights, owners = self._sweeps(run, jobs, repeats)
        return run._replace(total=self._add(run.total, states, weights, owners))

    def _sweeps(self, run: _Run, jobs: Jobs | None, repeats: int) -> tuple:
        """``repeats`` sweeps, and their states, weights and numbers of jobs as rows."""

        def one(run: _Run) -> tuple[_Run, tuple]:
            slots, tally = self._sweep(run.slots.unpack())
            slots, met, weights, moves = self._book(slots)
            # states before a slot takes its next job; of a pair that cannot go on -1, also if it has met
            met = jnp.where(tally.broken > 0, -1, met)
            counted = slots.z, weights, jnp.stack([slots.job, slots.job]), met
            taken = run.taken
            if jobs is not None:
                slots, taken = slots.fill(jobs, taken, self.window.lag)
            count = run.count + tally._replace(moves=moves).sums()
            return run._replace(slots=slots.pack(), taken=taken, count=count), counted

        if repeats == 1:
            run, (states, weights, owners, met) = one(run)
            time = run.meeting_time.at[owners[0]].min(met)
            return run._replace(meeting_time=time), flat(states), weights.reshape(-1), owners.reshape(-1)
        numbers = jnp.zeros((repeats, 2, len(run.slots.numbers[0])), jnp.int32)
        states = {b: jnp.zeros((repeats, *v.shape), v.dtype) for b, v in run.slots.z.items()}
        made = states, numbers, numbers, jnp.full_like(numbers[:, 0], _NEVER)

        def going(carry: tuple) -> Array:
            number, run, _ = carry
            # a branch on what runs would wait for the host on an accelerator; many slots run for few turns
            busy = backend.accelerated() or (jobs is not None and repeats <= _FEW_REPEATS)
            live = busy or run.slots.live() > 0
            return (number < repeats) & live

        def turn(carry: tuple) -> tuple:
            number, run, made = carry
            run, counted = one(run)
            put = lambda all_, a: lax.dynamic_update_index_in_dim(all_, a, number, 0)
            return number + 1, run, jax.tree.map(put, made, counted)

        _, run, (states, weights, owners, met) = lax.while_loop(going, turn, (jnp.int32(0), run, made))
        rows = {b: v.reshape(-1, *v.shape[3:]) for b, v in states.items()}
        run = run._replace(meeting_time=run.meeting_time.at[owners[:, 0]].min(met))
        return run, rows, weights.reshape(-1), owners.reshape(-1)

    def _sweep(self, slots: Slots) -> tuple[Slots, _Count]:
        """One attempt at each part of each move, in order; a row that is refused stalls at its part.

        :return: the slots, and what is to be counted, slot by slot.
        """
        keys = random.once(random.fold_in(self.keys[slots.job], slots.t + 1))
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
            random.once(random.fold_in(keys, index, slots.trial)),
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

    def _book(self, slots: Slots) -> tuple[Slots, Array, Array, Array]:
        """Advance the clock of finished sweeps, weigh their states, and retire pairs that are done.

        :return: the slots, the times of those that have met, the weights, and the moves that each has made.
        """
        moved = slots.active & (slots.move == self.offsets[-1])
        t = slots.t + moved.astype(slots.t.dtype)
        met = agree(slots.same, self.free, len(t))
        weights = jnp.where(moved, self._weights(t, met), 0)
        late = (self.window.max_sweeps > 0) & (t >= self.window.max_sweeps)
        # a pair that has met goes on to m: stopped before, it would lack what the window still counts
        done = moved & jnp.where(met, t >= self.window.m, late)
        slots = slots._replace(t=t, move=jnp.where(moved, 0, slots.move), active=slots.active & ~done)
        return slots, jnp.where(moved & met, t, _NEVER), weights, jnp.where(moved, self.offsets[-1], 0)


def _finite(params: Any) -> Array:
    # 0 times what is not finite is not a number
    return jnp.isfinite(sum((0 * leaf).sum() for leaf in jax.tree.leaves(params)))
