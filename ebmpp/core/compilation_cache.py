# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""JAX's persistent compilation cache, with settings that pay for small programs."""

import os
from pathlib import Path
import tempfile

import jax
from jax.experimental.compilation_cache import compilation_cache

from ebmpp.errors import ArgumentError


def enable_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path:
    """Keep compiled programs on disk, so that the next process reads them instead of compiling again.

    This turns on `JAX's persistent compilation cache
    <https://docs.jax.dev/en/latest/persistent_compilation_cache.html>`_. By default JAX does not store
    programs that compile within a second; most programs of a small model are of that size, so all are stored.
    Programs that were compiled before the call stay in memory and are not stored, so call it first.

    JAX runs what it finds in the directory: do not share one with users whom you do not trust.

    :param directory: a local directory, created if it does not exist. None: the directory that JAX is
        configured with (the environment variable ``JAX_COMPILATION_CACHE_DIR``), else
        ``$XDG_CACHE_HOME/ebmpp/jax``, else ``~/.cache/ebmpp/jax``.
    :return: the directory.
    :raises ArgumentError: for a directory that cannot be created or written.

    **Example**

    >>> import tempfile, ebmpp
    >>> directory = ebmpp.enable_compilation_cache(tempfile.mkdtemp())
    >>> directory.is_dir()
    True
    """
    path = _default_directory() if directory is None else directory
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"enable_compilation_cache: directory must be a path or None, got {type(path).__name__}. "
            "Give a str or a pathlib.Path."
        )
    path = Path(path).expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ArgumentError(
            f"enable_compilation_cache: directory must be writable, got {str(path)!r} ({error.strerror}). "
            "Give another one, or set JAX_COMPILATION_CACHE_DIR."
        ) from error
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX opens its cache once, at the first program that it compiles. Without this a directory that is set
    # later, or another one, would not be used.
    compilation_cache.reset_cache()
    return path


def _default_directory() -> str | Path:
    if configured := getattr(jax.config, "jax_compilation_cache_dir", None):
        return configured
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base) / "ebmpp" / "jax"
