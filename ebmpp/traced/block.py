# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Base of the kernels that update sites of a NumPyro model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity

from jax import Array
import jax.numpy as jnp

from ebmpp.errors import StateError
from ebmpp.kernels.base import Kwargs, is_batched

TRIES = 3  #: values of the siblings, between which a model and a graph are compared
STATES = 6  #: states of the sites at each


class Call(NamedTuple):
    """What NumPyro passes, sorted."""

    siblings: Mapping[str, Array]
    """Values of the sibling sites."""
    args: tuple
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, model_args: tuple, model_kwargs: Kwargs) -> "Call":
        """The siblings' values are among the keyword arguments."""
        kwargs = dict(model_kwargs or {})
        return cls(dict(kwargs.pop(GIBBS_SITES_KWARG, {})), model_args, kwargs)


class SiteKernel(MCMCKernel):
    """A kernel of sites as the model knows them; nothing in its state depends on their siblings."""

    sample_field = "z"

    def __getattr__(self, name: str) -> NoReturn:
        """:raises AttributeError: that there is no ``model``: NumPyro takes no block whose model is None."""
        more = "; ebmpp.to_datatree(mcmc) converts its draws for ArviZ" if name == "model" else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{more}")

    def refresh(self, state: Any, model_args: tuple, model_kwargs: Kwargs) -> Any:
        """The state as it is."""
        return state

    def get_constrain_fn(self, model_args: tuple, model_kwargs: Kwargs) -> Callable:
        """Identity."""
        return identity


def one_chain(rng_key: Array) -> None:
    """:raises StateError: for keys of many chains."""
    if is_batched(rng_key):
        raise StateError(
            "GibbsBlock runs one chain a key, like numpyro.infer.Gibbs: for many chains use "
            'chain_method="parallel", "sequential" or jax.vmap'
        )


def plain(value: Array) -> Array:
    """A site's value, in whole numbers where it came as booleans: NumPyro's summary fails on those."""
    return value.astype(jnp.int8) if value.dtype == bool else value


def compare(theirs: np.ndarray, ours: np.ndarray, sites: Sequence[str], tolerance: float) -> None:
    """That two log densities change alike from state to state, ``TRIES`` times ``STATES`` of them.

    :raises StateError: where they do not.
    """
    theirs, ours = (a.reshape(TRIES, STATES) for a in (theirs, ours))
    change, own = (a[:, 1:] - a[:, :-1] for a in (theirs, ours))
    scale = np.abs(change).max() + np.abs(own).max() + 1e-6 * np.abs(theirs).max() / tolerance
    gap = np.abs(change - own)
    if not np.isfinite(gap).all() or gap.max() > tolerance * scale:
        worst = np.unravel_index(np.nanargmax(np.where(np.isfinite(gap), gap, np.inf)), gap.shape)
        raise StateError(
            f"the block is not the posterior of sites {list(sites)}: between two states the "
            f"model's log density changes by {change[worst]:.6g}, and the block's by {own[worst]:.6g}. Is "
            "there a factor for each likelihood that reads the sites, and the energy of their prior once?"
        )
