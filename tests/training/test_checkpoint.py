# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Resumed runs: bitwise the run that never stopped, or refused with a reason."""

import dataclasses
import itertools
import shutil
from typing import Any

from checkpoint_tools import run
import numpy as np
import pytest
from training_tools import (
    ADAM,
    ROWS,
    SGD,
    WALKER,
    ZEROS,
    Recorder,
    as_memmap,
    assert_continues,
    assert_same_run,
    leaves,
    rows_seen,
    train,
)
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import (
    PCD,
    UCD,
    Bernoulli,
    Bias,
    Factor,
    FactorGraph,
    Pairwise,
    ParticleUCD,
    Stage,
    WeightedPCD,
)
from ebmpp.errors import CheckpointError, DataError
from ebmpp.estimators import Centered
from ebmpp.training.optimizers import averaged, box, projected
from helpers import nightly, often

ESTIMATORS = {
    "pcd": PCD(num_chains=8),
    "ucd": UCD(k=1, num_pairs=16, num_slots=8),
    "centered": Centered(PCD(num_chains=8)),
    "particles": ParticleUCD(
        num_particles=20, path="training", max_rungs=8, refit_every=5
    ),
    "weighted": WeightedPCD(num_chains=20, num_watchers=20),
}
BATCHES = [ROWS[i : i + 2] for i in range(0, 10, 2)]
MEETING = {"meeting_time_mean", "meeting_time_max", "num_unmet", "lag", "k", "sweeps"}
OTHER_KEY = {"rng_key": jax.random.key(1)}
SUM = {"sum": lambda p: p["v"].sum()}


@pytest.mark.parametrize("name", often(ESTIMATORS, "ucd"))
def test_a_run_that_resumes_or_continues_is_the_uninterrupted_run(
    name: str, tmp_path: Any
) -> None:
    options = {"rng_key": zoo.KEY, "batch_size": zoo.BATCH, "progress_bar": False}
    settings = {
        "estimator": ESTIMATORS[name],
        "optimizer": SGD,
        "checkpoint_dir": tmp_path,
    }
    graph, rows = zoo.graph("rbm"), zoo.rows("rbm", 20)
    first = ebmpp.fit(graph, rows, num_steps=5, **settings, **options)
    resumed = ebmpp.fit(graph, rows, num_steps=8, resume=True, **settings, **options)
    uninterrupted = ebmpp.fit(
        graph, rows, num_steps=8, **settings | {"checkpoint_dir": None}, **options
    )
    assert_same_run(resumed, uninterrupted)
    second = ebmpp.fit(graph, rows, num_steps=3, start=first, **options)
    assert_continues(second, uninterrupted)
    assert second.estimator == first.estimator and second.optimizer is first.optimizer
    other = ebmpp.fit(
        graph,
        rows,
        num_steps=5,
        **settings | {"checkpoint_dir": None},
        **options | OTHER_KEY,
    )
    assert (leaves(other.params) != leaves(first.params)).mean() > 0.5
    assert name != "ucd" or set(first.history) >= MEETING


KINDS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": ADAM},
    "weights": {"weights": np.arange(10)},
    "rows kept": {"estimator": Recorder(0.1, steps_per_batch=4)},
    "best": {"keep_best": ("sum", "max")},
    "mean": {
        "optimizer": averaged(projected(optax.adam(0.1), box(-1, 1)), from_step=3)
    },
    "key": {
        "optimizer": optax.chain(
            optax.sgd(0.1), optax.add_noise(0.1, 0.5, jax.random.key(3))
        )
    },
    "file": {},
    "stream": {"batch_size": None},
}


@pytest.mark.parametrize("kind", often(KINDS, "weights", "rows kept", "best", "stream"))
def test_every_part_of_a_run_resumes_and_continues(kind: str, tmp_path: Any) -> None:
    data = {
        "file": lambda: as_memmap(ROWS, tmp_path / "rows"),
        "stream": lambda: itertools.cycle(BATCHES),
    }
    options = {"num_steps": 11, "monitor_every": 3, "monitors": SUM} | KINDS[kind]
    make = data.get(kind, lambda: ROWS)
    first = train(make(), **options | {"num_steps": 6}, checkpoint_dir=tmp_path / "run")
    resumed = train(make(), **options, checkpoint_dir=tmp_path / "run", resume=True)
    uninterrupted = train(make(), **options)
    if kind != "key":
        assert_same_run(resumed, uninterrupted)
    np.testing.assert_array_equal(leaves(resumed.params), leaves(uninterrupted.params))
    if kind in ("adam", "key", "weights"):
        second = train(**options | {"num_steps": 5, "params": None, "start": first})
        np.testing.assert_array_equal(
            leaves(second.params), leaves(uninterrupted.params)
        )
        seen = np.concatenate([rows_seen(first), rows_seen(second)])
        np.testing.assert_array_equal(seen, rows_seen(uninterrupted))


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_may_be_stopped_anywhere_between_looks(
    stream: bool, tmp_path: Any
) -> None:
    make = lambda: (
        itertools.cycle([np.roll(ROWS, i, axis=0)[:4] for i in range(9)])
        if stream
        else ROWS
    )
    options = {
        "optimizer": ADAM,
        "checkpoint_every": 10**6,
        "monitors": SUM,
        "monitor_every": 40,
    }
    uninterrupted = train(make(), num_steps=110, **options)
    for stop in (2, 51, 110):
        fit = train(
            make(), num_steps=stop, checkpoint_dir=tmp_path, resume=True, **options
        )
        assert fit.history.sizes["step"] == stop
    # the last look of each part is in its history, too
    fit = dataclasses.replace(fit, history=fit.history.drop_dims("monitor_step"))
    history = uninterrupted.history.drop_dims("monitor_step")
    assert_same_run(fit, dataclasses.replace(uninterrupted, history=history))


