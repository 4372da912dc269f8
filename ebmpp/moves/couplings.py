# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Couplings of a layer: two conditionals in, one coupled draw out.

A layer of a pair has natural parameters ``eta`` (leading chain, law p) and ``other`` (following chain,
law q). Every coupling here leaves each chain its own law and is faithful: equal conditionals give equal
draws.

"common" draws both chains from the same random words: unitwise maximal for Bernoulli, Spin and Categorical
units, the same noise for real-valued ones. "reflection" differs for Gaussian blocks alone: it makes them
equal as often as any coupling can, and mirrors the noise otherwise. The joint maximal couplings make the two
layers equal with the largest possible probability, ``1 - TV(p, q)``, for any family; they need only the
log-ratio ``<other - eta, t(x)> - (A(other) - A(eta))``, in which the base measure cancels.

The residual of a maximal coupling is a rejection sampler. It runs one trial a call: a row not yet accepted
*stalls*, and is tried again with fresh words. A row that still stalls after :data:`MOST_TRIALS` is not
accepted but flagged.

Whether a pair is *together* on a block is what the coupling says: XLA computes a value that both chains have
once in each fusion that uses it, and need not round it alike.

**References**

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*: Algorithms 1, 3 and 4.
2. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with couplings*.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxtyping import Bool

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Blocks, Counts, Keys, Rows, Which
from ebmpp.errors import ArgumentError
from ebmpp.families.family import LogRatio
from ebmpp.moves.gibbs import Families, draw_rows, num_words, split_words

#: Natural parameters of a layer, of the leading and of the following chain.
Etas = tuple[Rows, Rows]

#: The couplings of a layer.
KINDS = ("maximal", "maximal_independent", "common", "reflection", "independent")

#: Trials of one draw after which it is given up and flagged. A residual whose laws have total variation d is
#: entered with probability d and then tried until a chance of d hits, so one with mass gets here with
#: probability ``d (1 - d)**2**24``: at most 2.2e-8 a draw, where d is the step 2**-24 of the uniforms, and
#: below 1e-13 from d = 1e-6 on. What gets here is a residual that float32 has left without mass.
MOST_TRIALS = 2**24


class Attempt(NamedTuple):
    """One trial of a coupled draw, row by row."""

    x: Blocks
    """Proposed values of the leading chain."""
    y: Blocks
    """Proposed values of the following chain."""
    accept_x: Which
    """Whether the leading chain takes its proposal (if it has not taken one before)."""
    accept_y: Which
    broken: Which
    """Whether a natural parameter is outside its family's domain, a log-ratio is not a number, or a residual
    has no mass."""
    together: dict[str, Which]
    """Whether the coupling made one value of a block for both chains."""
    taken: Counts | int = 0
    """How many of the two chains took a Metropolis proposal."""


class Trial(NamedTuple):
    """One trial of a coupled draw, a pair of chains a row: its words, and what is known of the row."""

    keys: Keys
    first: Which
    """Whether it is a row's first trial."""
    same: Which
    """Whether the chains of a row agree on all that the draw depends on, so that they have one law, whatever
    the last bits of natural parameters say."""
    part: Any = 0
    """Which part of a move that is made in parts."""
    flags: Mapping[str, Bool[Array, "rows ..."]] = MappingProxyType({})
    """On which blocks the chains of a row agree, ``(rows, parts)`` a block."""
    most: Array | int = MOST_TRIALS
    """How many trials a draw within this one may take."""


