# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""BlockedGibbs: real units, large lattices, double precision and values that a trace can see."""

from functools import cache

from mcmc_tools import METHODS, assert_same, run_mcmc, samples, strong_params
import networkx as nx
import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp

from ebmpp import BlockedGibbs, FactorGraph, Observed, Spin
from ebmpp.errors import StateError


@pytest.mark.parametrize("method", METHODS)
def test_chain_methods_agree_for_real_units_up_to_rounding(method):
    runs = [
        samples(
            run_mcmc(
                BlockedGibbs(zoo.graph("gaussian")), zoo.params("gaussian"), num_chains=2, chain_method=m
            )
        )
        for m in ("vectorized", method)
    ]
    # matrix products of one row and of two round differently
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-6), *runs)


@cache
def torus() -> FactorGraph:
    """Large enough, with twenty chains, for the code paths that pay for many numbers only."""
    lattice = nx.grid_2d_graph(30, 30, periodic=True)
    return FactorGraph.from_networkx(lattice, family=Spin, shared=True, bias=False)


@pytest.mark.parametrize("observed", [False, True])
def test_chain_methods_agree_on_a_large_lattice(observed):
    params = {"x:x": np.float32(0.5)}  # its sums are exact in any order
    clamped = {"x": Observed(np.ones(900), np.arange(900) < 100)} if observed else {}
    runs = [
        samples(
            run_mcmc(
                BlockedGibbs(torus()), params, num_samples=3, num_chains=20, chain_method=m, clamped=clamped
            )
        )
        for m in ("vectorized", "sequential")
    ]
    assert_same(*runs)


def test_chains_of_a_lattice_are_updated_without_scatters():
    """Mapped over chains, values were scattered, which took most of a sweep."""
    kernel, args = BlockedGibbs(torus()), ({"x:x": np.float32(0.5)},)
    state = kernel.init(jax.random.split(zoo.KEY, 20), 0, None, args, {})
    assert "scatter" not in str(jax.make_jaxpr(kernel.sample)(state, args, {}))


def test_draws_in_double_precision_equal_those_in_single():
    kernel, options = BlockedGibbs(zoo.graph("rbm")), {"num_samples": 6, "num_chains": 2}
    with jax.enable_x64(True):
        mcmc = run_mcmc(kernel, jax.tree.map(jnp.float64, strong_params()), **options)
        drawn = samples(mcmc)
        assert drawn["v"].dtype == np.float64 and mcmc.last_state.i.dtype == np.int32
    assert_same(drawn, jax.tree.map(np.float64, samples(run_mcmc(kernel, strong_params(), **options))))


def test_known_values_are_checked_while_params_are_traced():
    graph, x = zoo.graph("rbm"), {"v": np.full(4, 2.0), "h": np.ones(3)}
    with pytest.raises(StateError, match="got 2.0"):
        jax.jit(lambda params: graph.energy(params, x))(strong_params())
