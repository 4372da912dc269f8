# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple
import zipfile

from hypothesis import HealthCheck, given, settings, strategies as st
import numpy as np
import pytest
from surgery_tools import PARAMS, RBM, graphs

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Binomial,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    Poisson,
    Spin,
    condition,
    layered,
    load,
    marginalize,
    save,
)
from ebmpp.errors import ParameterError, SavedFileError
from helpers import gated, random_params, three_way_energy


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.ebmpp"


def assert_same(one: Any, two: Any) -> None:
    """Trees of equal kinds, dtypes and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graphs(), st.integers(0, 99))
def test_any_graph_comes_back(path: Path, graph: FactorGraph, seed: int) -> None:
    params = random_params(graph, seed)
    save(path, graph, params)
    again, theirs = load(path)
    assert again == graph and hash(again) == hash(graph)
    assert (list(again.families), again.layers) == (list(graph.families), graph.layers)
    assert_same(theirs, params)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_fields_and_names_come_back(path: Path) -> None:
    graph = FactorGraph(
        {"x": Gaussian((2, 2), variance="learned"), "y": Categorical(1, 3)},
        {"h": Binomial(2, total_count=4)},
        [Bias("x", name="precision"), Bias("y"), Bilinear("h", "x", name="w"), Bias("h")],
    )
    save(path, graph, graph.init(jax.random.key(0)))
    assert load(path)[0] == graph
    first = path.read_bytes()
    save(path, graph, graph.init(jax.random.key(0)))
    assert path.read_bytes() == first


def loose_energy(params: Any, v: jax.Array, h: jax.Array) -> jax.Array:
    weight, (scale, shift), _ = params["w"], *params["rest"]
    return -(v @ weight.astype(float) @ h) * scale - shift.sum() * v[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "float64", "int8", "int64"])
def test_params_keep_their_bits(path: Path, dtype: str) -> None:
    weight = np.array([[1.1, -0.0, 3.0], [5e-3, 2, -7]]).astype(jnp.dtype(dtype))
    params = {"loose": {"w": weight, "rest": [(np.float64(1 / 3), np.arange(3)), None]}}
    loose = Factor("v", "h", energy=loose_energy, init=params["loose"], name="loose")
    graph = FactorGraph({"v": Bernoulli(2)}, {"h": Spin(3)}, [loose])
    save(path, graph, params)
    assert_same(load(path, factors=graph.factors)[1], params)


def test_names_of_units_come_back(path: Path) -> None:
    blocks = {"v": Spin(2), "w": Spin(3)}
    factors = [Bias("v"), Bias("w")]
    graph = FactorGraph(blocks, factors=factors, labels={"v": [(0, 1), (1, 0)], "w": ["a", 2, 0.5]})
    assert graph != FactorGraph(blocks, factors=factors)
    save(path, graph, random_params(graph))
    loaded = load(path)[0]
    assert loaded == graph and loaded.labels == graph.labels
    odd = FactorGraph(blocks, factors=factors, labels={"v": [frozenset(), 1]})
    with pytest.raises(SavedFileError, match=r"labels of block 'v' .* not frozenset\(\)"):
        save(path, odd, random_params(odd))


def test_numpy_reads_it_without_ebmpp(path: Path) -> None:
    save(path, RBM, PARAMS)
    with zipfile.ZipFile(path) as archive:
        header = json.loads(archive.read("header.json"))
        number = header["body"]["params"]["v:h"]["array"]
        with archive.open(f"arrays/{number}.npy") as file:
            np.testing.assert_array_equal(np.load(file, allow_pickle=False), PARAMS["v:h"])


# -- what is of one's own --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class Doubled(Bernoulli):
    """A family of one's own."""

    factor: float = 2.0


