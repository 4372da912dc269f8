# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The door through which data enter: whatever holds numbers, checked before it is narrowed, row by row."""

import numpy as np
import pandas as pd
import pytest

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    BlockedGibbs,
    Categorical,
    Exponential,
    FactorGraph,
    Gaussian,
    Observed,
    Poisson,
    ais,
    evaluate,
    exact,
    layered,
    local_search,
)
from ebmpp.errors import IntractableError, StateError
from ebmpp.graph import tables
from ebmpp.graph.factors import Bias, Bilinear
from ebmpp.training import batches, monitors
from helpers import alone, pair, random_params

KEY = jax.random.key(0)
RBM = layered(v=Bernoulli(3), h=Bernoulli(2))
PARAMS = random_params(RBM)
V = np.array([[1, 0, 0], [1, 1, 1], [0, 1, 1], [0, 0, 1]])
TWO = FactorGraph(
    {"u": Bernoulli(2), "v": Bernoulli(3)},
    {"h": Bernoulli(2)},
    [*map(Bias, "uvh"), Bilinear("u", "h"), Bilinear("v", "h")],
)


def in_file(path, values):
    made = np.memmap(path, mode="w+", dtype=values.dtype, shape=values.shape)
    made[:] = values
    return made


def read(graph, data):
    """The rows of the first batch of a training step."""
    made = batches.as_source(graph, data, None, 4, KEY).batch(0)
    return {b: np.asarray(v if made.index is None else v[made.index]) for b, v in made.rows.items()}


#: everything that takes data, or a state of the visible blocks alone
DOORS = {
    "fit": lambda graph, params, data: read(graph, data),
    "stream": lambda graph, params, data: batches.as_source(graph, iter([data]), None, None, KEY),
    "init": lambda graph, params, data: graph.init(KEY, data),
    "free_energy": lambda graph, params, data: graph.free_energy(params, data),
    "conditional": lambda graph, params, data: graph.conditional(params, data, list(graph.latent)[0]).mean,
    "mean": lambda graph, params, data: graph.mean(params, data, list(graph.latent)[0]),
    "log_likelihood": exact.log_likelihood,
    "gradient": exact.grad_log_likelihood,
    "pseudo": evaluate.pseudo_log_likelihood,
    "bound": evaluate.mean_field_bound,
    "activity": lambda graph, params, data: evaluate.unit_activity(graph, params, data, rng_key=KEY),
    "ais": lambda graph, params, data: (
        ais(
            graph, params, rng_key=KEY, data=data, num_particles=4, num_temperatures=3, progress_bar=False
        ).log_partition
    ),
    "monitor": lambda graph, params, data: monitors.reconstruction(graph, data, KEY)(params),
}
every_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
#: those that take nothing but rows of data: nothing is broadcast, and there is a row
NO_DATA = ("free_energy", "conditional", "mean")
doors_of_data = pytest.mark.parametrize(
    "door", [f for n, f in DOORS.items() if n not in NO_DATA], ids=[n for n in DOORS if n not in NO_DATA]
)


class Tensor:
    """Like a tensor of another library."""

    def __array__(self, dtype=None, copy=None):
        return V.astype(dtype or np.int64)


KINDS = {
    "int64": V,
    "bool": V.astype(bool),
    "uint8": V.astype(np.uint8),
    "float64": V.astype(float),
    "float16": V.astype(np.float16),
    "on the device": jnp.asarray(V),
    "bfloat16": jnp.asarray(V, jnp.bfloat16),
    "list": V.tolist(),
    "tuple": tuple(map(tuple, V.tolist())),
    "tensor": Tensor(),
    "frame": pd.DataFrame(V, columns=["c", "a", "b"]),
    "nullable frame": pd.DataFrame(V).astype("Int64"),
    "mixed frame": pd.DataFrame({"x": V[:, 0], "y": V[:, 1] > 0, "z": V[:, 2] / 1.0}),
    "dict": {"v": V},
    "dict of a frame": {"v": pd.DataFrame(V)},
    "known": Observed(V, np.ones(3, bool)),
}


