# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and what goes wrong: kills, other runs, other people's files, damage, and disks that fail."""

import errno
import json
import os
from pathlib import Path
import random
import resource
import shutil
import signal
import time
import warnings

from checkpoint_tools import DATA, RBM, finished, names, run, start
import numpy as np
import pytest
from training_tools import assert_same_run, leaves, numbered

import jax

import ebmpp
from ebmpp.core import archive
from ebmpp.errors import ArgumentError, CheckpointError, CheckpointWriteError, TrainingError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return directory, run(12, directory)


@pytest.fixture
def copied(whole, tmp_path):
    return Path(shutil.copytree(whole[0], tmp_path / "copy")), whole[1]


# -- kills ---------------------------------------------------------------------------------------


def goes_on(directory):
    """A run whose process was killed is the run that never stopped."""
    done = max(finished(directory), default=0)
    assert_same_run(run(done + 6, directory, resume=True), run(done + 6))
    assert not [name for name in names(directory) if name.endswith(".tmp")]


def wait(process, until):
    deadline = time.monotonic() + 300
    while not until() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_second_run_is_refused_and_the_first_one_killed_goes_on(tmp_path):
    process = start(tmp_path)
    try:
        wait(process, lambda: len(finished(tmp_path)) >= 2)
        with pytest.raises(CheckpointError, match=rf"in use by another run \(process {process.pid} on "):
            run(10**6, tmp_path, resume=True)
        before = max(finished(tmp_path))
        wait(process, lambda: max(finished(tmp_path)) > before)
        assert process.poll() is None and max(finished(tmp_path)) > before
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    goes_on(tmp_path)


@pytest.mark.parametrize("die", ["fsync", "replace"])
def test_a_process_killed_inside_a_write_leaves_what_was_there(die, tmp_path):
    process = start(tmp_path, die)
    assert process.wait(300) == -signal.SIGKILL
    assert finished(tmp_path) == [4, 8]
    assert [name for name in names(tmp_path) if name.startswith(".checkpoint-000012.zip.")]
    goes_on(tmp_path)


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path):
    generator, kills = random.Random(0), 0
    for _ in range(12):
        process, before = start(tmp_path), len(names(tmp_path))
        wait(process, lambda: len(names(tmp_path)) > before or finished(tmp_path))
        time.sleep(generator.uniform(0, 6))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        assert finished(tmp_path) or not kills > 3
    assert kills == 12
    goes_on(tmp_path)


# -- other runs and other files ------------------------------------------------------------------


def test_a_run_inside_a_run_is_refused_and_the_first_goes_on(tmp_path):
    told = []

    def another(progress):
        with pytest.raises(CheckpointError, match="in use by another run") as error:
            run(12, tmp_path, resume=True)
        told.append(str(error.value))

    assert_same_run(run(12, tmp_path, callbacks=[another]), run(12))
    assert len(told) == 5 and f"process {os.getpid()}" in told[0]
    run(12, tmp_path, resume=True)  # the lock is given back


def test_other_peoples_files_are_let_alone(tmp_path):
    for name in ("4", "8", "10", "12/deep", "500"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "results.npy").write_text("mine")
    for name in ("4.json", "notes.json", "checkpoint-best.zip", ".checkpoint-4.tmp"):
        (tmp_path / name).write_text('{"mine": 1}')
    there = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run(8, tmp_path)
    assert_same_run(run(20, tmp_path, resume=True), run(20))
    assert {path: path.read_bytes() for path in there} == there
    more = {path.name for path in tmp_path.rglob("*") if path.is_file()} - {path.name for path in there}
    kept = {f"checkpoint-{n:06}.zip" for n in (12, 16, 20)}
    assert more == kept | {"ebmpp-checkpoints.json", "ebmpp-checkpoints.lock"}


def test_files_of_our_names_without_a_marker_are_refused_and_kept(tmp_path):
    (tmp_path / "checkpoint-000500.zip").write_text("mine")
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="'checkpoint-000500.zip' and no ebmpp-checkpoints.json"):
            run(8, tmp_path, resume=resume)
    assert names(tmp_path) == ["checkpoint-000500.zip"]


def test_the_first_format_is_refused_by_name(tmp_path):
    (tmp_path / "500.json").write_text(json.dumps({"body": {}, "digest": ""}))
    (tmp_path / "500").mkdir()
    with pytest.raises(CheckpointError, match="in the format of an earlier ebmpp"):
        run(8, tmp_path, resume=True)
    assert names(tmp_path) == ["500", "500.json"]


def test_a_newer_format_is_refused_by_name(copied):
    (copied[0] / "ebmpp-checkpoints.json").write_text('{"format": "ebmpp checkpoint", "version": 9}')
    with pytest.raises(CheckpointError, match="version 9, and this ebmpp reads .*, version 2"):
        run(12, copied[0], resume=True)


