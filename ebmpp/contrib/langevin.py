# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Langevin moves of real-valued blocks: steps along the gradient of their log-density, with noise."""

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
from ebmpp.errors import ArgumentError, DeclarationError
from ebmpp.families.family import Family
from ebmpp.families.gaussian import reflected
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.energy import natural_rows
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.gibbs import keep_observed
from ebmpp.moves.move import (
    Drawn,
    Move,
    both_as_rows,
    refuse_interacting,
    refuse_observed,
    rows_agree,
)
from ebmpp.moves.target import Target


def is_real(family: Family) -> bool:
    """Return True if units take every real value, so that a step with noise stays in the support."""
    return family.support is constraints.real


@dataclasses.dataclass(frozen=True)
class Langevin(Move):
    r"""``num_steps`` Langevin steps of real-valued ``blocks``, each accepted or rejected by the energy.

    .. math:: x' = x + \tfrac{1}{2} (\epsilon s)^2 \nabla \log p(x) + \epsilon s \xi

    Here epsilon is ``step_size`` and s, unit by unit, is the standard deviation that
    fits the curvature of the unit's conditional at its mode (for a Gaussian, its own),
    so that one step size fits units of all variances. The temperature is 1 for any
    number of rows and chains.

    The density is the conditional given the other blocks or, with ``marginalize``, its
    marginal with those blocks summed out in closed form. The two chains of a pair share
    the noise, mirrored where that lets them meet (reflection coupling), and the uniform
    that accepts. Once they agree on what the move reads they stay together.

    :param blocks: real-valued blocks.
    :param step_size: in standard deviations s.
    :param num_steps: at least 1.
    :param marginalize: blocks that are summed out; no two of them interact.
    :param adjust: False accepts every step. **The invariant distribution is then
        another one**: for a Gaussian conditional and many steps the variance is too
        large by ``1 / (1 - step_size**2 / 4)``.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Liao, Kornblith, Ren, Fleet, Hinton (2022), *Gaussian-Bernoulli RBMs without
       tears*: Gibbs-Langevin sampling, and Langevin sampling of the marginal.
    2. Roberts, Tweedie (1996), *Exponential convergence of Langevin distributions and
       their discrete approximations*: the acceptance.
    3. Bou-Rabee, Eberle, Zimmer (2020), *Coupling and convergence for Hamiltonian Monte
       Carlo*: reflection.
    """

    blocks: tuple[str, ...]
    step_size: float = 0.5
    num_steps: int = 10
    marginalize: tuple[str, ...] = ()
    adjust: bool = True

    def __post_init__(self) -> None:
        checks.number(
            "step_size, in standard deviations of a unit given the rest,",
            self.step_size,
            above=0,
        )
        checks.set_counts(self, "num_steps")
        checks.flag("adjust", self.adjust)
        if not self.adjust and self.step_size >= 2:
            raise ArgumentError(
                f"step_size must be below 2 with adjust=False, got {self.step_size!r}: "
                "unadjusted steps diverge even for a Gaussian."
            )

    @property
    def proposes(self) -> int:
        """The number of steps, if they are adjusted."""
        return self.num_steps if self.adjust else 0

    @property
    def exact(self) -> bool:
        """True if steps are adjusted."""
        return self.adjust

    def check(self, graph: FactorGraph) -> None:
        """Check the blocks.

        :raises DeclarationError: for a block that is not real-valued.
        :raises IntractableError: for blocks that cannot be moved, or summed out,
            together.
        """
        for b in self.blocks:
            if not is_real(graph.families[b]):
                raise DeclarationError(
                    f"Langevin: blocks must be real-valued, got {b!r}, which is "
                    f"{graph.families[b]!r}. Draw it by Layer."
                )
        refuse_interacting(graph, self.marginalize, "summed out")
        if not self.marginalize:
            refuse_interacting(graph, self.blocks, "moved by one Langevin move")

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        """See :class:`~ebmpp.moves.Move`."""
        return *self.blocks, *self._around(graph)

    def _around(self, graph: FactorGraph) -> tuple[str, ...]:
        """Return the other blocks on which the density depends."""
        inside = (*self.blocks, *self.marginalize)
        return tuple(b for b in graph.neighbours(inside) if b not in inside)

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        """See :class:`~ebmpp.moves.Move`."""
        density = self._density(target, x)

        def step(
            i: Array, carry: tuple[_LangevinState, Array]
        ) -> tuple[_LangevinState, Array]:
            at, count = carry
            noise, log_u, _ = _noise(random.fold_in(keys, i), density.units)
            new = density.at(density.held(density.drift(at) + density.step * noise, at))
            accept = (log_u < density.log_ratio(at, new)) | (not self.adjust)
            return density.choose(accept, new, at), count + (
                accept & self.adjust
            ).astype(count.dtype)

        start = density.at(density.flat(x)), jnp.zeros(len(keys), jnp.int32)
        end, count = lax.fori_loop(
            jnp.uint32(0), jnp.uint32(self.num_steps), step, start
        )
        return keep_observed(target.keep, x, density.blocks(end.x)), count

    def prepare(self, target: Target, z: Chains) -> "_Density":
        """See :class:`~ebmpp.moves.Move`."""
        return self._density(target.twice(), both_as_rows(z))

    def attempt(
        self, target: Target, focused: "_Density", z: Chains, trial: Trial
    ) -> Attempt:
        """See :class:`~ebmpp.moves.Move`."""
        rows = len(trial.keys)
        density = focused
        # rows whose chains have one density
        shared = trial.same | rows_agree(trial.flags, self._around(target.graph), rows)

        def halves(a):
            return (a[:rows], a[rows:])

        def step(
            i: Array, carry: tuple[_LangevinState, Array, Array]
        ) -> tuple[_LangevinState, Array, Array]:
            at, count, met = carry
            noise, log_u, u = _noise(random.fold_in(trial.keys, i), density.units)
            x, y = halves(density.drift(at))
            size, size_y = halves(density.step)
            together = shared & met
            x, y, meets = reflected(noise, u, x, size, y, size_y)
            y = where_rows(together, x, y)
            new = density.at(density.held(jnp.concatenate([x, y]), at))
            accept = (jnp.tile(log_u, 2) < density.log_ratio(at, new)) | (
                not self.adjust
            )
            accept_x, accept_y = halves(accept)
            both = jnp.stack([accept_x, jnp.where(together, accept_x, accept_y)])
            point = density.choose(both.reshape(-1), new, at)
            met = ((meets | together) & both.all(0)) | (met & ~both.any(0))
            # equal states under one density get equal scores, whatever their last bits
            stay = shared & met
            point = jax.tree.map(
                lambda a: jnp.concatenate(
                    [a[:rows], where_rows(stay, a[:rows], a[rows:])]
                ),
                point,
            )
            return point, count + (both & self.adjust).sum(0, dtype=jnp.int32), met

        start = density.at(density.flat(both_as_rows(z)))
        carry = (
            start,
            jnp.zeros(rows, jnp.int32),
            rows_agree(trial.flags, self.blocks, rows),
        )
        end, count, met = lax.fori_loop(
            jnp.uint32(0), jnp.uint32(self.num_steps), step, carry
        )
        x, y = (density.blocks(half) for half in halves(end.x))
        before = [{b: z[b][i] for b in self.blocks} for i in range(2)]
        accepted = jnp.ones(rows, bool)
        broken = ~jnp.stack(halves(jnp.isfinite(end.value))).all(0)
        together = dict.fromkeys(self.blocks, met)
        new = (
            keep_observed(target.keep, *both)
            for both in zip(before, (x, y), strict=True)
        )
        return Attempt(*new, accepted, accepted, broken, together, count)

    # -- the density ------------------------------------------------------------------

    def _density(self, target: Target, x: Rows) -> "_Density":
        refuse_observed(self.marginalize, target.keep)
        graph = target.graph
        params = target.params
        keep = target.keep
        families = {b: graph.families[b] for b in self.blocks}
        rows = len(next(iter(x.values())))
        if self.marginalize:
            others = {
                b: v for b, v in x.items() if b not in (*self.blocks, *self.marginalize)
            }
            rest = graph.statistics(others)

            def log_density(v: Rows, rest: Rows) -> Array:
                t = {**rest, **graph.statistics(v)}
                marginal = energy.log_marginal(graph, params, t, self.marginalize)
                return marginal + energy.log_base_measure(graph, v)

            # A metric that depends on the state would need a term of its own, so
            # summed-out blocks are at their default means, and the blocks themselves at
            # 0.
            summed = {b: graph.families[b] for b in self.marginalize}
            usual = {b: f.mean(f.default_eta()) for b, f in summed.items()}
            usual |= {b: jnp.zeros(f.statistic_shape) for b, f in families.items()}

            def natural_at(t):
                return energy.natural(graph, params, {**usual, **t}, self.blocks)

            eta = jax.vmap(natural_at, axis_size=rows)(rest)
        else:
            # Blocks that do not interact: their natural parameters are the same at all
            # steps.
            rest = eta = natural_rows(graph, params, x, self.blocks)

            def log_density(v: Rows, rest: Rows) -> Array:
                return jnp.asarray(
                    sum(
                        f.unit_log_prob(rest[b], v[b]).sum()
                        for b, f in families.items()
                    )
                )

        scale = {
            b: jax.vmap(lambda e, f=f: _scale(f, e))(eta[b])
            for b, f in families.items()
        }
        free = {
            b: ~jnp.broadcast_to(keep.get(b, False), v.shape) for b, v in scale.items()
        }
        shapes = {b: f.shape for b, f in families.items()}
        # observed units meet
        step = jnp.where(_join(free), _join(scale) * self.step_size, 1.0)
        return _Density(log_density, rest, step, _join(free), shapes)