@every_door
def test_whatever_holds_numbers_is_data(door, tmp_path):
    wanted = jax.tree.leaves(door(RBM, PARAMS, V.astype(np.float32)))
    kinds = KINDS | {
        "file": in_file(tmp_path / "v", V),
        "file of bytes": in_file(tmp_path / "b", V.astype(bool)),
    }
    for name, data in kinds.items():
        if name == "known" and any(door is DOORS[n] for n in ("conditional", "mean")):
            continue  # one block of a state, which is no data
        got = jax.tree.leaves(door(RBM, PARAMS, data))
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            if hasattr(b, "dtype"):
                np.testing.assert_array_equal(a, b, err_msg=name)


WRONG = {
    "words": ("abc", "expected an array of numbers, got 'abc'"),
    "objects": (V.astype(object), "dtype object"),
    "strings": (V.astype(str), "dtype <U"),
    "ragged": ([[1, 0, 0], [1, 0]], "expected an array of numbers, got .*inhomogeneous"),
    "complex": (V + 0j, "expected real numbers, got complex ones"),
    "complex on the device": (jnp.asarray(V) + 0j, "expected real numbers, got complex ones"),
    "times": (V.astype("timedelta64[s]"), "dtype timedelta64"),
    "keys": (jax.random.split(KEY, 3), "dtype key"),
    "masked": (np.ma.masked_array(V, V == 0), r"masked array; give ebmpp.Observed\("),
    "masked rows": (list(np.ma.masked_array(V, V == 0)), r"masked array; .* of np.ma.stack\(list\)"),
    "a tuple": ((V, V > 0), r"give ebmpp.Observed\(values, known\)"),
    "a frame of words": (
        pd.DataFrame({"a": [1], "b": ["x"], "c": [2]}),
        "column 'b' of the data frame holds",
    ),
    "missing": (np.where(V == 0, np.nan, V), "got nan at index .*Observed.where_finite"),
    "missing in a frame": (pd.DataFrame(V).astype("Int64").replace(0, pd.NA), "Observed.where_finite"),
    "another unit": (V[:, :2], r"got shape \(4, 2\), expected \(..., 3\)"),
    "outside": (2 * V, r"got 2 at index \(0, 0\) \(7 such values\); expected values in {0, 1}"),
    "half": (0.5 * V, "got 0.5 at index"),
    "infinite": (np.where(V == 0, np.inf, V), "got inf at index"),
    "another block": ({"w": V}, "unknown visible block 'w'|unknown block 'w'"),
}


@every_door
@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_data_is_refused_by_name(door, data, message):
    with pytest.raises(StateError, match=message) as error:
        door(RBM, PARAMS, data)
    assert "'v'" in str(error.value) or "'w'" in str(error.value)


# -- widths ----------------------------------------------------------------------------------------

COUNTS = pair(Poisson(1), Bernoulli(1))
WIDE = [
    (np.array([[2**32 + 3]]), "got 4294967299 at .*float32 cannot hold: it would be 4294967296"),
    (np.array([[2**24 + 1]]), "got 16777217 at index .*would be 16777216"),
    (np.array([[2**24 + 1]], np.int32), "got 16777217"),
    (jnp.array([[2**24 + 1]]), "got 16777217"),
    (np.array([[2.0**24 + 1]]), r"got 16777217.0 at"),
    (np.array([[2**24 + 0.5]]), r"got 16777216.5 at"),
    (np.array([[2**63 + 1]], np.uint64), "got 9223372036854775809"),
    (np.array([[2**64 - 1]], np.uint64), "got 18446744073709551615"),
    (np.array([[2**63 - 1]]), "got 9223372036854775807"),
    (np.array([[1e39]]), r"got 1e\+39 at"),
    (pd.DataFrame({"a": [2**40 + 1]}), "got 1099511627777"),
    (pd.DataFrame({"a": [2**53 + 1]}).astype("Int64"), "got 9007199254740992|got 9007199254740993"),
]


