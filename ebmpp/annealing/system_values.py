# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What is averaged over the particles of a system."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.annealing.path import Path
from ebmpp.annealing.systems import IslandKeys, Systems, particle_keys
from ebmpp.core import random
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Blocks, Params
from ebmpp.graph import energy


@full_precision
def energy_gradient(path: Path, params: Params, made: Systems) -> Params:
    """The mean over a system of dE/dparams, the blocks that are not kept summed out: a leading axis of
    systems.

    :param params: of the model at the path's end.
    """
    x = {b: v.reshape(*made.log_weights.shape, *v.shape[1:]) for b, v in made.x.items()}

    def one(weights: Array, x: Blocks) -> Params:
        marginal = lambda p: -(weights @ energy.summed_out(path.graph, p, x, path.summed))
        return jax.grad(marginal)(params)

    return jax.vmap(one)(made.weights, x)


def states(path: Path, params: Params, made: Systems, keys: IslandKeys) -> Blocks:
    """All blocks of all particles, ``(systems * particles, *shape)``: those summed out are drawn given the
    others.
    """
    slope = path.slope(params, made.x)
    own = random.fold_in(particle_keys(keys, made.log_weights.shape[1]), 0, 2)
    drawn = path.draw(path.summed, slope.eta, jnp.ones(()), own)
    return {b: drawn[b] if b in drawn else made.x[b] for b in path.graph.families}


@full_precision
def weighted_mean(fn: Callable[[Blocks], Any], x: Blocks, made: Systems) -> Any:
    """The mean of ``fn`` over each system's particles: a leading axis of systems.

    :param x: of :func:`states`.
    """
    weights = made.weights

    def mean(values: Array) -> Array:
        each = values.reshape(*weights.shape, *values.shape[1:]).astype(weights.dtype)
        return jax.vmap(lambda w, v: jax.numpy.tensordot(w, v, 1))(weights, each)

    return jax.tree.map(mean, jax.vmap(fn)(dict(x)))
