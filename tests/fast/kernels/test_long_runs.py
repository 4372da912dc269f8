# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""LongRun: the moments of draws that are not kept, and draws in files."""

import arviz_stats
from gibbs_tools import METHODS, PARAMS, RBM
from long_run_tools import DRAWS, KERNEL, KEY, START, THINNING, chains, corner, longest, run
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
import pytest
import xarray as xr

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import BlockedGibbs, GibbsBlock, MaximalCoupling, ParallelTempering
from ebmpp.errors import ArgumentError, CheckpointError, ParameterError
from ebmpp.kernels import LongRun
from helpers import assert_law, often, random_params


def all_draws(mcmc, *args, extra_fields=(), **kwargs):
    """Those that MCMC keeps, unthinned."""
    whole = MCMC(
        mcmc.sampler,
        num_warmup=mcmc.num_warmup,
        num_samples=mcmc.num_samples,
        num_chains=mcmc.num_chains,
        chain_method=mcmc.chain_method,
        progress_bar=False,
    )
    whole.run(KEY, *args, extra_fields=extra_fields, **kwargs)
    return jax.tree.map(np.asarray, whole.get_samples(group_by_chain=True))


@pytest.mark.parametrize("method", METHODS)
def test_moments_are_those_of_the_draws(method, tmp_path):
    mcmc = chains(count=3, chain_method=METHODS[method])
    options = {"covariance": corner, "fold": (START, longest), "directory": tmp_path, "keep": True}
    made = LongRun(mcmc, **options, every=20, batch_length=8).run(KEY, PARAMS)
    draws = all_draws(mcmc, PARAMS)
    for block, x in draws.items():
        flat = x.reshape(-1, x.shape[-1]).astype(float)
        np.testing.assert_allclose(made.moments.mean[block], flat.mean(0), rtol=1e-12)
        np.testing.assert_allclose(made.moments.variance[block], flat.var(0, ddof=1), rtol=1e-12)
        np.testing.assert_allclose(made.moments.chain_means[block], x.astype(float).mean(1), rtol=1e-12)
        np.testing.assert_array_equal(made.draws().posterior[block], x[:, THINNING - 1 :: THINNING])
    vectors = jax.vmap(jax.vmap(corner))(draws).reshape(-1, 2)
    np.testing.assert_allclose(made.covariance, np.cov(vectors.T), rtol=1e-6)
    on = draws["v"][:, :, 0] > 0
    runs = [[len(part) for part in "".join("x "[not b] for b in chain).split()] for chain in on]
    np.testing.assert_array_equal(made.folded[1], [max(each) for each in runs])


