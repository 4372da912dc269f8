# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pictures: what is on them, and that importing ebmpp does not import matplotlib."""

from collections.abc import Iterator
import subprocess
import sys

from matplotlib import pyplot as plt
import numpy as np
import pytest
import xarray as xr

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    layered,
    tv_upper_bound,
)
from ebmpp.diagnostics import plots
from ebmpp.sampling.expectation import UnbiasedEstimate


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    plt.close("all")


def test_matplotlib_waits():
    code = "import sys, ebmpp, ebmpp.diagnostics, ebmpp.graph; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the graph -------------------------------------------------------------------------------------


def test_draw_graph():
    graph = FactorGraph(
        {"v": Bernoulli(2), "x": Gaussian((2, 2), variance="learned")},
        {"h": Categorical(2, 3)},
        [Bias("v"), Bias("h"), Bias("x"), Bilinear("v", "h", name="weights"), Bilinear("x", "h")],
    )
    _, ax = plt.subplots()
    assert graph.draw(ax) is ax
    texts = [text.get_text() for text in ax.texts]
    assert {"v", "x", "h", "weights", "x:h", "layer 0", "layer 1", "Bernoulli(2)"} <= set(texts)
    faces = [patch.get_facecolor()[:3] for patch in ax.patches]
    assert faces[0] == faces[1] != faces[2]  # visible ones are shaded
    assert len(ax.lines) == 2
    ax.figure.canvas.draw()


def test_draw_a_three_way_factor_and_a_deep_machine():
    gate = Factor("x", "y", "h", energy=lambda _, x, y, h: -x[0] * y[0] * h[0], name="gate")
    ax = FactorGraph({"x": Bernoulli(1), "y": Bernoulli(1)}, {"h": Bernoulli(1)}, [gate]).draw()
    assert [t.get_text() for t in ax.texts].count("gate") == 3
    deep = layered(v=Bernoulli(3), h1=Bernoulli(3), h2=Bernoulli(3)).draw()
    assert deep.figure is not ax.figure
    assert {"v:h1", "h1:h2"} <= {t.get_text() for t in deep.texts}


# -- units -----------------------------------------------------------------------------------------


def test_plot_units_lays_out_images_in_order():
    images = np.arange(6 * 4).reshape(6, 2, 2) / 24
    shown = plots.plot_units(images, ncols=3).images[0]
    grid = np.asarray(shown.get_array().filled(np.nan))
    assert grid.shape == (7, 10)
    np.testing.assert_allclose(grid[1:3, 4:6], images[1])
    np.testing.assert_allclose(grid[4:6, 1:3], images[3])
    assert np.isnan(grid[0]).all() and np.isnan(grid[:, 3]).all()
    assert shown.get_clim() == (0, 1)


def test_plot_units_scale_is_symmetric():
    weights = np.random.default_rng(0).normal(size=(5, 9))
    ax = plots.plot_units(weights)
    low, high = ax.images[0].get_clim()
    assert low == -high == -np.abs(weights).max()
    assert len(ax.figure.axes) == 2  # the colour bar
    assert len(plots.plot_units(weights, colorbar=False).figure.axes) == 1


@pytest.mark.parametrize(
    ("shape", "images"), [(None, (4, 7)), ((2, 2), (4, 7)), (None, (0, 2, 2)), (None, (4,))]
)
def test_plot_units_refuses(shape, images):
    with pytest.raises(ValueError, match="images have shape"):
        plots.plot_units(np.zeros(images), shape=shape)


# -- training --------------------------------------------------------------------------------------


def history(steps=200, unmet=0):
    made = {
        "gradient_norm": ("step", np.linspace(3, 1, steps)),
        "meeting_time_mean": ("step", np.full(steps, 4.0)),
        "meeting_time_max": ("step", np.full(steps, 9)),
        "num_unmet": ("step", np.full(steps, unmet)),
        "lag": ("step", np.ones(steps, int)),
        "log_likelihood": ("monitor_step", np.array([-3.0, -2.0])),
    }
    return xr.Dataset(made, {"step": np.arange(steps), "monitor_step": [0, 100]})


