# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""DataTrees of runs and fits, and the summary."""

from importlib import metadata
from types import SimpleNamespace
import warnings

import arviz_base
import arviz_stats
import numpy as np
from numpyro.infer import MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel
import pytest
import xarray as xr

import jax

import ebmpp
from ebmpp import Bernoulli, Bias, BlockedGibbs, FactorGraph, MaximalCoupling, layered, to_datatree
from ebmpp.diagnostics import summary
from ebmpp.errors import ArgumentError

RBM = layered(v=Bernoulli(4), h=Bernoulli(3))


def run(graph=RBM, params=None, chains=2, extra_fields=(), kernel=BlockedGibbs, **clamped):
    mcmc = MCMC(
        kernel(graph),
        num_warmup=0,
        num_samples=60,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    params = graph.init(jax.random.key(0)) if params is None else params
    mcmc.run(jax.random.key(1), params, extra_fields=extra_fields, **clamped)
    return mcmc


@pytest.fixture(scope="module")
def mcmc() -> MCMC:
    return run(extra_fields=("i",))


def test_posterior_group(mcmc):
    tree = to_datatree(mcmc)
    assert tree.posterior["v"].dims == ("chain", "draw", "v_dim_0")
    samples = mcmc.get_samples(group_by_chain=True)
    for block in ("v", "h"):
        np.testing.assert_array_equal(tree.posterior[block], samples[block])
    np.testing.assert_array_equal(tree.sample_stats["i"][0], np.arange(1, 61))
    assert tree.attrs["inference_library"] == "ebmpp"
    assert tree.attrs["graph"] == repr(RBM)
    assert tree.posterior.attrs["inference_kernel"] == "BlockedGibbs"
    assert "meeting" not in tree.children


@pytest.mark.parametrize("kernel", [BlockedGibbs, MaximalCoupling])
def test_arvizs_own_converter_takes_the_kernels(kernel) -> None:
    mcmc = run(kernel=kernel)
    tree = arviz_base.from_numpyro(mcmc)
    for block, drawn in mcmc.get_samples(group_by_chain=True).items():
        np.testing.assert_array_equal(tree.posterior[block], drawn)


def test_no_kernel_has_a_model_but_blocks_of_a_composite() -> None:
    # NumPyro refuses a block of Gibbs whose model is None, and ArviZ asks every other kernel for one
    for kernel in vars(ebmpp.kernels).values():
        if isinstance(kernel, type) and issubclass(kernel, MCMCKernel) and hasattr(kernel, "sample_field"):
            is_block = kernel.refresh is not MCMCKernel.refresh
            assert hasattr(kernel, "model") != is_block, kernel


def test_the_version_is_that_of_the_installation(mcmc) -> None:
    assert ebmpp.__version__ == metadata.version("ebmpp")
    assert to_datatree(mcmc).attrs["inference_library_version"] == ebmpp.__version__


def test_rows_come_before_the_blocks_own_dimensions():
    grid = FactorGraph({"x": Bernoulli((2, 3)), "y": Bernoulli(2)}, {}, [Bias("x"), Bias("y")])
    assert to_datatree(run(grid)).posterior["x"].dims == ("chain", "draw", "x_dim_0", "x_dim_1")
    one = to_datatree(run(grid, chains=1, y=np.zeros((5, 2)))).posterior
    assert one["x"].dims == ("chain", "draw", "row", "x_dim_0", "x_dim_1")
    assert one["x"].shape == (1, 60, 5, 2, 3)
    two = to_datatree(run(grid, y=np.zeros((2, 5, 2)))).posterior
    assert two["x"].dims[2:4] == ("row_0", "row_1")


def test_arviz_takes_it_and_netcdf_keeps_it(mcmc, tmp_path):
    tree = to_datatree(mcmc)
    tree.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "run.nc", engine="h5netcdf") as opened:
        loaded = opened.load()
    xr.testing.assert_identical(loaded.posterior.to_dataset(), tree.posterior.to_dataset())
    assert loaded.attrs == tree.attrs
    through_arviz = arviz_base.from_dict({"posterior": mcmc.get_samples(group_by_chain=True)})
    np.testing.assert_array_equal(arviz_stats.ess(loaded)["v"], arviz_stats.ess(through_arviz)["v"])
    np.testing.assert_array_equal(arviz_stats.rhat(loaded)["h"], arviz_stats.rhat(tree)["h"])
    plain = arviz_stats.summary(loaded)
    ours = summary(loaded)
    assert list(ours.index) == list(plain.index)
    np.testing.assert_array_equal(ours[plain.columns], plain)
    assert not ours["frozen"].any()