def test_errors_are_those_of_the_draws():
    made = LongRun(chains(), batch_length=7).run(KEY, PARAMS)  # the last four draws make no batch
    x = all_draws(chains(), PARAMS)["v"].astype(float)
    batches = x[:, :56].reshape(3, 8, 7, 4).mean(2)
    error = np.sqrt(7 * batches.reshape(24, 4).var(0, ddof=1) / (3 * DRAWS))
    np.testing.assert_allclose(made.moments.mcse_batches["v"], error, rtol=1e-10)
    by_chains = x.mean(1).std(0, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(made.moments.mcse_chains["v"], by_chains, rtol=1e-10)
    for errors, sizes in ((error, "ess_batches"), (by_chains, "ess_chains")):
        independent = x.reshape(-1, 4).var(0, ddof=1) / errors**2
        np.testing.assert_allclose(getattr(made.moments, sizes)["v"], independent, rtol=1e-10)
    data = xr.Dataset({"v": (("chain", "draw", "unit"), x)})
    np.testing.assert_allclose(made.moments.r_hat["v"], arviz_stats.rhat(data, method="identity")["v"])


def test_means_have_the_law_and_errors_their_size():
    params = random_params(RBM, 1)
    made = LongRun(chains(draws=900, count=40)).run(KEY, params)
    exact = ebmpp.exact.moments(RBM, params)
    for block in exact:
        for error in (made.moments.mcse_chains, made.moments.mcse_batches):
            assert_law(made.moments.mean[block], exact[block], error[block], comparisons=14)
    independent = LongRun(chains(draws=900, count=40)).run(KEY, jax.tree.map(jnp.zeros_like, params))
    sizes = np.concatenate([*independent.moments.ess_batches.values()]) / 36_000
    assert_law(sizes.mean(), 1, np.sqrt(2 / (40 * 30 * 7)))  # chi-squares of 1,200 batches each, 7 of them
    assert (np.abs(independent.moments.r_hat["v"] - 1) < 0.01).all()


def test_one_chain_and_few_draws_have_no_error():
    made = LongRun(chains(count=1, draws=3), batch_length=3).run(KEY, PARAMS)
    assert np.isnan(made.moments.mcse_chains["v"]).all() and np.isnan(made.moments.mcse_batches["v"]).all()
    assert np.isnan(made.moments.r_hat["v"]).all()
    held = LongRun(chains(count=2)).run(KEY, PARAMS | {"v": jnp.full(4, 60.0)})
    assert (held.moments.mean["v"] == 1).all() and np.isnan(held.moments.r_hat["v"]).all()
    assert np.isnan(held.moments.ess_chains["v"]).all()


def test_real_values_far_from_zero_keep_their_variance():
    graph = ebmpp.FactorGraph({"x": ebmpp.Gaussian(2)}, factors=[ebmpp.Bias("x")])
    mcmc = chains(BlockedGibbs(graph), draws=500, count=4)
    made = LongRun(mcmc, lambda z: z["x"] + 1000.0).run(KEY, {"x": jnp.zeros(2)})
    kept = np.asarray(all_draws(mcmc, {"x": jnp.zeros(2)})["x"] + np.float32(1000)).astype(float)
    np.testing.assert_allclose(made.moments.variance, kept.reshape(-1, 2).var(0, ddof=1), rtol=1e-5)


def test_any_function_and_any_field():
    fn = lambda z: {"both": (z["v"].sum(), z["h"] > 0)}
    made = LongRun(chains(), fn).run(KEY, PARAMS, extra_fields=("i",))
    draws = all_draws(chains(), PARAMS)
    total, on = made.moments.mean["both"]
    np.testing.assert_allclose(total, draws["v"].sum(-1).astype(float).mean(), rtol=1e-12)
    np.testing.assert_allclose(on, (draws["h"] > 0).mean((0, 1)), rtol=1e-12)
    np.testing.assert_allclose(made.fields["i"].mean, 7 + np.arange(1, DRAWS + 1).mean())


def test_clamped_rows_and_initial_values_are_as_in_mcmc():
    v, first = np.array([[0, 1, 1, 0], [1, 1, 1, 1]]), {"h": np.ones((3, 2, 3))}
    mcmc = chains(draws=12, num_warmup=0)
    made = LongRun(mcmc).run(KEY, PARAMS, v=v, init_params=first)
    draws = all_draws(mcmc, PARAMS, v=v, init_params=first)["h"]
    np.testing.assert_allclose(made.moments.mean["h"], draws.mean((0, 1)), rtol=1e-7)


def test_it_goes_on_where_a_run_ended():
    made = LongRun(chains(draws=30)).run(KEY, PARAMS)
    mcmc = chains(draws=30)
    mcmc.run(KEY, PARAMS)
    np.testing.assert_array_equal(made.last_state.z["v"], mcmc.last_state.z["v"])
    mcmc.post_warmup_state = made.last_state
    again = LongRun(mcmc).run(made.last_state.rng_key, PARAMS)
    whole = LongRun(chains(draws=60)).run(KEY, PARAMS)
    both = (made.moments.mean["v"] + again.moments.mean["v"]) / 2
    np.testing.assert_allclose(both, whole.moments.mean["v"], rtol=1e-12)


def test_a_second_run_traces_nothing():
    traced = []

    def fn(z):
        traced.append(None)
        return z["v"]

    long = LongRun(chains(), fn)
    long.run(KEY, PARAMS)
    once = len(traced)
    other = long.run(jax.random.key(9), PARAMS | {"v": jnp.full(4, 60.0)})
    longer = LongRun(chains(draws=90), fn).run(KEY, PARAMS)
    assert (other.moments.mean == 1).all() and longer.num_draws == 90
    assert once and len(traced) == once


# -- kernels ---------------------------------------------------------------------------------------


def mixture(y):
    means = numpyro.sample("means", dist.Normal(jnp.array([-2.0, 2.0]), 1.0).to_event(1))
    numpyro.deterministic("gap", means[1] - means[0])
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.5, 0.5])))
        numpyro.sample("y", dist.Normal(means[z], 1.0), obs=y)


