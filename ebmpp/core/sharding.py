# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sharding of rows and jobs over the first axis of a mesh; everything else is replicated.

The mesh is passed by jax's context (``jax.set_mesh``), which is part of the key of
compiled programs. Jobs with keys of their own run on each device separately
(:func:`shard_jobs`), with results that do not depend on the devices. XLA partitions
products over rows (:func:`rows`). Under ``jax.distributed`` the same program runs on
the devices of all processes.
"""

from collections.abc import Callable, Generator
import contextlib
from typing import TypeVar

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array, lax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
from jax.typing import ArrayLike

from ebmpp.core import checks
from ebmpp.core.rows import at_index
from ebmpp.core.types import Numbers
from ebmpp.errors import ArgumentError, CheckpointError

_FORWARDED = (ArgumentError, CheckpointError, OSError)
T = TypeVar("T")

#: Takes jobs (a pytree with a leading axis), shared values, the number of the first job
#: and a mask of valid jobs (None for all). Returns values per job and sums over jobs,
#: both pytrees.
Work = Callable[[PyTree, PyTree, Array, Array | None], tuple[PyTree, PyTree]]


def use_mesh(name: str, mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Return a context in which rows and jobs are sharded over the first axis of ``mesh``, if any.

    Params may be sharded over the other axes.

    :raises ArgumentError: for a mesh without axes or without a device of this process.
    """
    if mesh is None:
        return contextlib.nullcontext()
    checks.instance(
        name,
        mesh,
        Mesh,
        'a jax.sharding.Mesh, such as jax.make_mesh((8,), ("rows",)), or None',
    )
    processes = {device.process_index for device in mesh.devices.flat}
    if not mesh.axis_names or jax.process_index() not in processes:
        raise checks.error(
            name, "a mesh with an axis and a device of this process", mesh
        )
    # An explicit axis would require shardings in the types of all operations.
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return jax.set_mesh(Mesh(mesh.devices, mesh.axis_names, axis_types=types))


