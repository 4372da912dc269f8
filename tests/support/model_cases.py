# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of blocks made from models: one model of each kind, and conditionals by brute force."""

from collections.abc import Callable
import dataclasses
from typing import Any

import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace
from numpyro.infer.util import log_density

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import GibbsBlock

Y5 = np.array([0.3, -1.2, 0.8, 2.0, -0.4], np.float32)
Y23 = np.array([[0.3, -1.2, 0.8], [2.0, -0.4, 0.1]], np.float32)


def mixture(y: Any) -> None:
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    means = numpyro.sample("means", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Categorical(weights))
        numpyro.sample("y", dist.Normal(means[z], 0.7), obs=y)


def centred_mixture(y: Any) -> None:
    """The spread is what a site outside of the plate decides, itself discrete."""
    wide = numpyro.sample("wide", dist.Bernoulli(0.3))
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(0.4))
        numpyro.sample("y", dist.Normal(2.0 * z - 1, 1.0 + wide), obs=y)


def markov_chain(y: Any) -> None:
    """A chain of plate-less sites: the transition is a factor of neighbours by index."""
    rows = numpyro.sample("rows", dist.Dirichlet(jnp.ones(3)).expand([3]).to_event(1))
    z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([len(y)]).to_event(1))
    numpyro.factor("moves", jnp.log(rows[z[:-1], z[1:]]).sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)


def conditional_chain(y: Any) -> None:
    """The transition as a law of its own, evaluated at the next unit."""
    rows = numpyro.sample("rows", dist.Dirichlet(jnp.ones(3)).expand([3]).to_event(1))
    z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([len(y)]).to_event(1))
    numpyro.factor("moves", dist.Categorical(probs=rows[z[:-1]]).log_prob(z[1:]).sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)


def rolled_lattice(y: Any) -> None:
    """A torus of 2 x 3; the interaction is one number, in whole numbers."""
    coupling = numpyro.sample("coupling", dist.HalfNormal(1.0))
    z = numpyro.sample("z", dist.Bernoulli(0.5).expand(y.shape).to_event(2))
    alike = sum((z * jnp.roll(z, 1, axis)).sum() for axis in range(2))
    numpyro.factor("prior", coupling * alike)
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(2), obs=y)


def sliced_lattice(y: Any) -> None:
    """Equal neighbours of an open lattice of three-valued units."""
    coupling = numpyro.sample("coupling", dist.HalfNormal(1.0))
    z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand(y.shape).to_event(2))
    alike = (z[1:] == z[:-1]).sum() + (z[:, 1:] == z[:, :-1]).sum()
    numpyro.factor("prior", coupling * alike)
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(2), obs=y)


def quadratic_form(y: Any) -> None:
    """Neighbours by an adjacency matrix, whose zeros are known."""
    adjacent = np.diag(np.ones(4), 1)
    z = numpyro.sample("z", dist.Bernoulli(0.5).expand(y.shape).to_event(1))
    spins = 2.0 * z - 1
    numpyro.factor("prior", jnp.einsum("i,ij,j", spins, adjacent + adjacent.T, spins))
    numpyro.sample("y", dist.Normal(spins, 1.0).to_event(1), obs=y)


def nested_plates(y: Any) -> None:
    """A unit a group, and one a member whose prior is the group's."""
    base = numpyro.sample("base", dist.Normal(0, 1))
    with numpyro.plate("groups", 2, dim=-2):
        group = numpyro.sample("group", dist.Bernoulli(0.3))
        with numpyro.plate("members", 3, dim=-1):
            z = numpyro.sample("z", dist.Bernoulli(jnp.where(group == 1, 0.8, 0.2)))
            numpyro.sample("y", dist.Normal(base + z + 0.5 * group, 1.0), obs=y)


def masked_and_scaled(y: Any, mask: Any) -> None:
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(0.4))
        with handlers.mask(mask=mask), handlers.scale(scale=2.5):
            numpyro.sample("y", dist.Normal(2.0 * z, 1.0), obs=y)


def counts(y: Any) -> None:
    rate = numpyro.sample("rate", dist.HalfNormal(1.0))
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Binomial(jnp.array([1, 3, 2, 3, 1]), 0.4))
        numpyro.sample("y", dist.Normal(rate * z, 1.0), obs=y)


