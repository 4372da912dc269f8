# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""BlockedGibbs: NumPyro's contract, and the law of its draws."""

import itertools
import pickle

import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    BlockedGibbs,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    Spin,
    layered,
)
from ebmpp.errors import DomainError, ParameterError, StateError
from helpers import assert_law, assert_rows_law

RBM = layered(v=Bernoulli(4), h=Bernoulli(3))
GRAPHS = {
    "bernoulli": RBM,
    "spin": layered(v=Spin(5), h1=Spin(4), h2=Spin(3)),
    "categorical": layered(v=Categorical(4, 3), h=Categorical(3, 4)),
    "gaussian": layered(v=Gaussian(6), h=Bernoulli(4)),
}
METHODS = {"sequential": "sequential", "vectorized": "vectorized", "parallel": "parallel", "vmap": jax.vmap}


def perturbed(graph, seed=0, scale=0.7):  # noqa: ANN001, ANN201
    params = graph.init(jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 100), len(leaves))
    drawn = [a + scale * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, drawn)


PARAMS = perturbed(RBM)


def sampler(graph, num_samples=8, num_chains=1, chain_method="vectorized", num_warmup=0, **kwargs):  # noqa: ANN001, ANN003, ANN201
    kwargs.setdefault("progress_bar", False)
    return MCMC(
        BlockedGibbs(graph),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=chain_method,
        **kwargs,
    )


def draws(mcmc, key, params, extra_fields=(), init_params=None, **clamped):  # noqa: ANN001, ANN003, ANN201
    mcmc.run(key, params, extra_fields=extra_fields, init_params=init_params, **clamped)
    return jax.tree.map(np.asarray, mcmc.get_samples(group_by_chain=True))


def assert_same(first, second):  # noqa: ANN001, ANN201
    jax.tree.map(np.testing.assert_array_equal, first, second)


# -- chain methods and keys ------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_chain_methods_give_the_same_draws(name):  # noqa: ANN001, ANN201
    graph = GRAPHS[name]
    keys = jax.random.PRNGKey if name == "spin" else jax.random.key  # legacy keys too
    params = perturbed(graph)
    runs = {
        m: draws(sampler(graph, 12, 2, method, num_warmup=3), keys(5), params)
        for m, method in METHODS.items()
    }
    first = runs.pop("sequential")
    assert set(first) == set(graph.families)
    for run in runs.values():
        for b, family in graph.families.items():
            if isinstance(family, Gaussian):  # matrix products of 1 and of 2 rows round differently
                np.testing.assert_allclose(run[b], first[b], rtol=0, atol=5e-6)
            else:
                np.testing.assert_array_equal(run[b], first[b])
    chains = first["v"].reshape(2, -1)
    assert len(np.unique(chains, axis=0)) == 2  # one stream a chain