@pytest.mark.parametrize(("values", "message"), WIDE)
def test_counts_are_checked_before_they_are_narrowed(values, message, tmp_path):
    ways = [values, {"a": values}]
    if isinstance(values, np.ndarray):
        ways += [in_file(tmp_path / "v", values), Observed(values, np.ones((1, 1), bool))]
    for given in ways:
        with pytest.raises(StateError, match=rf"block 'a' \(Poisson\(1\)\) {message}"):
            read(COUNTS, given)
    with pytest.raises(StateError, match=message):
        exact.log_likelihood(COUNTS, random_params(COUNTS), values)
    with pytest.raises(StateError, match=message):
        local_search(COUNTS, random_params(COUNTS), rng_key=KEY, a=values)


def test_what_floats_hold_enters():
    held = np.array([[2**24], [2**24 + 2], [2**40], [3]])
    np.testing.assert_array_equal(np.sort(read(COUNTS, held)["a"], axis=0), np.sort(held, axis=0))
    below = Observed(
        np.array([[2**32 + 3], [4]]), np.array([[False], [True]])
    )  # what is unknown says nothing
    assert set(read(COUNTS, below)["a"].ravel()) <= {0.0, 4.0}


@pytest.mark.parametrize("family", [Gaussian(1), Exponential(1)])
def test_real_numbers_round_as_floats_do(family):
    graph = pair(family, Bernoulli(1))
    assert read(graph, np.array([[0.1], [2.0**24 + 1]]))["a"].ravel().tolist() == [
        pytest.approx(0.1, abs=1e-8),
        2.0**24,
    ]
    with pytest.raises(
        StateError, match=r"got 1e\+39 at index \(0, 0\) .* float32 cannot hold: it would be inf"
    ):
        read(graph, np.array([[1e39]]))


def test_columns_of_unlike_types_are_not_rounded_before_they_are_checked():
    frame = pd.DataFrame({"a": [2**53 + 1], "b": [0.0]})  # as doubles 2**53, which float32 holds
    with pytest.raises(StateError, match=r"at index \(0, 0\) .*float32 cannot hold"):
        read(pair(Poisson(2), Bernoulli(1)), frame)


def test_a_category_keeps_its_own_type():
    graph = pair(Categorical(2, num_categories=3), Bernoulli(1))
    assert read(graph, np.array([[0.0, 2.0]]))["a"].dtype == np.int32
    with pytest.raises(StateError, match="got 1.5 at index"):
        read(graph, np.array([[0.0, 1.5]]))


# -- rows ------------------------------------------------------------------------------------------


@doors_of_data
@pytest.mark.parametrize("u", [np.zeros(2), np.zeros((1, 2)), np.zeros((3, 2))], ids=["none", "one", "three"])
def test_rows_of_data_are_not_broadcast(door, u):
    with pytest.raises(StateError, match=r"unlike leading axes, {'u': \(.*\), 'v': \(4,\)}"):
        door(TWO, random_params(TWO), {"u": u, "v": V})
    with pytest.raises(StateError, match="block 'u' is missing"):
        door(TWO, random_params(TWO), {"v": V})


def test_axes_of_a_state_are_broadcast_still():
    params = random_params(TWO)
    many = TWO.free_energy(params, {"u": np.zeros(2), "v": V})
    np.testing.assert_array_equal(many, TWO.free_energy(params, {"u": np.zeros((4, 2)), "v": V}))


def test_leading_axes_of_data_stay():
    data = np.stack([V, 1 - V])
    made = exact.log_likelihood(RBM, PARAMS, data)
    assert made.shape == (2, 4)
    np.testing.assert_allclose(made[1], exact.log_likelihood(RBM, PARAMS, 1 - V), rtol=1e-6)


# -- bare arrays -----------------------------------------------------------------------------------


def test_a_bare_array_is_the_only_visible_block():
    lone = alone(Bernoulli(3))
    params, given = random_params(lone), {"a": V}
    for of in (lone.energy, lone.log_density, lone.free_energy):
        np.testing.assert_array_equal(of(params, V), of(params, given))
    for of in (RBM.natural_parameters, RBM.mean, RBM.mode):
        np.testing.assert_array_equal(of(PARAMS, V, "h"), of(PARAMS, {"v": V}, "h"))
    np.testing.assert_array_equal(RBM.marginal(PARAMS, V, "h"), RBM.marginal(PARAMS, {"v": V}, "h"))


