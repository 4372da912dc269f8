# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Continuous sites whose conditional is of a known family, by the traced log density.

Units are Gaussian where the log density is a polynomial of degree two in all of them
jointly, Gamma where it is a sum of x and log x, inverse Gamma where of 1/x and log x,
Beta where of log x and log(1 - x). Rows on the simplex are Dirichlet where it is a sum
of log x. With L the log density, the coefficients of both are
:math:`x_k \partial L / \partial x_k`, taken in the middle of the simplex, and at the
two ends of the interval. A prior on an interval restricts the conditional to it.

No conditional depends on the present value of its site, near or far.
"""

from collections.abc import Callable, Sequence, Set
import math
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jax.typing import ArrayLike

from ebmpp.core import SiteArrays, random
from ebmpp.dependence.powers import LOG, LOG1M, Facts, powers_of
from ebmpp.dependence.pullback import run_guarded
from ebmpp.errors import IntractableError
from ebmpp.traced.block import Coupled, SiteValues
from ebmpp.traced.maximal import coupled, rounded
from ebmpp.traced.model import DrawnSites, Inputs, ModelInfo
from ebmpp.traced.rows import all_in_row
from ebmpp.traced.sweep.posterior import ModelDensity, groups_of
from ebmpp.traced.truncated import Truncated

_MOST_JOINT = 1024  # units that are drawn jointly
# folded into keys beside a site's number; larger than the counters of random words
_CONTINUOUS = 1 << 31
_COUPLED = _CONTINUOUS + 1
_MOST_COLUMNS = 64  # of second derivatives at once
# of u, so that x^-2 does not overflow, and widths of the intervals around it
_SCALES = (2.0**-50, 2.0**50)
_WIDTHS = (2.0**40, 2.0**12)
_EDGE = 2.0**-20  # distance from the ends of the interval; 1 - x is exact there
# of the log density, so that counts / tiny, the slope of a clipped log 0, are finite
_SCALE = 2.0**-24
_ROOT = 64  # of the gammas that make up a Dirichlet draw
#: by kind of site, the powers of each family
_FAMILIES: dict[str, dict[str, Set]] = {
    "real": {"Gaussian": {0.0, 1.0, 2.0}},
    "positive": {
        "Gamma": {0.0, 1.0, LOG},
        "InverseGamma": {0.0, -1.0, LOG},
        "SqrtInverseGamma": {0.0, -2.0, LOG},
    },
    "unit_interval": {"Beta": {0.0, LOG, LOG1M}},
    "simplex": {"Dirichlet": {0.0, LOG}},
}
#: of x in the density of u, a Gamma's
_EXPONENTS = {"Gamma": 1, "InverseGamma": -1, "SqrtInverseGamma": -2}
_IN_WORDS = {LOG: "log x", LOG1M: "log(1 - x)", 1.0: "x"}

Density = Callable[[Array], Array]
Derivative = Callable[[Density], Density]


class ContinuousSite:
    """A site of numbers whose conditional is of a known family.

    :param posterior: the log density of the site, or of several that are a vector.
    :param kind: the kind of numbers on which the log density has the family's form.
    :param family: the family of the conditional, before it is truncated.
    :param is_separable: True if it is a sum of functions of one unit each.
    :raises IntractableError: where too many units interact.
    """

    most_joint = 1  # units that can be drawn jointly

    def __init__(
        self,
        posterior: ModelDensity,
        kind: str,
        family: str,
        is_separable: bool,
    ) -> None:
        info = posterior.info
        self.posterior = posterior
        self.family = family
        #: of x in a power that is a Gamma
        self.exponent = _EXPONENTS.get(family, 1)
        self.name = posterior.sites[0]
        self.bounds = info.bounds(self.name)
        self.is_truncated = info.support(self.name) != getattr(constraints, kind)
        self.number = info.continuous.index(self.name)
        program = posterior.program
        #: in the order of the program's units
        self.names = tuple(program.sites)
        self.shape = posterior.shapes[self.name]
        if len(self.names) > 1:
            self.shape = (sum(map(program.size, program.sites.values())),)
        self.dtype = program.dtypes[program.sites[self.name]]
        edges = np.zeros((0, 2), int) if is_separable else posterior.terms().edges
        #: of every unit its group, and its place in the group
        self.index = groups_of(math.prod(self.shape), edges)
        self.groups, self.places = self.index
        self.most = int(self.places.max(initial=-1)) + 1
        if self.most > self.most_joint:
            _refuse(
                posterior,
                f"units that interact must be at most {self.most_joint} where their "
                f"conditional is {family}, got {self.most}",
            )

    def point(self, inputs: Inputs) -> Array:
        """Return the value at which the log density is expanded."""
        return self.join(inputs[0])

    def statistics(
        self, fn: Density, at: Array, differentiate: Derivative = jax.grad
    ) -> Any:
        """Return the coefficients of a part of the log density, in which they are linear.

        :param fn: from the site to one number, or to an array by ``jax.jacfwd``.
        :param at: the site, near the mean.
        """
        raise NotImplementedError

    def log_integral(self, statistics: Any, at: Array) -> Array:
        """Return the log of the integral of exp(fn) over the site, less ``fn(at)``."""
        raise NotImplementedError

    def density(self, inputs: Inputs) -> Density:
        """Return the log density as a function of the site."""
        program = self.posterior.program
        slots = self.posterior.inputs(inputs)

        def density(x):
            at = self.posterior.inputs_at(self.split(x), slots)
            return run_guarded(program, at, program.output)

        return density

    def join(self, values: SiteValues) -> Array:
        """Return the value; of several sites as a vector."""
        if len(self.names) == 1:
            return values[self.name]
        return jnp.concatenate([values[name].ravel() for name in self.names])

    def split(self, x: Array) -> SiteArrays:
        """Return the values of the sites by name."""
        shapes = [self.posterior.shapes[name] for name in self.names]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        parts = jnp.split(x.ravel(), ends[:-1])
        return {
            name: part.reshape(shape)
            for name, part, shape in zip(self.names, parts, shapes)
        }

    def derivatives(self, inputs: Inputs) -> Any:
        """Return the derivatives from which the conditional follows, with the present value."""
        raise NotImplementedError

    def new_values(self, at: Any, keys: Array, beta: Array | float) -> Array:
        """Return draws from the conditional; nan of units or rows where it is degenerate."""
        return self.truncated(beta * at.counts, *self.bounds).draw(keys)

    def distribution(self, at: Any) -> dist.Distribution:
        """Return the conditional; that of the flattened site if units interact."""
        return self.truncated(at.counts, *self.bounds)

    def invalid(self, at: Any) -> Array:
        """Return a mask of the units whose conditional is nan."""
        return jnp.isnan(at.counts).reshape(at.x.size, -1).any(-1)

    def move(
        self, inputs: Inputs, keys: Array, beta: Array | None = None, *_: object
    ) -> DrawnSites:
        """Draw the site; see :meth:`~ebmpp.traced.sweep.sweep.BlockSweep.__call__`."""
        keys = random.fold_in(keys, self.number, _CONTINUOUS)
        at = self.derivatives(inputs)
        new, degenerate = self.draw(at, keys, 1.0 if beta is None else beta)
        return self._like(inputs, new), degenerate

    def _like(self, inputs: Inputs, x: Array) -> SiteArrays:
        """Return values of the sites in the dtypes of the present ones."""
        parts = self.split(x).items()
        return {name: v.astype(inputs[0][name].dtype) for name, v in parts}

    def draw(
        self, at: Any, keys: Array, beta: Array | float = 1.0
    ) -> tuple[Array, Array]:
        """Return a new value, and the number of units whose conditional is degenerate."""
        new = self.new_values(at, keys, beta)
        is_degenerate = jnp.isnan(new)
        new = jnp.where(is_degenerate, at.x, new)
        return new, is_degenerate.sum(dtype=jnp.int32)

    def couple(self, first: Inputs, second: Inputs, keys: Array) -> Coupled:
        """Draw the site of two chains, each unit or group of units coupled."""
        keys = random.fold_in(keys, self.number, _COUPLED)
        p = self.unit_params(self.derivatives(first))
        q = self.unit_params(self.derivatives(second))
        unit_keys = random.fold_in(keys, jnp.arange(len(p[0])))

        def couple_unit(key, p, q):
            return coupled(key, self.unit(*p), self.unit(*q))

        x, y, is_valid = jax.vmap(couple_unit)(unit_keys, p, q)
        x, y = (self._like(first, self.from_units(v)) for v in (x, y))
        return x, y, ~is_valid.all()

    def unit_params(self, at: Any) -> Sequence[Array]:
        """Return the parameters of :meth:`unit`, with a first axis of units or groups."""
        *shape, size = at.counts.shape
        ends = [jnp.broadcast_to(end, shape).ravel() for end in self.bounds]
        return [at.counts.reshape(-1, size), *ends]

    def truncated(self, counts: Array, /, *bounds: ArrayLike) -> Truncated:
        """Return the conditional on an interval."""
        params = jnp.moveaxis(counts, -1, 0)
        return Truncated("Gaussian", 1, *params, *bounds)

    def unit(self, counts: Array, /, *bounds: ArrayLike) -> dist.Distribution:
        """Return the conditional of one unit, or of a group of units that interact."""
        return self.truncated(counts, *bounds)

    def from_units(self, values: Array) -> Array:
        """Return values of all units or groups in the site's shape."""
        flat = values[self.index] if self.most > 1 else values
        return flat.reshape(self.shape)

    def walk(self, inputs: Inputs, keys: Array) -> tuple[SiteValues, Array]:
        """Draw the site, and return the change of the log density that its conditional implies."""
        at = self.derivatives(inputs)
        new, _ = self.draw(at, keys)
        change = self._log_probs(at, new) - self._log_probs(at, at.x)
        is_same = all_in_row(new == at.x, change.ndim)
        return self.split(new), jnp.where(is_same, 0, change).sum()

    def log_prob(self, inputs: Inputs) -> Array:
        """Return the log density of the present value given everything else."""
        at = self.derivatives(inputs)
        return self._log_probs(at, at.x).sum()

    def _log_probs(self, at: Any, x: Array) -> Array:
        flat = x.ravel() if self.most > 1 else x
        return jnp.asarray(self.distribution(at).log_prob(flat))


