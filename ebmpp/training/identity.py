# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What tells one run from another: the numbers of its optimisers and the functions that watch it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp
import optax

from ebmpp.core import identity
from ebmpp.core.archive import hashed
from ebmpp.core.identity import function_identity
from ebmpp.core.types import Params

#: Step counts at which schedules are looked at.
_COUNTS = tuple(digit * 10**power for power in range(1, 6) for digit in (1, 2, 5))
_TOLERANCE = 1e-4  # relative: what one update is on another kind of device differs by some 1e-6
_MOVES = "optimizer"


def optimizer_moves(optimizer: optax.GradientTransformation, params: Params) -> list[list[float]]:
    """What an optimiser makes of fixed gradients: so rates, schedules and momenta are told apart.

    Three updates in a row from the start, of gradients that differ in size and sign; then one at each of some
    step counts up to half a million, so that schedules show, at the counts that are looked at. Each leaf is
    told by two weighted sums, of what is above 0 and of what is below.

    :return: numbers to compare up to a tolerance.
    """
    gradients = [_pattern(params, scale) for scale in (1.0, -0.5, 0.25)]
    at, update = _pattern(params, 0.1), jax.jit(optimizer.update)
    state, made = optimizer.init(at), []
    for gradient in gradients:
        updates, state = update(gradient, state, at)
        made.append(_sums(updates))
    for count in _COUNTS:
        made.append(_sums(update(gradients[0], _counted(state, count), at)[0]))
    return made


def _pattern(params: Params, scale: float) -> Params:
    """Numbers between ``scale`` / 2 and ``scale``, one in three of them negative."""

    def leaf(a: Any) -> Any:
        index = np.arange(np.size(a)).reshape(np.shape(a))
        sizes = 0.5 + 0.5 * np.modf(index * 0.618034)[0]
        return jnp.asarray(scale * np.where(index % 3 == 2, -sizes, sizes), jnp.result_type(a))

    return jax.tree.map(leaf, params)


def _counted(state: Any, count: int) -> Any:
    """The state with its step counts set."""
    is_count = lambda a: jnp.issubdtype(jnp.result_type(a), jnp.integer) and jnp.ndim(a) == 0
    return jax.tree.map(lambda a: jnp.full_like(a, count) if is_count(a) else a, state)


def _sums(updates: Params) -> list[float]:
    made = []
    for leaf in map(np.asarray, jax.tree.leaves(updates)):
        flat = leaf.astype(float).ravel()
        weights = 1 + np.modf(np.arange(flat.size) * 0.381966)[0]
        made += [float(weights @ np.maximum(flat, 0)), float(weights @ np.maximum(-flat, 0))]
    return made


def monitor_identity(monitors: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Hashes by name."""
    return {name: function_identity(fn) for name, fn in sorted(monitors.items())}


def fingerprint(run: Mapping[str, Any]) -> str:
    """A hash of what identifies a run, but for what is compared up to a tolerance."""
    return hashed({name: value for name, value in run.items() if name != _MOVES})


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In words, what two runs differ in; empty for one run.

    :param there: what identifies the one that was saved; ``here``, the one that goes on.
    """
    told = []
    if wrong := _other_updates(there.get(_MOVES) or (), here.get(_MOVES) or ()):
        stage = f" of stage {wrong[0]}" if len(here[_MOVES]) > 1 else ""
        told.append(f"optimizer{stage}: it makes other updates here of the same gradients (another rate?)")
    left_out = {_MOVES}
    a, b = there.get("monitors"), here.get("monitors")
    if a != b and a and b and a.keys() == b.keys():
        changed = [n for n in a if a[n] != b[n]]
        told.append(f"monitors: {changed[0]!r} is another function here, or holds other values")
        left_out.add("monitors")
    rest = [{n: v for n, v in run.items() if n not in left_out} for run in (there, here)]
    return told + identity.differences(*rest)


def _other_updates(there: Sequence[Any], here: Sequence[Any]) -> list[int]:
    """The stages whose optimisers differ."""
    return [i for i, (x, y) in enumerate(zip(there, here, strict=False)) if not _close(x, y)]


def _close(a: list[list[float]], b: list[list[float]]) -> bool:
    x, y = np.asarray(a, float), np.asarray(b, float)
    if x.shape != y.shape:
        return False
    sizes = (x + np.abs(y)).reshape(len(x), -1, 2).sum(-1, keepdims=True)
    off = np.abs(x - y).reshape(sizes.shape[0], -1, 2)
    return bool(((off <= _TOLERANCE * sizes) | np.isnan(off)).all())
