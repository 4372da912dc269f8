# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Warnings of estimators, of coupled pairs that meet too late, and of growing gradients."""

from collections.abc import Mapping
import dataclasses
import math
import time
import warnings

import numpy as np

from ebmpp.core import Key, backend, num_rows, random, sharding
from ebmpp.estimators.base import SWEEPS
from ebmpp.training.batches import BatchSource
from ebmpp.training.history import Log
from ebmpp.training.observers.base import Observer
from ebmpp.training.observers.guard import Guard
from ebmpp.training.steps import Stages, TrainState

# predicted sweeps of a pair, per step and in all, that are too many
_SWEEPS = 150
_TOTAL = 30_000
# Predicted unit updates of a pair that are too many. `make demo` (84 units, 1,000
# steps) predicts 7e7 at step 100 and ends in half a minute; MNIST at 784x100, where PCD
# is far better at equal seconds, 5e8.
_UPDATES = 2e8
_HORIZON = 4  # growth is extrapolated to so many times the steps done
_LOOKS = (1, 10, 25, 50, 100)  # steps of a stage after which its pairs are diagnosed
# Gradient norms without latents, over the first one, that are too large, and steps to see
# it; leaps exceed all other norms by the second factor. Of 24 runs on edges and triangles
# of 12 nodes, with cliques, 12 grew, and 6 others leapt; of 94 sound runs none, with
# factors of at most 1.4 (one of 20 steps: 2.1) and 1.5.
_GROWTH = 2.2
_LEAP = 2.0
_FEWEST = 30
# Under networks sound gradients leave saddle points: at any length of 7 runs on 8x8
# digits by PCD and CD the median norm of the last third was at most 14 times the largest
# of the first 30. It was 3e5 times that in one that diverged, and 1e5 on MNIST.
_EXPLOSION = 50.0


@dataclasses.dataclass
class PairWatch(Observer):
    """Warn once if the pairs of a stage will take too many sweeps.

    :param units: number of units of the graph.
    :param start: step at which the run starts, where nothing is diagnosed.
    :param deadline: time of ``time.monotonic`` at which the run ends.
    """

    log: Log
    stages: Stages
    units: int
    start: int
    deadline: float = math.inf

    def __post_init__(self) -> None:
        self._has_warned = False
        self._enter(0)

    def _enter(self, stage: int) -> None:
        self._stage = stage
        self._looks = _LOOKS
        # steps of the stage, and time, at the last look
        self._last_look = (0, time.monotonic())

    def at(self, step: int, state: TrainState, is_last: bool) -> None:
        if self._has_warned or step == self.start:
            return
        stage = self.stages.at(step - 1)
        if stage != self._stage:
            self._enter(stage)
        done = step - self.stages.first[stage]
        if not self._looks or not self._looks[0] <= done <= _LOOKS[-1] + 1:
            return
        backend.wait(state.ok)
        message = self.diagnose(self.log.steps.columns(), step)
        if message is not None:
            self._has_warned = True
            warnings.warn(f"fit: {message}", stacklevel=4)

    def diagnose(self, columns: Mapping[str, np.ndarray], step: int) -> str | None:
        """Return a warning from the metrics of all steps, if there is a reason."""
        first = self.stages.first[self._stage]
        done = step - first
        now = time.monotonic()
        self._looks = tuple(look for look in self._looks if look > done)
        parts = [columns[name][first:step] for name in SWEEPS if name in columns]
        if not parts or "meeting_time_mean" not in columns:
            return None
        sweeps = np.nan_to_num(np.sum(parts, 0))
        before, then = self._last_look
        self._last_look = (done, now)
        remaining = self.stages.end(self._stage) - step
        if not before:  # the first steps compile, so there is no pace
            if self.deadline < math.inf:
                return None
            return diagnose_pairs(sweeps, remaining, math.nan, self.units)
        pace = (now - then) / max(sweeps[before:].sum(), 1.0)
        seconds = max(0.0, self.deadline - now)
        affordable = seconds * (done - before) / (now - then)
        remaining = int(min(remaining, affordable))
        return diagnose_pairs(sweeps, remaining, pace, self.units)


