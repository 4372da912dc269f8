# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Base of the kernels: NumPyro's contract, params, clamped blocks, keys and chains.

A kernel holds its graph and nothing of a run: params and clamped values are arguments
of every call. Anything kept on a kernel would become a constant of NumPyro's compiled
loop, and the next run, with other params, would continue to sample the old model.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
import dataclasses
from functools import partial, reduce
import inspect
from typing import Any, Generic, TypeVar
import warnings

from jaxtyping import PyTree
import numpy as np
from numpyro.infer.mcmc import MCMCKernel

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from ebmpp.core import Blocks, State, checks, is_concrete, random, sharding
from ebmpp.core.backend import barrier_pays
from ebmpp.errors import ParameterError
from ebmpp.families.values import check_values
from ebmpp.graph import FactorGraph, states
from ebmpp.moves import Layer, Move, Target, gibbs_sweep, search, sweeps

#: Arguments that NumPyro passes: initial values, and keyword arguments of the model.
InitParams = State | None
Kwargs = Mapping[str, Any] | None
#: A run of one chain or of all, from its arguments to its result.
Run = Callable[[PyTree], PyTree]

#: Share of accepted proposals, or swaps, below which chains hardly move.
MIN_ACCEPTANCE = 0.05
# sweeps from which on chains are looked at: where 20 % of the proposals are accepted,
# fewer than 5 of 100 are with probability 4e-6
_FEWEST_SWEEPS = 100

#: A kernel's state, a named tuple with the free blocks ``z`` and the run's ``rng_key``.
S = TypeVar("S", bound=Any)


