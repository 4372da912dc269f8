# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Annealed importance sampling: log Z of models that are too large to sum, from both sides.

Forward, weights are unbiased for Z, so the log of their mean is too small on average: a
lower bound of log Z. In reverse, from draws of the model, they are unbiased for 1/Z,
which gives an upper bound. Particles do not interact, as they do in
:mod:`ebmpp.annealing.systems`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
from functools import partial

from jaxtyping import Float32, PyTree
import numpy as np
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh

from ebmpp import exact
from ebmpp.annealing import ladder as ladders
from ebmpp.annealing.log_partition import Bracket, LogPartition, summarize, warn
from ebmpp.annealing.path import Path, draw_reference
from ebmpp.annealing.reference import (
    check_model,
    log_partition,
    reference as find_reference,
)
from ebmpp.core import (
    Blocks,
    Keys,
    Params,
    StateLike,
    checks,
    compiled,
    in_chunks,
    random,
    select,
    sharding,
)
from ebmpp.errors import IntractableError, UnmetError
from ebmpp.exact import enumeration, perfect_sample, shifted
from ebmpp.exact.perfect import MAX_SWEEPS
from ebmpp.graph import FactorGraph, states
from ebmpp.moves import Layer, Target
from ebmpp.moves.sweeps import MovesLike, single_moves

_STEPS = 100  # per call of the device, after which a progress bar is updated
_PILOT = 10  # an adaptive ladder costs a run with this many times fewer temperatures
_ADVICE = (
    "Raise num_temperatures, or give a reference that is nearer to the model "
    "(data=..., reference=...)."
)
_DRAWS = (
    "Give samples=..., the last states of long chains of BlockedGibbs or "
    "ParallelTempering, or call bracket, which makes draws. Either bounds log Z only "
    "as far as they are distributed as the model."
)
_MOST_SUMMED = 2**20  # states up to which bracket computes the exact value as well
#: Sweeps into the past after which bracket makes approximate draws. 511 sweeps, up to
#: 256 into the past, of 100 draws of 210 units took as long as 10,000 temperatures.
_MOST_SWEEPS = 2**9
#: Sweeps of the model after which annealed draws start the reverse direction.
_SETTLING = 100
#: Units of all particles of the parameter sets that run side by side.
_SET_UNITS = 2**18


