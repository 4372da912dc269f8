# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Discrete sites drawn with continuous ones integrated out, which are then drawn given them.

Where the log density of discrete sites z and some continuous sites c is
:math:`g(z) + \langle \eta(z), t(c) \rangle`, a Gaussian, Gamma, Beta or Dirichlet
density of c given z, that of z alone is :math:`g(z) + A(\eta(z))`, with A the family's
log-normaliser. A draw of z from it and one of c given z are a draw of both.

The coefficients :math:`\eta` are derivatives of the traced log density in c. Where no
two units of z interact given c, :math:`g` and :math:`\eta` are sums over the units, and
the sum is kept while one unit after the other is drawn. Otherwise, the collapsed
density is traced as another density of z.

**References**

1. Liu (1994), *The collapsed Gibbs sampler in Bayesian computations with applications
   to a gene regulation problem*.
2. George, McCulloch (1997), *Approaches for Bayesian variable selection*.
"""

from collections.abc import Callable, Sequence
from functools import partial
import math
from typing import NamedTuple, cast

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Numbers, SiteArrays, at_index, checks, expand
from ebmpp.dependence.program import SlotValues
from ebmpp.errors import IntractableError, StateError
from ebmpp.traced.block import SiteValues
from ebmpp.traced.model import Context, Inputs, ModelInfo
from ebmpp.traced.sweep.conditionals import ChainInputs, Conditionals, Visit, Visited
from ebmpp.traced.sweep.continuous import ContinuousSite
from ebmpp.traced.sweep.layers import UnitLayers
from ebmpp.traced.sweep.posterior import ModelDensity
from ebmpp.traced.sweep.sweep import BlockSweep, conditionals_by_units

Collapsed = Sequence[ContinuousSite]
# continuous units that are integrated out by default
_MOST_COLLAPSED = 64


class CollapsedDensity(ModelDensity):
    """The log density of discrete sites with continuous ones integrated out.

    The values of these are those at which the log density is expanded. They change no
    more than its rounding.
    """

    def __init__(
        self, info: ModelInfo, sites: Sequence[str], collapsed: Collapsed
    ) -> None:
        self.collapsed = collapsed
        super().__init__(info, sites)

    def inputs(self, inputs: Inputs) -> SlotValues:
        return super().inputs(_at_points(self.collapsed, inputs))

    def _log_density(
        self, sites: SiteValues, siblings: SiteValues, arguments: Sequence
    ) -> Array:
        inputs = {**sites, **siblings}, Context({}, arguments)
        total = jnp.zeros(())
        for site in self.collapsed:
            at = site.join(inputs[0])
            density = site.density(inputs)
            total += site.log_integral(site.statistics(density, at), at)
        return total + density(at)


class _Chain(NamedTuple):
    """The part of a chain that is fixed while its units are drawn."""

    weights: Array
    """Log weights of the units' values, ``(units, values)``, at the points."""
    rows: PyTree
    """What these add to the coefficients of each site, ``(units, values, ...)``."""
    points: list[Array]
    """The values of the collapsed sites at which the log density is expanded."""


class _State(NamedTuple):
    """The state of a chain between two units."""

    numbers: Array
    """Of the units' values."""
    sums: PyTree
    """The coefficients of each site."""
    errors: PyTree
    """What rounding left out of them, so that a row that is subtracted leaves no trace."""

    def add(self, rows: PyTree) -> "_State":
        """Return the state with rows added to the coefficients."""
        sums = jax.tree.map(jnp.add, self.sums, rows)

        def error(before, after, row, rest):
            added = after - before
            return rest + (before - (after - added)) + (row - added)

        errors = jax.tree.map(error, self.sums, sums, rows, self.errors)
        return self._replace(sums=sums, errors=errors)


