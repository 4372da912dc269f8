# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled Metropolis chains inside NumPyro, against enumerated ones."""

import functools
import pickle
from typing import Any

from metropolis_tools import Chain
import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Binomial, Categorical, Gaussian, Poisson, Spin, layered
from ebmpp.errors import DeclarationError, IntractableError
from ebmpp.kernels import MetropolisCoupling
from helpers import assert_law, assert_rows_law, pair, random_params, slow

GRAPH = pair(Bernoulli(2), Categorical(1, 3))
PARAMS = random_params(GRAPH, seed=3, scale=1.5)
CHAINS, LAG, SAMPLES = 20_000, 2, 6
START = {"a": jnp.ones(2), "b": jnp.full(1, 2)}


def run(
    kernel: MetropolisCoupling, chains: int, samples: int, method: Any = "vectorized", **clamped: Any
) -> MCMC:
    """Pairs from the same key; all from ``START`` where they are many."""
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=samples,
        num_chains=chains,
        chain_method=method,
        progress_bar=False,
    )
    init = None
    if chains == CHAINS:
        init = {b: jnp.broadcast_to(v, (CHAINS, *v.shape)) for b, v in START.items() if b not in clamped}
    extra = ("y", "met", "meeting_time", "accepted")
    mcmc.run(jax.random.key(3), PARAMS, init_params=init, extra_fields=extra, **clamped)
    return mcmc


def by_time(mcmc: MCMC) -> list[tuple[dict, dict, dict]]:
    """Both chains and the extra fields after each sweep; the leading chain's first is LAG + 1."""
    z, extra = mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(group_by_chain=True)
    at = lambda tree, i: {name: np.asarray(v[:, i]) for name, v in tree.items()}
    y = extra.pop("y")
    return [(at(z, i), at(y, i), at(extra, i)) for i in range(next(iter(z.values())).shape[1])]


@pytest.fixture(scope="module")
def pairs() -> MCMC:
    return run(MetropolisCoupling(GRAPH, lag=LAG), CHAINS, SAMPLES)


def test_once_met_always_met(pairs: MCMC) -> None:
    before = np.zeros(CHAINS, bool)
    for i, (z, y, extra) in enumerate(by_time(pairs)):
        equal = np.all([(z[b] == y[b]).all(-1) for b in z], axis=0)
        assert (equal == extra["met"]).all() and (extra["met"] >= before).all()
        assert ((extra["distance"] == 0) == equal).all()
        energy = np.stack([GRAPH.energy(PARAMS, z), GRAPH.energy(PARAMS, y)], axis=1)
        np.testing.assert_allclose(extra["energies"], energy, atol=1e-5)
        now = LAG + 1 + i
        assert (extra["meeting_time"][~before & (i > 0)] == now).all()  # met now, or not yet
        before = extra["met"]
    assert set(np.unique(extra["meeting_time"])) == set(range(LAG, now + 1))


def test_both_chains_have_the_law_of_a_metropolis_chain(pairs: MCMC) -> None:
    chain = Chain(GRAPH, PARAMS)
    start = chain.at(**START)
    for i, (z, y, _) in enumerate(by_time(pairs)):
        for drawn, t in ((z, LAG + 1 + i), (y, 1 + i)):
            chain.assert_law(drawn, chain.law(start, t), 2 * SAMPLES * len(start))
    distance = 0.5 * np.abs(chain.law(start, 1) - chain.target).sum()
    assert distance > 0.2  # a chain that was stationary at once would be found out


def test_pairs_meet_as_often_as_the_enumerated_pair(pairs: MCMC) -> None:
    chain = Chain(GRAPH, PARAMS)
    joint = chain.pairs(chain.at(**START), LAG, SAMPLES + 1)[1:]
    exact = joint.trace(axis1=1, axis2=2)
    assert 0.1 < exact[0] < exact[-1] < 0.99
    met = [extra["met"].mean() for *_, extra in by_time(pairs)]
    assert_law(met, exact, np.sqrt(exact * (1 - exact) / CHAINS))


def test_acceptance_is_told(pairs: MCMC) -> None:
    chain = Chain(GRAPH, PARAMS)
    start = chain.at(**START)
    rates = [chain.law(start, t) @ chain.accept for t in range(LAG + SAMPLES)]
    state = pairs.last_state
    exact = sum(rates) + sum(rates[:SAMPLES])  # the following chain is LAG sweeps behind
    assert_rows_law(state.accepted, exact)
    told = pairs.sampler.get_diagnostics_str(state)
    assert told.startswith(f"{int(state.met.sum())} of {CHAINS} pairs met, mean meeting time ")
    assert float(told.split("acceptance ")[1]) == pytest.approx(exact / (LAG + 2 * SAMPLES), rel=0.04)


def test_a_clamped_block_is_conditioned_on() -> None:
    v = jnp.array([1.0, 0.0])
    mcmc = run(MetropolisCoupling(GRAPH), CHAINS, 2, a=v)
    assert set(mcmc.get_samples()) == {"b"}
    chain = Chain(GRAPH, PARAMS, among=lambda x: (x["a"] == v).all())
    start = chain.at(b=[2])
    for i, (z, y, _) in enumerate(by_time(mcmc)):
        chain.assert_law(z, chain.law(start, 2 + i), 4 * len(start))
        chain.assert_law(y, chain.law(start, 1 + i), 4 * len(start))


