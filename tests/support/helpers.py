# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Statistical assertions, tiny graphs and random params, shared by all tests."""

from collections.abc import Iterable, Sequence
import math
import re
from typing import Any

import numpy as np
from oracle import unit_values
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Categorical,
    Exponential,
    FactorGraph,
    Family,
    Gaussian,
    Poisson,
    Spin,
)


def nightly(*values: Any) -> Any:
    """Mark a further case of a tested claim, which runs each night."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def often(cases: Iterable[Any], *names: Any) -> list[Any]:
    """Mark the cases of one claim: ``names`` run at each change, the others each night."""
    cases = list(cases)
    assert set(names) < set(cases), (
        "a name of no case, or nothing is left for the night"
    )
    return [case if case in names else nightly(case) for case in cases]


#: how often a correct program may fail one call of ``assert_law``; the seeds are fixed
#: anyway
_OVERALL = 1e-4


def assert_law(
    mean: Any, exact: Any, standard_error: Any, comparisons: int | None = None
) -> None:
    """Assert that sample means agree with exact ones, given their standard errors.

    :param mean: sample means, any shape.
    :param exact: expectations, broadcast against ``mean``.
    :param standard_error: of each mean; where it is 0, the means must agree to 1e-6.
    :param comparisons: how many numbers the test compares in all; the size of ``mean``
        unless given.
    """
    mean, exact, error = np.broadcast_arrays(
        *(np.asarray(a, float) for a in (mean, exact, standard_error))
    )
    assert np.isfinite(mean).all() and np.isfinite(error).all(), (
        "a mean or a standard error is not finite"
    )
    bound = stats.norm.isf(_OVERALL / (2 * max(1, comparisons or mean.size)))
    z = (mean - exact) / np.maximum(error, 1e-6 / bound)
    worst = np.unravel_index(np.abs(z).argmax(), z.shape)
    assert abs(z[worst]) <= bound, (
        f"|z| = {abs(z[worst]):.1f} > {bound:.1f} at {tuple(map(int, worst))}: mean "
        f"{mean[worst]:.6g}, "
        f"exact {exact[worst]:.6g}, standard error {error[worst]:.2g}"
    )


def assert_like(printed: str, stored: str) -> None:
    """Assert equal words, and numbers no further apart than metrics of single steps
    under other roundings."""
    number = r"-?\d+(?:,\d{3})*\.?\d*(?:e-?\d+)?"
    assert (
        re.sub(number, "0", printed).split() == re.sub(number, "0", stored).split()
    ), printed
    values, expected = (
        [float(n.replace(",", "")) for n in re.findall(number, t)]
        for t in (printed, stored)
    )
    assert values == pytest.approx(expected, rel=0.5, abs=0.1), printed


def assert_rows_law(samples: Any, exact: Any, comparisons: int | None = None) -> None:
    """:func:`assert_law` for independent rows of shape ``(rows, ...)``."""
    samples = np.asarray(samples, float)
    error = samples.std(0, ddof=1) / math.sqrt(len(samples))
    assert_law(samples.mean(0), exact, error, comparisons)


#: one of each family, two units each (three where the shape is worth testing)
FAMILIES: dict[str, Family] = {
    "bernoulli": Bernoulli(2),
    "spin": Spin(2),
    "categorical": Categorical(2, num_categories=3),
    "binomial": ebmpp.Binomial(2, total_count=3),
    "poisson": Poisson(2),
    "exponential": Exponential(2),
    "gaussian": Gaussian(2),
    "gaussian_learned": Gaussian(2, variance="learned"),
}
FINITE = ("bernoulli", "spin", "categorical", "binomial")


def pair(first: Family, second: Family) -> FactorGraph:
    """Two blocks ``a`` (visible) and ``b`` (latent), biases and a bilinear factor."""
    return FactorGraph(
        {"a": first}, {"b": second}, [Bias("a"), Bias("b"), ebmpp.Bilinear("a", "b")]
    )


def alone(family: Family) -> FactorGraph:
    """One block ``a`` with a bias."""
    return FactorGraph({"a": family}, factors=[Bias("a")])


def three_way_energy(
    weight: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> jax.Array:
    """A gated factor; at module level, so that graphs with it compare equal and pickle."""
    return -jnp.einsum("ijk,i,j,k", weight, a, b, c)


def gated(shape: Sequence[int] = (2, 2, 2)) -> FactorGraph:
    """A three-way factor over ``a`` (visible), ``b`` and ``c``, and biases."""
    sizes = dict(zip("abc", shape, strict=True))
    families = {name: Bernoulli(size) for name, size in sizes.items()}
    gate = ebmpp.Factor(
        "a", "b", "c", energy=three_way_energy, init=np.zeros(tuple(shape))
    )
    return FactorGraph(
        {"a": families["a"]},
        {"b": families["b"], "c": families["c"]},
        [*map(Bias, "abc"), gate],
    )


def parameter_sets(graph: FactorGraph, num: int = 3) -> tuple[dict, list[dict]]:
    """Return params with a leading axis of sets, and the sets."""
    sets = [random_params(graph, seed=i) for i in range(num)]
    return jax.tree.map(lambda *a: np.stack(a), *sets), sets


def random_params(
    graph: FactorGraph, seed: int = 0, scale: float = 0.4
) -> dict[str, Any]:
    """Initial params plus noise, weak enough to stay in every family's domain."""
    generator = np.random.default_rng(seed)
    noise = lambda a: (scale * np.clip(generator.normal(size=a.shape), -1, 1)).astype(
        a.dtype
    )
    started = graph.init(
        jax.random.key(seed), scheme={"weight": "zero", "bias": "zero"}
    )
    # on the host, where nothing is compiled
    return jax.tree.map(
        lambda a: jax.device_put((np.asarray(a) + noise(a)).astype(np.float32)), started
    )


def random_state(family: Family, seed: int, rows: tuple[int, ...] = ()) -> np.ndarray:
    """Values in the family's support."""
    generator = np.random.default_rng(seed)
    shape = rows + family.shape
    if isinstance(family, Gaussian):
        return generator.normal(size=shape).astype(np.float32)
    if isinstance(family, Exponential):
        return generator.exponential(size=shape).astype(np.float32)
    drawn = generator.choice(
        range(5) if isinstance(family, Poisson) else unit_values(family), size=shape
    )
    return drawn.astype(np.int32 if isinstance(family, Categorical) else np.float32)


class Tensor:
    """As an array of another library, such as torch, shows itself."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.ndim = values, values.shape, values.ndim

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return np.asarray(self.values, dtype)
