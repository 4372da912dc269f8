# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Greedy layer-wise pretraining of deep models."""

from collections.abc import Mapping
import dataclasses
from functools import partial
from typing import Any

import networkx as nx

import jax
from jax import Array
import jax.numpy as jnp
import optax

from ebmpp.contrib.graphs import mean_params
from ebmpp.core import Blocks, Params, Rows, checks, random
from ebmpp.errors import DeclarationError
from ebmpp.estimators import CD, Estimator
from ebmpp.families import Family
from ebmpp.graph import Factor, FactorGraph, tables
from ebmpp.graph.transforms.rewire import Initial
from ebmpp.moves import Layer, Target
from ebmpp.training import fit


def pretrain(
    graph: FactorGraph,
    data: Mapping[str, Array] | Array,
    *,
    rng_key: Array,
    estimator: Estimator | None = None,
    optimizer: optax.GradientTransformation | None = None,
    num_steps: int = 1000,
    batch_size: int = 100,
    init_scheme: str | Mapping[str, str] = "gaussian",
    progress_bar: bool = True,
) -> Params:
    """Return initial params for ``fit(params=...)``, learned two levels at a time.

    The levels are the blocks by their distance from the visible ones in the block
    graph. Each level and the next are trained as a separate model, on one draw per row
    of the level below given the row. Inner levels are in two such models, and in the
    complete one they have input from both sides, so in each of the two their input
    counts twice: the first model has two copies of its lower level, the last one two of
    its upper level, all with the same params, and in the models between the energy
    across is doubled. Factors of inner levels alone (biases) are learned twice and
    averaged.

    The result is a start, not the maximum of a likelihood. A model of two levels is
    trained as it is.

    :param graph: a graph of levels such as :func:`~ebmpp.layered` makes; a level may
        have several blocks.
    :param data: rows of the visible blocks, as for :func:`~ebmpp.fit`.
    :param rng_key: a jax key.
    :param estimator: estimator of each model; default ``CD(k=1)``.
    :param optimizer: optimiser of each model; default ``optax.sgd(0.05)``.
    :param num_steps: gradient steps of each model.
    :param batch_size: rows per step.
    :param init_scheme: initial params, "gaussian", "orthogonal", or a dict: see
        :meth:`FactorGraph.init`.
    :param progress_bar: show a progress bar for each model.
    :return: params of ``graph``.
    :raises DeclarationError: for latent blocks of one level that interact, or that no
        path of factors connects with a visible block.
    :raises StateError: for data of a wrong name, shape or value.
    :raises ArgumentError: for numbers out of range, or under ``jit``.

    **References**

    1. Salakhutdinov, Hinton (2009), *Deep Boltzmann machines*, section 3.2.
    2. Hinton, Osindero, Teh (2006), *A fast learning algorithm for deep belief nets*.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import pretrain
    >>> deep = ebmpp.layered(v=ebmpp.Bernoulli(9), h1=ebmpp.Bernoulli(4), h2=ebmpp.Bernoulli(2))
    >>> rows = ebmpp.data.bars_and_stripes(3)
    >>> start = pretrain(deep, rows, rng_key=jax.random.key(0), num_steps=5,
    ...                                 progress_bar=False)
    >>> start["h1:h2"].shape  # next: ebmpp.fit(deep, rows, params=start, ...)
    (4, 2)
    """
    checks.instance("pretrain: graph", graph, FactorGraph)
    rng_key = checks.key("pretrain: rng_key", rng_key)
    checks.on_host("pretrain", rng_key, data)
    num_steps = checks.count("pretrain: num_steps", num_steps)
    levels = _levels(graph)
    init_key, *keys = jax.random.split(rng_key, 1 + 2 * len(levels))
    rows, _, _ = tables.as_data(graph, data, "pretrain")
    params = graph.init(init_key, rows, init_scheme)
    train = partial(
        fit,
        estimator=CD(k=1) if estimator is None else estimator,
        optimizer=optax.sgd(0.05) if optimizer is None else optimizer,
        num_steps=num_steps,
        batch_size=batch_size,
        progress_bar=progress_bar,
    )
    learned: dict[str, list[Any]] = {name: [] for name in params}
    for i in range(len(levels) - 1):
        model = _Pair.make(graph, levels, i)
        start = {f.name: params[f.name] for f in model.graph.factors}
        result = train(model.graph, model.rows(rows), params=start, rng_key=keys[2 * i])
        for name, value in result.params.items():
            learned[name].append(value)
        if i + 2 < len(levels):
            rows = _draw(
                model.graph,
                levels[i + 1],
                result.params,
                model.rows(rows),
                keys[2 * i + 1],
            )
    return mean_params(learned)


