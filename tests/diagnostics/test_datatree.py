# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""DataTrees of runs, estimates and fits for ArviZ, their names, and the summary.

Tests diagnostics/datatree.py.
"""

from importlib import metadata
from types import SimpleNamespace
import warnings

import arviz as az
import arviz_base
import arviz_stats
from long_run_tools import chains, run
from mcmc_tools import make_mcmc, run_mcmc, samples, strong_params
import numpy as np
from numpyro.infer import NUTS
from numpyro.infer.mcmc import MCMCKernel
import pytest
import xarray as xr
import zoo

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    BlockedGibbs,
    FactorGraph,
    MaximalCoupling,
    to_datatree,
)
from ebmpp.diagnostics import summary, to_arviz
from ebmpp.diagnostics.datatree import sample_statistics
from ebmpp.errors import ArgumentError
from ebmpp.kernels import LongRun


@pytest.fixture(scope="module")
def mcmc():
    kernel = BlockedGibbs(zoo.graph("rbm"))
    return run_mcmc(
        kernel, strong_params(), num_samples=60, num_chains=2, extra_fields=("i",)
    )


@pytest.fixture(scope="module")
def board():
    """A block of two axes and clamped rows."""
    graph = FactorGraph(
        {"x": Bernoulli((2, 3)), "y": Bernoulli(2)}, factors=[Bias("x"), Bias("y")]
    )
    params = {"x": np.zeros((2, 3), np.float32), "y": np.zeros(2, np.float32)}
    return run_mcmc(
        BlockedGibbs(graph), params, num_samples=4, clamped={"y": np.zeros((5, 2))}
    )


def test_posterior_and_sample_stats(mcmc):
    tree = to_datatree(mcmc)
    assert set(tree.children) == {"posterior", "sample_stats"}
    assert tree.posterior["v"].dims == ("chain", "draw", "v_dim_0")
    for block, drawn in samples(mcmc).items():
        np.testing.assert_array_equal(tree.posterior[block], drawn)
        np.testing.assert_array_equal(
            arviz_base.from_numpyro(mcmc).posterior[block], drawn
        )
        np.testing.assert_array_equal(to_arviz(tree).posterior[block], drawn)
    np.testing.assert_array_equal(tree.sample_stats["i"][0], np.arange(1, 61))
    assert tree.attrs["inference_library"] == "ebmpp" and tree.attrs["graph"] == repr(
        zoo.graph("rbm")
    )
    assert (
        tree.attrs["inference_library_version"]
        == ebmpp.__version__
        == metadata.version("ebmpp")
    )
    assert tree.posterior.attrs["inference_kernel"] == "BlockedGibbs"


def test_netcdf_and_arviz_statistics(mcmc, tmp_path):
    tree = to_datatree(mcmc)
    tree.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "run.nc", engine="h5netcdf") as opened:
        loaded = opened.load()
    xr.testing.assert_identical(
        loaded.posterior.to_dataset(), tree.posterior.to_dataset()
    )
    assert loaded.attrs == tree.attrs
    plain, table = arviz_stats.summary(loaded, round_to="none"), summary(loaded)
    np.testing.assert_array_equal(table[plain.columns], plain)
    assert not np.array_equal(table["mcse_mean"], table["mcse_mean"].round(2))
    rounded = summary(loaded, round_to=2)
    np.testing.assert_array_equal(
        rounded[plain.columns], arviz_stats.summary(loaded, round_to=2)
    )
    assert list(table.index) == list(plain.index) and not table["frozen"].any()
    assert list(az.summary(to_arviz(mcmc), var_names=["h"]).index) == [
        f"h[{i}]" for i in range(3)
    ]


#: latents that couple strongly, so that pairs take some sweeps to meet
STRONG = {
    "v": np.zeros(3, np.float32),
    "h1": np.full(3, -1.8, np.float32),
    "h2": np.full(2, -2.7, np.float32),
    "v:h1": np.full((3, 3), 0.1, np.float32),
    "h1:h2": np.full((3, 2), 1.8, np.float32),
}
ROWS = np.array([[1.0, 1, 1], [1, 0, 1]])


def run_pairs(**options):
    # compiles fastest
    kernel = MaximalCoupling(zoo.graph("deep"), lag=3, coupling="common")
    options = {
        "num_samples": 40,
        "num_chains": 3,
        "key": 1,
        "clamped": {"v": ROWS},
    } | options
    return run_mcmc(kernel, STRONG, **options)


@pytest.mark.nightly
def test_meeting_group_has_the_path_of_every_pair(tmp_path):
    pairs = run_pairs(extra_fields=("met",))
    tree = to_datatree(pairs)
    meeting = tree["meeting"].to_dataset()
    assert meeting["meeting_time"].dims == meeting["met"].dims == ("chain", "row")
    np.testing.assert_array_equal(
        meeting["meeting_time"], pairs.last_state.meeting_time
    )
    assert (
        meeting["met"].dtype == bool
        and meeting["met"].all()
        and int(meeting["lag"]) == 3
    )
    np.testing.assert_array_equal(meeting["sweep"], 3 + 1 + np.arange(40))
    assert meeting["distance"].dims == ("chain", "sweep", "row")
    assert meeting["distance"].shape == (3, 40, 2)
    is_unmet = (meeting["sweep"] < meeting["meeting_time"]).transpose(
        "chain", "sweep", "row"
    )
    np.testing.assert_array_equal(meeting["distance"] > 0, is_unmet)
    assert is_unmet.sum() > 5
    assert set(tree.sample_stats.data_vars) == {"met"}
    tree.to_netcdf(tmp_path / "pairs.nc", engine="h5netcdf")


@pytest.mark.nightly
def test_a_thinned_run_is_a_part_of_the_same_path():
    """A sweep draws from the pair's key and its number."""
    meeting = to_datatree(run_pairs())["meeting"].to_dataset()
    part = to_datatree(run_pairs(num_warmup=6, num_samples=34, thinning=6))[
        "meeting"
    ].to_dataset()
    np.testing.assert_array_equal(part["sweep"], [19, 25, 31, 37, 43])
    xr.testing.assert_equal(part, meeting.sel(sweep=part["sweep"]))


