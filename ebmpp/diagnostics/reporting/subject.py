# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What is reported on: a model with data, how much work is done, and chains that several sections read."""

from collections.abc import Mapping
import dataclasses
from functools import cached_property
import time
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Params, checks
from ebmpp.core.compile import compiled
from ebmpp.diagnostics.reporting.page import Section
from ebmpp.errors import IntractableError
from ebmpp.evaluate.variational import mean_field_bound
from ebmpp.exact.perfect import perfect_sample
from ebmpp.graph import FactorGraph, tables
from ebmpp.kernels import BlockedGibbs, ParallelTempering

State = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Work:
    """How much a report computes.

    :param rows: at most so many rows of each data set, drawn at random.
    :param particles: of annealed importance sampling, in each direction.
    :param temperatures: of its ladder.
    :param chains: of each sampler.
    :param sweeps: of each chain that count, after as many that do not.
    :param replicas: temperatures of parallel tempering.
    :param pairs: coupled pairs of chains.
    :param max_sweeps: after which a pair counts as unmet.
    :param references: unbiased gradients that the bias of the run's estimator is measured against, at least
        3; 0 for none. Each is some systems of 1000 particles, the dearest part of a report on a large model.
    :raises ArgumentError: for what is no positive int (chains, particles, replicas and temperatures at least
        2, sweeps at least 4, references at least 3 or 0).
    """

    rows: int = 500
    particles: int = 50
    temperatures: int = 1000
    chains: int = 10
    sweeps: int = 300
    replicas: int = 8
    pairs: int = 100
    max_sweeps: int = 1000
    references: int = 0

    def __post_init__(self) -> None:
        checks.set_counts(self, "rows", "pairs", "max_sweeps")
        checks.set_counts(self, "chains", "particles", "replicas", "temperatures", least=2)
        checks.set_counts(self, "sweeps", least=4)
        if self.references != 0:
            checks.set_counts(self, "references", least=3)


WORK = {"quick": Work(), "thorough": Work(5000, 200, 10_000, 20, 5000, 16, 1000, 50_000, 20)}


