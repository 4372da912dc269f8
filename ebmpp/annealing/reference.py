# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Start of annealing: a checked model, and a reference of independent units near it.

The reference's log Z is a sum of log-normalisers. Estimates of Z are unbiased for any
reference; they vary less from one that is near.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Eta,
    Numbers,
    Params,
    RowMask,
    State,
    StateLike,
    checks,
    compiled,
    expand,
    num_rows,
    random,
)
from ebmpp.errors import DomainError, ParameterError
from ebmpp.exact.shifted import Shifted
from ebmpp.families import Family
from ebmpp.graph import FactorGraph, energy, initialization, tables
from ebmpp.graph.factors import zeros
from ebmpp.moves import Move, Target
from ebmpp.moves.move import draw_chains


def check_model(name: str, graph: FactorGraph, params: Params, rng_key: Array) -> Array:
    """Check what every function of this room takes, and return the key pair of the key."""
    checks.instance(f"{name}: graph", graph, FactorGraph)
    instead = "Use a function of ebmpp.monitors or Monitor(fn, compiled=False), or call it outside"
    checks.on_host(name, params, rng_key, instead=instead)
    graph.check(params)
    return random.key_pair(checks.key(f"{name}: rng_key", rng_key))


# as much work as a hundred particles at 200 temperatures
_PILOT_CHAINS = 200
_PILOT_SWEEPS = 100
_MOST_CERTAIN = 16.0


def reference(
    graph: FactorGraph,
    model: Shifted,
    key: Array,
    data: StateLike | None = None,
    fixed: State | None = None,
    pilot: "Pilot | None" = None,
    moves: tuple[Move, ...] | None = None,
) -> Eta:
    """Return natural parameters of independent blocks; values of ``fixed`` take precedence.

    By default the means come from a pilot: short chains of the model, whose draws are
    used for nothing else. On four machines that learned bars and stripes 4x4 (16 latent
    units, 100 particles, 1,000 temperatures, 20 keys) the root mean square error of log
    Z is 0.02 to 0.05, and was 0.7 to 2.3 from the model's biases.

    :param data: rows of the visible blocks, whose means replace the pilot's; latents
        then have the family's default distribution. These and ``fixed`` are not
        shifted; the result is.
    :param pilot: of :func:`run_pilot`; None to run it where it is needed.
    :param moves: of a sweep of that pilot.
    """
    eta = model.natural(graph, _checked(graph, {} if fixed is None else fixed))
    if data is not None:
        return model.natural(graph, base_rates(graph, data)) | eta
    if eta.keys() == graph.families.keys():
        return eta
    pilot = pilot or run_pilot(Target(graph, model.params), key, moves)
    return center(graph, pilot) | eta


def base_rates(
    graph: FactorGraph, data: StateLike, weights: Numbers | None = None
) -> Blocks:
    """Return natural parameters with the (weighted) means of data, and defaults of latents.

    Salakhutdinov, Murray (2008), *On the quantitative analysis of deep belief
    networks*, section 4.1.3.
    """
    families = graph.families
    eta = {b: f.default_eta() for b, f in families.items()}
    for b, mean in tables.mean_statistics(graph, data, weights).items():
        eta[b] = initialization.base_rate(families[b], mean, eta[b])
    return eta


def log_partition(graph: FactorGraph, eta: Eta) -> float:
    """Return log Z of independent blocks."""
    terms = _log_normalizers(graph, eta)
    return float(sum(np.asarray(term, float).sum() for term in terms))


@compiled(statics=1, once=True)
def _log_normalizers(graph: FactorGraph, eta: Eta) -> list[Array]:
    return [f.log_normalizer(eta[b]) for b, f in graph.families.items()]


class Pilot(NamedTuple):
    """Last states of short chains from initial draws, and natural parameters given these.

    Blocks without conditionals in closed form have their families' defaults.
    """

    x: Blocks
    eta: Blocks


def run_pilot(
    target: Target, key: Array, moves: tuple[Move, ...] | None = None
) -> Pilot:
    """Run the chains in whose midst a reference is."""
    keys = random.fold_in(random.fold_in(key, 4, 1), np.arange(_PILOT_CHAINS))
    return _run_pilot(moves, target, keys)


@compiled(statics=1, key=lambda moves, target, keys: target.graph)
def _run_pilot(moves: tuple[Move, ...] | None, target: Target, keys: Array) -> Pilot:
    graph = target.graph
    x = draw_chains(target, keys, _PILOT_SWEEPS, moves)

    def natural(b):
        family = graph.families[b]
        if b in graph.nonconjugate:
            shape = len(keys), *family.statistic_shape
            return jnp.broadcast_to(family.default_eta(), shape)
        eta = energy.natural_rows(graph, target.params, x, [b])[b]
        if not graph.has_zeros:
            return eta
        # other values must not be impossible under the reference
        return zeros.saturate(family, eta, _MOST_CERTAIN)

    return Pilot(x, {b: natural(b) for b in target.free})


def center(graph: FactorGraph, pilot: Pilot, where: RowMask | None = None) -> Eta:
    """Return natural parameters with the means of a pilot's chains, or of some of them."""
    # one program for both
    mask = np.ones(num_rows(pilot.x), bool) if where is None else where
    return _center(graph, pilot, mask)


@compiled(statics=1, once=True)
def _center(graph: FactorGraph, pilot: Pilot, mask: Numbers) -> Eta:
    def average(values):
        return values.mean(0, where=expand(jnp.asarray(mask), values))

    result = {}
    for b, eta in pilot.eta.items():
        family = graph.families[b]
        is_closed = b not in graph.nonconjugate
        means = family.mean(eta) if is_closed else family.statistics(pilot.x[b])
        result[b] = _from_mean(family, average(means), average(eta))
    return result


def _from_mean(family: Family, mean: Array, default: Array) -> Array:
    """Return the natural parameter with these means, or per unit the default without one.

    There is none where a mean is rounded to the end of its range, and for a family
    without an inverse mean map. The default, a mean of natural parameters, is in the
    domain, which is convex. On bars and stripes by PCD 88 of 100 particles were
    effective from the means, and 58 from the default.
    """
    try:
        eta = family.from_mean(mean)
    # the second: an inverse map written in NumPy
    except (NotImplementedError, jax.errors.JAXTypeError):
        return default
    is_valid = family.in_domain(eta).reshape(*family.shape, -1).all(-1)
    return jnp.where(expand(is_valid, eta), eta, default)


def _checked(graph: FactorGraph, values: Mapping[str, Array]) -> Eta:
    """Return a user's natural parameters as arrays."""
    if not isinstance(values, Mapping):
        raise checks.parameter_error(
            "reference", "a dict of natural parameters", values
        )
    checks.names("block of the reference", values, graph.families, ParameterError)
    result = {}
    for b, value in values.items():
        family = graph.families[b]
        name = f"reference: block {b!r} ({family!r})"
        eta = jnp.asarray(checks.numbers(name, value, ParameterError), float)
        if eta.shape != family.statistic_shape:
            raise checks.parameter_error(
                name, f"of shape {family.statistic_shape}", eta.shape
            )
        if not bool(family.in_domain(eta).all()):
            raise checks.error(
                name, family.domain, np.asarray(eta).tolist(), DomainError
            )
        result[b] = eta
    return result
