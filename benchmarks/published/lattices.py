# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Lattices with exact results."""

import networkx as nx
import numpy as np
from numpyro.infer import MCMC
from outcome import Row

import jax
import jax.numpy as jnp

import ebmpp


def ising() -> list[Row]:
    """Kaufman (1949): energy per spin of the 32x32 torus at the critical coupling."""
    torus = nx.grid_2d_graph(32, 32, periodic=True)
    graph = ebmpp.FactorGraph.from_networkx(torus, family=ebmpp.Spin, shared=True)
    (block,) = graph.families
    critical = np.log(1 + np.sqrt(2)) / 2
    params = jax.tree.map(jnp.zeros_like, graph.init(jax.random.key(0)))
    params[f"{block}:{block}"] += critical
    mcmc = MCMC(
        ebmpp.SwendsenWang(graph),
        num_warmup=200,
        num_samples=2000,
        num_chains=20,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), params)
    draws = mcmc.get_samples(group_by_chain=True)
    energy = np.asarray(graph.energy(params, draws)) / (critical * 1024)
    per_chain = energy.mean(1)
    error = per_chain.std(ddof=1) / np.sqrt(len(per_chain))
    return [Row("energy per spin", -1.43366, float(per_chain.mean()), float(error))]


def hard_core() -> list[Row]:
    """The hard-core gas on a free 8x8 lattice, beside its exact sum by a transfer matrix."""
    lattice = nx.grid_2d_graph(8, 8)
    exclusion = ebmpp.Table("x", units=lattice, log_weights=[[0, 0], [0, -np.inf]])
    gas = ebmpp.FactorGraph({"x": ebmpp.Bernoulli((8, 8))}, factors=[exclusion])
    params = gas.init(jax.random.key(0))
    result = ebmpp.ais(
        gas,
        params,
        rng_key=jax.random.key(1),
        num_particles=1000,
        num_temperatures=1000,
    )
    log_z = float(result.log_partition)
    return [Row("log Z", 27.2165, log_z, float(result.standard_error))]
