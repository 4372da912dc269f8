# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The backend that functions are compiled for; tests replace :func:`accelerated`."""

import jax


def accelerated() -> bool:
    """Return True if the default device is not a CPU."""
    return jax.default_backend() != "cpu"
