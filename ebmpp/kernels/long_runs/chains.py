# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Chains of any NumPyro kernel, advanced by some steps at a time while sums of their draws are kept.

The steps are those of ``MCMC.run``, under its chain method. How many are taken in one call of the program has
no effect on any of them, nor on a sum: the program is one, and the number an argument.
"""

from collections.abc import Callable, Mapping
import copy
import dataclasses
from typing import Any, NamedTuple

import numpy as np
from numpyro.infer.mcmc import MCMCKernel

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.core.programs import compiled
from ebmpp.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled; hashable, and kernels and functions by identity.

    :param kernel: a NumPyro kernel. It is copied before it is initialised, and never written to.
    :param method: MCMC's: "vectorized", "sequential", "parallel" or a callable such as ``jax.vmap``.
    :param num_chains: how many.
    :param num_warmup: of the run, for the kernel's adaptation.
    :param postprocess: MCMC's, or None for the kernel's own.
    :param fn: of a draw, whose moments are kept.
    :param covariance: of a draw, whose products are kept; or None.
    :param fold: ``step(carry, draw)``, or None.
    :param fields: names of fields of the state whose moments are kept too.
    :param keep: whose draws are kept: True, or names of sites; or False.
    :param thinning: every so many steps.
    :param capacity: draws that one call may keep.
    """

    kernel: MCMCKernel
    method: str | Callable[..., Any]
    num_chains: int
    num_warmup: int
    postprocess: Callable[..., Any] | None
    fn: Callable[..., Any]
    covariance: Callable[..., Any] | None
    fold: Callable[..., Any] | None
    fields: tuple[str, ...]
    keep: bool | tuple[str, ...]
    thinning: int
    capacity: int

    @property
    def together(self) -> bool:
        """Whether the kernel itself moves all chains at once."""
        return self.method == "vectorized" and self.num_chains > 1

    @property
    def one_by_one(self) -> bool:
        """Whether the program is of one chain."""
        return self.num_chains == 1 or self.method == "sequential"

    def map(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """From one chain to all, as MCMC does it within one program."""
        if self.together or self.one_by_one:
            return fn
        return jax.pmap(fn) if isinstance(self.method, str) else self.method(fn)


class Sums(NamedTuple):
    """Of the draws of the batch that is open.

    - **pivot** - values at the draw before the batch, a chain each.
    - **first** - sums of differences to the pivot, a chain each.
    - **second** - sums of their squares: a chain each, or over all chains where these are moved together.
    - **products** - likewise, sums of products of all pairs of differences in ``covariance``; or None.
    - **carry** - of the fold; from the run's beginning.
    """

    pivot: Any
    first: Any
    second: Any
    products: Array | None
    carry: Any


class Chains(NamedTuple):
    """All chains; leaves have a leading axis of chains."""

    state: Any
    sums: Sums
    kept: Any
    """Room for draws: ``(capacity, ...)`` after the axis of chains, or before it where ``Plan.together``."""


class Look(NamedTuple):
    """What is seen of a state."""

    values: Any
    """Floats whose moments are kept: of ``fn``, of fields, and of ``covariance``."""
    kept: Any
    """What is written of a draw."""
    draw: Any


class Arguments:
    """A model's arguments: arrays, which a program takes, and all else, which is compiled into it.

    :param constant: whether arrays are compiled into it also: of a model whose Python looks at their values.
    """

    def __init__(self, args: tuple, kwargs: Mapping[str, Any], constant: bool = False) -> None:
        leaves, self._structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        given = [not constant and _is_numeric(leaf) for leaf in leaves]
        self.arrays = [_strict(leaf) for leaf, is_given in zip(leaves, given, strict=True) if is_given]
        self._rest = tuple(_GIVEN if g else leaf for leaf, g in zip(leaves, given, strict=True))

    def rebuild(self, arrays: list[Any]) -> tuple[tuple, dict[str, Any]]:
        """Arguments and keyword arguments with these arrays."""
        rest = iter(arrays)
        leaves = [next(rest) if leaf is _GIVEN else leaf for leaf in self._rest]
        return jax.tree.unflatten(self._structure, leaves)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Arguments) or self._structure != other._structure:
            return False
        return all(map(_same, self._rest, other._rest))

    def __hash__(self) -> int:
        return hash(self._structure)


_GIVEN = object()


def _is_numeric(leaf: Any) -> bool:
    known = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    return known and (_is_key(leaf) or leaf.dtype.kind not in "OSUMm")


def _same(a: Any, b: Any) -> bool:
    plain = isinstance(a, bool | int | float | complex | str | bytes | None)
    return a is b or (plain and type(a) is type(b) and a == b)


class Setup(NamedTuple):
    """What initialises a kernel: a key and initial values a chain, and the arrays among its arguments."""

    keys: Array
    init_params: Any
    arrays: list[Any]


