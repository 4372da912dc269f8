# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests: statistical assertions, a slow independent oracle, and tiny graphs."""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.special import gammaln

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Binomial,
    Categorical,
    Exponential,
    Factor,
    FactorGraph,
    Family,
    Gaussian,
    Pairwise,
    Poisson,
    Spin,
)


def slow(*values: Any) -> Any:
    """Mark a further case of a tested claim, which only ``make test-all`` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def often(cases: Iterable[Any], *names: Any) -> list[Any]:
    """Mark the cases of one claim: ``make test`` runs ``names``, ``make test-all`` runs the others too."""
    cases = list(cases)
    assert set(names) < set(cases), "a name of no case, or nothing is left for make test-all"
    return [case if case in names else slow(case) for case in cases]


#: how often a correct program may fail one call of ``assert_law``; the seeds are fixed anyway
_OVERALL = 1e-4


def assert_law(mean: Any, exact: Any, standard_error: Any, comparisons: int | None = None) -> None:
    """Assert that sample means agree with exact ones, given their standard errors.

    :param mean: sample means, any shape.
    :param exact: expectations, broadcast against ``mean``.
    :param standard_error: of each mean; where it is 0, the means must agree to 1e-6.
    :param comparisons: how many numbers the test compares in all; the size of ``mean`` unless given.
    """
    mean, exact, error = np.broadcast_arrays(*(np.asarray(a, float) for a in (mean, exact, standard_error)))
    assert np.isfinite(mean).all() and np.isfinite(error).all(), "a mean or a standard error is not finite"
    bound = stats.norm.isf(_OVERALL / (2 * max(1, comparisons or mean.size)))
    z = (mean - exact) / np.maximum(error, 1e-6 / bound)
    worst = np.unravel_index(np.abs(z).argmax(), z.shape)
    assert abs(z[worst]) <= bound, (
        f"|z| = {abs(z[worst]):.1f} > {bound:.1f} at {tuple(map(int, worst))}: mean {mean[worst]:.6g}, "
        f"exact {exact[worst]:.6g}, standard error {error[worst]:.2g}"
    )


def empirical_z(samples: Any, exact: Any) -> np.ndarray:
    """z of independent rows' means against ``exact``.

    :param samples: shape ``(rows, ...)``.
    :param exact: shape ``(...)``.
    """
    samples = np.asarray(samples, float)
    error = samples.std(0, ddof=1) / math.sqrt(len(samples))
    return (samples.mean(0) - np.asarray(exact)) / np.maximum(error, 1e-12)


def assert_rows_law(samples: Any, exact: Any, comparisons: int | None = None) -> None:
    """:func:`assert_law` for independent rows of shape ``(rows, ...)``."""
    samples = np.asarray(samples, float)
    error = samples.std(0, ddof=1) / math.sqrt(len(samples))
    assert_law(samples.mean(0), exact, error, comparisons)


# -- an oracle that shares no code with the package ----------------------------------------------


def numpy_statistics(family: Family, x: np.ndarray) -> np.ndarray:
    """t(x), float64."""
    x = np.asarray(x, float)
    if isinstance(family, Categorical):
        return (x[..., None] == np.arange(family.num_categories)).astype(float)
    if isinstance(family, Gaussian) and family.variance == "learned":
        return np.stack([x, x * x], -1)
    return x


def numpy_log_base(family: Family, x: np.ndarray) -> float:
    """Sum of log r(x) over units."""
    x = np.asarray(x, float)
    if isinstance(family, Binomial):
        n = family.total_count
        return float(sum(math.log(math.comb(n, int(value))) for value in x.ravel()))
    if isinstance(family, Poisson):
        return float(-gammaln(x + 1).sum())
    if isinstance(family, Gaussian):
        return float(np.sum(-0.5 * math.log(2 * math.pi) - (family.variance == "unit") * 0.5 * x**2))
    return 0.0


def numpy_energy(graph: FactorGraph, params: Mapping[str, Any], x: Mapping[str, np.ndarray]) -> float:
    """E of one state for biases, bilinear and pairwise factors, by loops over units."""
    total = 0.0
    for factor in graph.factors:
        weight = np.asarray(params[factor.name], float)
        if isinstance(factor, Pairwise):
            total += _pairwise_energy(factor, graph.families, weight, x[factor.blocks[0]])
            continue
        ts = []
        for b in factor.blocks:
            t = numpy_statistics(graph.families[b], x[b])
            learned = isinstance(graph.families[b], Gaussian) and graph.families[b].variance == "learned"
            ts.append(t[..., 0] if learned and isinstance(factor, Bilinear) else t)
        for index in np.ndindex(weight.shape):
            term, start = weight[index], 0
            for t in ts:
                term = term * t[index[start : start + t.ndim]]
                start += t.ndim
            total -= term
    return total


def _pairwise_energy(
    factor: Pairwise, families: Mapping[str, Family], weight: np.ndarray, x: np.ndarray
) -> float:
    (block,) = factor.blocks
    family, learned = families[block], getattr(families[block], "variance", "unit") == "learned"
    t = numpy_statistics(family, x).reshape(family.size, -1)
    t = t[:, :1] if learned else t
    each = np.broadcast_to(weight, len(factor.edges(families)[block]))
    return -sum(w * float(t[i] @ t[j]) for w, (i, j) in zip(each, factor.edges(families)[block], strict=True))


def numpy_log_weight(graph: FactorGraph, params: Mapping[str, Any], x: Mapping[str, np.ndarray]) -> float:
    """log p(x) + log Z of one state."""
    base = sum(numpy_log_base(graph.families[b], x[b]) for b in graph.families)
    return base - numpy_energy(graph, params, x)


def unit_values(family: Family, most: int = 60) -> list[float]:
    """A unit's values from the family's definition; counts without an end up to ``most``."""
    if isinstance(family, Spin):
        return [-1.0, 1.0]
    if isinstance(family, Categorical):
        return list(range(family.num_categories))
    last = {Bernoulli: 1, Poisson: most}.get(type(family), getattr(family, "total_count", None))
    return [float(i) for i in range(last + 1)]


def numpy_states(family: Family, most: int = 60) -> list[np.ndarray]:
    """Every value of a block."""
    all_units = itertools.product(unit_values(family, most), repeat=family.size)
    return [np.array(units).reshape(family.shape) for units in all_units]


def enumerate_numpy(
    graph: FactorGraph, params: Mapping[str, Any], most: int = 60
) -> tuple[list[dict[str, np.ndarray]], np.ndarray, float]:
    """Every joint state, its probability, and log Z: float64, one state at a time.

    Takes biases and two-block bilinear factors, over units of finitely many values or counts.
    """
    params = jax.tree.map(lambda a: np.asarray(a, float), dict(params))
    blocks = list(graph.families)
    listed = itertools.product(*(numpy_states(graph.families[b], most) for b in blocks))
    states = [dict(zip(blocks, values, strict=True)) for values in listed]
    weights = np.array([numpy_log_weight(graph, params, x) for x in states])
    log_z = float(np.logaddexp.reduce(weights))
    return states, np.exp(weights - log_z), log_z


# -- tiny graphs ---------------------------------------------------------------------------------

#: one of each family, two units each (three where the shape is worth testing)
FAMILIES: dict[str, Family] = {
    "bernoulli": Bernoulli(2),
    "spin": Spin(2),
    "categorical": Categorical(2, num_categories=3),
    "binomial": Binomial(2, total_count=3),
    "poisson": Poisson(2),
    "exponential": Exponential(2),
    "gaussian": Gaussian(2),
    "gaussian_learned": Gaussian(2, variance="learned"),
}
FINITE = ("bernoulli", "spin", "categorical", "binomial")


def pair(first: Family, second: Family) -> FactorGraph:
    """Two blocks ``a`` (visible) and ``b`` (latent), biases and a bilinear factor."""
    return FactorGraph({"a": first}, {"b": second}, [Bias("a"), Bias("b"), Bilinear("a", "b")])


def alone(family: Family) -> FactorGraph:
    """One block ``a`` with a bias."""
    return FactorGraph({"a": family}, factors=[Bias("a")])


def three_way_energy(weight: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """A gated factor; at module level, so that graphs with it compare equal and pickle."""
    return -jnp.einsum("ijk,i,j,k", weight, a, b, c)


def gated(shape: Sequence[int] = (2, 2, 2)) -> FactorGraph:
    """A three-way factor over ``a`` (visible), ``b`` and ``c``, and biases."""
    sizes = dict(zip("abc", shape, strict=True))
    families = {name: Bernoulli(size) for name, size in sizes.items()}
    gate = Factor("a", "b", "c", energy=three_way_energy, init=np.zeros(tuple(shape)))
    return FactorGraph(
        {"a": families["a"]}, {"b": families["b"], "c": families["c"]}, [*map(Bias, "abc"), gate]
    )


def random_params(graph: FactorGraph, seed: int = 0, scale: float = 0.4) -> dict[str, Any]:
    """Initial params plus noise, weak enough to stay in every family's domain."""
    generator = np.random.default_rng(seed)
    noise = lambda a: (scale * np.clip(generator.normal(size=a.shape), -1, 1)).astype(a.dtype)
    started = graph.init(jax.random.key(seed), scheme={"weight": "zero", "bias": "zero"})
    # on the host, where nothing is compiled
    return jax.tree.map(lambda a: jnp.asarray((np.asarray(a) + noise(a)).astype(np.float32)), started)


def random_state(family: Family, seed: int, rows: tuple[int, ...] = ()) -> np.ndarray:
    """Values in the family's support."""
    generator = np.random.default_rng(seed)
    shape = rows + family.shape
    if isinstance(family, Gaussian):
        return generator.normal(size=shape).astype(np.float32)
    if isinstance(family, Exponential):
        return generator.exponential(size=shape).astype(np.float32)
    drawn = generator.choice(unit_values(family, most=4), size=shape)
    return drawn.astype(np.int32 if isinstance(family, Categorical) else np.float32)


class Tensor:
    """As an array of another library, such as torch, shows itself."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.ndim = values, values.shape, values.ndim

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return np.asarray(self.values, dtype)
