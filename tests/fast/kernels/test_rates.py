# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Kernels whose params move: rates-FPCD, rates-herding, sample penalisation."""

from functools import partial
import pickle

from gibbs_tools import PARAMS, RBM, assert_same, perturbed
import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, BlockedGibbs, Observed, Spin
from ebmpp.errors import IntractableError, ParameterError, StateError
from ebmpp.kernels import RatesFPCD, RatesHerding, SamplePenalization
from helpers import enumerate_numpy, random_params, slow

DATA = np.array([[1, 0, 0, 1], [1, 1, 1, 0], [1, 1, 0, 0]], np.float32)
RATES = jax.device_get(ebmpp.estimators.rates(RBM, PARAMS, DATA))
KEY = jax.random.key(5)


@partial(jax.jit, static_argnums=(0, 1))
def scan(kernel, num_samples, keys, args, clamped, start):
    """In one program: NumPyro's own way compiles several a run."""

    def one(state, _):
        state = kernel.sample(state, args, clamped)
        return state, (state.z, getattr(state, "drift", 0.0))

    state = kernel.init(keys, 0, start, args, clamped)
    state, (z, drift) = jax.lax.scan(one, state, length=num_samples)
    return state, z, drift


def run(kernel, *args, num_samples=8, keys=KEY, start=None, **clamped):
    return jax.device_get(scan(kernel, num_samples, keys, args, clamped, start))


def mcmc(kernel, *args, num_samples=8, num_chains=1, method="vectorized", fields=(), **clamped):
    made = MCMC(
        kernel,
        num_warmup=0,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=method,
        progress_bar=False,
    )
    made.run(KEY, *args, extra_fields=fields, **clamped)
    return made, jax.tree.map(np.asarray, made.get_samples(group_by_chain=True))


# -- what they are ---------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, slow(3)])
def test_at_rate_0_it_is_blocked_gibbs_bit_by_bit(k):
    keys = jax.random.split(KEY, 3)
    state, made, _ = run(RatesFPCD(RBM, rate=0, decay=0.5, k=k), PARAMS, RATES, num_samples=40, keys=keys)
    _, whole, _ = run(BlockedGibbs(RBM), PARAMS, num_samples=40 * k, keys=keys)
    assert_same(made, {b: v[k - 1 :: k] for b, v in whole.items()})
    assert (state.drift == 0).all()


def test_fast_weights_follow_the_recursion_of_the_paper():
    """fast <- decay fast + rate (rates - statistics), by NumPy from the draws alone."""
    rate, decay = 0.2, 0.9
    state, made, drift = run(RatesFPCD(RBM, rate=rate, decay=decay), PARAMS, RATES, num_samples=30)
    fast, norms = {name: np.zeros(np.shape(r)) for name, r in RATES.items()}, []
    for v, h in zip(made["v"], made["h"], strict=True):
        norms.append(np.sqrt(sum((f**2).sum() for f in fast.values())))
        seen = {"v": v, "h": h, "v:h": np.outer(v, h)}
        fast = {name: decay * f + rate * (RATES[name] - seen[name]) for name, f in fast.items()}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.fast, fast)
    size = np.sqrt(sum((np.asarray(p) ** 2).sum() for p in PARAMS.values()))
    np.testing.assert_allclose(drift, np.array(norms) / size, rtol=1e-4)


def test_draws_leave_the_mode_that_gibbs_stays_in():
    """Two modes of opposite sign: what the sampler is for."""
    graph = ebmpp.layered(v=Spin(6), h=Spin(4))
    params = {"v": jnp.zeros(6), "h": jnp.zeros(4), "v:h": jnp.full((6, 4), 1.5)}
    rates = ebmpp.estimators.rates(graph, params, np.array([[1.0] * 6, [-1.0] * 6]))
    changes = lambda made: (np.diff(np.sign(made[1]["v"].sum(-1))) != 0).sum()
    assert changes(run(RatesFPCD(graph, rate=0.0), params, rates, num_samples=400)) == 0
    assert changes(run(RatesFPCD(graph, rate=0.5), params, rates, num_samples=400)) > 3


def test_sample_penalisation_is_rates_of_0():
    none = jax.tree.map(jnp.zeros_like, PARAMS)
    options = {"rate": 0.3, "decay": 0.8}
    made = run(SamplePenalization(RBM, **options), PARAMS, num_samples=30)
    assert_same(made[1], run(RatesFPCD(RBM, **options), PARAMS, none, num_samples=30)[1])