def initial(plan: Plan, setup: Setup, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, MCMCKernel]:
    """States of all chains, with a leading axis of chains, and the kernel; errors are the kernel's own."""
    kernel = fresh(plan.kernel)
    one = lambda each: kernel.init(each[0], plan.num_warmup, each[1], args, kwargs)
    if not plan.one_by_one:
        made = plan.map(one)((setup.keys, setup.init_params))
    else:
        made = _stack(*(one(take((setup.keys, setup.init_params), c)) for c in range(plan.num_chains)))
    return jax.tree.map(_strict, made), kernel


def outline(plan: Plan, rest: Arguments, state: Any, setup: Setup) -> Look:
    """Shapes of what is seen of all chains after a step."""
    if not plan.one_by_one:
        return _first_look.shapes(plan, rest, state, setup)
    state, keys, params = take((state, setup.keys, setup.init_params), 0)
    one = _first_look.shapes(plan, rest, state, Setup(keys, params, setup.arrays))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((plan.num_chains, *a.shape), a.dtype), one)


@compiled(statics=2)
def _first_look(plan: Plan, rest: Arguments, state: Any, setup: Setup) -> Look:

    def one(each: tuple[Any, Array, Any]) -> Look:
        kernel, args, kwargs = _initialised(plan, rest, setup.arrays, *each[1:])
        return _look(plan, kernel, kernel.sample(each[0], args, kwargs), args, kwargs)

    return plan.map(one)((state, setup.keys, setup.init_params))


@compiled(statics=2)
def _several(
    plan: Plan, rest: Arguments, chains: Chains, setup: Setup, at: Array, phase: Array, num: Array
) -> Chains:
    """``num`` steps: of all chains, or of one where the plan goes one by one.

    :param at: steps into the open batch; below 0 in the warm-up, whose draws are not looked at.
    :param phase: steps since a draw was last kept.
    """

    def one(each: tuple[Chains, Array, Any]) -> Chains:
        kernel, args, kwargs = _initialised(plan, rest, setup.arrays, *each[1:])

        def step(i: Array, chains: Chains) -> Chains:
            state = kernel.sample(chains.state, args, kwargs)

            def seen() -> tuple[Sums, Any]:
                look = _look(plan, kernel, state, args, kwargs)
                kept = chains.kept
                if plan.keep:
                    place = (phase + i + 1) // plan.thinning - 1
                    put = lambda room, x: lax.dynamic_update_index_in_dim(room, x, place, 0)
                    full = (phase + i + 1) % plan.thinning == 0
                    fill = lambda: jax.tree.map(put, kept, look.kept)
                    kept = lax.cond(full, fill, lambda: kept)
                return _add(plan, chains.sums, look), kept

            return Chains(state, *lax.cond(at >= 0, seen, lambda: (chains.sums, chains.kept)))

        def anew() -> Sums:
            return _reset(chains.sums, _look(plan, kernel, chains.state, args, kwargs))

        chains = each[0]
        sums = lax.cond(at == 0, anew, lambda: chains.sums)
        return lax.fori_loop(jnp.int32(0), num, step, chains._replace(sums=sums))

    return plan.map(one)((chains, setup.keys, setup.init_params))


def advance(
    plan: Plan, rest: Arguments, chains: Chains, setup: Setup, at: int, phase: int, num: int
) -> Chains:
    """``num`` steps of all chains; see :func:`_several`."""
    numbers = np.int32(at), np.int32(phase), np.int32(num)
    if not plan.one_by_one:
        return _several(plan, rest, chains, setup, *numbers)
    moved = []
    for c in range(plan.num_chains):
        one, keys, params = take((chains, setup.keys, setup.init_params), c)
        moved.append(_several(plan, rest, one, Setup(keys, params, setup.arrays), *numbers))
    return _stack(*moved)


def start(plan: Plan, state: Any, look: Look, carry: Any) -> Chains:
    """Chains whose sums are empty.

    :param look: shapes of what is seen of all chains.
    :param carry: of the fold, of one chain.
    """
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
    axis = 0 if plan.together else 1
    room = lambda a: jnp.zeros((*a.shape[:axis], plan.capacity, *a.shape[axis:]), a.dtype)
    over = () if plan.together else (plan.num_chains,)
    products = None
    if plan.covariance is not None:
        vector = look.values["covariance"]
        products = jnp.zeros((*over, *(vector.shape[-1],) * 2), vector.dtype)
    second = jax.tree.map(lambda a: jnp.zeros((*over, *a.shape[1:]), a.dtype), look.values)
    spread = lambda a: jnp.broadcast_to(jnp.asarray(a), (plan.num_chains, *jnp.shape(a)))
    sums = Sums(zeros(look.values), zeros(look.values), second, products, jax.tree.map(spread, carry))
    return placed(plan, Chains(state, sums, jax.tree.map(room, look.kept)))


def placed(plan: Plan, chains: Chains) -> Chains:
    """Where the program leaves chains, too, so that it is compiled once."""
    apart = plan.method == "parallel" and not plan.one_by_one
    return jax.pmap(lambda a: a)(chains) if apart else chains


