# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A graph and its params in one file, for keeping and passing on.

The file is an archive (:mod:`ebmpp.core.archive`) whose header holds the declaration. Nothing in it is
executed when it is read, and nothing is pickled. Checkpoints of a run (:mod:`ebmpp.core.checkpoints`) hold
the state of an optimiser and of chains, and are no such files.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from functools import lru_cache
import os
from pathlib import Path
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp import families as builtin_families
from ebmpp.core import Params, archive, checks
from ebmpp.errors import DeclarationError, ParameterError, SavedFileError
from ebmpp.families import Family
from ebmpp.graph.factors import Factor
from ebmpp.graph.graph import FactorGraph
from ebmpp.graph.states import named

_KIND = archive.Kind("ebmpp model", 1, "ebmpp.save")
_PLAIN = (bool, int, float, str, type(None))
_OWN = {"blocks", "energy", "init", "name", "lateral"}  # fields of every factor
_TOLERANCE = 1e-2  # of a factor's energy at one state, relative: params of 16 bits, other devices


def save(path: str | os.PathLike[str], graph: FactorGraph, params: Params) -> None:
    """Write a graph and its params to one file, whole or not at all.

    A factor's energy is a function, and no file can hold one safely: of a :class:`Factor` of your own the
    file has its name, its blocks, its params and its energy at one state, and :func:`load` takes the factor
    itself back. Params keep their dtypes bit by bit.

    :param path: where; a file that is there is replaced.
    :param graph: the declaration.
    :param params: its params; their names and shapes are checked, their values are not.
    :raises ParameterError: for params of wrong names or shapes.
    :raises SavedFileError: for what such a file cannot hold.

    **Example**

    >>> import pathlib, tempfile, jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rbm.ebmpp"
    >>> ebmpp.save(path, rbm, rbm.init(jax.random.key(0)))
    >>> graph, params = ebmpp.load(path)
    >>> graph == rbm, params["v:h"].shape
    (True, (4, 3))
    """
    checks.instance("save: graph", graph, FactorGraph, "a FactorGraph")
    graph.check(params, values=False)
    arrays = Arrays()
    body = {"graph": describe(graph, params, arrays)}
    body["params"] = {name: arrays.put(value) for name, value in named(graph, params).items()}
    archive.write(Path(path), _KIND, body, arrays.listed)


def load(
    path: str | os.PathLike[str],
    *,
    factors: Iterable[Factor] = (),
    families: Mapping[str, type[Family]] | None = None,
) -> tuple[FactorGraph, Params]:
    """Read what :func:`save` wrote.

    Params are jax arrays; one of 64 bits is a numpy array where jax is not set to hold it
    (``jax_enable_x64``), so that no bit is lost.

    :param path: the file.
    :param factors: the graph's factors that are of your own, as they were declared; others of its factors may
        be among them.
    :param families: classes of families of your own, by their names.
    :raises FileNotFoundError: where there is no file.
    :raises SavedFileError: for a file of another kind or a newer version, one that is cut off or changed, a
        factor or family that is missing, or one that is not what was saved.

    **Example**

    >>> import pathlib, tempfile, jax.numpy as jnp, ebmpp
    >>> def gate_energy(w, x, y, h):
    ...     return -jnp.einsum("ijk,i,j,k", w, x, y, h)
    >>> gate = ebmpp.Factor("x", "y", "h", init=jnp.ones((2, 2, 3)), energy=gate_energy, name="gate")
    >>> blocks = {"x": ebmpp.Bernoulli(2), "y": ebmpp.Bernoulli(2)}
    >>> graph = ebmpp.FactorGraph(blocks, {"h": ebmpp.Bernoulli(3)}, [gate])
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "gated.ebmpp"
    >>> ebmpp.save(path, graph, {"gate": jnp.ones((2, 2, 3))})
    >>> ebmpp.load(path, factors=[gate])[0] == graph
    True
    """
    data = Path(path).read_bytes()
    try:
        body, listed = archive.read(data, _KIND, str(path))
    except archive.ArchiveError as error:
        raise SavedFileError(str(error)) from error
    held = lambda a: jax.dtypes.canonicalize_dtype(a.dtype) == a.dtype  # jax is set to hold its dtype
    arrays = Arrays([jnp.asarray(a) if held(a) else a for a in listed])
    try:
        params = {name: arrays.get(tree) for name, tree in body["params"].items()}
        graph = build(body["graph"], params, arrays, tuple(factors), dict(families or {}))
    except (SavedFileError, DeclarationError, ParameterError) as error:
        raise SavedFileError(f"{path}: {error}") from error
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise SavedFileError(f"{path}: the declaration in it cannot be read ({error!r})") from error
    return graph, params


