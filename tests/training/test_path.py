# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The path of a run: bounded memory, the same after a resume, from base rates to the model.

Tests annealing/path.py, training/observers/path.py.
"""

from functools import cache
import pickle
from typing import Any

import numpy as np
import pytest
from training_tools import assert_same_run, train as train_on
import zoo

import jax
import optax

import ebmpp
from ebmpp import CD, PCD, Bernoulli
from ebmpp.errors import CheckpointError
from ebmpp.training.observers import path as path_module
from helpers import assert_law

ROWS = (np.arange(10)[:, None] // [1, 2, 3, 4] % 2).astype(np.float32)


def train(data: Any = ROWS, **options: Any) -> ebmpp.FitResult:
    """Train with three checkpoints after 5 or 11 steps: the number of checkpoints is a
    shape to compile."""
    return train_on(data, graph="rbm", **{"keep_path": 3, **options})


def checkpoints(
    size: int, first: int, last: int, loaded: list[Any] | None = None
) -> list[np.ndarray]:
    """Return the leaves of a recorder of these steps, whose params are the number of the step."""
    params = lambda step: {"w": np.full(2, float(step)), "b": np.array(float(step))}
    result = path_module.PathRecorder(size, params(0))
    if loaded is not None:
        result.load(iter(loaded))
    for step in range(first, last + 1):
        result.record(step, params(step))
    return [np.asarray(leaf) for leaf in result.leaves()]


@pytest.mark.parametrize("steps", [0, 4, 97])
def test_checkpoints_are_bounded_and_evenly_spaced(steps: int) -> None:
    stride, numbers, bias, weights = checkpoints(4, 0, steps)
    assert numbers.tolist() == list(range(0, steps + 1, int(stride)))
    assert len(numbers) <= 4 < (steps + 1) / stride * 2 or stride == 1
    assert bias.tolist() == numbers.tolist() == weights[:, 1].tolist()
    for stop in (2, 7):
        # the step of the resume is seen twice
        resumed = checkpoints(4, stop, 30, checkpoints(4, 0, stop))
        jax.tree.map(np.testing.assert_array_equal, resumed, checkpoints(4, 0, 30))


@pytest.mark.nightly
def test_a_path_leads_from_base_rates_to_the_model() -> None:
    fit, graph = train(num_steps=11), zoo.graph("rbm")
    path = fit.path
    assert path.graph == graph and path.betas[0] == 0 and path.betas[-1] == 1
    assert (np.diff(path.betas) >= 0).all()
    assert path.ends_at(fit.params) and not path.ends_at(path.params_at(0))
    jax.tree.map(np.testing.assert_array_equal, path.params_at(-1), fit.params)
    np.testing.assert_allclose(
        path.eta0["v"], graph.init(zoo.KEY, ROWS)["v"], rtol=1e-5
    )
    assert (path.eta0["h"] == 0).all()
    copy = pickle.loads(pickle.dumps(fit)).path
    assert copy.graph == graph
    jax.tree.map(np.testing.assert_array_equal, copy.along(), path.along())
    with pytest.raises(IndexError):
        path.params_at(len(path))


@pytest.mark.nightly
def test_base_rates_are_those_of_weighted_rows_and_of_the_first_batch() -> None:
    index = [0, 1, 4, 6, 8]
    subset = train(ROWS[index * 2], batch_size=10).path.eta0["v"]
    weights = np.isin(np.arange(10), index)
    weighted = train(weights=weights).path.eta0["v"]
    np.testing.assert_allclose(weighted, subset, rtol=1e-5)
    streamed = train(lambda: iter([ROWS[index * 2]] * 5)).path.eta0["v"]
    np.testing.assert_allclose(streamed, subset, rtol=1e-5)


def test_the_run_is_the_same_with_a_path() -> None:
    plain = train(keep_path=False)
    assert plain.path is None
    assert_same_run(train(), plain)
    stopped = train(callbacks=[lambda p: p.step == 5], monitor_every=1, num_steps=9)
    assert stopped.history.sizes["step"] == 5 and stopped.path.ends_at(stopped.params)


@pytest.mark.nightly
def test_a_resumed_run_has_the_same_path(tmp_path: Any) -> None:
    options = {"monitors": {"sum": lambda p: p["v"].sum()}, "keep_best": "sum"}
    train(checkpoint_dir=tmp_path, **options)
    fit = train(num_steps=11, **options)
    resumed = train(num_steps=11, checkpoint_dir=tmp_path, resume=True, **options)
    assert_same_run(resumed, fit)
    jax.tree.map(np.testing.assert_array_equal, resumed.path.along(), fit.path.along())
    np.testing.assert_array_equal(resumed.path.betas, fit.path.betas)
    with pytest.raises(CheckpointError, match="keep_path: 3 there, 4 here"):
        train(
            num_steps=11, checkpoint_dir=tmp_path, resume=True, keep_path=4, **options
        )


@cache
def trained() -> ebmpp.FitResult:
    graph, data = (
        ebmpp.layered(v=Bernoulli(9), h=Bernoulli(4)),
        ebmpp.data.bars_and_stripes(3),
    )
    options = {
        "estimator": PCD(num_chains=200),
        "optimizer": optax.sgd(0.2),
        "num_steps": 1500,
    }
    return ebmpp.fit(
        graph, data, rng_key=zoo.KEY, keep_path=True, progress_bar=False, **options
    )


@pytest.mark.nightly
def test_annealing_along_a_path_is_exact() -> None:
    fit = trained()
    assert 5 < len(fit.path) < 40  # as many knots as the model needs, of 64 checkpoints
    log_z = float(ebmpp.exact.log_partition(fit.graph, fit.params))
    options = {"rng_key": zoo.KEY, "path": fit.path}
    smc = ebmpp.smc(fit.graph, fit.params, num_particles=2000, **options)
    assert smc.standard_error < 0.1
    assert_law(np.exp(smc.log_z - log_z).mean(), 1, smc.standard_error)
    sizes = {"num_particles": 200, "num_pairs": 20}
    # pilots choose the line or the path, by rungs and correlation
    assert (
        smc.num_rungs
        <= 1.5
        * ebmpp.smc(
            fit.graph, fit.params, rng_key=zoo.KEY, num_particles=2000
        ).num_rungs
    )
    mean = ebmpp.particle_expectation(
        fit.graph, fit.params, lambda x: x["v"], **sizes, **options
    )
    assert_law(
        mean.value, ebmpp.exact.moments(fit.graph, fit.params)["v"], mean.standard_error
    )
    assert mean.acceptance > 0.5


@pytest.mark.nightly
def test_a_path_that_needs_too_many_knots_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(path_module, "_MAX_KNOTS", 2)
    options = {
        "estimator": CD(),
        "optimizer": optax.sgd(5.0),
        "num_steps": 3,
        "progress_bar": False,
    }
    with pytest.warns(UserWarning, match="more than 2 knots"):
        fit = ebmpp.fit(
            zoo.graph("rbm"), np.eye(4), rng_key=zoo.KEY, keep_path=True, **options
        )
    assert len(fit.path) == 5 and fit.path.ends_at(fit.params)