def _initialised(plan: Plan, rest: Arguments, arrays: list[Any], key: Array, init_params: Any) -> tuple:
    """A kernel that was initialised here, and its arguments.

    The state that ``init`` makes is not used, and so not computed.
    """
    kernel = fresh(plan.kernel)
    args, kwargs = rest.rebuild(arrays)
    kernel.init(key, plan.num_warmup, init_params, args, kwargs)
    return kernel, args, kwargs


def _look(plan: Plan, kernel: MCMCKernel, state: Any, args: tuple, kwargs: Mapping[str, Any]) -> Look:
    each = jax.vmap if plan.together else (lambda fn: fn)
    constrain = plan.postprocess or kernel.postprocess_fn(args, kwargs)
    draw = each(constrain)(field(kernel, state, kernel.sample_field))
    fields = {name: field(kernel, state, name) for name in plan.fields}
    values = {"fn": each(lambda x: _floats("fn", plan.fn(x)))(draw), "fields": _floats("a field", fields)}
    if plan.covariance is not None:
        covary = plan.covariance
        values["covariance"] = each(lambda x: ravel_pytree(_floats("covariance", covary(x)))[0])(draw)
    kept = ()
    if plan.keep:
        sites = draw if isinstance(draw, Mapping) else {kernel.sample_field: draw}
        if not isinstance(plan.keep, bool):
            checks.names("site", plan.keep, sites)
            sites = {name: sites[name] for name in plan.keep}
        kept = {"posterior": sites, "sample_stats": fields}
    return Look(values, kept, draw)


def field(kernel: MCMCKernel, state: Any, name: str) -> Any:
    """A field of a state, with dots for fields of fields, as MCMC has it.

    :raises ArgumentError: for one that the state has not.
    """
    found = state
    for part in name.split("."):
        try:
            if isinstance(found, Mapping):
                found = found[part]
            else:
                found = found[int(part)] if part.isdigit() else getattr(found, part)
        except (KeyError, IndexError, AttributeError):
            known = list(getattr(state, "_fields", ()))
            raise ArgumentError(
                f"LongRun: extra_fields names {name!r}, and the state of {type(kernel).__name__} has {known}"
            ) from None
    return found


def _floats(name: str, tree: Any) -> Any:
    """:raises ArgumentError: for what is no number."""

    def leaf(a: Any) -> Array:
        known = hasattr(a, "dtype") or isinstance(a, bool | int | float)
        dtype, floats = jnp.result_type(a if known else float), jnp.result_type(float)
        kinds = (np.floating, np.integer, np.bool_)
        if not known or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            told = f"those of dtype {dtype}" if known else checks.tell(a)
            raise ArgumentError(f"LongRun: {name} is real numbers, arrays or trees of them, not {told}")
        wide = jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits >= jnp.finfo(floats).bits
        return jnp.asarray(a, dtype if wide else floats)

    return jax.tree.map(leaf, tree)


def _reset(sums: Sums, look: Look) -> Sums:
    """Of no draw, around what is seen before the first."""
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    pivot = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), look.values)
    return Sums(pivot, zeros(sums.first), zeros(sums.second), zeros(sums.products), sums.carry)


def _add(plan: Plan, sums: Sums, look: Look) -> Sums:
    """With one more draw."""
    pivot = sums.pivot
    gap = jax.tree.map(jnp.subtract, look.values, pivot)
    first = jax.tree.map(jnp.add, sums.first, gap)
    square = lambda x: (x * x).sum(0) if plan.together else x * x
    second = jax.tree.map(lambda old, x: old + square(x), sums.second, gap)
    products, carry = sums.products, sums.carry
    if products is not None:
        rows = gap["covariance"].reshape(-1, gap["covariance"].shape[-1])
        products = products + rows.T @ rows
    if plan.fold is not None:
        fold = jax.vmap(plan.fold) if plan.together else plan.fold
        moved = fold(carry, look.draw)
        _check_fold(carry, moved)
        carry = moved
    return Sums(pivot, first, second, products, carry)


def _check_fold(before: Any, after: Any) -> None:
    """:raises ArgumentError: for a fold that does not return what it is given."""
    told = lambda tree: jax.tree.map(lambda a: f"{jnp.result_type(a)}{list(jnp.shape(a))}", tree)
    if told(before) != told(after):
        raise ArgumentError(
            f"LongRun: fold got a carry of {told(before)} and returned one of {told(after)}: start with what "
            "it returns"
        )


@jax.jit
def take(tree: Any, chain: int) -> Any:
    """One chain of a tree of all."""
    return jax.tree.map(lambda a: a[chain], tree)


@jax.jit
def _stack(*trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def fresh(kernel: MCMCKernel) -> MCMCKernel:
    """A copy that was never initialised: what ``init`` leaves on a kernel belongs to where it was called."""
    try:
        made = kernel.wrap_model(lambda model: model)
    except (NotImplementedError, ValueError):  # of those that have no model
        made = kernel
    return copy.copy(made)


def _strict(a: Any) -> Any:
    """Of a dtype of its own, where jax would let it take that of others: equal arguments, one program."""
    return a if _is_key(a) else lax.convert_element_type(a, jnp.result_type(a))


def _is_key(a: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(a), jax.dtypes.prng_key)
