# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased contrastive divergence, and its choice between three unbiased gradients."""

from collections.abc import Sequence
import contextlib
import dataclasses
import itertools
from typing import NamedTuple

from jaxtyping import PyTree
import numpy as np

import jax.numpy as jnp

from ebmpp.core import Key, Params, Rows, checks
from ebmpp.errors import IntractableError
from ebmpp.estimators.base import METHODS, Batch, Choice, Columns, Estimate
from ebmpp.estimators.pairs import ChainUCD, CoupledPairs, UCDState
from ebmpp.estimators.particles import ParticleState, ParticleUCD
from ebmpp.graph import FactorGraph
from ebmpp.moves.mixture import has_costly_sweeps, mixture_sweep

# Unit updates before the first comparison: some 50 CPU-seconds, over twice what the
# other methods compile for. `make demo` takes 2e9 in all.
_WORK = 2.5e9
# mean sweeps that pairs take to meet, beyond the lag, below which there is no
# comparison
_LONG = 30.0
# steps of a method in a comparison, of which the first adapts its state and does not
# count
_TRIAL = 10
# share of the work since the last comparison that another trial of a method may take
_SHARE = 0.1
# a method must be so many times better than the one in use
_MARGIN = 0.8


@dataclasses.dataclass(frozen=True, repr=False)
class UCD(CoupledPairs):
    r"""Unbiased contrastive divergence, by coupled pairs of chains or of particle systems.

    The estimator to begin with. It starts with pairs of Gibbs chains or, where a factor
    that is not affine makes a sweep of more than 16 parts, with ``method="mixture"``
    and ``pool="persistent"``, and Gibbs pairs are not tried. Where pairs take
    more than 30 sweeps beyond the lag to meet, after 2.5e9 unit updates (some 50
    CPU-seconds), ten steps are made by each other method: chains that share proposals
    from a mixture (of two layers and complete rows), and pairs of particle systems
    (:class:`ParticleUCD`). It continues with the method of the smallest
    :math:`C \, E|g|^2`, where C is the cost of a step in sweeps and g its gradient:
    with the best learning rate a step gains :math:`|E g|^4 / (2 L \, E|g|^2)`, L being
    the smoothness. Comparisons are repeated when the work has doubled, and depend on
    past steps alone. The history has the ``cost``, and from the first comparison on the
    ``method`` of each step.

    With chains the negative phase is the time-averaged estimator :math:`H_{k:m}` of the
    energy's gradient over coupled pairs, whose expectation is the model's. By default
    k, m and the lag follow the meeting times of the steps *before*, which keeps the
    gradient unbiased given the past and bounds its variance: k = lag, m = 2 lag. (With
    k = lag = 1 single steps with meeting times in the hundreds can destroy a model.)

    The positive phase is exact where the latents given the visibles are one layer.
    Elsewhere, and where entries are missing, a second set of coupled pairs, one per
    row, runs on the posterior.

    :param num_pairs: pairs per step, which reuse the batch's rows cyclically. Default:
        one per row.
    :param k: first sweep that counts. Default: adaptive.
    :param m: with a fixed k, the last sweep that counts, at least k; default: k. With
        an adaptive k, the number of sweeps that count after k, so that the last one is
        k + m; default: the lag; 0 counts the state at k alone.
    :param lag: sweeps that the leading chain is ahead. Default: adaptive with k; 1 if
        only k is given.
    :param coupling: coupling of the chains: "maximal" (as without it),
        "maximal_independent", "common", "reflection" or "independent" for every layer,
        or a tuple of these, one per layer; moves, or a function that returns moves: see
        :func:`ebmpp.moves.resolve_moves`. A single name or a function applies to
        the posterior too.
    :param pool: source of mixture proposals: "data" (rows of the data, chosen once,
        with latents redrawn at each step) or "persistent" (chains that start there and
        move by one sweep per step).
    :param pool_size: number of states in the pool, which should contain every mode.
    :param init: where pairs start: "data" (the batch's rows), "persistent" (chains
        that move by one sweep per step, as in :class:`PCD`), "uniform", "local_mode"
        (one Gibbs sweep from a local mode found from uniform draws), or a function of a
        jax key to values of some or all blocks of one pair. Pairs on the posterior
        start at latents that fit the row, at uniform ones or at local modes. The
        estimate is unbiased for any start; its variance and cost depend on it.
    :param marginalize: blocks that are summed out of the energy before its gradient is
        taken: a tuple of blocks that do not interact, or "layers" for the mean over all
        layers, each summed out in turn.
    :param length: rule for an adaptive k and lag: :class:`~ebmpp.estimators.Quantile`
        of the meeting times, or :class:`~ebmpp.estimators.TargetVariance` or
        :class:`~ebmpp.estimators.TargetCost`, which choose m as well, but for m=0.
    :param max_sweeps: stop a pair that has not met after so many sweeps, more than the
        lag (an adaptive lag stays below it), or in a draw of 1024 trials for each. The
        default, no limit, is unbiased; with a limit training stops with an error if a
        pair is unmet, unless ``allow_unmet``.
    :param allow_unmet: continue with truncated pairs. **This biases the gradient**; the
        history counts them.
    :param num_slots: pairs that run at once on each device. It affects speed and
        rounding only.
    :param method: "gibbs", "mixture" or "particles"; "auto" (default) chooses from past
        steps, unless ``coupling`` is given. With "mixture" chains move by
        :func:`ebmpp.moves.mixture_sweep`. Particle systems have twice as many particles
        as there are pairs, at least 100 (200 without ``num_pairs``). Persistent chains
        start again after steps of particles.
    :raises ArgumentError: for invalid arguments, such as a ``length`` with a fixed
        window.

    **References**

    1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, Algorithms 2 and 3.
    2. Jacob, O'Leary, Atchade (2020); Biswas, Jacob, Vanetti (2019) for lags above 1.
    3. Taniguchi et al. (2023), eq. 27, for "layers".
    4. Bottou, Curtis, Nocedal (2018), *Optimization methods for large-scale machine
       learning*, section 4, for the gain of a step.

    **Example**

    >>> from ebmpp import UCD
    >>> from ebmpp.estimators import TargetVariance
    >>> UCD(init="persistent", length=TargetVariance(1.5))
    UCD(length=TargetVariance(target=1.5), init='persistent')
    """

    method: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("UCD: method", self.method, ("auto", *METHODS))
        if self.coupling == "mixture":
            raise checks.error(
                "UCD: coupling",
                "a coupling of Gibbs chains",
                "mixture",
                hint='Use method="mixture".',
            )
        if self.method == "mixture" and self.coupling is not None:
            raise checks.error(
                "UCD: coupling", 'None with method="mixture"', self.coupling
            )
        super().__post_init__()

    @property
    def current(self) -> ChainUCD | ParticleUCD:
        """Estimator of this method; that of "auto" has Gibbs chains."""
        settings = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(CoupledPairs)
        }
        if self.method == "mixture":
            settings["coupling"] = "mixture"
        chains = ChainUCD(**settings)
        if self.method != "particles":
            return chains
        num_particles = max(100, 2 * (self.num_pairs or 100))
        return ParticleUCD(num_particles=num_particles, posterior=chains)

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> UCDState | ParticleState:
        return self.current.init_state(graph, params, data, batch, key)

    def estimate(
        self, graph: FactorGraph, params: Params, state: PyTree, batch: Batch, key: Key
    ) -> Estimate:
        return self.current.estimate(graph, params, state, batch, key)

    def adopt(self, before: PyTree, fresh: PyTree) -> PyTree:
        """Continue chains and lengths.

        The length of Gibbs pairs survives steps of another method.
        """
        adopted = self.current.adopt(before, fresh)
        old = _method_of(before)
        new = _method_of(fresh)
        has_coupling = self.method == "auto" and self.coupling is not None
        if old is None or old == new or has_coupling:
            return adopted
        gibbs = before.negative if old == "gibbs" else before.gibbs
        if not gibbs:
            return adopted
        adopted = adopted._replace(gibbs=gibbs, positive=before.positive)
        if isinstance(adopted, ParticleState):
            return adopted
        return adopted._replace(negative=gibbs, seen=jnp.zeros_like(adopted.seen))

    def choose(self, graph: FactorGraph, history: Columns) -> Choice:
        if self.method != "auto" or self.coupling is not None:
            return Choice(self)
        possible = _possible_methods(graph, "posterior_sweeps" not in history)
        past = _Past.read(graph, history)
        method, until = past.next_method(possible)
        record = {"method": METHODS.index(method)}
        if method != "gibbs":
            changes = {} if "gibbs" in possible else {"pool": "persistent"}
            estimator = dataclasses.replace(self, method=method, **changes)
            return Choice(estimator, until, record)
        is_first = (past.method == "gibbs").all()
        return Choice(self, until, {} if is_first else record)

    def diagnose(self, history: Columns) -> str | None:
        """Return the warning of the method in use at the end, about its steps."""
        estimator, steps = self._last(history)
        return estimator.diagnose(steps)

    def diagnose_chains(
        self, graph: FactorGraph, params: Params, data: Rows, history: Columns, key: Key
    ) -> str | None:
        """Return the warning of the method in use at the end, about its chains."""
        estimator, steps = self._last(history)
        return estimator.diagnose_chains(graph, params, data, steps, key)

    def fast_compile(self, graph: FactorGraph) -> bool:
        return self.current.fast_compile(graph)

    def _last(self, history: Columns) -> tuple[ChainUCD | ParticleUCD, Columns]:
        """Return the estimator of the last step, and the steps of its method."""
        methods = _methods(history.get("method", np.zeros(0)))
        if (methods == "gibbs").all():
            return self.current, history
        last = dataclasses.replace(self, method=str(methods[-1]))
        is_last = methods == methods[-1]
        return last.current, {name: v[is_last] for name, v in history.items()}


