# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Published maximum-likelihood analyses with discrete latents summed out."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from outcome import Row
import published_data as data
from scipy.optimize import minimize

import jax
import jax.numpy as jnp

import ebmpp


def _fit(
    model: Callable, sites: Sequence[str], *args: object, **options: object
) -> Any:
    """Return the maximum of the likelihood with the discrete sites summed out."""
    block = ebmpp.GibbsBlock.from_model(model, sites, *args)
    return block.maximise(rng_key=jax.random.key(0), prior=False, **options)


def _rates(num_states: int) -> list[Row]:
    """Fit a Poisson hidden Markov model with a stationary start."""

    def model(counts):
        rows = dist.Dirichlet(jnp.ones(num_states)).expand([num_states]).to_event(1)
        transition = numpyro.sample("transition", rows)
        rate = dist.Gamma(1, 0.1).expand([num_states]).to_event(1)
        rate = numpyro.sample("rate", rate)
        # the stationary distribution solves pi (1 - P + 1) = 1
        ones = jnp.ones((num_states, num_states))
        start = jnp.linalg.solve(
            (jnp.eye(num_states) - transition + ones).T, jnp.ones(num_states)
        )
        with numpyro.plate("years", len(counts)):
            state = numpyro.sample(
                "state", dist.Categorical(jnp.ones(num_states) / num_states)
            )
            numpyro.sample("count", dist.Poisson(rate[state]), obs=counts)
        numpyro.factor("start", jnp.log(start)[state[0]])
        numpyro.factor("steps", jnp.log(transition)[state[:-1], state[1:]].sum())

    result = _fit(model, ["state"], jnp.array(data.EARTHQUAKES), uniform=["state"])
    published = {2: 342.3183, 3: 329.4603}[num_states]
    name = f"-log L, {num_states} states"
    return [Row(name, published, -float(result.log_density), 0.0005)]


def earthquakes() -> list[Row]:
    """Zucchini, MacDonald, Langrock (2016): earthquakes by year, hidden Markov models."""
    return [row for count in (2, 3) for row in _rates(count)]


def latent_classes() -> list[Row]:
    """Goodman (1974): two latent classes of the Stouffer-Toby table."""
    patterns = 1 - np.array(list(np.ndindex(2, 2, 2, 2)))  # from + + + + to - - - -
    answers = np.repeat(patterns, data.STOUFFER_TOBY, axis=0)

    def model(answers):
        share = numpyro.sample("share", dist.Uniform(0, 1))
        items = dist.Uniform(0, 1).expand([2, 4]).to_event(2)
        items = numpyro.sample("items", items)
        with numpyro.plate("respondents", len(answers)):
            kind = numpyro.sample("kind", dist.Bernoulli(share))
            numpyro.sample(
                "answers", dist.Bernoulli(items[kind]).to_event(1), obs=answers
            )

    result = _fit(model, ["kind"], jnp.array(answers))
    share = float(result.values["share"])
    return [
        Row("log L", -504.4677, float(result.log_density), 0.0005),
        Row("smaller class", 0.279, min(share, 1 - share), 0.0005),
    ]


def annotators() -> list[Row]:
    """Dawid, Skene (1979): fitness of patients graded by anaesthetists, by EM from the votes.

    This is the published maximum, of log-likelihood -192.891. It is a local one: EM
    from random starts finds others, up to -191.569.
    """

    def model(grades):
        share = numpyro.sample("share", dist.Dirichlet(jnp.ones(4)))
        rows = dist.Dirichlet(jnp.ones(4)).expand([5, 4]).to_event(2)
        table = numpyro.sample("table", rows)
        with numpyro.plate("patients", len(grades)):
            true = numpyro.sample("true", dist.Categorical(share))
            probs = table[data.ANAESTHETIST, true[:, None]]
            numpyro.sample("grades", dist.Categorical(probs).to_event(1), obs=grades)

    block = ebmpp.GibbsBlock.from_model(model, ["true"], jnp.array(data.FITNESS))
    votes = np.eye(4)[data.FITNESS]  # (patients, columns, grades)
    chance = votes.mean(1)
    for _ in range(100):
        table = np.full((5, 4, 4), 1e-9)
        np.add.at(table, data.ANAESTHETIST, np.einsum("pk,pcg->ckg", chance, votes))
        table /= table.sum(-1, keepdims=True)
        values = {"share": jnp.array(chance.mean(0)), "table": jnp.array(table)}
        chance = np.asarray(block.marginals(values)["true"])
    published = (0.40, 0.42, 0.11, 0.07)
    return [
        Row(f"share of class {i + 1}", value, float(share), 0.0, 0.005)
        for i, (value, share) in enumerate(zip(published, chance.mean(0), strict=True))
    ]