@pytest.mark.parametrize("directory", ["", 3, b"run", "a\0b"])
def test_a_place_is_a_path(directory):
    with pytest.raises(ArgumentError, match="fit: checkpoint_dir is "):
        numbered(checkpoint_dir=directory)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file: give a directory"):
        numbered(checkpoint_dir=tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be used for checkpoints: .*Not a directory"):
        numbered(checkpoint_dir=tmp_path / "file" / "below")


def test_checkpoints_are_not_overwritten(whole):
    with pytest.raises(CheckpointError, match="pass resume=True"):
        run(12, whole[0])


def test_a_run_that_made_no_checkpoint_leaves_the_place_to_another(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(12, tmp_path, callbacks=[lambda progress: 1 / 0])
    assert finished(tmp_path) == []
    run(4, tmp_path, estimator="pcd")


# -- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "renamed"])
def test_a_damaged_checkpoint_is_found_and_the_one_before_is_taken(how, copied):
    directory, made = copied
    broken = directory / "checkpoint-000012.zip"
    data = broken.read_bytes()
    middle = len(data) // 2
    changes = {
        "cut": data[:middle],
        "empty": b"",
        "renamed": (directory / "checkpoint-000004.zip").read_bytes(),
    }
    changes["flipped"] = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    broken.write_bytes(changes[how])
    for _ in range(2):  # a run that stops before it has something better changes nothing
        with (
            pytest.warns(UserWarning, match="checkpoint 12 in .* is damaged"),
            pytest.raises(ZeroDivisionError),
        ):
            run(16, directory, resume=True, callbacks=[lambda progress: 1 / 0])
        assert broken.read_bytes() == changes[how]
    with pytest.warns(UserWarning, match="checkpoint 12 in .* is damaged"):
        assert_same_run(run(12, directory, resume=True), made)
    assert_same_run(run(12, directory, resume=True), made)  # without a warning: it was written again


def test_damage_behind_which_the_run_goes_on_is_swept_up(copied):
    directory, _ = copied
    (directory / "checkpoint-000012.zip").write_bytes(b"")
    given = {"resume": True, "callbacks": [lambda progress: progress.step == 9]}
    with pytest.warns(UserWarning, match="checkpoint 12 in .* is damaged"):
        run(12, directory, **given)
    assert finished(directory) == [4, 8, 9, 12]  # a good one is not given up for a bad one
    with pytest.warns(UserWarning, match="checkpoint 12 in .* is damaged"):
        assert_same_run(run(14, directory, resume=True), run(14))
    assert finished(directory) == [9, 12, 14]


def test_all_damaged_stays_all_damaged(copied):
    directory, _ = copied
    for path in directory.rglob("*"):
        path.write_bytes(b"")
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(CheckpointError, match=r"steps \[12, 8, 4\]\) are damaged; start anew"):
                run(12, directory, resume=True)
    assert finished(directory) == [4, 8, 12]


# -- disks that fail -----------------------------------------------------------------------------


def fail(number):
    def failing(*given, **named):
        raise OSError(number, os.strerror(number))

    return failing


def full_disk(write):
    """No file may be longer than a thousand bytes while a checkpoint is written."""

    def limited(*given):
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
        try:
            write(*given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)

    return limited


@pytest.mark.parametrize("how", ["full", "read-only", "lost", "gone"])
def test_a_disk_that_fails_loses_nothing(how, tmp_path, monkeypatch):
    directory, broken = tmp_path / "run", []

    def later(progress):
        if progress.step == 6 and not broken:
            broken.append(how)
            if how == "full":
                monkeypatch.setattr(archive, "write", full_disk(archive.write))
            elif how == "read-only":
                monkeypatch.setattr(archive.tempfile, "mkstemp", fail(errno.EROFS))
            elif how == "lost":
                monkeypatch.setattr(archive.os, "replace", fail(errno.ESTALE))
            else:
                shutil.rmtree(directory)

    with pytest.raises(
        CheckpointWriteError, match="checkpoint 8 cannot be written .*Mend the disk"
    ) as caught:
        run(12, directory, callbacks=[later])
    monkeypatch.undo()
    error, eight = caught.value, run(8)
    assert isinstance(error, TrainingError) and isinstance(error, CheckpointError) and error.step == 8
    np.testing.assert_array_equal(leaves(error.params), leaves(eight.params))
    assert error.history["gradient_norm"].identical(eight.history["gradient_norm"])
    assert not directory.exists() or finished(directory) == [4] and len(names(directory)) == 3
    assert_same_run(run(12, directory, resume=True), run(12))


def test_a_disk_that_cannot_be_read_now_changes_nothing(copied, monkeypatch):
    directory, made = copied
    before = {path: path.read_bytes() for path in directory.iterdir() if path.suffix != ".lock"}
    read = Path.read_bytes
    refuse = lambda path: fail(errno.EIO)() if path.suffix == ".zip" else read(path)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match="cannot be read at checkpoint 12, so nothing was changed"):
        run(12, directory, resume=True)
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in before} == before
    assert_same_run(run(12, directory, resume=True), made)


def test_a_disk_that_takes_nothing_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", fail(errno.EROFS))
    with pytest.raises(CheckpointError, match="cannot be used for checkpoints: .*Read-only file system"):
        ebmpp.fit(RBM, DATA, rng_key=jax.random.key(0), num_steps=1, checkpoint_dir=tmp_path)


def test_a_disk_without_locks_warns(tmp_path, monkeypatch):
    monkeypatch.setattr("ebmpp.core.checkpoints.fcntl.flock", fail(errno.ENOLCK))
    with pytest.warns(UserWarning, match="on a disk without locks .*no two runs use it"):
        run(4, tmp_path)
