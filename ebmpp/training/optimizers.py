# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Optax transformations for stochastic approximation: projections and averages of the params."""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, NamedTuple

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
from jax.extend import core
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from ebmpp.core import Params, checkpoints, checks
from ebmpp.errors import ArgumentError
from ebmpp.estimators.base import shapes

#: A bound of all params, or of some factors' params.
Limit = float | Mapping[str, ArrayLike]

#: Operations that XLA does not join with a factor after them, unless of constants.
_PLAIN = frozenset("add sub mul div sqrt rsqrt integer_pow select_n".split())
_PASSED = "passed, as optimizer.update(gradient, state, params)"


def as_transformation(name: str, optimizer: object) -> optax.GradientTransformation:
    """Return an optax transformation; raise ArgumentError for other values."""
    if isinstance(optimizer, optax.MultiSteps):
        return optimizer.gradient_transformation()
    return checks.instance(
        name,
        optimizer,
        optax.GradientTransformation,
        "an optax transformation such as optax.sgd(0.1)",
    )


@dataclasses.dataclass(frozen=True)
class Comparable:
    """Optimiser that equals every other one with the same computation, but for its numbers.

    Two ``optax.adam(0.01)`` are unequal, as their functions are.

    :param update: ``update(numbers, gradient, state, params)``.
    :param numbers: rates, which are arguments of a program.
    :param digest: digest of the update's code and of the numbers.
    :param code: the code alone.
    :param host: an optimiser that calls functions on the host, whose code is unknown.
    """

    update: Callable[..., Any] = dataclasses.field(compare=False)
    numbers: list[np.ndarray] = dataclasses.field(compare=False)
    digest: str = dataclasses.field(compare=False)
    code: str
    host: optax.GradientTransformation | None = None

    @classmethod
    def for_params(
        cls, optimizer: optax.GradientTransformation, params: Params
    ) -> "Comparable":
        """Lower the update for params of these shapes.

        :raises ArgumentError: for an optimiser that needs more (the loss, say), or
            changes shapes or dtypes, or was made in a caller's transformation.
        """
        params = jax.eval_shape(lambda: params)
        try:
            state = jax.eval_shape(optimizer.init, params)
            trace = jax.make_jaxpr(optimizer.update, return_shape=True)
            closed, shapes = trace(params, state, params)
        except Exception as error:
            raise ArgumentError(
                "fit: optimizer must work as optimizer.update(gradient, state, "
                f"params), got {error}. Use sgd or adam: optax.lbfgs and "
                "reduce_on_plateau need the value of a loss."
            ) from error

        checks.on_host("fit", closed.consts)
        outputs = _outline(shapes)
        expected = _outline((params, state))
        if outputs != expected:
            raise checks.error(
                "fit: updates and state of optimizer",
                f"of the shapes and dtypes that it was passed, {expected}",
                outputs,
            )
        program, numbers = _with_rates(closed)

        def update(*inputs):
            leaves = core.jaxpr_as_fun(program)(*jax.tree.leaves(inputs))
            return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

        lowered = jax.jit(update).lower(numbers, params, state, params)
        # the structure has the state's classes, which the code has not
        text = f"{checkpoints.code(lowered)} {jax.tree.structure(state)}"
        host = optimizer if "callback" in text else None
        digest = checkpoints.text_digest(f"{text} {numbers}")
        return cls(update, numbers, digest, text, host)


def _with_rates(closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[np.ndarray]]:
    """Turn constant factors of a program's outputs into its first arguments.

    A factor after an operation with constants stays, since XLA may join these: results
    are bitwise the same.

    :return: the program, and the values of the arguments.
    """
    jaxpr = closed.jaxpr
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    variables = [*jaxpr.invars, *makers]
    used = [v for eqn in jaxpr.eqns for v in eqn.invars]
    rates = {}
    equations = []
    for eqn in jaxpr.eqns:
        factor = eqn.invars[0]
        if eqn.primitive.name == "mul" and isinstance(factor, core.Literal):
            other = eqn.invars[1]
            before = makers.get(other)
            is_plain = before is None or (
                before.primitive.name in _PLAIN
                and all(v in variables for v in before.invars)
            )
            if is_plain and eqn.outvars[0] not in used:
                rate = core.Var(factor.aval)
                rates[rate] = np.asarray(factor.val)
                eqn = eqn.replace(invars=[rate, other])
        equations.append(eqn)
    jaxpr = jaxpr.replace(invars=[*rates, *jaxpr.invars], eqns=equations)
    return closed.replace(jaxpr=jaxpr), list(rates.values())


def _outline(tree: PyTree) -> tuple[list[str], object]:
    """Return the dtypes and shapes of a pytree's leaves, and its structure."""
    leaves, structure = jax.tree.flatten(tree)
    return [f"{a.dtype}{list(a.shape)}" for a in leaves], structure


def carried(before: PyTree, fresh: PyTree) -> PyTree:
    """Return an optimiser's first state, with the parts of another optimiser's state that fit.

    Parts of ``optax.chain`` are compared separately. ``optax.inject_hyperparams`` gets
    the new values.
    """
    if type(before) is type(fresh) and hasattr(fresh, "hyperparams"):
        return fresh._replace(
            count=before.count,
            inner_state=carried(before.inner_state, fresh.inner_state),
        )
    if type(before) is type(fresh) is tuple and len(before) == len(fresh):
        return tuple(map(carried, before, fresh))
    return before if shapes(before) == shapes(fresh) else fresh


