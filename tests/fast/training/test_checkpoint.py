# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Runs that stop and go on: bitwise the same, or refused with a reason."""

import dataclasses
import itertools
import shutil
from typing import Any

from checkpoint_tools import DATA, ESTIMATORS, run, size
import numpy as np
import pytest
from training_tools import ROWS, Recorder, Walker, assert_same_run, numbered

import jax
import optax

import ebmpp
from ebmpp import CD, PCD, Bernoulli, Bias, Factor, FactorGraph, Pairwise, Stage
from ebmpp.core.archive import digest
from ebmpp.errors import CheckpointError, DataError
from ebmpp.training.optimizers import averaged, box, projected
from helpers import often


@pytest.mark.parametrize("estimator", often(ESTIMATORS, "cd", "pcd", "ucd", "particles"))
def test_a_resumed_run_is_the_run_that_never_stopped(estimator, tmp_path):
    whole = run(estimator=estimator)
    run(6, tmp_path, estimator)
    assert_same_run(run(12, tmp_path, estimator, resume=True), whole)
    assert_same_run(run(12, tmp_path, estimator, resume=True), whole)  # nothing is left to do


def test_resuming_where_there_is_nothing_starts(tmp_path):
    assert_same_run(run(12, tmp_path / "new", resume=True), run())


def test_resuming_needs_a_place():
    with pytest.raises(ValueError, match="resume=True goes on from a checkpoint: give checkpoint_dir"):
        run(resume=True)


OPTIONS = {"num_steps": 11, "monitor_every": 3, "monitors": {"size": lambda p: p["a"].sum()}}
SCHEDULE = [
    Stage(num_steps=4, estimator=Walker(steps_per_batch=2), optimizer=optax.adam(0.1)),
    Stage(num_steps=2, estimator=Walker(adopts=True)),
    Stage(num_steps=5, estimator=Walker(steps_per_batch=3, adopts=True, metric="other")),
]
KINDS = {
    "weights": {"weights": np.arange(10), "batch_size": 3, "estimator": Walker()},
    "rows kept": {"estimator": Walker(steps_per_batch=4), "batch_size": 3},
    "best": {"estimator": Walker(), "keep_best": ("size", "min"), "optimizer": optax.sgd(0.5)},
    "mean": {"estimator": Walker(), "optimizer": averaged(projected(optax.adam(0.1), box(-1, 1)), start=3)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_run_has_goes_on(kind, tmp_path):
    options = OPTIONS | KINDS[kind]
    numbered(**options | {"num_steps": 6}, checkpoint_dir=tmp_path)
    assert_same_run(numbered(**options, checkpoint_dir=tmp_path, resume=True), numbered(**options))


@pytest.mark.parametrize("stop", [3, 4, 5, 8])
def test_schedules_go_on(stop, tmp_path):
    """Within a stage, between two of them, and amid steps of one batch."""
    options = OPTIONS | {"schedule": SCHEDULE, "monitor_every": 1}
    numbered(**options, callbacks=[lambda progress: progress.step == stop], checkpoint_dir=tmp_path)
    assert_same_run(numbered(**options, checkpoint_dir=tmp_path, resume=True), numbered(**options))


def test_real_estimators_in_stages_go_on_and_the_last_may_be_longer(tmp_path):
    stages = lambda last: [
        Stage(num_steps=3, estimator=PCD(num_chains=4)),
        Stage(num_steps=last, estimator=CD(), optimizer=optax.adam(0.01)),
    ]
    run = lambda last, **kept: numbered(ROWS / 10, schedule=stages(last), **kept)
    run(1, checkpoint_dir=tmp_path)
    assert_same_run(run(4, checkpoint_dir=tmp_path, resume=True), run(4))
    with pytest.raises(CheckpointError, match="holds 7 steps, and this run has 5"):
        run(2, checkpoint_dir=tmp_path, resume=True)


def test_files_and_streams_go_on(tmp_path):
    batches = [ROWS[i : i + 2] for i in range(0, 10, 2)]
    file = np.memmap(tmp_path / "rows", mode="w+", dtype=ROWS.dtype, shape=ROWS.shape)
    file[:] = ROWS
    others = {"file": ROWS, "stream": iter(batches[1:])}
    makes = {"file": lambda: file, "stream": lambda: itertools.cycle(batches)}
    for name, make in makes.items():
        options = OPTIONS | {"estimator": Walker(steps_per_batch=2), "batch_size": 2}
        kept = {"checkpoint_dir": tmp_path / name}
        numbered(make(), **options | {"num_steps": 5}, **kept)
        assert_same_run(numbered(make(), **options, **kept, resume=True), numbered(make(), **options))
        with pytest.raises(CheckpointError, match="of another run: .*data: "):
            numbered(others[name], **options, **kept, resume=True)


def test_a_stream_that_ended_is_mended_and_goes_on(tmp_path):
    batches = [ROWS[i : i + 2] for i in range(0, 10, 2)]
    kept = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    with pytest.raises(DataError, match="with checkpoint_dir the run can be resumed here"):
        numbered(iter(batches), estimator=Walker(), num_steps=8, **kept)
    assert (tmp_path / "checkpoint-000005.zip").exists()
    again = numbered(itertools.cycle(batches), estimator=Walker(), num_steps=8, **kept, resume=True)
    assert_same_run(again, numbered(itertools.cycle(batches), estimator=Walker(), num_steps=8))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    run(12, directory)
    return directory


def copy(directory, to):
    return shutil.copytree(directory, to / "copy")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"estimator": "pcd"}, "estimator: 'CD"),
        ({"graph": ebmpp.layered(v=Bernoulli(9), h=Bernoulli(4))}, "graph: "),
        ({"data": DATA[:-1]}, "data: "),
        ({"rng_key": jax.random.key(1)}, "rng_key: "),
        ({"batch_size": 7}, "batch_size: 5 there, 7 here"),
        ({"optimizer": optax.adam(0.051)}, "optimizer: it makes other updates here of the same gradients"),
        ({"optimizer": optax.adam(0.05, b1=0.8)}, "optimizer: it makes other updates here"),
        ({"monitors": {"size": lambda p: 2 * size(p)}}, "monitors: 'size' is another function here"),
    ],
)
def test_another_runs_checkpoint_is_refused(options, told, finished, tmp_path):
    with pytest.raises(CheckpointError, match="of another run") as error:
        run(12, copy(finished, tmp_path), resume=True, **options)
    assert told in str(error.value)


