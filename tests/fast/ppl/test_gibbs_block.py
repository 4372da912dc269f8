# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of NumPyro's Gibbs: the posterior, the contract, and what is refused."""

import pickle
from typing import Any

from block_tools import (
    NOISY,
    binary_block,
    exact_posterior,
    lattice,
    model,
    spin_block,
    spin_model,
)
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import HMC, MCMC, Gibbs, HMCGibbs
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, FactorGraph, GibbsBlock, Observed, layered
from ebmpp.errors import IntractableError, ParameterError, StateError
from ebmpp.ppl import gibbs_fn
from ebmpp.ppl.sites import Call
from helpers import assert_rows_law


def run(
    kernel: Any, key: int = 0, chains: int = 200, samples: int = 30, method: Any = jax.vmap, **fields: Any
) -> MCMC:
    mcmc = MCMC(
        kernel,
        num_warmup=40,
        num_samples=samples,
        num_chains=chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(key), jnp.asarray(NOISY), **fields)
    return mcmc


def noise_kernel(of: Any = model) -> HMC:
    """Short trajectories of fixed length: they compile fast, and warm-up is short too."""
    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False, "trajectory_length": None}
    return HMC(of, step_size=0.25, num_steps=4, **fixed)


def composite(block: GibbsBlock | None = None) -> Gibbs:
    return Gibbs([(block or binary_block(), ["x"]), (noise_kernel(), ["precision"])])


def assert_posterior(mcmc: MCMC) -> None:
    """Means of whole chains are independent, whatever the autocorrelation within."""
    draws = mcmc.get_samples(group_by_chain=True)
    probability, precision = exact_posterior()
    assert_rows_law(np.asarray(draws["x"] > 0, float).mean(1), probability, comparisons=7)
    assert_rows_law(np.asarray(draws["precision"]).mean(1), precision, comparisons=7)


@pytest.mark.slow
def test_the_posterior_in_gibbs_with_hmc_on_the_noise() -> None:
    mcmc = run(composite())
    assert_posterior(mcmc)
    assert mcmc.get_samples()["x"].dtype == jnp.int32  # as the model's own site


@pytest.mark.slow
def test_sites_in_minus_and_plus_one() -> None:
    block = spin_block()
    block.verify(spin_model, NOISY)
    mcmc = run(Gibbs([(block, ["x"]), (noise_kernel(spin_model), None)]))
    assert_posterior(mcmc)
    assert set(np.unique(mcmc.get_samples()["x"])) == {-1.0, 1.0}


@pytest.mark.slow
def test_the_posterior_by_hmcgibbs() -> None:
    def halves(sites: dict) -> dict:  # HMCGibbs passes no arguments on
        graph = binary_block().within
        return {name: f(sites, NOISY) if callable(f) else f for name, f in graph.params.items()}

    graph, layout, _ = lattice(Bernoulli)
    update = gibbs_fn(graph, {"x": layout}, halves)
    assert_posterior(run(HMCGibbs(noise_kernel(), update, ["x"])))


@pytest.mark.slow
# NumPyro's own, of any extra field under jax.vmap
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_a_likelihood_that_is_no_factor_goes_by_metropolis() -> None:
    graph, layout, weights = lattice(Bernoulli)
    prior = binary_block().within.params["even:odd"]
    biases = {
        name: lambda sites, y, full=full, name=name: full({"precision": 0.0}, y)
        for name, full in binary_block().within.params.items()
        if name != "even:odd"
    }

    def likelihood(x: dict, sites: dict, y: jax.Array) -> jax.Array:
        return dist.Normal(2.0 * x["x"] - 1, sites["precision"] ** -0.5).log_prob(y).sum()

    block = GibbsBlock(
        graph, {"x": layout}, biases | {"even:odd": prior}, log_weight=likelihood, fraction=0.5
    )
    block.verify(model, NOISY)
    mcmc = run(composite(block), extra_fields=("block_states.0.accepted",))
    assert_posterior(mcmc)
    accepted = mcmc.get_extra_fields()["block_states.0.accepted"]
    assert block.num_sweeps == 2  # as many as propose every unit once
    assert 0 < np.mean(accepted) < 2 * 2 * 70
    assert "acceptance" in block.get_diagnostics_str(mcmc.last_state.block_states[0])


def test_few_units_are_proposed_unless_told_otherwise() -> None:
    """Of the layer that has the most, where there is a weight; a tenth of it is swept ten times."""
    graph = FactorGraph(
        {"a": Bernoulli(40), "b": Bernoulli(8)}, factors=[Bias("a"), Bias("b"), Bilinear("a", "b")]
    )
    made = lambda **options: GibbsBlock(graph, ["a", "b"], **options)
    weigh = lambda x, sites: 0.0
    assert (made().fraction, made().num_sweeps) == (1, 1)
    assert (made(log_weight=weigh).fraction, made(log_weight=weigh).num_sweeps) == (0.05, 20)
    assert made(log_weight=weigh, fraction=0.1).num_sweeps == 10
    assert made(log_weight=weigh, num_sweeps=1).fraction == 0.05
    chessboard, layout, _ = lattice()
    assert GibbsBlock(chessboard, {"x": layout}, log_weight=weigh).fraction == 2 / 3


