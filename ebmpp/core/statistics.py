# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a mean of independent values tells of the mean that they are drawn from."""

import math

from jaxtyping import Float
import numpy as np


def standard_error(values: Float[np.ndarray, "*means values"]) -> Float[np.ndarray, "*means"]:
    """Of means over the last axis; nan of one value alone.

    **Example**

    >>> float(standard_error(np.array([1.0, 3.0])))
    1.0
    """
    count = values.shape[-1]
    if count < 2:
        return np.full(values.shape[:-1], np.nan)
    return np.asarray(values.std(-1, ddof=1) / math.sqrt(count))
