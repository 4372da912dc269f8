# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled composites: laws, faithfulness, unbiasedness, and the contract."""

import pickle

from block_tools import NOISY, SHAPE_RATE, exact_posterior, precision_step, spin_block
import numpy as np
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, GibbsBlock, layered, to_datatree, tv_upper_bound
from ebmpp.ppl import Conjugate, CoupledComposite, composite_expectation
from ebmpp.ppl.composite import maximal
from helpers import assert_law, assert_rows_law, slow


def composite(lag: int = 1, **options: object) -> CoupledComposite:
    return CoupledComposite([spin_block(**options), precision_step()], lag=lag)


def everything(sites: dict) -> dict:
    return {"x": sites["x"] > 0, "precision": sites["precision"]}


@pytest.mark.parametrize(("k", "m", "lag"), [slow(1, 1, 1), (3, 6, 2)])  # compiles anew
def test_estimates_of_the_posterior_are_unbiased(k: int, m: int, lag: int) -> None:
    kernel = composite(lag)
    options = {"rng_key": jax.random.key(3), "num_pairs": 3000, "k": k}
    made = composite_expectation(kernel, everything, NOISY, **options, m=m)
    probability, precision = exact_posterior()
    assert_law(made.value["x"], probability, made.standard_error["x"], comparisons=7)
    assert_law(made.value["precision"], precision, made.standard_error["precision"], comparisons=7)
    assert made.num_unmet == 0 and (made.meeting_time > lag).any()
    # a limit stops pairs that have not met, and not those that go on to m
    last = int(made.meeting_time.max())
    again, limited = (
        composite_expectation(kernel, everything, NOISY, **options, m=last + 3, max_sweeps=limit)
        for limit in (None, last)
    )
    jax.tree.map(np.testing.assert_array_equal, limited.value, again.value)


@pytest.mark.slow
def test_metropolis_steps_are_coupled_too() -> None:
    def weight(x: dict, sites: dict, y: jax.Array) -> jax.Array:
        return -0.3 * (x["x"].sum() - 1.0) ** 2

    made = composite_expectation(
        composite(log_weight=weight, fraction=0.7),
        everything,
        NOISY,
        rng_key=jax.random.key(4),
        num_pairs=3000,
        k=4,
    )
    single = MCMC(
        composite(log_weight=weight),
        num_warmup=30,
        num_samples=1,
        num_chains=4000,
        chain_method="vectorized",
        progress_bar=False,
    )
    single.run(jax.random.key(5), NOISY)
    draws = np.asarray(single.get_samples()["x"] > 0, float)
    error = np.hypot(made.standard_error["x"], draws.std(0) / len(draws) ** 0.5)
    assert_law(made.value["x"], draws.mean(0), error)


@pytest.fixture(scope="module")
def pairs() -> MCMC:
    mcmc = MCMC(
        composite(lag=2),
        num_warmup=0,
        num_samples=60,
        num_chains=400,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(6), NOISY, extra_fields=("y", "met", "meeting_time", "t"))
    return mcmc


@pytest.mark.slow
def test_pairs_meet_and_stay_together(pairs: MCMC) -> None:
    fields, draws = (
        pairs.get_extra_fields(group_by_chain=True),
        pairs.get_samples(group_by_chain=True),
    )
    equal = np.ones(fields["met"].shape, bool)
    for site, value in draws.items():
        same = np.asarray(value == fields["y"][site])
        equal &= same.reshape(*equal.shape, -1).all(-1)
    met = np.asarray(fields["met"])
    assert (met == equal).all() and (np.diff(met.astype(int), axis=1) >= 0).all()
    assert met[:, -1].mean() > 0.95
    started_equal = np.asarray(fields["meeting_time"])[:, 0] == 2
    first = np.where(met.any(1), met.argmax(1) + 3, np.asarray(fields["t"])[:, -1])
    assert (np.asarray(fields["meeting_time"])[:, -1] == np.where(started_equal, 2, first)).all()


def test_its_meeting_times_become_a_tree(pairs: MCMC) -> None:
    tree = to_datatree(pairs)
    assert tree.meeting.meeting_time.shape == (400,) and int(tree.meeting.lag) == 2
    assert tree.posterior.x.shape == (400, 60, 2, 3)
    bound = tv_upper_bound(tree)
    assert float(bound.bound[0]) > float(bound.bound[-1]) >= 0


def test_both_chains_of_a_pair_have_the_law_of_one_chain(pairs: MCMC) -> None:
    probability, precision = exact_posterior()
    y = pairs.last_state.y
    z = pairs.last_state.z
    for chain in (z, y):
        assert_rows_law(np.asarray(chain["x"] > 0, float), probability, comparisons=14)
        assert_rows_law(np.asarray(chain["precision"]), precision, comparisons=14)


