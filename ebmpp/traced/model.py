# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A NumPyro model as a block reads it, and the calls of the block that follow."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
import warnings

import numpy as np
from numpyro import handlers
from numpyro.distributions import ImproperUniform, constraints
from numpyro.infer.gibbs import (
    latent_sample_sites,
    prototype_trace,
    subsample_plate_sizes,
)

import jax
from jax import Array, core
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.dependence.program import Program
from ebmpp.distribution import EnergyDistribution
from ebmpp.distribution.tractability import (
    base_of,
    energies_of,
    refuse_params,
    unnormalized,
)
from ebmpp.errors import StateError
from ebmpp.traced.block import Call, SiteValues
from ebmpp.traced.data import (
    ArrayData,
    count_impossible,
    element_of,
    impossible_sites,
    is_cut_off,
)

#: kinds of sites that may have a conditional of a known family
_KINDS = ("real", "positive", "unit_interval", "simplex")


class Context(NamedTuple):
    """Everything outside of a block that its log density depends on, checked."""

    siblings: Mapping[str, Array]
    arguments: Sequence[Array]  # the arrays among the model's arguments


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

    def __init__(
        self,
        model: Callable,
        sites: Sequence[str],
        args: tuple,
        kwargs: Mapping[str, Any],
    ) -> None:
        checks.function("GibbsBlock.from_model: model", model, "NumPyro's primitives")
        sites = (
            [sites]
            if isinstance(sites, str)
            else checks.sequence("from_model: sites", sites, "names")
        )
        self.model = model
        self.sites = tuple(sites)
        self.args = args
        self.kwargs = dict(kwargs)
        traced = [
            leaf
            for leaf in jax.tree.leaves((args, self.kwargs))
            if isinstance(leaf, core.Tracer)
        ]
        if traced:
            raise checks.error(
                "from_model: arguments of the model",
                "known, as their values may decide which units interact",
                traced,
                StateError,
                "Make the block outside of jax.jit and jax.vmap, and use it inside.",
            )
        with unnormalized() as used:
            trace = prototype_trace(model, jax.random.key(0), args, self.kwargs)
        names = latent_sample_sites(trace)
        _check_sites(trace, names, self.sites)
        #: a draw of each latent site
        self.latent = {name: jnp.asarray(trace[name]["value"]) for name in names}
        self.distributions = {name: base_of(trace[name]["fn"]) for name in names}
        self.scales = {name: trace[name]["scale"] for name in names}
        self.arguments = Arguments(args, self.kwargs)
        self._impossible = impossible_sites(trace)
        self.deterministic = [
            name for name, site in trace.items() if site["type"] == "deterministic"
        ]
        #: numbers of arguments whose values decide which units interact
        self.relied: set[int] = set()
        if used or not all(
            d.has_log_partition
            for energies in energies_of(trace).values()
            for d in energies
        ):
            refuse_params(model, args, self.kwargs, self.sites)

    def support(self, name: str) -> Any:
        """Return the constraint on one unit of a site."""
        return element_of(self.distributions[name].support)

    @property
    def continuous(self) -> tuple[str, ...]:
        """The block's sites whose units are real or positive numbers, or probabilities."""

        def is_energy(name):
            return isinstance(self.distributions[name], EnergyDistribution)

        return tuple(
            name for name in self.sites if not is_energy(name) and self.kind(name)
        )

    def kind(self, name: str) -> str | None:
        """Return "real", "positive", "unit_interval" or "simplex"; None for a site of other values."""
        support = self.support(name)
        return next(
            (kind for kind in _KINDS if getattr(constraints, kind) == support), None
        )

    def trace(
        self, values: Mapping[str, Any], arguments: Sequence[Any], key: Any = 0
    ) -> dict[str, Any]:
        """Return NumPyro's trace of the model at values of its sites; others are drawn from the prior."""
        args, kwargs = self.arguments.rebuild(arguments)
        improper = [
            name
            for name, d in self.distributions.items()
            if isinstance(d, ImproperUniform)
        ]
        data = {**{name: self.latent[name] for name in improper}, **values}
        model = handlers.seed(
            handlers.substitute(ArrayData(self.model), data=data), key
        )
        return handlers.trace(model).get_trace(*args, **kwargs)

    def check_data(self, call: Call) -> None:
        """Raise a StateError for impossible observed values, which most log densities would ignore."""
        if any(
            isinstance(leaf, core.Tracer)
            for leaf in jax.tree.leaves((call.args, call.kwargs))
        ):
            return
        problems = self._impossible
        if not self.arguments.equal(call):
            with jax.ensure_compile_time_eval():
                trace = prototype_trace(
                    self.model, jax.random.key(0), call.args, dict(call.kwargs)
                )
                problems = impossible_sites(trace)
        for name in filter(self._is_certain, problems):
            sources = self.arguments.with_nan(call) if "nan" in problems[name] else []
            source = (
                f": argument {sources[0]} of the model holds nan" if sources else ""
            )
            advice = "Correct them, or exclude them by numpyro.handlers.mask"
            raise StateError(
                f"the data of observed site {name!r} must be {problems[name]}{source}. {advice}"
            )

    def _is_certain(self, name: str) -> bool:
        """Return True if the support of an observed site depends on no latent site."""

        def count(sites: Mapping, siblings: Mapping, arguments: Sequence) -> Array:
            return count_impossible(self.trace({**sites, **siblings}, arguments)[name])

        program = self.program(count, self.latent, self.sites)
        return program.is_known(program.output)

    def program(
        self, fn: Callable[..., Any], values: Mapping[str, Array], sites: Sequence[str]
    ) -> Program:
        """Trace ``fn(sites, siblings, arguments)``, with fixed arguments if the model reads their values."""
        siblings = {name: v for name, v in values.items() if name not in sites}
        inputs = {name: values[name] for name in sites}, siblings
        with warnings.catch_warnings():
            # check_data raises an error
            warnings.filterwarnings("ignore", "Out-of-support", UserWarning)
            try:
                return Program(fn, *inputs, self.arguments.arrays)
            except (
                jax.errors.JAXTypeError,
                jax.errors.JAXIndexError,
            ):  # a value was read
                self.arguments = Arguments(self.args, self.kwargs, fixed=True)
                return Program(fn, *inputs, self.arguments.arrays)

    def context(self, values: Mapping[str, Any], call: Call) -> Context:
        """Check a call of the block.

        :param values: the block's sites.
        :raises StateError: for missing sites, or shapes and arguments that differ from
            the model as it was read.
        """
        if set(values) != set(self.sites):
            raise checks.error(
                f"sites of the block of {list(self.sites)}",
                "these",
                sorted(values),
                StateError,
                "Name the same sites in numpyro.infer.Gibbs([(block, sites), ...]).",
            )
        shapes = {site: jnp.shape(v) for site, v in {**call.siblings, **values}.items()}
        wrong = {
            site: v.shape
            for site, v in self.latent.items()
            if shapes.get(site) != v.shape
        }
        name = f"values for the block of {list(self.sites)}"
        if wrong:
            raise checks.error(
                name,
                f"of shapes {wrong}",
                {s: shapes.get(s) for s in wrong},
                StateError,
                "Run it in numpyro.infer.Gibbs with blocks for all sites. Make it "
                "again for other shapes.",
            )
        siblings = {
            name: call.siblings[name] for name in self.latent if name not in self.sites
        }
        return Context(siblings, self.arguments.take(call, self.relied))


