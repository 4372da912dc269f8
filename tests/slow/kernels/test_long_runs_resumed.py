# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Long runs that stop and resume: bit by bit the same, or refused."""

import os
import shutil
import signal

from long_run_tools import assert_same_run, chains, kernel, run, start_killed_run
from mcmc_tools import strong_params
import numpy as np
import pytest
import zoo

import jax

from ebmpp import BlockedGibbs, ParallelTempering
from ebmpp.errors import CheckpointError
from ebmpp.kernels import LongRun
from ebmpp.kernels.draw_file import DrawFile


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A run that was never stopped."""
    return run(tmp_path_factory.mktemp("complete"))


@pytest.fixture
def folder(complete, tmp_path):
    """A copy of its directory."""
    shutil.copytree(complete.directory, tmp_path / "run")
    return tmp_path / "run"


class Stopped(Exception):
    pass


# Files are renamed in this order: the marker, checkpoints of steps 27, 45 and 60, the complete draws.
@pytest.mark.parametrize("calls", range(1, 6))
def test_a_stopped_run_resumes_bit_by_bit(calls, complete, tmp_path, monkeypatch):
    replace, count = os.replace, iter(range(1, 100))

    def replace_or_stop(*args):
        if next(count) >= calls:
            raise Stopped
        replace(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace_or_stop)
        with pytest.raises(Stopped):
            run(tmp_path)
    assert_same_run(run(tmp_path, resume=True), complete)
    assert_same_run(run(tmp_path, resume=True), complete)  # nothing is left to do
    names = lambda directory: sorted(path.name for path in directory.iterdir())
    assert names(tmp_path) == names(complete.directory)


def test_a_killed_process_resumes_bit_by_bit(complete, tmp_path):
    assert start_killed_run(tmp_path, 3).wait(timeout=300) == -signal.SIGKILL
    assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]  # what it was writing
    assert_same_run(run(tmp_path, resume=True), complete)


def test_a_run_can_be_extended_but_not_shortened(complete, tmp_path):
    run(tmp_path, draws=30)
    assert_same_run(run(tmp_path, resume=True), complete)
    with pytest.raises(CheckpointError, match="60 steps.*30"):
        run(tmp_path, draws=30, resume=True)


@pytest.mark.parametrize("every", [1, 33, 1000])
def test_the_interval_of_checkpoints_changes_nothing(every, complete, tmp_path):
    assert_same_run(run(tmp_path, every=every), complete)


# -- damage ----------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(folder, complete):
    newest = folder / "checkpoint-000060.zip"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="checkpoint 60.*damaged"):
        assert_same_run(run(folder, resume=True), complete)


def test_a_full_disk_damages_nothing(complete, tmp_path, monkeypatch):
    write, written = DrawFile.write, []

    def write_once(*args):
        if written:
            raise OSError(28, "No space left on device")
        written.append(write(*args))

    with monkeypatch.context() as patched:
        patched.setattr(DrawFile, "write", write_once)
        with pytest.raises(CheckpointError, match="No space left"):
            run(tmp_path)
    assert_same_run(run(tmp_path, resume=True), complete)


# -- refusals --------------------------------------------------------------------------------------


def test_a_directory_in_use_is_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match="resume=True"):
        run(folder)
    foreign = tmp_path / "foreign" / "draws.nc"
    foreign.parent.mkdir()
    foreign.write_bytes(b"other data")
    with pytest.raises(CheckpointError, match=foreign.name):
        run(foreign.parent)
    assert foreign.read_bytes() == b"other data"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"some_kernel": "tempering"}, "kernel: .*BlockedGibbs.*ParallelTempering"),
        ({"params": {"v": np.ones(4, np.float32)}}, "arguments"),
        ({"key": jax.random.key(6)}, "rng_key"),
        ({"num_warmup": 8}, "num_warmup: 7 there, 8 here"),
        ({"chain_method": jax.vmap}, "chain_method"),
        ({"fn": lambda z: z["v"]}, "fn"),
        ({"keep": ["v"]}, "keep"),
        ({"batch_length": 12}, "batch_length"),
        ({}, None),
    ],
)
def test_only_the_same_run_resumes(change, message, folder, complete):
    pick = lambda *names: {n: v for n, v in change.items() if n in names}
    options = pick("num_warmup", "chain_method")
    equal = ParallelTempering(zoo.graph("rbm")) if "some_kernel" in change else BlockedGibbs(zoo.graph("rbm"))
    assert equal is not kernel()
    long = {"batch_length": 9, "keep": True} | pick("fn", "batch_length", "keep")
    call = {"extra_fields": ("i",)} | pick("extra_fields")
    before = sorted(path.name for path in folder.iterdir())
    resumed = LongRun(chains(equal, **options), **long, directory=folder, every=20, resume=True)
    args = change.get("key", zoo.KEY), strong_params() | change.get("params", {})
    if message is None:
        assert_same_run(resumed.run(*args, **call), complete)
        return
    with pytest.raises(CheckpointError, match=message):
        resumed.run(*args, **call)
    assert sorted(path.name for path in folder.iterdir()) == before
