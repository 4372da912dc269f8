# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Accumulators: sums over the states of coupled pairs."""

from collections.abc import Callable, Iterable
import dataclasses
from functools import cached_property, lru_cache
import math
from typing import Any, ClassVar, Protocol, Self

from jaxtyping import Bool, Integer
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import backend, checks, sharding
from ebmpp.core.backend import full_precision
from ebmpp.core.types import Counts, PerRow, Rows
from ebmpp.errors import ArgumentError
from ebmpp.graph import FactorGraph, energy
from ebmpp.moves import Layer, Move, Target


class Accumulator(Protocol):
    """A hashable object that sums weighted values of states."""

    per_job: ClassVar[bool]  # True for one sum per job, with a leading axis of jobs
    fast_compile: ClassVar[bool]  # True if the older emitters do not slow it down

    def init(self, target: Target, num_jobs: int) -> Any:
        """Return the empty sum."""

    def add(
        self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts
    ) -> Any:
        """Return ``total`` plus the weighted values of states ``x``, one row per entry of ``jobs``."""


def uses_fast_compile(
    graph: FactorGraph | None, moves: Iterable[Move], accumulator: Accumulator
) -> bool:
    """Return True if a run is compiled by XLA's older emitters.

    For layers of Bernoulli, Spin and Categorical units the first step of ``UCD`` then
    takes 0.6 to 0.8 of the time, and later steps differ by at most 4 %. Gaussian and
    Poisson units ran 1.3 and 1.1 times as long, and other moves were not measured.
    Moves of sites have no graph.
    """
    if (
        graph is None
        or not accumulator.fast_compile
        or not all(type(move) is Layer for move in moves)
    ):
        return False
    return all(
        f.num_words == 1 and f.states() is not None for f in graph.families.values()
    )


@dataclasses.dataclass(frozen=True)
class EnergyGradient:
    """Sum over all jobs of w dE/dparams, as one weighted product per batch of states."""

    per_job: ClassVar[bool] = False
    fast_compile: ClassVar[bool] = True

    def init(self, target: Target, num_jobs: int) -> Any:
        """Return zeros like the params."""
        return jax.tree.map(jnp.zeros_like, target.params)

    def add(
        self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts
    ) -> Any:
        """Add the gradient of sum_i w_i E(params, x_i)."""
        return jax.tree.map(
            jnp.add,
            total,
            energy.weighted_gradient(target.graph, target.params, x, weights),
        )


@dataclasses.dataclass(frozen=True)
class MarginalGradient(EnergyGradient):
    """Rao-Blackwellised energy gradient: the mean over ``groups`` of blocks, each summed out in turn.

    Taniguchi et al. (2023), eq. 27, where the groups are the odd and the even layers.
    The expectation equals that of :class:`EnergyGradient`. Blocks of one group do not
    interact.
    """

    groups: tuple[tuple[str, ...], ...]
    fast_compile: ClassVar[bool] = False  # a run took 1.3 times as long at 200x100

    @full_precision
    def add(
        self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts
    ) -> Any:
        """Add the gradient of the weighted sum of energies with each group summed out."""

        def marginal(p: Any) -> Array:
            terms = [
                energy.summed_out(target.graph, p, x, group) for group in self.groups
            ]
            return -(weights @ sum(terms)) / len(self.groups)

        return jax.tree.map(jnp.add, total, jax.grad(marginal)(target.params))


#: Values of all pairs together above which blocks of pairs share a sum.
_MAX_VALUES = 2**22
# the standard error then has a relative error of 6 %, and a 95 % interval covers 94.8 %
BLOCKS = 128
_WIDE = 4096  # values per state above which states are evaluated sequentially


