# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""An energy-based model as a NumPyro distribution: log densities, draws and exact sums."""

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
import math
from typing import NoReturn, TypeVar, cast

from jaxtyping import Float, PyTree, Real
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from numpyro.util import identity

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp import exact
from ebmpp.core import (
    BatchShape,
    Params,
    PerState,
    Rows,
    State,
    checks,
    expand,
    merge_axes,
    random,
    select,
)
from ebmpp.distribution.layout import (
    Layout,
    UnitwiseSupport,
    is_index,
    is_own_statistic,
    joint_values,
)
from ebmpp.errors import IntractableError, ParameterError, clash
from ebmpp.exact import enumeration
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.graph.transforms import batches
from ebmpp.moves import Target
from ebmpp.moves.move import draw_chains

T = TypeVar("T", bound=PyTree)
#: While a model is inspected: from params and ``log_prob`` without log Z to the value
#: of ``log_prob``.
HOOK: ContextVar[Callable[[Params, Array], Array] | None] = ContextVar(
    "HOOK", default=None
)

ADVICE = (
    "log_prob lacks log Z, which depends on the params: the posterior of anything they "
    "depend on is doubly intractable, and without log Z it would be silently wrong. "
    "Either give EnergyDistribution(..., log_partition=lambda params: "
    "ebmpp.exact.log_partition(graph, params)), exact for small models; or update the "
    "sites that the params depend on by the exchange algorithm, ebmpp.ppl.Exchange, "
    "alone or as a block of numpyro.infer.Gibbs."
)


@jax.custom_jvp
def _without_gradient(params: Params) -> Params:
    """Return ``params``, which must not be differentiated in."""
    return params


@_without_gradient.defjvp
def _refuse_gradient(primals: tuple, tangents: tuple) -> NoReturn:
    # JAX calls this rule only where a tangent reaches the params, so gradients in the
    # value, and in sites that the params do not depend on, are unaffected
    raise IntractableError(
        f"an EnergyDistribution was differentiated in its params. Its {ADVICE}"
    )


_draw = jax.jit(draw_chains)


