# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local modes are local modes."""

import functools
from typing import Any

import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.errors import StateError
from helpers import assert_law, assert_rows_law, numpy_log_weight, numpy_states, random_state, slow

GRAPH = ebmpp.layered(v=ebmpp.Bernoulli(4), h1=ebmpp.Spin(3), h2=ebmpp.Categorical(2, 3))
PARAMS = jax.tree.map(
    lambda a: jax.random.normal(jax.random.key(a.size), a.shape), GRAPH.init(jax.random.key(0))
)


ROWS = 25
KNOWN = np.random.default_rng(1).random((ROWS, 4)) < 0.3


def observed() -> ebmpp.Observed:
    return ebmpp.Observed(np.where(KNOWN, np.arange(4) % 2, np.nan), KNOWN)


@functools.cache
def everything() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """All joint states, and their log densities up to a constant."""
    values = {b: np.array(numpy_states(f)) for b, f in GRAPH.families.items()}
    index = np.indices([len(v) for v in values.values()]).reshape(len(values), -1)
    states = {b: v[i] for (b, v), i in zip(values.items(), index, strict=True)}
    params = jax.tree.map(lambda a: np.asarray(a, float), PARAMS)
    rows = ({b: v[i] for b, v in states.items()} for i in range(index.shape[1]))
    return states, np.array([numpy_log_weight(GRAPH, params, x) for x in rows])


def assert_modes(found: dict, fixed: dict[str, np.ndarray] | None = None) -> None:
    """No layer can raise the density of a row by itself.

    :param fixed: units that are not the search's to change: masks like ``found``, or one for all rows.
    """
    states, density = everything()
    found = {b: np.asarray(v) for b, v in found.items()}
    for row in range(len(found["v"])):
        x = {b: v[row] for b, v in found.items()}
        agrees = {b: states[b] == x[b] for b in x}
        value = density[np.all([a.all(1) for a in agrees.values()], axis=0)]
        assert len(value) == 1
        for layer in GRAPH.layers:
            same = np.ones(len(density), bool)
            for b in x:
                mask = np.broadcast_to((fixed or {}).get(b, b not in layer), found[b].shape)[row]
                same &= (agrees[b] | ~(mask | (b not in layer))).all(1)
            assert density[same].max() <= value[0] + 1e-4


def test_no_layer_can_raise_the_density_of_what_is_found() -> None:
    mode = ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(1), num_rows=200)
    assert_modes(mode.state)
    assert (mode.steps >= 0).all() and len(np.unique(mode.steps)) > 1
    value = np.asarray(GRAPH.log_density(PARAMS, mode.state))
    assert value.max() == pytest.approx(everything()[1].max(), abs=1e-4)  # one of 200 finds the best
    assert len(np.unique(value.round(3))) > 1  # and there is more than one to find


def test_clamped_blocks_stay_and_starts_are_used() -> None:
    v = jnp.array([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    mode = ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(2), v=v)
    assert (mode.state["v"] == v).all()
    again = ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(3), init=mode.state)
    # a mode of the latents given v need not be one of all blocks, but searching on never goes down
    assert (GRAPH.log_density(PARAMS, again.state) >= GRAPH.log_density(PARAMS, mode.state)).all()


def test_observed_units_stay_and_the_others_are_optimal() -> None:
    known = {"v": KNOWN, "h2": np.array([True, False])}
    h2 = ebmpp.Observed(np.array([2, 7]), known["h2"])  # 7 is not looked at
    mode = ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(4), v=observed(), h2=h2).state
    assert (np.asarray(mode["v"]) == np.arange(4) % 2)[KNOWN].all() and (mode["h2"][:, 0] == 2).all()
    assert_modes(mode, known)
    assert 0 < np.asarray(mode["v"])[~KNOWN].mean() < 1


@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_the_layer_that_goes_first_is_random(first: str) -> None:
    # three units, each wants to be on and hinders the others: whoever goes first is on
    found = triangle()
    names = ["a", "b", "c"]
    on = np.concatenate([np.asarray(found[b]) for b in names], axis=1)
    assert (on.sum(1) == 1).all()
    share = on[:, names.index(first)].mean()
    assert_law(share, 1 / 3, np.sqrt(2 / 9 / len(on)), 3)


