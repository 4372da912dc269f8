# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The natural parameter that a block has on its own."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from jax import Array
import jax.numpy as jnp

from ebmpp.errors import DeclarationError
from ebmpp.families import Family
from ebmpp.graph.factors.factor import Factor


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Bias(Factor):
    """``-<b, t(x)>``: the natural parameter that a block has on its own; ``b`` has its statistics' shape.

    :param block: the block's name.
    :param shared: axes of the block's shape along which units have one bias in common, such as the positions
        of a feature map; the params have length 1 there.
    :param init: where the biases start, an array or a function of a jax key; what the scheme of
        :meth:`ebmpp.FactorGraph.init` says unless given.
    :param name: the key of its params; the block's name unless given.
    :raises DeclarationError: for axes that the block does not have, or an ``init`` of another shape.

    **Example**

    >>> import jax
    >>> from ebmpp import Bernoulli, Bias, FactorGraph
    >>> maps = FactorGraph({"x": Bernoulli((5, 22, 22))}, factors=[Bias("x", shared=(1, 2))])
    >>> maps.init(jax.random.key(0))["x"].shape
    (5, 1, 1)
    """

    shared: tuple[int, ...]

    role = "bias"

    def __init__(
        self, block: str, *, shared: Sequence[int] = (), init: Any = None, name: str | None = None
    ) -> None:
        super().__init__(block, energy=_bias_energy, init=init, name=name)
        if not isinstance(shared, Sequence) or not all(isinstance(axis, int) for axis in shared):
            raise DeclarationError(
                f"Bias({block!r}): shared is a tuple of axes, such as (1, 2), not {shared!r}"
            )
        object.__setattr__(self, "shared", tuple(shared))

    def __repr__(self) -> str:
        shared = f", shared={self.shared}" if self.shared else ""
        return super().__repr__().removesuffix(")") + shared + ")"

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Array:
        family, rank = families[self.blocks[0]], len(families[self.blocks[0]].shape)
        if not all(-rank <= axis < rank for axis in self.shared):
            raise DeclarationError(f"{self!r}: {family!r} has axes 0 to {rank - 1}, and shared names another")
        start = self.pool(family.default_eta(), family)
        if self.init is None:
            return start
        made = super().init_params(rng_key, families)
        if jnp.shape(made) != start.shape:
            raise DeclarationError(f"{self!r}: init has shape {jnp.shape(made)}, expected {start.shape}")
        return made

    def pool(self, statistics: Array, family: Family) -> Array:
        """The mean over the axes that are shared, which keep length 1."""
        axes = tuple({axis % len(family.shape) for axis in self.shared})
        return statistics.mean(axes, keepdims=True) if axes else statistics

    def row_axes(self, families: Mapping[str, Family]) -> int:
        return 0


def _bias_energy(bias: Array, statistics: Array) -> Array:
    # Not vdot: XLA makes a kernel of its own, dear to compile, for a product of vectors.
    return -(jnp.broadcast_to(bias, statistics.shape) * statistics).sum()
