# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Whether the conditionals of a block are numbers where a run begins: a unit without a law never moves."""

from collections.abc import Callable
from typing import Any

import numpy as np

import jax
from jax import Array, core
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.errors import StateError
from ebmpp.traced.block import Call
from ebmpp.traced.conditionals import Conditionals, Sites
from ebmpp.traced.sweep import ModelSweep


class LawCheck:
    """Looks at all laws of a block, for as much as a sweep takes; traced values it cannot look at.

    :param sweep: the block's.
    """

    def __init__(self, sweep: ModelSweep) -> None:
        self.sweep = sweep
        self._arguments: list[Any] | None = None
        self._count: Callable[..., tuple[Array, dict[str, Array]]] | None = None

    def __call__(self, values: Sites, call: Call, rng_key: Array) -> None:
        """:raises StateError: naming a unit whose law is not a number, or data that are none."""
        if any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves((values, tuple(call), rng_key))):
            return
        keys = random.key_pair(rng_key)
        missing = self.sweep.posterior.arguments.with_nan(call)
        density = self._log_density(values, call, keys) if missing else 0.0
        if not np.isfinite(density):
            raise StateError(
                f"the model's log density is {density:g} where the block begins, expected a finite number: "
                f"argument {missing[0]} of the model holds nan, of which no draw can be right; leave missing "
                "data out, or hold them back by numpyro.handlers.mask"
            )
        units, sites = self._compiled(call)(dict(values), dict(call.siblings), keys)
        if units:
            raise StateError(_told(*self._unit(values, call, keys)))
        for name, where in sites.items():
            if where.any():
                raise StateError(_told(name, np.argwhere(where)[0], None))

    def _compiled(self, call: Call) -> Callable[..., tuple[Array, dict[str, Array]]]:
        """Chains that begin with the same arguments share one program."""
        leaves = jax.tree.leaves((call.args, call.kwargs))
        known = self._arguments
        same = known is not None and len(known) == len(leaves)
        if self._count is None or not (
            same and all(a is b for a, b in zip(known or (), leaves, strict=True))
        ):
            count = lambda values, siblings, keys: self._missing(
                values, call._replace(siblings=siblings), keys
            )
            self._arguments, self._count = leaves, jax.jit(count)
        return self._count

    def _missing(self, values: Sites, call: Call, keys: Array) -> tuple[Array, dict[str, Array]]:
        """How many discrete units have no law, and which units of continuous sites."""
        sweep, units, sites = self.sweep, jnp.zeros((), jnp.int32), {}
        if sweep.conditionals is not None:
            laws, own, given = self._discrete(sweep.conditionals, values, call, keys)
            # what has a law counts as kept, so that every unit is looked at where the others are
            draw = lambda layer, logits: (jnp.zeros(len(logits), jnp.int32), jnp.isnan(logits).any(-1))
            units = laws.size - laws.sweep(own, given, draw)[1]
        for site in sweep.continuous:
            law = site.law(values[site.name], sweep.given(site.posterior, values, call))
            broken = jnp.isnan(law.slope) | jnp.isnan(law.curvature).any(-1)
            sites[site.name] = broken[site.groups, site.places].reshape(site.shape)
        return units, sites

    def _log_density(self, values: Sites, call: Call, keys: Array) -> Array:
        """Of the model where the block begins."""
        return jax.jit(lambda v: self.sweep.log_density(self.sweep.with_latents(v, call, keys), call))(
            dict(values)
        )

    def _discrete(self, laws: Conditionals, values: Sites, call: Call, keys: Array) -> tuple:
        """Laws, the sites that they are of, and the inputs of their program."""
        whole = self.sweep.with_latents(values, call, keys)
        own = {name: values[name] for name in self.sweep.finite}
        return laws, own, self.sweep.given(self.sweep.drawn, whole, call)

    def _unit(self, values: Sites, call: Call, keys: Array) -> tuple[str, np.ndarray, Any]:
        """A site, a unit without a law, and a value at which there is no number."""
        assert self.sweep.conditionals is not None
        laws, own, given = self._discrete(self.sweep.conditionals, values, call, keys)
        broken = np.isnan(jax.jit(laws.table)(own, given))
        unit = int(broken.any(1).argmax())
        name, start = next((n, a) for n, (a, b) in laws.spans.items() if a <= unit < b)
        shape, table = laws.posterior.shapes[name], laws.posterior.values[name].table
        place = np.unravel_index(unit - start, shape)
        value = np.broadcast_to(table, (len(table), *shape))[(int(broken[unit].argmax()), *place)]
        return name, np.array(place), value


def _told(name: str, place: np.ndarray, value: Any) -> str:
    unit = f"unit {tuple(int(i) for i in place)} of site {name!r}" if len(place) else f"site {name!r}"
    at = "" if value is None else f" where it is {value:g}"
    return (
        f"the conditional of {unit} is nan{at}, expected numbers (-inf for what is impossible): its draws "
        "would never move. Look for nan in the model's arguments, and for inf - inf and 0 * inf in the model "
        "at this value; or begin elsewhere, by init_params or another rng_key, if only the starting values "
        "are at fault"
    )
