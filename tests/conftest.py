# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Settings that must stand before jax starts; shared helpers live in helpers.py."""

import os

# Set the variable yourself to run the tests on an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight host devices, for sharding and chain_method="parallel"; one device stays the default.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
os.environ.setdefault("MPLBACKEND", "agg")

from hypothesis import settings  # noqa: E402 - after the environment

# No deadline: an example that compiles takes seconds, the next one microseconds.
settings.register_profile("ebmpp", parent=settings(), deadline=None)
settings.load_profile("ebmpp")