class Chains(NamedTuple):
    """Draws of a sampler's chains, which started from noise."""

    draws: State
    """``(chains, sweeps, *shape)`` a block."""
    seconds: float
    passes: int
    """Sweeps of one state that a draw took."""
    told: str
    """What the kernel says of its run."""


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A model with data."""

    graph: FactorGraph
    params: Params
    data: Mapping[str, Mapping[str, Array]]
    """Rows of the visible blocks, by the name of the data set; the first is what was trained on."""
    work: Work
    rng_key: Array
    image_shape: tuple[int, int] | Mapping[str, tuple[int, int]] | None
    table: tables.Table | None = None
    """All rows that were trained on; None where ``data`` has them all."""

    @property
    def count(self) -> int:
        """How many rows there are to train on."""
        return len(next(iter(self.train.values()))) if self.table is None else self.table.batch[0]

    @property
    def share(self) -> float:
        """The share of these that ``train`` is."""
        return len(next(iter(self.train.values()))) / self.count

    @property
    def train(self) -> Mapping[str, Array]:
        """The first data set."""
        return next(iter(self.data.values()))

    @property
    def closed(self) -> bool:
        """Whether the latents given the visibles are summed out in closed form."""
        return not self.graph.interacting(self.graph.latent)

    def key(self, index: int) -> Array:
        """A key for one purpose."""
        return jax.random.fold_in(self.rng_key, index)

    def log_weight(self, rows: Mapping[str, Array]) -> Float[np.ndarray, "*batch"]:
        """log p(v) + log Z of rows; of interacting latents a lower bound of it."""
        count, size = len(next(iter(rows.values()))), len(next(iter(self.train.values())))
        # shorter sets are filled up, so that one program serves all of them
        filled = {b: np.resize(rows[b], (max(count, size), *rows[b].shape[1:])) for b in self.graph.visible}
        if self.closed:
            return -np.asarray(self.graph.free_energy(self.params, filled), float)[:count]
        return np.asarray(mean_field_bound(self.graph, self.params, filled), float)[:count]

    @cached_property
    def gibbs(self) -> Chains:
        """Chains of blocked Gibbs."""
        return self._run(1, 1, 1)

    @cached_property
    def tempered(self) -> Chains:
        """Chains of parallel tempering."""
        replicas = self.work.replicas
        return self._run(replicas, 2, 2 * replicas)

    def chains(self, section: Section) -> dict[str, Chains]:
        """Those of both samplers, by name; where one does not take the model, the section says why."""
        made = {}
        for name, run in {"Gibbs": lambda: self.gibbs, "tempered": lambda: self.tempered}.items():
            try:
                made[name] = run()
            except ValueError as error:
                section.missing(f"{name} chains", error)
        return made

    def _run(self, replicas: int, index: int, passes: int) -> Chains:
        work, begin = self.work, time.monotonic()
        kernel = _kernel(self.graph, replicas)
        kernel.target((self.params,), {}, check=True)  # values, which the program below cannot look at
        keys = jax.random.split(self.key(index), work.chains)
        state, draws = _run_chains(self.graph, replicas, work.sweeps, self.params, keys)
        draws = {b: np.moveaxis(np.asarray(v), 0, 1) for b, v in draws.items()}
        return Chains(draws, time.monotonic() - begin, passes, kernel.get_diagnostics_str(state))

    @cached_property
    def starts(self) -> tuple[State, bool, str]:
        """A state a particle to start annealing in reverse from; whether they are exact; what they are."""
        count = self.work.particles
        try:
            drawn = perfect_sample(self.graph, self.params, self.key(3), count, method="enumerate")
            return {b: np.asarray(v) for b, v in drawn.items()}, True, "independent exact draws"
        except IntractableError:
            each = -(-count // self.work.chains)
            place = np.linspace(self.work.sweeps - 1, 0, each, endpoint=False).astype(int)
            # all chains' last draws first
            pick = lambda v: np.moveaxis(v[:, place], 1, 0).reshape(-1, *v.shape[2:])[:count]
            told = f"draws of {self.work.chains} chains of parallel tempering, started from noise"
            return {b: pick(v) for b, v in self.tempered.draws.items()}, False, told


def _kernel(graph: FactorGraph, replicas: int) -> BlockedGibbs | ParallelTempering:
    return BlockedGibbs(graph) if replicas == 1 else ParallelTempering(graph, num_temperatures=replicas)


@compiled(statics=3)
def _run_chains(
    graph: FactorGraph, replicas: int, sweeps: int, params: Params, keys: Array
) -> tuple[Any, dict[str, Array]]:
    """The last state of all chains, and their draws ``(sweeps, chains, *shape)`` after as many warmup sweeps.

    One program: ``numpyro.infer.MCMC`` would compile twenty more, for the kernel's ``init`` and its storage.
    """
    kernel = _kernel(graph, replicas)
    state = kernel.init(keys, sweeps, None, (params,), {})
    draws = {b: jnp.zeros((sweeps, *v.shape), v.dtype) for b, v in state.z.items()}

    def sweep(index: Array, carry: tuple) -> tuple:
        state, draws = carry
        state = kernel.sample(state, (params,), {})
        place = jnp.maximum(index - sweeps, 0)  # the first draw that counts overwrites those of the warmup
        return state, {b: v.at[place].set(state.z[b]) for b, v in draws.items()}

    return lax.fori_loop(0, 2 * sweeps, sweep, (state, draws))


def some_rows(graph: FactorGraph, data: Any, most: int, seed: int) -> tuple[dict[str, Array], int]:
    """At most so many rows of the visible blocks, checked, and how many there were.

    :raises StateError: for data that do not fit the graph, or without rows.
    """
    table = tables.as_table(graph, data, "the report")
    total = tables.one_axis(graph, table)
    chosen = np.random.default_rng(seed).permutation(total)[:most] if total > most else np.arange(total)
    return tables.check_table(graph, table.take(chosen)).rows, total
