# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Doubly intractable models whose energies are inside of other laws, or in factors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import AffineTransform
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, EnergyDistribution, GibbsBlock, exact, layered
from ebmpp.errors import IntractableError
from ebmpp.ppl import check_model

GRAPH = layered(v=Bernoulli(2), h=Bernoulli(2))
SMALL = GRAPH.init(jax.random.key(0))
LARGE = {"v": jnp.array([1.0, 2.0]), "h": jnp.array([0.5, 1.0]), "v:h": jnp.ones((2, 2))}
OBS = jnp.array([1.0, 0.0])


def picked(k: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(k == 1, b, a), SMALL, LARGE)


def energy(params: Any, known: bool = False) -> Any:
    log_z = (lambda p: exact.log_partition(GRAPH, p)) if known else None
    return EnergyDistribution(GRAPH, params, log_partition=log_z)


def doubled(law: Any) -> Any:
    return dist.TransformedDistribution(law, AffineTransform(0.0, 2.0))


def two(k: Any, *laws: Any) -> Any:
    weights = jnp.stack([0.2 + 0.3 * k, 0.8 - 0.3 * k])
    return dist.MixtureGeneral(dist.Categorical(weights), list(laws))


def stacked(k: Any) -> Any:
    params = jax.tree.map(lambda a, b: jnp.stack([a, b + k]), SMALL, LARGE)
    return dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), energy(params))


def observed(law: Any) -> None:
    numpyro.sample("v", law, obs=OBS)


def factor(law: Any, value: Any = OBS) -> None:
    numpyro.factor("f", 2.0 + law.log_prob(value))


REFUSED: dict[str, tuple[Callable, str]] = {
    "transformed": (lambda k: numpyro.sample("v", doubled(energy(picked(k))), obs=2 * OBS), "v"),
    "components": (lambda k: observed(two(0, energy(SMALL), energy(picked(k)))), "v"),
    "weights": (lambda k: observed(two(k, energy(SMALL), energy(LARGE))), "v"),
    "one family": (lambda k: observed(stacked(k)), "v"),
    "deep inside": (lambda k: observed(doubled(two(0, energy(SMALL), energy(picked(k)))).mask(True)), "v"),
    "factor": (lambda k: factor(energy(picked(k))), "f"),
    "factor of a wrapped one": (lambda k: factor(doubled(energy(picked(k))), 2 * OBS * 0), "f"),
}
TAKEN: dict[str, Callable] = {
    "log Z is known": lambda k: observed(two(k, energy(SMALL, True), energy(LARGE, True))),
    "nothing depends": lambda k: observed(two(0, energy(SMALL), energy(LARGE))),
    "transform alone": lambda k: numpyro.sample(
        "v", dist.TransformedDistribution(energy(SMALL), AffineTransform(0.0, 1.0 + k)), obs=OBS
    ),
    "factor with log Z": lambda k: factor(energy(picked(k), True)),
    "factor of fixed params": lambda k: factor(energy(SMALL)),
    "only told": lambda k: numpyro.deterministic("told", energy(picked(k)).log_prob(OBS)),
}


def among(site: Callable) -> Callable:
    def model() -> None:
        site(numpyro.sample("k", dist.Bernoulli(0.5)))

    return model


@pytest.mark.parametrize("name", REFUSED)
def test_energies_inside_of_others_are_found(name: str) -> None:
    site, where = REFUSED[name]
    with pytest.raises(IntractableError, match=rf"site '{where}' depend on the latent sites \['k'\]"):
        check_model(among(site))
    with pytest.raises(IntractableError, match=rf"site '{where}' depend on sites \['k'\], which the block"):
        GibbsBlock.from_model(among(site), ["k"])


@pytest.mark.parametrize("name", TAKEN)
def test_what_has_no_unknown_log_partition_is_taken(name: str) -> None:
    check_model(among(TAKEN[name]))
    GibbsBlock.from_model(among(TAKEN[name]), ["k"])


def test_a_latent_mixture_of_energies_without_log_partition() -> None:
    """Its own value is weighed wrongly, whatever else there is."""

    def model() -> None:
        numpyro.sample("v", two(0, energy(SMALL), energy(LARGE)))

    with pytest.raises(IntractableError, match=r"\['v'\]"):
        check_model(model)


def test_a_mixture_with_log_partitions_is_exact() -> None:
    block = GibbsBlock.from_model(among(TAKEN["log Z is known"]), ["k"])
    each = np.array([float(energy(p, True).log_prob(OBS)) for p in (SMALL, LARGE)])
    weights = np.log([[0.2, 0.8], [0.5, 0.5]])
    joint = np.logaddexp.reduce(weights + each, axis=1)
    found = block.log_conditionals({"k": jnp.array(0)})["k"]
    np.testing.assert_allclose(found, joint - np.logaddexp.reduce(joint), atol=1e-5)
