# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of Hamiltonian Monte Carlo chains of a NumPyro model's continuous sites.

The transition is that of :mod:`ebmpp.moves.gradients.hamiltonian`, in NumPyro's unconstrained
space.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpyro import handlers
from numpyro.infer.gibbs import conditioned, with_conditioning
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import constrain_fn, potential_energy, unconstrain_fn

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import SiteArrays, at_index, checks, random
from ebmpp.errors import StateError
from ebmpp.moves.gradients.hamiltonian import Transition, draw_numbers
from ebmpp.traced.block import Advanced, BlockChain, Call, Coupled, SiteValues
from ebmpp.traced.data import values_in
from ebmpp.traced.start import Strategy

#: Length of a trajectory, in units of the posterior's standard deviations.
_LENGTH = 1.4


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
        count = checks.optional_count("CoupledHMC: num_steps", num_steps)
        self.num_steps = count or int(np.ceil(_LENGTH / self.step_size))
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

    def draw_prior(
        self,
        values: SiteValues,
        call: Call,
        keys: Array,
        strategy: Strategy | None = None,
    ) -> SiteArrays:
        """Draw the sites that are not among the values, by ``init_to_uniform`` or a strategy."""
        missing = [site for site in self.sites if site not in values]
        if not missing:
            return {}

        def value_of(site):
            start_strategy = strategy or init_to_uniform
            return start_strategy(site) if site["name"] in missing else None

        model = handlers.substitute(self.model, data=dict(values))
        model = handlers.seed(model, random.as_key(keys))
        model = handlers.substitute(model, substitute_fn=value_of)
        trace = handlers.trace(model).get_trace(*call.args, **call.kwargs)
        checks.names("site of CoupledHMC", missing, trace, StateError)
        return values_in(trace, missing)

    def advance(self, values: SiteValues, call: Call, keys: Array) -> Advanced:
        """Make one transition."""
        chains = at_index((dict(values), dict(call.siblings)), None)
        moved, _ = self._transition(*chains, call, keys)
        return Advanced(at_index(moved, 0))

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
        x = at_index(moved, 0)
        # a shared value that is computed twice may be rounded differently
        y = {site: jnp.where(are_equal, v[0], v[1]) for site, v in moved.items()}
        return x, y, jnp.zeros((), bool)

    def check_coupled(self, coupling: str | None) -> None:
        """Accept any coupling of the layers of graphs."""

    def is_possible(self, values: SiteValues, call: Call) -> Array:
        """Return True where the log density and its gradient are finite."""
        arguments = self._arguments(call.siblings, call)
        z = unconstrain_fn(*arguments, values)
        potential = partial(potential_energy, *arguments)
        energy, gradient = jax.value_and_grad(potential)(z)
        return jnp.isfinite(energy) & jnp.isfinite(ravel_pytree(gradient)[0]).all()

    # -- the transition ---------------------------------------------------------------

    def _arguments(self, siblings: SiteValues, call: Call) -> tuple:
        kwargs = with_conditioning(dict(call.kwargs), dict(siblings))
        return self.model, call.args, kwargs

    def _transition(
        self, values: SiteValues, siblings: SiteValues, call: Call, keys: Array
    ) -> tuple[SiteArrays, Array]:
        """Move one chain, or two, along the first axis.

        :return: the sites, and True if two chains made a step to the same point.
        """

        def unconstrained(values, siblings):
            return unconstrain_fn(*self._arguments(siblings, call), values)

        def potential(siblings, z):
            return potential_energy(*self._arguments(siblings, call), z)

        def constrained(values, siblings, z, has_moved):
            new = constrain_fn(*self._arguments(siblings, call), z)
            # a chain that stays keeps its values to the last bit
            return {
                site: jnp.where(has_moved, new[site].astype(v.dtype), v)
                for site, v in values.items()
            }

        z = jax.vmap(unconstrained)(values, siblings)
        size = sum(v[0].size for v in z.values())
        transition = Transition(
            self.step_size,
            self.num_steps,
            self.walk_scale or size**-0.5,
            self.walk_probability,
            self._factor(size),
        )
        _, at, z = transition.run(potential, siblings, z, draw_numbers(keys, size))
        values = jax.vmap(constrained)(values, siblings, z, at.has_moved)
        return values, (at.z[0] == at.z[-1]).all() & at.has_moved.all()

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
