# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A model whose finite discrete sites are summed out, as another NumPyro model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpyro
from numpyro import handlers

from ebmpp.traced.sweep.posterior import Posterior


def summed_out(posterior: Posterior, sites: Sequence[str], log_marginal: Callable) -> Callable[..., None]:
    """Return the model of a posterior's siblings, whose log density is ``log_marginal``.

    :param sites: discrete sites, which the new model lacks.
    :param log_marginal: ``fn(values, *model_args, **model_kwargs)`` of values of all other sites.
    """
    info = posterior.info
    fixed = {name: info.latent[name] for name in sites}  # at any value, whose density is masked
    latent = [name for name in info.latent if name not in fixed]
    samples: set[str] = set()

    def deterministic(sites: Mapping, siblings: Mapping, arguments: Sequence) -> list[Any]:
        trace = info.trace({**sites, **siblings}, arguments)
        samples.update(name for name, site in trace.items() if site["type"] == "sample")
        return [trace[name]["value"] for name in info.deterministic]

    program = posterior.trace(deterministic, info.latent)
    slots = zip(info.deterministic, program.outputs, strict=True)
    hidden = samples.difference(latent).union(n for n, slot in slots if program.depends(slot))
    is_hidden = lambda msg: msg.get("name") in hidden

    def model(*args: Any, **kwargs: Any) -> None:
        inner = _Masked(handlers.substitute(info.model, data=fixed), samples)
        trace = handlers.trace(handlers.block(inner, hide_fn=is_hidden)).get_trace(*args, **kwargs)
        values = {name: trace[name]["value"] for name in latent}
        numpyro.factor("log_marginal", log_marginal(values, *args, **kwargs))

    return model


class _Masked(handlers.mask):
    """Masks sites by name, not the factors of Jacobians, which NUTS adds where it finds a latent site."""

    def __init__(self, fn: Callable[..., Any], names: set[str]) -> None:
        super().__init__(fn, mask=False)
        self.names = names

    def process_message(self, msg: Any) -> None:
        if msg.get("name") in self.names:
            super().process_message(msg)
