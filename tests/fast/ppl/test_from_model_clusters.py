# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Clusters of units of a model: laws against enumeration, by the move alone, and what is refused."""

from typing import Any

from model_cases import CASES, Y5, Y23, latents
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import log_density
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.core import random
from ebmpp.errors import ArgumentError, IntractableError
from ebmpp.ppl import CoupledComposite
from ebmpp.ppl.sites import Call
from helpers import assert_rows_law, often


def potts(y: Any) -> None:
    """Three values on a lattice of 2 x 3, whose neighbours like to be alike; some pairs the contrary."""
    z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand(y.shape).to_event(2))
    strength = jnp.array([1.5, -0.8, 1.2])
    numpyro.factor("rows", (strength * (z[1:] == z[:-1])).sum())
    numpyro.factor("columns", 0.9 * (z[:, 1:] == z[:, :-1]).sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(2), obs=y)


def ordered(y: Any) -> None:
    """Counts of different sizes, two sites, whose pairs are joined by a function that is not symmetric."""
    z = numpyro.sample("z", dist.Binomial(jnp.array([2, 1, 2, 2]), 0.5).to_event(1))
    w = numpyro.sample("w", dist.Bernoulli(0.4))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.factor("chain", -((z[1:] - 0.7 * z[:-1]) ** 2).sum() / scale + 1.3 * w * z[0])
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y[:4])


def forbidden(y: Any) -> None:
    """Neighbours that may not both be 2."""
    z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([4]).to_event(1))
    numpyro.factor("never", jnp.where((z[1:] == 2) & (z[:-1] == 2), -jnp.inf, 1.0 * (z[1:] == z[:-1])).sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y[:4])


def by_logits(y: Any) -> None:
    """Neighbours like to be alike; logits are inferred, and infinite in a branch that is not taken."""
    a = numpyro.sample("a", dist.Normal(0, 1))
    z = numpyro.sample("z", dist.Bernoulli(logits=a).expand([5]).to_event(1))
    numpyro.factor("chain", jnp.where(a < 10, 0.8 * (z[1:] * z[:-1]), jnp.inf * (z[1:] * z[:-1])).sum())
    numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)


