# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Refusals of wrong arguments: each row of the tables is a call, and the error that it raises.

A row is ``call  # ErrorClass | word | word``: the class is one of the library's own,
and the words are the argument's name and the offending value, which the message
contains.
"""

from functools import cache
from pathlib import Path
import re
from typing import Any

import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pandas as pd
import pytest
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Exponential,
    FactorGraph,
    Gaussian,
    Poisson,
    contrib,
    layered,
)
from ebmpp.data import decode_bits, encode_bits


def coins() -> None:
    numpyro.sample("z", dist.Bernoulli(0.5).expand([3]).to_event(1))


def noisy(y: Any) -> None:
    s = numpyro.sample("s", dist.Normal(0, 1))
    z = numpyro.sample("z", dist.Bernoulli(0.5).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(s * z, 1.0).to_event(1), obs=1.0 * y)


def subsampled() -> None:
    with numpyro.plate("points", 5, subsample_size=2):
        numpyro.sample("z", dist.Bernoulli(0.4))


@cache
def names() -> dict[str, Any]:
    """Return the names that the calls use: public names, small graphs, data, and shorthands."""
    key, rbm, params = jax.random.key(0), zoo.graph("rbm"), zoo.params("rbm")
    rooms = [
        ebmpp,
        ebmpp.graph,
        ebmpp.moves,
        ebmpp.exact,
        ebmpp.coupling,
        ebmpp.annealing,
        ebmpp.kernels,
    ]
    rooms += [
        contrib.graphs,
        ebmpp.estimators,
        ebmpp.evaluate,
        ebmpp.training,
        ebmpp.ppl,
    ]
    rooms += [ebmpp.diagnostics, contrib]
    public = {name: getattr(room, name) for room in rooms for name in room.__all__}
    graphs = {
        "DEEP": layered(v=Bernoulli(4), h=Bernoulli(3), g=Bernoulli(2)),
        "TWO": FactorGraph(
            {"v": Bernoulli(4), "y": Categorical(1, 3)},
            {"h": Bernoulli(3)},
            [*map(Bias, "vyh"), Bilinear("v", "h"), Bilinear("y", "h")],
        ),
        "GATED": zoo.graph("gated"),
        "ISING": zoo.graph("lattice"),
        "WIDE": layered(v=Bernoulli(40), h=Bernoulli(40)),
        "GAUSS": layered(v=Gaussian(2), h=Gaussian(2)),
        "POISSON": layered(v=Poisson(2), h=Poisson(2)),
        "COUNTS": zoo.graph("poisson"),
        "REALS": layered(v=Gaussian(2), h=Bernoulli(2)),
        "EXPONENTIAL": FactorGraph({"x": Exponential(2)}, factors=[Bias("x")]),
    }
    initial = {f"{name}_PARAMS": graph.init(key) for name, graph in graphs.items()}

    def zeros(graph: FactorGraph) -> dict[str, Any]:
        return {
            name: np.zeros(expected.shape)
            for name, expected in graph.param_shapes.items()
        }

    def fit(*args: Any, **options: Any) -> ebmpp.FitResult:
        if "schedule" not in options:
            options = {"num_steps": 1, "estimator": ebmpp.CD(), **options}
        return ebmpp.fit(*args, **{"progress_bar": False, **options})

    def estimate(
        graph: Any = rbm,
        params: Any = params,
        fn: Any = lambda x: x["v"],
        **options: Any,
    ) -> Any:
        return ebmpp.unbiased_expectation(
            graph, params, fn, **{"rng_key": key, "num_pairs": 4, **options}
        )

    def mean(
        graph: Any = rbm,
        params: Any = params,
        fn: Any = lambda x: x["v"],
        **options: Any,
    ) -> Any:
        options = {"rng_key": key, "num_pairs": 4, **options}
        return ebmpp.expectation(graph, params, fn, **options)

    def tempered(betas: Any = (0, 1), **options: Any) -> Any:
        return estimate(
            coupling=ebmpp.moves.tempered(betas, options.pop("coupling", None)),
            **options,
        )

    def composite(fn: Any = lambda s: s["v"], **options: Any) -> Any:
        kernel = ebmpp.ppl.CoupledComposite([ebmpp.GibbsBlock(rbm, ["v"], params)])
        options = {"kernel": kernel, "rng_key": key, "num_pairs": 4, **options}
        return ebmpp.ppl.composite_expectation(options.pop("kernel"), fn, **options)

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        MCMC(kernel, num_warmup=0, num_samples=1, progress_bar=False).run(
            key, *args, **options
        )

    def exchange(graph: Any = rbm, params: Any = params) -> Any:
        return ebmpp.ppl.Exchange(
            graph, {"a": dist.Uniform(0, 1)}, lambda s, x: params, lambda s, x: x
        )

    functions = (
        zeros,
        fit,
        estimate,
        mean,
        tempered,
        composite,
        run,
        exchange,
        coins,
        noisy,
        subsampled,
    )
    shorthands = {f.__name__: f for f in functions}
    modules = {
        "ebmpp": ebmpp,
        "np": np,
        "nx": nx,
        "jax": jax,
        "jnp": jnp,
        "dist": dist,
        "optax": optax,
        "numpyro": numpyro,
    }
    modules |= {"pd": pd, "zoo": zoo, "data": ebmpp.data, "readers": contrib.readers}
    bits = {"encode_bits": encode_bits, "decode_bits": decode_bits, "MCMC": MCMC}
    data = np.array(
        [
            [1.0, 0, 1, 0],
            [0, 1, 0, 1],
            [1, 1, 0, 0],
            [0, 0, 1, 1],
            [1, 1, 1, 1],
            [0, 0, 0, 0],
        ]
    )
    arrays = {
        "DATA": data,
        "LABELS": np.zeros((6, 1)),
        "V": np.array([1.0, 0, 1, 0]),
        "H": np.ones(3),
    }
    arrays |= {"KEY": key, "RBM": rbm, "PARAMS": params}
    return public | graphs | initial | shorthands | modules | bits | arrays


ROWS = [
    pytest.param(*row.split("  # "), id=f"{path.stem}-{row.split('  # ')[0]}")
    for path in sorted(Path(__file__).parent.glob("*.txt"))
    for row in path.read_text().splitlines()
]


@pytest.mark.parametrize(("call", "error"), ROWS)
def test_wrong_argument_is_refused(call: str, error: str) -> None:
    name, *words = error.split(" | ")
    with pytest.raises(getattr(ebmpp.errors, name)) as caught:
        eval(call, dict(names()))
    assert type(caught.value).__name__ == name
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(caught.value)), (
            f"no {word}: {caught.value}"
        )


def test_every_row_is_another_call() -> None:
    assert len({row.values[0] for row in ROWS}) == len(ROWS) >= 350
