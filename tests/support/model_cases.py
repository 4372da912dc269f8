# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""NumPyro models with discrete sites, one of each kind, and their conditionals by brute force."""

from collections.abc import Callable
import dataclasses
from functools import cache
from typing import Any

import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace
from numpyro.infer.util import log_density

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import GibbsBlock
from ebmpp.core import random
from ebmpp.traced.block import Call

Y5 = np.array([0.3, -1.2, 0.8, 2.0, -0.4], np.float32)
Y23 = np.array([[0.3, -1.2, 0.8], [2.0, -0.4, 0.1]], np.float32)
X = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)


def mixture(y: Any) -> None:
    logits = numpyro.sample("logits", dist.Normal(0, 1).expand([3]).to_event(1))
    means = numpyro.sample("means", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Categorical(logits=logits))
        numpyro.sample("y", dist.Normal(means[z], 0.7), obs=y)


def switched_scale(y: Any) -> None:
    """A discrete site outside of the plate decides the spread inside."""
    wide = numpyro.sample("wide", dist.Bernoulli(0.3))
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(0.4))
        numpyro.sample("y", dist.Normal(2.0 * z - 1, 1.0 + wide), obs=y)


def markov_chain(y: Any) -> None:
    """Transitions are a factor of neighbours by index."""
    rows = numpyro.sample("rows", dist.Normal(0, 1).expand([3, 3]).to_event(2))
    z = numpyro.sample(
        "z", dist.Categorical(logits=jnp.zeros(3)).expand([len(y)]).to_event(1)
    )
    numpyro.factor("moves", jax.nn.log_softmax(rows)[z[:-1], z[1:]].sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)


def scanned_chain(y: Any) -> None:
    """A hidden Markov chain by NumPyro's scan."""
    rows = numpyro.sample("rows", dist.Normal(0, 1).expand([3, 3]).to_event(2))

    def step(last: Any, y: Any) -> Any:
        z = numpyro.sample("z", dist.Categorical(logits=rows[last]))
        numpyro.sample("y", dist.Normal(1.0 * z, 1.0), obs=y)
        return z, None

    scan(step, 0, y)


def lattice(y: Any) -> None:
    """Equal neighbours of an open lattice of three-valued units."""
    coupling = numpyro.sample("coupling", dist.Normal(0, 1))
    z = numpyro.sample(
        "z", dist.Categorical(logits=jnp.zeros(3)).expand(y.shape).to_event(2)
    )
    equal = (z[1:] == z[:-1]).sum() + (z[:, 1:] == z[:, :-1]).sum()
    numpyro.factor("prior", coupling * equal)
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(2), obs=y)


def convolved(y: Any) -> None:
    """The sum over neighbours as a convolution with a kernel whose middle is zero."""
    z = numpyro.sample("z", dist.Bernoulli(0.5).expand([2, 3]).to_event(2))
    kernel = jnp.array([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]])
    total = jax.lax.conv((1.0 * z)[None, None], kernel[None, None], (1, 1), "SAME")[
        0, 0
    ]
    numpyro.factor("prior", 0.2 * (total * z).sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(2), obs=y)


def nested_plates(y: Any) -> None:
    """One unit per group, and one per member, whose prior is the group's."""
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
    rate = numpyro.sample("rate", dist.Normal(0, 1))
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Binomial(jnp.array([1, 3, 2, 3, 1]), 0.4))
        numpyro.sample("y", dist.Normal(rate * z, 1.0), obs=y)


def grouped_sums(y: Any) -> None:
    """Sums of products of neighbours by group, which another site multiplies."""
    z = numpyro.sample("z", dist.Bernoulli(0.4).expand([6]).to_event(1))
    w = numpyro.sample("w", dist.Binomial(2, 0.4).expand([3]).to_event(1))
    sums = jnp.zeros(3, int).at[np.array([0, 1, 2, 0, 1])].add(z[1:] * z[:-1])
    numpyro.factor(
        "prior",
        (w * sums).sum() + 0.1 * jnp.zeros(6).at[np.arange(5)].set(1.0 * z[1:]) @ z,
    )
    numpyro.sample("y", dist.Normal(1.0 * w, 1.0).to_event(1), obs=y[:3])