def first_energy(w, a, b):
    return -w * (a.sum() * b.sum())


def second_energy(w, a, b):
    return -w * (a[0] * b.sum())


def joined(pairs):
    return FactorGraph({"a": Bernoulli(4)}, factors=[Bias("a"), Pairwise("a", pairs)])


def of_ones_own(energy):
    factors = [Bias("a"), Bias("b"), Factor("a", "b", energy=energy, init=np.ones(()))]
    return FactorGraph({"a": Bernoulli(4)}, {"b": Bernoulli(2)}, factors)


@pytest.mark.parametrize(
    ("graph", "other"),
    [
        (joined([(0, 1), (2, 3)]), joined([(0, 2), (1, 3)])),
        (of_ones_own(first_energy), of_ones_own(second_energy)),
    ],
)
def test_a_graph_that_differs_in_its_energy_alone_is_refused(graph, other, tmp_path):
    """Which units are joined, and what an energy of one's own computes, is not in a repr."""
    assert repr(graph) == repr(other)
    options = {"rng_key": jax.random.key(0), "estimator": Recorder(), "num_steps": 1, "progress_bar": False}
    options |= {"checkpoint_dir": tmp_path, "scheme": {"weight": "zero"}}
    rows = np.eye(4)
    whole = ebmpp.fit(graph, rows, **options)
    assert_same_run(ebmpp.fit(graph, rows, **options, resume=True), whole)
    with pytest.raises(CheckpointError, match="of another run: energies: "):
        ebmpp.fit(other, rows, **options, resume=True)


@dataclasses.dataclass(frozen=True)
class Told(Recorder):
    function: Any = None


def test_functions_of_an_estimator_are_known_by_name(tmp_path):
    """They stand at another address in the process that goes on."""
    make = lambda: Told(lambda key: key)
    assert repr(make()) != repr(make())
    numbered(estimator=make(), checkpoint_dir=tmp_path)
    numbered(estimator=make(), checkpoint_dir=tmp_path, resume=True)


def test_a_digest_tells_shapes_types_and_names_apart():
    a = np.arange(6, dtype=np.float32)
    made = {
        digest(d)
        for d in ({"a": a}, {"b": a}, {"a": a.reshape(2, 3)}, {"a": a.astype(np.float64)}, {"a": a + 1})
    }
    assert len(made) == 5


def test_an_optimizers_key_goes_on(tmp_path):
    """optax's noise has a jax key in its state, which is no array of numbers."""
    options = {"estimator": Walker(), "num_steps": 4}
    noisy = lambda: optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, jax.random.key(3)))
    numbered(**options | {"num_steps": 2}, optimizer=noisy(), checkpoint_dir=tmp_path)
    again = numbered(**options, optimizer=noisy(), checkpoint_dir=tmp_path, resume=True)
    whole = numbered(**options, optimizer=noisy())
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
