# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Refusals of wrong states, params, blocks, scopes and energies."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zoo

import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, Factor, FactorGraph, Gaussian, layered
from ebmpp.errors import DeclarationError, NotMultiAffineError, ParameterError, StateError
from helpers import Tensor

V, H = np.zeros((5, 4)), np.zeros((5, 3))
NAN = V.copy()
NAN[2, 1] = np.nan

STATES = {
    "unknown block": ({"v": V, "h": H, "w": V}, "unknown block 'w'"),
    "missing block": ({"v": V}, "block 'h' is missing"),
    "shape": ({"v": H, "h": H}, r"block 'v' got shape \(5, 3\)"),
    "leading axes": ({"v": V[:2], "h": H}, "do not broadcast"),
    "nan": ({"v": NAN, "h": H}, r"block 'v' .* got nan at index \(2, 1\)"),
    "outside the support": ({"v": V + 0.5, "h": H}, r"block 'v' .* got 0.5 at index \(0, 0\)"),
    "text": ({"v": "zeros", "h": H}, "block 'v': expected an array of numbers, got 'zeros'"),
}


@pytest.mark.parametrize(("state", "message"), STATES.values(), ids=STATES)
def test_wrong_states(state: dict, message: str) -> None:
    with pytest.raises(StateError, match=message):
        zoo.graph("rbm").energy(zoo.params("rbm"), state)


def test_wrong_block_names_and_categories() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    for method in (rbm.conditional, rbm.marginal):
        with pytest.raises(StateError, match="unknown block 'w'"):
            method(params, {"v": V}, "w")
    with pytest.raises(StateError, match=r"block 'v' .* got 7 at index \(1,\)"):
        zoo.graph("categorical").free_energy(zoo.params("categorical"), {"v": np.array([0, 7])})


PARAMS = {
    "shape": (lambda p: p | {"v": np.zeros(5)}, r"factor 'v': params have shape \(5,\)"),
    "missing": (lambda p: {n: a for n, a in p.items() if n != "v:h"}, "lacks factor 'v:h'"),
    "unknown": (lambda p: p | {"w": np.zeros(5)}, "params has 'w'"),
    "not a dict": (lambda p: [1, 2], "keyed by factor name, not list"),
    "not finite": (lambda p: p | {"h": np.float32([0, np.inf, 0])}, "factor 'h': 1 of 3"),
}


@pytest.mark.parametrize(("change", "message"), PARAMS.values(), ids=PARAMS)
def test_wrong_params(change: Callable[[dict], Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        zoo.graph("rbm").check(change(zoo.params("rbm")))


BLOCKS = {"v": Bernoulli(2), "h": Bernoulli(3)}
FACTORS = {
    "unknown block": ([Bias("v"), Bias("w")], DeclarationError, "block 'w'"),
    "two names": ([Bias("v"), Bias("v"), Bias("h")], DeclarationError, "two factors are named 'v'"),
    "unused block": ([Bias("v")], DeclarationError, "no factor mentions block 'h'"),
    "not a factor": ([Bias("v"), "h"], DeclarationError, "'h', which is not a Factor"),
}
ENERGIES = {
    "not scalar": (lambda p, v, h: v, DeclarationError, r"shape \(2,\), expected a scalar"),
    "failing": (lambda p, v, h: v @ h, DeclarationError, "its energy failed"),
    "not finite": (lambda p, v, h: v.sum() * jnp.inf, DeclarationError, "initial params"),
    "none": (lambda p, v, h: None, DeclarationError, "returned None"),
    "python if": (lambda p, v, h: v.sum() if v[0] > 0.5 else h.sum(), DeclarationError, "use jnp.where"),
    "numpy": (lambda p, v, h: np.sum(np.asarray(v)) * h.sum(), DeclarationError, "use jax.numpy"),
    "own units": (lambda p, v, h: v[0] * v[1] * h.sum(), NotMultiAffineError, "'v' interact with one an"),
    "square": (lambda p, v, h: v.sum() * (h**2).sum(), NotMultiAffineError, "not affine .* block 'h'"),
    "exponential": (lambda p, v, h: jnp.exp(v).sum() + h.sum(), NotMultiAffineError, "not affine"),
}
DECLARATIONS = FACTORS | {
    name: ([Factor("v", "h", energy=energy)], error, message)
    for name, (energy, error, message) in ENERGIES.items()
}


@pytest.mark.parametrize(("factors", "error", "message"), DECLARATIONS.values(), ids=DECLARATIONS)
def test_wrong_factors(factors: list, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FactorGraph(BLOCKS, factors=factors)


SCOPES = [
    (lambda: Bilinear("v", "v"), "names a block twice"),
    (lambda: Factor("v", energy=3), "energy is a function, not 3"),
    (lambda: Factor(energy=lambda p: p), "one or more names"),
    (lambda: FactorGraph({"v": Bernoulli(2)}, {"v": Bernoulli(2)}, [Bias("v")]), "'v'.* visible and latent"),
    (lambda: FactorGraph({"v": 3}, factors=[Bias("v")]), "block 'v' needs a family"),
    (lambda: FactorGraph({}, {"h": Bernoulli(2)}, [Bias("h")]), "at least one visible block"),
    (layered, "at least one block"),
]


@pytest.mark.parametrize(("declare", "message"), SCOPES, ids=[message for _, message in SCOPES])
def test_wrong_blocks_and_scopes(declare: Callable[[], Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        declare()


def test_affine_energies_are_accepted() -> None:
    mixed = Factor("v", "h", energy=lambda p, v, h: v.sum() * h.sum() - 2 * v[0] + 1.0)
    assert FactorGraph(BLOCKS, factors=[mixed]).edges == {("v", "h")}
    squared = Factor("x", "h", energy=lambda p, x, h: (x[:, 1] * h[:2]).sum())  # x**2 is a statistic
    graph = FactorGraph({"x": Gaussian(2, "learned"), "h": Bernoulli(3)}, factors=[squared])
    assert graph.layers == (("x",), ("h",))


def test_array_types_of_data_and_params() -> None:
    """Data may be arrays of any library, params those of jax and numpy."""
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    expected = rbm.free_energy(params, np.eye(4))
    np.testing.assert_array_equal(rbm.free_energy(params, Tensor(np.eye(4))), expected)
    wide = {name: np.asarray(a, float) for name, a in params.items()}
    np.testing.assert_allclose(rbm.free_energy(wide, np.eye(4)), expected, rtol=1e-6)
    tensors = {name: Tensor(np.asarray(a)) for name, a in params.items()}
    with pytest.raises(ParameterError, match="Tensor"):
        rbm.free_energy(tensors, np.eye(4))
