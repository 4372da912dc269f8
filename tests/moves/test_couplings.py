# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Couplings of one layer: marginals of both chains and meeting probabilities, for every family.

Tests moves/couplings.py.
"""

import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Binomial,
    Categorical,
    Exponential,
    Family,
    Gaussian,
    Poisson,
    Spin,
)
from ebmpp.core import random
from ebmpp.moves.couplings import KINDS, Attempt, Trial, attempt, resolve
from helpers import assert_law, nightly

ROWS = 5000
ROOT_KEY = np.array([0, 5], np.uint32)
MAXIMAL = ("maximal", "maximal_independent")

#: a family, its natural parameters in the leading chain and in the following one
FAMILIES: dict[str, tuple[Family, list, list]] = {
    "bernoulli": (Bernoulli(3), [0.5, -1.0, 2.0], [-0.4, 0.3, 1.0]),
    "spin": (Spin(2), [0.5, -0.3], [-0.2, 0.4]),
    "categorical": (
        Categorical(2, 3),
        [[0, 1, -1], [0.5, 0.2, 0]],
        [[0.8, 0, 0.3], [-0.5, 0.2, 1]],
    ),
    "binomial": (Binomial(2, total_count=3), [0.5, -1.0], [-0.2, 0.1]),
    "poisson": (Poisson(2), [0.5, 1.2], [0.1, 1.6]),
    "exponential": (Exponential(2), [-1.0, -2.0], [-0.6, -3.0]),
    "gaussian": (Gaussian(2), [0.3, -0.5], [1.0, 0.2]),
    "gaussian_learned": (
        Gaussian(2, "learned"),
        [[0.3, -0.5], [1, -1]],
        [[1, -0.8], [0, -0.4]],
    ),
}


def _is_fast(name: str, kind: str) -> bool:
    """Return True if the pair is not another case of code that a cheaper pair runs."""
    # its draws take as long to compile as draws of all other finite units
    if name == "binomial":
        return False
    match kind:
        case "independent":
            return name == "bernoulli"
        case "reflection":  # the common draw, except for Gaussian units
            return name.startswith("gaussian")
        case "maximal_independent":
            return name in ("bernoulli", "categorical", "gaussian")
        case "common":  # also tested with each family
            return name in ("bernoulli", "categorical", "gaussian_learned")
    return True


def cases(kinds: tuple[str, ...]) -> list:
    """All families times ``kinds``."""
    return [
        (n, k) if _is_fast(n, k) else nightly(n, k) for n in FAMILIES for k in kinds
    ]


every_coupling = pytest.mark.parametrize(("name", "kind"), cases(KINDS))


@functools.cache
def program(family: Family, kind: str):
    """One trial of a coupled draw, compiled once per family and kind."""
    graph = SimpleNamespace(families={"a": family})
    # hundreds of trials of counts take 3 s without optimisation
    options = (
        {"xla_backend_optimization_level": 1} if isinstance(family, Poisson) else {}
    )

    @functools.partial(jax.jit, compiler_options=options)
    def run(eta, other, number, is_first, is_same):
        keys, rows = (
            random.fold_in(ROOT_KEY, jnp.arange(ROWS), number),
            jnp.ones(ROWS, bool),
        )
        trial = Trial(keys, is_first & rows, is_same & rows)
        return attempt(graph.families, kind, ({"a": eta}, {"a": other}), trial)

    return run


def try_once(
    family: Family, kind: str, etas: tuple, number: int = 0, is_same: bool = False
) -> Attempt:
    shape = (ROWS, *family.statistic_shape)
    eta, other = (np.broadcast_to(np.asarray(e, np.float32), shape) for e in etas)
    return program(family, kind)(eta, other, np.uint32(number), number == 0, is_same)


def draw(
    family: Family, kind: str, etas: tuple, is_same: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Coupled draws. Trials repeat, and each chain takes the first proposal that it accepts."""
    chains = [np.zeros((ROWS, *family.shape)), np.zeros((ROWS, *family.shape))]
    is_pending = np.ones((2, ROWS), bool)
    for number in range(500):
        trial = try_once(family, kind, etas, number, is_same)
        assert not np.asarray(trial.broken).any()
        for i, (values, accept) in enumerate(
            [(trial.x, trial.accept_x), (trial.y, trial.accept_y)]
        ):
            accepted = is_pending[i] & np.asarray(accept)
            chains[i][accepted] = np.asarray(values["a"])[accepted]
            is_pending[i] &= ~accepted
        if not is_pending.any():
            return chains[0], chains[1]
    raise AssertionError("some rows were never accepted")


