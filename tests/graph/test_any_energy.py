# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Factors of any energy: conditionals, sweeps, gradients, and the units that interact.

Tests graph/factors/evaluation.py, graph/factors/interactions.py, graph/factors/terms.py.
"""

import pickle

import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    Pairwise,
    Spin,
    exact,
)
from ebmpp.core import random
from ebmpp.errors import DeclarationError, IntractableError
from ebmpp.graph import energy
from ebmpp.graph.factors.terms import PairTerms, Terms
from ebmpp.moves import gibbs_sweep
from ebmpp.moves.move import coupled_sweep, draw_sweep
from ebmpp.moves.target import Target
from helpers import assert_law, often

ROWS = 4000


def network(params, *statistics):
    x = jnp.concatenate([t.ravel() for t in statistics])
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def initial(size, hidden=8, scale=1.5):
    def init(rng_key):
        keys = jax.random.split(rng_key, 3)
        return {
            "w": jax.random.normal(keys[0], (size, hidden)),
            "b": jax.random.normal(keys[1], (hidden,)),
            "v": scale * jax.random.normal(keys[2], (hidden,)),
        }

    return init


def net(**blocks):
    size = sum(np.prod(f.statistic_shape) for f in blocks.values())
    init = initial(size)
    return Factor(*blocks, energy=network, init=init, affine=False, name="net")


def window(params, x):
    """Return terms of three units in a row, with kinks."""
    return jnp.abs(x[:-2] + params * x[1:-1] - x[2:]).sum()


def agreement(params, x):
    """Return bonds of a ring of one-hot units, with different weights."""
    equal = (x * jnp.roll(x, -1, 0)).sum(-1)
    return -jnp.vdot(params, equal)


def joined(params, v, c):
    """Return a term for each unit of one block and each category of another's units."""
    return jnp.tanh(params * v[:, None, None] * c).sum()


def declare(factors=(), **blocks):
    return FactorGraph(blocks, factors=[*factors, net(**blocks)])


GRAPHS = {
    "bits": declare(v=Bernoulli(12)),
    "spins": declare([Bias("v")], v=Spin(5)),
    "categories": declare(v=Categorical(4, 3)),
    "two blocks": declare(v=Bernoulli(4), c=Categorical((2,), 3)),
    "windows": FactorGraph(
        {"v": Spin(8)},
        factors=[
            Bias("v"),
            Factor("v", energy=window, init=1.7, affine=False, name="w"),
        ],
    ),
    "ring": FactorGraph(
        {"v": Categorical(6, 3)},
        factors=[
            Bias("v"),
            Factor("v", energy=agreement, init=np.ones(6), affine=False, name="w"),
        ],
    ),
}
GRAPHS["machine"] = FactorGraph(
    {"v": Spin(4)},
    {"c": Categorical(3, 3)},
    [
        Bias("v"),
        Factor(
            "v",
            "c",
            energy=joined,
            init=np.random.default_rng(0).normal(size=(4, 3, 3)),
            affine=False,
            name="w",
        ),
    ],
)
GRAPHS["many values"] = FactorGraph(
    {"v": Categorical(4, 6)},
    factors=[Factor("v", energy=network, init=initial(24), affine=False, name="net")],
)
PATHS = {"machine": Terms, "windows": Terms, "ring": PairTerms}
EVALUATIONS = {
    "bits": 12 * 1 + 1,
    "categories": 4 * 2 + 1,
    "two blocks": 4 * 1 + 1 + 2 * 2 + 1,
    "windows": 3 * 1 + 1,
    "ring": 3**2,
    "machine": 1 + 1 + 2 + 1,
    "many values": 4 * 6,
}


def params_of(graph):
    params = graph.init(jax.random.key(1))
    if "v" in params:
        params["v"] = jax.random.normal(jax.random.key(2), params["v"].shape)
    return params


