# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A graph and its params in one file, for keeping and passing on.

The file is a zip archive that is not compressed: ``header.json``, which holds the declaration, and one
``.npy`` file an array. Nothing in it is executed when it is read, and nothing is pickled. Checkpoints of a
run (:mod:`ebmpp.checkpoint`) hold the state of an optimiser and of chains, and are no such files.
"""

from collections.abc import Iterable, Mapping
import hashlib
import io
import json
import os
from pathlib import Path
import tempfile
from typing import Any
import zipfile

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp import describing
from ebmpp.core import checks
from ebmpp.describing import Arrays
from ebmpp.errors import SavedFileError
from ebmpp.factors import Factor
from ebmpp.families import Family
from ebmpp.graph import FactorGraph
from ebmpp.rewiring import named

Params = dict[str, Any]

FORMAT, VERSION = "ebmpp model", 1
_HEADER = "header.json"


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
        "graph": describing.describe(graph, params, arrays),
        "params": {name: arrays.put(value) for name, value in named(graph, params).items()},
    }
    members = {f"arrays/{i}.npy": _npy(a) for i, a in enumerate(arrays.listed)}
    body["arrays"] = [
        {"dtype": str(a.dtype), "shape": list(a.shape), "sha256": _hash(members[f"arrays/{i}.npy"])}
        for i, a in enumerate(arrays.listed)
    ]
    header = {"format": FORMAT, "version": VERSION, "sha256": _hash(_text(body)), "body": body}
    _write(Path(path), {_HEADER: json.dumps(header, indent=1).encode(), **members})


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
    :return: the graph and its params.
    :raises FileNotFoundError: where there is no file.
    :raises SavedFileError: for a file of another kind or a newer version, one that is cut off or changed, a
        factor or family that is missing, or one that is not what was saved.

    **Example**

    >>> import pathlib, tempfile, jax.numpy as jnp, ebmpp
    >>> from ebmpp import Bernoulli, Factor, FactorGraph
    >>> def gate_energy(w, x, y, h):
    ...     return -jnp.einsum("ijk,i,j,k", w, x, y, h)
    >>> gate = Factor("x", "y", "h", init=jnp.ones((2, 2, 3)), energy=gate_energy, name="gate")
    >>> blocks = {"x": Bernoulli(2), "y": Bernoulli(2)}
    >>> graph = FactorGraph(blocks, {"h": Bernoulli(3)}, [gate])
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "gated.ebmpp"
    >>> ebmpp.save(path, graph, {"gate": jnp.ones((2, 2, 3))})
    >>> ebmpp.load(path, factors=[gate])[0] == graph
    True
    """
    body, arrays = _read(Path(path))
    try:
        with describing.refusing(path):
            params = {name: arrays.get(tree) for name, tree in body["params"].items()}
            graph = describing.build(
                body["graph"], params, arrays, tuple(factors), dict(families or {}), path
            )
            graph.check(params, values=False)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise SavedFileError(f"{path}: the declaration in it cannot be read ({error!r})") from error
    return graph, params


# -- the file --------------------------------------------------------------------------------------


def _npy(array: np.ndarray) -> bytes:
    """An array as a .npy file; dtypes that numpy itself does not have are stored as their bits."""
    if array.dtype.kind == "V":
        array = array.view(f"u{array.dtype.itemsize}")
    made = io.BytesIO()
    np.lib.format.write_array(made, array, allow_pickle=False)
    return made.getvalue()


def _array(data: bytes, told: Mapping[str, Any], path: Path) -> Any:
    made = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    dtype = jnp.dtype(told["dtype"])  # jax's own also, such as bfloat16
    if dtype.kind == "V" and made.dtype == np.dtype(f"u{dtype.itemsize}"):
        made = made.view(dtype)
    if (list(made.shape), made.dtype) != (told["shape"], dtype):
        raise SavedFileError(f"{path}: an array is {made.dtype}{made.shape}, and the header says {told}")
    held = jax.dtypes.canonicalize_dtype(dtype) == dtype
    return jnp.asarray(made) if held else made


def _write(path: Path, members: Mapping[str, bytes]) -> None:
    """Beside the file first, and then in its place at once."""
    handle, beside = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, data in members.items():
                    archive.writestr(zipfile.ZipInfo(name), data)  # without a date: equal models, equal files
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _read(path: Path) -> tuple[dict[str, Any], Arrays]:
    """The header's body and the arrays, every byte checked."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise SavedFileError(f"{path} is a compressed archive: ebmpp.save did not write it")
            body = _body(archive, path)
            listed = []
            for i, told in enumerate(body["arrays"]):
                data = archive.read(f"arrays/{i}.npy")
                if _hash(data) != told["sha256"]:
                    raise SavedFileError(f"{path}: array {i} is not what was written; the file was changed")
                listed.append(_array(data, told, path))
    except zipfile.BadZipFile as error:
        raise SavedFileError(
            f"{path} is no file that ebmpp.save wrote, or is cut off or damaged ({error})"
        ) from error
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except (OSError, KeyError, TypeError, ValueError, EOFError, MemoryError, RuntimeError) as error:
        if isinstance(error, SavedFileError):
            raise
        raise SavedFileError(f"{path} is damaged, or no file that ebmpp.save wrote ({error})") from error
    return body, Arrays(listed)


def _body(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    if _HEADER not in archive.namelist():
        raise SavedFileError(f"{path} is an archive without {_HEADER}: ebmpp.save did not write it")
    header = json.loads(archive.read(_HEADER))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise SavedFileError(f"{path}: its header is not that of a file that ebmpp.save wrote")
    if header["version"] != VERSION:
        raise SavedFileError(
            f"{path} is of version {header['version']!r} of the format, and this ebmpp reads version "
            f"{VERSION}: a newer ebmpp wrote it, and reads it"
        )
    if _hash(_text(header["body"])) != header["sha256"]:
        raise SavedFileError(f"{path}: the declaration is not what was written; the file was changed")
    return header["body"]


def _text(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