@functools.cache
def pairs(name: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Draws at the two natural parameters of a case."""
    family, eta, other = FAMILIES[name]
    return draw(family, kind, (eta, other))


def unit_distribution(family: Family, eta: np.ndarray) -> stats.rv_continuous:
    """The frozen distribution of one unit."""
    match family:
        case Bernoulli():
            return stats.bernoulli(1 / (1 + math.exp(-eta)))
        case Spin():
            return stats.rv_discrete(
                values=([-1, 1], 1 / (1 + np.exp([2 * eta, -2 * eta])))
            )
        case Categorical():
            return stats.rv_discrete(
                values=(np.arange(len(eta)), np.exp(eta) / np.exp(eta).sum())
            )
        case Binomial():
            return stats.binom(family.total_count, 1 / (1 + math.exp(-eta)))
        case Poisson():
            return stats.poisson(math.exp(eta))
        case Exponential():
            return stats.expon(scale=-1 / eta)
    if not family.learned:
        return stats.norm(eta)
    return stats.norm(-eta[0] / (2 * eta[1]), math.sqrt(-0.5 / eta[1]))


def block_distributions(family: Family, eta: list) -> list:
    return [unit_distribution(family, np.asarray(e, float)) for e in eta]


def probability_table(family: Family, eta: list) -> np.ndarray:
    """Probabilities of all joint values of the block, on a grid for real units."""
    if isinstance(family, Gaussian | Exponential):
        edges = (
            np.linspace(-8, 8, 801)
            if isinstance(family, Gaussian)
            else np.linspace(0, 20, 2001)
        )
        columns = [
            np.diff(unit.cdf(edges)) for unit in block_distributions(family, eta)
        ]
    else:
        values = np.arange(-1, 40)
        columns = [unit.pmf(values) for unit in block_distributions(family, eta)]
    return functools.reduce(np.multiply.outer, columns)


def overlap(name: str) -> float:
    """1 - TV of the two distributions of the block."""
    family, eta, other = FAMILIES[name]
    return float(
        np.minimum(
            probability_table(family, eta), probability_table(family, other)
        ).sum()
    )


def assert_distribution(
    family: Family, eta: list, samples: np.ndarray, num_tests: int = 1
) -> None:
    """Compare the joint distribution function at many points, with binomial standard errors."""
    points = np.array([-1.5, -0.7, 0.0, 0.5, 1.0, 2.0, 4.0])
    below = [unit.cdf(points) for unit in block_distributions(family, eta)]
    exact = functools.reduce(np.multiply.outer, below).ravel()
    corners = np.array(list(itertools.product(points, repeat=len(eta))))
    share = [(samples <= corner).all(-1).mean() for corner in corners]
    error = np.sqrt(np.maximum(exact * (1 - exact), 1e-9) / ROWS)
    assert_law(share, exact, error, num_tests * len(corners))


def assert_share(is_equal: np.ndarray, exact: float, comparisons: int) -> None:
    assert 0.05 < exact < 0.95, "the case cannot show a fault"
    assert_law(
        is_equal.mean(), exact, math.sqrt(exact * (1 - exact) / ROWS), comparisons
    )


@every_coupling
def test_each_chain_keeps_its_distribution(name: str, kind: str) -> None:
    family, *etas = FAMILIES[name]
    for eta, samples in zip(etas, pairs(name, kind), strict=True):
        assert_distribution(family, eta, samples, num_tests=2)


@pytest.mark.parametrize(
    ("name", "kind"), [*cases(MAXIMAL), ("gaussian", "reflection")]
)
def test_maximal_couplings_meet_with_probability_one_minus_tv(
    name: str, kind: str
) -> None:
    x, y = pairs(name, kind)
    assert_share((x == y).all(-1), overlap(name), 2 * len(FAMILIES))


@pytest.mark.parametrize(
    ("name", "kind"), cases(tuple(k for k in KINDS if k != "independent"))
)
def test_equal_conditionals_give_equal_draws(name: str, kind: str) -> None:
    family, eta, _ = FAMILIES[name]
    np.testing.assert_array_equal(*draw(family, kind, (eta, eta)))


@every_coupling
def test_rows_marked_same_stay_equal_despite_rounding(name: str, kind: str) -> None:
    family, eta, _ = FAMILIES[name]
    rounded = np.nextafter(np.asarray(eta, np.float32), np.float32(10))
    x, y = draw(family, kind, (eta, rounded), is_same=True)
    np.testing.assert_array_equal(x, y)
    assert_distribution(family, eta, x)


@every_coupling
def test_invalid_natural_parameters_are_reported(name: str, kind: str) -> None:
    family, eta, other = FAMILIES[name]
    etas = [
        np.tile(np.asarray(e, np.float32), (ROWS, *(1,) * np.ndim(e)))
        for e in (eta, other)
    ]
    unit = (0,) * np.ndim(eta)
    wrong = itertools.product((np.nan, np.inf, -np.inf), ((0,), (0, 1)))
    for row, (value, chains) in enumerate(wrong, start=1):
        for chain in chains:
            etas[chain][(row, *unit)] = value
    etas[1][(7, *unit)] = np.nan
    for is_same in (False, True):
        trial = try_once(family, kind, tuple(etas), is_same=is_same)
        np.testing.assert_array_equal(np.flatnonzero(trial.broken), range(1, 8))


@pytest.mark.parametrize("kind", ["maximal", "common"])
def test_negative_precisions_are_reported(kind: str) -> None:
    family, eta, _ = FAMILIES["gaussian_learned"]
    assert np.asarray(
        try_once(family, kind, (eta, [[0.3, 0.5], [1.0, -1.0]])).broken
    ).all()


def natural_parameters(mean: list[float], scale: list[float]) -> list[list[float]]:
    return [[m / s**2, -0.5 / s**2] for m, s in zip(mean, scale, strict=True)]


@pytest.mark.parametrize("variance", ["unit", nightly("learned")])
def test_reflection_mirrors_the_noise_of_pairs_that_do_not_meet(variance: str) -> None:
    family = Gaussian(2, variance=variance)
    means, scale = np.array([[0.3, -0.5], [1.0, 0.2]]), np.array([0.5, 2.0])
    etas = tuple(natural_parameters(mean, scale) for mean in means)
    if variance == "unit":
        scale, etas = np.ones(2), tuple(means)
    x, y = draw(family, "reflection", etas)
    distance = np.linalg.norm((means[1] - means[0]) / scale)
    is_equal = (x == y).all(-1)
    assert_share(is_equal, 2 * stats.norm.cdf(-distance / 2), 2)
    noise = np.stack([(x - means[0]) / scale, (y - means[1]) / scale])[:, ~is_equal]
    axis = (means[1] - means[0]) / scale / distance
    mirrored = noise[0] - 2 * np.outer(noise[0] @ axis, axis)
    np.testing.assert_allclose(noise[1], mirrored, atol=1e-4)


def test_reflection_with_unequal_scales_shares_the_noise() -> None:
    family = Gaussian(2, variance="learned")
    etas = (
        natural_parameters([0.3, -0.5], [0.5, 2.0]),
        natural_parameters([1.0, -0.5], [0.5, 1.0]),
    )
    x, y = draw(family, "reflection", etas)
    np.testing.assert_allclose(
        (x - [0.3, -0.5]) / [0.5, 2.0], (y - [1.0, -0.5]) / [0.5, 1.0], atol=1e-5
    )


LAYERS = (("v",), ("h",), ("g",))


def test_one_kind_per_layer() -> None:
    assert resolve(None, LAYERS) == resolve("maximal", LAYERS) == ("maximal",) * 3
    assert resolve(["common", "independent", "maximal"], LAYERS) == (
        "common",
        "independent",
        "maximal",
    )
