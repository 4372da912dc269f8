# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training on many devices, and by two processes: the run that one device makes, but for rounding."""

import json
import os
from pathlib import Path
import re
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import two_processes

import jax
from jax.sharding import Mesh, PartitionSpec as P
import optax

import ebmpp
from ebmpp.core import random, sharding
from ebmpp.training.steps import estimate_step
from helpers import often

RBM = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
DATA = np.tile(ebmpp.data.bars_and_stripes(3), (8, 1))
MISSING = ebmpp.Observed(DATA, np.random.default_rng(0).random(DATA.shape) < 0.8)
ESTIMATORS = {
    "ucd": ebmpp.UCD(),
    "pcd": ebmpp.PCD(num_chains=60),  # 8 do not divide them
    "weighted": ebmpp.WeightedPCD(num_chains=64, num_watchers=80),
    "particles": ebmpp.ParticleUCD(num_particles=50, num_pairs=2),
}


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("rows",))


def trained(mesh: Mesh | None, estimator: Any, data: Any = DATA, **options: Any) -> ebmpp.Fit:
    options = {"num_steps": 6, "batch_size": 60, "progress_bar": False, **options}
    sgd = optax.sgd(0.5)
    key = jax.random.key(0)
    return ebmpp.fit(RBM, data, rng_key=key, estimator=estimator, optimizer=sgd, mesh=mesh, **options)


def same(a: ebmpp.Fit, b: ebmpp.Fit) -> None:
    for name in a.history:
        loose = 0.0 if "meeting" in name or name in ("k", "m", "lag") else 1e-3
        np.testing.assert_allclose(a.history[name], b.history[name], rtol=loose, err_msg=name)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), a.params, b.params)


@pytest.mark.parametrize("name", often(ESTIMATORS, "ucd", "pcd"))
def test_a_run_on_many_devices_is_that_of_one(name: str) -> None:
    one, many = trained(None, ESTIMATORS[name]), trained(mesh_of(8), ESTIMATORS[name])
    same(many, one)
    if name == "pcd":
        np.testing.assert_array_equal(many.estimator_state["v"], one.estimator_state["v"])


def test_chains_that_go_on_to_a_stage_are_cut_over_devices_again() -> None:
    options = {"rng_key": jax.random.key(0), "batch_size": 60, "progress_bar": False}
    chains = (ebmpp.PCD(num_chains=count) for count in (60, 64))
    stages = [ebmpp.Stage(num_steps=3, estimator=each, optimizer=optax.sgd(0.5)) for each in chains]
    one, many = (ebmpp.fit(RBM, DATA, schedule=stages, mesh=m, **options) for m in (None, mesh_of(8)))
    same(many, one)
    np.testing.assert_array_equal(many.estimator_state["v"], one.estimator_state["v"])
    assert many.estimator_state["v"].sharding.spec == P("rows")


@pytest.mark.parametrize("name", often(ESTIMATORS, "weighted"))
def test_a_state_is_where_its_step_leaves_it(name: str) -> None:
    """Else the second step on many devices is compiled for others than the first."""
    estimator, mesh = ESTIMATORS[name], mesh_of(4)
    trained(mesh, estimator, num_steps=1)
    program = estimate_step._program((RBM, estimator))
    count = program._cache_size()
    trained(mesh, estimator, num_steps=3)
    assert program._cache_size() == count > 0


@pytest.mark.slow
def test_missing_entries_on_many_devices() -> None:
    same(trained(mesh_of(4), ebmpp.UCD(), MISSING), trained(None, ebmpp.UCD(), MISSING))


@pytest.mark.slow
def test_a_run_resumes_on_its_devices(tmp_path: Path) -> None:
    estimator, mesh = ebmpp.PCD(num_chains=64), mesh_of(8)
    whole = trained(mesh, estimator, keep_path=True)
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "keep_path": True}
    trained(mesh, estimator, num_steps=4, **options)
    resumed = trained(mesh, estimator, resume=True, **options)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    assert resumed.estimator_state["v"].sharding.spec == P("rows")
    jax.tree.map(np.testing.assert_array_equal, resumed.path.knots, whole.path.knots)


def test_each_device_makes_the_products_of_its_rows() -> None:
    estimator, key = ebmpp.CD(), random.key_pair(jax.random.key(0))
    params, rows = RBM.init(jax.random.key(0)), {"v": np.float32(DATA[:64])}
    with sharding.over("mesh", mesh_of(8)):
        program = estimate_step._program((RBM, estimator))  # what `fit` runs
        index = np.arange(64, dtype=np.int32)
        text = program.lower(params, (), rows, index, key, np.uint32(0)).compile().as_text()
    products = re.findall(r"= f32\[([\d,]*)\]\S* dot\(", text)
    assert products
    assert not any("64" in dims.split(",") for dims in products)


# -- two processes ---------------------------------------------------------------------------------

PROGRAM = Path(two_processes.__file__)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def together(folder: Path, *parts: str) -> list[dict[str, Any]]:
    """What each of two processes of two devices tells of parts of :data:`PROGRAM`."""
    port, environment = str(_free_port()), dict(os.environ)
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    command = [sys.executable, str(PROGRAM), port, str(folder), *parts]
    running = [
        subprocess.Popen(
            [*command[:2], str(i), *command[2:]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    told = [process.communicate(timeout=300) for process in running]
    for process, (_, error) in zip(running, told, strict=True):
        assert process.returncode == 0, error[-4000:]
    return [{**json.loads(out.splitlines()[-1]), "stderr": error} for out, error in told]


def test_two_processes_make_the_run_of_one(tmp_path: Path) -> None:
    first, second = together(tmp_path, "train", "resume", "errors")
    assert first["same"] == second["same"] and len(first["same"]) == 5
    assert first["resumed"] == first["same"]["pcd"]
    assert "training" in first["stderr"] and "training" not in second["stderr"]  # one progress bar
    assert "data of process 1 are wrong" in first["errors"]["data"]
    assert "block 'v'" in second["errors"]["data"]
    assert "data of process 1 are wrong" in first["errors"]["stream"]
    assert "ended before batch 3" in second["errors"]["stream"]
    assert "multiple of their number" in first["errors"]["batch"]
    assert "holds checkpoints of steps" in first["errors"]["checkpoints"]
    assert "the first of 2 processes" in second["errors"]["checkpoints"]

    one = trained(mesh_of(4), ebmpp.UCD(), batch_size=len(DATA), num_steps=4)
    for name, values in first["history"].items():
        np.testing.assert_allclose(one.history[name], values, rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_two_processes_sample_what_one_does(tmp_path: Path) -> None:
    first, second = together(tmp_path, "sample")
    assert first["same"] == second["same"] and len(first["same"]) == 4
    params, key = two_processes.params(), jax.random.key(2)
    est = ebmpp.unbiased_expectation(RBM, params, lambda x: x["v"], rng_key=key, num_pairs=20)
    np.testing.assert_array_equal(est.meeting_time, first["meeting_time"])
    assert est.meeting_time.max() > 3  # not all at once
