# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Many devices: rows and jobs over the first axis of a mesh, everything else on each device.

A mesh reaches what is inside by jax's own context (``jax.set_mesh``), which is a part of what a program is
compiled for. Work that is cut into jobs with keys of their own runs on each device for itself
(:func:`apart`), and what it is does not depend on the devices; plain products over rows are cut by XLA, which
needs to be told of the rows alone (:func:`rows`). Under ``jax.distributed`` it is the same program, on the
devices of all processes.
"""

from collections.abc import Callable, Generator
import contextlib
from typing import Any, TypeVar

import numpy as np

import jax
from jax import Array, lax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from ebmpp.core import checks
from ebmpp.errors import ArgumentError, CheckpointError

_TOLD = (ArgumentError, CheckpointError, OSError)
T = TypeVar("T")

#: From jobs (a pytree with a leading axis), what all share, the number of the first of these jobs, and which
#: of them are meant (None for all), to values a job (of the same axis) and sums over jobs, both pytrees.
Work = Callable[[Any, Any, Array, Array | None], tuple[Any, Any]]


def over(name: str, mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Rows and jobs go over the first axis of ``mesh``; its other axes are for params that are cut too.

    :param name: of the argument, for errors.
    :param mesh: None for no other devices than where things are.
    :raises ArgumentError: for anything else, or a mesh that this process has no device of.
    """
    if mesh is None:
        return contextlib.nullcontext()
    checks.instance(name, mesh, Mesh, 'a jax.sharding.Mesh, such as jax.make_mesh((8,), ("rows",)), or None')
    if not mesh.axis_names:
        raise ArgumentError(f"{name}: rows go over the mesh's first axis, and this one has none: {mesh}")
    if jax.process_index() not in {device.process_index for device in mesh.devices.flat}:
        raise ArgumentError(f"{name}: none of the mesh's devices is of this process: {mesh}")
    # The engine says itself what is where; an explicit axis would ask that of every operation, in every type.
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return jax.set_mesh(Mesh(mesh.devices, mesh.axis_names, axis_types=types))