# -- a declaration as JSON values and arrays ----------------------------------------------------------


class Arrays:
    """Trees of arrays as JSON values that refer to a list.

    :param listed: the arrays.
    """

    def __init__(self, listed: Sequence[Any] = ()) -> None:
        self.listed = list(listed)

    def put(self, tree: Any) -> Any:
        """A description of a tree of dicts, lists, tuples, None and arrays.

        :raises SavedFileError: for a node or a leaf of another kind.
        """
        if isinstance(tree, dict):
            wrong = [key for key in tree if not isinstance(key, str)]
            if wrong:
                raise SavedFileError(f"params with a key {wrong[0]!r} cannot be saved: names are strings")
            return {"dict": {key: self.put(value) for key, value in tree.items()}}
        if type(tree) in (list, tuple):
            return {type(tree).__name__: [self.put(value) for value in tree]}
        if tree is None:
            return {"none": None}
        refused = (
            f"params that hold a {type(tree).__name__} cannot be saved; accepted are arrays of numbers in "
            "dicts, lists and tuples"
        )
        try:
            array = np.asarray(tree)
        except Exception as error:  # jax's own arrays of keys refuse, each in its way
            raise SavedFileError(refused) from error
        numeric = jax.dtypes.issubdtype(array.dtype, np.number) or array.dtype == bool
        if not numeric or not jax.tree_util.all_leaves([tree]):
            raise SavedFileError(refused)
        self.listed.append(np.asarray(array, order="C"))
        return {"array": len(self.listed) - 1}

    def get(self, described: Mapping[str, Any]) -> Any:
        """The tree."""
        ((kind, value),) = described.items()
        if kind == "dict":
            return {key: self.get(inner) for key, inner in value.items()}
        if kind in ("list", "tuple"):
            return {"list": list, "tuple": tuple}[kind](map(self.get, value))
        return None if kind == "none" else self.listed[value]


# -- what is written -------------------------------------------------------------------------------


def describe(graph: FactorGraph, params: Params, arrays: Arrays) -> dict[str, Any]:
    """The graph; ``arrays`` takes what belongs to a factor's declaration."""
    blocks = {b: {**_fields(f, set()), **_kind(f, _families())} for b, f in graph.families.items()}
    factors = [_factor(graph, f, params, arrays) for f in graph.factors]
    labels = {"labels": {b: _labels(b, names) for b, names in graph.labels.items()}} if graph.labels else {}
    return {"blocks": blocks, "visible": list(graph.visible), "factors": factors, **labels}


def _labels(block: str, names: tuple) -> list:
    """:raises SavedFileError: for names that would not come back from JSON."""
    made = [list(n) if type(n) is tuple else n for n in names]
    wrong = [n for n, m in zip(names, made, strict=True) if not _is_plain(m)]
    if wrong:
        raise SavedFileError(
            f"labels of block {block!r} cannot be saved: a file takes numbers, strings and tuples of them, "
            f"not {wrong[0]!r}"
        )
    return made


def _is_plain(made: Any) -> bool:
    return all(type(part) in _PLAIN for part in made) if type(made) is list else type(made) in _PLAIN