class RowKernel(MCMCKernel, Generic[S]):
    """NumPyro kernel on the states of a graph. Base class.

    Subclasses define ``_init_one(rng_key, target, init_params)`` and
    ``_sample_one(state, target)`` for one chain (one key, ``target.num_rows`` rows).
    They must draw from ``target.keys`` only; then all of NumPyro's chain methods give
    the same chains.

    ``_sample_fn``, by which NumPyro recognises an initialised kernel, is undefined on
    purpose: a resumed run then calls ``init`` again and drops its state, so that new
    params and clamped values are checked.

    :param init: "uniform": chains start at ``init_params``, with blocks that these lack
        drawn from their conditionals, or without them at uniform draws; "local_mode":
        they start one Gibbs sweep from the local mode that a search from there finds.
    :raises ArgumentError: for anything but a :class:`~ebmpp.FactorGraph`, or an unknown
        ``init``.
    """

    #: a warning for readers of the draws: that they are not of the model, say
    caveat = ""
    model = None  #: read by ``arviz_base.from_numpyro``
    sample_field = "z"
    #: True if ``_sample_one`` takes chains of one row each as the rows of one chain
    _as_rows = False
    #: True if params may have a leading axis of parameter sets
    _takes_sets = False

    def __init__(self, graph: FactorGraph, init: str = "uniform") -> None:
        name = type(self).__name__
        checks.instance(f"{name}: graph", graph, FactorGraph)
        checks.choice(
            f"{name}: init",
            init,
            search.STARTS,
            also="give states as init_params to mcmc.run",
        )
        self.graph = graph
        self.start = init

    def __repr__(self) -> str:
        _, *parameters = inspect.signature(type(self)).parameters.values()
        stored = vars(self) | {"init": self.start}
        words = [repr(self.graph)]
        for parameter in parameters:
            value = stored.get(parameter.name, parameter.default)
            if value != parameter.default:
                words.append(f"{parameter.name}={value!r}")
        return f"{type(self).__name__}({', '.join(words)})"

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: InitParams,
        model_args: tuple,
        model_kwargs: Kwargs,
    ) -> S:
        """Return the initial state. Values that are not traced are checked.

        :param rng_key: one key, or a batch of keys (``chain_method="vectorized"``).
        :param num_warmup: unused, as nothing adapts.
        :param init_params: values of some or all free blocks, each of shape
            ``(*batch, *shape)`` or one that broadcasts to it, after a leading axis of
            chains where keys are batched.
        :param model_args: the params, ``(params,)``.
        :param model_kwargs: the clamped blocks.
        :raises ParameterError: for missing params, or a wrong name, shape or value.
        :raises DomainError: for params under which the model does not normalise.
        :raises StateError: for a wrong name, shape or value of clamped blocks or
            ``init_params``, for draws of a custom family outside of its support, or if
            no block is free.
        """
        target = self.target(model_args, model_kwargs, check=True)
        axis = int(is_batched(rng_key))

        keys = over_chains(target.set_keys, rng_key)(rng_key)
        state = self.init_sets(target, keys, init_params, axis, num_warmup)
        return state._replace(rng_key=rng_key)

    def init_sets(
        self,
        target: Target,
        keys: Array,
        init_params: InitParams,
        axis: int = 0,
        num_warmup: int = 0,
    ) -> S:
        """Return the initial states of all chains of all parameter sets.

        :param axis: number of the axis of sets of keys, states and ``init_params``.
        """
        init = partial(self.init_all, num_warmup=num_warmup)
        state = target.over_sets(init, keys, init_params, axis=axis)
        if not (self.graph.has_zeros and is_concrete(state.z)):
            return state
        for i, single in enumerate(target.each_set()):
            index = (slice(None),) * axis + (i,) if target.sets else ...
            self._check_possible(single, {b: v[index] for b, v in state.z.items()})
        return state

    def init_all(
        self,
        target: Target,
        rng_key: Array,
        init_params: InitParams,
        num_warmup: int = 0,
    ) -> S:
        """Return the initial states of all chains of one parameter set."""
        chains = rng_key.shape[: int(is_batched(rng_key))]
        init_params = _check_init(target, init_params, chains)

        def init(key, values):
            return self._init_one(key, target, values)

        state = over_chains(init, rng_key)(rng_key, init_params)
        for b, v in state.z.items():
            check_values(b, self.graph.families[b], v)
        return state

    def _check_possible(self, target: Target, z: Blocks) -> None:
        """Refuse starts of probability zero."""
        chains = {
            b: v.reshape(-1, *target.batch, *target.shape(b)) for b, v in z.items()
        }
        x = jax.vmap(target.to_rows)(chains)
        rows = {b: v.reshape(-1, *target.shape(b)) for b, v in x.items()}
        name = type(self).__name__
        text = search.check_starts(name, target, rows)
        if text and all(isinstance(move, Layer) for move in self._moves(target)):
            warnings.warn(f"{name}: {text}", stacklevel=2)

    def sample(self, state: S, model_args: tuple, model_kwargs: Kwargs) -> S:
        """Return the state after one step of every chain.

        :raises StateError: if the state is of a run that clamped other blocks, or other
            shapes.
        """
        target = self.target(model_args, model_kwargs, check=False)
        axis = int(is_batched(state.rng_key))

        def step(state):
            keys = over_chains(target.set_keys, state.rng_key)(state.rng_key)
            new = target.over_sets(self.step, state._replace(rng_key=keys), axis=axis)
            return new._replace(rng_key=state.rng_key)

        return track(step, state)

    def step(self, target: Target, state: S) -> S:
        """Return the state after one step of all chains of one parameter set.

        Its flags do not change.
        """
        batched = is_batched(state.rng_key)
        expected = {
            b: target.batch + target.graph.families[b].shape for b in target.free
        }
        actual = {b: v.shape[1:] if batched else v.shape for b, v in state.z.items()}
        if actual != expected:
            raise checks.state_error(
                "free blocks of the chain's state",
                f"of shapes {expected}",
                actual,
                hint="Clamp the blocks and axes of the first run, or set "
                "mcmc.post_warmup_state = None.",
            )
        if not batched:
            return self._sample_one(state, target)
        if self._as_rows and not (target.batch or target.clamped):
            # under vmap the program would be one of a single row, without what pays for
            # many rows
            clamped = dataclasses.replace(target.fixed, batch=state.rng_key.shape[:1])
            return self._sample_one(state, dataclasses.replace(target, fixed=clamped))
        return jax.vmap(lambda s: self._sample_one(s, target))(state)

    @abstractmethod
    def _init_one(self, rng_key: Array, target: Any, init_params: InitParams) -> S:
        """Return the initial state of one chain."""

    @abstractmethod
    def _sample_one(self, state: S, target: Any) -> S:
        """Return the state of one chain after one step."""

    def target(self, model_args: tuple, model_kwargs: Kwargs, check: bool) -> Target:
        """Return the target of model arguments as NumPyro passes them.

        :param check: check values too, not only names and shapes.
        """
        name = type(self).__name__
        if len(model_args) != 1:
            raise ParameterError(
                f"{name}: params must be the only positional argument after the key, "
                f"got {len(model_args)} arguments. Call mcmc.run(key, params, v=...), "
                "with clamped blocks by keyword."
            )
        params, *_ = model_args
        target = Target.checked(
            name, self.graph, params, model_kwargs or {}, check, self._takes_sets
        )
        if check:
            sweeps.check_params(target, self._moves(target))
        return target

    def _moves(self, target: Target) -> tuple[Move, ...]:
        """Return the moves of a sweep: Gibbs draws of all free layers, unless overridden."""
        return gibbs_sweep(target.graph, target.clamped)

    def _start(self, target: Target, rng_key: Array, init_params: InitParams) -> Blocks:
        """Return states of step 0: ``init_params``, and draws of other blocks given these."""
        init = {}
        for b, v in (init_params or {}).items():
            shape = target.graph.families[b].shape
            init[b] = jnp.broadcast_to(v, target.batch + shape).reshape(-1, *shape)

        def draw(target, keys):
            # subclasses may be no pytrees
            rung = target.tempering
            plain = Target(target.graph, target.params, target.fixed, tempering=rung)
            return search.compiled_initial_states(
                plain, keys, init, kind=self.start, blocks=target.free
            )

        return target.starts(draw, target.keys(rng_key, 0))