SCHEDULE = [
    Stage(num_steps=4, estimator=Recorder(0.1, steps_per_batch=2), optimizer=ADAM),
    Stage(num_steps=2, estimator=Recorder(0.1, adopts=True), optimizer=SGD),
    Stage(
        num_steps=5,
        estimator=Recorder(0.1, 3, adopts=True, metric="other"),
        optimizer=SGD,
    ),
]


@pytest.mark.parametrize("stop", [nightly(3), 4, nightly(8)])
def test_schedules_resume_within_and_between_stages(stop: int, tmp_path: Any) -> None:
    options = {"monitors": SUM, "schedule": SCHEDULE, "monitor_every": 1}
    train(
        **options,
        callbacks=[lambda progress: progress.step == stop],
        checkpoint_dir=tmp_path,
    )
    assert_same_run(
        train(**options, checkpoint_dir=tmp_path, resume=True), train(**options)
    )
    options["schedule"] = [*SCHEDULE[:2], dataclasses.replace(SCHEDULE[2], num_steps=7)]
    assert_same_run(
        train(**options, checkpoint_dir=tmp_path, resume=True), train(**options)
    )


def test_a_run_whose_stream_ended_resumes_with_a_longer_one(tmp_path: Any) -> None:
    options = {"num_steps": 8, "checkpoint_dir": tmp_path, "checkpoint_every": 2}
    with pytest.raises(DataError, match="checkpoint_dir"):
        train(iter(BATCHES), **options)
    assert (tmp_path / "checkpoint-000005.zip").exists()
    resumed = train(itertools.cycle(BATCHES), **options, resume=True)
    assert_same_run(resumed, train(itertools.cycle(BATCHES), num_steps=8))


def test_resume_starts_a_run_where_there_is_no_checkpoint(tmp_path: Any) -> None:
    assert_same_run(run(tmp_path / "new", resume=True), run())
    assert_same_run(run(tmp_path / "new", resume=True), run())  # nothing is left to do
    with pytest.raises(ValueError, match="checkpoint_dir"):
        run(resume=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> Any:
    directory = tmp_path_factory.mktemp("run")
    run(directory)
    return directory


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"estimator": Recorder(0.2)}, "estimator: "),
        ({"data": ROWS[:-1]}, "data: "),
        ({"data": iter(BATCHES)}, "data: "),
        ({"weights": np.arange(10)}, "weights: "),
        ({"params": ZEROS | {"h": np.ones(2)}}, "start: "),
        ({"rng_key": jax.random.key(1)}, "rng_key: "),
        ({"batch_size": 7}, "batch_size: 4 there, 7 here"),
        ({"optimizer": optax.adam(0.1001)}, "optimizer: "),
        ({"monitors": {"sum": lambda p: 2 * p["v:h"].sum()}}, "monitors: 'sum'"),
        ({"keep_path": 4}, "keep_path: "),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    options: dict, match: str, finished: Any, tmp_path: Any
) -> None:
    directory = shutil.copytree(finished, tmp_path / "copy")
    with pytest.raises(CheckpointError, match=f"of another run.*{match}"):
        run(directory, resume=True, **options)


@dataclasses.dataclass(frozen=True)
class Scaled(Recorder):
    """An estimator with a function as a field."""

    fn: Any = jnp.sin

    def estimate(self, *args: Any) -> Any:
        result = super().estimate(*args)
        return result._replace(gradient=jax.tree.map(self.fn, result.gradient))


def test_a_function_of_an_estimator_is_compared_by_its_code(tmp_path: Any) -> None:
    def scaled(factor: float) -> Any:
        return Scaled(fn=lambda leaf: factor * leaf)

    fit = run(tmp_path, estimator=scaled(0.5))
    assert_same_run(run(tmp_path, resume=True, estimator=scaled(0.5)), fit)
    with pytest.raises(CheckpointError, match="estimator code: "):
        run(tmp_path, resume=True, estimator=scaled(0.7))


@pytest.mark.nightly
def test_a_graph_of_another_energy_is_refused(tmp_path: Any) -> None:
    """Edges and custom energies are not part of the repr."""
    product, first_unit = (
        lambda w, a, b: -w * (a.sum() * b.sum()),
        lambda w, a, b: -w * (a[0] * b.sum()),
    )
    edges, graphs = ([(0, 1), (2, 3)], [(0, 2), (1, 3)]), []
    for energy, i in ((product, 0), (first_unit, 0), (product, 1)):
        factors = [
            Bias("v"),
            Pairwise("v", edges[i]),
            Factor("v", "h", energy=energy, init=np.ones(())),
        ]
        graphs.append(FactorGraph({"v": Bernoulli(4)}, {"h": Bernoulli(2)}, factors))
    assert len({repr(graph) for graph in graphs}) == 1
    options = {
        "rng_key": zoo.KEY,
        "estimator": WALKER,
        "num_steps": 1,
        "progress_bar": False,
    }
    options |= {
        "checkpoint_dir": tmp_path,
        "init_scheme": {"weight": "zero", "bias": "zero"},
    }
    fit = ebmpp.fit(graphs[0], np.eye(4), **options)
    assert_same_run(ebmpp.fit(graphs[0], np.eye(4), **options, resume=True), fit)
    for other in graphs[1:]:
        with pytest.raises(CheckpointError, match="energies: "):
            ebmpp.fit(other, np.eye(4), **options, resume=True)
