# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks that follow from a model: conditionals against the model's own density, laws of draws, refusals."""

from collections.abc import Callable
import dataclasses
import pickle
from typing import Any

import block_tools
from hypothesis import given, settings, strategies as st
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import HMC, MCMC, Gibbs, HMCGibbs
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace
from numpyro.infer.util import log_density
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import GibbsBlock
from ebmpp.core import random
from ebmpp.errors import ArgumentError, IntractableError, StateError
from ebmpp.ppl import CoupledComposite, composite_expectation, gibbs_fn
from ebmpp.ppl.sites import Call
from helpers import assert_law, assert_rows_law

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


@pytest.mark.parametrize("name", CASES)
def test_conditionals_are_those_of_the_joint_density(name: str) -> None:
    case, block = made(name)
    assert block.conditionals.num_layers == case.layers
    for seed in range(2):
        values = latents(case.model, case.args, seed)
        exact, found = brute_force(case, block, values), block.log_conditionals(values)
        for site in case.sites:
            np.testing.assert_allclose(np.exp(found[site]), np.exp(exact[site]), atol=2e-5, err_msg=site)


@pytest.mark.parametrize("name", ["mixture", "weighed_groups", "convolved"])
def test_x64(name: str) -> None:
    with jax.enable_x64(True):
        case, block = made(name)
        values = latents(case.model, case.args, 0)
        exact, found = brute_force(case, block, values), block.log_conditionals(values)
        for site in case.sites:
            assert found[site].dtype == jnp.float64
            np.testing.assert_allclose(np.exp(found[site]), np.exp(exact[site]), atol=1e-6, err_msg=site)


@pytest.mark.parametrize("name", ["mixture", "sliced_lattice", "counts", "scanned_chain"])
def test_draws_follow_the_conditionals(name: str) -> None:
    """Of the first layer, whose units are drawn given the state as it is."""
    case, block = made(name)
    values = latents(case.model, case.args, 0)
    own = {site: values[site] for site in case.sites}
    call = Call({n: v for n, v in values.items() if n not in own}, case.args, {})
    step = jax.jit(jax.vmap(lambda key: block.advance(own, call, random.key_pair(key))[0]))
    draws = step(jax.random.split(jax.random.key(0), 4000))
    exact, layers = brute_force(case, block, values), block.layers
    for site in case.sites:
        table, valid = (np.moveaxis(np.asarray(a), 0, -1) for a in block.posterior.values[site])
        first, law = layers[site] == 0, np.exp(exact[site])
        hits = ((np.asarray(draws[site])[..., None] == table) & valid).mean(0)
        assert_law(hits[first], law[first], np.sqrt(law * (1 - law) / 4000)[first])


def test_the_posterior_in_gibbs() -> None:
    """A lattice seen through noise of unknown precision, against enumeration, by a chain a key."""
    block = GibbsBlock.from_model(block_tools.model, ["x"], jnp.asarray(block_tools.NOISY))
    assert block.conditionals.num_layers == 2
    block.verify(block_tools.model, jnp.asarray(block_tools.NOISY))
    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False, "trajectory_length": None}
    noise = HMC(block_tools.model, step_size=0.25, num_steps=4, **fixed)
    for kernel in (Gibbs([(block, ["x"]), (noise, None)]), HMCGibbs(noise, gibbs_fn(block), ["x"])):
        mcmc = MCMC(
            kernel, num_warmup=40, num_samples=30, num_chains=200, chain_method=jax.vmap, progress_bar=False
        )
        mcmc.run(jax.random.key(0), jnp.asarray(block_tools.NOISY))
        draws = mcmc.get_samples(group_by_chain=True)
        probability, precision = block_tools.exact_posterior()
        assert_rows_law(np.asarray(draws["x"] > 0, float).mean(1), probability, comparisons=14)
        assert_rows_law(np.asarray(draws["precision"]).mean(1), precision, comparisons=14)


def test_pairs_of_a_composite_are_unbiased_and_meet() -> None:
    """The lattice's prior as an energy model, the precision conjugate: means against enumeration."""
    noisy = jnp.asarray(block_tools.NOISY)
    block = GibbsBlock.from_model(block_tools.spin_model, ["x"], noisy)
    assert block.conditionals.num_layers == 2
    kernel = CoupledComposite([block, block_tools.precision_step()])
    made = composite_expectation(
        kernel,
        lambda sites: {"x": sites["x"] > 0, "precision": sites["precision"]},
        noisy,
        rng_key=jax.random.key(3),
        num_pairs=3000,
        k=3,
        m=6,
    )
    probability, precision = block_tools.exact_posterior()
    assert made.num_unmet == 0 and (made.meeting_time > 1).any()
    assert_law(made.value["x"], probability, made.standard_error["x"], comparisons=7)
    assert_law(made.value["precision"], precision, made.standard_error["precision"], comparisons=7)


