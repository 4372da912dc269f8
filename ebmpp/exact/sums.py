# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exact sums for small models: log Z, log-likelihood, moments and their gradients.

One independent set of blocks is summed out in closed form, and the joint states of the
others are enumerated; see :mod:`ebmpp.exact.enumeration`.
"""

from functools import lru_cache, partial
from typing import Any

from jaxtyping import Bool, Float, Real
import numpy as np

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Params,
    PerRow,
    PerState,
    Rows,
    Scalar,
    StateLike,
    checks,
    is_concrete,
    num_rows,
    select,
    sharding,
)
from ebmpp.errors import DomainError
from ebmpp.exact import enumeration, shifted
from ebmpp.exact.enumeration import Plan
from ebmpp.graph import Bias, FactorGraph, energy, tables

_log_partition = jax.jit(enumeration.log_sum_states, static_argnames=("graph", "plan"))


@partial(jax.jit, static_argnames=("graph", "clamped", "free"))
def _log_likelihood(
    graph: FactorGraph,
    params: Params,
    rows: Rows,
    known: Rows,
    clamped: Plan,
    free: Plan,
) -> PerRow:
    chunk = enumeration.states_per_chunk(graph, clamped)
    batch_size = max(1, min(num_rows(rows), enumeration.CHUNK // chunk))

    def log_sum(row):
        x, known = row
        return enumeration.log_sum_states(graph, params, x, clamped, known)

    sums = jax.lax.map(log_sum, (dict(rows), dict(known)), batch_size=batch_size)
    return sums - enumeration.log_sum_states(graph, params, {}, free)


@partial(jax.jit, static_argnums=(0, 4, 5))
def _gradient(graph: FactorGraph, params: Params, *rest: Any) -> Params:
    return jax.grad(lambda p: _log_likelihood(graph, p, *rest).mean())(params)


# a declaration probes its factors, which takes tenths of a second
@lru_cache(maxsize=32)
def _with_sources(graph: FactorGraph) -> FactorGraph:
    """Return the model with another bias on each block.

    Derivatives of log Z in these are the moments.
    """
    sources = [Bias(b, name=_source(b)) for b in graph.families]
    with sharding.eager():  # the probe needs values, even if called under jit
        return FactorGraph(graph.visible, graph.latent, (*graph.factors, *sources))


def _source(block: str) -> str:
    return f"<source of {block}>"


@partial(jax.jit, static_argnames=("sourced", "plan", "order"))
def _derivatives(
    sourced: FactorGraph, params: Params, plan: Plan, order: int
) -> Blocks:
    """Return the derivatives of log Z in the sources at zero, of order 2 in each source alone."""
    flat, unravel = ravel_pytree(energy.zero_statistics(sourced, sourced.families))

    def tilted(s):
        return {**params, **{_source(b): value for b, value in unravel(s).items()}}

    first = jax.grad(lambda s: enumeration.log_sum_states(sourced, tilted(s), {}, plan))
    if order == 1:
        return unravel(first(flat))

    def second(i):
        return jax.jvp(first, (flat,), (jnp.zeros_like(flat).at[i].set(1),))[1][i]

    return unravel(jax.lax.map(second, jnp.arange(len(flat))))


def _cumulants(graph: FactorGraph, params: Params, order: int) -> Blocks:
    _check(graph, params)
    plan = enumeration.make_plan(graph)
    result = _derivatives(_with_sources(graph), params, plan, order)
    result = _checked(result, params, plan)
    return select(result, graph.families)  # jit sorts a dict


@partial(jax.jit, static_argnames=("graph", "plan"))
def _table(graph: FactorGraph, params: Params, plan: Plan) -> tuple[Blocks, Array]:
    index = jnp.arange(enumeration.num_states(graph, plan.enumerated), dtype=jnp.int32)
    term = partial(enumeration.log_term, graph, params, {}, plan)
    chunk = enumeration.states_per_chunk(graph, plan)
    log_weight = jax.lax.map(term, index, batch_size=chunk)
    return enumeration.list_states(graph, plan.enumerated), jax.nn.softmax(log_weight)


def _checked(value: Any, params: Params, plan: Plan) -> Any:
    """Return a result unless it is known and overflows."""
    leaves = jax.tree.leaves(value)
    if not is_concrete(leaves):
        return value
    if all((np.asarray(leaf) < np.inf).all() for leaf in leaves):
        return value
    if plan.integrated:
        raise DomainError(
            "the model does not normalise: for some states of the blocks "
            f"{list(plan.enumerated)} the joint precision of the Gaussian blocks "
            f"{list(plan.integrated)} is not positive definite. Weaken the factors "
            "between them."
        )
    sizes = {
        name: float(np.abs(ravel_pytree(param)[0]).max(initial=0))
        for name, param in params.items()
    }
    name = max(sizes, key=sizes.__getitem__)
    raise DomainError(
        f"factor {name!r}: params must give every state an energy that "
        f"{jnp.result_type(float)} holds, got entries of {sizes[name]:.3g}. Scale the "
        "params down."
    )


def log_partition(graph: FactorGraph, params: Params) -> Scalar:
    """Return log Z, exactly.

    Works under ``jit`` (with ``graph`` closed over or static), ``vmap`` and ``grad``;
    the gradient is minus the expected gradient of the energy.

    :raises IntractableError: more than 2^25 joint states to enumerate, or interacting
        blocks of infinitely many values that are not all Gaussian.
    :raises ParameterError: params that do not fit, do not normalise or overflow (a
        ``DomainError``).

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(5), h=ebmpp.Bernoulli(3))
    >>> zero = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> print(f"{ebmpp.exact.log_partition(rbm, zero):.4f}")  # 8 log 2
    5.5452

    **References**

    1. Salakhutdinov, Murray (2008), *On the quantitative analysis of deep belief
       networks*, section 3.
    """
    _check(graph, params)
    plan = enumeration.make_plan(graph)
    return _checked(_log_partition(graph, params, {}, plan), params, plan)


def _check(graph: FactorGraph, params: Params) -> None:
    checks.instance("exact: graph", graph, FactorGraph)
    graph.check(params)
    if not graph.has_zeros:
        return
    value = _log_partition(graph, params, {}, enumeration.make_plan(graph))
    if is_concrete(value) and np.isinf(energy.with_infinities(graph, value)):
        names = [f.name for f in graph.factors if f.has_zeros]
        raise DomainError(
            f"factors {names}: zeros must leave a state of positive probability, got "
            "none. Check them against each other."
        )


def _prepare(
    graph: FactorGraph, params: Params, rows: StateLike
) -> tuple[tables.Table, Plan, Plan]:
    _check(graph, params)
    table = tables.as_data(graph, rows, missing=None)
    lacking = [(b, _most_unknown(k)) for b, k in table.known.items()]
    complete = [b for b in graph.visible if b not in table.known]
    clamped = enumeration.make_plan(graph, complete, lacking)
    return table, clamped, enumeration.make_plan(graph)


def _most_unknown(known: Bool[Array, "rows ..."]) -> int:
    """Return the largest number of unknown units of a row; of all units where it is traced."""
    rows = known.reshape(len(known), -1)
    if not is_concrete(known):
        return rows.shape[1]
    return int((~np.asarray(rows)).sum(1).max())


def log_likelihood(graph: FactorGraph, params: Params, rows: StateLike) -> PerState:
    """Return log p(v) of each row, exactly.

    :param rows: the visible blocks, each of shape ``(*batch, *shape)``; a bare array
        stands for the only visible block. In an :class:`~ebmpp.Observed` block unknown
        entries are summed out.
    :return: shape ``(*batch,)``; -inf for a row of probability zero.
    :raises IntractableError: as :func:`log_partition` does, and when a row's latents
        have too many states.
    :raises StateError: rows of a wrong name, shape or value.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> zero = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> print(ebmpp.exact.log_likelihood(rbm, zero, jax.numpy.zeros((2, 4))))  # -4 log 2
    [-2.7725887 -2.7725887]
    """
    table, clamped, free = _prepare(graph, params, rows)
    model = shifted.shift_origin(graph, params)
    x = model.shift(table.rows)
    value = _log_likelihood(graph, model.params, x, table.known, clamped, free)
    value = energy.with_infinities(graph, value)
    return _checked(value.reshape(table.batch), params, free)


def grad_log_likelihood(graph: FactorGraph, params: Params, rows: StateLike) -> Params:
    """Return the gradient of the mean of :func:`~ebmpp.exact.log_likelihood` in ``params``.

    :param rows: as for :func:`~ebmpp.exact.log_likelihood`.
    :return: a pytree like ``params``.
    :raises IntractableError: as :func:`~ebmpp.exact.log_likelihood` does.
    :raises StateError: as well for a row of probability zero.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(2), h=ebmpp.Bernoulli(3))
    >>> zero = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> ebmpp.exact.grad_log_likelihood(rbm, zero, jax.numpy.array([1.0, 0.0]))["v"].tolist()
    [0.5, -0.5]
    """
    table, clamped, free = _prepare(graph, params, rows)
    if graph.has_zeros:
        tables.check_possible(log_likelihood(graph, params, rows))

    # integers have no gradient
    real = jax.tree.map(lambda p: jnp.asarray(p, jnp.result_type(p, float)), params)
    value = _gradient(graph, real, table.rows, table.known, clamped, free)
    return _checked(value, params, free)


def moments(graph: FactorGraph, params: Params) -> dict[str, Float[Array, "..."]]:
    """Return E[t_b] of every block under the model, exactly.

    It is the derivative of log Z in a linear source.

    :return: a dict keyed by block; shapes ``shape + stat_shape``.
    :raises IntractableError: as :func:`log_partition` does.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(2), h=ebmpp.Bernoulli(3))
    >>> zero = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> ebmpp.exact.moments(rbm, zero)["h"].tolist()
    [0.5, 0.5, 0.5]
    """
    return _cumulants(graph, params, 1)


def variances(graph: FactorGraph, params: Params) -> dict[str, Float[Array, "..."]]:
    """Return Var[t_b] of every block under the model, exactly.

    It is the second derivative of log Z in a linear source, and costs as many sums as
    there are statistics.

    :return: a dict keyed by block; shapes ``shape + stat_shape``.
    :raises IntractableError: as :func:`log_partition` does.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(2), h=ebmpp.Bernoulli(3))
    >>> zero = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> ebmpp.exact.variances(rbm, zero)["v"].tolist()
    [0.25, 0.25]
    """
    return _cumulants(graph, params, 2)


def probabilities(
    graph: FactorGraph, params: Params
) -> tuple[dict[str, Real[Array, "states ..."]], Float[Array, "states"]]:
    """Return every joint state and its probability.

    :param graph: a declaration whose blocks all take finitely many values.
    :return: the S states, each block of shape ``(S, *shape)``, with the last unit
        varying fastest; and their probabilities, shape ``(S,)``.
    :raises IntractableError: more than 2^20 states, or a block of infinitely many.

    **Example**

    >>> import jax, ebmpp
    >>> pair = ebmpp.layered(a=ebmpp.Bernoulli(1), b=ebmpp.Bernoulli(1))
    >>> params = {"a": jax.numpy.zeros(1), "b": jax.numpy.zeros(1), "a:b": jax.numpy.ones((1, 1))}
    >>> states, probs = ebmpp.exact.probabilities(pair, params)
    >>> print(probs.round(4))
    [0.1749 0.1749 0.1749 0.4754]
    """
    _check(graph, params)
    plan = Plan(tuple(graph.families))
    enumeration.refuse_many(graph, plan, enumeration.MOST_LISTED)
    listed, probs = _table(graph, params, plan)
    return select(listed, graph.families), _checked(probs, params, plan)