@pytest.mark.slow
def test_chain_methods_give_the_same_pairs() -> None:
    made = {}
    for method in ("sequential", "vectorized", "parallel"):
        mcmc = MCMC(
            composite(), num_warmup=0, num_samples=5, num_chains=2, chain_method=method, progress_bar=False
        )
        mcmc.run(jax.random.key(7), NOISY)
        made[str(method)] = mcmc.get_samples(group_by_chain=True)
    first, *others = made.values()
    for other in others:
        assert (np.asarray(first["x"]) == np.asarray(other["x"])).all()
        np.testing.assert_allclose(first["precision"], other["precision"], rtol=2e-6)


@pytest.mark.slow
def test_latents_of_a_prior_are_part_of_the_pair() -> None:
    rbm = layered(x=Bernoulli(3), h=Bernoulli(2))
    params = rbm.init(jax.random.key(0)) | {"x:h": 1.5 * jnp.array([[1.0, -1], [0.5, 1], [-1, 0.2]])}
    block = GibbsBlock(rbm, ["x"], params | {"x": lambda sites, y: (y - 0.5) * sites["precision"]})
    law = lambda sites, y: dist.Gamma(2.0 + 1.5, 1.0 + 0.5 * ((y - sites["x"]) ** 2).sum())
    kernel = CoupledComposite([block, Conjugate("precision", law, dist.Gamma(*SHAPE_RATE))])
    y = jnp.array([0.9, 0.2, 0.4])
    made = composite_expectation(kernel, lambda s: s["x"], y, rng_key=jax.random.key(8), num_pairs=3000, k=2)
    states = np.array([[i & 1, i >> 1 & 1, i >> 2] for i in range(8)], float)
    free = -np.asarray(rbm.free_energy(params, {"x": states}))
    rate = 1.0 + 0.5 * ((np.asarray(y) - states) ** 2).sum(1)
    weight = np.exp(free - 3.5 * np.log(rate))
    assert_law(made.value, weight @ states / weight.sum(), made.standard_error)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        (dist.Normal(0.0, 1.0), dist.Normal(1.0, 2.0)),
        slow(dist.Gamma(2.0, 1.0), dist.Gamma(3.0, 2.0)),
        (dist.Normal(jnp.zeros(2), 1.0).to_event(1), dist.Normal(jnp.ones(2), 1.0).to_event(1)),
    ],
)
def test_the_maximal_coupling_has_its_marginals_and_its_probability(
    p: dist.Distribution, q: dist.Distribution
) -> None:
    keys = jax.random.split(jax.random.key(9), 20_000)
    x, y, sound = jax.jit(jax.vmap(lambda key: maximal(key, p, q)))(keys)
    assert sound.all()
    for draws, law in ((x, p), (y, q)):
        assert_rows_law(draws, law.mean, comparisons=8)
        assert_rows_law((draws - law.mean) ** 2, law.variance, comparisons=8)
    own = p.sample(jax.random.key(10), (200_000,))
    overlap = np.minimum(1.0, np.exp(q.log_prob(own) - p.log_prob(own)))
    equal = np.asarray((x == y).reshape(len(x), -1).all(-1), float)
    error = np.hypot(equal.std() / len(equal) ** 0.5, overlap.std() / len(overlap) ** 0.5)
    assert_law(equal.mean(), overlap.mean(), error, comparisons=8)


def test_a_density_that_is_no_number_is_flagged() -> None:
    @jax.jit
    def sound(mean: jax.Array) -> jax.Array:
        return maximal(jax.random.key(0), dist.Normal(0.0, 1.0), dist.Normal(mean, 1.0))[2]

    assert sound(0.5) and not sound(jnp.nan)


@pytest.mark.slow
def test_it_pickles_and_resumes() -> None:
    kernel = pickle.loads(pickle.dumps(composite()))
    run = lambda: MCMC(kernel, num_warmup=0, num_samples=4, progress_bar=False)
    long = MCMC(kernel, num_warmup=0, num_samples=8, progress_bar=False)
    long.run(jax.random.key(1), NOISY)
    mcmc = run()
    mcmc.run(jax.random.key(1), NOISY)
    first = np.asarray(mcmc.get_samples()["x"])
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, NOISY)
    assert (np.concatenate([first, mcmc.get_samples()["x"]]) == np.asarray(long.get_samples()["x"])).all()


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: composite(lag=0), ValueError, "lag is an int"),
        (lambda: CoupledComposite([precision_step(), precision_step()]), ValueError, "precision"),
        (lambda: CoupledComposite([object()]), TypeError, "GibbsBlock or a Conjugate"),
        (lambda: CoupledComposite([spin_block()], coupling="best"), ValueError, "best"),
        (lambda: CoupledComposite([]), ValueError, "no site"),
    ],
)
def test_mistakes_are_told(make: object, error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        make()
