# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Whether a NumPyro model is doubly intractable: a look at what the params of its energy models depend on."""

from collections.abc import Callable, Mapping, Sequence
import copy
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

_WRAPPERS = (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution)


def base_law(fn: dist.Distribution) -> dist.Distribution:
    """A distribution without what plates, events and masks wrap it in."""
    return base_law(fn.base_dist) if isinstance(fn, _WRAPPERS) else fn


def with_base(fn: dist.Distribution, base: dist.Distribution) -> dist.Distribution:
    """The same with another distribution inside of what plates, events and masks wrap it in."""
    if not isinstance(fn, _WRAPPERS):
        return base
    made = copy.copy(fn)
    made.base_dist = with_base(fn.base_dist, base)
    return made


def energy_laws(trace: Mapping[str, Any]) -> dict[str, EnergyDistribution]:
    """By site, observed ones too, the laws of a model's trace that are energies."""
    laws = {name: base_law(site["fn"]) for name, site in trace.items() if site["type"] == "sample"}
    return {name: law for name, law in laws.items() if isinstance(law, EnergyDistribution)}


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
    for name, sources in read_by_params(model, model_args, model_kwargs, known=False).items():
        if sources:
            raise IntractableError(
                f"the params of site {name!r} depend on the latent sites {sources}, and its {TWO_WAYS_OUT}"
            )


def refuse_params(model: Callable, args: tuple, kwargs: Mapping[str, Any], sites: Sequence[str]) -> None:
    """Refuse to draw sites that the params of an energy model without log Z depend on.

    :raises IntractableError: naming both.
    """
    for name, sources in read_by_params(model, args, kwargs, known=False).items():
        own = [source for source in sources if source in sites]
        if own:
            raise IntractableError(
                f"from_model: the params of site {name!r} depend on sites {own}, which the block would draw, "
                f"and its {TWO_WAYS_OUT}"
            )


def read_by_params(
    model: Callable, args: tuple, kwargs: Mapping[str, Any], known: bool
) -> dict[str, list[str]]:
    """By energy model, the latent sites that its params depend on. Nothing is computed.

    :param known: whether those with log Z are told, too.
    """

    def latent() -> dict[str, Array]:
        seeded = handlers.substitute(handlers.seed(model, 0), substitute_fn=init_to_sample)
        trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        drawn = {n: s for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
        return {n: s["value"] for n, s in drawn.items()}

    values = jax.eval_shape(latent)
    # the tracer takes values as keyword arguments, beside its own, and a site may have any name
    alias = {f"site_{i}": name for i, name in enumerate(values)}

    def params_of(**given: Array) -> dict[str, Params]:
        data = {alias[key]: value for key, value in given.items()}
        seeded = handlers.seed(handlers.substitute(model, data=data), 0)
        laws = energy_laws(handlers.trace(seeded).get_trace(*args, **kwargs))
        return {name: law.params for name, law in laws.items() if known or not law.has_log_partition}

    found, made = eval_provenance(params_of, **{key: values[name] for key, name in alias.items()}), {}
    for name, sources in found.items():
        leaves = jax.tree.leaves(sources, is_leaf=lambda s: isinstance(s, frozenset))
        upstream = {alias[key] for leaf in leaves for key in leaf} - {name}
        made[name] = [site for site in values if site in upstream]
    return made