@pytest.mark.parametrize("name", often(GRAPHS, "bits", "categories", "windows", "ring"))
def test_conditionals_are_those_of_enumeration(name):
    graph = GRAPHS[name]
    params = params_of(graph)
    states, probs = exact.probabilities(graph, params)
    assert probs.max() > 40 * probs.min()
    rows = {b: v[3 : -1 : len(v) // 5][:5] for b, v in states.items()}
    for block, family in graph.families.items():
        values = np.asarray(family.states())
        eta = graph.natural_parameters(params, rows, block)
        context = energy.part_context(graph, params, rows, block)
        units = energy.to_units(rows[block], family)
        split = graph.splits[block]
        if name in PATHS:
            assert type(split.fast_paths[-1]) is PATHS[name]
        for part in range(split.num_parts):
            natural, _ = energy.natural_part(
                graph, params, rows, units, block, context, part
            )
            np.testing.assert_allclose(
                family.mean(natural)[:, : len(split.units[part])],
                family.mean(eta[:, split.units[part]]),
                atol=1e-5,
            )
        for unit in range(family.size):
            repeated = {b: np.repeat(v, len(values), 0) for b, v in rows.items()}
            repeated[block] = np.array(repeated[block])
            repeated[block].reshape(-1, family.size)[:, unit] = np.tile(values, 5)
            log_density = graph.log_density(params, repeated).reshape(5, -1)
            unit_distribution = family.unit_distribution(eta[:, unit][:, None])
            np.testing.assert_allclose(
                jax.nn.softmax(log_density),
                jnp.exp(unit_distribution.log_prob(values[None])),
                atol=1e-5,
            )


@pytest.mark.parametrize("name", often(EVALUATIONS, "categories", "windows", "machine"))
def test_values_pass_from_part_to_part(name):
    """Conditionals along a visit equal single evaluations, whatever is drawn."""
    graph = GRAPHS[name]
    params = params_of(graph)
    generator = np.random.default_rng(0)

    def random_state():
        return {
            b: family.states()[
                generator.integers(len(family.states()), size=(5, *family.shape))
            ]
            for b, family in graph.families.items()
        }

    x = random_state()
    drawn = random_state()
    evaluations = 0
    for block, split in graph.splits.items():
        family = split.family
        context = energy.part_context(graph, params, x, block)
        units = energy.to_units(x[block], family)
        for part in range(split.num_parts):
            eta, advance = energy.natural_part(
                graph, params, x, units, block, context, part
            )
            now = {**x, block: energy.to_rows(units, family)}
            expected = graph.natural_parameters(params, now, block)
            expected = energy.to_units(expected, family)[split.units[part]]
            np.testing.assert_allclose(
                family.mean(eta)[:, : len(expected)],
                family.mean(jnp.moveaxis(expected, 0, 1)),
                atol=1e-5,
            )
            new = split.take(energy.to_units(drawn[block], family), part)
            units = split.put(units, part, new)
            context = context._replace(carried=advance(units))
        fresh = energy.part_context(
            graph, params, {**x, block: drawn[block]}, block
        ).carried
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
            context.carried,
            fresh,
        )
        evaluations += split.evaluations(split.inner_factors[-1])
    assert evaluations == EVALUATIONS[name]


@pytest.mark.parametrize("name", ["bits", "windows", "machine"])
def test_sweeps_evaluate_as_often_as_printed(name, monkeypatch):
    """Each evaluation of all rows is one in the program, where parts are unrolled."""
    graph = GRAPHS[name]
    count = 0
    run = Terms.run

    def counted(self, prepared, t, known, slots):
        nonlocal count
        count += self.traced.program.output in slots or type(self) is Terms
        return run(self, prepared, t, known, slots)

    monkeypatch.setattr(Terms, "run", counted)
    target = Target(graph, params_of(graph))
    x = {
        b: jnp.zeros((5, *f.shape), f.dtype) + f.states()[0]
        for b, f in graph.families.items()
    }
    keys = random.fold_in(random.key_pair(jax.random.key(0)), jnp.arange(5))
    sweep = lambda x: draw_sweep(target, x, gibbs_sweep(graph), keys)[0]
    jax.eval_shape(sweep, x)
    # parts that are not unrolled are traced once
    split = graph.splits["v"]
    parts = EVALUATIONS[name] if split.unrolled else 2
    assert count == parts


def test_a_linear_layer_is_carried_without_drift():
    """784 increments of a product in float32, against float64."""
    weights = initial(784, hidden=128)
    factor = Factor("v", energy=network, init=weights, affine=False, name="net")
    graph = FactorGraph({"v": Bernoulli(784)}, factors=[factor])
    params = graph.init(jax.random.key(0))
    split = graph.splits["v"]
    generator = np.random.default_rng(0)
    first, last = np.float32(generator.random((2, 784, 2)) < 0.5)
    context = energy.part_context(graph, params, {"v": first.T}, "v")

    @jax.jit
    def visit(context):
        def step(part, state):
            units, carried = state
            _, advance = energy.natural_part(
                graph, params, {}, units, "v", context._replace(carried=carried), part
            )
            units = split.put(units, part, split.take(last, part))
            return units, advance(units)

        state = jnp.asarray(first), context.carried
        return jax.lax.fori_loop(0, 784, step, state)[1][0]

    carried = visit(context)
    (product,) = carried.sums.values()
    layer = np.float64(params["net"]["w"]).T
    expected = last.T.astype(float) @ layer.T
    error = abs(product - expected).max() / abs(expected).max()
    assert 0 < error < 1e-5
    hidden = np.tanh(expected + np.float64(params["net"]["b"]))
    energies = hidden @ np.float64(params["net"]["v"])
    np.testing.assert_allclose(carried.elements[0], energies, rtol=1e-5)


@pytest.mark.parametrize("name", often(GRAPHS, "two blocks", "ring"))
def test_sweeps_keep_the_distribution(name):
    """A sweep of exact draws, and a coupled sweep of pairs, a quarter of them equal."""
    graph = GRAPHS[name]
    params = params_of(graph)
    states, probs = jax.device_get(exact.probabilities(graph, params))
    generator = np.random.default_rng(0)
    first, second = generator.choice(
        len(probs), (2, ROWS), p=np.float64(probs) / probs.sum(dtype=float)
    )
    second[-ROWS // 4 :] = first[-ROWS // 4 :]
    z = {b: np.stack([x[first], x[second]]) for b, x in states.items()}

    @jax.jit
    def sweep(params, z):
        keys = random.fold_in(random.key_pair(jax.random.key(5)), jnp.arange(ROWS))
        target, moves = Target(graph, params), gibbs_sweep(graph)
        alone, _ = draw_sweep(target, {b: v[0] for b, v in z.items()}, moves, keys)
        both, met, broken, _ = coupled_sweep(target, z, moves, keys)
        return alone, both, met, broken

    alone, both, met, broken = jax.device_get(sweep(params, z))
    assert met[-ROWS // 4 :].all()
    assert 0 < met[: ROWS // 2].mean() < 1
    assert not broken.any()
    for chain in (alone, {b: v[1] for b, v in both.items()}):
        assert all((chain[b] != start[0]).any(0).all() for b, start in z.items())
        t = graph.statistics(chain)
        flat = np.concatenate([v.reshape(ROWS, -1) for v in t.values()], 1)
        exactly = graph.statistics(states)
        table = np.concatenate(
            [v.reshape(len(probs), -1) for v in exactly.values()], 1
        ).astype(float)

        def products(t):
            return (t[:, :, None] * t[:, None, :]).reshape(len(t), -1)

        mean = probs @ products(table)
        variance = probs @ products(table) ** 2 - mean**2
        error = np.sqrt(np.maximum(variance, 0) / ROWS)
        assert_law(products(flat.astype(float)).mean(0), mean, error, 4 * mean.size)


def test_a_lattice_written_as_a_function_is_drawn_like_pairs():
    """Equal draws of a declared torus, a black box and lateral pairs."""

    def torus(weight, x):
        return -weight * (x * jnp.roll(x, 1, 0) + x * jnp.roll(x, 1, 1)).sum()

    number = np.arange(36).reshape(6, 6)
    pairs = np.concatenate(
        [np.stack([number, np.roll(number, 1, a)], -1).reshape(-1, 2) for a in (0, 1)]
    )
    drawn = []
    for factor in (
        Pairwise("x", pairs, shared=True, init=0.4, name="w"),
        Factor("x", energy=torus, init=0.4, affine=False, name="w"),
        Factor("x", energy=torus, init=0.4, lateral={"x": pairs}, name="w"),
    ):
        graph = FactorGraph({"x": Spin((6, 6))}, factors=[factor])
        assert graph.num_parts("x") == 2
        target = Target(graph, graph.init(jax.random.key(0)))
        keys = random.fold_in(random.key_pair(jax.random.key(5)), jnp.arange(50))
        start = {"x": jnp.ones((50, 6, 6))}

        @jax.jit
        def sweep(target, start, keys, graph=graph):
            return draw_sweep(target, start, gibbs_sweep(graph), keys)[0]["x"]

        drawn.append(sweep(target, start, keys))
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0], drawn[2])


def test_units_interact_as_the_energy_reads_them():
    def declared(energy, family, init=None, **options):
        factor = Factor("x", energy=energy, init=init, affine=False, **options)
        return FactorGraph({"x": family}, factors=[factor])

    def convolved(kernel, x):
        image = jax.lax.conv_general_dilated(x[None, None], kernel, (1, 1), "VALID")
        return jnp.tanh(image).sum()

    graph = declared(convolved, Bernoulli((7, 7)), np.ones((2, 1, 3, 3)))
    assert graph.num_parts("x") == 9
    assert type(graph.splits["x"].fast_paths[0]) is Terms
    complete = declared(lambda w, x: jnp.tanh(x @ w).sum(), Spin(1500), np.ones(1500))
    assert complete.num_parts("x") == 1500
    alone = declared(lambda w, x: jnp.exp(w * x).sum(), Spin(9), np.ones(9))
    assert alone.num_parts("x") == 1
    rows = {"x": jnp.ones((1, 9))}
    params = alone.init(jax.random.key(0))
    context = energy.part_context(alone, params, rows, "x")
    natural, _ = energy.natural_part(alone, params, rows, rows["x"].T, "x", context, 0)
    np.testing.assert_allclose(natural, -np.sinh(rows["x"]), 1e-5)
    ends = declared(
        lambda p, x: jnp.where(x[0] == x[8], -1.0, 0.0),
        Spin(9),
        lateral={"x": [(0, 8)]},
    )
    assert ends.num_parts("x") == 2


def test_latents_of_ordinary_factors_are_summed_out():
    """The likelihood of an RBM with a residual, and its gradient, by enumeration."""
    blocks = {"v": Bernoulli(5)}, {"h": Bernoulli(3)}
    factors = [Bias("v"), Bias("h"), Bilinear("v", "h")]
    graph = FactorGraph(*blocks, [*factors, net(v=blocks[0]["v"])])
    params = graph.init(jax.random.key(1))
    params["v:h"] = jax.random.normal(jax.random.key(2), (5, 3))
    rows = {"v": np.float32([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1]])}
    plain = FactorGraph(*blocks, factors)
    residual = jax.vmap(lambda v: network(params["net"], v))(rows["v"])
    rest = {name: params[name] for name in plain.param_shapes}
    np.testing.assert_allclose(
        graph.free_energy(params, rows), plain.free_energy(rest, rows) + residual, 1e-5
    )
    gradient = exact.grad_log_likelihood(graph, params, rows)
    states, probs = exact.probabilities(graph, params)

    def mean_energy(params, x, weights):
        return weights @ graph.energy(params, x)

    def positive(params):
        return graph.free_energy(params, rows).mean()

    negative = jax.grad(mean_energy)(params, states, probs)
    expected = jax.tree.map(jnp.subtract, negative, jax.grad(positive)(params))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradient, expected
    )