def looking(y):
    """A model whose Python looks at its data."""
    assert float(np.max(np.asarray(y))) > 1
    mixture(y)


def regression(y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]))
    numpyro.sample("y", dist.Normal(slope.sum(), numpyro.sample("scale", dist.HalfNormal(1))), obs=y)


Y = np.array([-2.1, 1.9, -1.0, 2.5, 0.1], np.float32)


def block(model):
    return Gibbs([(GibbsBlock.from_model(model, ["z"], Y), ["z"]), (NUTS(model), None)])


KERNELS = {
    "nuts": (lambda: NUTS(regression), "sequential", Y),
    "composite": (lambda: block(mixture), jax.vmap, Y),
    "nuts together": (lambda: NUTS(regression), "vectorized", Y),
    "composite, constants": (lambda: block(looking), "sequential", Y),
    "composite, two devices": (lambda: block(mixture), "parallel", Y),
    "pairs": (lambda: MaximalCoupling(RBM), "vectorized", PARAMS),
    "tempering": (lambda: ParallelTempering(RBM), "vectorized", PARAMS),
}


@pytest.mark.parametrize("name", often(KERNELS, "pairs"))
def test_every_kernel(name, tmp_path):
    make, method, arg = KERNELS[name]
    kernel = make()
    mcmc = chains(kernel, draws=12, count=2, chain_method=method, num_warmup=4)
    draws = all_draws(mcmc, arg)
    made = LongRun(mcmc, directory=tmp_path, keep=True, every=6).run(KEY, arg)
    kept = made.draws().posterior
    for site, x in draws.items():
        np.testing.assert_allclose(kept[site], x[:, 2::3], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(made.moments.mean[site], x.mean((0, 1)), rtol=1e-3, atol=1e-3)
    fresh = chains(make(), draws=12, count=2, chain_method=method, num_warmup=4)
    for path in tmp_path.glob("checkpoint-00001[26].zip"):
        path.unlink()  # only that of step 6 is left
    again = LongRun(fresh, directory=tmp_path, keep=True, every=6, resume=True).run(KEY, arg)
    jax.tree.map(np.testing.assert_array_equal, again.moments.mean, made.moments.mean)
    for site in draws:
        np.testing.assert_array_equal(again.draws().posterior[site], kept[site])


# -- draws in files --------------------------------------------------------------------------------


def test_draws_stay_in_their_files(tmp_path):
    made = run(tmp_path)
    tree = made.draws()
    files = sorted(p.name for p in tmp_path.glob("draws-*.nc"))
    assert len(files) == 4 and files[0] == "draws-000000000-000000004.nc"
    x = all_draws(chains(), PARAMS)["v"][:, 2::3]
    lazy = tree.posterior["v"]
    held = xr.DataArray(x, dims=lazy.dims)
    for key in [
        (0,),
        (slice(None), -1),
        (1, slice(2, 17, 3), 2),
        (slice(None), slice(None, None, -2)),
        (slice(None), slice(3, 3)),
        ([0, 2], [19, 0, 5]),
        (slice(None), np.array([7, 7, 1]), slice(1, 3)),
    ]:
        np.testing.assert_array_equal(lazy[key].values, held[key].values)
    np.testing.assert_array_equal(tree.sample_stats["i"][0], np.arange(10, 68, 3))
    first = xr.open_datatree(tmp_path / files[0], engine="h5netcdf")
    assert first.posterior["v"].shape == (3, 4, 4)
    first.close()


def test_some_sites_alone_are_kept(tmp_path):
    made = run(tmp_path, keep=["h"])
    assert set(made.draws().posterior.data_vars) == {"h"} and "v" in made.moments.mean
    with pytest.raises(ArgumentError, match="unknown site 'w'; there is 'h', 'v'"):
        run(tmp_path / "other", keep=["w"])
    with pytest.raises(ArgumentError, match="kept no draws: give LongRun"):
        run().draws()


def test_a_file_that_is_gone_or_damaged_is_told(tmp_path):
    made = run(tmp_path)
    opened, victim = made.draws(), tmp_path / "draws-000000004-000000011.nc"
    whole = victim.read_bytes()
    hurt = bytearray(whole)
    at = whole.find(np.ascontiguousarray(made.draws().posterior["v"][:, 4:11].values).tobytes())
    assert at > 0
    hurt[at] ^= 1
    victim.write_bytes(hurt)
    with pytest.raises(CheckpointError, match=f"{victim.name}, which holds draws of the run, cannot be read"):
        opened.posterior["v"].values
    victim.unlink()
    opened.posterior["v"][:, :4].load()  # others can be read
    with pytest.raises(CheckpointError, match="lacks the file of draws 4 and after, and the run has 20"):
        made.draws()


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fn": 3}, "LongRun: fn is a function of a draw, not 3"),
        ({"fn": lambda a, b: a}, "fn is a function of a draw, one argument"),
        ({"covariance": "v"}, "LongRun: covariance is a function of a draw, not 'v'"),
        ({"fold": longest}, r"LongRun: fold is a pair \(start, step\)"),
        ({"fold": (0, lambda carry: carry)}, "the step of fold is a function of a carry and a draw, 2"),
        ({"batch_length": 0}, "LongRun: batch_length is an int of at least 1, not 0"),
        ({"every": 2.5}, "LongRun: every is an int of at least 1, not 2.5"),
        ({"keep": True}, "LongRun: keep is about files: give directory"),
        ({"resume": True}, "LongRun: resume is about files: give directory"),
        ({"resume": 1, "directory": "x"}, "LongRun: resume is True or False, not 1"),
        ({"keep": "v", "directory": "x"}, "LongRun: keep is a list of names of sites"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ArgumentError, match=message):
        LongRun(chains(), **options)


def test_what_is_no_mcmc_and_a_thinning_that_does_not_fit(tmp_path):
    with pytest.raises(ArgumentError, match="LongRun: mcmc is a numpyro.infer.MCMC, not a BlockedGibbs"):
        LongRun(KERNEL)
    with pytest.raises(ArgumentError, match="num_samples 61 is no multiple of its thinning 3.*: give 60"):
        LongRun(chains(draws=61), directory=tmp_path, keep=True)
    LongRun(chains(draws=61))  # nothing is kept that could be thinned


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({}, {"rng_key": jax.random.split(KEY, 2)}, "rng_key is one key, or 3, one a chain, not 2"),
        ({}, {"rng_key": 0}, "rng_key is a jax key, not the number 0"),
        ({}, {"init_params": {"v": np.zeros((2, 4))}}, r"array of shape \(2, 4\).* of the 3 chains"),
        ({}, {"extra_fields": "i"}, "LongRun: extra_fields is a list of names of fields, not 'i'"),
        ({}, {"extra_fields": ["energy"]}, r"names 'energy', and the state of BlockedGibbs has \['z', 'i'"),
        ({}, {"extra_fields": ["~z.v"]}, "extra_fields has '~z.v'; fn says whose moments"),
        ({}, {"extra_fields": ["rng_key"]}, "LongRun: a field is real numbers, .* not those of dtype key"),
        ({"fn": lambda z: "v"}, {}, "LongRun: fn is real numbers, arrays or trees of them, not 'v'"),
        ({"fold": (0, lambda c, z: c + z["v"])}, {}, "fold got a carry of .* start with what it returns"),
    ],
)
def test_wrong_calls(options, given, message):
    rest = {name: value for name, value in given.items() if name != "rng_key"}
    with pytest.raises(ArgumentError, match=message):
        LongRun(chains(), **options).run(given.get("rng_key", KEY), PARAMS, **rest)


def test_errors_of_kernels_are_their_own():
    with pytest.raises(ParameterError, match="got 0 positional arguments"):
        LongRun(chains()).run(KEY)
    with pytest.raises(ZeroDivisionError):
        LongRun(chains(), lambda z: 1 / 0).run(KEY, PARAMS)
