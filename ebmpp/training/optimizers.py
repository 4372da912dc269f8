# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Optax transformations for stochastic approximation: projections and averages of the params."""

from collections.abc import Callable, Mapping
import dataclasses
import hashlib
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import optax

from ebmpp.core import checks
from ebmpp.errors import ArgumentError

Params = Any
Bound = float | Mapping[str, Any]
WithArgs = optax.GradientTransformationExtraArgs


def shapes(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """A pytree's structure, and the shapes of its leaves."""
    return jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]


@dataclasses.dataclass(frozen=True)
class Comparable:
    """An optimiser that equals every other one with the same computation.

    ``optax.adam(0.01)`` called twice returns two unequal objects. With this key the second training run uses
    the program that the first one compiled.

    :param optimizer: an optax transformation.
    :param computation: a digest of what its update computes.
    """

    optimizer: optax.GradientTransformation = dataclasses.field(compare=False)
    computation: str

    @classmethod
    def of(cls, optimizer: optax.GradientTransformation, params: Params) -> "Comparable":
        """Trace and lower the update for params of these shapes."""
        like = lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
        params = jax.tree.map(like, params)
        state = jax.eval_shape(optimizer.init, params)
        lowered = jax.jit(optimizer.update).lower(params, state, params)
        # The text has the values of arrays that the update holds; the structure has the classes of its state.
        text = f"{lowered.as_text()} {jax.tree.structure(state)}"
        if "callback" in text:  # what the host computes is in no text
            text += f"{id(optimizer)}"
        return cls(optimizer, hashlib.sha256(text.encode()).hexdigest())


def check(optimizer: optax.GradientTransformation, params: Params) -> None:
    """That an optimiser makes updates like the params, from a gradient, its state and the params alone.

    Nothing is computed.

    :raises ArgumentError: for one that needs more (the loss, say), or whose updates or state are of other
        shapes: they would be broadcast.
    """
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), params)
    try:
        state = jax.eval_shape(optimizer.init, params)
        updates, moved = jax.eval_shape(optimizer.update, params, state, params)
    except Exception as error:
        raise ArgumentError(
            f"fit: the optimizer failed when called as optimizer.update(gradient, state, params): {error}. "
            "Stochastic gradients come without the value of a loss, so optimizers that need it or search "
            "along a line (optax.lbfgs, polyak_sgd, reduce_on_plateau) cannot be used; sgd and adam can"
        ) from error
    if shapes(updates) != shapes(params):
        raise ArgumentError(
            f"fit: the optimizer's updates have shapes {jax.tree.map(jnp.shape, updates)}, and the params "
            f"{jax.tree.map(jnp.shape, params)}: update one by one what the gradient holds"
        )
    types = [[a.dtype for a in jax.tree.leaves(tree)] for tree in (updates, params)]
    wrong = [(u, p) for u, p in zip(*types, strict=True) if u != p]
    if wrong:
        raise ArgumentError(
            f"fit: the optimizer's updates are {wrong[0][0]}, and the params {wrong[0][1]}: let it return "
            "updates of the gradient's dtype"
        )
    if shapes(moved) != shapes(state):
        raise ArgumentError(
            f"fit: the optimizer's state has shapes {shapes(moved)[1]} after an update, and "
            f"{shapes(state)[1]} before: it must keep its structure"
        )


