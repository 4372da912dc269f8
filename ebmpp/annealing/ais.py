# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""log Z of models that are too large to sum: annealed importance sampling, forward and in reverse.

Forward, weights are unbiased for Z, so the log of their mean is too small on average: log Z is bounded from
below. In reverse, from draws of the model, they are unbiased for 1/Z, and log Z is bounded from above.
"""

from collections.abc import Mapping
import dataclasses
from functools import cached_property
import math
from typing import Any
import warnings

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh

from ebmpp import exact
from ebmpp.annealing import annealing_path
from ebmpp.annealing.log_partition import Bracket, Data, LogPartition
from ebmpp.core import checks, random, sharding
from ebmpp.core.statistics import standard_error
from ebmpp.core.types import Blocks, Eta, Params
from ebmpp.errors import DomainError, IntractableError, StateError, UnmetError
from ebmpp.exact import enumeration
from ebmpp.exact.perfect import perfect_sample
from ebmpp.graph import FactorGraph, states
from ebmpp.moves import Layer, Target

_PILOT = 10  # an adaptive ladder costs a run with this many times fewer temperatures
_FEWEST = 2  # particles: one has no standard error
_FEW = 0.25  # of the particles: an effective sample size below is told
_DIRECTION = {"lower": "forward", "upper": "in reverse"}
_MOST_SUMMED = 2**20  # states; where there are no more, bracket computes the exact value too


# -- what they share -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Annealing:
    """What :func:`ais` is asked for, checked: a path, and how it is run through in either direction."""

    graph: FactorGraph
    params: Params
    rng_key: Array
    num_particles: int
    num_temperatures: int
    ladder: Any
    data: Data | None
    reference: Mapping[str, Array] | None
    progress_bar: bool

    def __post_init__(self) -> None:
        checks.instance("graph", self.graph, FactorGraph, "a FactorGraph")
        instead = (
            "take monitors.estimated_log_likelihood, monitors.Monitor(fn, compiled=False), or call it outside"
        )
        checks.on_host("annealed importance sampling", self.params, self.rng_key, instead=instead)
        self.graph.check(self.params)
        checks.count("num_particles", self.num_particles, _FEWEST)
        annealing_path.ladder("linear" if self._adaptive else self.ladder, self.num_temperatures)
        checks.flag("progress_bar", self.progress_bar)
        checks.key("rng_key", self.rng_key)

    @property
    def _adaptive(self) -> bool:
        return isinstance(self.ladder, str) and self.ladder == "adaptive"

    @cached_property
    def _eta0(self) -> Eta:
        """Of the reference, which both directions share."""
        key = random.fold_in(random.key_pair(self.rng_key), 4, 1)
        return annealing_path.reference(self.graph, self.params, key, self.data, self.reference)

    @property
    def _log_z0(self) -> float:
        return annealing_path.log_partition_of(self.graph, self._eta0)

    def forward(self, rng_key: Array) -> LogPartition:
        """From the reference to the model."""
        key = random.key_pair(rng_key)
        betas = self._betas(key)
        log_w, _ = self._anneal(betas, random.fold_in(key, 0, 1), progress_bar=self.progress_bar)
        return self._estimate(log_w + self._log_z0, betas, 1, True)

    def backward(self, rng_key: Array, samples: Blocks | None, samples_are_exact: bool) -> LogPartition:
        """From draws of the model to the reference."""
        sound = checks.flag("samples_are_exact", samples_are_exact) or samples is None
        key = random.key_pair(rng_key)
        betas, log_z0 = self._betas(key)[::-1], self._log_z0
        if samples is None:
            x = _perfect(self.graph, self.params, rng_key, self.num_particles)
        else:
            x = _completed(self.graph, self.params, samples, random.fold_in(key, 2, 1))
        log_w, _ = self._anneal(betas, random.fold_in(key, 3, 1), x, self.progress_bar)
        return self._estimate(log_w - log_z0, betas, -1, sound)

    def _betas(self, key: Array) -> np.ndarray:
        count = self.num_temperatures
        if not self._adaptive:
            return annealing_path.ladder(self.ladder, count)
        pilot = annealing_path.ladder("linear", max(count // _PILOT, min(count, _PILOT)))
        # draws of its own: a ladder made from the particles' own weights would bias them
        _, spread = self._anneal(pilot, random.fold_in(key, 1, 1))
        return annealing_path.equal_speed(pilot, spread, count)

    def _anneal(
        self, betas: np.ndarray, key: Array, x: Blocks | None = None, progress_bar: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        run = (self.graph, self.params, self._eta0, betas, key, self.num_particles, x, progress_bar)
        return annealing_path.anneal(*run)

    def _estimate(self, log_weights: np.ndarray, betas: np.ndarray, sign: int, sound: bool) -> LogPartition:
        num, wrong = len(log_weights), int(np.isnan(log_weights).sum())
        top = log_weights.max()
        if wrong or not np.isfinite(top):
            raise DomainError(
                f"{wrong or num} of {num} particles have weights that are not finite: the model may not "
                "normalise, or natural parameters overflow on the way to it. Look at the params; a reference "
                "that is nearer to the model (data=..., reference=...) may help"
            )
        w = np.exp(log_weights - top)
        mean = w.mean()
        error = standard_error(w) / mean
        effective = w.sum() ** 2 / (w**2).sum()
        value = sign * (math.log(mean) + top)
        bound = "lower" if sign > 0 else "upper"
        told = float(value), float(error), float(effective), log_weights, betas, bound, sound
        return LogPartition(*told, self.graph, self.params)


def _tell_few(*made: LogPartition) -> None:
    """One warning a call of the public face, whichever runs it is of."""
    few = [m for m in made if m.effective_sample_size < max(2.0, _FEW * len(m.log_weights))]
    if few:
        told = " and ".join(
            f"{m.effective_sample_size:.1f} of {len(m.log_weights)} particles "
            f"({_DIRECTION[m.bound]}, standard error {m.standard_error:.2g})"
            for m in few
        )
        warnings.warn(
            f"the effective sample size is {told}: too small for the standard error to be trusted. Raise "
            f"num_temperatures (now {len(few[0].betas)}), or give a reference that is nearer to the model "
            "(data=..., reference=...)",
            stacklevel=3,
        )


# -- the public face -------------------------------------------------------------------------------


def ais(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    num_particles: int = 100,
    num_temperatures: int = 10_000,
    ladder: str | Any = "linear",
    data: Data | None = None,
    reference: Mapping[str, Array] | None = None,
    mesh: Mesh | None = None,
    progress_bar: bool = False,
) -> LogPartition:
    """log Z by annealed importance sampling, for any graph.

    Particles start from independent units of about the model's means, and are carried to the model by a
    blocked Gibbs sweep at each inverse temperature. The mean of their weights is an **unbiased** estimate of
    Z, whatever the reference and the number of temperatures; its log is too small on average, by about half
    its variance where that is small. It can be much too small, with a small standard error, where chains miss
    a mode: compare :func:`ebmpp.annealing.reverse_ais`.

    The weights are those of the marginal law of as few units as can be, an independent set of blocks being
    summed out in closed form (the larger layer of a Boltzmann machine, every second layer of a deep one).

    :param graph: the model.
    :param params: a dict keyed by factor name.
    :param rng_key: a jax key; a particle's draws depend on it and on the particle's number alone.
    :param num_particles: at least 2.
    :param num_temperatures: at least 2, the ends included.
    :param ladder: "linear", "sigmoid" (denser at both ends), "adaptive" (steps with weights of equal spread,
        found by a run of its own with a tenth of the temperatures), or increasing values from 0 to 1.
    :param data: rows of the visible blocks: start from their base rates. By default from those of a pilot,
        200 chains of 100 sweeps whose draws are used for nothing else.
    :param reference: natural parameters to start from, for some or all blocks
        (``{b: f.default_eta() for b, f in graph.families.items()}`` is uniform where that exists).
    :param mesh: devices to share the particles, over the mesh's first axis; the weights are those of one
        device, but for rounding.
    :param progress_bar: show one.
    :return: a :class:`LogPartition`.
    :raises ArgumentError: for numbers out of range, a ladder that does not go from 0 to 1, or under ``jit``.
    :raises ParameterError: params or a reference that do not fit, or do not normalise.
    :raises StateError: data of a wrong name, shape or value.
    :warns UserWarning: where less than a quarter of the particles is effective.

    **References**

    1. Neal (2001), *Annealed importance sampling*.
    2. Salakhutdinov, Murray (2008), *On the quantitative analysis of deep belief networks*, section 4.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(20), h=ebmpp.Bernoulli(8))
    >>> params = rbm.init(jax.random.key(0))
    >>> ais = ebmpp.ais(rbm, params, rng_key=jax.random.key(1), num_temperatures=200)
    >>> bool(abs(ais.log_partition - ebmpp.exact.log_partition(rbm, params)) < 0.01)
    True
    """
    with sharding.over("ais: mesh", mesh):
        own = sharding.place(params)
        run = _Annealing(
            graph, own, rng_key, num_particles, num_temperatures, ladder, data, reference, progress_bar
        )
        made = run.forward(rng_key)
    _tell_few(made)
    return made


def reverse_ais(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    samples: Mapping[str, Array] | None = None,
    samples_are_exact: bool = False,
    num_particles: int | None = None,
    num_temperatures: int = 10_000,
    ladder: str | Any = "linear",
    data: Data | None = None,
    reference: Mapping[str, Array] | None = None,
    progress_bar: bool = False,
) -> LogPartition:
    """log Z from above: annealing from draws of the model to independent units.

    From **exact** draws the mean weight is unbiased for 1/Z, so what is returned is too large on average, an
    upper bound in expectation. Without ``samples`` they come from :func:`ebmpp.perfect_sample`, for models
    that are small or attractive. Samples of a long chain may be given; then nothing is bounded for certain
    (draws that miss a mode give too small a value, as forward annealing does): the result is not ``sound``.

    :param graph: the model.
    :param params: a dict keyed by factor name.
    :param rng_key: a jax key.
    :param samples: draws of the model, one a particle, ``(num_particles, *shape)``; blocks that are left out
        are drawn given these, which is exact where they do not interact with one another.
    :param samples_are_exact: whether they are independent draws of exactly the model's law.
    :param num_particles: at least 2; 100 unless given, or as many as there are samples.
    :param num_temperatures: as for :func:`ebmpp.ais`, like all that follows.
    :param ladder: increasing from 0 to 1; run through from 1 to 0.
    :param data: rows of the visible blocks, for the base rates of the reference.
    :param reference: natural parameters of some or all blocks to end at.
    :param progress_bar: show one.
    :return: a :class:`LogPartition`.
    :raises IntractableError: without samples, when the model is neither small nor attractive; with some, when
        blocks that interact are left out.
    :raises StateError: for samples that do not fit.
    :raises ArgumentError: as for :func:`ebmpp.ais`.

    **References**

    1. Grosse, Ghahramani, Adams (2015), *Sandwiching the marginal likelihood using bidirectional Monte
       Carlo*.
    2. Burda, Grosse, Salakhutdinov (2015), *Accurate and conservative estimates of MRF log-likelihood using
       reverse annealing*: from rows of data instead, for the likelihood of the annealed chain, which is
       another model than the one given.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(20), h=ebmpp.Bernoulli(8))
    >>> params = rbm.init(jax.random.key(0))
    >>> ebmpp.annealing.reverse_ais(rbm, params, rng_key=jax.random.key(1), num_temperatures=200).bound
    'upper'
    """
    x, num = _as_samples("reverse_ais", graph, samples, num_particles)
    run = _Annealing(graph, params, rng_key, num, num_temperatures, ladder, data, reference, progress_bar)
    made = run.backward(rng_key, x, samples_are_exact)
    _tell_few(made)
    return made


def _as_samples(
    name: str, graph: FactorGraph, samples: Mapping[str, Array] | None, num_particles: int | None
) -> tuple[Blocks | None, int]:
    """Samples as rows, and how many particles there are."""
    if samples is None:
        return None, 100 if num_particles is None else num_particles
    given = samples if isinstance(samples, Mapping) else graph.as_visible(samples)
    x, batch = states.as_rows(graph.families, given)
    if len(batch) != 1 or num_particles not in (None, batch[0]):
        wanted = "(num_particles,)" if num_particles is None else f"({num_particles},), one a particle"
        raise StateError(f"{name}: samples have leading axes {batch}, expected {wanted}")
    return {b: v.astype(graph.families[b].dtype) for b, v in x.items()}, batch[0]


def _perfect(graph: FactorGraph, params: Params, rng_key: Array, num: int) -> Blocks:
    try:
        return perfect_sample(graph, params, rng_key, num)
    except (IntractableError, UnmetError) as error:
        raise type(error)(
            f"reverse_ais starts from draws of the model, and there are no perfect ones: {error}. Give "
            "samples=..., the last states of long chains of ebmpp.BlockedGibbs or ebmpp.ParallelTempering, "
            "which bound log Z only as far as they have the model's law"
        ) from None


def _completed(graph: FactorGraph, params: Params, x: Blocks, key: Array) -> Blocks:
    """Samples with the blocks that they leave out drawn given the others."""
    missing = tuple(b for b in graph.families if b not in x)
    for a, b in graph.interacting(missing):
        raise IntractableError(
            f"reverse_ais: samples leave out blocks {a!r} and {b!r}, which interact, so they cannot be drawn "
            "given the others; give one of them too"
        )
    if missing:
        rows = random.fold_in(key, jnp.arange(len(next(iter(x.values()))), dtype=jnp.uint32))
        x = x | Layer(missing).draw(Target(graph, params), x, rows)[0]
    return x


def bracket(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    samples: Mapping[str, Array] | None = None,
    samples_are_exact: bool = False,
    num_particles: int | None = None,
    num_temperatures: int = 10_000,
    ladder: str | Any = "linear",
    data: Data | None = None,
    reference: Mapping[str, Array] | None = None,
    progress_bar: bool = False,
) -> Bracket:
    """log Z from below and from above, and exactly where the model's states can be summed.

    :param graph: the model.
    :param params: a dict keyed by factor name.
    :param rng_key: a jax key.
    :param samples: as for :func:`ebmpp.annealing.reverse_ais`, like all that follows; the runs share one
        reference, and make a ladder each if it is "adaptive".
    :param ladder: "linear", "sigmoid", "adaptive", or increasing values from 0 to 1; see :func:`ebmpp.ais`.
    :return: a :class:`Bracket`.
    :raises IntractableError: without samples, when the model is neither small nor attractive.

    **References**

    1. Grosse, Ghahramani, Adams (2015), *Sandwiching the marginal likelihood using bidirectional Monte
       Carlo*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(20), h=ebmpp.Bernoulli(8))
    >>> zero = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> ebmpp.bracket(rbm, zero, rng_key=jax.random.key(1), num_temperatures=2)  # 28 log 2
    Bracket(lower 19.4081 +- 0 (100.0 of 100 particles effective), upper ...exact 19.4081)
    """
    x, num = _as_samples("bracket", graph, samples, num_particles)
    run = _Annealing(graph, params, rng_key, num, num_temperatures, ladder, data, reference, progress_bar)
    forward, backward = jax.random.split(rng_key)
    above, below = run.backward(backward, x, samples_are_exact), run.forward(forward)
    _tell_few(below, above)
    return Bracket(below, above, _exact(graph, params))


def _exact(graph: FactorGraph, params: Params) -> float | None:
    try:
        plan = enumeration.make_plan(graph)
    except IntractableError:
        return None
    few = enumeration.num_states(graph, plan.enumerated) <= _MOST_SUMMED
    return float(exact.log_partition(graph, params)) if few else None
