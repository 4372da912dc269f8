# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A check for doubly intractable models, whose params of energies depend on latent sites."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
import contextlib
import copy
from typing import Any

from jaxtyping import PyTree
import numpy as np
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace
from numpyro.ops.provenance import eval_provenance

import jax
from jax import Array

from ebmpp.core import Params
from ebmpp.distribution.energy_distribution import ADVICE, HOOK, EnergyDistribution
from ebmpp.errors import IntractableError

_WRAPPERS = (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution)


def base_of(fn: dist.Distribution) -> dist.Distribution:
    """Return a distribution without the wrappers of plates, events and masks."""
    return base_of(fn.base_dist) if isinstance(fn, _WRAPPERS) else fn


def with_base(fn: dist.Distribution, base: dist.Distribution) -> dist.Distribution:
    """Return a distribution with another one inside of its wrappers."""
    if not isinstance(fn, _WRAPPERS):
        return base
    copied = copy.copy(fn)
    copied.base_dist = with_base(fn.base_dist, base)
    return copied


def energies_of(trace: Mapping[str, PyTree]) -> dict[str, list[EnergyDistribution]]:
    """Return the energies in the distributions of a trace, by site, observed sites included."""
    energies = _by_site(EnergyDistribution, trace)
    return {name: parts for name, parts in energies.items() if parts}


def _by_site(kind: Any, trace: Mapping[str, PyTree]) -> dict[str, list]:
    """Return, by sample site, the instances of a class in the distribution."""
    return {
        name: [part for part in parts_of(site["fn"]) if isinstance(part, kind)]
        for name, site in trace.items()
        if site["type"] == "sample"
    }


def parts_of(fn: PyTree) -> Iterator[PyTree]:
    """Yield a distribution, and what it holds, such as components of a mixture and arrays."""
    yield fn
    if isinstance(fn, dist.Distribution):
        for part in jax.tree.leaves(
            dict(vars(fn)), is_leaf=lambda part: isinstance(part, dist.Distribution)
        ):
            yield from parts_of(part)


def _reweights(fn: dist.Distribution) -> bool:
    """Return True if log Z of an energy inside may be more than added, as in a mixture."""
    if isinstance(fn, EnergyDistribution):
        return False
    if isinstance(fn, (*_WRAPPERS, dist.TransformedDistribution)):
        return _reweights(fn.base_dist)
    return True


@contextlib.contextmanager
def unnormalized(
    hook: Callable[[Params, Array], Array] | None = None,
) -> Generator[list[Params]]:
    """Collect the params of energies without log Z whose ``log_prob`` is evaluated.

    :param hook: its result replaces that of ``log_prob``; see :data:`HOOK`.
    """
    evaluated = []

    def record(params, log_weight):
        evaluated.append(params)
        return log_weight if hook is None else hook(params, log_weight)

    token = HOOK.set(record)
    try:
        yield evaluated
    finally:
        HOOK.reset(token)


def check_tractable(
    model: Callable, *model_args: object, **model_kwargs: object
) -> None:
    """Refuse a model that is doubly intractable.

    That is, one in which the params of an energy model without log Z depend on what is
    inferred. Gradient-based inference refuses by itself. Call this before any method
    without gradients. Nothing is computed: dependencies are traced through the model.

    :param model: a NumPyro model, conditioned on the data.
    :param model_args: its arguments.
    :param model_kwargs: its keyword arguments.
    :raises IntractableError: naming the site and the latent sites that its params
        depend on.

    **Example**

    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, ebmpp
    >>> pair = ebmpp.layered(a=ebmpp.Spin(1), b=ebmpp.Spin(1))
    >>> def model(x):
    ...     J = numpyro.sample("J", dist.Uniform(0, 2))
    ...     params = {"a": jnp.zeros(1), "b": jnp.zeros(1), "a:b": J * jnp.ones((1, 1))}
    ...     numpyro.sample("x", ebmpp.EnergyDistribution(pair, params, blocks="all"), obs=x)
    >>> ebmpp.ppl.check_tractable(model, jnp.ones(2))
    Traceback (most recent call last):
    ...
    ebmpp.errors.IntractableError: the params of site 'x' depend on the latent sites ['J']...
    """
    refuse_params(model, model_args, model_kwargs, None)


def refuse_params(
    model: Callable, args: tuple, kwargs: dict, sites: Sequence[str] | None
) -> None:
    """Refuse to draw sites, all if None, that the params of an energy without log Z depend on."""
    for name, sources in read_by_params(model, args, kwargs, known=False).items():
        drawn = [source for source in sources if sites is None or source in sites]
        if drawn:
            raise IntractableError(
                f"the params of site {name!r} depend on the latent sites {drawn}, and its {ADVICE}"
            )


def read_by_params(
    model: Callable, args: tuple, kwargs: dict, known: bool
) -> dict[str, list[str]]:
    """Return the latent sites that the params of energies depend on, by the energy's site.

    Nothing is computed. An energy inside of a mixture also depends on what the weights
    depend on, and on the site itself. A site that reads ``log_prob`` of an energy, such
    as a factor, depends on what its params do.

    :param known: True to include energies with log Z.
    """

    def latents():
        trace = prototype_trace(model, jax.random.key(0), args, kwargs)
        return {name: trace[name]["value"] for name in latent_sample_sites(trace)}

    values = jax.eval_shape(latents)
    # the tracer takes values as keyword arguments, beside its own, and a site may have
    # any name
    alias = {f"site_{i}": name for i, name in enumerate(values)}
    reweighted = set()

    def read(mark, **inputs):
        data = {alias[key]: value for key, value in inputs.items()}
        seeded = handlers.seed(handlers.substitute(model, data=data), 0)
        with unnormalized(lambda params, log_weight: log_weight + mark) as used:
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        params = {}
        for name, energies in energies_of(trace).items():
            trees = [e.params for e in energies if known or not e.has_log_partition]
            if trees:
                params[name] = trees
        if known:
            return params, {}, used
        arrays = _by_site(Array | np.ndarray, trace)
        for name, trees in params.items():
            if _reweights(trace[name]["fn"]):
                reweighted.add(name)
                params[name] = [trees, arrays[name]]
        return params, arrays, used

    inputs = {key: values[name] for key, name in alias.items()}
    params, arrays, used = eval_provenance(
        read, mark=jax.ShapeDtypeStruct((), float), **inputs
    )

    def sites_of(tree):
        return {alias[key] for key in _keys(tree) if key in alias}

    # a value reweighted by an energy without log Z is wrong, whatever the params depend
    # on
    sources = {}
    for name, tree in params.items():
        sources[name] = sites_of(tree) - {name} | ({name} & reweighted)
    for name, tree in arrays.items():
        if "mark" in _keys(tree):
            sources[name] = sources.get(name, set()) | sites_of(used)
    return {
        name: [site for site in values if site in names]
        for name, names in sources.items()
    }


def _keys(provenance: PyTree) -> set[str]:
    """Return all inputs that a tree of values depends on."""
    leaves = jax.tree.leaves(provenance, is_leaf=lambda s: isinstance(s, frozenset))
    return {key for leaf in leaves for key in leaf}
