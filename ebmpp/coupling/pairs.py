# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Inputs and outcome of a run of coupled pairs."""

from collections.abc import Iterable
import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

from jaxtyping import Integer

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core.types import Blocks, Counts, Keys, PerRow, Rows, Scalar, State
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import Clamped
from ebmpp.moves import search
from ebmpp.moves.move import Layer, Move
from ebmpp.moves.target import Target


class Accumulator(Protocol):
    """A hashable object that sums weighted values of states."""

    per_job: ClassVar[bool]
    """True for one sum per job, with a leading axis of jobs; False for one sum over all jobs."""

    fast_compile: ClassVar[bool]
    """True if the older emitters do not slow it down: see :func:`uses_fast_compile`."""

    def init(self, target: Target, num_jobs: int) -> Any:
        """Return the empty sum."""

    def add(self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts) -> Any:
        """Return ``total`` plus the weighted values of states ``x``, one row per entry of ``jobs``."""


def uses_fast_compile(graph: FactorGraph | None, moves: Iterable[Move], accumulator: Accumulator) -> bool:
    """Return True if a run is compiled by XLA's older emitters.

    For layers of Bernoulli, Spin and Categorical units the first step of ``UCD`` then takes 0.6 to 0.8 of the
    time, and later steps differ by at most 4 %. Gaussian and Poisson units ran 1.3 and 1.1 times as long,
    Binomial units compiled no faster, and other moves were not measured.

    :param graph: None for moves of the sites of a NumPyro model.
    """
    if graph is None or not accumulator.fast_compile or not all(type(move) is Layer for move in moves):
        return False
    return all(f.num_words == 1 and f.states() is not None for f in graph.families.values())


class Window(NamedTuple):
    """The window of states that the estimator :math:`H_{k:m}` averages, and the lag; all may be traced."""

    k: Array
    m: Array
    lag: Array
    max_sweeps: Array
    """Sweeps of the leading chain after which an unmet pair stops; 0 for no limit. A draw may take at most
    :data:`~ebmpp.moves.couplings.MOST_TRIALS` trials, and at most 1024 times this limit."""

    def inside(self, t: Array) -> Array:
        """Return the weight of f(X_t) in the ergodic average."""
        return ((t >= self.k) & (t <= self.m)).astype(jnp.int32)

    def correction(self, t: Array) -> Array:
        """Return the weight of f(X_t) - f(Y_{t - lag}) while the pair is unmet."""
        first = jnp.maximum(self.lag, t - self.m)
        # Not negative where they count, so truncation equals floor division, which takes ten kernels.
        count = lax.div(t - self.k, self.lag) - lax.div(first + self.lag - 1, self.lag) + 1
        return jnp.where(t >= self.k + self.lag, count, 0)


class Outcome(NamedTuple):
    """Sums, meeting times and counts of a run."""

    total: Any
    """Sum of the accumulator, to be divided by ``m - k + 1``."""
    meeting_time: Integer[Array, "jobs"]
    """First t with X_t = Y_{t - lag}; -1 if unmet, or if a draw before m failed."""
    trials: Scalar
    """Mean number of coupled trials per move, trials of residuals included."""
    acceptance: Scalar | None
    """Accepted proposals over all proposals; None without Metropolis moves."""
    broken: Scalar | int = 0
    """Number of pairs stopped by a failed draw: see :class:`~ebmpp.moves.couplings.Attempt`."""


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "init"], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True)
class Fresh:
    """Starting states to be drawn by :func:`ebmpp.moves.search.start` when needed, to save memory.

    :param keys: one per state.
    :param init: values of some blocks, ``(rows, *shape)`` or one row for all states.
    :param kind: one of :data:`~ebmpp.moves.search.STARTS`.
    """

    keys: Keys
    init: State
    kind: str

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, target: Target) -> Blocks:
        """Draw the states."""
        return search.start(target, self.keys, self.init, self.kind)


#: Starting states of all jobs.
Starts = Rows | Fresh


class Job(NamedTuple):
    """Inputs of the jobs, each with a leading axis."""

    number: Counts
    x: Starts
    y: Starts | None  # None: the start of the leading chain
    given: Clamped | None  # clamped values, where they differ between jobs
    weights: PerRow | None

    def slice(self, first: Array | int, size: int) -> "Job":
        """Return ``size`` jobs from ``first`` on; arrays of one row are shared by all jobs."""
        num_jobs = len(self.number)
        cut = lambda a: lax.dynamic_slice_in_dim(a, first, size) if len(a) == num_jobs else a
        return self if size == num_jobs else jax.tree.map(cut, self)