def rows_model(y: jax.Array) -> None:
    """Three rows of two pixels, one noise."""
    precision = numpyro.sample("precision", dist.Gamma(4.0, 2.0))
    with numpyro.plate("rows", len(y)):
        x = numpyro.sample("x", dist.Bernoulli(0.5).expand((2,)).to_event(1))
        numpyro.sample("y", dist.Normal(2.0 * x - 1, precision**-0.5).to_event(1), obs=y)


def test_rows_of_a_plate_have_their_own_params() -> None:
    y = jnp.array([[0.3, -0.2], [1.0, 0.1], [-0.5, 0.0]])
    graph = FactorGraph({"x": Bernoulli(2)}, factors=[Bias("x")])
    block = GibbsBlock(graph, ["x"], {"x": lambda sites, y: 2 * y * sites["precision"]})
    block.verify(rows_model, y)
    made = block.within.bind({"x": jnp.zeros((3, 2))}, Call({"precision": 1.5}, (y,), {}))
    draw = lambda key: block.advance(made, {"x": jnp.zeros((3, 2))}, made.keys(key, 1))[0]["x"]
    draws = jax.vmap(draw)(jax.random.split(jax.random.key(0), 4000))
    assert_rows_law(draws, jax.nn.sigmoid(3.0 * y))


RBM = layered(x=Bernoulli(3), h=Bernoulli(2))
RBM_PARAMS = RBM.init(jax.random.key(0)) | {"x:h": 1.5 * jnp.array([[1.0, -1], [0.5, 1], [-1, 0.2]])}


def rbm_model(y: jax.Array) -> None:
    x = numpyro.sample("x", dist.Bernoulli(0.5).expand((3,)).to_event(1))
    numpyro.factor("prior", -RBM.free_energy(RBM_PARAMS, {"x": 1.0 * x}))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(1.0 * x, scale).to_event(1), obs=y)


def rbm_block(**options: Any) -> GibbsBlock:
    field = lambda sites, y: RBM_PARAMS["x"] + (y - 0.5) / sites["scale"] ** 2
    return GibbsBlock(RBM, ["x"], RBM_PARAMS | {"x": field}, **options)


@pytest.mark.slow
@pytest.mark.parametrize("init", ["uniform", "local_mode"])
def test_latent_blocks_are_sampled_along(init: str) -> None:
    y, block = jnp.array([0.9, 0.2, 0.4]), rbm_block(init=init)
    block.verify(rbm_model, y)
    conditions = {"_gibbs_sites": {"scale": jnp.float32(0.8)}}

    def last(key: jax.Array) -> jax.Array:
        state = block.init(key, 0, {"x": jnp.zeros(3)}, (y,), conditions)
        return jax.lax.fori_loop(0, 30, lambda _, s: block.sample(s, (y,), conditions), state).z["x"]

    draws = jax.jit(jax.vmap(last))(jax.random.split(jax.random.key(1), 4000))
    states = np.array([[i & 1, i >> 1 & 1, i >> 2] for i in range(8)], float)
    log = -np.asarray(RBM.free_energy(RBM_PARAMS, {"x": states}))
    log += -0.5 * ((np.asarray(y) - states) ** 2).sum(1) / 0.8**2
    assert_rows_law(draws, np.exp(log) @ states / np.exp(log).sum())


@pytest.mark.slow
def test_chain_methods_give_the_same_chains() -> None:
    made = [
        np.asarray(run(composite(), 3, 2, 8, method).get_samples(group_by_chain=True)["x"])
        for method in ("parallel", jax.vmap)
    ]
    assert (made[0] == made[1]).all()


@pytest.mark.slow
def test_it_pickles_resumes_and_takes_legacy_keys() -> None:
    kernel = pickle.loads(pickle.dumps(composite()))
    long, short = run(kernel, 4, 1, 12), run(kernel, 4, 1, 6)
    first = np.asarray(short.get_samples()["x"])
    short.post_warmup_state = short.last_state
    short.run(short.post_warmup_state.rng_key, jnp.asarray(NOISY))
    assert (np.concatenate([first, short.get_samples()["x"]]) == np.asarray(long.get_samples()["x"])).all()
    legacy = MCMC(composite(), num_warmup=40, num_samples=12, progress_bar=False)
    legacy.run(jax.random.PRNGKey(4), jnp.asarray(NOISY))
    assert (np.asarray(legacy.get_samples()["x"]) == np.asarray(long.get_samples()["x"])).all()


