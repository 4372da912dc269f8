# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Rows that lack entries: the likelihood of what is known, its gradient, and training on it."""

import itertools

import networkx as nx
import numpy as np
import pytest
from training_tools import assert_same_run, leaves

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import (
    CD,
    FPCD,
    PCD,
    UCD,
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    FactorGraph,
    Gaussian,
    Observed,
    Spin,
    TemperedPCD,
    WeightedPCD,
    exact,
    layered,
)
from ebmpp.errors import DataError, IntractableError, StateError
from ebmpp.estimators import SDCP, Batch, Estimator, Herding, LocalModeUCD, MeanField
from ebmpp.estimators.phases import complete_batch
from helpers import assert_rows_law, enumerate_numpy, random_params, slow

KEY = jax.random.key(0)
RBM = layered(v=Bernoulli(4), h=Bernoulli(2))
WIDE = layered(v=Bernoulli(3), h=Bernoulli(4))  # what lacks is listed, not the latents
DEEP = layered(v=Bernoulli(3), h1=Bernoulli(2), h2=Bernoulli(2))
LABELS = FactorGraph(
    {"v": Bernoulli(3), "y": Categorical(1, num_categories=3)},
    {"h": Bernoulli(2)},
    [*map(Bias, "vyh"), Bilinear("v", "h"), Bilinear("y", "h")],
)
LATTICE = FactorGraph.from_networkx(nx.grid_2d_graph(2, 3), family=Spin)


def some_rows(graph, rows, seed=0):
    """Rows, and which units of them are known: all of the first, none of the last."""
    generator = np.random.default_rng(seed)
    values, known = {}, {}
    for b, family in graph.visible.items():
        states = np.asarray(family.states())
        values[b] = generator.choice(states, size=(rows, *family.shape))
        known[b] = generator.random((rows, *family.shape)) < 0.6
        known[b][0], known[b][-1] = True, False
    return values, known


def observed(values, known):
    return {b: Observed(values[b], known[b]) for b in values}


# -- the exact likelihood --------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [RBM, WIDE, DEEP, LABELS], ids=["rbm", "wide", "deep", "labels"])
def test_the_exact_likelihood_of_what_is_known(graph):
    """Against a table of all joint states, in float64, that shares no code."""
    params, (values, known) = random_params(graph, 1, scale=1.0), some_rows(graph, 5)
    states, probs, _ = enumerate_numpy(graph, params)
    wanted = []
    for i in range(5):
        fits = [all((x[b] == values[b][i])[known[b][i]].all() for b in values) for x in states]
        wanted.append(np.log(probs[fits].sum()))
    np.testing.assert_allclose(
        exact.log_likelihood(graph, params, observed(values, known)), wanted, rtol=1e-4, atol=2e-6
    )
    assert abs(wanted[-1]) < 1e-9  # of nothing


