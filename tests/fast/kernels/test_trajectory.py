# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Parallel tempering along a path of models: laws, the path as an argument, statistics, refusals."""

from functools import partial
import itertools
import pickle

import networkx as nx
import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Categorical, FactorGraph, Gaussian, Observed, Pairwise, Spin, layered
from ebmpp.errors import ArgumentError, DomainError
from ebmpp.kernels import ParallelTempering
from ebmpp.kernels.replicas import Ensemble, Knots
from ebmpp.moves import swaps
from ebmpp.moves.target import Target
from ebmpp.sampling import Path
from helpers import assert_rows_law, numpy_energy, often, pair, random_params, random_state

GRAPHS = {
    "bernoulli": layered(v=Bernoulli(4), h=Bernoulli(3)),
    "three layers": layered(v=Spin(3), h1=Spin(2), h2=Spin(2)),
    "potts": FactorGraph(
        {"x": Categorical(6, 3)}, factors=[Bias("x"), Pairwise("x", nx.circular_ladder_graph(3))]
    ),
    "lateral and latent": FactorGraph(
        {"x": Spin(6)},
        {"h": Bernoulli(2)},
        [Bias("x"), Bias("h"), Pairwise("x", nx.complete_graph(6)), ebmpp.Bilinear("x", "h")],
    ),
}


def reference(graph, seed=0):
    generator = np.random.default_rng(seed)
    make = lambda f: (
        f.default_eta() + jnp.asarray(0.3 * generator.normal(size=f.statistic_shape), jnp.float32)
    )
    return {b: make(f) for b, f in graph.families.items()}


def path_of(graph, num=2, scale=1.5):
    """Models that have little to do with one another."""
    each = [random_params(graph, seed=i, scale=scale) for i in range(num)]
    return Path.through(graph, reference(graph), each)


def model(graph):
    return random_params(graph, seed=9, scale=1.5)


@partial(jax.jit, static_argnums=(0, 4, 5))
def run(kernel, state, params, clamped, chains, sweeps):
    """The last state, from one of ``chains`` chains or from none."""
    del chains
    return jax.lax.scan(lambda s, _: (kernel.sample(s, (params,), clamped), None), state, length=sweeps)[0]


def simulate(kernel, params, chains=4000, sweeps=12, clamped=None):
    keys = jax.random.split(jax.random.key(1), chains)
    state = kernel.init(keys, 0, None, (params,), clamped or {})
    return run(kernel, state, params, clamped or {}, chains, sweeps)


def joint(graph, x):
    """Statistics of all blocks and all their products."""
    t = graph.statistics(x)
    t = np.concatenate([np.asarray(t[b]).reshape(len(t[b]), -1) for b in graph.families], axis=1)
    return np.einsum("ri,rj->rij", t, t)


@pytest.mark.parametrize("name", often(GRAPHS, "potts"))
def test_every_replica_has_the_law_of_its_knot(name):
    graph = GRAPHS[name]
    scale = 0.6 if "lateral" in name else 1.5  # six units that are all joined freeze early
    path, params = path_of(graph, scale=scale), random_params(graph, seed=9, scale=scale)
    state = simulate(ParallelTempering(graph, path=path), params)
    laws = [path.params_at(1), path.params_at(2), params]
    assert state.betas.shape == (4000, 4) and (state.betas[0] == jnp.array([0, 1, 1, 1])).all()
    for r, at in enumerate(laws, 1):
        states, p = ebmpp.exact.probabilities(graph, at)
        exact = np.einsum("s,sij->ij", np.asarray(p, float), joint(graph, states))
        drawn = joint(graph, {b: v[:, r] for b, v in state.replicas.items()})
        assert_rows_law(drawn, exact, comparisons=4 * exact.size)
    for b, eta0 in path.eta0.items():  # independent units
        drawn = graph.families[b].statistics(state.replicas[b][:, 0])
        assert_rows_law(drawn, graph.families[b].mean(eta0))
    jax.tree.map(np.testing.assert_array_equal, state.z, {b: v[:, -1] for b, v in state.replicas.items()})
    assert (np.bincount(state.origin[:, -1], minlength=4) > 20).all()


