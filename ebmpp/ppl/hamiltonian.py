# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Pairs of Hamiltonian Monte Carlo chains of a NumPyro model's continuous sites.

A step is a Hamiltonian transition, in which the two chains share momentum and
acceptance uniform, and which brings them closer; then a step of a random walk, whose
proposals are coupled by reflection and maximally, so that close chains become equal.
With :math:`\Sigma = L L^\top` the inverse mass matrix, :math:`s` the scale of the walk,
:math:`\delta = L^{-1}(x - y) / s` and :math:`\xi` standard normal, the chains propose
:math:`x + s L \xi` and :math:`y + s L \eta`, where

.. math::

    \eta = \begin{cases}
        \xi + \delta & \text{with probability } \min(1, \phi(\xi + \delta) / \phi(\xi)) \\
        \xi - 2 (e^\top \xi)\, e, \quad e = \delta / |\delta| & \text{otherwise,}
    \end{cases}

so that both propose the same point as often as any coupling can.

**References**

1. Heng, Jacob (2019), *Unbiased Hamiltonian Monte Carlo with couplings*, section 3.
2. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with couplings*,
   section 4.1.
"""

from collections.abc import Callable, Sequence
from functools import partial
import math
from typing import NamedTuple

from jaxtyping import PyTree
import numpy as np
from numpyro import handlers
from numpyro.infer.gibbs import conditioned, with_conditioning
from numpyro.infer.hmc_util import euclidean_kinetic_energy, velocity_verlet
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import constrain_fn, potential_energy, unconstrain_fn

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import SiteArrays, checks, random
from ebmpp.errors import StateError
from ebmpp.traced.block import Advanced, BlockChain, Call, Coupled, SiteValues
from ebmpp.traced.data import values_in

#: Length of a trajectory, in units of the posterior's standard deviations.
_LENGTH = 1.4


class _Draws(NamedTuple):
    """Random numbers of one step, the same for both chains."""

    momentum: Array  # standard normal, `(d,)`
    walk: Array  # standard normal, `(d,)`
    level: Array  # logarithms of uniforms: of the trajectory's acceptance
    walk_level: Array  # of the walk's acceptance
    meeting_level: Array  # of the event that both chains propose the same point
    walk_choice: Array  # of whether the walk makes a step


class _Position(NamedTuple):
    """A chain in NumPyro's unconstrained space."""

    z: Array  # `(d,)`
    energy: Array
    has_moved: Array


