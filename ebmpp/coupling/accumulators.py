# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What the engine sums over the states of coupled pairs."""

from collections.abc import Callable
import dataclasses
from functools import cached_property
import math
from typing import Any, ClassVar, Self

from jaxtyping import Bool, Integer
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import backend, checks, sharding
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Counts, PerRow, Rows
from ebmpp.errors import ArgumentError
from ebmpp.graph import energy
from ebmpp.moves.target import Target


@dataclasses.dataclass(frozen=True)
class EnergyGradient:
    """The sum over all jobs of w dE/dparams: one weighted product a flush, nothing a pair."""

    per_job: ClassVar[bool] = False
    quick: ClassVar[bool] = True

    def init(self, target: Target, num_jobs: int) -> Any:
        """Zeros like ``params``."""
        del num_jobs
        return jax.tree.map(jnp.zeros_like, target.params)

    def add(self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts) -> Any:
        """Add the gradient of sum_i w_i E(params, x_i)."""
        del jobs
        made = energy.weighted_gradient(target.graph, target.params, x, weights)
        return jax.tree.map(jnp.add, total, made)


@dataclasses.dataclass(frozen=True)
class MarginalGradient(EnergyGradient):
    """The same with blocks summed out: the mean over ``groups``, each summed out of the energy in turn.

    Its expectation is that of :class:`EnergyGradient`, and no group alone has a larger variance under the
    model (Rao-Blackwell).

    :param groups: blocks that do not interact with one another, a tuple a group.

    **References**

    1. Taniguchi et al. (2023), eq. 27, where the groups are the odd and the even layers.
    """

    groups: tuple[tuple[str, ...], ...]
    quick: ClassVar[bool] = False  # 1.3 of the time at 200x100

    @full_precision
    def add(self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts) -> Any:
        """Add the gradient of the weighted sum of energies with a group summed out."""
        del jobs

        def marginal(p: Any) -> Array:
            each = [energy.summed_out(target.graph, p, x, group) for group in self.groups]
            return -(weights @ sum(each)) / len(self.groups)

        return jax.tree.map(jnp.add, total, jax.grad(marginal)(target.params))


#: Numbers of all pairs together above which sums over blocks of pairs are kept in place of them.
_MOST_KEPT = 2**22
BLOCKS = 128  # the error of a standard error by so many is 6 %, and a normal interval of 95 % covers 94.8 %
_WIDE = 4096  # numbers of a state above which they are added as they are made


@dataclasses.dataclass(frozen=True)
class Function:
    """The sum of w fn(state), pair by pair or over blocks of pairs, for any ``fn`` from a state to a pytree.

    :param rows: of sums: pair ``i`` is in row ``i % rows``; None for a row a pair.
    """

    fn: Callable[[dict[str, Array]], Any]
    blocks: tuple[tuple[str, tuple[int, ...], str], ...]
    rows: int | None = None

    @property
    def per_job(self) -> bool:
        """Whether a pair has a row of its own."""
        return self.rows is None

    @cached_property
    def quick(self) -> bool:
        """Whether it has few numbers: of 300 a run took 1.0 of the time, of 20,000 twice."""
        return self.size() <= _WIDE

    def state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What ``fn`` is called with, in shapes."""
        return {b: jax.ShapeDtypeStruct(shape, dtype) for b, shape, dtype in self.blocks}

    def size(self) -> int:
        """How many numbers ``fn`` returns."""
        return sum(math.prod(s.shape) for s in jax.tree.leaves(jax.eval_shape(self.fn, self.state())))

    def in_blocks(self, num_pairs: int) -> Self:
        """The same by blocks of pairs, where a row a pair would be many numbers."""
        many = num_pairs > BLOCKS and num_pairs * self.size() > _MOST_KEPT
        return dataclasses.replace(self, rows=BLOCKS) if many else self

    def init(self, target: Target, num_jobs: int) -> Any:
        """Zeros with a leading axis of pairs, or of blocks."""
        del target
        shapes, rows = jax.eval_shape(self.fn, self.state()), num_jobs if self.rows is None else self.rows
        return jax.tree.map(lambda s: jnp.zeros((rows, *s.shape), jnp.result_type(float)), shapes)

    def add(self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts) -> Any:
        """Add each weighted value to the sum of its pair or block."""
        del target
        where, size, rows = jobs if self.rows is None else jobs % self.rows, self.size(), len(weights)
        put = lambda total, value, w, at: total.at[at].add(_weighted(w, value))
        if size >= _WIDE and not backend.accelerated():
            # one by one, those that count: XLA adds a value where it belongs as it makes it, a fifth of the
            # time of making all and scattering them
            order = jnp.argsort(weights == 0, stable=True)

            def one(i: Array, total: Any) -> Any:
                at = order[i]
                made = self.fn({b: v[at] for b, v in x.items()})
                return jax.tree.map(lambda t, v: put(t, v, weights[at], where[at]), total, made)

            return lax.fori_loop(0, (weights != 0).sum(), one, total)
        each = min(rows, max(1, _MOST_KEPT // max(1, size)))

        def some(i: Array, total: Any) -> Any:
            at = i * each + jnp.arange(each)
            w, at = jnp.where(at < rows, weights[at], 0.0), jnp.minimum(at, rows - 1)
            made = jax.vmap(self.fn)({b: v[at] for b, v in x.items()})
            return jax.tree.map(lambda t, v: put(t, v, w, where[at]), total, made)

        if each < rows:
            return lax.fori_loop(0, -(-rows // each), some, total)
        made = jax.vmap(self.fn)(dict(x))
        return jax.tree.map(lambda t, v: put(t, v, weights, where), total, made)

    def pairs(self, met: Bool[np.ndarray, "pairs"]) -> Integer[np.ndarray, "rows"]:
        """How many pairs that met each row is the sum of; with a row for several all of them have."""
        if self.rows is None:
            return met.astype(int)
        number = np.arange(len(met)) % (sharding.share(len(met)) // sharding.width())  # on its device
        return np.bincount(number % self.rows, minlength=self.rows)


def _weighted(weights: Array, value: Array) -> Array:
    w = weights.reshape(-1, *(1,) * (value.ndim - 1)) if weights.ndim else weights
    # a weight of zero silences a value that is not finite in a slot that holds no pair
    return jnp.where(w == 0, 0.0, w * value.astype(w.dtype))


def check_function(name: str, fn: Callable[[dict[str, Array]], Any], state: dict[str, Any]) -> None:
    """Whether a function of a state can be averaged.

    :param state: a shape a block.
    :raises ArgumentError: for one that fails, or whose value is no number; with what went wrong.
    """
    checks.function(name, fn, "a state", arguments=1)
    try:
        leaves = jax.tree.leaves(jax.eval_shape(fn, state))
    except Exception as error:
        told = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error) else repr(error)
        raise ArgumentError(
            f"{name} could not be traced at a state of the blocks {', '.join(map(repr, state))}: {told}; it "
            "takes one state, without batch axes, and returns numbers by jax.numpy"
        ) from error
    if not leaves:
        raise ArgumentError(f"{name} returned no number at a state; it returns a pytree of numbers")
