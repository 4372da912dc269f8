# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What the engine sums over the states of coupled pairs."""

from collections.abc import Callable
import dataclasses
from typing import Any, ClassVar

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.core.precision import in_full
from ebmpp.core.types import Counts, PerRow, Rows
from ebmpp.errors import ArgumentError
from ebmpp.graph import energy
from ebmpp.moves.target import Target


@dataclasses.dataclass(frozen=True)
class EnergyGradient:
    """The sum over all jobs of w dE/dparams: one weighted product a flush, nothing a pair."""

    per_job: ClassVar[bool] = False

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

    @in_full
    def add(self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts) -> Any:
        """Add the gradient of the weighted sum of energies with a group summed out."""
        del jobs

        def marginal(p: Any) -> Array:
            each = [energy.summed_out(target.graph, p, x, group) for group in self.groups]
            return -(weights @ sum(each)) / len(self.groups)

        return jax.tree.map(jnp.add, total, jax.grad(marginal)(target.params))


@dataclasses.dataclass(frozen=True)
class Function:
    """The sum of w fn(state), pair by pair, for any ``fn`` from a state to a pytree."""

    fn: Callable[[dict[str, Array]], Any]
    blocks: tuple[tuple[str, tuple[int, ...], str], ...]
    per_job: ClassVar[bool] = True

    def state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What ``fn`` is called with, in shapes."""
        return {b: jax.ShapeDtypeStruct(shape, dtype) for b, shape, dtype in self.blocks}

    def init(self, target: Target, num_jobs: int) -> Any:
        """Zeros with a leading axis of pairs."""
        del target
        shapes = jax.eval_shape(self.fn, self.state())
        return jax.tree.map(lambda s: jnp.zeros((num_jobs, *s.shape), jnp.result_type(float)), shapes)

    def add(self, target: Target, total: Any, x: Rows, weights: PerRow, jobs: Counts) -> Any:
        """Add each weighted value to its own pair's sum."""
        del target
        values = jax.vmap(self.fn)(dict(x))

        def put(total: Array, value: Array) -> Array:
            w = weights.reshape(-1, *(1,) * (value.ndim - 1))
            # a weight of zero silences a value that is not finite in a slot that holds no pair
            return total.at[jobs].add(jnp.where(w == 0, 0.0, w * value.astype(w.dtype)))

        return jax.tree.map(put, total, values)


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