def test_derivatives_in_statistics_are_differences():
    """Second derivatives of the extension are second differences of the energy."""
    graph = GRAPHS["bits"]
    params = params_of(graph)
    t = jnp.asarray(2 * [1.0, 0, 0, 1, 1, 0])
    hessian = jax.hessian(lambda t: energy.energy(graph, params, {"v": t}))(t)
    value = jax.vmap(lambda t: network(params["net"], t))
    for i, j in ((0, 1), (2, 11), (4, 3)):
        corners = np.tile(t, (4, 1))
        corners[:, i] = [0, 0, 1, 1]
        corners[:, j] = [0, 1, 0, 1]
        low, *middle, high = value(corners)
        np.testing.assert_allclose(hessian[i, j], high - sum(middle) + low, atol=1e-5)
    np.testing.assert_allclose(jnp.diagonal(hessian), 0, atol=1e-5)


def test_fields_are_one_gradient_of_the_energy_as_written():
    graph = GRAPHS["two blocks"]
    params = params_of(graph)
    x = {"v": jnp.ones((2, 4)), "c": jnp.zeros((2, 2), int)}
    fields = energy.fields(graph, params, x)
    slopes = jax.vmap(jax.grad(network, (1, 2)), (None, 0, 0))
    by_hand = slopes(params["net"], *graph.statistics(x).values())
    for field, slope in zip(fields.values(), by_hand, strict=True):
        np.testing.assert_allclose(field, -slope, atol=1e-6)


