# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""One of two processes that train together: ``two_processes.py NUMBER PORT FOLDER PART...``; tells JSON."""

from collections.abc import Callable
import hashlib
import json
from pathlib import Path
import sys
from typing import Any

import numpy as np

import jax
import optax

NUMBER, PORT, FOLDER, PARTS = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, NUMBER)  # before anything else asks for a device

import ebmpp  # noqa: E402
from ebmpp.core import sharding  # noqa: E402

MESH = jax.make_mesh((4,), ("rows",))
RBM = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
DATA = np.tile(ebmpp.data.bars_and_stripes(3), (8, 1))
PART = DATA[NUMBER * len(DATA) // 2 :][: len(DATA) // 2]
told: dict[str, Any] = {"same": {}, "errors": {}}


def trained(estimator: Any, data: Any = PART, **options: Any) -> ebmpp.Fit:
    options = {"num_steps": 4, "batch_size": len(DATA), "progress_bar": False, **options}
    sgd, key = optax.sgd(0.5), jax.random.key(0)
    return ebmpp.fit(RBM, data, rng_key=key, estimator=estimator, optimizer=sgd, mesh=MESH, **options)


def hashed(fit: ebmpp.Fit) -> str:
    leaves = sharding.to_host(jax.tree.leaves((fit.params, fit.estimator_state)))
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def failing(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        told["errors"][name] = str(error)


if "train" in PARTS:
    made = trained(ebmpp.UCD(), progress_bar=True)
    told["same"]["ucd"] = hashed(made)
    told["history"] = {name: v.values.tolist() for name, v in made.history.items()}
    told["same"]["small"] = hashed(trained(ebmpp.PCD(num_chains=16), batch_size=8))
    weights = np.arange(1.0, 1 + len(PART)) + NUMBER
    told["same"]["weighted"] = hashed(trained(ebmpp.CD(), weights=weights))
    stream = lambda: iter(np.split(PART, 4) * 2)
    told["same"]["stream"] = hashed(trained(ebmpp.CD(), stream, batch_size=None))
if "resume" in PARTS:
    pcd = ebmpp.PCD(num_chains=16)
    told["same"]["pcd"] = hashed(trained(pcd))
    options = {"checkpoint_dir": FOLDER / "run", "checkpoint_every": 1}
    trained(pcd, num_steps=2, **options)
    told["resumed"] = hashed(trained(pcd, resume=True, **options))
if "sample" in PARTS:
    options = {"rng_key": jax.random.key(2), "mesh": MESH}
    params = jax.tree.map(lambda a: 8 * a, made.params)  # so that pairs meet late
    est = ebmpp.unbiased_expectation(RBM, params, lambda x: x["v"], num_pairs=20, **options)
    told["meeting_time"] = est.meeting_time.tolist()
    told["same"]["value"] = np.asarray(est.value).tolist()
    told["same"]["smc"] = ebmpp.smc(RBM, params, num_particles=60, **options).log_partition
    told["same"]["ais"] = ebmpp.ais(
        RBM, params, num_particles=10, num_temperatures=150, **options
    ).log_partition
    systems = {"num_particles": 10, "num_pairs": 5}
    told["same"]["systems"] = ebmpp.particle_expectation(
        RBM, params, lambda x: x["v"].mean(), **systems, **options
    ).value.tolist()
if "errors" in PARTS:
    failing("data", lambda: trained(ebmpp.CD(), PART + 5 * NUMBER))
    failing("batch", lambda: trained(ebmpp.CD(), batch_size=7))
    failing("checkpoints", lambda: trained(ebmpp.CD(), checkpoint_dir=FOLDER / "run"))
print(json.dumps(told), flush=True)
