# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import functools
import itertools
import math

import numpy as np
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Categorical, FactorGraph, Family, Gaussian, Poisson, Spin
from ebmpp.core import random
from ebmpp.moves.couplings import KINDS, Attempt, Trial, attempt, resolve
from helpers import alone, assert_law

ROWS = 20_000
MAXIMAL = ("maximal", "maximal_independent")

#: a family, its natural parameters in the leading chain and in the following one
CASES: dict[str, tuple[Family, list, list]] = {
    "bernoulli": (Bernoulli(3), [0.5, -1.0, 2.0], [-0.4, 0.3, 1.0]),
    "spin": (Spin(2), [0.5, -0.3], [-0.2, 0.4]),
    "categorical": (
        Categorical(2, num_categories=3),
        [[0.0, 1.0, -1.0], [0.5, 0.2, 0.0]],
        [[0.8, 0.0, 0.3], [-0.5, 0.2, 1.0]],
    ),
    "gaussian": (Gaussian(2), [0.3, -0.5], [1.0, 0.2]),
    "gaussian_learned": (
        Gaussian(2, variance="learned"),
        [[0.3, -0.5], [1.0, -1.0]],
        [[1.0, -0.8], [0.0, -0.4]],
    ),
    "poisson": (Poisson(2), [0.5, 1.2], [0.1, 1.6]),
}


declare = functools.cache(alone)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _jitted(graph: FactorGraph, kind: str, etas: tuple, pairs: jax.Array, first: bool, same: bool) -> Attempt:
    rows = jnp.ones(len(pairs), bool)
    etas = tuple({"a": e} for e in etas)
    return attempt(graph, ("a",), kind, etas, Trial(pairs, first & rows, same & rows))


def try_once(family: Family, kind: str, etas: tuple, pairs: jax.Array, first: bool, same: bool) -> Attempt:
    """One trial of every row: always the same shapes, so that a family and a kind compile once."""
    shape = (ROWS, *family.statistic_shape)
    etas = tuple(np.broadcast_to(np.asarray(e, np.float32), shape) for e in etas)
    return _jitted(declare(family), kind, etas, pairs, first, same)


def key_pairs(trial: int) -> jax.Array:
    """Fresh key pairs for each trial."""
    return random.fold_in(random.key_pair(jax.random.key(5)), jnp.arange(ROWS), trial)


