# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Whether a model is the one that a block was made of: how its log density changes as sites move."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace
from numpyro.infer.util import log_density

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.traced.block import STATES, TRIES, Call, compare
from ebmpp.traced.conditionals import Conditionals, Layer, Sites
from ebmpp.traced.continuous import ContinuousSite
from ebmpp.traced.sweep import ModelSweep

#: From the block's sites, their surroundings and words to the sites moved, and what the laws say of that.
_Move = Callable[[Sites, Call, Array], tuple[dict[str, Array], Any]]


def compare_with(
    sweep: ModelSweep,
    model: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    key: Array,
    tolerance: float,
) -> None:
    """Compare how the model's log density changes, as sites move, with what the conditionals say.

    :raises StateError: where they differ, telling by how much.
    """
    theirs, ours = [], []
    density = jax.jit(lambda values: log_density(model, args, dict(kwargs), values)[0])
    moves: list[_Move] = [jax.jit(_move_site(sweep, site)) for site in sweep.continuous]
    if sweep.conditionals is not None:
        moves.insert(0, _move_layer(sweep, sweep.conditionals))
    for number in range(TRIES):
        own_key = jax.random.fold_in(key, number)
        trace = prototype_trace(model, own_key, args, dict(kwargs))
        values = {name: jnp.asarray(trace[name]["value"]) for name in latent_sample_sites(trace)}
        own, call = sweep.apart(values, Call({}, args, kwargs))
        theirs.append(density({**call.siblings, **own}))
        ours.append(0.0)
        for step in range(STATES - 1):
            words = random.key_pair(jax.random.fold_in(own_key, step))
            own, change = moves[step % len(moves)](own, call, words)
            theirs.append(density({**call.siblings, **own}))
            ours.append(ours[-1] + float(change))
    compare(np.asarray(theirs), np.asarray(ours), sweep.sites, tolerance)


def _move_layer(sweep: ModelSweep, laws: Conditionals) -> _Move:
    table, law_of = jax.jit(laws.table), sweep.log_law

    def move(own: Sites, call: Call, words: Array) -> tuple[dict[str, Array], Any]:
        discrete = {site: own[site] for site in sweep.posterior.sites}
        whole = sweep.with_latents(own, call, words)
        found = np.asarray(table(discrete, sweep.given(sweep.drawn, whole, call)), float)
        rng = np.random.default_rng(np.asarray(words))
        (units, numbers), change = _redraw(rng, laws, found, discrete)
        every = jnp.ones(len(units), bool)
        moved = laws.put(Layer(-1, units, {}, {}), discrete, jnp.asarray(numbers), every)
        after = {**own, **moved}
        # p(z) = p(z, h) / p(h | z), at one h for both
        return after, change - float(law_of(after, whole, call)) + float(law_of(own, whole, call))

    return move


def _move_site(sweep: ModelSweep, site: ContinuousSite) -> _Move:
    def move(own: Sites, call: Call, words: Array) -> tuple[dict[str, Array], Any]:
        law = site.law(own[site.name], sweep.given(site.posterior, own, call))
        new = site.draw(law, words)[0]
        return {**own, site.name: new}, site.change(law, new)

    return move


def _redraw(
    rng: np.random.Generator, laws: Conditionals, table: np.ndarray, own: Sites
) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """Possible values of a random layer, and how the conditionals say that the log density changes."""
    layer = rng.integers(laws.num_layers)
    units = np.flatnonzero(laws.colors == layer)
    now = laws.numbers(own)[units]
    possible = np.isfinite(table[units])
    new = np.where(possible, rng.random(possible.shape), -1).argmax(1)
    new = np.where(possible.any(1), new, now)
    at = table[units]
    rows = np.arange(len(units))
    moved = new != now
    return (units, new), float((at[rows, new] - at[rows, now])[moved].sum())
