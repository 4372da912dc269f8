# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Files of a graph and its params: round trips, custom parts, damage, and failed writes.

Tests graph/saving.py.
"""

from collections.abc import Callable
import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Binomial,
    Factor,
    FactorGraph,
    Poisson,
    Spin,
    load,
    save,
)
from ebmpp.errors import ArgumentError, ParameterError, SavedFileError
from helpers import gated, random_params, three_way_energy


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.ebmpp"


def assert_same(first: Any, second: Any) -> None:
    """Trees of equal structures, dtypes and bits."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def fields() -> FactorGraph:
    visible = {
        "x": ebmpp.Gaussian((2, 2), variance="learned"),
        "y": ebmpp.Categorical(1, 3),
    }
    factors = [
        Bias("x", name="precision"),
        Bias("y"),
        Bilinear("h", "x", name="w"),
        Bias("h", shared=(0,)),
    ]
    return FactorGraph(visible, {"h": Binomial(2, total_count=4)}, factors)


def convolutional() -> FactorGraph:
    factors = [Bias("v"), ebmpp.Convolution("v", "h", window=(2,), stride=2, padding=1)]
    return FactorGraph({"v": Poisson(4)}, {"h": Spin((2, 3))}, factors)


def pairs() -> FactorGraph:
    lateral = ebmpp.Pairwise("x", nx.grid_2d_graph(2, 2), init=np.linspace(-1, 1, 4))
    labels = {"x": [(0, 1), "a", 2, 0.5]}
    return FactorGraph({"x": Spin((2, 2))}, factors=[Bias("x"), lateral], labels=labels)