@functools.cache
def triangle() -> dict:
    names, bonds = ("a", "b", "c"), (("a", "b"), ("b", "c"), ("a", "c"))
    graph = ebmpp.FactorGraph(
        {b: ebmpp.Bernoulli(1) for b in names},
        factors=[*map(ebmpp.Bias, names), *(ebmpp.Bilinear(*bond) for bond in bonds)],
    )
    params = {b: jnp.ones(1) for b in names} | {":".join(bond): jnp.full((1, 1), -3.0) for bond in bonds}
    init = {b: jnp.zeros((3000, 1)) for b in names}
    return ebmpp.local_search(graph, params, rng_key=jax.random.key(0), init=init).state


@pytest.mark.slow
def test_gaussian_means_are_found() -> None:
    graph = ebmpp.layered(v=ebmpp.Gaussian(3), h=ebmpp.Gaussian(2))
    params = {"v": jnp.ones(3), "h": jnp.zeros(2), "v:h": 0.3 * jnp.ones((3, 2))}
    mode = ebmpp.local_search(graph, params, rng_key=jax.random.key(0), num_rows=3)
    precision = np.block([[np.eye(3), -0.3 * np.ones((3, 2))], [-0.3 * np.ones((2, 3)), np.eye(2)]])
    exact = np.linalg.solve(precision, np.array([1.0, 1, 1, 0, 0]))
    assert np.abs(np.asarray(mode.state["v"]) - exact[:3]).max() < 2e-3


def test_a_change_that_the_energy_cannot_show_is_made() -> None:
    # next to 1e9 a gain of 1 is below the last bit of the energy
    graph = ebmpp.layered(v=ebmpp.Bernoulli(2), h=ebmpp.Bernoulli(1))
    params = {"v": jnp.array([1e9, 1.0]), "h": jnp.array([-1.0]), "v:h": jnp.zeros((2, 1))}
    init = {"v": jnp.array([[1.0, 0.0]] * 4), "h": jnp.zeros((4, 1))}
    mode = ebmpp.local_search(graph, params, rng_key=jax.random.key(0), init=init)
    np.testing.assert_array_equal(mode.state["v"], 1)
    np.testing.assert_array_equal(mode.steps, 1)


@pytest.mark.parametrize("family", [ebmpp.Bernoulli, ebmpp.Spin])
def test_ties_go_up(family: type) -> None:
    graph = ebmpp.layered(v=family(3), h=family(2))
    params = jax.tree.map(jnp.zeros_like, graph.init(jax.random.key(0)))
    mode = ebmpp.local_search(graph, params, rng_key=jax.random.key(0), num_rows=8)
    assert all((v == 1).all() for v in mode.state.values())


class Contrary(ebmpp.Bernoulli):
    """Of a mode that is the other value: what rounding does near a tie, at its worst."""

    def mode(self, eta: jax.Array) -> jax.Array:
        return 1 - super().mode(eta)


def test_a_search_that_goes_in_circles_ends() -> None:
    graph = ebmpp.layered(v=Contrary(1), h=ebmpp.Bernoulli(1))
    params = {"v": jnp.array([-1.0]), "h": jnp.array([-1.0]), "v:h": jnp.full((1, 1), 2.0)}
    mode = ebmpp.local_search(graph, params, rng_key=jax.random.key(0), num_rows=8)
    assert (mode.steps < 10).all()


def test_bad_calls_are_told() -> None:
    with pytest.raises(StateError, match="every block is clamped"):
        ebmpp.local_search(
            GRAPH,
            PARAMS,
            rng_key=jax.random.key(0),
            v=jnp.ones(4),
            h1=jnp.ones(3),
            h2=jnp.zeros(2, int),
        )
    with pytest.raises(StateError, match=r"num_rows=3 with leading axes \(2,\)"):
        ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(0), num_rows=3, v=jnp.ones((2, 4)))


# -- the kernel ----------------------------------------------------------------------------------