DEEP = layered(v=Bernoulli(4), h1=Bernoulli(4), h2=Bernoulli(3))
#: latents that hold on to each other, so that pairs take some sweeps to meet
STRONG = {
    "v": np.zeros(4, np.float32),
    "h1": np.full(4, -2.4, np.float32),
    "h2": np.full(3, -3.4, np.float32),
    "v:h1": np.full((4, 4), 0.1, np.float32),
    "h1:h2": np.full((4, 3), 1.8, np.float32),
}


def pairs(chains=3, **options):
    """Coupled chains; "common" compiles fastest."""
    settings = {"num_warmup": 0, "num_samples": 40} | options
    kernel = MaximalCoupling(DEEP, lag=3, coupling="common")
    return MCMC(kernel, num_chains=chains, chain_method="vectorized", progress_bar=False, **settings)


ROWS = np.array([[1.0, 1, 1, 1], [1, 0, 1, 0]])


def meeting_group(mcmc, key, **clamped):
    mcmc.run(key, STRONG, **clamped)
    return to_datatree(mcmc)["meeting"].to_dataset()


@pytest.fixture(scope="module")
def paths() -> MCMC:
    """Three pairs of two rows each, from sweep 4 to 43."""
    mcmc = pairs()
    mcmc.run(jax.random.key(1), STRONG, v=ROWS, extra_fields=("met",))
    return mcmc


