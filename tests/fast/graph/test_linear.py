# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Linear maps and convolutions between blocks: against the Bilinear factor they are, unrolled."""

import pickle

import numpy as np
import pytest
from scipy.signal import correlate

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, Categorical, Convolution, FactorGraph, Gaussian, Spin
from ebmpp.errors import DeclarationError, NotMultiAffineError
from ebmpp.graph import Linear
from helpers import assert_law, assert_rows_law, random_params, random_state

KEY = jax.random.key(0)


def windows(w: jax.Array, v: jax.Array) -> jax.Array:
    """At module level, so that graphs with it compare equal and pickle."""
    return jnp.convolve(v, w, mode="valid")


def tiny() -> FactorGraph:
    """Nine pixels under two filters of 2x2, biases a map: 2**17 states."""
    return FactorGraph(
        visible={"v": Bernoulli((3, 3))},
        latent={"h": Bernoulli((2, 2, 2))},
        factors=[Bias("v"), Bias("h", shared=(1, 2)), Convolution("v", "h", window=(2, 2))],
    )


def unrolled(filters: np.ndarray) -> np.ndarray:
    """The whole matrix of the tiny machine, entry by entry."""
    w = np.zeros((3, 3, 2, 2, 2))
    for k, i, j, a, b in np.ndindex(2, 2, 2, 2, 2):
        w[i + a, j + b, k, i, j] += filters[k, 0, a, b]
    return w


@pytest.fixture(scope="module")
def machine() -> tuple:
    """The tiny machine, and the same law without shared weights."""
    graph = tiny()
    params = random_params(graph, seed=5, scale=0.8)
    dense = FactorGraph(
        {"v": Bernoulli((3, 3))}, {"h": Bernoulli((2, 2, 2))}, [Bias("v"), Bias("h"), Bilinear("v", "h")]
    )
    weight, bias = unrolled(np.asarray(params["v:h"])), np.broadcast_to(params["h"], (2, 2, 2))
    return graph, params, dense, {"v": params["v"], "h": bias, "v:h": weight.astype("f")}


# -- the law ---------------------------------------------------------------------------------------