def draw(family: Family, kind: str, etas: tuple, same: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Coupled draws: a trial at a time, each chain keeping the first proposal it accepts."""
    chains = [np.zeros((ROWS, *family.shape)), np.zeros((ROWS, *family.shape))]
    open_rows = np.ones((2, ROWS), bool)
    for trial in range(2000):
        made = try_once(family, kind, etas, key_pairs(trial), trial == 0, same)
        assert not np.asarray(made.broken).any()
        for i, (values, accept) in enumerate([(made.x, made.accept_x), (made.y, made.accept_y)]):
            take = open_rows[i] & np.asarray(accept)
            chains[i][take] = np.asarray(values["a"])[take]
            open_rows[i] &= ~take
        if not open_rows.any():
            return chains[0], chains[1]
    raise AssertionError("rows that were never accepted")


# -- the laws from scipy and enumeration ---------------------------------------------------------


def unit_law(family: Family, eta: np.ndarray) -> stats.rv_continuous:
    """A unit's law, frozen."""
    if isinstance(family, Bernoulli):
        return stats.bernoulli(1 / (1 + math.exp(-eta)))
    if isinstance(family, Spin):
        return stats.rv_discrete(
            values=([-1, 1], [1 / (1 + math.exp(2 * eta)), 1 / (1 + math.exp(-2 * eta))])
        )
    if isinstance(family, Categorical):
        weights = np.exp(eta)
        return stats.rv_discrete(values=(np.arange(len(eta)), weights / weights.sum()))
    if isinstance(family, Poisson):
        return stats.poisson(math.exp(eta))
    if not family.learned:
        return stats.norm(eta)
    return stats.norm(-eta[0] / (2 * eta[1]), math.sqrt(-0.5 / eta[1]))


def unit_grid(family: Family) -> tuple[np.ndarray, float]:
    """A unit's values and the width of a step."""
    if isinstance(family, Gaussian):
        return np.linspace(-8, 8, 801), 0.02
    return {
        "Bernoulli": np.arange(2),
        "Spin": np.array([-1, 1]),
        "Categorical": np.arange(3),
        "Poisson": np.arange(40),
    }[type(family).__name__], 1.0


def block_table(family: Family, eta: list) -> np.ndarray:
    """Probabilities of all joint values of the block (on a mesh for reals)."""
    values, width = unit_grid(family)
    laws = [unit_law(family, np.asarray(e, float)) for e in eta]
    density = [(law.pdf if isinstance(family, Gaussian) else law.pmf)(values) * width for law in laws]
    return functools.reduce(np.multiply.outer, density)


def overlap(name: str) -> float:
    """1 - TV of the two blocks' laws."""
    family, eta, other = CASES[name]
    return float(np.minimum(block_table(family, eta), block_table(family, other)).sum())


def assert_block_law(family: Family, eta: list, drawn: np.ndarray, comparisons: int) -> None:
    """The joint distribution function at many points, with binomial standard errors."""
    points = np.array([-1.5, -0.7, 0.0, 0.5, 1.0, 2.0, 4.0])
    below = [unit_law(family, np.asarray(e, float)).cdf(points) for e in eta]
    exact = functools.reduce(np.multiply.outer, below).ravel()
    cuts = np.array(list(itertools.product(points, repeat=len(eta))))
    share = [(drawn <= cut).all(-1).mean() for cut in cuts]
    error = np.sqrt(np.maximum(exact * (1 - exact), 1e-9) / ROWS)
    assert_law(share, exact, error, comparisons)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_each_chain_keeps_its_own_law(name: str, kind: str) -> None:
    family, eta, other = CASES[name]
    x, y = draw(family, kind, (eta, other))
    comparisons = 2 * 8 ** len(eta)
    assert_block_law(family, eta, x, comparisons)
    assert_block_law(family, other, y, comparisons)


@pytest.mark.parametrize("kind", MAXIMAL)
@pytest.mark.parametrize("name", CASES)
def test_joint_maximal_couplings_meet_with_probability_one_minus_tv(name: str, kind: str) -> None:
    family, eta, other = CASES[name]
    x, y = draw(family, kind, (eta, other))
    exact = overlap(name)
    assert 0.05 < exact < 0.95
    equal = (x == y).all(-1).mean()
    assert_law(equal, exact, math.sqrt(exact * (1 - exact) / ROWS), 2 * len(CASES))


def test_overlap_of_gaussians_in_closed_form() -> None:
    # the mesh of the test above against 2 Phi(-|mean difference| / 2)
    _, eta, other = CASES["gaussian"]
    distance = np.linalg.norm(np.subtract(eta, other))
    assert overlap("gaussian") == pytest.approx(2 * stats.norm.cdf(-distance / 2), abs=1e-4)


@pytest.mark.parametrize("name", ["bernoulli", "spin", "categorical", "poisson"])
def test_common_and_independent_draws_meet_as_often_as_they_should(name: str) -> None:
    family, eta, other = CASES[name]
    p, q = block_table(family, eta), block_table(family, other)
    x, y = draw(family, "independent", (eta, other))
    exact = float((p * q).sum())
    assert_law((x == y).all(-1).mean(), exact, math.sqrt(exact * (1 - exact) / ROWS), 4)
    if name == "poisson":  # not unitwise maximal
        return
    values, _ = unit_grid(family)
    x, y = draw(family, "common", (eta, other))
    for unit, (e, o) in enumerate(zip(eta, other, strict=True)):
        laws = unit_law(family, np.asarray(e)), unit_law(family, np.asarray(o))
        exact = float(np.minimum(laws[0].pmf(values), laws[1].pmf(values)).sum())
        share = (x[:, unit] == y[:, unit]).mean()
        assert_law(share, exact, math.sqrt(exact * (1 - exact) / ROWS), 4 * len(eta))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "independent"])
@pytest.mark.parametrize("name", CASES)
def test_equal_conditionals_give_equal_draws(name: str, kind: str) -> None:
    family, eta, _ = CASES[name]
    x, y = draw(family, kind, (eta, eta))
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_same_holds_chains_together_whatever_the_last_bits(name: str, kind: str) -> None:
    family, eta, _ = CASES[name]
    nudged = np.nextafter(np.asarray(eta, np.float32), np.float32(10))
    x, y = draw(family, kind, (eta, nudged), same=True)
    np.testing.assert_array_equal(x, y)
    assert_block_law(family, eta, x, 8 ** len(eta))


# -- reflection ----------------------------------------------------------------------------------


def learned(mean: list[float], scale: list[float]) -> list[list[float]]:
    """Natural parameters of Gaussians of learned variance."""
    return [[m / s**2, -0.5 / s**2] for m, s in zip(mean, scale, strict=True)]


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("variance", ["unit", "learned"])
def test_reflected_gaussians_meet_as_often_as_can_be_and_are_mirrored_otherwise(
    units: int, variance: str
) -> None:
    family = Gaussian(units, variance=variance)
    means = np.array([[0.3, -0.5, 1.0], [1.0, 0.2, 0.4]])[:, :units]
    scale = np.array([0.5, 2.0, 1.0])[:units] if variance == "learned" else np.ones(units)
    etas = tuple(learned(mean, scale) if variance == "learned" else mean for mean in means)
    x, y = draw(family, "reflection", etas)
    for eta, drawn in zip(etas, (x, y), strict=True):
        assert_block_law(family, eta, drawn, 6 * 2 * 8**units)
    distance = np.linalg.norm((means[1] - means[0]) / scale)
    exact = 2 * stats.norm.cdf(-distance / 2)
    assert 0.05 < exact < 0.95
    equal = (x == y).all(-1)
    assert_law(equal.mean(), exact, math.sqrt(exact * (1 - exact) / ROWS), 6)
    # who does not meet has noise as long as the other's, mirrored at a plane across the gap
    noise = np.stack([(x - means[0]) / scale, (y - means[1]) / scale])[:, ~equal]
    np.testing.assert_allclose(*np.square(noise).sum(-1), rtol=1e-3, atol=1e-4)
    gap = (means[1] - means[0]) / scale / distance
    np.testing.assert_allclose(noise[0] @ gap, -noise[1] @ gap, atol=1e-4)
    np.testing.assert_allclose(noise[1] - noise[0], np.outer((noise[1] - noise[0]) @ gap, gap), atol=1e-4)


