# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Posteriors whose coupled chains are derived from a NumPyro model.

The data of the eight schools are Rubin's (1981); all others are simulated, with fixed
seeds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.distributions import constraints

from jax import Array, lax
import jax.numpy as jnp

Sites = dict[str, Array]


class Posterior(NamedTuple):
    """A model, its data, and the function whose expectation is estimated."""

    model: Callable
    args: tuple
    fn: Callable[[Sites], Any]
    #: sites that a reference run sums out, or draws beside NUTS where they interact
    discrete: tuple[str, ...] = ()
    is_summed_out: bool = True


def eight_schools() -> Posterior:
    """Return the eight schools, non-centred."""
    effects = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    errors = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def model(effects, errors):
        mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
        scale = numpyro.sample("scale", dist.HalfCauchy(5.0))
        with numpyro.plate("schools", len(effects)):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(mean + scale * z, errors), obs=effects)

    return Posterior(
        model,
        (effects, errors),
        lambda sites: sites | {"log scale": jnp.log(sites["scale"])},
    )


def logistic(size: int = 20, rows: int = 200) -> Posterior:
    """Return a logistic regression."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, size))
    weights = rng.normal(size=size)
    y = rng.random(rows) < 1 / (1 + np.exp(-x @ weights))

    def model(x, y):
        prior = dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1)
        weights = numpyro.sample("weights", prior)
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)

    args = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32)
    return Posterior(model, args, lambda sites: sites)


def mixture(is_ordered: bool = False, rows: int = 100) -> Posterior:
    """Return a Gaussian mixture of three components, with unknown weights and means."""
    rng = np.random.default_rng(1)
    z = rng.choice(3, size=rows, p=[0.5, 0.3, 0.2])
    y = np.array([-3.0, 0.0, 3.0])[z] + rng.normal(size=rows)

    def model(y):
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(3, 2.0)))
        prior = dist.Normal(0.0, 4.0).expand([3]).to_event(1)
        if is_ordered:
            prior = dist.ImproperUniform(constraints.ordered_vector, (), (3,))
        means = numpyro.sample("means", prior)
        if is_ordered:
            numpyro.factor("prior", dist.Normal(0.0, 4.0).log_prob(means).sum())
        with numpyro.plate("rows", len(y)):
            z = numpyro.sample("z", dist.Categorical(weights))
            numpyro.sample("y", dist.Normal(means[z], 1.0), obs=y)

    def fn(sites):
        means = sites["means"]
        of_largest = sites["weights"][jnp.argmax(means)]
        return {"means": jnp.sort(means), "weight of the largest mean": of_largest}

    return Posterior(model, (jnp.asarray(y, jnp.float32),), fn, ("z",))


def ordered_mixture() -> Posterior:
    """Return the mixture with ordered means."""
    return mixture(is_ordered=True)


def hidden_markov(steps: int = 100) -> Posterior:
    """Return a hidden Markov model of two states with unknown transitions and means."""
    rng = np.random.default_rng(2)
    transitions = np.array([[0.9, 0.1], [0.2, 0.8]])
    states = [0]
    for _ in range(steps - 1):
        states.append(rng.choice(2, p=transitions[states[-1]]))
    y = np.array([-1.0, 1.5])[states] + 0.7 * rng.normal(size=steps)

    def model(y):
        rows = jnp.array([[4.0, 1.0], [1.0, 4.0]])
        transitions = numpyro.sample("transitions", dist.Dirichlet(rows).to_event(1))
        # ordered, as the posterior has a mode for each labelling otherwise
        prior = dist.ImproperUniform(constraints.ordered_vector, (), (2,))
        means = numpyro.sample("means", prior)
        numpyro.factor("prior", dist.Normal(0.0, 2.0).log_prob(means).sum())

        def step(previous, y):
            z = numpyro.sample("z", dist.Categorical(transitions[previous]))
            numpyro.sample("y", dist.Normal(means[z], 0.7), obs=y)
            return z, None

        scan(step, 0, y)

    def fn(sites):
        return {name: sites[name] for name in ("transitions", "means")}

    return Posterior(model, (jnp.asarray(y, jnp.float32),), fn, ("z",))


def spike_and_slab(size: int = 10, rows: int = 60) -> Posterior:
    """Return a regression with an indicator of each coefficient's inclusion."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, size))
    weights = np.where(np.arange(size) < 4, rng.normal(size=size), 0)
    y = x @ weights + rng.normal(size=rows)

    def model(x, y):
        size = x.shape[1]
        share = numpyro.sample("share", dist.Beta(1.0, 1.0))
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 2.0))
        with numpyro.plate("columns", size):
            included = numpyro.sample("included", dist.Bernoulli(share))
            slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        mean = x @ (included * slope)
        numpyro.sample("y", dist.Normal(mean, jnp.sqrt(variance)).to_event(1), obs=y)

    def fn(sites):
        effect = sites["included"] * sites["slope"]
        return {
            "included": sites["included"],
            "effect": effect,
            "share": sites["share"],
        }

    args = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return Posterior(model, args, fn, ("included",), is_summed_out=False)


def changepoint(steps: int = 60) -> Posterior:
    """Return a log-linear Poisson regression whose level changes at an unknown time."""
    rng = np.random.default_rng(4)
    time = np.arange(steps)
    rate = np.exp(1.0 + 0.5 * np.sin(time / 6) + 0.8 * (time >= 35))
    y = rng.poisson(rate)

    def model(y):
        time = jnp.arange(len(y))
        change = numpyro.sample("change", dist.DiscreteUniform(1, len(y) - 1))
        levels = numpyro.sample("levels", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        level = jnp.where(time < change, levels[0], levels[1])
        rate = jnp.exp(level + slope * jnp.sin(time / 6))
        numpyro.sample("y", dist.Poisson(rate).to_event(1), obs=y)

    def fn(sites):
        return {name: sites[name] for name in ("levels", "slope")}

    return Posterior(model, (jnp.asarray(y),), fn, ("change",))


def stochastic_volatility(steps: int = 100) -> Posterior:
    """Return a stochastic volatility model, non-centred."""
    rng = np.random.default_rng(5)
    volatility = -1.0
    returns = []
    for _ in range(steps):
        volatility = -1.0 + 0.95 * (volatility + 1.0) + 0.3 * rng.normal()
        returns.append(np.exp(volatility / 2) * rng.normal())

    def model(returns):
        size = len(returns)
        persistence = numpyro.sample("persistence", dist.Beta(20.0, 1.5))
        scale = numpyro.sample("scale", dist.HalfNormal(0.5))
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
        prior = dist.Normal(0.0, 1.0).expand([size]).to_event(1)
        shocks = numpyro.sample("shocks", prior)

        def step(volatility, shock):
            volatility = mean + persistence * (volatility - mean) + scale * shock
            return volatility, volatility

        _, volatilities = lax.scan(step, mean, shocks)
        numpyro.sample(
            "returns",
            dist.Normal(0.0, jnp.exp(volatilities / 2)).to_event(1),
            obs=returns,
        )

    def fn(sites):
        return {name: sites[name] for name in ("persistence", "scale", "mean")}

    return Posterior(model, (jnp.asarray(returns, jnp.float32),), fn)


POSTERIORS = {
    "eight schools": eight_schools,
    "logistic regression": logistic,
    "mixture": mixture,
    "ordered mixture": ordered_mixture,
    "hidden Markov model": hidden_markov,
    "spike and slab": spike_and_slab,
    "changepoint": changepoint,
    "stochastic volatility": stochastic_volatility,
}