class EnergyDistribution(dist.Distribution):
    """The distribution of blocks of an energy-based model, for :func:`numpyro.sample`.

    The value is one array, made of the blocks by ``layout``. The other blocks are
    summed out, so ``log_prob`` is minus the free energy. Without ``log_partition`` that
    is **up to log Z**, a constant while the params are constant (which shifts evidence
    bounds, and reweights the components of a mixture). If the params depend on what is
    inferred, log Z is no constant and the posterior is *doubly intractable*:
    differentiating ``log_prob`` in the params then raises
    :class:`~ebmpp.errors.IntractableError`. For methods without gradients,
    :func:`check_tractable` inspects the model.

    ``sample`` makes ``num_sweeps`` sweeps of blocked Gibbs from initial draws. It is
    **approximate**, unless that is long enough for the model to mix. A row's draw
    depends on its own key.

    Params with leading axes, which broadcast against one another, make a batch of
    distributions.

    For small models ``mean``, ``variance``, ``entropy`` and
    ``numpyro.distributions.kl_divergence`` (between energy models, or one and
    independent units) are exact sums, with or without ``log_partition``;
    ``enumerate_support`` lists the joint values. NumPyro itself may enumerate a value
    of **one unit** with values 0, 1, ... (``DiscreteHMCGibbs``, ``infer_discrete``), as
    it enumerates each element separately. Larger values are drawn by
    :class:`~ebmpp.GibbsBlock`.

    :param params: a dict keyed by factor name; leaves may have leading axes.
    :param blocks: names of the value's blocks; the visible ones if None, "all" for
        every block.
    :param layout: a :class:`~ebmpp.ppl.Layout`; by default one block with its shape, or
        several flattened, one after the other.
    :param log_partition: log Z, which ``log_prob`` then subtracts: a number, one per
        distribution of a batch, or a function of one set of params.
    :param num_sweeps: sweeps per draw.
    :param validate_args: False to check neither the params' values nor the value's
        support.
    :raises ParameterError: for params that do not fit, or do not normalise.
    :raises StateError: for an unknown block, or a layout of other blocks.
    :raises IntractableError: when two blocks that are to be summed out interact.

    **References**

    1. Murray, Ghahramani, MacKay (2006), *MCMC for doubly-intractable distributions*.

    **Example**

    >>> import jax, numpyro, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> prior = ebmpp.EnergyDistribution(rbm, rbm.init(jax.random.key(0)), num_sweeps=20)
    >>> prior.event_shape, prior.support.is_discrete
    ((4,), True)
    >>> x = prior.sample(jax.random.key(1), (5,))
    >>> prior.log_prob(x).shape
    (5,)
    """

    arg_constraints = {}
    #: draws are not differentiable in the params: a guide needs the score function
    has_rsample = False
    pytree_data_fields = ("params", "_log_partition_value")
    pytree_aux_fields = ("graph", "layout", "num_sweeps", "_log_partition_fn")

    def __init__(
        self,
        graph: FactorGraph,
        params: Params,
        *,
        blocks: Iterable[str] | str | None = None,
        layout: Layout | None = None,
        log_partition: ArrayLike | Callable[[Params], Array] | None = None,
        num_sweeps: int = 100,
        validate_args: bool | None = None,
    ) -> None:
        checks.instance("EnergyDistribution: graph", graph, FactorGraph)
        num_sweeps = checks.count("EnergyDistribution: num_sweeps", num_sweeps)
        batch = batches.leading_axes(graph, params)
        validates = self._validate_args if validate_args is None else validate_args
        batches.check_batch(graph, params, batch, validates)
        self.graph = graph
        self.params = dict(params)
        self.num_sweeps = num_sweeps
        self.layout = _check_layout(graph, blocks, layout)
        for a, b in graph.interacting(self.summed):
            raise IntractableError(
                f"{clash(a, b)}, so their sum in log_prob has no closed form. Make "
                f"one of them part of the value, blocks=[..., {a!r}] or "
                f'blocks="all" (the layers are {graph.block_layers})'
            )
        self._log_partition_fn = self._log_partition_value = None
        if callable(log_partition):
            self._log_partition_fn = log_partition
        elif log_partition is not None:
            numbers = checks.numbers("log_partition", log_partition, ParameterError)
            if numbers.shape not in ((), batch):
                raise checks.parameter_error(
                    "log_partition",
                    f"a function of the params, or numbers of shape () or {batch}",
                    log_partition,
                )
            self._log_partition_value = log_partition
        super().__init__(batch, self.layout.shape, validate_args=validate_args)

    def __repr__(self) -> str:
        return f"EnergyDistribution({self.graph!r}, blocks={list(self.layout.names)})"

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading axes of the params, broadcast."""
        return batches.leading_axes(self.graph, self.params)  # vmap changes them

    @property
    def summed(self) -> tuple[str, ...]:
        """The blocks that are summed out."""
        return tuple(b for b in self.graph.families if b not in self.layout.names)

    @property
    def has_log_partition(self) -> bool:
        """True if ``log_prob`` is normalised."""
        fn = self._log_partition_fn
        return fn is not None or self._log_partition_value is not None

    @property
    def support(self) -> constraints.Constraint:
        """The values that the units can take."""
        first, *others = (self.graph.families[b].support for b in self.layout.names)
        if all(first == other for other in others):
            return constraints.independent(first, len(self.layout.shape))
        return UnitwiseSupport(self.graph, self.layout)

    def _map(self, fn: Callable[[Params], T]) -> T:
        """Apply a function to each set of params; return ``(*batch_shape, ...)``."""
        batch = self.batch_shape
        params, axes = batches.flatten_axes(self.graph, self.params, batch)
        if not jax.tree.leaves(axes):
            return fn(params)
        results = jax.vmap(fn, (axes,))(params)
        return jax.tree.map(lambda r: r.reshape(batch + r.shape[1:]), results)

    def _map_sets(
        self, fn: Callable[[Params, T], PyTree], batch: BatchShape, rows: T
    ) -> PyTree:
        """Apply ``fn(params, rows)`` to each set of params, which broadcast to ``batch``.

        :param rows: ``(number, sets, ...)``, as the result.
        """
        params, axes = batches.flatten_axes(self.graph, self.params, batch)
        if jax.tree.leaves(axes):
            return jax.vmap(fn, (axes, 1), out_axes=1)(params, rows)
        # one set: all rows at once
        sets = math.prod(batch)
        rows = merge_axes(rows)
        results = fn(params, rows)
        return jax.tree.map(lambda r: r.reshape(-1, sets, *r.shape[1:]), results)

    def _subtract_log_partition(self, weight: PerState) -> PerState:
        log_z = self._log_partition_value
        if self._log_partition_fn is not None:
            log_z = self._map(self._log_partition_fn)
        if log_z is None:
            return weight
        return weight - jnp.broadcast_to(log_z, weight.shape)

    def _map_rows(self, fn: Callable[[Params, State], PyTree], x: Rows) -> PyTree:
        """Apply ``fn(params, row)`` to rows of blocks.

        :return: results with the leading axes of blocks and params, broadcast.
        """
        families = self.graph.families
        leads = (v.shape[: v.ndim - len(families[b].shape)] for b, v in x.items())
        lead = jnp.broadcast_shapes(*leads, self.batch_shape)
        batch = lead[len(lead) - len(self.batch_shape) :]
        rows = {}
        for b, v in x.items():
            shape = families[b].shape
            full = jnp.broadcast_to(v, lead + shape)
            full = full.reshape(-1, math.prod(batch), *shape)
            rows[b] = full.astype(families[b].dtype)

        def of_rows(params, rows):
            return jax.vmap(partial(fn, params))(rows)

        results = self._map_sets(of_rows, batch, rows)
        return jax.tree.map(lambda r: r.reshape(lead + r.shape[2:]), results)

    def _guard(self, params: Params) -> Params:
        if self.has_log_partition:
            return params
        return _without_gradient(params)

    def _log_weight(
        self, value: Array, guard: Callable[[Params], Params] = identity
    ) -> PerState:
        """Return ``log_prob`` up to log Z."""

        def of_row(params, x):
            weight = energy.log_unnormalized(self.graph, guard(params), x, self.summed)
            return energy.with_infinities(self.graph, weight)

        return self._map_rows(of_row, self.layout.split(value))

    @validate_sample
    def log_prob(self, value: ArrayLike, intermediates: object = None) -> PerState:
        """Return minus the free energy of the value, minus log Z if it was given.

        :param value: shape ``(*batch, *event_shape)``.
        :return: shape ``(*batch,)``.
        :raises IntractableError: when differentiated in the params without
            ``log_partition``.
        :raises StateError: for a wrong shape.
        """
        del intermediates
        weight = self._log_weight(jnp.asarray(value), self._guard)
        hook = HOOK.get()
        if hook is not None and not self.has_log_partition:
            weight = hook(self.params, weight)
        return self._subtract_log_partition(weight)

    def joint_log_prob(
        self, value: ArrayLike, latents: Mapping[str, Array]
    ) -> PerState:
        """Return the joint log density of the value and the blocks that are summed out.

        It is relative to the base measure of the latter, whose sum gives
        :meth:`log_prob`.

        :param value: shape ``(*batch, *event_shape)``.
        :param latents: by block of :attr:`summed`, ``(*batch, *shape)``.
        """
        graph = self.graph

        def of_row(params, x):
            visible = select(x, self.layout.names)
            base = energy.log_base_measure(graph, visible)
            return base - energy.energy(graph, self._guard(params), graph.statistics(x))

        x = {**self.layout.split(value), **latents}
        return self._subtract_log_partition(self._map_rows(of_row, x))

    def latent_parameters(self, value: ArrayLike) -> dict[str, Float[Array, "..."]]:
        """Return natural parameters of the blocks that are summed out, given the value.

        Given the value these blocks are independent.

        :param value: shape ``(*batch, *event_shape)``.
        :return: by block of :attr:`summed`, ``(*batch, *statistic_shape)``.
        """

        def of_row(params, x):
            return energy.natural(
                self.graph, params, self.graph.statistics(x), self.summed
            )

        return self._map_rows(of_row, self.layout.split(value)) if self.summed else {}

    def sample(
        self, key: Array | None, sample_shape: tuple[int, ...] = ()
    ) -> Real[Array, "*value"]:
        """Draw by ``num_sweeps`` sweeps of blocked Gibbs, with one chain per draw.

        :param key: a jax key.
        :param sample_shape: leading axes.
        :return: shape ``sample_shape + batch_shape + event_shape``.
        """
        key = checks.key("EnergyDistribution: key", key)
        batch = self.batch_shape
        name = "EnergyDistribution: sample_shape"
        shape = (*(checks.count(name, n, least=0) for n in sample_shape), *batch)
        numbers = jnp.arange(math.prod(shape), dtype=jnp.uint32)
        keys = random.fold_in(random.key_pair(key), numbers)

        def draw(params, keys):
            # draws are not differentiable in them
            target = Target(self.graph, jax.lax.stop_gradient(params))
            return self.layout.join(_draw(target, keys, self.num_sweeps))

        keys = keys.reshape(-1, math.prod(batch), keys.shape[-1])
        drawn = self._map_sets(draw, batch, keys)
        return drawn.reshape(shape + self.layout.shape)

    def rsample(
        self, key: Array | None, sample_shape: tuple[int, ...] = ()
    ) -> NoReturn:
        """Raise NotImplementedError, as draws are not differentiable in the params."""
        raise NotImplementedError(
            "EnergyDistribution: draws are not differentiable in the params. Use sample, "
            "and the score function for gradients."
        )

    @property
    def has_enumerate_support(self) -> bool:
        """True if NumPyro may enumerate: values of one unit, numbered from 0."""
        family = self.graph.families[self.layout.names[0]]
        return math.prod(self.layout.shape) == 1 and is_index(family)

    def enumerate_support(self, expand: bool = True) -> Real[Array, "values ..."]:
        """Return the joint values of all units, ``(values, *batch_shape, *event_shape)``.

        :param expand: False for axes of length 1 in place of ``batch_shape``.
        :raises IntractableError: for more than 2^20 of them, or units of infinitely
            many values.
        """
        values = joint_values(self.graph, self.layout)
        batch = self.batch_shape
        values = values.reshape(len(values), *(1,) * len(batch), *self.layout.shape)
        if not expand:
            return values
        return jnp.broadcast_to(values, (len(values), *batch, *self.layout.shape))

    def log_probs(self, values: Array) -> Float[Array, "values *batch"]:
        """Return exact log probabilities, normalised over ``values``.

        :param values: as of :meth:`enumerate_support`: all that there are.
        """
        size = min(len(values), enumeration.CHUNK)
        weights = jax.lax.map(self._log_weight, values, batch_size=size)
        return jax.nn.log_softmax(weights, axis=0)

    @property
    def mean(self) -> Float[Array, "*value"]:
        """E[x], exactly.

        :raises IntractableError: where the model is too large for
            :func:`ebmpp.exact.moments`.
        """
        return self._moment(exact.moments, centred=False)

    @property
    def variance(self) -> Float[Array, "*value"]:
        """Var[x] of each unit, exactly.

        :raises IntractableError: where the model is too large for
            :func:`ebmpp.exact.variances`.
        """
        return self._moment(exact.variances, centred=True)

    def _moment(self, of_statistics: Callable[..., State], centred: bool) -> Array:
        """Return a moment by derivatives of log Z if values are statistics, else by a list."""
        families = select(self.graph.families, self.layout.names)
        if not all(map(is_own_statistic, families.values())):
            values = self.enumerate_support(expand=False)
            probabilities = expand(jnp.exp(self.log_probs(values)), values)
            mean = (probabilities * values).sum(0)
            return (probabilities * (values - mean) ** 2).sum(0) if centred else mean

        def moment(params):
            moments = of_statistics(self.graph, params)
            means = {b: f.interaction(moments[b]) for b, f in families.items()}
            return self.layout.join(means)

        return self._map(moment)

    def entropy(self) -> PerState:
        """Return the entropy of the value, exactly, in nats.

        :raises IntractableError: for more than 2^20 joint values, or infinitely many.
        """
        log_p = self.log_probs(self.enumerate_support(expand=False))
        return -_expectation(log_p, log_p)


def _expectation(log_p: Array, x: Array) -> PerState:
    """Return E[x] over all values, of which some may be impossible."""
    return (jnp.exp(log_p) * jnp.where(log_p > -jnp.inf, x, 0.0)).sum(0)


def _check_layout(
    graph: FactorGraph, blocks: Iterable[str] | str | None, layout: Layout | None
) -> Layout:
    """Raise a StateError for an unknown block, or a layout of other blocks."""
    if blocks is None:
        blocks = getattr(layout, "names", graph.visible)
    elif blocks == "all" and "all" not in graph.families:
        blocks = graph.families
    names = states.check_names(blocks, graph.families)
    if layout is None:
        return Layout.flat(graph, names)
    checks.instance("EnergyDistribution: layout", layout, Layout)
    blocks = dict(layout.blocks)
    expected = {b: graph.families[b].shape for b in names}
    if blocks != expected:
        raise checks.state_error(
            "blocks of layout",
            str(expected),
            blocks,
            hint="Make it by Layout.flat(graph, blocks) or Layout.at(graph, shape, places).",
        )
    return layout


#: Distributions whose values are listed in a divergence.
Enumerable = EnergyDistribution | dist.Independent


@dist.kl_divergence.register(EnergyDistribution, EnergyDistribution)
@dist.kl_divergence.register(EnergyDistribution, dist.Independent)
@dist.kl_divergence.register(dist.Independent, EnergyDistribution)
def _divergence(p: Enumerable, q: Enumerable) -> PerState:
    """Return KL(p || q) of energy models, or of one and independent units."""
    model = p if isinstance(p, EnergyDistribution) else cast(EnergyDistribution, q)
    if p.event_shape != q.event_shape or p.support != q.support:
        raise ParameterError(
            "kl_divergence needs two distributions of the same values, got shapes "
            f"{p.event_shape} and {q.event_shape}, and supports {p.support} and "
            f"{q.support}"
        )
    batch = (1,) * max(len(p.batch_shape), len(q.batch_shape))
    values = model.enumerate_support(expand=False)
    values = values.reshape(len(values), *batch, *model.event_shape)

    def log_probs(d):
        if isinstance(d, EnergyDistribution):
            return d.log_probs(values)
        return jnp.asarray(d.log_prob(values))

    log_p = log_probs(p)
    return _expectation(log_p, log_p - log_probs(q))