@pytest.mark.parametrize("method", ["vectorized", "parallel"])
def test_clamped_chain_methods_agree(method):  # noqa: ANN001, ANN201
    v = np.array([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    run = draws(sampler(RBM, 6, 2, METHODS[method]), jax.random.key(0), PARAMS, v=v)
    assert run["h"].shape == (2, 6, 3, 3)
    assert_same(run, draws(sampler(RBM, 6, 2, "sequential"), jax.random.key(0), PARAMS, v=v))


def test_keys_given_one_a_chain():  # noqa: ANN201
    keys = jax.random.split(jax.random.key(7), 3)
    many = draws(sampler(RBM, num_chains=3), keys, PARAMS)
    one = draws(sampler(RBM), keys[2], PARAMS)
    np.testing.assert_array_equal(many["v"][2], one["v"][0])


# -- clamping --------------------------------------------------------------------------------------


def test_batched_clamping_has_a_stream_a_row():  # noqa: ANN201
    v = jnp.zeros((2, 5, 4)).at[1].set(1.0)
    batched = draws(sampler(RBM, 10), jax.random.key(1), PARAMS, v=v)["h"]
    assert batched.shape == (1, 10, 2, 5, 3)
    single = draws(sampler(RBM, 10), jax.random.key(1), PARAMS, v=v[0, 0])["h"]
    np.testing.assert_array_equal(batched[:, :, 0, 0], single)
    rows = batched[0, :, 0].swapaxes(0, 1).reshape(5, -1)  # five rows clamped alike
    assert len(np.unique(rows, axis=0)) == 5


def test_clamped_axes_broadcast_and_take_any_number_type():  # noqa: ANN201
    graph, params = GRAPHS["spin"], perturbed(GRAPHS["spin"])
    h2 = np.array([-1, 1, 1], np.int8)
    run = draws(sampler(graph), jax.random.key(0), params, v=np.ones((6, 5), np.int8), h2=h2)
    assert set(run) == {"h1"} and run["h1"].shape == (1, 8, 6, 4)
    as_float = draws(sampler(graph), jax.random.key(0), params, v=np.ones((6, 5)), h2=list(map(float, h2)))
    assert_same(run, as_float)


def test_clamped_values_matter():  # noqa: ANN201
    params = {"v": jnp.zeros(1), "h": jnp.full(1, -20.0), "v:h": jnp.full((1, 1), 40.0)}
    run = draws(sampler(layered(v=Bernoulli(1), h=Bernoulli(1))), jax.random.key(0), params, v=[[0.0], [1.0]])
    assert (run["h"][..., 0, 0] == 0).all() and (run["h"][..., 1, 0] == 1).all()


@pytest.mark.parametrize(
    ("clamped", "message"),
    [
        ({"w": np.zeros(4)}, "unknown block 'w'; this graph has 'v', 'h'"),
        ({"v": np.zeros(5)}, r"block 'v' got shape \(5,\), expected \(..., 4\)"),
        ({"v": np.full(4, np.nan)}, "block 'v' .* got nan at index"),
        ({"v": np.full(4, 2.0)}, r"got 2.0 at index \(0,\).*values in \{0, 1\}"),
        ({"v": "ones"}, "block 'v'"),
        ({"v": np.zeros((0, 4))}, "at least one row"),
        ({"v": np.zeros(4), "h": np.zeros(3)}, "all blocks are clamped"),
    ],
)
@pytest.mark.parametrize("method", ["vectorized", "parallel"])
def test_wrong_clamped_values(clamped, message, method):  # noqa: ANN001, ANN201
    with pytest.raises(StateError, match=message):
        draws(sampler(RBM, 2, 2, method), jax.random.key(0), PARAMS, **clamped)


# -- params ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit_model_args", [True, False])
def test_new_params_are_never_ignored(jit_model_args):  # noqa: ANN001, ANN201
    mcmc = sampler(RBM, 20, 2, jit_model_args=jit_model_args)
    key = jax.random.key(3)
    on = PARAMS | {"v": jnp.full(4, 30.0)}
    off = PARAMS | {"v": jnp.full(4, -30.0)}
    assert (draws(mcmc, key, on)["v"] == 1).all()
    assert (draws(mcmc, key, off)["v"] == 0).all()
    assert (draws(mcmc, key, off, h=np.ones(3))["v"] == 0).all()
    assert (draws(mcmc, key, on, h=np.ones(3))["v"] == 1).all()


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((), ParameterError, "expected 1, the params: mcmc.run"),
        ((PARAMS, np.zeros(4)), ParameterError, "got 2 positional"),
        (({"v": np.zeros(4)},), ParameterError, "lacks factor 'h'"),
        ((PARAMS | {"v": np.zeros(3)},), ParameterError, r"factor 'v'.*\(3,\), expected \(4,\)"),
        ((PARAMS | {"v": np.full(4, np.nan)},), ParameterError, "4 of 4 params are not finite"),
    ],
)
@pytest.mark.parametrize("method", ["vectorized", "parallel"])
def test_wrong_params(args, error, message, method):  # noqa: ANN001, ANN201
    with pytest.raises(error, match=message):
        sampler(RBM, 2, 2, method).run(jax.random.key(0), *args)


