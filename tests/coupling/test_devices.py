# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Many devices give the pairs, particles, chains and estimates of one device.

Tests core/sharding.py.
"""

from collections.abc import Callable
import re
from typing import Any

import numpy as np
from numpyro.infer import MCMC
import pytest
from ucd_tools import flat, key, problem, two_modes
import zoo

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import ebmpp
from ebmpp.contrib import metropolis_sweep
from ebmpp.core import sharding
from ebmpp.coupling.accumulators import EnergyGradient
from ebmpp.coupling.engine import Window, run_pairs
from ebmpp.coupling.expectation import UnbiasedEstimate
from ebmpp.errors import ArgumentError, ParameterError, StateError
from ebmpp.kernels import sharded_chains
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from helpers import nightly

ROWS = np.random.default_rng(0).integers(0, 2, (20, 4)).astype(np.float32)


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("rows",))


def values(x: dict[str, Any]) -> dict[str, Any]:
    return dict(x)


def pairs(
    mesh: Any, params: Any = None, num_pairs: int = 20, **options: Any
) -> UnbiasedEstimate:
    graph, usual, _ = problem("rbm")
    return ebmpp.unbiased_expectation(
        graph,
        params or usual,
        values,
        rng_key=zoo.KEY,
        num_pairs=num_pairs,
        mesh=mesh,
        **options,
    )


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        nightly(2, {"m": 5}),
        nightly(8, {"coupling": metropolis_sweep}),
        nightly(8, {"v": ROWS}),
    ],  # 8 do not divide 20
    ids=lambda value: str(value)[:9],
)
def test_pairs_are_those_of_one_device(devices: int, options: dict[str, Any]) -> None:
    single, sharded = pairs(None, **options), pairs(mesh_of(devices), **options)
    np.testing.assert_array_equal(sharded.meeting_time, single.meeting_time)
    assert len(np.unique(single.meeting_time)) > 1
    assert (sharded.trials, sharded.num_unmet) == (single.trials, 0)
    np.testing.assert_equal(sharded.acceptance, single.acceptance)
    for name in ("value", "standard_error"):
        values_of = flat(getattr(sharded, name)), flat(getattr(single, name))
        np.testing.assert_allclose(*values_of, rtol=1e-5, atol=1e-6)


def test_params_sharded_over_axes_that_do_not_fit_are_refused() -> None:
    graph, params, _ = problem("rbm")
    shard = lambda kind: NamedSharding(
        jax.make_mesh((2, 4), ("rows", "units"), axis_types=(kind,) * 2),
        P("units", None),
    )
    cut = {
        **params,
        "v:h": jax.device_put(np.asarray(params["v:h"]), shard(AxisType.Auto)),
    }
    with pytest.raises(ArgumentError, match=r"'units'.*\['v:h'\]"):
        pairs(mesh_of(2), cut)
    cut = {
        **params,
        "v:h": jax.device_put(np.asarray(params["v:h"]), shard(AxisType.Explicit)),
    }
    with pytest.raises(ParameterError, match="'v:h' .*explicit"):
        graph.free_energy(cut, {"v": ROWS})
    rows = jax.device_put(ROWS, NamedSharding(shard(AxisType.Explicit).mesh, P("rows")))
    with pytest.raises(StateError, match="block 'v' .*explicit"):
        ebmpp.fit(graph, rows, rng_key=zoo.KEY, num_steps=1, progress_bar=False)


def test_invalid_meshes_are_refused() -> None:
    graph, params, _ = problem("rbm")
    for mesh in (8, "rows", P("rows")):
        with pytest.raises(ArgumentError, match="unbiased_expectation: mesh"):
            pairs(mesh)
    with pytest.raises(ArgumentError, match="smc: mesh"):
        ebmpp.smc(
            graph, params, rng_key=zoo.KEY, mesh=Mesh(np.array(jax.devices()[0]), ())
        )


def run(name: str, *arguments: Any, **options: Any) -> list[Any]:
    """Results of one device and of several."""
    call = lambda mesh: getattr(ebmpp, name)(
        zoo.graph("rbm"), two_modes(), *arguments, rng_key=zoo.KEY, mesh=mesh, **options
    )
    return [call(None), call(mesh_of(4))]  # 4 do not divide 10 islands, 9 pairs


@pytest.mark.nightly
def test_particles_and_their_pairs_are_those_of_one_device() -> None:
    single, sharded = run("smc", num_particles=200)
    np.testing.assert_allclose(sharded.log_z, single.log_z, rtol=1e-5)
    np.testing.assert_array_equal(sharded.particles["v"], single.particles["v"])
    assert sharded.num_rungs == single.num_rungs
    for ladder in ("linear", "adaptive"):
        single, sharded = run(
            "ais", num_particles=30, num_temperatures=150, ladder=ladder
        )
        np.testing.assert_allclose(sharded.log_weights, single.log_weights, rtol=1e-4)
    options = {"num_particles": 2, "num_pairs": 9, "ladder": [0, 1]}
    single, sharded = run("particle_expectation", values, **options)
    np.testing.assert_array_equal(sharded.meeting_time, single.meeting_time)
    np.testing.assert_array_equal(sharded.cost, single.cost)
    np.testing.assert_allclose(sharded.value["v"], single.value["v"], rtol=1e-5)
    assert sharded.meeting_time.max() > 1


@pytest.mark.nightly
def test_params_may_be_sharded_over_another_axis() -> None:
    params = problem("rbm")[1]
    mesh = jax.make_mesh((2, 4), ("rows", "units"))
    shard = NamedSharding(mesh, P("units", None))
    cut = {**params, "v:h": jax.device_put(np.asarray(params["v:h"]), shard)}
    single, sharded = pairs(None, m=5), pairs(mesh, cut, m=5)
    np.testing.assert_array_equal(sharded.meeting_time, single.meeting_time)


_COLLECTIVE = re.compile(
    r"= (?:\([^()]*\)|\S+) "
    r"(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


@pytest.mark.nightly
def test_devices_synchronise_once_per_run() -> None:
    graph, params, _ = problem("rbm")
    window = Window(*(np.int32(n) for n in (2, 4, 2, 0)))
    start = {b: np.zeros((24, *f.shape), np.float32) for b, f in graph.families.items()}
    statics = resolve_moves(graph, None), EnergyGradient(), 4
    with sharding.use_mesh("mesh", mesh_of(8)):
        program = run_pairs.lower(
            Target(graph, params), *statics, start, start, key(7), window
        )
        text = program.compile().as_text()
    outside_loops = re.search(r"^ENTRY .*?^\}", text, re.M | re.S)
    assert (
        outside_loops
        and _COLLECTIVE.findall(outside_loops.group()).count("all-reduce") == 1
    )
    assert _COLLECTIVE.findall(text) == _COLLECTIVE.findall(outside_loops.group())


def sampler(kernel: Any, method: Any, num_chains: int = 8) -> MCMC:
    options = {
        "num_warmup": 1,
        "num_samples": 4,
        "num_chains": num_chains,
        "progress_bar": False,
    }
    return MCMC(kernel, chain_method=method, **options)


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", [ebmpp.BlockedGibbs, ebmpp.MaximalCoupling])
def test_chains_over_devices_are_those_of_one(kernel: Callable[..., Any]) -> None:
    graph, params, _ = problem("rbm")
    draws = []
    for method in ("vectorized", sharded_chains(mesh_of(4))):
        mcmc = sampler(kernel(graph), method)
        mcmc.run(zoo.KEY, params)
        draws.append(mcmc.get_samples(group_by_chain=True)["v"])
    np.testing.assert_array_equal(*draws)
    assert draws[1].sharding.spec == P("rows")
    with pytest.raises(ArgumentError, match="num_chains.*4 devices.*6"):
        sampler(kernel(graph), sharded_chains(mesh_of(4)), 6).run(zoo.KEY, params)
