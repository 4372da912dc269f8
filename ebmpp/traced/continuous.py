# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Continuous sites of a block whose conditional is of a known family, found in the traced log density.

Where the log density of a model is a polynomial of degree two in all units of a site, whatever everything
else is, the site given everything else is Gaussian; where it is a sum of x, log x and a constant, its units
are Gamma, and of 1/x, log x and a constant, inverse Gamma. That is read off the program
(:mod:`ebmpp.traced.dependence.powers`). Parameters then follow from two derivatives at the present value.
Units that interact are drawn together, group by group.
"""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.errors import IntractableError
from ebmpp.traced.dependence import LOG, Powers, Terms, powers_of, run_guarded
from ebmpp.traced.posterior import Posterior, Reading

_MOST = 1024  # units that are drawn together
_AT_ONCE = 64  # columns of second derivatives
_FAMILIES = {"Gaussian": {0.0, 1.0, 2.0}, "Gamma": {0.0, 1.0, LOG}, "InverseGamma": {0.0, -1.0, LOG}}


class Law(NamedTuple):
    """The conditional of a site: the derivatives of the log density at its present value, group by group."""

    x: Array
    """The present value, ``(groups, most)``."""
    slope: Array
    """First derivatives, ``(groups, most)``."""
    curvature: Array
    """Minus the second ones, ``(groups, most, most)``."""


class ContinuousSite:
    """A site of real, or positive, numbers and the family of its conditional.

    :param read: the model.
    :param name: of the site.
    :raises IntractableError: where the conditional is of no family that is known here, with what the log
        density is instead; and where too many units interact.
    """

    def __init__(self, read: Reading, name: str) -> None:
        self.name, self.posterior = name, Posterior(read, [name])
        self.shape = self.posterior.shapes[name]
        self.positive = read.support(name) is constraints.positive
        self.family, apart = _family(name, powers_of(self.posterior.program, self.positive), self.positive)
        edges, size = np.zeros((0, 2), int), math.prod(self.shape)
        if not apart:
            terms = Terms(self.posterior.program, self.posterior.arguments.arrays)
            self.posterior.relied |= terms.relied
            edges = terms.edges
        #: of every unit its group, and its place there
        self.groups, self.places = _together(size, edges)
        self.most = int(self.places.max(initial=-1)) + 1
        if self.most > 1 and self.family != "Gaussian":
            raise IntractableError(
                f"from_model: units of site {name!r} are {self.family} given one another, and interact, so "
                "that there is no joint law to draw them from; leave the site to another block"
            )
        if self.most > _MOST:
            raise IntractableError(
                f"from_model: {self.most} units of site {name!r} interact, directly or through one another, "
                f"and are drawn together by a Cholesky factor, of at most {_MOST} units; leave the site to "
                "another block, such as NUTS"
            )

    # -- laws ------------------------------------------------------------------------------------

    def law(self, value: Array, given: Mapping[int, Any]) -> Law:
        """The conditional given everything else.

        :param value: of the site.
        :param given: values of all of the program's inputs.
        """
        program, size = self.posterior.program, len(self.places)
        slot, dtype = program.own[self.name], program.dtypes[program.own[self.name]]
        at = lambda flat: run_guarded(program, {**given, slot: flat.reshape(self.shape)}, program.output)
        slope = jax.grad(at)
        flat, places = jnp.asarray(value, dtype).ravel(), jnp.asarray(self.places)

        def column(place: Array) -> Array:
            """Second derivatives beside the one unit of each group at this place."""
            return jax.jvp(slope, (flat,), ((places == place).astype(dtype),))[1]

        columns = lax.map(column, jnp.arange(self.most), batch_size=_AT_ONCE)
        groups = int(self.groups.max(initial=-1)) + 1
        spread = lambda a: jnp.zeros((groups, self.most), dtype).at[self.groups, self.places].set(a)
        curvature = jnp.broadcast_to(jnp.eye(self.most, dtype=dtype), (groups, self.most, self.most))
        curvature = curvature.at[self.groups, self.places].set(-columns.T if size else columns.T)
        return Law(spread(flat), spread(slope(flat)), curvature)

    def draw(self, law: Law, keys: Array, beta: Array | float = 1.0) -> tuple[Array, Array]:
        """A new value, and how many units kept theirs because the conditional is no law.

        :param keys: words, ``(2,)``.
        :param beta: the power of the density that is drawn from.
        """
        new, sound = (_gaussian if self.family == "Gaussian" else self._gamma)(law, keys, beta)
        taken = jnp.where(sound[:, None], new, law.x)[self.groups, self.places]
        return taken.reshape(self.shape), (~sound)[self.groups].sum(dtype=jnp.int32)

    def _gamma(self, law: Law, keys: Array, beta: Array | float) -> tuple[Array, Array]:
        concentration, rate = self._gamma_law(law, beta)
        drawn = jax.random.gamma(jax.random.wrap_key_data(keys), concentration) / rate
        new = drawn if self.family == "Gamma" else 1 / drawn
        sound = (concentration > 0) & (rate > 0) & jnp.isfinite(new) & (new > 0)
        return jnp.where(sound, new, 1), sound[:, 0]

    def _gamma_law(self, law: Law, beta: Array | float = 1.0) -> tuple[Array, Array]:
        """Concentration and rate of a law whose log density is a log x - b x, or a log x - b / x."""
        first, second = law.x * law.slope, -(law.x**2) * law.curvature[..., 0]
        if self.family == "Gamma":
            return beta * -second + 1, beta * -(first + second) / law.x
        rate = -law.x * (first + second)
        return beta * (rate / law.x - first) - 1, beta * rate

    def change(self, law: Law, new: Array) -> Array:
        """How the law says that the log density changes from the present value to another one."""
        there = jnp.zeros_like(law.x).at[self.groups, self.places].set(new.ravel())
        step = jnp.zeros_like(law.x).at[self.groups, self.places].set(new.ravel() - law.x[self._at])
        if self.family == "Gaussian":
            return (law.slope * step).sum() - 0.5 * jnp.einsum("gi,gij,gj", step, law.curvature, step)
        concentration, rate = self._gamma_law(law)
        sign = 1 if self.family == "Gamma" else -1
        each = (sign * concentration - 1) * jnp.log(there / law.x) - rate * (there**sign - law.x**sign)
        return jnp.where(step == 0, 0, each).sum()

    @property
    def _at(self) -> tuple[np.ndarray, np.ndarray]:
        return self.groups, self.places

    def distribution(self, law: Law) -> dist.Distribution:
        """The conditional, of the site's shape; of interacting units that of all of them, flattened."""
        if self.family != "Gaussian":
            each = [a[self._at].reshape(self.shape) for a in self._gamma_law(law)]
            return (dist.Gamma if self.family == "Gamma" else dist.InverseGamma)(*each)
        mean = (law.x + jnp.linalg.solve(law.curvature, law.slope[..., None])[..., 0])[self._at]
        if self.most <= 1:
            return dist.Normal(
                mean.reshape(self.shape), law.curvature[self.groups, 0, 0].reshape(self.shape) ** -0.5
            )
        inverse = jnp.linalg.inv(law.curvature)
        inverse = (0.5 * (inverse + inverse.mT))[self._at][:, self.places]
        same = self.groups[:, None] == self.groups
        return dist.MultivariateNormal(mean, jnp.where(same, inverse, 0))


