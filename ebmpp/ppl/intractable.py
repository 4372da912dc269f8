# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Whether a NumPyro model is doubly intractable: a look at what the params of its energy models depend on."""

from collections.abc import Callable, Iterator
from typing import Any

from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.initialization import init_to_sample
from numpyro.ops.provenance import eval_provenance

import jax
from jax import Array

from ebmpp.core import Params
from ebmpp.errors import IntractableError
from ebmpp.ppl.distribution import TWO_WAYS_OUT, EnergyDistribution


def base_law(fn: dist.Distribution) -> dist.Distribution:
    """A distribution without what plates, events and masks wrap it in."""
    wrappers = (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution)
    return base_law(fn.base_dist) if isinstance(fn, wrappers) else fn


def _energy_sites(trace: dict[str, Any]) -> Iterator[tuple[str, EnergyDistribution]]:
    """The sites whose law has no log Z."""
    for name, site in trace.items():
        law = base_law(site["fn"]) if site["type"] == "sample" else None
        if isinstance(law, EnergyDistribution) and not law.has_log_partition:
            yield name, law


def check_model(model: Callable, *model_args: Any, **model_kwargs: Any) -> None:
    """Refuse a model in which the params of an energy model depend on what is inferred, without log Z.

    Gradient-based inference refuses by itself. Call this before any method without gradients. Nothing is
    computed: dependencies are traced through the model.

    :param model: a NumPyro model, conditioned on the data.
    :param model_args: its arguments.
    :param model_kwargs: its keyword arguments.
    :raises IntractableError: naming the site and the latent sites that its params depend on.

    **Example**

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, ebmpp
    >>> pair = ebmpp.layered(a=ebmpp.Spin(1), b=ebmpp.Spin(1))
    >>> def model(x):
    ...     J = numpyro.sample("J", dist.Uniform(0, 2))
    ...     params = {"a": jnp.zeros(1), "b": jnp.zeros(1), "a:b": J * jnp.ones((1, 1))}
    ...     numpyro.sample("x", ebmpp.EnergyDistribution(pair, params, blocks="all"), obs=x)
    >>> ebmpp.ppl.check_model(model, jnp.ones(2))
    Traceback (most recent call last):
    ...
    ebmpp.errors.IntractableError: the params of site 'x' depend on the latent sites ['J']...
    """

    def latent() -> dict[str, Array]:
        seeded = handlers.substitute(handlers.seed(model, 0), substitute_fn=init_to_sample)
        trace = handlers.trace(seeded).get_trace(*model_args, **model_kwargs)
        drawn = {n: s for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
        return {n: s["value"] for n, s in drawn.items()}

    values = jax.eval_shape(latent)
    # the tracer takes values as keyword arguments, beside its own, and a site may have any name
    alias = {f"site_{i}": name for i, name in enumerate(values)}

    def params_of(**given: Array) -> dict[str, Params]:
        data = {alias[key]: value for key, value in given.items()}
        seeded = handlers.seed(handlers.substitute(model, data=data), 0)
        trace = handlers.trace(seeded).get_trace(*model_args, **model_kwargs)
        return {name: law.params for name, law in _energy_sites(trace)}

    found = eval_provenance(params_of, **{key: values[name] for key, name in alias.items()})
    for name, sources in found.items():
        leaves = jax.tree.leaves(sources, is_leaf=lambda s: isinstance(s, frozenset))
        upstream = {alias[key] for leaf in leaves for key in leaf} - {name}
        if upstream:
            listed = [site for site in values if site in upstream]
            raise IntractableError(
                f"the params of site {name!r} depend on the latent sites {listed}, and its {TWO_WAYS_OUT}"
            )
