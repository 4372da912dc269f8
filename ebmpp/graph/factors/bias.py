# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The bias factor of one block."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.errors import DeclarationError
from ebmpp.families import Family
from ebmpp.graph.factors.factor import Factor


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Bias(Factor):
    """``-<b, t(x)>``, with ``b`` a natural parameter of the block.

    :param block: name of the block.
    :param shared: axes of the block's shape along which units share a bias, such as the positions of a
        feature map; the params have length 1 there.
    :param init: initial biases, an array or a function of a jax key; by default from the scheme of
        :meth:`ebmpp.FactorGraph.init`.
    :param name: key of its params; the block's name by default.
    :raises DeclarationError: for axes that the block lacks, or an ``init`` of another shape.

    **Example**

    >>> import jax
    >>> from ebmpp import Bernoulli, Bias, FactorGraph
    >>> maps = FactorGraph({"x": Bernoulli((5, 22, 22))}, factors=[Bias("x", shared=(1, 2))])
    >>> maps.init(jax.random.key(0))["x"].shape
    (5, 1, 1)
    """

    shared: tuple[int, ...]

    role = "bias"
    affine = True

    def __init__(
        self, block: str, *, shared: Sequence[int] = (), init: Any = None, name: str | None = None
    ) -> None:
        super().__init__(block, energy=_bias_energy, init=init, name=name)
        are_axes = isinstance(shared, Sequence) and all(isinstance(axis, int) for axis in shared)
        checks.require(are_axes, f"Bias({block!r}): shared", "a tuple of axes", shared, DeclarationError)
        object.__setattr__(self, "shared", tuple(shared))

    def __repr__(self) -> str:
        shared = f", shared={self.shared}" if self.shared else ""
        return super().__repr__().removesuffix(")") + shared + ")"

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Array:
        family, rank = families[self.blocks[0]], len(families[self.blocks[0]].shape)
        are_axes = all(-rank <= axis < rank for axis in self.shared)
        checks.require(are_axes, f"{self!r}: shared", f"axes of {family!r}", self.shared, DeclarationError)
        start = self.pool(family.default_eta(), family)
        return start if self.init is None else self.init_checked(rng_key, families, start.shape)

    def pool(self, statistics: Array, family: Family) -> Array:
        """Average statistics over the shared axes, which keep length 1."""
        axes = tuple({axis % len(family.shape) for axis in self.shared})
        return statistics.mean(axes, keepdims=True) if axes else statistics

    def row_axes(self, families: Mapping[str, Family]) -> int:
        return 0


def _bias_energy(bias: Array, statistics: Array) -> Array:
    # Not vdot: XLA compiles a kernel of its own for a product of vectors, which takes long.
    return -(jnp.broadcast_to(bias, statistics.shape) * statistics).sum()