def test_knots_between_the_reference_and_a_model():
    graph = GRAPHS["bernoulli"]
    params = model(graph)
    path = Path.line(graph, reference(graph), params).cut(jnp.array([0.0, 0.4, 1.0]), jnp.array(3))
    kernel = ParallelTempering(graph, path=path)
    state = simulate(kernel, params)
    assert state.betas.shape == (4000, 3)  # the last knot is the model
    part = {b: 0.4 * params[b] + 0.6 * path.eta0[b] for b in ("v", "h")} | {"v:h": 0.4 * params["v:h"]}
    for r, law in ((1, part), (2, params)):
        for b, exact in ebmpp.exact.moments(graph, law).items():
            assert_rows_law(state.replicas[b][:, r], exact, comparisons=15)


@pytest.mark.slow
def test_a_gaussian_block():
    graph = pair(Gaussian(2, "learned"), Bernoulli(2))
    law = lambda s: random_params(graph, seed=s, scale=0.3)
    eta0 = {"a": jnp.array([[0.5, -0.4], [0.0, -0.5]]), "b": jnp.zeros(2)}
    state = simulate(ParallelTempering(graph, path=Path.through(graph, eta0, [law(1)])), law(2))
    exact = ebmpp.exact.moments(graph, law(2))
    for b, t in graph.statistics(state.z).items():
        assert_rows_law(t, exact[b], comparisons=6)


@pytest.mark.slow
def test_blocks_and_units_that_are_held():
    """Of summed blocks and of others, in rows."""
    graph = GRAPHS["bernoulli"]
    path, params = path_of(graph), model(graph)
    kernel = ParallelTempering(graph, path=path)
    states, p = ebmpp.exact.probabilities(graph, params)
    states, p = {b: np.asarray(v) for b, v in states.items()}, np.asarray(p, float)

    h = jnp.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    state = simulate(kernel, params, clamped={"h": h})
    assert state.z.keys() == {"v"} and state.replicas["v"].shape == (4000, 2, 4, 4)
    for row in range(2):
        assert_rows_law(state.z["v"][:, row], graph.mean(params, {"h": h}, "v")[row], comparisons=8)
    assert (state.rejection < 1e-3).all()  # nothing is left to swap: h is held and v summed out

    known = np.array([True, False, False, True])
    state = simulate(kernel, params, clamped={"v": Observed(np.array([1.0, 0.0, 0.0, 0.0]), known)})
    fits = (states["v"][:, 0] == 1) & (states["v"][:, 3] == 0)
    p = np.where(fits, p, 0) / p[fits].sum()
    assert (state.replicas["v"][..., 0] == 1).all() and (state.replicas["v"][..., 3] == 0).all()
    assert_rows_law(state.z["v"][:, 1:3], p @ states["v"][:, 1:3], comparisons=5)
    assert_rows_law(state.z["h"], p @ states["h"], comparisons=5)


@pytest.mark.parametrize(
    ("name", "summed"), [("three layers", ("v", "h2")), ("three layers", ()), ("potts", ())]
)
def test_swaps_are_accepted_by_the_laws_of_both_knots(name, summed):
    graph = GRAPHS[name]
    path, params = path_of(graph), model(graph)
    ensemble = Ensemble.along(Target(graph, params), Knots.before(path, params))
    x = {b: random_state(f, i, (3,)) for i, (b, f) in enumerate(ensemble.graph.families.items())}
    given = [swaps.log_ratio(Target(ensemble.graph, ensemble.params), x, i, summed) for i in range(2)]
    models, betas = [None, *(path.params_at(i) for i in (1, 2)), params], [0, 1, 1, 1]

    def log_p(r, x):
        """By enumeration of what is summed out."""
        total = -np.inf
        for inside in itertools.product([-1.0, 1.0], repeat=5) if summed else [None]:
            whole = x if inside is None else x | {"v": np.array(inside[:3]), "h2": np.array(inside[3:])}
            t = {b: np.asarray(f.statistics(whole[b])) for b, f in graph.families.items()}
            independent = sum(float((np.asarray(path.eta0[b]) * t[b]).sum()) for b in t)
            own = -numpy_energy(graph, models[r], whole) if models[r] else 0.0
            total = np.logaddexp(total, betas[r] * own + (1 - betas[r]) * independent)
        return total

    for row in range(3):
        state = [{b: v[row, r] for b, v in x.items()} for r in range(4)]
        for low in range(3):
            a, b = state[low], state[low + 1]
            wanted = log_p(low, b) + log_p(low + 1, a) - log_p(low, a) - log_p(low + 1, b)
            np.testing.assert_allclose(given[low % 2][row, low], wanted, rtol=1e-4, atol=1e-4)
            assert given[1 - low % 2][row, low] == 0


