# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checks of a block: of the values that it starts from, and of its agreement with a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import itertools
from typing import Any

import numpy as np
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace
from numpyro.infer.util import log_density

import jax
from jax import Array, core
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.errors import StateError
from ebmpp.traced.block import Call, Sites
from ebmpp.traced.model import Context
from ebmpp.traced.sweep import Conditionals, ContinuousSite, Layer, Sweep

_NUM_WALKS, _NUM_STATES = 3, 6
#: From a block's sites, a call and a key to states of the sites with the block's log density, up to a
#: constant.
Walk = Callable[[Sites, Call, Array], Iterator[tuple[Sites, float]]]


# -- start -----------------------------------------------------------------------------------------


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


# -- agreement with a model ------------------------------------------------------------------------


def verify(
    model: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    sites: Sequence[str],
    walk: Walk,
    rng_key: Array | None,
    tolerance: float,
) -> None:
    """Compare how a model's log density and a block's change along random walks of the sites.

    The two must change alike, whatever the other sites are. A constant does not matter. A term that is
    missing, counted twice, or of the wrong scale shows at once.

    :param walk: of the block, endless.
    :param rng_key: for the random states; a fixed key by default.
    :param tolerance: relative to the size of the changes.
    :raises StateError: where they differ; or for sites that the model does not have.
    """
    theirs, ours = [], []
    density = jax.jit(lambda values: log_density(model, args, dict(kwargs), values)[0])
    for number in range(_NUM_WALKS):
        key = jax.random.fold_in(jax.random.key(0) if rng_key is None else rng_key, number)
        trace = prototype_trace(model, key, args, dict(kwargs))
        values = {name: jnp.asarray(trace[name]["value"]) for name in latent_sample_sites(trace)}
        missing = sorted(set(sites) - set(values))
        if missing:
            raise StateError(f"sites {missing} are not latent sample sites of the model: {sorted(values)}")
        siblings = {name: v for name, v in values.items() if name not in sites}
        states = walk({name: values[name] for name in sites}, Call(siblings, args, kwargs), key)
        for state, log_prob in itertools.islice(states, _NUM_STATES):
            theirs.append(density({**siblings, **state}))
            ours.append(log_prob)
    theirs, ours = (np.asarray(a, float).reshape(_NUM_WALKS, _NUM_STATES) for a in (theirs, ours))
    change, block_change = np.diff(theirs), np.diff(ours)
    scale = np.abs(change).max() + np.abs(block_change).max() + 1e-6 * np.abs(theirs).max() / tolerance
    gap = np.abs(change - block_change)
    if not np.isfinite(gap).all() or gap.max() > tolerance * scale:
        worst = np.unravel_index(np.where(np.isfinite(gap), gap, np.inf).argmax(), gap.shape)
        raise StateError(
            f"the block is not the posterior of sites {list(sites)}: between two states the model's log "
            f"density changes by {change[worst]:.6g}, and the block's by {block_change[worst]:.6g}. Give one "
            "factor for each likelihood that reads the sites, and the energy of their prior once"
        )


def random_walk(sweep: Sweep) -> Walk:
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
