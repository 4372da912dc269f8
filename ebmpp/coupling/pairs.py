# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a run of coupled pairs is asked for, what each pair brings to it, and what becomes of them."""

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
    """Sums weighted values of states; a hashable value."""

    per_job: ClassVar[bool]
    """Whether there is a sum for each job, with a leading axis of jobs, or one over all."""

    quick: ClassVar[bool]
    """Whether a program that is compiled quick adds as fast: see :func:`quick`."""

    def init(self, target: Target, num_jobs: int) -> Any:
        """The empty sum."""

    def add(self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts) -> Any:
        """``total`` plus the weighted values of rows ``x`` that belong to ``jobs``."""


def quick(graph: FactorGraph | None, moves: Iterable[Move], accumulator: Accumulator) -> bool:
    """Whether a program of such pairs is compiled by the older emitters.

    Where layers are drawn whose units have few values and take one word (Bernoulli, Spin, Categorical) the
    first step of ``UCD`` then takes 0.6 to 0.8 of the time, and later ones as long to within some 4 %.
    Gaussian and Poisson units ran 1.3 and 1.1 times as long, what Binomial units take compiled no sooner, and
    other moves were not measured.

    :param graph: None where moves are made without one, of sites that nothing is known of.
    """
    if graph is None or not accumulator.quick or not all(type(move) is Layer for move in moves):
        return False
    return all(f.num_words == 1 and f.states() is not None for f in graph.families.values())


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
    """First t with X_t = Y_{t - lag}; -1 where unmet, or where a draw before m could not be made."""
    trials: Scalar
    """Coupled trials of a move, those of residuals included, over moves done."""
    acceptance: Scalar | None
    """Proposals that a chain took over those it was made; None without Metropolis moves."""
    broken: Scalar | int = 0
    """Pairs that were stopped because a draw could not be made: see
    :class:`~ebmpp.moves.couplings.Attempt`."""


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "init"], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True)
class Fresh:
    """Rows that :func:`ebmpp.moves.search.start` makes, not made yet: all at once they may not fit.

    :param keys: one a row.
    :param init: values of some blocks, ``(rows, *shape)`` or one row for all.
    :param kind: one of :data:`~ebmpp.moves.search.STARTS`.
    """

    keys: Keys
    init: State
    kind: str

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, target: Target) -> Blocks:
        """All of them."""
        return search.start(target, self.keys, self.init, self.kind)


#: Where the chains of each job start.
Starts = Rows | Fresh


class Job(NamedTuple):
    """What each job brings, with a leading axis."""

    number: Counts
    x: Starts
    y: Starts | None  # where it starts elsewhere
    given: Clamped | None  # of its target, where that is another in each
    weights: PerRow | None

    def some(self, first: Array | int, size: int) -> "Job":
        """``size`` of them; what is one row stands for all."""
        every = len(self.number)
        cut = lambda a: lax.dynamic_slice_in_dim(a, first, size) if len(a) == every else a
        return self if size == every else jax.tree.map(cut, self)