def vectors(y: Any) -> None:
    """Units in the events of a plate: three categoricals a row, of different laws."""
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(4)).expand([3]).to_event(1))
    with numpyro.plate("rows", 2):
        z = numpyro.sample("z", dist.Categorical(probs).to_event(1))
        numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)


LATTICE = ebmpp.FactorGraph(
    {"s": ebmpp.Spin(4)}, factors=[ebmpp.Bias("s"), ebmpp.Pairwise("s", np.array([[0, 1], [1, 2], [2, 3]]))]
)
LATTICE_PARAMS = LATTICE.init(jax.random.key(0)) | {"s": jnp.array([0.3, -0.2, 0.1, 0.0])}


def energy_prior(y: Any) -> None:
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    z = numpyro.sample("z", ebmpp.EnergyDistribution(LATTICE, LATTICE_PARAMS, num_sweeps=1))
    numpyro.sample("y", dist.Normal(z, scale).to_event(1), obs=y[:4])


def hidden_dependence(y: Any) -> None:
    """A neighbour that matters only where the switch is on."""
    switch = numpyro.sample("switch", dist.Normal(0, 1))
    z = numpyro.sample("z", dist.Bernoulli(0.4).expand(y.shape).to_event(1))
    neighbour = jnp.where(switch > 100.0, jnp.roll(z, 2), 0)
    numpyro.sample("y", dist.Normal(1.0 * z + jnp.exp(1.0 * neighbour), 1.0).to_event(1), obs=y)


PAIRS = np.array([[0, 3], [1, 4], [2, 0]])


def gathered(y: Any) -> None:
    """Edges by index, of both sites."""
    strength = numpyro.sample("strength", dist.Normal(0, 1))
    z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand(y.shape).to_event(1))
    w = numpyro.sample("w", dist.Bernoulli(0.5).expand([3]).to_event(1))
    numpyro.factor("edges", strength * (w * jnp.cos(1.0 * z[PAIRS[:, 0]] - z[PAIRS[:, 1]])).sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)


def summed_groups(y: Any) -> None:
    """Members of a group are seen through their sum."""
    z = numpyro.sample("z", dist.Bernoulli(0.4).expand([6]).to_event(1))
    sums = jax.ops.segment_sum(1.0 * z, np.array([0, 1, 2, 0, 1, 2]), 3)
    numpyro.sample("y", dist.Normal(sums, 1.0).to_event(1), obs=y[:3])


def weighed_groups(y: Any) -> None:
    """Sums of products of neighbours, group by group, which another site weighs."""
    z = numpyro.sample("z", dist.Bernoulli(0.4).expand([6]).to_event(1))
    w = numpyro.sample("w", dist.Binomial(2, 0.4).expand([3]).to_event(1))
    sums = jnp.zeros(3, int).at[np.array([0, 1, 2, 0, 1])].add(z[1:] * z[:-1])
    numpyro.factor("prior", (w * sums).sum() + 0.1 * jnp.zeros(6).at[np.arange(5)].set(1.0 * z[1:]) @ z)
    numpyro.sample("y", dist.Normal(1.0 * w, 1.0).to_event(1), obs=y[:3])


def full_covariances(y: Any) -> None:
    """Points in the plane, with a covariance a component."""
    means = numpyro.sample("means", dist.Normal(0, 2).expand([3, 2]).to_event(2))
    trils = jnp.array([[[1.0, 0], [0.5, 1]], [[2.0, 0], [0.0, 1]], [[1.0, 0], [-0.7, 0.5]]])
    with numpyro.plate("points", 3):
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.2, 0.3, 0.5])))
        numpyro.sample("y", dist.MultivariateNormal(means[z], scale_tril=trils[z]), obs=y.T)


def one_covariance(y: Any) -> None:
    """Points in the plane, with one covariance."""
    means = numpyro.sample("means", dist.Normal(0, 2).expand([3, 2]).to_event(2))
    with numpyro.plate("points", 3):
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.2, 0.3, 0.5])))
        law = dist.MultivariateNormal(means[z], covariance_matrix=jnp.array([[1.0, 0.3], [0.3, 0.5]]))
        numpyro.sample("y", law, obs=y.T)


