# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Two blocks, each unit of one with each unit of the other."""

from collections.abc import Mapping
import dataclasses

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.families import Family
from ebmpp.graph.factors.factor import Factor


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Bilinear(Factor):
    """``-sum_ij w_ij t_i(a) t_j(b)``; ``w`` has the shapes of the two blocks' statistics, joined.

    A Gaussian of learned variance takes part with x alone; write a :class:`Factor` to couple x**2.

    :param first: a block's name.
    :param second: another block's name.
    :param name: the key of its params; ``"first:second"`` unless given.
    """

    role = "weight"

    def __init__(self, first: str, second: str, *, name: str | None = None) -> None:
        super().__init__(first, second, energy=_bilinear_energy, name=name)

    def evaluate(self, params: Array, *statistics: Array, families: tuple[Family, ...]) -> Array:
        return self.energy(params, *map(lambda f, t: f.interaction(t), families, statistics))

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Array:
        first, second = (families[b].interaction_shape for b in self.blocks)
        return jax.device_put(np.zeros(first + second, jnp.result_type(float)))  # compiles nothing

    def row_axes(self, families: Mapping[str, Family]) -> int:
        return len(families[self.blocks[0]].interaction_shape)


def _bilinear_energy(weight: Array, first: Array, second: Array) -> Array:
    matrix = weight.reshape(first.size, second.size)
    # Gradients in either block then come out row by row when vmapped; (matrix @ second) gives the transpose,
    # and reading that in a loop over rows costs a tenth of a coupled sweep at 784x500.
    return -(first.ravel() @ (second.ravel() @ matrix.T))