def all_still(z: Blocks) -> Blocks:
    """Return flags of the blocks of one chain, none of which has moved yet."""
    return {b: jnp.asarray(True) for b in z}


def track(step: Callable[[S], S], state: S) -> S:
    """Return the state after a step, with its flags of blocks that have not moved, if any."""
    flags = getattr(state, "still", None)
    if flags is None:
        return step(state)
    if not barrier_pays(sum(v.size for v in state.z.values())):
        new = step(state)
        return new._replace(still=flags_after(new.z, state.z, flags))
    # To compare large states at each step took as long as the sweep of a lattice, and to
    # keep the old one a fifth of it.
    is_any = reduce(jnp.logical_or, map(jnp.any, flags.values()))
    zeros = {b: flag.astype(jnp.uint32) for b, flag in flags.items()}

    def sums(z, key):
        def add_up():
            # The step takes its key from this branch: XLA then sums the old state before
            # the step, which may overwrite it. The barrier keeps the key in the branch.
            rows = {b: z[b].reshape(*flag.shape, -1) for b, flag in flags.items()}
            return checksums(rows), lax.optimization_barrier(key)

        return lax.cond(is_any, add_up, lambda: (zeros, key))

    before, key = sums(state.z, state.rng_key)
    new = step(state._replace(rng_key=key))
    after, _ = sums(new.z, key)
    still = {b: flag & (before[b] == after[b]) for b, flag in flags.items()}
    return new._replace(still=still)


def flags_after(new: Blocks, old: Blocks, flags: Blocks) -> Blocks:
    """Return the flags of blocks that have not moved, now and before."""
    still = {}
    for b, flag in flags.items():
        is_equal = (new[b] == old[b]).reshape(*flag.shape, -1)
        still[b] = flag & is_equal.all(-1)
    return still


def checksums(z: Blocks) -> Blocks:
    """Return 32 bits per row, in which different rows agree once in 2**32 times.

    Each word is hashed with its place by Wellons' function (2018, *Prospecting for hash
    functions*): values like 1 and -1 differ in the highest bit alone.
    """
    sums = {}
    for b, rows in z.items():
        if rows.dtype.itemsize < 4:
            rows = rows.astype(jnp.float32)  # exact
        words = lax.bitcast_convert_type(rows, jnp.uint32)
        words = words.reshape(*rows.shape[:-1], -1)  # two of a double
        place = lax.broadcasted_iota(jnp.uint32, words.shape, words.ndim - 1)
        words += place * jnp.uint32(0x9E3779B1)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            words = (words ^ words >> jnp.uint32(shift)) * jnp.uint32(factor)
        sums[b] = (words ^ words >> jnp.uint32(16)).sum(-1, dtype=jnp.uint32)
    return sums


def describe_still(state: PyTree, steps: Array) -> str:
    """Name the blocks that have not moved in any chain, from 20 draws of their units on.

    Also name blocks that are not finite, as a custom family may draw.
    """
    names = [
        b
        for b, flag in state.still.items()
        if np.all(flag) and np.size(state.z[b]) * np.max(steps) >= 20
    ]
    text = f", {names} NOT MOVED since the start" if names else ""
    wrong = [b for b, v in state.z.items() if not np.isfinite(v).all()]
    return f"{text}, {wrong} NOT FINITE" if wrong else text


