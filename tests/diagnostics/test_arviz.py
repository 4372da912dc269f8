# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""ArviZ's functions on runs, and DataTrees of composites, blocks, Exchange and resumed pairs.

These run on both of its lines: 0.23 (Python 3.11), and 1.x.
"""

import arviz as az
import arviz_base
from block_tools import NOISY, offset_step, spin_block
import matplotlib.pyplot as plt
from mcmc_tools import TWO_MODES, make_mcmc, run_mcmc, samples, strong_params
import networkx as nx
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import NUTS, Gibbs
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    EnergyDistribution,
    FactorGraph,
    GibbsBlock,
    MaximalCoupling,
    Spin,
    to_datatree,
)
from ebmpp.diagnostics import to_arviz
from ebmpp.errors import ArgumentError
from ebmpp.ppl import CoupledComposite, Exchange

pytestmark = pytest.mark.nightly

PARAMS = {"x": np.zeros(3, np.float32), "x:x": np.float32(0.3)}
FIELD = np.array([0.8, -0.4, 1.1], np.float32)


@pytest.fixture(scope="module")
def ising() -> FactorGraph:
    path = nx.relabel_nodes(nx.path_graph(3), dict(enumerate("abc")))
    return FactorGraph.from_networkx(path, Spin, shared=True)


@pytest.fixture(scope="module")
def composite(ising):
    """Spins in a plate's rows, and the noise scale by NUTS."""

    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal())
        with numpyro.plate("image", 2):
            x = numpyro.sample("x", EnergyDistribution(ising, PARAMS, num_sweeps=2))
            numpyro.sample("y", dist.Normal(x, scale).to_event(1), obs=y)

    field = lambda sites, y: PARAMS["x"] + y / sites["scale"] ** 2
    kernel = Gibbs(
        [(GibbsBlock(ising, ["x"], PARAMS | {"x": field}), ["x"]), (NUTS(model), None)]
    )
    names = (
        "block_states.0.accepted",
        "block_states.1.accept_prob",
        "block_states.1.potential_energy",
    )
    options = {
        "num_samples": 20,
        "num_chains": 2,
        "num_warmup": 5,
        "chain_method": "sequential",
    }
    return run_mcmc(kernel, jnp.stack([FIELD, -FIELD]), extra_fields=names, **options)


@pytest.fixture(scope="module")
def exchange(ising):
    coupling = lambda sites, x: PARAMS | {"x:x": sites["J"]}
    kernel = Exchange(
        ising,
        {"J": dist.Uniform(0, 1)},
        coupling,
        lambda sites, x: x,
        auxiliary="enumerate",
    )
    data = np.sign(np.stack([FIELD, -FIELD]))
    options = {"num_samples": 40, "num_chains": 2, "num_warmup": 5}
    return run_mcmc(kernel, data, extra_fields=("accept_prob", "step_size"), **options)


@pytest.mark.parametrize(
    "name",
    ["plot_trace", "plot_rank", "plot_ess", "plot_autocorr", "plot_forest", "rhat"],
)
# matplotlib 3.11 announces what it will take from ArviZ 0.23 in 3.13
@pytest.mark.filterwarnings("ignore::matplotlib.MatplotlibDeprecationWarning")
def test_arviz_functions_accept_a_run(name, exchange):
    mcmc = run_mcmc(
        ebmpp.BlockedGibbs(zoo.graph("rbm")),
        strong_params(),
        num_samples=40,
        num_chains=2,
    )
    for source, variable in ((mcmc, "h"), (exchange, "J")):
        assert getattr(az, name)(to_arviz(source), var_names=[variable]) is not None
        plt.close("all")


def test_arviz_converts_composites(composite):
    coupled = run_mcmc(
        CoupledComposite([spin_block(), offset_step()]),
        NOISY,
        num_samples=5,
        num_chains=2,
    )
    for mcmc in (composite, coupled):
        tree = arviz_base.from_numpyro(mcmc)
        for site, drawn in samples(mcmc).items():
            np.testing.assert_array_equal(tree.posterior[site], drawn)
    assert list(az.summary(to_arviz(composite), var_names=["scale"]).index) == ["scale"]


def test_a_composite(composite):
    tree = to_datatree(composite)
    assert tree.posterior["x"].dims == ("chain", "draw", "image", "x_dim_0")
    assert list(tree.posterior["x"].coords["x_dim_0"].values) == ["a", "b", "c"]
    for site, drawn in samples(composite).items():
        np.testing.assert_array_equal(tree.posterior[site], drawn)
    rows = np.stack([FIELD, -FIELD])
    np.testing.assert_array_equal(tree["observed_data"]["y"], rows)
    noise = dist.Normal(
        tree.posterior["x"].values, tree.posterior["scale"].values[..., None, None]
    )
    np.testing.assert_allclose(
        tree["log_likelihood"]["y"], noise.log_prob(rows).sum(-1), rtol=1e-5
    )
    assert set(tree.sample_stats.data_vars) == {"accepted", "acceptance_rate", "lp"}
    potential = composite.get_extra_fields(group_by_chain=True)[
        "block_states.1.potential_energy"
    ]
    np.testing.assert_array_equal(tree.sample_stats["lp"], -potential)
    assert tree.attrs["inference_kernel"] == "Gibbs"


