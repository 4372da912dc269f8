# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Many devices: the same pairs, particles and chains as on one, and nothing that they wait for in a loop."""

from collections.abc import Callable
import functools
import re
import sys
from typing import Any

import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import ebmpp
from ebmpp.core import random, sharding
from ebmpp.errors import ArgumentError, ParameterError, StateError
from ebmpp.kernels import over_devices
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from ebmpp.sampling.accumulators import EnergyGradient
from ebmpp.sampling.engine import Window, run_pairs
from ebmpp.sampling.expectation import UnbiasedEstimate
from helpers import often, slow

RBM = ebmpp.layered(v=ebmpp.Bernoulli(6), h=ebmpp.Bernoulli(4))
PARAMS = jax.tree.map(
    lambda a: a + 0.8 * jax.random.normal(jax.random.key(3), a.shape), RBM.init(jax.random.key(0))
)
KEY = jax.random.key(7)
CLAMPED = {"v": np.random.default_rng(0).integers(0, 2, (20, 6)).astype(np.float32)}


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("rows",))


def both(x: dict[str, Any]) -> dict[str, Any]:
    return dict(x)


def pairs(mesh: Mesh | None, **options: Any) -> UnbiasedEstimate:
    return ebmpp.unbiased_expectation(RBM, PARAMS, both, rng_key=KEY, num_pairs=20, mesh=mesh, **options)


CASES = {
    "gibbs": (2, {"m": 5}),
    "metropolis": (8, {"coupling": "metropolis"}),  # 8 do not divide 20
    "a row each": (8, CLAMPED),
}


@pytest.mark.parametrize("name", often(CASES, "gibbs"))
def test_pairs_are_those_of_one_device(name: str) -> None:
    devices, options = CASES[name]
    one, many = pairs(None, **options), pairs(mesh_of(devices), **options)
    np.testing.assert_array_equal(many.meeting_time, one.meeting_time)
    assert (many.trials, many.num_unmet) == (one.trials, 0)
    np.testing.assert_equal(many.acceptance, one.acceptance)
    for told, there in ((many.value, one.value), (many.standard_error, one.standard_error)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), told, there)


@pytest.mark.slow
def test_fewer_jobs_than_devices() -> None:
    few = ebmpp.unbiased_expectation(RBM, PARAMS, both, rng_key=KEY, num_pairs=3, m=5, mesh=mesh_of(8))
    np.testing.assert_array_equal(few.meeting_time, pairs(None, m=5).meeting_time[:3])


def test_particles_are_those_of_one_device() -> None:
    options = {"rng_key": KEY, "num_particles": 60}
    one, many = (ebmpp.smc(RBM, PARAMS, mesh=mesh, **options) for mesh in (None, mesh_of(4)))
    np.testing.assert_allclose(many.log_z, one.log_z, rtol=1e-5)  # 4 do not divide the 10 islands
    np.testing.assert_array_equal(many.particles["v"], one.particles["v"])
    assert many.num_rungs == one.num_rungs
    truth = float(ebmpp.exact.log_partition(RBM, PARAMS))
    assert abs(many.log_partition - truth) < 4 * many.standard_error


@pytest.mark.slow
def test_pairs_of_systems_are_those_of_one_device() -> None:
    away = [jax.tree.map(lambda a: -a, PARAMS)]  # a detour, so that systems differ and some are turned down
    options = {"rng_key": KEY, "num_particles": 2, "num_pairs": 9, "ladder": [0, 1, 2], "path": away}
    one, many = (
        ebmpp.particle_expectation(RBM, PARAMS, both, mesh=mesh, **options) for mesh in (None, mesh_of(4))
    )
    np.testing.assert_array_equal(many.meeting_time, one.meeting_time)
    assert many.meeting_time.max() > 1  # else the systems that count are no more than the first two
    np.testing.assert_allclose(many.value["v"], one.value["v"], rtol=1e-5)
    np.testing.assert_array_equal(many.cost, one.cost)