@pytest.mark.slow
def test_summing_out_makes_swaps_likelier():
    graph = layered(v=Bernoulli(20), h=Bernoulli(4))
    params = [random_params(graph, seed=i, scale=1.0) for i in range(3)]
    path = Path.through(graph, reference(graph), params[:2])
    state = simulate(ParallelTempering(graph, path=path), params[2], chains=300, sweeps=60)
    knots = Knots.before(path, params[2])
    ensemble = Ensemble.along(Target(graph, params[2]), knots)
    x = {b: v for b, v in state.replicas.items()}
    for low, parity in ((0, 0), (1, 1)):
        ratios = [
            swaps.log_ratio(Target(ensemble.graph, ensemble.params), x, parity, summed)[:, low]
            for summed in (("v",), ())
        ]
        some, none = (float(np.exp(np.minimum(0, r)).mean()) for r in ratios)
        assert some > 1.2 * none
        # what is told is what was
        assert abs(1 - state.rejection[:, low].mean() - some) < 0.1


# -- the path is an argument -----------------------------------------------------------------------


def test_the_path_is_no_constant_of_the_program():
    graph = layered(v=Bernoulli(30), h=Bernoulli(20))
    kernel = ParallelTempering(graph, path=path_of(graph, 3, 0.1))
    params = model(graph)
    state = kernel.init(jax.random.split(jax.random.key(0), 2), 0, None, (params,), {})
    made = jax.make_jaxpr(lambda s, p: kernel.sample(s, (p,), {}))(state, params)
    assert all(np.size(c) < 600 for c in _constants(made)), [np.shape(c) for c in _constants(made)]
    assert state.knots.params["v:h"].shape == (4, 30, 20)  # of all chains together


def _constants(closed):
    found = list(closed.consts)
    for equation in closed.jaxpr.eqns:
        for value in equation.params.values():
            if isinstance(value, jax.extend.core.ClosedJaxpr):
                found += _constants(value)
    return found


def test_another_path_of_its_shape_needs_no_other_program():
    graph = GRAPHS["bernoulli"]
    params, traces = model(graph), []
    kernels = [ParallelTempering(graph, path=path_of(graph, 2, scale)) for scale in (0.5, 1.5)]

    @jax.jit
    def step(state, params):
        traces.append(1)
        return kernels[0].sample(state, (params,), {})

    keys = jax.random.split(jax.random.key(1), 3000)
    for kernel in kernels[::-1]:
        state = kernel.init(keys, 0, None, (params,), {})
        for _ in range(8):
            state = step(state, params)
        for b, exact in ebmpp.exact.moments(graph, kernel.path.params_at(1)).items():
            assert_rows_law(state.replicas[b][:, 1], exact, comparisons=20)
    assert len(traces) == 1


def test_the_model_is_one_more_knot_unless_it_is_the_last():
    graph = GRAPHS["bernoulli"]
    path = path_of(graph)
    kernel = ParallelTempering(graph, path=path)
    key, last, other = jax.random.key(0), path.params_at(-1), model(graph)
    assert kernel.init(key, 0, None, (last,), {}).betas.shape == (3,)
    assert kernel.init(key, 0, None, (other,), {}).betas.shape == (4,)
    traced = jax.eval_shape(lambda p: kernel.init(key, 0, None, (p,), {}), last)
    assert traced.betas.shape == (4,)  # nobody can look
    assert ParallelTempering(graph, path=Path.line(graph, path.eta0, last)).init(
        key, 0, None, (last,), {}
    ).betas.tolist() == [0, 1]


