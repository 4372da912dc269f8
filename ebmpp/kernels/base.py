# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What all kernels share: NumPyro's contract, params, clamped blocks, keys, chains.

A kernel holds its graph and nothing of a run: params and clamped values arrive as model arguments on
every call. What is kept on a kernel would become a constant of NumPyro's compiled loop, and the next
run, with other params, would go on sampling the old model.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpyro.infer.mcmc import MCMCKernel

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Blocks, Numbers, State, checks
from ebmpp.errors import ParameterError, StateError
from ebmpp.graph import FactorGraph, states
from ebmpp.moves import Move, Target, gibbs_sweep, search, sweeps

#: What NumPyro passes: values to start from, and the keyword arguments of the model.
Init = State | None
Kwargs = Mapping[str, Any] | None


class ChainState(Protocol):
    """What every kernel's state has, a named tuple: the free blocks, and the run's key."""

    @property
    def z(self) -> Blocks: ...
    @property
    def rng_key(self) -> Array: ...


S = TypeVar("S", bound=ChainState)


class RowKernel(MCMCKernel, Generic[S]):
    """A NumPyro kernel on the states of a graph; subclasses define one chain.

    Subclasses define ``_init_one(rng_key, target, init_params)`` and ``_sample_one(state, target)``, both for
    one chain (one key, ``target.num_rows`` rows), of what their ``target`` makes. They must draw from
    ``target.keys`` alone; then all of NumPyro's chain methods give the same chains.

    ``_sample_fn``, by which NumPyro tells an initialised kernel, is left undefined on purpose: a
    resumed run then calls ``init`` once more and drops its state, so that new params and clamped
    values are checked there too.

    :param graph: the declaration.
    :param init: where chains start, from uniform draws or from ``init_params``: there ("uniform"), or one
        Gibbs sweep from the local mode that a search from there finds ("local_mode").
    :raises ArgumentError: for anything but a :class:`~ebmpp.FactorGraph`, or another ``init``.
    """

    caveat = ""  #: what whoever reads the draws must know: that they are not of the model, say
    model = None  #: there is none to trace: what ``arviz_base.from_numpyro`` asks for
    _as_rows = False  #: whether ``_sample_one`` takes chains of one row each as the rows of one

    def __init__(self, graph: FactorGraph, init: str = "uniform") -> None:
        name = type(self).__name__
        checks.instance(f"{name}: graph", graph, FactorGraph, "a FactorGraph")
        checks.choice(f"{name}: init", init, search.STARTS, also="give states as init_params to mcmc.run")
        self.graph = graph
        self.start = init

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._options().items())
        return f"{type(self).__name__}({self.graph!r}{options})"

    def _options(self) -> dict[str, Any]:
        """The arguments after the graph that are not at their defaults."""
        return {} if self.start == "uniform" else {"init": self.start}

    @property
    def sample_field(self) -> str:
        """The field of the state that holds the draws."""
        return "z"

    def init(
        self, rng_key: Array, num_warmup: int, init_params: Init, model_args: tuple, model_kwargs: Kwargs
    ) -> S:
        """The initial state; what can be looked at now (not under a transformation) is checked.

        :param rng_key: one key, or a batch of keys (``chain_method="vectorized"``).
        :param num_warmup: unused: nothing adapts.
        :param init_params: values of some or all free blocks, each of shape ``(*batch, *shape)`` or
            one that broadcasts to it, after a leading chain axis when keys are batched.
        :param model_args: the params, ``(params,)``.
        :param model_kwargs: the clamped blocks.
        :raises ParameterError: no params, or of a wrong name, shape or value.
        :raises DomainError: params under which the model does not normalise.
        :raises StateError: a wrong name, shape or value among clamped blocks or ``init_params``, or
            no free block.
        """
        del num_warmup
        return self._init_all(rng_key, self.target(model_args, model_kwargs, check=True), init_params)

    def _init_all(self, rng_key: Array, made: Target, init_params: Mapping[str, Array] | None) -> S:
        """The initial states of all chains."""
        chains = rng_key.shape[:1] if is_batched(rng_key) else ()
        init_params = _check_init(made, init_params, chains)
        one = lambda key, given: self._init_one(key, made, given)
        return jax.vmap(one)(rng_key, init_params) if chains else one(rng_key, init_params)

    def sample(self, state: S, model_args: tuple, model_kwargs: Kwargs) -> S:
        """One step of every chain in ``state``.

        :raises StateError: when the state is of a run that clamped other blocks, or other shapes.
        """
        return self._sample_all(state, self.target(model_args, model_kwargs, check=False))

    def _sample_all(self, state: S, made: Target) -> S:
        """One step of all chains; what they share is in ``made``."""
        batched = is_batched(state.rng_key)
        _check_state(made, state, batched)
        if not batched:
            return self._sample_one(state, made)
        if self._as_rows and not (made.batch or made.clamped):
            # mapped, each would be a program of one row, and what pays for many rows would not be done
            given = dataclasses.replace(made.given, batch=state.rng_key.shape[:1])
            return self._sample_one(state, dataclasses.replace(made, given=given))
        return jax.vmap(lambda s: self._sample_one(s, made))(state)

    def _init_one(self, rng_key: Array, target: Any, init_params: dict | None) -> S:
        raise NotImplementedError

    def _sample_one(self, state: S, target: Any) -> S:
        raise NotImplementedError

    def target(self, model_args: tuple, model_kwargs: Kwargs, check: bool) -> Target:
        """What model arguments, as NumPyro passes them, ask for.

        :param check: whether to look at values also (names and shapes are checked anyway).
        """
        if len(model_args) != 1:
            raise ParameterError(
                f"{type(self).__name__} got {len(model_args)} positional arguments after the key, expected "
                "1, the params: mcmc.run(key, params), with clamped blocks by keyword: "
                "mcmc.run(key, params, v=...)"
            )
        graph, (params,) = self.graph, model_args
        given = states.as_clamped(graph.families, model_kwargs or {}, check)
        if len(given.whole) == len(graph.families):
            raise StateError(
                f"all blocks are clamped ({', '.join(map(repr, given.whole))}), so nothing is left to "
                "sample; leave out at least one"
            )
        graph.check(params, values=check)
        target = Target(graph, params, given)
        if check:
            sweeps.check_params(target, self._moves(target))
        return target

    def _moves(self, target: Target) -> tuple[Move, ...]:
        """The moves of a sweep: Gibbs draws of all free layers, unless a subclass has others."""
        return gibbs_sweep(target.graph, target.clamped)

    def _start(self, target: Target, rng_key: Array, init_params: Mapping[str, Array] | None) -> Blocks:
        """Step 0: full states, from uniform draws overridden by ``init_params``."""
        shape = lambda b: target.graph.families[b].shape
        rows = lambda b, v: jnp.broadcast_to(v, target.batch + shape(b)).reshape(-1, *shape(b))
        init = {b: rows(b, v) for b, v in (init_params or {}).items()}
        keys = target.keys(rng_key, 0)
        plain = Target(target.graph, target.params, target.given)  # a subclass is no argument of a program
        return search.started(plain, keys, init, kind=self.start, blocks=target.free)


