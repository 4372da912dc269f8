# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Starts of blocks of a model: possible states, checked values and data, under every chain method.

Tests traced/start.py.
"""

from collections.abc import Callable
import pickle
import time
from typing import Any

import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs, init_to_median, init_to_value
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import GibbsBlock
from ebmpp.errors import IntractableError, StateError
from ebmpp.ppl import CoupledComposite, CoupledHMC, gibbs_fn
from ebmpp.traced.block import Call
from helpers import nightly, often

FIELDS = jnp.array([-1, -0.5, 0, 0.5, 1, 1.5])
KEYS = jax.random.split(jax.random.key(0), 16)
METHODS = {"sequential": "sequential", "vmap": jax.vmap, "parallel": "parallel"}


def conserved() -> None:
    """Twenty of 64 states are possible, and no unit alone can move between them."""
    z = numpyro.sample("z", dist.Bernoulli(logits=FIELDS).to_event(1))
    numpyro.factor("three", jnp.where(z.sum() == 3, 0.0, -jnp.inf))


def either() -> None:
    a, b = (numpyro.sample(name, dist.Bernoulli(0.5)) for name in "ab")
    numpyro.factor("one", jnp.where((a == 0) & (b == 0), -jnp.inf, 0.0))


def four() -> None:
    numpyro.sample("z", dist.Categorical(jnp.ones(4) / 4))


def run(
    block: Any, *args: Any, method: Any = "sequential", steps: int = 2, **options: Any
) -> MCMC:
    """Two chains; the results are awaited, as compiled programs raise errors late."""
    mcmc = MCMC(
        block,
        num_warmup=0,
        num_samples=steps,
        num_chains=2,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *args, **options)
    jax.block_until_ready(mcmc.get_samples())
    return mcmc


def test_chains_start_at_possible_states() -> None:
    """In Gibbs, draws of the prior come as init_params, which may be impossible."""
    block, impossible = (
        GibbsBlock.from_model(conserved, ["z"], sequential=True),
        {"z": jnp.ones(6, int)},
    )
    start = jax.vmap(
        lambda key: block.init(key, 0, impossible, (), {"_gibbs_sites": {}})
    )
    assert (start(KEYS).z["z"].sum(-1) == 3).all()
    with pytest.raises(StateError, match="site 'three'"):
        block.init(KEYS[0], 0, impossible, (), {})


@pytest.mark.nightly
def test_model_without_possible_state_is_refused() -> None:
    def model() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([2]).to_event(1))
        numpyro.factor("never", jnp.where(z.sum() < 3, -jnp.inf, 0.0))

    block = GibbsBlock.from_model(model, ["z"], sequential=True)
    with pytest.raises(StateError, match="'z'.*'never'"):
        block.init(KEYS[0], 0, None, (), {})


@pytest.mark.nightly
def test_verify_probes_possible_states() -> None:
    block = GibbsBlock.from_model(either, ["a", "b"])
    block.verify(either)

    def other() -> None:
        either()
        numpyro.factor("more", 1.0 * numpyro.sample("c", dist.Bernoulli(0.5)))

    block.verify(other)
    with pytest.raises(StateError, match="log density changes"):
        block.verify(
            lambda: [numpyro.sample(name, dist.Bernoulli(0.7)) for name in "ab"]
        )


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["sequential", "vmap", nightly("parallel")])
def test_starts_out_of_the_support_are_refused(method: str) -> None:
    error = Exception if method == "parallel" else StateError
    block = GibbsBlock.from_model(four, ["z"])
    for value in (9, 1.5, -1):
        with pytest.raises(error, match="site 'z' must be in"):
            run(block, method=METHODS[method], init_params={"z": np.array([2, value])})
    block = GibbsBlock(
        ebmpp.FactorGraph({"x": ebmpp.Bernoulli(2)}, factors=[ebmpp.Bias("x")])
    )
    start = {"x": np.array([[0, 1], [2, 0]])}
    with pytest.raises(error, match="'x'"):
        run(block, {"x": np.zeros(2)}, method=METHODS[method], init_params=start)


def vague(y: Any) -> None:
    tau = numpyro.sample("tau", dist.Gamma(1e-4, 1e-4))
    mu = numpyro.sample("mu", dist.Normal(0, 1000.0))
    numpyro.sample("y", dist.Normal(mu, tau**-0.5).expand([len(y)]).to_event(1), obs=y)


@pytest.mark.nightly
def test_vague_priors_start_at_every_key() -> None:
    """Most draws of this precision underflow to 0, where no state is possible."""
    y = np.random.default_rng(0).normal(5, 2, 20).astype(np.float32)
    block = GibbsBlock.from_model(vague, ["tau", "mu"], y)
    mcmc = MCMC(
        block,
        num_warmup=20,
        num_samples=100,
        num_chains=16,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), y)
    draws = mcmc.get_samples(group_by_chain=True)
    # of the improper prior 1/tau, but for 1e-4
    exact = {"mu": y.mean(), "tau": 1 / y.var(ddof=1)}
    for site, mean in exact.items():
        chains = np.asarray(draws[site]).mean(1)
        assert abs(chains.mean() - mean) < 5 * chains.std(ddof=1) / 4 + 0.01, site


@pytest.mark.nightly
def test_long_search_is_reported(caplog: Any, monkeypatch: Any) -> None:
    block = GibbsBlock.from_model(conserved, ["z"], sequential=True)
    find = block.start._find
    slow = lambda *args: (time.sleep(1.5), find(*args))[1]
    monkeypatch.setattr(block.start, "_find", slow)
    block.init(KEYS[0], 0, {"z": jnp.ones(6, int)}, (), {"_gibbs_sites": {}})
    assert "possible start of ['z']" in caplog.text


def two_groups(y: Any) -> None:
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    means = numpyro.sample("means", dist.Normal(0, 1000.0).expand([2]).to_event(1))
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(means[z], scale), obs=y)


GROUPS = np.float32([-4, -3, 3, 4])
# groups in an order that the data do not decide, and a mean given as integers
NATURAL = {"z": np.array([1, 1, 0, 0]), "means": np.array([3, -3]), "scale": 0.5}


def starts_of(strategy: Any, kind: str) -> dict[str, Any]:
    """Starts of two chains of ``two_groups`` in natural values."""
    named = ["z", "means"]
    block = GibbsBlock.from_model(two_groups, named, GROUPS, init_strategy=strategy)
    nuts = NUTS(two_groups, init_strategy=strategy)
    if kind == "composite":
        block = GibbsBlock.from_model(two_groups, named, GROUPS)
        steps = [block, CoupledHMC(two_groups, ["scale"], step_size=0.1)]
        kernel = CoupledComposite(steps, init_strategy=strategy)
        call = Call({}, (GROUPS,), {})
        start = jax.vmap(lambda words: kernel.start(words, call, {})[0])
        return start(jax.random.key_data(KEYS[:2]))
    pairs = [(block, named), (nuts, None)]
    kernel = Gibbs(pairs if kind == "block first" else pairs[::-1])
    start = jax.vmap(lambda key: kernel.init(key, 0, None, (GROUPS,), {}).z)(KEYS[:2])
    return {**start, "scale": jnp.exp(start["scale"])}


@pytest.mark.parametrize("kind", ["composite", "block first", nightly("NUTS first")])
def test_natural_values_start_all_kernels(kind: str) -> None:
    starts = starts_of(init_to_value(values=NATURAL), kind)
    for site, value in NATURAL.items():
        np.testing.assert_allclose(starts[site], np.stack([value, value]), rtol=1e-6)


def test_natural_values_start_a_block_alone() -> None:
    """Discrete sites without a value are drawn given the others; init_params come first."""
    values = {"tau": 2.0, "means": np.array([-3, 3])}

    def model(y: Any) -> None:
        tau = numpyro.sample("tau", dist.Gamma(1e-3, 1e-3))
        means = numpyro.sample("means", dist.Normal(0, 1000.0).expand([2]).to_event(1))
        with numpyro.plate("points", len(y)):
            z = numpyro.sample("z", dist.Bernoulli(0.5))
            numpyro.sample("y", dist.Normal(means[z], tau**-0.5), obs=y)

    block = GibbsBlock.from_model(
        model,
        ["z", "means", "tau"],
        GROUPS,
        init_strategy=init_to_value(values=values),
    )
    init = {"tau": np.ones(16)}
    states = block.init(KEYS, 0, init, (GROUPS,), {}).z
    np.testing.assert_array_equal(states["z"], np.tile([0, 0, 1, 1], (16, 1)))
    np.testing.assert_array_equal(states["means"], np.tile([-3, 3], (16, 1)))
    np.testing.assert_array_equal(states["tau"], 1)
    assert states["means"].dtype == np.float32
    run(block, GROUPS, method="vectorized")


def test_chains_start_as_widely_as_those_of_nuts() -> None:
    """Uniform over (-2, 2) unconstrained, whatever the prior; discrete sites given these."""
    keys = jax.random.split(jax.random.key(1), 400)

    def model() -> None:
        tau = numpyro.sample("tau", dist.Gamma(1e-3, 1e-3))
        mu = numpyro.sample("mu", dist.Normal(0, 1000.0))
        numpyro.sample("z", dist.Bernoulli(jnp.where(mu > 0, 1.0, 0.0)))
        numpyro.sample("y", dist.Normal(0.0, tau**-0.5), obs=1.0)

    siblings = {"mu": jnp.where(jnp.arange(400) % 2, 1.0, -1.0)}
    block = GibbsBlock.from_model(
        model, ["tau", "z"], init_strategy=init_to_value(values={})
    )

    def start(key: Any, siblings: Any) -> Any:
        return block.init(key, 0, None, (), {"_gibbs_sites": siblings}).z

    z = jax.vmap(start)(keys, siblings)
    np.testing.assert_array_equal(z["z"], siblings["mu"] > 0)
    position = np.log(np.asarray(z["tau"]))
    assert abs(position).max() <= 2
    assert abs(position.mean()) < 4 * np.sqrt(4 / 3 / 400)
    assert abs(position.var() - 4 / 3) < 4 * np.sqrt(64 / 45 / 400)


@pytest.mark.nightly
def test_strategies_of_numpyro_and_custom_ones_are_used() -> None:
    def custom(site: Any = None) -> Any:
        if site["type"] == "sample" and site["name"] == "a":
            return jnp.array(0)
        return init_to_median(site)

    block = GibbsBlock.from_model(either, ["a", "b"], init_strategy=custom)
    states = block.init(KEYS, 0, None, (), {}).z
    # b is drawn given a
    assert not states["a"].any() and states["b"].all()
    steps = [GibbsBlock.from_model(either, ["a", "b"])]
    composite = CoupledComposite(steps, init_strategy=custom)
    start = jax.vmap(lambda words: composite.start(words, Call({}, (), {}), {})[0])
    assert not start(jax.random.key_data(KEYS))["a"].any()
    block = GibbsBlock.from_model(
        vague, ["tau", "mu"], GROUPS, init_strategy=init_to_median
    )
    # the median of 15 draws underflows
    with pytest.raises(StateError, match="not finite at site 'tau'"):
        block.init(KEYS[0], 0, None, (GROUPS,), {})
    tau = {"tau": np.ones(16)}
    assert block.init(KEYS, 0, tau, (GROUPS,), {}).z["mu"].std() > 100
    copy = pickle.loads(pickle.dumps(GibbsBlock.from_model(either, ["a", "b"])))
    assert copy.init_strategy is None


def test_given_values_are_held_in_the_search() -> None:
    strategy = init_to_value(values={"a": 0})
    named = GibbsBlock.from_model(either, ["a", "b"], init_strategy=strategy)
    states = named.init(KEYS, 0, None, (), {}).z
    assert not states["a"].any() and states["b"].all()

    def three_of_two_sites() -> None:
        a = numpyro.sample("a", dist.Bernoulli(0.5).expand([3]).to_event(1))
        b = numpyro.sample("b", dist.Bernoulli(0.5).expand([3]).to_event(1))
        numpyro.factor("three", jnp.where(a.sum() + b.sum() == 3, 0.0, -jnp.inf))

    block = GibbsBlock.from_model(three_of_two_sites, ["a", "b"], sequential=True)
    a = np.tile([1, 0, 1], (16, 1))
    states = block.init(KEYS, 0, {"a": a}, (), {}).z
    np.testing.assert_array_equal(states["a"], a)
    np.testing.assert_array_equal(states["b"].sum(1), 1)


def test_impossible_values_of_a_strategy_are_named() -> None:
    def start(model: Any, **values: Any) -> None:
        strategy = init_to_value(values=values)
        block = GibbsBlock.from_model(model, ["a", "b"], init_strategy=strategy)
        block.init(KEYS[0], 0, None, (), {})

    with pytest.raises(StateError, match=r"\['a', 'b'\] must start .* at site 'one'"):
        start(either, a=0, b=0)
    with pytest.raises(StateError, match="site 'a' must be in .* got .2"):
        start(either, a=2)
    with pytest.raises(StateError, match="unknown site of init_strategy 'c'"):
        start(either, c=0)
    with pytest.raises(StateError, match=r"of shapes {'a': \(\)}, got {'a': \(2,\)}"):
        start(either, a=np.zeros(2, int))
    block = GibbsBlock.from_model(either, ["a", "b"])
    with pytest.raises(StateError, match="unknown site of init_strategy 'c'"):
        CoupledComposite([block], init_strategy=init_to_value(values={"c": 0}))


def test_draws_of_vague_priors_at_the_edge_are_replaced_in_gibbs() -> None:
    y = np.zeros(20, np.float32)
    block = GibbsBlock.from_model(vague, ["tau", "mu"], y)
    kwargs = {"_gibbs_sites": {}}
    for edge in (0.0, np.inf):
        values = {"tau": edge, "mu": 0.0}
        state = block.init(KEYS[0], 0, values, (y,), kwargs).z
        assert np.isfinite(state["tau"]) and state["tau"] > 0
        with pytest.raises(StateError, match="site 'tau' must be in"):
            block.init(KEYS[0], 0, values, (y,), {})
    with pytest.raises(StateError, match="site 'tau' must be in"):
        block.init(KEYS[0], 0, {"tau": -1.0, "mu": 0.0}, (y,), kwargs)


def test_init_params_are_completed_and_named() -> None:
    block = GibbsBlock.from_model(either, ["a", "b"])
    assert block.init(KEYS[0], 0, {"a": jnp.array(1)}, (), {}).z["a"] == 1
    with pytest.raises(StateError, match="unknown site of init_params 'c'"):
        block.init(KEYS[0], 0, {"c": jnp.array(1)}, (), {})
    block = GibbsBlock(
        ebmpp.FactorGraph({"x": ebmpp.Bernoulli(2)}, factors=[ebmpp.Bias("x")])
    )
    with pytest.raises(StateError, match="unknown site of init_params 'y'"):
        block.init(KEYS[0], 0, {"y": np.zeros(2)}, ({"x": np.zeros(2)},), {})


@pytest.mark.nightly
def test_vectorized_chains_are_those_of_vmap():
    block = GibbsBlock.from_model(either, ["a", "b"])
    first, second = (
        run(block, method=method).get_samples()["a"]
        for method in (jax.vmap, "vectorized")
    )
    np.testing.assert_array_equal(first, second)


# -- data
# ------------------------------------------------------------------------------------------


def mixture(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(z + mu, 1.0), obs=y)


@pytest.mark.parametrize("method", ["vmap", nightly("sequential"), nightly("parallel")])
def test_nan_in_the_data_is_refused(method: str) -> None:
    y = np.float32([1.2, np.nan, -0.1])
    with pytest.raises(StateError, match=r"'y'.*args\[0\] of the model holds nan"):
        run(GibbsBlock.from_model(mixture, ["z", "mu"], y), y, method=METHODS[method])
    kernel = Gibbs(
        [(GibbsBlock.from_model(mixture, ["z"], y), ["z"]), (NUTS(mixture), None)]
    )
    with pytest.raises(StateError, match="'y'"):
        run(kernel, y, method=METHODS[method])


def observing(likelihood: Callable) -> Callable:
    def model(y: Any) -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        numpyro.sample("y", likelihood(1.0 + z), obs=y)

    return model


IMPOSSIBLE = {
    "negative count": (dist.Poisson, -1),
    "fraction": (dist.Poisson, 2.5),
    "more than all": (lambda rate: dist.Binomial(5, 0.1 * rate), 9),
    "negative": (dist.Exponential, -1.0),
    "infinite": (lambda rate: dist.Normal(rate, 1.0), np.inf),
    "category": (lambda rate: dist.Categorical(logits=rate * jnp.arange(3)), 7),
    "share": (lambda rate: dist.Beta(rate, 1.0), 1.5),
    "wrapped": (
        lambda rate: dist.Poisson(rate).expand([2]).to_event(1),
        np.array([1, 2**32 + 1]),
    ),
    "row": (
        lambda rate: dist.MultivariateNormal(rate * jnp.ones(2), jnp.eye(2)),
        np.float32([0, np.nan]),
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_data_are_named(name: str) -> None:
    likelihood, y = IMPOSSIBLE[name]
    block = GibbsBlock.from_model(observing(likelihood), ["z"], y)
    for init in (block.init, jax.vmap(block.init, (0, None, None, None, None))):
        with pytest.raises(StateError, match="observed site 'y'"):
            init(KEYS if init != block.init else KEYS[0], 0, None, (y,), None)
    with pytest.raises(StateError, match="observed site 'y'"):
        gibbs_fn(block)
    sums = (
        block.log_marginal,
        block.marginals,
        block.pair_marginals,
        block.most_probable,
    )
    for ask in (*sums, lambda _: block.log_conditionals({"z": 0})):
        with pytest.raises(StateError, match="observed site 'y'"):
            ask({})


def test_values_outside_of_their_support_are_refused_in_sums() -> None:
    def model() -> None:
        p = numpyro.sample("p", dist.Beta(1.0, 1.0))
        numpyro.sample("u", dist.Uniform(0.0, 1 + p))
        z = numpyro.sample("z", dist.Bernoulli(p))
        numpyro.sample("x", dist.Uniform(0.0, 1.0 + z))

    block = GibbsBlock.from_model(model, ["z"])
    # u is possible though not at the prototype's p, and p(z = 0) is 0.9 / 1.1
    values = {"p": 0.9, "u": 1.89, "x": 0.5}
    exact = np.array([0.1, 0.9 / 2]) / 0.55
    np.testing.assert_allclose(block.marginals(values)["z"], exact, rtol=1e-5)
    np.testing.assert_allclose(block.marginals({**values, "x": 1.5})["z"], [0, 1])
    np.testing.assert_allclose(
        block.marginals({**values, "p": 1.0})["z"], [0, 1], atol=1e-6
    )
    for site, value in (("p", 1.7), ("p", np.nan), ("u", 1.91), ("u", -0.1)):
        with pytest.raises(StateError, match=f"site '{site}' must be in"):
            block.marginals({**values, site: value})
    with pytest.raises(StateError, match="unknown site 'q'"):
        block.marginals({**values, "q": 1.0})
    ask = jax.jit(lambda p: block.marginals({**values, "p": p})["z"])
    np.testing.assert_allclose(ask(0.9), exact, rtol=1e-5)


@pytest.mark.nightly
def test_enumerated_sites_are_drawn() -> None:
    def model(y: Any) -> None:
        infer = {"enumerate": "parallel"}
        z = numpyro.sample("z", dist.Bernoulli(0.3), infer=infer)
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)

    block = GibbsBlock.from_model(model, ["z"], 0.5)
    np.testing.assert_allclose(
        jnp.exp(block.log_conditionals({"z": 0})["z"]), [0.7, 0.3]
    )
    assert run(block, 0.5).get_samples()["z"].shape == (4,)


@pytest.mark.nightly
def test_impossible_data_of_a_later_call_are_named() -> None:
    block = GibbsBlock.from_model(observing(dist.Exponential), ["z"], jnp.float32(1))
    assert block.init(KEYS[0], 0, None, (jnp.float32(2),), None).i == 0
    with pytest.raises(StateError, match="observed site 'y'"):
        block.init(KEYS[0], 0, None, (jnp.float32(-1),), None)

    def wrapped(y: Any) -> None:
        observing(dist.Poisson)(jnp.asarray(y))

    with pytest.raises(StateError, match=r"args\[0\]"):
        big = np.array(2**32 + 1)
        GibbsBlock.from_model(wrapped, ["z"], big).init(KEYS[0], 0, None, (big,), None)

    def factor() -> None:
        numpyro.sample("z", dist.Bernoulli(0.3))
        numpyro.factor("f", jnp.nan)

    with pytest.raises(StateError, match="observed site 'f'"):
        GibbsBlock.from_model(factor, ["z"]).init(KEYS[0], 0, None, (), None)


POSSIBLE = {
    "bound by a site": (lambda rate: dist.Uniform(0.0, rate), jnp.float32(1.9)),
    "bound by a site, a Python number": (lambda rate: dist.Uniform(0.0, rate), 1.9),
    "masked": (
        lambda rate: dist.Poisson(rate).expand([2]).mask(jnp.array([True, False])),
        np.array([1, -1]),
    ),
}


@pytest.mark.parametrize("name", often(POSSIBLE, "bound by a site", "masked"))
def test_possible_data_are_accepted(name: str) -> None:
    likelihood, y = POSSIBLE[name]
    block = GibbsBlock.from_model(observing(likelihood), ["z"], y)
    z = jax.vmap(lambda key: block.init(key, 0, None, (y,), None).z["z"])(KEYS)
    assert "bound" not in name or z.all()


@pytest.mark.nightly
def test_arguments_changed_in_place_are_noticed() -> None:
    def model(pairs: Any) -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.4).expand([5]).to_event(1))
        numpyro.factor("prior", (z[pairs[:, 0]] * z[pairs[:, 1]]).sum())

    def read(scale: Any) -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.4).expand([2]).to_event(1))
        numpyro.factor("prior", float(scale[0]) * z.sum())

    for fn, args in ((model, np.array([[0, 1], [2, 3]])), (read, np.ones(1))):
        block = GibbsBlock.from_model(fn, ["z"], args)
        block.init(KEYS[0], 0, None, (args,), None)
        args[:1] = 2
        with pytest.raises(StateError, match=r"args\[0\]"):
            block.init(KEYS[0], 0, None, (args,), None)
        with pytest.raises(StateError, match=r"args\[0\]"):
            block.log_conditionals({"z": np.zeros(block.info.latent["z"].shape, int)})


# -- refusals and draws
# ----------------------------------------------------------------------------


@pytest.mark.nightly
def test_refusals_name_a_way_that_works() -> None:
    def communities(links: Any) -> None:
        rates = numpyro.sample("rates", dist.Beta(1, 1).expand([2, 2]).to_event(2))
        z = numpyro.sample(
            "z", dist.Categorical(jnp.ones(2) / 2).expand([10]).to_event(1)
        )
        numpyro.sample(
            "links", dist.Bernoulli(rates[z[i], z[j]]).to_event(1), obs=links
        )

    def poisson(prior: Any) -> None:
        count = numpyro.sample("k", prior)
        numpyro.sample("y", dist.Normal(count, 1.0), obs=2.5)

    i, j = np.triu_indices(10, 1)
    links = np.random.default_rng(0).integers(2, size=len(i))
    with pytest.raises(IntractableError, match=r"all 10 units .* sequential=True"):
        GibbsBlock.from_model(communities, ["z"], links)
    assert (
        GibbsBlock.from_model(
            communities, ["z"], links, sequential=True
        ).conditionals.num_layers
        == 10
    )
    for prior in (dist.Poisson(3.0), dist.DiscreteUniform(0, 5000)):
        with pytest.raises(IntractableError, match="Truncate its support"):
            GibbsBlock.from_model(poisson, ["k"], prior)
    logits = dist.Poisson(3.0).log_prob(jnp.arange(20))
    block = GibbsBlock.from_model(poisson, ["k"], dist.Categorical(logits=logits))
    exact = jax.nn.log_softmax(logits - 0.5 * (2.5 - jnp.arange(20)) ** 2)
    np.testing.assert_allclose(block.log_conditionals({"k": 1})["k"], exact, atol=2e-5)


@pytest.mark.nightly
def test_tree_of_a_block_alone_has_all_groups() -> None:
    def model(y: Any) -> None:
        def step(last: Any, y: Any) -> Any:
            with numpyro.plate("people", 3):
                z = numpyro.sample("z", dist.Bernoulli(0.3 + 0.4 * last))
                numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
            return 1.0 * z, None

        last, _ = scan(step, jnp.zeros(3), y)
        numpyro.deterministic("number", last.sum())
        numpyro.factor("weight", 0.1 * last.sum())

    y = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    block = GibbsBlock.from_model(model, ["z"], y)
    tree = ebmpp.to_datatree(run(block, y, steps=5))
    z, density = tree.posterior["z"], tree.log_likelihood
    assert z.dims == ("chain", "draw", "z_dim_0", "people") and list(
        density.data_vars
    ) == ["y"]
    np.testing.assert_array_equal(tree.posterior["number"], z[:, :, -1].sum("people"))
    exact = np.broadcast_to(block.pointwise({})["y"], z.shape)  # with z summed out
    np.testing.assert_allclose(density["y"], exact, rtol=1e-5)
