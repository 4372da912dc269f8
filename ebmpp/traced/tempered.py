# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tempered transitions: a chain is heated step by step, cooled again, and taken where it came to, or not.

With L the log density of a block given everything else, the law at inverse temperature beta is
p_b = exp(b L). From the present state x_0 the chain goes up, x_i drawn by a sweep that leaves p_bi as it is,
b_0 = 1 > b_1 > ... > b_n, and down again, y_n = x_n, y_i-1 drawn by the same sweep backward, which is its
reversal under p_bi. Where it comes to, y_0, is taken with the probability

    min(1, exp(sum_i (b_i+1 - b_i) (L(x_i) - L(y_i)))),   i = 0, ..., n - 1

and then exp(L) is left as it is, exactly: whatever the betas are, however badly the sweeps mix, and whether
or not the hot laws normalise. Nothing is kept from one transition to the next, so that other sites may change
in between, which replicas of a parallel tempering could not allow: their law would be that of what has gone.

**References**

1. Neal (1996), *Sampling from multimodal distributions using tempered transitions*, section 3.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.errors import ArgumentError
from ebmpp.moves.tempering import check_betas

X = TypeVar("X")
#: ``(x, keys, beta, backward)`` to a state and a count.
Sweep = Callable[[X, Array, Any, bool], tuple[X, Array]]
_UP, _DOWN, _LAST = 1 << 20, 1 << 21, 1 << 22  # apart from what else the keys of a step are folded with


def check_tempering(name: str, betas: Any) -> tuple[float, ...] | None:
    """Inverse temperatures, checked; None stays None.

    :param name: of the argument.
    :raises ArgumentError: for what is not increasing from more than 0 to 1.

    **Example**

    >>> check_tempering("tempering", [0.5, 1])
    (0.5, 1.0)
    """
    if betas is None:
        return None
    wanted = "increasing inverse temperatures from more than 0 to 1, such as [0.3, 0.6, 1]"
    try:
        made = check_betas(betas)
    except ArgumentError:
        raise ArgumentError(f"{name} is {wanted}, not {checks.tell(betas)}") from None
    if made[0] <= 0:
        raise ArgumentError(f"{name} is {wanted}, and begins at {made[0]:g}")
    return made


def transition(
    betas: tuple[float, ...], density: Callable[[X], Array], sweep: Sweep, x: X, keys: Array
) -> tuple[X, Array, Array]:
    """One transition of a state, or of rows of states each.

    :param betas: from the hottest to 1.
    :param density: log density L of a state, or of each row.
    :param sweep: of all units at ``beta``; backward it must be its reversal.
    :param x: a pytree; with rows first where there are such.
    :param keys: words of this transition, ``(2,)``, or ``(rows, 2)``.
    :return: the state, whether it is where the chain came to, and the sum of the sweeps' counts.
    """
    path, rungs = jnp.asarray(betas[::-1]), len(betas) - 1

    def up(i: Array, carry: tuple) -> tuple:
        x, gain, count = carry
        gain = gain + (path[i + 1] - path[i]) * density(x)
        x, more = sweep(x, random.fold_in(keys, i, _UP), path[i + 1], False)
        return x, gain, count + more

    def down(number: Array, carry: tuple) -> tuple:
        x, gain, count = carry
        i = rungs - 1 - number
        x, more = sweep(x, random.fold_in(keys, i, _DOWN), path[i + 1], True)
        return x, gain - (path[i + 1] - path[i]) * density(x), count + more

    first = jnp.zeros_like(density(x))
    count = jnp.zeros(jax.eval_shape(lambda x: sweep(x, keys, path[1], False)[1], x).shape, jnp.int32)
    made = lax.fori_loop(0, rungs, up, (x, first, count))
    new, gain, count = lax.fori_loop(0, rungs, down, made)
    took = jnp.log(random.uniform(random.words(random.fold_in(keys, 0, _LAST), 1)[..., 0])) < gain
    spread = lambda v: took.reshape(took.shape + (1,) * (v.ndim - took.ndim))
    return jax.tree.map(lambda a, b: jnp.where(spread(a), a, b), new, x), took, count