def projected(optimizer: optax.GradientTransformation, projection: Callable[[Params], Params]) -> WithArgs:
    """An optimiser after each of whose updates the params are projected.

    An update is a difference that is added to the params, so they are in the set up to its rounding: leave a
    margin to a bound that must not be touched.

    :param optimizer: any optax transformation.
    :param projection: params to params: :func:`box`, :func:`ball`, or a function of ``optax.projections``.

    **References**

    1. Qiu, Zhang, Wang (2020), Algorithm 2: the projection onto a compact set in which the chains meet.

    **Example**

    >>> import jax, optax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> small = ebmpp.optimizers.projected(optax.sgd(1.0), ebmpp.optimizers.box(-0.01, 0.01))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.CD(), optimizer=small, progress_bar=False)
    >>> print(f"{abs(fit.params['v:h']).max():.4f}")
    0.0100
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def update(updates: Params, state: Any, params: Params | None = None, **extra: Any) -> tuple[Params, Any]:
        params = _needed("projected", params)
        updates, state = optimizer.update(updates, state, params, **extra)
        wanted = projection(optax.apply_updates(params, updates))
        return jax.tree.map(jnp.subtract, wanted, params), state

    return WithArgs(optimizer.init, update)


def box(low: Bound | None = None, high: Bound | None = None) -> Callable[[Params], Params]:
    """The projection onto ``low <= params <= high``, param by param.

    :param low: a number for all params, or a dict from the names of some factors to numbers or arrays like
        their params; None for no bound.
    :param high: likewise.
    :raises ArgumentError: for a low above high, where both are numbers.

    **Example**

    >>> import jax.numpy as jnp
    >>> box(high={"v:h": 1.0})({"v": jnp.array([5.0]), "v:h": jnp.array([5.0, -5.0])})["v:h"].tolist()
    [1.0, -5.0]
    """
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and not low <= high:
        raise ArgumentError(f"box: low is at most high; got low={low!r}, high={high!r}")

    def project(params: Params) -> Params:
        bounds = (_bound(low, params, -math.inf), _bound(high, params, math.inf))
        return optax.projections.projection_box(params, *bounds)

    return project


def _bound(given: Bound | None, params: Params, without: float) -> Params:
    """A bound for every leaf of the params."""
    if isinstance(given, Mapping):
        checks.names("factor in optimizers.box", given, params)
        given = {name: given.get(name, without) for name in params}
    return jax.tree.broadcast(without if given is None else given, params)


def ball(radius: float) -> Callable[[Params], Params]:
    """The projection onto the params of Euclidean norm at most ``radius``, all of them together.

    :param radius: above 0.
    :raises ArgumentError: for another radius.

    **Example**

    >>> import jax.numpy as jnp
    >>> ball(1.0)({"a": jnp.array([3.0]), "b": jnp.array([4.0])})["b"].tolist()
    [0.8]
    """
    radius = checks.number("ball: radius", radius, above=0)
    return lambda params: optax.projections.projection_l2_ball(params, radius)


class AveragedState(NamedTuple):
    """What :func:`averaged` carries."""

    inner: Any
    count: Array
    """Steps done."""
    mean: Params


def averaged(optimizer: optax.GradientTransformation, start: int = 0) -> WithArgs:
    """An optimiser that also keeps the mean of the params over its steps; the steps stay as they are.

    Around :func:`projected`, so that the mean is of the projected params.

    :param optimizer: any optax transformation.
    :param start: the first step, counted from 0, whose result enters the mean.
    :return: an optax transformation; see :func:`averaged_params`.
    :raises ArgumentError: for a negative start.

    **References**

    1. Polyak, Juditsky (1992), *Acceleration of stochastic approximation by averaging*.
    2. Qiu, Zhang, Wang (2020), Algorithm 2, which averages its iterates.

    **Example**

    >>> import jax, optax, ebmpp
    >>> from ebmpp.training.optimizers import averaged, averaged_params
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.CD(), optimizer=averaged(optax.sgd(0.1), start=2),
    ...                 progress_bar=False)
    >>> averaged_params(fit.optimizer_state)["v:h"].shape
    (9, 4)
    """
    start = checks.count("averaged: start", start, least=0)
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Params) -> AveragedState:
        return AveragedState(optimizer.init(params), jnp.zeros((), jnp.int32), params)

    def update(
        updates: Params, state: Any, params: Params | None = None, **extra: Any
    ) -> tuple[Params, AveragedState]:
        params = _needed("averaged", params)
        updates, inner = optimizer.update(updates, state.inner, params, **extra)
        count = state.count + 1
        new = optax.apply_updates(params, updates)
        # Until the mean begins, it is the params.
        mean = optax.incremental_update(new, state.mean, 1 / jnp.maximum(1, count - start))
        return updates, AveragedState(inner, count, mean)

    return WithArgs(init, update)


def averaged_params(optimizer_state: Any) -> Params:
    """The mean that :func:`averaged` keeps; before its start, the last params.

    :param optimizer_state: of an optimiser that holds one :func:`averaged`, such as ``Fit.optimizer_state``.
    :raises ArgumentError: for none, or more than one.
    """
    mine = lambda s: isinstance(s, AveragedState)
    found = [s for s in jax.tree.leaves(optimizer_state, is_leaf=mine) if mine(s)]
    if len(found) != 1:
        raise ArgumentError(f"averaged_params: the state holds {len(found)} of averaged(...), not one")
    return found[0].mean


def _needed(who: str, params: Params | None) -> Params:
    if params is None:
        raise ArgumentError(f"{who}: update needs the params: optimizer.update(gradient, state, params)")
    return params
