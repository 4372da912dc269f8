# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directories that are shared, foreign or damaged, disks that fail, and
killed processes.

Tests core/archive.py, core/checkpoints.py, training/observers/checkpoints.py.
"""

from collections.abc import Callable
import errno
import os
from pathlib import Path
import shutil
import signal
import subprocess
import time
from typing import Any
import warnings

from checkpoint_tools import names_in, run, start_process, steps_in
import numpy as np
import pytest
from training_tools import assert_same_run, leaves

from ebmpp.core import archive
from ebmpp.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointWriteError,
    TrainingError,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: Any) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("run")
    return directory, run(directory)


@pytest.fixture
def copy(original: Any, tmp_path: Path) -> tuple[Path, Any]:
    return Path(shutil.copytree(original[0], tmp_path / "copy")), original[1]


@pytest.mark.nightly
def test_a_directory_in_use_is_refused_and_released_at_the_end(tmp_path: Path) -> None:
    def run_again(progress: Any) -> None:
        with pytest.raises(CheckpointError, match=f"in use .*process {os.getpid()}"):
            run(tmp_path, resume=True)

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, callbacks=[lambda progress: 1 / 0], weights=np.arange(10))
    # a run without a checkpoint leaves the directory to another
    assert steps_in(tmp_path) == []
    assert_same_run(run(tmp_path, callbacks=[run_again]), run())
    run(tmp_path, resume=True)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    for name in (
        "4/results.npy",
        "notes.json",
        "checkpoint-best.zip",
        ".checkpoint-4.tmp",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"mine": 1}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run(tmp_path, 8)
    assert_same_run(run(tmp_path, 20, resume=True), run(num_steps=20))
    assert {path: path.read_bytes() for path in before} == before
    new = {path.name for path in tmp_path.rglob("*") if path.is_file()} - {
        path.name for path in before
    }
    assert {name for name in new if name.endswith(".zip")} == {
        f"checkpoint-0000{n}.zip" for n in (12, 16, 20)
    }


def test_a_file_of_unknown_origin_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000500.zip").write_text("mine")
    with pytest.raises(CheckpointError, match="resume=True"):
        run(tmp_path)
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(CheckpointError, match=r"\[500\]"),
    ):
        run(tmp_path, resume=True)
    assert (tmp_path / "checkpoint-000500.zip").read_text() == "mine"


def test_a_checkpoint_directory_is_a_path_to_a_directory(
    tmp_path: Path, original: Any
) -> None:
    for directory in ("", 3, b"run", "a\0b"):
        with pytest.raises(ArgumentError, match="checkpoint_dir"):
            run(directory)
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="file"):
            run(directory)
    with pytest.raises(CheckpointError, match="resume=True"):  # it has checkpoints
        run(original[0])


@pytest.mark.parametrize("damage", ["cut", "flipped", "renamed"])
def test_a_damaged_checkpoint_is_replaced_from_the_one_before(
    damage: str, copy: Any
) -> None:
    directory, fit = copy
    path = directory / "checkpoint-000012.zip"
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    other = (directory / "checkpoint-000004.zip").read_bytes()
    damaged = {"cut": data[:middle], "flipped": flipped, "renamed": other}[damage]
    path.write_bytes(damaged)
    warns = lambda: pytest.warns(UserWarning, match="checkpoint 12 .*damaged")
    with warns(), pytest.raises(ZeroDivisionError):
        run(directory, 16, resume=True, callbacks=[lambda progress: 1 / 0])
    assert path.read_bytes() == damaged  # until there is a better one
    if damage == "cut":
        with warns():
            run(directory, resume=True, callbacks=[lambda progress: progress.step == 9])
        # no whole checkpoint is dropped for a damaged one
        assert steps_in(directory) == [
            4,
            8,
            9,
            12,
        ]
    with warns():
        assert_same_run(run(directory, resume=True), fit)
    assert_same_run(run(directory, resume=True), fit)  # without a warning


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(copy: Any) -> None:
    directory, _ = copy
    for path in directory.rglob("*"):
        path.write_bytes(b"")
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(CheckpointError, match=r"\[12, 8, 4\]"),
    ):
        run(directory, resume=True)
    assert steps_in(directory) == [4, 8, 12]


def failing(number: int) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("fault", ["full", "lost", "removed"])
def test_a_failed_write_loses_nothing(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, broken = tmp_path / "run", []

    def break_disk(progress: Any) -> None:
        if progress.step == 6 and not broken:
            broken.append(fault)
            if fault == "full":
                monkeypatch.setattr(archive.os, "fsync", failing(errno.ENOSPC))
            elif fault == "lost":
                monkeypatch.setattr(archive.os, "replace", failing(errno.ESTALE))
            else:
                shutil.rmtree(directory)

    with pytest.raises(CheckpointWriteError, match="checkpoint 8") as caught:
        run(directory, callbacks=[break_disk])
    monkeypatch.undo()
    error, expected = caught.value, run(num_steps=8)
    assert (
        isinstance(error, TrainingError)
        and isinstance(error, CheckpointError)
        and error.step == 8
    )
    np.testing.assert_array_equal(leaves(error.params), leaves(expected.params))
    assert error.history["gradient_norm"].identical(expected.history["gradient_norm"])
    assert not directory.exists() or (
        steps_in(directory) == [4] and len(names_in(directory)) == 2
    )
    assert_same_run(run(directory, resume=True), run())


def test_a_failed_read_changes_nothing(
    copy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, fit = copy
    before = {
        path: path.read_bytes()
        for path in directory.iterdir()
        if path.suffix != ".lock"
    }
    read = Path.read_bytes
    refuse = lambda path: failing(errno.EIO)() if path.suffix == ".zip" else read(path)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match="checkpoint 12"):
        run(directory, resume=True)
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in before} == before
    assert_same_run(run(directory, resume=True), fit)


def test_a_read_only_disk_is_refused_and_one_without_locks_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        monkeypatch.context() as patch,
        pytest.raises(CheckpointError, match="Read-only"),
    ):
        patch.setattr(os, "open", failing(errno.EROFS))
        run(tmp_path)
    monkeypatch.setattr("ebmpp.core.checkpoints.fcntl.flock", failing(errno.ENOLCK))
    with pytest.warns(UserWarning, match="locks"):
        run(tmp_path, 4)


def assert_resumes(directory: Path) -> None:
    done = max(steps_in(directory), default=0)
    assert_same_run(run(directory, done + 6, resume=True), run(num_steps=done + 6))
    assert not [name for name in names_in(directory) if name.endswith(".tmp")]


def wait(process: subprocess.Popen, until: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not until() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.nightly
def test_a_directory_of_another_process_is_refused_and_resumes_after_a_kill(
    tmp_path: Path,
) -> None:
    process = start_process(tmp_path)
    try:
        wait(process, lambda: len(steps_in(tmp_path)) >= 2)
        with pytest.raises(CheckpointError, match=rf"process {process.pid} on "):
            run(tmp_path, 10**6, resume=True)
        before = max(steps_in(tmp_path))
        wait(process, lambda: max(steps_in(tmp_path)) > before)
        assert process.poll() is None and max(steps_in(tmp_path)) > before
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert_resumes(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_kill_during_a_write_keeps_the_checkpoints_before(
    call: str, tmp_path: Path
) -> None:
    process = start_process(tmp_path, die_in=call)
    assert process.wait(300) == -signal.SIGKILL
    assert steps_in(tmp_path) == [4, 8]
    assert [
        name
        for name in names_in(tmp_path)
        if name.startswith(".checkpoint-000012.zip.")
    ]
    assert_resumes(tmp_path)
