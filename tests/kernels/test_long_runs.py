# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""LongRun: moments of all draws, and a stopped run that resumes bit by bit.

Tests kernels/draw_file.py, kernels/long_run.py, kernels/streaming.py.
"""

from functools import partial
import os
import shutil
import signal

import arviz_stats
from long_run_tools import (
    DRAWS,
    THINNING,
    assert_same_run,
    chains,
    kernel,
    run,
    start_killed_run,
)
from mcmc_tools import samples, strong_params
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS, Gibbs
import pytest
import xarray as xr
import zoo

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    BlockedGibbs,
    Categorical,
    Factor,
    FactorGraph,
    GibbsBlock,
    MaximalCoupling,
    ParallelTempering,
    Spin,
    SwendsenWang,
)
from ebmpp.errors import ArgumentError, CheckpointError
from ebmpp.kernels import LongRun
from ebmpp.kernels.draw_file import DrawFile
from ebmpp.kernels.streaming import variable_names
from helpers import assert_law, nightly


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A run that was never stopped."""
    return run(tmp_path_factory.mktemp("complete"))


@pytest.fixture
def folder(complete, tmp_path):
    """A copy of its directory."""
    shutil.copytree(complete.directory, tmp_path / "run")
    return tmp_path / "run"


class Stopped(Exception):
    pass


# Files are renamed in this order: checkpoints of steps 27, 45 and 60, the complete
# draws.
@pytest.mark.parametrize("calls", [2, nightly(3), nightly(4)])
def test_a_stopped_run_resumes_bit_by_bit(calls, complete, tmp_path, monkeypatch):
    replace, count = os.replace, iter(range(1, 100))

    def replace_or_stop(*args):
        if next(count) >= calls:
            raise Stopped
        replace(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace_or_stop)
        with pytest.raises(Stopped):
            run(tmp_path)
    assert_same_run(run(tmp_path, resume=True), complete)
    assert_same_run(run(tmp_path, resume=True), complete)  # nothing is left to do
    names = lambda directory: sorted(path.name for path in directory.iterdir())
    assert names(tmp_path) == names(complete.directory)


def test_moments_are_those_of_all_draws(complete):
    tree = complete.draws()
    assert not tree.posterior["v"].variable._in_memory
    np.testing.assert_array_equal(tree.sample_stats["i"][0], np.arange(10, 68, 3))
    for block, x in all_draws(chains(), strong_params()).items():
        flat = x.reshape(-1, x.shape[-1]).astype(float)
        np.testing.assert_allclose(
            complete.moments.mean[block], flat.mean(0), rtol=1e-6
        )
        np.testing.assert_allclose(
            complete.moments.variance[block], flat.var(0, ddof=1), rtol=1e-5
        )
        lazy, draws = tree.posterior[block], x[:, THINNING - 1 :: THINNING]
        np.testing.assert_array_equal(lazy[1, 2:17:3], draws[1, 2:17:3])
        np.testing.assert_array_equal(lazy, draws)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"batch_length": 0}, "batch_length"),
        ({"batch_length": 8, "keep": True, "directory": "run"}, "batch_length"),
        ({"keep": True}, "directory"),
        ({"resume": True}, "directory"),
        ({"fn": 3}, "fn"),
        ({"mcmc": 3}, "mcmc"),
        ({"rng_key": jax.random.split(zoo.KEY, 2)}, "rng_key"),
        ({"rng_key": 0}, "rng_key"),
        nightly({"extra_fields": ["energy"]}, "'energy'"),
        nightly({"extra_fields": ["rng_key"]}, "field"),
    ],
)
def test_invalid_arguments_are_refused(options, argument):
    with pytest.raises(ArgumentError, match=argument):
        long_run(**options)


def all_draws(mcmc, *args, **options):
    """Draws that MCMC keeps, without thinning."""
    mcmc.thinning = 1
    mcmc.run(zoo.KEY, *args, **options)
    return samples(mcmc)


def long_run(
    mcmc=None, fn=None, params=None, extra_fields=(), rng_key=zoo.KEY, **options
):
    long = LongRun(chains() if mcmc is None else mcmc, fn, **options)
    return long.run(
        rng_key,
        strong_params() if params is None else params,
        extra_fields=extra_fields,
    )


@pytest.mark.nightly
def test_errors_match_those_computed_from_the_draws():
    moments = long_run(batch_length=7).moments  # the last four draws are no batch
    x = all_draws(chains(), strong_params())["v"].astype(float)
    batches = x[:, :56].reshape(24, 7, 4).mean(1)
    for errors, sizes, exact in (
        (
            "mcse_batches",
            "ess_batches",
            np.sqrt(7 * batches.var(0, ddof=1) / (3 * DRAWS)),
        ),
        ("mcse_chains", "ess_chains", x.mean(1).std(0, ddof=1) / np.sqrt(3)),
    ):
        np.testing.assert_allclose(getattr(moments, errors)["v"], exact, rtol=1e-4)
        size = x.reshape(-1, 4).var(0, ddof=1) / exact**2
        np.testing.assert_allclose(getattr(moments, sizes)["v"], size, rtol=1e-4)
    data = xr.Dataset({"v": (("chain", "draw", "unit"), x)})
    np.testing.assert_allclose(
        moments.r_hat["v"], arviz_stats.rhat(data, method="identity")["v"], rtol=1e-5
    )