def _levels(graph: FactorGraph) -> list[tuple[str, ...]]:
    """Return blocks by distance from the visible ones; refuse a graph without levels."""
    distance = nx.multi_source_dijkstra_path_length(
        graph.to_networkx(), set(graph.visible)
    )
    far = [b for b in graph.families if b not in distance]
    if far:
        raise DeclarationError(
            f"pretrain: no path of factors connects {far[0]!r} with a visible block. "
            f"Declare a factor between it and one of {list(distance)}."
        )
    levels = [
        tuple(b for b in graph.families if distance[b] == i)
        for i in range(1 + max(distance.values()))
    ]
    if len(levels) < 2:
        raise DeclarationError(
            "pretrain: the graph has no latent block. Train it by fit alone."
        )
    for i, level in enumerate(levels[1:], 1):
        for a, b in graph.interacting(level):
            names = [f.name for f in graph.factors if {a, b} <= set(f.blocks)]
            raise DeclarationError(
                f"pretrain: factor {names[0]!r} couples {a!r} and {b!r}, both at "
                f"distance {i} from the visible blocks, so the graph is no chain of "
                "levels. Start from graph.init(...), or pretrain the graph without "
                "that factor."
            )
    return levels


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Model of a level and the next, the lower one visible."""

    graph: FactorGraph
    copied: frozenset[str]

    @classmethod
    def make(
        cls, complete: FactorGraph, levels: list[tuple[str, ...]], index: int
    ) -> "_Pair":
        """Make the model of levels ``index`` and ``index + 1``."""
        lower, upper = levels[index : index + 2]
        factors = [f for f in complete.factors if set(f.blocks) <= {*lower, *upper}]
        first = index == 0
        last = index + 2 == len(levels)
        copied = frozenset(() if first == last else lower if first else upper)

        def across(f):
            return not (
                set(f.blocks).isdisjoint(lower) or set(f.blocks).isdisjoint(upper)
            )

        def double(f):
            return not first and not last and across(f)

        tied = [_tied(f, complete, copied, 2.0 if double(f) else 1.0) for f in factors]
        # an inner block without a bias may not occur
        used = {b for f in tied for b in f.blocks}

        def twice(f):
            return dataclasses.replace(f, shape=(2, *f.shape))

        def family(b):
            return twice(complete.families[b]) if b in copied else complete.families[b]

        visible, latent = (
            {b: family(b) for b in level if b in used} for level in (lower, upper)
        )
        return cls(FactorGraph(visible, latent, tied), copied)

    def rows(self, x: Rows) -> Blocks:
        """Return rows of the visible blocks, duplicated where the model has two copies."""
        rows = {b: x[b] for b in self.graph.visible}
        return {
            b: jnp.stack([v, v], axis=1) if b in self.copied else v
            for b, v in rows.items()
        }


def _tied(
    factor: Factor, complete: FactorGraph, copied: frozenset[str], scale: float
) -> Factor:
    """Return a factor for copied blocks: its energy summed over the copies, times ``scale``."""
    flags = tuple(b in copied for b in factor.blocks)
    if scale == 1 and not any(flags):
        return factor
    families = tuple((b, complete.families[b]) for b in factor.blocks)
    tied = _Tied(factor, families, flags, scale)
    return Factor(
        *factor.blocks, energy=tied, init=Initial(factor, families), name=factor.name
    )


@dataclasses.dataclass(frozen=True)
class _Tied:
    """Energy of a tied factor; hashable, so that equal models share their programs."""

    factor: Factor
    families: tuple[tuple[str, Family], ...]
    copied: tuple[bool, ...]
    scale: float

    def __call__(self, params: Any, *statistics: Array) -> Array:
        families = tuple(family for _, family in self.families)
        total = jnp.zeros(())
        for copy in range(2 if any(self.copied) else 1):
            t = [
                t[copy] if twice else t
                for t, twice in zip(statistics, self.copied, strict=True)
            ]
            total = total + self.factor.evaluate(params, *t, families=families)
        return self.scale * total


@partial(jax.jit, static_argnums=(0, 1))
def _draw(
    graph: FactorGraph,
    level: tuple[str, ...],
    params: Params,
    rows: Rows,
    rng_key: Array,
) -> Blocks:
    """Draw the upper level once for each row of the lower."""
    count = len(next(iter(rows.values())))
    keys = random.fold_in(random.key_pair(rng_key), jnp.arange(count))
    x, _ = Layer(level).draw(Target(graph, params), rows, keys)
    return {b: x[b] for b in level}
