# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Kernel launches and bytes of programs for an H200, counted without a GPU.

XLA compiles for a described device, and each instruction of the result that is no view
is one launch. Bytes are those of operands and results, also where a cache would hold
them. Kernels are not tuned without the device, so products are cuBLAS calls here. A loop of
known length runs without the host; in any other loop the host waits for the device once
per turn.

``python benchmarks/speed/launches.py gibbs gradient cd pcd hand pairs``, in an environment
with ``jax[cuda13]``. ``ROWS`` in the environment sets the chains or rows, 1,000 by default.
"""

from collections.abc import Callable, Iterator
import contextlib
import math
import os
from pathlib import Path
import re
import sys
from typing import Any, NamedTuple

import nvidia

DEVICE = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
os.environ["JAX_PLATFORMS"] = "cpu"
_CUDA = Path(list(nvidia.__path__)[0], "cu13")
os.environ["XLA_FLAGS"] = (
    f"--xla_gpu_cuda_data_dir={_CUDA} --xla_gpu_autotune_level=0 "
    "--xla_gpu_enable_triton_gemm=false"
)
os.environ["PATH"] = f"{_CUDA}/bin:{os.environ['PATH']}"

import numpy as np  # noqa: E402

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402
import optax  # noqa: E402

sys.path[:0] = [str(Path(__file__).parents[2])]
from benchmarks.speed import by_hand, cases, gpu  # noqa: E402
import ebmpp  # noqa: E402
from ebmpp.core import backend, random  # noqa: E402
from ebmpp.coupling.accumulators import EnergyGradient  # noqa: E402
from ebmpp.coupling.engine import run_pairs  # noqa: E402
from ebmpp.coupling.slots import Window  # noqa: E402
from ebmpp.estimators import Batch  # noqa: E402
from ebmpp.moves import Target  # noqa: E402
from ebmpp.moves.sweeps import resolve_moves  # noqa: E402
from ebmpp.training import loop  # noqa: E402

ROWS = int(os.environ.get("ROWS", "1000"))
_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f64": 8, "u64": 8}
_VIEWS = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "opt-barrier",
}  # fmt: skip
_INSTRUCTION = re.compile(r"(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    shape: str
    kind: str
    rest: str

    def called(self) -> Iterator[str]:
        """Yield the names of computations that a loop or a branch runs."""
        yield from re.findall(r"(?:body|to_apply|_computation)=%([\w.\-]+)", self.rest)
        for names in re.findall(r"branch_computations={([^}]*)}", self.rest):
            yield from re.findall(r"%([\w.\-]+)", names)


def num_bytes(shape: str) -> int:
    """Return the bytes of an array, or of a tuple of arrays."""
    # without the workspace of cuBLAS
    arrays = re.findall(r"\b(?!s8\[33554432)(\w+)\[([\d,]*)\]", shape)
    sizes = (
        _WIDTHS.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in arrays
    )
    return sum(sizes)


def report(text: str) -> None:
    """Print the launches of each computation that runs on its own."""
    computations: dict[str, list[Instruction]] = {}
    entry = body = ""
    for line in text.splitlines():
        if match := re.match(r"(ENTRY )?%([\w.\-]+) \(.*{$", line):
            body = match[2]
            entry = body if match[1] else entry
            computations[body] = []
        elif match := _INSTRUCTION.match(line.strip()):
            computations[body].append(Instruction(*match.groups()))
    shapes = {i.name: i.shape for c in computations.values() for i in c}

    def show(name: str, label: str, depth: int) -> None:
        launches = total = 0
        inner = []
        for i in computations[name]:
            if i.kind in ("while", "conditional", "call"):
                inner.append(i)
            elif i.kind not in _VIEWS:
                launches += 1
                operands = re.findall(r"%([\w.\-]+)", i.rest.split("), ")[0])
                total += num_bytes(i.shape)
                total += sum(num_bytes(shapes.get(o, "")) for o in operands)
        print(f"{'  ' * depth}{label}: {launches} launches, {total / 1e6:.1f} MB")
        for i in inner:
            count = re.search(r'known_trip_count":{"n":"(\d+)"', i.rest)
            turns = f" of {count[1]} turns" if count else ""
            for callee in i.called():
                show(callee, f"{i.kind}{turns}", depth + 1)

    show(entry, "program", 0)


def chunk(estimator: ebmpp.estimators.Estimator) -> tuple[Callable, tuple]:
    """Return the program of several steps of ``fit``, and its arguments."""
    run, arguments = loop.run_chunk, []

    def stop(*args: Any) -> Any:
        arguments.extend(args)
        raise StopIteration

    loop.run_chunk = stop
    graph, _ = cases.rbm()
    data = np.asarray(gpu.bits(ROWS, 784))  # one batch: gathers count whole operands
    options = {"optimizer": optax.sgd(0.05), "batch_size": ROWS, "progress_bar": False}
    with contextlib.suppress(StopIteration):
        ebmpp.fit(
            graph, data, rng_key=gpu.KEY, estimator=estimator, num_steps=200, **options
        )
    loop.run_chunk = run
    return run, tuple(arguments)


def programs(name: str) -> Iterator[tuple[str, Any, tuple, tuple]]:
    """Yield the label of a program, its function, static and other arguments."""
    graph, params = cases.rbm()
    v, h = gpu.bits(ROWS, 784), gpu.bits(ROWS, 500)
    pair = random.key_pair(gpu.KEY)
    if name == "gibbs":
        kernel = ebmpp.BlockedGibbs(graph)
        keys = jax.random.key_data(jax.random.split(gpu.KEY, ROWS))
        state = kernel.init(keys, 0, {"v": v, "h": h}, (params,), {})

        def sweeps(state, params):
            def body(_, s):
                return kernel.sample(s, (params,), {})

            return jax.lax.fori_loop(0, gpu.SWEEPS, body, state).z

        yield "Gibbs sweeps", jax.jit(sweeps), (), (state, params)
        hand = jax.jit(lambda *args: by_hand.gibbs(*args, gpu.SWEEPS))
        yield "Gibbs sweeps by hand", hand, (), (params, v, h, pair)
    elif name == "gradient":

        def gradient(params, v, key):
            batch = Batch.uniform({"v": v})
            return ebmpp.CD().estimate(graph, params, (), batch, key).gradient

        yield "CD-1 gradient", jax.jit(gradient), (), (params, v, pair)
        hand = jax.jit(by_hand.cd_gradient)
        yield "CD-1 gradient by hand", hand, (), (params, v, pair)
    elif name in ("cd", "pcd"):
        estimator = ebmpp.CD() if name == "cd" else ebmpp.PCD(num_chains=ROWS)
        run, (program, *arguments) = chunk(estimator)
        yield f"steps of fit, {name}", run, (program,), tuple(arguments)
    elif name == "hand":
        run = gpu.pcd_by_hand(ROWS, 50)
        yield "PCD-1 steps by hand", run, (), (params["v:h"], v, v)
    else:
        first = jnp.int32(1)
        window = Window(first, first, first, jnp.int32(0))
        start = {"v": v, "h": h}
        moves = resolve_moves(graph, None)

        def gradient_of_pairs(target, start, key, window):
            sums = EnergyGradient()
            return run_pairs(target, moves, sums, None, start, start, key, window)

        arguments = (Target(graph, params), start, pair, window)
        yield "coupled pairs", jax.jit(gradient_of_pairs), (), arguments


def main(names: list[str]) -> None:
    """Compile and count."""
    jax.devices()  # registers the platform
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=DEVICE, topology="1x1x1"
    )
    mesh = Mesh(np.array(topology.devices), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def describe(a: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(a), jnp.result_type(a), sharding=sharding)

    for name in names:
        for label, run, static, arguments in programs(name):
            on_host = backend.accelerated
            backend.accelerated = lambda: True
            with jax.default_matmul_precision("highest"):
                lowered = run.lower(*static, *jax.tree.map(describe, arguments))
            backend.accelerated = on_host
            print(f"== {label}")
            report(lowered.compile().as_text())


if __name__ == "__main__":
    main(sys.argv[1:])
