# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Wrapper of a kernel that accumulates moments of every draw, and its runs in chunks of steps."""

from collections.abc import Callable, Mapping, Sequence
import copy
from typing import Any, NamedTuple

import numpy as np
from numpyro.infer.mcmc import MCMC, MCMCKernel
from numpyro.util import nested_attrgetter

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.errors import ArgumentError, CheckpointError
from ebmpp.kernels.base import is_batched


class RunningMoments(NamedTuple):
    """Mean and sum of squared deviations of one chain's draws, updated draw by draw (Welford, 1962)."""

    count: Array
    mean: Any
    squares: Any

    def add(self, values: Any) -> "RunningMoments":
        """Return the moments with one more draw."""
        count = self.count + 1
        delta = jax.tree.map(jnp.subtract, values, self.mean)
        mean = jax.tree.map(lambda m, d: m + d / count.astype(m.dtype), self.mean, delta)
        rise = jax.tree.map(lambda d, v, m: d * (v - m), delta, values, mean)
        return RunningMoments(count, mean, jax.tree.map(jnp.add, self.squares, rise))


class StreamState(NamedTuple):
    """State of a :class:`Streaming` kernel.

    - **inner** - the state of the wrapped kernel.
    - **moments** - of the draws since they were last reset.
    - **stored** - the draw and the fields to store, by group; empty where nothing is stored.
    """

    inner: Any
    moments: RunningMoments
    stored: dict[str, dict[str, Array]]


class Start(NamedTuple):
    """Inputs that initialise a chain: key, initial values, and leaves that replace fields of the state."""

    rng_key: Array
    init_params: Any
    restored: dict[str, list[Any]]