def diagnose_pairs(
    sweeps: np.ndarray, remaining: int, pace: float, units: int
) -> str | None:
    """Return a warning if coupled pairs will need too many sweeps for the remaining steps.

    A power of the number of steps extrapolates the sweeps. A clock enters the words
    alone.

    :param pace: seconds per sweep, or nan.
    """
    done = len(sweeps)
    recent = sweeps[done // 2 :].mean()
    before = sweeps[done // 4 : done // 2]
    growth = 0.0
    if len(before) >= 5 and before.mean() > 0:
        growth = min(2.0, math.log2(max(1.0, recent / before.mean())))

    def sweeps_at(step):
        return recent * (step / (0.75 * done)) ** growth

    near = np.arange(done, min(done + remaining, _HORIZON * done))
    far = (remaining - len(near)) * sweeps_at(_HORIZON * done)
    total = sweeps_at(near).sum() + far
    if total < max(_TOTAL, _SWEEPS * remaining, _UPDATES / units):
        return None
    minutes = "" if math.isnan(pace) else f" (roughly {pace * total / 60:.2g} minutes)"
    return (
        f"a coupled pair takes {recent:.0f} sweeps per step until it meets, and about "
        f"{total:.2g} in the remaining {remaining} steps{minutes}, where a chain of PCD "
        f"takes {remaining}. Chains of this model mix too slowly for this estimator. "
        "Use Centered(PCD()), and an exact gradient for the last steps if at all. "
        'ParticleUCD() and UCD(method="mixture") are exact where chains do not leave '
        "their modes."
    )


@dataclasses.dataclass
class EstimatorDiagnosis(Observer):
    """Warn of what estimators report about their stages, and the last one about its chains.

    :param num_before: steps of the run that this one continues.
    """

    guard: Guard
    source: BatchSource
    key: Key
    num_before: int = 0

    def at(self, step: int, state: TrainState, is_last: bool) -> None:
        if not is_last:
            return
        stages = self.guard.stages
        columns = self.guard.log.steps.columns()
        sample = self.source.sample()
        has_chains = sharding.processes() == 1 and not sample.known
        graph = self.guard.graph
        is_linear = all(factor.affine for factor in graph.factors)
        is_concave = is_linear and not (sample.known or graph.latent)
        done = num_rows(columns)
        last = stages.at(done - 1)
        for number, stage in enumerate(stages.stages[: last + 1]):
            first = stages.first[number]
            stop = min(stages.end(number), done)
            history = {name: v[first:stop] for name, v in columns.items()}
            message = stage.estimator.diagnose(history)
            if message is None and is_concave and not (number or self.num_before):
                message = diagnose_growth(history["gradient_norm"])
            if message is None and not is_linear:
                message = diagnose_explosion(history["gradient_norm"])
            if message is None and number == last and has_chains:
                key = random.fold_in(self.key, number, 2)
                message = stage.estimator.diagnose_chains(
                    graph, state.params, sample.rows, history, key
                )
            if message is not None:
                warnings.warn(
                    f"fit: steps {first} to {stop - 1}: {message}", stacklevel=4
                )


def diagnose_growth(norms: np.ndarray) -> str | None:
    """Return a warning if the gradients of a graph without latents grew.

    Its log-likelihood is concave, so they do not grow under small steps. With latents,
    and under networks, they grow in sound runs, which leave saddle points. Norms after
    the first third are compared with the first one, since a run may leave its phase in
    two steps: three quarters of the last third, and leaps, at least two norms that are
    far above the others, as a chain that changes its phase causes them.
    """
    third = len(norms) // 3
    if len(norms) < _FEWEST:
        return None
    limit = _GROWTH * norms[0]
    largest = np.sort(norms[third:])[-third:]
    leaps = largest[1:-1] > np.maximum(limit, _LEAP * largest[:-2])
    if np.quantile(norms[-third:], 0.25) <= limit and not leaps.any():
        return None
    return (
        f"the gradient norm was {norms[0]:.3g} at the first step, and later "
        f"{np.median(norms[third:]):.3g} in the median and up to {largest[-1]:.3g}. The "
        "usual cause is a large rate: reduce it. If the norm still grows, the model has "
        "two phases, as random graphs with counts of triangles have, and steps jump "
        "between them: replace such counts by bounded statistics, such as "
        "geometrically weighted ones."
    )


def diagnose_explosion(norms: np.ndarray) -> str | None:
    """Return a warning if gradients grew by orders of magnitude, with any latents or network."""
    third = len(norms) // 3
    if third < _FEWEST:
        return None
    first = norms[:_FEWEST].max()
    late = np.median(norms[-third:])
    if late <= _EXPLOSION * first:
        return None
    return (
        f"the gradient norm was at most {first:.3g} in the first {_FEWEST} steps, and "
        f"{late:.3g} in the median of the last third: training diverged, as chains no "
        "longer follow the model. Reduce the rate, or use more chains or sweeps per "
        "step, and start again."
    )
