# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A NumPyro model's log density, traced once as a function of some of its sites."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace, subsample_plate_sizes
from numpyro.infer.util import log_density

import jax
from jax import Array, core
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.distribution.energy_distribution import EnergyDistribution
from ebmpp.distribution.intractable import base_law, energy_laws, refuse_params, unnormalized
from ebmpp.errors import IntractableError, StateError
from ebmpp.traced.block import Call
from ebmpp.traced.dependence import Program

_MOST_VALUES = 1024
_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Values(NamedTuple):
    """The values that the units of a site can take."""

    table: np.ndarray
    """``(K, *shape)``, or ``(K, 1, ..., 1)`` where all units take the same ones."""
    valid: np.ndarray
    """Of the same shape: whether a unit can take the value; where it has fewer the table is filled up."""


class Reading:
    """A model as it was read: its latent sites, their laws, and the arguments.

    :param model: a NumPyro model, conditioned on the data.
    :param sites: names of latent sites.
    :param args: the model's arguments.
    :param kwargs: its keyword arguments.
    :raises StateError: for sites that the model has not, or that it draws for a part of a plate.
    :raises IntractableError: for sites that the params of an energy model without log Z depend on.
    """

    def __init__(
        self, model: Callable[..., Any], sites: Sequence[str], args: tuple, kwargs: Mapping[str, Any]
    ) -> None:
        checks.function("GibbsBlock.from_model: model", model, "NumPyro's primitives")
        named = (
            [sites] if isinstance(sites, str) else list(checks.sequence("from_model: sites", sites, "names"))
        )
        self.model, self.sites, self.args, self.kwargs = model, tuple(named), args, kwargs
        if any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves((args, dict(kwargs)))):
            raise StateError(
                "from_model: an argument of the model is traced, and which units interact may depend on its "
                "value; make the block outside of jax.jit and jax.vmap, and use it inside"
            )
        with unnormalized() as read:
            trace = prototype_trace(model, jax.random.key(0), args, dict(kwargs))
        latent = {name: trace[name]["value"] for name in latent_sample_sites(trace)}
        _check_sites(trace, latent, self.sites)
        self.latent = {name: jnp.asarray(value) for name, value in latent.items()}
        self.laws = {name: base_law(trace[name]["fn"]) for name in latent}
        self.scales = {name: trace[name]["scale"] for name in latent}
        if read or not all(law.has_log_partition for laws in energy_laws(trace).values() for law in laws):
            refuse_params(model, args, kwargs, self.sites)

    def support(self, name: str) -> Any:
        """The values that one unit of a site can take, as a constraint."""
        return _unwrapped(self.laws[name].support)

    @property
    def continuous(self) -> tuple[str, ...]:
        """Those of the named sites whose units are real, or positive, numbers."""
        real = lambda name: self.support(name) in (constraints.real, constraints.positive)
        energies = lambda name: isinstance(self.laws[name], EnergyDistribution)
        return tuple(name for name in self.sites if not energies(name) and real(name))