class Derivatives(NamedTuple):
    """Derivatives of the log density near the mean, group by group."""

    x: Array  # the present value
    point: Array  # where the slope is taken, `(groups, most)`
    slope: Array  # first derivatives, `(groups, most)`
    curvature: Array  # minus the second derivatives, `(groups, most, most)`

    @property
    def mean(self) -> Array:
        """Means of the conditional, ``(groups, most)``."""
        return self.point + _solve(self.curvature, self.slope)

    @property
    def counts(self) -> Array:
        """Coefficients of x and -x^2 / 2 where no units interact, ``(*shape, 2)``."""
        curvature = self.curvature[..., 0]
        counts = jnp.stack([self.slope + curvature * self.point, curvature], -1)
        return counts.reshape(*self.x.shape, 2)


class GaussianSite(ContinuousSite):
    """A site of real numbers with a Gaussian conditional.

    A step by Newton's method from 0 leads to the mean up to rounding, where the slope
    is taken again, whatever the present value is.
    """

    def derivatives(self, inputs: Inputs) -> Derivatives:
        density = self.density(inputs)
        zero = jnp.zeros(self.shape, self.dtype)
        slope, columns = self.statistics(density, zero)
        curvature = self._curvature(columns)
        point = _solve(curvature, self._slope(slope))
        point = jnp.where(jnp.isfinite(point), point, 0)
        at_point = jax.grad(density)(self._by_unit(point).reshape(self.shape))
        at_point = self._slope(at_point.ravel())
        return Derivatives(self.join(inputs[0]), point, at_point, curvature)

    def statistics(
        self, fn: Density, at: Array, differentiate: Derivative = jax.grad
    ) -> tuple[Array, Array]:
        """Return the slope at a value, ``(..., units)``, and second derivatives.

        These, ``(..., most, units)``, are in the units at each place of their groups.
        """
        slope = differentiate(lambda flat: fn(flat.reshape(self.shape)))
        places = jnp.asarray(self.places)

        def column(place):
            tangent = (places == place).astype(self.dtype)
            return jax.jvp(slope, (at.ravel(),), (tangent,))[1]

        # not in a loop, which hides the units that its results depend on
        is_small = self.most <= _MOST_COLUMNS
        numbers = np.arange(self.most)
        if is_small:
            columns = jax.vmap(column, out_axes=-2)(numbers)
        else:
            columns = lax.map(column, numbers, batch_size=_MOST_COLUMNS)
        return slope(at.ravel()), columns

    def log_integral(self, statistics: tuple[Array, Array], at: Array) -> Array:
        slope, columns = statistics
        slope = self._slope(slope)
        curvature = self._curvature(columns)
        if self.most == 1:
            curvature = curvature[..., 0]
            return 0.5 * (slope**2 / curvature - jnp.log(curvature)).sum()
        # with the slope as one more row, of which the factor is the scaled slope
        padded = jnp.pad(curvature, [(0, 0), (0, 1), (0, 1)])
        joint = padded.at[:, -1, :-1].set(slope)
        joint = joint.at[:, -1, -1].set(jnp.finfo(slope.dtype).max)
        factor = jnp.linalg.cholesky(joint, symmetrize_input=False)
        diagonal = jnp.diagonal(factor, axis1=1, axis2=2)[:, :-1]
        return (0.5 * factor[:, -1, :-1] ** 2 - jnp.log(diagonal)).sum()

    def _slope(self, slope: Array) -> Array:
        """Return slopes in the units, ``(groups, most)``."""
        return self._by_group(slope, jnp.zeros(self.most, self.dtype))

    def _curvature(self, columns: Array) -> Array:
        """Return minus the second derivatives, ``(groups, most, most)``."""
        return self._by_group(-columns.T, jnp.eye(self.most, dtype=self.dtype))

    def _by_group(self, values: Array, padding: Array) -> Array:
        """Return values of units, ``(groups, most, ...)``."""
        if self.most == 1:
            return values[:, None]
        if self.most == self.groups.size:
            return values[None]
        num_groups = int(self.groups.max(initial=-1)) + 1
        padded = jnp.broadcast_to(padding, (num_groups, *padding.shape))
        return padded.at[self.index].set(values)

    def _by_unit(self, values: Array) -> Array:
        """Return values of groups as a vector, without a gather if no units interact."""
        if self.most == self.groups.size:
            return values[0]
        return values[:, 0] if self.most == 1 else values[self.index]

    def invalid(self, at: Derivatives) -> Array:
        is_nan = jnp.isnan(at.slope) | jnp.isnan(at.curvature).any(-1)
        return self._by_unit(is_nan)


