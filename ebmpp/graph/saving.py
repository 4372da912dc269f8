# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Files that hold a graph and its params.

A file is an archive (:mod:`ebmpp.core.archive`) whose header describes the declaration.
Nothing in it is pickled or executed. A family is made again by ``cls(**fields)``, and a
factor by ``cls(*blocks, *pairs, name=name, **fields)``: its blocks, the listed pairs of
units, and its other dataclass fields, with ``init`` if it has one. Params are the leaves
of the trees that the factors declare. Custom factors and families are passed to
:func:`load` instead. Checkpoints of a training run (:mod:`ebmpp.core.checkpoints`) are
another format.
"""

from collections.abc import Collection, Iterable, Mapping
import dataclasses
from functools import lru_cache
import os
from typing import Any

from jaxtyping import PyTree
import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.core import HashableArray, Numbers, Params, archive, checks, omit, select
from ebmpp.errors import SavedFileError
import ebmpp.families
from ebmpp.families import Family
from ebmpp.families.family import Families
from ebmpp.graph.factors import (
    Bias,
    Bilinear,
    Convolution,
    Coupling,
    Factor,
    Hyperedges,
    Pairwise,
    Table,
)
from ebmpp.graph.factors.probe import (
    generic_statistics,
    random_statistics,
    with_noise,
)
from ebmpp.graph.graph import FactorGraph
from ebmpp.graph.states import ordered_params

#: A part of a file's header: numbers, strings, lists and dicts of these.
Description = Mapping[str, PyTree]

_KIND = archive.Kind("ebmpp model", 1, "ebmpp.save")
_FAMILIES = tuple(getattr(ebmpp.families, name) for name in ebmpp.families.__all__)
_FACTORS = (Bias, Bilinear, Convolution, Coupling, Hyperedges, Pairwise, Table)
#: Classes that a file describes completely, by name; Linear has a function.
_CLASSES: dict[str, Any] = {kind.__name__: kind for kind in _FAMILIES + _FACTORS}
_COMMON = {f.name for f in dataclasses.fields(Factor)}
# relative, of a custom energy at one state: params may have 16 bits, devices differ
_TOLERANCE = 1e-2
_STATES = 16  # at which an energy that is not affine is compared


def save(file: str | os.PathLike[str], graph: FactorGraph, params: Params) -> None:
    """Write a graph and its params to one file, atomically.

    A custom energy is a function, which no file can hold safely. The file stores the
    name, blocks and params of a custom :class:`Factor` and the value of its energy at
    one state; pass the factor to :func:`load`. Params keep their dtypes bit by bit.

    :param file: an existing file is replaced.
    :param params: only their names and shapes are checked.
    :raises ParameterError: for params with wrong names or shapes.
    :raises SavedFileError: for params, labels or fields that the format cannot hold.
    :raises ArgumentError: for a path where no file can be written, as of a directory.
    :raises OSError: if the disk fails; an existing file is then unchanged.

    **Example**

    >>> import pathlib, tempfile, jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "rbm.ebmpp"
    >>> ebmpp.save(file, rbm, rbm.init(jax.random.key(0)))
    >>> graph, params = ebmpp.load(file)
    >>> graph == rbm, params["v:h"].shape
    (True, (4, 3))
    """
    checks.instance("save: graph", graph, FactorGraph)
    graph.check(params, values=False)
    arrays: list[np.ndarray] = []
    body = {
        "blocks": {
            b: {"fields": _fields(f), **_class_of(f)} for b, f in graph.families.items()
        },
        "visible": list(graph.visible),
        "factors": [_describe_factor(graph, f, params, arrays) for f in graph.factors],
        "labels": {
            b: _to_json(f"labels of block {b!r}", names)
            for b, names in graph.labels.items()
        },
        "params": {
            name: [_store(name, leaf, arrays) for leaf in jax.tree.leaves(value)]
            for name, value in ordered_params(graph, params).items()
        },
    }
    archive.write(checks.output_file("save: file", file), _KIND, body, arrays)


def load(
    file: str | os.PathLike[str],
    *,
    factors: Iterable[Factor] = (),
    families: Mapping[str, type[Family]] | None = None,
) -> tuple[FactorGraph, Params]:
    """Read a file written by :func:`save`.

    Params are jax arrays; 64-bit params are numpy arrays unless ``jax_enable_x64`` is
    set.

    :param factors: the graph's custom factors as they were declared; other factors of
        the graph are accepted too.
    :param families: custom family classes by name.
    :raises FileNotFoundError: if there is no file; ArgumentError for a directory.
    :raises SavedFileError: for a file that is damaged or of another kind or version,
        and for a custom factor or family that is missing or differs from the saved one.

    **Example**

    >>> import pathlib, tempfile, jax.numpy as jnp, ebmpp
    >>> def gate_energy(w, x, y, h):
    ...     return -jnp.einsum("ijk,i,j,k", w, x, y, h)
    >>> init = jnp.ones((2, 2, 3))
    >>> gate = ebmpp.Factor("x", "y", "h", init=init, energy=gate_energy, name="gate")
    >>> blocks = {"x": ebmpp.Bernoulli(2), "y": ebmpp.Bernoulli(2)}
    >>> graph = ebmpp.FactorGraph(blocks, {"h": ebmpp.Bernoulli(3)}, [gate])
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "gated.ebmpp"
    >>> ebmpp.save(file, graph, {"gate": jnp.ones((2, 2, 3))})
    >>> ebmpp.load(file, factors=[gate])[0] == graph
    True
    """
    data = checks.input_file("load: file", file).read_bytes()
    try:
        body, stored = archive.read(data, _KIND, "the file")
        arrays = list(map(_on_device, stored))
        blocks = {
            b: _build_family(b, saved, families or {})
            for b, saved in body["blocks"].items()
        }
        saved_factors = {d["name"]: d for d in body["factors"]}
        custom = {f.name: f for f in factors}
        checks.names("factor", custom, saved_factors, SavedFileError)
        declared = [
            _build_factor(d, custom.get(name), arrays)
            for name, d in saved_factors.items()
        ]
        visible = select(blocks, body["visible"])
        latent = omit(blocks, visible)
        labels = {b: _from_json(names) for b, names in body["labels"].items()}
        graph = FactorGraph(visible, latent, declared, labels=labels)
        params = {}
        for name, numbers in body["params"].items():
            structure = jax.tree.structure(graph.param_shapes[name])
            params[name] = jax.tree.unflatten(structure, [arrays[i] for i in numbers])
        graph.check(params, values=False)
        for factor in graph.factors:
            description = saved_factors[factor.name]
            if description["custom"]:
                _check_value(description["value"], factor, graph, params)
        return graph, params
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SavedFileError(f"{file}: {error}") from error


def _on_device(array: np.ndarray) -> Numbers:
    """Return a jax array, or numpy's if jax has no such dtype, as 64 bits without x64."""
    is_held = jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype
    return jnp.asarray(array) if is_held else array


