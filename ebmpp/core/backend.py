# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What programs are compiled for: asked here alone, where another device's can be asked for without one."""

import jax
from jax.extend.backend import get_backend


def accelerated() -> bool:
    """Whether programs are for something else than a CPU."""
    return jax.default_backend() != "cpu"


def cuda() -> bool:
    """Whether they are for a GPU of NVIDIA's."""
    return accelerated() and "cuda" in get_backend().platform_version.lower()
