# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A NumPyro model as a block reads it, and the calls of the block that follow."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import itertools
from typing import Any, NamedTuple
import warnings

from jaxtyping import PyTree
import numpy as np
from numpyro import handlers
from numpyro.distributions import ImproperUniform, constraints
from numpyro.distributions.distribution import validation_enabled
from numpyro.infer.gibbs import (
    latent_sample_sites,
    subsample_plate_sizes,
)
from numpyro.infer.util import log_density

import jax
from jax import Array, core
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
import jax.numpy as jnp

from ebmpp.core import Numbers, checks, is_concrete, select
from ebmpp.dependence.program import Program, SlotValues
from ebmpp.distribution import EnergyDistribution
from ebmpp.distribution.tractability import (
    base_of,
    energies_of,
    refuse_params,
    unnormalized,
)
from ebmpp.errors import StateError
from ebmpp.traced import contents
from ebmpp.traced.block import Call, SiteValues
from ebmpp.traced.data import (
    ArrayData,
    Message,
    Prototype,
    Trace,
    are_valid,
    count_impossible,
    element_of,
    impossible_sites,
    is_cut_off,
    names_of,
    values_in,
)

#: kinds of numbers, the next among those before
_KINDS = ("real", "positive", "unit_interval")
_INTERVALS = (
    type(constraints.real),
    constraints.interval,
    constraints.greater_than,
    constraints.less_than,
)


class Context(NamedTuple):
    """Everything outside of a block that its log density depends on, checked."""

    siblings: SiteValues
    arguments: Sequence[Numbers]  # the arrays among the model's arguments


Inputs = tuple[SiteValues, Context]
#: New values, and the number of units that kept theirs because their conditional is
#: degenerate.
DrawnSites = tuple[SiteValues, Array]


