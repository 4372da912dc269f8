# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Arguments of models that are no arrays: compared by content, and refused if that changes.

Tests traced/contents.py.
"""

from collections.abc import Callable
import copy
from functools import cached_property
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
import pandas as pd
import pytest
import xarray as xr

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.errors import StateError
from ebmpp.ppl import Conjugate, CoupledComposite, composite_expectation
from ebmpp.traced import contents
from helpers import often

LOW, HIGH = np.zeros(3), np.full(3, 3.0)
DAY = np.datetime64("2020-01-01")


class Tagged:
    """Equal if the names are, whatever the values are."""

    def __init__(self, y: Any) -> None:
        self.y = y
        self.scale = lambda: 1.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tagged)

    __hash__ = None  # type: ignore[assignment]


class Plain:
    def __init__(self, y: Any) -> None:
        self._y = y

    @cached_property
    def y(self) -> Any:
        return np.array(self._y)


#: from values to an argument, and back
KINDS: dict[str, tuple[Callable, Callable]] = {
    "own comparison": (Tagged, lambda d: d.y),
    "object": (Plain, lambda d: d.y),
    "frame": (lambda y: pd.DataFrame({"y": y}), lambda d: d["y"].to_numpy()),
    "series": (pd.Series, lambda d: d.to_numpy()),
    "dataset": (lambda y: xr.Dataset({"y": ("n", y)}), lambda d: d["y"].to_numpy()),
    "array": (xr.DataArray, lambda d: d.to_numpy()),
    "tree": (
        lambda y: xr.DataTree(xr.Dataset({"y": ("n", y)})),
        lambda d: d["y"].to_numpy(),
    ),
    "strings": (lambda y: y.astype(str), lambda d: d.astype(float)),
    "objects": (lambda y: y.astype(object), lambda d: d.astype(float)),
    "dates": (lambda y: DAY + y.astype(int), lambda d: (d - DAY).astype(float)),
    "set": (
        lambda y: frozenset(enumerate(y)),
        lambda d: np.array(list(dict(d).values())),
    ),
}


def model_of(read: Callable) -> Callable:
    def model(data: Any) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("n", 3):
            z = numpyro.sample("z", dist.Bernoulli(0.3))
            y = jnp.asarray(read(data), float)
            numpyro.sample("y", dist.Normal(2.0 * z, scale), obs=y)

    return model


@pytest.mark.parametrize("kind", often(KINDS, "own comparison", "dataset", "dates"))
def test_content_of_an_argument_may_not_change(kind: str) -> None:
    make, read = KINDS[kind]
    data = make(LOW)
    block = GibbsBlock.from_model(model_of(read), ["z"], data)
    values = {"z": np.zeros(3, int), "scale": 1.0}
    weights = np.array([0.7, 0.3]) * np.exp(-0.5 * np.array([0, 2]) ** 2)
    exact = np.log(weights / weights.sum())
    for same in (data, copy.deepcopy(data)):
        logits = block.log_conditionals(values, same)["z"]
        np.testing.assert_allclose(logits, [exact] * 3, rtol=1e-5)
    with pytest.raises(StateError, match=r"args\[0\] has another value"):
        block.log_conditionals(values, make(HIGH))
    kernel = Gibbs([(block, ["z"]), (NUTS(block.info.model), ["scale"])])
    mcmc = MCMC(kernel, num_warmup=0, num_samples=1, progress_bar=False)
    with pytest.raises(StateError, match=r"args\[0\] has another value"):
        mcmc.run(jax.random.key(0), make(HIGH))


CHANGES = {
    "own comparison": lambda d: setattr(d, "y", HIGH),
    "object": lambda d: d.__dict__.update(_y=HIGH, y=HIGH),
    "frame": lambda d: d.__setitem__("y", HIGH),
    "dataset": lambda d: d["y"].__setitem__(0, 1.0),
    "strings": lambda d: d.__setitem__(0, "3.0"),
}


@pytest.mark.parametrize("kind", often(CHANGES, "own comparison"))
def test_change_in_place_is_noticed(kind: str) -> None:
    make, read = KINDS[kind]
    data = make(LOW.copy())
    block = GibbsBlock.from_model(model_of(read), ["z"], data)
    CHANGES[kind](data)
    with pytest.raises(StateError, match=r"args\[0\] has another value"):
        block.log_conditionals({"z": np.zeros(3, int), "scale": 1.0})


def test_numbers_that_change_are_given_as_arrays() -> None:
    def model(weight: Any) -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([2]).to_event(1))
        numpyro.factor("f", weight * z.sum())

    values = {"z": np.zeros(2, int)}
    block = GibbsBlock.from_model(model, ["z"], 0.5)
    with pytest.raises(StateError, match=r"args\[0\] .* only arrays .* of arrays"):
        block.log_conditionals(values, 0.7)
    block = GibbsBlock.from_model(model, ["z"], jnp.asarray(0.5))
    logits = block.log_conditionals(values, 0.7)["z"]
    np.testing.assert_allclose(np.diff(logits), 0.7, rtol=1e-6)
    with pytest.raises(StateError, match=r"args\[0\] is a Series"):
        block.log_conditionals(values, pd.Series(0.7))


def test_content_counts_what_a_pickle_names() -> None:
    def function(shift: float) -> Callable:
        return lambda x: x + shift

    assert contents.content(np.ones((2, 3))) == contents.content(np.ones((3, 2)).T)
    assert contents.content(np.float64(0.5)) == contents.content(0.5)
    first = function(1.0)
    assert contents.content({"a": first}) == contents.content({"a": first})
    assert contents.content({"a": first}) != contents.content({"a": function(2.0)})
    different = [1, 1.0, True, "1", np.ones(1), jnp.ones(1, int), np.ones((1, 1))]
    assert len({contents.content(value) for value in different}) == len(different)
    generator = (i for i in range(2))  # no pickle has it
    assert contents.content(generator) == contents.content(generator)


@pytest.mark.nightly
def test_pairs_of_a_composite_read_the_present_content() -> None:
    mean = Conjugate("m", lambda sites, d: dist.Normal(d.y[0], 1e-3), dist.Normal())
    kernel, data = CoupledComposite([mean]), Tagged(LOW)

    def estimate() -> float:
        options = {"rng_key": jax.random.key(0), "num_pairs": 4}
        return composite_expectation(kernel, lambda s: s["m"], data, **options).value

    assert abs(estimate()) < 0.01
    data.y = HIGH
    assert abs(estimate() - 3) < 0.01