def test_coupled_chains_have_their_own_laws_and_meet_as_often_as_they_can() -> None:
    case, block = made("counts")
    sides = []
    for seed in range(2):
        values = latents(case.model, case.args, seed)
        sides.append((values, ({"z": values["z"]}, Call({"rate": values["rate"]}, case.args, {}))))
    step = jax.jit(jax.vmap(lambda key: block.couple(sides[0][1], sides[1][1], random.key_pair(key))))
    x, y, broken = step(jax.random.split(jax.random.key(0), 4000))
    assert not broken.any()
    laws = [np.exp(brute_force(case, block, values)["z"]) for values, _ in sides]
    for drawn, law in zip((x, y), laws, strict=True):
        hits = (np.asarray(drawn["z"])[..., None] == np.arange(4)).mean(0)
        assert_law(hits, law, np.sqrt(law * (1 - law) / 4000))
    together, same = np.asarray(x["z"] == y["z"]).mean(0), np.minimum(*laws).sum(-1)
    assert_law(together, same, np.sqrt(same * (1 - same) / 4000))


def test_it_pickles_and_draws_depend_on_the_key_and_the_step() -> None:
    case, block = made("markov_chain")
    values = latents(case.model, case.args, 0)
    kwargs = {"_gibbs_sites": {"rows": values["rows"]}}

    def chain(block: Any, steps: int, state: Any = None) -> Any:
        state = state or block.init(jax.random.key(1), 0, {"z": values["z"]}, case.args, kwargs)
        return jax.lax.fori_loop(0, steps, lambda _, s: block.sample(s, case.args, kwargs), state)

    long, again = chain(block, 6), chain(pickle.loads(pickle.dumps(block)), 3)
    assert (long.z["z"] == chain(block, 3, again).z["z"]).all()
    assert int(long.i) == 6 and int(long.kept) == 0
    assert long.z["z"].dtype == values["z"].dtype


def test_a_model_is_traced_once() -> None:
    called = []

    def counted(y: Any) -> None:
        called.append(0)
        mixture(y)

    block = GibbsBlock.from_model(counted, ["z"], Y5)
    values, before = latents(counted, (Y5,), 0), len(called) + 1
    kwargs = {"_gibbs_sites": {name: v for name, v in values.items() if name != "z"}}
    state = block.init(jax.random.key(1), 0, {"z": values["z"]}, (Y5,), kwargs)
    step = jax.jit(lambda state, y: block.sample(state, (y,), kwargs))
    state = step(step(state, Y5), Y5 + 1)
    assert step._cache_size() == 1
    assert len(called) == before - 1


def regression(y: Any, x: Any) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([12]).to_event(1))
    with numpyro.plate("columns", 12):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(x @ (z * b), 1.0).to_event(1), obs=y)


X = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)


def test_where_all_units_interact_it_must_be_asked_for() -> None:
    with pytest.raises(
        IntractableError, match=r"all 12 units .* 12 x 2 = 24 evaluations .* unit_by_unit=True"
    ):
        GibbsBlock.from_model(regression, ["z"], Y5, X)
    block = GibbsBlock.from_model(regression, ["z"], Y5, X, unit_by_unit=True)
    case = Case(regression, ("z",), (Y5, X), 12)
    values = latents(regression, (Y5, X), 0)
    found = block.log_conditionals(values)["z"]
    exact = brute_force(case, block, values)["z"]
    np.testing.assert_allclose(np.exp(found), np.exp(exact), atol=2e-5)
    block.verify(regression, Y5, X)
    call = Call({"b": values["b"]}, (Y5, X), {})
    step = lambda key: block.advance({"z": values["z"]}, call, random.key_pair(key))[0]["z"]
    draws = jax.jit(jax.vmap(step))(jax.random.split(jax.random.key(0), 4000))
    assert_rows_law(np.asarray(draws[:, 0], float), np.exp(exact)[0, 1])


def test_many_layers_share_one_program() -> None:
    """Six units that all interact: more layers than are compiled one by one."""

    def model(y: Any) -> None:
        z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([6]).to_event(1))
        w = numpyro.sample("w", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(z.sum() + w, 2.0), obs=y)
        numpyro.factor("pairs", 0.3 * w * (z[1:] * z[:-1]).sum())

    args = (jnp.array(3.0),)
    assert_conditionals(model, ["z", "w"], args, 7)
    GibbsBlock.from_model(model, ["z", "w"], *args).verify(model, *args)


