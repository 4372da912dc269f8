# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The ladder of a tempered run against enumeration of every rung.

Tests diagnostics/thermodynamics.py.
"""

from mcmc_tools import run_mcmc, strong_params
from metropolis_tools import Law
import numpy as np
from oracle import numpy_energy
import pytest
import zoo

import ebmpp
from ebmpp import Spin, diagnostics
from ebmpp.errors import ArgumentError
from ebmpp.kernels import BlockedGibbs, ParallelTempering

BETAS = (0.0, 0.5, 1.0)


def test_every_rung_has_the_energies_and_log_z_of_enumeration():
    graph = zoo.graph("rbm")
    params = strong_params(scale=2.0)
    options = {"num_chains": 100, "num_warmup": 10, "num_samples": 400}
    mcmc = run_mcmc(
        ParallelTempering(graph, BETAS), params, extra_fields=["replicas"], **options
    )
    ladder = diagnostics.ladder(mcmc)
    coupled = params | {"v": np.zeros(4), "h": np.zeros(3)}
    free = params | {"v:h": np.zeros((4, 3))}
    states = Law(graph, params).states
    interaction = np.array([numpy_energy(graph, coupled, x) for x in states])
    rest = np.array([numpy_energy(graph, free, x) for x in states])
    for r, beta in enumerate(BETAS):
        weights = np.exp(-rest - beta * interaction)
        mean = np.average(interaction, weights=weights)
        variance = np.average((interaction - mean) ** 2, weights=weights)
        exact = {
            "energy": mean,
            "heat_capacity": beta**2 * variance,
            "log_partition": np.log(weights.sum()),
        }
        for name, value in exact.items():
            error = ladder[f"{name}_error"].values[:, r]
            if name != "energy" and beta == 0:
                np.testing.assert_allclose(ladder[name].values[:, r], value, 1e-5)
                continue
            # stated errors are errors of chains
            z = (ladder[name].values[:, r] - value) / error
            assert 0.8 < np.sqrt(np.mean(z**2)) < 1.25, (name, beta, z)
            assert abs(z.mean()) < 0.4


def test_neighbours_that_hardly_overlap_are_named():
    magnet = ebmpp.layered(v=Spin(12), h=Spin(12))
    params = {"v": np.zeros(12), "h": np.zeros(12), "v:h": np.full((12, 12), 1.0)}
    kernel = ParallelTempering(magnet, (0.0, 0.05, 1.0))
    mcmc = run_mcmc(kernel, params, extra_fields=["replicas"], num_samples=40)
    match = r"rungs 1 and 2, at beta 0.05 and 1, accept 0.0% .*Give more temperatures"
    with pytest.warns(UserWarning, match=match):
        acceptance = diagnostics.ladder(mcmc)["acceptance"].values
    assert (acceptance[:, 0] > 0.2).all() and (acceptance[:, 1] < 0.01).all()


@pytest.mark.parametrize(
    ("kernel", "extra"),
    [(BlockedGibbs, ["still"]), (ParallelTempering, ["betas"])],
)
def test_other_runs_are_refused(kernel, extra):
    mcmc = run_mcmc(kernel(zoo.graph("rbm")), strong_params(), extra_fields=extra)
    with pytest.raises(ArgumentError, match="with replicas and nothing clamped"):
        diagnostics.ladder(mcmc)
