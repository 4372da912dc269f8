# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""One of two processes that train together: `two_processes.py NUMBER PORT DIRECTORY
PART...` prints JSON."""

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
def graph() -> ebmpp.FactorGraph:
    """Declare the model, once all devices are there."""
    return ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))


def params() -> Any:
    """Params under which pairs meet late."""
    draw = lambda name, shape: (
        1.5 * np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
    )
    return {"v": draw("v", 9), "h": draw("h", 4), "v:h": draw("v:h", (9, 4))}


class Process:
    """The parts of one process, and its report."""

    def __init__(self, number: int, directory: Path) -> None:
        self.mesh = jax.make_mesh((4,), ("rows",))
        half = len(DATA) // 2
        self.number, self.directory, self.rows = (
            number,
            directory,
            DATA[number * half :][:half],
        )
        self.report: dict[str, Any] = {"same": {}, "errors": {}}

    def fit(self, estimator: Any, data: Any = None, **options: Any) -> ebmpp.FitResult:
        options = {
            "num_steps": 4,
            "batch_size": len(DATA),
            "progress_bar": False,
            **options,
        }
        options |= {
            "estimator": estimator,
            "optimizer": optax.sgd(0.5),
            "mesh": self.mesh,
        }
        return ebmpp.fit(
            graph(),
            self.rows if data is None else data,
            rng_key=jax.random.key(0),
            **options,
        )

    def train(self) -> None:
        fit = self.fit(ebmpp.UCD(), progress_bar=True)
        weights = np.arange(1.0, 1 + len(self.rows)) + self.number
        stream = lambda: iter(np.split(self.rows, 4) * 2)
        self.report["history"] = {
            name: v.values.tolist() for name, v in fit.history.items()
        }
        self.report["same"] |= {
            "ucd": hash_of(fit),
            "small": hash_of(self.fit(ebmpp.PCD(num_chains=16), batch_size=8)),
            "weighted": hash_of(self.fit(ebmpp.CD(), weights=weights)),
            "stream": hash_of(self.fit(ebmpp.CD(), stream, batch_size=None)),
        }

    def resume(self) -> None:
        pcd = ebmpp.PCD(num_chains=16)
        self.report["same"]["pcd"] = hash_of(self.fit(pcd))
        options = {"checkpoint_dir": self.directory / "run", "checkpoint_every": 1}
        self.fit(pcd, num_steps=2, **options)
        self.report["resumed"] = hash_of(self.fit(pcd, resume=True, **options))

    def sample(self) -> None:
        options = {"rng_key": jax.random.key(2), "mesh": self.mesh}
        est = ebmpp.unbiased_expectation(
            graph(), params(), lambda x: x["v"], num_pairs=20, **options
        )
        self.report["meeting_time"] = est.meeting_time.tolist()
        smc = ebmpp.smc(graph(), params(), num_particles=200, **options)
        ais = ebmpp.ais(
            graph(), params(), num_particles=80, num_temperatures=150, **options
        )
        systems = ebmpp.particle_expectation(
            graph(),
            params(),
            lambda x: x["v"].mean(),
            num_particles=20,
            num_pairs=5,
            **options,
        )
        values = {
            "value": est.value,
            "smc": smc.log_partition,
            "ais": ais.log_partition,
            "systems": systems.value,
        }
        self.report["same"] |= {
            name: np.asarray(value).tolist() for name, value in values.items()
        }

    def errors(self) -> None:
        def short_stream() -> Iterator[np.ndarray]:
            """Yield batches, of which the second process has too few."""
            return iter(np.split(self.rows, 4)[: 4 - self.number])

        cd = ebmpp.CD()
        self.expect_error("data", lambda: self.fit(cd, self.rows + 5 * self.number))
        self.expect_error("stream", lambda: self.fit(cd, short_stream, batch_size=None))
        self.expect_error("batch", lambda: self.fit(cd, batch_size=7))
        self.expect_error(
            "checkpoints", lambda: self.fit(cd, checkpoint_dir=self.directory / "run")
        )

    def expect_error(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self.report["errors"][name] = str(error)


def hash_of(fit: ebmpp.FitResult) -> str:
    """Return a hash of the last params and estimator state."""
    leaves = sharding.to_host(jax.tree.leaves((fit.params, fit.estimator_state)))
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def main(argv: Sequence[str]) -> None:
    """Run the parts and print the report."""
    number, port, directory, *parts = argv
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
    process = Process(int(number), Path(directory))
    for part in parts:
        getattr(process, part)()
    print(json.dumps(process.report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
