# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a graph refuses, and that the message names it, shows it and says how to mend it."""

import numpy as np
import pytest

import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, Categorical, Factor, FactorGraph, Gaussian, layered
from ebmpp.errors import DeclarationError, NotMultiAffineError, ParameterError, StateError
from helpers import Tensor, alone, random_params


@pytest.fixture(scope="module")
def rbm() -> FactorGraph:
    return layered(v=Bernoulli(4), h=Bernoulli(3))


@pytest.fixture(scope="module")
def params(rbm: FactorGraph) -> dict:
    return random_params(rbm, seed=2)


def test_wrong_states(rbm: FactorGraph, params: dict) -> None:
    v, h = np.zeros((5, 4)), np.zeros((5, 3))
    at = lambda changed: rbm.energy(params, {"v": v, "h": h} | changed)
    with pytest.raises(StateError, match="unknown block 'w'; there is 'v', 'h'"):
        at({"w": v})
    with pytest.raises(StateError, match=r"block 'h' is missing: got \['v'\]"):
        rbm.energy(params, {"v": v})
    with pytest.raises(StateError, match=r"block 'v' got shape \(5, 3\), expected \(..., 4\)"):
        at({"v": h})
    with pytest.raises(StateError, match="leading axes of the blocks do not broadcast"):
        at({"v": v[:2]})
    bad = v.copy()
    bad[2, 1] = np.nan
    with pytest.raises(
        StateError, match=r"block 'v' .* got nan at index \(2, 1\) \(1 such value\); expected .*0, 1"
    ):
        at({"v": bad})
    with pytest.raises(StateError, match=r"got 0.5 at index \(0, 0\) \(20 such values\)"):
        at({"v": v + 0.5})
    with pytest.raises(StateError, match="block 'v': expected an array of numbers, got 'zeros'"):
        at({"v": "zeros"})
    with pytest.raises(StateError, match="unknown block 'w'"):
        rbm.conditional(params, {"v": v}, "w")
    with pytest.raises(StateError, match="unknown block 'w'"):
        rbm.marginal(params, {"v": v}, "w")


def test_a_category_out_of_range() -> None:
    graph = alone(Categorical(2, num_categories=3))
    with pytest.raises(
        StateError, match=r"block 'a' .* got 7 at index \(1,\) .*expected values in {0, 1, 2}"
    ):
        graph.energy(random_params(graph), {"a": np.array([0, 7])})


def test_wrong_params(rbm: FactorGraph, params: dict) -> None:
    v = {"v": np.zeros(4)}
    with pytest.raises(ParameterError, match=r"factor 'v': params have shape \(5,\), expected \(4,\)"):
        rbm.free_energy(params | {"v": jnp.zeros(5)}, v)
    with pytest.raises(ParameterError, match="params lacks factor 'v:h'"):
        rbm.free_energy({"v": params["v"], "h": params["h"]}, v)
    with pytest.raises(ParameterError, match="params has 'w', and the factors are"):
        rbm.free_energy(params | {"w": jnp.zeros(5)}, v)
    with pytest.raises(ParameterError, match="keyed by factor name, not list"):
        rbm.free_energy([1, 2], v)
    with pytest.raises(ParameterError, match="factor 'h': 1 of 3 params are not finite"):
        rbm.check(params | {"h": jnp.array([0.0, np.inf, 0.0])})


def test_wrong_data() -> None:
    graph = FactorGraph({"v": Bernoulli(2), "w": Bernoulli(2)}, factors=[Bilinear("v", "w")])
    with pytest.raises(
        StateError, match=r"one array, and there are visible blocks \['v', 'w'\]: give a dict"
    ):
        graph.as_visible(np.zeros((3, 2)))