class Streaming:
    """The kernel of ``mcmc``, with moments of ``fn`` of every draw in its state.

    :param fn: from one chain's draw to a pytree of numbers.
    :param fields: names of state fields whose moments are accumulated as well.
    :param keep: sites to store: True for all, or their names.
    :param args: the model's arguments.
    :param kwargs: the model's keyword arguments.
    """

    def __init__(
        self,
        mcmc: MCMC,
        fn: Callable[..., Any],
        fields: Sequence[str],
        keep: bool | Sequence[str],
        args: tuple,
        kwargs: Mapping[str, Any],
    ) -> None:
        self.mcmc, self.kernel = mcmc, _uninitialised(mcmc.sampler)
        self._fn, self._fields, self._keep = fn, fields, keep
        self._args, self._kwargs = args, kwargs
        self._vectorized = mcmc.chain_method == "vectorized" and mcmc.num_chains > 1

    def init(self, start: Start) -> StreamState:
        """Return the initial state."""
        key, init_params, restored = start
        inner = self.kernel.init(key, self.mcmc.num_warmup, init_params, self._args, self._kwargs)
        values, stored = self._observe(inner)
        zeros = jax.tree.map(jnp.zeros_like, values)
        count = jnp.zeros(self.mcmc.num_chains if self._vectorized else (), jnp.int32)
        state = StreamState(inner, RunningMoments(count, zeros, zeros), stored)
        return state._replace(**{name: _restore(getattr(state, name), restored[name]) for name in restored})

    def advance(self, start: Start, state: StreamState, steps: int, thinning: int) -> tuple[StreamState, Any]:
        """Return the state after ``steps`` steps, and what is kept of every ``thinning``-th."""
        # what `init` leaves on a kernel belongs to the trace in which it was called
        self.kernel = _uninitialised(self.mcmc.sampler)
        self.init(start)

        def stride(state: StreamState, _: None) -> tuple[StreamState, Any]:
            state = lax.fori_loop(0, thinning, lambda i, s: self._sample(s), state)
            return state, state.stored

        return lax.scan(stride, state, length=steps // thinning)

    def _sample(self, state: StreamState) -> StreamState:
        inner = self.kernel.sample(state.inner, self._args, self._kwargs)
        values, stored = self._observe(inner)
        add = jax.vmap(RunningMoments.add) if self._vectorized else RunningMoments.add
        return StreamState(inner, add(state.moments, values), stored)

    def _observe(self, inner: Any) -> tuple[Any, dict[str, Any]]:
        """Return the numbers whose moments are accumulated, and the values to store."""
        constrain = self.mcmc.postprocess_fn or self.kernel.postprocess_fn(self._args, self._kwargs)

        def observe(z: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            draw = constrain(z)
            values = jax.tree.map(_real, {"fn": self._fn(draw), "fields": fields})
            if not self._keep:
                return values, {}
            sites = leaves_by_name(draw, self.kernel.sample_field)
            if not isinstance(self._keep, bool):
                checks.names("site", self._keep, sites)
                sites = {name: sites[name] for name in self._keep}
            return values, {"posterior": sites, "sample_stats": leaves_by_name(fields, "field")}

        fields = {name: self._field(inner, name) for name in self._fields}
        z = self._field(inner, self.kernel.sample_field)
        return (jax.vmap(observe) if self._vectorized else observe)(z, fields)

    def _field(self, inner: Any, name: str) -> Any:
        try:
            return nested_attrgetter(name)(inner)
        except (KeyError, IndexError, TypeError):
            raise ArgumentError(
                f"LongRun: extra_fields must name fields of {type(inner).__name__}, got {name!r}. "
                f"Its fields are {list(getattr(inner, '_fields', ()))}."
            ) from None


class Chunks:
    """Chains after their warm-up, advanced some steps at a time.

    ``MCMC.run`` is not called: it compiles its loop again each time, 0.2 s or more for a chunk of 1 ms.

    :param stream: what advances the chains; its ``mcmc`` has their number, warm-up and chain method.
    :param rng_key: one key, or one per chain.
    :param init_params: as for ``MCMC.run``.
    :param restored: by name, leaves of fields of the state that replace the initial ones, without a warm-up.
    """

    def __init__(
        self, stream: Streaming, rng_key: Array, init_params: Any, restored: Mapping[str, list[Any]]
    ) -> None:
        self._stream, self._mcmc, self._programs = stream, stream.mcmc, {}
        self._start = Start(chain_keys(stream.mcmc, rng_key), init_params, dict(restored))
        self.state: StreamState = self._map(stream.init)(self._start)
        if not restored:
            if self._mcmc.num_warmup:
                self.run(self._mcmc.num_warmup, self._mcmc.num_warmup)
            self.reset()

    def _map(
        self, fn: Callable[..., Any], jit: Callable[..., Any] = lambda program: program
    ) -> Callable[..., Any]:
        """Map a function of one chain over all of them, as ``MCMC.run`` does."""
        num_chains, method = self._mcmc.num_chains, self._mcmc.chain_method
        if num_chains == 1 or method == "vectorized":
            return jit(fn)
        if method == "parallel":
            return jax.pmap(fn)
        if callable(method):
            return jit(method(fn))
        single = jit(fn)
        stack = lambda *leaves: jnp.stack(leaves)
        take = lambda tree, c: jax.tree.map(lambda a: a[c], tree)
        return lambda tree: jax.tree.map(stack, *(single(take(tree, c)) for c in range(num_chains)))

    def run(self, steps: int, thinning: int) -> dict[str, dict[str, Array]]:
        """Advance all chains.

        :return: every ``thinning``-th of what is kept, ``(chains, draws, ...)`` by name and group.
        """
        size = steps, thinning
        if size not in self._programs:
            self._programs[size] = self._map(lambda inputs: self._stream.advance(*inputs, *size), jax.jit)
        self.state, stored = self._programs[size]((self._start, self.state))
        if self._mcmc.num_chains == 1:
            return jax.tree.map(lambda a: a[None], stored)
        vectorized = self._mcmc.chain_method == "vectorized"
        return jax.tree.map(lambda a: a.swapaxes(0, 1), stored) if vectorized else stored

    def reset(self) -> None:
        """Set the moments to zero."""
        self.state = self.state._replace(moments=jax.tree.map(jnp.zeros_like, self.state.moments))

    def moments(self) -> RunningMoments:
        """Return the moments as float64 arrays with a leading axis of chains."""
        axis = (lambda a: a[None]) if self._mcmc.num_chains == 1 else (lambda a: a)
        return jax.tree.map(lambda a: axis(np.asarray(a, float)), self.state.moments)


def chain_keys(mcmc: MCMC, rng_key: Array) -> Array:
    """Return the keys of all chains, or the key of the only one.

    :raises ArgumentError: if the number of keys is not that of the chains.
    """
    if not is_batched(rng_key):
        return jax.random.split(rng_key, mcmc.num_chains) if mcmc.num_chains > 1 else rng_key
    if len(rng_key) != mcmc.num_chains or mcmc.num_chains == 1:
        raise ArgumentError(f"LongRun: rng_key must be one key or {mcmc.num_chains}, got {len(rng_key)}.")
    return rng_key


def as_numbers(leaf: Any) -> np.ndarray:
    """Return a leaf of a state as numbers: a key as its words."""
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _restore(tree: Any, numbers: list[Array]) -> Any:
    """Return ``tree`` with the leaves of which :func:`as_numbers` made ``numbers``."""
    leaves, structure = jax.tree.flatten(tree)

    def restore(expected: Any, saved: Array) -> Array:
        is_key = jnp.issubdtype(expected.dtype, jax.dtypes.prng_key)
        saved = jax.random.wrap_key_data(saved, impl=jax.random.key_impl(expected)) if is_key else saved
        if (saved.shape, saved.dtype) != (expected.shape, expected.dtype):
            raise CheckpointError(
                f"LongRun: the checkpoint holds {saved.dtype}{saved.shape} where this kernel's state is "
                f"{expected.dtype}{expected.shape}. Continue with the versions that began the run."
            )
        return saved

    return jax.tree.unflatten(structure, list(map(restore, map(jnp.asarray, leaves), numbers)))


def leaves_by_name(tree: Any, default: str) -> dict[str, Any]:
    """Return the leaves of a pytree by their dotted paths; ``default`` names a tree that is a leaf.

    >>> leaves_by_name({"a": {"b": 1}, "c": (2, 3)}, "x"), leaves_by_name(4, "x")
    ({'a.b': 1, 'c.0': 2, 'c.1': 3}, {'x': 4})
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator=".") or default: leaf for path, leaf in leaves}


def _real(value: Any) -> Array:
    """Return a value as floats.

    :raises ArgumentError: if it is not made of real numbers.
    """
    value = jnp.asarray(value)
    if not any(jnp.issubdtype(value.dtype, kind) for kind in (np.bool_, np.integer, np.floating)):
        raise ArgumentError(f"LongRun: fn and fields must be real numbers, got dtype {value.dtype}.")
    return value.astype(jnp.result_type(float))


def _uninitialised(kernel: MCMCKernel) -> MCMCKernel:
    """Return a copy of a kernel without what an earlier ``init`` left on it."""
    try:
        return copy.copy(kernel.wrap_model(lambda model: model))
    except (NotImplementedError, ValueError):  # it has no model
        return copy.copy(kernel)
