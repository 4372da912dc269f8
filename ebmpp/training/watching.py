# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a monitor is: a compiled function of the params, with arrays that it reads."""

from collections.abc import Callable
import dataclasses
from functools import partial
from typing import Any

import jax
from jax import Array

from ebmpp.core.types import Params, Rows
from ebmpp.graph import FactorGraph, tables

#: A function of the params to a scalar.
Watch = Callable[..., Array | float]


@dataclasses.dataclass(frozen=True, eq=False)  # known by itself: arrays have no hash
class Monitor:
    """A function of the params that is compiled, with arrays that it reads.

    A plain function of the params is a monitor too; this adds the arrays, and the estimator's state, or takes
    a function as it is: ``Monitor(fn, compiled=False)``.

    :param fn: called with the params, then the estimator's state if it ``takes_state``, then the arguments.
        Hashable: one that compares equal to another is not compiled again.
    :param arguments: arrays, or pytrees of them.
    :param takes_state: whether it takes what the estimator of the run carries (persistent chains, say).
    :param compiled: False for one that works on the host and cannot be traced.

    **Example**

    >>> import jax.numpy as jnp
    >>> distance = Monitor(lambda params, truth: abs(params["v"] - truth).max(), (jnp.ones(2),))
    >>> float(distance({"v": jnp.array([1.0, 3.0])}))
    2.0
    """

    fn: Watch
    arguments: tuple[Any, ...] = ()
    takes_state: bool = False
    compiled: bool = True

    def __call__(self, params: Params, estimator_state: Any = None) -> Array | float:
        """The value."""
        state = (estimator_state,) if self.takes_state else ()
        given = (params, *state, *self.arguments)
        return _evaluate(self.fn, *given) if self.compiled else self.fn(*given)


@partial(jax.jit, static_argnums=0)
def _evaluate(fn: Watch, *given: Any) -> Array | float:
    return fn(*given)


@dataclasses.dataclass(frozen=True)
class Of:
    """A function with values that do not change, known by both."""

    fn: Watch
    fixed: tuple[Any, ...]

    def __call__(self, *given: Any) -> Array | float:
        return self.fn(*self.fixed, *given)


def rows_of(graph: FactorGraph, data: Any, missing: str | None = "this monitor") -> Rows:
    """Checked rows of the visible blocks."""
    return tables.check_rows(graph, data, missing)[0]
