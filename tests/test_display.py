# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Displays in print and notebooks: the object's numbers, in text and in well-formed HTML alike.

Tests core/display.py, graph/display.py.
"""

import math
from pathlib import Path
import re
from xml.etree import ElementTree

import numpy as np
import pytest

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, FactorGraph, Spin
from ebmpp.annealing import Bracket, LogPartition, ParticleSystem, Path as ModelPath
from ebmpp.core.display import Card, Grid, Measured, Shown
from ebmpp.coupling import UnbiasedEstimate
from ebmpp.estimators.certificate import GradientBias, Squares

RBM = ebmpp.layered(v=Bernoulli(4), h=Bernoulli(3))
PARAMS = {"v": jnp.zeros(4), "h": jnp.ones(3), "v:h": jnp.full((4, 3), 2.0)}
FACTORS = [Bilinear("<b>", "a&b"), Bias("<b>"), Bias("a&b")]
ODD = FactorGraph({"<b>": Bernoulli(2), "a&b": Bernoulli(2)}, factors=FACTORS)


def words(result: Shown) -> str:
    """Return the text of the HTML, which an XML parser reads."""
    return " ".join(ElementTree.fromstring(result._repr_html_()).itertext())


def line(result: Shown, begins: str) -> list[str]:
    """The cells of the row of the text that begins so."""
    (row,) = [text for text in str(result).splitlines() if re.match(begins, text)]
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def estimate(value, error, met=(True, True, True, True)) -> UnbiasedEstimate:
    times, met = np.where(met, [1.0, 2.0, 2.0, 7.0], np.inf), np.array(met)
    unmet = int((~met).sum())
    return UnbiasedEstimate(
        value, error, times, met, 2 * times, 2, 5, 1, None, unmet, 1.1, math.nan
    )


def log_z(value: float, bound: str, unbiased: bool = True) -> LogPartition:
    weights, betas = np.zeros(50), np.linspace(0, 1, 7)
    return LogPartition(
        value, 0.0321, 41.25, weights, betas, bound, unbiased, RBM, PARAMS
    )


def trained() -> ebmpp.FitResult:
    settings = {
        "num_steps": 5,
        "batch_size": 4,
        "monitor_every": 2,
        "progress_bar": False,
    }
    settings |= {
        "monitors": {"norm": lambda p: sum(jnp.abs(v).sum() for v in p.values())},
        "keep_best": "norm",
    }
    settings |= {"optimizer": optax.adam(0.01), "rng_key": jax.random.key(0)}
    return ebmpp.fit(
        RBM, np.eye(4, dtype=np.float32), estimator=ebmpp.UCD(num_pairs=2), **settings
    )


BRACKET = Bracket(
    log_z(12.3456789, "lower"), log_z(12.5, "upper", unbiased=False), 12.41
)
# fmt: skip
SYSTEM = ParticleSystem(
    **vars(log_z(1234.5678, "lower")),
    particles={"v": jnp.zeros((50, 4))},
    weights=np.full(50, 0.02),
    log_z=np.zeros(5),
    num_rungs=3,
    distinct_ancestors=0.5,
)
PART, ALL = Squares(0.5, 0.1, 2.0, 0.3), Squares(0.25, 0.01, 3.0, 0.2)
BIAS = GradientBias(ebmpp.CD(k=1), {"<b>": PART}, ALL, {}, {}, 20, None, 20)
PATH = ModelPath.through(RBM, {"v": jnp.zeros(4), "h": jnp.zeros(3)}, [PARAMS, PARAMS])
MANY = estimate(
    {"v": np.linspace(-1, 3, 20), "h": np.zeros(5)},
    {"v": np.full(20, 0.1), "h": np.zeros(5)},
)
EVERY = {
    "graph": RBM,
    "odd": ODD,
    "estimate": estimate(0.5, 0.01),
    "many": MANY,
    "unmet": estimate(0.5, 0.01, (True, False, True, False)),
    "log_z": log_z(3.0, "lower"),
    "bracket": BRACKET,
    "system": SYSTEM,
    "bias": BIAS,
}


@pytest.mark.parametrize("name", EVERY)
def test_html_is_well_formed_and_has_the_words_of_the_text(name: str) -> None:
    result = EVERY[name]
    words_in_page = words(result).split()
    assert len(str(result).splitlines()) > 2 and set(str(result).split()) <= set(
        words_in_page
    )
    assert "\n" not in repr(result)


def test_a_measured_number_has_the_digits_that_its_error_allows() -> None:
    for value, error, expected in [
        (-19.34567, 0.0312, "-19.346 +- 0.031"),
        (1.0, 0.0996, "1.00 +- 0.10"),
        (123456.0, 2345.0, "123500 +- 2300"),
        (0.0, 0.5, "0.00 +- 0.50"),
        (3.2e-12, 1e-13, "(3.20 +- 0.10)e-12"),
        (-2e12, 1e10, "(-2.000 +- 0.010)e12"),
        (0.5, 0.0, "0.5 +- 0"),
        (0.5, math.nan, "0.5 +- nan"),
        (math.inf, 1.0, "inf +- 1"),
    ]:
        assert str(Measured(value, error)) == expected


def test_a_graph_tells_its_blocks_and_factors() -> None:
    assert line(RBM, "v +Bernoulli") == ["v", "Bernoulli(4)", "4", "visible", "layer 0"]
    assert line(RBM, "v:h") == ["v:h", "Bilinear", "v, h", "(4, 3)", "12"]
    assert str(RBM).startswith(
        "FactorGraph: 7 units in 2 blocks, 2 layers, 19 params in 3 factors\n"
    )
    ising = FactorGraph(
        {"x": Spin((4, 4))}, factors=[ebmpp.Pairwise("x", [(0, 1), (1, 2)])]
    )
    assert "layers 0 to 1" in line(ising, "x +Spin")


def test_the_quickstart_shows_what_is_printed() -> None:
    page = Path(__file__).parents[1] / "docs" / "quickstart.md"
    assert str(ebmpp.layered(v=Bernoulli(64), h=Bernoulli(16))) in page.read_text(
        encoding="utf-8"
    )


def test_names_are_escaped() -> None:
    assert "<b>" in str(ODD) and "<b>" not in ODD._repr_html_() and "<b>" in words(ODD)


@pytest.mark.nightly
def test_a_fit_tells_its_history_and_params() -> None:
    fit = trained()
    last = fit.history.meeting_time_mean.values[-1]
    assert line(fit, "meeting_time_mean")[2:] == [f"{last:.4g}", "4"]
    norm = fit.history.norm
    ends = [f"{v:.4g}" for v in norm.values[[0, -1]]]
    assert line(fit, "norm") == ["norm", *ends, str(norm.monitor_step.values[-1])]
    size = float(jnp.sqrt(jnp.mean(fit.params["v:h"] ** 2)))
    assert line(fit, "v:h")[-1] == f"{size:.4g}"
    expected = (
        "FitResult(5 steps by UCD(num_pairs=2), 19 params in 3 factors, best at "
        f"step {fit.best_step})"
    )
    assert repr(fit) == expected
    assert set(str(fit).split()) <= set(words(fit).split())


def test_an_estimate_prints_its_values_with_their_errors() -> None:
    result = estimate({"v": np.array([0.123456, 2.0])}, {"v": np.array([0.0123, 0.5])})
    assert line(result, "value")[1] == "['v']: [0.1235, 2] +- [0.012, 0.5]"
    assert line(result, "meeting time")[1] == "3, 2, 7"
    assert line(estimate(0.5, 0.01), "value")[1] == "0.5 +- 0.01"
    assert "biased" in str(EVERY["unmet"]) and "biased" not in str(result).replace(
        "Unbiased", ""
    )
    assert line(EVERY["unmet"], "meeting time")[1] == "1.5, 1.5, 2"


def test_an_estimate_of_many_numbers_prints_their_range() -> None:
    assert (
        line(MANY, "value")[1] == "25 numbers from -1 to 3, standard errors at most 0.1"
    )


def test_brackets_systems_and_biases_tell_their_numbers() -> None:
    assert line(BRACKET, "lower") == [
        "lower",
        "12.346 +- 0.032",
        "41.2 of 50",
        "7",
        "lower bound on average",
    ]
    assert line(BRACKET, "upper")[-1] == "no bound: approximate samples"
    assert (
        line(BRACKET, "gap")[1]
        == str(Measured(BRACKET.gap, BRACKET.standard_error))
        == "0.154 +- 0.045"
    )
    assert line(BRACKET, "exact")[1] == "12.41"
    assert line(SYSTEM, "log Z")[1] == "1234.568 +- 0.032"
    assert line(BIAS, "<b>") == ["<b>", "0.50 +- 0.10", "2.00 +- 0.30"]
    assert line(BIAS, "all params")[1] == "0.250 +- 0.010"


def test_a_path_prints_a_line_traced_or_not() -> None:
    texts = [str(PATH)]
    jax.jit(lambda p: texts.append(str(p)))(PATH)
    assert all(text.startswith("Path(3 knots") and "\n" not in text for text in texts)


def test_a_long_table_says_how_much_it_leaves_out() -> None:
    grid = Grid(("a", "b"), [(str(i), i) for i in range(30)])
    card = Card("many", [grid])
    assert str(card).endswith("... and 6 more rows")
    assert "23  23" in str(card) and "24" not in str(card)