def resolve(coupling: str | Sequence[Any] | None, layers: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """One kind a layer.

    :param coupling: "maximal", "maximal_independent", "common", "reflection" or "independent" for every
        layer, or one a layer; None for the default, "maximal"
        on every layer. Algorithm 3 of Qiu et al. is ``("maximal", "common")``, their Algorithm 1
        ``("maximal_independent", "independent")``.
    :param layers: the layers of the sweep.
    :raises ArgumentError: for an unknown kind or a wrong number of them.

    **Example**

    >>> resolve(None, (("v",), ("h",)))
    ('maximal', 'maximal')
    """
    if coupling is None:
        # Milliseconds until 1000 pairs have met (and mean tau), against ("maximal", "common"): untrained
        # 500x100 93 for 112 (7.8 for 10.6); trained 200x100 46 for 48 (8.7 for 11.0), 784x500 754 for 787
        # (27.0 for 29.3), 784x1000 1799 for 2342 (36.6 for 47.3). It loses where milliseconds matter least:
        # 16x16 3.3 for 2.8 (2.6 for 2.6), with a heavy tail 18 for 13 (27.0 for 21.9).
        kinds = ("maximal",) * len(layers)
    else:
        single = isinstance(coupling, str)
        kinds = (coupling,) * len(layers) if single else tuple(checks.sequence("coupling", coupling, "kinds"))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ArgumentError(
            f'coupling {unknown[0]!r} is unknown; choose among {KINDS} for the layers, or "metropolis" or '
            '"mixture"'
        )
    if len(kinds) != len(layers):
        raise ArgumentError(f"coupling names {len(kinds)} layers, and the sweep has {len(layers)}: {layers}")
    if set(kinds) == {"independent"}:
        raise ArgumentError(
            "with every layer drawn independently the chains of a pair cannot be held together"
        )
    return kinds


def stalls(kind: str) -> bool:
    """Whether a trial of this coupling can fail."""
    return kind.startswith("maximal")


def attempt(graph: Families, blocks: Sequence[str], kind: str, etas: Etas, trial: Trial) -> Attempt:
    """One trial of the coupled draw of a layer.

    :param etas: natural parameters of the two chains, each ``(rows, *shape, *stat_shape)``.
    :param trial: its words, and whether the conditionals are the same law whatever the last bits of ``etas``
        say.
    """
    if not stalls(kind):
        x, y, together = _unconditional(graph, blocks, kind, etas, trial.keys)
        accepted = jnp.ones(len(trial.keys), bool)
        # Else such a row would be accepted with a law that does not exist.
        inside = [_all(graph.families[b].in_domain(eta[b])) for eta in etas for b in blocks]
        attempt_ = Attempt(x, y, accepted, accepted, ~jnp.stack(inside).all(0), together)
    else:
        attempt_ = _maximal(graph, blocks, kind, etas, trial)
    y = {b: where_rows(trial.same, attempt_.x[b], attempt_.y[b]) for b in blocks}
    together = {b: attempt_.together[b] | trial.same for b in blocks}
    return attempt_._replace(y=y, together=together)


def _unconditional(
    graph: Families, blocks: Sequence[str], kind: str, etas: Etas, keys: Keys
) -> tuple[Blocks, Blocks, dict[str, Which]]:
    apart = dict.fromkeys(blocks, jnp.zeros(len(keys), bool))
    if kind == "independent":
        each = num_words(graph, blocks)
        words = random.words(keys, 2 * each)
        return (
            draw_rows(graph, blocks, etas[0], words[:, :each]),
            draw_rows(graph, blocks, etas[1], words[:, each:]),
            apart,
        )
    each = num_words(graph, blocks, coupled=True)
    if kind == "common":
        return *_couple(graph, blocks, etas, random.words(keys, each)), apart
    words = random.words(keys, each + len(blocks))
    parts = split_words(graph, blocks, words[:, :each], coupled=True)
    u = random.uniform(words[:, each:])
    drawn = {
        b: graph.families[b].reflect(parts[b], u[:, i], etas[0][b], etas[1][b]) for i, b in enumerate(blocks)
    }
    x, y, together = ({b: d[i] for b, d in drawn.items()} for i in range(3))
    return x, y, together


def _couple(graph: Families, blocks: Sequence[str], etas: Etas, words: Array) -> tuple[Blocks, Blocks]:
    parts = split_words(graph, blocks, words, coupled=True)
    drawn = {b: graph.families[b].couple(parts[b], etas[0][b], etas[1][b]) for b in blocks}
    return {b: d[0] for b, d in drawn.items()}, {b: d[1] for b, d in drawn.items()}


def _maximal(graph: Families, blocks: Sequence[str], kind: str, etas: Etas, trial: Trial) -> Attempt:
    """Algorithm 4 (residual "independent") or 3 (shared words) of Qiu et al.

    A first trial proposes one x for both chains, and in the same call tries the residual with other
    words for the rows that refuse it.
    """
    keys, first, same = trial[:3]
    independent = kind == "maximal_independent"
    each = num_words(graph, blocks)
    rest = 2 * each if independent else num_words(graph, blocks, coupled=True)
    # Several fusions read the words: without the barrier each hashes them again, a tenth of the whole sweep.
    words = lax.optimization_barrier(random.words(keys, each + rest + 3))
    log_u = jnp.log(random.uniform(words[:, -3:].T)).T
    families = {b: graph.families[b] for b in blocks}
    log_ratio = LogRatio(families, *etas)
    statistics = lambda x: {b: f.statistics(x[b]) for b, f in families.items()}
    ratio = lambda x: log_ratio(statistics(x))

    shared = draw_rows(graph, blocks, etas[0], words[:, :each])
    at_shared = log_ratio.checked(statistics(shared), same)
    together = first & (log_u[:, 0] <= at_shared)
    residual = words[:, each : each + rest]
    if independent:
        # The refused x is itself a draw of the leading residual; only the follower is still to be drawn.
        again = draw_rows(graph, blocks, etas[0], residual[:, :each])
        own = draw_rows(graph, blocks, etas[1], residual[:, each:])
        x = {b: where_rows(first, shared[b], again[b]) for b in blocks}
        accept_x = first | (log_u[:, 1] > ratio(x))
    else:
        x, own = _couple(graph, blocks, etas, residual)
        accept_x = log_u[:, 1] > ratio(x)
        x = {b: where_rows(together, shared[b], x[b]) for b in blocks}
    accept_y = log_u[:, 2] > -ratio(own)
    y = {b: where_rows(together, shared[b], own[b]) for b in blocks}
    # A row with a law that does not exist would be accepted all the same, or stall for ever.
    broken = ~jnp.isfinite(at_shared)
    accept = together | accept_x, together | accept_y
    return Attempt(x, y, *accept, broken, dict.fromkeys(blocks, together))


def _all(a: Bool[Array, "rows ..."]) -> Which:
    return a.reshape(len(a), -1).all(-1)


def where_rows(rows: Array, a: Array, b: Array) -> Array:
    """``a`` in the rows that are chosen, ``b`` in the others."""
    return jnp.where(rows.reshape(rows.shape + (1,) * (a.ndim - rows.ndim)), a, b)
