# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Continuous sites whose conditional is of a known family, which is read off the traced log density.

Where a model's log density is a polynomial of degree two in all units of a site, whatever everything else is,
the site given everything else is Gaussian. Where it is a sum of x, log x and a constant its units are Gamma,
and of 1/x, log x and a constant inverse Gamma (:mod:`ebmpp.traced.dependence.powers`). Parameters follow from
two derivatives at the present value. Units that interact are drawn jointly, group by group.
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
from ebmpp.traced.dependence import LOG, Powers, powers_of, run_guarded
from ebmpp.traced.model import ModelInfo
from ebmpp.traced.sweep.posterior import Posterior

_MOST_JOINT = 1024  # units that are drawn jointly
_MOST_COLUMNS = 64  # of second derivatives at once
_FAMILIES = {"Gaussian": {0.0, 1.0, 2.0}, "Gamma": {0.0, 1.0, LOG}, "InverseGamma": {0.0, -1.0, LOG}}


class Derivatives(NamedTuple):
    """Derivatives of the log density in a site at its present value, group by group."""

    x: Array
    """The present value, ``(groups, most)``."""
    slope: Array
    """First derivatives, ``(groups, most)``."""
    curvature: Array
    """Minus the second derivatives, ``(groups, most, most)``."""


class ContinuousSite:
    """A site of real, or positive, numbers with a Gaussian, Gamma or inverse Gamma conditional.

    :param info: the model.
    :param name: of the site.
    :raises IntractableError: where the conditional is of no known family, or too many units interact.
    """

    def __init__(self, info: ModelInfo, name: str) -> None:
        self.name, self.posterior = name, Posterior(info, [name])
        self.shape = self.posterior.shapes[name]
        self.positive = info.support(name) is constraints.positive
        powers = powers_of(self.posterior.program, self.positive)
        self.family, separable = _family(name, powers, self.positive)
        edges = np.zeros((0, 2), int) if separable else self.posterior.terms().edges
        #: of every unit its group, and its place in the group
        self.groups, self.places = self.index = _groups(math.prod(self.shape), edges)
        self.most = int(self.places.max(initial=-1)) + 1
        problem = None
        if self.most > 1 and self.family != "Gaussian":
            problem = (
                f"interact and are {self.family} given one another, which have no joint distribution to draw"
            )
        elif self.most > _MOST_JOINT:
            problem = f"interact: {self.most} of them, and at most {_MOST_JOINT} are drawn jointly"
        if problem:
            raise IntractableError(
                f"from_model: units of site {name!r} {problem}. Leave the site to another block, such as NUTS"
            )

    def derivatives(self, value: Array, inputs: Mapping[int, Any]) -> Derivatives:
        """Return the derivatives from which the conditional follows.

        :param value: of the site.
        :param inputs: values of the program's inputs.
        """
        program = self.posterior.program
        slot, dtype = program.sites[self.name], program.dtypes[program.sites[self.name]]
        at = lambda flat: run_guarded(program, {**inputs, slot: flat.reshape(self.shape)}, program.output)
        slope = jax.grad(at)
        flat, places = jnp.asarray(value, dtype).ravel(), jnp.asarray(self.places)

        def column(place: Array) -> Array:
            """Return second derivatives in the unit at this place of each group."""
            return jax.jvp(slope, (flat,), ((places == place).astype(dtype),))[1]

        columns = lax.map(column, jnp.arange(self.most), batch_size=_MOST_COLUMNS)
        groups = int(self.groups.max(initial=-1)) + 1
        spread = lambda a: jnp.zeros((groups, self.most), dtype).at[self.index].set(a)
        curvature = jnp.broadcast_to(jnp.eye(self.most, dtype=dtype), (groups, self.most, self.most))
        curvature = curvature.at[self.index].set(-columns.T if len(places) else columns.T)
        return Derivatives(spread(flat), spread(slope(flat)), curvature)

    def draw(self, at: Derivatives, keys: Array, beta: Array | float = 1.0) -> tuple[Array, Array]:
        """Return a new value, and the number of units that kept theirs as their conditional is degenerate.

        :param keys: words, ``(2,)``.
        :param beta: exponent of the density that is drawn from.
        """
        new, valid = (_draw_gaussian if self.family == "Gaussian" else self._draw_gamma)(at, keys, beta)
        value = jnp.where(valid[:, None], new, at.x)[self.index]
        return value.reshape(self.shape), (~valid)[self.groups].sum(dtype=jnp.int32)

    def _draw_gamma(self, at: Derivatives, keys: Array, beta: Array | float) -> tuple[Array, Array]:
        concentration, rate = self._gamma_params(at, beta)
        drawn = jax.random.gamma(jax.random.wrap_key_data(keys), concentration) / rate
        new = drawn if self.family == "Gamma" else 1 / drawn
        valid = (concentration > 0) & (rate > 0) & jnp.isfinite(new) & (new > 0)
        return jnp.where(valid, new, 1), valid[:, 0]

    def _gamma_params(self, at: Derivatives, beta: Array | float = 1.0) -> tuple[Array, Array]:
        """Return concentration and rate of a log density a log x - b x, or a log x - b / x."""
        first, second = at.x * at.slope, -(at.x**2) * at.curvature[..., 0]
        if self.family == "Gamma":
            return beta * -second + 1, beta * -(first + second) / at.x
        rate = -at.x * (first + second)
        return beta * (rate / at.x - first) - 1, beta * rate

    def change(self, at: Derivatives, new: Array) -> Array:
        """Return the change of the log density from the present value to another one."""
        there = jnp.zeros_like(at.x).at[self.index].set(new.ravel())
        step = jnp.zeros_like(at.x).at[self.index].set(new.ravel() - at.x[self.index])
        if self.family == "Gaussian":
            return (at.slope * step).sum() - 0.5 * jnp.einsum("gi,gij,gj", step, at.curvature, step)
        concentration, rate = self._gamma_params(at)
        sign = 1 if self.family == "Gamma" else -1
        changes = (sign * concentration - 1) * jnp.log(there / at.x) - rate * (there**sign - at.x**sign)
        return jnp.where(step == 0, 0, changes).sum()

    def distribution(self, at: Derivatives) -> dist.Distribution:
        """Return the conditional, of the site's shape; if units interact, that of the flattened site."""
        if self.family != "Gaussian":
            params = [a[self.index].reshape(self.shape) for a in self._gamma_params(at)]
            return (dist.Gamma if self.family == "Gamma" else dist.InverseGamma)(*params)
        mean = (at.x + jnp.linalg.solve(at.curvature, at.slope[..., None])[..., 0])[self.index]
        if self.most <= 1:
            scale = at.curvature[self.groups, 0, 0].reshape(self.shape) ** -0.5
            return dist.Normal(mean.reshape(self.shape), scale)
        inverse = jnp.linalg.inv(at.curvature)
        inverse = (0.5 * (inverse + inverse.mT))[self.index][:, self.places]
        is_same_group = self.groups[:, None] == self.groups
        return dist.MultivariateNormal(mean, jnp.where(is_same_group, inverse, 0))


