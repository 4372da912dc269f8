# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The Langevin move: real-valued blocks that follow the gradient of their log-density, and noise."""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, NamedTuple

from numpyro.distributions import constraints

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Chains, Keys, Rows
from ebmpp.errors import ArgumentError, DeclarationError, IntractableError, clash
from ebmpp.families.family import Family
from ebmpp.families.gaussian import reflected
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.energy import natural_rows
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.gibbs import hold
from ebmpp.moves.metropolis import refuse_held
from ebmpp.moves.move import Drawn, Move, agree, flat
from ebmpp.moves.target import Target


def is_real(family: Family) -> bool:
    """Whether units take every real value, so that a step with noise stays in the support."""
    return family.support is constraints.real


@dataclasses.dataclass(frozen=True)
class Langevin(Move):
    """``num_steps`` Langevin steps of real-valued ``blocks``, each accepted or refused by the energy.

    A step goes ``step_size**2 / 2 * s**2`` times the gradient of the log-density, and adds normal noise of
    standard deviation ``step_size * s``. Here s is, unit by unit, the standard deviation that fits the
    curvature of the unit's conditional at its mode (for a Gaussian, its own), so that one step size fits
    units of all variances. The energy is that of one state, never divided by how many run side by side: the
    temperature is 1 whatever the batch.

    The density is the conditional given the other blocks or, with ``marginalize``, what is left of the
    energy when those blocks are summed out in closed form.

    Two chains of a pair share the noise, mirrored where that lets them meet (reflection coupling), and the
    uniform that accepts. Once they agree on what the move reads they stay together.

    :param blocks: blocks of real-valued units.
    :param step_size: in standard deviations s.
    :param num_steps: at least 1.
    :param marginalize: blocks that are summed out; no two of them interact.
    :param adjust: False leaves out acceptance. **The law is then another one**: of a Gaussian conditional,
        num_steps to infinity give a variance that is too large by the factor ``1 / (1 - step_size**2 / 4)``.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Liao, Kornblith, Ren, Fleet, Hinton (2022), *Gaussian-Bernoulli RBMs without tears*: Gibbs-Langevin
       sampling, and Langevin sampling of the marginal.
    2. Roberts, Tweedie (1996), *Exponential convergence of Langevin distributions and their discrete
       approximations*: the acceptance.
    3. Bou-Rabee, Eberle, Zimmer (2020), *Coupling and convergence for Hamiltonian Monte Carlo*: reflection.
    """

    blocks: tuple[str, ...]
    step_size: float = 0.5
    num_steps: int = 10
    marginalize: tuple[str, ...] = ()
    adjust: bool = True

    def __post_init__(self) -> None:
        checks.number("step_size, in standard deviations of a unit given the rest,", self.step_size, above=0)
        checks.set_counts(self, "num_steps")
        checks.flag("adjust", self.adjust)
        if not self.adjust and self.step_size >= 2:
            raise ArgumentError(
                f"step_size={self.step_size!r} with adjust=False: from 2 on, unadjusted steps run away even "
                "from a Gaussian; give a smaller one, or adjust=True"
            )

    @property
    def proposes(self) -> int:
        return self.num_steps if self.adjust else 0

    @property
    def exact(self) -> bool:
        """Whether the model's law is left as it is."""
        return self.adjust

    def check(self, graph: FactorGraph) -> None:
        """Check the blocks.

        :raises DeclarationError: for a block that is not real-valued.
        :raises IntractableError: for blocks that cannot be moved, or summed out, together.
        """
        for b in self.blocks:
            if not is_real(graph.families[b]):
                raise DeclarationError(
                    f"block {b!r} ({graph.families[b]!r}) is not real-valued, so it has no Langevin step: "
                    "draw it from its conditional instead"
                )
        for a, b in graph.interacting(self.marginalize):
            raise IntractableError(f"{clash(a, b)}, so they cannot be summed out together")
        for a, b in () if self.marginalize else graph.interacting(self.blocks):
            raise IntractableError(
                f"{clash(a, b)}: a Langevin move takes blocks that are independent given the rest"
            )

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        return *self.blocks, *self._around(graph)

    def _around(self, graph: FactorGraph) -> tuple[str, ...]:
        """What the density depends on, beside the blocks themselves."""
        own = (*self.blocks, *self.marginalize)
        return tuple(b for b in graph.neighbours(own) if b not in own)

    # -- one chain a row -------------------------------------------------------------------------

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        density = self._density(target, x)

        def one(i: Array, carry: tuple[_Point, Array]) -> tuple[_Point, Array]:
            at, taken = carry
            noise, log_u, _ = _noise(random.fold_in(keys, i), density.units)
            new = density.at(density.held(density.drift(at) + density.step * noise, at))
            took = (log_u < density.log_ratio(at, new)) | (not self.adjust)
            return density.choose(took, new, at), taken + (took & self.adjust).astype(taken.dtype)

        start = density.at(density.flat(x)), jnp.zeros(len(keys), jnp.int32)
        end, taken = lax.fori_loop(jnp.uint32(0), jnp.uint32(self.num_steps), one, start)
        return hold(target.keep, x, density.blocks(end.x)), taken

    # -- a coupled pair a row --------------------------------------------------------------------

    def prepare(self, target: Target, z: Chains) -> "_Density":
        return self._density(target.twice(), flat(z))

    def attempt(self, target: Target, focused: "_Density", z: Chains, trial: Trial) -> Attempt:
        rows, density = len(trial.keys), focused
        # one density for both chains of a row
        alike = trial.same | agree(trial.flags, self._around(target.graph), rows)
        halves = lambda a: (a[:rows], a[rows:])

        def one(i: Array, carry: tuple[_Point, Array, Array]) -> tuple[_Point, Array, Array]:
            at, taken, met = carry
            noise, log_u, u = _noise(random.fold_in(trial.keys, i), density.units)
            (x, y), (step, to_step) = halves(density.drift(at)), halves(density.step)
            together = alike & met
            x, y, meets = reflected(noise, u, x, step, y, to_step)
            y = where_rows(together, x, y)
            new = density.at(density.held(jnp.concatenate([x, y]), at))
            took = (jnp.tile(log_u, 2) < density.log_ratio(at, new)) | (not self.adjust)
            took, took_y = halves(took)
            both = jnp.stack([took, jnp.where(together, took, took_y)])
            chosen = density.choose(both.reshape(-1), new, at)
            met = ((meets | together) & both.all(0)) | (met & ~both.any(0))
            # one state under one density has one score, whatever the last bits say
            stay = alike & met
            chosen = jax.tree.map(
                lambda a: jnp.concatenate([a[:rows], where_rows(stay, a[:rows], a[rows:])]), chosen
            )
            return chosen, taken + (both & self.adjust).sum(0, dtype=jnp.int32), met

        start = density.at(density.flat(flat(z)))
        carry = start, jnp.zeros(rows, jnp.int32), agree(trial.flags, self.blocks, rows)
        end, taken, met = lax.fori_loop(jnp.uint32(0), jnp.uint32(self.num_steps), one, carry)
        x, y = (density.blocks(half) for half in halves(end.x))
        own = [{b: z[b][i] for b in self.blocks} for i in range(2)]
        every = jnp.ones(rows, bool)
        broken = ~jnp.stack(halves(jnp.isfinite(end.value))).all(0)
        together = dict.fromkeys(self.blocks, met)
        held = (hold(target.keep, *both) for both in zip(own, (x, y), strict=True))
        return Attempt(*held, every, every, broken, together, taken)

    # -- the density -----------------------------------------------------------------------------

    def _density(self, target: Target, x: Rows) -> "_Density":
        refuse_held(self.marginalize, target.keep)
        graph, params, keep = target.graph, target.params, target.keep
        families = {b: graph.families[b] for b in self.blocks}
        rows = len(next(iter(x.values())))
        if self.marginalize:
            others = {b: v for b, v in x.items() if b not in (*self.blocks, *self.marginalize)}
            rest = graph.statistics(others)

            def log_density(v: Rows, rest: Rows) -> Array:
                t = {**rest, **graph.statistics(v)}
                marginal = energy.log_marginal(graph, params, t, self.marginalize)
                return marginal + energy.log_base_measure(graph, v)

            # A metric that moved with the state would need its own term: the summed-out blocks are put at
            # their default means, and the blocks themselves at 0.
            summed = {b: graph.families[b] for b in self.marginalize}
            usual = {b: f.mean(f.default_eta()) for b, f in summed.items()}
            usual |= {b: jnp.zeros(f.statistic_shape) for b, f in families.items()}
            one = lambda t: energy.natural(graph, params, {**usual, **t}, self.blocks)
            eta = jax.vmap(one, axis_size=rows)(rest)
        else:
            # Blocks that do not interact: their natural parameters are the same at every step.
            rest = eta = natural_rows(graph, params, x, self.blocks)

            def log_density(v: Rows, rest: Rows) -> Array:
                return jnp.asarray(sum(_log_density(f, v[b], rest[b]) for b, f in families.items()))

        scale = {b: jax.vmap(lambda e, f=f: _scale(f, e))(eta[b]) for b, f in families.items()}
        free = {b: ~jnp.broadcast_to(keep.get(b, False), v.shape) for b, v in scale.items()}
        shapes = {b: f.shape for b, f in families.items()}
        step = jnp.where(_join(free), _join(scale) * self.step_size, 1.0)  # held units have no say in meeting
        return _Density(log_density, rest, step, _join(free), shapes)