def _families() -> dict[str, type]:
    return {n: getattr(builtin_families, n) for n in builtin_families.__all__}


def _factors() -> dict[str, type]:
    """The package's own classes of factors, whose energies it knows."""
    return {c.__name__: c for c in Factor.__subclasses__() if c.__module__.split(".")[0] == "ebmpp"}


def _kind(value: Any, known: Mapping[str, type]) -> dict[str, Any]:
    name = type(value).__name__
    return {"class": name, "own": known.get(name) is not type(value)}


def _fields(value: Any, left_out: set[str]) -> dict[str, Any]:
    made = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name not in left_out}
    for name, field in made.items():
        parts = field if isinstance(field, tuple) else (field,)
        if not all(isinstance(part, _PLAIN) for part in parts):
            raise SavedFileError(
                f"{value!r} cannot be saved: its field {name!r} is {field!r}, and a file takes numbers, "
                "strings and tuples of them"
            )
    return {"fields": {n: list(v) if isinstance(v, tuple) else v for n, v in made.items()}}


def _factor(graph: FactorGraph, factor: Factor, params: Params, arrays: Arrays) -> dict[str, Any]:
    made = {"name": factor.name, "blocks": list(factor.blocks), **_kind(factor, _factors())}
    if made["own"]:
        energy = getattr(factor.energy, "__qualname__", type(factor.energy).__qualname__)
        return {**made, "energy": energy, "value": _value(factor, graph.families, params[factor.name])}
    made["lateral"] = {b: arrays.put(pairs.array) for b, pairs in factor.lateral}
    if factor.init is not None:
        if callable(factor.init):
            raise SavedFileError(f"{factor!r} cannot be saved: its init is a function; give it as arrays")
        made["init"] = arrays.put(factor.init.unflatten())
    return {**made, **_fields(factor, _OWN)}


def _value(factor: Factor, families: Mapping[str, Family], params: Any) -> list[float | None]:
    """The energy at one state that tells energies apart, and the size of what is summed in it."""
    scope = tuple(families[b] for b in factor.blocks)
    generator = np.random.default_rng(0)
    as_float = lambda a: jnp.asarray(a, jnp.result_type(float))
    stats = [as_float(generator.uniform(0.1, 0.9, f.statistic_shape)) for f in scope]
    with jax.default_matmul_precision("highest"):
        call = lambda *t: as_float(factor.evaluate(params, *t, families=scope))
        value, slopes = jax.value_and_grad(call, argnums=tuple(range(len(stats))))(*stats)
    size = sum(float(jnp.vdot(jnp.abs(g), t)) for g, t in zip(slopes, stats, strict=True))
    numbers = (float(value), abs(float(value)) + size)
    return [x if np.isfinite(x) else None for x in numbers]


def layers(graph: FactorGraph) -> dict[str, Any]:
    """Return the order in which a sweep visits blocks, and a digest of the colours of their units.

    A resumed run continues bitwise only if its sweep is the same.
    """
    colors = {block: split.colors for block, split in graph.splits.items()}
    order = [list(blocks) for blocks in graph.block_layers]
    return {"order": order, "colors": archive.digest(colors) if colors else None}


@lru_cache(maxsize=32)  # tenths of a second
def energies(graph: FactorGraph) -> dict[str, list]:
    """What a graph's repr does not tell: which units are joined, and what the energies are, by factor.

    :return: JSON values. An energy is told by its value at one state and at params that are nowhere zero,
        rounded, so that another device finds the same.
    """
    made = {}
    for number, factor in enumerate(graph.factors):
        params = factor.init_params(jax.random.key(0), graph.families)
        generator = np.random.default_rng(number)
        noisy = jax.tree.map(lambda a: a + jnp.asarray(generator.normal(size=a.shape), a.dtype), params)
        value, size = _value(factor, graph.families, noisy)
        if value is None or size is None:  # an energy that restricts its params is told at its init
            value, size = _value(factor, graph.families, params)
        if value is None or size is None:
            told = "not finite"
        else:
            told = f"{round(value / size, 3) + 0.0 if size else 0.0:.3f} of {size:.3g}"  # no -0
        made[factor.name] = [told, archive.digest(factor.edges(graph.families))]
    return made