def test_under_jit_masks_need_not_be_known():
    values, known = some_rows(RBM, 5)
    params = random_params(RBM)
    of = lambda k: exact.log_likelihood(RBM, params, {"v": Observed(values["v"], k)})
    np.testing.assert_allclose(jax.jit(of)(known["v"]), of(known["v"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("latent", [Bernoulli(2), Gaussian(2)], ids=["summed", "integrated"])
def test_unknown_gaussian_units_are_integrated(latent):
    """By quadrature of the density over the second unit."""
    graph = layered(v=Gaussian(2), h=latent)
    params = random_params(graph, 2, scale=0.3)
    v = np.array([[0.7, np.nan], [-1.2, np.nan]])
    grid = np.linspace(-12, 12, 4001)
    rows = np.stack(np.broadcast_arrays(v[:, :1], grid), -1)
    dense = np.asarray(exact.log_likelihood(graph, params, rows), float)
    wanted = np.log(np.trapezoid(np.exp(dense), grid, axis=1))
    made = exact.log_likelihood(graph, params, Observed.where_finite(v))
    np.testing.assert_allclose(made, wanted, atol=1e-4)


# -- the gradient ----------------------------------------------------------------------------------


def gradients(graph, params, estimator, values, known, draws):
    """Draws of an estimator's gradient with weighted rows, ``(draws, params)``."""
    weights = jnp.arange(1.0, 1 + len(next(iter(values.values()))))
    rows = {b: jnp.asarray(v, graph.families[b].dtype) for b, v in values.items()}
    rows = {b: jnp.where(known[b], v, v.min()) for b, v in rows.items()}
    batch = Batch(rows, weights / weights.sum(), jax.tree.map(jnp.asarray, known))
    state = estimator.init(graph, params, rows, len(weights), jnp.zeros(2, jnp.uint32))

    def one(seed):
        made = estimator.estimate(graph, params, state, batch, jnp.stack([jnp.uint32(3), seed]))
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(made.gradient)])

    return np.asarray(jax.jit(lambda s: jax.lax.map(one, s))(jnp.arange(draws, dtype=jnp.uint32)))


def exact_gradient(graph, params, values, known):
    """Of the weighted loss, by autodiff of the exact marginal likelihood."""
    weights = np.arange(1.0, 1 + len(next(iter(values.values()))))
    data = observed(values, known)
    loss = lambda p: -jnp.vdot(weights / weights.sum(), exact.log_likelihood(graph, p, data))
    return leaves(jax.grad(loss)(params))


@pytest.mark.parametrize(
    ("graph", "estimator"),
    [
        (RBM, UCD(k=1, lag=1, num_slots=4)),
        slow(RBM, UCD(k=0, m=2, start="uniform", marginalize="layers", num_slots=4)),
        slow(DEEP, UCD(k=1, lag=1, num_slots=2)),
        slow(LABELS, UCD(k=1, lag=2, start="local_mode", num_slots=4)),
        slow(LATTICE, UCD(k=1, lag=1, start="persistent", num_slots=4)),
    ],
    ids=["rbm", "layers", "deep", "labels", "lattice"],
)
def test_the_gradient_is_unbiased(graph, estimator):
    params, (values, known) = random_params(graph, 3, scale=0.8), some_rows(graph, 5)
    made = gradients(graph, params, estimator, values, known, 1500)
    assert_rows_law(made, exact_gradient(graph, params, values, known))


def test_a_row_that_lacks_nothing_counts_without_noise():
    """The positive phase of rows of which one lacks units in another block's place."""
    values, known = some_rows(RBM, 4)
    known = {"v": np.ones((4, 4), bool)}
    params = random_params(RBM, 3)
    batch = Batch.of({"v": jnp.asarray(values["v"], jnp.float32)}, known)
    phase, past = UCD(k=1, lag=1).posterior_phase, (jnp.ones(()), jnp.ones((), jnp.int32))
    made = [phase(RBM, params, past, batch, jnp.array([0, s], jnp.uint32)).gradient for s in (1, 2)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *made)


def test_draws_of_what_is_missing_have_the_posteriors_law():
    params, (values, known) = random_params(RBM, 5, scale=1.0), some_rows(RBM, 2)
    known["v"][1] = [True, False, False, True]
    rows, mask = jnp.tile(values["v"][1:], (4000, 1)), jnp.tile(known["v"][1:], (4000, 1))
    batch = Batch.of({"v": rows.astype(jnp.float32)}, {"v": mask})
    made = complete_batch(RBM, params, batch, 30, jnp.array([0, 1], jnp.uint32))
    assert not made.known
    np.testing.assert_array_equal(made.rows["v"][:, known["v"][1]], rows[:, known["v"][1]])
    every = np.array(list(itertools.product([0.0, 1.0], repeat=4)))
    fits = every[(every == values["v"][1])[:, known["v"][1]].all(1)]
    probs = jax.nn.softmax(exact.log_likelihood(RBM, params, fits))
    assert_rows_law(made.rows["v"][:, 1:3], probs @ fits[:, 1:3])


# -- base rates ------------------------------------------------------------------------------------


def test_base_rates_are_those_of_known_entries():
    table = np.array([[1, np.nan, 0, 1], [1, np.nan, np.nan, 0], [0, np.nan, 1, 0.0]])
    made = RBM.init(KEY, Observed.where_finite(table))["v"]
    for unit in (0, 2, 3):
        column = table[~np.isnan(table[:, unit]), unit]
        alone = RBM.init(KEY, np.repeat(column[:, None], 4, axis=1))["v"]
        np.testing.assert_allclose(made[unit], alone[unit], rtol=1e-6)
    assert made[1] == 0  # of which nothing is known
    weighted = RBM.init(KEY, Observed.where_finite(table), weights=np.array([0, 0, 3.0]))["v"]
    assert weighted[0] < 0 < weighted[2]


def test_pooled_base_rates_count_what_is_known():
    graph = FactorGraph({"v": Bernoulli((2, 2))}, factors=[Bias("v", shared=(1,))])
    table = np.array([[[1, np.nan], [0, 0]], [[1, 0], [np.nan, np.nan]]])
    made = graph.init(KEY, Observed.where_finite(table))["v"]
    assert made.shape == (2, 1)
    # the first row's units: three known entries in two columns, two of them 1, and a pseudo-row of 1/2
    np.testing.assert_allclose(jax.nn.sigmoid(made[:, 0]), [(1 + 0.5) / 2.5, (0 + 0.5) / 2], rtol=1e-6)


# -- training --------------------------------------------------------------------------------------

BARS = np.asarray(ebmpp.data.bars_and_stripes(3), np.float32)
MANY = np.tile(BARS, (6, 1))
MANY = np.where(np.random.default_rng(7).random(MANY.shape) < 0.25, np.nan, MANY).astype(np.float32)
HOLES = MANY[: len(BARS)]
SMALL = layered(v=Bernoulli(9), h=Bernoulli(6))


def train(data, estimator, graph=SMALL, **given):
    options = {"num_steps": 4, "optimizer": optax.sgd(0.2), "progress_bar": False, **given}
    return ebmpp.fit(graph, data, rng_key=KEY, estimator=estimator, **options)


@pytest.mark.parametrize(
    "estimator", [slow(UCD(num_slots=4)), PCD(k=5, num_chains=50), CD(k=5)], ids=["ucd", "pcd", "cd"]
)
def test_training_on_what_is_known_raises_its_likelihood(estimator):
    data = Observed.where_finite(MANY)
    made = train(data, estimator, num_steps=300, optimizer=optax.adam(0.05))
    for rows, least in ((data, 0.3), (BARS, 0.5)):
        before, after = (
            float(exact.log_likelihood(SMALL, p, rows).mean()) for p in (SMALL.init(KEY, data), made.params)
        )
        assert after > before + least, (before, after)


@pytest.mark.parametrize(
    "estimator",
    [
        FPCD(k=1, num_chains=8),
        slow(TemperedPCD(num_chains=4, num_temperatures=3)),
        SDCP(d=2, k=1),
        slow(Herding(num_chains=4)),
        slow(LocalModeUCD(num_pairs=8, num_slots=4)),
    ],
    ids=repr,
)
def test_the_others_train_too(estimator):
    made = train(Observed.where_finite(HOLES), estimator)
    assert np.isfinite(leaves(made.params)).all()
    full = train(np.where(np.isnan(HOLES), 0, HOLES), estimator)
    assert np.abs(leaves(made.params) - leaves(full.params)).max() > 1e-3  # what is missing is no zero


def test_weighted_chains_tell_no_likelihood_of_entries_that_they_drew():
    estimator = WeightedPCD(num_chains=20, num_watchers=20)
    whole, holes = (train(x, estimator).history for x in (BARS, Observed.where_finite(HOLES)))
    assert "log_likelihood" in whole and "log_partition" in holes
    assert "log_likelihood" not in holes


def in_file(path, values):
    made = np.memmap(path, mode="w+", dtype=values.dtype, shape=values.shape)
    made[:] = values
    return made


@pytest.mark.slow
def test_what_lacks_nothing_trains_as_arrays_do(tmp_path):
    known, file = np.ones(BARS.shape, bool), in_file(tmp_path / "v", BARS)
    options = {"batch_size": 5, "estimator": UCD(num_pairs=8, num_slots=4)}
    plain = train(BARS, **options)
    for data in (
        Observed(BARS, known),
        {"v": Observed(BARS, True)},
        Observed(file, known),
        Observed(file, True),
    ):
        assert_same_run(train(data, **options), plain)
    batches = [BARS[i : i + 5] for i in range(0, 10, 5)] * 2
    stream = train(iter(batches), options["estimator"])
    assert_same_run(train([Observed(b, True) for b in batches], options["estimator"]), stream)


@pytest.mark.slow
def test_files_and_streams_train_as_arrays_do(tmp_path):
    data = Observed.where_finite(HOLES)
    options = {"batch_size": 5, "estimator": CD()}
    plain = train(data, **options)
    file = Observed(in_file(tmp_path / "v", HOLES), in_file(tmp_path / "k", data.known))
    assert_same_run(train(file, **options), plain)
    assert_same_run(train(Observed.where_finite(in_file(tmp_path / "w", HOLES)), **options), plain)
    batches = [Observed.where_finite(HOLES[i : i + 5]) for i in range(0, 10, 5)]
    made = train(itertools.cycle(batches), options["estimator"])
    assert np.isfinite(leaves(made.params)).all()
    mixed = train(iter([BARS[:5], *batches, BARS[:5]]), UCD(num_pairs=8, num_slots=4))
    assert np.isnan(mixed.history.posterior_meeting_time_mean.values).tolist() == [True, False, False, True]


@pytest.mark.slow
def test_a_block_of_several_may_lack_entries():
    values, known = some_rows(LABELS, 8)
    data = {"v": values["v"], "y": Observed(values["y"], known["y"])}
    made = train(
        data,
        UCD(num_pairs=8, num_slots=4),
        LABELS,
        monitors={"l": ebmpp.monitors.log_likelihood(LABELS, data)},
    )
    assert np.isfinite(made.history.l).all()
    wanted = exact.log_likelihood(LABELS, made.params, data).mean()
    np.testing.assert_allclose(made.history.l.values[-1], wanted, rtol=1e-5)


# -- what cannot -----------------------------------------------------------------------------------


class Plain(Estimator):
    """An estimator of one's own that knows nothing of missing entries."""

    def init(self, graph, params, data, batch, pair):
        return ()

    def estimate(self, graph, params, state, batch, pair):
        raise AssertionError("must not be asked")


@pytest.mark.parametrize(
    "estimator",
    [ebmpp.estimators.Centered(CD()), ebmpp.estimators.Discriminative("y"), Plain()],
    ids=["centered", "discriminative", "own"],
)
def test_estimators_that_need_whole_rows_say_so(estimator):
    values, known = some_rows(LABELS, 4)
    with pytest.raises(StateError, match="block 'v' .* missing entries, and .* trains on whole rows; UCD"):
        train(observed(values, known), estimator, LABELS)
    stages = [ebmpp.Stage(num_steps=1), ebmpp.Stage(num_steps=1, estimator=estimator)]
    with pytest.raises(StateError, match="trains on whole rows"):
        ebmpp.fit(LABELS, observed(values, known), rng_key=KEY, schedule=stages, progress_bar=False)


def test_a_later_batch_that_lacks_entries_stops_what_needs_whole_rows():
    batches = [BARS[:5], Observed.where_finite(HOLES[:5])]
    with pytest.raises(DataError, match="stopped at step 1: block 'v' .* trains on whole rows"):
        train(iter(batches), ebmpp.estimators.Centered(CD()))


def test_a_stand_in_for_the_posterior_knows_no_missing_entries():
    values, known = some_rows(DEEP, 4)
    with pytest.raises(IntractableError, match=r"MeanField\(passes=20\) stands in .*\['v'\] .*UCD\(\)"):
        train(observed(values, known), PCD(posterior=MeanField()), DEEP)


def test_missing_entries_that_are_not_said_to_be():
    with pytest.raises(StateError, match="block 'v' .* got nan at index .*Observed.where_finite"):
        train(HOLES, UCD())