def test_a_bare_array_is_no_state_of_several_blocks():
    for of in (RBM.energy, RBM.log_density):
        with pytest.raises(StateError, match=r"block 'h' is missing: got \['v'\], .*'v', 'h', in a dict"):
            of(PARAMS, V)
    with pytest.raises(StateError, match="block 'h' is missing"):
        RBM.conditional(PARAMS, V, "v")
    with pytest.raises(StateError, match=r"visible blocks \['u', 'v'\]: give a dict"):
        TWO.free_energy(random_params(TWO), V)
    with pytest.raises(StateError, match="init is a dict of blocks, not an array of shape"):
        local_search(RBM, PARAMS, rng_key=KEY, init=V)


# -- what is observed in part ----------------------------------------------------------------------


def test_rows_of_what_is_observed():
    part = Observed.where_finite(pd.DataFrame(np.where(V == 0, np.nan, V)))
    for rows in (slice(1, 3), np.array([2, 0]), np.arange(len(V)) % 2 == 0):
        some = part[rows]
        np.testing.assert_array_equal(some.known, (V != 0)[rows])
        np.testing.assert_array_equal(some.values, np.where(V == 0, np.nan, V)[rows])
    once = Observed(V, np.arange(V.shape[1]) < 1)[:2]  # the same units of every row
    assert once.values.shape == (2, V.shape[1]) and once.known.shape == (V.shape[1],)
    values, known = part  # it unpacks as it did
    assert values.shape == known.shape == V.shape


def test_observed_is_refused_where_whole_rows_are_meant():
    some = Observed(V, V > 0)
    for name in ("pseudo", "bound", "activity", "monitor"):
        with pytest.raises(
            StateError, match="block 'v' has units that are not known, and .* takes whole rows"
        ):
            DOORS[name](RBM, PARAMS, some)
    with pytest.raises(StateError, match="block 'v': got an Observed, and every unit needs a value here"):
        RBM.conditional(PARAMS, some, "h")
    with pytest.raises(StateError, match="known is an array of booleans"):
        RBM.init(KEY, Observed(V, V))
    with pytest.raises(StateError, match=r"known has shape \(2,\)"):
        exact.log_likelihood(RBM, PARAMS, Observed(V, np.ones(2, bool)))
    with pytest.raises(StateError, match=r"give ebmpp.Observed\(values, known\)"):
        BlockedGibbs(RBM).init(KEY, 0, None, (PARAMS,), {"v": (V[0], V[0] > 0)})


def test_free_energy_of_what_is_known():
    """Summed out where no latent is left out; refused by name, and given with all known, where one is."""
    h, known = np.array([[1, 0], [0, 1], [1, 1], [0, 0]]), V > 0
    made = RBM.free_energy(PARAMS, {"v": Observed(V, known), "h": h})
    every = np.array(np.meshgrid([0, 1], [0, 1], [0, 1])).reshape(3, -1).T
    for row, mask, latent, value in zip(V, known, h, made, strict=True):
        fits = every[(every[:, mask] == row[mask]).all(1)]
        states = {"v": fits, "h": np.broadcast_to(latent, (len(fits), 2))}
        wanted = -jax.scipy.special.logsumexp(-RBM.energy(PARAMS, states))
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    with pytest.raises(
        IntractableError, match=r"every unit of 'v', or call exact.log_likelihood.*ebmpp.complete"
    ):
        RBM.free_energy(PARAMS, Observed(V, known))
    whole = RBM.free_energy(PARAMS, Observed(V, np.ones(3, bool)))
    np.testing.assert_array_equal(whole, RBM.free_energy(PARAMS, V))


def test_a_table_reads_a_file_row_by_row(tmp_path):
    table = tables.as_table(RBM, in_file(tmp_path / "v", V))
    assert isinstance(table.values["v"].base, np.memmap)
    np.testing.assert_array_equal(table.take(np.array([2, 0])).values["v"], V[[2, 0]])