class Arguments:
    """A model's arguments: arrays, whose values may change unless ``fixed``, and others, which may not."""

    def __init__(
        self, args: tuple, kwargs: Mapping[str, Any], fixed: bool = False
    ) -> None:
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(
            (tuple(args), dict(kwargs))
        )

        def name(path):
            return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])

        self._names = [name(path) for path, _ in leaves]
        # copies, as numpy arrays may change in place
        self._leaves = [
            leaf.copy() if isinstance(leaf, np.ndarray) else leaf for _, leaf in leaves
        ]
        self._places = (
            []
            if fixed
            else [i for i, leaf in enumerate(self._leaves) if _is_array(leaf)]
        )
        self.arrays = [self._leaves[i] for i in self._places]

    def rebuild(self, arrays: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """Return arguments and keyword arguments with these arrays."""
        leaves = list(self._leaves)
        for i, array in zip(self._places, arrays, strict=True):
            leaves[i] = array
        return jax.tree.unflatten(self._structure, leaves)

    def take(self, call: Call, relied: set[int]) -> list[Any]:
        """Return the arrays of another call; raise a StateError where it differs in what may not change.

        :param relied: numbers of the arrays whose values must be the same.
        """
        leaves, structure = jax.tree.flatten((tuple(call.args), dict(call.kwargs)))
        name = "arguments of the model"
        if structure != self._structure:
            raise checks.error(
                name, f"of the structure {self._structure}", structure, StateError
            )
        fixed = {*range(len(leaves))} - {*self._places} | {
            self._places[i] for i in relied
        }
        for i, argument in enumerate(self._names):
            if change := self._change(i, leaves[i], i in fixed):
                raise StateError(
                    f"{name}: {argument} {change}. Make the block again for others"
                )
        return [leaves[i] for i in self._places]

    def equal(self, call: Call) -> bool:
        """Return True if another call has the same values, or a structure that :meth:`take` refuses."""
        leaves, structure = jax.tree.flatten((tuple(call.args), dict(call.kwargs)))
        return structure != self._structure or all(
            map(_are_equal, leaves, self._leaves)
        )

    def with_nan(self, call: Call) -> list[str]:
        """Return the names of a call's arguments that hold nan."""
        leaves = jax.tree.leaves((tuple(call.args), dict(call.kwargs)))

        def is_float(leaf):
            return _is_array(leaf) and jnp.issubdtype(leaf.dtype, np.floating)

        pairs = zip(self._names, leaves, strict=True)
        return [name for name, leaf in pairs if is_float(leaf) and np.isnan(leaf).any()]

    def _change(self, place: int, leaf: Any, fixed: bool) -> str | None:
        """Return how an argument differs from the one that was traced, where it may not."""
        before = self._leaves[place]
        if is_cut_off(leaf):
            return f"of dtype {leaf.dtype} has values of more than 32 bits, which jax would cut off"
        if leaf is before:
            return None
        if place in self._places:
            new = jnp.result_type(leaf)
            old = jnp.result_type(before)
            are_floats = all(jnp.issubdtype(dtype, np.floating) for dtype in (new, old))
            # and not a key
            is_number = jnp.issubdtype(new, np.number) or new == np.bool_
            if is_number and not are_floats and jnp.promote_types(new, old) != old:
                return f"is of dtype {new}, which was {old} and would be cut off"
        if not fixed:
            same = jnp.shape(leaf) == jnp.shape(before)
            return (
                None
                if same
                else f"has shape {jnp.shape(leaf)}, which was {jnp.shape(before)}"
            )
        if isinstance(leaf, core.Tracer):
            return "decides which units interact, and is traced. Run MCMC without jit_model_args"
        return (
            None
            if _are_equal(leaf, before)
            else "has another value, which decides which units interact"
        )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _are_equal(leaf: Any, other: Any) -> bool:
    """Return True for equal arguments; nan equals nan."""

    def is_float(a):
        return isinstance(a, float) or (
            _is_array(a) and jnp.issubdtype(a.dtype, np.floating)
        )

    are_floats = is_float(leaf) and is_float(other)
    if are_floats or _is_array(leaf) or _is_array(other):
        return leaf is other or np.array_equal(leaf, other, equal_nan=are_floats)
    return bool(leaf == other)


def _check_sites(trace: Any, latent: Sequence[str], sites: Sequence[str]) -> None:
    """Raise a StateError for sites that the model does not have, and models that no block can be made of."""
    checks.names("latent site", sites, latent, StateError)
    who = "from_model:"
    if not bool(sites) or len(set(sites)) != len(sites):
        raise checks.error(
            f"{who} sites", "names of latent sites, each once", list(sites), StateError
        )
    parts = dict(subsample_plate_sizes(trace))
    if parts:
        raise checks.error(
            f"{who} plates", "whole, without a subsample_size", parts, StateError
        )
    marked = [
        name for name in latent if trace[name]["infer"].get("enumerate") == "parallel"
    ]
    if marked:
        raise checks.error(
            f"{who} latent sites", "without the mark enumerate", marked, StateError
        )