def _gaussian(law: Law, keys: Array, beta: Array | float) -> tuple[Array, Array]:
    """Group by group: mean x + C^-1 g, and noise of the covariance C^-1 / beta."""
    count = law.x.size
    words = random.words(keys, count)
    noise = jax.scipy.special.ndtri(random.open_uniform(words)).reshape(law.x.shape) / jnp.sqrt(beta)
    if law.x.shape[1] == 1:
        precision = law.curvature[..., 0]
        new = law.x + law.slope / precision + noise / jnp.sqrt(precision)
    else:
        factor = jnp.linalg.cholesky(law.curvature)
        mean = jax.scipy.linalg.cho_solve((factor, True), law.slope[..., None])
        spread = lax.linalg.triangular_solve(
            factor, noise[..., None].astype(factor.dtype), left_side=True, lower=True, transpose_a=True
        )
        new = law.x + (mean + spread)[..., 0]
    return new.astype(law.x.dtype), jnp.isfinite(new).all(-1)


def _family(name: str, found: tuple[Powers, bool] | str, positive: bool) -> tuple[str, bool]:
    """The family, and whether units are independent.

    :raises IntractableError: where there is none.
    """
    if isinstance(found, str):
        raise IntractableError(
            f"from_model: site {name!r} enters the log density through {found!r}, so that its conditional is "
            "neither Gaussian nor Gamma; leave it to another block, such as NUTS, or name discrete sites"
        )
    powers, apart = found
    wanted = ["Gamma", "InverseGamma"] if positive else ["Gaussian"]
    for family in wanted:
        if powers <= _FAMILIES[family]:
            return family, apart
    numbers = sorted(p for p in powers if p not in (0, LOG))
    told = ", ".join(["log x"] * (LOG in powers) + ["x" if p == 1 else f"x^{p:g}" for p in numbers])
    of = "x and log x (Gamma), or of 1/x and log x (inverse Gamma)" if positive else "x and x^2 (Gaussian)"
    raise IntractableError(
        f"from_model: given everything else the log density of site {name!r} is a sum of {told}, and can be "
        f"drawn where it is one of {of}; leave it to another block, such as NUTS"
    )


def _together(size: int, edges: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Of each unit the group of units that it interacts with, through others too, and its place there."""
    if edges is None:
        return np.zeros(size, int), np.arange(size)
    if not len(edges):
        return np.arange(size), np.zeros(size, int)
    graph = nx.Graph(edges.tolist())
    graph.add_nodes_from(range(size))
    groups, places = np.zeros(size, int), np.zeros(size, int)
    for number, members in enumerate(nx.connected_components(graph)):
        units = sorted(members)
        groups[units], places[units] = number, np.arange(len(units))
    return groups, places