def assert_conditionals(model: Any, sites: list, args: tuple, layers: int) -> None:
    block, values = GibbsBlock.from_model(model, sites, *args), latents(model, args, 0)
    assert block.conditionals.num_layers == layers
    exact = brute_force(Case(model, tuple(sites), args, layers), block, values)
    found = block.log_conditionals(values)
    for site in sites:
        np.testing.assert_allclose(np.exp(found[site]), np.exp(exact[site]), atol=5e-5, err_msg=site)


def test_units_that_many_elements_read() -> None:
    """One unit reads all of a plate, in one layer of two; and of seven layers that share a program."""
    y = np.random.default_rng(0).normal(size=60).astype(np.float32)
    assert_conditionals(centred_mixture, ["wide", "z"], (y,), 2)
    index = np.minimum(np.arange(60), 6) % 6

    def model(y: Any) -> None:
        z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([7]).to_event(1))
        numpyro.factor("all", jnp.cos(1.0 * z.sum()))
        numpyro.sample("y", dist.Normal(0.1 * z[index], 1.0).to_event(1), obs=y)

    assert_conditionals(model, ["z"], (y,), 7)


def test_another_model_is_told() -> None:
    _, block = made("mixture")
    block.verify(mixture, Y5)

    def sharper(y: Any) -> None:
        with handlers.scale(scale=2.0):
            mixture(y)

    with pytest.raises(StateError, match="log density changes by"):
        block.verify(sharper, Y5)


def subsampled(y: Any) -> None:
    with numpyro.plate("points", 5, subsample_size=2):
        numpyro.sample("z", dist.Bernoulli(0.4))


def depending(y: Any) -> None:
    n = numpyro.sample("n", dist.Categorical(jnp.ones(4) / 4))
    z = numpyro.sample("z", dist.Binomial(n, 0.4))
    numpyro.sample("y", dist.Normal(z, 1.0), obs=y[0])


def summed_out(y: Any) -> None:
    numpyro.sample("z", dist.Bernoulli(0.4))
    numpyro.sample("w", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})


def endless(y: Any) -> None:
    numpyro.sample("z", dist.Poisson(1.0))


def indexed(y: Any, pairs: Any) -> None:
    z = numpyro.sample("z", dist.Bernoulli(0.4).expand([5]).to_event(1))
    numpyro.factor("prior", (z[pairs[:, 0]] * z[pairs[:, 1]]).sum())


def started(name: str, value: Any, *args: Any, **siblings: Any) -> Any:
    return made(name)[1].init(jax.random.key(0), 0, value, args, {"_gibbs_sites": siblings})


def made_inside_jit() -> Any:
    return jax.jit(lambda y: GibbsBlock.from_model(mixture, ["z"], y).log_conditionals({}))(Y5)


def indexed_block() -> Any:
    return GibbsBlock.from_model(indexed, ["z"], Y5, PAIRED)


def traced_pairs(block: Any) -> Any:
    given = lambda pairs: block.log_conditionals({"z": jnp.zeros(5, int)}, Y5, pairs)
    return jax.jit(given)(PAIRED)