MODELS = {
    "by_logits": (by_logits, Y5, {"z": (2,) * 5}),
    "potts": (potts, Y23, {"z": (3,) * 6}),
    "ordered": (ordered, Y5, {"z": (3, 2, 3, 3), "w": (2,)}),
    "forbidden": (forbidden, Y5, {"z": (3,) * 4}),
    "energy_prior": (CASES["energy_prior"].model, Y5, {"z": (2,) * 4}),
    "rolled_lattice": (CASES["rolled_lattice"].model, Y23, {"z": (2,) * 6}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("beta", often([None, 0.6], 0.6))
def test_a_move_alone_leaves_the_law_as_it_is(name: str, beta: Any) -> None:
    """States drawn exactly by enumeration stay so, and do move."""
    model, y, sizes = MODELS[name]
    block = GibbsBlock.from_model(model, list(sizes), y, clusters=True)
    values = latents(model, (y,), 0)
    weak = {"coupling": jnp.float32(0.4)}  # so that pairs do not hold everything
    siblings = {s: weak.get(s, v) for s, v in values.items() if s not in sizes}
    counts = [n for site in sorted(sizes) for n in sizes[site]]
    numbers = np.stack(np.unravel_index(np.arange(np.prod(counts)), counts), 1)

    def sites(row: Any) -> dict[str, Any]:
        made, start = {}, 0
        for site in sorted(sizes):
            table, shape = block.posterior.values[site].table, values[site].shape
            each = row[start : start + len(sizes[site])].reshape(shape)
            table = jnp.broadcast_to(jnp.asarray(table), (len(table), *shape))
            made[site] = jnp.take_along_axis(table, each[None], 0)[0].astype(values[site].dtype)
            start += len(sizes[site])
        return made

    density = lambda row: log_density(model, (y,), {}, {**siblings, **sites(row)})[0]
    log = np.asarray(jax.jit(jax.vmap(density))(jnp.asarray(numbers)), float) * (beta or 1.0)
    weight = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
    drawn = numbers[np.random.default_rng(0).choice(len(numbers), 8000, p=weight)]

    flat = lambda row: jnp.concatenate([sites(row)[site].ravel() for site in sorted(sizes)])

    def move(key: Any, row: Any) -> Any:
        own = sites(row)
        given = block.sweep.given(block.posterior, own, Call(siblings, (y,), {}))
        moved = block.sweep.clusters(own, given, random.key_pair(key), beta)
        return jnp.concatenate([moved[site].ravel() for site in sorted(sizes)])

    before = np.asarray(jax.vmap(flat)(drawn))
    after = np.asarray(jax.jit(jax.vmap(move))(jax.random.split(jax.random.key(1), 8000), jnp.asarray(drawn)))
    assert 0.05 < (before != after).any(1).mean() < 1
    exact = np.asarray(jax.vmap(flat)(numbers))
    assert_rows_law(after.astype(float), weight @ exact, comparisons=24)
    pairs = lambda a: 1.0 * a[:, 1:] * a[:, :-1]
    assert_rows_law(pairs(after), weight @ pairs(exact), comparisons=24)
    same = lambda a: 1.0 * (a[:, 1:] == a[:, :-1])
    assert_rows_law(same(after), weight @ same(exact), comparisons=24)


def test_regions_turn_where_units_do_not() -> None:
    """Two values of a 6 x 6 lattice far above the critical coupling: all at one, then all at the other."""

    def model() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([6, 6]).to_event(2))
        numpyro.factor("prior", 2.0 * ((z[1:] == z[:-1]).sum() + (z[:, 1:] == z[:, :-1]).sum()))

    def ups(clusters: bool) -> Any:
        block = GibbsBlock.from_model(model, ["z"], clusters=clusters)

        def chain(key: Any) -> Any:
            state = block.init(key, 0, {"z": jnp.zeros((6, 6), int)}, (), {})
            return jax.lax.fori_loop(0, 20, lambda _, s: block.sample(s, (), {}), state).z["z"].mean() > 0.5

        return jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), 1000))

    assert float(ups(False).mean()) < 0.02
    assert_rows_law(np.asarray(ups(True), float)[:, None], np.array([0.5]))


@pytest.mark.slow
def test_chain_methods_agree_and_a_second_call_does_not_retrace() -> None:
    block = GibbsBlock.from_model(potts, ["z"], Y23, clusters=True, tempering=[0.5, 1.0])
    begin = lambda key: block.init(key, 0, {"z": jnp.zeros((2, 3), int)}, (Y23,), {})
    one = jax.jit(lambda s: block.sample(s, (Y23,), {}))
    many = jax.jit(jax.vmap(lambda s: block.sample(s, (Y23,), {})))
    keys = jax.random.split(jax.random.key(5), 3)
    batch = jax.vmap(begin)(keys)
    for _ in range(4):
        batch = many(batch)
    for number, key in enumerate(keys):
        state = begin(key)
        for _ in range(4):
            state = one(state)
        assert (state.z["z"] == batch.z["z"][number]).all()
        assert state.transitions == batch.transitions[number]
    assert one._cache_size() == 1 and many._cache_size() == 1


def triples(y: Any) -> None:
    z = numpyro.sample("z", dist.Bernoulli(0.5).expand([5]).to_event(1))
    numpyro.factor("prior", jnp.cos(1.0 * z[2:] + z[1:-1] + z[:-2]).sum())


def real(y: Any) -> None:
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(x, 1.0).expand([5]).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: GibbsBlock.from_model(triples, ["z"], Y5, clusters=True), IntractableError, "reads 3 units"),
        (
            lambda: GibbsBlock.from_model(CASES["counts"].model, ["z"], Y5, clusters=True),
            IntractableError,
            "no two units interact",
        ),
        (lambda: GibbsBlock.from_model(real, ["x"], Y5, clusters=True), IntractableError, "there are none"),
        (lambda: GibbsBlock.from_model(potts, ["z"], Y23, clusters=1), ArgumentError, "clusters"),
        (
            lambda: CoupledComposite([GibbsBlock.from_model(potts, ["z"], Y23, clusters=True)]),
            ArgumentError,
            "has clusters",
        ),
    ],
)
def test_what_makes_no_clusters_is_refused_by_name(make: Any, error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        make()
