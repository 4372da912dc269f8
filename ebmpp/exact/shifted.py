# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Real units with large means, shifted: -E and log Z of means of 10,000 would cancel."""

from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Blocks, Natural, Numbers, Params, Rows, is_concrete
from ebmpp.families import Gaussian
from ebmpp.graph import Bias, Bilinear, FactorGraph, energy

_FAR = 100.0  # standard deviations


class Shifted(NamedTuple):
    """Params of the same model in the coordinates x - origin."""

    params: Params
    origin: Blocks
    """Origins of the units of the blocks that move."""
    log_factor: Any = 0.0
    """log Z of the model less that of the shifted one; in double precision where params
    are known."""

    def shift(self, x: Rows, sign: int = -1) -> Blocks:
        """Return states less the origins; with a sign of 1 plus the origins."""
        result = dict(x)
        for b, origin in self.origin.items():
            if b in result:
                result[b] = result[b] + sign * origin
        return result

    def natural(self, graph: FactorGraph, eta: Blocks) -> Blocks:
        """Return natural parameters of independent blocks in the shifted coordinates."""
        eta = dict(eta)
        for b, origin in self.origin.items():
            if b in eta:
                eta[b] = _moved(graph.families[b], eta[b], origin)
        return eta


def _moved(family: Any, eta: Natural, origin: Array) -> Natural:
    if not family.learned:
        return eta - origin
    return eta.at[..., 0].add(2 * eta[..., 1] * origin)


def _log_density(family: Gaussian, eta: Numbers, origin: Numbers) -> Numbers:
    """Return the log density at the origin, less constants."""
    if is_concrete(eta):
        eta = np.asarray(eta, float)
        origin = np.asarray(origin, float)
    slope, curve = (eta[..., 0], eta[..., 1]) if family.learned else (eta, -0.5)
    return (slope * origin + curve * origin**2).sum()


def shift_origin(graph: FactorGraph, params: Params) -> Shifted:
    """Return the model shifted to the means of its biases.

    Only units with means beyond a hundred standard deviations move, in blocks whose
    factors are biases per unit and Bilinear factors to blocks that have such biases
    too.
    """
    biases = [f for f in graph.factors if isinstance(f, Bias) and not f.shared]
    bias = {f.blocks[0]: f.name for f in biases}
    params = dict(params)
    origins = {}
    log_factor = 0.0
    for b, family in graph.visible.items():
        factors = [f for f in graph.factors if b in f.blocks and f.name != bias.get(b)]
        movable = all(
            isinstance(f, Bilinear) and set(f.blocks) <= bias.keys() for f in factors
        )
        if not (isinstance(family, Gaussian) and b in bias and movable):
            continue
        eta = jnp.asarray(params[bias[b]], float)
        mean, deviation = family.moments(eta)
        is_far = jnp.abs(mean) > _FAR * deviation
        if is_concrete(is_far) and not is_far.any():
            continue
        origins[b] = jax.lax.stop_gradient(jnp.where(is_far, jnp.round(mean), 0.0))
        for f in factors:
            t = energy.zero_statistics(graph, f.blocks)
            t[b] = family.statistics(origins[b])
            other = next(n for n in f.blocks if n != b)
            field = energy.contributed(graph, [f], params, t)[other]
            params[bias[other]] = params[bias[other]] + field
        params[bias[b]] = _moved(family, eta, origins[b])
        log_factor += _log_density(family, eta, origins[b])
    return Shifted(params, origins, log_factor)
