# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Stated errors of log Z on trained machines."""

from collections.abc import Iterator
import importlib
from pathlib import Path
import sys
from typing import Any

import numpy as np
import pytest

import jax
import optax

import ebmpp
from ebmpp import Bernoulli, WeightedPCD

pytestmark = pytest.mark.nightly

SEEDS = range(6)


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    folder = str(Path(__file__).parents[2] / "benchmarks" / "papers")
    sys.path.insert(0, folder)
    yield importlib.import_module("coverage_of_log_z")
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def machine(bench: Any) -> Any:
    return bench.bars()


@pytest.mark.parametrize("method", ["smc", "ais", "bracket", "WeightedPCD", "monitor"])
def test_intervals_hold_the_exact_value_or_warn(
    bench: Any, machine: Any, method: str
) -> None:
    row = bench.covered(machine, method, SEEDS)
    # six intervals at 0.95: three or more fail with probability 0.002
    assert row["covered or warned"] >= 4, row


def test_weighted_chains_at_a_large_rate_do_not_flatter() -> None:
    """With steps that nothing can follow the history is nan where it would be off by many nats."""
    graph, rows = (
        ebmpp.layered(v=Bernoulli(64), h=Bernoulli(16)),
        ebmpp.data.binarize(ebmpp.data.digits()),
    )
    exactly = lambda params: ebmpp.exact.log_partition(graph, params)
    run = {
        "optimizer": optax.sgd(0.3),
        "num_steps": 400,
        "batch_size": 100,
        "progress_bar": False,
    }
    run |= {
        "monitors": {"exact": exactly},
        "monitor_every": 10,
        "rng_key": jax.random.key(0),
    }
    with pytest.warns(UserWarning, match="nan"):
        fit = ebmpp.fit(
            graph, rows, estimator=WeightedPCD(num_chains=200, num_watchers=1000), **run
        )
    steps = fit.history.monitor_step.values[:-1]
    value, error = (
        fit.history[f"log_partition{end}"].values[steps] for end in ("", "_error")
    )
    gap, known = value - fit.history.exact.values[:-1], np.isfinite(value)
    assert 5 < known.sum() < len(steps) and np.abs(gap[known]).max() < 1
    assert (np.abs(gap[known]) < 2.3 * error[known]).mean() > 0.8
