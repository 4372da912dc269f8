# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Subject of a report: a model, its data, a budget, and chains for several sections."""

from collections.abc import Mapping
import dataclasses
from functools import cached_property
import time
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np
import xarray as xr

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Blocks, Params, State, checks, compiled, merge_axes, num_rows
from ebmpp.evaluate import mean_field_bound
from ebmpp.graph import FactorGraph, tables
from ebmpp.kernels import BlockedGibbs, ParallelTempering
from ebmpp.reporting.page import Section


@dataclasses.dataclass(frozen=True)
class Budget:
    """Amount of computation of a report.

    :param rows: maximal number of rows of each data set, chosen at random.
    :param particles: particles of annealed importance sampling in each direction.
    :param temperatures: temperatures of annealed importance sampling.
    :param chains: number of chains of each sampler.
    :param sweeps: sweeps per chain, after as many warm-up sweeps.
    :param replicas: temperatures of parallel tempering.
    :param pairs: number of coupled pairs of chains.
    :param max_sweeps: sweeps after which a pair counts as unmet.
    :raises ArgumentError: values that are not positive ints (at least 2 chains,
        particles, replicas and temperatures, at least 4 sweeps).
    """

    rows: int = 500
    particles: int = 50
    temperatures: int = 1000
    chains: int = 10
    sweeps: int = 300
    replicas: int = 8
    pairs: int = 100
    max_sweeps: int = 1000

    def __post_init__(self) -> None:
        checks.set_counts(self, "rows", "pairs", "max_sweeps")
        checks.set_counts(
            self, "chains", "particles", "replicas", "temperatures", least=2
        )
        checks.set_counts(self, "sweeps", least=4)


BUDGETS = {
    "quick": Budget(),
    "thorough": Budget(5000, 200, 10_000, 20, 5000, 16, 1000, 50_000),
}


class SamplerRun(NamedTuple):
    """Draws of a sampler's chains, started from noise.

    :param draws: by block, ``(chains, sweeps, *shape)``.
    :param passes: sweeps of a single state per draw.
    :param diagnostics: the kernel's diagnostics string.
    """

    draws: dict[str, np.ndarray]
    seconds: float
    passes: int
    diagnostics: str


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """Model, data and budget of a report.

    :param data: rows of the visible blocks by name of the data set; the first is the
        training set.
    :param num_train: number of all training rows, of which ``data`` holds a subset.
    """

    graph: FactorGraph
    params: Params
    data: Mapping[str, State]
    budget: Budget
    rng_key: Array
    num_train: int
    history: xr.Dataset | None = None

    @property
    def train(self) -> State:
        """Subset of the training rows."""
        return next(iter(self.data.values()))

    @property
    def share(self) -> float:
        """Share of all training rows that ``train`` holds."""
        return num_rows(self.train) / self.num_train

    @property
    def has_free_energy(self) -> bool:
        """True if the latents given the visibles are summed out in closed form."""
        return not self.graph.interacting(self.graph.latent)

    def key(self, index: int) -> Array:
        """Return the key of one purpose."""
        return jax.random.fold_in(self.rng_key, index)

    def log_density(self, rows: State) -> Float[np.ndarray, "rows"]:
        """Return log p(v) + log Z of each row, or its mean-field bound if latents interact."""
        count = num_rows(rows)
        # smaller sets are padded, so that one program serves all of them
        size = max(count, num_rows(self.train))
        padded = {
            b: np.resize(rows[b], (size, *family.shape))
            for b, family in self.graph.visible.items()
        }
        if self.has_free_energy:
            value = -self.graph.free_energy(self.params, padded)
        else:
            value = mean_field_bound(self.graph, self.params, padded)
        return np.asarray(value, float)[:count]

    @cached_property
    def gibbs(self) -> SamplerRun:
        """Chains of blocked Gibbs sampling."""
        return self._run(1, 1, 1)

    @cached_property
    def tempered(self) -> SamplerRun:
        """Chains of parallel tempering."""
        return self._run(self.budget.replicas, 2, 2 * self.budget.replicas)

    def chains(self, section: Section) -> dict[str, SamplerRun]:
        """Return the chains of both samplers by name; note a sampler that rejects the model."""
        result = {}
        for name in ("Gibbs", "tempered"):
            try:
                result[name] = getattr(self, name.lower())
            except ValueError as error:
                section.missing(f"{name} chains", error)
        return result

    def _run(self, replicas: int, index: int, passes: int) -> SamplerRun:
        begin = time.monotonic()
        kernel = _kernel(self.graph, replicas)
        # checks values, which the traced program cannot
        kernel.target((self.params,), {}, check=True)
        keys = jax.random.split(self.key(index), self.budget.chains)
        state, draws = _run_chains(
            self.graph, replicas, self.budget.sweeps, self.params, keys
        )
        draws = {b: np.moveaxis(np.asarray(v), 0, 1) for b, v in draws.items()}
        diagnostics = kernel.get_diagnostics_str(state)
        return SamplerRun(draws, time.monotonic() - begin, passes, diagnostics)


def spread_draws(
    draws: Mapping[str, np.ndarray], chains: int, per_chain: int
) -> dict[str, np.ndarray]:
    """Return the last draw of each chain, then earlier ones, ``(draws, *shape)``."""
    sweeps = next(iter(draws.values())).shape[1]
    index = np.linspace(sweeps - 1, 0, per_chain, endpoint=False).astype(int)

    return {
        b: merge_axes(np.moveaxis(v[:chains, index], 1, 0)) for b, v in draws.items()
    }


def _kernel(graph: FactorGraph, replicas: int) -> BlockedGibbs | ParallelTempering:
    if replicas == 1:
        return BlockedGibbs(graph)
    return ParallelTempering(graph, num_temperatures=replicas)


@compiled(statics=3)
def _run_chains(
    graph: FactorGraph, replicas: int, sweeps: int, params: Params, keys: Array
) -> tuple[Any, Blocks]:
    """Return the last state of all chains, and draws after warm-up ``(sweeps, chains, *shape)``.

    This is one program; ``numpyro.infer.MCMC`` compiles twenty more, for the kernel's
    ``init`` and storage.
    """
    kernel = _kernel(graph, replicas)
    state = kernel.init(keys, sweeps, None, (params,), {})
    draws = {b: jnp.zeros((sweeps, *v.shape), v.dtype) for b, v in state.z.items()}

    def body(index, carry):
        state, draws = carry
        state = kernel.sample(state, (params,), {})
        slot = jnp.maximum(index - sweeps, 0)  # the first draw overwrites the warm-up
        return state, {b: v.at[slot].set(state.z[b]) for b, v in draws.items()}

    return lax.fori_loop(0, 2 * sweeps, body, (state, draws))


def check_rows(
    graph: FactorGraph, table: tables.Table, max_rows: int, seed: int
) -> Blocks:
    """Return at most ``max_rows`` random rows, checked."""
    total = tables.one_axis(graph, table)
    index = np.arange(total)
    if total > max_rows:
        index = np.random.default_rng(seed).permutation(total)[:max_rows]
    return tables.check_table(graph, table.take(index)).rows