# -- herding ---------------------------------------------------------------------------------------


def test_moments_of_herding_come_to_the_rates_as_one_over_t():
    """T times the error stays bounded: it is the fast weights over the rate."""
    rate, times = 0.2, (64, 256, 1024, 4096)
    state, made, drift = run(RatesHerding(RBM, rate=rate), PARAMS, RATES, num_samples=times[-1])
    seen = {**made, "v:h": np.einsum("ti,tj->tij", made["v"], made["h"])}
    off = {name: s - RATES[name] for name, s in seen.items()}
    scaled = [max(np.abs(o[:t].sum(0)).max() for o in off.values()) for t in times]
    # under a law of 1/sqrt(T) they would grow by a factor of 8
    assert max(scaled) < 2 * scaled[0] and drift.max() < 3
    for name, o in off.items():
        np.testing.assert_allclose(-rate * o.sum(0), state.fast[name], atol=0.02)  # sums in float32
    assert len(np.unique(made["v"], axis=0)) > 3


def test_herding_is_a_function_of_its_start_and_begins_at_a_mode():
    start = {"v": jnp.ones(4), "h": jnp.zeros(3)}
    kernel = RatesHerding(RBM)
    runs = [run(kernel, PARAMS, RATES, num_samples=50, keys=jax.random.key(s), start=start) for s in (0, 1)]
    assert_same(runs[0][1], runs[1][1])
    made = runs[0][1]
    assert len(np.unique(made["v"], axis=0)) > 2
    x = {b: jnp.asarray(a[0]) for b, a in made.items()}  # of the model itself, as nothing has moved yet
    for b in x:
        np.testing.assert_array_equal(RBM.mode(PARAMS, x, b), x[b])


# -- rates -----------------------------------------------------------------------------------------


def test_rates_are_posterior_means_over_rows():
    graph = ebmpp.layered(v=Spin(2), h=ebmpp.Categorical(2, num_categories=3))
    params, rows = random_params(graph, seed=2, scale=1.0), np.array([[1, -1], [1, 1], [-1, 1]])
    weights = np.array([1.0, 2.0, 3.0])
    made = ebmpp.estimators.rates(graph, params, rows, weights=weights)
    states, p, _ = enumerate_numpy(graph, params)
    v, h = (np.array([s[b] for s in states]) for b in ("v", "h"))
    one_hot = (h[..., None] == np.arange(3)).astype(float)
    wanted = {name: 0.0 for name in made}
    for row, weight in zip(rows, weights / weights.sum(), strict=True):
        given = p * (v == row).all(1)
        mean = np.tensordot(given / given.sum(), one_hot, 1)
        found = {"v": row, "h": mean, "v:h": np.einsum("i,jk->ijk", row, mean)}
        wanted = {name: wanted[name] + weight * found[name] for name in made}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), made, wanted)


def test_rates_do_not_depend_on_how_rows_are_cut(monkeypatch):
    whole = ebmpp.estimators.rates(RBM, PARAMS, DATA)
    monkeypatch.setattr("ebmpp.estimators.mean_statistics._CHUNK", 2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        ebmpp.estimators.rates(RBM, PARAMS, DATA),
        whole,
    )


def test_rates_of_a_deep_graph_ask_for_a_posterior():
    deep = ebmpp.layered(v=Bernoulli(3), a=Bernoulli(2), b=Bernoulli(2))
    params, rows = random_params(deep), np.ones((2, 3))
    with pytest.raises(IntractableError, match=r"rates needs an exact positive phase.*MeanField"):
        ebmpp.estimators.rates(deep, params, rows)
    field = ebmpp.estimators.MeanField(30)
    made, means = ebmpp.estimators.rates(deep, params, rows, posterior=field), None
    means = field.statistics(deep, params, {"v": jnp.ones((1, 3))})
    np.testing.assert_allclose(made["a:b"], np.outer(means["a"][0], means["b"][0]), rtol=1e-4)


# -- numpyro's contract ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vectorized", "parallel"])
@pytest.mark.parametrize("make", [RatesFPCD, RatesHerding])
def test_chain_methods_give_the_same_draws(make, method):
    chains = {"num_chains": 2}
    first, other = (
        mcmc(make(RBM, rate=0.2), PARAMS, RATES, method=m, **chains)[1] for m in ("sequential", method)
    )
    assert_same(other, first)
    if make is RatesFPCD:  # herding's are the same once they have climbed to one mode
        assert len(np.unique(first["v"].reshape(2, -1), axis=0)) == 2


