# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The start of a block's chains: possible states, found by search where a prior draw is impossible.

A Gibbs sampler does not leave a state of probability 0 if all values of each unit are
impossible given the others. The search draws units from the conditionals of a relaxed
log density, in which fewer impossible elements are more probable, and starts again from
draws of the prior.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import numpy as np

import jax
from jax import Array, lax
from jax.core import Tracer
import jax.numpy as jnp

from ebmpp.core import Numbers, checks, random
from ebmpp.core.types import SiteArrays
from ebmpp.distribution import EnergyDistribution
from ebmpp.errors import StateError
from ebmpp.traced.block import Call, SiteValues
from ebmpp.traced.model import Context, ModelInfo
from ebmpp.traced.rows import checked, is_staged, on_rows
from ebmpp.traced.sweep import BlockSweep

# of the prior, and sweeps from each
_MOST_DRAWS = 20
_MOST_SWEEPS = 50
_SEARCH = 1 << 22  # folded into the keys of the search


class BlockStart:
    """Checks of the first states of chains of a block, and a search for possible ones."""

    def __init__(self, info: ModelInfo, sweep: BlockSweep) -> None:
        self.info = info
        self.sweep = sweep
        self.posterior = sweep.posterior

        def inspect(values, context, keys):
            log_prob = self.posterior.log_density(values, context)
            return log_prob, sweep.invalid(values, context, keys)

        self._inspect = _over_rows(inspect)
        self._find = _over_rows(self._search)

    def __call__(
        self, values: SiteValues, call: Call, keys: Array, origin: str = "given"
    ) -> SiteArrays:
        """Return the values, or possible ones near them; under ``jax.vmap`` of all chains at once.

        :param origin: "given" by the user, who may not want others; "siblings" for
            values that may be impossible given the siblings; "prior" for draws, which
            may also be at the edge of their support.
        :raises StateError: for values outside of their support, impossible states and
            data, nan in the data, and conditionals that are nan.
        """
        self.info.check_data(call)
        context = self.info.context(values, call)
        if is_staged():
            return self._check_staged(values, context)
        leaves, structure = jax.tree.flatten(context)
        mapped = [leaf if isinstance(leaf, Tracer) else None for leaf in leaves]
        axes = tuple(None if leaf is None else 0 for leaf in mapped)

        def check(rows):
            values, mapped, keys = rows
            filled = [
                leaf if row is None else row
                for leaf, row in zip(leaves, mapped, strict=True)
            ]
            context = jax.tree.unflatten(structure, filled)
            return self._check(values, context, keys, axes, call, origin)

        return on_rows(check, (dict(values), mapped, keys))

    def _check(
        self,
        values: SiteValues,
        context: Context,
        keys: Array,
        axes: tuple[int | None, ...],
        call: Call,
        origin: str,
    ) -> SiteArrays:
        """Return possible states of all chains, the rows."""
        inside = {site: np.asarray(self._inside(site, v)) for site, v in values.items()}
        if origin != "prior":
            self._refuse_outside(inside, values)
        log_prob, invalid = self._inspect(axes, values, context, keys)
        is_inside = np.all(list(inside.values()), 0)
        is_lost = np.isneginf(log_prob) | ~is_inside
        is_possible = np.isfinite(log_prob)
        if not (is_possible | is_lost).all():
            names = self.info.arguments.with_nan(call)
            if names:
                raise checks.state_error(
                    "arguments of the model",
                    "without nan where the log density reads it",
                    names,
                    hint="Leave missing data out, or exclude them by numpyro.handlers.mask.",
                )
        if origin != "given" and is_lost.any():
            values, is_possible = self._find(axes, values, context, keys)
        for site, mask in invalid.items():
            self._refuse_invalid(site, np.asarray(mask)[~is_lost])
        if not is_possible.all():
            row = int(np.argmin(is_possible))
            leaves, structure = jax.tree.flatten(context)
            in_row = [
                leaf if axis is None else leaf[row]
                for leaf, axis in zip(leaves, axes, strict=True)
            ]
            context = jax.tree.unflatten(structure, in_row)
            values = {site: v[row] for site, v in values.items()}
            self._refuse_impossible(values, context)
        return dict(values)

    def _check_staged(self, values: SiteValues, context: Context) -> SiteArrays:
        """Return the values; the compiled program raises the error, without a search."""
        inside = {site: self._inside(site, v) for site, v in values.items()}
        log_prob = self.posterior.log_density(values, context)

        def check(rows):
            values, inside, log_prob = rows
            self._refuse_outside(inside, values)
            if not np.isfinite(log_prob).all():
                self._refuse_impossible(values, None)

        return checked(check, (dict(values), inside, log_prob))[0]

    def _inside(self, site: str, value: Array) -> Array:
        """Return True where the value is in the site's support, for each chain."""
        support: Any = self.info.distributions[site].support
        inside = jnp.asarray(support(value)) & True
        num_axes = jnp.ndim(value) - self.info.latent[site].ndim

        def by_row(a):
            return a.reshape(*a.shape[:num_axes], -1).all(-1)

        return by_row(inside) & by_row(jnp.isfinite(value))

    def is_possible(self, values: SiteValues, context: Context) -> Array:
        """Return True for values in their supports, of a finite log density."""
        inside = [self._inside(site, v) for site, v in values.items()]
        is_finite = jnp.isfinite(self.posterior.log_density(values, context))
        return functools.reduce(jnp.logical_and, inside, is_finite)

    def relaxed(self, values: SiteValues, context: Context, keys: Array) -> SiteArrays:
        """Draw the values by conditionals in which fewer impossible elements are more probable."""
        with self.sweep.joint.program.relaxed():
            moved, _ = self.sweep((values, context), keys)
        return {site: moved[site].astype(v.dtype) for site, v in values.items()}

    def draw_energies(self, keys: Array) -> SiteArrays:
        """Draw the sites whose prior is an energy, uniformly from the values of each unit."""
        drawn: SiteArrays = {}
        for number, site in enumerate(self.info.sites):
            if not isinstance(self.info.distributions[site], EnergyDistribution):
                continue
            shape = self.posterior.shapes[site]
            table, valid = (
                jnp.moveaxis(jnp.broadcast_to(a, (len(a), *shape)), 0, -1)
                for a in self.posterior.values[site]
            )
            key = jax.random.fold_in(random.as_key(keys), number)
            picked = jax.random.categorical(key, jnp.where(valid, 0.0, -jnp.inf))
            drawn[site] = jnp.take_along_axis(table, picked[..., None], -1)[..., 0]
        return drawn

    def _search(
        self, values: SiteValues, context: Context, keys: Array
    ) -> tuple[SiteArrays, Array]:
        """Return values by search, and whether they are possible.

        In the second half siblings are drawn too, as later kernels, such as NUTS, find
        values that fit.
        """

        def split(x):
            siblings = {site: x[site] for site in context.siblings}
            sites = {site: x[site] for site in values}
            return sites, context._replace(siblings=siblings)

        def draw(x, keys, is_late):
            energies = self.draw_energies(keys)
            key = random.as_key(keys)
            trace = self.info.trace(energies, context.arguments, key)
            result = {}
            for site, v in x.items():
                drawn = jnp.asarray(trace[site]["value"], v.dtype)
                result[site] = jnp.where(is_late | (site in values), drawn, v)
            return result

        def sweep(x, keys):
            return x | self.relaxed(*split(x), keys)

        def is_possible(x):
            return self.is_possible(*split(x))

        start = {**context.siblings, **values}
        x, possible = search(start, keys, draw, sweep, is_possible)
        return split(x)[0], possible

    def _refuse_outside(
        self, inside: Mapping[str, Numbers], values: SiteValues
    ) -> None:
        for site, is_inside in inside.items():
            if not np.all(is_inside):
                raise checks.state_error(
                    f"site {site!r}",
                    f"in {self.info.distributions[site].support}",
                    np.asarray(values[site]).tolist(),
                )

    def _refuse_invalid(self, site: str, mask: np.ndarray) -> None:
        """Raise a StateError for a conditional that is nan in one of the chains."""
        if not mask.any():
            return
        _, unit, number = np.argwhere(mask)[0]
        shape = self.posterior.shapes[site]
        place = tuple(map(int, np.unravel_index(unit, shape)))
        where = ""
        if site in self.posterior.values:
            table = self.posterior.values[site].table
            where = f" where it is {np.broadcast_to(table[number], shape)[place]:g}"
        raise StateError(
            f"the conditional of unit {place} of site {site!r} is nan{where} and "
            "would never move. Look for nan in the model's arguments, inf - inf "
            "and 0 * inf, or start elsewhere by init_params"
        )

    def _refuse_impossible(self, values: SiteValues, context: Context | None) -> None:
        """Raise a StateError that names the sites, and those whose log density is not finite."""
        culprits = []
        if context is not None:
            trace = self.info.trace({**context.siblings, **values}, context.arguments)
            for name, site in trace.items():
                if site["type"] == "sample":
                    log_prob = site["fn"].log_prob(site["value"])
                    if not np.isfinite(log_prob).all():
                        culprits.append(repr(name))
        where = f" at site {', '.join(culprits)}" if culprits else ""
        raise StateError(
            f"the block of sites {list(values)} must start at a possible state, got "
            f"one whose log density is not finite{where}. Give possible init_params, "
            "or check that there are any for these data"
        )


