# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Many devices give the pairs, particles and estimates of one device."""

from typing import Any

import numpy as np
import pytest
from ucd_tools import flat, problem
import zoo

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import ebmpp
from ebmpp.errors import ArgumentError, ParameterError, StateError
from ebmpp.sampling.expectation import UnbiasedEstimate
from helpers import slow

ROWS = np.random.default_rng(0).integers(0, 2, (20, 4)).astype(np.float32)


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("rows",))


def values(x: dict[str, Any]) -> dict[str, Any]:
    return dict(x)


def pairs(mesh: Any, params: Any = None, num_pairs: int = 20, **options: Any) -> UnbiasedEstimate:
    graph, usual, _ = problem("rbm")
    return ebmpp.unbiased_expectation(
        graph, params or usual, values, rng_key=zoo.KEY, num_pairs=num_pairs, mesh=mesh, **options
    )


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"m": 5}),
        slow(1, {"m": 5}),
        slow(8, {"coupling": "metropolis"}),  # 8 do not divide 20
        slow(8, {"v": ROWS}),
    ],
    ids=str,
)
def test_pairs_are_those_of_one_device(devices: int, options: dict[str, Any]) -> None:
    single, sharded = pairs(None, **options), pairs(mesh_of(devices), **options)
    np.testing.assert_array_equal(sharded.meeting_time, single.meeting_time)
    assert len(np.unique(single.meeting_time)) > 1 and (sharded.trials, sharded.num_unmet) == (
        single.trials,
        0,
    )
    np.testing.assert_equal(sharded.acceptance, single.acceptance)
    for name in ("value", "standard_error"):
        values_of = flat(getattr(sharded, name)), flat(getattr(single, name))
        np.testing.assert_allclose(*values_of, rtol=1e-5, atol=1e-6)


def test_params_sharded_over_axes_that_do_not_fit_are_refused() -> None:
    graph, params, _ = problem("rbm")
    shard = lambda kind: NamedSharding(
        jax.make_mesh((2, 4), ("rows", "units"), axis_types=(kind,) * 2), P("units", None)
    )
    cut = {**params, "v:h": jax.device_put(np.asarray(params["v:h"]), shard(AxisType.Auto))}
    with pytest.raises(ArgumentError, match=r"\['v:h'\] .*'units'"):
        pairs(mesh_of(2), cut)
    cut = {**params, "v:h": jax.device_put(np.asarray(params["v:h"]), shard(AxisType.Explicit))}
    with pytest.raises(ParameterError, match="'v:h': .*explicit"):
        graph.free_energy(cut, {"v": ROWS})
    rows = jax.device_put(ROWS, NamedSharding(shard(AxisType.Explicit).mesh, P("rows")))
    with pytest.raises(StateError, match="block 'v': .*explicit"):
        ebmpp.fit(graph, rows, rng_key=zoo.KEY, num_steps=1, progress_bar=False)


def test_invalid_meshes_are_refused() -> None:
    graph, params, _ = problem("rbm")
    for mesh in (8, "rows", P("rows")):
        with pytest.raises(ArgumentError, match="unbiased_expectation: mesh"):
            pairs(mesh)
    with pytest.raises(ArgumentError, match="smc: mesh"):
        ebmpp.smc(graph, params, rng_key=zoo.KEY, mesh=Mesh(np.array(jax.devices()[0]), ()))