def _axis() -> tuple[str, int] | None:
    """The axis of rows and its size; None where there is none, or one device works for itself."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.axis_types[0] != AxisType.Auto or mesh.axis_sizes[0] == 1:
        return None
    return mesh.axis_names[0], mesh.axis_sizes[0]


def width() -> int:
    """Over how many devices rows go."""
    return 1 if (axis := _axis()) is None else axis[1]


def share(number: int) -> int:
    """The least multiple of :func:`width` that is no less than ``number``."""
    return -(-number // width()) * width()


@contextlib.contextmanager
def at_once() -> Generator[None]:
    """Operations on known values are done, not traced, also amid a caller's program.

    Where each device of a mesh runs a program of its own, jax would take them for arrays of that program.
    """
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


# -- traced ----------------------------------------------------------------------------------------


def rows(tree: Any) -> Any:
    """The same arrays, their leading axes cut over the devices; a whole number of rows on each or not."""
    axis = _axis()
    return tree if axis is None else lax.with_sharding_constraint(tree, P(axis[0]))


def everywhere(tree: Any) -> Any:
    """The same arrays, whole on every device."""
    return tree if _axis() is None else lax.with_sharding_constraint(tree, P())


def apart(work: Work, jobs: Any, shared: Any, count: int) -> tuple[Any, Any]:
    """Each device does its share of the jobs for itself; sums are added up once at the end.

    :param work: traced. A job's values depend on the job and its number alone.
    :param jobs: ``(count, ...)`` each, or one row that stands for all; where devices do not divide them, some
        of the last are done again and not meant.
    :param shared: whole on every device.
    :return: values of the jobs, cut over the devices, and sums, whole.
    """
    if (axis := _axis()) is None:
        return work(jobs, shared, jnp.zeros((), jnp.int32), None)
    name, devices = axis
    each = -(-count // devices)
    order = jnp.minimum(jnp.arange(each * devices), count - 1)
    arrays, structure = jax.tree.flatten(jobs)
    spec = [P(name) if len(a) == count else P() for a in arrays]
    if len(order) > count:
        arrays = [a[order] if len(a) == count else a for a in arrays]

    def local(arrays: list[Array], shared: Any) -> tuple[Any, Any]:
        jobs = jax.tree.unflatten(structure, arrays)
        first = lax.axis_index(name).astype(jnp.int32) * each
        meant = None if len(order) == count else first + jnp.arange(each) < count
        values, sums = work(jobs, shared, first, meant)
        return values, lax.psum(sums, name)

    # Loops begin with zeros that are the same everywhere and end with what is not: nothing to be checked.
    cut = jax.shard_map(local, in_specs=(spec, P()), out_specs=(P(name), P()), check_vma=False)
    values, sums = cut(arrays, shared)
    return jax.tree.map(lambda a: a[:count], values), sums


# -- on the host -----------------------------------------------------------------------------------


def place(tree: Any) -> Any:
    """Arrays on the devices of the mesh: whole on each, or as the user has cut them over a mesh.

    :raises ArgumentError: for one that is cut over an axis which this mesh lacks.
    """
    if (mesh := _concrete()) is None:
        return tree

    def put(path: Any, a: Any) -> Array:
        given = a.sharding if isinstance(a, Array) else None
        spec = given.spec if isinstance(given, NamedSharding) else P()
        axes = {
            axis for each in spec if each is not None for axis in ((each,) if isinstance(each, str) else each)
        }
        if lacking := sorted(axes - set(mesh.axis_names)):
            raise ArgumentError(
                f"mesh: the array {jax.tree_util.keystr(path)} is cut over {lacking[0]!r}, and this mesh has "
                f"the axes {mesh.axis_names}: give the mesh that it was cut over, or the array whole"
            )
        return jax.device_put(a, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(put, tree)


def together(tree: Any) -> Any:
    """Rows of all processes, one's after the other's: arrays that are cut over the devices.

    :param tree: the rows of this process, ``(rows, ...)`` each, of one size in all processes.
    """
    mesh = _concrete()
    if mesh is None:
        raise ArgumentError("several processes train one model over a mesh of their devices: give mesh=")
    cut = NamedSharding(mesh, P(mesh.axis_names[0]))
    return jax.tree.map(lambda a: jax.make_array_from_process_local_data(cut, np.asarray(a)), tree)


def _concrete() -> Mesh | None:
    if jax.sharding.get_abstract_mesh().empty:
        return None
    return jax.sharding.get_mesh()


def to_host(tree: Any) -> Any:
    """Arrays of numpy, whole; of what is cut over processes too, where all of them call it."""

    def whole(a: Any) -> np.ndarray:
        if isinstance(a, Array) and not (a.is_fully_addressable or a.is_fully_replicated):
            return np.asarray(multihost_utils.process_allgather(a, tiled=True))
        return np.asarray(a)

    return jax.tree.map(whole, tree)


def settle(tree: Any) -> None:
    """Wait for what is computed, where devices are cores: XLA's threads for these are as many as there are
    cores, and two steps in flight can each hold one while they wait for a sum over all.
    """
    if (mesh := _concrete()) is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(tree)


def place_like(value: np.ndarray, like: Any) -> Array:
    """Numbers on the device, or on the devices of the mesh where ``like`` is."""
    made = jnp.asarray(value)
    if _concrete() is None or not isinstance(like, Array):
        return made
    return jax.device_put(value, like.sharding)


# -- processes -------------------------------------------------------------------------------------


def processes() -> int:
    """How many run this program together, over one mesh."""
    return 1 if _concrete() is None else jax.process_count()


def alone() -> bool:
    """Whether there is no mesh: one process, and the device that jax takes."""
    return _concrete() is None


def is_first() -> bool:
    """Whether this process is the one that shows and writes."""
    return processes() == 1 or jax.process_index() == 0


def gathered(tree: Any) -> Any:
    """Arrays of every process, ``(processes, ...)`` each; of one shape in all."""
    if processes() == 1:
        return jax.tree.map(lambda a: np.asarray(a)[None], tree)
    return jax.tree.map(np.asarray, multihost_utils.process_allgather(tree))


def by_first(call: Callable[[], T]) -> T | None:
    """What the first process makes of it, and None in the others; where it fails there, all fail alike.

    :raises CheckpointError: in the others, for any error but one of :data:`_TOLD`.
    """
    made, error = None, None
    if is_first():
        try:
            made = call()
        except Exception as raised:
            error = raised
    told = "" if error is None else f"{type(error).__name__}\n{error}"
    told = shared_bytes(told.encode()).decode()
    if error is not None:
        raise error
    if told:
        kind, _, text = told.partition("\n")
        of = {each.__name__: each for each in _TOLD}.get(kind, CheckpointError)
        raise of(f"the first of {processes()} processes: {text}")
    return made


def shared_bytes(data: bytes) -> bytes:
    """Those of the first process, in all."""
    if processes() == 1:
        return data
    size = multihost_utils.broadcast_one_to_all(np.int64(len(data)))
    if not size:  # nothing cannot be sent
        return b""
    own = np.frombuffer(data, np.uint8) if is_first() else np.zeros(int(size), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(own)).astype(np.uint8).tobytes()