def is_batched(rng_key: Array) -> bool:
    """Whether this is an array of keys (one a chain), typed ``(C,)`` or legacy ``(C, 2)``.

    :raises ArgumentError: for what is no array.
    """
    if not isinstance(rng_key, Array | np.ndarray):
        checks.key("rng_key", rng_key)
    typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    return rng_key.ndim > (0 if typed else 1)


def _check_init(made: Target, init_params: State | None, chains: tuple[int, ...]) -> Blocks | None:
    """:raises StateError: for initial values of a wrong name, shape or value."""
    if init_params is None:
        return None
    if not isinstance(init_params, Mapping):
        given = type(init_params).__name__
        raise StateError(f"init_params is a dict of free blocks, such as {made.free}; got {given}")
    states.check_names(init_params, made.graph.families)
    checked = {}
    for b, value in init_params.items():
        if b in made.clamped:
            raise StateError(f"block {b!r} is clamped and in init_params; the free blocks are {made.free}")
        checked[b] = _check_initial_value(made, b, states.as_array(b, value), chains)
    return checked


def _check_initial_value(made: Target, block: str, value: Numbers, chains: tuple[int, ...]) -> Array:
    family = made.graph.families[block]
    wanted = made.batch + family.shape
    shape = value.shape
    each = shape[len(chains) :] if shape[: len(chains)] == chains else None
    fits = each is not None and each[len(each) - len(family.shape) :] == family.shape
    if not fits or not _broadcasts(each, wanted):
        many = f" ({chains[0]} chains come first)" if chains else " (a single chain has no chain axis)"
        raise StateError(
            f"init_params of block {block!r} got shape {shape}, expected {chains + wanted}{many}"
        )
    return states.settle(block, family, value)


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    try:
        return jnp.broadcast_shapes(shape, wanted) == wanted
    except ValueError:
        return False


def _check_state(made: Target, state: ChainState, batched: bool) -> None:
    """:raises StateError: when ``state`` does not fit, as on resuming with other clamped blocks."""
    wanted = {b: made.batch + made.graph.families[b].shape for b in made.free}
    given = {b: v.shape[1:] if batched else v.shape for b, v in state.z.items()}
    if given != wanted:
        raise StateError(
            f"the chain's state has blocks of shapes {given}, and these arguments leave {wanted} free; "
            "resume with the blocks (and leading axes) that the first run clamped, or set "
            "mcmc.post_warmup_state = None to start anew"
        )
