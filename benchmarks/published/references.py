# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Independent figures where nobody has published one, without ebmpp.

``python benchmarks/published/references.py`` simulates them again, in minutes.
"""

import itertools
from typing import NamedTuple

import networkx as nx
import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh

import jax
from jax import Array
import jax.numpy as jnp


class Figure(NamedTuple):
    """A number and its Monte Carlo standard error."""

    value: float
    error: float


#: Energy per spin and heat capacity of the XY model on the 16x16 torus at coupling 1,
#: by :func:`simulate_angles`.
XY_ENERGY = Figure(-1.3359, 0.0002)
XY_HEAT_CAPACITY = Figure(1.219, 0.003)
#: Most likely params of the Florentine marriages, by :func:`maximise_florentine`.
FLORENTINE = {"edges": Figure(-1.6743, 0.0003), "triangles": Figure(0.1550, 0.0004)}


def simulate_angles(num_blocks: int = 12) -> tuple[Figure, Figure]:
    """Return the energy per spin and the heat capacity of the XY model.

    Metropolis updates of one colour of the checkerboard after the other, then
    reflections of each angle in the field of its neighbours, of 200 lattices.
    """
    side, num_lattices = 16, 200
    is_even = jnp.asarray(np.indices((side, side)).sum(0) % 2 == 0)

    def field(angle: Array) -> tuple[Array, Array]:
        shifts = list(itertools.product((1, -1), (1, 2)))
        return tuple(
            sum(jnp.roll(part, shift, axis) for shift, axis in shifts)
            for part in (jnp.cos(angle), jnp.sin(angle))
        )

    def metropolis(angle: Array, key: Array, mask: Array) -> Array:
        proposal_key, accept_key = jax.random.split(key)
        x, y = field(angle)
        step = jax.random.uniform(proposal_key, angle.shape, minval=-2.2, maxval=2.2)
        new = angle + step
        gain = x * (jnp.cos(new) - jnp.cos(angle)) + y * (jnp.sin(new) - jnp.sin(angle))
        accepts = jnp.log(jax.random.uniform(accept_key, angle.shape)) < gain
        return jnp.where(mask & accepts, new, angle)

    def reflect(angle: Array, mask: Array) -> Array:
        x, y = field(angle)
        return jnp.where(mask, 2 * jnp.arctan2(y, x) - angle, angle)

    def sweep(angle: Array, key: Array) -> tuple[Array, Array]:
        even_key, odd_key = jax.random.split(key)
        angle = metropolis(angle, even_key, is_even)
        angle = metropolis(angle, odd_key, ~is_even)
        for mask in is_even, ~is_even:
            angle = reflect(angle, mask)
        bonds = sum(jnp.cos(angle - jnp.roll(angle, 1, axis)) for axis in (1, 2))
        return angle, -bonds.sum((1, 2))

    run = jax.jit(lambda a, key: jax.lax.scan(sweep, a, jax.random.split(key, 1000)))
    shape = num_lattices, side, side
    key = jax.random.key(1)
    angle = jax.random.uniform(jax.random.key(2), shape, minval=-np.pi, maxval=np.pi)
    blocks = []
    for _ in range(num_blocks):
        key, block_key = jax.random.split(key)
        angle, block = run(angle, block_key)
        angle = jnp.mod(angle, 2 * np.pi)
        blocks.append(np.asarray(block, float))
    energies = np.concatenate(blocks[1:]).T  # (lattices, sweeps)
    variances = ((energies - energies.mean()) ** 2).mean(1)
    return mean_of_chains(energies.mean(1) / side**2), mean_of_chains(
        variances / side**2
    )


def mean_of_chains(values: np.ndarray) -> Figure:
    """Return the mean of one value per chain, with its standard error."""
    error = values.std(ddof=1) / np.sqrt(len(values))
    return Figure(float(values.mean()), float(error))


def maximise_florentine(num_blocks: int = 12) -> dict[str, Figure]:
    """Return the most likely params for edges and triangles of Florentine marriages.

    Statistics of Gibbs sampled networks near the maximum are reweighted to it
    (Geyer, Thompson 1992).
    """
    graph = nx.florentine_families_graph()
    observed = np.array(
        [graph.number_of_edges(), sum(nx.triangles(graph).values()) / 3]
    )
    size, num_networks = 16, 1000  # with Pucci, who has no marriage
    near = np.array([-1.673, 0.155])
    first, second = map(jnp.asarray, np.triu_indices(size, 1))

    def draw_dyad(networks: Array, dyad: tuple[Array, Array, Array]) -> tuple:
        i, j, uniform = dyad
        shared = (networks[:, i] * networks[:, j]).sum(-1)
        value = uniform < jax.nn.sigmoid(near[0] + near[1] * shared)
        networks = networks.at[:, i, j].set(value).at[:, j, i].set(value)
        return networks, None

    def sweep(networks: Array, key: Array) -> tuple[Array, Array]:
        uniforms = jax.random.uniform(key, (len(first), num_networks))
        networks, _ = jax.lax.scan(draw_dyad, networks, (first, second, uniforms))
        closed = jnp.einsum("bij,bjk,bki->b", networks, networks, networks)
        return networks, jnp.stack([networks.sum((1, 2)) / 2, closed / 6], -1)

    run = jax.jit(lambda x, key: jax.lax.scan(sweep, x, jax.random.split(key, 200)))
    networks = jnp.zeros((num_networks, size, size))
    blocks = []
    for key in jax.random.split(jax.random.key(5), num_blocks + 1):
        networks, block = run(networks, key)
        blocks.append(np.asarray(block, float))
    statistics = np.concatenate(blocks[1:])  # (sweeps, networks, 2)
    groups = np.stack(
        [
            near + _step_to_maximum(statistics[:, group::20].reshape(-1, 2) - observed)
            for group in range(20)
        ]
    )
    return dict(zip(FLORENTINE, map(mean_of_chains, groups.T), strict=True))


def _step_to_maximum(surplus: np.ndarray) -> np.ndarray:
    """Return the change of params after which the weighted surplus of statistics is 0."""
    step = np.zeros(2)
    for _ in range(20):
        weights = np.exp(surplus @ step)
        weights /= weights.sum()
        mean = weights @ surplus
        spread = (surplus - mean).T @ ((surplus - mean) * weights[:, None])
        step -= np.linalg.solve(spread, mean)
    return step


def sum_fields(side: int, quartic: float, num_points: int = 6) -> tuple[float, float]:
    r"""Return the mean square of a phi^4 field and its mass times the side, exactly.

    The energy on the torus is :math:`\sum_x [\lambda \phi_x^4 - 2 \sum_\mu \phi_x
    \phi_{x+\mu}]`. Gaussian quadrature replaces each integral, and the largest
    eigenvalues of the transfer matrix of a column make up its trace: 20 leave out a
    share of 1e-8. More points change the ninth digit.

    :return: the mean square, and the effective mass from columns 1 to 3 apart.
    """
    points, weights = _quadrature(quartic, num_points)
    bond = np.exp(2 * np.outer(points, points)) * np.sqrt(np.outer(weights, weights))
    fields = np.stack(np.meshgrid(*[points] * side, indexing="ij"))
    half = np.exp((fields * np.roll(fields, 1, 0)).sum(0))

    def multiply(vector: np.ndarray) -> np.ndarray:
        table = vector.reshape(half.shape) * half
        for _ in range(side):
            table = np.moveaxis(np.tensordot(bond, table, (1, 0)), 0, -1)
        return (table * half).ravel()

    matrix = LinearOperator((half.size,) * 2, matvec=multiply, dtype=float)
    values, vectors = eigsh(matrix, k=20)
    ratios = values / values.max()
    trace = (ratios**side).sum()
    square = (fields**2).mean(0).ravel()
    mean_square = (ratios**side @ (vectors**2).T @ square) / trace
    sums = (vectors.T * fields.sum(0).ravel()) @ vectors
    correlation = [
        (np.outer(ratios ** (side - gap), ratios**gap) * sums**2).sum() / trace
        for gap in range(1, 4)
    ]
    return float(mean_square), effective_mass(*correlation) * side


def effective_mass(before: float, here: float, after: float) -> float:
    """Return the rate of a hyperbolic cosine through three equidistant values."""
    return float(np.arccosh((before + after) / (2 * here)))


def _quadrature(quartic: float, num_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points and weights for the integral of exp(-quartic x^4), by Lanczos."""
    x = np.linspace(-3, 3, 4001)
    density = np.exp(
        x**2 - quartic * x**4
    )  # wider than that of one site, as sites attract
    density /= density.sum()
    last, polynomial, norm = np.zeros_like(x), np.ones_like(x), 0.0
    norms = []
    for _ in range(num_points - 1):
        following = x * polynomial - norm * last
        norm = np.sqrt((density * following**2).sum())
        last, polynomial = polynomial, following / norm
        norms.append(norm)
    points, vectors = np.linalg.eigh(np.diag(norms, 1) + np.diag(norms, -1))
    return points, vectors[0] ** 2 * np.exp(-(points**2))


if __name__ == "__main__":
    print("XY model, energy and heat capacity", *simulate_angles())
    print("Florentine marriages", maximise_florentine())
    print("phi^4, mean square and mass times side", *sum_fields(6, 6.975))