def test_a_fit_has_its_history():
    history = xr.Dataset({"gradient_norm": ("step", [2.0, 1.0])}, {"step": [0, 1]})
    tree = to_datatree(SimpleNamespace(history=history, graph=zoo.graph("rbm")))
    xr.testing.assert_identical(tree["history"].to_dataset(), history)


def test_kernels_have_the_model_attribute_that_numpyro_and_arviz_expect():
    # NumPyro refuses a block of Gibbs whose model is None, and ArviZ asks every other
    # kernel for one
    for kernel in vars(ebmpp.kernels).values():
        if (
            isinstance(kernel, type)
            and issubclass(kernel, MCMCKernel)
            and hasattr(kernel, "sample_field")
        ):
            is_block = kernel.refresh is not MCMCKernel.refresh
            assert hasattr(kernel, "model") != is_block, kernel


def test_what_has_no_draws_is_refused():
    with pytest.raises(TypeError, match="dict"):
        to_datatree({})
    with pytest.raises(ArgumentError, match="NUTS"):
        to_datatree(make_mcmc(NUTS(lambda: None)))
    with pytest.raises(ValueError, match="mcmc.run"):
        to_datatree(make_mcmc(BlockedGibbs(zoo.graph("rbm"))))
    with pytest.raises(TypeError, match="fmt"):
        summary(xr.DataTree(), fmt="long")


def test_dimensions_and_coordinates(mcmc, board):
    assert to_datatree(board).posterior["x"].dims == (
        "chain",
        "draw",
        "row",
        "x_dim_0",
        "x_dim_1",
    )
    columns = ["left", "middle", "right"]
    for dims in (["line", "column"], ["row", "line", "column"]):
        tree = to_datatree(
            board, dims={"x": dims}, coords={"column": columns, "row": list("abcde")}
        )
        assert tree.posterior["x"].dims == ("chain", "draw", "row", "line", "column")
        drawn = tree.posterior["x"].sel(column="right", line=1, row="b")
        np.testing.assert_array_equal(drawn, samples(board)["x"][:, :, 1, 1, 2])
    tree = to_datatree(mcmc, coords={"h_dim_0": [7, 9, 11]})
    np.testing.assert_array_equal(
        tree.posterior["h"].sel(h_dim_0=9), samples(mcmc)["h"][..., 1]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": {"w": ["a"]}}, "'w'"),
        ({"dims": {"x": ["a"]}}, "'x'.*2"),
        ({"dims": {"x": list("abcd")}}, "'x'.*2"),
        ({"coords": {"column": [1, 2]}}, "'column'"),
        ({"coords": {"x_dim_0": [1, 2, 3]}}, "'x_dim_0'.*2.*3"),
    ],
)
def test_names_that_do_not_fit_are_refused(options, message, board):
    with pytest.raises(ValueError, match=message):
        to_datatree(board, **options)