def other_energy(weight: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return 2 * three_way_energy(weight, a, b, c)


def test_a_factor_of_ones_own_is_given_back(path: Path) -> None:
    graph = gated()
    params = random_params(graph)
    save(path, graph, params)
    again, theirs = load(path, factors=[graph.factors[-1]])
    assert again == graph
    assert_same(theirs, params)
    with pytest.raises(SavedFileError, match="energy of factor 'a:b:c' .three_way_energy. is a function"):
        load(path)
    wrong = Factor("a", "b", "c", energy=other_energy, init=np.zeros((2, 2, 2)))
    with pytest.raises(SavedFileError, match="energy given for factor 'a:b:c' is not the one that was saved"):
        load(path, factors=[wrong])
    with pytest.raises(SavedFileError, match="no factor is named 'gate'; the file has"):
        load(path, factors=[Factor("a", energy=other_energy, name="gate")])
    with pytest.raises(SavedFileError, match=r"factor 'a' is a Bias over \('a',\), and the one given is"):
        load(path, factors=[Factor("a", energy=other_energy)])
    small = Factor("a", "b", "c", energy=three_way_energy, init=np.zeros((1, 2, 2)))
    with pytest.raises(
        SavedFileError, match="factor 'a:b:c': params have shape .2, 2, 2., expected .1, 2, 2."
    ):
        load(path, factors=[small])


def test_a_family_of_ones_own_is_given_back(path: Path) -> None:
    graph = FactorGraph({"v": Doubled(2, factor=3.0)}, factors=[Bias("v")])
    save(path, graph, {"v": jnp.zeros(2)})
    assert load(path, families={"Doubled": Doubled})[0] == graph
    with pytest.raises(SavedFileError, match="block 'v' is of family 'Doubled', .* families=.'Doubled'"):
        load(path)
    loose = FactorGraph({"v": Doubled(2, factor=[1.0])}, factors=[Bias("v")])
    with pytest.raises(SavedFileError, match="its field 'factor' is .1.0., and a file takes"):
        save(path, loose, {"v": jnp.zeros(2)})
    assert load(path, families={"Doubled": Doubled})[0] == graph


def test_graphs_by_surgery_are_given_their_factors_back(path: Path) -> None:
    graph = layered(a=Spin(1), h=Bernoulli(3), b=Spin(1))
    params = random_params(graph)
    made, theirs = marginalize(condition(graph, b=np.ones(1)), "h", params=params)
    save(path, made, theirs)
    again, loaded = load(path, factors=made.factors)
    assert again == made
    assert_same(loaded, theirs)
    with pytest.raises(SavedFileError, match="energy of factor 'b' .Rewired. is a function"):
        load(path)


# -- files that are none ---------------------------------------------------------------------------


class Pair(NamedTuple):
    """A node that a file does not take."""

    first: Any


def test_what_cannot_be_saved_is_told(path: Path) -> None:
    with pytest.raises(ParameterError, match="params lacks factor 'h'"):
        save(path, RBM, {"v": PARAMS["v"]})
    for tree, told in ((Pair(jnp.zeros(2)), "hold a Pair"), ({1: jnp.zeros(2)}, "with a key 1")):
        take = Factor("v", energy=lambda p, v: -v.sum(), init=tree, name="x")
        with pytest.raises(SavedFileError, match=told):
            save(path, FactorGraph({"v": Poisson(2)}, factors=[take]), {"x": tree})
    assert not list(path.parent.iterdir())
    with pytest.raises(FileNotFoundError):
        load(path)


def rewritten(path: Path, change: Any) -> Path:
    """The archive with its header changed, and the checksum made anew."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(members["header.json"])
    change(header)
    members["header.json"] = json.dumps(header).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_other_versions_and_kinds_are_told(path: Path) -> None:
    save(path, RBM, PARAMS)
    with pytest.raises(SavedFileError, match="of version 2 of the format, and this ebmpp reads version 1"):
        load(rewritten(path, lambda h: h.update(version=2)))
    save(path, RBM, PARAMS)
    with pytest.raises(SavedFileError, match="the declaration is not what was written"):
        load(rewritten(path, lambda h: h["body"]["graph"]["blocks"]["v"]["fields"].update(shape=[4])))
    np.savez(path.with_suffix(".npz"), a=np.zeros(3))
    with pytest.raises(SavedFileError, match="an archive without header.json"):
        load(path.with_suffix(".npz"))
    np.savez_compressed(path.with_suffix(".npz"), a=np.zeros(300))
    with pytest.raises(SavedFileError, match="is a compressed archive"):
        load(path.with_suffix(".npz"))
    path.write_text("no archive at all")
    with pytest.raises(SavedFileError, match="is no file that ebmpp.save wrote, or is cut off"):
        load(path)


def test_no_changed_or_missing_byte_goes_unseen(path: Path) -> None:
    save(path, RBM, PARAMS)
    whole = path.read_bytes()
    for size in range(0, len(whole), 61):
        path.write_bytes(whole[:size])
        with pytest.raises(SavedFileError):
            load(path)
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        try:
            graph, params = load(path)
        except SavedFileError:
            continue
        assert graph == RBM  # a byte of zip's own that says nothing: a date, a flag
        assert_same(params, PARAMS)


def test_a_write_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(path, RBM, PARAMS)
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is full"):
        save(path, RBM, jax.tree.map(jnp.zeros_like, PARAMS))
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.slow
def test_a_trained_model_goes_on_where_it_was(path: Path) -> None:
    rows = ebmpp.data.bars_and_stripes(3)
    rbm = layered(v=Bernoulli(9), h=Bernoulli(4))
    settings = {"rng_key": jax.random.key(0), "num_steps": 5, "progress_bar": False, "estimator": ebmpp.CD()}
    first = ebmpp.fit(rbm, rows, **settings)
    save(path, rbm, first.params)
    graph, params = load(path)
    runs = [ebmpp.fit(g, rows, params=p, **settings) for g, p in ((rbm, first.params), (graph, params))]
    assert_same(*(run.params for run in runs))