@functools.cache
def start() -> dict[str, np.ndarray]:
    """Random values for two chains of many rows."""
    return {b: np.stack([random_state(f, i, (ROWS,)) for i in range(2)]) for b, f in GRAPH.families.items()}


@functools.cache
def two_searches(method: Any) -> MCMC:
    mcmc = MCMC(
        ebmpp.kernels.LocalSearch(GRAPH),
        num_warmup=0,
        num_samples=8,
        num_chains=2,
        chain_method=method,
        progress_bar=False,
    )
    fields = ("steps", "found", "log_density")
    mcmc.run(jax.random.key(2), PARAMS, init_params=start(), extra_fields=fields, v=observed())
    return mcmc


def test_the_kernel_climbs_to_a_mode_and_stays() -> None:
    mcmc = two_searches("vectorized")
    z, extra = mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(group_by_chain=True)
    found, density, steps = (np.asarray(extra[name]) for name in ("found", "log_density", "steps"))
    assert found.shape == (2, 8, ROWS)
    np.testing.assert_allclose(density, GRAPH.log_density(PARAMS, z), atol=1e-4)
    rise, made = np.diff(density, axis=1), np.diff(steps, axis=1)
    assert ((rise > 0) == (made == 1)).all() and ((rise == 0) == (made == 0)).all()
    assert ((made == 0) == found[:, 1:]).all()  # a pass that raises nothing is the last
    assert found[:, -1].all() and not found[:, 0].all()
    for chain in range(2):
        assert_modes({b: v[chain] for b, v in mcmc.last_state.z.items()}, {"v": KNOWN})
    told = mcmc.sampler.get_diagnostics_str(mcmc.last_state)
    assert told == f"50 of 50 searches at a local mode, after {steps[:, -1].mean():.3g} steps"


def test_the_kernel_finds_what_local_search_finds() -> None:
    state = two_searches("vectorized").last_state
    for chain, key in enumerate(jax.random.split(jax.random.key(2), 2)):
        init = {b: v[chain] for b, v in start().items()}
        mode = ebmpp.local_search(GRAPH, PARAMS, rng_key=key, init=init, v=observed())
        for b, value in state.z.items():
            np.testing.assert_array_equal(value[chain], mode.state[b])
        np.testing.assert_array_equal(state.steps[chain], mode.steps)


# NumPyro donates its collection of scalars and cannot always use it under a vmap of its own
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("method", ["parallel", slow("sequential"), slow(jax.vmap)])
def test_chain_methods_agree_bitwise(method: Any) -> None:
    wanted, given = (
        {**mcmc.get_samples(), **mcmc.get_extra_fields()}
        for mcmc in (two_searches("vectorized"), two_searches(method))
    )
    np.testing.assert_allclose(given.pop("log_density"), wanted.pop("log_density"), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, given, wanted)


# -- starts of other kernels ---------------------------------------------------------------------


@pytest.mark.slow
def test_local_mode_starts_are_one_sweep_from_a_mode() -> None:
    rows = 4000
    kernel = ebmpp.MaximalCoupling(GRAPH, lag=2, init="local_mode")
    keys = jax.random.split(jax.random.key(3), rows)
    pairs = jax.jit(lambda keys: kernel.init(keys, 0, None, (PARAMS,), {}))(keys)
    start = {b: np.asarray(v) for b, v in pairs.y.items()}
    mode = ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(9), num_rows=rows).state
    # the first layer is drawn given the mode, the second given the first
    assert GRAPH.layers == (("v", "h2"), ("h1",))
    given_mode = np.asarray(GRAPH.mean(PARAMS, mode, "v"))
    error = np.sqrt((start["v"].var(0) + given_mode.var(0)) / rows)
    assert_law(start["v"].mean(0), given_mode.mean(0), error)
    assert_rows_law(start["h1"] - np.asarray(GRAPH.mean(PARAMS, start, "h1")), np.zeros(3))
    both = {b: jnp.stack([start[b], mode[b]]) for b in start}
    of_start, of_mode = np.asarray(GRAPH.log_density(PARAMS, both)).mean(1)
    assert everything()[1].mean() + 1 < of_start < of_mode  # the first is that of uniform draws
