# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""An energy-based model as a NumPyro distribution: densities, draws, and what small models have exactly."""

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
import math
from typing import Any, NoReturn, cast

from jaxtyping import Float, Real
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp import exact
from ebmpp.core import Params, Rows, State, checks, random
from ebmpp.distribution import batches
from ebmpp.distribution.layout import Layout
from ebmpp.distribution.listed import is_index, is_own_statistic, values_of
from ebmpp.distribution.support import support_of
from ebmpp.errors import IntractableError, StateError, clash
from ebmpp.exact import enumeration
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.moves import Target, gibbs, gibbs_sweep
from ebmpp.moves.move import draw_sweep

LogPartition = Callable[[Params], Array]
#: While a model is looked at: from params and log_prob without log Z to what log_prob gives instead.
WATCH: ContextVar[Callable[[Params, Array], Array] | None] = ContextVar("WATCH", default=None)

TWO_WAYS_OUT = (
    "log_prob lacks log Z, which depends on the params: the posterior of anything they depend on is doubly "
    "intractable, and without log Z it comes out silently wrong. Two ways out: give "
    "EnergyDistribution(..., log_partition=lambda params: ebmpp.exact.log_partition(graph, params)), exact "
    "for small models; or update the sites that the params depend on by the exchange algorithm, "
    "ebmpp.ppl.Exchange, alone or as a block of numpyro.infer.Gibbs."
)


@jax.custom_jvp
def _without_gradient(params: Params) -> Params:
    """``params``, which must not be differentiated in."""
    return params