class _LangevinState(NamedTuple):
    """States as rows of numbers, their log-density and its gradient."""

    x: Array
    value: Array
    slope: Array


@dataclasses.dataclass(frozen=True)
class _Density:
    """A log-density of flat rows, ``(rows, units)``, and the steps that go with it."""

    log_density: Callable[[Rows, Any], Array]
    """Log-density of one state, given ``rest``."""
    rest: Any
    step: Array
    """Standard deviation of the noise, ``(rows, units)``."""
    free: Array
    """Units that move."""
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def units(self) -> int:
        return self.step.shape[1]

    def flat(self, x: Rows) -> Array:
        return _join({b: x[b] for b in self.shapes})

    def blocks(self, x: Array) -> dict[str, Array]:
        result = {}
        start = 0
        for b, shape in self.shapes.items():
            stop = start + math.prod(shape)
            result[b] = x[..., start:stop].reshape(*x.shape[:-1], *shape)
            start = stop
        return result

    def at(self, x: Array) -> _LangevinState:
        def log_prob_at(v, rest):
            return self.log_density(self.blocks(v), rest)

        return _LangevinState(
            x, *jax.vmap(jax.value_and_grad(log_prob_at))(x, self.rest)
        )

    def drift(self, at: _LangevinState) -> Array:
        """Return the mean of the next step."""
        return at.x + jnp.where(self.free, 0.5 * self.step**2 * at.slope, 0)

    def held(self, x: Array, at: _LangevinState) -> Array:
        """Return ``x`` with the observed units at their values."""
        return jnp.where(self.free, x, at.x)

    def log_ratio(self, at: _LangevinState, new: _LangevinState) -> Array:
        """Return the log of the acceptance ratio, of densities and of steps forth and back."""
        there = ((new.x - self.drift(at)) / self.step) ** 2
        back = ((at.x - self.drift(new)) / self.step) ** 2
        gain = jnp.where(self.free, 0.5 * (there - back), 0).sum(-1)
        return new.value - at.value + gain

    def choose(
        self, accept: Array, new: _LangevinState, at: _LangevinState
    ) -> _LangevinState:
        """Return the accepted points. A state without density becomes nan, rather than never moving again."""
        point = jax.tree.map(lambda a, b: where_rows(accept, a, b), new, at)
        x = jnp.where(jnp.isfinite(point.value)[:, None], point.x, jnp.nan)
        return point._replace(x=x)


def _noise(keys: Keys, units: int) -> tuple[Array, Array, Array]:
    """Draw normal noise, the log-uniform that accepts, and the uniform that decides on a reflection."""
    words = random.words(keys, units + 2)
    noise = jax.scipy.special.ndtri(random.open_uniform(words[:, :units]))
    return (
        noise,
        jnp.log(random.uniform(words[:, units])),
        random.uniform(words[:, units + 1]),
    )


def _join(x: Rows) -> Array:
    return jnp.concatenate([v.reshape(len(v), -1) for v in x.values()], -1)


def _scale(family: Family, eta: Array) -> Array:
    """Return the standard deviation of each unit that fits the curvature at its mode."""
    slope = jax.grad(lambda x: family.unit_log_prob(eta, x).sum())
    mode = family.mode(eta)
    # units of a block given eta are independent: the second derivatives are on the
    # diagonal
    curvature = jax.jvp(slope, (mode,), (jnp.ones_like(mode),))[1]
    return jnp.sqrt(-1 / curvature)