class Posterior:
    """The log density of a model as a function of some of its sites, of their siblings and of arguments.

    :param read: the model.
    :param sites: names of latent sites: those whose units take finitely many values, or one of real numbers.
    :param beside: by name, other arrays that the log density is a function of, as if they were siblings.
    :raises IntractableError: for sites of infinitely many values, or values that depend on other sites.
    """

    def __init__(
        self, read: Reading, sites: Sequence[str], beside: Mapping[str, Array] = MappingProxyType({})
    ) -> None:
        self.model, self.sites = read.model, tuple(sites)
        own = {name: read.latent[name] for name in self.sites}
        others = {name: v for name, v in read.latent.items() if name not in own} | dict(beside)
        self.shapes = {name: jnp.shape(v) for name, v in {**own, **others}.items()}
        self.arguments = Arguments(read.args, read.kwargs)
        try:
            self.program = Program(self._log_density, own, others, self.arguments.arrays)
        except _CONCRETE:  # the model looks at values of its arguments while it is traced
            self.arguments = Arguments(read.args, read.kwargs, fixed=True)
            self.program = Program(self._log_density, own, others, self.arguments.arrays)
        self.relied: set[int] = set()
        finite = [name for name in self.sites if name not in read.continuous]
        self.values = {name: self._values(name, read, own, others) for name in finite}

    def _log_density(self, own: Mapping, others: Mapping, arguments: Sequence) -> Array:
        args, kwargs = self.arguments.rebuild(arguments)
        model = handlers.seed(self.model_at(others), 0)
        return jnp.asarray(log_density(model, args, kwargs, {**own, **others})[0])

    def model_at(self, others: Mapping[str, Array]) -> Callable[..., Any]:
        """The model whose log density is traced; of its inputs, those that are no sites may be a part."""
        del others
        return self.model

    def trace(self, own: Mapping, others: Mapping, arguments: Sequence) -> dict[str, Any]:
        """The model's sites at these values."""
        args, kwargs = self.arguments.rebuild(arguments)
        held = handlers.substitute(handlers.seed(self.model, 0), data={**own, **others})
        return handlers.trace(held).get_trace(*args, **kwargs)

    def _values(self, name: str, read: Reading, own: Mapping, others: Mapping) -> Values:
        """:raises IntractableError: where there are too many, or they depend on other sites."""
        law, shape = read.laws[name], self.shapes[name]
        if isinstance(law, EnergyDistribution):
            return _of_energy(name, law, shape)
        support = read.support(name)
        if support == constraints.boolean:
            low, high = np.zeros((), int), np.ones((), int)
        elif isinstance(support, type(constraints.integer_interval(0, 1))):
            low, high = (np.asarray(b) for b in (support.lower_bound, support.upper_bound))
            if np.ndim(support.lower_bound) or not isinstance(support.upper_bound, int):
                self._check_bounds(name, own, others)
        else:
            raise IntractableError(
                f"from_model: site {name!r} is {type(law).__name__}, whose values are not finitely many "
                "whole numbers, nor all real or all positive numbers; name sites of Bernoulli, Categorical, "
                "Binomial, DiscreteUniform or EnergyDistribution laws, or sites whose conditional is "
                "Gaussian or Gamma, and leave others to another block"
            )
        size = int((high - low).max()) + 1
        if size > _MOST_VALUES:
            raise IntractableError(
                f"from_model: a unit of site {name!r} takes {size} values, each an evaluation of the model; "
                f"at most {_MOST_VALUES} are taken"
            )
        low, high = (np.reshape(_to(b, shape), (1,) * (len(shape) - b.ndim) + b.shape) for b in (low, high))
        table = low + np.arange(size).reshape(-1, *(1,) * low.ndim)
        return Values(np.minimum(table, high), table <= high)

    def _check_bounds(self, name: str, own: Mapping, others: Mapping) -> None:
        """That the values of a site do not depend on other sites; arguments they depend on are taken down."""

        def bounds(own: Mapping, others: Mapping, arguments: Sequence) -> Array:
            support = _unwrapped(base_law(self.trace(own, others, arguments)[name]["fn"]).support)
            return jnp.sum(jnp.asarray(support.lower_bound)) + jnp.sum(jnp.asarray(support.upper_bound))

        program = Program(bounds, own, others, self.arguments.arrays)
        sources = program.sources[program.output]
        if sources is None:
            raise IntractableError(
                f"from_model: the values that site {name!r} can take depend on other sites of the model; "
                "give it a support that does not, and a likelihood of 0 elsewhere"
            )
        self.relied |= {program.arguments.index(slot) for slot in sources}

    def inputs(
        self, values: Mapping[str, Array], call: Call, program: Program | None = None
    ) -> dict[int, Any]:
        """Values of the program's inputs.

        :param values: the block's own sites.
        :param program: another one, of the same sites and arguments.
        :raises StateError: for missing sites, shapes that are not those of the model as it was read, or
            arguments that are others.
        """
        if set(values) != set(self.sites):
            raise StateError(
                f"the block has sites {sorted(self.sites)}, and was given {sorted(values)}: name the same "
                "sites in numpyro.infer.Gibbs([(block, sites), ...])"
            )
        program = self.program if program is None else program
        names = [name for name in self.shapes if name in program.others]
        missing = [name for name in names if name not in call.siblings]
        if missing:
            raise StateError(
                f"the block of {list(self.sites)} reads sites {missing} of the model, which are not given: "
                "run it in numpyro.infer.Gibbs with blocks for all other latent sites, or by gibbs_fn"
            )
        given = {**{name: call.siblings[name] for name in names}, **values}
        for name, value in given.items():
            if jnp.shape(value) != self.shapes[name]:
                raise StateError(
                    f"site {name!r} has shape {jnp.shape(value)}, and had {self.shapes[name]} when the block "
                    "was made; make the block anew with GibbsBlock.from_model for arguments of other shapes"
                )
        arrays = self.arguments.of(call, self.relied)
        return program.inputs(values, {name: given[name] for name in names}, arrays)