BLOCKS = {"v": Bernoulli(2), "h": Bernoulli(3)}
DECLARATIONS = [
    (
        [Bias("v"), Bias("w")],
        DeclarationError,
        r"Bias\('w'\) names block 'w', and the blocks are \['v', 'h'\]",
    ),
    ([Bias("v"), Bias("v"), Bias("h")], DeclarationError, "two factors are named 'v'; drop one"),
    ([Bias("v")], DeclarationError, r"no factor mentions block 'h'; add Bias\('h'\)"),
    ([Bias("v"), "h"], DeclarationError, "'h', which is not a Factor"),
    (
        [Factor("v", "h", energy=lambda p, v, h: v)],
        DeclarationError,
        r"returned shape \(2,\), expected a scalar",
    ),
    (
        [Factor("v", "h", energy=lambda p, v, h: v @ h)],
        DeclarationError,
        "its energy failed when called with",
    ),
    (
        [Factor("v", "h", energy=lambda p, v, h: v.sum() * jnp.inf)],
        DeclarationError,
        "at its initial params",
    ),
    (
        [Factor("v", "h", energy=lambda p, v, h: v[0] * v[1] * h.sum())],
        NotMultiAffineError,
        "units of block 'v' interact with one another, .* split the block",
    ),
    (
        [Factor("v", "h", energy=lambda p, v, h: v.sum() * (h**2).sum())],
        NotMultiAffineError,
        r"not affine in the sufficient statistics of block 'h' \(Bernoulli\(3\)\); accepted is",
    ),
    (
        [Factor("v", "h", energy=lambda p, v, h: jnp.exp(v).sum() + h.sum())],
        NotMultiAffineError,
        "not affine",
    ),
    (
        [Factor("v", "h", energy=lambda p, v, h: jnp.round(v).sum() + h.sum())],
        NotMultiAffineError,
        "not affine",
    ),
]


@pytest.mark.parametrize(("factors", "error", "message"), DECLARATIONS)
def test_wrong_declarations(factors: list, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        FactorGraph(BLOCKS, factors=factors)


def test_wrong_blocks_and_scopes() -> None:
    with pytest.raises(DeclarationError, match="names a block twice: units of one block would interact"):
        Bilinear("v", "v")
    with pytest.raises(DeclarationError, match="energy is a function, not 3"):
        Factor("v", energy=3)
    with pytest.raises(DeclarationError, match="one or more names"):
        Factor(energy=lambda p: p)
    with pytest.raises(DeclarationError, match=r"blocks \['v'\] are declared visible and latent"):
        FactorGraph({"v": Bernoulli(2)}, {"v": Bernoulli(2)}, [Bias("v")])
    with pytest.raises(DeclarationError, match="block 'v' needs a family such as"):
        FactorGraph({"v": 3}, factors=[Bias("v")])
    with pytest.raises(DeclarationError, match="at least one visible block"):
        FactorGraph({}, {"h": Bernoulli(2)}, [Bias("h")])
    with pytest.raises(DeclarationError, match="at least one block"):
        layered()


def test_accepted_affine_energies() -> None:
    mixed = Factor("v", "h", energy=lambda p, v, h: v.sum() * h.sum() - 2 * v[0] + 1.0)
    assert FactorGraph(BLOCKS, factors=[mixed]).edges == {("v", "h")}
    squared = Factor("x", "h", energy=lambda p, x, h: (x[:, 1] * h[:2]).sum())  # x**2 is a statistic
    assert FactorGraph({"x": Gaussian(2, "learned"), "h": Bernoulli(3)}, factors=[squared]).layers == (
        ("x",),
        ("h",),
    )


@pytest.mark.parametrize(
    ("energy", "message"),
    [
        (lambda p, v, h: v.sum() if v[0] > 0.5 else h.sum(), r"if, bool, .* use jnp.where or jax.lax.cond"),
        (lambda p, v, h: float(v[0]) * h.sum(), "bool, float and int cannot depend on params or statistics"),
        (lambda p, v, h: np.sum(np.asarray(v)) * h.sum(), "use jax.numpy in place of numpy"),
        (lambda p, v, h: None, "energy returned None, expected a scalar"),
    ],
)
def test_an_energy_that_cannot_be_compiled_is_refused_with_what_to_write(energy, message) -> None:
    factors = [Bias("v"), Bias("h"), Factor("v", "h", energy=energy)]
    with pytest.raises(DeclarationError, match=message):
        FactorGraph({"v": BLOCKS["v"]}, {"h": BLOCKS["h"]}, factors)


def test_data_are_arrays_of_any_library_and_params_of_jax_or_numpy(rbm: FactorGraph, params: dict) -> None:
    wanted = rbm.free_energy(params, np.eye(4))
    np.testing.assert_array_equal(rbm.free_energy(params, Tensor(np.eye(4))), wanted)
    for floats in (np.float32, np.float64):
        numpy = {name: np.asarray(a, floats) for name, a in params.items()}
        np.testing.assert_allclose(rbm.free_energy(numpy, np.eye(4)), wanted, rtol=1e-6)
    tensors = {name: Tensor(np.asarray(a)) for name, a in params.items()}
    with pytest.raises(ParameterError, match=r"params are a .*Tensor, expected .*jax.tree.map\(jax.numpy"):
        rbm.free_energy(tensors, np.eye(4))
