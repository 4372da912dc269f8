# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A graph and its params in one file, for keeping and passing on.

The file is an archive (:mod:`ebmpp.core.archive`) whose header holds the declaration. Nothing in it is
executed when it is read, and nothing is pickled. Checkpoints of a run (:mod:`ebmpp.training.checkpoint`) hold
the state of an optimiser and of chains, and are no such files.
"""

from collections.abc import Iterable, Mapping
import os
from pathlib import Path

import jax
import jax.numpy as jnp

from ebmpp.core import Params, archive, checks
from ebmpp.errors import DeclarationError, ParameterError, SavedFileError
from ebmpp.families import Family
from ebmpp.graph import describe
from ebmpp.graph.describe import Arrays
from ebmpp.graph.factors import Factor
from ebmpp.graph.graph import FactorGraph
from ebmpp.graph.states import named

_KIND = archive.Kind("ebmpp model", 1, "ebmpp.save")


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
    body = {
        "graph": describe.describe(graph, params, arrays),
        "params": {name: arrays.put(value) for name, value in named(graph, params).items()},
    }
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
        graph = describe.build(body["graph"], params, arrays, tuple(factors), dict(families or {}))
    except (SavedFileError, DeclarationError, ParameterError) as error:
        raise SavedFileError(f"{path}: {error}") from error
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise SavedFileError(f"{path}: the declaration in it cannot be read ({error!r})") from error
    return graph, params
