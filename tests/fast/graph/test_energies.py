# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Energies that are refused or accepted, and array types of data and params."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zoo

import jax.numpy as jnp

from ebmpp import Bernoulli, Factor, FactorGraph, Gaussian
from ebmpp.errors import DeclarationError, NotMultiAffineError, ParameterError
from helpers import Tensor

BLOCKS = {"v": Bernoulli(2), "h": Bernoulli(3)}
ENERGIES = {
    "not scalar": (lambda p, v, h: v, DeclarationError, r"scalar.*\(2,\)"),
    "failing": (lambda p, v, h: v @ h, DeclarationError, "energy failed"),
    "not finite": (lambda p, v, h: v.sum() * jnp.inf, DeclarationError, "initial params"),
    "none": (lambda p, v, h: None, DeclarationError, "scalar.*None"),
    "python if": (lambda p, v, h: v.sum() if v[0] > 0.5 else h.sum(), DeclarationError, "jax.numpy"),
    "numpy": (lambda p, v, h: np.sum(np.asarray(v)) * h.sum(), DeclarationError, "jax.numpy"),
    "own units": (lambda p, v, h: v[0] * v[1] * h.sum(), NotMultiAffineError, "block 'v'"),
    "square": (lambda p, v, h: v.sum() * (h**2).sum(), NotMultiAffineError, "block 'h'"),
    "exponential": (lambda p, v, h: jnp.exp(v).sum() + h.sum(), NotMultiAffineError, "block 'v'"),
}


@pytest.mark.parametrize(("energy", "error", "message"), ENERGIES.values(), ids=ENERGIES)
def test_wrong_energies(energy: Callable[..., Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FactorGraph(BLOCKS, factors=[Factor("v", "h", energy=energy)])


def test_affine_energies_are_accepted() -> None:
    mixed = Factor("v", "h", energy=lambda p, v, h: v.sum() * h.sum() - 2 * v[0] + 1.0)
    assert FactorGraph(BLOCKS, factors=[mixed]).edges == {("v", "h")}
    squared = Factor("x", "h", energy=lambda p, x, h: (x[:, 1] * h[:2]).sum())  # x**2 is a statistic
    graph = FactorGraph({"x": Gaussian(2, "learned"), "h": Bernoulli(3)}, factors=[squared])
    assert graph.layers == (("x",), ("h",))


def test_array_types_of_data_and_params() -> None:
    """Data may be arrays of any library, params of jax and numpy only."""
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    expected = rbm.free_energy(params, np.eye(4))
    np.testing.assert_array_equal(rbm.free_energy(params, Tensor(np.eye(4))), expected)
    wide = {name: np.asarray(a, float) for name, a in params.items()}
    np.testing.assert_allclose(rbm.free_energy(wide, np.eye(4)), expected, rtol=1e-6)
    tensors = {name: Tensor(np.asarray(a)) for name, a in params.items()}
    with pytest.raises(ParameterError, match="Tensor"):
        rbm.free_energy(tensors, np.eye(4))