def _store(name: str, value: PyTree, arrays: list[np.ndarray]) -> int:
    """Append an array of numbers of factor ``name`` to a list; return its number there."""
    array = checks.numbers(f"factor {name!r}: params", value, SavedFileError)
    arrays.append(np.asarray(array, order="C"))
    return len(arrays) - 1


def _to_json(name: str, value: object) -> PyTree:
    """Return numbers, strings and nested tuples of them as JSON values."""
    if isinstance(value, HashableArray):
        return value.array.tolist()
    if type(value) is tuple:
        return [_to_json(name, item) for item in value]
    if value is not None and not isinstance(value, bool | int | float | str):
        raise checks.error(
            name,
            "numbers, strings or tuples of them to be saved",
            value,
            SavedFileError,
        )
    return value


def _from_json(value: PyTree) -> PyTree:
    return tuple(map(_from_json, value)) if isinstance(value, list) else value


def _fields(value: Family | Factor, skipped: Collection[str] = ()) -> Description:
    return {
        f.name: _to_json(f"{value!r}: field {f.name!r}", getattr(value, f.name))
        for f in dataclasses.fields(value)
        if f.name not in skipped
    }


def _class_of(value: object) -> Description:
    name = type(value).__name__
    return {"class": name, "custom": _CLASSES.get(name) is not type(value)}


def _describe_factor(
    graph: FactorGraph, factor: Factor, params: Params, arrays: list[np.ndarray]
) -> Description:
    description = {
        "name": factor.name,
        "blocks": list(factor.blocks),
        **_class_of(factor),
    }
    if description["custom"]:
        energy: object = factor.energy
        name = getattr(energy, "__qualname__", type(energy).__qualname__)
        value = _value(factor, graph.families, params[factor.name])
        return description | {"energy": name, "value": value}
    # other pairs follow from the fields
    is_listed = isinstance(factor, Pairwise | Coupling)
    stored = [pairs.array for _, pairs in factor.lateral] if is_listed else []
    init = None
    if factor.init is not None:
        values = factor.init if callable(factor.init) else factor.init.unflatten()
        init = _store(factor.name, values, arrays)
    return description | {
        "pairs": [_store(factor.name, array, arrays) for array in stored],
        "init": init,
        "fields": _fields(factor, {*_COMMON, "units"} if is_listed else _COMMON),
    }