def test_declarations_are_values(tmp_path):
    graph = GRAPHS["windows"]
    repeated = FactorGraph(dict(graph.visible), factors=graph.factors)
    assert repeated == graph
    assert hash(repeated) == hash(graph)
    assert pickle.loads(pickle.dumps(graph)) == graph
    assert "Factor('v', affine=False, name='w')" in repr(graph)
    assert "evaluations per sweep" in str(graph)
    params = params_of(graph)
    ebmpp.save(tmp_path / "model", graph, params)
    loaded, _ = ebmpp.load(tmp_path / "model", factors=graph.factors[1:])
    assert loaded == graph


def test_real_units_have_fields_and_no_conditional():
    """A chain of phi^4 fields: the gradient is exact, and closed forms are refused."""

    def chain(params, x):
        return (params * x**4).sum() - (x[1:] * x[:-1]).sum()

    factor = Factor("x", energy=chain, init=0.1, affine=False)
    graph = FactorGraph({"x": Gaussian(4)}, factors=[factor])
    params = graph.init(jax.random.key(0))
    x = {"x": jnp.asarray([[1.0, -2.0, 0.5, 0.0]])}
    slope = jax.grad(chain, 1)(0.1, x["x"][0])
    np.testing.assert_allclose(energy.fields(graph, params, x)["x"][0], -slope, 1e-5)
    density = jax.grad(lambda v: graph.log_density(params, {"x": v}).sum())(x["x"])
    np.testing.assert_allclose(density[0], -slope - x["x"][0], 1e-5)
    for refused in (
        lambda: graph.conditional(params, x, "x"),
        lambda: exact.log_partition(graph, params),
        lambda: ebmpp.local_search(graph, params, rng_key=jax.random.key(0)),
    ):
        with pytest.raises(IntractableError, match="affine=False"):
            refused()


