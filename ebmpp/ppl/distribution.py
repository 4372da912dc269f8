# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""An energy-based model as a NumPyro distribution, and what may be inferred about its params."""

from collections.abc import Callable, Iterable, Iterator
import math
from typing import Any, NoReturn, cast

from jaxtyping import Float, Real
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from numpyro.infer.initialization import init_to_sample
from numpyro.ops.provenance import eval_provenance

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import Params, checks, random
from ebmpp.errors import IntractableError, ParameterError, StateError, clash
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.graph.arrays import describe
from ebmpp.moves import Target, gibbs, gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.ppl.layout import Layout

LogPartition = Callable[[Params], Array]

_TWO_WAYS_OUT = (
    "log_prob lacks log Z, which depends on the params: the posterior of anything they depend on is doubly "
    "intractable, and without log Z it comes out silently wrong. Two ways out: give "
    "EnergyDistribution(..., log_partition=lambda params: ebmpp.exact.log_partition(graph, params)), exact "
    "for small models; or update the sites that the params depend on by the exchange algorithm, "
    "ebmpp.ppl.Exchange, alone or as a block of numpyro.infer.Gibbs."
)
_MOMENTS = "ebmpp.exact.moments(graph, params) sums small models, ebmpp.unbiased_expectation estimates others"


class _UnitwiseSupport(constraints.Constraint):
    """The support of a value whose units are of several families."""

    def __init__(self, graph: FactorGraph, layout: Layout) -> None:
        self.graph, self.layout = graph, layout

    @property
    def is_discrete(self) -> bool:
        # one discrete unit is enough: a gradient-based method must not take the site
        return any(self.graph.families[b].support.is_discrete for b in self.layout.names)

    @property
    def event_dim(self) -> int:
        return len(self.layout.shape)

    def __call__(self, x: Array) -> Array:
        valid = jnp.array(True)
        for b, part in self.layout.split(x).items():
            family = self.graph.families[b]
            valid &= family.in_support(part).all(tuple(range(-len(family.shape), 0)))
        return valid

    def feasible_like(self, prototype: Array) -> Array:
        families = {b: self.graph.families[b] for b in self.layout.names}
        made = {b: f.initial(jnp.zeros((*f.shape, f.num_words), jnp.uint32)) for b, f in families.items()}
        values = self.layout.join(made).astype(jnp.result_type(prototype))
        return jnp.broadcast_to(values, jnp.shape(prototype))

    def eq(self, other: object, static: bool = False) -> bool:
        same = isinstance(other, _UnitwiseSupport)
        return same and (self.graph, self.layout) == (other.graph, other.layout)

    def tree_flatten(self) -> tuple:
        return (), ((), {"graph": self.graph, "layout": self.layout})

    def __repr__(self) -> str:
        listed = (f"{b}: {describe(self.graph.families[b])}" for b in self.layout.names)
        return f"UnitwiseSupport({', '.join(listed)})"


@jax.custom_jvp
def _without_gradient(params: Params) -> Params:
    """``params``, which must not be differentiated in."""
    return params


@_without_gradient.defjvp
def _refuse_gradient(primals: tuple, tangents: tuple) -> NoReturn:
    # JAX calls this rule only where a tangent reaches the params, so gradients in the value, and in sites
    # that the params do not depend on, go through.
    raise IntractableError(f"an EnergyDistribution was differentiated in its params. Its {_TWO_WAYS_OUT}")


@jax.jit
def _draw(target: Target, keys: Array, num_sweeps: Array) -> dict[str, Array]:
    """Every block after ``num_sweeps`` sweeps from initial draws."""
    moves = gibbs_sweep(target.graph)
    start = gibbs.initial_rows(target.graph, target.graph.families, random.fold_in(keys, 0))
    one = lambda i, x: draw_sweep(target, x, moves, random.fold_in(keys, i))[0]
    return jax.lax.fori_loop(1, num_sweeps + 1, one, start)


def _lacks(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: "EnergyDistribution", *_: Any, **__: Any) -> NoReturn:
        """:raises NotImplementedError: always, with what to use."""
        raise NotImplementedError(f"EnergyDistribution has no {what}: {instead}")

    return refuse


