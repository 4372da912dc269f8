# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A model's log density as a traced function of some of its sites."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import networkx as nx
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions import constraints

from jax import Array
import jax.numpy as jnp

from ebmpp.core import expand, ranks_in_groups, select
from ebmpp.dependence.program import SlotValues
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.distribution import EnergyDistribution
from ebmpp.distribution.tractability import base_of
from ebmpp.errors import IntractableError
from ebmpp.traced.block import SiteValues
from ebmpp.traced.data import Message, element_of, values_in
from ebmpp.traced.model import Inputs, ModelInfo

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
    """A model's log density as a function of some sites, their siblings and arguments.

    :param sites: names of latent sites: with finitely many values per unit, or one of
        real numbers.
    :param extra: further arrays by name that the log density depends on, like siblings.
    :param are_inside: True if the values of all sites are in their supports.
    :raises IntractableError: for sites of infinitely many values, or values that depend
        on other sites.
    """

    def __init__(
        self,
        info: ModelInfo,
        sites: Sequence[str],
        extra: SiteValues = MappingProxyType({}),
        are_inside: bool = False,
    ) -> None:
        self.info = info
        self.are_inside = are_inside
        self.sites = tuple(sites)
        prototypes = {**info.latent, **extra}
        self.shapes = {name: value.shape for name, value in prototypes.items()}
        self.program = info.program(self._log_density, prototypes, self.sites)
        finite = [name for name in self.sites if name not in info.continuous]
        self.values = {name: self._values(name) for name in finite}
        #: largest number of values of a unit
        self.num_values = max((len(v.table) for v in self.values.values()), default=0)

    def terms(self, products: bool = True) -> SumOfTerms:
        """Return the terms of the log density; arguments that they rely on must stay the same."""
        tables = {site: v.table for site, v in self.values.items()}
        terms = SumOfTerms(self.program, self.info.arguments.arrays, tables, products)
        self.info.relied |= terms.relied
        return terms

    def inputs(self, inputs: Inputs) -> SlotValues:
        """Return the values of the program's inputs, given sites and what is drawn with them."""
        values, context = inputs
        return self.program.inputs({**context.siblings, **values}, context.arguments)

    def inputs_at(self, sites: SiteValues, inputs: SlotValues) -> dict[int, Array]:
        """Return the values of the program's inputs at other values of the sites."""
        result = dict(inputs)
        for name, value in sites.items():
            slot = self.program.sites[name]
            result[slot] = value.astype(self.program.dtypes[slot])
        return result

    def log_density(self, inputs: Inputs) -> Array:
        """Return the log density, given sites and what is drawn with them."""
        output = self.program.output
        return self.program.run(self.inputs(inputs), [output])[output]

    def _log_density(
        self, sites: SiteValues, siblings: SiteValues, arguments: Sequence
    ) -> Array:
        """Return the log density that is traced; subclasses change it, given ``extra``."""
        values = {**sites, **siblings}
        return self.info.log_density(values, arguments, self.are_inside)

    def summed_out(self, log_marginal: Callable[..., Array]) -> Callable[..., None]:
        """Return the NumPyro model of the siblings alone, whose log density is ``log_marginal``.

        :param log_marginal: ``fn(values, *model_args, **model_kwargs)`` of values of
            all siblings.
        """
        info = self.info
        # at any value, whose density is masked
        fixed = select(info.latent, self.sites)
        latent = [name for name in info.latent if name not in fixed]

        def deterministic(trace):
            return [trace[name]["value"] for name in info.deterministic]

        program = info.program_of_trace(deterministic, self.sites)
        hidden = set(info.samples).difference(latent)
        slots = zip(info.deterministic, program.outputs)
        hidden.update(name for name, slot in slots if program.depends(slot))

        def model(*args, **kwargs):
            inner = _Masked(handlers.substitute(info.model, data=fixed), info.samples)
            visible = handlers.block(inner, hide=[*hidden])
            trace = handlers.trace(visible).get_trace(*args, **kwargs)
            log_factor = log_marginal(values_in(trace, latent), *args, **kwargs)
            numpyro.factor("log_marginal", log_factor)

        return model

    def _values(self, name: str) -> ValueTable:
        """Raise an IntractableError where there are too many, or they depend on other sites."""
        prior = self.info.distributions[name]
        shape = self.shapes[name]
        support = self.info.support(name)
        if isinstance(prior, EnergyDistribution):
            return _values_of_energy(name, prior, shape)
        if support == constraints.boolean:
            support = constraints.integer_interval(0, 1)
        if not isinstance(support, constraints.integer_interval):
            problem = (
                f"is {type(prior).__name__}, expected finitely many whole numbers, an "
                "EnergyDistribution, real numbers or probabilities"
            )
            _refuse(name, problem, _TRUNCATE if support.is_discrete else _ELSEWHERE)
        low = np.asarray(support.lower_bound)
        high = np.asarray(support.upper_bound)
        if low.ndim or not isinstance(support.upper_bound, int):
            self.check_bounds(name)
        size = int((high - low).max()) + 1
        if size > _MOST_VALUES:
            problem = f"takes {size} values per unit, expected at most {_MOST_VALUES}"
            _refuse(name, problem, _TRUNCATE)
        low = _bound(low, shape)
        high = _bound(high, shape)
        table = low + expand(np.arange(size), low[None])
        return ValueTable(np.minimum(table, high), table <= high)

    def check_bounds(self, name: str) -> None:
        """Raise an IntractableError where the values of a site depend on other sites."""

        def bounds(trace):
            support = element_of(base_of(trace[name]["fn"]).support)
            low = jnp.sum(jnp.asarray(support.lower_bound))
            return low + jnp.sum(jnp.asarray(support.upper_bound))

        program = self.info.program_of_trace(bounds, self.sites)
        if not program.is_known(program.output):
            _refuse(
                name,
                "must not have values that depend on other sites: make the likelihood 0 elsewhere",
            )
        sources = program.sources[program.output]
        self.info.relied |= {program.arguments.index(slot) for slot in sources}