@pytest.mark.parametrize("method", ["sequential", "vectorized", "parallel"])
def test_params_that_do_not_normalise(method):  # noqa: ANN001, ANN201
    graph = layered(x=Gaussian(2), y=Gaussian(2))
    params = graph.init(jax.random.key(0)) | {"x:y": 3 * jnp.eye(2)}
    with pytest.raises(DomainError):
        sampler(graph, 2, 2, method).run(jax.random.key(0), params)


def test_a_kernel_takes_a_graph():  # noqa: ANN201
    with pytest.raises(TypeError, match="FactorGraph, not dict"):
        BlockedGibbs({})


# -- initial values --------------------------------------------------------------------------------


def _first(graph, chains, init_params, **clamped):  # noqa: ANN001, ANN003, ANN202
    keys = jax.random.key(0) if chains == 1 else jax.random.split(jax.random.key(0), chains)
    state = BlockedGibbs(graph).init(keys, 0, init_params, (perturbed(graph),), clamped)
    return jax.tree.map(np.asarray, state.z)


def test_init_params_override_some_blocks():  # noqa: ANN201
    ones = np.ones(4, np.int8)
    z = _first(RBM, 1, {"v": ones})
    np.testing.assert_array_equal(z["v"], ones)
    assert z["v"].dtype == np.float32
    np.testing.assert_array_equal(z["h"], _first(RBM, 1, None)["h"])
    many = _first(RBM, 3, {"v": np.eye(3, 4)})
    np.testing.assert_array_equal(many["v"], np.eye(3, 4))
    rows = _first(RBM, 3, {"h": np.eye(3)}, v=np.zeros((5, 4)))["h"]  # one value for five rows
    np.testing.assert_array_equal(rows, np.broadcast_to(np.eye(3)[:, None], (3, 5, 3)))


def test_init_params_reach_the_chains():  # noqa: ANN201
    params = {"v": jnp.zeros(1), "h": jnp.zeros(1), "v:h": jnp.zeros((1, 1))}
    pair = layered(v=Bernoulli(1), h=Bernoulli(1))
    frozen = params | {"v:h": jnp.full((1, 1), 60.0), "v": jnp.full(1, -30.0), "h": jnp.full(1, -30.0)}
    mcmc = sampler(pair, 5, 2, "sequential")
    init = {"v": np.zeros((2, 1)), "h": np.array([[0.0], [1.0]])}  # v is drawn first, given h
    run = draws(mcmc, jax.random.key(0), frozen, init_params=init)
    np.testing.assert_array_equal(run["v"][:, :, 0], [[0] * 5, [1] * 5])


@pytest.mark.parametrize(
    ("chains", "init", "clamped", "message"),
    [
        (1, {"w": np.zeros(4)}, {}, "unknown block 'w'"),
        (1, {"v": np.zeros((1, 4))}, {}, r"got shape \(1, 4\), expected \(4,\) \(a single chain"),
        (2, {"v": np.zeros(4)}, {}, r"got shape \(4,\), expected \(2, 4\) \(2 chains"),
        (1, {"v": np.full(4, 0.5)}, {}, "got 0.5 at index"),
        (1, {"v": np.zeros(4)}, {"v": np.zeros(4)}, "clamped and in init_params"),
        (1, {"h": np.zeros((2, 3))}, {"v": np.zeros((5, 4))}, r"got shape \(2, 3\), expected \(5, 3\)"),
        (1, np.zeros(4), {}, "init_params is a dict of free blocks"),
    ],
)
def test_wrong_init_params(chains, init, clamped, message):  # noqa: ANN001, ANN201
    with pytest.raises(StateError, match=message):
        _first(RBM, chains, init, **clamped)


# -- NumPyro's machinery ---------------------------------------------------------------------------


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("method", ["sequential", "vectorized"])
def test_resume_continues_the_chain(method, chains):  # noqa: ANN001, ANN201
    key = jax.random.key(2)
    whole = draws(sampler(RBM, 12, chains, METHODS[method]), key, PARAMS)
    mcmc = sampler(RBM, 6, chains, METHODS[method])
    first = draws(mcmc, key, PARAMS)
    mcmc.post_warmup_state = mcmc.last_state
    second = draws(mcmc, mcmc.post_warmup_state.rng_key, PARAMS)
    joined = {b: np.concatenate([first[b], second[b]], axis=1) for b in first}
    assert_same(joined, whole)


