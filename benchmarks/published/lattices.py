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
    energy, error = _energy(graph, params, critical * 1024)
    return [Row("energy per spin", -1.43366, energy, error)]


def _energy(
    graph: ebmpp.FactorGraph, params: dict[str, jax.Array], unit: float
) -> tuple[float, float]:
    """Return the mean energy over chains of cluster moves, and its standard error."""
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
    energy = np.asarray(graph.energy(params, draws)) / unit
    per_chain = energy.mean(1)
    error = per_chain.std(ddof=1) / np.sqrt(len(per_chain))
    return float(per_chain.mean()), float(error)


def potts() -> list[Row]:
    """Wu (1982): energy per site of the three-state Potts model where it orders."""
    energies = [_potts_energy(side) for side in (16, 32)]
    # corrections of a torus fall as the side to the power -4/5
    ratio = 2**-0.8
    energy, error = (
        combine / (1 - ratio)
        for combine in (
            energies[1][0] - ratio * energies[0][0],
            np.hypot(energies[1][1], ratio * energies[0][1]),
        )
    )
    return [Row("energy per site", -1 - 1 / np.sqrt(3), energy, error)]


def _potts_energy(side: int) -> tuple[float, float]:
    """Return the mean over chains, and its standard error."""
    torus = nx.grid_2d_graph(side, side, periodic=True)
    bonds = ebmpp.Pairwise("s", torus, shared=True)
    graph = ebmpp.FactorGraph(
        {"s": ebmpp.Categorical((side, side), 3)}, factors=[bonds]
    )
    critical = np.log(1 + np.sqrt(3))
    return _energy(graph, {"s:s": jnp.asarray(critical)}, critical * side**2)


def hopfield() -> list[Row]:
    """Amit, Gutfreund, Sompolinsky (1987): overlap with a memory, 25 patterns, 1,000 spins.

    The sum over patterns of squares is a layer of Gaussian units that are summed out.
    """
    spins, patterns, beta = 1000, 25, 2.0
    network = ebmpp.layered(s=ebmpp.Spin(spins), g=ebmpp.Gaussian(patterns))
    overlaps = []
    for seed in range(20):
        memory = np.random.default_rng(seed).choice([-1.0, 1.0], (spins, patterns))
        params = jax.tree.map(jnp.zeros_like, network.init(jax.random.key(0)))
        params["s:g"] = jnp.asarray(memory) * np.sqrt(beta / spins)
        start = {"s": jnp.tile(memory[:, 0], (100, 1))}
        s = ebmpp.sample(
            network,
            params,
            100,
            rng_key=jax.random.key(seed),
            num_sweeps=300,
            init=start,
            progress_bar=False,
        )["s"]
        overlaps.append((s @ memory[:, 0] / spins).mean())
    error = np.std(overlaps, ddof=1) / np.sqrt(len(overlaps))
    published = _recall(patterns / spins, beta)
    return [Row("overlap", published, float(np.mean(overlaps)), float(error))]


def _recall(load: float, beta: float) -> float:
    """Return the overlap in the replica-symmetric theory, by iteration."""
    z, weights = np.polynomial.hermite_e.hermegauss(61)
    weights /= weights.sum()
    overlap = order = 1.0
    for _ in range(1000):
        noise = order / (1 - beta * (1 - order)) ** 2
        mean = np.tanh(beta * (overlap + np.sqrt(load * noise) * z))
        overlap = weights @ mean
        order = weights @ mean**2
    return float(overlap)


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