MIXED = {"weights": jnp.ones(3) / 3, "means": jnp.zeros(3)}
PAIRED = np.array([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (
            lambda: GibbsBlock.from_model(3, ["z"]),
            ArgumentError,
            "model is a function of NumPyro's primitives",
        ),
        (lambda: GibbsBlock.from_model(mixture, ["q"], Y5), StateError, "unknown latent site 'q'"),
        (lambda: GibbsBlock.from_model(mixture, [], Y5), StateError, "names of latent sites"),
        (lambda: GibbsBlock.from_model(mixture, ["y"], Y5), StateError, "unknown latent site 'y'"),
        (lambda: GibbsBlock.from_model(mixture, ["means"], Y5), IntractableError, "'means' is Normal"),
        (lambda: GibbsBlock.from_model(endless, ["z"], Y5), IntractableError, "'z' is Poisson"),
        (
            lambda: GibbsBlock.from_model(subsampled, ["z"], Y5),
            StateError,
            "plate 'points' is subsampled .2 of 5",
        ),
        (lambda: GibbsBlock.from_model(depending, ["z"], Y5), IntractableError, "depend on other sites"),
        (
            lambda: GibbsBlock.from_model(summed_out, ["z"], Y5),
            StateError,
            "'w' is summed out by enumeration",
        ),
        (lambda: GibbsBlock.from_model(mixture, ["z"], Y5, num_sweeps=0), ArgumentError, "num_sweeps"),
        (lambda: GibbsBlock.from_model(mixture, ["z"], Y5, unit_by_unit=1), ArgumentError, "unit_by_unit"),
        (lambda: started("mixture", None, Y5, **MIXED), StateError, "initial values of its sites"),
        (lambda: started("mixture", {"w": jnp.zeros(5)}, Y5), StateError, "name the same sites"),
        (
            lambda: started("mixture", {"z": jnp.zeros(5)}, Y5),
            StateError,
            r"reads sites \['weights', 'means'\]",
        ),
        (lambda: started("mixture", {"z": jnp.zeros(4)}, Y5, **MIXED), StateError, "site 'z' has shape"),
        (
            lambda: started("mixture", {"z": jnp.full(5, 3)}, Y5, **MIXED),
            StateError,
            "site 'z' is .*expected one of",
        ),
        (
            lambda: started("mixture", {"z": jnp.zeros(5)}, Y5[:3], **MIXED),
            StateError,
            r"args\[0\] .* has shape",
        ),
        (lambda: started("mixture", {"z": jnp.zeros(5)}, **MIXED), StateError, "the model's arguments are"),
        (
            lambda: indexed_block().log_conditionals({"z": jnp.zeros(5, int)}, Y5, PAIRED + 1),
            StateError,
            r"args\[1\] of the model has another value",
        ),
        (made_inside_jit, StateError, "outside of jax.jit"),
        (lambda: traced_pairs(indexed_block()), StateError, "jit_model_args"),
        (lambda: gibbs_fn(made("mixture")[1], ["z"]), ArgumentError, "has its sites and options already"),
    ],
)
def test_mistakes_are_told(make: Any, error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        make()


def test_what_the_model_looks_at_is_fixed() -> None:
    """Arguments whose values decide shapes are taken as they are."""

    def model(y: Any, groups: Any) -> None:
        with numpyro.plate("groups", int(groups.max()) + 1):
            z = numpyro.sample("z", dist.Bernoulli(0.4))
        numpyro.sample("y", dist.Normal(1.0 * z[groups], 1.0).to_event(1), obs=y)

    groups = np.array([0, 1, 1, 0, 2])
    block = GibbsBlock.from_model(model, ["z"], Y5, groups)
    assert block.conditionals.num_layers == 1
    values = {"z": jnp.array([0, 1, 0])}
    exact = brute_force(Case(model, ("z",), (Y5, groups), 1), block, values)["z"]
    np.testing.assert_allclose(np.exp(block.log_conditionals(values)["z"]), np.exp(exact), atol=2e-5)
    with pytest.raises(StateError, match="another value"):
        block.log_conditionals(values, Y5, groups[::-1].copy())


def test_impossible_values_stay() -> None:
    """A unit none of whose values is possible keeps the one that it has, and that is counted."""

    def model() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.4).expand([3]).to_event(1))
        numpyro.factor("never", jnp.where(jnp.arange(3) == 1, -jnp.exp(1e3 + z), 0.0).sum())

    block = GibbsBlock.from_model(model, ["z"])
    state = block.init(jax.random.key(0), 0, {"z": jnp.array([0, 1, 0])}, (), {})
    for _ in range(3):
        state = block.sample(state, (), {})
        assert int(state.z["z"][1]) == 1
    assert int(state.kept) == 3
    assert "3 draws kept a value" in block.get_diagnostics_str(state)


@given(data=st.data())
@settings(max_examples=6, derandomize=True)
def test_random_index_structures(data: st.DataObject) -> None:
    """Pairs by random indices, joined by a random function, weighed by a sibling."""
    edges = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
    join = data.draw(st.sampled_from([jnp.maximum, jnp.multiply, jnp.equal, jnp.hypot, jnp.subtract]))
    first, second = np.array(edges).T

    def model(y: Any) -> None:
        weight = numpyro.sample("weight", dist.Normal(0, 1))
        z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([5]).to_event(1))
        numpyro.factor("pairs", weight * (1.0 * join(z[first], 1.0 * z[second])).sum())
        numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)

    block, values = GibbsBlock.from_model(model, ["z"], Y5), latents(model, (Y5,), 1)
    exact = brute_force(Case(model, ("z",), (Y5,), 0), block, values)["z"]
    np.testing.assert_allclose(np.exp(block.log_conditionals(values)["z"]), np.exp(exact), atol=2e-5)