def test_resume_with_other_clamped_blocks_is_refused():  # noqa: ANN201
    mcmc = sampler(RBM)
    mcmc.run(jax.random.key(0), PARAMS, v=np.zeros(4))
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.raises(StateError, match="resume with the blocks"):
        mcmc.run(jax.random.key(1), PARAMS)
    with pytest.raises(StateError, match="resume with the blocks"):
        mcmc.run(jax.random.key(1), PARAMS, v=np.zeros((2, 4)))
    with pytest.raises(StateError, match="got 3.0"):  # resuming checks values as well
        mcmc.run(jax.random.key(1), PARAMS, v=np.full(4, 3.0))


def test_warmup_then_run_and_thinning():  # noqa: ANN201
    whole = draws(sampler(RBM, 12), jax.random.key(4), PARAMS)
    thinned = draws(sampler(RBM, 12, thinning=3), jax.random.key(4), PARAMS)
    np.testing.assert_array_equal(thinned["v"], whole["v"][:, 2::3])
    warmed = sampler(RBM, 7, num_warmup=5)
    warmed.warmup(jax.random.key(4), PARAMS)
    run = draws(warmed, warmed.post_warmup_state.rng_key, PARAMS)
    # warm-up without collection still runs its sweeps
    np.testing.assert_array_equal(run["v"], whole["v"][:, 5:])
    np.testing.assert_array_equal(
        draws(sampler(RBM, 7, num_warmup=5), jax.random.key(4), PARAMS)["v"], run["v"]
    )


def test_one_kernel_serves_two_runs():  # noqa: ANN201
    kernel, other = BlockedGibbs(RBM), perturbed(RBM, seed=1)
    before = dict(vars(kernel))
    chains = dict(num_warmup=0, num_samples=6, progress_bar=False)
    many = MCMC(kernel, num_chains=3, chain_method="vectorized", **chains)
    one = MCMC(kernel, num_chains=1, **chains)
    first = draws(many, jax.random.key(0), PARAMS)
    single = draws(one, jax.random.key(0), other)
    assert_same(draws(many, jax.random.key(0), PARAMS), first)
    assert_same(single, draws(sampler(RBM, 6), jax.random.key(0), other))
    assert vars(kernel) == before == {"graph": RBM}


def test_pickle():  # noqa: ANN201
    kernel = pickle.loads(pickle.dumps(BlockedGibbs(RBM)))
    assert kernel.graph == RBM
    mcmc = sampler(RBM)
    run = draws(mcmc, jax.random.key(0), PARAMS)
    copied = pickle.loads(pickle.dumps(mcmc))
    assert_same(draws(copied, jax.random.key(0), PARAMS), run)


def test_extra_fields_and_diagnostics():  # noqa: ANN201
    mcmc = sampler(RBM, 5, 2)
    draws(mcmc, jax.random.key(0), PARAMS, extra_fields=("i",), v=np.zeros(4))
    np.testing.assert_array_equal(mcmc.get_extra_fields()["i"], [1, 2, 3, 4, 5] * 2)
    said = mcmc.sampler.get_diagnostics_str(mcmc.last_state)
    assert said == "5 sweeps, 1 layers, 3 free units"
    assert not mcmc.sampler.is_ensemble_kernel  # an ensemble resumes from one key, chains from their own
    assert not hasattr(mcmc.sampler, "model")  # numpyro's Gibbs refuses a kernel that has one
    mcmc.print_summary()