def test_rows_of_a_clamped_block_have_fast_weights_of_their_own():
    v, kernel = np.array([[1, 0, 1, 0], [1, 1, 1, 1]], np.float32), RatesFPCD(RBM, rate=0.5, decay=0.9)
    state, made, _ = run(kernel, PARAMS, RATES, num_samples=20, v=v)
    alone, single, _ = run(kernel, PARAMS, RATES, num_samples=20, v=v[0])
    np.testing.assert_array_equal(made["h"][:, 0], single["h"])
    np.testing.assert_allclose(state.fast["v:h"][0], alone.fast["v:h"], rtol=1e-5)
    assert state.fast["v:h"].shape == (2, 4, 3) and state.drift.shape == (2,)


def test_observed_units_stay():
    known = np.array([True, True, False, False])
    clamp = {"v": Observed(np.array([1.0, 0.0, 0.0, 0.0]), known)}
    made = run(RatesHerding(RBM, rate=1.0), PARAMS, RATES, num_samples=30, **clamp)[1]["v"]
    assert (made[:, :2] == [1, 0]).all() and len(np.unique(made[:, 2:], axis=0)) > 1


def test_new_params_and_rates_are_arguments_of_one_program():
    kernel, made = RatesFPCD(RBM, rate=1.0), []
    size = scan._cache_size()
    for level in (0.0, 1.0):
        rates = jax.tree.map(lambda r, level=level: jnp.full(r.shape, level), RATES)
        made.append(run(kernel, perturbed(RBM, int(level)), rates, num_samples=30)[1]["v"].mean())
    assert made[0] < 0.2 and made[1] > 0.8
    assert scan._cache_size() == size + 1
    assert vars(kernel) == {"graph": RBM, "start": "uniform", "rate": 1.0, "decay": 1.0, "k": 1}


def test_they_say_what_they_are_not():
    for kernel in (RatesFPCD(RBM), RatesHerding(RBM), SamplePenalization(RBM)):
        assert "whose params move, not of the model" in repr(kernel)
        assert pickle.loads(pickle.dumps(kernel)).rate == kernel.rate
    made, _ = mcmc(SamplePenalization(RBM, rate=0.1), PARAMS, num_samples=5, fields=("drift",))
    tree = ebmpp.to_datatree(made)
    assert tree.attrs["inference_caveat"] == "draws of a process whose params move, not of the model"
    assert tree["sample_stats"]["drift"].values[0, -1] > 0
    assert made.sampler.get_diagnostics_str(made.last_state).startswith(
        "5 steps, not of the model: params off"
    )
    assert repr(RatesFPCD(RBM, k=2)).endswith("rate=0.01, decay=1.0, k=2): " + RatesFPCD.caveat + ">")


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (RatesFPCD, {"rate": -1.0}, "RatesFPCD: rate is a number of at least 0, not -1.0"),
        (RatesHerding, {"rate": np.inf}, "RatesHerding: rate is a number"),
        (RatesFPCD, {"decay": 1.5}, r"in \[0, 1\], not 1.5"),
        (RatesFPCD, {"k": 0}, "k is an int of at least 1, not 0"),
        (SamplePenalization, {"decay": 1}, "below 1, as without it the draws become uniform"),
    ],
)
def test_wrong_options(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(RBM, **options)


@pytest.mark.parametrize(
    ("make", "args", "error", "message"),
    [
        (RatesFPCD, (PARAMS,), ParameterError, "got 1 positional .*expected 2, the params and the rates"),
        (SamplePenalization, (PARAMS, RATES), ParameterError, "got 2 positional .*expected 1, the params"),
        (
            RatesFPCD,
            (PARAMS, {"v": RATES["v"]}),
            ParameterError,
            "rates, which are shaped .*lacks factor 'h'",
        ),
        (RatesHerding, (PARAMS, RATES | {"v": np.full(4, np.nan)}), ParameterError, "rates.*not finite"),
        (
            RatesHerding,
            (PARAMS, RATES | {"v": np.zeros(3)}),
            ParameterError,
            r"rates.*\(3,\), expected \(4,\)",
        ),
    ],
)
def test_wrong_arguments(make, args, error, message):
    with pytest.raises(error, match=message):
        make(RBM).init(KEY, 0, None, args, {})


def test_clamping_everything_is_refused():
    with pytest.raises(StateError, match="all blocks are clamped"):
        RatesFPCD(RBM).init(KEY, 0, None, (PARAMS, RATES), {"v": np.zeros(4), "h": np.zeros(3)})