class ModelInfo:
    """A model's latent sites, their distributions, and its arguments.

    :raises StateError: for sites that the model does not have, or draws for a part of a
        plate only.
    :raises IntractableError: for sites that the params of an energy without log Z
        depend on.
    """

    def __init__(self, model: Callable, sites: Sequence[str], call: Call) -> None:
        checks.function("GibbsBlock.from_model: model", model, "NumPyro's primitives")
        sites = [sites] if isinstance(sites, str) else sites
        self.model = model
        self.sites = tuple(checks.sequence("from_model: sites", sites, "names"))
        self.call = call
        if not is_concrete(call):
            raise checks.state_error(
                "from_model: arguments of the model",
                "known, as their values may decide which units interact",
                "traced ones",
                hint="Make the block outside of jax.jit and jax.vmap, and use it inside.",
            )
        with unnormalized() as used:
            trace = self._prototype(call)
        names = latent_sample_sites(trace)
        _check_sites(trace, names, self.sites)
        #: a value of each latent site
        self.latent = values_in(trace, names)
        self.distributions = {name: base_of(trace[name]["fn"]) for name in names}
        self.scales = {name: trace[name]["scale"] for name in names}
        self.arguments = Arguments(call)
        self._traced: dict[tuple, ClosedJaxpr] = {}
        self.samples = names_of("sample", trace)
        self._impossible = impossible_sites(trace)
        self.deterministic = names_of("deterministic", trace)
        #: numbers of arguments whose values decide which units interact
        self.relied: set[int] = set()
        energies = itertools.chain(*energies_of(trace).values())
        if used or not all(energy.has_log_partition for energy in energies):
            refuse_params(model, *call.inputs, self.sites)

    def _prototype(self, call: Call) -> Trace:
        """Return a trace of the model at any possible values of its sites."""
        seeded = handlers.seed(Prototype(self.model), jax.random.key(0))
        model = handlers.trace(seeded)
        args, kwargs = call.inputs
        # which compiles some four programs per distribution, 25 ms each
        with validation_enabled(False):
            trace = model.get_trace(*args, **kwargs)
        return trace if are_valid(trace) else model.get_trace(*args, **kwargs)

    def support(self, name: str) -> Any:
        """Return the constraint on one unit of a site."""
        return element_of(self.distributions[name].support)

    def has_varying_support(self, name: str) -> bool:
        """Return True if the support of a site depends on parameters."""
        return constraints.is_dependent(type(self.distributions[name]).support)

    @property
    def continuous(self) -> tuple[str, ...]:
        """The block's sites whose units are numbers of an interval, or probabilities."""
        return tuple(filter(self.kinds, self.sites))

    def kinds(self, name: str) -> Sequence[str]:
        """Return the kinds of numbers that a site's units are; none for energies and others.

        A probability is also a positive and a real number, a row only a "simplex".
        """
        support = self.support(name)
        if support == constraints.simplex:
            return ("simplex",)
        is_energy = isinstance(self.distributions[name], EnergyDistribution)
        is_interval = (
            isinstance(support, _INTERVALS) and support != constraints.circular
        )
        if is_energy or not is_interval:
            return ()
        if np.min(self.bounds(name)[0]) < 0:
            return _KINDS[:1]
        return _KINDS[: 2 + (support == constraints.unit_interval)]

    def bounds(self, name: str) -> tuple[Any, Any]:
        """Return the ends of the interval that supports a site."""
        support = self.support(name)
        low = getattr(support, "lower_bound", -np.inf)
        return low, getattr(support, "upper_bound", np.inf)

    def trace(
        self,
        values: Mapping[str, Array],
        arguments: Sequence[Numbers],
        key: Array | int = 0,
        strategy: Callable[[Message], Any] | None = None,
    ) -> Trace:
        """Return the model's trace at values of sites; others are drawn from the prior.

        :param strategy: returns the value of a site, or None.
        """
        args, kwargs = self.arguments.rebuild(arguments)
        improper = {
            name: self.latent[name]
            for name, prior in self.distributions.items()
            if isinstance(prior, ImproperUniform)
        }
        model = handlers.substitute(ArrayData(self.model), data={**improper, **values})
        model = handlers.seed(model, key)
        if strategy is not None:
            model = handlers.substitute(model, substitute_fn=strategy)
        # handlers around a call, such as NUTS's, must not see the sites of this trace
        with handlers.block():
            return handlers.trace(model).get_trace(*args, **kwargs)

    def log_density_of(
        self, model: Callable, values: SiteValues, arguments: Sequence[Numbers]
    ) -> Array:
        """Return the log density of a model with the same arguments."""
        args, kwargs = self.arguments.rebuild(arguments)
        model = handlers.seed(ArrayData(model), 0)
        density, _ = log_density(model, args, kwargs, dict(values))
        return jnp.asarray(density)

    def log_density(
        self, values: SiteValues, arguments: Sequence[Numbers], are_inside: bool
    ) -> Array:
        """Return the log density, for which the model is traced once.

        :param values: of all latent sites.
        :param are_inside: True if all are in their supports, for which NumPyro's
            validation would add masks.
        """
        key = self.arguments, are_inside
        if key not in self._traced:
            trace = jax.make_jaxpr(functools.partial(self.log_density_of, self.model))
            inside = validation_enabled(False)
            with inside if are_inside else contextlib.nullcontext():
                self._traced[key] = trace(self.latent, self.arguments.arrays)
        leaves = jax.tree.leaves((values, list(arguments)))
        return jaxpr_as_fun(self._traced[key])(*leaves)[0]

    def check_data(self, call: Call) -> None:
        """Raise a StateError for impossible data, which most log densities would ignore."""
        if not is_concrete(call.inputs):
            return
        problems = self._impossible
        if not self.arguments.equal(call):
            with jax.ensure_compile_time_eval():
                problems = impossible_sites(self._prototype(call))
        for name, problem in problems.items():
            if not self.counts.is_known(self._slot(name)):
                continue  # its support depends on latent sites
            if "nan" in problem and (sources := self.arguments.with_nan(call)):
                problem += f": argument {sources[0]} of the model holds nan"
            raise StateError(
                f"the data of observed site {name!r} must be {problem}. Correct them, "
                "or exclude them by numpyro.handlers.mask"
            )

    @functools.cached_property
    def counts(self) -> Program:
        """The numbers of rows of all sites that are outside of their support."""

        def count(trace):
            return [count_impossible(trace[name]) for name in self.samples]

        return self.program_of_trace(count, self.sites)

    def _slot(self, name: str) -> int:
        return self.counts.outputs[self.samples.index(name)]

    def is_inside(self, name: str, inputs: SlotValues) -> bool:
        """Return True if a site is in its support, or that depends on the block's own sites."""
        slot = self._slot(name)
        if name not in self.sites and self.counts.depends(slot):
            return True
        return self.counts.run(inputs, [slot])[slot] == 0

    def program_of_trace(
        self, fn: Callable[[Trace], PyTree], sites: Sequence[str]
    ) -> Program:
        """Trace a function of the model's trace, in which all latent sites are substituted."""

        def of_values(sites, siblings, arguments):
            return fn(self.trace({**sites, **siblings}, arguments))

        return self.program(of_values, self.latent, sites)

    def program(
        self, fn: Callable, values: Mapping[str, Array], sites: Sequence[str]
    ) -> Program:
        """Trace ``fn(sites, siblings, arguments)``.

        Arguments are fixed if the model reads their values.
        """
        siblings = {name: v for name, v in values.items() if name not in sites}
        inputs = select(values, sites), siblings
        with warnings.catch_warnings():
            # check_data raises an error
            warnings.filterwarnings("ignore", "Out-of-support", UserWarning)
            try:
                return Program(fn, *inputs, self.arguments.arrays)
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                # a value was read
                self.arguments = Arguments(self.call, fixed=True)
                return Program(fn, *inputs, self.arguments.arrays)

    def context(self, values: SiteValues, call: Call) -> Context:
        """Check a call of the block.

        :param values: the block's sites.
        :raises StateError: for missing sites, or shapes and arguments that differ from
            the model as it was read.
        """
        name = f"the block of {list(self.sites)}"
        if set(values) != set(self.sites):
            raise checks.state_error(
                f"sites of {name}",
                "these",
                sorted(values),
                hint="Name the same sites in numpyro.infer.Gibbs([(block, sites), ...]).",
            )
        sites = {**call.siblings, **values}
        shapes = {site: jnp.shape(v) for site, v in sites.items()}
        expected = {
            site: v.shape
            for site, v in self.latent.items()
            if shapes.get(site) != v.shape
        }
        if expected:
            raise checks.state_error(
                f"values for {name}",
                f"of shapes {expected}",
                {site: shapes.get(site) for site in expected},
                hint="Run it in numpyro.infer.Gibbs with blocks for all sites, where "
                "init_params of NUTS are unconstrained: a simplex has one number fewer. "
                "Make it again for other shapes.",
            )
        siblings = select(call.siblings, [s for s in self.latent if s not in values])
        return Context(siblings, self.arguments.take(call, self.relied))


