# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Chains that stand still: in the summary, in the tree of a run, and in words.

Tests diagnostics/stillness.py.
"""

import warnings

import arviz_base
from mcmc_tools import run_mcmc
import networkx as nx
import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

from ebmpp import (
    Bias,
    BlockedGibbs,
    FactorGraph,
    MaximalCoupling,
    ParallelTempering,
    Spin,
    to_datatree,
)
from ebmpp.diagnostics import summary
from ebmpp.diagnostics.stillness import stillness
from ebmpp.kernels.base import checksums
from helpers import often

RNG = np.random.default_rng(0)
COIN, NORMAL = RNG.integers(0, 2, (3, 1000)).astype(float), RNG.normal(size=(3, 1000))
LATE = np.concatenate([RNG.normal(size=(1, 200)), np.full((1, 800), 0.01)], axis=1)
THREES = np.repeat(np.arange(3.0)[:, None], 1000, 1)
UNCERTAIN = ["ess_bulk", "ess_tail", "mcse_mean", "mcse_sd"]
CASES = {
    "coin": (
        np.vstack([COIN, np.ones((1, 1000))]),
        1,
    ),  # cases 4 of the reports that failed
    "normal": (np.vstack([NORMAL, np.full((1, 1000), 0.3)]), 1),
    "two of five": (np.vstack([COIN, np.zeros((2, 1000))]), 2),
    "late": (np.vstack([NORMAL, LATE]), 1),
    "one switch": (np.vstack([THREES, np.repeat([[0.0, 1.0]], 500, 1)]), 4),
    "one moves": (np.vstack([THREES, NORMAL[:1]]), 3),
    "apart": (np.vstack([THREES, THREES[:1]]), 4),
    "agree": (np.ones((4, 1000)), 4),
    "two of three": (
        np.vstack([THREES[:2], np.repeat([[0.0, 1.0, 0.0]], [400, 200, 400], 1)]),
        2,
    ),
    "rare": (1.0 * (RNG.random((4, 1000)) < 1e-3), None),
    "sound": (RNG.normal(size=(4, 1000)), 0),
}
KIND = {
    "one switch": "apart",
    "apart": "apart",
    "agree": "agree",
    "rare": "",
    "sound": "",
}


def table_of(**draws):
    return summary(arviz_base.from_dict({"posterior": draws}))


@pytest.mark.parametrize("name", CASES)
def test_a_chain_that_stands_still_has_no_effective_sample_size(name):
    draws, still = CASES[name]
    kind = KIND.get(name, "beside")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row = table_of(x=draws).loc["x"]
    assert row["frozen"] == (kind != "") and still in (None, row["frozen_chains"])
    assert np.isnan(row[UNCERTAIN].astype(float)).all() == (kind != "")
    assert len(caught) == (kind != "")
    if kind == "apart":
        assert np.isposinf(row["r_hat"]) and "different values" in str(
            caught[0].message
        )
    elif kind == "agree":
        assert np.isnan(row["r_hat"]) and "all chains agree" in str(caught[0].message)
    else:
        assert (row["r_hat"] > 1.1) == (kind == "beside")


def test_values_of_one_table_are_told_apart_and_nothing_else_changes():
    values = np.stack([CASES["apart"][0], CASES["sound"][0], CASES["coin"][0]], axis=-1)
    with pytest.warns(UserWarning) as caught:
        table = table_of(x=values, y=values[..., 1])
    assert table["frozen"].tolist() == [True, False, True, False]
    assert table["frozen_chains"].tolist() == [4, 0, 1, 0]
    named = [["x[0]" in str(w.message), "x[2]" in str(w.message)] for w in caught]
    assert named == [[True, False], [False, True]]
    with pytest.warns(UserWarning, match="1 of 1"):
        table = summary(
            arviz_base.from_dict({"posterior": {"x": values}}), coords={"x_dim_0": 0}
        )
    assert table["frozen"].all()
    single = table_of(x=values[:1, :, 1])  # a single chain
    assert not single["frozen"].any() and single["ess_bulk"].notna().all()


def test_sound_chains_stand_still_by_chance_only():
    """Units of any probability: with four chains of 1,000 draws, and with short runs."""
    for chains, count in ((4, 1000), (2, 50), (4, 12)):
        for p in (1e-4, 1e-3, 0.01, 0.1, 0.5):
            draws = RNG.random((200, chains, count, 1)) < p
            kinds = {stillness(d).kind for d in draws}
            assert kinds <= {"", "agree"}, (chains, count, p)
            assert "agree" not in kinds or p < 0.1


FROZEN = {"x": np.zeros(9, np.float32), "x:x": np.full(12, 40.0, np.float32)}
ONES = {"x": np.ones((3, 9), np.float32)}
KERNELS = {
    "gibbs": BlockedGibbs(zoo.graph("lattice")),
    "pairs": MaximalCoupling(zoo.graph("lattice")),
    "tempering": ParallelTempering(zoo.graph("lattice"), betas=(0.9, 1.0)),
}


def run(kernel, params=FROZEN, **options):
    return run_mcmc(
        KERNELS[kernel], params, num_chains=3, num_samples=25, num_warmup=5, **options
    )


@pytest.mark.parametrize("coupling", [0.0, 40.0])
def test_a_small_block_that_never_moved_is_named(coupling):
    kernel = BlockedGibbs(FactorGraph.from_networkx(nx.path_graph(3), Spin))
    params = {"x": np.zeros(3), "x:x": np.full(2, coupling)}
    mcmc = run_mcmc(kernel, params, num_samples=10, init_params={"x": np.ones(3)})
    is_named = "['x'] NOT MOVED" in kernel.get_diagnostics_str(mcmc.last_state)
    assert is_named == (coupling > 0)


@pytest.mark.parametrize("values", [[0, 1], [-1, 1], [0, 1e-30]])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int8])
def test_sums_of_different_rows_differ(values, dtype):
    rows = np.random.default_rng(0).choice(values, (1000, 100)).astype(dtype)
    sums = checksums({"x": jnp.asarray(np.append(rows, rows[:5], axis=0))})["x"]
    assert len(np.unique(sums)) == len(np.unique(rows, axis=0))
    np.testing.assert_array_equal(sums[1000:], sums[:5])


@pytest.mark.parametrize("free", [0, 1])
def test_one_unit_of_a_large_block_counts_as_moving(free):
    """Sums of large states are compared, not their values."""
    kernel = BlockedGibbs(FactorGraph({"x": Spin(4096)}, factors=[Bias("x")]))
    bias = np.full(4096, 40.0, np.float32)
    bias[4000:][:free] = 0
    mcmc = run_mcmc(
        kernel,
        {"x": bias},
        num_chains=2,
        num_samples=30,
        init_params={"x": np.ones((2, 4096), np.float32)},
    )
    assert np.all(mcmc.last_state.still["x"]) == (free == 0)


def test_large_states_inside_a_strict_shard_map():
    kernel = BlockedGibbs(FactorGraph({"x": Spin(8192)}, factors=[Bias("x")]))
    model = ({"x": np.zeros(8192, np.float32)},)
    state = kernel.init(jax.random.split(zoo.KEY, 2), 0, None, model, {})
    mesh = jax.make_mesh((1,), ("chains",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(
        lambda state: kernel.sample(state, model, {}),
        mesh=mesh,
        in_specs=P("chains"),
        out_specs=P("chains"),
    )
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(step, state).still["x"].shape == (2,)


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", often(KERNELS, "gibbs"))
def test_a_block_that_never_moved_is_reported(kernel):
    mcmc = run(kernel, init_params=ONES)
    assert np.all(mcmc.last_state.still["x"])
    with pytest.warns(UserWarning, match=r"\(x\): all chains agree"):
        to_datatree(mcmc)
    assert "['x'] NOT MOVED" in KERNELS[kernel].get_diagnostics_str(mcmc.last_state)
    both = {"x": ONES["x"] * np.array([[1.0], [-1.0], [1.0]], np.float32)}
    with pytest.warns(UserWarning, match=r"\(x\): chains are stuck at different"):
        to_datatree(run(kernel, init_params=both))
    certain = {"x": np.full(9, 40.0, np.float32), "x:x": np.zeros(12, np.float32)}
    # chains that move to one certain state are sound; pairs do so before the first draw
    for params in [zoo.params("lattice")] + [certain] * (kernel != "pairs"):
        sound = run(kernel, params)
        to_datatree(sound)
        assert "NOT MOVED" not in KERNELS[kernel].get_diagnostics_str(sound.last_state)
