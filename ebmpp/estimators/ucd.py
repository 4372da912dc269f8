# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased contrastive divergence, and its choice between three unbiased gradients."""

from collections.abc import Sequence
import contextlib
import dataclasses
from typing import Any, NamedTuple

import numpy as np

import jax.numpy as jnp

from ebmpp.core import Key, Params, Rows, checks
from ebmpp.errors import IntractableError
from ebmpp.estimators.base import Batch, Choice, Estimate, History
from ebmpp.estimators.pairs import ChainUCD, UCDState
from ebmpp.estimators.particles import ParticleState, ParticleUCD
from ebmpp.graph import FactorGraph
from ebmpp.moves.mixture import mixture_sweep

_WAYS = ("gibbs", "mixture", "particles")
# Unit updates before the first comparison: some 50 CPU-seconds, over twice what the
# other ways compile for. `make demo` takes 2e9 in all.
_WORK = 2.5e9
# mean sweeps that pairs take to meet, beyond the lag, below which there is no
# comparison
_LONG = 30.0
# steps of a way in a comparison, of which the first adapts its state and does not count
_TRIAL = 10
_SHARE = (
    0.1  # of the work since the last comparison, that another trial of a way may take
)
_MARGIN = 0.8  # a way must be so many times better than the one in use


@dataclasses.dataclass(frozen=True, repr=False)
class UCD(ChainUCD):
    r"""Unbiased contrastive divergence: pairs of chains that run until they meet, or of particle systems.

    The estimator to begin with. It starts with pairs of Gibbs chains. Where they take
    more than 30 sweeps beyond the lag to meet, after 2.5e9 unit updates (some 50
    CPU-seconds), ten steps are made by each other way: chains that share proposals from
    a mixture (``coupling="mixture"``, of two layers and complete rows), and pairs of
    particle systems (:class:`ParticleUCD`). It continues with the way of the smallest
    :math:`C \, E|g|^2`, where C is the cost of a step in sweeps and g its gradient:
    with the best learning rate a step gains :math:`|E g|^4 / (2 L \, E|g|^2)`, L being
    the smoothness. Comparisons are repeated when the work has doubled, and depend on
    past steps alone. The history has the ``cost``, and from the first comparison on the
    ``way`` of each step (0 Gibbs, 1 mixture, 2 particles) and the ``chosen_way``.

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
    :param m: last sweep that counts, at least k. Default: k. With an adaptive k: number
        of sweeps after k that count too; default: the lag; 0 counts the state at k
        alone.
    :param lag: sweeps that the leading chain is ahead. Default: adaptive with k; 1 if
        only k is given.
    :param coupling: fixes the way: "maximal" (as without it), "maximal_independent",
        "common", "reflection" or "independent" for every layer, or a tuple of these,
        one per layer; "mixture", moves, or a function that returns moves: see
        :func:`ebmpp.moves.sweeps.resolve_moves`. A single name but "mixture", or a
        function, applies to the posterior too.
    :param pool: with "mixture", the source of proposals: "data" (rows of the data,
        chosen once, with latents redrawn at each step) or "persistent" (chains that
        start there and move by one sweep per step).
    :param pool_size: number of states in the pool, which should contain every mode.
    :param start: where pairs start: "data" (the batch's rows), "persistent" (chains
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
    :param pairs: "auto" (default) chooses from past steps, unless ``coupling`` is
        given; "gibbs", "mixture" and "particles" fix the way. Particle systems have
        twice as many particles as there are pairs, at least 100 (200 without
        ``num_pairs``). Persistent chains start again after steps of particles.
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
    >>> UCD(start="persistent", length=TargetVariance(1.5))
    UCD(length=TargetVariance(smoothing=0.9, target=1.5), start='persistent')
    """

    pairs: str = "auto"

    def __post_init__(self) -> None:
        checks.choice("UCD: pairs", self.pairs, ("auto", *_WAYS))
        fits = {
            "gibbs": self.coupling != "mixture",
            "mixture": self.coupling in (None, "mixture"),
        }
        if not fits.get(self.pairs, True):
            raise checks.error(
                "UCD: coupling", f"left out or fit pairs={self.pairs!r}", self.coupling
            )
        if self.pairs == "mixture":
            object.__setattr__(self, "coupling", "mixture")
        super().__post_init__()

    @property
    def uses_chains(self) -> bool:
        """False if the negative phase is by particle systems."""
        return self.pairs != "particles"

    @property
    def _estimator(self) -> Any:
        """Estimator of this way: particle systems, or the chains of the base class."""
        if self.uses_chains:
            return super()
        num = max(100, 2 * (self.num_pairs or 100))
        return ParticleUCD(
            num_particles=num, posterior=dataclasses.replace(self, pairs="auto")
        )

    def init(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> Any:
        """Return the first state of this way; that of "auto" is the one of Gibbs chains."""
        return self._estimator.init(graph, params, data, batch, key)

    def estimate(
        self, graph: FactorGraph, params: Params, state: Any, batch: Batch, key: Key
    ) -> Estimate:
        return self._estimator.estimate(graph, params, state, batch, key)

    def adopt(self, before: Any, fresh: Any) -> Any:
        """Continue chains and lengths; the length of Gibbs pairs survives steps of another way."""
        adopted = self._estimator.adopt(before, fresh)
        way = _way_of(before)
        is_fixed = self.pairs == "auto" and self.coupling is not None
        continues = is_fixed or way is None or way == _way_of(fresh)
        gibbs = 0 if continues else before.gibbs if way else before.negative
        if not float(gibbs):
            return adopted
        lengths = (
            {"negative": gibbs, "seen": jnp.zeros_like(adopted.seen)}
            if self.uses_chains
            else {}
        )
        return adopted._replace(gibbs=gibbs, positive=before.positive, **lengths)

    def choose(self, graph: FactorGraph, history: History) -> Choice:
        if self.pairs != "auto" or self.coupling is not None:
            return Choice(self)
        past = _Past.read(graph, history)
        is_complete = "posterior_sweeps" not in history
        way, current, until = past.choose(_possible(graph, is_complete))
        record = {"way": way, "chosen_way": current} if way or past.way.any() else {}
        return Choice(
            dataclasses.replace(self, pairs=_WAYS[way]) if way else self, until, record
        )

    def diagnose(self, history: History) -> str | None:
        """Return the warning of the way in use at the end, about its steps."""
        estimator, rows = self._last(history)
        return estimator.diagnose(rows)

    def diagnose_chains(
        self, graph: FactorGraph, params: Params, data: Rows, history: History, key: Key
    ) -> str | None:
        """Return the warning of the way in use at the end, about its chains."""
        estimator, rows = self._last(history)
        return estimator.diagnose_chains(graph, params, data, rows, key)

    def _last(self, history: History) -> tuple[Any, History]:
        """Return the estimator of the last step, and the steps of its way."""
        way = np.nan_to_num(history.get("way", np.zeros(0))).astype(int)
        if not way.any():
            return self._estimator, history
        last = dataclasses.replace(self, pairs=_WAYS[way[-1]])
        return last._estimator, {name: v[way == way[-1]] for name, v in history.items()}


def _way_of(state: Any) -> int | None:
    """Return the number of the way that a state belongs to; None for that of another estimator."""
    if isinstance(state, UCDState):
        return int(bool(state.pool))
    return 2 if isinstance(state, ParticleState) else None


def _possible(graph: FactorGraph, is_complete: bool) -> tuple[int, ...]:
    """Return the ways that a graph allows, with missing entries or an intractable posterior or without."""
    with contextlib.suppress(IntractableError):
        mixture_sweep(graph)
        return (0, 1, 2) if is_complete else (0, 2)
    return (0, 2)


class _Past(NamedTuple):
    """Past steps of a stage, ``(steps,)`` each, by which the next way is chosen."""

    way: np.ndarray
    current: np.ndarray  # the way in use, from which trials of the others differ
    cost: np.ndarray  # unit updates
    square: np.ndarray  # squared norm of the gradient
    late: np.ndarray  # mean sweeps in which pairs met, beyond the lag

    @classmethod
    def read(cls, graph: FactorGraph, history: History) -> "_Past":
        """Return the columns of a history."""
        steps = len(history.get("cost", ()))

        def column(name):
            return np.nan_to_num(np.asarray(history.get(name, np.zeros(steps)), float))

        way = column("way").astype(int)
        current = column("chosen_way").astype(int)
        units = sum(family.size for family in graph.families.values())
        late = column("meeting_time_mean") - column("lag")
        return cls(
            way, current, units * column("cost"), column("gradient_norm") ** 2, late
        )

    def choose(self, possible: Sequence[int]) -> tuple[int, int, int]:
        """Return the way of the next step, the way in use, and the number of steps at the next choice.

        The result is the same at any step between two choices, so that a run may resume
        there.
        """
        steps = len(self.way)
        # of trials in progress
        start = int(np.max(np.flatnonzero(self.way == self.current), initial=-1)) + 1
        home = int(self.current[-1]) if steps else 0
        past = _Past(*(column[:start] for column in self))
        if start == steps and not (steps == _next_look(steps - 1) and past._is_due()):
            return home, home, _next_look(steps)
        work = float(past.cost[past._compared() :].sum())
        # others that were not tried, or whose trial costs little beside the work since
        # then
        costs = {
            way: past.cost[past.way == way][-_TRIAL:] for way in possible if way != home
        }
        others = [
            w
            for w, cost in costs.items()
            if not len(cost) or _TRIAL * cost.mean() <= _SHARE * work
        ]
        tried = list(dict.fromkeys(self.way[start:].tolist()))
        done = int((self.way[start:] == tried[-1]).sum()) if tried else _TRIAL
        if done < _TRIAL:
            return tried[-1], home, steps + _TRIAL - done
        if len(tried) < len(others):
            return others[len(tried)], home, steps + _TRIAL
        rows = {
            way: start + np.flatnonzero(self.way[start:] == way)[1:] for way in others
        }
        score = {
            way: self.cost[r].mean() * self.square[r].mean() for way, r in rows.items()
        }
        recent = np.flatnonzero(past.way == home)[1 - _TRIAL :]
        score[home] = _MARGIN * self.cost[recent].mean() * self.square[recent].mean()
        best = min(score, key=lambda way: score[way])
        return best, best, _next_look(steps)

    def _compared(self) -> int:
        """Return the number of steps at the end of the last comparison, or 0."""
        return int(np.max(np.flatnonzero(self.way != self.current), initial=-1)) + 1

    def _is_due(self) -> bool:
        """Return True if the others should be tried: after enough work, if this way is slow or got slower."""
        compared = self._compared()
        if self.cost.sum() < max(_WORK, 2 * self.cost[:compared].sum()):
            return False
        if self.current[-1] != 2:
            return bool(self.late[-_TRIAL:].mean() > _LONG)
        return bool(
            self.cost[-_TRIAL:].mean() > 2 * self.cost[compared:][:_TRIAL].mean()
        )


def _next_look(steps: int) -> int:
    """Return the next step at which ways may be compared: seldom in long runs, at ends of their programs."""
    stride = 10 if steps < 51 else 50 << max(0, (steps // 1000).bit_length() - 1)
    return max(steps, 1) + stride - (max(steps, 1) - 1) % stride