@pytest.mark.slow
def test_x64() -> None:
    with jax.enable_x64(True):
        mcmc = run(composite(), 5, 1, 4)
        assert mcmc.get_samples()["precision"].dtype == jnp.float64
        assert set(np.unique(mcmc.get_samples()["x"])) <= {0, 1}


def test_a_block_that_is_not_the_posterior_is_told() -> None:
    binary_block().verify(model, NOISY)
    graph, layout, weights = lattice(Bernoulli)
    halved = binary_block().within.params | {"even:odd": 2 * weights}
    with pytest.raises(StateError, match="log density changes by"):
        GibbsBlock(graph, {"x": layout}, halved).verify(model, NOISY)
    with pytest.raises(StateError, match="not latent sample sites"):
        GibbsBlock(graph, {"z": layout}, halved).verify(model, NOISY)


def deep() -> FactorGraph:
    return layered(x=Bernoulli(3), h1=Bernoulli(2), h2=Bernoulli(2))


def test_latents_that_interact_need_params_that_stand_still() -> None:
    params = deep().init(jax.random.key(0))
    scaled = GibbsBlock(deep(), ["x"], params | {"x:h1": lambda sites: sites["beta"] * params["x:h1"]})
    with pytest.raises(IntractableError, match="'x:h1' depend on sibling sites"):
        scaled.within.bind({"x": jnp.zeros(3)}, Call({"beta": 1.0}, (), {}))
    GibbsBlock(deep(), ["x"], params).within.bind({"x": jnp.zeros(3)}, Call({"beta": 1.0}, (), {}))
    with pytest.raises(IntractableError, match="drawn afresh"):
        gibbs_fn(deep(), ["x"], params)


def start(block: GibbsBlock, value: Any, *args: Any, **siblings: Any) -> Any:
    return block.init(jax.random.key(0), 0, value, args, {"_gibbs_sites": siblings})


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: GibbsBlock("x"), TypeError, "graph is a FactorGraph, not 'x'"),
        (lambda: GibbsBlock(RBM, ["z"]), StateError, "unknown block 'z'"),
        (lambda: GibbsBlock(RBM, {"a": "x", "b": "x"}), StateError, "one site, given or latent"),
        (lambda: GibbsBlock(RBM, params={"x": 0}), ParameterError, "lacks factor 'h'"),
        (lambda: GibbsBlock(RBM, init="mode"), ValueError, "init is one of .*, not 'mode'"),
        (lambda: GibbsBlock(RBM, fraction=0.0), ValueError, "fraction"),
        (lambda: start(rbm_block(), None), StateError, "initial values of its sites"),
        (lambda: start(rbm_block(), {"x": jnp.zeros(4)}, NOISY), StateError, "site 'x' has shape"),
        (
            lambda: start(rbm_block(), {"x": -jnp.ones(3)}, NOISY[0], scale=1.0),
            StateError,
            "values in {0, 1}",
        ),
        (lambda: start(rbm_block(), {"x": jnp.zeros(3)}, NOISY[0]), StateError, "asked for site 'scale'"),
        (
            lambda: start(rbm_block(), {"x": jnp.zeros(3)}, jnp.zeros((5, 3)), scale=1.0),
            ParameterError,
            "'x': params have shape",
        ),
        (
            lambda: start(rbm_block(), {"x": jnp.zeros(3)}, jnp.full(3, jnp.nan), scale=1.0),
            ParameterError,
            "not finite",
        ),
        (lambda: start(GibbsBlock(RBM), {"x": jnp.zeros(3)}), ParameterError, "no params"),
        (lambda: run(GibbsBlock(RBM), method="vectorized"), StateError, "one chain a key"),
        (
            lambda: start(
                GibbsBlock(RBM, ["h"], RBM_PARAMS, given={"x": Observed(jnp.ones(3), jnp.arange(3) < 1)}),
                {"h": jnp.zeros(2)},
            ),
            StateError,
            "given block 'x' is an Observed, .* held as a whole",
        ),
    ],
)
def test_mistakes_are_told(make: Any, error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        make()


def test_given_blocks_are_held() -> None:
    block = GibbsBlock(RBM, ["h"], RBM_PARAMS, given={"x": lambda sites: sites["pixels"]})
    pixels = jnp.array([1.0, 0.0, 1.0])
    state = start(block, {"h": jnp.zeros(2)}, pixels=pixels)
    step = jax.jit(
        lambda key: block.sample(state._replace(rng_key=key), (), {"_gibbs_sites": {"pixels": pixels}}).z["h"]
    )
    draws = jax.vmap(step)(jax.random.split(jax.random.key(2), 4000))
    assert_rows_law(draws, RBM.mean(RBM_PARAMS, {"x": pixels}, "h"))