@pytest.mark.parametrize("method", ["sequential", "vectorized", "parallel"])
def test_progress_bar(method, capfd, monkeypatch):  # noqa: ANN001, ANN201
    for variable in ("CI", "PYTEST_XDIST_WORKER"):  # there numpyro switches the bar off
        monkeypatch.delenv(variable, raising=False)
    mcmc = sampler(RBM, 6, 2, method, progress_bar=True)
    run = draws(mcmc, jax.random.key(0), PARAMS)
    jax.effects_barrier()
    if method == "sequential":
        assert "sweeps, 2 layers, 7 free units" in capfd.readouterr().err
    assert_same(run, draws(sampler(RBM, 6, 2, method), jax.random.key(0), PARAMS))


def test_x64():  # noqa: ANN201
    with jax.enable_x64(True):
        mcmc = sampler(RBM, 6, 2)
        run = draws(mcmc, jax.random.key(0), jax.tree.map(jnp.float64, PARAMS))
        assert run["v"].dtype == np.float64
        assert mcmc.last_state.i.dtype == np.int32
    assert_same(run, jax.tree.map(np.float64, draws(sampler(RBM, 6, 2), jax.random.key(0), PARAMS)))


def test_sampling_inside_a_jitted_loop():  # noqa: ANN201
    kernel = BlockedGibbs(RBM)

    @jax.jit
    def last(params, v):  # noqa: ANN001, ANN202
        state = kernel.init(jax.random.key(0), 0, None, (params,), {"v": v})
        step = lambda s, _: (kernel.sample(s, (params,), {"v": v}), None)  # noqa: E731
        return jax.lax.scan(step, state, length=8)[0].z["h"]

    run = draws(sampler(RBM, 8), jax.random.key(0), PARAMS, v=jnp.ones(4))
    np.testing.assert_array_equal(last(PARAMS, jnp.ones(4)), run["h"][0, -1])


def test_checks_look_at_known_values_under_jit():  # noqa: ANN201
    x = {"v": jnp.ones(4), "h": jnp.ones(3)}  # closed over: known while params are traced
    jitted = jax.jit(lambda params: RBM.energy(params, x))(PARAMS)
    np.testing.assert_allclose(jitted, RBM.energy(PARAMS, x), rtol=1e-5)
    with pytest.raises(StateError, match="got 2.0"):
        jax.jit(lambda params: RBM.energy(params, x | {"v": np.full(4, 2.0)}))(PARAMS)
    bad = layered(x=Gaussian(2), y=Gaussian(2))
    wrong = bad.init(jax.random.key(0)) | {"x:y": 3 * jnp.eye(2)}
    with pytest.raises(DomainError):
        jax.jit(lambda a: (bad.check(wrong), a)[1])(1.0)


# -- the law ---------------------------------------------------------------------------------------


def _gate(w, x, y, h):  # noqa: ANN001, ANN202
    return -jnp.einsum("ijk,i,j,k", w, x, y, h)


THREE_WAY = FactorGraph(
    {"x": Bernoulli(2), "y": Bernoulli(2)},
    {"h": Spin(2)},
    [Bias("x"), Bias("y"), Bias("h"), Factor("x", "y", "h", energy=_gate, init=jnp.ones((2, 2, 2)))],
)
MIXED = FactorGraph(
    {"v": Bernoulli(3)},
    {"h": Categorical(2, 3)},
    [Bias("v"), Bias("h"), Bilinear("v", "h")],
)
LAWS = {
    "rbm": (RBM, {}),
    "rbm, v clamped": (RBM, {"v": [1.0, 0.0, 1.0, 1.0]}),
    "deep": (layered(v=Bernoulli(3), h1=Bernoulli(3), h2=Bernoulli(2)), {}),
    "deep, v clamped": (layered(v=Bernoulli(3), h1=Bernoulli(3), h2=Bernoulli(2)), {"v": [1.0, 1.0, 0.0]}),
    "three-way": (THREE_WAY, {}),
    "three-way, x clamped": (THREE_WAY, {"x": [1.0, 1.0]}),
    "categorical": (MIXED, {}),
}


