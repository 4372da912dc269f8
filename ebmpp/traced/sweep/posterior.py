# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A model's log density as a traced function of some of its sites."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.util import log_density

from jax import Array
import jax.numpy as jnp

from ebmpp.dependence.program import Program
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.distribution import EnergyDistribution
from ebmpp.distribution.tractability import base_of
from ebmpp.errors import IntractableError
from ebmpp.traced.data import ArrayData, element_of
from ebmpp.traced.model import Context, ModelInfo

_MOST_VALUES = 1024
_ELSEWHERE = "Leave it to another block"
_TRUNCATE = (
    "Truncate its support, as by "
    "dist.Categorical(logits=dist.Poisson(rate).log_prob(jnp.arange(100))) or a "
    f"DiscreteUniform of at most {_MOST_VALUES} values, or leave it to another block"
)


class ValueTable(NamedTuple):
    """The values that the units of a site can take."""

    #: ``(K, *shape)``, or ``(K, 1, ..., 1)`` where all units take the same ones
    table: np.ndarray
    #: mask of the values that a unit can take; units with fewer than K are padded
    valid: np.ndarray


class ModelDensity:
    """The log density of a model as a function of some of its sites, of their siblings and of arguments.

    :param sites: names of latent sites: with finitely many values per unit, or one of
        real numbers.
    :param extra: further arrays by name that the log density depends on, like siblings.
    :raises IntractableError: for sites of infinitely many values, or values that depend
        on other sites.
    """

    def __init__(
        self,
        info: ModelInfo,
        sites: Sequence[str],
        extra: Mapping = MappingProxyType({}),
    ) -> None:
        self.info = info
        self.sites = tuple(sites)
        prototypes = info.latent | dict(extra)
        self.shapes = {name: value.shape for name, value in prototypes.items()}
        self.program = self.trace(self._log_density, prototypes)
        finite = [name for name in self.sites if name not in info.continuous]
        self.values = {name: self._values(name) for name in finite}

    def trace(self, fn: Callable[..., Any], prototypes: Mapping[str, Array]) -> Program:
        """Trace a function of the sites, their siblings and the model's arguments."""
        return self.info.program(fn, prototypes, self.sites)

    def terms(self, products: bool = True) -> SumOfTerms:
        """Return the terms of the log density; the arguments that they rely on must then stay the same."""
        tables = {site: v.table for site, v in self.values.items()}
        terms = SumOfTerms(self.program, self.info.arguments.arrays, tables, products)
        self.info.relied |= terms.relied
        return terms

    def inputs(self, values: Mapping[str, Array], context: Context) -> dict[int, Any]:
        """Return the values of the program's inputs, given sites and what is drawn with them."""
        return self.program.inputs({**context.siblings, **values}, context.arguments)

    def site_inputs(self, sites: Mapping[str, Array]) -> dict[int, Array]:
        """Return the inputs that are the sites, as :meth:`inputs` has them."""
        slots = {self.program.sites[name]: value for name, value in sites.items()}
        return {
            slot: value.astype(self.program.dtypes[slot])
            for slot, value in slots.items()
        }

    def log_density(self, values: Mapping[str, Array], context: Context) -> Array:
        """Return the log density, given sites and what is drawn with them."""
        output = self.program.output
        return self.program.run(self.inputs(values, context), [output])[output]

    def _log_density(
        self, sites: Mapping, siblings: Mapping, arguments: Sequence
    ) -> Array:
        args, kwargs = self.info.arguments.rebuild(arguments)
        model = handlers.seed(ArrayData(self.model_at(siblings)), 0)
        return jnp.asarray(log_density(model, args, kwargs, {**sites, **siblings})[0])

    def model_at(self, siblings: Mapping[str, Array]) -> Callable[..., Any]:
        """Return the model whose log density is traced; subclasses change it, given ``extra``."""
        return self.info.model

    def summed_out(self, log_marginal: Callable[..., Array]) -> Callable[..., None]:
        """Return the NumPyro model of the siblings alone, whose log density is ``log_marginal``.

        :param log_marginal: ``fn(values, *model_args, **model_kwargs)`` of values of
            all siblings.
        """
        info = self.info
        # at any value, whose density is masked
        fixed = {name: info.latent[name] for name in self.sites}
        latent = [name for name in info.latent if name not in fixed]
        samples: set[str] = set()

        def deterministic(
            sites: Mapping, siblings: Mapping, arguments: Sequence
        ) -> list[Any]:
            trace = info.trace({**sites, **siblings}, arguments)
            samples.update(
                name for name, site in trace.items() if site["type"] == "sample"
            )
            return [trace[name]["value"] for name in info.deterministic]

        program = self.trace(deterministic, info.latent)
        slots = zip(info.deterministic, program.outputs, strict=True)
        hidden = samples.difference(latent).union(
            n for n, slot in slots if program.depends(slot)
        )

        def is_hidden(msg):
            return msg.get("name") in hidden

        def model(*args: Any, **kwargs: Any) -> None:
            inner = _Masked(handlers.substitute(info.model, data=fixed), samples)
            trace = handlers.trace(handlers.block(inner, hide_fn=is_hidden)).get_trace(
                *args, **kwargs
            )
            values = {name: trace[name]["value"] for name in latent}
            numpyro.factor("log_marginal", log_marginal(values, *args, **kwargs))

        return model

    def _values(self, name: str) -> ValueTable:
        """Raise an IntractableError where there are too many, or they depend on other sites."""
        prior = self.info.distributions[name]
        shape = self.shapes[name]
        support = self.info.support(name)
        if isinstance(prior, EnergyDistribution):
            return _values_of_energy(name, prior, shape)
        is_interval = isinstance(support, type(constraints.integer_interval(0, 1)))
        if not is_interval and support != constraints.boolean:
            expected = (
                "finitely many whole numbers, an EnergyDistribution, real numbers or "
                "probabilities"
            )
            hint = _TRUNCATE if support.is_discrete else _ELSEWHERE
            _refuse(name, f"is {type(prior).__name__}, expected {expected}", hint)
        bounds = (support.lower_bound, support.upper_bound) if is_interval else (0, 1)
        if np.ndim(bounds[0]) or not isinstance(bounds[1], int):
            self.check_bounds(name)
        size = int((np.asarray(bounds[1]) - np.asarray(bounds[0])).max()) + 1
        if size > _MOST_VALUES:
            _refuse(
                name,
                f"takes {size} values per unit, expected at most {_MOST_VALUES}",
                _TRUNCATE,
            )
        low, high = (_bound(np.asarray(bound), shape) for bound in bounds)
        table = low + np.arange(size).reshape(-1, *(1,) * low.ndim)
        return ValueTable(np.minimum(table, high), table <= high)

    def check_bounds(self, name: str) -> None:
        """Raise an IntractableError where the values of a site depend on other sites."""

        def bounds(sites: Mapping, siblings: Mapping, arguments: Sequence) -> Array:
            trace = self.info.trace({**sites, **siblings}, arguments)
            support = element_of(base_of(trace[name]["fn"]).support)
            return jnp.sum(jnp.asarray(support.lower_bound)) + jnp.sum(
                jnp.asarray(support.upper_bound)
            )

        program = self.trace(bounds, self.info.latent)
        if not program.is_known(program.output):
            _refuse(
                name,
                "must not have values that depend on other sites: make the likelihood 0 elsewhere",
            )
        self.info.relied |= {
            program.arguments.index(slot) for slot in program.sources[program.output]
        }


