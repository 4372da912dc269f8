# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training on eight devices, and by two processes, equals training on one device up to rounding."""

import json
import os
from pathlib import Path
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from training_tools import Recorder
import two_processes
import zoo

import jax
from jax.sharding import Mesh, PartitionSpec as P
import optax

import ebmpp
from ebmpp.estimators.base import Estimate

pytestmark = pytest.mark.nightly

DATA = two_processes.DATA
MISSING = ebmpp.Observed(DATA, np.random.default_rng(0).random(DATA.shape) < 0.8)
ESTIMATORS = {
    "ucd": ebmpp.UCD(),
    "pcd": ebmpp.PCD(num_chains=60),  # not a multiple of 8
    "weighted": ebmpp.WeightedPCD(num_chains=64, num_watchers=80),
    "particles": ebmpp.ParticleUCD(num_particles=50, num_pairs=2),
}


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("rows",))


def train(mesh: Mesh | None, data: Any = DATA, **options: Any) -> ebmpp.FitResult:
    defaults = {
        "rng_key": zoo.KEY,
        "batch_size": 60,
        "mesh": mesh,
        "progress_bar": False,
    }
    if "schedule" not in options:
        defaults |= {"num_steps": 6, "optimizer": optax.sgd(0.5)}
    return ebmpp.fit(two_processes.graph(), data, **defaults | options)


def assert_close(a: ebmpp.FitResult, b: ebmpp.FitResult) -> None:
    for name in a.history:
        rtol = 0.0 if "meeting" in name or name in ("k", "m", "lag") else 1e-3
        np.testing.assert_allclose(
            a.history[name], b.history[name], rtol=rtol, err_msg=name
        )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4),
        a.params,
        b.params,
    )


@pytest.mark.parametrize("name", [*ESTIMATORS, "missing"])
def test_a_run_on_eight_devices_is_that_of_one(name: str) -> None:
    data, estimator = (
        MISSING if name == "missing" else DATA,
        ESTIMATORS.get(name, ebmpp.UCD()),
    )
    single, sharded = (
        train(mesh, data, estimator=estimator) for mesh in (None, mesh_of(8))
    )
    assert_close(sharded, single)


def test_chains_of_the_next_stage_are_sharded_again() -> None:
    estimators = [ebmpp.PCD(num_chains=count) for count in (60, 64)]
    stages = [
        ebmpp.Stage(num_steps=3, estimator=e, optimizer=optax.sgd(0.5))
        for e in estimators
    ]
    single, sharded = (train(mesh, schedule=stages) for mesh in (None, mesh_of(8)))
    assert_close(sharded, single)
    assert sharded.estimator_state["v"].sharding.spec == P("rows")


def test_a_run_resumes_on_its_devices(tmp_path: Path) -> None:
    options = {"estimator": ebmpp.PCD(num_chains=64), "keep_path": True}
    uninterrupted = train(mesh_of(8), **options)
    options |= {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    train(mesh_of(8), **options, num_steps=4)
    resumed = train(mesh_of(8), **options, resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, uninterrupted.params)
    assert resumed.estimator_state["v"].sharding.spec == P("rows")
    jax.tree.map(
        np.testing.assert_array_equal, resumed.path.knots, uninterrupted.path.knots
    )


def test_a_run_continues_on_its_devices() -> None:
    options = {"estimator": ebmpp.PCD(num_chains=64), "optimizer": optax.adam(0.1)}
    first = train(mesh_of(8), **options, num_steps=4)
    second = train(mesh_of(8), **options, num_steps=2, start=first)
    jax.tree.map(
        np.testing.assert_array_equal,
        second.params,
        train(mesh_of(8), **options).params,
    )
    assert second.estimator_state["v"].sharding.spec == P("rows")
    assert (
        train(
            mesh_of(8), **options | {"num_steps": None, "max_seconds": 1e-9}
        ).num_steps
        == 1
    )
    assert train(None, **options, num_steps=2, start=second).num_steps == 8


def test_each_device_has_its_rows_of_a_batch() -> None:
    shapes = []

    class Inspector(Recorder):
        def estimate(
            self, graph: Any, params: Any, state: Any, batch: Any, key: Any
        ) -> Estimate:
            shape = batch.rows["v"].shape
            report = lambda sharding: shapes.append(sharding.shard_shape(shape))
            jax.debug.inspect_array_sharding(batch.rows["v"], callback=report)
            return Estimate(params, state, {})

    train(mesh_of(8), estimator=Inspector(), batch_size=64, num_steps=2)
    assert set(shapes) == {(8, 9)}


def run_both(directory: Path, *parts: str) -> list[dict[str, Any]]:
    """Run parts of `two_processes.py` in two processes of two devices, and return their reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = {
        "env": os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        "text": True,
    }
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = lambda i: [
        sys.executable,
        two_processes.__file__,
        str(i),
        port,
        str(directory),
        *parts,
    ]
    processes = [subprocess.Popen(command(i), **options) for i in range(2)]
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, error) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, error[-4000:]
    return [
        {**json.loads(out.splitlines()[-1]), "stderr": error} for out, error in outputs
    ]


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    first, second = run_both(tmp_path, "train", "resume", "errors")
    assert first["same"] == second["same"] and len(first["same"]) == 5
    assert first["resumed"] == first["same"]["pcd"]
    # one progress bar
    assert "training" in first["stderr"] and "training" not in second["stderr"]
    assert "process 1" in first["errors"]["data"] and "'v'" in second["errors"]["data"]
    assert (
        "process 1" in first["errors"]["stream"]
        and "batch 3" in second["errors"]["stream"]
    )
    assert (
        "multiple" in first["errors"]["batch"]
        and "the first of 2" in second["errors"]["checkpoints"]
    )
    single = train(mesh_of(4), estimator=ebmpp.UCD(), batch_size=len(DATA), num_steps=4)
    for name, values in first["history"].items():
        np.testing.assert_allclose(
            single.history[name], values, rtol=1e-4, err_msg=name
        )


def test_two_processes_sample_like_one(tmp_path: Path) -> None:
    first, second = run_both(tmp_path, "sample")
    assert "Warning" not in first["stderr"] + second["stderr"]
    assert first["same"] == second["same"] and len(first["same"]) == 4
    options = {"rng_key": jax.random.key(2), "num_pairs": 20}
    params = two_processes.params()
    est = ebmpp.unbiased_expectation(
        two_processes.graph(), params, lambda x: x["v"], **options
    )
    np.testing.assert_array_equal(est.meeting_time, first["meeting_time"])
    assert est.meeting_time.max() > 3  # pairs meet at different times