def test_nodes_of_a_networkx_graph_name_the_units():
    lattice = run_mcmc(
        BlockedGibbs(zoo.graph("lattice")), zoo.params("lattice"), num_samples=4
    )
    expected = [str((i, j)) for i in range(3) for j in range(3)]
    assert list(to_datatree(lattice).posterior["x_dim_0"].values) == expected
    assert (
        list(to_datatree(lattice, dims={"x": ["node"]}).posterior["node"].values)
        == expected
    )
    renamed = to_datatree(lattice, coords={"x_dim_0": range(9)})
    assert list(renamed.posterior["x_dim_0"].values) == list(range(9))


def test_statistics_of_one_name_get_different_names():
    fields = {
        "block_states.0.accept_prob": np.zeros((1, 2)),
        "block_states.1.accept_prob": np.ones((1, 2)),
    }
    result = sample_statistics(fields)
    assert {name: v[0, 0] for name, v in result.items()} == {
        "acceptance_rate": 0,
        "acceptance_rate_1": 1,
    }


def test_constant_values_have_no_effective_sample_size(mcmc):
    posterior = to_datatree(mcmc)["posterior"].to_dataset()
    posterior["v"] = posterior["v"].where(posterior["v_dim_0"] != 1, 1.0)
    tree = xr.DataTree.from_dict({"posterior": posterior})
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert arviz_stats.summary(tree).loc["v[1]", "ess_bulk"] == 120  # ArviZ's value
    with pytest.warns(UserWarning, match=r"1 of 7.*v\[1\]"):
        table = summary(tree)
    assert table["frozen"].tolist() == [label == "v[1]" for label in table.index]
    uncertain = ["ess_bulk", "ess_tail", "r_hat", "mcse_mean", "mcse_sd"]
    assert table.loc["v[1]", uncertain].isna().all() and table.loc["v[1]", "mean"] == 1
    assert table.drop(index="v[1]")[uncertain].notna().all(axis=None)
    assert table["frozen_chains"].tolist() == [
        2 * (label == "v[1]") for label in table.index
    ]


@pytest.mark.nightly
def test_a_long_run_has_its_moments_and_draws(tmp_path):
    result = run(tmp_path / "run")
    tree = to_datatree(result)
    moments = tree["moments"].to_dataset()
    assert dict(moments.sizes) == {"statistic": 7, "h_dim_0": 3, "v_dim_0": 4}
    np.testing.assert_array_equal(
        moments["v"].sel(statistic="mean"), result.moments.mean["v"]
    )
    np.testing.assert_array_equal(
        moments["h"].sel(statistic="r_hat"), result.moments.r_hat["h"]
    )
    mcmc = chains()
    mcmc.run(zoo.KEY, strong_params(), extra_fields=("i",))
    expected = to_datatree(mcmc)
    for group in ("posterior", "sample_stats"):
        for name, x in expected[group].data_vars.items():
            np.testing.assert_array_equal(tree[group][name], x)
    tree.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "run.nc", engine="h5netcdf") as opened:
        assert opened.posterior.sizes["draw"] == 20
    tree = to_datatree(result, dims={"v": ["pixel"]}, coords={"pixel": list("abcd")})
    assert tree["posterior"]["v"].sel(pixel="c").shape == (3, 20)
    assert tree["moments"]["v"].sel(pixel="d", statistic="variance").shape == ()
    long = LongRun(
        chains(draws=6), lambda z: {"both": (z["v"][0], z["h"]), "v": z["v"].sum()}
    )
    moments = to_datatree(long.run(zoo.KEY, strong_params()))["moments"].to_dataset()
    dims = {
        "both.0": ("statistic",),
        "both.1": ("statistic", "both.1_dim_0"),
        "v": ("statistic",),
    }
    assert {str(n): x.dims for n, x in moments.data_vars.items()} == dims
    rows = to_datatree(
        LongRun(chains(draws=6)).run(zoo.KEY, strong_params(), v=np.ones((2, 4)))
    )
    assert rows["moments"]["h"].dims == ("statistic", "row", "h_dim_0")
    assert "posterior" not in rows.children