class JointGaussianSite(GaussianSite):
    """A site of all real numbers, whose units may interact."""

    most_joint = _MOST_JOINT

    def new_values(self, at: Derivatives, keys: Array, beta: Array | float) -> Array:
        """Draw each group with mean x + C^-1 g and covariance C^-1 / beta."""
        uniforms = random.open_uniform(random.words(keys, at.slope.size))
        noise = jax.scipy.special.ndtri(uniforms).reshape(at.slope.shape)
        noise /= jnp.sqrt(beta)
        if self.most == 1:
            noise /= jnp.sqrt(at.curvature[..., 0])
        else:
            factor = jnp.linalg.cholesky(at.curvature)
            noise = lax.linalg.triangular_solve(
                factor,
                noise[..., None].astype(factor.dtype),
                left_side=True,
                lower=True,
                transpose_a=True,
            )[..., 0]
        new = at.mean + noise
        is_finite = jnp.isfinite(new).all(-1, keepdims=True)
        new = jnp.where(is_finite, new, jnp.nan).astype(self.dtype)
        return self._by_unit(new).reshape(self.shape)

    def unit_params(self, at: Derivatives) -> Sequence[Array]:
        if self.most == 1:
            return at.mean[:, 0], at.curvature[:, 0, 0] ** -0.5
        return at.mean, at.curvature

    def unit(self, mean: Array, *params: ArrayLike) -> dist.Distribution:
        if self.most == 1:
            return dist.Normal(mean, *params)
        return dist.MultivariateNormal(mean, precision_matrix=params[0])

    def distribution(self, at: Derivatives) -> dist.Distribution:
        mean = self._by_unit(at.mean)
        if self.most <= 1:
            scale = at.curvature.reshape(self.shape) ** -0.5
            return dist.Normal(mean.reshape(self.shape), scale)
        covariance = jnp.linalg.inv(at.curvature)
        covariance = 0.5 * (covariance + covariance.mT)
        pairs = self._by_unit(covariance)[:, self.places]
        is_same_group = self.groups[:, None] == self.groups
        return dist.MultivariateNormal(mean, jnp.where(is_same_group, pairs, 0))