def test_plot_history():
    axes = plots.plot_history(history())
    assert [ax.get_ylabel() for ax in axes] == ["log likelihood", "gradient norm", "meeting time (sweeps)"]
    np.testing.assert_array_equal(axes[0].lines[0].get_xdata(), [0, 100])
    pale, smooth = axes[1].lines
    np.testing.assert_allclose(pale.get_ydata(), np.linspace(3, 1, 200))
    assert smooth.get_ydata()[0] == pytest.approx(np.linspace(3, 1, 200)[:4].mean())
    assert [t.get_text() for t in axes[2].get_legend().get_texts()] == ["mean", "max", "lag"]
    assert axes[2].get_yscale() == "log"
    axes[0].figure.canvas.draw()


def test_plot_history_shows_unmet_pairs_and_takes_axes():
    _, given = plt.subplots(1, 4)
    axes = plots.plot_history(history(20, unmet=2), axes=given)
    assert axes[2] is given[2] and axes[2].get_ylabel() == "unmet pairs"
    with pytest.raises(ValueError, match="got 1 axes, expected 3"):
        plots.plot_history(history(), axes=given[0])
    with pytest.raises(TypeError, match="not list"):
        plots.plot_history([])
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.plot_history(xr.Dataset())


# -- meeting times ---------------------------------------------------------------------------------


def test_survival_without_censoring_is_the_empirical_one():
    times = np.random.default_rng(0).geometric(0.1, size=500).astype(float)
    t, survival = plots.survival_curve(times, np.ones(500, bool))
    np.testing.assert_allclose(survival, [(times > s).mean() for s in t], atol=1e-12)


def test_survival_with_censoring_is_unbiased():
    """Half of the pairs watched for 5 sweeps only: the naive curve would fall at 5, this one not."""
    times = np.random.default_rng(1).geometric(0.1, size=20_000).astype(float)
    watched = np.where(np.arange(20_000) % 2, 5.0, 1000.0)
    met = times <= watched
    t, survival = plots.survival_curve(np.minimum(times, watched), met)
    at = t <= 20
    np.testing.assert_allclose(survival[at], 0.9 ** t[at], atol=0.02)


def test_survival_takes_whole_numbers():
    t, survival = plots.survival_curve(np.array([2, 3, 3, 7]), np.array([True, True, False, False]))
    np.testing.assert_allclose(survival, [1, 3 / 4, 1 / 2, 1 / 2])


def test_survival_by_hand():
    # 4 at risk at 2, one meets; 3 at risk at 3 (one is censored there); 1 at risk at 7, unmet
    t, survival = plots.survival_curve(np.array([2.0, 3, 3, 7]), np.array([True, True, False, False]))
    np.testing.assert_array_equal(t, [0, 2, 3, 7])
    np.testing.assert_allclose(survival, [1, 3 / 4, 1 / 2, 1 / 2])


def test_plot_meeting_times():
    ax = plots.plot_meeting_times([1, 2, 2, 5], lag=4, met=[True, True, True, False], label="a")
    assert ax.get_yscale() == "log" and "lag 4" in ax.get_xlabel()
    assert "a: 1 of 4 pairs unmet" in [t.get_text() for t in ax.texts]
    assert ax.lines[1].get_xdata().tolist() == [5]
    again = plots.plot_meeting_times([1, 2, 3], ax=ax, label="b")
    assert again is ax and len(ax.lines) == 3
    assert ax.lines[2].get_color() != ax.lines[0].get_color()
    assert ax.get_ylim()[0] < 1 / 6 * 1.1
    ax.figure.canvas.draw()


def test_plot_meeting_times_of_a_datatree():
    group = xr.Dataset({"meeting_time": ("chain", [3, 4]), "met": ("chain", [True, False]), "lag": 2})
    ax = plots.plot_meeting_times(xr.DataTree.from_dict({"meeting": group}))
    assert "lag 2" in ax.get_xlabel()
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1, 0.5, 0.5])


@pytest.mark.parametrize(
    ("times", "met", "message"),
    [
        ([], None, "expected at least one"),
        ([1, np.inf], None, "1 of 2"),
        ([1, 2], [True], r"met has shape \(1,\)"),
    ],
)
def test_plot_meeting_times_refuses(times, met, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_meeting_times(times, met=met)


def estimate(times, met, max_sweeps=None, lag=1):
    """An estimate with these meeting times; unmet ones are infinite."""
    times = np.where(met, np.asarray(times, float), np.inf)
    unmet = int((~np.isfinite(times)).sum())
    return UnbiasedEstimate(
        0.0, 0.0, times, np.asarray(met), times, 1, 1, lag, max_sweeps, unmet, 1.0, np.nan
    )


def test_plot_meeting_times_of_an_estimate():
    ax = plots.plot_meeting_times(estimate([4, 5, 5, 9], [True] * 4, lag=4), label="default")
    assert "lag 4" in ax.get_xlabel()
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [0, 4, 5, 9])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1, 3 / 4, 1 / 4, 1 / 8])
    assert not ax.texts


