# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units that share one hash: bitwise the draws of one hash per unit, and the same in
large sweeps."""

import networkx as nx
import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Binomial, Categorical, FactorGraph, Gaussian, Poisson, Spin
from ebmpp.core import backend, random
from ebmpp.families import Family
from ebmpp.families.family import draw_rows, num_words
from ebmpp.moves import gibbs, gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target
from helpers import nightly, random_params

ROOT_KEY = np.array([0, 1], np.uint32)


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        (Spin(9), 17),
        (Categorical(9, 5), 16),
        nightly(Spin(1), 7),
        nightly(Bernoulli(9), 16),
        nightly(Categorical(64, 5), 40),
    ],
)
def test_shared_hashes_give_the_draws_of_separate_hashes(
    family: Family, rows: int
) -> None:
    assert gibbs.fits_bytes(family)
    eta = 2 * np.random.default_rng(0).normal(
        size=(rows, *family.statistic_shape)
    ).astype(np.float32)

    @jax.jit
    def run(eta):
        keys, families = random.fold_in(ROOT_KEY, jnp.arange(rows)), {"x": family}
        words = random.words(keys, num_words(families))
        expected = draw_rows(families, {"x": eta}, words)["x"]
        return gibbs.draw_pairs(family, gibbs.known({"x": eta}), keys), expected

    result, expected = run(eta)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)
    assert family.size == 1 or len(np.unique(result)) > 1


def test_only_small_values_of_one_word_share_hashes() -> None:
    assert not any(
        map(gibbs.fits_bytes, [Categorical(3, 200), Gaussian(3), Poisson(3)])
    )
    assert gibbs.fits_bytes(Categorical(3, 100))
    assert gibbs.fits_bytes(Binomial(3, 5)) == (Binomial.num_words == 1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("potts", 4),
        *(nightly(n, s) for n in ("spin", "gaussian") for s in (4, 5)),
        nightly("potts", 5),
    ],
)
def test_large_sweeps_equal_small_ones(
    name: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep of many numbers takes another path, which a threshold of 1 forces here."""
    family = {"spin": Spin, "potts": lambda n: Categorical(n, 3), "gaussian": Gaussian}[
        name
    ]
    graph = FactorGraph.from_networkx(
        nx.grid_2d_graph(side, side, periodic=True), family=family
    )
    params = random_params(graph, scale=0.1)

    def run(params):
        keys = random.fold_in(ROOT_KEY, jnp.arange(30))
        x = gibbs.initial_rows(graph, ["x"], keys)
        return draw_sweep(Target(graph, params), x, gibbs_sweep(graph), keys)[0]["x"]

    small = np.asarray(jax.jit(lambda p: run(p))(params))
    monkeypatch.setattr(backend, "_MIN_SIZE", 1)
    large = np.asarray(jax.jit(lambda p: run(p))(params))
    assert len(np.unique(small)) > 1
    if name == "gaussian":  # sums may be rounded differently
        np.testing.assert_allclose(large, small, rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_array_equal(large, small)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [Spin, Gaussian])
def test_large_sweeps_have_the_gradient_of_small_ones(
    family: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = FactorGraph.from_networkx(
        nx.cycle_graph(6), family=family, shared=True, bias=False
    )
    params = graph.init(jax.random.key(0))

    def run(coupling):
        keys = random.fold_in(ROOT_KEY, jnp.arange(4))
        x, target = (
            gibbs.initial_rows(graph, ["x"], keys),
            Target(graph, params | {"x:x": coupling}),
        )
        return (draw_sweep(target, x, gibbs_sweep(graph), keys)[0]["x"] ** 2).sum()

    small = jax.jit(jax.grad(lambda c: run(c)))(0.1)
    monkeypatch.setattr(backend, "_MIN_SIZE", 1)
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda c: run(c)))(0.1), small, rtol=1e-5
    )
    assert (small == 0) == (family is Spin)