class Coefficients(NamedTuple):
    """The coefficients of a log density, and the present value."""

    x: Array
    counts: Array
    """Of logarithms, ``(*rows, K)``, of a Beta ``(*shape, 2)``; of log u and -u of a Gamma."""


class GammaSite(ContinuousSite):
    """A site of positive numbers, a power of which has a Gamma conditional.

    With u = x, 1 / x or 1 / x^2, the log density is a log u - b u, and its derivative
    in log u is a - b u. It is taken at both ends of an interval, first around 1, then
    around (|a| + 1) / b, where the two terms are of one size. Elsewhere, as at extreme
    values, rounding would hide one of them. In float32, x is from 1e-18 to 1e18 there.
    """

    def derivatives(self, inputs: Inputs) -> Coefficients:
        density = self.density(inputs)

        def measure(x, width):
            counts = self.statistics(density, x, width=width)
            return self._middle(counts), counts

        start = jnp.ones(self.shape, self.dtype)
        _, counts = lax.scan(measure, start, jnp.asarray(_WIDTHS, self.dtype))
        return Coefficients(self.join(inputs[0]), counts[-1])

    def statistics(
        self,
        fn: Density,
        at: Array,
        differentiate: Derivative = jax.grad,
        width: float | Array = _WIDTHS[1],
    ) -> Array:
        def slope(u):
            x = u ** (1 / self.exponent)
            return x * differentiate(fn)(x) / self.exponent

        middle = at**self.exponent
        low = middle / width
        high = middle * width
        at_low, at_high = jax.vmap(slope)(jnp.stack([low, high]))
        rate = (at_low - at_high) / (high - low)
        return jnp.stack([at_low + low * rate, rate], -1)

    def _middle(self, counts: Array) -> Array:
        """Return the value at which both terms are of one size."""
        count, rate = jnp.moveaxis(counts, -1, 0)
        middle = (abs(count) + 1) / abs(rate)
        middle = jnp.where(jnp.isnan(middle), 1, jnp.clip(middle, *_SCALES))
        return middle ** (1 / self.exponent)

    def point(self, inputs: Inputs) -> Array:
        return self._middle(self.derivatives(inputs).counts)

    def log_integral(self, statistics: Array, at: Array) -> Array:
        concentration, rate = self._params(statistics)
        is_valid = (concentration > 0) & (rate > 0)
        u = at**self.exponent
        log_integral = gammaln(concentration) - concentration * jnp.log(rate)
        log_integral += rate * u - statistics[..., 0] * jnp.log(u)
        return jnp.where(is_valid, log_integral, jnp.nan).sum()

    def _params(self, counts: Array) -> tuple[Array, Array]:
        count, rate = jnp.moveaxis(counts, -1, 0)
        return count + 1 / self.exponent, rate

    def truncated(self, counts: Array, *bounds: ArrayLike) -> Truncated:
        return Truncated("Gamma", self.exponent, *self._params(counts), *bounds)

    def distribution(self, at: Coefficients) -> dist.Distribution:
        if self.is_truncated or self.exponent < -1:
            return super().distribution(at)
        family = dist.Gamma if self.exponent > 0 else dist.InverseGamma
        return family(*self._params(at.counts))


