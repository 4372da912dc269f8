# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""ArviZ as its users call it: its functions on our runs, names of dimensions, statistics under its names.

These run on both of its lines: 0.23 (Python 3.11), and 1.x.
"""

import arviz as az
import arviz_base
from block_tools import NOISY, precision_step, spin_block
import matplotlib
import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    BlockedGibbs,
    EnergyDistribution,
    FactorGraph,
    GibbsBlock,
    Spin,
    layered,
    to_datatree,
)
from ebmpp.diagnostics import to_arviz
from ebmpp.errors import ArgumentError
from ebmpp.ppl import CoupledComposite, Exchange

BOARD = layered(v=Bernoulli((2, 3)), h=Bernoulli(2))
PATH = nx.relabel_nodes(nx.path_graph(3), dict(enumerate("abc")))
ISING = FactorGraph.from_networkx(PATH, Spin, shared=True)
PARAMS = {"x": jnp.zeros(3), "x:x": jnp.asarray(0.3)}
FIELD = np.array([0.8, -0.4, 1.1], np.float32)


def run(kernel, *args, samples=40, chains=2, warmup=0, extra_fields=(), method="vectorized", **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=samples,
        num_chains=chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *args, extra_fields=extra_fields, **kwargs)
    return mcmc


@pytest.fixture(scope="module")
def board() -> MCMC:
    return run(BlockedGibbs(BOARD), BOARD.init(jax.random.key(0)))


@pytest.fixture(scope="module")
def composite() -> MCMC:
    """Spins in a plate's rows, and the noise scale by NUTS."""

    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal())
        with numpyro.plate("image", 2):
            x = numpyro.sample("x", EnergyDistribution(ISING, PARAMS, num_sweeps=2))
            numpyro.sample("y", dist.Normal(x, scale).to_event(1), obs=y)

    field = lambda sites, y: PARAMS["x"] + y / sites["scale"] ** 2
    block = GibbsBlock(ISING, ["x"], PARAMS | {"x": field})
    fields = ("block_states.0.accepted", "block_states.1.accept_prob", "block_states.1.potential_energy")
    y = jnp.stack([FIELD, -FIELD])
    kernel = Gibbs([(block, ["x"]), (NUTS(model), None)])
    return run(kernel, y, samples=20, warmup=5, extra_fields=fields, method="sequential")


@pytest.fixture(scope="module")
def exchange() -> MCMC:
    coupling = lambda sites, x: PARAMS | {"x:x": sites["J"]}
    kernel = Exchange(ISING, {"J": dist.Uniform(0, 1)}, coupling, lambda sites, x: x, auxiliary="enumerate")
    return run(
        kernel, np.sign(np.stack([FIELD, -FIELD])), warmup=5, extra_fields=("accept_prob", "step_size")
    )


# -- ArviZ's own functions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["summary", "plot_trace", "plot_rank", "plot_ess", "plot_autocorr", "plot_forest", "ess", "rhat"]
)
# matplotlib 3.11 announces what it will take from ArviZ 0.23 in 3.13
@pytest.mark.filterwarnings("ignore::matplotlib.MatplotlibDeprecationWarning")
def test_arvizs_functions_take_a_run(name, board, exchange):
    matplotlib.use("Agg")
    for mcmc, variable in ((board, "h"), (exchange, "J")):
        assert getattr(az, name)(to_arviz(mcmc), var_names=[variable]) is not None
        plt.close("all")


def test_what_arviz_is_given_has_the_draws(board, composite):
    made = to_arviz(board, dims={"v": ["row", "column"]})
    assert made.posterior["v"].dims == ("chain", "draw", "row", "column")
    np.testing.assert_array_equal(made.posterior["h"], board.get_samples(group_by_chain=True)["h"])
    np.testing.assert_array_equal(to_arviz(to_datatree(board)).posterior["h"], made.posterior["h"])
    assert list(az.summary(to_arviz(composite), var_names=["scale"]).index) == ["scale"]


@pytest.mark.slow
def test_arvizs_converter_takes_composites(composite):
    for mcmc in (composite, run(CoupledComposite([spin_block(), precision_step()]), NOISY, samples=5)):
        tree = arviz_base.from_numpyro(mcmc)
        for site, drawn in mcmc.get_samples(group_by_chain=True).items():
            np.testing.assert_array_equal(tree.posterior[site], drawn)


