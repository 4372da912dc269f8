# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sites of a model by the way in which they can be drawn."""

from collections.abc import Callable, Mapping

from numpyro.infer.gibbs import latent_sample_sites, prototype_trace

import jax

from ebmpp.distribution import EnergyDistribution
from ebmpp.errors import IntractableError
from ebmpp.traced.block import Call
from ebmpp.traced.model import ModelInfo
from ebmpp.traced.sweep.sweep import continuous_site

#: Ways to draw a site: from its conditional, or by Hamiltonian Monte Carlo.
KINDS = ("gibbs", "hmc")


def kinds_of_sites(
    model: Callable, call: Call, fixed: Mapping[str, str]
) -> dict[str, str]:
    """Return one of :data:`KINDS` for every latent site of a model.

    :param fixed: kinds that the user chose.
    :raises IntractableError: for a continuous site that shall be drawn from its
        conditional, which is of no known family.
    """
    trace = prototype_trace(model, jax.random.key(0), *call.inputs)
    names = latent_sample_sites(trace)
    info = ModelInfo(model, names, call)
    return {name: fixed.get(name) or _kind(info, name) for name in names}


def _kind(info: ModelInfo, name: str) -> str:
    prior = info.distributions[name]
    if isinstance(prior, EnergyDistribution) or prior.is_discrete:
        return "gibbs"
    if info.kind(name) is None:
        return "hmc"
    try:
        continuous_site(info, name)
    except IntractableError:
        return "hmc"
    return "gibbs"