def salamanders() -> list[Row]:
    """MacKenzie et al. (2006): occupancy of 39 sites by salamanders."""

    def model(seen):
        occupied = numpyro.sample("occupancy", dist.Uniform(0, 1))
        detected = numpyro.sample("detection", dist.Uniform(0, 1))
        with numpyro.plate("sites", len(seen)):
            here = numpyro.sample("here", dist.Bernoulli(occupied))
            visits = dist.Bernoulli(jnp.tile(here[:, None] * detected, (1, 5)))
            numpyro.sample("seen", visits.to_event(1), obs=seen)

    result = _fit(model, ["here"], jnp.array(data.SALAMANDERS))
    values = result.values
    return [
        Row("-2 log L", 161.76, -2 * float(result.log_density), 0.005),
        Row("occupancy", 0.595, float(values["occupancy"]), 0.0005),
        Row("detection", 0.259, float(values["detection"]), 0.0005),
    ]


def _releases() -> tuple[np.ndarray, np.ndarray]:
    """Return sightings of each released bird until its next one, and a mask of these years."""
    seen = []
    watched = []
    for first, row in enumerate(data.DIPPERS):
        for after, count in enumerate(row.tolist()):
            years = np.arange(6)
            history = np.tile(years == after, (count, 1))
            seen.append(history.astype(int))
            watched.append(np.tile((years >= first) & (years <= after), (count, 1)))
    return np.concatenate(seen), np.concatenate(watched)


def dippers() -> list[Row]:
    """Lebreton et al. (1992): survival of dippers, Cormack-Jolly-Seber with constant rates.

    A bird counts as a new one after each sighting, which leaves the likelihood as it is.
    NumPyro's own example masks the state at the first capture, and so is another model.
    """
    seen, watched = _releases()

    def model(seen, watched):
        survival = numpyro.sample("survival", dist.Uniform(0, 1))
        recapture = numpyro.sample("recapture", dist.Uniform(0, 1))
        alive = jnp.ones(len(seen), int)
        with numpyro.plate("birds", len(seen)):
            for year in range(6):
                with numpyro.handlers.mask(mask=watched[:, year]):
                    alive = numpyro.sample(
                        f"alive_{year}", dist.Bernoulli(alive * survival)
                    )
                    numpyro.sample(
                        f"seen_{year}",
                        dist.Bernoulli(alive * recapture),
                        obs=seen[:, year],
                    )
                alive = jnp.where(watched[:, year], alive, 1)

    sites = [f"alive_{year}" for year in range(6)]
    result = _fit(model, sites, jnp.array(seen), jnp.array(watched))
    values = result.values
    return [
        Row("-2 log L", 666.8377, -2 * float(result.log_density), 0.001),
        Row("survival", 0.5602, float(values["survival"]), 0.0005),
        Row("recapture", 0.9026, float(values["recapture"]), 0.0005),
    ]


def law_school() -> list[Row]:
    """Bock, Lieberman (1970): items of a test, as a machine with one Gaussian latent."""
    counts = [3, 6, 2, 11, 1, 1, 3, 4, 1, 8, 0, 16, 0, 3, 2, 15]
    counts += [10, 29, 14, 81, 3, 28, 15, 80, 16, 56, 21, 173, 11, 61, 28, 298]
    graph = ebmpp.FactorGraph(
        {"x": ebmpp.Bernoulli(5)},
        {"ability": ebmpp.Gaussian(1)},
        [ebmpp.Bias("x"), ebmpp.Bilinear("x", "ability")],
    )
    patterns = {"x": np.array(list(np.ndindex(2, 2, 2, 2, 2)))}

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=0)
    def loss(params):
        rows = ebmpp.exact.log_likelihood(graph, params, patterns)
        return -jnp.dot(jnp.array(counts), rows)

    start = jax.tree.map(lambda p: p + 0.3, graph.init(jax.random.key(0)))
    flat, unflatten = jax.flatten_util.ravel_pytree(start)

    def in_double(x):
        value, slope = loss(unflatten(jnp.float32(x)))
        slope, _ = jax.flatten_util.ravel_pytree(slope)
        return float(value), np.float64(slope)

    best = minimize(in_double, flat, jac=True)
    return [Row("log L (2PL, normal ability)", -2466.65, -best.fun, 0.01)]
