# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Expectations under a model as values that JAX differentiates without bias.

For a loss with derivative g in E[f], the derivative in a param :math:`\theta` is that
of a surrogate,

.. math::

    E[\partial s / \partial \theta] - \mathrm{Cov}(s, \partial E / \partial \theta),
    \qquad s = \langle g, f \rangle.

The forward pass keeps each pair's estimate :math:`H_i(f)`. The backward pass runs the
pairs again, from the same keys, and sums the derivative of
:math:`s - (s - b_i) E` over their weighted states, with :math:`s - b_i` held fixed,
where :math:`b_i` is the mean of :math:`H_j(s)` over the other pairs: see
:mod:`ebmpp.coupling.covariance`. Memory does not grow with the number of pairs times
that of params.
"""

from collections.abc import Callable
import dataclasses
from functools import partial
from typing import NamedTuple, NoReturn

from jaxtyping import PyTree

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

from ebmpp.annealing.ladder import find_ladder
from ebmpp.annealing.particle_pairs import proposal, run_pair
from ebmpp.annealing.path import Path
from ebmpp.annealing.reference import center, run_pilot
from ebmpp.core import (
    Blocks,
    Counts,
    Key,
    Params,
    PerRow,
    Rows,
    at_index,
    checks,
    compiled,
    expand,
    random,
    sharding,
)
from ebmpp.coupling.accumulators import (
    Accumulator,
    Function,
    blocks_of,
    check_function,
    state_shapes,
)
from ebmpp.coupling.covariance import mean_of_others
from ebmpp.coupling.engine import run_pairs
from ebmpp.coupling.expectation import NEVER, Pooled
from ebmpp.coupling.slots import Fresh, Outcome, Window
from ebmpp.errors import ArgumentError
from ebmpp.exact import enumeration
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.states import Clamped
from ebmpp.moves import Move, Pool, Target
from ebmpp.moves.couplings import where_rows
from ebmpp.moves.sweeps import (
    CouplingLike,
    check_params,
    resolve_moves,
    single_moves,
    with_pool,
)


class _Inputs(NamedTuple):
    """Traced inputs; the estimate does not depend on the pool on average."""

    params: Params
    closed: PyTree
    """Values that the function closes over."""
    clamped: Rows
    pool: Pool | None


class _Pairs(NamedTuple):
    """Settings of coupled pairs, ``num_pairs`` for each of the clamped rows."""

    graph: FactorGraph
    fn: Callable[..., PyTree]
    num_rows: int
    num_pairs: int
    moves: tuple[Move, ...]
    limit: int
    # a pilot counts no state, and shares the program of the estimate
    num_runs = 2
    first_window = NEVER, 1, 1

    def run(
        self, inputs: _Inputs, key: Key, window: Window, sums: Accumulator
    ) -> Outcome:
        """Run the pairs of each row in turn, with independent starts of both chains."""
        count = self.num_rows * self.num_pairs
        clamped = {b: v.repeat(self.num_pairs, 0) for b, v in inputs.clamped.items()}
        fixed = Clamped(clamped, batch=(count,))
        target = Target(self.graph, inputs.params, fixed, inputs.pool)
        start_key, run_key = random.fold_in(key, jnp.arange(2))
        keys = random.fold_in(start_key, jnp.arange(count))
        x = Fresh(keys, {}, "uniform")
        y = Fresh(random.fold_in(keys, 1), {}, "uniform")
        # part of the caller's program, since accumulators close over traced values
        return run_pairs.fn(target, self.moves, sums, None, x, y, run_key, window)


class _Particles(NamedTuple):
    """Settings of coupled chains of particle systems, as of :class:`_Pairs`."""

    graph: FactorGraph
    fn: Callable[..., PyTree]
    num_rows: int
    num_pairs: int
    num_particles: int
    limit: int
    num_runs = 1
    first_window = 0, 0, 1  # one sum per pair, already a mean

    def run(
        self, inputs: _Inputs, key: Key, window: Window, sums: Accumulator
    ) -> Outcome:
        """Run the pairs in turn, with the reference and rungs of a pilot for each row."""
        graph = self.graph
        params = inputs.params
        moves = single_moves("expectation: moves", graph, None, inputs.clamped)
        num = self.num_particles
        ladder_key, run_key = random.fold_in(key, jnp.arange(2))

        def fixed_at(row):
            return Clamped({b: v[row][None] for b, v in inputs.clamped.items()})

        def path_at(row, eta0):
            line = Path.line(graph, eta0, params, moves)
            return dataclasses.replace(line, fixed=fixed_at(row))

        def run_pilots(row):
            pilot = run_pilot(Target(graph, params, fixed_at(row)), key, moves)
            eta0 = center(graph, pilot)
            # as ParticleUCD's; a path of more rungs ends with a long one, without bias
            return eta0, find_ladder(path_at(row, eta0), ladder_key, num, 0.95, 1024)

        pilots = lax.map(run_pilots, jnp.arange(self.num_rows))
        target = Target(graph, params)
        empty = sums.init(target, 1)

        def run_one(total, number):
            # one sum for all pairs, or the row of this one
            jobs = jnp.full(num, 0 if sums.per_job else number)
            add_states = partial(sums.add, target, empty, jobs=jobs)
            row = number // self.num_pairs
            eta0, ladder = at_index(pilots, row)
            propose = proposal(add_states, num, path_at(row, eta0), ladder)
            pair_key = random.fold_in(run_key, number)
            pair = run_pair(propose, pair_key, 0, 1, self.limit)

            def add(total, h):
                return total.at[number].set(h[0]) if sums.per_job else total + h

            tau = jnp.where(pair.broken, -1, pair.meeting_time)
            return jax.tree.map(add, total, pair.total), tau

        count = self.num_rows * self.num_pairs
        result = lax.scan(run_one, sums.init(target, count), jnp.arange(count))
        return Outcome(*result, jnp.ones(()), None)


@compiled(statics=1, size=64, unbounded=True)
def _forward(
    pairs: _Pairs | _Particles, inputs: _Inputs, key: Key
) -> tuple[PyTree, tuple]:
    """Return the mean, and estimates by each pair with what they are run again with."""
    limit = pairs.limit
    sums = Function(lambda x: pairs.fn(x, *inputs.closed), blocks_of(pairs.graph))

    def run(window, key):
        outcome = pairs.run(inputs, key, window, sums)
        met = outcome.meeting_time >= 0
        times = jnp.where(met, outcome.meeting_time, limit) - window.lag
        lag = jnp.quantile(times, 0.95, method="higher").astype(jnp.int32)
        lag = jnp.clip(lag, 1, limit - 1 if limit else None)

        def average(total):
            h = total / (window.m - window.k + 1)
            return jnp.where(expand(met, h), h, jnp.nan)

        h = jax.tree.map(average, outcome.total)
        return window._replace(k=lag, m=2 * lag, lag=lag), (h, key, window)

    first = Window(*map(jnp.int32, (*pairs.first_window, limit)))
    _, runs = lax.scan(run, first, random.fold_in(key, jnp.arange(pairs.num_runs)))
    h, key, window = at_index(runs, -1)

    def mean(h):
        return h.reshape(-1, pairs.num_pairs, *h.shape[1:]).mean(1)

    return jax.tree.map(mean, h), (inputs, h, key, window)


class _Surrogate(NamedTuple):
    """Accumulator of the surrogate's derivative in the inputs.

    :param cotangent: of the mean, for each clamped row.
    :param others: mean of s over the other pairs, for each pair.
    """

    pairs: _Pairs | _Particles
    inputs: _Inputs
    cotangent: PyTree
    others: PerRow
    per_job = False

    def init(self, target: Target, num_jobs: int) -> _Inputs:
        return jax.tree.map(lambda a: jnp.zeros(a.shape), self.inputs)

    def add(
        self, target: Target, total: _Inputs, x: Rows, weights: PerRow, jobs: Counts
    ) -> _Inputs:
        # a slot without a pair may hold no state; the first one has had a pair
        x = {b: where_rows(weights != 0, v, v[0]) for b, v in x.items()}
        row = jobs // self.pairs.num_pairs

        def surrogate(inputs):
            states = x | at_index(inputs.clamped, row)
            values = jax.vmap(lambda x: self.pairs.fn(x, *inputs.closed))(states)
            s = jax.vmap(optax.tree.vdot)(at_index(self.cotangent, row), values)
            fixed = lax.stop_gradient(s - self.others[jobs])
            log_density = energy.log_density(self.pairs.graph, inputs.params, states)
            return weights @ (s + fixed * log_density)

        def add(total, gradient):
            is_real = gradient.dtype != jax.dtypes.float0
            return total + gradient if is_real else total

        gradient = jax.grad(surrogate, allow_int=True)(self.inputs)
        return jax.tree.map(add, total, gradient)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
@compiled(statics=1, size=64, unbounded=True)
def _gradient(
    pairs: _Pairs | _Particles, residuals: tuple, cotangent: PyTree
) -> _Inputs:
    inputs, h, key, window = residuals
    by_pair = jax.tree.map(lambda g: g.repeat(pairs.num_pairs, 0), cotangent)
    s = jnp.reshape(jax.vmap(optax.tree.vdot)(by_pair, h), (-1, pairs.num_pairs))
    others = jnp.ravel(jax.vmap(mean_of_others)(s))
    sums = _Surrogate(pairs, inputs, cotangent, others)
    count = pairs.num_pairs * (window.m - window.k + 1)
    total = pairs.run(inputs, key, window, sums).total
    return jax.tree.map(lambda g, a: (g / count).astype(a.dtype), total, inputs)


@_gradient.defjvp
def _refuse(*_: PyTree) -> NoReturn:
    raise ArgumentError(
        "expectation must be differentiated once, by reverse mode, got a second "
        'derivative. Pass method="exact" where the states can be listed, or estimate '
        "covariances of the energy's derivatives."
    )


_mean = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(0,))
_mean.defvjp(lambda *args: _forward(*args), lambda *args: (_gradient(*args), None))


def _exact(target: Target, fn: Callable[[Blocks], PyTree]) -> PyTree:
    """Return sums over all states of the free blocks, for each clamped row."""
    graph = target.graph
    plan = enumeration.Plan(target.free)
    enumeration.refuse_many(graph, plan, enumeration.MOST_LISTED)
    states = enumeration.list_states(graph, target.free)

    def at_row(clamped):
        x = jax.vmap(lambda state: state | clamped)(states)
        p = jax.nn.softmax(energy.log_density(graph, target.params, x))
        return jax.tree.map(lambda v: jnp.tensordot(p, v, 1), jax.vmap(fn)(x))

    return jax.vmap(at_row, axis_size=target.num_rows)(target.clamped)


def expectation(
    graph: FactorGraph,
    params: Params,
    fn: Callable[[Blocks], PyTree],
    *,
    rng_key: Array,
    num_pairs: int = 100,
    num_particles: int = 1000,
    method: CouplingLike = "gibbs",
    pool: Pooled = None,
    max_sweeps: int | None = None,
    **clamped: Array,
) -> PyTree:
    r"""Return E[fn(state)] under the model, a value that JAX differentiates without bias.

    ``jax.grad``, ``jax.vjp`` and ``jax.value_and_grad`` differentiate it in the params,
    in traced values that ``fn`` closes over, and in real-valued clamped blocks, also
    under ``jax.jit`` and ``jax.vmap``. The derivative in a param is :math:`E[\partial f
    / \partial \theta] - \mathrm{Cov}(f, \partial E / \partial \theta)`, a covariance
    from independent coupled pairs of chains, so a model is a layer of a network.

    The value and its derivatives are unbiased, and so is the gradient of every loss
    that is linear in the value. The gradient of another loss has a bias of order
    1/``num_pairs``, since the same pairs estimate the value at which it is linearised.
    For a product, as in a square, call twice with different keys: ``(a - target) * (b -
    target)`` has the expectation of the squared error, and unbiased derivatives.

    A pilot of as many other pairs chooses the window of the pairs, k = lag = the 0.95
    quantile of its meeting times and m = 2 lag. Particle systems have k = 0 and m = 1,
    and a pilot for their rungs. The backward pass runs the pairs again, in about the
    time of the forward pass. Each new function is compiled for seconds: call inside
    ``jax.jit``, or pass the same function again.

    :param fn: from one state (a dict of all blocks, without batch axes) to a pytree of
        numbers. It may close over traced values.
    :param rng_key: a jax key.
    :param num_pairs: independent pairs for each clamped row, at least 2. The default is
        that of a step of training, a tenth of :func:`~ebmpp.unbiased_expectation`'s.
    :param num_particles: particles per system, at least 2, for "particles".
    :param method: "gibbs" for chains of Gibbs sweeps; "mixture" for proposals from a
        ``pool``, as for :class:`~ebmpp.UCD`; "particles" for chains of particle
        systems, as for :func:`~ebmpp.particle_expectation`, where Gibbs chains do not
        meet; moves, or a function that returns moves, as ``coupling`` of
        :func:`~ebmpp.unbiased_expectation`; or "exact" for the sum over at most 2^20
        states of the free blocks, which has derivatives of all orders.
    :param pool: rows of some blocks that resemble draws of the model, for "mixture".
    :param max_sweeps: stop a pair that has not met after so many sweeps, or particle
        systems, at least 3. The values of its row are then nan, and so are all
        derivatives of the params. None: no limit.
    :param clamped: clamped blocks, with or without leading axes: a layer given its
        inputs. Each row has pairs of its own.
    :return: the value of ``fn`` with the leading axes of the clamped blocks.
    :raises ArgumentError: for arguments of wrong type or out of range, and for a second
        derivative, in which the states of the pairs would count as constants. Forward
        mode raises JAX's ``TypeError``.
    :raises IntractableError: for "exact" with too many states.
    :raises StateError: for clamped values or a pool that do not fit the graph.
    :raises ParameterError: for params that do not fit the graph.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with
       couplings*, for the estimates by pairs.
    2. Middleton, Deligiannidis, Doucet, Jacob (2019), *Unbiased smoothing using
       particle independent Metropolis-Hastings*, for those by particle systems.
    3. Kool, van Hoof, Welling (2019), *Buy 4 REINFORCE samples, get a baseline for
       free!*: for independent draws the gradient is their leave-one-out estimator.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(2), h=ebmpp.Bernoulli(2))
    >>> params = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> def mean(params):
    ...     return ebmpp.expectation(rbm, params, lambda x: x["v"][0], method="exact",
    ...                              rng_key=jax.random.key(1))
    >>> jax.grad(mean)(params)["v"].tolist()  # a variance and a covariance
    [0.25, 0.0]
    """
    key = random.key_pair(checks.key("expectation: rng_key", rng_key))
    num_pairs = checks.count("expectation: num_pairs", num_pairs, 2)
    size = checks.count("expectation: num_particles", num_particles, 2)
    limit = checks.optional_count("expectation: max_sweeps", max_sweeps, 3) or 0
    if isinstance(method, str):
        methods = ("gibbs", "mixture", "particles", "exact")
        checks.choice("expectation: method", method, methods, "moves")
    target = Target.checked("expectation", graph, params, clamped)
    if target.keep:
        raise checks.state_error("expectation: clamped", "whole blocks", [*target.keep])
    if sharding.num_shards() > 1:
        raise checks.error("expectation: devices", "one", sharding.num_shards())
    check_function("expectation: fn", fn, blocks_of(graph))
    if method == "exact":
        value = _exact(target, fn)
    else:
        is_particles = method == "particles"
        coupling = None if method == "gibbs" else method
        moves = () if is_particles else resolve_moves(graph, coupling, target.clamped)
        check_params(target, moves)
        key, pool_key = random.fold_in(key, jnp.arange(2))
        target = with_pool("expectation", target, moves, pool, pool_key)
        converted, closed = jax.closure_convert(fn, state_shapes(blocks_of(graph)))
        # compiled once if it closes over known values only; a partial is not warned of
        fn = partial(converted) if closed else fn
        pairs = _Pairs(graph, fn, target.num_rows, num_pairs, moves, limit)
        if is_particles:
            pairs = _Particles(graph, fn, target.num_rows, num_pairs, size, limit)
        inputs = _Inputs(params, closed, target.clamped, target.pool)
        value = _mean(pairs, jax.tree.map(jnp.asarray, inputs), key)
    return jax.tree.map(lambda v: v.reshape(*target.batch, *v.shape[1:]), value)