# -- NumPyro's contract ------------------------------------------------------------------------------


def mcmc(kernel, params, method, num_warmup=5):
    made = MCMC(
        kernel, num_warmup=num_warmup, num_samples=10, num_chains=2, chain_method=method, progress_bar=False
    )
    made.run(jax.random.key(3), params, extra_fields=("rejection", "round_trips"))
    return made


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("method", often(["sequential", "parallel", jax.vmap], "parallel"))
def test_chain_methods_give_the_same_draws(method):
    graph = GRAPHS["bernoulli"]
    kernel = ParallelTempering(graph, path=path_of(graph))
    wanted, given = (mcmc(kernel, model(graph), m) for m in ("vectorized", method))
    jax.tree.map(np.testing.assert_array_equal, wanted.get_samples(), given.get_samples())
    np.testing.assert_array_equal(wanted.last_state.origin, given.last_state.origin)


def test_a_run_goes_on_and_tells():
    graph = GRAPHS["bernoulli"]
    kernel = ParallelTempering(graph, path=path_of(graph))
    made = mcmc(kernel, model(graph), "vectorized")
    told = kernel.get_diagnostics_str(made.last_state)
    assert told.startswith("15 sweeps of 4 knots, swaps accepted 0.") and "round trips" in told
    made.post_warmup_state = made.last_state
    made.run(made.post_warmup_state.rng_key, model(graph))
    assert int(made.last_state.i[0]) == 25
    assert made.last_state.knots.betas.shape == (3,)
    assert "ParallelTempering" in repr(kernel) and "path=Path(3 knots" in repr(kernel)
    again = pickle.loads(pickle.dumps(kernel))
    jax.tree.map(np.testing.assert_array_equal, again.path.along(), kernel.path.along())
    tree = ebmpp.to_datatree(made)
    assert tree["posterior"].sizes["draw"] == 10


def test_round_trips_are_counted():
    graph = GRAPHS["bernoulli"]
    path = Path.through(graph, reference(graph), [random_params(graph, seed=1, scale=0.2)])
    state = simulate(ParallelTempering(graph, path=path), path.params_at(-1), chains=100, sweeps=40)
    assert (state.rejection < 0.5).all() and (state.round_trips > 3).all()


BERNOULLI = GRAPHS["bernoulli"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: ParallelTempering(BERNOULLI, [0, 1], path=p), ArgumentError, "takes the place of betas"),
        (
            lambda p: ParallelTempering(BERNOULLI, num_temperatures=10, path=p),
            ArgumentError,
            "num_temperatures=10 beside it",
        ),
        (
            lambda p: ParallelTempering(GRAPHS["potts"], path=p),
            ArgumentError,
            "the path is one of FactorGraph",
        ),
        (
            lambda p: ParallelTempering(BERNOULLI, path=[1]),
            ArgumentError,
            r"path is a Path, such as fit\(..., keep_path=True\) has",
        ),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make(path_of(BERNOULLI))


def test_a_path_that_does_not_normalise_is_refused():
    graph = pair(Gaussian(1, "learned"), Bernoulli(1))
    bad = random_params(graph) | {"a": jnp.array([[0.0, 0.5]])}
    with pytest.raises(DomainError, match="knot 2 of the path: .*'a'"):
        path = Path.through(
            graph, {b: f.default_eta() for b, f in graph.families.items()}, [model(graph), bad]
        )
        ParallelTempering(graph, path=path)


def test_pairs_are_not_coupled_along_a_path():
    graph = BERNOULLI
    params = model(graph)
    knots = Knots.before(path_of(graph), params)
    ensemble = Ensemble.along(Target(graph, params), knots)
    move = ebmpp.moves.tempering.tempered_sweep(graph, summed=("v",))
    with pytest.raises(ArgumentError, match="coupled at inverse temperatures, not along a path"):
        ebmpp.unbiased_expectation(
            ensemble.graph, ensemble.params, lambda x: x["v"], rng_key=jax.random.key(0), coupling=move
        )