@pytest.mark.nightly
def test_means_match_exact_moments():
    moments = long_run(chains(draws=900, count=40), params=zoo.params("rbm")).moments
    for block, exact in zoo.moments("rbm").items():
        for error in (moments.mcse_chains, moments.mcse_batches):
            assert_law(moments.mean[block], exact, error[block], comparisons=14)


@pytest.mark.nightly
def test_one_chain_and_few_draws_have_no_error():
    with pytest.raises(ZeroDivisionError):
        long_run(fn=lambda z: 1 / 0)
    moments = long_run(chains(count=1, draws=3), batch_length=3).moments
    for values in (moments.mcse_chains, moments.mcse_batches, moments.r_hat):
        assert np.isnan(values["v"]).all()
    frozen = long_run(
        params=strong_params() | {"v": np.full(4, 60.0, np.float32)}
    ).moments
    assert (frozen.mean["v"] == 1).all()
    for values in (frozen.mcse_chains, frozen.mcse_batches, frozen.r_hat):
        assert np.isnan(values["v"]).all()


def mixture(y):
    means = numpyro.sample(
        "means", dist.Normal(jnp.array([-2.0, 2.0]), 1.0).to_event(1)
    )
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.5, 0.5])))
        numpyro.sample("y", dist.Normal(means[z], 1.0), obs=y)


