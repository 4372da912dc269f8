# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Machines with lateral weights: tiny ones, and from end to end."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import jax

import ebmpp
from helpers import assert_law, enumerate_numpy, random_params
from models import semi_restricted

KEY = jax.random.key(0)


def test_pixels_are_joined_to_their_neighbours() -> None:
    for number, near in ((4, lambda d: d.sum() == 1), (8, lambda d: d.max() == 1)):
        found = {frozenset(edge) for edge in semi_restricted.lattice(4, number).edges}
        cells = itertools.combinations(np.ndindex(4, 4), 2)
        assert found == {frozenset(c) for c in cells if near(np.abs(np.subtract(*c)))}


@pytest.mark.parametrize(("kind", "parts"), [*zip(semi_restricted.KINDS, (2, 5, 9), strict=True)])
def test_each_is_drawn_in_as_few_parts_as_its_pairs_allow(kind: str, parts: int) -> None:
    assert len(semi_restricted.declare(kind, 3, 2, neighbours=8).layers) == parts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["semi-restricted", "fully visible"])
def test_coupled_chains_have_the_gradient_of_the_likelihood(kind: str) -> None:
    """Of 2x2 pixels: minus the gradient of log Z is the mean slope of the energy, by enumeration."""
    graph = semi_restricted.declare(kind, 2, 2, neighbours=8)
    params = random_params(graph, seed=3, scale=0.8)
    states, probs, log_z = enumerate_numpy(graph, params)
    np.testing.assert_allclose(ebmpp.exact.log_partition(graph, params), log_z, rtol=1e-5)
    found = ebmpp.unbiased_expectation(
        graph, params, lambda x: jax.grad(graph.energy)(params, x), rng_key=KEY, num_pairs=3000
    )
    slope = jax.jit(jax.vmap(lambda x: jax.grad(graph.energy)(params, x)))
    each = slope({b: np.stack([s[b] for s in states]) for b in graph.families})
    for name, value in found.value.items():
        exact = np.tensordot(probs, np.asarray(each[name], float), 1)
        assert_law(value, exact, found.standard_error[name])


def test_lateral_weights_are_shown_where_they_are() -> None:
    graph = semi_restricted.declare("semi-restricted", 3, 2, neighbours=4)
    params = random_params(graph, seed=1)
    made = semi_restricted.Machine(graph, ebmpp.Fit(graph, params, None, None, None), None, None)
    fields = semi_restricted.lateral_fields(made).reshape(9, 9)
    np.testing.assert_array_equal(fields, fields.T)
    corner = fields[0].reshape(3, 3)
    assert (corner != 0).sum() == 2 and corner[0, 1] != 0 and corner[1, 0] != 0
    np.testing.assert_allclose(np.triu(fields).sum(), params["v:v"].sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["pcd", "ucd"])
def test_it_writes_what_it_says(estimator: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    few = "--latent=3 --steps=3 --batch-size=10 --num-pairs=5 --sweeps=20 --temperatures=20"
    semi_restricted.main([*few.split(), "--no-progress", f"--estimator={estimator}", f"--out={tmp_path}"])
    for name in ("samples", "learning_curves", "meeting_times", *(f"{k}/weights" for k in folders())):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    for kind in folders():
        with xr.open_datatree(tmp_path / kind / "history.nc", engine="h5netcdf") as tree:
            assert "gradient_norm" in {v for node in tree.subtree for v in node.data_vars}
    told = capsys.readouterr().out
    assert told.count("log-likelihood, held out") == 3 and told.count("the same, exactly") == 1


def folders() -> list[str]:
    return [kind.replace(" ", "_") for kind in semi_restricted.KINDS]


def test_bad_options_say_what_is_wrong(capsys: pytest.CaptureFixture) -> None:
    refused = ((["--neighbours=6"], "invalid choice: 6"), (["--sweeps=2"], "--sweeps is at least 3, not 2"))
    for argv, said in refused:
        with pytest.raises(SystemExit):
            semi_restricted.parse(argv)
        assert said in capsys.readouterr().err