class CoupledHMC:
    r"""Continuous sites that move by Hamiltonian Monte Carlo, a step of a composite.

    All distributions of NumPyro with a bijection to the real numbers are supported.
    The two chains of a pair share momentum and acceptance uniform, which brings them
    closer. A random walk follows, whose proposals are coupled by reflection and
    maximally, so that close chains become equal. The settings must not depend on the
    pairs, or their estimates were biased. They come from the user or, in
    :meth:`CoupledComposite.from_model`, from a pilot run.

    :param model: a NumPyro model; the composite passes its arguments.
    :param sites: names of its latent sites that move, all of them continuous.
    :param step_size: of the leapfrog integrator.
    :param inverse_mass_matrix: ``(d,)`` or ``(d, d)``, an estimate of the posterior
        covariance in unconstrained space, with sites in alphabetical order; None for
        the identity.
    :param num_steps: leapfrog steps of a trajectory; None for a trajectory of length
        1.4.
    :param walk_scale: standard deviation of the random walk's steps, relative to the
        inverse mass matrix; None for :math:`1 / \sqrt{d}`.
    :param walk_probability: probability of a step of the random walk after a
        trajectory. A step costs one evaluation of the density, a trajectory
        ``num_steps`` gradients, so the default is 1.
    :raises ArgumentError: for a number out of range, or a matrix that is not positive
        definite.

    **References**

    1. Heng, Jacob (2019), *Unbiased Hamiltonian Monte Carlo with couplings*.

    **Example**

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from ebmpp.ppl import CoupledComposite, CoupledHMC, composite_expectation
    >>> def model(y):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    ...     numpyro.sample("y", dist.Normal(0.0, scale), obs=y)
    >>> kernel = CoupledComposite([CoupledHMC(model, ["scale"], step_size=0.3)])
    >>> estimate = composite_expectation(kernel, lambda sites: sites["scale"], 1.0,
    ...                                  rng_key=jax.random.key(0), num_pairs=50)
    >>> estimate.num_unmet
    0
    """

    latents: tuple[str, ...] = ()

    def __init__(
        self,
        model: Callable[..., object],
        sites: Sequence[str],
        *,
        step_size: float,
        inverse_mass_matrix: Array | np.ndarray | None = None,
        num_steps: int | None = None,
        walk_scale: float | None = None,
        walk_probability: float = 1.0,
    ) -> None:
        checks.function("CoupledHMC: model", model, "NumPyro's primitives")
        self.model = conditioned(model)
        self.sites = tuple(checks.sequence("CoupledHMC: sites", sites, "names"))
        self.step_size = checks.number("CoupledHMC: step_size", step_size, above=0)
        self.num_steps = checks.optional_count("CoupledHMC: num_steps", num_steps)
        if self.num_steps is None:
            self.num_steps = int(np.ceil(_LENGTH / self.step_size))
        self.walk_scale = walk_scale
        if walk_scale is not None:
            self.walk_scale = checks.number(
                "CoupledHMC: walk_scale", walk_scale, above=0
            )
        self.walk_probability = checks.number(
            "CoupledHMC: walk_probability", walk_probability, above=0, most=1
        )
        self.inverse_mass_matrix = None
        if inverse_mass_matrix is not None:
            self.inverse_mass_matrix = _check_matrix(inverse_mass_matrix)

    def __repr__(self) -> str:
        matrix = self.inverse_mass_matrix
        mass = ""
        if matrix is not None:
            kind = "dense" if matrix.ndim > 1 else "diagonal"
            mass = f"{len(matrix)} dimensions, {kind} mass, "
        return (
            f"CoupledHMC({list(self.sites)}): {mass}{self.num_steps} steps of size "
            f"{self.step_size:.3g}"
        )

    # -- the contract of a step -------------------------------------------------------

    def draw_initial(self, keys: Array) -> SiteArrays:
        """Return no values: :meth:`draw_prior` draws them."""
        return {}

    def draw_prior(self, values: SiteValues, call: Call, key: Array) -> SiteArrays:
        """Draw the sites that are not among the values, uniformly as NumPyro's kernels do."""
        missing = [site for site in self.sites if site not in values]
        if not missing:
            return {}

        def uniform(site):
            return init_to_uniform(site) if site["name"] in missing else None

        model = handlers.substitute(self.model, data=dict(values))
        model = handlers.substitute(handlers.seed(model, key), substitute_fn=uniform)
        trace = handlers.trace(model).get_trace(*call.args, **call.kwargs)
        checks.names("site of CoupledHMC", missing, trace, StateError)
        return values_in(trace, missing)

    def advance(self, values: SiteValues, call: Call, keys: Array) -> Advanced:
        """Make one transition."""
        chains = jax.tree.map(lambda a: a[None], (dict(values), dict(call.siblings)))
        moved, _ = self._transition(*chains, call, keys)
        return Advanced({site: v[0] for site, v in moved.items()})

    def couple(
        self,
        first: BlockChain,
        second: BlockChain,
        keys: Array,
        coupling: str | None = None,
    ) -> Coupled:
        """Make one transition of two chains, whose proposals are coupled."""
        pair = (first[0], first[1].siblings), (second[0], second[1].siblings)
        chains = jax.tree.map(lambda *a: jnp.stack(a), *pair)
        moved, are_equal = self._transition(*chains, first[1], keys)
        x = {site: v[0] for site, v in moved.items()}
        # a shared value that is computed twice may be rounded differently
        y = {site: jnp.where(are_equal, v[0], v[1]) for site, v in moved.items()}
        return x, y, jnp.zeros((), bool)

    def check_coupled(self, coupling: str | None) -> None:
        """Accept any coupling of the layers of graphs."""

    def is_possible(self, values: SiteValues, call: Call) -> Array:
        """Return True where the log density and its gradient are finite."""
        z = self._unconstrained(values, call.siblings, call)
        potential = self._potential(values, call.siblings, call)
        energy, gradient = jax.value_and_grad(potential)(z)
        return jnp.isfinite(energy) & jnp.isfinite(gradient).all()

    # -- the transition ---------------------------------------------------------------

    def _transition(
        self, values: SiteValues, siblings: SiteValues, call: Call, keys: Array
    ) -> tuple[SiteArrays, Array]:
        """Move one chain, or two, along the first axis.

        :return: the sites, and True if two chains made a step to the same point.
        """
        shapes = jax.eval_shape(self._unconstrained, *_first((values, siblings)), call)
        draws = _draws(keys, shapes.size)
        factor = self._factor(shapes.size)

        def simulate(values, siblings):
            z = self._unconstrained(values, siblings, call)
            potential = self._potential(values, siblings, call)
            return self._simulate(potential, z, factor, draws)

        def walk(values, siblings, at, proposal):
            potential = self._potential(values, siblings, call)
            new = _metropolis(at, proposal, potential(proposal), draws.walk_level)
            constrained = self._constrained(values, siblings, call, new.z)
            # a chain that stays keeps its values to the last bit
            return new, {
                site: jnp.where(new.has_moved, constrained[site].astype(v.dtype), v)
                for site, v in values.items()
            }

        at = jax.vmap(simulate)(values, siblings)
        proposals = self._proposals(at.z, factor, draws)
        at, values = jax.vmap(walk)(values, siblings, at, proposals)
        return values, (at.z[0] == at.z[-1]).all() & at.has_moved.all()

    def _simulate(
        self,
        potential: Callable[[Array], Array],
        z: Array,
        factor: Array,
        draws: _Draws,
    ) -> _Position:
        """Make a Hamiltonian transition."""
        matrix = factor**2 if factor.ndim == 1 else factor @ factor.T
        kinetic = partial(euclidean_kinetic_energy, matrix)
        begin, leapfrog = velocity_verlet(potential, euclidean_kinetic_energy)

        def step(_, state):
            return leapfrog(self.step_size, matrix, state)

        start = begin(z, _solve(factor, draws.momentum, transposed=True))
        end = lax.fori_loop(0, self.num_steps, step, start)
        energy = start.potential_energy + kinetic(start.r)
        at = _Position(z, energy, jnp.zeros((), bool))
        new_energy = end.potential_energy + kinetic(end.r)
        at = _metropolis(at, end.z, new_energy, draws.level)
        potential_energy = jnp.where(
            at.has_moved, end.potential_energy, start.potential_energy
        )
        return at._replace(energy=potential_energy)

    def _proposals(self, z: Array, factor: Array, draws: _Draws) -> Array:
        """Return the points that the random walks of the chains propose, ``(chains, d)``."""
        scale = self.walk_scale or z.shape[-1] ** -0.5
        x = z[0]
        proposal = x + scale * _multiply(factor, draws.walk)
        if len(z) == 1:
            proposals = proposal[None]
        else:
            y = z[1]
            gap = _solve(factor, x - y) / scale
            norm = jnp.linalg.norm(gap)
            direction = gap / jnp.where(norm > 0, norm, 1)
            log_ratio = -gap @ draws.walk - 0.5 * norm**2
            mirrored = draws.walk - 2 * (direction @ draws.walk) * direction
            other = y + scale * _multiply(factor, mirrored)
            other = jnp.where(draws.meeting_level <= log_ratio, proposal, other)
            proposals = jnp.stack([proposal, other])
        if self.walk_probability == 1:
            return proposals
        is_made = draws.walk_choice < math.log(self.walk_probability)
        return jnp.where(is_made, proposals, z)

    # -- NumPyro's unconstrained space ------------------------------------------------

    def _call(self, siblings: SiteValues, call: Call) -> tuple:
        return (
            self.model,
            call.args,
            with_conditioning(dict(call.kwargs), dict(siblings)),
        )

    def _unconstrained(
        self, values: SiteValues, siblings: SiteValues, call: Call
    ) -> Array:
        free = unconstrain_fn(*self._call(siblings, call), values)
        return ravel_pytree(free)[0]

    def _constrained(
        self, values: SiteValues, siblings: SiteValues, call: Call, z: Array
    ) -> SiteArrays:
        """Return the sites at a point of unconstrained space."""
        unravel = self._unravel(values, siblings, call)
        return constrain_fn(*self._call(siblings, call), unravel(z))

    def _potential(
        self, values: SiteValues, siblings: SiteValues, call: Call
    ) -> Callable[[Array], Array]:
        """Return minus the log density, as a function of the point."""
        unravel = self._unravel(values, siblings, call)
        arguments = self._call(siblings, call)
        return lambda z: potential_energy(*arguments, unravel(z))

    def _unravel(
        self, values: SiteValues, siblings: SiteValues, call: Call
    ) -> Callable[[Array], SiteArrays]:
        """Return the map from a point to arrays by site; it depends on shapes alone."""
        shapes = jax.eval_shape(
            lambda v, s: unconstrain_fn(*self._call(s, call), v), values, siblings
        )
        return ravel_pytree(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes))[
            1
        ]

    def _factor(self, size: int) -> Array:
        """Return L, with ``L @ L.T`` the inverse mass matrix; its diagonal if that is all."""
        matrix = self.inverse_mass_matrix
        if matrix is None:
            return jnp.ones(size)
        if len(matrix) != size:
            raise checks.state_error(
                "CoupledHMC: inverse_mass_matrix",
                f"of the {size} dimensions of sites {list(self.sites)}",
                matrix,
            )
        return jnp.asarray(
            np.sqrt(matrix) if matrix.ndim == 1 else np.linalg.cholesky(matrix)
        )