def _draw_gaussian(at: Derivatives, keys: Array, beta: Array | float) -> tuple[Array, Array]:
    """Draw each group with mean x + C^-1 g and covariance C^-1 / beta."""
    words = random.words(keys, at.x.size)
    noise = jax.scipy.special.ndtri(random.open_uniform(words)).reshape(at.x.shape) / jnp.sqrt(beta)
    if at.x.shape[1] == 1:
        precision = at.curvature[..., 0]
        new = at.x + at.slope / precision + noise / jnp.sqrt(precision)
    else:
        factor = jnp.linalg.cholesky(at.curvature)
        mean = jax.scipy.linalg.cho_solve((factor, True), at.slope[..., None])
        spread = lax.linalg.triangular_solve(
            factor, noise[..., None].astype(factor.dtype), left_side=True, lower=True, transpose_a=True
        )
        new = at.x + (mean + spread)[..., 0]
    return new.astype(at.x.dtype), jnp.isfinite(new).all(-1)


def _family(name: str, powers: tuple[Powers, bool] | str, positive: bool) -> tuple[str, bool]:
    """Return the family, and whether units are independent.

    :raises IntractableError: where there is none.
    """
    families = ["Gamma", "InverseGamma"] if positive else ["Gaussian"]
    if isinstance(powers, str):
        form = f"a function with {powers!r}"
    else:
        for family in families:
            if powers[0] <= _FAMILIES[family]:
                return family, powers[1]
        numbers = sorted(p for p in powers[0] if p not in (0, LOG))
        form = ", ".join(["log x"] * (LOG in powers[0]) + ["x" if p == 1 else f"x^{p:g}" for p in numbers])
    allowed = "x and log x, or 1/x and log x" if positive else "x and x^2"
    raise IntractableError(
        f"from_model: given everything else the log density of site {name!r} must be a sum of {allowed}, got "
        f"{form}. Leave the site to another block, such as NUTS"
    )


def _groups(size: int, edges: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return each unit's group of units that interact, directly or not, and its place there."""
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
