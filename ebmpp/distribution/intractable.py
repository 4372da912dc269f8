# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Whether a NumPyro model is doubly intractable: a look at what the params of its energy models depend on."""

from collections.abc import Callable, Generator, Mapping, Sequence
import contextlib
import copy
from typing import Any

import numpy as np
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.initialization import init_to_sample
from numpyro.ops.provenance import eval_provenance

import jax
from jax import Array

from ebmpp.core import Params
from ebmpp.distribution.energy_distribution import TWO_WAYS_OUT, WATCH, EnergyDistribution
from ebmpp.errors import IntractableError

_WRAPPERS = (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution)
#: What adds to the log density of the law inside; anything else may weigh one against another.
_ADDING = (*_WRAPPERS, dist.TransformedDistribution)


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


def energy_laws(trace: Mapping[str, Any]) -> dict[str, list[EnergyDistribution]]:
    """By site, observed ones too, the energies in the laws of a model's trace, however deep inside."""
    laws = {name: energies_in(site["fn"]) for name, site in trace.items() if site["type"] == "sample"}
    return {name: found for name, found in laws.items() if found}


def energies_in(fn: dist.Distribution) -> list[EnergyDistribution]:
    """The energies among a distribution and those that it holds, such as components of a mixture."""
    if isinstance(fn, EnergyDistribution):
        return [fn]
    return [law for part in _parts(fn) if isinstance(part, dist.Distribution) for law in energies_in(part)]


def _parts(fn: dist.Distribution) -> list[Any]:
    """What a distribution holds."""
    return jax.tree.leaves(dict(vars(fn)), is_leaf=lambda part: isinstance(part, dist.Distribution))


def _arrays(fn: dist.Distribution) -> list[Any]:
    """Of a distribution and of those that it holds."""
    inner = [_arrays(p) if isinstance(p, dist.Distribution) else [p] for p in _parts(fn)]
    return [p for parts in inner for p in parts if isinstance(p, jax.Array | np.ndarray)]


def _weighs(fn: dist.Distribution) -> bool:
    """Whether log Z of an energy inside may be more than added to the log density, as in a mixture."""
    if isinstance(fn, EnergyDistribution):
        return False
    return not isinstance(fn, _ADDING) or _weighs(fn.base_dist)


@contextlib.contextmanager
def unnormalized(watch: Callable[[Params, Array], Array] | None = None) -> Generator[list[Params]]:
    """The params of all energies without log Z whose ``log_prob`` is asked for, such as for a factor.

    :param watch: what ``log_prob`` gives instead.
    """
    found: list[Params] = []

    def seen(params: Params, weight: Array) -> Array:
        found.append(params)
        return weight if watch is None else watch(params, weight)

    token = WATCH.set(seen)
    try:
        yield found
    finally:
        WATCH.reset(token)


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
    """By site with an energy, the latent sites that its params depend on. Nothing is computed.

    Of an energy inside of a mixture those count, too, that its weights depend on, and the site itself; a site
    that reads ``log_prob`` of an energy, such as a factor, depends on what the params of that depend on.

    :param known: whether those with log Z are told, too.
    """

    values = _latents(model, args, kwargs)
    # the tracer takes values as keyword arguments, beside its own, and a site may have any name
    alias = {f"site_{i}": name for i, name in enumerate(values)}
    weighing: set[str] = set()

    def read(mark: Array, **given: Array) -> tuple[dict[str, Any], dict[str, Any], list[Params]]:
        data = {alias[key]: value for key, value in given.items()}
        seeded = handlers.seed(handlers.substitute(model, data=data), 0)
        with unnormalized(lambda params, weight: weight + mark) as asked:
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        laws = {name: _params(found, known) for name, found in energy_laws(trace).items()}
        own: dict[str, Any] = {name: params for name, params in laws.items() if params}
        weighing.update(name for name in own if not known and _weighs(trace[name]["fn"]))
        arrays = {name: _arrays(site["fn"]) for name, site in trace.items() if site["type"] == "sample"}
        own |= {name: [own[name], arrays[name]] for name in weighing}
        return own, {} if known else arrays, asked

    inputs = {key: values[name] for key, name in alias.items()}
    own, arrays, asked = eval_provenance(read, mark=jax.ShapeDtypeStruct((), float), **inputs)
    # a value weighed by an energy without log Z is wrong, whatever the params depend on
    of = lambda tree: {alias[key] for key in _keys(tree) if key in alias}
    made = {name: of(each) - {name} | ({name} & weighing) for name, each in own.items()}
    for name, each in arrays.items():
        if "mark" in _keys(each):
            made[name] = made.get(name, set()) | of(asked)
    return {name: [site for site in values if site in found] for name, found in made.items()}


def _latents(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes of a model's latent sites."""

    def latent() -> dict[str, Array]:
        seeded = handlers.substitute(handlers.seed(model, 0), substitute_fn=init_to_sample)
        trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        drawn = {n: s for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
        return {n: s["value"] for n, s in drawn.items()}

    return jax.eval_shape(latent)


def _params(laws: Sequence[EnergyDistribution], known: bool) -> list[Params]:
    return [law.params for law in laws if known or not law.has_log_partition]


def _keys(provenance: Any) -> set[str]:
    """All inputs that a tree of values depends on."""
    leaves = jax.tree.leaves(provenance, is_leaf=lambda s: isinstance(s, frozenset))
    return {key for leaf in leaves for key in leaf}
