# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Hamiltonian moves of real-valued units, and the coupled transition that they are made of.

A transition is a Hamiltonian trajectory, in which two chains share momentum and
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

from collections.abc import Callable
import dataclasses
from functools import partial
import math
from typing import NamedTuple

from jaxtyping import PyTree
from numpyro.distributions import constraints
from numpyro.infer.hmc_util import euclidean_kinetic_energy, velocity_verlet

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Chains,
    Keys,
    Rows,
    at_index,
    checks,
    random,
    select,
)
from ebmpp.families import Family
from ebmpp.graph import FactorGraph, energy
from ebmpp.moves.couplings import Attempt, Trial, where_states
from ebmpp.moves.gradients.density import check_blocks, local_density, surroundings
from ebmpp.moves.move import (
    Drawn,
    Move,
    final_attempt,
    one_chain,
    with_invalid,
)
from ebmpp.moves.target import Target


class Draws(NamedTuple):
    """Random numbers of one transition, the same for both chains."""

    momentum: Array  # standard normal, `(d,)`
    walk: Array  # standard normal, `(d,)`
    level: Array  # logarithms of uniforms: of the trajectory's acceptance
    walk_level: Array  # of the walk's acceptance
    meeting_level: Array  # of the event that both chains propose the same point
    walk_choice: Array  # of whether the walk makes a step


class Position(NamedTuple):
    """A chain in a space of real numbers."""

    z: Array  # `(d,)`
    energy: Array
    has_moved: Array


class Transition(NamedTuple):
    """Settings of a transition."""

    step_size: float | Array
    num_steps: int
    walk_scale: float
    walk_probability: float
    factor: Array
    """L, with ``L @ L.T`` the inverse mass matrix; its diagonal if that is all."""

    def simulate(
        self, potential: Callable[[Array], Array], z: Array, draws: Draws
    ) -> Position:
        """Make a Hamiltonian trajectory of one chain."""
        factor = self.factor
        matrix = factor**2 if factor.ndim == 1 else factor @ factor.T
        kinetic = partial(euclidean_kinetic_energy, matrix)
        begin, leapfrog = velocity_verlet(potential, euclidean_kinetic_energy)

        def step(_, state):
            return leapfrog(self.step_size, matrix, state)

        start = begin(z, _solve(factor, draws.momentum, transposed=True))
        end = lax.fori_loop(0, self.num_steps, step, start)
        old, new = (s.potential_energy + kinetic(s.r) for s in (start, end))
        at = Position(z, old, jnp.zeros((), bool))
        at = metropolis(at, end.z, new, draws.level)
        energy = jnp.where(at.has_moved, end.potential_energy, start.potential_energy)
        return at._replace(energy=energy)

    def proposals(self, z: Array, draws: Draws) -> Array:
        """Return the points that the random walks of the chains propose, ``(chains, d)``."""
        x = z[0]
        proposal = x + self.walk_scale * _multiply(self.factor, draws.walk)
        if len(z) == 1:
            proposals = proposal[None]
        else:
            y = z[1]
            gap = _solve(self.factor, x - y) / self.walk_scale
            norm = jnp.linalg.norm(gap)
            direction = gap / jnp.where(norm > 0, norm, 1)
            log_ratio = -gap @ draws.walk - 0.5 * norm**2
            mirrored = draws.walk - 2 * (direction @ draws.walk) * direction
            other = y + self.walk_scale * _multiply(self.factor, mirrored)
            other = jnp.where(draws.meeting_level <= log_ratio, proposal, other)
            proposals = jnp.stack([proposal, other])
        if self.walk_probability == 1:
            return proposals
        is_made = draws.walk_choice < math.log(self.walk_probability)
        return jnp.where(is_made, proposals, z)

    def run(
        self, potential: Callable[..., Array], sites: PyTree, x: PyTree, draws: Draws
    ) -> tuple[Position, Position, PyTree]:
        """Make one transition of one chain, or two.

        :param potential: minus the log density of a chain, given its data and point.
        :param sites: data of the chains, with a leading axis of chains.
        :param x: their points, trees of arrays with a leading axis of chains.
        :return: the chains after the trajectory and after the walk, with the energy nan
            if that of its proposal is, and their points.
        """
        _, unravel = ravel_pytree(at_index(x, 0))
        z = jax.vmap(lambda x: ravel_pytree(x)[0])(x)

        def potential_of(site):
            return lambda z: potential(site, unravel(z))

        def simulate(site, z):
            return self.simulate(potential_of(site), z, draws)

        def walk(site, at, proposal):
            energy = potential_of(site)(proposal)
            moved = metropolis(at, proposal, energy, draws.walk_level)
            # walks are short: unlike a trajectory's it is no sign of divergence
            marked = jnp.where(jnp.isnan(energy), energy, moved.energy)
            return moved._replace(energy=marked)

        at = jax.vmap(simulate)(sites, z)
        end = jax.vmap(walk)(sites, at, self.proposals(at.z, draws))
        return at, end, jax.vmap(unravel)(end.z)


def draw_numbers(keys: Array, size: int) -> Draws:
    """Return the random numbers of a transition in ``size`` dimensions."""
    uniforms = random.open_uniform(random.words(keys, 2 * size + 4))
    normals = jax.scipy.special.ndtri(uniforms[: 2 * size])
    levels = jnp.log(uniforms[2 * size :])
    return Draws(normals[:size], normals[size:], *levels)


