# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What is refused, call by call: the tables beside this file hold a call, and the error it ends in.

A call is one line, and the indented line below it is the error, class and message, with ``...`` for what
differs from run to run. An error of another class, Python's and jax's own among them, is a failure: who gives
something wrong is told so by this library, in its words.
"""

import doctest
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import errors
from ebmpp.data import decode_bits, encode_bits

KEY = jax.random.key(0)
RBM = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
PARAMS = RBM.init(KEY)
DEEP = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3), g=ebmpp.Bernoulli(2))
TWO = ebmpp.FactorGraph(
    {"v": ebmpp.Bernoulli(4), "y": ebmpp.Categorical(1, 3)},
    {"h": ebmpp.Bernoulli(3)},
    [*map(ebmpp.Bias, "vyh"), ebmpp.Bilinear("v", "h"), ebmpp.Bilinear("y", "h")],
)
ISING = ebmpp.FactorGraph.from_networkx(nx.grid_2d_graph(3, 3), family=ebmpp.Spin)
WIDE = ebmpp.layered(v=ebmpp.Bernoulli(40), h=ebmpp.Bernoulli(40))
GAUSS = ebmpp.layered(v=ebmpp.Gaussian(2), h=ebmpp.Gaussian(2))
POISSON = ebmpp.layered(v=ebmpp.Poisson(2), h=ebmpp.Poisson(2))
DATA = np.array([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])


def fit(*args: Any, **options: Any) -> ebmpp.Fit:
    """One quick step unless said otherwise."""
    if "schedule" not in options:
        options = {"num_steps": 1, "estimator": ebmpp.CD(), **options}
    return ebmpp.fit(*args, **{"progress_bar": False, **options})


def estimate(graph=RBM, params=PARAMS, fn=lambda x: x["v"], **options: Any) -> Any:
    return ebmpp.unbiased_expectation(graph, params, fn, **{"rng_key": KEY, "num_pairs": 4, **options})


def tempered(betas: Any = (0, 1), **options: Any) -> Any:
    options = {"rng_key": KEY, "num_pairs": 4, **options}
    return ebmpp.kernels.tempered_expectation(RBM, PARAMS, lambda x: x["v"], betas=betas, **options)


def coins() -> None:
    numpyro.sample("z", dist.Bernoulli(0.5).expand([3]).to_event(1))


def composite(fn=lambda s: s["v"], **options: Any) -> Any:
    kernel = ebmpp.ppl.CoupledComposite([ebmpp.GibbsBlock(RBM, ["v"], PARAMS)])
    options = {"kernel": kernel, "rng_key": KEY, "num_pairs": 4, **options}
    return ebmpp.ppl.composite_expectation(options.pop("kernel"), fn, **options)


def run(kernel: Any, *args: Any, **options: Any) -> None:
    mcmc = MCMC(kernel, num_warmup=0, num_samples=1, progress_bar=False)
    mcmc.run(KEY, *args, **options)


ROOMS = (
    ebmpp,
    ebmpp.graph,
    ebmpp.moves,
    ebmpp.sampling,
    ebmpp.kernels,
    ebmpp.estimators,
    ebmpp.evaluate,
    ebmpp.training,
    ebmpp.ppl,
    ebmpp.diagnostics,
)
NAMES = {
    **{name: getattr(room, name) for room in ROOMS for name in room.__all__},
    **globals(),
    "decode_bits": decode_bits,
    "dist": dist,
    "encode_bits": encode_bits,
    "jnp": jnp,
    "optax": optax,
    "DEEP_PARAMS": DEEP.init(KEY),
    "TWO_PARAMS": TWO.init(KEY),
    "ISING_PARAMS": ISING.init(KEY),
    "WIDE_PARAMS": WIDE.init(KEY),
    "GAUSS_PARAMS": GAUSS.init(KEY),
    "POISSON_PARAMS": POISSON.init(KEY),
    "EXPONENTIAL": ebmpp.FactorGraph({"x": ebmpp.Exponential(2)}, factors=[ebmpp.Bias("x")]),
    "COUNTS": ebmpp.layered(v=ebmpp.Poisson(2), h=ebmpp.Bernoulli(2)),
    "REALS": ebmpp.layered(v=ebmpp.Gaussian(2), h=ebmpp.Bernoulli(2)),
    "LABELS": np.zeros((6, 1)),
    "V": np.array([1.0, 0, 1, 0]),
    "H": np.ones(3),
}


def table(path: Path) -> list[tuple[str, str]]:
    """Calls and errors of a file."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    calls, told = lines[::2], lines[1::2]
    assert len(calls) == len(told) and all(line.startswith("    ") for line in told), f"{path}: odd lines"
    return [(call, line.strip()) for call, line in zip(calls, told, strict=True)]


CASES = [
    pytest.param(*case, id=f"{path.stem}-{case[0]}")
    for path in sorted(Path(__file__).parent.glob("*.txt"))
    for case in table(path)
]


def test_there_are_enough():
    assert len(CASES) >= 300
    assert len({case.values[0] for case in CASES}) == len(CASES)


@pytest.mark.parametrize(("call", "told"), CASES)
def test_is_refused_by_name(call, told):
    with pytest.raises(Exception) as caught:
        eval(call, dict(NAMES))
    error = caught.value
    found = f"{type(error).__name__}: {' '.join(str(error).split())}"
    assert type(error).__module__ == errors.__name__, f"a raw error: {found}"
    matches = doctest.OutputChecker().check_output(told + "\n", found + "\n", doctest.ELLIPSIS)
    assert matches, f"{found}\nwas expected to be\n{told}"
