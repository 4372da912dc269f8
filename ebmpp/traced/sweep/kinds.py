# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sites of a model by the way in which they can be drawn."""

from collections.abc import Callable, Mapping

from numpyro.distributions import Distribution
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace

import jax

from ebmpp.core import checks
from ebmpp.distribution import EnergyDistribution
from ebmpp.errors import IntractableError, StateError
from ebmpp.traced.block import Call
from ebmpp.traced.model import ModelInfo
from ebmpp.traced.sweep.continuous import continuous_site

#: Ways to draw a site: from its conditional, or by Hamiltonian Monte Carlo.
KINDS = ("gibbs", "hmc")


def kinds_of_sites(
    model: Callable, call: Call, fixed: Mapping[str, str]
) -> dict[str, str]:
    """Return one of :data:`KINDS` for every latent site of a model.

    :param fixed: kinds that the user chose.
    :raises StateError: for an unknown site, or a discrete one that shall move by "hmc".
    :raises IntractableError: for a continuous site that shall be drawn from its
        conditional, which is of no known family.
    """
    trace = prototype_trace(model, jax.random.key(0), *call.inputs)
    names = latent_sample_sites(trace)
    info = ModelInfo(model, names, call)
    checks.names("site of kinds", fixed, names, StateError)
    kinds = {name: _kind(info, name) for name in names if name not in fixed}
    for name, kind in fixed.items():
        if kind == "hmc" and not is_continuous(info.distributions[name]):
            raise checks.state_error(
                "kinds",
                f"'gibbs' for site {name!r}, which is discrete or an energy",
                kind,
            )
    return {name: fixed.get(name) or kinds[name] for name in names}


def is_continuous(prior: Distribution) -> bool:
    """Return True for real numbers with a density, which an energy's units may lack."""
    return not isinstance(prior, EnergyDistribution) and not prior.is_discrete


def _kind(info: ModelInfo, name: str) -> str:
    if not is_continuous(info.distributions[name]):
        return "gibbs"
    if not info.kinds(name):
        return "hmc"
    try:
        continuous_site(info, name)
    except IntractableError:
        return "hmc"
    return "gibbs"
