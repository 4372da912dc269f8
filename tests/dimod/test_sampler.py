# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The sampler of binary quadratic models: its distribution, and dimod's tests.

Tests dimod/sampler.py.
"""

import unittest

import numpy as np
import pytest

from ebmpp.errors import ArgumentError

dimod = pytest.importorskip("dimod")

from dimod.testing import assert_sampler_api, load_sampler_bqm_tests  # noqa: E402

from ebmpp.dimod import BoltzmannSampler  # noqa: E402


class Quick(BoltzmannSampler):
    """Few draws, of whatever is asked."""

    def sample(self, bqm, **options):
        defaults = {"num_reads": 4, "num_sweeps": 10, "num_temperatures": 3, "seed": 0}
        return super().sample(bqm, **defaults | options)


@pytest.mark.nightly
@load_sampler_bqm_tests(Quick, max_num_variables=3)
class TestByDimod(unittest.TestCase):
    """The tests that dimod asks of every sampler."""


def test_draws_have_the_boltzmann_distribution() -> None:
    sampler = BoltzmannSampler()
    assert_sampler_api(sampler)
    model = dimod.BinaryQuadraticModel(
        {"a": 0.5, "b": -0.3}, {"ab": -1.0, "bc": 0.8, "ac": 0.4}, 2.0, "BINARY"
    )
    options = {"num_reads": 4000, "num_sweeps": 20, "num_temperatures": 3}
    reads = sampler.sample(model, beta=1.5, seed=1, **options)
    exact = dimod.ExactSolver().sample(model)
    weights = np.exp(-1.5 * exact.record.energy)
    expected = weights / weights.sum()
    order = exact.variables
    numbers = {tuple(row): i for i, row in enumerate(exact.record.sample.tolist())}
    columns = [reads.variables.index(v) for v in order]
    states = reads.record.sample[:, columns].tolist()
    counts = np.bincount([numbers[tuple(row)] for row in states], minlength=8)
    error = np.sqrt(expected * (1 - expected) / 4000)
    assert np.abs((counts / 4000 - expected) / error).max() < 3.5
    np.testing.assert_allclose(reads.record.energy, model.energies(reads))
    repeated = sampler.sample(model, beta=1.5, seed=1, **options)
    assert (repeated.record.sample == reads.record.sample).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_reads": 0}, "num_reads must be"),
        ({"beta": 0.0}, "beta must be"),
        ({"num_sweeps": 1}, "num_sweeps must be"),
        ({"num_temperatures": 1}, "num_temperatures must be"),
    ],
)
def test_wrong_options_are_refused(options: dict, match: str) -> None:
    model = dimod.BinaryQuadraticModel({"a": 1.0}, {}, "SPIN")
    with pytest.raises(ArgumentError, match=match):
        BoltzmannSampler().sample(model, **options)
