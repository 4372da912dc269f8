# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Continuous sites whose conditional is of a known family, by the traced log density.

Where a model's log density is a polynomial of degree two in all units of a site, the
site given everything else is Gaussian. Where it is a sum of x and log x its units are
Gamma, and of 1/x and log x inverse Gamma. Parameters follow from two derivatives at the
present value. Units that interact are drawn jointly.

Where it is a sum of log x of a site's rows on the simplex, the rows given everything
else are Dirichlet; where it is one of log x and log(1 - x), units are Beta. With L the
log density, its coefficients are :math:`x_k \partial L / \partial x_k` at any x. They
are taken in the middle of the simplex, and at the two ends of the interval, and so do
not depend on the present value.
"""

from collections.abc import Callable, Set
import math
from typing import Any, NamedTuple, NoReturn

import networkx as nx
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.groups import ranks_in_groups
from ebmpp.core.rows import expand
from ebmpp.dependence.powers import LOG, LOG1M, Facts, Powers, powers_of
from ebmpp.dependence.pullback import run_guarded
from ebmpp.errors import IntractableError
from ebmpp.traced.block import SiteValues
from ebmpp.traced.model import DrawnSites, Inputs, ModelInfo
from ebmpp.traced.rows import all_in_row
from ebmpp.traced.sweep.posterior import ModelDensity

_MOST_JOINT = 1024  # units that are drawn jointly
_CONTINUOUS = 1 << 16  # folded into keys beside a site's number
_MOST_COLUMNS = 64  # of second derivatives at once
_EDGE = 2.0**-20  # distance from the ends of the interval; 1 - x is exact there
# of the log density, so that counts / tiny, the slope of a clipped log 0, are finite
_SCALE = 2.0**-24
#: by kind of site, the powers of each family
_FAMILIES: dict[str, dict[str, Set]] = {
    "real": {"Gaussian": {0.0, 1.0, 2.0}},
    "positive": {"Gamma": {0.0, 1.0, LOG}, "InverseGamma": {0.0, -1.0, LOG}},
    "unit_interval": {"Beta": {0.0, LOG, LOG1M}},
    "simplex": {"Dirichlet": {0.0, LOG}},
}
_IN_WORDS = {LOG: "log x", LOG1M: "log(1 - x)", 1.0: "x"}


class Derivatives(NamedTuple):
    """Derivatives of the log density in a site at its present value, group by group."""

    x: Array  # the present value, `(groups, most)`
    slope: Array  # first derivatives, `(groups, most)`
    curvature: Array  # minus the second derivatives, `(groups, most, most)`


class ContinuousSite:
    """A site of real, or positive, numbers with a Gaussian, Gamma or inverse Gamma conditional.

    :raises IntractableError: where the conditional is of no known family, or too many
        units interact.
    """

    def __init__(self, info: ModelInfo, name: str) -> None:
        self.name = name
        self.posterior = ModelDensity(info, [name])
        self.number = info.continuous.index(name)
        kind = str(info.kind(name))
        self.shape = self.posterior.shapes[name]
        program = self.posterior.program
        self.dtype = program.dtypes[program.sites[name]]
        indicators = frozenset(
            slot
            for site, slot in program.siblings.items()
            if info.support(site) == constraints.boolean
        )
        facts = Facts(kind != "real", kind in ("unit_interval", "simplex"), indicators)
        self.family, is_separable = _family(name, kind, powers_of(program, facts))
        edges = np.zeros((0, 2), int) if is_separable else self.posterior.terms().edges
        #: of every unit its group, and its place in the group
        self.index = _groups(math.prod(self.shape), edges)
        self.groups, self.places = self.index
        self.most = int(self.places.max(initial=-1)) + 1
        if self.most > 1 and self.family != "Gaussian":
            problem = f"must not interact where their conditional is {self.family}"
            _refuse(name, f"units {problem}")
        if self.most > _MOST_JOINT:
            problem = f"must be at most {_MOST_JOINT}, got {self.most}"
            _refuse(name, f"units that interact {problem}")

    def _density(self, inputs: Inputs) -> Callable[[Array], Array]:
        """Return the log density as a function of the site."""
        program = self.posterior.program
        slots = self.posterior.inputs(inputs)
        slot = program.sites[self.name]
        return lambda x: run_guarded(program, {**slots, slot: x}, program.output)

    def derivatives(self, inputs: Inputs) -> Any:
        """Return the derivatives from which the conditional follows."""
        density = self._density(inputs)
        slope = jax.grad(lambda flat: density(flat.reshape(self.shape)))
        flat = jnp.asarray(inputs[0][self.name], self.dtype).ravel()
        places = jnp.asarray(self.places)

        def column(place):
            """Return second derivatives in the unit at this place of each group."""
            tangent = (places == place).astype(self.dtype)
            return jax.jvp(slope, (flat,), (tangent,))[1]

        columns = lax.map(column, jnp.arange(self.most), batch_size=_MOST_COLUMNS)
        num_groups = int(self.groups.max(initial=-1)) + 1

        def spread(a):
            blank = jnp.zeros((num_groups, self.most), self.dtype)
            return blank.at[self.index].set(a)

        identity = jnp.eye(self.most, dtype=self.dtype)
        curvature = jnp.broadcast_to(identity, (num_groups, *identity.shape))
        curvature = curvature.at[self.index].set(-columns.T)
        return Derivatives(spread(flat), spread(slope(flat)), curvature)

    def move(
        self, inputs: Inputs, keys: Array, beta: Array | None = None, *_: object
    ) -> DrawnSites:
        """Draw the site; see :meth:`~ebmpp.traced.sweep.sweep.BlockSweep.__call__`."""
        keys = random.fold_in(keys, self.number, _CONTINUOUS)
        at = self.derivatives(inputs)
        new, degenerate = self.draw(at, keys, 1.0 if beta is None else beta)
        return {self.name: new.astype(inputs[0][self.name].dtype)}, degenerate

    def draw(
        self, at: Any, keys: Array, beta: Array | float = 1.0
    ) -> tuple[Array, Array]:
        """Return a new value, and the number of units whose conditional is degenerate."""
        draw = _draw_gaussian if self.family == "Gaussian" else self._draw_gamma
        new, valid = draw(at, keys, beta)
        value = jnp.where(valid[:, None], new, at.x)[self.index]
        is_kept = (~valid)[self.groups]
        return value.reshape(self.shape), is_kept.sum(dtype=jnp.int32)

    def _draw_gamma(
        self, at: Derivatives, keys: Array, beta: Array | float
    ) -> tuple[Array, Array]:
        concentration, rate = self._gamma_params(at, beta)
        drawn = jax.random.gamma(random.as_key(keys), concentration) / rate
        new = drawn if self.family == "Gamma" else 1 / drawn
        valid = (concentration > 0) & (rate > 0) & jnp.isfinite(new) & (new > 0)
        return jnp.where(valid, new, 1), valid[:, 0]

    def _gamma_params(
        self, at: Derivatives, beta: Array | float = 1.0
    ) -> tuple[Array, Array]:
        """Return concentration and rate of a log density a log x - b x, or a log x - b / x."""
        first = at.x * at.slope
        second = -(at.x**2) * at.curvature[..., 0]
        if self.family == "Gamma":
            return beta * -second + 1, beta * -(first + second) / at.x
        rate = -at.x * (first + second)
        return beta * (rate / at.x - first) - 1, beta * rate

    def walk(self, inputs: Inputs, keys: Array) -> tuple[SiteValues, Array]:
        """Draw the site, and return the change of the log density that its conditional implies."""
        at = self.derivatives(inputs)
        old = inputs[0][self.name]
        new, _ = self.draw(at, keys)
        conditional = self.distribution(at)
        flat = jnp.ravel if self.most > 1 else jnp.asarray
        log_prob = conditional.log_prob
        change = jnp.subtract(log_prob(flat(new)), log_prob(flat(old)))
        is_same = all_in_row(new == old, change.ndim)
        return {self.name: new}, jnp.where(is_same, 0, change).sum()

    def invalid(self, at: Any) -> Array:
        """Return a mask of the units whose conditional is nan."""
        is_nan = jnp.isnan(at.slope) | jnp.isnan(at.curvature).any(-1)
        return is_nan[self.index]

    def distribution(self, at: Any) -> dist.Distribution:
        """Return the conditional; that of the flattened site if units interact."""
        if self.family != "Gaussian":
            kind = dist.Gamma if self.family == "Gamma" else dist.InverseGamma
            params = self._gamma_params(at)
            return kind(*(a[self.index].reshape(self.shape) for a in params))
        shift = jnp.linalg.solve(at.curvature, at.slope[..., None])[..., 0]
        mean = (at.x + shift)[self.index]
        if self.most <= 1:
            scale = at.curvature[self.groups, 0, 0].reshape(self.shape) ** -0.5
            return dist.Normal(mean.reshape(self.shape), scale)
        covariance = jnp.linalg.inv(at.curvature)
        covariance = 0.5 * (covariance + covariance.mT)
        pairs = covariance[self.index][:, self.places]
        is_same_group = self.groups[:, None] == self.groups
        return dist.MultivariateNormal(mean, jnp.where(is_same_group, pairs, 0))


class Pseudocounts(NamedTuple):
    """The coefficients of the logarithms, and the present value."""

    x: Array
    counts: Array  # `(*rows, K)`, for a Beta `(*shape, 2)`


class Probabilities(ContinuousSite):
    """A site of probabilities with a Dirichlet or Beta conditional.

    :raises IntractableError: where the conditional is no such distribution.
    """

    def derivatives(self, inputs: Inputs) -> Pseudocounts:
        density = self._density(inputs)
        value = inputs[0][self.name]

        def slope(x):
            return jax.grad(lambda x: _SCALE * density(x))(x) / _SCALE

        def fill(number):
            return jnp.full(self.shape, number, self.dtype)

        if self.family == "Dirichlet":
            middle = 1 / self.shape[-1]
            return Pseudocounts(value, middle * slope(fill(middle)))
        ends = jnp.stack([fill(_EDGE), fill(1 - _EDGE)])
        low, high = _EDGE * jax.vmap(slope)(ends)
        ratio = _EDGE / (1 - _EDGE)  # low is a - b ratio, and high is a ratio - b
        ones = low - ratio * high
        zeros = ratio * low - high
        counts = jnp.stack([ones, zeros], -1) / (1 - ratio**2)
        return Pseudocounts(value, counts)

    def draw(
        self, at: Pseudocounts, keys: Array, beta: Array | float = 1.0
    ) -> tuple[Array, Array]:
        concentration = beta * at.counts + 1
        drawn = jax.random.dirichlet(random.as_key(keys), concentration)
        limits = jnp.finfo(drawn.dtype)
        # A draw that rounds to 0 or 1 becomes the nearest float inside, where log x is
        # finite, as in NumPyro.
        drawn = jnp.clip(drawn, limits.tiny, 1 - limits.eps)
        valid = ((concentration > 0) & jnp.isfinite(drawn)).all(-1)
        if self.family == "Beta":
            drawn = drawn[..., 0]
        new = jnp.where(expand(valid, at.x), drawn, at.x)
        return new, (~valid).sum(dtype=jnp.int32)

    def distribution(self, at: Pseudocounts) -> dist.Distribution:
        concentration = at.counts + 1
        if self.family == "Dirichlet":
            # rounding moves rows off the simplex
            return dist.Dirichlet(concentration, validate_args=False)
        return dist.Beta(concentration[..., 0], concentration[..., 1])

    def invalid(self, at: Pseudocounts) -> Array:
        counts = at.counts.reshape(at.x.size, -1)
        return jnp.isnan(counts).any(-1)


def _draw_gaussian(
    at: Derivatives, keys: Array, beta: Array | float
) -> tuple[Array, Array]:
    """Draw each group with mean x + C^-1 g and covariance C^-1 / beta."""
    uniforms = random.open_uniform(random.words(keys, at.x.size))
    noise = jax.scipy.special.ndtri(uniforms).reshape(at.x.shape)
    noise = noise / jnp.sqrt(beta)
    if at.x.shape[1] == 1:
        precision = at.curvature[..., 0]
        new = at.x + at.slope / precision + noise / jnp.sqrt(precision)
    else:
        factor = jnp.linalg.cholesky(at.curvature)
        mean = jax.scipy.linalg.cho_solve((factor, True), at.slope[..., None])
        spread = lax.linalg.triangular_solve(
            factor,
            noise[..., None].astype(factor.dtype),
            left_side=True,
            lower=True,
            transpose_a=True,
        )
        new = at.x + (mean + spread)[..., 0]
    return new.astype(at.x.dtype), jnp.isfinite(new).all(-1)


def _family(  # noqa: RET503 - a refusal does not return
    name: str, kind: str, powers: tuple[Powers, bool] | str
) -> tuple[str, bool]:
    """Return the family of a site, and whether its units are independent."""
    families = _FAMILIES[kind]
    if isinstance(powers, str):
        form = f"a function with {powers!r}"
    else:
        present, is_separable = powers
        for family, allowed in families.items():
            if present <= allowed:
                return family, is_separable
        form = ", ".join(_in_words(present))
    sums = ", or ".join(
        " and ".join(_in_words(allowed)) for allowed in families.values()
    )
    problem = f"its conditional could not be shown to be a sum of {sums}: it has {form}"
    _refuse(name, problem)


def _refuse(name: str, problem: str) -> NoReturn:
    raise IntractableError(
        f"from_model: site {name!r}: {problem}. Select values by jnp.where(z, a, b), "
        "or leave the site to another block, such as NUTS"
    )


def _in_words(powers: Set) -> list[str]:
    in_order = sorted(powers - {0.0}, key=str)
    return [_IN_WORDS.get(p) or f"x^{p:g}" for p in in_order]


def _groups(size: int, edges: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return each unit's group of units that interact, directly or not, and its place there."""
    groups = np.zeros(size, int) if edges is None else np.arange(size)
    if edges is not None and len(edges):
        graph = nx.Graph(edges.tolist())
        graph.add_nodes_from(range(size))
        for number, members in enumerate(nx.connected_components(graph)):
            groups[list(members)] = number
    return groups, ranks_in_groups(groups)