def projected(
    optimizer: optax.GradientTransformation, projection: Callable[[Params], Params]
) -> optax.GradientTransformation:
    """Return an optimiser that projects the params after each update, up to the rounding of a sum.

    :param optimizer: any optax transformation.
    :param projection: params to params: :func:`box`, or a function of
        ``optax.projections``.

    **References**

    1. Qiu, Zhang, Wang (2020), Algorithm 2: the projection onto a compact set in which
       the chains meet.

    **Example**

    >>> import jax, optax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> small = ebmpp.optimizers.projected(optax.sgd(1.0), ebmpp.optimizers.box(-0.01, 0.01))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.CD(), optimizer=small, progress_bar=False)
    >>> print(f"{abs(fit.params['v:h']).max():.4f}")
    0.0100
    """

    def project(updates, params):
        if params is None:
            raise checks.error("projected: params", _PASSED, None)
        free: PyTree = optax.apply_updates(params, updates)
        return jax.tree.map(jnp.subtract, projection(free), params)

    optimizer = as_transformation("projected: optimizer", optimizer)
    return optax.chain(optimizer, optax.stateless(project))


def box(
    low: Limit | None = None, high: Limit | None = None
) -> Callable[[Params], Params]:
    """Return the projection onto ``low <= params <= high``, elementwise.

    :param low: a number for all params, or a dict from the names of some factors to
        numbers or arrays like their params; None for no bound. So is ``high``.
    :raises ArgumentError: for a number ``low`` above a number ``high``, or an unknown
        factor.

    **Example**

    >>> import jax.numpy as jnp
    >>> params = {"v": jnp.array([5.0]), "v:h": jnp.array([5.0, -5.0])}
    >>> box(high={"v:h": 1.0})(params)["v:h"].tolist()
    [1.0, -5.0]
    """
    are_numbers = isinstance(low, int | float) and isinstance(high, int | float)
    if are_numbers and not low <= high:
        raise checks.error("box: low", f"at most high, {high}", low)

    def project(params):
        bounds = (_bound(low, params, -math.inf), _bound(high, params, math.inf))
        return optax.projections.projection_box(params, *bounds)

    return project


def _bound(bound: Limit | None, params: Params, default: float) -> Params:
    """Return a bound for every leaf of the params."""
    if isinstance(bound, Mapping):
        checks.names("factor in optimizers.box", bound, params)
        bound = {name: bound.get(name, default) for name in params}
    return jax.tree.broadcast(default if bound is None else bound, params)


class AveragedState(NamedTuple):
    """State of :func:`averaged`, after ``count`` steps."""

    count: Array
    mean: Params


def averaged(
    optimizer: optax.GradientTransformation, from_step: int = 0
) -> optax.GradientTransformation:
    """Return an optimiser that also keeps the mean of the params over its steps.

    :func:`averaged_params` returns the mean. Put it around :func:`projected`, so that
    the mean is of the projected params.

    :param optimizer: any optax transformation, whose steps do not change.
    :param from_step: first step, counted from 0, whose result enters the mean.
    :raises ArgumentError: for a negative ``from_step``.

    **References**

    1. Polyak, Juditsky (1992), *Acceleration of stochastic approximation by averaging*.
    2. Qiu, Zhang, Wang (2020), Algorithm 2, which averages its iterates.

    **Example**

    >>> import jax, optax, ebmpp
    >>> from ebmpp.training.optimizers import averaged, averaged_params
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.CD(), optimizer=averaged(optax.sgd(0.1), from_step=2),
    ...                 progress_bar=False)
    >>> averaged_params(fit.optimizer_state)["v:h"].shape
    (9, 4)
    """
    from_step = checks.count("averaged: from_step", from_step, least=0)
    optimizer = as_transformation("averaged: optimizer", optimizer)

    def init(params):
        return AveragedState(jnp.int32(0), params)

    def update(updates, state, params=None):
        if params is None:
            raise checks.error("averaged: params", _PASSED, None)
        count = state.count + 1
        new: PyTree = optax.apply_updates(params, updates)
        # before from_step the mean equals the params
        rate = 1 / jnp.maximum(1, count - from_step)
        mean: PyTree = optax.incremental_update(new, state.mean, rate)
        return updates, AveragedState(count, mean)

    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def averaged_params(optimizer_state: PyTree) -> Params:
    """Return the mean that :func:`averaged` keeps; before its first step, the last params.

    :param optimizer_state: state of an optimiser with one :func:`averaged`, such as
        ``FitResult.optimizer_state``.
    :raises ArgumentError: for none, or more than one.
    """
    states = optax.tree.get_all_with_path(optimizer_state, AveragedState.__name__)
    if len(states) != 1:
        raise checks.error(
            "averaged_params: optimizer_state",
            "the state of an optimiser with one averaged(...)",
            f"{len(states)} of them",
        )
    return states[0][1].mean