def test_reflection_of_unequal_scales_is_the_same_noise() -> None:
    family = Gaussian(2, variance="learned")
    etas = learned([0.3, -0.5], [0.5, 2.0]), learned([1.0, -0.5], [0.5, 1.0])  # one scale is the same
    x, y = draw(family, "reflection", etas)
    for eta, drawn in zip(etas, (x, y), strict=True):
        assert_block_law(family, eta, drawn, 2 * 8**2)
    np.testing.assert_allclose((x - [0.3, -0.5]) / [0.5, 2.0], (y - [1.0, -0.5]) / [0.5, 1.0], atol=1e-5)


@pytest.mark.parametrize("kind", MAXIMAL)
def test_residual_trials_accept_as_enumerated(kind: str) -> None:
    family, eta, other = CASES["bernoulli"]
    made = try_once(family, kind, (eta, other), key_pairs(1), False, False)
    p, q = block_table(family, eta).ravel(), block_table(family, other).ravel()
    keep_x, keep_y = np.maximum(1 - q / p, 0), np.maximum(1 - p / q, 0)
    joint = np.multiply.outer(p, q)
    if kind == "maximal":  # common uniforms, unit by unit
        tables = []
        for e, o in zip(eta, other, strict=True):
            a, b = 1 / (1 + math.exp(-e)), 1 / (1 + math.exp(-o))
            tables.append([[1 - max(a, b), max(b - a, 0)], [max(a - b, 0), min(a, b)]])
        joint = np.einsum("ab,cd,ef->acebdf", *map(np.array, tables)).reshape(8, 8)
        np.testing.assert_allclose(joint.sum(1), p, rtol=1e-12)
    accept_x, accept_y = np.asarray(made.accept_x), np.asarray(made.accept_y)
    exact = [p @ keep_x, q @ keep_y, keep_x @ joint @ keep_y]
    means = [accept_x.mean(), accept_y.mean(), (accept_x & accept_y).mean()]
    assert exact[0] == pytest.approx(1 - overlap("bernoulli"))
    assert_law(means, exact, np.sqrt(np.multiply(exact, np.subtract(1, exact)) / ROWS), 6)


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_natural_parameters_that_are_not_finite_are_reported(name: str, kind: str, same: bool) -> None:
    family, eta, other = CASES[name]
    # row 0 is sound, then nan, inf and -inf in one chain or in both
    etas = [np.tile(np.asarray(e, np.float32), (ROWS, *(1,) * np.ndim(e))) for e in (eta, other)]
    unit = (0,) * np.ndim(eta)
    for row, (value, chains) in enumerate(
        itertools.product((np.nan, np.inf, -np.inf), ((0,), (0, 1))), start=1
    ):
        for chain in chains:
            etas[chain][(row, *unit)] = value
    etas[1][(7, *unit)] = np.nan
    made = try_once(family, kind, tuple(etas), key_pairs(0), True, same)
    np.testing.assert_array_equal(made.broken, [False] + [True] * 7 + [False] * (ROWS - 8))


def test_a_precision_outside_the_domain_is_reported() -> None:
    family, eta, _ = CASES["gaussian_learned"]
    outside = [[0.3, 0.5], [1.0, -1.0]]
    for kind in KINDS:
        etas = (eta, outside)
        assert np.asarray(try_once(family, kind, etas, key_pairs(0), True, False).broken).all()


LAYERS = (("v",), ("h",), ("g",))


def test_resolve_names_one_kind_a_layer() -> None:
    assert resolve(None, LAYERS) == ("maximal", "maximal", "maximal")
    assert resolve("maximal", LAYERS) == ("maximal",) * 3
    assert resolve(["common", "independent", "maximal_independent"], LAYERS) == (
        "common",
        "independent",
        "maximal_independent",
    )


@pytest.mark.parametrize(
    ("coupling", "message"),
    [
        ("synchronous", r"coupling 'synchronous' is unknown; choose among \('maximal', "),
        (("maximal", "crn", "common"), "coupling 'crn' is unknown"),
        (("maximal", "common"), r"names 2 layers, and the sweep has 3: \(\('v',\), \('h',\), \('g',\)\)"),
        ("independent", "every layer drawn independently"),
    ],
)
def test_resolve_refuses(coupling: str | tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(coupling, LAYERS)
