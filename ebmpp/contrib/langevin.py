# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Langevin moves of real-valued blocks: noisy steps along the gradient of the log-density."""

from collections.abc import Callable, Mapping
import dataclasses
from functools import partial
import math
from typing import NamedTuple

from numpyro.distributions import constraints

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, omit, random
from ebmpp.core.rows import num_rows
from ebmpp.core.types import Blocks, Chains, Keys, Rows
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
    """Return True if units take every real value, so that noise stays in the support."""
    return family.support is constraints.real


@dataclasses.dataclass(frozen=True)
class Langevin(Move["_Density"]):
    r"""Langevin steps of real-valued ``blocks``, each accepted or rejected by the energy.

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

        def step(i, carry):
            state, count = carry
            noise = _noise(random.fold_in(keys, i), density.units)
            new = density.at(density.mean(state) + density.step * noise.normal, state)
            fits = noise.log_u < density.log_ratio(state, new)
            accept = fits | (not self.adjust)
            count += (accept & self.adjust).astype(count.dtype)
            return density.choose(accept, new, state), count

        start = (density.start(x), jnp.zeros(len(keys), jnp.int32))
        end, count = lax.fori_loop(
            jnp.uint32(0), jnp.uint32(self.num_steps), step, start
        )
        return keep_observed(target.keep, x, density.blocks(end.x)), count

    def prepare(self, target: Target, z: Chains) -> "_Density":
        """See :class:`~ebmpp.moves.Move`."""
        return self._density(target.twice(), both_as_rows(z))

    def attempt(
        self,
        target: Target,
        focused: "_Density",
        z: Chains,
        trial: Trial,
    ) -> Attempt:
        """See :class:`~ebmpp.moves.Move`."""
        rows = len(trial.keys)
        density = focused
        # rows whose chains have one density
        shared = trial.same | rows_agree(trial.flags, self._around(target.graph), rows)

        def halves(a):
            return a[:rows], a[rows:]

        def step(i, pair):
            noise = _noise(random.fold_in(trial.keys, i), density.units)
            together = shared & pair.met
            mean_x, mean_y = halves(density.mean(pair.state))
            step_x, step_y = halves(density.step)
            x, y, meets = reflected(
                noise.normal, noise.u, mean_x, step_x, mean_y, step_y
            )
            y = where_rows(together, x, y)
            new = density.at(jnp.concatenate([x, y]), pair.state)
            fits = jnp.tile(noise.log_u, 2) < density.log_ratio(pair.state, new)
            accept_x, accept_y = halves(fits | (not self.adjust))
            accept_y = jnp.where(together, accept_x, accept_y)
            accept = jnp.stack([accept_x, accept_y])
            both = accept.all(0)
            neither = ~accept.any(0)
            met = ((meets | together) & both) | (pair.met & neither)

            def with_equal_copies(a):
                # equal states under one density get equal scores, whatever their last
                # bits
                leading, following = halves(a)
                following = where_rows(shared & met, leading, following)
                return jnp.concatenate([leading, following])

            state = density.choose(accept.reshape(-1), new, pair.state)
            state = jax.tree.map(with_equal_copies, state)
            count = pair.count + (accept & self.adjust).sum(0, dtype=jnp.int32)
            return _PairState(state, count, met)

        met = rows_agree(trial.flags, self.blocks, rows)
        count = jnp.zeros(rows, jnp.int32)
        start = _PairState(density.start(both_as_rows(z)), count, met)
        end = lax.fori_loop(jnp.uint32(0), jnp.uint32(self.num_steps), step, start)

        def drawn(chain):
            x = {b: z[b][chain] for b in self.blocks}
            new = density.blocks(halves(end.state.x)[chain])
            return keep_observed(target.keep, x, new)

        finite_x, finite_y = halves(jnp.isfinite(end.state.log_prob))
        together = dict.fromkeys(self.blocks, end.met)
        return Attempt.final(
            drawn(0), drawn(1), ~(finite_x & finite_y), together, end.count
        )

    # -- the density ------------------------------------------------------------------

    def _density(self, target: Target, x: Rows) -> "_Density":
        refuse_observed(self.marginalize, target.keep)
        families = {b: target.graph.families[b] for b in self.blocks}
        make = self._marginal if self.marginalize else self._conditional
        log_density, rest, eta = make(target, x)
        scales = {b: jax.vmap(partial(_scale, f))(eta[b]) for b, f in families.items()}
        scale = _join(scales)
        free = {
            b: ~jnp.broadcast_to(target.keep.get(b, False), v.shape)
            for b, v in scales.items()
        }
        # observed units meet
        step = jnp.where(_join(free), scale * self.step_size, 1.0)
        shapes = {b: f.shape for b, f in families.items()}
        return _Density(log_density, rest, step, _join(free), shapes)

    def _conditional(self, target: Target, x: Rows) -> "_Parts":
        """Return the density of blocks that do not interact, given the others."""
        families = target.graph.families
        # natural parameters are the same at all steps
        eta = natural_rows(target.graph, target.params, x, self.blocks)

        def log_density(v, eta):
            terms = [families[b].unit_log_prob(eta[b], v[b]).sum() for b in self.blocks]
            return jnp.asarray(sum(terms))

        return log_density, eta, eta

    def _marginal(self, target: Target, x: Rows) -> "_Parts":
        """Return the density with the marginalised blocks summed out."""
        graph = target.graph
        params = target.params
        inside = (*self.blocks, *self.marginalize)
        rest = graph.statistics(omit(x, inside))

        def log_density(v, rest):
            t = {**rest, **graph.statistics(v)}
            marginal = energy.log_marginal(graph, params, t, self.marginalize)
            return marginal + energy.log_base_measure(graph, v)

        # A metric that depends on the state would need a term of its own, so
        # summed-out blocks are at their default means, and the blocks themselves at
        # 0.
        usual = {}
        for b in self.marginalize:
            family = graph.families[b]
            usual[b] = family.mean(family.default_eta())
        for b in self.blocks:
            usual[b] = jnp.zeros(graph.families[b].statistic_shape)

        def natural_at(t):
            return energy.natural(graph, params, {**usual, **t}, self.blocks)

        return log_density, rest, jax.vmap(natural_at, axis_size=num_rows(x))(rest)


#: Log-density of one state given the rest, the rest, and natural parameters at a
#: typical state.
_Parts = tuple[Callable[[Rows, Rows], Array], Rows, Rows]


class _LangevinState(NamedTuple):
    """States as rows of numbers, their log-density and its gradient."""

    x: Array
    log_prob: Array
    gradient: Array


class _PairState(NamedTuple):
    """Both chains, one after the other, in a coupled draw."""

    state: _LangevinState
    count: Array
    """Number of accepted steps of both chains."""
    met: Array


class _Noise(NamedTuple):
    normal: Array
    log_u: Array
    """Log of the uniform that accepts."""
    u: Array
    """Uniform that decides on a reflection."""


@dataclasses.dataclass(frozen=True)
class _Density:
    """A log-density of flat rows, ``(rows, units)``, and the steps that go with it."""

    log_density: Callable[[Rows, Rows], Array]
    """Log-density of one state, given ``rest``."""
    rest: Rows
    step: Array
    """Standard deviation of the noise, ``(rows, units)``."""
    free: Array
    """Units that move."""
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def units(self) -> int:
        return self.step.shape[1]

    def start(self, x: Rows) -> _LangevinState:
        return self._evaluate(_join({b: x[b] for b in self.shapes}))

    def blocks(self, x: Array) -> Blocks:
        result = {}
        start = 0
        for b, shape in self.shapes.items():
            stop = start + math.prod(shape)
            result[b] = x[..., start:stop].reshape(*x.shape[:-1], *shape)
            start = stop
        return result

    def _evaluate(self, x: Array) -> _LangevinState:
        def log_prob_at(v, rest):
            return self.log_density(self.blocks(v), rest)

        log_prob, gradient = jax.vmap(jax.value_and_grad(log_prob_at))(x, self.rest)
        return _LangevinState(x, log_prob, gradient)

    def at(self, x: Array, old: _LangevinState) -> _LangevinState:
        """Return the state at ``x``, with the observed units at their values."""
        return self._evaluate(jnp.where(self.free, x, old.x))

    def mean(self, state: _LangevinState) -> Array:
        """Return the mean of the next step."""
        return state.x + jnp.where(self.free, 0.5 * self.step**2 * state.gradient, 0)

    def log_ratio(self, old: _LangevinState, new: _LangevinState) -> Array:
        """Return ``log p(new) q(old | new) - log p(old) q(new | old)``, with q the proposal."""
        forward = ((new.x - self.mean(old)) / self.step) ** 2
        backward = ((old.x - self.mean(new)) / self.step) ** 2
        log_proposals = jnp.where(self.free, 0.5 * (forward - backward), 0).sum(-1)
        return new.log_prob - old.log_prob + log_proposals

    def choose(
        self, accept: Array, new: _LangevinState, old: _LangevinState
    ) -> _LangevinState:
        """Return the accepted states; one without density becomes nan, or would never move."""
        state = jax.tree.map(partial(where_rows, accept), new, old)
        is_finite = jnp.isfinite(state.log_prob)[:, None]
        return state._replace(x=jnp.where(is_finite, state.x, jnp.nan))


def _noise(keys: Keys, units: int) -> _Noise:
    words = random.words(keys, units + 2)
    normal = jax.scipy.special.ndtri(random.open_uniform(words[:, :units]))
    log_u = jnp.log(random.uniform(words[:, units]))
    return _Noise(normal, log_u, random.uniform(words[:, units + 1]))


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
