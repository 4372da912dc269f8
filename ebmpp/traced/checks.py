# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A check of the values that a block of a model starts from."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import jax
from jax import Array, core
import jax.numpy as jnp

from ebmpp.errors import StateError
from ebmpp.traced.block import Call, Sites
from ebmpp.traced.model import Context
from ebmpp.traced.sweep import Sweep


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
        for unit in self._degenerate(table, sites):
            raise StateError(
                f"the conditional of {unit}, so that its draws would never move. Look for nan in the model's "
                "arguments and for inf - inf or 0 * inf in the model, or start elsewhere by init_params"
            )

    def _degenerate(self, table: np.ndarray, sites: Mapping[str, np.ndarray]) -> Iterator[str]:
        """Yield units whose conditional is nan, in words."""
        posterior, conditionals = self.sweep.posterior, self.sweep.conditionals
        for site, (start, stop) in conditionals.spans.items() if conditionals else ():
            values, shape, invalid = (
                posterior.values[site].table,
                posterior.shapes[site],
                np.isnan(table[start:stop]),
            )
            for unit, number in np.argwhere(invalid):
                place = tuple(map(int, np.unravel_index(unit, shape)))
                at = np.broadcast_to(values, (len(values), *shape))[(number, *place)]
                yield f"unit {place} of site {site!r} is nan where it is {at:g}"
        for site, mask in sites.items():
            for place in np.argwhere(mask):
                yield f"unit {tuple(map(int, place))} of site {site!r} is nan"

    def _conditionals(
        self, values: Sites, context: Context, keys: Array
    ) -> tuple[Array, Array, dict[str, Array]]:
        """Return the log density, the conditionals of discrete units, and continuous units without one."""
        values, conditionals, sites = (
            self.sweep.with_latents(values, context, keys),
            self.sweep.conditionals,
            {},
        )
        for site in self.sweep.continuous:
            at = site.derivatives(values, context)
            invalid = jnp.isnan(at.slope) | jnp.isnan(at.curvature).any(-1)
            sites[site.name] = invalid[site.index].reshape(site.shape)
        table = jnp.zeros((0, 1)) if conditionals is None else conditionals.table(values, context)
        return self.sweep.log_density(values, context), table, sites
