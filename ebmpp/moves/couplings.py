# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Couplings of a layer: one coupled draw from two conditionals.

A layer of a pair has natural parameters ``eta`` (leading chain, distribution p) and
``other`` (following chain, distribution q). Every coupling leaves each chain its own
distribution and is faithful: equal conditionals give equal draws.

"common" draws both chains from the same random words: unitwise maximal for Bernoulli,
Spin and Categorical units, the same noise for real-valued ones. "reflection" differs
for Gaussian blocks only: it makes them equal with the largest possible probability, and
mirrors the noise otherwise. The joint maximal couplings make the two layers equal with
the largest possible probability, ``1 - TV(p, q)``, for any family. They need only the
log-ratio ``<other - eta, t(x)> - (A(other) - A(eta))``, in which the base measure
cancels.

The residual of a maximal coupling is a rejection sampler, which runs one trial per
call: a rejected row *stalls*, and is tried again with other words. A row that still
stalls after 2**24 trials (``MOST_TRIALS``) is flagged.

Whether a pair agrees on a block is reported by the coupling, not read off the values:
XLA may compute a value that both chains share twice, and round it differently.

**References**

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*: Algorithms 1, 3 and 4.
2. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with couplings*.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from jaxtyping import Bool

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Blocks, Counts, Keys, RowMask, Rows, checks, expand, random
from ebmpp.families.family import (
    Families,
    draw_rows,
    log_ratio,
    num_words,
    split_words,
)

#: Index of a part of a block whose units interact.
PartIndex = Array | int
#: Natural parameters of a layer, of the leading and of the following chain.
Etas = tuple[Rows, Rows]

#: The couplings of a layer.
KINDS = ("maximal", "maximal_independent", "common", "reflection", "independent")

#: Trials after which a draw is given up and flagged. A residual of distributions with
#: total variation d is entered with probability d and then accepted with probability d
#: per trial, so a residual with mass gets here with probability ``d (1 - d)**2**24``:
#: at most 2.2e-8 per draw, where d is the step 2**-24 of the uniforms, and below 1e-13
#: from d = 1e-6 on. What gets here is a residual that has no mass in float32.
MOST_TRIALS = 2**24


class Attempt(NamedTuple):
    """One trial of a coupled draw, row by row."""

    x: Blocks
    """Proposed values of the leading chain."""
    y: Blocks
    """Proposed values of the following chain."""
    accept_x: RowMask
    """True if the leading chain accepts its proposal (and has not accepted one before)."""
    accept_y: RowMask
    """The same for the following chain."""
    broken: RowMask
    """True if a natural parameter is outside its family's domain, a log-ratio is nan, or a
    residual has no mass."""
    together: dict[str, RowMask]
    """True if the coupling gave both chains one value of a block."""
    num_accepted: Counts | int = 0
    """Number of the two chains that accepted a Metropolis proposal."""

    @classmethod
    def final(
        cls,
        x: Blocks,
        y: Blocks,
        broken: RowMask,
        together: dict[str, RowMask],
        num_accepted: Counts | int = 0,
    ) -> Self:
        """Return an attempt that needs no other trial: both chains of every row accept it."""
        accept = jnp.ones(len(broken), bool)
        return cls(x, y, accept, accept, broken, together, num_accepted)

    @property
    def done(self) -> RowMask:
        """True if both chains have accepted."""
        return self.accept_x & self.accept_y

    def retried(self, new: Self) -> Self:
        """Return this attempt, with values of a later trial where chains accept only there."""
        take_x = new.accept_x & ~self.accept_x
        take_y = new.accept_y & ~self.accept_y
        take = take_x & take_y
        return self._replace(
            x=where_states(take_x, new.x, self.x),
            y=where_states(take_y, new.y, self.y),
            accept_x=self.accept_x | new.accept_x,
            accept_y=self.accept_y | new.accept_y,
            broken=self.broken | new.broken,
            together={
                b: jnp.where(take, new.together[b], v) for b, v in self.together.items()
            },
        )


class Trial(NamedTuple):
    """Inputs of one trial of a coupled draw, a pair of chains per row."""

    keys: Keys
    first: RowMask
    """True for a row's first trial."""
    same: RowMask
    """True if the chains of a row agree on all that the draw depends on, and so have one
    distribution, even where natural parameters differ in their last bits."""
    part: PartIndex = 0
    """Index of the part, for a move that is made in parts."""
    flags: Mapping[str, Bool[Array, "rows ..."]] = MappingProxyType({})
    """Blocks on which the chains of a row agree, ``(rows, parts)`` each."""
    most: Array | int = MOST_TRIALS
    """Largest number of trials of a draw within this one."""


def resolve(
    coupling: str | Sequence[Any] | None, layers: Sequence[Sequence[str]]
) -> tuple[str, ...]:
    """Return one kind of coupling per layer.

    :param coupling: "maximal" (the default), "maximal_independent", "common",
        "reflection" or "independent" for every layer, or one per layer. Algorithm 3 of
        Qiu et al. is ``("maximal", "common")``, their Algorithm 1
        ``("maximal_independent", "independent")``.
    :raises ArgumentError: for an unknown kind, a wrong number of kinds, or independent
        draws of all layers.
    """
    # Milliseconds until 1000 pairs have met (and mean tau), against ("maximal",
    # "common"): untrained 500x100 93 for 112 (7.8 for 10.6); trained 200x100 46 for 48
    # (8.7 for 11.0), 784x500 754 for 787 (27.0 for 29.3), 784x1000 1799 for 2342 (36.6
    # for 47.3). It loses where milliseconds matter least: 16x16 3.3 for 2.8 (2.6 for
    # 2.6), with a heavy tail 18 for 13 (27.0 for 21.9).
    coupling = "maximal" if coupling is None else coupling
    if isinstance(coupling, str):
        kinds = (coupling,) * len(layers)
    else:
        kinds = tuple(checks.sequence("coupling", coupling, "kinds"))
    for kind in kinds:
        checks.choice(
            "coupling",
            kind,
            KINDS,
            also='"mixture", moves, or a function that returns moves',
        )
    if len(kinds) != len(layers) or set(kinds) == {"independent"}:
        raise checks.error(
            "coupling",
            f"a kind for each of the {len(layers)} layers {layers}, and not "
            "independent for all of them",
            kinds,
            hint="Chains drawn independently part.",
        )
    return kinds


