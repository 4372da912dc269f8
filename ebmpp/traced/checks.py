# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a block of a model: of the values that it starts from, and random walks to compare models by."""

from collections.abc import Callable, Iterator, Sequence
import itertools
from typing import Any

import numpy as np

import jax
from jax import Array, core
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.errors import StateError
from ebmpp.traced.block import Call, Sites
from ebmpp.traced.model import Context
from ebmpp.traced.sweep import Conditionals, ContinuousSite, Layer, Sweep


class StartCheck:
    """A check that all conditionals of a block are numbers where it starts; traced values are accepted.

    :param sweep: of the block.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._evaluate = jax.jit(self._conditionals)

    def __call__(self, values: Sites, context: Context, call: Call, keys: Array) -> None:
        """Raise a StateError for an impossible value, a conditional that is nan, or nan in the data."""
        for site, value in values.items():
            support: Any = self.sweep.info.distributions[site].support
            if not isinstance(value, core.Tracer) and not (support(value) & jnp.isfinite(value)).all():
                raise StateError(f"site {site!r} must be in {support}, got {np.asarray(value)}")
        if any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves((values, tuple(call), keys))):
            return
        density, table, sites = jax.device_get(self._evaluate(values, context, keys))
        names = self.sweep.info.arguments.with_nan(call)
        if names and not np.isfinite(density):
            raise StateError(
                f"the model's log density is {density:g} at the start, as argument {names[0]} of the model "
                "holds nan. Leave missing data out, or exclude them by numpyro.handlers.mask"
            )
        invalid = np.isnan(table)
        for site, (start, stop) in self.sweep.conditionals.spans.items() if self.sweep.conditionals else ():
            values_of, shape = self.sweep.posterior.values[site].table, self.sweep.posterior.shapes[site]
            units = np.flatnonzero(invalid[start:stop].any(1))
            if len(units):
                place, number = np.unravel_index(units[0], shape), invalid[start + units[0]].argmax()
                at = np.broadcast_to(values_of, (len(values_of), *shape))[(number, *place)]
                raise StateError(_degenerate(site, place, f" where it is {at:g}"))
        for site, mask in sites.items():
            if mask.any():
                raise StateError(_degenerate(site, np.argwhere(mask)[0], ""))

    def _conditionals(
        self, values: Sites, context: Context, keys: Array
    ) -> tuple[Array, Array, dict[str, Array]]:
        """Return the log density, the conditionals of discrete units, and continuous units without one."""
        values, sites = self.sweep.with_latents(values, context, keys), {}
        for site in self.sweep.continuous:
            at = site.derivatives(values[site.name], site.posterior.inputs(values, context))
            invalid = jnp.isnan(at.slope) | jnp.isnan(at.curvature).any(-1)
            sites[site.name] = invalid[site.index].reshape(site.shape)
        return self.sweep.log_density(values, context), self.sweep.table(values, context), sites


def _degenerate(site: str, place: Sequence[Any], where: str) -> str:
    return (
        f"the conditional of unit {tuple(int(i) for i in place)} of site {site!r} is nan{where}, so that its "
        "draws would never move. Look for nan in the model's arguments and for inf - inf or 0 * inf in the "
        "model, or start elsewhere by init_params"
    )


def random_walk(sweep: Sweep) -> Callable[[Sites, Call, Array], Iterator[tuple[Sites, float]]]:
    """Return the walk of a block of a model: random values of layers, and draws of continuous sites."""
    moves: list[Callable[..., tuple[Sites, Any]]]
    moves = [jax.jit(_continuous_move(sweep, site)) for site in sweep.continuous]
    if sweep.conditionals is not None:
        moves.insert(0, _layer_move(sweep, sweep.conditionals))

    def walk(values: Sites, call: Call, key: Array) -> Iterator[tuple[Sites, float]]:
        context, log_prob = sweep.info.context(values, call), 0.0
        yield values, log_prob
        for step in itertools.count():
            keys = random.key_pair(jax.random.fold_in(key, step))
            values, change = moves[step % len(moves)](values, context, keys)
            log_prob += float(change)
            yield values, log_prob

    return walk


def _layer_move(sweep: Sweep, conditionals: Conditionals) -> Callable[..., tuple[Sites, Any]]:
    tabulate = jax.jit(sweep.table)

    def move(values: Sites, context: Context, keys: Array) -> tuple[Sites, Any]:
        latents = sweep.with_latents(values, context, keys)
        table = np.asarray(tabulate(latents, context), float)
        rng = np.random.default_rng(np.asarray(keys))
        units = np.flatnonzero(conditionals.colors == rng.integers(conditionals.num_layers))
        rows, present = table[units], _numbers(sweep, conditionals, values)[units]
        possible = np.isfinite(rows)
        new = np.where(possible, rng.random(possible.shape), -1).argmax(1)
        new = np.where(possible.any(1), new, present)
        numbers = np.arange(len(units))
        change = (rows[numbers, new] - rows[numbers, present])[new != present].sum()
        sites = {site: values[site] for site in sweep.finite}
        accepted = jnp.ones(len(units), bool)
        after = {**values, **conditionals.put(Layer(-1, units, {}, {}), sites, jnp.asarray(new), accepted)}
        # p(z) = p(z, h) / p(h | z), at one h for both
        change += float(sweep.log_conditional(values, latents, context))
        return after, change - float(sweep.log_conditional(after, latents, context))

    return move


def _numbers(sweep: Sweep, conditionals: Conditionals, values: Sites) -> np.ndarray:
    """Return the number of the value of every unit."""
    tables = {name: sweep.posterior.values[name] for name in conditionals.spans}
    at = lambda name: (
        ((np.asarray(values[name]) == tables[name].table) & tables[name].valid).argmax(0).ravel()
    )
    return np.concatenate(list(map(at, tables)))


def _continuous_move(sweep: Sweep, site: ContinuousSite) -> Callable[..., tuple[Sites, Any]]:
    def move(values: Sites, context: Context, keys: Array) -> tuple[Sites, Any]:
        at = site.derivatives(values[site.name], site.posterior.inputs(values, context))
        new = site.draw(at, keys)[0]
        return {**values, site.name: new}, site.change(at, new)

    return move
