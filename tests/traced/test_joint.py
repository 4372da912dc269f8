# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Discrete units of models that are drawn jointly, and summed out, along forests.

Tests traced/sweep/forests.py.
"""

from copy import copy
from functools import cache, partial
import itertools
import pickle
from typing import Any

from model_cases import CASES, Y5, Call, advance, latents, run_alone
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer.util import log_density, potential_energy
import pytest
from scipy.special import expit, softmax
from scipy.stats import norm

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.core import random
from ebmpp.errors import ArgumentError, IntractableError, StateError
from helpers import assert_law, assert_rows_law, often

ROWS = jnp.array([[0.8, 0.1, 0.1], [0.1, 0.9, 0.0], [0.0, 0.0, 1.0]])
MEANS, SCALE = jnp.array([1.0, 0.0, 0.0]), 0.001**0.5
#: a left-to-right chain that enters its last state, or does not (hmmlearn, issue 214)
Y20 = np.float32(
    "0.97463307 .98580524 .96502726 .94767963 .96783919 .02015515 .97280737 "
    "1.05605478 1.01784615 -.01791463 "
    ".02308386 .0117951 .01688058 -.00290845 .03611139 -.03572094 -.02688102 .0303838 .02761991 "
    "-.00352225".split()
)


def absorbing(y: Any) -> None:
    z = numpyro.sample(
        "z", dist.Categorical(jnp.ones(3) / 3).expand([len(y)]).to_event(1)
    )
    numpyro.factor("start", jnp.log(3 * jnp.array([0.8, 0.1, 0.1]))[z[0]])
    numpyro.factor("moves", jnp.log(3 * ROWS)[z[:-1], z[1:]].sum())
    numpyro.sample("y", dist.Normal(MEANS[z], SCALE).to_event(1), obs=y)


def absorbing_by_step(y: Any) -> None:
    """Declare the same chain as a Python loop of sites."""
    z = numpyro.sample("z0", dist.Categorical(jnp.array([0.8, 0.1, 0.1])))
    for t, observed in enumerate(y):
        z = z if t == 0 else numpyro.sample(f"z{t}", dist.Categorical(ROWS[z]))
        numpyro.sample(f"y{t}", dist.Normal(MEANS[z], SCALE), obs=observed)


@cache
def absorbing_block() -> Any:
    return GibbsBlock.from_model(absorbing, ["z"], Y20)


def two_chains(y: Any) -> None:
    """Two separate chains in one site, of units that take 2 or 3 values, and a site
    that joins nothing."""
    z = numpyro.sample(
        "z", dist.Binomial(jnp.array([2, 1, 2, 1, 1, 2]), 0.4).to_event(1)
    )
    weight = numpyro.sample("weight", dist.Normal(0, 1))
    numpyro.factor("first", -weight * (z[:2] - z[1:3]) ** 2)
    numpyro.factor(
        "second",
        jnp.where((z[3:5] == 0) & (z[4:] == 0), -jnp.inf, 0.3 * z[3:5] * z[4:]),
    )
    numpyro.sample("y", dist.Normal(1.0 * z[:5], 1.0).to_event(1), obs=y)


def tree(y: Any) -> None:
    """A tree of three sites, whose leaves have the values of their parents or not."""
    p = numpyro.sample("p", dist.Beta(2.0, 2.0))
    a = numpyro.sample("a", dist.Categorical(jnp.array([0.2, 0.3, 0.5])))
    b = numpyro.sample(
        "b", dist.Bernoulli(jnp.stack([p, 0.5, 1 - p])[a]).expand([2]).to_event(1)
    )
    with numpyro.plate("leaves", 2):
        c = numpyro.sample("c", dist.Bernoulli(logits=2.0 * b[0] - p))
    numpyro.deterministic("odds", p / (1 - p))
    numpyro.deterministic("total", a + b.sum())
    numpyro.sample(
        "y",
        dist.Normal(1.0 * jnp.array([a, b[0], b[1], c[0], c[1]]), 1.0).to_event(1),
        obs=y,
    )


#: model, discrete sites, numbers of values of their flattened units
MODELS: dict[str, tuple] = {
    "two chains": (two_chains, ["z"], [3, 2, 3, 2, 2, 3]),
    "tree": (tree, ["a", "b", "c"], [3, 2, 2, 2, 2]),
    "scanned chain": (CASES["scanned_chain"].model, ["z"], [3] * 5),
    "chain": (CASES["markov_chain"].model, ["z"], [3] * 5),
    "energy prior": (CASES["energy_prior"].model, ["z"], [2] * 4),
}


def values_of(block: Any, site: str) -> list[np.ndarray]:
    """Values of the units of a site and a mask of the values that a unit can take,
    ``(K, units)``."""
    shape = block.posterior.shapes[site]
    return [
        np.broadcast_to(a, (len(a), *shape)).reshape(len(a), -1)
        for a in block.posterior.values[site]
    ]


class Exact:
    """A block of a model, values of its other sites, and its posterior by enumeration."""

    def __init__(self, name: str) -> None:
        model, self.sites, sizes = MODELS[name]
        self.model, self.block = model, GibbsBlock.from_model(model, self.sites, Y5)
        values = latents(model, (Y5,))
        self.siblings = {
            site: jnp.asarray(v) for site, v in values.items() if site not in self.sites
        }
        numbers = np.array(list(itertools.product(*map(range, sizes))))
        shapes = [values[site].shape for site in self.sites]
        parts = np.split(
            numbers, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1], 1
        )
        table = lambda site, part: values_of(self.block, site)[0][:, 0][part]
        self.states = {
            site: table(site, part).reshape(-1, *shape).astype(values[site].dtype)
            for site, part, shape in zip(self.sites, parts, shapes, strict=True)
        }
        self.start = {site: values[site] for site in self.sites}

        self.gradient = jax.jit(jax.value_and_grad(self.log_marginal, has_aux=True))
        (self.log_sum, log), self.slope = self.gradient(self.siblings)
        self.log = np.asarray(log, float)

    def log_marginal(self, siblings: Any) -> tuple[jax.Array, jax.Array]:
        """Return the log density of the siblings, and that of each state."""
        density = lambda states: log_density(
            self.model, (Y5,), {}, {**siblings, **states}
        )[0]
        log = jax.vmap(density)(self.states)
        possible = jnp.isfinite(log)
        return jax.nn.logsumexp(jnp.where(possible, log, 0.0), where=possible), log

    def weights(self, siblings: Any = None) -> np.ndarray:
        """Return the probabilities of the states."""
        return softmax(
            self.log
            if siblings is None
            else np.asarray(self.gradient(siblings)[0][1], float)
        )


@cache
def exact(name: str) -> Exact:
    return Exact(name)


def features(states: dict) -> np.ndarray:
    """Units and products of pairs, ``(rows, ...)``."""
    units = np.concatenate(
        [np.reshape(v, (len(v), -1)) for v in states.values()], 1
    ).astype(float)
    return np.concatenate(
        [units, (units[:, :, None] * units[:, None]).reshape(len(units), -1)], 1
    )


@pytest.mark.parametrize("name", often(MODELS, "tree"))
def test_draws_are_of_the_joint_posterior(name: str) -> None:
    case = exact(name)
    assert all((layer == 0).all() for layer in case.block.layers.values())
    drawn = advance(case.block, case.start, Call(case.siblings, (Y5,), {}))
    assert not drawn.degenerate.any()
    mean, square = (case.weights() @ features(case.states) ** power for power in (1, 2))
    assert_law(
        features(drawn.z).mean(0), mean, np.sqrt(np.maximum(square - mean**2, 0) / 4000)
    )


@pytest.mark.parametrize("name", often(MODELS, "two chains"))
def test_sums_match_enumeration(name: str) -> None:
    case = exact(name)
    value, slope = jax.value_and_grad(case.block.log_marginal)(case.siblings)
    np.testing.assert_allclose(value, case.log_sum, rtol=1e-5)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), slope, case.slope
    )
    best, marginals = (
        case.block.most_probable(case.siblings),
        case.block.marginals(case.siblings),
    )
    values = {}
    for site, states in case.states.items():
        assert (best[site] == states[case.log.argmax()]).all()
        table, valid = values_of(case.block, site)
        values[site] = 1.0 * ((states.reshape(len(states), 1, -1) == table) & valid)
        shares = np.tensordot(case.weights(), values[site], 1).T
        np.testing.assert_allclose(
            marginals[site].reshape(shares.shape), shares, atol=1e-5
        )
    for (a, b), (units, pairs) in case.block.pair_marginals(case.siblings).items():
        ends = values[a][..., units[:, 0]], values[b][..., units[:, 1]]
        np.testing.assert_allclose(
            pairs, np.einsum("s,sie,sje->eij", case.weights(), *ends), atol=1e-5
        )


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["unary", "pairwise"])
def test_verify_names_a_wrong_table_of_a_joint_draw(kind: str) -> None:
    block = copy(exact("two chains").block)
    block.verify(two_chains, Y5)
    drawn = block.conditionals = copy(block.conditionals)
    tables, wrong, number = (
        drawn.log_weights,
        jnp.sin(jnp.arange(9.0)).reshape(3, 3),
        int(kind == "pairwise"),
    )
    change = (
        jnp.zeros((6, 3)).at[1].set(wrong[0]),
        jnp.zeros((4, 3, 3)).at[0].set(wrong),
    )
    add = lambda table, i: table + change[i] if i == number else table
    drawn.log_weights = lambda *args: tuple(map(add, tables(*args), range(2)))
    drawn._compiled_tables = jax.jit(drawn._all_tables)
    with pytest.raises(StateError, match=rf"{kind} table of z\[1\]"):
        block.verify(two_chains, Y5)


@pytest.mark.nightly
def test_absorbing_chain_leaves_its_start() -> None:
    block = absorbing_block()
    np.testing.assert_allclose(block.log_marginal({}), 34.161407, rtol=2e-6)
    np.testing.assert_allclose(block.marginals({})["z"][9:, 2], 0.741467, atol=1e-5)
    assert (block.most_probable({})["z"][9:] == 2).all()
    units = GibbsBlock.from_model(absorbing, ["z"], Y20, joint="units")
    assert units.layers["z"].max() == 1
    np.testing.assert_allclose(units.log_marginal({}), 34.161407, rtol=2e-6)


@pytest.mark.nightly
def test_chain_in_a_python_loop_is_one_forest() -> None:
    block = GibbsBlock.from_model(
        absorbing_by_step, [f"z{t}" for t in range(6)], Y20[:6]
    )
    assert all(layer == 0 for layer in block.layers.values())
    full = GibbsBlock.from_model(absorbing, ["z"], Y20[:6]).log_marginal({})
    np.testing.assert_allclose(block.log_marginal({}), full, rtol=1e-5)


@pytest.mark.nightly
def test_pairs_of_a_forest_meet_in_one_step() -> None:
    block, call = absorbing_block(), Call({}, (Y20,), {})
    chains = [({"z": jnp.full(20, number)}, call) for number in (0, 2)]
    step = jax.jit(jax.vmap(lambda key: block.couple(*chains, random.key_pair(key))))
    x, y, broken = step(jax.random.split(jax.random.key(0), 4000))
    assert (x["z"] == y["z"]).all() and not broken.any()
    assert (x["z"][:, :9] == np.array([0, 0, 0, 0, 0, 1, 0, 0, 0])).all()
    assert_rows_law(np.asarray(y["z"])[:, 9:] == 2, 0.741467)


@pytest.mark.nightly
def test_coupled_forests_keep_their_distributions() -> None:
    case = exact("two chains")
    calls = [Call({"weight": jnp.float32(w)}, (Y5,), {}) for w in (0.5, 0.7)]
    step = lambda key: case.block.couple(
        *((case.start, call) for call in calls), random.key_pair(key)
    )
    *pair, broken = jax.jit(jax.vmap(step))(jax.random.split(jax.random.key(0), 4000))
    assert not broken.any()
    for drawn, call in zip(pair, calls, strict=True):
        exact_mean = case.weights(call.siblings) @ features(case.states)
        assert_rows_law(features(drawn), exact_mean, comparisons=84)
    assert (pair[0]["z"] == pair[1]["z"]).all(1).mean() > 0.8


@pytest.mark.nightly
def test_lattice_is_drawn_by_layers_of_forests() -> None:
    case = CASES["lattice"]
    block = GibbsBlock.from_model(case.model, ["z"], *case.args, joint="forest")
    assert block.layers["z"].max() == 1
    states = np.array(list(itertools.product(range(3), repeat=6))).reshape(-1, 2, 3)
    density = jax.vmap(
        lambda z: log_density(case.model, case.args, {}, {"coupling": 0.6, "z": z})[0]
    )
    weights = softmax(np.asarray(jax.jit(density)(states), float))
    state = run_alone(
        block,
        {"z": np.zeros((2, 3), int)},
        8,
        4000,
        case.args,
        coupling=np.float32(0.6),
    )
    assert_rows_law(features(state.z), weights @ features({"z": states}))
    with pytest.raises(IntractableError, match="forest"):
        block.log_marginal({"coupling": 0.6})


@pytest.mark.nightly
def test_impossible_trees_keep_their_values() -> None:
    def model(bound: Any) -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([4]).to_event(1))
        numpyro.factor(
            "f", jnp.where(z[:2].sum() >= bound, 0.0, -jnp.inf) + 0.1 * z[2] * z[3]
        )

    block = GibbsBlock.from_model(model, ["z"], 1)
    drawn = advance(block, {"z": np.zeros(4, int)}, Call({}, (1,), {}), 500)
    assert (drawn.z["z"][:, :2].sum(1) >= 1).all() and len(
        np.unique(drawn.z["z"], axis=0)
    ) == 12
    never = GibbsBlock.from_model(lambda: model(3), ["z"])
    drawn = advance(never, {"z": np.zeros(4, int)}, Call({}, (), {}), 500)
    assert (drawn.z["z"][:, :2] == 0).all() and (drawn.degenerate == 2).all()
    assert (
        len(np.unique(drawn.z["z"], axis=0)) == 4 and never.log_marginal({}) == -np.inf
    )


@pytest.mark.nightly
def test_marginal_model_has_the_other_sites() -> None:
    case = exact("tree")
    model = case.block.marginal_model(tree)
    density, trace = log_density(model, (Y5,), {}, case.siblings)
    np.testing.assert_allclose(density, case.log_sum, rtol=1e-5)
    assert {name for name, site in trace.items() if site["type"] != "plate"} == {
        "p",
        "odds",
        "log_marginal",
    }
    with pytest.raises(ArgumentError, match="marginal_model: model"):
        case.block.marginal_model(two_chains)
    jacobian = potential_energy(model, (Y5,), {}, {"p": 1.5}) + case.block.log_marginal(
        {"p": expit(1.5)}
    )
    np.testing.assert_allclose(jacobian, -np.log(expit(1.5) * expit(-1.5)), rtol=1e-4)


@pytest.mark.nightly
def test_a_block_may_be_used_first_inside_a_model() -> None:
    block = GibbsBlock.from_model(CASES["scanned_chain"].model, ["z"], Y5)
    at = {"rows": jnp.eye(3)}
    density, trace = log_density(block.marginal_model(), (Y5,), {}, at)
    np.testing.assert_allclose(density, block.log_marginal(at), 1e-5)
    assert "z" not in trace  # the outer trace has its own sites


@pytest.mark.nightly
def test_gradients_and_parts_of_sums_beside_hard_zeros() -> None:
    def left_to_right(y: Any, seen: Any) -> None:
        stay = numpyro.sample("stay", dist.Uniform(0, 1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        rows = jnp.array([[stay, 1 - stay, 0], [0, stay, 1 - stay], [0, 0, 1]])
        z = numpyro.sample(
            "z", dist.Categorical(jnp.ones(3) / 3).expand([5]).to_event(1)
        )
        numpyro.factor("start", jnp.where(z[0] == 0, 0.0, -jnp.inf))
        numpyro.factor("moves", scale * jnp.log(rows)[z[:-1], z[1:]].sum())
        with numpyro.plate("steps", 5), numpyro.handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(1.0 * z, 1.0), obs=y)

    paths = np.array([z for z in itertools.product(range(3), repeat=5) if z[0] == 0])
    paths = paths[np.isin(np.diff(paths), (0, 1)).all(1)]
    at = {"stay": jnp.float32(0.7), "scale": jnp.float32(1.3)}
    density = lambda at, seen, z: log_density(
        left_to_right, (Y5, seen), {}, {**at, "z": z}
    )[0]
    log = lambda at, seen: jax.vmap(density, (None, None, 0))(at, seen, paths)
    masks = np.concatenate([np.ones((1, 5), bool), ~np.eye(5, dtype=bool)])
    total = jax.grad(lambda at: jax.nn.logsumexp(log(at, masks[0])))
    slope, logs = jax.jit(lambda at: (total(at), jax.vmap(log, (None, 0))(at, masks)))(
        at
    )
    block = GibbsBlock.from_model(left_to_right, ["z"], Y5, masks[0])
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4),
        jax.grad(block.log_marginal)(at),
        slope,
    )
    # log p(y_t | other y), of which arviz_stats.loo is made
    total, *others = jax.vmap(lambda seen: block.log_marginal(at, Y5, seen))(masks)
    weights = np.exp(logs[1:] - np.logaddexp.reduce(logs[1:], 1, keepdims=True))
    exact_density = (weights * np.exp(-0.5 * (Y5 - paths) ** 2).T).sum(1) / np.sqrt(
        2 * np.pi
    )
    np.testing.assert_allclose(
        total - np.array(others), np.log(exact_density), atol=1e-5
    )


@pytest.mark.nightly
def test_options_are_checked_and_pickled() -> None:
    block = GibbsBlock.from_model(CASES["markov_chain"].model, ["z"], Y5, joint="units")
    assert (pickle.loads(pickle.dumps(block)).layers["z"] == block.layers["z"]).all()
    with pytest.raises(StateError, match="rows"):
        block.log_marginal({})


@pytest.mark.nightly
def test_log_marginal_of_a_long_chain_is_right_to_the_last_digit() -> None:
    """Rounding of the constants of 20,000 densities does not add up."""
    rows = np.array([[0.9, 0.1], [0.2, 0.8]])

    def model(y: Any) -> None:
        def step(z: Any, y: Any) -> tuple:
            z = numpyro.sample("z", dist.Categorical(jnp.asarray(rows)[z]))
            numpyro.sample("y", dist.Normal(2.0 * z, 1.0), obs=y)
            return z, None

        scan(step, 0, y)

    y = np.random.default_rng(0).normal(1, 1.3, 20_000).astype(np.float32)
    weights = np.array([1.0, 0.0])
    exact = 0.0
    for value in y.astype(float):
        weights = weights @ rows * norm.pdf(value, [0, 2])
        exact += np.log(weights.sum())
        weights /= weights.sum()
    block = GibbsBlock.from_model(model, ["z"], y)
    error = abs(float(block.log_marginal({})) - exact)
    assert error <= np.spacing(np.float32(-exact))
