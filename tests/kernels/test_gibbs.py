# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""BlockedGibbs inside NumPyro's MCMC: chain methods, clamping, params, starts, resuming.

Tests kernels/base.py, kernels/gibbs.py.
"""

from functools import cache
import itertools
import pickle

from mcmc_tools import (
    assert_same,
    fields,
    make_mcmc,
    run_mcmc,
    samples,
    scan_kernel,
    strong_params,
)
from metropolis_tools import Law
import networkx as nx
import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp

from ebmpp import BlockedGibbs, FactorGraph, Gaussian, Observed, Spin, layered
from ebmpp.errors import DomainError, ParameterError, StateError
from helpers import assert_law, assert_rows_law, nightly, often

ROWS = {"v": np.array([[0.0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])}


def draw(method="vectorized", num_samples=8, num_chains=2, params=None, **options):
    options |= {
        "chain_method": method,
        "num_samples": num_samples,
        "num_chains": num_chains,
    }
    return samples(
        run_mcmc(BlockedGibbs(zoo.graph("rbm")), params or strong_params(), **options)
    )


@cache
def usual_draws():
    return draw()


@pytest.mark.parametrize(
    ("method", "clamped"),
    [
        ("sequential", {}),
        nightly("parallel", {}),
        nightly(jax.vmap, {}),
        nightly("parallel", ROWS),
    ],
)
def test_chain_methods_give_the_same_draws(method, clamped):
    expected = draw(clamped=clamped) if clamped else usual_draws()
    assert_same(draw(method, clamped=clamped), expected)
    assert set(expected) == {"v", "h"} - set(clamped)
    assert (expected["h"][0] != expected["h"][1]).any()


def test_one_key_per_chain():
    keys = jax.random.split(jax.random.key(7), 2)
    expected = draw(key=keys[1], num_chains=1)
    np.testing.assert_array_equal(draw(key=keys)["v"][1], expected["v"][0])


def test_scan_in_a_jitted_function_gives_the_same_draws():
    _, z, _ = scan_kernel(BlockedGibbs(zoo.graph("rbm")), 8, strong_params(), key=0)
    assert_same({b: x[None] for b, x in z.items()}, draw(num_chains=1))


def test_each_clamped_row_has_its_own_random_stream():
    kernel, v = BlockedGibbs(zoo.graph("rbm")), np.zeros((2, 5, 4))
    v[1] = 1
    _, z, _ = scan_kernel(kernel, 10, strong_params(), clamped={"v": v})
    assert z["h"].shape == (10, 2, 5, 3)
    _, single, _ = scan_kernel(kernel, 10, strong_params(), clamped={"v": v[0, 0]})
    np.testing.assert_array_equal(z["h"][:, 0, 0], single["h"])
    rows = z["h"][:, 0].swapaxes(0, 1).reshape(5, -1)  # five rows clamped to one value
    assert len(np.unique(rows, axis=0)) == 5


def test_clamped_values_broadcast_and_may_have_any_number_type():
    kernel, params = BlockedGibbs(zoo.graph("deep")), strong_params("deep")
    first = {"v": np.ones((6, 3), np.int8), "h2": np.array([0, 1], np.int8)}
    second = {"v": np.ones((6, 3)), "h2": np.array([0.0, 1.0])}
    expected = scan_kernel(kernel, 4, params, clamped=first)[1]
    assert set(expected) == {"h1"} and expected["h1"].shape == (4, 6, 3)
    assert_same(scan_kernel(kernel, 4, params, clamped=second)[1], expected)


@pytest.mark.parametrize(
    ("clamped", "message"),
    [
        ({"w": np.zeros(4)}, "unknown block 'w'"),
        ({"v": np.zeros(5)}, r"'v'.*\(5,\)"),
        ({"v": np.full(4, np.nan)}, "'v'.*nan"),
        ({"v": np.full(4, 2.0)}, r"2\.0"),
        ({"v": "ones"}, "'v'"),
        ({"v": np.zeros((0, 4))}, r"clamped .*\(0,\)"),
        ({"v": np.zeros(4), "h": np.zeros(3)}, "clamped .*'v', 'h'"),
    ],
)
def test_wrong_clamped_values_are_refused(clamped, message):
    with pytest.raises(StateError, match=message):
        BlockedGibbs(zoo.graph("rbm")).init(
            zoo.KEY, 0, None, (strong_params(),), clamped
        )


@pytest.mark.parametrize("jit_model_args", [True, nightly(False)])
def test_a_second_run_uses_its_own_params(jit_model_args):
    kernel = BlockedGibbs(zoo.graph("rbm"))
    attributes = dict(vars(kernel))
    mcmc = make_mcmc(kernel, jit_model_args=jit_model_args)
    for bias, value in ((30.0, 1), (-30.0, 0)):
        mcmc.run(zoo.KEY, strong_params() | {"v": np.full(4, bias, np.float32)})
        assert (samples(mcmc)["v"] == value).all()
    assert vars(kernel) == attributes  # nothing of a run is stored on the kernel


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (None, ParameterError, "params.*0"),
        ({"h": None}, ParameterError, "factors.*'h'"),
        ({"v": np.zeros(3)}, ParameterError, r"factor 'v'.*\(3,\)"),
        ({"v": np.full(4, np.nan)}, ParameterError, "finite"),
    ],
)
@pytest.mark.parametrize("method", ["vectorized", nightly("parallel")])
def test_wrong_params_are_refused(change, error, message, method):
    args = (
        ()
        if change is None
        else ({n: a for n, a in (strong_params() | change).items() if a is not None},)
    )
    with pytest.raises(error, match=message):
        run_mcmc(
            BlockedGibbs(zoo.graph("rbm")), *args, num_chains=2, chain_method=method
        )


def test_params_that_do_not_normalise_are_refused():
    graph = layered(x=Gaussian(2), y=Gaussian(2))
    params = {"x": np.zeros(2), "y": np.zeros(2), "x:y": 3 * np.eye(2)}
    with pytest.raises(DomainError):
        run_mcmc(BlockedGibbs(graph), params, num_chains=2)


def initial_values(num_chains, init_params, **clamped):
    keys = zoo.KEY if num_chains == 1 else jax.random.split(zoo.KEY, num_chains)
    return (
        BlockedGibbs(zoo.graph("rbm"))
        .init(keys, 0, init_params, (strong_params(),), clamped)
        .z
    )


def test_init_params_replace_some_blocks():
    z = initial_values(1, {"v": np.ones(4, np.int8)})
    np.testing.assert_array_equal(z["v"], np.ones(4))
    assert z["v"].dtype == np.float32
    np.testing.assert_array_equal(
        initial_values(3, {"v": np.eye(3, 4)})["v"], np.eye(3, 4)
    )
    # one value for five rows
    rows = initial_values(3, {"h": np.eye(3)}, v=np.zeros((5, 4)))["h"]
    np.testing.assert_array_equal(rows, np.broadcast_to(np.eye(3)[:, None], (3, 5, 3)))


@pytest.mark.parametrize(
    ("num_chains", "init", "clamped", "message"),
    [
        (1, {"w": np.zeros(4)}, {}, "'w'"),
        (1, {"v": np.zeros((1, 4))}, {}, r"'v'.*\(1, 4\)"),
        (2, {"v": np.zeros(4)}, {}, r"\(2, 4\)"),
        (1, {"v": np.full(4, 0.5)}, {}, r"0\.5"),
        (1, {"v": np.zeros(4)}, {"v": np.zeros(4)}, "init_params .*'v'"),
        (1, np.zeros(4), {}, "init_params"),
    ],
)
def test_wrong_init_params_are_refused(num_chains, init, clamped, message):
    with pytest.raises(StateError, match=message):
        initial_values(num_chains, init, **clamped)


@pytest.mark.parametrize("method", ["vectorized", nightly("sequential")])
def test_a_resumed_run_continues_the_chains(method):
    expected = draw(method, 12, 3)
    mcmc = make_mcmc(BlockedGibbs(zoo.graph("rbm")), 6, 3, chain_method=method)
    mcmc.run(zoo.KEY, strong_params())
    first = samples(mcmc)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, strong_params())
    assert_same(
        {b: np.concatenate([first[b], x], axis=1) for b, x in samples(mcmc).items()},
        expected,
    )
    with pytest.raises(StateError, match="post_warmup_state"):
        mcmc.run(mcmc.post_warmup_state.rng_key, strong_params(), v=np.zeros(4))


def test_warmup_and_thinning_drop_draws():
    expected = draw(num_samples=12)["v"]
    np.testing.assert_array_equal(
        draw(num_samples=12, thinning=3)["v"], expected[:, 2::3]
    )
    np.testing.assert_array_equal(
        draw(num_samples=7, num_warmup=5)["v"], expected[:, 5:]
    )


def test_extra_fields_diagnostics_and_summary(capsys):
    # long enough for every unit to change: NumPyro's summary divides by its variance
    mcmc = run_mcmc(BlockedGibbs(zoo.graph("rbm")), strong_params(), num_samples=200, num_chains=2,
                    extra_fields=("i",))  # fmt: skip
    np.testing.assert_array_equal(fields(mcmc)["i"], [range(1, 201)] * 2)
    assert mcmc.sampler.get_diagnostics_str(mcmc.last_state).startswith("200 sweeps")
    mcmc.print_summary()
    assert "h[2]" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["sequential", nightly("parallel")])
def test_a_progress_bar_does_not_change_the_draws(method, capfd, monkeypatch):
    for variable in ("CI", "PYTEST_XDIST_WORKER"):  # NumPyro switches the bar off there
        monkeypatch.delenv(variable, raising=False)
    with_bar = draw(method, progress_bar=True)
    jax.effects_barrier()
    if method == "sequential":
        assert "sweeps, 2 layers, 7 free units" in capfd.readouterr().err
    assert_same(with_bar, usual_draws())


def test_a_kernel_can_be_pickled_and_needs_a_graph():
    kernel = pickle.loads(
        pickle.dumps(BlockedGibbs(zoo.graph("rbm"), init="local_mode"))
    )
    assert vars(kernel) == vars(BlockedGibbs(zoo.graph("rbm"), init="local_mode"))
    with pytest.raises(TypeError, match="FactorGraph"):
        BlockedGibbs({})


@pytest.mark.nightly
@pytest.mark.parametrize("observed", [False, True])
def test_chain_methods_agree_on_a_large_lattice(observed):
    """Large enough, with twenty chains, for the code paths that pay for many numbers only."""
    lattice = nx.grid_2d_graph(30, 30, periodic=True)
    kernel = BlockedGibbs(
        FactorGraph.from_networkx(lattice, family=Spin, shared=True, bias=False)
    )
    params = {"x:x": np.float32(0.5)}  # its sums are exact in any order
    clamped = {"x": Observed(np.ones(900), np.arange(900) < 100)} if observed else {}
    options = {"num_samples": 3, "num_chains": 20, "clamped": clamped}
    run = lambda m: samples(run_mcmc(kernel, params, chain_method=m, **options))
    assert_same(run("vectorized"), run("sequential"))
    # mapped over chains, values were scattered, which took most of a sweep
    state = kernel.init(jax.random.split(zoo.KEY, 20), 0, None, (params,), clamped)
    assert observed or "scatter" not in str(
        jax.make_jaxpr(kernel.sample)(state, (params,), clamped)
    )


@pytest.mark.nightly
def test_draws_in_double_precision_equal_those_in_single():
    kernel, options = (
        BlockedGibbs(zoo.graph("rbm")),
        {"num_samples": 6, "num_chains": 2},
    )
    with jax.enable_x64(True):
        mcmc = run_mcmc(kernel, jax.tree.map(jnp.float64, strong_params()), **options)
        drawn = samples(mcmc)
        assert drawn["v"].dtype == np.float64 and mcmc.last_state.i.dtype == np.int32
    assert_same(
        drawn,
        jax.tree.map(np.float64, samples(run_mcmc(kernel, strong_params(), **options))),
    )


@pytest.mark.nightly
def test_known_values_are_checked_while_params_are_traced():
    graph, x = zoo.graph("rbm"), {"v": np.full(4, 2.0), "h": np.ones(3)}
    with pytest.raises(StateError, match="got 2.0"):
        jax.jit(lambda params: graph.energy(params, x))(strong_params())


CASES = {
    "rbm": {},
    "rbm, clamped": {"v": [1.0, 0.0, 1.0, 1.0]},
    "deep": {},
    "deep, clamped": {"v": [1.0, 1.0, 0.0]},
    "gated": {},
    "gated, clamped": {"a": [1.0, 1.0]},
    "categorical": {},
    "lattice": {},  # interacting units of one block
}


@pytest.mark.parametrize("case", often(CASES, "lattice"))
def test_joint_states_match_enumeration(case):
    name, clamped = case.split(",")[0], {b: np.array(v) for b, v in CASES[case].items()}
    params = strong_params(name)
    # the last draws of many chains are independent
    mcmc = run_mcmc(
        BlockedGibbs(zoo.graph(name)),
        params,
        num_samples=1,
        num_chains=4000,
        num_warmup=30,
        clamped=clamped,
    )
    exact = Law(
        zoo.graph(name),
        params,
        lambda x: all((x[b] == v).all() for b, v in clamped.items()),
    )
    exact.assert_law(
        {b: x[:, -1] for b, x in samples(mcmc).items()}, exact.target, len(exact.states)
    )


def test_moments_of_real_units_match_exact_moments():
    state, *_ = scan_kernel(
        BlockedGibbs(zoo.graph("learned")), 30, zoo.params("learned"), num_chains=4000
    )
    exact = zoo.moments("learned")
    assert_rows_law(
        np.stack([state.z["v"], state.z["v"] ** 2], -1), exact["v"], comparisons=6
    )
    assert_rows_law(state.z["h"], exact["h"], comparisons=6)


def test_rows_of_clamped_values_have_their_own_conditionals():
    params = {name: np.asarray(a, float) for name, a in strong_params().items()}
    v = np.array(list(itertools.product([0.0, 1.0], repeat=4)))
    exact = 1 / (1 + np.exp(-params["h"] - v @ params["v:h"]))
    kernel = BlockedGibbs(zoo.graph("rbm"))
    drawn = scan_kernel(kernel, 1, strong_params(), num_chains=3000, clamped={"v": v})[
        0
    ].z["h"]
    assert_law(drawn.mean(0), exact, np.sqrt(exact * (1 - exact) / len(drawn)))