def test_meeting_group(paths, tmp_path):
    tree = to_datatree(paths)
    meeting = tree["meeting"].to_dataset()
    assert meeting["meeting_time"].dims == meeting["met"].dims == ("chain", "row")
    np.testing.assert_array_equal(meeting["meeting_time"], paths.last_state.meeting_time)
    assert meeting["met"].dtype == bool and meeting["met"].all()
    assert int(meeting["lag"]) == 3
    np.testing.assert_array_equal(meeting["sweep"], 3 + 1 + np.arange(40))
    for name in ("distance", "energy", "energy_following"):
        assert meeting[name].dims == ("chain", "sweep", "row") and meeting[name].shape == (3, 40, 2)
    apart = (meeting["sweep"] < meeting["meeting_time"]).transpose("chain", "sweep", "row")
    np.testing.assert_array_equal(meeting["distance"] > 0, apart)
    assert apart.sum() > 10
    draws = {b: tree.posterior[b].values for b in ("h1", "h2")}
    energy = DEEP.energy(STRONG, draws | {"v": np.broadcast_to(ROWS, (3, 40, 2, 4))})
    np.testing.assert_allclose(meeting["energy"], energy, rtol=1e-5, atol=1e-6)
    assert set(tree.sample_stats.data_vars) == {"met"}
    tree.to_netcdf(tmp_path / "pairs.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "pairs.nc", engine="h5netcdf") as loaded:
        xr.testing.assert_identical(loaded["meeting"].to_dataset(), meeting)


def test_sweeps_are_numbered_through_warm_up_and_thinning(paths):
    """A pair's sweep draws from its key and its number, so a later run is a piece of the same path."""
    whole = to_datatree(paths)["meeting"].to_dataset()
    piece = meeting_group(pairs(num_warmup=6, num_samples=34, thinning=6), jax.random.key(1), v=ROWS)
    np.testing.assert_array_equal(piece["sweep"], [19, 25, 31, 37, 43])
    xr.testing.assert_equal(piece, whole.sel(sweep=piece["sweep"]))


@pytest.mark.slow
def test_one_pair_resumed():
    """One chain keeps its dimension, and goes on counting; it meets in the second run."""
    mcmc = pairs(chains=1, num_samples=4)
    before = meeting_group(mcmc, jax.random.key(3))
    assert not before["met"].any() and before["meeting_time"].item() == 7
    mcmc.post_warmup_state = mcmc.last_state
    after = meeting_group(mcmc, mcmc.last_state.rng_key)
    for meeting, sweeps in ((before, range(4, 8)), (after, range(8, 12))):
        assert meeting["meeting_time"].dims == ("chain",)
        assert meeting["distance"].dims == ("chain", "sweep")
        np.testing.assert_array_equal(meeting["sweep"], sweeps)
        apart = (meeting["sweep"] < after["meeting_time"]).transpose("chain", "sweep")
        np.testing.assert_array_equal(meeting["distance"] > 0, apart)
    assert after["met"].all() and after["meeting_time"] > 8


def test_a_fit_gives_its_history():
    history = xr.Dataset({"gradient_norm": ("step", [2.0, 1.0])}, {"step": [0, 1]})
    tree = to_datatree(SimpleNamespace(history=history, graph=RBM))
    xr.testing.assert_identical(tree["history"].to_dataset(), history)
    assert tree.attrs["graph"] == repr(RBM)


def test_what_is_refused():
    with pytest.raises(TypeError, match="not dict"):
        to_datatree({})
    with pytest.raises(ArgumentError, match="not of NUTS; arviz_base.from_numpyro converts those of NumPyro"):
        to_datatree(MCMC(NUTS(lambda: None), num_warmup=0, num_samples=1))
    with pytest.raises(ValueError, match="call mcmc.run"):
        to_datatree(MCMC(BlockedGibbs(RBM), num_warmup=0, num_samples=1))
    with pytest.raises(TypeError, match="another fmt"):
        summary(xr.DataTree(), fmt="long")


def test_frozen_chains_have_no_effective_sample_size():
    params = RBM.init(jax.random.key(0))
    params["v"] = params["v"].at[1].set(60.0)
    tree = to_datatree(run(params=params))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert arviz_stats.summary(tree).loc["v[1]", "ess_bulk"] == 120  # what we are guarding against
    with pytest.warns(UserWarning, match=r"1 of 7 values are constant in every chain \(v\[1\]\)"):
        table = summary(tree)
    assert table["frozen"].tolist() == [label == "v[1]" for label in table.index]
    uncertain = ["ess_bulk", "ess_tail", "r_hat", "mcse_mean", "mcse_sd"]
    assert table.loc["v[1]", uncertain].isna().all()
    assert table.loc["v[1]", "mean"] == 1
    assert table.drop(index="v[1]")[uncertain].notna().all(axis=None)
    with pytest.warns(UserWarning, match="1 of 4 values"):
        only = summary(tree, var_names=["v"], kind="diagnostics")
    assert list(only.index) == [f"v[{i}]" for i in range(4)]


def test_chains_frozen_at_different_values_are_frozen():
    stuck = np.broadcast_to(np.array([0.0, 1.0])[:, None], (2, 50))
    one_moves = np.stack([np.zeros(50), np.random.default_rng(0).normal(size=50)])
    tree = arviz_base.from_dict({"posterior": {"stuck": stuck, "one_moves": one_moves}})
    with pytest.warns(UserWarning, match=r"\(stuck\)"):
        table = summary(tree)
    assert table["frozen"].to_dict() == {"stuck": True, "one_moves": False}
    assert np.isnan(table.loc["stuck", "ess_bulk"])