class Probabilities(ContinuousSite):
    """A site of probabilities with a Dirichlet or Beta conditional."""

    def derivatives(self, inputs: Inputs) -> Coefficients:
        counts = self.statistics(self.density(inputs), jnp.zeros(self.shape))
        return Coefficients(self.join(inputs[0]), counts)

    def point(self, inputs: Inputs) -> Array:
        counts = self.derivatives(inputs).counts + 1
        mean = jnp.maximum(counts / counts.sum(-1, keepdims=True), _EDGE)
        return mean[..., 0] if self.family == "Beta" else mean

    def statistics(
        self, fn: Density, at: Array, differentiate: Derivative = jax.grad
    ) -> Array:
        def slope(x):
            return differentiate(lambda x: _SCALE * fn(x))(x) / _SCALE

        def fill(number):
            return jnp.full(self.shape, number, self.dtype)

        if self.family == "Dirichlet":
            middle = 1 / self.shape[-1]
            return middle * slope(fill(middle))
        ends = jnp.stack([fill(_EDGE), fill(1 - _EDGE)])
        low, high = _EDGE * jax.vmap(slope)(ends)
        ratio = _EDGE / (1 - _EDGE)  # low is a - b ratio, and high is a ratio - b
        ones = low - ratio * high
        zeros = ratio * low - high
        return jnp.stack([ones, zeros], -1) / (1 - ratio**2)

    def log_integral(self, statistics: Array, at: Array) -> Array:
        concentration = statistics + 1
        is_valid = (concentration > 0).all(-1)
        at = jnp.stack([at, 1 - at], -1) if self.family == "Beta" else at
        log_integral = (gammaln(concentration) - statistics * jnp.log(at)).sum(-1)
        log_integral -= gammaln(concentration.sum(-1))
        return jnp.where(is_valid, log_integral, jnp.nan).sum()

    def new_values(self, at: Coefficients, keys: Array, beta: Array | float) -> Array:
        # roots, as gammas of small concentrations underflow
        roots = Truncated("Gamma", _ROOT, beta * at.counts + 1, 1.0, 0.0, jnp.inf)
        drawn = jax.nn.softmax(_ROOT * jnp.log(roots.draw(keys)))
        drawn = jnp.minimum(rounded(drawn), 1 - jnp.finfo(drawn.dtype).eps)
        return drawn[..., 0] if self.family == "Beta" else drawn

    def unit(self, counts: Array, *_: ArrayLike) -> dist.Distribution:
        concentration = counts + 1
        if self.family == "Dirichlet":
            # rounding moves rows off the simplex
            return dist.Dirichlet(concentration, validate_args=False)
        return dist.Beta(concentration[..., 0], concentration[..., 1])


