# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The path of a run: bounded while it goes on, the same however it was stopped, and a path of models."""

from functools import cache
import pickle

import numpy as np
import pytest
from training_tools import ROWS, Walker, assert_same_run, numbered

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, Bernoulli, Gaussian, Observed, Spin
from ebmpp.core import random
from ebmpp.errors import ArgumentError, CheckpointError
from ebmpp.sampling import Path
from ebmpp.training import trail
from ebmpp.training.trail import Trail
from helpers import assert_law, pair

RBM = ebmpp.layered(v=Bernoulli(9), h=Bernoulli(4))
DATA = ebmpp.data.bars_and_stripes(3)
KEY = jax.random.key(0)


def at(step):
    return {"w": jnp.full(2, float(step)), "b": jnp.array(float(step))}


def saw(room, steps):
    made = Trail(room, at(0))
    for step in range(steps + 1):
        made.see(step, at(step))
    return made


@pytest.mark.parametrize("steps", [0, 4, 5, 30, 97])
def test_checkpoints_are_bounded_and_evenly_spaced(steps):
    made = saw(4, steps)
    stride, kept, bias, weights = made.leaves()
    assert kept.tolist() == list(range(0, steps + 1, int(stride)))
    assert len(kept) <= 4 < (steps + 1) / stride * 2 or stride == 1
    assert bias.tolist() == kept.tolist() and weights[:, 1].tolist() == kept.tolist()


