# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Cluster moves of units of a model, against enumeration and above the critical coupling.

Tests contrib/cluster_block.py.
"""

from typing import Any

from model_cases import CASES, Y5, Y23, Call, advance, latents
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import log_density
import pytest

import jax
import jax.numpy as jnp

from ebmpp.contrib import ClusterBlock
from ebmpp.core import random
from ebmpp.errors import ArgumentError, IntractableError
from ebmpp.ppl import CoupledComposite
from helpers import assert_rows_law, nightly


def potts(y: Any) -> None:
    """Three values on a lattice of 2 x 3; some pairs attract, others repel."""
    z = numpyro.sample(
        "z", dist.Categorical(logits=jnp.zeros(3)).expand(y.shape).to_event(2)
    )
    strength = jnp.array([1.5, -0.8, 1.2])
    numpyro.factor("rows", (strength * (z[1:] == z[:-1])).sum())
    numpyro.factor("columns", 0.9 * (z[:, 1:] == z[:, :-1]).sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(2), obs=y)


def ordered(y: Any) -> None:
    """Counts of different sizes, two sites, whose pairs are joined by a function that
    is not symmetric."""
    z = numpyro.sample("z", dist.Binomial(jnp.array([2, 1, 2, 2]), 0.5).to_event(1))
    w = numpyro.sample("w", dist.Bernoulli(0.4))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.factor(
        "chain", -((z[1:] - 0.7 * z[:-1]) ** 2).sum() / scale + 1.3 * w * z[0]
    )
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y[:4])


MODELS = {
    "potts": (potts, Y23, {"z": (3,) * 6}),
    "ordered": (ordered, Y5, {"w": (2,), "z": (3, 2, 3, 3)}),
    "energy_prior": (CASES["energy_prior"].model, Y5, {"z": (2,) * 4}),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "beta"),
    [
        ("potts", None),
        nightly("potts", 0.6),
        *(nightly(name, 0.6) for name in ("ordered", "energy_prior")),
    ],
)
def test_move_preserves_the_distribution(name: str, beta: Any) -> None:
    """States drawn exactly by enumeration keep their distribution, and do move."""
    model, y, sizes = MODELS[name]
    block = ClusterBlock(model, list(sizes), (y,))
    values = latents(model, (y,))
    siblings = {s: v for s, v in values.items() if s not in sizes}
    counts = [n for site in sizes for n in sizes[site]]
    numbers = np.stack(np.unravel_index(np.arange(np.prod(counts)), counts), 1)
    states, start = {}, 0
    for site, count in sizes.items():
        table, shape = (
            np.asarray(block.posterior.values[site].table),
            values[site].shape,
        )
        table = np.broadcast_to(table, (len(table), *shape))
        index = numbers[:, start : start + len(count)].reshape(-1, *shape)
        states[site] = np.stack([np.choose(i, table) for i in index]).astype(
            values[site].dtype
        )
        start += len(count)

    density = lambda sites: log_density(model, (y,), {}, {**siblings, **sites})[0]
    log = np.asarray(jax.jit(jax.vmap(density))(states), float) * (beta or 1.0)
    weight = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
    picked = np.random.default_rng(0).choice(len(numbers), 4000, p=weight)
    before = {site: v[picked] for site, v in states.items()}

    def move(key: Any, sites: Any) -> Any:
        context = block.info.context(sites, Call(siblings, (y,), {}))
        return block.sweep.parts[0].move((sites, context), random.key_pair(key), beta)[
            0
        ]

    after = jax.jit(jax.vmap(move))(jax.random.split(jax.random.key(1), 4000), before)
    flat = lambda z: np.concatenate(
        [np.asarray(z[s], float).reshape(len(z[s]), -1) for s in sizes], 1
    )
    before, after, exact = flat(before), flat(after), flat(states)
    assert 0.05 < (before != after).any(1).mean() < 1
    for feature in (
        lambda a: a,
        lambda a: a[:, 1:] * a[:, :-1],
        lambda a: 1.0 * (a[:, 1:] == a[:, :-1]),
    ):
        assert_rows_law(feature(after), weight @ feature(exact), comparisons=24)


@pytest.mark.nightly
def test_refusals() -> None:
    def triples() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([3]).to_event(1))
        numpyro.factor("f", 1.0 * z.prod())

    def pairs() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([3]).to_event(1))
        numpyro.factor("f", (z[1:] * z[:-1]).sum())

    reals = lambda: numpyro.sample("z", dist.Normal(0, 1))
    independent = lambda: numpyro.sample("z", dist.Bernoulli(0.5))
    for model, most in ((triples, 3), (reals, 0), (independent, 1)):
        with pytest.raises(IntractableError, match=f"up to {most}"):
            ClusterBlock(model, ["z"])
    with pytest.raises(ArgumentError, match="clusters"):
        CoupledComposite([ClusterBlock(pairs, ["z"])])


@pytest.mark.nightly
def test_step_moves_clusters_before_the_sweep() -> None:
    """Units that a strong coupling ties flip together, which sweeps alone hardly ever do."""

    def model() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([6]).to_event(1))
        numpyro.factor("prior", 6.0 * (z[1:] == z[:-1]).sum())

    block = ClusterBlock(model, ["z"])
    moved = advance(block, {"z": np.zeros(6, np.int32)}, Call({}, (), {})).z["z"]
    assert_rows_law(moved.mean(1, keepdims=True) > 0.5, np.array([0.5]))