def test_a_block_of_a_model_has_the_names_of_its_model(tmp_path):
    def model(y):
        with numpyro.plate("points", len(y)):
            z = numpyro.sample("z", dist.Categorical(jnp.full((len(y), 2), 0.5)))
            numpyro.sample("y", dist.Normal(2.0 * z, 1.0), obs=y)

    block = GibbsBlock.from_model(model, ["z"], FIELD)
    mcmc = run_mcmc(
        block,
        FIELD,
        num_chains=2,
        extra_fields=("degenerate",),
        chain_method="sequential",
    )
    tree = to_datatree(mcmc, coords={"points": ["a", "b", "c"]})
    assert (
        tree.posterior["z"].dims
        == to_arviz(mcmc).posterior["z"].dims
        == ("chain", "draw", "points")
    )
    np.testing.assert_array_equal(tree.posterior["z"], samples(mcmc)["z"])
    np.testing.assert_array_equal(tree["observed_data"]["y"], FIELD)
    assert set(tree.sample_stats.data_vars) == {"degenerate"}
    assert tree.attrs["inference_kernel"] == "ModelBlock"
    tree.to_netcdf(tmp_path / "block.nc", engine="h5netcdf")


# of few draws of one binary unit
@pytest.mark.filterwarnings("ignore:Estimated shape parameter:UserWarning")
@pytest.mark.parametrize("with_nuts", [False, True])
def test_scoped_sites_are_variables_with_dots(with_nuts):
    """A slash in a name stands for a group of a tree."""

    def part(y):
        z = numpyro.sample("z", dist.Bernoulli(0.4))
        numpyro.sample("y", dist.Normal(z, 9.0), obs=y)
        numpyro.deterministic("odd", 2 * z + 1)

    def model(y):
        numpyro.sample("chain", dist.Normal(0.0, 1.0))
        with numpyro.plate("points", len(y)):
            handlers.scope(part, "left", hide_types=["plate"])(y)

    sites = ["left/z"] if with_nuts else ["left/z", "chain"]
    kernel = GibbsBlock.from_model(model, sites, FIELD)
    if with_nuts:
        kernel = Gibbs([(kernel, sites), (NUTS(model), None)])
    mcmc = run_mcmc(kernel, FIELD, num_samples=20)
    tree = to_datatree(mcmc, dims={"left/z": ["place"]})
    expected = {"left.z": "left/z", "left.odd": "left/odd", "chain_": "chain"}
    assert set(tree.posterior.data_vars) == set(expected)
    for variable, site in expected.items():
        np.testing.assert_array_equal(tree.posterior[variable], samples(mcmc)[site])
    assert tree.posterior["left.z"].dims == ("chain", "draw", "place")
    assert tree["log_likelihood"]["left.y"].dims == ("chain", "draw", "points")
    np.testing.assert_array_equal(tree["observed_data"]["left.y"], FIELD)
    # z is summed out
    both = dist.Normal(np.arange(2.0)[:, None], 9.0).log_prob(FIELD)
    exact = jax.nn.logsumexp(both, 0, b=np.array([[0.6], [0.4]]))
    likelihood = tree["log_likelihood"]["left.y"]
    np.testing.assert_allclose(
        likelihood, np.broadcast_to(exact, likelihood.shape), rtol=1e-5
    )
    assert az.loo(to_arviz(mcmc)) is not None
    with pytest.raises(ArgumentError, match="names that no site has.*left.odd"):
        to_datatree(mcmc, dims={"left/z": ["left.odd"]})


def test_a_block_of_a_graph_has_the_names_of_its_graph(ising):
    start = {"x": np.ones((2, 5, 3))}
    mcmc = run_mcmc(
        GibbsBlock(ising, ["x"], PARAMS),
        num_chains=2,
        extra_fields=("accepted", "latents"),
        chain_method="sequential",
        init_params=start,
    )
    tree = to_datatree(mcmc)
    assert tree.posterior["x"].dims == ("chain", "draw", "row", "x_dim_0")
    assert list(tree.posterior["x_dim_0"].values) == ["a", "b", "c"]
    assert (
        tree.attrs["graph"] == repr(ising)
        and tree.attrs["inference_kernel"] == "GraphBlock"
    )
    assert set(tree.sample_stats.data_vars) == {"accepted"}


def test_exchange(exchange):
    tree = to_datatree(exchange)
    np.testing.assert_array_equal(tree.posterior["J"], samples(exchange)["J"])
    assert set(tree.sample_stats.data_vars) == {"acceptance_rate", "step_size"}
    # NumPyro would refuse a model on a block
    with pytest.raises(AttributeError, match="to_datatree"):
        arviz_base.from_numpyro(exchange)


def test_an_estimate_has_no_dimensions_to_name(ising):
    estimate = ebmpp.unbiased_expectation(
        ising, PARAMS, lambda x: x["x"].mean(), rng_key=zoo.KEY, num_pairs=5, k=2
    )
    with pytest.raises(ArgumentError, match="dims"):
        to_datatree(estimate, dims={"x": ["node"]})
    assert f"{estimate.value:.4g}" in repr(estimate) and "5 pairs" in repr(estimate)


def test_a_resumed_pair_continues_to_count_sweeps():
    mcmc = make_mcmc(MaximalCoupling(zoo.graph("rbm"), lag=3), 4)
    trees = []
    for key in (zoo.KEY, zoo.KEY):
        mcmc.run(key, TWO_MODES)
        trees.append(to_datatree(mcmc)["meeting"].to_dataset())
        mcmc.post_warmup_state = mcmc.last_state
    for meeting, sweeps in zip(trees, (range(4, 8), range(8, 12)), strict=True):
        assert meeting["meeting_time"].dims == ("chain",)
        np.testing.assert_array_equal(meeting["sweep"], sweeps)
        not_met = (meeting["sweep"] < meeting["meeting_time"]).transpose(
            "chain", "sweep"
        )
        np.testing.assert_array_equal(
            (meeting["distance"] > 0) | ~meeting["met"], not_met | ~meeting["met"]
        )
