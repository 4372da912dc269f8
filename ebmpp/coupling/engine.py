# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The engine: many coupled pairs run to their meeting, in slots.

A pair (a *job*) is a leading chain X, ahead by ``lag`` sweeps, and its follower Y.
Meeting times have heavy tails, so a fixed number of slots is kept busy: a slot whose
pair is done takes the next job inside the same loop, and once no jobs wait the active
pairs are compacted into fewer and fewer slots. The draws of a job depend on its own
key, time, move and trial only, so results do not depend on slots or order. A pair that
``max_sweeps`` or a failed draw stops is flagged. The engine sums weighted values of
states with integer weights, for the estimator :math:`H_{k:m}` (Jacob, O'Leary, Atchade
2020; Biswas, Jacob, Vanetti 2019).
"""

from collections.abc import Iterable
import dataclasses
from functools import partial, reduce
from typing import Any, NamedTuple

from jaxtyping import Integer, PyTree

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Chains,
    Counts,
    Key,
    Keys,
    PerRow,
    RowMask,
    Rows,
    backend,
    compiled,
    fold_parts,
    num_rows,
    random,
    sharding,
)
from ebmpp.coupling.accumulators import (
    WIDE,
    Accumulator,
    EnergyGradient,
    Function,
    Scores,
)
from ebmpp.coupling.slots import (
    Fresh,
    Job,
    Jobs,
    Outcome,
    Packed,
    SlotLoop,
    Slots,
    Window,
    slot_loops,
    slots_for,
    start_rows,
)
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import Clamped
from ebmpp.moves.couplings import MOST_TRIALS, Trial, where_rows
from ebmpp.moves.gibbs import PartIndex
from ebmpp.moves.move import (
    Flags,
    Layer,
    Move,
    block_flags,
    both_as_rows,
    draw_sweep,
    num_proposals,
    offsets,
    rows_agree,
    stack_chains,
    update_flags,
    with_equal_copies,
)
from ebmpp.moves.target import Target

#: Trials per sweep of ``max_sweeps`` that a draw may take, so that it stops a stalled
#: pair as well.
_TRIALS_PER_SWEEP = 1024
_READY = 16384  # pairs whose starts are in memory at once
_NEVER = 2**31 - 1  # meeting time of an unmet pair
_FLUSH_ROWS = 512  # states per weighted product; smaller products are bound by overhead
_ACCELERATED_FLUSH_ROWS = 2048  # fewer sweeps wait for the host
_FEW_REPEATS = 8  # sweeps that may run without a check for active slots


class _Run(NamedTuple):
    slots: Packed
    total: Any
    meeting_time: Array
    started: Array  # number of jobs of the queue that have been started
    count: Array  # sums of a _Count over all pairs; floats, since they exceed 2**31


class _Count(NamedTuple):
    """Counts for each slot."""

    attempts: Array
    moves: Array
    # of leading chains before the lag: pairs that meet stop, so a count of theirs
    # flatters
    proposals: Array
    accepted: Array
    broken: Array  # pairs


class _Record(NamedTuple):
    """Chains of each slot after a sweep; several sweeps have a leading axis."""

    states: Chains
    weights: Array
    jobs: Array
    meeting_time: Array  # by slot


def uses_fast_compile(
    graph: FactorGraph | None, moves: Iterable[Move], accumulator: Accumulator
) -> bool:
    """Return True if a run is compiled by XLA's older emitters.

    For layers of Bernoulli, Spin and Categorical units the first step of ``UCD`` then
    takes 0.6 to 0.8 of the time, and later steps differ by at most 4 %. Gaussian and
    Poisson units ran 1.3 and 1.1 times as long, and other moves were not measured. With
    blocks summed out of the gradient a run took 1.3 times as long at 200x100; with a
    function of 300 values as long, with one of 20,000 twice as long.

    :param graph: None for moves of sites.
    """
    if graph is None or not all(type(move) is Layer for move in moves):
        return False
    is_small = isinstance(accumulator, Function) and accumulator.size() <= WIDE
    if not is_small and type(accumulator) not in (EnergyGradient, Scores):
        return False
    families = graph.families.values()
    return all(f.num_words == 1 and f.states() is not None for f in families)


# An accumulator of a user's function differs for each function object, hence the larger
# cache.
@compiled(
    statics=(1, 2, 3),
    size=64,
    fast_compile=lambda target, moves, sums, *_, **__: uses_fast_compile(
        target.graph, moves, sums
    ),
    key=lambda target, *_, **__: target.graph,
    unbounded=True,
)
def run_pairs(
    target: Target,
    moves: tuple[Move, ...],
    accumulator: Accumulator,
    num_slots: int | None,
    x: Rows | Fresh,
    y: Rows | Fresh | None,
    key: Key,
    window: Window,
    job_weights: PerRow | None = None,
) -> Outcome:
    """Run every job to its meeting and to time ``m``; jobs are sharded over a mesh.

    :param target: clamped values have one row for all jobs, or one row per job.
    :param num_slots: slots per device; None for the default of the device.
    :param x: starts of the leading chains, ``(jobs, *shape)`` for each block; other
        blocks do not change.
    :param y: starts of the following chains; None for ``x``.
    :param key: ``(2,)``; job j draws from ``fold_in(key, j)``.
    :param job_weights: weights of the jobs in the sum, ``(jobs,)``; None for 1.
    """
    num_jobs = len(x) if isinstance(x, Fresh) else num_rows(x)
    per_job = target.fixed if target.num_rows > 1 else None
    shared = target if per_job is None else dataclasses.replace(target, fixed=Clamped())
    size = slots_for(num_jobs) if num_slots is None else num_slots

    def run_share(jobs, common, first, valid):
        target, key, window = common
        valid = jnp.ones(len(jobs.number), bool) if valid is None else valid
        run = _Engine(target, moves, accumulator, window, jobs, valid, key).run(size)
        time = jnp.where(run.meeting_time == _NEVER, -1, run.meeting_time)
        if accumulator.per_job:
            return (time, run.total), (run.count, ())
        return (time, ()), (run.count, run.total)

    jobs = Job(jnp.arange(num_jobs), x, y, per_job, job_weights)
    (time, job_totals), (sums, total) = sharding.shard_jobs(
        run_share, jobs, (shared, key, window), num_jobs
    )
    if accumulator.per_job:
        total = job_totals
    count = _Count(*sums)
    trials = count.attempts / jnp.maximum(count.moves, 1)
    acceptance = None
    if num_proposals(moves):
        acceptance = count.accepted / count.proposals
    return Outcome(total, sharding.replicate(time), trials, acceptance, count.broken)


@dataclasses.dataclass(eq=False)
class _Engine:
    """The loops of one run; params and window are traced."""

    target: Target
    moves: tuple[Move, ...]
    accumulator: Accumulator
    window: Window
    jobs: Job
    valid: RowMask
    key: dataclasses.InitVar[Key]

    def __post_init__(self, key: Key) -> None:
        if self.jobs.clamped is not None:
            self.target = dataclasses.replace(self.target, fixed=self.jobs.clamped)
        self.keys = random.fold_in(key, self.jobs.number)
        self.window = Window(*(jnp.asarray(n, jnp.int32) for n in self.window))
        self.free = tuple({b: None for move in self.moves for b in move.blocks})
        self.offsets = offsets(self.target.graph, self.moves)
        self.proposes = num_proposals(self.moves)
        max_sweeps = self.window.max_sweeps
        limit = jnp.minimum(max_sweeps, MOST_TRIALS // _TRIALS_PER_SWEEP)
        self.max_trials = jnp.where(
            max_sweeps > 0, limit * _TRIALS_PER_SWEEP, MOST_TRIALS
        )

    def run(self, num_slots: int) -> _Run:
        """Run all valid jobs, prepared in parts, in at most ``num_slots`` slots."""
        num_jobs = len(self.keys)
        # at most the jobs, rounded up to a power of two, which shares programs
        first, *rest = slot_loops(min(num_slots, 1 << (num_jobs - 1).bit_length()))
        size = min(num_jobs, _READY)
        parts = -(-num_jobs // size)
        shapes = jax.eval_shape(lambda: self._starts(0, size)[0])
        flags = {b: self.target.num_parts(b) for b in shapes}
        zero = jnp.int32(0)
        run = _Run(
            slots=Packed.empty(shapes, flags, first.size),
            total=self.accumulator.init(self.target, num_jobs),
            meeting_time=jnp.full(num_jobs, _NEVER, jnp.int32),
            started=zero,
            count=jnp.zeros(5),
        )

        def run_part(number, run):
            run, jobs = self._prepare(run, number, size)
            filled, started = run.slots.unpack().fill(jobs, zero, self.window.lag)
            run = run._replace(slots=filled.pack(), started=started)
            return self._run_loop(run, first, jobs, is_last=number == parts - 1)

        if parts == 1:
            run = run_part(0, run)
        else:
            run = lax.fori_loop(0, parts, run_part, run)
        return reduce(self._run_loop, rest, run)

    def _prepare(self, run: _Run, number: Array | int, size: int) -> tuple[_Run, Jobs]:
        """Advance the leading chains of part ``number``, ``size`` jobs, by the lag."""
        num_jobs = len(self.keys)
        valid = self.valid
        # The last part overlaps the part before, and jobs of both run once.
        first = 0 if size == num_jobs else jnp.minimum(number * size, num_jobs - size)
        numbers = first + jnp.arange(size)
        if size < num_jobs:
            valid = (numbers >= number * size) & valid[numbers]
        x, y = self._starts(first, size)
        x, run = self._advance(run, x, numbers, valid)
        starts = stack_chains(x, y)
        same = block_flags(self.target, starts)
        run, met = self._load(run, starts, same, numbers, valid)
        # draws may agree where params are not finite
        leaves = jax.tree.leaves(self.target.params)
        met &= jnp.isfinite(sum((0 * leaf).sum() for leaf in leaves))
        lag = self.window.lag
        done = ~valid | (met & (lag >= self.window.m))
        # int64 under jax_enable_x64
        queue = jnp.argsort(done, stable=True).astype(jnp.int32)
        time = jnp.where(met & valid, lag, _NEVER)
        run = run._replace(meeting_time=run.meeting_time.at[numbers].min(time))
        return run, Jobs(starts, same, queue, (~done).sum(dtype=jnp.int32), first)

    def _starts(self, first: Array | int, size: int) -> tuple[Blocks, Blocks]:
        """Return the starts of both chains of ``size`` jobs from ``first`` on."""
        jobs = self.jobs.slice(first, size)
        target = self.target.take(first + jnp.arange(size))
        x = start_rows(jobs.x, target)
        return x, x if jobs.y is None else start_rows(jobs.y, target)

    def _advance(
        self, run: _Run, x: Rows, numbers: Counts, valid: RowMask
    ) -> tuple[Rows, _Run]:
        """Make ``lag`` sweeps of the leading chains, and add the states at times k to m."""
        keys = self.keys[numbers]
        target = self.target.take(numbers)

        def sweep(t, carry):
            x, total, accepted = carry
            inside = self.window.inside(t)
            weights = jnp.where(valid, inside, 0)
            total = self._add_if(inside > 0, total, x, weights, numbers)
            x, count = draw_sweep(target, x, self.moves, random.fold_in(keys, t + 1))
            count = jnp.where(valid, count, 0).sum().astype(accepted.dtype)
            return x, total, accepted + count

        zero = jnp.float32(0)
        x, total, accepted = lax.fori_loop(
            0, self.window.lag, sweep, (x, run.total, zero)
        )
        proposals = (self.window.lag * self.proposes * valid.sum()).astype(jnp.float32)
        count = jnp.stack(_Count(zero, zero, proposals, accepted, zero))
        return x, run._replace(total=total, count=run.count + count)

    def _load(
        self, run: _Run, starts: Chains, same: Flags, numbers: Counts, valid: RowMask
    ) -> tuple[_Run, RowMask]:
        """Add the states (X_lag, Y_0), and return which pairs have met there."""
        lag = self.window.lag
        met = rows_agree(same, self.free, len(same[self.free[0]]))
        weights = self._weights(jnp.broadcast_to(lag, met.shape), met)
        weights = jnp.where(valid, weights, 0).reshape(-1)
        is_counted = (self.window.inside(lag) != 0) | (self.window.correction(lag) != 0)
        x = both_as_rows(starts)
        owners = jnp.tile(numbers, 2)
        total = self._add_if(is_counted, run.total, x, weights, owners)
        return run._replace(total=total), met

    def _weights(self, t: Counts, met: RowMask) -> Integer[Array, "2 rows"]:
        """Return the weights of both chains at time t."""
        correction = jnp.where(met, 0, self.window.correction(t))
        return jnp.stack([self.window.inside(t) + correction, -correction])

    def _add(self, total: Any, x: Rows, weights: Counts, numbers: Counts) -> Any:
        weights = weights.astype(jnp.result_type(float))
        if self.jobs.weights is not None:
            weights = weights * self.jobs.weights[numbers]
        x = self.target.coldest(x)
        return self.accumulator.add(self.target, total, x, weights, numbers)

    def _add_if(
        self, condition: Array, total: Any, x: Rows, weights: Counts, numbers: Counts
    ) -> Any:
        def add(total):
            return self._add(total, x, weights, numbers)

        return lax.cond(condition, add, lambda total: total, total)

    def _run_loop(
        self,
        run: _Run,
        loop: SlotLoop,
        jobs: Jobs | None = None,
        is_last: Array | bool = True,
    ) -> _Run:
        """Run one loop over slots.

        :param jobs: the jobs that idle slots take; None if all have been started.
        :param is_last: False if more jobs follow, with which active slots may continue.
        """

        def cond(run):
            is_busy = run.slots.live() > loop.until
            if jobs is None:
                return is_busy
            return (run.started < jobs.waiting) | (is_last & is_busy)

        def sweep_chunks(run):
            run = run._replace(slots=run.slots.compact(loop.size))
            count = (run.slots.live() + loop.chunk - 1) // loop.chunk
            return lax.fori_loop(0, count, sweep_chunk, run)

        def sweep_chunk(number, run):
            slots = run.slots
            start = number * loop.chunk
            part = self._block(run._replace(slots=slots.part(start, loop.chunk)), None)
            return part._replace(slots=slots.put(start, part.slots))

        if len(run.slots.numbers[0]) > loop.size:
            run = run._replace(slots=run.slots.compact(loop.size))
        if loop.chunk < loop.size:
            return lax.while_loop(cond, sweep_chunks, run)
        return lax.while_loop(cond, lambda run: self._block(run, jobs), run)

    def _block(self, run: _Run, jobs: Jobs | None) -> _Run:
        """Make the sweeps of one weighted product, and add their states to the sum."""
        rows = _ACCELERATED_FLUSH_ROWS if backend.accelerated() else _FLUSH_ROWS
        repeats = max(1, rows // (2 * len(run.slots.numbers[0])))
        if repeats == 1:
            run, record = self._sweep_once(run, jobs)
            x = both_as_rows(record.states)
        else:
            run, record = self._sweep_repeatedly(run, jobs, repeats)
            x = {b: v.reshape(-1, *v.shape[3:]) for b, v in record.states.items()}
        leading = record.jobs[..., 0, :]
        time = run.meeting_time.at[leading].min(record.meeting_time)
        weights = record.weights.reshape(-1)
        total = self._add(run.total, x, weights, record.jobs.reshape(-1))
        return run._replace(meeting_time=time, total=total)

    def _sweep_repeatedly(
        self, run: _Run, jobs: Jobs | None, repeats: int
    ) -> tuple[_Run, _Record]:
        """Make up to ``repeats`` sweeps, while slots are active."""
        numbers = jnp.zeros((repeats, 2, len(run.slots.numbers[0])), jnp.int32)
        states = {
            b: jnp.zeros((repeats, *v.shape), v.dtype) for b, v in run.slots.z.items()
        }
        never = jnp.full_like(numbers[:, 0], _NEVER)
        # On an accelerator a branch on the state would synchronise with the host.
        skip_check = backend.accelerated() or (
            jobs is not None and repeats <= _FEW_REPEATS
        )

        def cond(carry):
            number, run, _ = carry
            is_busy = skip_check or run.slots.live() > 0
            return (number < repeats) & is_busy

        def body(carry):
            number, run, records = carry
            run, record = self._sweep_once(run, jobs)

            def put(rows, row):
                return lax.dynamic_update_index_in_dim(rows, row, number, 0)

            return number + 1, run, jax.tree.map(put, records, record)

        records = _Record(states, numbers, numbers, never)
        start = jnp.int32(0), run, records
        _, run, records = lax.while_loop(cond, body, start)
        return run, records

    def _sweep_once(self, run: _Run, jobs: Jobs | None) -> tuple[_Run, _Record]:
        """Make one sweep, and start jobs in the slots of pairs that are done."""
        slots, tally = self._sweep(run.slots.unpack())
        slots, tally, record = self._finish(slots, tally)
        started = run.started
        if jobs is not None:
            slots, started = slots.fill(jobs, started, self.window.lag)
        counts = jnp.stack([n.astype(jnp.float32) for n in tally])
        count = run.count + counts.sum(-1)
        return run._replace(slots=slots.pack(), started=started, count=count), record

    def _sweep(self, slots: Slots) -> tuple[Slots, _Count]:
        """Make one trial of each part of each move; a rejected row retries the same part."""
        keys = random.materialize(random.fold_in(self.keys[slots.job], slots.t + 1))
        # A copy of what the loop carries has the same bits wherever it is read.
        slots = slots._replace(z=with_equal_copies(slots.z, slots.same))
        target = self.target.take(slots.job)
        tally = _Count(*(jnp.zeros_like(slots.job),) * 5)
        for start, move in zip(self.offsets, self.moves):
            prepared = move.prepare(target, slots.z)
            step = partial(self._step, target, move, prepared, start, keys)
            slots, tally, _ = fold_parts(
                move.num_parts(target.graph),
                step,
                (slots, tally, move.carry(prepared)),
            )
        return slots, tally

    def _step(
        self,
        target: Target,
        move: Move,
        prepared: PyTree,
        start: int,
        keys: Keys,
        part: PartIndex,
        state: tuple[Slots, _Count, PyTree],
    ) -> tuple[Slots, _Count, PyTree]:
        """Make one trial of a part of a move in the slots whose turn it is."""
        slots, tally, carried = state
        index = start + part
        at = slots.active & (slots.move == index)
        trial_keys = random.materialize(random.fold_in(keys, index, slots.trial))
        same = rows_agree(slots.same, move.reads(target.graph), len(at))
        trial = Trial(
            trial_keys, slots.trial == 0, same, part, slots.same, self.max_trials
        )
        focused, advance = move.focus(target, prepared, carried, slots.z, part)
        attempt = move.attempt(target, focused, slots.z, trial)
        accept = jnp.stack([attempt.accept_x, attempt.accept_y])
        take = at[None] & ~slots.accepted & accept
        accepted = slots.accepted | take
        ready = at & accepted[0] & accepted[1]
        has_stalled = at & ~ready & (slots.trial + 1 >= self.max_trials)
        broken = at & (attempt.broken | has_stalled)

        z = dict(slots.z)
        for b in move.blocks:
            z[b] = where_rows(take, jnp.stack([attempt.x[b], attempt.y[b]]), z[b])
        attempt = attempt._replace(accept_x=take[0], accept_y=take[1])
        same = update_flags(target, move, slots.same, z, part, attempt, ready)
        trials = jnp.where(ready, 0, jnp.where(at, slots.trial + 1, slots.trial))
        index = jnp.where(ready, index + 1, slots.move)
        slots = slots._replace(
            z=z,
            same=same,
            move=index,
            trial=trials,
            accepted=jnp.where(ready, False, accepted),
            active=slots.active & ~broken,
        )

        def add(count, mask):
            return count + mask.astype(count.dtype)

        tally = tally._replace(
            attempts=add(tally.attempts, at), broken=add(tally.broken, broken)
        )
        return slots, tally, advance(z)

    def _finish(self, slots: Slots, tally: _Count) -> tuple[Slots, _Count, _Record]:
        """Advance the time of finished sweeps, record them, and free the slots of done pairs."""
        moved = slots.active & (slots.move == self.offsets[-1])
        t = slots.t + moved.astype(slots.t.dtype)
        met = rows_agree(slots.same, self.free, len(t))
        weights = jnp.where(moved, self._weights(t, met), 0)
        is_late = (self.window.max_sweeps > 0) & (t >= self.window.max_sweeps)
        # A pair that has met continues to m, since the window counts these states.
        done = moved & jnp.where(met, t >= self.window.m, is_late)
        time = jnp.where(moved & met, t, _NEVER)
        # a pair with a failed draw is unmet, even if it has met
        time = jnp.where(tally.broken > 0, -1, time)
        record = _Record(slots.z, weights, jnp.stack([slots.job, slots.job]), time)
        tally = tally._replace(moves=jnp.where(moved, self.offsets[-1], 0))
        slots = slots._replace(
            t=t, move=jnp.where(moved, 0, slots.move), active=slots.active & ~done
        )
        return slots, tally, record
