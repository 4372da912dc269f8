# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the persistent compilation cache: programs are stored, found again, and
errors name the cause."""

from collections.abc import Callable, Iterator
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.monitoring
import jax.numpy as jnp

import ebmpp
from ebmpp.errors import ArgumentError

HIT = "/jax/compilation_cache/cache_hits"


@pytest.fixture(autouse=True)
def restored_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the flags that the cache adds to."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])


@pytest.fixture
def hits() -> Iterator[list[str]]:
    """One entry per program that was read from the cache."""
    events: list[str] = []
    listener = lambda event, **_: events.append(event) if event == HIT else None
    jax.monitoring.register_event_listener(listener)
    yield events
    jax.monitoring.unregister_event_listener(listener)


def compile_again(constant: float) -> None:
    """Compile a program that is the same for the same constant, but unknown to ``jax.jit``."""

    def add_constant(x: Any) -> Any:
        return x + constant

    jax.jit(add_constant)(jnp.zeros(3)).block_until_ready()


def test_programs_are_stored_and_found_again(tmp_path: Path, hits: list[str]) -> None:
    # JAX opens its cache at the first program, if a directory is set
    compile_again(0.125)
    assert (
        ebmpp.enable_compilation_cache(tmp_path / "new" / "cache")
        == tmp_path / "new" / "cache"
    )
    hits.clear()  # of another cache, where the environment names one
    compile_again(0.25)
    assert not hits and list((tmp_path / "new" / "cache").glob("jit_add_constant-*"))
    compile_again(0.25)
    assert hits == [HIT]


def test_a_disabled_cache_is_enabled(tmp_path: Path) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    compile_again(1.5)
    ebmpp.enable_compilation_cache(tmp_path)
    compile_again(1.75)
    assert list(tmp_path.glob("jit_add_constant-*"))


@pytest.mark.parametrize(
    ("configured", "xdg", "expected"),
    [
        ("dir", "xdg", "dir"),
        (None, "xdg", "xdg/ebmpp/jax"),
        (None, "", "home/.cache/ebmpp/jax"),
    ],
)
def test_default_directory(
    configured: str | None,
    xdg: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_folder: Callable[[str], str] = lambda name: str(tmp_path / name) if name else ""
    jax.config.update("jax_compilation_cache_dir", configured and in_folder(configured))
    monkeypatch.setenv("XDG_CACHE_HOME", in_folder(xdg))
    monkeypatch.setenv("HOME", in_folder("home"))
    assert ebmpp.enable_compilation_cache() == tmp_path / expected
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / expected)


def test_a_directory_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = jax.config.jax_compilation_cache_dir
    with pytest.raises(ArgumentError, match="directory.*file/below"):
        ebmpp.enable_compilation_cache(tmp_path / "file" / "below")
    assert jax.config.jax_compilation_cache_dir == before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--a=1", "--a=1 --xla_backend_extra_options=xla_cpu_disable_loop_unrolling"),
        ("--xla_backend_extra_options=mine", "--xla_backend_extra_options=mine"),
    ],
)
def test_loops_are_not_unrolled_unless_options_are_set(
    flags: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    for _ in range(2):
        ebmpp.enable_compilation_cache(tmp_path)
        assert os.environ["XLA_FLAGS"] == expected


@pytest.mark.parametrize("directory", [3, "", b"", "a\0b", "~nobody_at_all/cache"])
def test_a_directory_must_be_a_path(
    directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="directory must be a writable path"):
        ebmpp.enable_compilation_cache(directory)
    compile_again(2.5)
    assert not list(tmp_path.iterdir())


PROGRAM = """
import logging, sys, jax, ebmpp
ebmpp.enable_compilation_cache(sys.argv[1])
assert logging.getLogger("jax").level == logging.NOTSET
print(jax.jit(lambda x: x @ x.T)(jax.numpy.ones((3, 3))).sum())
"""


@pytest.mark.nightly
def test_programs_that_are_found_again_log_no_errors(tmp_path: Path) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TF_CPP_MIN_LOG_LEVEL", "JAX_LOGGING_LEVEL")
    }
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert result.stdout == "27.0\n" and not result.stderr