@pytest.mark.parametrize("ladder", ["linear", "adaptive"])
def test_annealing_is_that_of_one_device(ladder: str) -> None:
    options = {"rng_key": KEY, "num_particles": 20, "num_temperatures": 150, "ladder": ladder}
    one, many = (ebmpp.ais(RBM, PARAMS, mesh=mesh, **options) for mesh in (None, mesh_of(8)))
    np.testing.assert_allclose(many.log_weights, one.log_weights, rtol=1e-4)


# -- what is compiled ------------------------------------------------------------------------------

_COLLECTIVE = re.compile(
    r"= (\([^()]*\)|\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def computations(text: str) -> dict[str, str]:
    """The bodies of a compiled program's computations, by name."""
    found = re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    assert found
    return dict(found)


def in_loops(text: str) -> list[str]:
    """Collectives in loops, and in what loops call."""
    bodies = computations(text)
    loops = re.compile(r"(?:body|condition)=%?([\w.\-]+)")
    waiting = [name for body in bodies.values() for name in loops.findall(body)]
    seen, told = set(), []
    assert waiting
    while waiting:
        if (name := waiting.pop()) in seen:
            continue
        seen.add(name)
        told += [made.group(2) for made in _COLLECTIVE.finditer(bodies[name])]
        waiting += [other for other in re.findall(r"%([\w.\-]+)", bodies[name]) if other in bodies]
    return told


def reduced(text: str) -> list[int]:
    """Numbers that each all-reduce adds up."""
    shapes = [made.group(1) for made in _COLLECTIVE.finditer(text) if made.group(2) == "all-reduce"]
    dims = [re.findall(r"f32\[([\d,]*)\]", shape) for shape in shapes]
    return [sum(int(np.prod([int(n) for n in d.split(",") if n])) for d in each) for each in dims]


def test_devices_wait_for_one_another_once_a_run() -> None:
    moves, key = resolve_moves(RBM, None), random.key_pair(KEY)
    window = Window(*(np.int32(n) for n in (2, 4, 2, 0)))
    start = RBM.statistics({b: np.zeros((24, *f.shape), np.float32) for b, f in RBM.families.items()})
    with sharding.over("mesh", mesh_of(8)):
        made = run_pairs.lower(Target(RBM, PARAMS), moves, EnergyGradient(), 4, start, start, key, window)
        text = made.compile().as_text()
    assert in_loops(text) == []
    assert max(reduced(text)) >= sum(a.size for a in jax.tree.leaves(PARAMS))
    assert len(reduced(text)) == 1


def test_the_test_finds_a_collective_in_a_loop() -> None:
    with sharding.over("mesh", mesh_of(2)):
        step = lambda i, x: x - x.mean()
        text = jax.jit(lambda x: jax.lax.fori_loop(0, 5, step, sharding.rows(x))).lower(np.ones(8)).compile()
    assert "all-reduce" in in_loops(text.as_text())


# -- chains ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [ebmpp.BlockedGibbs, slow(ebmpp.MaximalCoupling)])
def test_chains_over_devices_are_those_of_one(kernel: Callable[..., Any]) -> None:
    draws = []
    for method in ("vectorized", over_devices(mesh_of(4))):
        options = {"num_warmup": 1, "num_samples": 4, "num_chains": 8, "progress_bar": False}
        mcmc = MCMC(kernel(RBM), chain_method=method, **options)
        mcmc.run(KEY, PARAMS)
        draws.append(mcmc.get_samples(group_by_chain=True)["v"])
    np.testing.assert_array_equal(*draws)
    assert draws[1].sharding.spec == P("rows")


@pytest.mark.parametrize("family", [ebmpp.Bernoulli, slow(ebmpp.Gaussian)])
def test_chains_over_devices_may_be_the_first_thing_done_with_a_graph(family: Callable[..., Any]) -> None:
    # what is found out about a graph amid each device's own program is found out once, and looked up later
    for module in [module for name, module in sys.modules.items() if name.startswith("ebmpp")]:
        for fn in vars(module).values():
            if isinstance(fn, functools._lru_cache_wrapper):
                fn.cache_clear()
    graph = ebmpp.layered(v=family(5), h=ebmpp.Bernoulli(3))
    options = {"num_warmup": 0, "num_samples": 2, "num_chains": 4, "progress_bar": False}
    mcmc = MCMC(ebmpp.BlockedGibbs(graph), chain_method=over_devices(mesh_of(2)), **options)
    mcmc.run(KEY, graph.init(KEY))
    assert mcmc.get_samples()["v"].shape == (8, 5)


def test_a_number_of_chains_that_devices_do_not_divide_is_refused() -> None:
    mcmc = MCMC(
        ebmpp.BlockedGibbs(RBM),
        num_warmup=0,
        num_samples=1,
        num_chains=6,
        chain_method=over_devices(mesh_of(4)),
        progress_bar=False,
    )
    with pytest.raises(ArgumentError, match="num_chains is a multiple of the axis's 4 devices, not 6"):
        mcmc.run(KEY, PARAMS)


# -- params, and what is no mesh -------------------------------------------------------------------


@pytest.mark.slow
def test_params_may_be_cut_over_another_axis() -> None:
    mesh = jax.make_mesh((2, 4), ("rows", "units"))
    cut = {**PARAMS, "v:h": jax.device_put(PARAMS["v:h"], NamedSharding(mesh, P(None, "units")))}
    one = pairs(None, m=5)
    many = ebmpp.unbiased_expectation(RBM, cut, both, rng_key=KEY, num_pairs=20, m=5, mesh=mesh)
    np.testing.assert_array_equal(many.meeting_time, one.meeting_time)


def test_params_cut_over_an_axis_that_the_mesh_lacks_are_named() -> None:
    auto = jax.make_mesh((2, 4), ("rows", "units"), axis_types=(AxisType.Auto,) * 2)
    cut = {**PARAMS, "v:h": jax.device_put(PARAMS["v:h"], NamedSharding(auto, P(None, "units")))}
    told = r"mesh: the array \['v:h'\] is cut over 'units', and this mesh has the axes \('rows',\)"
    with pytest.raises(ArgumentError, match=told):
        ebmpp.unbiased_expectation(RBM, cut, both, rng_key=KEY, num_pairs=2, mesh=mesh_of(2))


@pytest.mark.parametrize("spec", [P(), P(None, "units")])
def test_arrays_over_explicit_axes_need_the_mesh(spec: P) -> None:
    mesh = jax.make_mesh((2, 4), ("rows", "units"), axis_types=(AxisType.Explicit,) * 2)
    cut = {**PARAMS, "v:h": jax.device_put(PARAMS["v:h"], NamedSharding(mesh, spec))}
    told = (
        r"an array over a mesh with explicit axes, \('rows', 'units'\); give mesh=, .*AxisType.Auto,\) \* 2"
    )
    with pytest.raises(ParameterError, match="factor 'v:h': " + told):
        RBM.free_energy(cut, CLAMPED)
    rows = jax.device_put(CLAMPED["v"], NamedSharding(mesh, P("rows")))
    with pytest.raises(StateError, match="block 'v': " + told):
        ebmpp.fit(RBM, rows, rng_key=KEY, num_steps=1, progress_bar=False)


@pytest.mark.slow
def test_a_mesh_of_one_device_changes_nothing() -> None:
    one, same = pairs(None, m=5), pairs(mesh_of(1), m=5)
    np.testing.assert_array_equal(same.value["h"], one.value["h"])


@pytest.mark.parametrize("wrong", [8, "rows", P("rows")])
def test_what_is_no_mesh_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="unbiased_expectation: mesh is a jax.sharding.Mesh"):
        pairs(wrong)


def test_a_mesh_without_an_axis_is_refused() -> None:
    with pytest.raises(ArgumentError, match="smc: mesh: rows go over the mesh's first axis, and this"):
        ebmpp.smc(RBM, PARAMS, rng_key=KEY, mesh=Mesh(np.array(jax.devices()[0]), ()))
