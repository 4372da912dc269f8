# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Lattices with exact results."""

import networkx as nx
import numpy as np
from numpyro.infer import MCMC
from outcome import Row
import references

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


def angles() -> list[Row]:
    """The XY model on a 16x16 torus at coupling 1, beside hand-written Metropolis chains."""
    torus = nx.grid_2d_graph(16, 16, periodic=True)
    graph = ebmpp.FactorGraph.from_networkx(torus, family=ebmpp.VonMises, shared=True)
    (block,) = graph.families
    params = jax.tree.map(jnp.zeros_like, graph.init(jax.random.key(0)))
    params[f"{block}:{block}"] += 1.0
    draws = _chains(ebmpp.BlockedGibbs(graph), params, num_samples=1000)
    energy = np.asarray(graph.energy(params, draws), float)
    variance = ((energy - energy.mean()) ** 2).mean(1)
    figures = {
        "energy per spin": (references.XY_ENERGY, energy.mean(1)),
        "heat capacity": (references.XY_HEAT_CAPACITY, variance),
    }
    rows = []
    for name, (reference, values) in figures.items():
        ours = references.mean_of_chains(values / 256)
        error = float(np.hypot(ours.error, reference.error))
        rows.append(Row(name, reference.value, ours.value, error))
    return rows


def field() -> list[Row]:
    """Albergo, Kanwar, Shanahan (2019): mass of the phi^4 field on a 6x6 torus."""
    side, quartic = 6, 6.975  # ensemble E1, of squared mass -4

    def energy(quartic: jax.Array, phi: jax.Array) -> jax.Array:
        lattice = phi.reshape(side, side)
        neighbours = jnp.roll(lattice, 1, 0) + jnp.roll(lattice, 1, 1)
        # a Gaussian unit brings phi^2 / 2
        return (
            quartic * (phi**4).sum()
            - 2 * (lattice * neighbours).sum()
            - (phi**2).sum() / 2
        )

    factor = ebmpp.Factor("phi", energy=energy, init=quartic, affine=False)
    graph = ebmpp.FactorGraph({"phi": ebmpp.Gaussian(side**2)}, factors=[factor])
    moves = [ebmpp.moves.Hamiltonian(("phi",), step_size=0.1, num_steps=8)]
    kernel = ebmpp.BlockedGibbs(graph, moves=moves)
    params = graph.init(jax.random.key(0))
    phi = np.asarray(_chains(kernel, params, num_samples=2000)["phi"], float)
    square = references.mean_of_chains((phi**2).mean((1, 2)))
    lattice = phi.reshape(*phi.shape[:2], side, side)
    mass, error = _mass([lattice.sum(axis) for axis in (2, 3)])
    exact, _ = references.sum_fields(side, quartic)
    return [
        # the published error is 0.03
        Row("mass times side", 3.96, mass * side, error * side, 0.03),
        Row("mean square", exact, *square),
    ]


def _mass(columns: list[np.ndarray]) -> tuple[float, float]:
    """Return the mass from sums of columns, and its standard error by a jackknife."""
    correlation = np.stack(
        [
            np.mean([(c * np.roll(c, gap, -1)).mean((1, 2)) for c in columns], axis=0)
            for gap in (1, 2, 3)
        ]
    )
    count = correlation.shape[1]
    others = (correlation.sum(1, keepdims=True) - correlation) / (count - 1)
    masses = [references.effective_mass(*values) for values in others.T]
    mass = references.effective_mass(*correlation.mean(1))
    return mass, float(np.std(masses) * np.sqrt(count - 1))


def _chains(
    kernel: ebmpp.BlockedGibbs, params: dict[str, jax.Array], num_samples: int
) -> dict[str, jax.Array]:
    """Return draws of 100 chains, with an axis of chains."""
    mcmc = MCMC(
        kernel,
        num_warmup=200,
        num_samples=num_samples,
        num_chains=100,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), params)
    return mcmc.get_samples(group_by_chain=True)
