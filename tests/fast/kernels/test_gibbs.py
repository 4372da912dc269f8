# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""BlockedGibbs: NumPyro's contract."""

import pickle

from gibbs_tools import GRAPHS, METHODS, PARAMS, RBM, assert_same, draws, perturbed, sampler
import networkx as nx
import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, BlockedGibbs, FactorGraph, Gaussian, Observed, Spin, layered
from ebmpp.errors import DomainError, ParameterError, StateError
from helpers import slow

# -- chain methods and keys ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["bernoulli", *(slow(n) for n in ("gaussian", "spin", "categorical"))],
)
def test_chain_methods_give_the_same_draws(name):
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
def test_clamped_chain_methods_agree(method):
    v = np.array([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    run = draws(sampler(RBM, 6, 2, METHODS[method]), jax.random.key(0), PARAMS, v=v)
    assert run["h"].shape == (2, 6, 3, 3)
    assert_same(run, draws(sampler(RBM, 6, 2, "sequential"), jax.random.key(0), PARAMS, v=v))


@pytest.fixture(scope="module")
def torus() -> FactorGraph:
    """Large enough, times twenty chains, for what pays for many numbers alone."""
    lattice = nx.grid_2d_graph(30, 30, periodic=True)
    return FactorGraph.from_networkx(lattice, family=Spin, shared=True, bias=False)


@pytest.mark.parametrize("known", [False, True])
def test_chains_of_a_lattice_are_those_of_one_at_a_time(torus: FactorGraph, known: bool) -> None:
    params = {"x:x": jnp.float32(0.5)}  # its sums are exact in any order
    held = {"x": Observed(np.ones(900), np.arange(900) < 100)} if known else {}
    methods = ("vectorized", "sequential")
    many, one = (draws(sampler(torus, 3, 20, m), jax.random.key(0), params, **held) for m in methods)
    assert_same(many, one)


def test_chains_of_a_lattice_put_nothing_in_its_place_one_by_one(torus: FactorGraph) -> None:
    """Mapped over chains, values were scattered, which took most of a sweep."""
    kernel, params = BlockedGibbs(torus), {"x:x": jnp.float32(0.5)}
    state = kernel.init(jax.random.split(jax.random.key(0), 20), 0, None, (params,), {})
    assert "scatter" not in str(jax.make_jaxpr(kernel.sample)(state, (params,), {}))


def test_keys_given_one_a_chain():
    keys = jax.random.split(jax.random.key(7), 3)
    many = draws(sampler(RBM, num_chains=3), keys, PARAMS)
    one = draws(sampler(RBM), keys[2], PARAMS)
    np.testing.assert_array_equal(many["v"][2], one["v"][0])


# -- clamping --------------------------------------------------------------------------------------


def test_batched_clamping_has_a_stream_a_row():
    v = jnp.zeros((2, 5, 4)).at[1].set(1.0)
    batched = draws(sampler(RBM, 10), jax.random.key(1), PARAMS, v=v)["h"]
    assert batched.shape == (1, 10, 2, 5, 3)
    single = draws(sampler(RBM, 10), jax.random.key(1), PARAMS, v=v[0, 0])["h"]
    np.testing.assert_array_equal(batched[:, :, 0, 0], single)
    rows = batched[0, :, 0].swapaxes(0, 1).reshape(5, -1)  # five rows clamped alike
    assert len(np.unique(rows, axis=0)) == 5


def test_clamped_axes_broadcast_and_take_any_number_type():
    graph, params = GRAPHS["spin"], perturbed(GRAPHS["spin"])
    h2 = np.array([-1, 1, 1], np.int8)
    run = draws(sampler(graph), jax.random.key(0), params, v=np.ones((6, 5), np.int8), h2=h2)
    assert set(run) == {"h1"} and run["h1"].shape == (1, 8, 6, 4)
    as_float = draws(sampler(graph), jax.random.key(0), params, v=np.ones((6, 5)), h2=list(map(float, h2)))
    assert_same(run, as_float)


def test_clamped_values_matter():
    params = {"v": jnp.zeros(1), "h": jnp.full(1, -20.0), "v:h": jnp.full((1, 1), 40.0)}
    run = draws(sampler(layered(v=Bernoulli(1), h=Bernoulli(1))), jax.random.key(0), params, v=[[0.0], [1.0]])
    assert (run["h"][..., 0, 0] == 0).all() and (run["h"][..., 1, 0] == 1).all()


@pytest.mark.parametrize(
    ("clamped", "message"),
    [
        ({"w": np.zeros(4)}, "unknown block 'w'; there is 'v', 'h'"),
        ({"v": np.zeros(5)}, r"block 'v' got shape \(5,\), expected \(..., 4\)"),
        ({"v": np.full(4, np.nan)}, "block 'v' .* got nan at index"),
        ({"v": np.full(4, 2.0)}, r"got 2.0 at index \(0,\).*values in \{0, 1\}"),
        ({"v": "ones"}, "block 'v'"),
        ({"v": np.zeros((0, 4))}, "at least one row"),
        ({"v": np.zeros(4), "h": np.zeros(3)}, "all blocks are clamped"),
    ],
)
@pytest.mark.parametrize("method", ["vectorized", "parallel"])
def test_wrong_clamped_values(clamped, message, method):
    with pytest.raises(StateError, match=message):
        draws(sampler(RBM, 2, 2, method), jax.random.key(0), PARAMS, **clamped)


# -- params ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit_model_args", [True, False])
def test_new_params_are_never_ignored(jit_model_args):
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
def test_wrong_params(args, error, message, method):
    with pytest.raises(error, match=message):
        sampler(RBM, 2, 2, method).run(jax.random.key(0), *args)


@pytest.mark.parametrize("method", ["sequential", "vectorized", "parallel"])
def test_params_that_do_not_normalise(method):
    graph = layered(x=Gaussian(2), y=Gaussian(2))
    params = graph.init(jax.random.key(0)) | {"x:y": 3 * jnp.eye(2)}
    with pytest.raises(DomainError):
        sampler(graph, 2, 2, method).run(jax.random.key(0), params)


def test_a_kernel_takes_a_graph():
    with pytest.raises(TypeError, match="graph is a FactorGraph, not {}"):
        BlockedGibbs({})


# -- initial values --------------------------------------------------------------------------------


def _first(graph, chains, init_params, **clamped):
    keys = jax.random.key(0) if chains == 1 else jax.random.split(jax.random.key(0), chains)
    state = BlockedGibbs(graph).init(keys, 0, init_params, (perturbed(graph),), clamped)
    return jax.tree.map(np.asarray, state.z)


def test_init_params_override_some_blocks():
    ones = np.ones(4, np.int8)
    z = _first(RBM, 1, {"v": ones})
    np.testing.assert_array_equal(z["v"], ones)
    assert z["v"].dtype == np.float32
    np.testing.assert_array_equal(z["h"], _first(RBM, 1, None)["h"])
    many = _first(RBM, 3, {"v": np.eye(3, 4)})
    np.testing.assert_array_equal(many["v"], np.eye(3, 4))
    rows = _first(RBM, 3, {"h": np.eye(3)}, v=np.zeros((5, 4)))["h"]  # one value for five rows
    np.testing.assert_array_equal(rows, np.broadcast_to(np.eye(3)[:, None], (3, 5, 3)))


def test_init_params_reach_the_chains():
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
def test_wrong_init_params(chains, init, clamped, message):
    with pytest.raises(StateError, match=message):
        _first(RBM, chains, init, **clamped)


# -- NumPyro's machinery ---------------------------------------------------------------------------


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("method", ["sequential", "vectorized"])
def test_resume_continues_the_chain(method, chains):
    key = jax.random.key(2)
    whole = draws(sampler(RBM, 12, chains, METHODS[method]), key, PARAMS)
    mcmc = sampler(RBM, 6, chains, METHODS[method])
    first = draws(mcmc, key, PARAMS)
    mcmc.post_warmup_state = mcmc.last_state
    second = draws(mcmc, mcmc.post_warmup_state.rng_key, PARAMS)
    joined = {b: np.concatenate([first[b], second[b]], axis=1) for b in first}
    assert_same(joined, whole)


def test_resume_with_other_clamped_blocks_is_refused():
    mcmc = sampler(RBM)
    mcmc.run(jax.random.key(0), PARAMS, v=np.zeros(4))
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.raises(StateError, match="resume with the blocks"):
        mcmc.run(jax.random.key(1), PARAMS)
    with pytest.raises(StateError, match="resume with the blocks"):
        mcmc.run(jax.random.key(1), PARAMS, v=np.zeros((2, 4)))
    with pytest.raises(StateError, match="got 3.0"):  # resuming checks values as well
        mcmc.run(jax.random.key(1), PARAMS, v=np.full(4, 3.0))


def test_warmup_then_run_and_thinning():
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


def test_one_kernel_serves_two_runs():
    kernel, other = BlockedGibbs(RBM), perturbed(RBM, seed=1)
    before = dict(vars(kernel))
    chains = dict(num_warmup=0, num_samples=6, progress_bar=False)
    many = MCMC(kernel, num_chains=3, chain_method="vectorized", **chains)
    one = MCMC(kernel, num_chains=1, **chains)
    first = draws(many, jax.random.key(0), PARAMS)
    single = draws(one, jax.random.key(0), other)
    assert_same(draws(many, jax.random.key(0), PARAMS), first)
    assert_same(single, draws(sampler(RBM, 6), jax.random.key(0), other))
    assert vars(kernel) == before == {"graph": RBM, "start": "uniform", "moves": None}


def test_pickle():
    kernel = pickle.loads(pickle.dumps(BlockedGibbs(RBM)))
    assert kernel.graph == RBM
    mcmc = sampler(RBM)
    run = draws(mcmc, jax.random.key(0), PARAMS)
    copied = pickle.loads(pickle.dumps(mcmc))
    assert_same(draws(copied, jax.random.key(0), PARAMS), run)


def test_extra_fields_and_diagnostics():
    mcmc = sampler(RBM, 5, 2)
    draws(mcmc, jax.random.key(0), PARAMS, extra_fields=("i",), v=np.zeros(4))
    np.testing.assert_array_equal(mcmc.get_extra_fields()["i"], [1, 2, 3, 4, 5] * 2)
    said = mcmc.sampler.get_diagnostics_str(mcmc.last_state)
    assert said == "5 sweeps, 1 layers, 3 free units"
    assert not mcmc.sampler.is_ensemble_kernel  # an ensemble resumes from one key, chains from their own
    assert mcmc.sampler.model is None  # ArviZ asks for one


def test_numpyro_prints_its_summary(capsys):
    mcmc = sampler(RBM, 200, 2)  # long enough for every unit to move: numpyro divides by its variance
    draws(mcmc, jax.random.key(0), PARAMS)
    mcmc.print_summary()
    assert "h[2]" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["sequential", "vectorized", "parallel"])
def test_progress_bar(method, capfd, monkeypatch):
    for variable in ("CI", "PYTEST_XDIST_WORKER"):  # there numpyro switches the bar off
        monkeypatch.delenv(variable, raising=False)
    mcmc = sampler(RBM, 6, 2, method, progress_bar=True)
    run = draws(mcmc, jax.random.key(0), PARAMS)
    jax.effects_barrier()
    if method == "sequential":
        assert "sweeps, 2 layers, 7 free units" in capfd.readouterr().err
    assert_same(run, draws(sampler(RBM, 6, 2, method), jax.random.key(0), PARAMS))


def test_x64():
    with jax.enable_x64(True):
        mcmc = sampler(RBM, 6, 2)
        run = draws(mcmc, jax.random.key(0), jax.tree.map(jnp.float64, PARAMS))
        assert run["v"].dtype == np.float64
        assert mcmc.last_state.i.dtype == np.int32
    assert_same(run, jax.tree.map(np.float64, draws(sampler(RBM, 6, 2), jax.random.key(0), PARAMS)))


def test_sampling_inside_a_jitted_loop():
    kernel = BlockedGibbs(RBM)

    @jax.jit
    def last(params, v):
        state = kernel.init(jax.random.key(0), 0, None, (params,), {"v": v})
        step = lambda s, _: (kernel.sample(s, (params,), {"v": v}), None)
        return jax.lax.scan(step, state, length=8)[0].z["h"]

    run = draws(sampler(RBM, 8), jax.random.key(0), PARAMS, v=jnp.ones(4))
    np.testing.assert_array_equal(last(PARAMS, jnp.ones(4)), run["h"][0, -1])


def test_checks_look_at_known_values_under_jit():
    x = {"v": jnp.ones(4), "h": jnp.ones(3)}  # closed over: known while params are traced
    jitted = jax.jit(lambda params: RBM.energy(params, x))(PARAMS)
    np.testing.assert_allclose(jitted, RBM.energy(PARAMS, x), rtol=1e-5)
    with pytest.raises(StateError, match="got 2.0"):
        jax.jit(lambda params: RBM.energy(params, x | {"v": np.full(4, 2.0)}))(PARAMS)
    bad = layered(x=Gaussian(2), y=Gaussian(2))
    wrong = bad.init(jax.random.key(0)) | {"x:y": 3 * jnp.eye(2)}
    with pytest.raises(DomainError):
        jax.jit(lambda a: (bad.check(wrong), a)[1])(1.0)
