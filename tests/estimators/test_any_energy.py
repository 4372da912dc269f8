# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Every estimator of the gradient on graphs with a network as a factor, by enumeration."""

from typing import Any

from network_graphs import NAMES, Enumerated, enumerated
import numpy as np
import pytest
from ucd_tools import estimate, key

import jax
import jax.numpy as jnp

from ebmpp import CD, PCD, PTT, UCD, ParticleUCD, WeightedPCD
from ebmpp.errors import IntractableError
from ebmpp.moves import informed_sweep
from helpers import assert_law, nightly

COPIES = 25  # of each row
BATCH = 4 * COPIES
#: number of discarded steps, stride, and number of steps that count
UNBIASED = (0, 1, 40)
PERSISTENT = (20, 6, 40)
#: least standard error: samples do not show that of units that seldom change
RARE = 1e-4
ESTIMATORS: dict[str, Any] = {
    "CD": (CD(k=30), UNBIASED),
    "PCD": (PCD(num_chains=300), PERSISTENT),
    "PTT": (PTT(num_chains=100), PERSISTENT),
    "WeightedPCD": (WeightedPCD(num_chains=400, num_watchers=20), PERSISTENT),
    "UCD, Gibbs": (UCD(method="gibbs"), UNBIASED),
    "UCD": (UCD(), UNBIASED),
    "UCD, mixture": (UCD(method="mixture", pool_size=12), UNBIASED),
    "UCD, persistent pool": (
        UCD(method="mixture", pool="persistent", pool_size=30),
        UNBIASED,
    ),
    "ParticleUCD": (ParticleUCD(num_particles=60), UNBIASED),
    "ParticleUCD, informed": (
        lambda graph: ParticleUCD(num_particles=60, moves=informed_sweep(graph)),
        UNBIASED,
    ),
}
BIASED = ("CD", "PCD", "PTT", "WeightedPCD")
FAST = {("PCD", "ordinary latents")}
CASES = [
    (kind, name) if (kind, name) in FAST else nightly(kind, name)
    for kind in ESTIMATORS
    for name in NAMES
    if not (kind in BIASED and name == "latents inside")
    # the smallest means depend on states that few runs visit; gradients in float64 differ
    # by 1e-7
    if not (kind == "UCD, persistent pool" and "latents" in name)
]


def rows_of(case: Enumerated) -> dict[str, jax.Array]:
    return {b: jnp.asarray(np.tile(v, (COPIES, 1))) for b, v in case.rows.items()}


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_mean_gradient_is_that_of_the_likelihood(kind: str, name: str) -> None:
    case = enumerated(name)
    estimator, (skip, stride, count) = ESTIMATORS[kind]
    if kind.endswith("informed"):
        estimator = estimator(case.graph)
    rows = rows_of(case)
    state = estimator.init_state(case.graph, case.params, rows, BATCH, key(0))
    gradients = []
    for step in range(skip + stride * count):
        result = estimate(
            estimator, case.graph, case.params, state, rows, key(step + 1)
        )
        state = result.state
        if step >= skip and (step - skip) % stride == 0:
            gradients.append(jax.device_get(result.gradient))
    exact = case.loss_gradient()
    leaves = jax.tree.leaves(exact)
    assert max(np.abs(leaf).max() for leaf in leaves) > 0.1
    size = sum(leaf.size for leaf in leaves)
    drawn = jax.tree.map(lambda *g: np.stack(g), *gradients)

    def compare(gradient: np.ndarray, expected: np.ndarray) -> None:
        error = gradient.std(0, ddof=1) / np.sqrt(len(gradient))
        assert_law(gradient.mean(0), expected, np.maximum(error, RARE), size)

    jax.tree.map(compare, drawn, exact)


@pytest.mark.parametrize("kind", BIASED)
def test_latents_inside_of_a_network_have_no_closed_posterior(kind: str) -> None:
    case = enumerated("latents inside")
    estimator: Any = ESTIMATORS[kind][0]
    with pytest.raises(IntractableError, match="UCD"):
        estimator.init_state(case.graph, case.params, rows_of(case), BATCH, key(0))
