# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What blocks made from models refuse."""

from typing import Any

from model_cases import Y5, made, mixture
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.errors import ArgumentError, IntractableError, StateError
from ebmpp.ppl import gibbs_fn


def subsampled(y: Any) -> None:
    with numpyro.plate("points", 5, subsample_size=2):
        numpyro.sample("z", dist.Bernoulli(0.4))


def depending(y: Any) -> None:
    n = numpyro.sample("n", dist.Categorical(jnp.ones(4) / 4))
    z = numpyro.sample("z", dist.Binomial(n, 0.4))
    numpyro.sample("y", dist.Normal(z, 1.0), obs=y[0])


def summed_out(y: Any) -> None:
    numpyro.sample("z", dist.Bernoulli(0.4))
    numpyro.sample("w", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})


def endless(y: Any) -> None:
    numpyro.sample("z", dist.Poisson(1.0))


def indexed(y: Any, pairs: Any) -> None:
    z = numpyro.sample("z", dist.Bernoulli(0.4).expand([5]).to_event(1))
    numpyro.factor("prior", (z[pairs[:, 0]] * z[pairs[:, 1]]).sum())


def started(name: str, value: Any, *args: Any, **siblings: Any) -> Any:
    return made(name)[1].init(jax.random.key(0), 0, value, args, {"_gibbs_sites": siblings})


def made_inside_jit() -> Any:
    return jax.jit(lambda y: GibbsBlock.from_model(mixture, ["z"], y).log_conditionals({}))(Y5)


def indexed_block() -> Any:
    return GibbsBlock.from_model(indexed, ["z"], Y5, PAIRED)


def traced_pairs(block: Any) -> Any:
    given = lambda pairs: block.log_conditionals({"z": jnp.zeros(5, int)}, Y5, pairs)
    return jax.jit(given)(PAIRED)


MIXED = {"weights": jnp.ones(3) / 3, "means": jnp.zeros(3)}
PAIRED = np.array([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (
            lambda: GibbsBlock.from_model(3, ["z"]),
            ArgumentError,
            "model is a function of NumPyro's primitives",
        ),
        (lambda: GibbsBlock.from_model(mixture, ["q"], Y5), StateError, "unknown latent site 'q'"),
        (lambda: GibbsBlock.from_model(mixture, [], Y5), StateError, "names of latent sites"),
        (lambda: GibbsBlock.from_model(mixture, ["y"], Y5), StateError, "unknown latent site 'y'"),
        (lambda: GibbsBlock.from_model(mixture, ["weights"], Y5), IntractableError, "'weights' is Dirichlet"),
        (lambda: GibbsBlock.from_model(endless, ["z"], Y5), IntractableError, "'z' is Poisson"),
        (
            lambda: GibbsBlock.from_model(subsampled, ["z"], Y5),
            StateError,
            "plate 'points' is subsampled .2 of 5",
        ),
        (lambda: GibbsBlock.from_model(depending, ["z"], Y5), IntractableError, "depend on other sites"),
        (
            lambda: GibbsBlock.from_model(summed_out, ["z"], Y5),
            StateError,
            "'w' is summed out by enumeration",
        ),
        (lambda: GibbsBlock.from_model(mixture, ["z"], Y5, num_sweeps=0), ArgumentError, "num_sweeps"),
        (lambda: GibbsBlock.from_model(mixture, ["z"], Y5, unit_by_unit=1), ArgumentError, "unit_by_unit"),
        (lambda: started("mixture", None, Y5, **MIXED), StateError, "initial values of its sites"),
        (lambda: started("mixture", {"w": jnp.zeros(5)}, Y5), StateError, "name the same sites"),
        (
            lambda: started("mixture", {"z": jnp.zeros(5)}, Y5),
            StateError,
            r"reads sites \['weights', 'means'\]",
        ),
        (lambda: started("mixture", {"z": jnp.zeros(4)}, Y5, **MIXED), StateError, "site 'z' has shape"),
        (
            lambda: started("mixture", {"z": jnp.full(5, 3)}, Y5, **MIXED),
            StateError,
            "site 'z' is .*expected one of",
        ),
        (
            lambda: started("mixture", {"z": jnp.zeros(5)}, Y5[:3], **MIXED),
            StateError,
            r"args\[0\] .* has shape",
        ),
        (lambda: started("mixture", {"z": jnp.zeros(5)}, **MIXED), StateError, "the model's arguments are"),
        (
            lambda: indexed_block().log_conditionals({"z": jnp.zeros(5, int)}, Y5, PAIRED + 1),
            StateError,
            r"args\[1\] of the model has another value",
        ),
        (made_inside_jit, StateError, "outside of jax.jit"),
        (lambda: traced_pairs(indexed_block()), StateError, "jit_model_args"),
        (lambda: gibbs_fn(made("mixture")[1], ["z"]), ArgumentError, "has its sites and options already"),
    ],
)
def test_mistakes_are_told(make: Any, error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        make()


@pytest.mark.parametrize(
    ("was", "new", "fits"),
    [
        (np.ones(5, int), np.full(5, 0.6), False),
        (np.ones(5, bool), np.arange(5), False),
        (np.ones(5, bool), np.full(5, 0.6), False),
        (np.ones(5, np.int8), np.arange(5) + 300, False),
        (np.ones(5), np.arange(5), True),
        (np.ones(5, int), np.array([True, False, True, True, False]), True),
        (np.ones(5, np.float32), np.full(5, 0.6, np.float64), True),
        (np.ones(5, np.int32), np.arange(5, dtype=np.int64), True),
    ],
)
def test_arguments_are_not_cut_off(was: Any, new: Any, fits: bool) -> None:
    def model(y: Any) -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.4).expand([5]).to_event(1))
        numpyro.factor("f", (z * y).sum())

    block, values = GibbsBlock.from_model(model, ["z"], was), {"z": jnp.zeros(5, int)}
    if fits:
        found = block.log_conditionals(values, new)["z"]
        np.testing.assert_allclose(found[:, 1] - found[:, 0], np.log(0.4 / 0.6) + new, rtol=1e-5)
        return
    with pytest.raises(StateError, match=rf"args\[0\] .* of dtype {jnp.result_type(new)}, and was .*anew"):
        block.log_conditionals(values, new)
