# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Angles with a von Mises distribution."""

import dataclasses
import math

import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax.numpy as jnp
from jax.scipy.special import i0e, i1e

from ebmpp.core import Natural, PerUnit, Values
from ebmpp.families.family import Family, as_float

#: After the approximation of Banerjee et al. (2005), whose relative error is below 0.1.
_NEWTON_STEPS = 3


@dataclasses.dataclass(frozen=True, repr=False)
class VonMises(Family):
    r"""Angles in [-pi, pi] with statistics (cos x, sin x), the last axis.

    The natural parameter is the concentration times the mean direction, and 0 is the
    uniform distribution. A pair of units i, j in a :class:`~ebmpp.Pairwise` factor of
    weight J has the energy :math:`-J \cos(x_i - x_j)` of the XY model.

    :param shape: shape of the block; statistics have one more axis.

    **References**

    1. Mardia, Jupp (1999), *Directional statistics*, section 3.5.4.

    **Example**

    >>> import jax, networkx as nx, ebmpp
    >>> xy = ebmpp.FactorGraph.from_networkx(nx.grid_2d_graph(4, 4), ebmpp.VonMises, shared=True)
    >>> params = {"x": jax.numpy.zeros((16, 2)), "x:x": jax.numpy.asarray(0.5)}
    >>> xy.energy(params, {"x": jax.numpy.zeros(16)}).item()  # 24 pairs
    -12.0
    """

    stat_shape = (2,)
    support = constraints.circular
    bounds = (-1.0, 1.0)

    def statistics(self, x: Values) -> Natural:
        x = as_float(x)
        return jnp.stack([jnp.cos(x), jnp.sin(x)], axis=-1)

    def log_normalizer(self, eta: Natural) -> PerUnit:
        kappa = _norm(eta)
        return math.log(2 * math.pi) + jnp.log(i0e(kappa)) + kappa

    def unit_distribution(self, eta: Natural) -> dist.Distribution:
        return dist.VonMises(self.mode(eta), _norm(eta))

    def from_mean(self, mean: Natural) -> Natural:
        length = _norm(mean)
        kappa = length * (2 - length**2) / (1 - length**2)
        for _ in range(_NEWTON_STEPS):
            ratio = i1e(kappa) / i0e(kappa)
            kappa = kappa - (ratio - length) / (1 - ratio**2 - ratio / kappa)
        return mean * (kappa / length)[..., None]

    def mode(self, eta: Natural) -> PerUnit:
        # jitted, XLA's arctan2(0, 0) is nan
        cosine = jnp.where((eta == 0).all(-1), 1.0, eta[..., 0])
        return jnp.arctan2(eta[..., 1], cosine)


def _norm(a: Natural) -> PerUnit:
    """Return lengths of at least 1e-6, so that gradients and draws at 0 are not nan."""
    return jnp.sqrt(jnp.maximum((a**2).sum(-1), 1e-12))