class CollapsedUnits(Conditionals):
    """Units that do not interact given the collapsed sites, drawn in order.

    :param units: their conditionals given these sites, of one layer.
    """

    def __init__(self, units: UnitLayers, collapsed: Collapsed) -> None:
        super().__init__(units.posterior, np.arange(units.size))
        self.given = units
        self.collapsed = collapsed

    def _chain(self, inputs: Inputs) -> ChainInputs:
        return super()._chain(_at_points(self.collapsed, inputs))

    def visit(
        self,
        fn: Visit,
        chains: Sequence[ChainInputs],
        carry: Array,
        backward: bool = False,
    ) -> Visited:
        fixed, states = zip(*(self._start(*chain) for chain in chains))

        def visit_unit(i, loop):
            states, carry = loop
            unit = self.size - 1 - i if backward else i
            visits = [self._visit_unit(*chain, unit) for chain in zip(fixed, states)]
            logits, takes = zip(*visits)
            choices, carry = fn(unit, unit[None], logits, carry)
            states = [take(*choice) for take, choice in zip(takes, choices)]
            return tuple(states), carry

        states, carry = lax.fori_loop(0, self.size, visit_unit, (states, carry))
        units = np.arange(self.size)
        accepted = jnp.ones(self.size, bool)
        sites = [
            self.put(sites, units, state.numbers, accepted)
            for (sites, _), state in zip(chains, states)
        ]
        return sites, carry

    def _start(self, sites: SiteValues, inputs: SlotValues) -> tuple[_Chain, _State]:
        siblings = self.posterior.program.siblings
        present = self.posterior.inputs_at(sites, inputs)
        (layer,) = self.given.layers
        values = {name: inputs[slot] for name, slot in siblings.items()}
        points = [site.join(values) for site in self.collapsed]

        def coefficients(fn):
            """Return the coefficients of a function of the program's inputs."""

            def of_site(site, x):
                moved = {siblings[name]: v for name, v in site.split(x).items()}
                return fn({**present, **moved})

            return [
                site.statistics(partial(of_site, site), at, jax.jacfwd)
                for site, at in zip(self.collapsed, points)
            ]

        def add_unit(state, unit):
            row, number = unit
            return state.add(at_index(row, number)), None

        log_weights = partial(self.given.log_weights, layer, sites)
        weights = log_weights(present)
        is_possible = jnp.isfinite(weights)
        rows = jax.tree.map(
            lambda a: jnp.where(expand(is_possible, a), a, 0), coefficients(log_weights)
        )
        rest = coefficients(lambda inputs: self.given.terms.expand(inputs)[0])
        numbers = self.numbers(sites)
        state = _State(numbers, rest, jax.tree.map(jnp.zeros_like, rest))
        state, _ = lax.scan(add_unit, state, (rows, numbers))
        return _Chain(weights, rows, points), state

    def _visit_unit(
        self, chain: _Chain, state: _State, unit: Array
    ) -> tuple[Array, Callable[[Array, Numbers], _State]]:
        """Return a unit's log weights, and a function of its choice to the new state."""
        rows = at_index(chain.rows, unit)
        now = state.numbers[unit]
        rest = state.add(jax.tree.map(lambda a: -a[now], rows))
        statistics = jax.tree.map(
            lambda a, error, row: a + error + row, rest.sums, rest.errors, rows
        )
        weights = chain.weights[unit]
        for site, at, values in zip(self.collapsed, chain.points, statistics):
            weights += jax.vmap(partial(site.log_integral, at=at))(values)

        def take(numbers, accepted):
            number = jnp.where(accepted[0], numbers[0], now)
            moved = rest._replace(numbers=state.numbers.at[unit].set(number))
            return moved.add(at_index(rows, number))

        return weights[None], take


class CollapsedSweep(BlockSweep):
    """A sweep that draws the discrete sites with some continuous ones integrated out."""

    def __init__(self, sweep: BlockSweep, collapsed: Collapsed) -> None:
        vars(self).update(vars(sweep))
        #: the collapsed sites, of which some are drawn jointly
        self.sets = collapsed
        units = sweep.conditionals
        is_sum = isinstance(units, UnitLayers) and not units.terms.has_products
        if is_sum and units.num_layers == 1:
            self.drawn: Conditionals = CollapsedUnits(units, collapsed)
        else:
            posterior = CollapsedDensity(self.info, self.finite, collapsed)
            self.drawn = conditionals_by_units(posterior, sequential=True)
        names = {name for site in collapsed for name in site.names}
        others = [site for site in self.continuous if site.name not in names]
        self.parts = [self.drawn, *collapsed, *others]

    def walk(self, inputs: Inputs, keys: Array) -> tuple[SiteArrays, Array]:
        """Return random discrete and drawn continuous sites, and the change that these imply."""
        values, context = inputs
        moved, change = self.drawn.walk(inputs, keys)
        change -= sum(site.log_prob(inputs) for site in self.sets)
        values = {**values, **moved}
        for site in self.sets:
            moved, _ = site.move((values, context), keys)
            values = {**values, **moved}
        change += sum(site.log_prob((values, context)) for site in self.sets)
        for site in self.parts[1 + len(self.sets) :]:
            moved, more = site.walk((values, context), keys)
            values = {**values, **moved}
            change += more
        return values, change