def search(
    x: SiteValues,
    keys: Array,
    draw: Callable,
    sweep: Callable,
    is_possible: Callable[[dict], Array],
) -> tuple[SiteArrays, Array]:
    """Return a state if it is possible, else one that a search finds; and whether that is possible.

    :param keys: words of the start, ``(2,)``.
    :param draw: ``(state, keys, is_late)`` to a state from which to search; late in the
        second half.
    :param sweep: ``(state, keys)`` to a less impossible state.
    """

    def is_lost(carry):
        return ~is_possible(carry[1])

    def sweep_once(carry):
        number, x = carry
        return number + 1, sweep(x, random.fold_in(keys, number, _SEARCH))

    def draw_again(carry):
        number, x = carry
        is_late = number >= _MOST_DRAWS // 2 * _MOST_SWEEPS
        end = number + _MOST_SWEEPS
        drawn = draw(x, random.fold_in(keys, number, _SEARCH + 1), is_late)
        is_first = number == 0
        x = {site: jnp.where(is_first, v, drawn[site]) for site, v in x.items()}

        def more_sweeps(carry):
            return (carry[0] < end) & is_lost(carry)

        return end, lax.while_loop(more_sweeps, sweep_once, (number, x))[1]

    def more_draws(carry):
        return (carry[0] < _MOST_DRAWS * _MOST_SWEEPS) & is_lost(carry)

    arrays = {site: jnp.asarray(v) for site, v in x.items()}
    end = lax.while_loop(more_draws, draw_again, (jnp.uint32(0), arrays))
    return end[1], ~is_lost(end)


def _over_rows(fn: Callable) -> Callable:
    """Return ``fn(values, context, keys)`` for all chains, compiled for axes of the context."""

    def rows(axes, values, context, keys):
        context_axes = jax.tree.unflatten(jax.tree.structure(context), axes)
        return jax.vmap(fn, (0, context_axes, 0))(values, context, keys)

    return jax.jit(rows, static_argnums=0)
