# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Runs whose process is killed, or whose disk is full."""

from collections.abc import Callable
from pathlib import Path
import resource
import signal
import subprocess
import time
from typing import Any

from checkpoint_tools import names_in, run, start_process, steps_in
import pytest
from training_tools import assert_same_run

from ebmpp.core import archive
from ebmpp.errors import CheckpointError, CheckpointWriteError


def assert_resumes(directory: Path) -> None:
    done = max(steps_in(directory), default=0)
    assert_same_run(run(directory, done + 6, resume=True), run(num_steps=done + 6))
    assert not [name for name in names_in(directory) if name.endswith(".tmp")]


def wait(process: subprocess.Popen, until: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not until() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_directory_of_another_process_is_refused_and_resumes_after_a_kill(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_kill_during_a_write_keeps_the_checkpoints_before(call: str, tmp_path: Path) -> None:
    process = start_process(tmp_path, die_in=call)
    assert process.wait(300) == -signal.SIGKILL
    assert steps_in(tmp_path) == [4, 8]
    assert [name for name in names_in(tmp_path) if name.startswith(".checkpoint-000012.zip.")]
    assert_resumes(tmp_path)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file may be longer than a thousand bytes while a checkpoint is written."""
    write = archive.write

    def limited(*args: Any) -> None:
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
        try:
            write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)

    fill = lambda progress: progress.step == 6 and monkeypatch.setattr(archive, "write", limited)
    with pytest.raises(CheckpointWriteError, match="checkpoint 8") as caught:
        run(tmp_path, callbacks=[fill])
    monkeypatch.undo()
    assert caught.value.step == 8 and steps_in(tmp_path) == [4]
    assert_resumes(tmp_path)
