# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased estimates with every coupling against exact moments."""

from functools import cache, partial
from typing import Any

import numpy as np
from pair_tools import graph_of, params_of
import pytest
from scipy import stats
from ucd_tools import exact_means, flat

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.contrib import Metropolis, metropolis_sweep
from ebmpp.coupling.expectation import UnbiasedEstimate
from ebmpp.errors import ArgumentError, DeclarationError
from helpers import assert_law, nightly

PAIRS = 6000
WINDOWS = [(1, 1, 1), (2, 6, 3), (5, 5, 2)]


#: Each compiles for seconds. The default coupling is tested with the engine.
CASES = [
    ("gaussian", "reflection"),
    nightly("tiny", metropolis_sweep),
    nightly("gated", ("common", "maximal", "independent")),
    nightly("tiny", ("common", "maximal")),
    nightly("tiny", ("maximal", "independent")),
    nightly("tiny", partial(metropolis_sweep, marginalize=("b",))),
    nightly("spin", partial(metropolis_sweep, proposal="initial")),
    nightly("categorical", partial(metropolis_sweep, marginalize=("v",))),
    nightly("learned", partial(metropolis_sweep, proposal="initial")),
    nightly(
        "poisson", partial(metropolis_sweep, proposal="initial", marginalize=("h",))
    ),
    nightly("deep", "maximal_independent"),
    nightly("deep", partial(metropolis_sweep, marginalize=("v", "h2"))),
    nightly("gated", metropolis_sweep),
]


@cache
def statistics(name: str) -> Any:
    """One function per graph, so that a coupling compiles once."""
    return lambda x: graph_of(name).statistics(x)


@cache
def params_for(name: str) -> dict[str, Any]:
    """Params whose tails are lighter than the tails of initial draws, where these are proposed."""
    special = {
        "learned": {
            "v": [[0.6, -0.8], [-0.4, -1.0]],
            "h": [0.5, -0.7],
            "v:h": [[1.5, -1.2], [0.8, 1.6]],
        },
        "poisson": {
            "v": [-1.0, -0.6],
            "h": [0.5, -0.7],
            "v:h": [[0.6, 0.3], [0.2, 0.4]],
        },
    }
    if name not in special:
        return params_of(name)
    return {
        factor: jnp.asarray(np.float32(value))
        for factor, value in special[name].items()
    }


def estimate(name: str, coupling: Any, **options: Any) -> UnbiasedEstimate:
    options = {
        "rng_key": jax.random.key(1),
        "num_pairs": PAIRS,
        "num_slots": 4,
        **options,
    }
    options["coupling"] = coupling
    return ebmpp.unbiased_expectation(
        graph_of(name), params_for(name), statistics(name), **options
    )


def name_of(value: Any) -> str:
    return getattr(value, "__name__", "") or str(getattr(value, "keywords", value))


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "coupling"), CASES, ids=name_of)
def test_every_coupling_is_unbiased(name: str, coupling: Any) -> None:
    exact = flat(exact_means(graph_of(name), params_for(name)))
    for k, m, lag in WINDOWS:
        result = estimate(name, coupling, k=k, m=m, lag=lag)
        assert_law(
            flat(result.value),
            exact,
            flat(result.standard_error),
            exact.size * len(WINDOWS),
        )
        # there was something to correct
        assert (result.meeting_time > lag + 1).mean() > 0.03
        assert (
            result.cost
            == np.maximum(m, result.meeting_time) + result.meeting_time - lag
        ).all()
        assert (
            (0 < result.acceptance < 1)
            if callable(coupling)
            else np.isnan(result.acceptance)
        )
        late = result.meeting_time > lag
        interval = stats.binomtest(
            int(late.sum()), PAIRS, alternative="less"
        ).proportion_ci(0.95, "exact")
        assert result.late == late.mean() and result.late_upper == pytest.approx(
            interval.high
        )


@pytest.mark.parametrize(
    ("name", "coupling", "clamped", "error", "message"),
    [
        (
            "tiny",
            Metropolis(("a", "b")),
            {"a": [1.0, 0.0]},
            ArgumentError,
            r"\['a', 'b'\].*\['b'\]",
        ),
        ("tiny", Metropolis(("a",)), {}, ArgumentError, r"\['a'\].*\['a', 'b'\]"),
        ("tiny", (), {}, ArgumentError, r"\[\]"),
        ("tiny", ("metropolised", "common"), {}, ArgumentError, "'metropolised'"),
        ("gaussian", metropolis_sweep, {}, DeclarationError, "block 'v' .*Gaussian"),
        ("poisson", metropolis_sweep, {}, DeclarationError, "block 'v' .*Poisson"),
    ],
)
def test_moves_that_do_not_fit_are_refused(
    name: str,
    coupling: Any,
    clamped: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        estimate(name, coupling, **{b: jnp.array(v) for b, v in clamped.items()})