def test_a_block_of_gibbs_has_no_model_and_says_what_converts_it(exchange):
    assert not hasattr(exchange.sampler, "model")  # NumPyro would refuse it as a block
    with pytest.raises(
        AttributeError, match=r"'Exchange' object has no attribute 'model'; ebmpp.to_datatree"
    ):
        arviz_base.from_numpyro(exchange)


# -- names -------------------------------------------------------------------------------------------


def test_dims_and_coords_are_named(board):
    columns = ["left", "middle", "right"]
    tree = to_datatree(board, dims={"v": ["row", "column"]}, coords={"column": columns, "h_dim_0": [7, 9]})
    assert tree.posterior["v"].dims == ("chain", "draw", "row", "column")
    assert list(tree.posterior["column"].values) == columns
    assert list(tree.posterior["row"].values) == [0, 1]
    drawn = board.get_samples(group_by_chain=True)
    np.testing.assert_array_equal(tree.posterior["v"].sel(column="right", row=1), drawn["v"][..., 1, 2])
    np.testing.assert_array_equal(tree.posterior["h"].sel(h_dim_0=9), drawn["h"][..., 1])


def test_rows_of_clamped_values_are_named_too():
    mcmc = run(BlockedGibbs(BOARD), BOARD.init(jax.random.key(0)), samples=3, chains=1, v=np.zeros((4, 2, 3)))
    for dims in (["unit"], ["row", "unit"]):
        tree = to_datatree(mcmc, dims={"h": dims}, coords={"row": list("abcd"), "unit": ["p", "q"]})
        assert tree.posterior["h"].dims == ("chain", "draw", "row", "unit")
        assert list(tree.posterior["row"].values) == list("abcd")
    with pytest.raises(ArgumentError, match=r"it has 1 axes of its own after \['row'\]"):
        to_datatree(mcmc, dims={"h": ["a", "b", "c"]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": {"w": ["a"]}}, r"dims names 'w', and the draws are of \['h', 'v'\]"),
        ({"dims": {"v": ["a"]}}, r"dims of 'v' are \['a'\], and it has 2 axes of its own"),
        ({"dims": {"h": ["a", "b"]}}, r"dims of 'h' are \['a', 'b'\], and it has 1 axes of its own"),
        ({"coords": {"column": [1, 2]}}, r"coords names dimension 'column', and the draws have \['h_dim_0'"),
        ({"coords": {"h_dim_0": [1, 2, 3]}}, "coords of 'h_dim_0' are 3 names, and it has length 2"),
    ],
)
def test_names_that_do_not_fit(options, message, board):
    with pytest.raises(ArgumentError, match=message):
        to_datatree(board, **options)


def test_an_estimate_has_no_dimensions_to_name():
    est = ebmpp.unbiased_expectation(
        ISING, PARAMS, lambda x: x["x"].mean(), rng_key=jax.random.key(0), num_pairs=5, k=2
    )
    with pytest.raises(ArgumentError, match="dims and coords are of a run's draws"):
        to_datatree(est, dims={"x": ["node"]})
    for word in (f"{est.value:.4g}", f"{est.standard_error:.2g}", "5 pairs", "0 unmet", "mean meeting time"):
        assert word in repr(est)


def test_nodes_of_a_network_name_the_units(composite, tmp_path):
    mcmc = run(BlockedGibbs(ISING), PARAMS, samples=5)
    tree = to_datatree(mcmc)
    assert list(tree.posterior["x_dim_0"].values) == ["a", "b", "c"]
    assert list(to_datatree(mcmc, dims={"x": ["node"]}).posterior["node"].values) == ["a", "b", "c"]
    other = to_datatree(mcmc, coords={"x_dim_0": [1, 2, 3]})
    assert list(other.posterior["x_dim_0"].values) == [1, 2, 3]
    assert list(to_datatree(composite).posterior["x"].coords["x_dim_0"].values) == ["a", "b", "c"]
    lattice = FactorGraph.from_networkx(nx.grid_2d_graph(2, 2), Spin, shared=True, bias=False)
    named = to_datatree(run(BlockedGibbs(lattice), {"x:x": jnp.asarray(0.1)}, samples=5))
    assert list(named.posterior["x_dim_0"].values) == ["(0, 0)", "(0, 1)", "(1, 0)", "(1, 1)"]
    named.to_netcdf(tmp_path / "lattice.nc", engine="h5netcdf")