class Arguments:
    """A model's arguments: arrays, which may have other values at another call, and all else, which may not.

    :param fixed: whether arrays are of the second kind, too.
    """

    def __init__(self, args: tuple, kwargs: Mapping[str, Any], fixed: bool = False) -> None:
        leaves, self._structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        paths = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
        told = lambda path: ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
        self._names = [told(path) for path, _ in paths]
        self._places = [] if fixed else [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        self._leaves = leaves
        self.arrays = [leaves[i] for i in self._places]

    def rebuild(self, arrays: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """Arguments and keyword arguments with these arrays."""
        leaves = list(self._leaves)
        for i, array in zip(self._places, arrays, strict=True):
            leaves[i] = array
        return jax.tree.unflatten(self._structure, leaves)

    def of(self, call: Call, relied: set[int]) -> list[Any]:
        """The arrays of another call.

        :param relied: numbers of arrays whose values must be the same.
        :raises StateError: for a call that differs in what may not.
        """
        leaves, structure = jax.tree.flatten((tuple(call.args), dict(call.kwargs)))
        if structure != self._structure:
            raise StateError(
                f"the model's arguments are {structure}, and were {self._structure} when the block was made: "
                "give GibbsBlock.from_model the arguments that are given to mcmc.run"
            )
        same = {*range(len(leaves))} - {*self._places} | {self._places[i] for i in relied}
        for i, (leaf, was) in enumerate(zip(leaves, self._leaves, strict=True)):
            if i in self._places:
                self._check_dtype(i, leaf)
            if i in same:
                self._check_same(i, leaf)
            elif jnp.shape(leaf) != jnp.shape(was):
                raise StateError(
                    f"argument {self._names[i]} of the model has shape {jnp.shape(leaf)}, and had "
                    f"{jnp.shape(was)} when the block was made; make the block anew"
                )
        return [leaves[i] for i in self._places]

    def with_nan(self, call: Call) -> list[str]:
        """Names of a call's arguments that hold a nan."""
        leaves = jax.tree.leaves((tuple(call.args), dict(call.kwargs)))
        floats = lambda leaf: _is_array(leaf) and jnp.issubdtype(leaf.dtype, np.floating)
        pairs = zip(self._names, leaves, strict=True)
        return [name for name, leaf in pairs if floats(leaf) and np.isnan(leaf).any()]

    def _check_dtype(self, place: int, leaf: Any) -> None:
        """:raises StateError: for an array that would be cut off as one of the dtype that was traced."""
        new, was = jnp.result_type(leaf), jnp.result_type(self._leaves[place])
        if _loses(new, was):
            raise StateError(
                f"argument {self._names[place]} of the model is of dtype {new}, and was {was} when the block "
                "was made, as which its values would be cut off; make the block anew with "
                f"GibbsBlock.from_model for arguments of dtype {new}"
            )

    def _check_same(self, place: int, leaf: Any) -> None:
        was, name = self._leaves[place], self._names[place]
        if leaf is was:
            return
        if isinstance(leaf, core.Tracer):
            raise StateError(
                f"which units interact depends on the value of argument {name} of the model, which is not "
                "known here: run MCMC without jit_model_args, or let the model close over it"
            )
        equal = np.array_equal(leaf, was) if _is_array(was) or _is_array(leaf) else leaf == was
        if not equal:
            raise StateError(
                f"argument {name} of the model has another value than when the block was made, and which "
                "units interact, or which values they take, depends on it; make the block anew"
            )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _loses(new: Any, was: Any) -> bool:
    """Whether a cast of numbers may lose more than precision."""
    if new == was or not (jnp.issubdtype(new, np.number) or new == np.bool_):  # of keys
        return False
    if jnp.issubdtype(was, np.inexact):
        return jnp.issubdtype(new, np.complexfloating) and not jnp.issubdtype(was, np.complexfloating)
    return not np.can_cast(new, was, "same_kind" if was.itemsize >= 4 else "safe")


def _unwrapped(support: Any) -> Any:
    """Of one unit."""
    wrapped = isinstance(support, type(constraints.independent(constraints.real, 1)))
    return _unwrapped(support.base_constraint) if wrapped else support


def _to(bound: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A bound of the shape of the site, or of one number where it is the same for all."""
    return np.broadcast_to(bound, shape) if (bound != bound.flat[0]).any() else bound.ravel()[0]


def _of_energy(name: str, law: EnergyDistribution, shape: tuple[int, ...]) -> Values:
    """:raises IntractableError: for blocks of infinitely many values."""
    families = {b: law.graph.families[b] for b in law.layout.names}
    found = {b: f.states() for b, f in families.items()}
    states = {b: np.asarray(values) for b, values in found.items() if values is not None}
    endless = [b for b in families if b not in states]
    if endless:
        raise IntractableError(
            f"from_model: block {endless[0]!r} of site {name!r} is {families[endless[0]]!r}, of infinitely "
            "many values; draw the site by GibbsBlock(graph, ...)"
        )
    size = max(map(len, states.values()))
    tables = []
    for k in range(size):
        parts = {b: np.full(families[b].shape, s[min(k, len(s) - 1)]) for b, s in states.items()}
        counts = {b: np.full(families[b].shape, k < len(s)) for b, s in states.items()}
        tables.append([np.broadcast_to(law.layout.join(part), shape) for part in (parts, counts)])
    table, valid = (np.stack(side) for side in zip(*tables, strict=True))
    return Values(table, valid.astype(bool))


def _check_sites(trace: Any, latent: Mapping[str, Any], sites: Sequence[str]) -> None:
    """:raises StateError: for sites that the model has not, and models that a block cannot be made of."""
    if not sites or len(set(sites)) < len(sites):
        raise StateError(f"from_model: sites are names of latent sites, each once, not {list(sites)}")
    checks.names("latent site", sites, latent, StateError)
    parts = subsample_plate_sizes(trace)
    if parts:
        plate, (size, part) = next(iter(parts.items()))
        raise StateError(
            f"from_model: plate {plate!r} is subsampled ({part} of {size}), and a block draws all units of "
            "its sites; give the plate no subsample_size"
        )
    summed = [name for name in latent if trace[name]["infer"].get("enumerate") == "parallel"]
    if summed:
        raise StateError(
            f"from_model: site {summed[0]!r} is summed out by enumeration "
            f"(infer={{'enumerate': 'parallel'}}), and a block needs its value; leave that mark away, and "
            "name the site in a block"
        )