def test_counts_are_refused_with_the_reason():
    def squared(params, x):
        return (x**2).sum()

    for family in (ebmpp.Poisson(2), ebmpp.Binomial(2, 3)):
        with pytest.raises(DeclarationError, match="outside its family"):
            FactorGraph(
                {"x": family}, factors=[Factor("x", energy=squared, affine=False)]
            )


def test_conditioned_graphs_keep_any_energy():
    graph = GRAPHS["two blocks"]
    params = params_of(graph)
    rest = ebmpp.condition(graph, c=np.array([2, 0]))
    assert rest.num_parts("v") == 4
    rows = {"v": np.float32([[0, 1, 1, 0]])}
    both = rows | {"c": np.array([[2, 0]])}
    np.testing.assert_allclose(
        rest.natural_parameters(params, rows, "v"),
        graph.natural_parameters(params, both, "v"),
        atol=1e-5,
    )


@pytest.mark.nightly
def test_layers_of_libraries_are_energies():
    """An equinox module, partitioned, and a flax module."""
    rows = {"v": np.float32(np.random.default_rng(0).random((3, 5)) < 0.5)}
    equinox = pytest.importorskip("equinox")
    module = equinox.nn.MLP(5, "scalar", 4, 1, key=jax.random.key(0))
    arrays, static = equinox.partition(module, equinox.is_array)

    def energy_of(arrays, v):
        return equinox.combine(arrays, static)(v)

    factor = Factor("v", energy=energy_of, init=lambda _: arrays, affine=False)
    graph = FactorGraph({"v": Bernoulli(5)}, factors=[factor])
    params = graph.init(jax.random.key(0))
    np.testing.assert_allclose(graph.energy(params, rows), jax.vmap(module)(rows["v"]))


@pytest.mark.nightly
def test_a_flax_module_is_an_energy():
    linen = pytest.importorskip("flax.linen")
    module = linen.Dense(1)
    factor = Factor(
        "v",
        energy=lambda params, v: jnp.tanh(module.apply(params, v)).sum(),
        init=lambda key: module.init(key, jnp.zeros(5)),
        affine=False,
    )
    graph = FactorGraph({"v": Bernoulli(5)}, factors=[factor])
    rows = {"v": np.ones((2, 5))}
    assert graph.energy(graph.init(jax.random.key(0)), rows).shape == (2,)
