# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Is a graph the posterior of its sites? A comparison of log densities with the model's own."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace
from numpyro.infer.util import log_density

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.errors import IntractableError, StateError
from ebmpp.graph import energy
from ebmpp.moves import gibbs
from ebmpp.ppl.sites import Call, Surroundings

_TRIES = 3  # values of the siblings
_STATES = 6  # states of the sites at each


def verify(
    within: Surroundings,
    model: Callable[..., Any],
    *model_args: Any,
    rng_key: Array | None = None,
    tolerance: float = 1e-3,
    **model_kwargs: Any,
) -> None:
    """Compare how the model's log density and the block's change between random states of the sites.

    The two must change alike, whatever the other sites are; a constant does not matter. A term that is
    missing, counted twice, or of the wrong scale shows at once.

    :param within: the block among its siblings.
    :param model: the NumPyro model.
    :param model_args: its arguments.
    :param rng_key: for the random states; a fixed key unless given.
    :param tolerance: relative to the size of the changes.
    :param model_kwargs: its keyword arguments.
    :raises StateError: where they differ, telling by how much; or for sites that the model has not.
    :raises IntractableError: for latent blocks that cannot be summed out in closed form.
    """
    key = jax.random.key(0) if rng_key is None else rng_key
    clash = within.graph.interacting(within.latents)
    if clash:
        raise IntractableError(f"latent blocks {clash[0]} interact: their sum has no closed form to compare")
    theirs, ours = [], []
    for number in range(_TRIES):
        k = jax.random.fold_in(key, number)
        found = prototype_trace(model, k, model_args, model_kwargs)
        values = {name: found[name]["value"] for name in latent_sample_sites(found)}
        missing = sorted(set(within.layouts) - set(values))
        if missing:
            raise StateError(f"sites {missing} are not latent sample sites of the model: {sorted(values)}")
        siblings = {name: v for name, v in values.items() if name not in within.layouts}
        own = {name: values[name] for name in within.layouts}
        batch = within.batch_of(own)
        made = within.bind(own, Call(siblings, model_args, model_kwargs), check=True)
        for index in range(_STATES):
            x = gibbs.initial_rows(within.graph, within.site_blocks, made.keys(k, index)) | made.clamped
            sites = within.to_sites(x, own, batch)
            theirs.append(log_density(model, model_args, model_kwargs, siblings | sites)[0])
            ours.append(_log_density(within, made, x))
    _compare(np.asarray(theirs), np.asarray(ours), within, tolerance)


def _log_density(within: Surroundings, made: Any, x: dict[str, Array]) -> Array:
    graph, latents = within.graph, within.latents
    one = lambda target, row: energy.log_unnormalized(graph, target.params, row, latents)
    value = made.map(lambda target, rows: jax.vmap(lambda row: one(target, row))(rows), x).sum()
    return value if made.log_weight is None else value + jnp.sum(made.log_weight(x))


def _compare(theirs: np.ndarray, ours: np.ndarray, within: Surroundings, tolerance: float) -> None:
    theirs, ours = (a.reshape(_TRIES, _STATES) for a in (theirs, ours))
    change, own = (a[:, 1:] - a[:, :-1] for a in (theirs, ours))
    scale = np.abs(change).max() + np.abs(own).max() + 1e-6 * np.abs(theirs).max() / tolerance
    gap = np.abs(change - own)
    if not np.isfinite(gap).all() or gap.max() > tolerance * scale:
        worst = np.unravel_index(np.nanargmax(np.where(np.isfinite(gap), gap, np.inf)), gap.shape)
        raise StateError(
            f"the block is not the posterior of sites {list(within.layouts)}: between two states the "
            f"model's log density changes by {change[worst]:.6g}, and the block's by {own[worst]:.6g}. Is "
            "there a factor for each likelihood that reads the sites, and the energy of their prior once?"
        )