def stalls(kind: str) -> bool:
    """Return True if a trial of this coupling can be rejected."""
    return kind.startswith("maximal")


def attempt(
    families: Families,
    kind: str,
    etas: Etas,
    trial: Trial,
) -> Attempt:
    """Make one trial of the coupled draw of a layer, given natural parameters of both chains."""
    if stalls(kind):
        result = _maximal(families, kind, etas, trial)
    else:
        x, y, together = _draw_both(families, kind, etas, trial.keys)
        is_inside = [
            family.in_domain(eta[b]).reshape(len(trial.keys), -1)
            for eta in etas
            for b, family in families.items()
        ]
        # the conditionals of other rows do not exist
        broken = ~jnp.concatenate(is_inside, 1).all(1)
        result = Attempt.final(x, y, broken, together)
    y = where_states(trial.same, result.x, result.y)
    together = {b: v | trial.same for b, v in result.together.items()}
    return result._replace(y=y, together=together)


def _draw_both(
    families: Families,
    kind: str,
    etas: Etas,
    keys: Keys,
) -> tuple[Blocks, Blocks, Blocks]:
    """Draw the layer of both chains; return True where the coupling gave both one value."""
    separate = dict.fromkeys(families, jnp.zeros(len(keys), bool))
    if kind == "independent":
        words = jnp.split(random.words(keys, 2 * num_words(families)), 2, axis=1)
        x = draw_rows(families, etas[0], words[0])
        y = draw_rows(families, etas[1], words[1])
        return x, y, separate
    count = num_words(families, coupled=True)
    if kind == "common":
        x, y = _couple(families, etas, random.words(keys, count))
        return x, y, separate
    words = random.words(keys, count + len(families))
    parts = split_words(families, words[:, :count], coupled=True)
    u = random.uniform(words[:, count:])
    x = {}
    y = {}
    together = {}
    for i, (b, family) in enumerate(families.items()):
        x[b], y[b], together[b] = family.reflect(
            parts[b], u[:, i], etas[0][b], etas[1][b]
        )
    return x, y, together


def _couple(families: Families, etas: Etas, words: Array) -> tuple[Blocks, Blocks]:
    parts = split_words(families, words, coupled=True)
    x = {}
    y = {}
    for b, family in families.items():
        x[b], y[b] = family.couple(parts[b], etas[0][b], etas[1][b])
    return x, y


def _maximal(
    families: Families,
    kind: str,
    etas: Etas,
    trial: Trial,
) -> Attempt:
    """Make one trial of Algorithm 3 (residual from shared words) or 4 ("independent") of Qiu et al.

    A first trial proposes one x for both chains, and in the same call tries the
    residual with other words for the rows that reject it.
    """
    is_independent = kind == "maximal_independent"
    count = num_words(families)
    num_residual = 2 * count if is_independent else num_words(families, coupled=True)
    # Several fusions read the words: without the barrier each hashes them again, a
    # tenth of the sweep's time.
    words = lax.optimization_barrier(random.words(trial.keys, count + num_residual + 3))
    log_u = jnp.log(random.uniform(words[:, -3:].T)).T
    residual = words[:, count:-3]

    def log_ratio_at(x, same=None):
        statistics = {b: family.statistics(x[b]) for b, family in families.items()}
        return log_ratio(families, *etas, statistics, same)

    shared = draw_rows(families, etas[0], words[:, :count])
    at_shared = log_ratio_at(shared, trial.same)
    together = trial.first & (log_u[:, 0] <= at_shared)
    if is_independent:
        # A rejected x is itself a draw of the leading chain's residual: only the
        # follower is still to be drawn.
        x = shared
        y = draw_rows(families, etas[1], residual[:, count:])
        accept_x = jnp.ones(len(trial.keys), bool)
    else:
        x, y = _couple(families, etas, residual)
        accept_x = together | (log_u[:, 1] > log_ratio_at(x))
        x = where_states(together, shared, x)
    accept_y = together | (log_u[:, 2] > -log_ratio_at(y))
    y = where_states(together, shared, y)
    # a row whose conditional does not exist would be accepted all the same, or stall
    # forever
    broken = ~jnp.isfinite(at_shared)
    return Attempt(x, y, accept_x, accept_y, broken, dict.fromkeys(families, together))


def where_rows(rows: Array, a: Array, b: Array | float) -> Array:
    """Return ``a`` in the selected rows and ``b`` in the others."""
    return jnp.where(expand(rows, a), a, b)


def where_states(rows: Array, x: Rows, y: Rows) -> Blocks:
    """Return the blocks of ``y``, from ``x`` in the selected rows."""
    return {b: where_rows(rows, x[b], v) for b, v in y.items()}