@dataclasses.dataclass
class _Annealing:
    """Checked arguments of :func:`ais`, and runs in either direction from one reference."""

    name: str
    graph: FactorGraph
    params: Params
    rng_key: Array
    num_particles: int
    num_temperatures: int
    ladder: str | ArrayLike
    data: StateLike | None
    reference: Mapping[str, Array] | None
    progress_bar: bool
    moves: MovesLike = None

    def __post_init__(self) -> None:
        key = check_model(self.name, self.graph, self.params, self.rng_key)
        # one has no standard error
        checks.count(f"{self.name}: num_particles", self.num_particles, 2)
        ladders.temperatures(self.ladder, self.num_temperatures)
        checks.flag(f"{self.name}: progress_bar", self.progress_bar)
        self.model = shifted.shift_origin(self.graph, self.params)
        moves = single_moves(f"{self.name}: moves", self.graph, self.moves)
        # which both directions share
        eta0 = find_reference(
            self.graph, self.model, key, self.data, self.reference, moves=moves
        )
        self.path = Path.line(self.graph, eta0, self.model.params, moves)

    def backward(
        self,
        rng_key: Array,
        samples: Blocks | None,
        unbiased: bool,
        approximate: bool = False,
    ) -> LogPartition:
        """Anneal from draws of the model to the reference.

        :param approximate: make approximate draws if there are no perfect ones.
        """
        unbiased = checks.flag(f"{self.name}: unbiased", unbiased) or samples is None
        key = random.key_pair(rng_key)
        betas = self.betas(self.path, key)
        log_share = 0.0
        if samples is not None:
            x = self._with_missing(samples, key)
        else:
            try:
                x = perfect_sample(
                    self.graph,
                    self.model.params,
                    self.num_particles,
                    rng_key=rng_key,
                    max_sweeps=_MOST_SWEEPS if approximate else MAX_SWEEPS,
                )
            except (IntractableError, UnmetError) as error:
                if not approximate:
                    raise type(error)(
                        f"{self.name}: there are no perfect draws of the model: "
                        f"{error} {_DRAWS}"
                    ) from None
                # annealed to the model, then moved by sweeps of it, with weights of
                # mean 1
                ladder = np.append(betas, np.ones(_SETTLING, betas.dtype))
                log_w, _, x = anneal(
                    self.path,
                    ladder,
                    random.fold_in(key, 5, 1),
                    self.num_particles,
                    progress_bar=self.progress_bar,
                )
                log_share = log_w - summarize(self.name, log_w[:, None]).log_mean
                unbiased = False
        betas = betas[::-1]
        key = random.fold_in(key, 3, 1)
        log_w, *_ = anneal(
            self.path, betas, key, self.num_particles, x, self.progress_bar
        )
        return self.result(log_w + log_share, betas, -1, unbiased)

    def _with_missing(self, samples: Blocks, key: Array) -> Blocks:
        """Return shifted samples, with missing blocks drawn given the others."""
        missing = tuple(b for b in self.graph.families if b not in samples)
        states.check_summable(self.graph, missing)
        samples = self.model.shift(samples)
        if not missing:
            return samples
        numbers = np.arange(self.num_particles, dtype=np.uint32)
        keys = random.fold_in(random.fold_in(key, 2, 1), numbers)
        target = Target(self.graph, self.model.params)
        drawn, _ = Layer(missing).draw(target, samples, keys)
        return samples | drawn

    def result(
        self, log_w: np.ndarray, betas: np.ndarray, sign: int = 1, unbiased: bool = True
    ) -> LogPartition:
        """Return the estimate by log-weights of a run: of Z, or of 1/Z with a sign of -1."""
        log_z0 = log_partition(self.graph, self.path.eta0) + self.model.log_factor
        log_weights = log_w + sign * log_z0
        # each particle is an island
        summary = summarize(self.name, log_weights[:, None])
        return LogPartition(
            log_partition=sign * summary.log_mean,
            standard_error=summary.standard_error,
            effective_sample_size=summary.effective_sample_size,
            log_weights=log_weights,
            betas=betas,
            bound="lower" if sign > 0 else "upper",
            unbiased=unbiased,
            graph=self.graph,
            params=self.params,
        )

    def betas(
        self, path: Path, key: Array
    ) -> Float32[np.ndarray, "*sets temperatures"]:
        """Return the inverse temperatures along a path, or along several."""
        count = self.num_temperatures
        if not (isinstance(self.ladder, str) and self.ladder == "adaptive"):
            return ladders.temperatures(self.ladder, count)
        pilot = ladders.temperatures("linear", max(count // _PILOT, min(count, _PILOT)))
        # a run of its own: a ladder made from the particles' own weights would bias
        # them
        pilot_key = random.fold_in(key, 1, 1)
        _, spread, _ = anneal(path, pilot, pilot_key, self.num_particles)
        find = partial(ladders.constant_speed, pilot, num_temperatures=count)
        return np.apply_along_axis(find, -1, spread)


def _forward(
    runs: Sequence[_Annealing], rng_keys: Iterable[Array]
) -> Iterator[LogPartition]:
    """Anneal from references to models, which differ in their params, in one program."""
    run, *_ = runs
    path = _stack([run.path for run in runs])
    key = _stack(list(map(random.key_pair, rng_keys)))
    betas = run.betas(path, key)
    key = random.fold_in(key, 0, 1)
    log_w, *_ = anneal(
        path, betas, key, run.num_particles, progress_bar=run.progress_bar
    )
    log_w = np.atleast_2d(log_w)
    betas = np.broadcast_to(betas, (len(runs), betas.shape[-1]))
    return map(_Annealing.result, runs, log_w, betas)


def _stack(trees: list[PyTree]) -> PyTree:
    """Return trees with a leading axis of parameter sets; a single one as it is."""
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def ais(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    num_particles: int = 100,
    num_temperatures: int = 10_000,
    ladder: str | ArrayLike = "linear",
    data: StateLike | None = None,
    reference: Mapping[str, Array] | None = None,
    moves: MovesLike = None,
    mesh: Mesh | None = None,
    progress_bar: bool = False,
) -> LogPartition | tuple[LogPartition, ...]:
    """Estimate log Z of any graph by annealed importance sampling.

    Particles start from independent units near the model and take a blocked Gibbs sweep
    at each inverse temperature. The mean of their weights is an **unbiased** estimate
    of Z for any reference and number of temperatures. Its log is too small on average,
    and can be much too small, with a small standard error, where particles miss a mode:
    compare :func:`ebmpp.annealing.reverse_ais`. The weights sum out an independent set
    of blocks with as many units as possible in closed form.

    :param params: of one model; or with a leading axis of parameter sets, of several in
        one program. The result is then a tuple, and set i has the result of a call with
        the key ``jax.random.fold_in(rng_key, i)``, up to rounding.
    :param rng_key: a jax key; a particle's draws depend on it and on the particle's
        number.
    :param num_particles: at least 2.
    :param num_temperatures: at least 2, including both ends.
    :param ladder: "linear", "sigmoid" (denser at both ends), "adaptive" (weights of
        equal spread at each step, from a separate run with a tenth of the
        temperatures), or increasing values from 0 to 1.
    :param data: rows of the visible blocks, at whose base rates the particles start; by
        default at the means of a pilot of 200 chains.
    :param reference: natural parameters at which some or all blocks start
        (``{b: f.default_eta() for b, f in graph.families.items()}`` is uniform where
        that exists). Real-valued blocks in a factor with ``affine=False`` need one.
    :param moves: moves of a sweep; see :class:`~ebmpp.BlockedGibbs`. Default where
        Gibbs sweeps are costly or have no closed form:
        :func:`~ebmpp.moves.informed_sweep`.
    :param mesh: devices over whose first axis the particles are sharded.
    :raises ArgumentError: for numbers out of range, a ladder that does not go from 0 to
        1, or under ``jit``.
    :raises ParameterError: params or a reference that do not fit, or do not normalise.
    :raises StateError: data of a wrong name, shape or value.
    :warns UserWarning: where less than a quarter of the particles is effective, the
        standard error exceeds 0.3, or there are fewer than 30 particles.

    **References**

    1. Neal (2001), *Annealed importance sampling*.
    2. Salakhutdinov, Murray (2008), *On the quantitative analysis of deep belief
       networks*, section 4.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(20), h=ebmpp.Bernoulli(8))
    >>> params = rbm.init(jax.random.key(0))
    >>> ais = ebmpp.ais(rbm, params, rng_key=jax.random.key(1), num_temperatures=200)
    >>> bool(abs(ais.log_partition - ebmpp.exact.log_partition(rbm, params)) < 0.01)
    True
    """
    options = num_particles, num_temperatures, ladder, data, reference, progress_bar
    options = (*options, moves)
    with sharding.use_mesh("ais: mesh", mesh):
        params = sharding.place(params)
        target = Target.checked("ais", graph, params, {}, values=False, sets=True)
        keys = [rng_key]
        if target.sets:
            keys = [jax.random.fold_in(rng_key, i) for i in range(*target.sets)]
        runs = [
            _Annealing("ais", graph, model.params, key, *options)
            for model, key in zip(target.each_set(), keys)
        ]
        results = tuple(_forward(runs, keys))
    for result in results:
        warn(_ADVICE, result.doubt)
    return results if target.sets else results[0]


def reverse_ais(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    samples: Mapping[str, Array] | None = None,
    unbiased: bool = False,
    num_particles: int | None = None,
    num_temperatures: int = 10_000,
    ladder: str | ArrayLike = "linear",
    data: StateLike | None = None,
    reference: Mapping[str, Array] | None = None,
    moves: MovesLike = None,
    progress_bar: bool = False,
) -> LogPartition:
    """Estimate log Z from above, by annealing from draws of the model.

    From **exact** draws the mean weight is unbiased for 1/Z, so the result is an upper
    bound in expectation. Without ``samples`` they come from
    :func:`ebmpp.perfect_sample`, for models that are small or attractive. Samples of a
    long chain bound nothing for certain: if they miss a mode, the value is too small.
    Other arguments are as for :func:`ebmpp.ais`; the ladder is used from 1 to 0.

    :param samples: draws of the model, one per particle, ``(num_particles, *shape)``;
        missing blocks are drawn given these, which is exact where they do not interact
        with one another.
    :param unbiased: True if the samples are independent draws of exactly the model.
    :param num_particles: at least 2; the default is the number of samples, or 100.
    :raises IntractableError: without samples, when the model is neither small nor
        attractive; with samples, when missing blocks interact.
    :raises StateError: for samples that do not fit.
    :raises ArgumentError: as :func:`ebmpp.ais` does.

    **References**

    1. Grosse, Ghahramani, Adams (2015), *Sandwiching the marginal likelihood using
       bidirectional Monte Carlo*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(20), h=ebmpp.Bernoulli(8))
    >>> params = rbm.init(jax.random.key(0))
    >>> ais = ebmpp.annealing.reverse_ais(rbm, params, rng_key=jax.random.key(1),
    ...                                   num_temperatures=200)
    >>> ais.bound
    'upper'
    """
    x, num = _as_samples("reverse_ais", graph, samples, num_particles)
    options = num, num_temperatures, ladder, data, reference, progress_bar, moves
    result = _Annealing("reverse_ais", graph, params, rng_key, *options).backward(
        rng_key, x, unbiased
    )
    warn(_ADVICE, result.doubt)
    return result


def _as_samples(
    name: str,
    graph: FactorGraph,
    samples: Mapping[str, Array] | None,
    num_particles: int | None,
) -> tuple[Blocks | None, int]:
    """Return samples as rows, and the number of particles."""
    if samples is None:
        return None, 100 if num_particles is None else num_particles
    blocks = (
        samples if isinstance(samples, Mapping) else states.as_visible(graph, samples)
    )
    x, batch = states.as_rows(graph.families, blocks)
    if len(batch) != 1 or num_particles not in (None, batch[0]):
        raise checks.state_error(
            f"{name}: leading axes of samples",
            f"({num_particles or 'num_particles'},), one per particle",
            batch,
        )
    return {b: v.astype(graph.families[b].dtype) for b, v in x.items()}, batch[0]


def bracket(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    samples: Mapping[str, Array] | None = None,
    unbiased: bool = False,
    num_particles: int | None = None,
    num_temperatures: int = 10_000,
    ladder: str | ArrayLike = "linear",
    data: StateLike | None = None,
    reference: Mapping[str, Array] | None = None,
    moves: MovesLike = None,
    progress_bar: bool = False,
) -> Bracket:
    """Estimate log Z from below and above by bidirectional Monte Carlo.

    Where states can be summed, the exact value is reported too. Without ``samples`` the
    reverse direction starts from perfect draws where those can be had, if chains are
    coupled from the past within 512 sweeps. Otherwise a separate run is annealed to
    the model and moved by 100 of its sweeps. Its weights multiply the weights of the
    reverse direction, so that the stated error of the upper side includes that of the
    draws. They may miss a mode, so that side is then marked as not guaranteed
    (``result.guaranteed``, ``result.upper.unbiased``).

    Arguments are as for :func:`ebmpp.annealing.reverse_ais`. Both runs share one
    reference; an "adaptive" ladder is found for each.

    :raises IntractableError: for samples whose missing blocks interact.
    :warns UserWarning: where few particles are effective, a standard error exceeds 0.3,
        or the upper side is below the lower one by more than four standard errors.

    **References**

    1. Grosse, Ghahramani, Adams (2015), *Sandwiching the marginal likelihood using
       bidirectional Monte Carlo*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(20), h=ebmpp.Bernoulli(8))
    >>> zero = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> ebmpp.bracket(rbm, zero, rng_key=jax.random.key(1), num_temperatures=2)  # 28 log 2
    Bracket(19.4081 +- 0 to 19.4081 +- 0, exact 19.4081)
    """
    x, num = _as_samples("bracket", graph, samples, num_particles)
    options = num, num_temperatures, ladder, data, reference, progress_bar, moves
    run = _Annealing("bracket", graph, params, rng_key, *options)
    forward, backward = random.split(rng_key, 2)
    upper = run.backward(backward, x, unbiased, approximate=True)
    (lower,) = _forward([run], [forward])
    result = Bracket(lower, upper, exact_log_partition(graph, params))
    warn(_ADVICE, result.doubt)
    return result


def exact_log_partition(graph: FactorGraph, params: Params) -> float | None:
    """Return log Z as a sum over states, None if there are too many."""
    try:
        plan = enumeration.make_plan(graph)
    except IntractableError:
        return None
    if enumeration.num_states(graph, plan.enumerated) > _MOST_SUMMED:
        return None
    model = shifted.shift_origin(graph, params)
    return float(exact.log_partition(graph, model.params)) + model.log_factor


@compiled
def _take_steps(
    path: Path, betas: Array, count: Array, x: Blocks, keys: Keys
) -> tuple[Blocks, Array, Array]:
    """Take ``count`` steps from one beta to the next, each with one evaluation of the model.

    All but ``count`` may have a leading axis of parameter sets.

    :param betas: shape ``(_STEPS + 1,)``, of which the first ``count + 1`` are used.
    :return: the kept blocks; the increment of the log-weights; its standard deviation
        at each step.
    """

    def run(jobs, shared, *_):
        x, keys = jobs
        path, betas, count = shared

        def step(i, carry):
            x, log_weight, gains = carry
            low = path.at(betas[i])
            high = path.at(betas[i + 1])
            here = path.evaluate(low.params, x)
            there = path.evaluate_at(high, here, x)
            gain = path.gain(low, high, here, there)
            x = path.sweep(high, x, there.eta, random.fold_in(keys, i))
            return x, log_weight + gain, gains.at[i].set(gain)

        start = x, jnp.zeros(len(keys)), jnp.zeros((len(betas) - 1, len(keys)))
        x, log_weight, gains = jax.lax.fori_loop(0, count, step, start)
        return (x, log_weight, gains.T), ()

    def at_set(path, betas, x, keys):
        (x, log_weight, gains), _ = sharding.shard_jobs(
            run, (x, keys), (path, betas, count), len(keys)
        )
        return x, *sharding.replicate((log_weight, gains.std(0)))

    if betas.ndim == 1:
        return at_set(path, betas, x, keys)
    size = max(1, _SET_UNITS // sum(a[0].size for a in x.values()))
    return in_chunks(at_set, min(size, len(betas)), path, betas, x, keys)


def anneal(
    path: Path,
    betas: np.ndarray,
    key: Array,
    num: int,
    x: Blocks | None = None,
    progress_bar: bool = False,
) -> tuple[np.ndarray, np.ndarray, Blocks]:
    """Carry ``num`` particles along a line, in the direction of ``betas``.

    Lines, betas, keys and results may have a leading axis of parameter sets.

    :param x: their state at ``betas[0]``; None for draws of the reference.
    :return: the log-weights, float64, ``(num,)``; their standard deviation by step; and
        the kept blocks.
    """
    keys = random.fold_in(key[..., None, :], np.arange(num))
    if x is None:
        draw = draw_reference if key.ndim == 1 else jax.vmap(draw_reference)
        x = draw(path, random.fold_in(keys, 0))
    x = select(x, path.sampled)
    # summed on the host in float64: ten thousand small gains would lose digits in
    # float32
    total = np.zeros(keys.shape[:-1])
    spreads = []
    num_steps = betas.shape[-1] - 1
    betas = np.broadcast_to(betas, (*key.shape[:-1], num_steps + 1))
    hidden = not (progress_bar and sharding.is_first())
    with tqdm(total=num_steps, disable=hidden, desc="annealing", unit="step") as bar:
        for first in range(0, num_steps, _STEPS):
            count = min(_STEPS, num_steps - first)
            places = first + np.minimum(np.arange(_STEPS + 1), count)
            padded = betas[..., places]
            step_keys = random.fold_in(keys, 1, first)
            x, gain, spread = _take_steps(path, padded, np.int32(count), x, step_keys)
            total += np.asarray(gain, float)
            spreads.append(np.asarray(spread, float)[..., :count])
            bar.update(count)
    return total, np.concatenate(spreads, -1), x
