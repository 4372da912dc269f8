# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Trees of long runs: moments, and draws that stay in their files."""

import arviz_stats
from gibbs_tools import PARAMS
from long_run_tools import KERNEL, KEY, chains, run
import networkx as nx
import numpy as np
from numpyro.infer import MCMC
import pytest

import jax.numpy as jnp

import ebmpp
from ebmpp import BlockedGibbs, FactorGraph, Spin, to_datatree
from ebmpp.errors import ArgumentError
from ebmpp.kernels import LongRun


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return run(tmp_path_factory.mktemp("run"))


def test_a_tree_has_the_moments_and_the_draws(made):
    tree = to_datatree(made)
    assert tree.attrs["inference_kernel"] == "BlockedGibbs"
    moments = tree["moments"].to_dataset()
    assert dict(moments.sizes) == {"statistic": 7, "h_dim_0": 3, "v_dim_0": 4}
    np.testing.assert_array_equal(moments["v"].sel(statistic="mean"), made.moments.mean["v"])
    np.testing.assert_array_equal(moments["h"].sel(statistic="r_hat"), made.moments.r_hat["h"])
    kept = MCMC(KERNEL, num_warmup=7, num_samples=60, num_chains=3, thinning=3, chain_method="vectorized")
    kept.progress_bar = False
    kept.run(KEY, PARAMS, extra_fields=("i",))
    theirs = to_datatree(kept)
    for group in ("posterior", "sample_stats"):
        assert dict(tree[group].sizes) == dict(theirs[group].sizes)
        for name, x in theirs[group].data_vars.items():
            np.testing.assert_array_equal(tree[group][name], x)
    assert set(arviz_stats.summary(tree).index) == set(arviz_stats.summary(theirs).index)


def test_names_of_dimensions_and_along_them(made):
    tree = to_datatree(made, dims={"v": ["pixel"]}, coords={"pixel": list("abcd")})
    assert tree["posterior"]["v"].sel(pixel="c").shape == (3, 20)
    assert tree["moments"]["v"].sel(pixel="d", statistic="variance").shape == ()
    with pytest.raises(ArgumentError, match="dims names 'w', and the moments are of"):
        to_datatree(made, dims={"w": ["pixel"]})
    with pytest.raises(ArgumentError, match="coords of 'pixel' are 2 names, and it has length 4"):
        to_datatree(made, dims={"v": ["pixel"]}, coords={"pixel": ["a", "b"]})


def test_units_have_their_names_and_rows_theirs():
    ring = FactorGraph.from_networkx(nx.relabel_nodes(nx.cycle_graph(3), dict(enumerate("abc"))), family=Spin)
    long = LongRun(chains(BlockedGibbs(ring), count=2))
    params = {name: jnp.zeros(3) for name in ("x", "x:x")}
    tree = to_datatree(long.run(KEY, params))
    assert tree["moments"]["x"].sel(x_dim_0="b", statistic="mean").shape == ()
    assert "posterior" not in tree.children
    rows = to_datatree(LongRun(chains(draws=6)).run(KEY, PARAMS, v=np.ones((2, 4))))
    assert rows["moments"]["h"].dims == ("statistic", "row", "h_dim_0")


def test_functions_have_the_names_of_their_trees():
    long = LongRun(chains(draws=6), lambda z: {"both": (z["v"][0], z["h"]), "v": z["v"].sum()})
    moments = to_datatree(long.run(KEY, PARAMS))["moments"].to_dataset()
    assert {str(n): x.dims for n, x in moments.data_vars.items()} == {
        "both.0": ("statistic",),
        "both.1": ("statistic", "both.1_dim_0"),
        "v": ("statistic",),
    }
    alone = LongRun(chains(draws=6), lambda z: z["v"]).run(KEY, PARAMS)
    assert list(to_datatree(alone)["moments"].data_vars) == ["value"]


def test_a_tree_is_written_and_read(made, tmp_path):
    tree = ebmpp.to_datatree(made)
    tree.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    assert made.num_kept == 20
