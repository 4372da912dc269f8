# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Long runs that stop and go on: bit by bit the same, or refused with a reason."""

import os
import shutil
import signal

from gibbs_tools import PARAMS, RBM
from long_run_tools import KERNEL, KEY, START, assert_same, chains, corner, longest, run, start
import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import BlockedGibbs, ParallelTempering
from ebmpp.errors import ArgumentError, CheckpointError
from ebmpp.kernels import LongRun
from helpers import often


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped."""
    return run(tmp_path_factory.mktemp("whole"))


class Stopped(Exception):
    pass


def stop_at(monkeypatch, calls, name="replace"):
    """From this call on nothing is written: as if the process had ended there."""
    real, seen = getattr(os, name), []

    def stop(*given):
        seen.append(given)
        if len(seen) >= calls:
            raise Stopped
        return real(*given)

    monkeypatch.setattr(os, name, stop)


#: Files are put in their places in this order: the marker, then draws and a checkpoint of each of steps 20,
#: 40, 60 and 67.
@pytest.mark.parametrize("calls", range(1, 10))
def test_a_stopped_run_is_the_run_that_never_stopped(calls, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_at(patched, calls)
        with pytest.raises(Stopped):
            run(tmp_path)
    assert_same(run(tmp_path, resume=True), whole)
    assert_same(run(tmp_path, resume=True), whole)  # nothing is left to do


def test_files_are_those_of_the_run_that_never_stopped(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_at(patched, 6)
        with pytest.raises(Stopped):
            run(tmp_path)
    run(tmp_path, resume=True)
    names = lambda folder: sorted(path.name for path in folder.iterdir())
    assert names(tmp_path) == names(whole.directory)
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]


@pytest.mark.parametrize("calls", [6, 7])
def test_a_killed_process_costs_what_came_after_its_checkpoint(calls, whole, tmp_path):
    killed = start(tmp_path, calls)
    assert killed.wait(timeout=300) == -signal.SIGKILL
    assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]  # what it was writing
    assert_same(run(tmp_path, resume=True), whole)


def test_a_run_may_be_made_longer(whole, tmp_path):
    run(tmp_path, draws=30)
    assert_same(run(tmp_path, resume=True), whole)
    default = LongRun(chains(draws=30), directory=tmp_path / "default").run(KEY, PARAMS)
    again = LongRun(chains(), directory=tmp_path / "default", resume=True).run(KEY, PARAMS)
    fives = LongRun(chains(), batch_length=5).run(KEY, PARAMS)  # the batches that it had: of the root of 30
    assert default.num_draws == 30
    np.testing.assert_array_equal(again.moments.mcse_batches["v"], fives.moments.mcse_batches["v"])
    with pytest.raises(CheckpointError, match="holds 67 steps, and this run has 37: give MCMC's num_samples"):
        run(tmp_path, draws=30, resume=True)


def test_where_checkpoints_are_made_changes_nothing(whole, tmp_path):
    made = run(tmp_path, every=7)
    first, second = (run(tmp_path / str(n), every=n) for n in (1000, 33))
    for other in (made, first, second):
        assert_same(other, whole)
    bare = run()
    jax.tree.map(np.testing.assert_array_equal, vars(bare.moments), vars(whole.moments))


@pytest.mark.parametrize("method", often(["sequential", jax.vmap, "parallel"], jax.vmap))
def test_other_kernels_go_on_too(tmp_path, method):
    make = lambda draws: chains(ParallelTempering(RBM), draws=draws, count=2, chain_method=method)
    options = {"directory": tmp_path, "keep": True, "every": 11}
    LongRun(make(12), **options).run(KEY, PARAMS)
    again = LongRun(make(30), **options, resume=True, batch_length=3).run(KEY, PARAMS)
    straight = LongRun(make(30), batch_length=3).run(KEY, PARAMS)
    for field in ("mean", "variance", "mcse_batches"):
        first, second = (getattr(m.moments, field)["v"] for m in (again, straight))
        np.testing.assert_array_equal(first, second)


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of the folder of the whole run."""
    shutil.copytree(whole.directory, tmp_path / "run")
    return tmp_path / "run"


def test_a_damaged_checkpoint_is_told_and_one_before_it_taken(folder, whole):
    newest = folder / "checkpoint-000067.zip"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="checkpoint 67 in .* is damaged"):
        assert_same(run(folder, resume=True), whole)


def test_draws_that_are_gone_are_told_before_a_run_goes_on(folder):
    (folder / "draws-000000004-000000011.nc").unlink()
    with pytest.raises(CheckpointError, match="lacks the file of draws 4 and after"):
        run(folder, resume=True)