def _first(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: a[0], tree)


def _draws(keys: Array, size: int) -> _Draws:
    uniforms = random.open_uniform(random.words(keys, 2 * size + 4))
    normals = jax.scipy.special.ndtri(uniforms[: 2 * size])
    levels = jnp.log(uniforms[2 * size :])
    return _Draws(normals[:size], normals[size:], *levels)


def _metropolis(
    at: _Position, proposal: Array, energy: Array, level: Array
) -> _Position:
    """Accept or reject a proposal; one whose energy is nan, or no other point, is rejected."""
    is_accepted = (level <= at.energy - energy) & (proposal != at.z).any()
    return _Position(
        jnp.where(is_accepted, proposal, at.z),
        jnp.where(is_accepted, energy, at.energy),
        at.has_moved | is_accepted,
    )


def _multiply(factor: Array, x: Array) -> Array:
    return factor * x if factor.ndim == 1 else factor @ x


def _solve(factor: Array, x: Array, transposed: bool = False) -> Array:
    if factor.ndim == 1:
        return x / factor
    return jax.scipy.linalg.solve_triangular(
        factor, x, trans=int(transposed), lower=True
    )


def _check_matrix(matrix: object) -> np.ndarray:
    """Return an inverse mass matrix; raise an ArgumentError unless it is positive definite."""
    name = "CoupledHMC: inverse_mass_matrix"
    array = np.asarray(checks.numbers(name, matrix))
    is_matrix = (
        array.ndim == 2 and len(array) == len(array.T) and np.allclose(array, array.T)
    )
    is_valid = array.ndim == 1 and (array > 0).all()
    if is_matrix:
        is_valid = (np.linalg.eigvalsh(array) > 0).all()
    if not is_valid:
        raise checks.error(
            name, "positive variances (d,) or a positive definite matrix (d, d)", matrix
        )
    return array