class _Masked(handlers.mask):
    """Masks sites by name, not the factors of Jacobians, which NUTS adds where it finds a latent site."""

    def __init__(self, fn: Callable[..., Any], names: set[str]) -> None:
        super().__init__(fn, mask=False)
        self.names = names

    def process_message(self, msg: Any) -> None:
        if msg.get("name") in self.names:
            super().process_message(msg)


def _refuse(name: str, problem: str, hint: str = _ELSEWHERE) -> NoReturn:
    raise IntractableError(f"from_model: site {name!r} {problem}. {hint}")


def _bound(bound: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a bound of the site's shape, or of one unit where it is the same for all."""
    bound = (
        np.broadcast_to(bound, shape)
        if (bound != bound.flat[0]).any()
        else bound.ravel()[:1]
    )
    return bound if bound.shape == shape else bound.reshape((1,) * len(shape))


def _values_of_energy(
    name: str, prior: EnergyDistribution, shape: tuple[int, ...]
) -> ValueTable:
    """Raise an IntractableError for blocks of infinitely many values."""
    families = {b: prior.graph.families[b] for b in prior.layout.names}
    states: dict[str, Any] = {b: family.states() for b, family in families.items()}
    for b, values in states.items():
        if values is None:
            _refuse(
                name,
                f"has block {b!r}, {families[b]!r}, with infinitely many values per unit",
            )
    tables = []
    for k in range(max(len(s) for s in states.values())):
        at = {
            b: np.full(families[b].shape, np.asarray(s)[min(k, len(s) - 1)])
            for b, s in states.items()
        }
        valid = {b: np.full(families[b].shape, k < len(s)) for b, s in states.items()}
        tables.append(
            [np.broadcast_to(prior.layout.join(part), shape) for part in (at, valid)]
        )
    table, valid = (np.stack(side) for side in zip(*tables, strict=True))
    return ValueTable(table, valid.astype(bool))