class _Point(NamedTuple):
    """States as rows of numbers, their log-density and its gradient."""

    x: Array
    value: Array
    slope: Array


@dataclasses.dataclass(frozen=True)
class _Density:
    """A log-density of flat rows, ``(rows, units)``, and the steps that go with it."""

    log_density: Callable[[Rows, Any], Array]
    """Of one state, given what is fixed."""
    rest: Any
    step: Array
    """Standard deviation of the noise, ``(rows, units)``."""
    free: Array
    """Which units move."""
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def units(self) -> int:
        return self.step.shape[1]

    def flat(self, x: Rows) -> Array:
        return _join({b: x[b] for b in self.shapes})

    def blocks(self, x: Array) -> dict[str, Array]:
        made, start = {}, 0
        for b, shape in self.shapes.items():
            stop = start + math.prod(shape)
            made[b], start = x[..., start:stop].reshape(*x.shape[:-1], *shape), stop
        return made

    def at(self, x: Array) -> _Point:
        one = lambda v, rest: self.log_density(self.blocks(v), rest)
        return _Point(x, *jax.vmap(jax.value_and_grad(one))(x, self.rest))

    def drift(self, at: _Point) -> Array:
        """The middle of the next step's law."""
        return at.x + jnp.where(self.free, 0.5 * self.step**2 * at.slope, 0)

    def held(self, x: Array, at: _Point) -> Array:
        """``x`` with its held units where they were."""
        return jnp.where(self.free, x, at.x)

    def log_ratio(self, at: _Point, new: _Point) -> Array:
        """Log of the acceptance ratio: of the densities, and of the steps back and forth."""
        there = ((new.x - self.drift(at)) / self.step) ** 2
        back = ((at.x - self.drift(new)) / self.step) ** 2
        gain = jnp.where(self.free, 0.5 * (there - back), 0).sum(-1)
        return new.value - at.value + gain

    def choose(self, took: Array, new: _Point, at: _Point) -> _Point:
        """The new point where it is taken. What has no density is made nan: better than to stay for ever."""
        chosen = jax.tree.map(lambda a, b: where_rows(took, a, b), new, at)
        x = jnp.where(jnp.isfinite(chosen.value)[:, None], chosen.x, jnp.nan)
        return chosen._replace(x=x)


def _noise(keys: Keys, units: int) -> tuple[Array, Array, Array]:
    """Normal noise, the log-uniform that accepts, and the uniform that decides on a reflection."""
    words = random.words(keys, units + 2)
    noise = jax.scipy.special.ndtri(random.open_uniform(words[:, :units]))
    return noise, jnp.log(random.uniform(words[:, units])), random.uniform(words[:, units + 1])


def _join(x: Rows) -> Array:
    return jnp.concatenate([v.reshape(len(v), -1) for v in x.values()], -1)


def _log_density(family: Family, x: Array, eta: Array) -> Array:
    return (eta * family.statistics(x)).sum() + family.log_base_measure(x).sum()


def _scale(family: Family, eta: Array) -> Array:
    """The standard deviation of each unit that fits the curvature at its mode."""
    slope = jax.grad(lambda x: _log_density(family, x, eta))
    mode = family.mode(eta)
    # units of a block given eta are independent: the second derivatives are on the diagonal
    curvature = jax.jvp(slope, (mode,), (jnp.ones_like(mode),))[1]
    return jnp.sqrt(-1 / curvature)