POTTS = FactorGraph.from_networkx(
    nx.path_graph(4), lambda size: Categorical(size, 3), shared=True
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind", ["composite", "clusters", MaximalCoupling, ParallelTempering]
)
def test_other_kernels_have_the_same_draws_and_resume(kind, tmp_path):
    if kind == "composite":
        y, method = np.array([-2.1, 1.9, -1.0, 2.5, 0.1], np.float32), jax.vmap
        make = lambda: Gibbs(
            [(GibbsBlock.from_model(mixture, ["z"], y), ["z"]), (NUTS(mixture), None)]
        )
    elif kind == "clusters":
        make, method = lambda: SwendsenWang(POTTS), "vectorized"
    else:
        make, method = lambda: kind(zoo.graph("rbm")), "vectorized"
    options = {"draws": 12, "count": 2, "chain_method": method, "num_warmup": 4}
    long = {"directory": tmp_path, "keep": True, "checkpoint_every": 6}
    kernel, arg = make(), y if kind == "composite" else strong_params()
    arg = {"x": np.zeros((4, 3)), "x:x": 0.4} if kind == "clusters" else arg
    first = LongRun(chains(kernel, **options), **long).run(zoo.KEY, arg)
    with first.draws() as tree:  # HDF5 does not write to a file that is open
        posterior = tree.posterior.load()
    draws = all_draws(chains(kernel, **options), arg)
    for site, x in draws.items():
        np.testing.assert_allclose(posterior[site], x[:, 2::3], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(
            first.moments.mean[site], x.mean((0, 1)), rtol=1e-3, atol=1e-3
        )
    for path in sorted(tmp_path.glob("checkpoint-*.zip"))[1:]:
        path.unlink()
    second = LongRun(chains(make(), **options), **long, resume=True).run(zoo.KEY, arg)
    jax.tree.map(np.testing.assert_array_equal, second.moments.mean, first.moments.mean)
    for site in draws:
        np.testing.assert_array_equal(second.draws().posterior[site], posterior[site])


@pytest.mark.nightly
def test_a_killed_process_resumes_bit_by_bit(complete, tmp_path):
    assert start_killed_run(tmp_path, 3).wait(timeout=300) == -signal.SIGKILL
    # what it was writing
    assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    assert_same_run(run(tmp_path, resume=True), complete)


@pytest.mark.nightly
def test_a_run_can_be_extended_but_not_shortened(complete, tmp_path):
    run(tmp_path, draws=30)
    assert_same_run(run(tmp_path, resume=True), complete)
    with pytest.raises(CheckpointError, match="60 steps.*30"):
        run(tmp_path, draws=30, resume=True)
    (tmp_path / "draws.nc").unlink()
    with pytest.raises(CheckpointError, match=r"draws.nc.* 20 draws"):
        run(tmp_path, resume=True)


def lattice(edges):
    edges = nx.Graph(edges)
    return BlockedGibbs(FactorGraph.from_networkx(edges, Spin, bias=False))


def factor(scale):
    energy = lambda p, x: scale * (x @ p)
    declared = Factor("x", energy=energy, init=jnp.ones(3))
    return BlockedGibbs(FactorGraph(visible={"x": Bernoulli(3)}, factors=[declared]))


def normal(mean=0.0, scale="narrow"):
    wide = 2.0 if scale == "wide" else 1.0
    numpyro.sample("x", dist.Normal(mean, wide))


def composite(y):
    block = GibbsBlock.from_model(mixture, ["z"], y)
    return Gibbs([(block, ["z"]), (NUTS(mixture), None)])


COUPLINGS = {"x:x": np.ones(3, np.float32)}
Y = np.array([-2.1, 1.9, -1.0, 2.5, 0.1], np.float32)
shifted = lambda shift: lambda z: z["x"] + shift


def scaled(scale, z):
    return scale * z["x"]


def chain(*options):
    return lattice([(0, 1), (1, 2), (2, 3)]), COUPLINGS, *options


#: kernel, arguments and function of a run, and of another that it is not
TWO_RUNS = {
    "edges": lambda: (
        chain(),
        (lattice([(0, 1), (0, 2), (2, 3)]), COUPLINGS),
    ),
    "closure": lambda: (
        chain(shifted(np.arange(4.0))),
        chain(shifted(np.arange(4.0) + 1)),
    ),
    "partial": lambda: (chain(partial(scaled, 2)), chain(partial(scaled, 3))),
    "energy": lambda: (
        (factor(1.0), {"x": np.ones(3)}),
        (factor(2.0), {"x": np.ones(3)}),
    ),
    "model": lambda: ((NUTS(normal),), (NUTS(partial(normal, 50.0)),)),
    "acceptance": lambda: (
        (NUTS(normal),),
        (NUTS(normal, target_accept_prob=0.9),),
    ),
    "string": lambda: ((NUTS(normal), 0.0, "narrow"), (NUTS(normal), 0.0, "wide")),
    "data": lambda: ((composite(Y), Y), (composite(Y + 1), Y + 1)),
}


def short_run(directory, kernel, *args, resume=False):
    fn = args[-1] if args and callable(args[-1]) else None
    args = args[:-1] if fn else args
    method = jax.vmap if isinstance(kernel, Gibbs) else "vectorized"
    mcmc = chains(kernel, draws=3, count=2, chain_method=method, num_warmup=0)
    long = LongRun(mcmc, fn, directory=directory, keep=True, resume=resume)
    return long.run(zoo.KEY, *args)


@pytest.mark.parametrize(
    "name",
    ["edges", *map(nightly, ("closure", "partial", "energy", "model"))]
    + [*map(nightly, ("acceptance", "string", "data"))],
)
def test_another_model_or_function_is_refused(name, tmp_path):
    run_of_one, run_of_another = TWO_RUNS[name]()
    first = short_run(tmp_path, *run_of_one)
    with pytest.raises(CheckpointError, match="another run: .*code of one step"):
        short_run(tmp_path, *run_of_another, resume=True)
    resumed = short_run(tmp_path, *run_of_one, resume=True)
    jax.tree.map(
        np.testing.assert_array_equal, first.moments.mean, resumed.moments.mean
    )


def test_a_directory_in_use_is_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match="resume=True"):
        run(folder)
    foreign = tmp_path / "foreign" / "draws.nc"
    foreign.parent.mkdir()
    foreign.write_bytes(b"other data")
    with pytest.raises(CheckpointError, match=foreign.name):
        run(foreign.parent)
    assert foreign.read_bytes() == b"other data"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"some_kernel": "tempering"}, "kernel: .*BlockedGibbs.*ParallelTempering"),
        ({"params": {"v": np.ones(4, np.float32)}}, "arguments"),
        ({"key": jax.random.key(6)}, "rng_key"),
        ({"num_warmup": 8}, "num_warmup: 7 there, 8 here"),
        ({"chain_method": jax.vmap}, "chain_method"),
        ({"fn": lambda z: z["v"]}, "fn"),
        ({"keep": ["v"]}, "keep"),
        ({"batch_length": 12}, "batch_length"),
        ({}, None),
    ],
)
def test_only_the_same_run_resumes(change, message, folder, complete):
    pick = lambda *names: {n: v for n, v in change.items() if n in names}
    options = pick("num_warmup", "chain_method")
    equal = (
        ParallelTempering(zoo.graph("rbm"))
        if "some_kernel" in change
        else BlockedGibbs(zoo.graph("rbm"))
    )
    assert equal is not kernel()
    long = {"batch_length": 9, "keep": True} | pick("fn", "batch_length", "keep")
    call = {"extra_fields": ("i",)} | pick("extra_fields")
    before = sorted(path.name for path in folder.iterdir())
    resumed = LongRun(
        chains(equal, **options),
        **long,
        directory=folder,
        checkpoint_every=20,
        resume=True,
    )
    args = change.get("key", zoo.KEY), strong_params() | change.get("params", {})
    if message is None:
        assert_same_run(resumed.run(*args, **call), complete)
        return
    with pytest.raises(CheckpointError, match=message):
        resumed.run(*args, **call)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_file_takes_sites_of_any_name(tmp_path):
    """Also where one names a group or a dimension of another, which netCDF does not allow."""
    names = ("a", "a/b", "x", "x_dim_0", "chain")
    sites = {name: np.full((2, 3, 4), i) for i, name in enumerate(names)}
    file = DrawFile(tmp_path, 3, 0)
    file.write(0, {"posterior": sites})
    file.finish()
    variables = variable_names(sites)
    with xr.open_datatree(file.path, engine="h5netcdf") as tree:
        for name, x in sites.items():
            np.testing.assert_array_equal(tree.posterior[variables[name]], x)
