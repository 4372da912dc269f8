# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Settings that must be made before JAX starts, for tests and for docstring examples."""

from collections.abc import Iterator
import contextlib
import ctypes
import doctest
import functools
import gc
import importlib
import inspect
import os
from pathlib import Path
import warnings

# Set the variable yourself to run the tests on an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight host devices, for sharding and chain_method="parallel"; one device stays the
# default.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
os.environ.setdefault("MPLBACKEND", "agg")

from hypothesis import settings
import pytest

import jax
from jax.experimental.compilation_cache import compilation_cache

# Tests compile in 0.3 to 0.4 of the time without LLVM's optimisation and by XLA's older
# emitters, which the XLA of jax 0.12 does not have.
_FAST_COMPILE = ("--xla_backend_optimization_level=0",)
if jax.__version_info__ < (0, 12):
    _FAST_COMPILE += ("--xla_cpu_use_fusion_emitters=false",)


def pytest_configure(config: pytest.Config) -> None:
    """Compile the tests of each change fast; those of the night compile as users' programs."""
    is_each_change = "not nightly" in config.option.markexpr
    if is_each_change and not config.option.doctestmodules:
        flags = os.environ["XLA_FLAGS"]
        more = [f for f in _FAST_COMPILE if f.partition("=")[0] not in flags]
        os.environ["XLA_FLAGS"] = " ".join([flags, *more])


# `make test-shapes` checks the shapes and dtypes in annotations; the hook must precede
# the import of ebmpp.
if os.environ.get("EBMPP_CHECK_SHAPES"):
    from jaxtyping import install_import_hook

    # A check adds a frame to the stack, so modules that warn at a line of their caller
    # stay out.
    _RUNS = ("coupling.accumulators", "coupling.engine", "coupling.slots", "exact")
    _ROOMS = ("core.random", "families", "graph", "moves", "estimators", "training")
    install_import_hook([f"ebmpp.{name}" for name in (*_ROOMS, *_RUNS)], "shapes.check")

# One loop to compile instead of two: 4.0 CPU-seconds instead of 6.6 per engine. The
# pairs do not depend on the number of slots; tests/coupling/test_engine.py uses
# more.
importlib.import_module("ebmpp.coupling.slots")._SLOTS = 8

_LOWERING = importlib.import_module("jax._src.interpreters.mlir")
_make_context = _LOWERING.make_ir_context
_shared_context = functools.cache(_make_context)


def _context() -> object:
    """Return one MLIR context for all programs of this process.

    JAX makes a context for each program, and loading the dialects takes a third of the time
    of a small program that is cached. A program that is lowered while another one is (a
    constant) needs its own.
    """
    is_nested = _LOWERING.ir.Context.current is not None
    return _make_context() if is_nested else _shared_context()


_LOWERING.make_ir_context = _context

# ArviZ 0.23 announces ArviZ 1.0 once a day and records that in a file. Two workers that
# do so at the same time fail, so the process that starts them imports it first.
if "PYTEST_XDIST_WORKER" not in os.environ:
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("arviz")

# The examples of a wrapped function are those of the function inside.
_from_module = doctest.DocTestFinder._from_module
doctest.DocTestFinder._from_module = lambda self, module, value: _from_module(
    self, module, inspect.unwrap(value) if callable(value) else value
)

# No deadline: the first example compiles for seconds, the next one takes microseconds.
settings.register_profile("ebmpp", parent=settings(), deadline=None)
settings.load_profile("ebmpp")


def pytest_collection_finish() -> None:
    """Collect garbage rarely, and never scan modules and collected tests: it took a
    quarter of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


# Memory and memory mappings above which a worker drops its programs between files, which
# takes a second. A program takes about 18 mappings, and a Linux process has 65,530.
_MAX_BYTES, _MAX_MAPPINGS = 2**31, 20_000


def _is_full() -> bool:
    """Return True if this process holds many programs, or if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        mappings = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return True
    return pages * os.sysconf("SC_PAGE_SIZE") > _MAX_BYTES or mappings > _MAX_MAPPINGS


@pytest.fixture(autouse=True, scope="module")
def drop_programs() -> Iterator[None]:
    """Drop compiled programs between files when the worker is large; the cache on disk
    still has them."""
    yield
    if _is_full():
        jax.clear_caches()
        _shared_context.cache_clear()
        gc.collect()
        # return free memory to the system: glibc keeps 1.4 GB where 0.5 GB is in use
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


_CACHE_SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def restore_compilation_cache() -> Iterator[None]:
    """Restore the settings of JAX's compilation cache after a test or an example that
    changes them."""

    def current():
        return {name: getattr(jax.config, name) for name in _CACHE_SETTINGS}

    before = current()
    yield
    if current() != before:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