class _Masked(handlers.mask):
    """Masks sites by name, not the factors of Jacobians that NUTS adds at latent sites."""

    def __init__(self, fn: Callable, names: Sequence[str]) -> None:
        super().__init__(fn, mask=False)
        self.names = names

    def process_message(self, msg: Message) -> None:
        if msg.get("name") in self.names:
            super().process_message(msg)


def _refuse(name: str, problem: str, hint: str = _ELSEWHERE) -> NoReturn:
    raise IntractableError(f"from_model: site {name!r} {problem}. {hint}")


def _bound(bound: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a bound of the site's shape, or of one unit where it is the same for all."""
    if (bound != bound.flat[0]).any():
        return np.broadcast_to(bound, shape)
    return np.full([1] * len(shape), bound.flat[0])


def _values_of_energy(
    name: str, prior: EnergyDistribution, shape: tuple[int, ...]
) -> ValueTable:
    """Raise an IntractableError for blocks of infinitely many values."""
    families = select(prior.graph.families, prior.layout.names)
    states = {}
    for b, family in families.items():
        values = family.states()
        if values is None:
            _refuse(
                name,
                f"has block {b!r}, {family!r}, with infinitely many values per unit",
            )
        states[b] = np.asarray(values)
    table = []
    valid = []
    for k in range(max(map(len, states.values()))):
        at = {}
        is_valid = {}
        for b, values in states.items():
            units = families[b].shape
            at[b] = np.full(units, values[min(k, len(values) - 1)])
            is_valid[b] = np.full(units, k < len(values))
        table.append(np.broadcast_to(prior.layout.join(at), shape))
        valid.append(np.broadcast_to(prior.layout.join(is_valid), shape))
    return ValueTable(np.stack(table), np.stack(valid).astype(bool))


def groups_of(size: int, edges: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return each unit's group of units that interact, directly or not, and its place there."""
    groups = np.arange(size)
    if edges is None:
        groups[:] = 0
    elif len(edges):
        graph = nx.Graph(edges.tolist())
        graph.add_nodes_from(range(size))
        for number, members in enumerate(nx.connected_components(graph)):
            groups[list(members)] = number
    return groups, ranks_in_groups(groups)
