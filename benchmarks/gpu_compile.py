# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of our programs for a GPU, without one: launches a turn of a loop, round trips, bytes, TF32.

Programs are compiled for an H200 that is described and not there (``pip install "jax[cuda13]"``, some 4 GB;
``JAX_PLATFORMS=cpu``). Autotuning needs a device, so products are XLA's default ones, whose launches differ
by a few from what a device would choose. A launch is an instruction of the scheduled program that is neither
free nor a loop; a round trip is a branch or a loop whose number of turns is not known, which the host
decides unless all of it lies inside one CUDA graph.

``python benchmarks/gpu_compile.py`` prints a table and writes ``report/gpu_compile.json``.
"""

import argparse
from collections.abc import Callable, Iterator
import json
import os
from pathlib import Path
import re
import tempfile
import time
from typing import Any, NamedTuple

import nvidia  # of jax[cuda13]

DUMP = tempfile.TemporaryDirectory()
CUDA = str(Path(next(iter(nvidia.__path__))) / "cu13")
os.environ["XLA_FLAGS"] = " ".join(
    [
        f"--xla_gpu_cuda_data_dir={CUDA}",
        "--xla_gpu_autotune_level=0",
        f"--xla_dump_to={DUMP.name}",
        os.environ.get("XLA_FLAGS", ""),
    ]
)
os.environ["PATH"] = f"{CUDA}/bin:{os.environ['PATH']}"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import networkx as nx  # noqa: E402
import numpy as np  # noqa: E402

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402

import ebmpp  # noqa: E402
from ebmpp.core import backend, programs, random  # noqa: E402
from ebmpp.moves.layer import gibbs_sweep  # noqa: E402
from ebmpp.moves.move import draw_sweep  # noqa: E402
from ebmpp.moves.sweeps import resolve_moves  # noqa: E402
from ebmpp.moves.target import Target  # noqa: E402
from ebmpp.sampling.accumulators import EnergyGradient  # noqa: E402
from ebmpp.sampling.engine import run_pairs  # noqa: E402
from ebmpp.sampling.pairs import Fresh, Window  # noqa: E402
from ebmpp.training.steps import estimate_step  # noqa: E402

#: An H200 as XLA wants one described; figures are NVIDIA's.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"}
_FREE |= {"replica-id", "opt-barrier", "async-done", "copy-done"}
_STEP = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([a-z][a-z\-]+)\(")


class Step(NamedTuple):
    """An instruction of a scheduled program."""

    name: str
    text: str


def parsed(text: str) -> dict[str, list[Step]]:
    """The computations of a program; that where it begins is "entry"."""
    made, at = {}, None
    for line in text.splitlines():
        if (head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line)) is not None:
            at = "entry" if head[1] else head[2]
            made[at] = []
        elif line.startswith("}"):
            at = None
        elif at is not None and (step := _STEP.match(line)) is not None:
            made[at].append(Step(step[1], line))
    return made


def launches(steps: list[Step]) -> int:
    """Of one turn, without what is inside loops and branches."""
    inside = ("while", "conditional", "call")
    return sum(step.name not in _FREE and step.name not in inside for step in steps)


def loops(computations: dict[str, list[Step]], at: str = "entry") -> Iterator[dict[str, Any]]:
    """All loops, from the outside in: launches and round trips of a turn, and what they are of."""
    for step in computations[at]:
        named = dict(re.findall(r"(body|condition|to_apply)=%?([\w.\-]+)", step.text))
        if step.name == "while":
            body, known = computations[named["body"]], "known_trip_count" in step.text
            inner = [s for s in body if s.name == "while"]
            yield {
                "launches": launches(body) + launches(computations[named["condition"]]),
                "branches": sum(s.name == "conditional" for s in body),
                "inner loops": len(inner),
                "turns": "known" if known else "found out",
                "of": (re.search(r'op_name="([^"]*)"', step.text) or ["", ""])[1][-60:],
            }
            yield from loops(computations, named["body"])
        elif "to_apply" in named and step.name == "call":
            yield from loops(computations, named["to_apply"])


def device() -> NamedSharding:
    """Where programs are for."""
    jax.devices()  # finds the plug-in
    found = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    return NamedSharding(Mesh(np.array(found.devices), ("devices",)), P())


def shapes(tree: Any, where: NamedSharding) -> Any:
    """Shapes on the device, for lowering."""
    one = lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a), sharding=where)
    return jax.tree.map(one, tree)


def graphs() -> dict[str, int]:
    """Of the program that was compiled last: what the host begins, and how many CUDA graphs are among it."""
    newest = max(Path(DUMP.name).glob("*.thunk_sequence*.txt"), key=lambda path: path.stat().st_mtime_ns)
    outside = [line for line in newest.read_text().splitlines() if re.match(r"\d+: ", line)]
    return {"begun": len(outside), "graphs": sum("kCommandBuffer" in line for line in outside)}


def compiled(lower: Callable[[], Any], loops_in_graphs: bool = False) -> dict[str, Any]:
    """What a program is, from how it is lowered."""
    for old in [path for kind in ("ptx", "txt") for path in Path(DUMP.name).glob(f"*.{kind}")]:
        old.unlink()
    jax.clear_caches()  # cases differ in what no argument tells
    began = time.monotonic()
    made = lower().compile(dict([programs._GRAPHS]) if loops_in_graphs else None)
    seconds = time.monotonic() - began
    text, memory = parsed(made.as_text()), made.memory_analysis()
    ptx = [path.read_text() for path in Path(DUMP.name).glob("*.ptx")]
    return {
        "launches": launches(text["entry"]),
        "loops": list(loops(text)),
        "from the host": graphs(),
        "kernels in tf32": sum("tf32" in each for each in ptx),
        "arguments MB": memory.argument_size_in_bytes / 1e6,
        "temporaries MB": memory.temp_size_in_bytes / 1e6,
        "compile s": seconds,
    }


# -- programs --------------------------------------------------------------------------------------

RBM = ebmpp.layered(v=ebmpp.Bernoulli(784), h=ebmpp.Bernoulli(500))
ISING = lambda: ebmpp.FactorGraph.from_networkx(nx.grid_2d_graph(256, 256, periodic=True), family=ebmpp.Spin)


def params_of(graph: ebmpp.FactorGraph) -> Any:
    """Their shapes."""
    return jax.eval_shape(graph.init, jax.random.key(0))


def engine(where: NamedSharding, jobs: int, num_slots: int | None) -> Any:
    """Coupled pairs of the gradient at 784x500."""
    window = Window(*(np.int32(n) for n in (1, 1, 1, 0)))
    starts = Fresh(jax.ShapeDtypeStruct((jobs, 2), jnp.uint32), {}, "uniform")
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    given = shapes((Target(RBM, params_of(RBM)), starts, key, window), where)
    target, starts, key, window = given
    statics = (resolve_moves(RBM, None), EnergyGradient(), num_slots)
    return run_pairs.lower(target, *statics, starts, None, key, window)


def divergence(where: NamedSharding) -> Any:
    """CD-1 of 1,000 rows at 784x500."""
    rows = {"v": jax.ShapeDtypeStruct((60000, 784), jnp.float32)}
    index, key = jax.ShapeDtypeStruct((1000,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)
    given = shapes((params_of(RBM), (), rows, index, key, jax.ShapeDtypeStruct((), jnp.uint32)), where)
    return estimate_step._program((RBM, ebmpp.CD())).lower(*given)


def persistent(where: NamedSharding) -> Any:
    """PCD-10 of 1,000 rows and chains at 784x500."""
    rows, estimator = {"v": jax.ShapeDtypeStruct((60000, 784), jnp.float32)}, ebmpp.PCD(k=10, num_chains=1000)
    index, key = jax.ShapeDtypeStruct((1000,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)
    chains = {b: jax.ShapeDtypeStruct((1000, *f.shape), f.dtype) for b, f in RBM.families.items()}
    given = shapes((params_of(RBM), chains, rows, index, key, jax.ShapeDtypeStruct((), jnp.uint32)), where)
    return estimate_step._program((RBM, estimator)).lower(*given)


def sweeps(graph: ebmpp.FactorGraph, chains: int, where: NamedSharding) -> Any:
    """Ten Gibbs sweeps of chains."""
    state = {b: jax.ShapeDtypeStruct((chains, *f.shape), f.dtype) for b, f in graph.families.items()}
    keys = jax.ShapeDtypeStruct((chains, 2), jnp.uint32)

    def run(target: Target, x: Any, keys: Any) -> Any:
        one = lambda i, x: draw_sweep(target, x, gibbs_sweep(graph), random.fold_in(keys, i))[0]
        return jax.lax.fori_loop(0, 10, one, x)

    return jax.jit(run).lower(*shapes((Target(graph, params_of(graph)), state, keys), where))


def as_on_a_processor(lower: Callable[[], Any]) -> Callable[[], Any]:
    """With a processor's slots and stages."""

    def call() -> Any:
        backend.accelerated = lambda: False
        try:
            return lower()
        finally:
            backend.accelerated = lambda: True

    return call


def main() -> None:
    """Compile all, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/report/gpu_compile.json"))
    args = parser.parse_args()
    where, told = device(), {}
    backend.accelerated = lambda: True
    cases: dict[str, Callable[[], Any]] = {
        "sweeps 784x500": lambda: sweeps(RBM, 1000, where),
        "CD-1 784x500": lambda: divergence(where),
        "Ising 256x256": lambda: sweeps(ISING(), 16, where),
        "pairs 784x500": lambda: engine(where, 1000, None),
        "pairs 784x500, a processor's slots": as_on_a_processor(lambda: engine(where, 1000, None)),
        "100,000 pairs 784x500": lambda: engine(where, 100_000, None),
        "1,000,000 pairs 784x500": lambda: engine(where, 1_000_000, None),
        "PCD-10 784x500": lambda: persistent(where),
        "pairs 784x500, loops in graphs": lambda: engine(where, 1000, None),
    }
    for name, lower in cases.items():
        if args.only is None or name in args.only:
            told[name] = compiled(lower, "in graphs" in name)
            print(name, json.dumps(told[name], indent=1), flush=True)
    args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