def describe_acceptance(state: PyTree) -> str:
    """Return the mean share of accepted proposals as text, if moves make any."""
    if state.acceptance is None:
        return ""
    return f", acceptance {np.mean(state.acceptance):.2g}"


def warn_acceptance(who: str, state: PyTree, stacklevel: int) -> None:
    """Warn of chains of 100 sweeps or more that reject nearly all proposals."""
    if state.acceptance is None or np.max(state.i) < _FEWEST_SWEEPS:
        return
    is_low = np.asarray(state.acceptance) < MIN_ACCEPTANCE
    if is_low.any():
        warnings.warn(
            f"{who}: {is_low.sum()} of {is_low.size} chains accept less than "
            f"{MIN_ACCEPTANCE:.0%} of their proposals, so that they may stay near "
            "their starts, and all values may be wrong beyond their errors. Give moves "
            "of a smaller step_size, likelier starts, or other moves.",
            stacklevel=stacklevel + 1,
        )


def is_batched(rng_key: Array) -> bool:
    """Return True for an array of keys, typed ``(C,)`` or legacy ``(C, 2)``."""
    if not isinstance(rng_key, Array | np.ndarray):
        checks.key("rng_key", rng_key)
    return rng_key.ndim > (0 if random.is_typed(rng_key) else 1)


def over_chains(fn: Callable[..., S], rng_key: Array) -> Callable[..., S]:
    """Map a function of one chain over all chains, if there is a key for each."""
    return jax.vmap(fn) if is_batched(rng_key) else fn


def sharded_chains(mesh: Mesh) -> Callable[[Run], Run]:
    """Return a ``chain_method`` of NumPyro's ``MCMC`` that shards chains over devices.

    For many chains: they are vectorized on each device, where "vectorized" runs all on
    one device and "parallel" one per device. Draws are bitwise the same as by other
    methods, and stay on their devices. NumPyro shows no progress for a callable
    ``chain_method``, and runs a single chain without it.

    :param mesh: devices of this process. Chains are sharded over its first axis, which
        must divide their number.
    :raises ArgumentError: for anything but a mesh, or another number of chains.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> method = ebmpp.kernels.sharded_chains(jax.make_mesh((len(jax.devices()),), ("chains",)))
    >>> mcmc = MCMC(ebmpp.BlockedGibbs(rbm), num_warmup=0, num_samples=5, num_chains=8,
    ...             chain_method=method, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), rbm.init(jax.random.key(1)))
    >>> mcmc.get_samples(group_by_chain=True)["v"].shape
    (8, 5, 4)
    """
    name = "sharded_chains: mesh"
    with sharding.use_mesh(name, mesh):
        devices = sharding.num_shards()
        axis = mesh.axis_names[0]

    def method(fn):
        def run(chains):
            count = len(jax.tree.leaves(chains)[0])
            if count % devices != 0:
                raise checks.error(
                    "sharded_chains: num_chains",
                    f"a multiple of {devices} devices",
                    count,
                )
            with sharding.use_mesh(name, mesh):
                sharded = jax.shard_map(
                    jax.vmap(fn), in_specs=P(axis), out_specs=P(axis), check_vma=False
                )
                return jax.jit(sharded)(chains)

        return run

    return method


def _check_init(
    target: Target, init_params: State | None, chains: tuple[int, ...]
) -> Blocks | None:
    """Return checked initial values; raise a StateError for a wrong name, shape or value."""
    if init_params is None:
        return None
    sweeps.check_free("init_params", target, init_params)
    result = {}
    for block, value in init_params.items():
        value = states.as_array(block, value)
        family = target.graph.families[block]
        lead = value.shape[len(chains) : len(value.shape) - len(family.shape)]
        pairs = zip(lead[::-1], target.batch[::-1])
        fits = len(lead) <= len(target.batch) and all(n in (1, m) for n, m in pairs)
        if value.shape != chains + lead + family.shape or not fits:
            axes = "a single chain has no axis of chains"
            if chains:
                axes = f"{chains[0]} chains come first"
            raise checks.state_error(
                f"init_params: block {block!r}",
                f"of shape {chains + target.batch + family.shape} ({axes})",
                value.shape,
            )
        result[block] = states.cast_values(block, family, value)
    return result
