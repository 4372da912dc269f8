# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""One of two processes that train together: ``two_processes.py NUMBER PORT FOLDER PART...``; tells JSON."""

from collections.abc import Callable, Iterator, Sequence
import functools
import hashlib
import json
from pathlib import Path
import sys
from typing import Any

import numpy as np

import jax
import optax

import ebmpp
from ebmpp.core import sharding

DATA = np.tile(ebmpp.data.bars_and_stripes(3), (8, 1))


@functools.cache
def machine() -> ebmpp.FactorGraph:
    """Declared once there are all devices: a declaration computes."""
    return ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))


def params() -> Any:
    """Under which pairs meet late."""
    draw = lambda name, shape: 1.5 * np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
    return {"v": draw("v", 9), "h": draw("h", 4), "v:h": draw("v:h", (9, 4))}


class Process:
    """What one of the two does, and what it has to tell."""

    def __init__(self, number: int, folder: Path) -> None:
        self.mesh = jax.make_mesh((4,), ("rows",))
        half = len(DATA) // 2
        self.number, self.folder, self.part = number, folder, DATA[number * half :][:half]
        self.told: dict[str, Any] = {"same": {}, "errors": {}}

    def trained(self, estimator: Any, data: Any = None, **options: Any) -> ebmpp.Fit:
        """A run of both."""
        options = {"num_steps": 4, "batch_size": len(DATA), "progress_bar": False, **options}
        options |= {"estimator": estimator, "optimizer": optax.sgd(0.5), "mesh": self.mesh}
        return ebmpp.fit(machine(), self.part if data is None else data, rng_key=jax.random.key(0), **options)

    def train(self) -> None:
        """Estimators, small batches, weights and streams."""
        made = self.trained(ebmpp.UCD(), progress_bar=True)
        weights = np.arange(1.0, 1 + len(self.part)) + self.number
        stream = lambda: iter(np.split(self.part, 4) * 2)
        self.told["history"] = {name: v.values.tolist() for name, v in made.history.items()}
        self.told["same"] |= {
            "ucd": hashed(made),
            "small": hashed(self.trained(ebmpp.PCD(num_chains=16), batch_size=8)),
            "weighted": hashed(self.trained(ebmpp.CD(), weights=weights)),
            "stream": hashed(self.trained(ebmpp.CD(), stream, batch_size=None)),
        }

    def resume(self) -> None:
        """A run that stops and goes on, beside one that does not."""
        pcd = ebmpp.PCD(num_chains=16)
        self.told["same"]["pcd"] = hashed(self.trained(pcd))
        options = {"checkpoint_dir": self.folder / "run", "checkpoint_every": 1}
        self.trained(pcd, num_steps=2, **options)
        self.told["resumed"] = hashed(self.trained(pcd, resume=True, **options))

    def sample(self) -> None:
        """Pairs, particles, annealing, pairs of systems."""
        options = {"rng_key": jax.random.key(2), "mesh": self.mesh}
        est = ebmpp.unbiased_expectation(machine(), params(), lambda x: x["v"], num_pairs=20, **options)
        self.told["meeting_time"] = est.meeting_time.tolist()
        steps = {"num_particles": 10, "num_temperatures": 150}
        pixel, sizes = lambda x: x["v"].mean(), {"num_particles": 10, "num_pairs": 5}
        systems = ebmpp.particle_expectation(machine(), params(), pixel, **sizes, **options)
        self.told["same"] |= {
            "value": np.asarray(est.value).tolist(),
            "smc": ebmpp.smc(machine(), params(), num_particles=60, **options).log_partition,
            "ais": ebmpp.ais(machine(), params(), **steps, **options).log_partition,
            "systems": systems.value.tolist(),
        }

    def errors(self) -> None:
        """What both are told of."""
        self.failing("data", lambda: self.trained(ebmpp.CD(), self.part + 5 * self.number))
        self.failing("stream", lambda: self.trained(ebmpp.CD(), self.cut, batch_size=None))
        self.failing("batch", lambda: self.trained(ebmpp.CD(), batch_size=7))
        self.failing("checkpoints", lambda: self.trained(ebmpp.CD(), checkpoint_dir=self.folder / "run"))

    def cut(self) -> Iterator[np.ndarray]:
        """Batches, of which the second process has fewer than the run takes."""
        return iter(np.split(self.part, 4)[: 4 - self.number])

    def failing(self, name: str, call: Callable[[], object]) -> None:
        """Keep the words of the error."""
        try:
            call()
        except Exception as error:
            self.told["errors"][name] = str(error)


def hashed(fit: ebmpp.Fit) -> str:
    """Of all that a run ends with."""
    leaves = sharding.to_host(jax.tree.leaves((fit.params, fit.estimator_state)))
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def main(argv: Sequence[str]) -> None:
    """Do the parts, and tell."""
    number, port, folder, *parts = argv
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
    process = Process(int(number), Path(folder))
    each = {
        "train": process.train,
        "resume": process.resume,
        "sample": process.sample,
        "errors": process.errors,
    }
    for part in parts:
        each[part]()
    print(json.dumps(process.told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
