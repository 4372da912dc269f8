# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""DataTrees of long runs: moments, and draws that stay in their files."""

from long_run_tools import chains, run
from mcmc_tools import strong_params
import numpy as np
import pytest
import xarray as xr
import zoo

from ebmpp import to_datatree
from ebmpp.errors import ArgumentError
from ebmpp.kernels import LongRun


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(tmp_path_factory.mktemp("run"))


def test_a_tree_has_the_moments_and_the_draws(result, tmp_path):
    tree = to_datatree(result)
    moments = tree["moments"].to_dataset()
    assert dict(moments.sizes) == {"statistic": 7, "h_dim_0": 3, "v_dim_0": 4}
    np.testing.assert_array_equal(moments["v"].sel(statistic="mean"), result.moments.mean["v"])
    np.testing.assert_array_equal(moments["h"].sel(statistic="r_hat"), result.moments.r_hat["h"])
    mcmc = chains()
    mcmc.run(zoo.KEY, strong_params(), extra_fields=("i",))
    expected = to_datatree(mcmc)
    for group in ("posterior", "sample_stats"):
        for name, x in expected[group].data_vars.items():
            np.testing.assert_array_equal(tree[group][name], x)
    tree.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "run.nc", engine="h5netcdf") as opened:
        assert opened.posterior.sizes["draw"] == 20


def test_names_of_dimensions(result):
    tree = to_datatree(result, dims={"v": ["pixel"]}, coords={"pixel": list("abcd")})
    assert tree["posterior"]["v"].sel(pixel="c").shape == (3, 20)
    assert tree["moments"]["v"].sel(pixel="d", statistic="variance").shape == ()
    with pytest.raises(ArgumentError, match="'w'"):
        to_datatree(result, dims={"w": ["pixel"]})
    with pytest.raises(ArgumentError, match="'pixel'.*2.*4"):
        to_datatree(result, dims={"v": ["pixel"]}, coords={"pixel": ["a", "b"]})


def test_functions_and_rows_are_named_after_their_trees():
    long = LongRun(chains(draws=6), lambda z: {"both": (z["v"][0], z["h"]), "v": z["v"].sum()})
    moments = to_datatree(long.run(zoo.KEY, strong_params()))["moments"].to_dataset()
    assert {str(n): x.dims for n, x in moments.data_vars.items()} == {
        "both.0": ("statistic",),
        "both.1": ("statistic", "both.1_dim_0"),
        "v": ("statistic",),
    }
    rows = to_datatree(LongRun(chains(draws=6)).run(zoo.KEY, strong_params(), v=np.ones((2, 4))))
    assert rows["moments"]["h"].dims == ("statistic", "row", "h_dim_0")
    assert "posterior" not in rows.children