def collapsed_sweep(
    sweep: BlockSweep, collapse: str | bool | Sequence[str], conflict: str | None
) -> BlockSweep:
    """Return the sweep, with continuous sites integrated out as ``collapse`` says.

    :param collapse: see :meth:`ebmpp.GibbsBlock.from_model`.
    :param conflict: an option of the block with which no site can be, or None.
    :raises ArgumentError: for a conflict.
    :raises StateError: for names that are no continuous sites of the block.
    :raises IntractableError: for named sites that are not jointly conjugate.
    """
    if collapse is False:
        return sweep
    known = [site.name for site in sweep.continuous]
    is_auto = isinstance(collapse, str) and collapse == "auto"
    is_open = is_auto or collapse is True
    names = known
    if not is_open:
        what = "continuous site of from_model: collapse"
        names = checks.names(what, cast(Sequence[str], collapse), known, StateError)
    if not (sweep.finite and names):
        conflict = "without discrete and continuous sites"
    elif sweep.augmented is not None:
        conflict = "for energies whose latents are drawn"
    if conflict and not is_auto:
        name = "GibbsBlock.from_model: collapse"
        raise checks.error(name, f"'auto' or False {conflict}", collapse)
    if conflict or (is_auto and not _pays(sweep)):
        return sweep
    sets = _conjugate_sets(sweep, names)
    left = set(names).difference(*(site.names for site in sets))
    if left and not is_open:
        raise IntractableError(
            f"from_model: collapse: sites {sorted(left)} are not jointly conjugate with "
            f"{sorted(set(names) - left)} given the discrete sites. Leave them out"
        )
    return CollapsedSweep(sweep, sets)


def _pays(sweep: BlockSweep) -> bool:
    """Return True if nearly all units interact without collapsing, and it is cheap."""
    units = cast(Conditionals, sweep.conditionals).units
    sizes = [math.prod(site.shape) for site in sweep.continuous]
    return 2 * units.num_layers > units.size and sum(sizes) <= _MOST_COLLAPSED


def _conjugate_sets(sweep: BlockSweep, names: Sequence[str]) -> list[ContinuousSite]:
    """Return the named sites; each member is drawn jointly."""
    info = sweep.info
    sites = [site for site in sweep.continuous if site.name in names]
    sites.sort(key=lambda site: site.family != "Gaussian")
    sets: list[ContinuousSite] = []
    for site in sites:
        for number, other in enumerate(sets):
            joined = _joined(info, other, site)
            if joined is not None:
                sets[number] = joined
                break
        else:
            sets.append(site)
    return _independent(info, sets)


def _joined(
    info: ModelInfo, first: ContinuousSite, second: ContinuousSite
) -> ContinuousSite | None:
    """Return two sets as one, if they are jointly conjugate."""
    if first.family != second.family or first.family == "Dirichlet":
        return None
    try:
        joined = type(first)(info, *first.names, *second.names)
    except IntractableError:
        return None
    return joined if joined.family == first.family else None


def _independent(info: ModelInfo, sets: list[ContinuousSite]) -> list[ContinuousSite]:
    """Return the first sets that do not interact."""
    names = [name for site in sets for name in site.names]
    terms = ModelDensity(info, names).terms()
    member = np.zeros(terms.sets.size, int)
    for number, site in enumerate(sets):
        for name in site.names:
            member[terms.numbers[name]] = number
    result: list[int] = []
    pairs = member[terms.edges]
    for number in range(len(sets)):
        touching = pairs[(pairs == number).any(1)]
        if not np.isin(touching, result).any():
            result.append(number)
    return [sets[number] for number in result]


def _at_points(collapsed: Collapsed, inputs: Inputs) -> Inputs:
    """Return the inputs with values of the collapsed sites near their means."""
    values, context = inputs
    for site in collapsed:
        values = {**values, **site.split(site.point(inputs))}
    return values, context
