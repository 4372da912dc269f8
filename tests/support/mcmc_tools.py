# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Kernels run by NumPyro's MCMC, or scanned in one compiled program."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpyro.infer import MCMC
import zoo

import jax

from ebmpp import FactorGraph
from helpers import random_params

#: NumPyro's ways to run several chains
METHODS = ("sequential", "vectorized", "parallel", jax.vmap)

#: of the zoo's "rbm": all units are off or all on, and chains change between the two
#: slowly
TWO_MODES = {
    "v": np.full(4, -2.0, np.float32),
    "h": np.full(3, -3.0, np.float32),
    "v:h": np.full((4, 3), 1.6, np.float32),
}


@cache
def strong_params(name: str = "rbm", scale: float = 1.0) -> dict[str, Any]:
    """Params of a graph of the zoo under which its units depend on one another strongly."""
    return random_params(zoo.graph(name), seed=3, scale=scale)


def reference(graph: FactorGraph) -> dict[str, Any]:
    """Natural parameters of independent units where a path may begin."""
    generator = np.random.default_rng(0)
    noise = lambda f: np.float32(0.3 * generator.normal(size=f.statistic_shape))
    return {
        b: np.asarray(f.default_eta()) + noise(f) for b, f in graph.families.items()
    }


def make_mcmc(
    kernel: Any, num_samples: int = 8, num_chains: int = 1, **options: Any
) -> MCMC:
    options = {
        "num_warmup": 0,
        "chain_method": "vectorized",
        "progress_bar": False,
    } | options
    return MCMC(kernel, num_samples=num_samples, num_chains=num_chains, **options)


def run_mcmc(
    kernel: Any,
    *args: Any,
    key: int | jax.Array = 0,
    clamped: Mapping[str, Any] | None = None,
    init_params: Mapping[str, Any] | None = None,
    extra_fields: Sequence[str] = (),
    **options: Any,
) -> MCMC:
    """Run a kernel on params (or other model arguments); ``options`` go to :func:`make_mcmc`."""
    mcmc = make_mcmc(kernel, **options)
    key = jax.random.key(key) if isinstance(key, int) else key
    mcmc.run(
        key,
        *args,
        extra_fields=extra_fields,
        init_params=init_params,
        **(clamped or {}),
    )
    return mcmc


def samples(mcmc: MCMC) -> dict[str, np.ndarray]:
    """Draws of shape ``(chains, draws, *rows, *shape)`` per block."""
    return jax.tree.map(np.asarray, mcmc.get_samples(group_by_chain=True))


def fields(mcmc: MCMC) -> dict[str, Any]:
    """Extra fields of shape ``(chains, draws, ...)``."""
    return jax.tree.map(np.asarray, mcmc.get_extra_fields(group_by_chain=True))


@partial(jax.jit, static_argnums=(0, 1))
def _scan(
    kernel: Any,
    num_sweeps: int,
    keys: Any,
    args: tuple,
    clamped: dict,
    init_params: Any,
) -> Any:
    def step(state: Any, _: None) -> tuple[Any, Any]:
        state = kernel.sample(state, args, clamped)
        return state, (state.z, getattr(state, "met", None))

    state = kernel.init(keys, num_sweeps // 2, init_params, args, clamped)
    return jax.lax.scan(step, state, length=num_sweeps)


def scan_kernel(
    kernel: Any,
    num_sweeps: int,
    *args: Any,
    num_chains: int | None = None,
    key: int = 1,
    clamped: Mapping[str, Any] | None = None,
    init_params: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, np.ndarray], np.ndarray]:
    """Run many chains (or a single one) in one program, which compiles faster than NumPyro's.

    :return: the last state, draws of shape ``(num_sweeps, chains, ...)`` per block, and
        ``met`` of pairs.
    """
    keys = jax.random.key(key)
    keys = keys if num_chains is None else jax.random.split(keys, num_chains)
    state, (z, met) = jax.device_get(
        _scan(kernel, num_sweeps, keys, args, dict(clamped or {}), init_params)
    )
    return state, z, met


def assert_same(first: Any, second: Any) -> None:
    """Assert that two trees are equal bit by bit."""
    jax.tree.map(np.testing.assert_array_equal, first, second)