def _axis() -> tuple[str, int] | None:
    """Return the axis of rows and its size, or None if rows are not sharded."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.axis_types[0] != AxisType.Auto or mesh.axis_sizes[0] == 1:
        return None
    return mesh.axis_names[0], mesh.axis_sizes[0]


def num_shards() -> int:
    """Return the number of devices that share the rows."""
    return 1 if (axis := _axis()) is None else axis[1]


@contextlib.contextmanager
def eager() -> Generator[None]:
    """Return a context in which operations on concrete values run at once, also under a trace.

    Inside ``shard_map`` jax would otherwise treat them as arrays of the traced program.
    """
    with (
        jax.ensure_compile_time_eval(),
        jax.sharding.use_abstract_mesh(AbstractMesh((), ())),
    ):
        yield


def rows(tree: T) -> T:
    """Shard the leading axes of arrays over the devices; sizes need not be divisible."""
    axis = _axis()
    return tree if axis is None else lax.with_sharding_constraint(tree, P(axis[0]))


def replicate(tree: T) -> T:
    """Replicate arrays on every device."""
    return tree if _axis() is None else lax.with_sharding_constraint(tree, P())


def shard_jobs(
    work: Work, jobs: PyTree, shared: PyTree, count: int
) -> tuple[PyTree, PyTree]:
    """Run shares of the jobs on each device separately, and add up the sums at the end.

    :param work: traced. The values of a job depend on the job and its number only.
    :param jobs: arrays ``(count, ...)``, or with one row for all jobs. The last job is
        repeated and masked if devices do not divide ``count``.
    :param shared: replicated on every device.
    :return: values of the jobs, sharded, and sums, replicated.
    """
    if (axis := _axis()) is None:
        return work(jobs, shared, jnp.int32(0), None)
    name, devices = axis
    size = -(-count // devices)
    order = jnp.minimum(jnp.arange(size * devices), count - 1)
    arrays, structure = jax.tree.flatten(jobs)
    spec = [P(name) if len(a) == count else P() for a in arrays]
    if len(order) > count:
        arrays = [a[order] if len(a) == count else a for a in arrays]

    def local(arrays, shared):
        jobs = jax.tree.unflatten(structure, arrays)
        first = lax.axis_index(name).astype(jnp.int32) * size
        valid = None if len(order) == count else first + jnp.arange(size) < count
        values, sums = work(jobs, shared, first, valid)
        return values, lax.psum(sums, name)

    # check_vma: loops carry zeros that are equal on all devices at first and differ
    # later.
    sharded = jax.shard_map(
        local, in_specs=(spec, P()), out_specs=(P(name), P()), check_vma=False
    )
    values, sums = sharded(arrays, shared)
    return at_index(values, slice(count)), sums


def place(tree: T) -> T:
    """Put arrays on the devices of the mesh, replicated unless the user has sharded them."""
    if (mesh := _concrete()) is None:
        return tree

    def put(path, a):
        sharding = getattr(a, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else P()
        axes = {*jax.tree.leaves(tuple(spec))}
        if missing := sorted(axes - set(mesh.axis_names)):
            raise ArgumentError(
                f"mesh must have the axis {missing[0]!r}, over which the array "
                f"{jax.tree_util.keystr(path)} is sharded, got {mesh.axis_names}. Pass "
                "the mesh of the array, or replicate it."
            )
        return jax.device_put(a, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(put, tree)


def concatenate_processes(tree: PyTree) -> PyTree:
    """Concatenate the rows of all processes, of equal number, sharded over the devices."""
    mesh = jax.sharding.get_mesh()
    sharding = NamedSharding(mesh, P(mesh.axis_names[0]))
    return jax.tree.map(
        lambda a: jax.make_array_from_process_local_data(sharding, np.asarray(a)), tree
    )


def _concrete() -> Mesh | None:
    return None if jax.sharding.get_abstract_mesh().empty else jax.sharding.get_mesh()


def to_host(tree: PyTree) -> PyTree:
    """Return numpy arrays; all processes must call it for arrays sharded over processes."""

    def to_numpy(a):
        is_local = not isinstance(a, Array) or a.is_fully_addressable
        if not is_local and not a.is_fully_replicated:
            a = multihost_utils.process_allgather(a, tiled=True)
        return np.asarray(a)

    return jax.tree.map(to_numpy, tree)


def block_on_cpu_mesh(tree: PyTree) -> None:
    """Wait for the computation of arrays sharded over CPU devices, to avoid a deadlock.

    XLA has one thread per core for these, and two steps in flight can block them in
    collective operations.
    """
    mesh = _concrete()
    is_shared = mesh is not None and mesh.size > 1
    if is_shared and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(tree)


def place_like(value: Numbers, template: ArrayLike) -> Array:
    """Put values on the device, or on a mesh with the sharding of ``template``."""
    if _concrete() is None or not isinstance(template, Array):
        return jnp.asarray(value)
    return jax.device_put(value, template.sharding)


def processes() -> int:
    """Return the number of processes that run this program over one mesh."""
    return 1 if _concrete() is None else jax.process_count()


def is_single_device() -> bool:
    """Return True if there is no mesh: one process with the default device."""
    return _concrete() is None


def is_first() -> bool:
    """Return True in the process that displays progress and writes files."""
    return processes() == 1 or jax.process_index() == 0


def gather(tree: PyTree) -> PyTree:
    """Return the arrays of all processes, ``(processes, ...)``; shapes must be equal."""
    if processes() == 1:
        return jax.tree.map(lambda a: np.asarray(a)[None], tree)
    return jax.tree.map(np.asarray, multihost_utils.process_allgather(tree))


def run_on_first(call: Callable[[], T]) -> T | None:
    """Call a function in the first process only; return its result there, and None in the others.

    An error is raised in all processes, in the others as CheckpointError unless one of
    :data:`_FORWARDED`.
    """
    result = None
    error = None
    if is_first():
        try:
            result = call()
        # SystemExit too: the others would wait for ever
        except BaseException as raised:
            error = raised
    message = "" if error is None else f"{type(error).__name__}\n{error}"
    message = broadcast_bytes(message.encode()).decode()
    if error is not None:
        raise error
    if message:
        name, _, text = message.partition("\n")
        kind = {cls.__name__: cls for cls in _FORWARDED}.get(name, CheckpointError)
        raise kind(f"the first of {processes()} processes: {text}")
    return result


def broadcast_bytes(data: bytes) -> bytes:
    """Return the bytes of the first process in all processes."""
    if processes() == 1:
        return data
    size = multihost_utils.broadcast_one_to_all(np.int64(len(data)))
    if not size:  # an empty array cannot be sent
        return b""
    # the bytes of other processes are not sent, but must be as many
    local = np.resize(np.frombuffer(data, np.uint8), int(size))
    received = multihost_utils.broadcast_one_to_all(local)
    return np.asarray(received).astype(np.uint8).tobytes()
