# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of models whose priors are energies with latents: what is taken as it is, and what is told."""

from typing import Any

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from prior_cases import PRIOR, RBM, Y, exact_partition, image, made, strong
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import EnergyDistribution, GibbsBlock
from ebmpp.errors import IntractableError, StateError


def blurred(y: Any) -> None:
    """A likelihood that reads all pixels: units interact also given the latents."""
    z = numpyro.sample("z", EnergyDistribution(RBM, PRIOR, num_sweeps=1))
    wide = numpyro.sample("w", dist.Bernoulli(0.5).expand([8]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.tanh(z.sum() + wide.sum()), 1.0), obs=y[0])


def raised(y: Any) -> None:
    with handlers.scale(scale=0.5):
        z = numpyro.sample("z", EnergyDistribution(WIDE, WIDE_PRIOR, num_sweeps=1))
    numpyro.sample("y", dist.Normal(z[:4], 1.0).to_event(1), obs=y)


WIDE = ebmpp.layered(v=ebmpp.Spin(9), h=ebmpp.Spin(2))
WIDE_PRIOR = strong(WIDE, 4, 0.5)


def test_where_latents_do_not_help_units_are_drawn_one_by_one_when_asked() -> None:
    """With the latents summed out, as before."""
    with pytest.raises(IntractableError, match="all 12 units .* unit_by_unit=True"):
        GibbsBlock.from_model(blurred, ["z", "w"], Y)
    block = GibbsBlock.from_model(blurred, ["z", "w"], Y, unit_by_unit=True)
    assert block.sweep.augmented is None
    block.verify(blurred, Y)
    with pytest.raises(IntractableError, match="'z' is scaled .* latents cannot be drawn along"):
        GibbsBlock.from_model(raised, ["z"], Y)
    block = GibbsBlock.from_model(raised, ["z"], Y, unit_by_unit=True)
    assert block.sweep.augmented is None
    block.verify(raised, Y)


def test_few_layers_with_the_latents_summed_out_are_taken_as_they_are() -> None:
    """A latent that ties two units is better summed out than drawn."""
    pair = ebmpp.layered(v=ebmpp.Spin(2), h=ebmpp.Spin(1))

    def model() -> None:
        numpyro.sample("z", EnergyDistribution(pair, strong(pair, 0), num_sweeps=1))

    block = GibbsBlock.from_model(model, ["z"])
    assert block.sweep.augmented is None and block.conditionals.num_layers == 2


def test_another_model_is_told() -> None:
    def tighter(y: Any) -> None:
        precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
        z = numpyro.sample("z", EnergyDistribution(RBM, PRIOR | {"h": PRIOR["h"] + 1}, num_sweeps=1))
        numpyro.sample("y", dist.Normal(z, precision**-0.5).to_event(1), obs=y)

    with pytest.raises(StateError, match="log density changes by"):
        made("image")[1].verify(tighter, Y)


def test_a_latent_without_a_law_keeps_the_units_and_is_counted() -> None:
    def model(y: Any) -> None:
        bias = numpyro.sample("bias", dist.Normal(0, 1))
        params = PRIOR | {"h": PRIOR["h"] + bias}
        z = numpyro.sample("z", EnergyDistribution(RBM, params, num_sweeps=1, validate_args=False))
        numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)

    block = GibbsBlock.from_model(model, ["z"], Y)
    beside = lambda bias: {"_gibbs_sites": {"bias": jnp.array(bias)}}
    begin = lambda bias: block.init(jax.random.key(0), 0, {"z": jnp.ones(4)}, (Y,), beside(bias))
    with pytest.raises(StateError, match="site 'z' is nan where it is -1"):
        begin(jnp.nan)
    state = block.sample(begin(0.3), (Y,), beside(jnp.nan))
    assert int(state.kept) == 4 and (state.z["z"] == 1).all()


def leaning(y: Any, log_partition: Any = None) -> None:
    """A site that the prior's biases are made of."""
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    lean = numpyro.sample("lean", dist.Normal(0, 1))
    params = PRIOR | {"v": k * lean * jnp.ones(4)}
    law = EnergyDistribution(RBM, params, num_sweeps=1, log_partition=log_partition)
    z = numpyro.sample("z", law)
    numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)


def offset(y: Any) -> None:
    """A site that the prior's biases are made of, and which is Gaussian, log Z being what it likes."""
    lean = numpyro.sample("lean", dist.Normal(0, 1))
    law = EnergyDistribution(RBM, PRIOR | {"v": lean * jnp.ones(4)}, num_sweeps=1, log_partition=0.0)
    z = numpyro.sample("z", law)
    numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("sites", "told"), [(["k"], r"depend on sites \['k'\]"), (["z", "lean"], r"depend on sites \['lean'\]")]
)
def test_params_without_log_z_are_not_drawn(sites: list, told: str) -> None:
    """Which would be silently wrong; the site itself is drawn whatever its params are made of."""
    with pytest.raises(IntractableError, match=told + ".* doubly intractable"):
        GibbsBlock.from_model(leaning, sites, Y)
    assert GibbsBlock.from_model(leaning, ["z"], Y).sweep.augmented is not None
    known = GibbsBlock.from_model(leaning, ["k", "z"], Y, log_partition=exact_partition)
    assert known.sweep.augmented is not None


def test_refusals_of_options() -> None:
    with pytest.raises(IntractableError, match="clusters=True .* no two units interact"):
        GibbsBlock.from_model(image, ["z"], Y, clusters=True)
    GibbsBlock.from_model(offset, ["z", "lean"], Y)
    with pytest.raises(IntractableError, match="tempering heats the latents of site 'z' too.* 'lean'"):
        GibbsBlock.from_model(offset, ["z", "lean"], Y, tempering=[0.5, 1.0])
    endless = ebmpp.layered(v=ebmpp.Gaussian(3), h=ebmpp.Bernoulli(2))
    model = lambda: numpyro.sample("z", EnergyDistribution(endless, endless.init(jax.random.key(0))))
    with pytest.raises(IntractableError, match="block 'v' of site 'z' is Gaussian"):
        GibbsBlock.from_model(model, ["z"])
