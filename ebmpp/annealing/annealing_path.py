# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A path of models from independent units to a given one, and chains that are carried along it.

At the inverse temperature beta the energy is ``(1 - beta) E_0 + beta E``, where E_0 is the energy of the
reference: independent units, each block at a natural parameter of its own, whose log Z is a sum of
log-normalisers. Wherever both ends normalise, so does all between (Hoelder's inequality).

The natural parameter of a block is then affine in beta too. So one evaluation at a state serves both
temperatures of an importance weight and the draw that follows, and a step costs what a Gibbs sweep costs.
An independent set of blocks is summed out of the weights in closed form, and only the others are kept.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Float32
import numpy as np
from tqdm.auto import tqdm

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.annealing.path import Path, draw_reference, kept_blocks
from ebmpp.core import checks, random, sharding
from ebmpp.core.compile import Compiled
from ebmpp.core.types import Blocks, Eta, Params
from ebmpp.errors import ArgumentError, DomainError, ParameterError
from ebmpp.families import Family
from ebmpp.graph import FactorGraph, energy, initialization, tables
from ebmpp.moves import gibbs
from ebmpp.moves.move import draw_sweep, gibbs_sweep
from ebmpp.moves.target import Target

#: beta_0 = 0 and beta = 1 count; this many is one step, plain importance sampling
FEWEST = 2

LADDERS = ("linear", "sigmoid", "adaptive")

_STEPS = 100  # in one call of the device: what a progress bar waits for
_SLOPE = 4.0  # of the sigmoid ladder, at either end
_PILOT_CHAINS, _PILOT_SWEEPS = 200, 100  # what a hundred particles sweep in 200 temperatures


# -- ladders ---------------------------------------------------------------------------------------


def ladder(kind: str | Any, num_temperatures: int) -> Float32[np.ndarray, "temperatures"]:
    """Inverse temperatures from 0 to 1.

    :param kind: "linear"; "sigmoid", denser at both ends; or increasing values from 0 to 1.
    :param num_temperatures: how many, 0 and 1 included; values that are given bring their own number.
    :return: increasing.
    :raises ArgumentError: for fewer than two, an unknown name, or values that do not increase from 0 to 1.

    **References**

    1. Wu, Burda, Salakhutdinov, Grosse (2017), *On the quantitative analysis of decoder-based generative
       models*, section 4: the sigmoid.

    **Example**

    >>> ladder("sigmoid", 5).round(2).tolist()
    [0.0, 0.1, 0.5, 0.9, 1.0]
    """
    if not isinstance(kind, str):
        return _given_ladder(kind)
    linear = np.linspace(0.0, 1.0, checks.count("num_temperatures", num_temperatures, FEWEST))
    if checks.choice("ladder", kind, LADDERS, "increasing values from 0 to 1") == "linear":
        return linear.astype(np.float32)
    rising = np.tanh(_SLOPE * (linear - 0.5))  # a logistic function, but for scale and place
    return (0.5 + 0.5 * rising / rising[-1]).astype(np.float32)


def _given_ladder(values: Any) -> Float32[np.ndarray, "temperatures"]:
    wanted = "ladder: inverse temperatures increase from 0 to 1, such as [0, 0.2, 1]"
    try:
        betas = np.asarray(values, np.float32)
    except (TypeError, ValueError):
        raise ArgumentError(f"{wanted}; got {values!r}") from None
    if betas.ndim != 1 or len(betas) < FEWEST:
        raise ArgumentError(
            f"{wanted}; got an array of shape {betas.shape}, and at least {FEWEST} are needed"
        )
    if betas[0] != 0 or betas[-1] != 1:
        raise ArgumentError(f"{wanted}; these go from {betas[0]:g} to {betas[-1]:g}")
    falls = np.flatnonzero(~(np.diff(betas) > 0))
    if len(falls):
        i = int(falls[0])
        raise ArgumentError(f"{wanted}; value {i + 1} is {betas[i + 1]:g}, after {betas[i]:g} (in float32)")
    return betas


def equal_speed(
    betas: Float[np.ndarray, "pilot"], spread: Float[np.ndarray, "steps"], num_temperatures: int
) -> Float32[np.ndarray, "temperatures"]:
    """A ladder whose steps have weights of about equal standard deviation.

    :param betas: of a pilot run.
    :param spread: the standard deviation of its log-weights, step by step.
    :param num_temperatures: how many to make.
    :return: increasing.

    **References**

    1. Gelman, Meng (1998), *Simulating normalizing constants*, section 4.2: constant speed along a path.

    **Example**

    >>> equal_speed(np.array([0, 0.5, 1]), np.array([0.3, 0.1]), 5).round(2).tolist()
    [0.0, 0.17, 0.33, 0.5, 1.0]
    """
    # steps without any spread must not fall together
    cumulated = np.concatenate([[0.0], np.cumsum(spread + 1e-3 * spread.mean() + 1e-12)])
    wanted = np.linspace(0.0, cumulated[-1], num_temperatures)
    made = np.interp(wanted, cumulated, betas).astype(np.float32)
    made[0], made[-1] = 0.0, 1.0
    return np.unique(made)


# -- the reference ---------------------------------------------------------------------------------


def reference(
    graph: FactorGraph,
    params: Params,
    key: Array,
    data: Mapping[str, Array] | Array | None = None,
    given: Mapping[str, Array] | None = None,
) -> Blocks:
    """Natural parameters of independent blocks, near to the model.

    By default every unit's mean statistics there are those of a pilot: of short chains of the model, whose
    draws are used for nothing else. The model's own biases would be far off where its weights are large: on
    four machines that learned bars and stripes 4x4 (16 latent units, 100 particles, 1,000 temperatures, 20
    keys) the root mean square error of log Z was 0.7 to 2.3 from there, and is 0.02 to 0.05 from here.

    :param graph: the model.
    :param params: its params.
    :param key: ``(2,)``, for the pilot alone.
    :param data: rows of the visible blocks: a unit's mean statistics there are those of its reference, and
        latents have the family's default law. There is no pilot then.
    :param given: natural parameters of some blocks, which go before.
    :raises ParameterError: for a wrong name or shape.
    :raises DomainError: where a block that is given does not normalise.
    :raises StateError: for data of a wrong name, shape or value.

    **References**

    1. Salakhutdinov, Murray (2008), *On the quantitative analysis of deep belief networks*, section 4.1.3:
       base rates.
    """
    fixed = _given_reference(graph, {} if given is None else given)
    if data is not None:
        return base_rates(graph, data) | fixed
    return fixed if fixed.keys() == graph.families.keys() else _pilot(Target(graph, params), key) | fixed


def base_rates(graph: FactorGraph, data: Mapping[str, Array] | Array, weights: Any = None) -> Blocks:
    """Natural parameters of the visible blocks' base rates, and of the latents' default laws.

    :param weights: of the rows; None for equal ones.
    :raises StateError: for data of a wrong name, shape or value.
    """
    families = graph.families
    default = {b: f.default_eta() for b, f in families.items()}
    mean = tables.mean_statistics(graph, data, weights)
    return default | {b: initialization.base_rate(families[b], *m, default[b]) for b, m in mean.items()}


@jax.jit
def _short_chains(target: Target, keys: Array) -> Blocks:
    """Natural parameters of the blocks that short chains from initial draws suggest: see :func:`_of_mean`."""
    graph, moves = target.graph, gibbs_sweep(target.graph)
    one = lambda i, x: draw_sweep(target, x, moves, random.fold_in(keys, i))[0]
    x = gibbs.initial_rows(graph, graph.families, random.fold_in(keys, 0))
    x = jax.lax.fori_loop(1, _PILOT_SWEEPS + 1, one, x)
    eta = {b: energy.natural_rows(graph, target.params, x, [b])[b] for b in graph.families}
    mean = {b: f.mean(eta[b]).mean(0) for b, f in graph.families.items()}
    return {b: _of_mean(family, mean[b], eta[b].mean(0)) for b, family in graph.families.items()}


def _pilot(target: Target, key: Array) -> Blocks:
    return _short_chains(target, random.fold_in(key, np.arange(_PILOT_CHAINS)))


def _of_mean(family: Family, mean: Array, otherwise: Array) -> Array:
    """The natural parameter with these mean statistics, unit by unit, or the other where there is none.

    There is none where a mean is rounded to the end of what it can be, and for a family without an inverse
    mean map. A mean of natural parameters is always in the domain, which is convex, and any reference is
    right; from means more particles are effective (88 of 100 against 58 on bars and stripes by PCD).
    """
    try:
        made = family.from_mean(mean)
    except (NotImplementedError, jax.errors.JAXTypeError):  # the second: an inverse map written in numpy
        return otherwise
    inside = family.in_domain(made).reshape(*family.shape, -1).all(-1)
    return jnp.where(inside.reshape(family.shape + (1,) * len(family.stat_shape)), made, otherwise)


def _given_reference(graph: FactorGraph, given: Mapping[str, Array]) -> Blocks:
    made = {}
    if not isinstance(given, Mapping):
        raise ParameterError(f"reference is a dict of natural parameters by block, not {checks.tell(given)}")
    for b, eta in given.items():
        if b not in graph.families:
            raise ParameterError(f"reference has {b!r}, and the blocks are {list(graph.families)}")
        family, eta = graph.families[b], jnp.asarray(eta, jnp.result_type(float))
        if eta.shape != family.statistic_shape:
            raise ParameterError(
                f"reference: the natural parameter of block {b!r} ({family!r}) has shape {eta.shape}, "
                f"expected {family.statistic_shape}"
            )
        if not bool(family.in_domain(eta).all()):
            raise DomainError(
                f"reference: block {b!r} ({family!r}) does not normalise: its natural parameter must be "
                f"{family.domain}, and it is {np.asarray(eta)}"
            )
        made[b] = eta
    return made


def log_partition_of(graph: FactorGraph, eta: Eta) -> float:
    """log Z of the reference."""
    return float(sum(np.asarray(f.log_normalizer(eta[b]), float).sum() for b, f in graph.families.items()))


# -- chains along the path -------------------------------------------------------------------------


@Compiled
def _carry(
    target: Target,
    eta0: Eta,
    betas: Array,
    count: Array,
    x: Blocks,
    keys: Array,
) -> tuple[Blocks, Array, Array]:
    """``count`` steps of all particles, from each beta to the next; devices of a mesh carry theirs.

    :param betas: shape ``(_STEPS + 1,)``; the first ``count + 1`` are used.
    :param x: the kept blocks, ``(rows, *shape)``.
    :param keys: of these steps, ``(rows, 2)``.
    :return: the kept blocks; the log-weights' increment; the spread of each step's, ``(_STEPS,)``.
    """

    def some(jobs: tuple[Blocks, Array], shared: tuple, *_: Any) -> tuple[tuple, tuple]:
        (x, keys), (target, eta0, betas, count) = jobs, shared
        path = Path.line(target.graph, eta0, target.params)

        def step(i: Array, carry: tuple) -> tuple:
            x, log_weight, gains = carry
            low, high = path.at(betas[i]), path.at(betas[i + 1])
            here = path.slope(low.params, x)
            gain = path.gain(low, high, here, here)
            x = path.sweep(high, x, here.eta, random.fold_in(keys, i))
            return x, log_weight + gain, gains.at[i].set(gain)

        start = x, jnp.zeros(len(keys)), jnp.zeros((len(betas) - 1, len(keys)))
        x, log_weight, gains = jax.lax.fori_loop(0, count, step, start)
        return (x, log_weight, gains.T), ()

    jobs, shared = (x, keys), (target, eta0, betas, count)
    (x, log_weight, gains), _ = sharding.apart(some, jobs, shared, len(keys))
    return x, *sharding.everywhere((log_weight, gains.std(0)))


def anneal(
    graph: FactorGraph,
    params: Params,
    eta0: Eta,
    betas: np.ndarray,
    key: Array,
    num: int,
    x: Blocks | None = None,
    progress_bar: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Carry particles along the path, and weigh them.

    :param eta0: of the reference.
    :param betas: from 0 to 1, or from 1 to 0.
    :param key: ``(2,)``.
    :param num: how many particles; a particle depends on the key and on its own number.
    :param x: where they start, at ``betas[0]``: drawn from the reference if None.
    :param progress_bar: show one.
    :return: the log-weights, float64, ``(num,)``; and the spread of each step's, ``(len(betas) - 1,)``.
    """
    kept, target = kept_blocks(graph), Target(graph, params)
    keys = random.fold_in(key, np.arange(num))
    start = draw_reference(graph, kept, eta0, random.fold_in(keys, 0)) if x is None else x
    x = {b: start[b] for b in kept}
    # summed on the host, in float64: ten thousand small gains would lose digits in float32
    total, spreads = np.zeros(num), []
    hidden = not (progress_bar and sharding.is_first())
    with tqdm(total=len(betas) - 1, disable=hidden, desc="annealing", unit="step") as bar:
        for first in range(0, len(betas) - 1, _STEPS):
            part = betas[first : first + _STEPS + 1]
            count = len(part) - 1
            padded = np.pad(part, (0, _STEPS - count), mode="edge")
            own = random.fold_in(keys, 1, first)
            x, gain, spread = _carry(target, eta0, padded, np.int32(count), x, own)
            total += np.asarray(gain, float)
            spreads.append(np.asarray(spread, float)[:count])
            bar.update(count)
    return total, np.concatenate(spreads)
