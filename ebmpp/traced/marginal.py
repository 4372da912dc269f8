# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A model whose finite discrete sites are summed out, as another NumPyro model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpyro
from numpyro import handlers

from jax import Array

from ebmpp.traced.sweep.posterior import Posterior


def summed_out(
    posterior: Posterior, sites: Sequence[str], log_marginal: Callable[..., Array]
) -> Callable[..., None]:
    """Return the model of a posterior's siblings, whose log density is ``log_marginal``.

    :param sites: discrete sites, which the new model lacks.
    :param log_marginal: ``fn(values, *model_args, **model_kwargs)`` of values of all other sites.
    """
    info = posterior.info
    fixed = {name: info.latent[name] for name in sites}  # at any value, whose density is masked
    latent = [name for name in info.latent if name not in fixed]

    def deterministic(sites: Mapping, siblings: Mapping, arguments: Sequence) -> list[Any]:
        trace = info.trace({**sites, **siblings}, arguments)
        return [trace[name]["value"] for name in info.deterministic]

    program = posterior.trace(deterministic, info.latent)
    slots = zip(info.deterministic, program.outputs, strict=True)
    hidden = {name for name, slot in slots if program.depends(slot)}
    is_other = lambda msg: msg["type"] == "sample" and msg["name"] not in latent
    is_hidden = lambda msg: msg.get("name") in hidden or is_other(msg)

    def model(*args: Any, **kwargs: Any) -> None:
        inner = handlers.mask(handlers.substitute(info.model, data=fixed), mask=False)
        trace = handlers.trace(handlers.block(inner, hide_fn=is_hidden)).get_trace(*args, **kwargs)
        values = {name: trace[name]["value"] for name in latent}
        numpyro.factor("log_marginal", log_marginal(values, *args, **kwargs))

    return model
