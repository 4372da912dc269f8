# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The convolutional machine, the gated one and the energy of one's own: tiny ones, and from end to end."""

from collections.abc import Mapping
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xarray as xr

import jax

import ebmpp
from ebmpp import FactorGraph
from ebmpp.moves.move import draw_sweep
from helpers import assert_law, assert_rows_law, numpy_states, numpy_statistics, random_params
from models import convolutional, custom_energy, third_order
from shared import digit_images

KEY = jax.random.key(0)
FEW = ["--steps=3", "--batch-size=10", "--num-pairs=8", "--no-progress"]


def pooled_energy(p: Mapping[str, Any], v: np.ndarray, h: np.ndarray) -> float:
    """Pixel by pixel: cell 0 of a map has five states, the last of which is none."""
    total = -(p["v"] * v).sum() - sum(p["h"][k, 0, 0] @ h[k, 0, 0] for k in range(len(h)))
    for k, i, j in np.ndindex(len(h), 2, 2):
        total -= h[k, 0, 0, 2 * i + j] * (p["v:h"][k, 0] * v[i : i + 2, j : j + 2]).sum()
    return float(total)


def gated_energy(p: Mapping[str, Any], x: np.ndarray, y: np.ndarray, h: np.ndarray) -> float:
    w, total = p["x:y:h"], -(p["x"] @ x + p["y"] @ y + p["h"] @ h)
    for f, i, j, k in np.ndindex(w["x"].shape[1], len(x), len(y), len(h)):
        total -= w["x"][i, f] * w["y"][j, f] * w["h"][k, f] * x[i] * y[j] * h[k]
    return float(total)


def selected_energy(p: Mapping[str, Any], v: np.ndarray, z: np.ndarray, h: np.ndarray) -> float:
    k, own = int(z[0].argmax()), p["v:z:h"]
    inner = v @ own["w"][k] @ h + own["b"][k] @ v + own["c"][k] @ h
    return float(-inner - p["v"] @ v - p["z"][0, k])


KINDS = {
    "convolutional": (convolutional.declare(3, 1, 2, 2), pooled_energy),
    "third order": (third_order.declare(2, 2, 3), gated_energy),
    "custom": (custom_energy.declare(3, 3, 2, seen=False), selected_energy),
}


def enumerated(graph: FactorGraph, params: Any, energy: Any) -> tuple[list[dict], np.ndarray]:
    """Statistics of every state, and log weights: float64, one state at a time."""
    params = jax.tree.map(lambda a: np.asarray(a, float), params)
    listed = [[numpy_statistics(f, x) for x in numpy_states(f)] for f in graph.families.values()]
    states = [dict(zip(graph.families, values, strict=True)) for values in itertools.product(*listed)]
    return states, np.array([-energy(params, **state) for state in states])


@pytest.mark.parametrize("kind", KINDS)
def test_sweeps_have_the_declared_law(kind: str) -> None:
    graph, energy = KINDS[kind]
    params = random_params(graph, seed=3, scale=0.8)
    states, weights = enumerated(graph, params, energy)
    weights = np.exp(weights - np.logaddexp.reduce(weights))
    draws = jax.jit(lambda key: _draws(graph, params, key))(KEY)
    for b in graph.families:
        exact = sum(w * s[b] for w, s in zip(weights, states, strict=True))
        assert_rows_law(draws[b], exact, 40)


def _draws(graph: FactorGraph, params: Any, key: jax.Array) -> dict:
    rows = ebmpp.core.random.fold_in(ebmpp.core.random.key_pair(key), jax.numpy.arange(4000))
    start = ebmpp.moves.gibbs.initial_rows(graph, graph.families, rows)
    target, moves = ebmpp.moves.Target(graph, params), ebmpp.moves.gibbs_sweep(graph)
    one = lambda i, x: draw_sweep(target, x, moves, ebmpp.core.random.fold_in(rows, i))[0]
    return graph.statistics(jax.lax.fori_loop(1, 40, one, start))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_exact_and_by_coupled_chains(kind: str) -> None:
    graph, energy = KINDS[kind]
    params = random_params(graph, seed=3, scale=0.8)
    states, weights = enumerated(graph, params, energy)
    log_z = np.logaddexp.reduce(weights)
    np.testing.assert_allclose(ebmpp.exact.log_partition(graph, params), log_z, rtol=1e-5)
    mean = jax.grad(lambda p: -ebmpp.exact.log_partition(graph, p))(params)
    leaves, tree = jax.tree.flatten(params)
    for i, leaf in enumerate(leaves):  # by differences of the enumeration, in one entry of each
        moved = [np.asarray(a, float).copy() for a in leaves]
        moved[i].flat[leaf.size - 1] += 1e-4
        _, after = enumerated(graph, jax.tree.unflatten(tree, moved), energy)
        slope = (log_z - np.logaddexp.reduce(after)) / 1e-4
        np.testing.assert_allclose(jax.tree.leaves(mean)[i].ravel()[-1], slope, rtol=2e-3, atol=2e-4)
    slope = lambda x: jax.grad(lambda p: graph.energy(p, x))(params)
    made = ebmpp.unbiased_expectation(graph, params, slope, rng_key=KEY, num_pairs=3000)
    count = sum(leaf.size for leaf in leaves)
    check = lambda value, exact, error: assert_law(value, exact, error, count)
    jax.tree.map(check, made.value, mean, made.standard_error)


# -- the programs ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "argv", "pictures", "said"),
    [
        (
            convolutional,
            ["--filters=3", "--unbiased-steps=2", "--temperatures=20"],
            ("samples", "filters", "history"),
            "log-likelihood, held out",
        ),
        (
            convolutional,
            ["--pool=1", "--filters=3", "--unbiased-steps=2", "--temperatures=20"],
            ("samples",),
            "ink",
        ),
        (third_order, ["--latent=4", "--factors=5"], ("analogies", "filters"), "move, carried over"),
        (custom_energy, ["--latent=3"], ("samples",), "not affine in the sufficient statistics of block 'v'"),
        (custom_energy, ["--latent=3", "--unsupervised"], ("samples",), "adjusted Rand index"),
    ],
)
def test_from_end_to_end(
    program: ModuleType,
    argv: list[str],
    pictures: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program.main([*argv, *FEW, f"--out={tmp_path}"])
    for name in pictures:
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    with xr.open_datatree(tmp_path / "history.nc", engine="h5netcdf") as tree:
        assert "gradient_norm" in {v for node in tree.subtree for v in node.data_vars}
    assert said in capsys.readouterr().out


def test_pairs_are_moved_as_they_say() -> None:
    images = digit_images.images("digits", 0).held_out[:20]
    made = third_order.pairs(images, seed=1)
    assert set(made.move) <= set(range(9)) and len(set(made.move)) > 4
    for x, y, m in zip(*made, strict=True):
        down, right = third_order.MOVES[m]
        x, y = x.reshape(8, 8), y.reshape(8, 8)
        for i, j in np.ndindex(8, 8):
            assert y[(i + down) % 8, (j + right) % 8] == x[i, j]


def test_an_energy_that_is_not_multi_affine_is_refused() -> None:
    assert "not affine in the sufficient statistics of block 'v'" in custom_energy.refused()


def test_bad_options_say_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in (
        (["--latent=0"], "--latent is at least 1, not 0"),
        (["--latent=15"], "--latent is at most 14"),
        (["--rate=nan"], "--rate is a positive number"),
    ):
        with pytest.raises(SystemExit):
            custom_energy.main(argv)
        assert said in capsys.readouterr().err