class Arguments:
    """A model's arguments: arrays, whose values may change unless ``fixed``, and others."""

    def __init__(self, call: Call, fixed: bool = False) -> None:
        self._names, leaves, self._structure = _flattened(call)
        # copies, as numpy arrays may change in place
        self._leaves = [
            leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves
        ]
        places = [i for i, leaf in enumerate(leaves) if contents.is_array(leaf)]
        #: other arguments may change in place too
        self._contents = {
            i: contents.content(leaf)
            for i, leaf in enumerate(leaves)
            if i not in places
        }
        self._places = [] if fixed else places
        self.arrays = [self._leaves[i] for i in self._places]

    def rebuild(self, arrays: Sequence[Numbers]) -> tuple[tuple, dict[str, object]]:
        """Return arguments and keyword arguments with these arrays."""
        leaves = list(self._leaves)
        for i, array in zip(self._places, arrays):
            leaves[i] = array
        return jax.tree.unflatten(self._structure, leaves)

    def take(self, call: Call, relied: set[int]) -> list[Numbers]:
        """Return the arrays of another call, which may differ only in what may change.

        :param relied: numbers of the arrays whose values must be the same.
        """
        name = "arguments of the model"
        names, leaves, structure = _flattened(call)
        if structure != self._structure:
            raise checks.state_error(
                name,
                f"{self._names} as in from_model, in the same containers",
                names,
            )
        fixed = {self._places[n] for n in relied}
        for i, argument in enumerate(names):
            change = self._change(i, leaves[i], is_relied=i in fixed)
            if change:
                raise StateError(
                    f"{name}: {argument} {change}. Make the block again for others, "
                    "and of arrays in place of numbers that change"
                )
        return [leaves[i] for i in self._places]

    def equal(self, call: Call) -> bool:
        """Return True for a call of the same values, or a structure that :meth:`take` refuses."""
        _, leaves, structure = _flattened(call)
        if structure != self._structure:
            return True
        return all(itertools.starmap(self._is_same, enumerate(leaves)))

    def with_nan(self, call: Call) -> list[str]:
        """Return the names of a call's arguments that hold nan."""
        leaves = jax.tree.leaves(call.inputs)
        return [
            name
            for name, leaf in zip(self._names, leaves, strict=True)
            if contents.is_array(leaf)
            and jnp.issubdtype(leaf.dtype, np.floating)
            and np.isnan(leaf).any()
        ]

    def _is_same(self, place: int, leaf: Any) -> bool:
        """Return True for the argument that was traced; nan equals nan."""
        if place in self._contents:
            return contents.content(leaf) == self._contents[place]
        before = self._leaves[place]
        return leaf is before or np.array_equal(leaf, before, equal_nan=True)

    def _change(self, place: int, leaf: Any, is_relied: bool) -> str | None:
        """Return how an argument differs from the one that was traced, where it may not."""
        before = self._leaves[place]
        if is_cut_off(leaf):
            return f"of dtype {leaf.dtype} has values of more than 32 bits, which jax would cut off"
        if place in self._places:
            if not contents.is_array(leaf) and not jnp.isscalar(leaf):
                return f"is a {type(leaf).__name__}, which was an array"
            new = jnp.result_type(leaf)
            old = jnp.result_type(before)
            # and not a key
            is_number = jnp.issubdtype(new, np.number) or new == np.bool_
            if is_number and jnp.promote_types(new, old) != old:
                return f"is of dtype {new}, which was {old} and would be cut off"
            shape = jnp.shape(leaf)
            expected = jnp.shape(before)
            if shape != expected:
                return f"has shape {shape}, which was {expected}"
            if not is_relied:
                return None
        reason = "is fixed, as only arrays that no Python code reads may change"
        if is_relied:
            reason = "decides which units interact"
        if isinstance(leaf, core.Tracer):
            return f"{reason}, and is traced. Run MCMC without jit_model_args"
        return (
            None if self._is_same(place, leaf) else f"has another value, and {reason}"
        )


def _flattened(call: Call) -> tuple[list[str], list[Any], Any]:
    """Return names and values of the arguments in a call, and their structure."""
    leaves, structure = jax.tree.flatten_with_path(call.inputs)

    def name(path):
        return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])

    return [name(path) for path, _ in leaves], [leaf for _, leaf in leaves], structure


def _check_sites(trace: Trace, latent: Sequence[str], sites: Sequence[str]) -> None:
    """Raise a StateError for unknown sites, and models that no block can be made of."""
    checks.names("latent site", sites, latent, StateError)
    if not sites:
        raise checks.state_error(
            "from_model: sites", "names of latent sites, each once", list(sites)
        )
    if subsamples := dict(subsample_plate_sizes(trace)):
        raise checks.state_error(
            "from_model: plates", "whole, without a subsample_size", subsamples
        )
    others = [
        name
        for name in latent
        if name not in sites and trace[name]["infer"].get("enumerate")
    ]
    if others:
        raise checks.state_error(
            "from_model: latent sites marked enumerate", "among the block's", others
        )