def test_a_disk_that_is_full_costs_nothing_that_was_there(whole, tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    real = ebmpp.core.archive.write_beside
    with monkeypatch.context() as patched:
        written = []
        once = lambda *given: full() if written else written.append(real(*given))
        patched.setattr("ebmpp.core.archive.write_beside", once)
        with pytest.raises(CheckpointError, match="checkpoint 40 cannot be written in .*: .*No space left"):
            run(tmp_path)
    assert_same(run(tmp_path, resume=True), whole)


# -- refusals --------------------------------------------------------------------------------------


def test_a_folder_in_use_or_used_is_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match="holds checkpoints of steps .*: pass resume=True"):
        run(folder)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "draws-000000000-000000004.nc").write_bytes(b"somebody's")
    with pytest.raises(CheckpointError, match="no run of ebmpp is known to have written it"):
        run(foreign)
    assert (foreign / "draws-000000000-000000004.nc").read_bytes() == b"somebody's"
    with pytest.raises(ArgumentError, match="LongRun: directory is a path, not 3"):
        run(3)


def test_a_folder_of_fit_is_refused(tmp_path):
    data, options = np.eye(4), {"num_steps": 2, "progress_bar": False, "estimator": ebmpp.CD()}
    ebmpp.fit(RBM, data, rng_key=KEY, checkpoint_dir=tmp_path, **options)
    with pytest.raises(CheckpointError, match="says 'ebmpp checkpoint', .* reads 'ebmpp long run'"):
        run(tmp_path, resume=True)
    run(tmp_path / "long")
    with pytest.raises(CheckpointError, match="says 'ebmpp long run', .* reads 'ebmpp checkpoint'"):
        ebmpp.fit(RBM, data, rng_key=KEY, checkpoint_dir=tmp_path / "long", resume=True, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": ParallelTempering(RBM)}, "kernel: .*BlockedGibbs.* there, .*ParallelTempering.* here"),
        ({"kernel": BlockedGibbs(RBM, init="local_mode")}, "kernel: .* there"),
        ({"params": PARAMS | {"v": jnp.ones(4)}}, "arguments: .* there"),
        ({"h": np.ones(3)}, "arguments: .* there"),
        ({"key": jax.random.key(6)}, "rng_key: .* there"),
        ({"extra_fields": ()}, "fields: .*'i'.* there, .* here"),
        ({"init_params": {"v": np.ones((3, 4))}}, "init_params: None there"),
        ({"num_warmup": 8}, "num_warmup: 7 there, 8 here"),
        ({"count": 2}, "num_chains: 3 there, 2 here"),
        ({"thinning": 2}, "thinning: 3 there, 2 here"),
        ({"chain_method": jax.vmap}, "chain_method: 'vectorized' there"),
        ({"fn": lambda z: z["v"]}, "fn: .* there"),
        ({"covariance": None}, "covariance: .* there, None here"),
        ({"fold": (START, lambda carry, z: carry)}, "fold: .* there"),
        ({"keep": ["v"]}, r"keep: True there, \['v'\] here"),
        ({"batch_length": 9}, "holds a run of batch_length 8, and this one has 9: give batch_length=8"),
    ],
)
def test_another_run_is_refused(change, message, folder):
    before = sorted(path.name for path in folder.iterdir())
    of_chains = ("kernel", "num_warmup", "count", "thinning", "chain_method")
    of_call = ("init_params", "extra_fields", "h")
    mcmc = chains(**{n: v for n, v in change.items() if n in of_chains})
    options = {"covariance": corner, "fold": (START, longest), "batch_length": 8, "keep": True}
    options |= {n: v for n, v in change.items() if n in ("fn", "fold", *options)}
    call = {"extra_fields": ("i",)} | {n: v for n, v in change.items() if n in of_call}
    long = LongRun(mcmc, **options, directory=folder, every=20, resume=True)
    with pytest.raises(CheckpointError, match=message):
        long.run(change.get("key", KEY), change.get("params", PARAMS), **call)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_other_floats_are_refused(folder):
    with (
        jax.enable_x64(True),
        pytest.raises(CheckpointError, match="other shapes or dtypes than the kernel's"),
    ):
        run(folder, resume=True)


def test_an_equal_kernel_is_the_same_run(whole, folder):
    equal = BlockedGibbs(RBM)
    options = {"covariance": corner, "fold": (START, longest), "batch_length": 8, "keep": True}
    long = LongRun(chains(equal), **options, directory=folder, every=20, resume=True)
    assert_same(long.run(KEY, PARAMS, extra_fields=("i",)), whole)
    assert equal is not KERNEL