def full_covariances(y: Any) -> None:
    """Points in the plane, with one covariance per component."""
    means = numpyro.sample("means", dist.Normal(0, 2).expand([3, 2]).to_event(2))
    trils = jnp.array(
        [[[1.0, 0], [0.5, 1]], [[2.0, 0], [0.0, 1]], [[1.0, 0], [-0.7, 0.5]]]
    )
    with numpyro.plate("points", 3):
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.2, 0.3, 0.5])))
        numpyro.sample(
            "y", dist.MultivariateNormal(means[z], scale_tril=trils[z]), obs=y.T
        )


@cache
def spin_chain() -> tuple[ebmpp.FactorGraph, dict]:
    """Four spins in a chain, and params."""
    pairs = np.array([[0, 1], [1, 2], [2, 3]])
    graph = ebmpp.FactorGraph(
        {"s": ebmpp.Spin(4)}, factors=[ebmpp.Bias("s"), ebmpp.Pairwise("s", pairs)]
    )
    return graph, {
        "s": np.float32([0.3, -0.2, 0.1, 0.0]),
        "s:s": np.float32([0.4, -0.3, 0.5]),
    }


def energy_prior(y: Any) -> None:
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    z = numpyro.sample("z", ebmpp.EnergyDistribution(*spin_chain(), num_sweeps=1))
    numpyro.sample("y", dist.Normal(z + shift, 1.0).to_event(1), obs=y[:4])


def regression(y: Any, x: Any) -> None:
    """Inclusion of columns: all units interact."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([12]).to_event(1))
    with numpyro.plate("columns", 12):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(x @ (z * b), 1.0).to_event(1), obs=y)


@dataclasses.dataclass
class Case:
    """A model, its sites, its arguments, how many layers its units need, and the
    block's options."""

    model: Callable[..., None]
    sites: tuple[str, ...]
    args: tuple
    layers: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    case.model.__name__: case
    for case in [
        Case(mixture, ("z",), (Y5,), 1),
        Case(switched_scale, ("wide", "z"), (Y5,), 2),
        Case(markov_chain, ("z",), (Y5,), 2),
        Case(scanned_chain, ("z",), (Y5,), 2),
        Case(lattice, ("z",), (Y23,), 2),
        Case(convolved, ("z",), (Y23,), 2),
        Case(nested_plates, ("group", "z"), (Y23,), 2),
        Case(
            masked_and_scaled,
            ("z",),
            (Y5, np.array([True, False, True, True, False])),
            1,
        ),
        Case(counts, ("z",), (Y5,), 1),
        Case(grouped_sums, ("z", "w"), (Y5,), 3),
        Case(full_covariances, ("z",), (Y23,), 1),
        Case(energy_prior, ("z",), (Y5,), 2),
        Case(regression, ("z",), (Y5, X), 12, {"sequential": True}),
    ]
}


@dataclasses.dataclass
class Conditionals:
    """A case's block, states drawn from the prior, and log conditionals at these, as
    numpy arrays."""

    case: Case
    block: Any
    values: dict[str, np.ndarray]
    exact: dict[str, np.ndarray]
    reported: dict[str, np.ndarray]

    def around(self, row: int = 0) -> tuple[dict[str, np.ndarray], Call]:
        """Return the block's sites and their siblings in one of the states."""
        sites = {site: self.values[site][row] for site in self.case.sites}
        siblings = {
            name: v[row] for name, v in self.values.items() if name not in sites
        }
        return sites, Call(siblings, self.case.args, {})

    def check(self, atol: float = 2e-5) -> None:
        """Assert that the block has the conditionals of the joint density."""
        assert self.block.conditionals.num_layers == self.case.layers
        for site in self.case.sites:
            reported, exact = np.exp(self.reported[site]), np.exp(self.exact[site])
            np.testing.assert_allclose(reported, exact, atol=atol, err_msg=site)


