# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How far a step's coupled pairs run, from the meeting times of the steps before.

With k = m = lag = L, a pair that takes T sweeps to meet, beyond the lag, makes ``n = ceil(T / L) - 1``
corrections (none where T <= L) and costs L + 2 T sweeps. Each correction is a difference of two states that
are a lag apart, so that where the chains forget within a lag the estimate has ``1 + 2 E[n]`` times the
variance of independent draws. T hardly depends on L, so the times of past steps tell what an L would have
cost and brought.
"""

from jaxtyping import Real
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Scalar

Times = Real[Array, "pairs"]
#: Candidates for L: some 5 % apart, up to 2^30 sweeps.
_LENGTHS = np.unique(np.geomspace(1, 2**30, 430).round().astype(np.int32))


def quantile(times: Times, q: float) -> Scalar:
    """The L within which a share ``q`` of the pairs meets."""
    return jnp.quantile(times.astype(jnp.result_type(float)), q)


def for_variance(times: Times, target: float) -> Array:
    """The least L at which the predicted variance is ``target`` times that of independent draws.

    :param times: T of each pair.
    :param target: above 1.

    **Example**

    >>> import jax.numpy as jnp
    >>> for_variance(jnp.array([1, 1, 1, 100]), 1.5).item()  # 1 + 2/4 where the last pair corrects once
    51
    """
    lengths = jnp.asarray(_LENGTHS)
    predicted = jax.vmap(lambda length: inflation(times, length))(lengths)
    return lengths[jnp.argmax(predicted <= target)]


def for_cost(times: Times, target: float) -> Array:
    """The L at which a pair costs ``target`` sweeps on average, at least 1.

    :param times: T of each pair.
    :param target: sweeps of both chains a pair.

    **Example**

    >>> import jax.numpy as jnp
    >>> for_cost(jnp.array([2.0, 4.0]), 16).item()
    10.0
    """
    return jnp.maximum(1.0, target - 2 * times.astype(jnp.result_type(float)).mean())


def inflation(times: Times, length: Array) -> Scalar:
    """Predicted variance at k = m = lag = ``length`` over that of independent draws: 1 + 2 E[corrections]."""
    corrections = jnp.maximum(0, -(-times // length) - 1)
    return 1 + 2 * corrections.astype(jnp.result_type(float)).mean()