GRAPHS: dict[str, Callable[[], FactorGraph]] = {
    "deep": lambda: zoo.graph("deep"),
    "lattice": lambda: zoo.graph("lattice"),
    "fields": fields,
    "convolution": convolutional,
    "pairs and labels": pairs,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_round_trip(path: Path, name: str) -> None:
    graph = GRAPHS[name]()
    params = random_params(graph, scale=0.1)
    save(path, graph, params)
    loaded, values = load(path)
    assert loaded == graph and hash(loaded) == hash(graph)
    assert (list(loaded.families), loaded.layers) == (
        list(graph.families),
        graph.layers,
    )
    assert loaded.labels == graph.labels
    assert_same(values, params)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    first = path.read_bytes()
    save(path, graph, params)
    assert path.read_bytes() == first


def nested_energy(params: Any, v: jax.Array, h: jax.Array) -> jax.Array:
    weight, (scale, shift), _ = params["w"], *params["rest"]
    return -(v @ weight.astype(float) @ h) * scale - shift.sum() * v[0]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float64", "int64"])
def test_params_keep_their_bits(path: Path, dtype: str) -> None:
    weight = np.array([[1.1, -0.0, 3.0], [5e-3, 2, -7]]).astype(jnp.dtype(dtype))
    params = {
        "nested": {"w": weight, "rest": [(np.float64(1 / 3), np.arange(3)), None]}
    }
    nested = Factor(
        "v", "h", energy=nested_energy, init=params["nested"], name="nested"
    )
    graph = FactorGraph({"v": Bernoulli(2)}, {"h": Spin(3)}, [nested])
    save(path, graph, params)
    assert_same(load(path, factors=graph.factors)[1], params)


@dataclasses.dataclass(frozen=True, repr=False)
class Doubled(Bernoulli):
    """A custom family with a field."""

    factor: float = 2.0


def other_energy(
    weight: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> jax.Array:
    return 2 * three_way_energy(weight, a, b, c)


def test_custom_factors_are_passed_to_load(path: Path) -> None:
    graph = gated()
    params = random_params(graph)
    save(path, graph, params)
    loaded, values = load(path, factors=[graph.factors[-1]])
    assert loaded == graph
    assert_same(values, params)
    with pytest.raises(SavedFileError, match="factor 'a:b:c' .*three_way_energy"):
        load(path)
    init = np.zeros((2, 2, 2))
    for factor, message in (
        (Factor("a", "b", "c", energy=other_energy, init=init), "factor 'a:b:c'"),
        (Factor("a", energy=other_energy, name="gate"), "factor 'gate'"),
        (Factor("a", energy=other_energy), "factor 'a' must be a Bias"),
        (
            Factor("a", "b", "c", energy=three_way_energy, init=init[:1]),
            "'a:b:c'.*1, 2, 2",
        ),
    ):
        with pytest.raises(SavedFileError, match=message):
            load(path, factors=[factor])


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Bond(ebmpp.Pairwise):
    """A subclass of a factor that has pairs of units in its declaration."""

    always_affine = True


def test_subclasses_of_factors_are_loaded_as_what_they_are(path: Path) -> None:
    bond = Bond("x", [(0, 1), (1, 2)], shared=True, init=0.5)
    graph = FactorGraph({"x": Spin(3)}, factors=[Bias("x"), bond])
    save(path, graph, random_params(graph))
    loaded = load(path, factors=[bond])[0]
    assert loaded == graph and type(loaded.factors[1]) is Bond
    with pytest.raises(SavedFileError, match="factor 'x:x'.*passed to load"):
        load(path)


def test_linear_factors_are_passed_to_load(path: Path) -> None:
    linear = ebmpp.graph.Linear("v", "h", forward=jnp.multiply, shape=(2,))
    graph = FactorGraph({"v": Bernoulli(2)}, {"h": Bernoulli(2)}, [linear])
    save(path, graph, random_params(graph))
    assert load(path, factors=[linear])[0] == graph
    with pytest.raises(SavedFileError, match="factor 'v:h'.*passed to load"):
        load(path)


def test_custom_families_are_passed_to_load(path: Path) -> None:
    declare = lambda field: FactorGraph(
        {"v": Doubled(2, factor=field)}, factors=[Bias("v")]
    )
    params = {"v": np.zeros(2, np.float32)}
    save(path, declare(3.0), params)
    with pytest.raises(SavedFileError, match="block 'v'.*'Doubled'"):
        load(path)
    with pytest.raises(SavedFileError, match="field 'factor'.*1.0"):
        save(path, declare([1.0]), params)
    assert load(path, families={"Doubled": Doubled})[0] == declare(3.0)


def test_factors_of_transformed_graphs_are_passed_to_load(path: Path) -> None:
    rest, params = ebmpp.condition(zoo.graph("rbm"), h=np.ones(3)), zoo.params("rbm")
    save(path, rest, params)
    with pytest.raises(SavedFileError, match="custom energy"):
        load(path)
    loaded, values = load(path, factors=rest.factors)
    assert loaded == rest
    assert_same(values, params)


class Pair(NamedTuple):
    """A container that a file does not describe."""

    first: Any


@pytest.mark.parametrize("tree", [Pair(np.ones(2)), {1: np.ones(2)}])
def test_containers_are_those_of_the_factor(path: Path, tree: Any) -> None:
    factor = Factor("v", energy=lambda p, v: -v.sum(), init=tree, name="x")
    graph = FactorGraph({"v": Poisson(2)}, factors=[factor])
    save(path, graph, {"x": tree})
    loaded = load(path, factors=[factor])[1]["x"]
    assert type(loaded) is type(tree)
    assert_same(loaded, tree)


def test_unsupported_content_is_refused(path: Path) -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    with pytest.raises(ParameterError, match="'h'"):
        save(path, rbm, {"v": params["v"]})
    labelled = FactorGraph(
        {"v": Spin(2)}, factors=[Bias("v")], labels={"v": [frozenset(), 1]}
    )
    with pytest.raises(SavedFileError, match=r"labels of block 'v' .* frozenset\(\)"):
        save(path, labelled, {"v": np.zeros(2)})
    assert not list(path.parent.iterdir())
    with pytest.raises(
        FileNotFoundError, match="load: file must be a file that exists"
    ):
        load(path)


def rewritten(path: Path, change: Callable[[dict], None]) -> Path:
    """Save a graph, and change the header of the file."""
    save(path, zoo.graph("rbm"), zoo.params("rbm"))
    members = dict(np.load(path))
    header = json.loads(members["header"].tobytes())
    change(header)
    with path.open("wb") as file:
        np.savez(
            file,
            **members
            | {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)},
        )
    return path


def test_other_versions_and_files_are_refused(path: Path) -> None:
    with pytest.raises(SavedFileError, match="version 2"):
        load(rewritten(path, lambda h: h.update(version=2)))
    with pytest.raises(SavedFileError, match="factor 'v'"):
        load(
            rewritten(
                path, lambda h: h["body"]["blocks"]["v"]["fields"].update(shape=[5])
            )
        )
    other = path.with_suffix(".npz")
    np.savez(other, a=np.zeros(300))
    path.write_text("no archive at all")
    for wrong in (other, path):
        with pytest.raises(SavedFileError, match="not a file of ebmpp.save"):
            load(wrong)


def test_damage_is_detected(path: Path) -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    save(path, rbm, params)
    content = path.read_bytes()
    for size in range(0, len(content), 101):
        path.write_bytes(content[:size])
        with pytest.raises(SavedFileError):
            load(path)
    for at in range(0, len(content), 13):
        path.write_bytes(content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :])
        try:
            graph, values = load(path)
        except SavedFileError:
            continue
        assert graph == rbm  # a byte of zip's own without meaning, such as a date
        assert_same(values, params)


def test_failed_writes_leave_the_file_unchanged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    save(path, rbm, params)
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the disk is full"):
        save(path, rbm, {name: 0 * np.asarray(value) for name, value in params.items()})
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [
        path.name
    ]


def test_files_follow_the_umask_and_symbolic_links(tmp_path: Path) -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "rbm.ebmpp", tmp_path / "latest.ebmpp"
    link.symlink_to(target)
    for umask in (0o022, 0o027):
        before = os.umask(umask)
        try:
            ebmpp.save(link, graph, params)
            assert os.umask(umask) == umask
        finally:
            os.umask(before)
        assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o666 & ~umask
        target.unlink()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("mode", [0o664, 0o600])
def test_a_replaced_file_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    path = tmp_path / "rbm.ebmpp"
    path.touch()
    path.chmod(mode)
    ebmpp.save(path, graph, params)
    assert path.stat().st_mode & 0o777 == mode
    assert ebmpp.load(path)[0] == graph


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ArgumentError, match="save: file must be a file that can"):
            ebmpp.save(path, zoo.graph("rbm"), zoo.params("rbm"))
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