# -- what is read ----------------------------------------------------------------------------------


def build(
    described: Mapping[str, Any],
    params: Params,
    arrays: Arrays,
    factors: Sequence[Factor],
    own: Mapping[str, type[Family]],
) -> FactorGraph:
    """The graph.

    :param arrays: what :func:`describe` filled.
    :param factors: those that the caller declares.
    :param own: the caller's families.
    :raises SavedFileError: for a factor or family that is missing, or not what was saved.
    """
    blocks = {b: _family(b, told, own) for b, told in described["blocks"].items()}
    given = {f.name: f for f in factors}
    there = [told["name"] for told in described["factors"]]
    unknown = [name for name in given if name not in there]
    if unknown:
        raise SavedFileError(f"no factor is named {unknown[0]!r}; the file has {there}")
    made = [_declared(told, given.get(told["name"]), arrays) for told in described["factors"]]
    visible = {b: blocks[b] for b in described["visible"]}
    latent = {b: f for b, f in blocks.items() if b not in visible}
    listed = described.get("labels", {})
    named = {b: [tuple(n) if isinstance(n, list) else n for n in names] for b, names in listed.items()}
    graph = FactorGraph(visible, latent, made, labels=named)
    graph.check(dict(params), values=False)
    for told, factor in zip(described["factors"], graph.factors, strict=True):
        if told["own"]:
            _check_value(told, factor, graph, params)
    return graph


def _family(block: str, told: Mapping[str, Any], own: Mapping[str, type[Family]]) -> Family:
    known = own if told["own"] else _families()
    if told["class"] not in known:
        raise SavedFileError(
            f"block {block!r} is of family {told['class']!r}, which this ebmpp does not have; give "
            f"load(..., families={{{told['class']!r}: ...}}) its class"
        )
    return known[told["class"]](**_as_given(told["fields"]))


def _as_given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`_fields` made of a declaration's: JSON has lists for tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}


def _declared(told: Mapping[str, Any], given: Factor | None, arrays: Arrays) -> Factor:
    name, blocks = told["name"], tuple(told["blocks"])
    if given is not None and (given.blocks, type(given).__name__) != (blocks, told["class"]):
        raise SavedFileError(
            f"factor {name!r} is a {told['class']} over {blocks}, and the one given is {given!r}"
        )
    if given is not None:
        return given
    if told["own"]:
        raise SavedFileError(
            f"the energy of factor {name!r} ({told['energy']}) is a function of your own, which no "
            f"file holds; give load(..., factors=[...]) the factor over {blocks} as you declared it"
        )
    known = _factors()
    if told["class"] not in known:
        raise SavedFileError(f"factor {name!r} is a {told['class']!r}, which this ebmpp does not have")
    # a factor whose pairs of units are a part of its declaration takes them after its block
    pairs = [arrays.get(e) for e in told["lateral"].values()]
    start = {"init": arrays.get(told["init"])} if "init" in told else {}
    return known[told["class"]](*blocks, *pairs, name=name, **_as_given(told["fields"]), **start)


def _check_value(told: Mapping[str, Any], factor: Factor, graph: FactorGraph, params: Params) -> None:
    """:raises SavedFileError: for an energy with another value at the state that was tried."""
    (was, size), (now, _) = told["value"], _value(factor, graph.families, params[factor.name])
    if None in (was, size, now):
        return
    if not abs(was - now) <= _TOLERANCE * size:
        raise SavedFileError(
            f"the energy given for factor {factor.name!r} is not the one that was saved: at one "
            f"state it is {now:.6g}, and it was {was:.6g}"
        )