def test_plot_meeting_times_of_an_estimate_with_unmet_pairs():
    ax = plots.plot_meeting_times(estimate([1, 2, 2, 7], [True, True, True, False], max_sweeps=7))
    assert "1 of 4 pairs unmet" in [t.get_text() for t in ax.texts]
    assert ax.lines[1].get_xdata().tolist() == [7]


# -- bounds ----------------------------------------------------------------------------------------


def tree(times, met, lag=2):
    group = xr.Dataset({"meeting_time": ("chain", times), "met": ("chain", met), "lag": lag})
    return xr.DataTree.from_dict({"meeting": group})


def bound(values, **attrs):
    values = np.asarray(values, float)
    columns = {"bound": values, "lower": 0.5 * values, "upper": 1.5 * values}
    return xr.Dataset({n: ("t", v) for n, v in columns.items()}, {"t": np.arange(len(values))}, attrs)


def band(ax, index=0):
    """The corners of a band."""
    return ax.collections[index].get_paths()[0].vertices


@pytest.mark.parametrize("kind", ["tree", "estimate"])
def test_plot_tv_bound(kind):
    times = np.array([3, 4, 4, 6, 9])
    source = tree(times, [True] * 5) if kind == "tree" else estimate(times, [True] * 5, lag=2)
    ax = plots.plot_tv_bound(source)
    wanted = tv_upper_bound(source)
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), wanted.t)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), wanted.bound)
    assert ax.lines[0].get_drawstyle() == "steps-post"
    corners = band(ax)
    for t, low, high in zip(wanted.t.values, wanted.lower.values, wanted.upper.values, strict=True):
        for value in (low, high):
            assert (np.abs(corners - [t, value]).max(1) < 1e-12).any()
    assert "lag 2" in ax.get_xlabel() and ax.get_ylabel() == "total variation distance, at most"
    assert ax.get_ylim()[0] == 0 and not ax.texts and ax.get_legend() is None
    ax.figure.canvas.draw()


def test_plot_tv_bound_tells_of_unmet_pairs():
    ax = plots.plot_tv_bound(tree([5, 3, 2], [True, True, False]), label="a")
    assert [t.get_text() for t in ax.texts] == ["a: 1 of 3 pairs unmet"]
    ax.figure.canvas.draw()


def test_plot_tv_bound_of_an_estimate_with_unmet_pairs():
    ax = plots.plot_tv_bound(estimate([1, 2, 2, 7], [True, True, True, False], max_sweeps=7))
    assert "1 of 4 pairs unmet" in [t.get_text() for t in ax.texts]


def test_plot_a_bound_that_was_computed():
    ax = plots.plot_tv_bound(bound([6, 2, 0.5], lag=3, pairs=9, unmet=0), label="a")
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [6, 2, 0.5])
    assert band(ax)[:, 1].max() == 9 and band(ax)[:, 1].min() == 0.25
    assert ax.get_xlabel() == "t (sweeps, lag 3)" and ax.get_ylabel() == "distance to stationarity, at most"
    again = plots.plot_tv_bound(bound([1, 0]), ax=ax, label="b")
    assert again is ax and [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b"]
    assert ax.lines[1].get_color() != ax.lines[0].get_color()
    assert len(ax.collections) == 2 and ax.get_xlabel() == "t (sweeps)"
    ax.figure.canvas.draw()


def test_plot_an_infinite_bound():
    ax = plots.plot_tv_bound(bound([np.inf, np.inf], lag=1, pairs=4, unmet=1))
    assert [t.get_text() for t in ax.texts] == ["1 of 4 pairs unmet"]
    ax.figure.canvas.draw()


def test_plot_tv_bound_refuses():
    with pytest.raises(ValueError, match="no 'meeting'"):
        plots.plot_tv_bound(xr.DataTree())
