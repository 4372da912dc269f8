# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Detection of doubly intractable models: energies as sites, inside other
distributions, and in factors.

Tests distribution/tractability.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions.transforms import AffineTransform
import pytest
import zoo

import jax
import jax.numpy as jnp

from ebmpp import EnergyDistribution, GibbsBlock, exact
from ebmpp.errors import IntractableError
from ebmpp.ppl import check_tractable

OBSERVED = np.float32([1.0, 0.0, 1.0, 1.0])


@pytest.fixture(autouse=True, scope="module")
def declared() -> None:
    """Create the shared params before a model is traced."""
    zoo.params("rbm")


def energy(k: Any = 0, known: bool = False) -> EnergyDistribution:
    """The energy at params that depend on ``k``, with its log Z if ``known``."""
    log_partition = (
        (lambda p: exact.log_partition(zoo.graph("rbm"), p)) if known else None
    )
    params = zoo.params("rbm")
    params = params | {"v": params["v"] + k}
    return EnergyDistribution(zoo.graph("rbm"), params, log_partition=log_partition)


def scaled(law: Any, factor: Any = 2.0) -> Any:
    return dist.TransformedDistribution(law, AffineTransform(0.0, factor))


def mixture(k: Any, *laws: Any) -> Any:
    return dist.MixtureGeneral(
        dist.Categorical(jnp.stack([0.2 + 0.3 * k, 0.8 - 0.3 * k])), list(laws)
    )


def same_family(k: Any) -> Any:
    params = jax.tree.map(lambda a: jnp.stack([a, a + k]), zoo.params("rbm"))
    return dist.MixtureSameFamily(
        dist.Categorical(np.ones(2) / 2), EnergyDistribution(zoo.graph("rbm"), params)
    )


def observe(law: Any, value: Any = OBSERVED) -> None:
    numpyro.sample("v", law, obs=value)


def factor(law: Any) -> None:
    numpyro.factor("f", 2.0 + law.log_prob(OBSERVED))


REFUSED: dict[str, tuple[Callable, str]] = {
    "site": (lambda k: observe(energy(k)), "v"),
    "transformed": (lambda k: observe(scaled(energy(k)), 2 * OBSERVED), "v"),
    "components": (lambda k: observe(mixture(0, energy(), energy(k))), "v"),
    "weights": (lambda k: observe(mixture(k, energy(), energy(1))), "v"),
    "same family": (lambda k: observe(same_family(k)), "v"),
    "nested": (
        lambda k: observe(scaled(mixture(0, energy(), energy(k))).mask(True)),
        "v",
    ),
    "factor": (lambda k: factor(energy(k)), "f"),
}
ACCEPTED: dict[str, Callable] = {
    "log Z is known": lambda k: observe(mixture(k, energy(0, True), energy(1, True))),
    "fixed params": lambda k: observe(mixture(0, energy(), energy(1))),
    "transform": lambda k: observe(scaled(energy(), 1.0 + k)),
    "factor with log Z": lambda k: factor(energy(k, True)),
    "factor of fixed params": lambda k: factor(energy()),
    "deterministic": lambda k: numpyro.deterministic(
        "told", energy(k).log_prob(OBSERVED)
    ),
}


def with_latent(site: Callable) -> Callable:
    def model() -> None:
        site(numpyro.sample("k", dist.Bernoulli(0.5)))

    return model


@pytest.mark.nightly
@pytest.mark.parametrize("name", REFUSED)
def test_unknown_log_partition_that_depends_on_latents_is_refused(name: str) -> None:
    site, where = REFUSED[name]
    model = with_latent(site)
    with pytest.raises(IntractableError, match=rf"'{where}' depend on .*\['k'\]"):
        check_tractable(model)
    with pytest.raises(IntractableError, match=rf"'{where}' depend on .*\['k'\]"):
        GibbsBlock.from_model(model, ["k"])
    check_tractable(handlers.condition(model, {"k": np.int32(1)}))


@pytest.mark.parametrize("name", ACCEPTED)
def test_known_or_constant_log_partition_is_accepted(name: str) -> None:
    check_tractable(with_latent(ACCEPTED[name]))
    GibbsBlock.from_model(with_latent(ACCEPTED[name]), ["k"])


def test_latent_mixture_of_energies_is_refused() -> None:
    with pytest.raises(IntractableError, match=r"\['v'\]"):
        check_tractable(lambda: numpyro.sample("v", mixture(0, energy(), energy(1))))


def test_dependence_through_other_sites_is_refused() -> None:
    def model(fn: Any) -> None:  # a site named as an argument of the tracer
        top = numpyro.sample("top", dist.Normal())
        middle = numpyro.sample("fn", dist.Normal(top))
        numpyro.sample("x", energy(middle).mask(fn))

    with pytest.raises(IntractableError, match=r"\['fn'\]"):
        check_tractable(model, True)


def test_mixture_with_log_partitions_is_exact() -> None:
    block = GibbsBlock.from_model(with_latent(ACCEPTED["log Z is known"]), ["k"])
    logs = np.array([float(energy(k, True).log_prob(OBSERVED)) for k in (0, 1)])
    joint = np.logaddexp.reduce(np.log([[0.2, 0.8], [0.5, 0.5]]) + logs, axis=1)
    reported = block.log_conditionals({"k": np.array(0)})["k"]
    np.testing.assert_allclose(reported, joint - np.logaddexp.reduce(joint), atol=1e-5)