class EnergyDistribution(dist.Distribution):
    """The law of blocks of an energy-based model, for :func:`numpyro.sample`.

    The value is one array, made of the blocks as ``layout`` says; the other blocks are summed out, so
    ``log_prob`` is minus the free energy. Without ``log_partition`` it is so **up to log Z**, a constant
    as long as the params are (of which an evidence bound is off, and by which the components of a mixture are
    weighted). Where they depend on what is inferred, log Z is no constant and its posterior
    is *doubly intractable*: differentiating ``log_prob`` in the params then raises
    :class:`~ebmpp.errors.IntractableError`. Methods without gradients cannot be caught so; let
    :func:`check_model` look at the model.

    ``sample`` makes ``num_sweeps`` sweeps of blocked Gibbs from initial draws: **approximate**, unless
    that is long enough for the model to mix. A row's draw depends on its own key.

    :param graph: the declaration.
    :param params: a dict keyed by factor name.
    :param blocks: names of the value's blocks; the visible ones if None, "all" for every block.
    :param layout: how the value is made of blocks: a :class:`~ebmpp.ppl.layout.Layout`; by default one block
        as it is, or several flattened, one after the other.
    :param log_partition: log Z, a number or a function of the params, which ``log_prob`` then subtracts.
    :param num_sweeps: sweeps of a draw.
    :param validate_args: False to look neither at the params' values nor at the value's support.
    :raises ParameterError: params that do not fit, or do not normalise.
    :raises StateError: an unknown block, or a layout of other blocks.
    :raises IntractableError: when two blocks that are to be summed out interact.

    **References**

    1. Murray, Ghahramani, MacKay (2006), *MCMC for doubly-intractable distributions*.

    **Example**

    >>> import jax, numpyro, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> law = ebmpp.EnergyDistribution(rbm, rbm.init(jax.random.key(0)), num_sweeps=20)
    >>> law.event_shape, law.support.is_discrete
    ((4,), True)
    >>> x = law.sample(jax.random.key(1), (5,))
    >>> law.log_prob(x).shape
    (5,)
    """

    arg_constraints = {}
    pytree_data_fields = ("params", "_log_partition_value")
    pytree_aux_fields = ("graph", "layout", "num_sweeps", "_log_partition_fn")

    def __init__(
        self,
        graph: FactorGraph,
        params: Params,
        *,
        blocks: Iterable[str] | str | None = None,
        layout: Layout | None = None,
        log_partition: Array | float | LogPartition | None = None,
        num_sweeps: int = 100,
        validate_args: bool | None = None,
    ) -> None:
        checks.instance("EnergyDistribution: graph", graph, FactorGraph, "a FactorGraph")
        num_sweeps = checks.count("EnergyDistribution: num_sweeps", num_sweeps)
        _refuse_batched(graph, params)
        graph.check(params, values=self._validate_args if validate_args is None else validate_args)
        self.graph, self.params, self.num_sweeps = graph, dict(params), num_sweeps
        self.layout = _check_layout(graph, blocks, layout)
        for a, b in graph.interacting(self.summed):
            raise IntractableError(
                f"{clash(a, b)}, so they cannot be summed out of the value's law in closed form; make one of "
                f'them part of the value, blocks=[..., {a!r}] or blocks="all" (the layers are '
                f"{graph.block_layers})"
            )
        self._log_partition_fn = cast(LogPartition, log_partition) if callable(log_partition) else None
        self._log_partition_value = None if callable(log_partition) else _as_scalar(log_partition)
        super().__init__((), self.layout.shape, validate_args=validate_args)

    def __repr__(self) -> str:
        return f"EnergyDistribution({self.graph!r}, blocks={list(self.layout.names)})"

    @property
    def summed(self) -> tuple[str, ...]:
        """The blocks that are summed out."""
        return tuple(b for b in self.graph.families if b not in self.layout.names)

    @property
    def has_log_partition(self) -> bool:
        """Whether ``log_prob`` is normalised."""
        return self._log_partition_fn is not None or self._log_partition_value is not None

    @property
    def support(self) -> constraints.Constraint:
        """Values that the units can take."""
        first, *others = (self.graph.families[b].support for b in self.layout.names)
        if all(first == other for other in others):
            return constraints.independent(first, len(self.layout.shape))
        return _UnitwiseSupport(self.graph, self.layout)

    @property
    def has_rsample(self) -> bool:
        """False: a draw is no differentiable function of the params, and a guide needs the score function."""
        return False

    rsample = _lacks("draws that can be differentiated in its params", "sample makes others")
    mean = property(_lacks("mean", _MOMENTS))
    variance = property(_lacks("variance", _MOMENTS))
    entropy = _lacks("entropy", "it has log Z and the mean energy, which only sums over states give")
    enumerate_support = _lacks(
        "enumeration of its support",
        "its states are those of all units together; draw such a site by ebmpp.GibbsBlock in "
        "numpyro.infer.Gibbs",
    )

    def _log_partition(self) -> Array | float:
        if self._log_partition_fn is not None:
            return self._log_partition_fn(self.params)
        return 0.0 if self._log_partition_value is None else self._log_partition_value

    @validate_sample
    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Float[Array, "*batch"]:
        """Minus the free energy of the value, minus log Z where it was given.

        :param value: shape ``(*batch, *event_shape)``.
        :return: shape ``(*batch,)``.
        :raises IntractableError: when differentiated in the params without ``log_partition``.
        :raises StateError: for a wrong shape.
        """
        del intermediates
        _refuse_batched(self.graph, self.params)
        parts = self.layout.split(value)
        batch = jnp.shape(value)[: jnp.ndim(value) - len(self.layout.shape)]
        families = self.graph.families
        rows = {b: x.reshape(-1, *families[b].shape).astype(families[b].dtype) for b, x in parts.items()}
        params = self.params if self.has_log_partition else _without_gradient(self.params)
        one = lambda x: energy.log_unnormalized(self.graph, params, x, self.summed)
        return jax.vmap(one)(rows).reshape(batch) - self._log_partition()

    def sample(self, key: Array | None, sample_shape: tuple[int, ...] = ()) -> Real[Array, "*value"]:
        """Draws after ``num_sweeps`` sweeps of blocked Gibbs, each from a chain of its own.

        :param key: a jax key.
        :param sample_shape: leading axes.
        :return: shape ``sample_shape + event_shape``.
        """
        _refuse_batched(self.graph, self.params)
        key, shape = checks.key("EnergyDistribution: key", key), tuple(sample_shape)
        keys = random.fold_in(random.key_pair(key), jnp.arange(math.prod(shape), dtype=jnp.uint32))
        params = jax.lax.stop_gradient(self.params)  # a draw is no differentiable function of them
        x = _draw(Target(self.graph, params), keys, self.num_sweeps)
        return self.layout.join(x).reshape(shape + self.layout.shape)


