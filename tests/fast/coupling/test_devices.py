# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Many devices give the pairs, particles, chains and estimates of one device."""

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
        pytest.param(
            8, {"coupling": metropolis_sweep}, id="metropolis", marks=pytest.mark.slow
        ),  # 8 do not divide 20
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
    with pytest.raises(ArgumentError, match=r"'units'.*\['v:h'\]"):
        pairs(mesh_of(2), cut)
    cut = {**params, "v:h": jax.device_put(np.asarray(params["v:h"]), shard(AxisType.Explicit))}
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
        ebmpp.smc(graph, params, rng_key=zoo.KEY, mesh=Mesh(np.array(jax.devices()[0]), ()))


def run(function: Callable[..., Any], *arguments: Any, mesh: Any, **options: Any) -> Any:
    graph, params = zoo.graph("rbm"), two_modes()
    return function(graph, params, *arguments, rng_key=zoo.KEY, mesh=mesh, **options)


@pytest.mark.slow
def test_particles_are_those_of_one_device() -> None:
    single, sharded = (run(ebmpp.smc, mesh=mesh, num_particles=60) for mesh in (None, mesh_of(4)))
    np.testing.assert_allclose(sharded.log_z, single.log_z, rtol=1e-5)  # 4 do not divide the 10 islands
    np.testing.assert_array_equal(sharded.particles["v"], single.particles["v"])
    assert sharded.num_rungs == single.num_rungs


@pytest.mark.slow
def test_pairs_of_systems_are_those_of_one_device() -> None:
    options = {"num_particles": 2, "num_pairs": 9, "ladder": [0, 1]}
    single, sharded = (
        run(ebmpp.particle_expectation, values, mesh=mesh, **options) for mesh in (None, mesh_of(4))
    )
    np.testing.assert_array_equal(sharded.meeting_time, single.meeting_time)
    assert sharded.meeting_time.max() > 1
    np.testing.assert_allclose(sharded.value["v"], single.value["v"], rtol=1e-5)
    np.testing.assert_array_equal(sharded.cost, single.cost)


@pytest.mark.slow
@pytest.mark.parametrize("ladder", ["linear", "adaptive"])
def test_annealing_is_that_of_one_device(ladder: str) -> None:
    options = {"num_particles": 20, "num_temperatures": 150, "ladder": ladder}
    single, sharded = (run(ebmpp.ais, mesh=mesh, **options) for mesh in (None, mesh_of(8)))
    np.testing.assert_allclose(sharded.log_weights, single.log_weights, rtol=1e-4)


@pytest.mark.slow
def test_params_may_be_sharded_over_another_axis() -> None:
    graph, params, _ = problem("rbm")
    mesh = jax.make_mesh((2, 4), ("rows", "units"))
    shard = NamedSharding(mesh, P("units", None))
    cut = {**params, "v:h": jax.device_put(np.asarray(params["v:h"]), shard)}
    single, sharded = (
        ebmpp.unbiased_expectation(graph, p, values, rng_key=zoo.KEY, num_pairs=20, m=5, mesh=m)
        for p, m in ((params, None), (cut, mesh))
    )
    np.testing.assert_array_equal(sharded.meeting_time, single.meeting_time)


_COLLECTIVE = re.compile(
    r"= (\([^()]*\)|\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collectives_in_loops(text: str) -> list[str]:
    """Collectives in loops of a compiled program, and in what loops call."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    loops = re.compile(r"(?:body|condition)=%?([\w.\-]+)")
    waiting = [name for body in bodies.values() for name in loops.findall(body)]
    seen, names = set(), []
    assert waiting
    while waiting:
        if (name := waiting.pop()) in seen:
            continue
        seen.add(name)
        names += [match.group(2) for match in _COLLECTIVE.finditer(bodies[name])]
        waiting += [other for other in re.findall(r"%([\w.\-]+)", bodies[name]) if other in bodies]
    return names


@pytest.mark.slow
def test_devices_synchronise_once_per_run() -> None:
    graph, params, _ = problem("rbm")
    window = Window(*(np.int32(n) for n in (2, 4, 2, 0)))
    start = {b: np.zeros((24, *f.shape), np.float32) for b, f in graph.families.items()}
    statics = resolve_moves(graph, None), EnergyGradient(), 4
    with sharding.over("mesh", mesh_of(8)):
        program = run_pairs.lower(Target(graph, params), *statics, start, start, key(7), window)
        text = program.compile().as_text()
    assert collectives_in_loops(text) == []
    assert [match.group(2) for match in _COLLECTIVE.finditer(text)].count("all-reduce") == 1
    # a collective in a loop would be found
    with sharding.over("mesh", mesh_of(2)):
        step = lambda i, x: x - x.mean()
        loop = jax.jit(lambda x: jax.lax.fori_loop(0, 5, step, sharding.rows(x))).lower(np.ones(8)).compile()
    assert "all-reduce" in collectives_in_loops(loop.as_text())


def sampler(kernel: Any, method: Any, num_chains: int = 8) -> MCMC:
    options = {"num_warmup": 1, "num_samples": 4, "num_chains": num_chains, "progress_bar": False}
    return MCMC(kernel, chain_method=method, **options)


@pytest.mark.slow
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