@pytest.mark.parametrize("stop", [-1, 2, 7])
def test_a_trail_goes_on_from_its_leaves(stop):
    """And the step at which it goes on may be seen again."""
    again = Trail(4, at(0))
    again.load([np.asarray(a) for a in saw(4, stop).leaves()])
    for step in range(max(stop, 0), 31):
        again.see(step, at(step))
    for one, other in zip(again.leaves(), saw(4, 30).leaves(), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


@cache
def trained():
    return ebmpp.fit(
        RBM, DATA, rng_key=KEY, estimator=PCD(num_chains=200), optimizer=optax.sgd(0.2), num_steps=1500,
        keep_path=True, progress_bar=False,
    )  # fmt: skip


def test_a_path_goes_from_base_rates_to_the_model():
    path, params = trained().path, trained().params
    assert path.graph == RBM and path.betas[0] == 0 and path.betas[-1] == 1
    assert (np.diff(path.betas) >= 0).all()
    assert path.ends_at(params) and not path.ends_at(path.params_at(0))
    jax.tree.map(np.testing.assert_array_equal, path.params_at(-1), params)
    np.testing.assert_allclose(path.eta0["v"], RBM.init(KEY, DATA)["v"], rtol=1e-6)
    assert (path.eta0["h"] == 0).all()
    assert 5 < len(path) < 40  # as many as the model needs: 66 were there


def test_a_path_is_a_value():
    path = trained().path
    assert repr(path) == f"Path({len(path)} knots, {RBM!r})"
    again = pickle.loads(pickle.dumps(trained())).path
    assert len(again) == len(path) and again.graph == RBM
    jax.tree.map(np.testing.assert_array_equal, again.along(), path.along())
    each = [path.params_at(i) for i in range(len(path))]
    np.testing.assert_array_equal(np.stack([p["v:h"] for p in each]), path.along()["v:h"])
    with pytest.raises(IndexError, match=rf"knot {len(path)} of a path of {len(path)} knots"):
        path.params_at(len(path))
    told = []
    jax.jit(lambda p: told.append(repr(p)))(Path.through(RBM, path.eta0, each[-4:]))  # traced
    assert told[0].startswith("Path(5 knots")


@pytest.mark.slow
def test_systems_go_along_it():
    made = trained()
    exact = ebmpp.exact.log_partition(RBM, made.params)
    found = ebmpp.smc(RBM, made.params, rng_key=KEY, num_particles=2000, path=made.path)
    assert found.standard_error < 0.1
    assert_law(np.exp(found.log_z - float(exact)).mean(), 1, found.standard_error)
    mean = ebmpp.particle_expectation(
        RBM, made.params, lambda x: x["v"], rng_key=KEY, num_particles=200, num_pairs=20, path=made.path
    )
    assert_law(mean.value, ebmpp.exact.moments(RBM, made.params)["v"], mean.standard_error)
    assert mean.acceptance > 0.5


def test_neighbours_are_near_each_other():
    """By the laws themselves: half of the draws at one knot are effective at the next."""
    path = trained().path
    assert path.kept == ("h",)
    every, rows = (
        [],
        {"h": np.unpackbits(np.arange(16, dtype=np.uint8)[:, None], axis=1)[:, 4:].astype(float)},
    )
    for i in range(len(path)):
        rung = path.at(jnp.array(float(i)))
        every.append((rung, path.slope(rung.params, rows)))
    log_p = np.zeros(16)
    for (low, here), (high, there) in zip(every, every[1:], strict=False):
        gain = np.asarray(path.gain(low, high, here, there), float)
        p = np.exp(log_p - log_p.max())
        p /= p.sum()
        even = (p @ np.exp(gain)) ** 2 / (p @ np.exp(2 * gain))
        assert even > 0.4  # of 500 particles it was 0.5
        log_p = log_p + gain


# -- runs ------------------------------------------------------------------------------------------


def same_path(first, second):
    jax.tree.map(np.testing.assert_array_equal, first.along(), second.along())
    np.testing.assert_array_equal(first.betas, second.betas)
    jax.tree.map(np.testing.assert_array_equal, first.eta0, second.eta0)


@pytest.mark.parametrize("stop", [1, 6])
def test_a_resumed_run_has_the_same_path(stop, tmp_path):
    options = {"estimator": Walker(), "optimizer": optax.sgd(0.2), "monitors": {"b": lambda p: p["a"].sum()}}
    run = lambda **more: numbered(ROWS / 10, **options, keep_best="b", keep_path=3, **more)
    run(num_steps=stop, checkpoint_dir=tmp_path)
    whole, again = run(num_steps=11), run(num_steps=11, checkpoint_dir=tmp_path, resume=True)
    assert_same_run(again, whole)
    same_path(again.path, whole.path)
    with pytest.raises(CheckpointError, match="keep_path: 3 there, 4 here"):
        numbered(
            ROWS / 10,
            **options,
            keep_best="b",
            keep_path=4,
            num_steps=11,
            checkpoint_dir=tmp_path,
            resume=True,
        )


def test_the_run_is_the_same_without_its_path():
    without = numbered(ROWS / 10, estimator=Walker(), optimizer=optax.sgd(0.2))
    assert without.path is None
    assert_same_run(numbered(ROWS / 10, estimator=Walker(), optimizer=optax.sgd(0.2), keep_path=2), without)


def test_a_run_that_a_callback_stops_has_a_path():
    made = numbered(ROWS / 10, estimator=Walker(), keep_path=True, callbacks=[lambda p: p.step == 2],
                    monitor_every=1, num_steps=9)  # fmt: skip
    assert made.history.sizes["step"] == 2 and made.path.ends_at(made.params)


GRAPHS = {
    "three layers": (ebmpp.layered(v=Spin(4), h1=Spin(3), h2=Spin(2)), np.sign(np.eye(4) - 0.5)),
    "gaussian": (pair(Gaussian(2, "learned"), Bernoulli(2)), np.array([[0.1, 1.0], [-0.5, 2.0], [0.4, 1.5]])),
    "missing": (RBM, Observed.where_finite(np.where(np.eye(9) > 0, np.nan, 1.0))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_other_graphs_and_data(name):
    graph, data = GRAPHS[name]
    pcd = PCD(num_chains=10, posterior=ebmpp.estimators.MeanField() if "h2" in graph.families else None)
    made = ebmpp.fit(
        graph, data, rng_key=KEY, estimator=pcd, optimizer=optax.sgd(0.01), num_steps=5,
        keep_path=2, progress_bar=False,
    )  # fmt: skip
    found = ebmpp.smc(graph, made.params, rng_key=KEY, num_particles=200, path=made.path)
    assert np.isfinite(found.log_partition) and len(made.path) >= 2


@pytest.mark.slow
def test_weights_and_streams_have_base_rates():
    weights = np.arange(len(DATA))
    run = lambda data, **more: ebmpp.fit(
        RBM, data, rng_key=KEY, estimator=CD(), num_steps=1, keep_path=True, progress_bar=False, **more
    )
    weighed = run(DATA, weights=weights).path.eta0["v"]
    np.testing.assert_allclose(weighed, RBM.init(KEY, DATA, weights=weights)["v"], rtol=1e-5)
    streamed = run(lambda: iter([{"v": DATA[:5]}])).path.eta0["v"]
    np.testing.assert_allclose(streamed, RBM.init(KEY, DATA[:5])["v"], rtol=1e-5)


def test_a_path_that_cannot_be_thinned_is_told(monkeypatch):
    monkeypatch.setattr(trail, "_MOST", 2)
    graph = pair(Gaussian(1), Bernoulli(1))
    params = [{"a": jnp.full(1, 9.0 * i), "b": jnp.zeros(1), "a:b": jnp.zeros((1, 1))} for i in range(4)]
    made = Trail(4, params[0])
    for step, p in enumerate(params[:3]):
        made.see(step, p)
    eta0 = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    with pytest.warns(UserWarning, match="more than 2 knots .*: the path has all 5 checkpoints"):
        path = made.path(graph, eta0, params[3], random.key_pair(KEY))
    assert len(path) == 5 and path.ends_at(params[3])


class Unknown(Bernoulli):
    def from_mean(self, mean):
        raise NotImplementedError(f"{self!r}")


def test_a_family_without_base_rates_is_refused():
    graph = ebmpp.layered(v=Unknown(9), h=Bernoulli(4))
    with pytest.raises(ArgumentError, match=r"keep_path starts from .*Unknown\(9\) has no from_mean"):
        ebmpp.fit(graph, DATA, rng_key=KEY, params=trained().params, keep_path=True)