@pytest.mark.parametrize("block", ["a", slow("b")])
def test_a_block_that_is_summed_out_is_drawn_from_its_conditional(block: str) -> None:
    mcmc = run(MetropolisCoupling(GRAPH, marginalize=block), CHAINS, 2)
    chain = Chain(GRAPH, PARAMS, summed=(block,))
    start = chain.at(**START)
    np.testing.assert_allclose(chain.target @ chain.step, chain.target)
    for i, (z, y, _) in enumerate(by_time(mcmc)):
        chain.assert_law(z, chain.law(start, 2 + i), 8 * len(start))
        chain.assert_law(y, chain.law(start, 1 + i), 8 * len(start))


V = jnp.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])


@functools.cache
def two_chains(method: Any) -> MCMC:
    return run(MetropolisCoupling(GRAPH), 2, 40, method, a=V)


# NumPyro donates its collection of scalars and cannot always use it under a vmap of its own
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.slow  # the kernels' states and batching are those of MaximalCoupling, where this is not slow
@pytest.mark.parametrize("method", ["sequential", "parallel", jax.vmap])
def test_chain_methods_agree_bitwise(method: Any) -> None:
    wanted, given = (
        {**mcmc.get_samples(), **mcmc.get_extra_fields()}
        for mcmc in (two_chains("vectorized"), two_chains(method))
    )
    assert set(wanted) >= {"b", "y", "met", "accepted", "distance"}
    jax.tree.map(np.testing.assert_array_equal, given, wanted)


@pytest.mark.slow
def test_clamped_rows_meet_row_by_row() -> None:
    mcmc = two_chains("vectorized")
    state = mcmc.last_state
    assert state.met.shape == state.accepted.shape == (2, 4) and state.met.all()
    assert len(np.unique(state.meeting_time)) > 1
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["b"])
    assert draws.shape == (2, 40, 4, 1)
    assert (draws[:, :, 0] != draws[:, :, 3]).any()  # rows clamped alike have their own words


@pytest.mark.slow
def test_observed_rows_are_held_row_by_row() -> None:
    values = jnp.array([[1.0, 0.0], [0.0, jnp.nan], [jnp.nan, 1.0]])
    known = ~jnp.isnan(values)
    mcmc = run(MetropolisCoupling(GRAPH), 3, 40, a=ebmpp.Observed(values, known))
    draws = np.asarray(mcmc.get_samples()["a"])
    assert (draws[:, known] == np.asarray(values[known])).all()
    assert {0.0, 1.0} == set(draws[:, ~known].ravel())
    assert mcmc.last_state.met.all()


# -- the declaration -----------------------------------------------------------------------------

DEEP = layered(v=Bernoulli(2), h1=Spin(2), h2=Bernoulli(2))


@pytest.mark.parametrize(
    ("graph", "options", "error", "message"),
    [
        (DEEP, {"proposal": "gaussian"}, ValueError, r"proposal 'gaussian' is unknown; .*\('uniform', 'ini"),
        (DEEP, {"lag": 0}, ValueError, "lag is an int of at least 1, not 0"),
        (
            DEEP,
            {"init": "mode"},
            ValueError,
            "init is one of 'uniform', 'local_mode', or give states .* not 'mode'",
        ),
        (DEEP, {"marginalize": ("h1", "w")}, ValueError, r"marginalize=\('h1', 'w'\).*\('v', 'h2', 'h1'\)"),
        (DEEP, {"marginalize": ("v", "h1", "h2")}, ValueError, "leave at least one"),
        (DEEP, {"marginalize": ("h1", "h2")}, IntractableError, "'h1' and 'h2' interact, .*summed out"),
        (pair(Gaussian(2), Spin(2)), {}, DeclarationError, r"block 'a' \(Gaussian\(2, .* no uniform law"),
        (pair(Spin(2), Poisson(2)), {}, DeclarationError, r"block 'b' \(Poisson\(2\)\) has no uniform law"),
        (pair(Binomial(2, 3), Spin(2)), {}, DeclarationError, r"block 'a' \(Binomial.*proposal=\"initial\""),
    ],
)
def test_wrong_options(graph: Any, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MetropolisCoupling(graph, **options)


def test_blocks_without_a_uniform_law_are_drawn_initially_or_summed_out() -> None:
    graph = pair(Gaussian(2), Spin(2))
    assert MetropolisCoupling(graph, marginalize="a").marginalize == ("a",)
    kernel = MetropolisCoupling(graph, proposal="initial")
    # where the model is the law of the proposals nothing is refused
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2), "a:b": jnp.zeros((2, 2))}
    keys = jax.random.split(jax.random.key(0), 500)
    state = jax.jit(lambda keys: kernel.init(keys, 0, None, (params,), {}))(keys)
    assert (state.accepted == 1).all() and not state.met.any()
    both = np.stack([state.z["a"], state.y["a"]])
    assert_rows_law(both[0] * both[1], np.zeros(2))
    assert_rows_law(both.swapaxes(0, 1) ** 2, np.ones((2, 2)))


def test_a_kernel_is_what_its_repr_says() -> None:
    kernels = [
        MetropolisCoupling(DEEP),
        MetropolisCoupling(DEEP, proposal="initial", lag=3, marginalize=("v", "h2"), init="local_mode"),
        MetropolisCoupling(DEEP, marginalize="h1"),
        ebmpp.MaximalCoupling(DEEP, lag=2, coupling=["common", "maximal"], init="local_mode"),
    ]
    for kernel in kernels:
        again = eval(repr(kernel), vars(ebmpp) | vars(ebmpp.kernels) | {"__builtins__": {}})
        assert type(again) is type(kernel) and vars(again) == vars(kernel)
        copied = pickle.loads(pickle.dumps(kernel))
        assert vars(copied) == vars(kernel) and repr(copied) == repr(kernel)
    assert repr(kernels[0]) == f"MetropolisCoupling({DEEP!r})"