def _methods(numbers: np.ndarray) -> np.ndarray:
    """Return names of methods; steps without a number are of Gibbs pairs."""
    return np.array(METHODS)[np.nan_to_num(numbers).astype(int)]


def _method_of(state: PyTree) -> str | None:
    """Return the method that a state belongs to; None for that of another estimator."""
    if isinstance(state, UCDState):
        return "mixture" if state.pool else "gibbs"
    return "particles" if isinstance(state, ParticleState) else None


def _possible_methods(graph: FactorGraph, is_complete: bool) -> tuple[str, ...]:
    """Return the methods that a graph allows, the first of which is used first.

    :param is_complete: False with missing entries or an intractable posterior.
    """
    if has_costly_sweeps(graph):
        return METHODS[1:]
    with contextlib.suppress(IntractableError):
        mixture_sweep(graph)
        if is_complete:
            return METHODS
    return ("gibbs", "particles")


class _Settled(NamedTuple):
    """A method is in use.

    :param since: step at which the last comparison ended.
    """

    method: str
    since: int


class _Trying(NamedTuple):
    """A comparison: other methods take turns.

    :param settled: the state in which it began.
    :param begin: its first step.
    :param tried: methods that have had their turn, or are having it.
    """

    settled: _Settled
    begin: int
    tried: tuple[str, ...] = ()