@_without_gradient.defjvp
def _refuse_gradient(primals: tuple, tangents: tuple) -> NoReturn:
    # JAX calls this rule only where a tangent reaches the params, so gradients in the value, and in sites
    # that the params do not depend on, go through.
    raise IntractableError(f"an EnergyDistribution was differentiated in its params. Its {TWO_WAYS_OUT}")


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

    Params that have leading axes, which broadcast against one another, make a batch of laws.

    Of small models ``mean``, ``variance``, ``entropy`` and ``numpyro.distributions.kl_divergence`` (between
    such laws, or from or to one of independent units) are exact sums, with or without ``log_partition``;
    ``enumerate_support`` lists the joint values. NumPyro itself may enumerate a value of **one unit** whose
    values are 0, 1, ... (``DiscreteHMCGibbs``, ``infer_discrete``): it takes the length of the list for the
    number of values of each element. Larger ones are drawn by :class:`~ebmpp.GibbsBlock`.

    :param graph: the declaration.
    :param params: a dict keyed by factor name; leaves may have leading axes.
    :param blocks: names of the value's blocks; the visible ones if None, "all" for every block.
    :param layout: how the value is made of blocks: a :class:`~ebmpp.ppl.Layout`; by default one block
        as it is, or several flattened, one after the other.
    :param log_partition: log Z, a number (or one for each law of a batch) or a function of one set of params,
        which ``log_prob`` then subtracts.
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
        batch = batches.batch_shape(graph, params)
        batches.check_each(
            graph, params, batch, self._validate_args if validate_args is None else validate_args
        )
        self.graph, self.params, self.num_sweeps = graph, dict(params), num_sweeps
        self.layout = _check_layout(graph, blocks, layout)
        for a, b in graph.interacting(self.summed):
            raise IntractableError(
                f"{clash(a, b)}, so they cannot be summed out of the value's law in closed form; make one of "
                f'them part of the value, blocks=[..., {a!r}] or blocks="all" (the layers are '
                f"{graph.block_layers})"
            )
        self._log_partition_fn = cast(LogPartition, log_partition) if callable(log_partition) else None
        self._log_partition_value = (
            None if callable(log_partition) else batches.as_numbers(log_partition, batch)
        )
        super().__init__(batch, self.layout.shape, validate_args=validate_args)

    def __repr__(self) -> str:
        return f"EnergyDistribution({self.graph!r}, blocks={list(self.layout.names)})"

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading axes of the params, broadcast."""
        return batches.batch_shape(self.graph, self.params)  # of what vmap returned, these are new

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
        return support_of(self.graph, self.layout)

    @property
    def has_rsample(self) -> bool:
        """False: a draw is no differentiable function of the params, and a guide needs the score function."""
        return False

    rsample = _lacks("draws that can be differentiated in its params", "sample makes others")

    # -- densities and draws ---------------------------------------------------------------------

    def _each(self, fn: Callable[..., Any], batch: tuple[int, ...], *rows: Array) -> Any:
        """``fn(params, *rows)`` for each set of params, which broadcast to ``batch``.

        :param rows: ``(number, sets, ...)``.
        :return: ``(number, sets, ...)`` too; without ``rows``, ``(sets, ...)``.
        """
        params, axes = batches.flat(self.graph, self.params, batch)
        if all(axis is None for axis in axes):
            moved = [r.reshape(-1, *r.shape[2:]) for r in rows]  # one set: all rows at once
            made = fn(params, *moved)
            return (
                jax.tree.map(lambda m: m.reshape(-1, math.prod(batch), *m.shape[1:]), made) if rows else made
            )
        leaves, tree = jax.tree.flatten(params)
        each = lambda leaves, *r: fn(jax.tree.unflatten(tree, leaves), *r)
        return jax.vmap(each, (axes, *(1,) * len(rows)), 1 if rows else 0)(leaves, *rows)

    def _log_partition(self) -> Array | float:
        if self._log_partition_fn is not None:
            return jnp.reshape(self._each(self._log_partition_fn, self.batch_shape), self.batch_shape)
        return 0.0 if self._log_partition_value is None else self._log_partition_value

    def _by_rows(self, fn: Callable[..., Any], x: Rows) -> Any:
        """``fn(params, rows)`` of blocks whose leading axes broadcast with those of the params.

        :return: what it makes, with these leading axes.
        """
        families = self.graph.families
        leads = (v.shape[: v.ndim - len(families[b].shape)] for b, v in x.items())
        lead = jnp.broadcast_shapes(*leads, self.batch_shape)
        inner = lead[len(lead) - len(self.batch_shape) :]

        def as_rows(b: str, x: Array) -> Array:
            shape = families[b].shape
            rows = jnp.broadcast_to(x, lead + shape).reshape(-1, math.prod(inner), *shape)
            return rows.astype(families[b].dtype)

        of_rows = lambda params, *rows: fn(params, dict(zip(x, rows, strict=True)))
        made = self._each(of_rows, inner, *(as_rows(b, v) for b, v in x.items()))
        return jax.tree.map(lambda m: m.reshape(lead + m.shape[2:]), made)

    def _log_weight(self, value: Array, gradient: bool = True) -> Float[Array, "*batch"]:
        """``log_prob`` up to log Z."""
        guard = (lambda params: params) if gradient else _without_gradient
        one = lambda params, x: energy.log_unnormalized(self.graph, params, x, self.summed)
        each = lambda params, x: jax.vmap(lambda row: one(guard(params), row))(x)
        return self._by_rows(each, self.layout.split(value))

    @validate_sample
    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Float[Array, "*batch"]:
        """Minus the free energy of the value, minus log Z where it was given.

        :param value: shape ``(*batch, *event_shape)``.
        :return: shape ``(*batch,)``.
        :raises IntractableError: when differentiated in the params without ``log_partition``.
        :raises StateError: for a wrong shape.
        """
        del intermediates
        value = jnp.asarray(value)
        weight, watch = self._log_weight(value, self.has_log_partition), WATCH.get()
        if watch is not None and not self.has_log_partition:
            weight = watch(self.params, weight)
        return weight - jnp.broadcast_to(self._log_partition(), weight.shape)

    def joint_log_prob(self, value: ArrayLike, latents: Mapping[str, Array]) -> Float[Array, "*batch"]:
        """Log density of the value and the blocks that are summed out together.

        Relative to the base measure of the latter: summed over them with it, :meth:`log_prob` follows.

        :param value: shape ``(*batch, *event_shape)``.
        :param latents: by block of :attr:`summed`, ``(*batch, *shape)``.
        """
        guard = (lambda params: params) if self.has_log_partition else _without_gradient
        kept = self.layout.names

        def one(params: Params, x: State) -> Array:
            base = energy.log_base_measure(self.graph, {b: x[b] for b in kept})
            return base - energy.energy(self.graph, params, self.graph.statistics(x))

        each = lambda params, x: jax.vmap(lambda row: one(guard(params), row))(x)
        weight = self._by_rows(each, {**self.layout.split(jnp.asarray(value)), **latents})
        return weight - jnp.broadcast_to(self._log_partition(), weight.shape)

    def latent_parameters(self, value: ArrayLike) -> dict[str, Float[Array, "..."]]:
        """Natural parameters of the blocks that are summed out given the value: they are independent then.

        :param value: shape ``(*batch, *event_shape)``.
        :return: by block of :attr:`summed`, ``(*batch, *statistic_shape)``.
        """
        each = lambda params, x: energy.natural_rows(self.graph, params, x, self.summed)
        return self._by_rows(each, self.layout.split(value)) if self.summed else {}

    def sample(self, key: Array | None, sample_shape: tuple[int, ...] = ()) -> Real[Array, "*value"]:
        """Draws after ``num_sweeps`` sweeps of blocked Gibbs, each from a chain of its own.

        :param key: a jax key.
        :param sample_shape: leading axes.
        :return: shape ``sample_shape + batch_shape + event_shape``.
        """
        key, batch = checks.key("EnergyDistribution: key", key), self.batch_shape
        shape = tuple(sample_shape) + batch
        keys = random.fold_in(random.key_pair(key), jnp.arange(math.prod(shape), dtype=jnp.uint32))

        def draw(params: Params, keys: Array) -> Array:
            params = jax.lax.stop_gradient(params)  # a draw is no differentiable function of them
            return self.layout.join(_draw(Target(self.graph, params), keys, self.num_sweeps))

        made = self._each(draw, batch, keys.reshape(-1, math.prod(batch), keys.shape[-1]))
        return made.reshape(shape + self.layout.shape)

    # -- exact sums, of small models -------------------------------------------------------------

    @property
    def has_enumerate_support(self) -> bool:
        """Whether NumPyro may enumerate: values of one unit, numbered from 0."""
        return math.prod(self.layout.shape) == 1 and is_index(self.graph.families[self.layout.names[0]])

    def enumerate_support(self, expand: bool = True) -> Real[Array, "values ..."]:
        """The joint values of all units, shape ``(values, *batch_shape, *event_shape)``.

        :param expand: False for axes of length 1 in place of ``batch_shape``.
        :raises IntractableError: for more than 2**20 of them, or units of infinitely many values.
        """
        listed = values_of(self.graph, self.layout)
        batch = self.batch_shape
        listed = listed.reshape(len(listed), *(1,) * len(batch), *self.layout.shape)
        return jnp.broadcast_to(listed, (len(listed), *batch, *self.layout.shape)) if expand else listed

    def log_probs(self, values: Array) -> Float[Array, "values *batch"]:
        """Exact log probabilities of ``values``, which are all that there are, whatever log Z is given.

        :param values: as of :meth:`enumerate_support`.
        """
        weights = jax.lax.map(self._log_weight, values, batch_size=min(len(values), enumeration.CHUNK))
        return jax.nn.log_softmax(weights, axis=0)

    @property
    def mean(self) -> Float[Array, "*value"]:
        """E[x], exactly.

        :raises IntractableError: where the model is too large for :func:`ebmpp.exact.moments`.
        """
        return self._moment(exact.moments, lambda x, p: (p * x).sum(0))

    @property
    def variance(self) -> Float[Array, "*value"]:
        """Var[x] of each unit, exactly.

        :raises IntractableError: where the model is too large for :func:`ebmpp.exact.variances`.
        """
        return self._moment(
            exact.variances, lambda x, p: (p * (x - (p * x).sum(0, keepdims=True)) ** 2).sum(0)
        )

    def _moment(self, of_statistics: Callable, of_table: Callable[[Array, Array], Array]) -> Array:
        """By the derivatives of log Z where values are statistics, else by a list of all values."""
        families = {b: self.graph.families[b] for b in self.layout.names}
        if not all(map(is_own_statistic, families.values())):
            values = self.enumerate_support(expand=False)
            log_probs = self.log_probs(values)
            return of_table(
                values, jnp.exp(log_probs).reshape(*log_probs.shape, *(1,) * len(self.layout.shape))
            )

        def one(params: Params) -> Array:
            made = of_statistics(self.graph, params)
            return self.layout.join({b: f.interaction(made[b]) for b, f in families.items()})

        return self._each(one, self.batch_shape).reshape(self.batch_shape + self.layout.shape)

    def entropy(self) -> Float[Array, "*batch"]:
        """Of the value, exactly, in nats.

        :raises IntractableError: for more than 2**20 joint values, or infinitely many.
        """
        log_probs = self.log_probs(self.enumerate_support(expand=False))
        return -(jnp.exp(log_probs) * jnp.where(log_probs > -jnp.inf, log_probs, 0.0)).sum(0)


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