def test_a_convolution_is_a_bilinear_factor_with_shared_weights(machine: tuple) -> None:
    graph, params, dense, whole = machine
    x = {b: random_state(f, seed=i, rows=(5,)) for i, (b, f) in enumerate(graph.families.items())}

    @jax.jit
    def derived(x: dict) -> tuple:
        of = lambda g, p: (
            g.energy(p, x),
            g.free_energy(p, {"v": x["v"]}),
            *(g.natural_parameters(p, x, b) for b in "vh"),
        )
        return of(graph, params), of(dense, whole)

    for ours, theirs in zip(*derived(x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_sweeps_have_the_law_of_the_unrolled_model(machine: tuple) -> None:
    graph, params, dense, whole = machine
    draws = ebmpp.EnergyDistribution(graph, params, blocks=["v", "h"], num_sweeps=60).sample(KEY, (4000,))
    exact = jax.grad(lambda p: ebmpp.exact.log_partition(dense, p))(whole)  # of biases: mean statistics
    assert_rows_law(draws, np.concatenate([np.ravel(exact[b]) for b in "vh"]))


def test_the_gradient_of_the_exact_likelihood_is_that_of_the_unrolled_model(machine: tuple) -> None:
    graph, params, dense, whole = machine
    rows = random_state(graph.families["v"], seed=9, rows=(6,))
    of = lambda g, p: jax.grad(lambda p: ebmpp.exact.log_likelihood(g, p, rows).mean())(p)
    shared, unshared = of(graph, params), of(dense, whole)
    by_hand = np.zeros((2, 1, 2, 2))
    for k, i, j, a, b in np.ndindex(2, 2, 2, 2, 2):
        by_hand[k, 0, a, b] += unshared["v:h"][i + a, j + b, k, i, j]
    np.testing.assert_allclose(shared["v:h"], by_hand, atol=1e-5)
    np.testing.assert_allclose(shared["h"], unshared["h"].sum((1, 2), keepdims=True), atol=1e-5)


@pytest.mark.slow
def test_coupled_chains_estimate_the_gradient_without_bias(machine: tuple) -> None:
    graph, params, _, _ = machine
    slope = lambda x: jax.grad(lambda p: graph.energy(p, x))(params)
    made = ebmpp.unbiased_expectation(graph, params, slope, rng_key=KEY, num_pairs=3000)
    mean = jax.grad(lambda p: -ebmpp.exact.log_partition(graph, p))(params)
    for name in params:
        assert_law(made.value[name], mean[name], made.standard_error[name], 19)


@pytest.mark.slow
def test_log_z_by_annealing(machine: tuple) -> None:
    graph, params, dense, whole = machine
    made = ebmpp.ais(graph, params, rng_key=KEY, num_particles=400, num_temperatures=60)
    assert_law(made.log_partition, ebmpp.exact.log_partition(dense, whole), made.standard_error)


@pytest.mark.parametrize(("stride", "padding"), [(2, "SAME"), ((2, 1), ((1, 0), (0, 2)))])
def test_strides_and_padding_against_scipy(stride: object, padding: object) -> None:
    strides = (stride, stride) if isinstance(stride, int) else stride
    pairs = ((1, 1), (1, 1)) if padding == "SAME" else padding
    image = np.random.default_rng(0).normal(size=(2, 5, 5))
    filters = np.random.default_rng(1).normal(size=(4, 2, 3, 3))
    around = np.pad(image, ((0, 0), *pairs))
    maps = np.stack([correlate(around, f, mode="valid")[0] for f in filters])[:, :: strides[0], :: strides[1]]
    factor = Convolution("v", "h", window=(3, 3), stride=stride, padding=padding)
    graph = FactorGraph({"v": Gaussian((2, 5, 5))}, {"h": Bernoulli(maps.shape)}, [factor])
    eta = graph.natural_parameters({"v:h": jnp.asarray(filters, jnp.float32)}, {"v": image.astype("f")}, "h")
    np.testing.assert_allclose(eta, maps, rtol=1e-4, atol=1e-5)


def test_a_units_own_statistics_are_channels() -> None:
    factor = Convolution("v", "h", window=(2,))
    graph = FactorGraph({"v": Categorical(4, 3)}, {"h": Spin((2, 3))}, [Bias("v"), factor])
    params = random_params(graph)
    v, h = np.array([0, 2, 1, 1]), np.array([[1, -1, 1], [-1, -1, 1.0]])
    w = np.asarray(params["v:h"])
    assert w.shape == (2, 3, 2)
    energy = -sum(h[k, i] * w[k, v[i + a], a] for k, i, a in np.ndindex(2, 3, 2))
    energy -= np.asarray(params["v"])[np.arange(4), v].sum()
    np.testing.assert_allclose(graph.energy(params, {"v": v, "h": h}), energy, rtol=1e-5)
    learned = {"v": Gaussian(4, "learned"), "h": Spin((2, 3))}
    assert factor.init_params(KEY, learned).shape == (2, 1, 2)  # x takes part, x**2 does not


# -- starting values ---------------------------------------------------------------------------------


def test_schemes_fill_a_shape_and_leave_init_alone() -> None:
    own = np.linspace(-1, 1, 200)
    factors = [
        Linear("v", "h", forward=windows, shape=(200,), name="shape"),
        Linear("v", "h", forward=windows, init=own, name="init"),
    ]
    graph = FactorGraph({"v": Bernoulli(300), "h": Bernoulli(101)}, factors=factors)
    gaussian, orthogonal = (graph.init(KEY, scheme=s) for s in ("gaussian", "orthogonal"))
    assert_law(np.std(gaussian["shape"]), 0.01, 0.01 / np.sqrt(400))
    np.testing.assert_allclose(np.linalg.norm(orthogonal["shape"]), 1, rtol=1e-5)
    for made in (gaussian, orthogonal):
        np.testing.assert_allclose(made["init"], own, rtol=1e-6)
    filters = tiny().init(KEY, scheme="orthogonal")["v:h"].reshape(2, 4)
    np.testing.assert_allclose(filters @ filters.T, np.eye(2), atol=1e-5)


def test_a_shared_bias_starts_at_the_rate_over_positions() -> None:
    graph = FactorGraph({"v": Bernoulli((2, 3, 4))}, factors=[Bias("v", shared=(-1, 1))])
    rows = np.random.default_rng(0).integers(2, size=(50, 2, 3, 4)).astype(np.float32)
    rate = (50 * rows.mean((0, 2, 3)) + 0.5) / 51
    bias = graph.init(KEY, rows)["v"]
    assert bias.shape == (2, 1, 1)
    np.testing.assert_allclose(bias.ravel(), np.log(rate / (1 - rate)), rtol=1e-4)


# -- declared values, and what is refused ------------------------------------------------------------


def test_declarations_are_values() -> None:
    made = lambda **given: Linear("v", "h", forward=windows, **given)
    assert made(shape=(3,)) == made(shape=[3]) != made(shape=(4,))
    assert made(init=np.ones(3)) == made(init=np.ones(3)) != made(init=np.zeros(3))
    assert hash(made(init=np.ones(3))) == hash(made(init=np.ones(3)))
    assert made(shape=(3,)) != Linear("v", "h", forward=np.convolve, shape=(3,))
    assert tiny() == tiny() and hash(tiny()) == hash(tiny())
    graph = FactorGraph({"v": Bernoulli(5)}, {"h": Bernoulli(3)}, [Bias("v"), made(shape=(3,))])
    for each in (tiny(), graph):
        assert pickle.loads(pickle.dumps(each)) == each
    strided = Convolution("v", "h", window=(2, 2), stride=2, padding=1)
    assert strided != Convolution("v", "h", window=(2, 2), stride=2)
    assert repr(strided) == "Convolution('v', 'h', window=(2, 2), stride=(2, 2), padding=((1, 1), (1, 1)))"
    assert repr(tiny().factors[1]) == "Bias('h', shared=(1, 2))"
    assert Bias("h") != Bias("h", shared=(0,))


def declared(factor: ebmpp.Factor, v: object = None, h: object = None) -> FactorGraph:
    return FactorGraph({"v": v or Bernoulli(5)}, {"h": h or Bernoulli(3)}, [factor])


def test_an_affine_forward_has_a_bias_in_it() -> None:
    factor = Linear(
        "v", "h", forward=lambda p, v: windows(p["w"], v) + p["b"], init={"w": np.ones(3), "b": 2.0}
    )
    graph = declared(factor)
    v = np.array([1, 0, 1, 1, 0.0])
    eta = graph.natural_parameters(graph.init(KEY), {"v": v}, "h")
    np.testing.assert_allclose(eta, [4, 4, 4])


def test_forwards_that_are_not_linear_are_refused() -> None:
    bent = lambda w, v: jax.nn.relu(windows(w, v))
    with pytest.raises(
        NotMultiAffineError, match=r"Linear\('v', 'h'\): .* block 'v' .*forward must be affine"
    ):
        declared(Linear("v", "h", forward=bent, shape=(3,)))


def test_a_forward_of_a_wrong_shape_is_refused() -> None:
    said = (
        r"Linear\('v', 'h'\): forward was given params of shape \(2,\) and the statistics of block 'v', of "
        r"shape \(5,\), and returned shape \(4,\); expected .* block 'h', \(3,\)"
    )
    with pytest.raises(DeclarationError, match=said):
        declared(Linear("v", "h", forward=windows, shape=(2,)))
    with pytest.raises(
        DeclarationError, match=r"Linear\('v', 'h'\): its energy failed .* params of shape \(3, 1\)"
    ):
        declared(Linear("v", "h", forward=windows, shape=(3, 1)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"forward": "conv"}, "forward is a function, not 'conv'"),
        ({"shape": (3,), "init": np.ones(3)}, "give shape, .* or init, .*not both"),
        ({"shape": (3, 0)}, r"shape is a tuple of positive ints, not \(3, 0\)"),
    ],
)
def test_bad_linear_factors(given: dict, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        Linear("v", "h", **{"forward": windows, **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"window": 7}, "window is a tuple of positive ints, .* not 7"),
        ({"stride": 0}, "stride is a positive int or 1 of them, not 0"),
        ({"stride": (1, 1)}, "stride is a positive int or 1 of them"),
        ({"padding": "CIRCULAR"}, "padding is .* not 'CIRCULAR'"),
        ({"padding": -1}, "padding is .* not -1"),
        ({"window": (3, 3)}, r"a window of 2 axes needs .* block 'v' is Bernoulli\(5\)"),
        ({"window": (2,)}, r"have positions \(4,\), and block 'h' \(Bernoulli\(\(1, 3\)\)\) has \(3,\)"),
    ],
)
def test_bad_convolutions(given: dict, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        declared(Convolution("v", "h", **{"window": (3,), **given}), h=Bernoulli((1, 3)))


def test_bad_shared_biases() -> None:
    with pytest.raises(DeclarationError, match=r"Bias\('v'\): shared is a tuple of axes.* not 1"):
        Bias("v", shared=1)
    with pytest.raises(DeclarationError, match=r"Bias\('v', shared=\(1,\)\): Bernoulli\(5\) has axes 0 to 0"):
        FactorGraph({"v": Bernoulli(5)}, factors=[Bias("v", shared=(1,))])


def test_centering_wants_a_bias_a_unit() -> None:
    with pytest.raises(DeclarationError, match=r"no Bias to take that up, unit by unit; add Bias\('h'\)"):
        ebmpp.fit(
            tiny(),
            np.zeros((4, 3, 3)),
            rng_key=KEY,
            estimator=ebmpp.estimators.Centered(ebmpp.CD()),
            num_steps=1,
            progress_bar=False,
        )