def metropolis(at: Position, proposal: Array, energy: Array, level: Array) -> Position:
    """Accept or reject a proposal; one whose energy is nan, or no other point, is rejected."""
    is_accepted = (level <= at.energy - energy) & (proposal != at.z).any()
    return Position(
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


# -- moves of blocks ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hamiltonian(Move[None]):
    r"""Hamiltonian trajectory and random-walk step of real-valued units of any energy.

    A trajectory of one step is Langevin's proposal with the Metropolis correction. The
    two chains of a pair share the momentum; the walk is coupled by reflection, so that
    close chains become equal. Angles (:class:`~ebmpp.VonMises`) move on the line and
    are wrapped.

    Points of infinite energy are rejected, like the ends of divergent trajectories. A
    row whose energy is nan, at present or where its walk goes, becomes nan, and a pair
    is reported as broken.

    :param blocks: blocks of real numbers or angles, moved together given the others.
    :param step_size: of the leapfrog integrator, in the units of the blocks. At 0.6 to
        0.9 of the trajectories accepted the distance per gradient is largest. Under a
        Gaussian, steps above twice its smallest standard deviation diverge. Chains that
        start where a steep energy curves more are moved by the walk alone.
    :param num_steps: leapfrog steps of a trajectory, with a gradient each.
    :param walk_scale: standard deviation of each unit's step in the walk; None for
        :math:`1 / \sqrt{d}` for d units.
    :raises ArgumentError: for a number out of range.

    **References**

    1. Neal (2011), *MCMC using Hamiltonian dynamics*.
    2. Heng, Jacob (2019), *Unbiased Hamiltonian Monte Carlo with couplings*.
    """

    blocks: tuple[str, ...]
    step_size: float = 0.2
    num_steps: int = 8
    walk_scale: float | None = None
    proposes = 1

    def __post_init__(self) -> None:
        checks.number("Hamiltonian: step_size", self.step_size, above=0)
        checks.set_counts(self, "num_steps")
        if self.walk_scale is not None:
            checks.number("Hamiltonian: walk_scale", self.walk_scale, above=0)

    def check(self, graph: FactorGraph) -> None:
        """Refuse unknown blocks, and units that are neither real numbers nor angles."""
        hint = "Move it by Layer or, if finite, by Informed."
        check_blocks(self, graph, _is_real, "of real numbers or angles", hint)

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        z = at_index(x, None)
        new, accepted, broken = self._transition(target, z, keys)
        return with_invalid(broken[0], one_chain(new, 0)), accepted.sum(0)

    def attempt(
        self, target: Target, focused: None, z: Chains, trial: Trial
    ) -> Attempt:
        new, accepted, broken = self._transition(target, z, trial.keys)
        return final_attempt(new, trial, broken.any(0), accepted.sum(0))

    def _transition(
        self, target: Target, z: Chains, keys: Keys
    ) -> tuple[Blocks, Array, Array]:
        """Move one chain, or two, of every row.

        :return: new values, accepted trajectories and rows whose energy is nan, with
            leading axes of chains and rows.
        """
        graph = target.graph
        x = select(z, self.blocks)
        around = jax.vmap(partial(surroundings, target, blocks=self.blocks))(dict(z))
        free = {
            b: jnp.broadcast_to(~target.keep.get(b, jnp.array(False)), v.shape)
            for b, v in x.items()
        }
        size = sum(graph.sizes(x))
        scale = self.walk_scale or size**-0.5
        transition = Transition(
            self.step_size, self.num_steps, scale, 1.0, jnp.ones(size)
        )
        log_density = local_density(target, self.blocks)
        angles = [b for b in x if graph.families[b].support is constraints.circular]

        def potential(site, x):
            # masks of the units that move, and what surroundings returns
            free, around, beta = site
            # observed units feel no force
            x = {b: jnp.where(free[b], v, lax.stop_gradient(v)) for b, v in x.items()}
            value = log_density(graph.statistics(x), around, beta)
            return -value - energy.log_base_measure(graph, x)

        def move_row(old, sites, key):
            is_free, _ = ravel_pytree(at_index(sites[0], 0))
            draws = draw_numbers(key, size)
            draws = draws._replace(
                momentum=jnp.where(is_free, draws.momentum, 0),
                walk=jnp.where(is_free, draws.walk, 0),
            )
            x = dict(old)
            for b in angles:  # both chains in one period
                x[b] = x[b][:1] + _wrapped(x[b] - x[b][:1])
            at, end, new = transition.run(potential, sites, x, draws)
            new |= {b: _wrapped(new[b]) for b in angles}
            # a chain that stays keeps its values to the last bit
            new = where_states(end.has_moved, new, old)
            # where nothing is free, nothing is rejected
            accepted = at.has_moved | ~is_free.any()
            return new, accepted.astype(jnp.int32), jnp.isnan(end.energy)

        return jax.vmap(move_row, (1, 1, 0), 1)(x, (free, *around), keys)


def _is_real(family: Family) -> bool:
    return family.support in (constraints.real, constraints.circular)


def _wrapped(x: Array) -> Array:
    """Return angles in [-pi, pi)."""
    return (x + math.pi) % (2 * math.pi) - math.pi