@dataclasses.dataclass(frozen=True)
class Function:
    """Weighted sum of ``fn(state)`` for each pair, or for each of ``rows`` blocks of pairs.

    :param blocks: name, shape and dtype of each block of a state.
    :param rows: number of blocks of pairs: pair ``i`` is in row ``i % rows``. None for
        one row per pair.
    """

    fn: Callable[[dict[str, Array]], Any]
    blocks: tuple[tuple[str, tuple[int, ...], str], ...]
    rows: int | None = None

    @property
    def per_job(self) -> bool:
        """True if each pair has a row of its own."""
        return self.rows is None

    @cached_property
    def fast_compile(self) -> bool:
        """True for few values: a run with 300 took as long, one with 20,000 twice as long."""
        return self.size() <= _WIDE

    def size(self) -> int:
        """Return the number of values that ``fn`` returns."""
        return sum(
            math.prod(s.shape) for s in jax.tree.leaves(shapes_of(self.fn, self.blocks))
        )

    def in_blocks(self, num_pairs: int) -> Self:
        """Return an accumulator by blocks of pairs if one row per pair would take too much memory."""
        is_large = num_pairs > BLOCKS and num_pairs * self.size() > _MAX_VALUES
        return dataclasses.replace(self, rows=BLOCKS) if is_large else self

    def init(self, target: Target, num_jobs: int) -> Any:
        """Return zeros with a leading axis of pairs or of blocks of pairs."""
        shapes = shapes_of(self.fn, self.blocks)
        rows = num_jobs if self.rows is None else self.rows
        return jax.tree.map(
            lambda s: jnp.zeros((rows, *s.shape), jnp.result_type(float)), shapes
        )

    def add(
        self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts
    ) -> Any:
        """Add each weighted value to the sum of its pair or block."""
        where = jobs if self.rows is None else jobs % self.rows
        size = self.size()
        rows = len(weights)

        def put(total, value, w, at):
            return total.at[at].add(_weighted(w, value))

        if size >= _WIDE and not backend.accelerated():
            # Sequentially, and for nonzero weights only: XLA fuses evaluation and
            # addition, which takes a fifth of the time of evaluating all states and
            # scattering them.
            order = jnp.argsort(weights == 0, stable=True)

            def add_one(i: Array, total: Any) -> Any:
                at = order[i]
                value = self.fn({b: v[at] for b, v in x.items()})
                return jax.tree.map(
                    lambda t, v: put(t, v, weights[at], where[at]), total, value
                )

            return lax.fori_loop(0, (weights != 0).sum(), add_one, total)
        chunk = min(rows, max(1, _MAX_VALUES // max(1, size)))

        def add_rows(total: Any, x: Rows, weights: Array, where: Array) -> Any:
            return jax.tree.map(
                lambda t, v: put(t, v, weights, where),
                total,
                jax.vmap(self.fn)(dict(x)),
            )

        def add_chunk(i: Array, total: Any) -> Any:
            at = i * chunk + jnp.arange(chunk)
            w = jnp.where(at < rows, weights[at], 0.0)
            at = jnp.minimum(at, rows - 1)
            return add_rows(total, {b: v[at] for b, v in x.items()}, w, where[at])

        if chunk == rows:
            return add_rows(total, x, weights, where)
        return lax.fori_loop(0, -(-rows // chunk), add_chunk, total)

    def pairs(self, met: Bool[np.ndarray, "pairs"]) -> Integer[np.ndarray, "rows"]:
        """Return the number of met pairs in each row; all pairs have met where pairs share a row."""
        if self.rows is None:
            return met.astype(int)
        per_device = sharding.round_up(len(met)) // sharding.num_shards()
        return np.bincount(
            np.arange(len(met)) % per_device % self.rows, minlength=self.rows
        )


def _weighted(weights: Array, value: Array) -> Array:
    w = weights.reshape(*weights.shape, *(1,) * (value.ndim - weights.ndim))
    # 0 times a value that is not finite, in a slot without a pair, is 0
    return jnp.where(w == 0, 0.0, w * value.astype(w.dtype))


def blocks_of(graph: FactorGraph) -> tuple:
    """Return name, shape and dtype of each block of a state."""
    return tuple(
        (b, family.shape, str(family.dtype)) for b, family in graph.families.items()
    )


@lru_cache(maxsize=64)  # tracing took a tenth of a millisecond of each call
def shapes_of(fn: Callable[[dict[str, Array]], Any], blocks: tuple) -> Any:
    """Return the shapes of the value of a function of a state."""
    return jax.eval_shape(
        fn, {b: jax.ShapeDtypeStruct(shape, dtype) for b, shape, dtype in blocks}
    )


def check_function(
    name: str, fn: Callable[[dict[str, Array]], Any], blocks: tuple
) -> None:
    """Check that a function of a state of these blocks can be averaged."""
    checks.function(name, fn, "a state", arguments=1)
    try:
        leaves = jax.tree.leaves(shapes_of(fn, blocks))
    except Exception as error:
        cause = (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            if str(error)
            else repr(error)
        )
        raise ArgumentError(
            f"{name} could not be traced at a state of blocks "
            f"{', '.join(repr(b[0]) for b in blocks)}: {cause}. It must take one "
            "state, without batch axes, and compute numbers by jax.numpy."
        ) from error
    if not leaves:
        raise checks.error(f"the value of {name}", "a pytree of numbers", leaves)