def _value(factor: Factor, families: Families, params: PyTree) -> list[float | None]:
    """Return the energy at one generic state, and the magnitude of the terms in its sum.

    An energy that is not affine is taken at states; the magnitude is then the largest.
    """
    families = select(families, factor.blocks)

    def energy_at(statistics):
        with jax.default_matmul_precision("highest"):
            return jnp.asarray(factor.energy_at(params, statistics, families), float)

    if factor.affine:
        t = generic_statistics(families, np.random.default_rng(0))
        value, slopes = jax.value_and_grad(energy_at)(t)
        terms = (jnp.vdot(jnp.abs(slopes[b]), t[b]) for b in families)
        size = abs(float(value)) + sum(map(float, terms))
    else:
        t = random_statistics(families, families, _STATES)
        values = np.asarray(jax.jit(jax.vmap(energy_at))(t))
        value = values[0]
        size = np.where(np.isfinite(values), np.abs(values), 0).max()
    return [x if np.isfinite(x) else None for x in (float(value), float(size))]


def _build_family(
    block: str, description: Description, custom: Mapping[str, type[Family]]
) -> Family:
    known = custom if description["custom"] else _CLASSES
    name = description["class"]
    if name not in known:
        raise checks.error(
            f"family of block {block!r}",
            "known",
            name,
            SavedFileError,
            f"Pass load(..., families={{{name!r}: ...}}).",
        )
    return known[name](**{n: _from_json(v) for n, v in description["fields"].items()})


def _build_factor(
    description: Description, custom: Factor | None, arrays: list
) -> Factor:
    name = description["name"]
    blocks = tuple(description["blocks"])
    kind = description["class"]
    if custom is not None:
        if (custom.blocks, type(custom).__name__) != (blocks, kind):
            raise checks.error(
                f"factor {name!r}", f"a {kind} over {blocks}", custom, SavedFileError
            )
        return custom
    if description["custom"]:
        raise checks.error(
            f"factor {name!r} over {blocks}",
            "passed to load, as no file holds a custom energy",
            description.get("energy"),
            SavedFileError,
            "Give load(..., factors=[...]) the factor as it was declared.",
        )
    pairs = [arrays[i] for i in description["pairs"]]
    fields = {n: _from_json(v) for n, v in description["fields"].items()}
    if description["init"] is not None:
        fields[_CLASSES[kind].init_name] = arrays[description["init"]]
    return _CLASSES[kind](*blocks, *pairs, name=name, **fields)


def _check_value(
    saved: list[float | None], factor: Factor, graph: FactorGraph, params: Params
) -> None:
    was, size = saved
    now, _ = _value(factor, graph.families, params[factor.name])
    if was is None or size is None or now is None:
        return
    if not abs(was - now) <= _TOLERANCE * size:
        raise checks.error(
            f"factor {factor.name!r}: energy",
            f"that of the file, {was:.6g} at one state",
            now,
            SavedFileError,
        )


def layers(graph: FactorGraph) -> Description:
    """Return the order of a sweep over blocks and a digest of its colours, for resumed runs."""
    colors = {block: split.colors for block, split in graph.splits.items()}
    order = [list(blocks) for blocks in graph.block_layers]
    return {"order": order, "colors": archive.digest(colors) if colors else None}


@lru_cache(maxsize=32)  # tenths of a second
def energies(graph: FactorGraph) -> dict[str, list]:
    """Return a rounded value of the energy and a digest of the pairs, by factor."""
    result = {}
    for number, factor in enumerate(graph.factors):
        params = factor.init_params(jax.random.key(0), graph.families)
        noisy = with_noise(params, np.random.default_rng(number))
        text = "not finite"
        for values in (noisy, params):  # an energy may restrict its params
            value, size = _value(factor, graph.families, values)
            if value is not None and size is not None:
                ratio = round(value / size, 3) if size else 0.0
                text = f"{ratio + 0.0:.3f} of {size:.3g}"  # 0.0 in place of -0.0
                break
        result[factor.name] = [text, archive.digest(factor.edges(graph.families))]
    return result
