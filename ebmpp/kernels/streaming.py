# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Chains of an MCMC that advance in chunks of steps, and moments of every draw.

Batches of draws are merged in float64 on the host, with errors of the means.
"""

from collections.abc import Callable, Mapping, Sequence
import copy
import dataclasses
import math
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from jaxtyping import PyTree
import numpy as np
from numpyro.infer.mcmc import MCMC, MCMCKernel
from numpyro.util import identity, nested_attrgetter

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import at_index, checkpoints, checks, select
from ebmpp.kernels.base import InitParams, Run, is_batched

T = TypeVar("T", bound=PyTree)


class RunningMoments(NamedTuple):
    """Mean and sum of squared deviations of one chain's draws, by draw (Welford, 1962)."""

    count: Any
    mean: Any
    squares: Any

    def add(self, values: Array) -> "RunningMoments":
        """Return the moments with one more draw."""
        count = self.count + 1
        delta = values - self.mean
        mean = self.mean + delta / count.astype(delta.dtype)
        return RunningMoments(count, mean, self.squares + delta * (values - mean))


@dataclasses.dataclass(eq=False)
class Chunks:
    """The chains of ``mcmc`` after their warm-up, advanced some steps at a time.

    ``MCMC.run`` is not called: it compiles its loop again each time, 0.2 s or more for
    a chunk of 1 ms.

    :param fn: from one chain's draw to a pytree of numbers.
    :param fields: names of state fields whose moments are accumulated as well.
    :param keep: sites to store: True for all, or their names.
    """

    mcmc: MCMC
    fn: Callable[..., PyTree]
    fields: Sequence[str]
    keep: bool | Sequence[str]
    args: tuple
    kwargs: Mapping[str, Any]
    rng_key: dataclasses.InitVar[Array]
    init_params: dataclasses.InitVar[InitParams]

    def __post_init__(self, rng_key: Array, init_params: InitParams) -> None:
        mcmc = self.mcmc
        self._kernel = _uninitialised(mcmc.sampler)
        self._vectorized = mcmc.chain_method == "vectorized" and mcmc.num_chains > 1
        self._programs: dict[tuple[int, int], Run] = {}
        keys = rng_key  # of all chains, or of the only one
        if is_batched(rng_key):
            if not len(rng_key) == mcmc.num_chains > 1:
                raise checks.error(
                    "LongRun: rng_key", f"one key or {mcmc.num_chains}", len(rng_key)
                )
        elif mcmc.num_chains > 1:
            keys = jax.random.split(rng_key, mcmc.num_chains)
        self._start = keys, init_params
        self.state, self.running = self._map(self._init)(self._start)

    def code(self) -> str:
        """Return a digest of the program of one step, whatever the chain method."""
        inputs = self._start, (self.state, self.running)
        if self.mcmc.num_chains > 1 and not self._vectorized:
            inputs = jax.tree.map(itemgetter(0), inputs)
        return checkpoints.computation(
            lambda *args: self._advance(*args, 1, 1), *inputs
        )

    def begin(self, saved: Sequence[np.ndarray] | None) -> None:
        """Warm the chains up, or continue from :meth:`arrays` of an earlier call."""
        mcmc = self.mcmc
        keys, _ = self._start
        if saved is not None:
            leaves = iter(saved)

            def restore(template):
                template = jnp.asarray(template)
                return jnp.asarray(checkpoints.from_numbers(next(leaves), template))

            self.state, self.running = jax.tree.map(restore, (self.state, self.running))
        elif mcmc.post_warmup_state is not None:
            key = keys[0] if mcmc.sampler.is_ensemble_kernel else keys
            self.state = mcmc.post_warmup_state._replace(rng_key=key)
        elif mcmc.num_warmup:
            self.run(mcmc.num_warmup, mcmc.num_warmup)
            self.reset()

    def _init(self, start: tuple[Array, InitParams]) -> tuple[PyTree, RunningMoments]:
        """Return the kernel's initial state and empty moments, given a key and values."""
        key, init_params = start
        state = self._kernel.init(
            key, self.mcmc.num_warmup, init_params, self.args, self.kwargs
        )
        zeros = jnp.zeros_like(self._observe(state, self._numbers))
        count = jnp.zeros(self.mcmc.num_chains if self._vectorized else (), jnp.int32)
        return state, RunningMoments(count, zeros, zeros)

    def _advance(
        self, start: tuple, carry: tuple, steps: int, thinning: int
    ) -> tuple[tuple, PyTree]:
        """Make ``steps`` steps; also return what is kept of every ``thinning``-th."""
        # what `init` leaves on a kernel belongs to the trace in which it was called
        self._kernel = _uninitialised(self.mcmc.sampler)
        self._init(start)

        def stride(carry, _):
            state, running = lax.fori_loop(0, thinning, self._sample, carry)
            stored = self._observe(state, self._stored) if self.keep else {}
            return (state, running), stored

        return lax.scan(stride, carry, length=steps // thinning)

    def _sample(
        self, index: Array, carry: tuple[PyTree, RunningMoments]
    ) -> tuple[PyTree, RunningMoments]:
        state, running = carry
        state = self._kernel.sample(state, self.args, self.kwargs)
        add = jax.vmap(RunningMoments.add) if self._vectorized else RunningMoments.add
        return state, add(running, self._observe(state, self._numbers))

    def _observe(
        self, state: PyTree, fn: Callable[[PyTree, dict[str, PyTree]], T]
    ) -> T:
        """Apply ``fn`` to the draw and the fields of each chain."""
        constrain = self.mcmc.postprocess_fn or self._kernel.postprocess_fn(
            self.args, self.kwargs
        )

        def observe(z, fields):
            return fn(constrain(z), fields)

        fields = {name: self._field(state, name) for name in self.fields}
        z = self._field(state, self._kernel.sample_field)
        return (jax.vmap(observe) if self._vectorized else observe)(z, fields)

    def _numbers(self, draw: PyTree, fields: dict[str, PyTree]) -> Array:
        """Return the numbers whose moments are accumulated as one vector."""

        def as_float(value):
            numbers = checks.numbers("LongRun: fn and fields", value)
            return jnp.asarray(numbers, float)

        values = jax.tree.map(as_float, {"fn": self.fn(draw), "fields": fields})
        leaves, self._structure = jax.tree.flatten(values)
        self._shapes = [leaf.shape for leaf in leaves]
        return ravel_pytree(values)[0]

    def _stored(
        self, draw: PyTree, fields: dict[str, PyTree]
    ) -> dict[str, dict[str, PyTree]]:
        """Return what is kept of a draw, by group."""
        sites = leaves_by_name(draw, self._kernel.sample_field)
        if not isinstance(self.keep, bool):
            sites = select(sites, checks.names("site", self.keep, sites))
        return {"posterior": sites, "sample_stats": leaves_by_name(fields, "field")}

    def _field(self, state: PyTree, name: str) -> PyTree:
        try:
            return nested_attrgetter(name)(state)
        except (KeyError, IndexError, TypeError):
            fields = list(getattr(state, "_fields", ()))
            raise checks.error(
                "LongRun: extra_fields",
                f"among the fields of the state, {fields}",
                name,
            ) from None

    def _map(self, fn: Run, jit: Callable[..., Run] = identity) -> Run:
        """Map a function of one chain over all of them, as ``MCMC.run`` does."""
        num_chains = self.mcmc.num_chains
        method = self.mcmc.chain_method
        if num_chains == 1 or method == "vectorized":
            return jit(fn)
        if method == "parallel":
            return jax.pmap(fn)
        if callable(method):
            return jit(method(fn))
        run_one = jit(fn)

        def run_all(chains):
            results = []
            for number in range(num_chains):
                chain = jax.tree.map(itemgetter(number), chains)
                results.append(run_one(chain))
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

        return run_all

    def run(self, steps: int, thinning: int) -> dict[str, dict[str, Array]]:
        """Advance all chains; return what is kept of each ``thinning``-th step.

        :return: arrays ``(chains, draws, ...)``.
        """
        size = steps, thinning
        if size not in self._programs:
            self._programs[size] = self._map(
                lambda inputs: self._advance(*inputs, *size), jax.jit
            )
        inputs = self._start, (self.state, self.running)
        (self.state, self.running), stored = self._programs[size](inputs)
        if self.mcmc.num_chains == 1:
            return at_index(stored, None)
        if self._vectorized:
            return jax.tree.map(lambda a: a.swapaxes(0, 1), stored)
        return stored

    def reset(self) -> None:
        """Set the moments to zero."""
        self.running = jax.tree.map(jnp.zeros_like, self.running)

    def moments(self) -> RunningMoments:
        """Return the moments as float64 arrays with a leading axis of chains."""

        def as_float64(leaf):
            values = np.asarray(leaf, float)
            return values[None] if self.mcmc.num_chains == 1 else values

        return jax.tree.map(as_float64, self.running)

    def unravel(self, vector: np.ndarray) -> dict[str, PyTree]:
        """Return numbers, ``(..., numbers)``, as trees of ``fn`` and of ``fields``."""
        ends = np.cumsum([math.prod(shape) for shape in self._shapes])
        parts = zip(np.split(vector, ends[:-1], axis=-1), self._shapes)
        leaves = [part.reshape(part.shape[:-1] + shape) for part, shape in parts]
        return jax.tree.unflatten(self._structure, leaves)

    def arrays(self) -> list[np.ndarray]:
        """Return all that the chains need to continue."""
        leaves = jax.tree.leaves((self.state, self.running))
        return [np.asarray(checkpoints.as_numbers(leaf)) for leaf in leaves]


def leaves_by_name(tree: PyTree, default: str) -> dict[str, PyTree]:
    """Return the leaves of a pytree by dotted paths; ``default`` names a tree that is a leaf.

    >>> leaves_by_name({"a": {"b": 1}, "c": (2, 3)}, "x"), leaves_by_name(4, "x")
    ({'a.b': 1, 'c.0': 2, 'c.1': 3}, {'x': 4})
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") or default: leaf
        for path, leaf in leaves
    }


def variable_name(name: str) -> str:
    """Return a name without slashes, which separate groups.

    >>> variable_name("left/z")
    'left.z'
    """
    return name.replace("/", ".")


def variable_names(draws: Mapping[str, Any]) -> dict[str, str]:
    """Return a variable's name for each site; one that names a dimension gets an underscore.

    :param draws: by site, ``(chains, draws, ...)``.

    >>> import numpy as np
    >>> x = np.zeros((2, 10, 3))
    >>> variable_names({"x": x, "x_dim_0": x, "chain": x, "a/b": x, "a.b": x})
    {'x': 'x', 'x_dim_0': 'x_dim_0_', 'chain': 'chain_', 'a.b': 'a.b', 'a/b': 'a.b_'}
    """
    reserved = {"chain", "draw", "statistic"}
    for name, x in draws.items():
        reserved.update(f"{variable_name(name)}_dim_{i}" for i in range(x.ndim - 2))
    result = {}
    for name in sorted(draws, key=lambda name: "/" in name):
        variable = variable_name(name)
        while variable in reserved:
            variable += "_"
        reserved.add(variable)
        result[name] = variable
    return result


def _uninitialised(kernel: MCMCKernel) -> MCMCKernel:
    """Return a copy of a kernel without what an earlier ``init`` left on it."""
    try:
        return copy.copy(kernel.wrap_model(lambda model: model))
    except (NotImplementedError, ValueError):  # it has no model
        return copy.copy(kernel)


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of a long run: each field is an array of the values' shape, or a tree of such arrays.

    There are two estimates of the error of a mean. **Between chains**: from the spread
    of the chains' means, whatever their autocorrelation; with C chains its relative
    error is about ``1 / sqrt(2 C - 2)``, and it is nan for one chain. **By batches**:
    from the spread of the means of batches of successive draws around the overall mean.
    It holds where batches are much longer than the autocorrelation time, and is nan for
    fewer than two batches per chain. Both are nan where all draws are equal. Neither
    detects modes that no chain has visited.

    :param mean: over all draws of all chains.
    :param variance: over all draws of all chains, unbiased for independent draws.
    :param mcse_chains: standard error of the mean, between chains.
    :param mcse_batches: standard error of the mean, by batches (replicated batch
        means).
    :param ess_chains: effective sample size between chains.
    :param ess_batches: effective sample size by batches.
    :param r_hat: Gelman and Rubin's, of whole chains (neither split nor ranked, which
        takes the draws themselves); nan for one chain, and for values that never
        changed.
    :param chain_means: with a leading axis of chains.

    **References**

    1. Gelman, Rubin (1992), *Inference from iterative simulation using multiple
       sequences*.
    2. Argon, Andradottir (2006), *Replicated batch means for steady-state simulations*.
    3. Gupta, Vats (2020), *Estimating Monte Carlo variance from multiple Markov
       chains*.
    """

    mean: Any
    variance: Any
    mcse_chains: Any
    mcse_batches: Any
    ess_chains: Any
    ess_batches: Any
    r_hat: Any
    chain_means: Any

    def map(self, fn: Callable[[PyTree], PyTree]) -> "Moments":
        """Apply a function to each field."""
        return Moments(*map(fn, vars(self).values()))


class Totals(NamedTuple):
    """Moments of ``batches`` batches of ``length`` draws per chain.

    - **mean** - of each chain, ``(chains, numbers)``.
    - **within** - squared deviations from each batch's mean, summed over batches and
      chains, ``(numbers,)``.
    - **between** - squared deviations of the batches' means from each chain's mean,
      summed, ``(numbers,)``.
    """

    length: int
    batches: int
    mean: np.ndarray
    within: np.ndarray
    between: np.ndarray

    @classmethod
    def empty(cls, length: int, chains: int, numbers: int) -> "Totals":
        """Return the totals of no batch."""
        none = np.zeros(numbers)
        return cls(length, 0, np.zeros((chains, numbers)), none, none)

    def add(self, batch: RunningMoments, draws: int) -> "Totals":
        """Merge a batch of ``draws`` draws per chain: Chan, Golub, LeVeque (1983), eq. 2.1.

        A batch shorter than ``length`` must be the last: ``batches`` does not count it.
        """
        before = self.batches * self.length
        share = draws / (before + draws)
        gap = batch.mean - self.mean
        within = self.within + batch.squares.sum(0)
        between = self.between + before * share / self.length * (gap * gap).sum(0)
        batches = self.batches + (draws == self.length)
        return Totals(self.length, batches, self.mean + share * gap, within, between)

    def moments(self, open_batch: RunningMoments, open_draws: int) -> Moments:
        """Return moments of all draws, the last ``open_draws`` of each chain in no batch."""
        totals = self.add(open_batch, open_draws) if open_draws else self
        mean = totals.mean
        chains = len(mean)
        length = self.length
        batches = self.batches
        draws = batches * length + open_draws
        grand = mean.mean(0)
        squares = totals.within + length * totals.between  # around each chain's mean
        spread = ((mean - grand) ** 2).sum(0)
        variance = _divide(squares + draws * spread, draws * chains - 1)
        of_chains = _divide(spread, chains - 1)
        disagreement = batches * ((self.mean - self.mean.mean(0)) ** 2).sum(0)
        of_batches = _divide(
            self.between + disagreement, batches * chains - 1 if batches > 1 else 0
        )
        inner = _divide(squares / chains, draws - 1)
        errors = of_chains / chains, length * of_batches / (draws * chains)
        with np.errstate(all="ignore"):
            ess = [variance / error for error in errors]
            # equal draws have no known error
            errors = [np.where(variance > 0, error, np.nan) for error in errors]
            r_hat = np.sqrt(((draws - 1) / draws * inner + of_chains) / inner)
            return Moments(grand, variance, *map(np.sqrt, errors), *ess, r_hat, mean)


def _divide(value: np.ndarray, by: int) -> np.ndarray:
    return value / by if by > 0 else np.full_like(value, np.nan)
