# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A step of training, compiled: alone, and several in one program."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxtyping import Float, Integer
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from ebmpp.core import random, sharding
from ebmpp.core.programs import compiled
from ebmpp.core.types import Key, Params, Rows
from ebmpp.errors import ArgumentError
from ebmpp.estimators import Batch, Estimator
from ebmpp.graph import FactorGraph
from ebmpp.training import optimizers
from ebmpp.training.batches import Selection

_ROOM, _BYTES = 50, 2**22  # of the batches that one program takes, which are copied side by side


class State(NamedTuple):
    """Everything a step changes."""

    params: Params
    optimizer: Any
    estimator: Any
    ok: Array
    """False from the first step that was not finite."""


@compiled(statics=2, quick=lambda graph, estimator, *_, **__: estimator.quick(graph))
def estimate_step(
    graph: FactorGraph,
    estimator: Estimator,
    params: Params,
    state: Any,
    rows: Rows,
    index: Integer[Array, "batch"] | None,
    key: Key,
    step: Array,
    weights: Float[Array, "batch"] | None = None,
    known: Rows = MappingProxyType({}),
) -> tuple[Params, Any, dict[str, Array]]:
    """One gradient estimate from the rows ``index``; from all of them where that is None.

    :param weights: of the rows that are taken, of mean 1 over the data; None for equal ones.
    :param known: of the blocks of ``rows`` that lack units, which are known.
    :raises ArgumentError: for an estimator whose gradient is not like the params.
    """
    take = lambda x: x if index is None else {b: v[index] for b, v in x.items()}
    batch = Batch.of(take(rows), take(known))
    if weights is not None:
        batch = batch._replace(weights=weights * batch.weights)
    batch = sharding.rows(batch)
    made = estimator.estimate(graph, params, state, batch, random.fold_in(key, step, 2))
    if optimizers.shapes(made.gradient) != optimizers.shapes(params):
        raise ArgumentError(
            f"{type(estimator).__name__}.estimate returned a gradient of shapes "
            f"{jax.tree.map(jnp.shape, made.gradient)}, and the params have {jax.tree.map(jnp.shape, params)}"
        )
    return made.gradient, made.state, made.metrics


@compiled(statics=1)
def _update(
    optimizer: optax.GradientTransformation, gradient: Params, params: Params, state: Any, ok: Array
) -> tuple[Params, Any, Array, Array]:
    updates, moved = optimizer.update(gradient, state, params)
    proposed = optax.apply_updates(params, updates)
    # Zero times what is not finite is nan: a sum is one pass, where asking number by number takes several.
    nothing = jax.tree.map(lambda g, p: jnp.sum(0 * g + 0 * p), gradient, proposed)
    ok = ok & jnp.isfinite(jnp.stack(jax.tree.leaves(nothing))).all()
    keep = lambda new, old: jnp.where(ok, new, old)
    params, state = jax.tree.map(keep, (proposed, moved), (params, state))
    return params, state, ok, optax.tree.norm(gradient)


def one_step(
    graph: FactorGraph,
    estimator: Estimator,
    optimizer: optax.GradientTransformation,
    key: Key,
    state: State,
    step: ArrayLike,
    given: Selection,
) -> tuple[State, dict[str, Array]]:
    """One gradient and one update; after a failure the state stays as it was."""
    rows, index, weights, known = given
    told = (rows, index, key, step, weights, known)
    gradient, carried, metrics = estimate_step(graph, estimator, state.params, state.estimator, *told)
    # Two programs: trying another optimiser does not compile the estimator again.
    params, moved, ok, norm = _update(optimizer, gradient, state.params, state.optimizer, state.ok)
    return State(params, moved, carried, ok), {"gradient_norm": norm, "ok": ok, **metrics}


def room(given: Selection) -> int:
    """How many batches like this one go into one program: 1 where their copies would take what it saves."""
    together = _ROOM * sum(leaf.nbytes for leaf in jax.tree.leaves(given))
    return _ROOM if given.index is not None or together <= _BYTES else 1


def packed(chosen: Sequence[Selection], size: int) -> Selection | tuple[Selection, ...]:
    """Batches for :func:`several_steps`, filled up to ``size``, so that one program does for fewer."""
    filled = (*chosen, *[chosen[-1]] * (size - len(chosen)))
    if chosen[0].index is None:
        return filled
    stack = lambda *each: np.stack(each)
    index, weights = jax.tree.map(stack, *((c.index, c.weights) for c in filled))
    return chosen[0]._replace(index=index, weights=weights)


@compiled(statics=3)
def several_steps(
    graph: FactorGraph,
    estimator: Estimator,
    optimizer: optax.GradientTransformation,
    key: Key,
    state: State,
    first: Array,
    count: Array,
    given: Selection | tuple[Selection, ...],
) -> tuple[State, dict[str, Array]]:
    """:func:`one_step` after the other in one program: small steps cost no more than their sums.

    How many is an argument, so what a step makes does not depend on how many go together.

    :param first: the number of the first step.
    :param count: how many, at least 1.
    :param given: of :func:`packed`.
    :return: the state after them, and metrics with a leading axis of steps, of which ``count`` are made.
    """
    if isinstance(given, Selection):
        given, own = given, given._replace(rows={}, known={})
    else:
        given = own = jax.tree.map(lambda *each: jnp.stack(each), *given)
    size = len(next(iter(jax.tree.leaves(own))))

    def one(i: Array | int, state: State) -> tuple[State, dict[str, Array]]:
        at = jax.tree.map(lambda a: a[i], own)
        chosen = at if given is own else at._replace(rows=given.rows, known=given.known)
        return one_step(graph, estimator, optimizer, key, state, first + jnp.asarray(i, first.dtype), chosen)

    def next_one(i: Array, carry: tuple[State, dict[str, Array]]) -> tuple[State, dict[str, Array]]:
        state, told = one(i, carry[0])
        return state, jax.tree.map(lambda column, value: column.at[i].set(value), carry[1], told)

    like = jax.eval_shape(one, 0, state)[1]
    table = jax.tree.map(lambda a: jnp.zeros((size, *a.shape), a.dtype), like)
    return lax.fori_loop(0, count, next_one, (state, table))