class _Past(NamedTuple):
    """Past steps of a stage, ``(steps,)`` each, by which the next method is chosen."""

    method: np.ndarray
    cost: np.ndarray  # unit updates
    square: np.ndarray  # squared norm of the gradient
    late: np.ndarray  # mean sweeps in which pairs met, beyond the lag

    @classmethod
    def read(cls, graph: FactorGraph, history: Columns) -> "_Past":
        """Return the columns of a history."""
        steps = len(history.get("cost", ()))

        def column(name):
            return np.nan_to_num(np.asarray(history.get(name, np.zeros(steps)), float))

        return cls(
            method=_methods(column("method")),
            cost=graph.num_units * column("cost"),
            square=column("gradient_norm") ** 2,
            late=column("meeting_time_mean") - column("lag"),
        )

    def next_method(self, possible: Sequence[str]) -> tuple[str, int]:
        """Return the method of the next step, and the number of steps at the next choice.

        The result is the same at any step between two choices, so that a run may resume
        there.
        """
        steps = len(self.method)
        state = self._state(possible[0])
        least = _WORK if possible[0] == "gibbs" else 0.0
        if isinstance(state, _Settled):
            if steps != _next_look(steps - 1) or not self._is_due(state, least):
                return state.method, _next_look(steps)
            state = _Trying(state, steps)
        remaining = _TRIAL * len(state.tried) - (steps - state.begin)
        if remaining:
            return state.tried[-1], steps + remaining
        others = self._affordable(state, possible)
        if len(state.tried) < len(others):
            return others[len(state.tried)], steps + _TRIAL
        return self._best(state, others), _next_look(steps)

    def _state(self, first: str) -> _Settled | _Trying:
        """Return whether a comparison is in progress, after steps of the ``first`` method.

        In a comparison each other method makes ``_TRIAL`` consecutive steps, once. So a
        method that makes more of them, or that returns, is the one that was chosen.
        """
        state: _Settled | _Trying = _Settled(first, since=0)
        begin = 0
        for method, steps in itertools.groupby(self.method.tolist()):
            length = len(list(steps))
            if isinstance(state, _Settled):
                state = _Trying(state, begin)
            if method in (state.settled.method, *state.tried):
                state = _Settled(method, since=begin)
            elif length > _TRIAL:
                state = _Settled(method, since=begin + _TRIAL)
            else:
                state = state._replace(tried=(*state.tried, method))
            begin += length
        return state

    def _is_due(self, state: _Settled, least: float) -> bool:
        """Return True if others should be tried.

        That is after enough work, ``least`` in all, if the method is slow or has become slower.
        """
        if self.cost.sum() < max(least, 2 * self.cost[: state.since].sum()):
            return False
        if state.method != "particles":
            return self.late[-_TRIAL:].mean() > _LONG
        first = self.cost[state.since :][:_TRIAL]
        return self.cost[-_TRIAL:].mean() > 2 * first.mean()

    def _affordable(self, state: _Trying, possible: Sequence[str]) -> list[str]:
        """Return other methods that are new, or cost little beside the work since then."""
        work = self.cost[state.settled.since : state.begin].sum()
        others = []
        for method in possible:
            if method == state.settled.method:
                continue
            is_used = self.method[: state.begin] == method
            costs = self.cost[: state.begin][is_used][-_TRIAL:]
            if not len(costs) or _TRIAL * costs.mean() <= _SHARE * work:
                others.append(method)
        return others

    def _best(self, state: _Trying, others: Sequence[str]) -> str:
        """Return the method with the smallest cost times squared gradient."""

        def score(steps):
            return self.cost[steps].mean() * self.square[steps].mean()

        current = state.settled.method
        trials = self.method[state.begin :]
        scores = {}
        for method in others:
            steps = state.begin + np.flatnonzero(trials == method)
            scores[method] = score(steps[1:])
        recent = np.flatnonzero(self.method[: state.begin] == current)[1 - _TRIAL :]
        scores[current] = _MARGIN * score(recent)
        return min(scores, key=scores.__getitem__)


def _next_look(steps: int) -> int:
    """Return the next step at which methods may be compared.

    It is at an end of a program, and seldom in long runs.
    """
    stride = 10 if steps < 51 else 50 << max(0, (steps // 1000).bit_length() - 1)
    last = max(steps, 1) - 1
    return last + 1 + stride - last % stride