def convolved(y: Any) -> None:
    """The sum over neighbours as a convolution with a kernel whose middle is zero."""
    z = numpyro.sample("z", dist.Bernoulli(0.5).expand([2, 3]).to_event(2))
    kernel = jnp.array([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]])
    around = jax.lax.conv((1.0 * z)[None, None], kernel[None, None], (1, 1), "SAME")[0, 0]
    numpyro.factor("prior", 0.2 * (around * z).sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(2), obs=y)


def scanned_chain(y: Any) -> None:
    """A hidden Markov chain as NumPyro's users write it."""
    from numpyro.contrib.control_flow import scan

    rows = numpyro.sample("rows", dist.Dirichlet(jnp.ones(3)).expand([3]).to_event(1))

    def step(before: Any, y: Any) -> Any:
        z = numpyro.sample("z", dist.Categorical(rows[before]))
        numpyro.sample("y", dist.Normal(1.0 * z, 1.0), obs=y)
        return z, None

    scan(step, 0, y)


@dataclasses.dataclass
class Case:
    """A model, its sites, its arguments, and how many layers its units need."""

    model: Callable[..., None]
    sites: tuple[str, ...]
    args: tuple
    layers: int


CASES = {
    case.model.__name__: case
    for case in [
        Case(mixture, ("z",), (Y5,), 1),
        Case(centred_mixture, ("wide", "z"), (Y5,), 2),
        Case(markov_chain, ("z",), (Y5,), 2),
        Case(conditional_chain, ("z",), (Y5,), 2),
        Case(rolled_lattice, ("z",), (Y23,), 3),
        Case(sliced_lattice, ("z",), (Y23,), 2),
        Case(quadratic_form, ("z",), (Y5,), 2),
        Case(nested_plates, ("group", "z"), (Y23,), 2),
        Case(masked_and_scaled, ("z",), (Y5, np.array([True, False, True, True, False])), 1),
        Case(counts, ("z",), (Y5,), 1),
        Case(vectors, ("z",), (Y23,), 1),
        Case(energy_prior, ("z",), (Y5,), 2),
        Case(hidden_dependence, ("z",), (Y5,), 3),
        Case(gathered, ("w", "z"), (Y5,), 3),
        Case(summed_groups, ("z",), (Y5,), 2),
        Case(weighed_groups, ("z", "w"), (Y5,), 3),
        Case(full_covariances, ("z",), (Y23,), 1),
        Case(one_covariance, ("z",), (Y23,), 1),
        Case(convolved, ("z",), (Y23,), 2),
        Case(scanned_chain, ("z",), (Y5,), 2),
    ]
}


def latents(model: Callable, args: tuple, seed: int) -> dict[str, Any]:
    trace = prototype_trace(model, jax.random.key(seed), args, {})
    return {name: jnp.asarray(trace[name]["value"]) for name in latent_sample_sites(trace)}


def made(name: str) -> tuple[Case, Any]:
    case = CASES[name]
    return case, GibbsBlock.from_model(case.model, list(case.sites), *case.args)


def brute_force(case: Case, block: Any, values: dict[str, Any]) -> dict[str, np.ndarray]:
    """Log conditionals from the joint density: each unit set to each of its values, one at a time."""
    changed = []
    for site in block.sites:
        table, valid = block.posterior.values[site]
        shape = values[site].shape
        table, valid = (np.broadcast_to(a, (len(a), *shape)) for a in (table, valid))
        for unit in np.ndindex(shape):
            for k in range(len(table)):
                new = np.array(values[site])
                new[unit] = table[(k, *unit)]
                changed.append((site, unit, k, bool(valid[(k, *unit)]), new))
    stacked = {
        site: np.stack([c[4] if c[0] == site else np.asarray(values[site]) for c in changed])
        for site in block.sites
    }
    density = lambda own: log_density(case.model, case.args, {}, values | own)[0]
    found = np.asarray(jax.jit(jax.vmap(density))(stacked), float)
    logs = {
        s: np.full((*values[s].shape, len(block.posterior.values[s].table)), -np.inf) for s in block.sites
    }
    for (site, unit, k, valid, _), value in zip(changed, found, strict=True):
        logs[site][(*unit, k)] = value if valid else -np.inf
    return {s: np.asarray(jax.nn.log_softmax(a, -1)) for s, a in logs.items()}


def regression(y: Any, x: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([12]).to_event(1))
    with numpyro.plate("columns", 12):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(x @ (z * b), 1.0).to_event(1), obs=y)


X = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)