# -- composites, exchange ----------------------------------------------------------------------------


def test_a_composite_of_gibbs(composite):
    tree = to_datatree(composite)
    assert tree.posterior["x"].dims == ("chain", "draw", "image", "x_dim_0")
    for site, drawn in composite.get_samples(group_by_chain=True).items():
        np.testing.assert_array_equal(tree.posterior[site], drawn)
    np.testing.assert_array_equal(tree["observed_data"]["y"], np.stack([FIELD, -FIELD]))
    assert tree["observed_data"]["y"].dims[0] == "image"
    fields = composite.get_extra_fields(group_by_chain=True)
    assert set(tree.sample_stats.data_vars) == {"accepted", "acceptance_rate", "lp"}
    np.testing.assert_array_equal(tree.sample_stats["acceptance_rate"], fields["block_states.1.accept_prob"])
    np.testing.assert_array_equal(tree.sample_stats["lp"], -fields["block_states.1.potential_energy"])
    assert tree.attrs["inference_kernel"] == "Gibbs"


def test_a_block_of_a_model_by_itself_has_the_models_names(tmp_path):
    def model(y):
        with numpyro.plate("points", len(y)):
            z = numpyro.sample("z", dist.Categorical(jnp.full((len(y), 2), 0.5)))
            numpyro.sample("y", dist.Normal(2.0 * z, 1.0), obs=y)

    mcmc = run(GibbsBlock.from_model(model, ["z"], FIELD), FIELD, extra_fields=("kept",), method="sequential")
    tree = to_datatree(mcmc, coords={"points": ["a", "b", "c"]})
    assert tree.posterior["z"].dims == ("chain", "draw", "points")
    assert list(tree.posterior["points"].values) == ["a", "b", "c"]
    np.testing.assert_array_equal(tree.posterior["z"], mcmc.get_samples(group_by_chain=True)["z"])
    np.testing.assert_array_equal(tree["observed_data"]["y"], FIELD)
    assert set(tree.sample_stats.data_vars) == {"kept"} and tree.attrs["inference_kernel"] == "ModelBlock"
    assert "y" not in tree.posterior and mcmc.sampler.sites == ("z",)  # the run is as it was
    assert to_arviz(mcmc).posterior["z"].dims == ("chain", "draw", "points")
    assert not hasattr(mcmc.sampler, "model")
    tree.to_netcdf(tmp_path / "block.nc", engine="h5netcdf")


def test_a_block_of_a_graph_by_itself_has_the_graphs_names():
    start = {"x": jnp.ones((2, 5, 3))}
    block = GibbsBlock(ISING, ["x"], PARAMS)
    mcmc = run(block, samples=5, extra_fields=("accepted", "latents"), method="sequential", init_params=start)
    tree = to_datatree(mcmc)
    assert tree.posterior["x"].dims == ("chain", "draw", "row", "x_dim_0")
    assert list(tree.posterior["x_dim_0"].values) == ["a", "b", "c"]
    np.testing.assert_array_equal(tree.posterior["x"], mcmc.get_samples(group_by_chain=True)["x"])
    assert tree.attrs["graph"] == repr(ISING) and tree.attrs["inference_kernel"] == "GibbsBlock"
    assert set(tree.sample_stats.data_vars) == {"accepted"}
    renamed = to_datatree(mcmc, dims={"x": ["node"]})
    assert renamed.posterior["x"].dims == ("chain", "draw", "row", "node")


def test_an_exchange(exchange):
    tree = to_datatree(exchange)
    np.testing.assert_array_equal(tree.posterior["J"], exchange.get_samples(group_by_chain=True)["J"])
    assert set(tree.sample_stats.data_vars) == {"acceptance_rate", "step_size"}
    assert tree.attrs["graph"] == repr(ISING)


def test_two_blocks_statistics_of_one_name_are_told_apart():
    fields = {"block_states.0.accept_prob": np.zeros((1, 2)), "block_states.1.accept_prob": np.ones((1, 2))}
    made = ebmpp.diagnostics.naming.statistics(fields)
    assert {name: v[0, 0] for name, v in made.items()} == {"acceptance_rate": 0, "acceptance_rate_1": 1}