def _enumerate(graph, clamped):  # noqa: ANN001, ANN202
    """Every state of a small discrete graph that agrees with ``clamped``."""
    units = []
    for b, family in graph.families.items():
        if b in clamped:
            units += [[value] for value in clamped[b]]
        else:
            units += [np.asarray(family.states()).tolist()] * family.size
    table = np.array(list(itertools.product(*units)))
    stops = np.cumsum([f.size for f in graph.families.values()])[:-1]
    parts = np.split(table, stops, axis=1)
    return {b: p.astype(f.dtype) for (b, f), p in zip(graph.families.items(), parts, strict=True)}


def _last_draws(graph, params, clamped, chains=4000, sweeps=30):  # noqa: ANN001, ANN202
    """The last draws of many chains: independent of one another, so standard errors are simple."""
    mcmc = sampler(graph, 1, chains, num_warmup=sweeps)
    return {b: x[:, -1] for b, x in draws(mcmc, jax.random.key(11), params, **clamped).items()}


def _assert_frequencies(observed, probabilities):  # noqa: ANN001, ANN202
    """Frequencies of the cells that are likely enough for a normal law, and of the others together."""
    n = len(observed)
    frequencies = np.bincount(observed, minlength=len(probabilities)) / n
    likely = n * probabilities > 10
    p = np.append(probabilities[likely], probabilities[~likely].sum())
    assert_law(np.append(frequencies[likely], frequencies[~likely].sum()), p, np.sqrt(p * (1 - p) / n))


@pytest.mark.parametrize("case", LAWS)
def test_law_against_enumeration(case):  # noqa: ANN001, ANN201
    graph, clamped = LAWS[case]
    params = perturbed(graph, scale=0.5)
    clamped = {b: np.array(v) for b, v in clamped.items()}
    table = _enumerate(graph, clamped)
    logits = np.asarray(graph.log_density(params, table), np.float64)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    last = _last_draws(graph, params, clamped)
    free = list(last)
    states = np.concatenate([table[b] for b in free], axis=1)
    drawn = np.concatenate([last[b] for b in free], axis=1)
    lookup = {tuple(s): i for i, s in enumerate(states.tolist())}
    assert len(lookup) == len(states)
    _assert_frequencies(np.array([lookup[tuple(d)] for d in drawn.tolist()]), probabilities)


@pytest.mark.parametrize("variance", ["unit", "learned"])
def test_law_of_a_gaussian_bernoulli_machine(variance):  # noqa: ANN001, ANN201
    graph = layered(v=Gaussian(3, variance=variance), h=Bernoulli(2))
    params = graph.init(jax.random.key(0))
    if variance == "learned":  # means 0.5, variances 2: eta = (0.25, -0.25)
        params["v"] = jnp.stack([jnp.full(3, 0.25), jnp.full(3, -0.25)], axis=-1)
    params |= {"h": jnp.array([0.3, -0.4]), "v:h": jnp.array([[0.8, -0.5], [0.2, 0.6], [-0.7, 0.1]])}
    hidden = np.array(list(itertools.product([0.0, 1.0], repeat=2)))
    logits = np.asarray(-graph.free_energy(params, {"h": jnp.array(hidden)}), np.float64)
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    last = _last_draws(graph, params, {})
    _assert_frequencies((last["h"] @ [2, 1]).astype(int), weights)
    # v given h is Gaussian, so v's law is a mixture with these two moments
    law = graph.conditional(params, {"h": jnp.array(hidden)}, "v")
    mean, variance_of = np.asarray(law.mean), np.asarray(law.variance)
    first = weights @ mean
    second = weights @ (variance_of + mean**2)
    moments = np.stack([last["v"], last["v"] ** 2], axis=1)
    assert_rows_law(moments, np.stack([first, second]))


def test_posteriors_of_many_rows():  # noqa: ANN201
    """One run, many rows of ``v``: each row's ``h`` follows its own conditional, which is exact."""
    v = np.array(list(itertools.product([0.0, 1.0], repeat=4)))
    exact = np.asarray(RBM.mean(PARAMS, {"v": jnp.array(v)}, "h"))
    drawn = draws(sampler(RBM, 1, 3000), jax.random.key(5), PARAMS, v=v)["h"][:, 0]
    assert_law(drawn.mean(0), exact, np.sqrt(exact * (1 - exact) / len(drawn)))