def _refuse_batched(graph: FactorGraph, params: Params) -> None:
    """:raises ParameterError: for params that all have the same leading axes, as ``vmap`` returns them."""
    wanted, given = jax.tree.leaves(graph.param_shapes), jax.tree.leaves(params)
    if len(wanted) != len(given):
        return  # told by names
    batches = {jnp.shape(p)[: jnp.ndim(p) - w.ndim] for p, w in zip(given, wanted, strict=True)}
    fits = all(jnp.shape(p)[jnp.ndim(p) - w.ndim :] == w.shape for p, w in zip(given, wanted, strict=True))
    if fits and len(batches) == 1 and batches != {()}:
        raise ParameterError(
            "EnergyDistribution takes one set of params, and all of these have leading axes "
            f"{batches.pop()}: make it, and call log_prob or sample, inside the function that jax.vmap "
            "maps over the params"
        )


def _check_layout(graph: FactorGraph, blocks: Iterable[str] | str | None, layout: Layout | None) -> Layout:
    """:raises StateError: for an unknown block, or a layout of other blocks."""
    if blocks is None:
        names = tuple(graph.visible) if layout is None else layout.names
    elif blocks == "all" and "all" not in graph.families:
        names = tuple(graph.families)
    else:
        names = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    if layout is None:
        return Layout.of(graph, names)
    states.check_names(names, graph.families)
    wanted = {b: graph.families[b].shape for b in names}
    if dict(layout.blocks) != wanted:
        raise StateError(
            f"the layout is of blocks {dict(layout.blocks)}, expected {wanted}; make it of this graph and "
            "these blocks, by Layout.of(graph, blocks) or Layout.at(graph, shape, places)"
        )
    return layout


def _as_scalar(log_partition: Array | float | None) -> Array | float | None:
    if log_partition is None:
        return None
    if jnp.shape(checks.numbers("log_partition", log_partition, ParameterError)) != ():
        raise ParameterError(
            f"log_partition is one number, or a function of the params; got shape {jnp.shape(log_partition)}"
        )
    return log_partition


# -- looking for double intractability -------------------------------------------------------------


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
                f"the params of site {name!r} depend on the latent sites {listed}, and its {_TWO_WAYS_OUT}"
            )