def latents(model: Callable, args: tuple, seed: int = 0) -> dict[str, np.ndarray]:
    """Latent sites of a draw from the prior; eager, as blocks draw, so that programs are shared."""
    trace = prototype_trace(model, jax.random.key(seed), args, {})
    return {
        name: np.asarray(trace[name]["value"]) for name in latent_sample_sites(trace)
    }


def brute_force(case: Case, block: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Log conditionals from the joint density: each unit set to each of its values, one
    at a time."""
    sizes = {
        s: (int(np.prod(values[s].shape)), len(block.posterior.values[s].table))
        for s in case.sites
    }
    rows = {s: [] for s in case.sites}
    for moved, (size, count) in sizes.items():
        for site in case.sites:
            value = jnp.asarray(values[site])
            changed = jnp.broadcast_to(value, (size, count, *value.shape))
            if site == moved:
                table = jnp.asarray(block.posterior.values[site].table).astype(
                    value.dtype
                )
                is_moved = np.eye(size, dtype=bool).reshape(size, 1, *value.shape)
                changed = jnp.where(
                    is_moved, jnp.broadcast_to(table, (count, *value.shape)), changed
                )
            rows[site].append(changed.reshape(-1, *value.shape))
    density = lambda sites: log_density(case.model, case.args, {}, {**values, **sites})[
        0
    ]
    logs, result, start = (
        jax.vmap(density)({s: jnp.concatenate(v) for s, v in rows.items()}),
        {},
        0,
    )
    for site, (size, count) in sizes.items():
        shape = (*values[site].shape, count)
        valid = jnp.moveaxis(jnp.asarray(block.posterior.values[site].valid), 0, -1)
        log = logs[start : start + size * count].reshape(shape)
        result[site] = jax.nn.log_softmax(jnp.where(valid, log, -jnp.inf), -1)
        start += size * count
    return result


def compare(case: Case, **values: Any) -> Conditionals:
    """Conditionals of two states, all in one program.

    :param case: the model.
    :param values: of sites, in place of draws from the prior.
    """
    block = GibbsBlock.from_model(
        case.model, list(case.sites), *case.args, joint="units", **case.options
    )
    states = [latents(case.model, case.args, seed) | values for seed in range(2)]
    stacked = {name: np.stack([state[name] for state in states]) for name in states[0]}
    at = lambda state: (
        brute_force(case, block, state),
        block.log_conditionals(state, *case.args),
    )
    results = jax.tree.map(np.asarray, jax.jit(jax.vmap(at))(stacked))
    return Conditionals(case, block, stacked, *results)


@cache
def conditionals(name: str) -> Conditionals:
    """:func:`compare` of a case by name, computed once."""
    return compare(CASES[name])


def advance(
    block: Any,
    sites: Any,
    call: Call,
    num_draws: int = 4000,
    seed: int = 0,
    rows: bool = False,
) -> Any:
    """One step of a block for each of many keys.

    :param sites: the block's sites; one state for each key if ``rows``.
    """
    keys = jax.random.split(jax.random.key(seed), num_draws)
    step = jax.vmap(
        lambda sites, key: block.advance(sites, call, random.key_pair(key)),
        (0 if rows else None, 0),
    )
    return jax.tree.map(np.asarray, jax.jit(step)(sites, keys))


def run_alone(
    block: Any, start: dict, steps: int, chains: int, args: tuple = (), **siblings: Any
) -> Any:
    """Last states of chains of a block, its siblings held."""
    kwargs = {"_gibbs_sites": siblings}

    keys = jax.random.split(jax.random.key(0), chains)
    states = jax.vmap(lambda key: block.init(key, 0, start, args, kwargs))(keys)
    chain = lambda state: jax.lax.fori_loop(
        0, steps, lambda _, s: block.sample(s, args, kwargs), state
    )
    return jax.jit(jax.vmap(chain))(states)