def continuous_site(info: ModelInfo, *names: str) -> ContinuousSite:
    """Return the conditional of a continuous site, or of several that are drawn jointly.

    :raises IntractableError: where it is of no known family.
    """
    posterior = ModelDensity(info, names, are_inside=True)
    if not all(map(np.isscalar, info.bounds(names[0]))):
        posterior.check_bounds(names[0])
    facts = _family(posterior)
    site = {"real": GaussianSite, "positive": GammaSite}.get(facts[0], Probabilities)
    if info.support(names[0]) == constraints.real:
        site = JointGaussianSite
    return site(posterior, *facts)


def _family(posterior: ModelDensity) -> tuple[str, str, bool]:  # noqa: RET503
    """Return a kind that holds the site, its family, and whether its units are independent."""
    info = posterior.info
    program = posterior.program
    indicators = frozenset(
        slot
        for name, slot in program.siblings.items()
        if info.support(name) == constraints.boolean
    )
    expected = []
    for kind in info.kinds(posterior.sites[0]):
        is_probability = kind in ("unit_interval", "simplex")
        powers = powers_of(program, Facts(kind != "real", is_probability, indicators))
        for family, allowed in _FAMILIES[kind].items():
            expected.append(" and ".join(_in_words(allowed)))
            if not isinstance(powers, str) and powers[0] <= allowed:
                return kind, family, powers[1]
    form = f"a function with {powers!r}"
    if not isinstance(powers, str):
        form = ", ".join(_in_words(powers[0]))
    _refuse(
        posterior,
        "its conditional could not be shown to be a sum of "
        f"{', or '.join(expected)}: it has {form}",
    )


def _solve(curvature: Array, slope: Array) -> Array:
    """Return the step C^-1 g of each group."""
    if slope.shape[1] == 1:
        return slope / curvature[..., 0]
    factor = jnp.linalg.cholesky(curvature)
    return jax.scipy.linalg.cho_solve((factor, True), slope[..., None])[..., 0]


def _refuse(posterior: ModelDensity, problem: str) -> NoReturn:
    name = ", ".join(posterior.sites)
    raise IntractableError(
        f"from_model: site {name!r}: {problem}. Select values by jnp.where(z, a, b), "
        "or leave the site to another block, such as NUTS"
    )


def _in_words(powers: Set) -> list[str]:
    in_order = sorted(powers - {0.0}, key=str)
    return [_IN_WORDS.get(p) or f"x^{p:g}" for p in in_order]
