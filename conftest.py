# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Settings that must stand before jax starts, for tests and for examples in docstrings."""

from collections.abc import Iterator
import contextlib
import ctypes
import doctest
import gc
import importlib
import inspect
import os
from pathlib import Path
import warnings

# Set the variable yourself to run the tests on an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight host devices, for sharding and chain_method="parallel"; one device stays the default.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
os.environ.setdefault("MPLBACKEND", "agg")

from hypothesis import settings
from jaxtyping import install_import_hook
import pytest

import jax

from tests import dear

# Whose functions check the shapes of what they are called with; before ebmpp is imported. A check adds a
# frame to the stack, so files that warn at a line of their caller stay out.
_SAMPLING = ("accumulators", "engine", "past", "perfect", "random_cluster", "search", "slots")
_ROOMS = ("core.random", "families", "graph", "moves", "estimators", "training")
_CHECKED = [*_ROOMS, *(f"sampling.{name}" for name in _SAMPLING)]
install_import_hook([f"ebmpp.{name}" for name in _CHECKED], "shapes.check")

# One loop to compile in place of two, 4.0 s of a processor in place of 6.6. What pairs make does not depend
# on it; tests/sampling/test_engine.py asks for more, and tutorials, in processes of their own, have all.
importlib.import_module("ebmpp.sampling.slots")._SLOTS = 8  # imported now: what is hooked is to be checked

# ArviZ 0.23 announces ArviZ 1.0 once a day, and notes in a file of the user's that it did. Two workers that
# do so at once stop each other, so the process that starts them does it first.
if "PYTEST_XDIST_WORKER" not in os.environ:
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("arviz")

# Examples of such a function are those of the one that is wrapped.
_from_module = doctest.DocTestFinder._from_module
doctest.DocTestFinder._from_module = lambda self, module, made: _from_module(
    self, module, inspect.unwrap(made) if callable(made) else made
)

# No deadline: an example that compiles takes seconds, the next one microseconds.
settings.register_profile("ebmpp", parent=settings(), deadline=None)
settings.load_profile("ebmpp")


@pytest.hookimpl(tryfirst=True)  # before what is marked slow is left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tutorials first: one file and the longest, which a single worker would else be left alone with.

    :raises pytest.UsageError: where tests/dear.txt names a test that is not there.
    """
    items.sort(key=lambda item: item.get_closest_marker("notebook") is None)
    left = dear.names()
    for item in items:
        if item.nodeid in left:
            item.add_marker(pytest.mark.slow)
    chosen = config.option.keyword or config.getoption("lf", False) or any("::" in a for a in config.args)
    if not chosen:
        files, found = ({item.nodeid.split("::")[0] for item in items}, {item.nodeid for item in items})
        gone = [name for name in left if name.split("::")[0] in files and name not in found]
        if gone:
            raise pytest.UsageError(f"tests/dear.txt names what is not there: take {gone} out")


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no later collection looks through them again, 0.3 s each time."""
    gc.collect()
    gc.freeze()


# Of memory and of mappings, above which a worker forgets its programs between files. A program takes some 18
# mappings, and a process has 65530.
_MOST_BYTES, _MOST_MAPPINGS = 900 * 2**20, 20_000


def _is_full() -> bool:
    """Whether this process holds much; where the system does not tell, it does."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        mappings = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return True
    return pages * os.sysconf("SC_PAGE_SIZE") > _MOST_BYTES or mappings > _MOST_MAPPINGS


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Files share few programs, and a worker that keeps them all grows to gigabytes; what a later one needs
    again comes from the cache on disk. What is free then lies in pieces, which glibc keeps unless it is
    asked: of 1.4 GB 0.5 are left.
    """
    yield
    if _is_full():
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # another system's C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)
