# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Contents of plots; importing ebmpp does not import matplotlib.

Tests diagnostics/plots.py, diagnostics/style.py.
"""

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
    tv_upper_bound,
)
from ebmpp.diagnostics import plots, style

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    plt.close("all")


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_matplotlib_is_imported_on_demand():
    code = (
        "import sys, ebmpp, ebmpp.diagnostics, ebmpp.graph; sys.exit('matplotlib' "
        "in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plot_graph():
    factors = [
        *map(Bias, "vhx"),
        Bilinear("v", "h", name="weights"),
        Bilinear("x", "h"),
    ]
    visible = {"v": Bernoulli(2), "x": Gaussian((2, 2), variance="learned")}
    graph = FactorGraph(visible, {"h": Categorical(2, 3)}, factors)
    _, ax = plt.subplots()
    assert graph.plot(ax) is ax
    assert {
        "weights",
        "x:h",
        "layer 0",
        "layer 1",
        "v\nBernoulli(2)\nfactors: v",
    } <= set(texts(ax))
    boxes = {
        text.get_text()[0]: text.get_bbox_patch()
        for text in ax.texts
        if "factors" in text.get_text()
    }
    colours = {block: box.get_facecolor() for block, box in boxes.items()}
    assert colours["v"] == colours["x"] != colours["h"]  # visible blocks are shaded
    gate = Factor(
        "x", "y", "h", energy=lambda _, x, y, h: -x[0] * y[0] * h[0], name="gate"
    )
    gated = FactorGraph(
        {"x": Bernoulli(1), "y": Bernoulli(1)}, {"h": Bernoulli(1)}, [gate]
    )
    assert texts(gated.plot()).count("gate") == 3


def test_plot_units():
    images = np.arange(6 * 4).reshape(6, 2, 2) / 24
    image = plots.plot_units(images, ncols=3).images[0]
    grid = np.asarray(image.get_array().filled(np.nan))
    np.testing.assert_allclose(grid[1:3, 4:6], images[1])
    np.testing.assert_allclose(grid[4:6, 1:3], images[3])
    assert np.isnan(grid[0]).all() and image.get_clim() == (0, 1)
    weights = np.random.default_rng(0).normal(size=(5, 9))
    low, high = plots.plot_units(weights).images[0].get_clim()
    assert low == -high == -np.abs(weights).max()
    for shape in ((4, 7), (0, 2, 2), (4,)):
        with pytest.raises(ValueError, match="images"):
            plots.plot_units(np.zeros(shape))


def history(unmet=0):
    columns = {
        "gradient_norm": ("step", np.linspace(3, 1, 200)),
        "meeting_time_mean": ("step", np.full(200, 4.0)),
        "meeting_time_max": ("step", np.full(200, 9)),
        "num_unmet": ("step", np.full(200, unmet)),
        "lag": ("step", np.ones(200, int)),
        "log_likelihood": ("monitor_step", np.array([-3.0, -2.0])),
    }
    return xr.Dataset(columns, {"step": np.arange(200), "monitor_step": [0, 100]})


def test_plot_history():
    axes = plots.plot_history(history().assign(k=("step", np.ones(200))))
    assert [ax.get_ylabel() for ax in axes] == [
        "log likelihood",
        "gradient norm",
        "meeting time (sweeps)",
    ]
    np.testing.assert_array_equal(axes[0].lines[0].get_xdata(), [0, 100])
    raw, smooth = axes[1].lines
    np.testing.assert_allclose(raw.get_ydata(), np.linspace(3, 1, 200))
    assert smooth.get_ydata()[0] == pytest.approx(np.linspace(3, 1, 200)[:4].mean())
    _, axes = plt.subplots(1, 4)
    assert (
        plots.plot_history(history(unmet=2), axes=axes)[2].get_ylabel() == "unmet pairs"
    )
    with pytest.raises(ValueError, match="axes .*3.*1"):
        plots.plot_history(history(), axes=axes[0])
    with pytest.raises(TypeError, match="history must be a fit"):
        plots.plot_history([])


def test_plot_meeting_times():
    ax = plots.plot_meeting_times(
        [1, 2, 2, 5], lag=4, met=[True, True, True, False], label="a"
    )
    assert ax.get_yscale() == "log" and "lag 4" in ax.get_xlabel()
    assert "a: 1 of 4 pairs unmet" in texts(ax) and ax.lines[
        1
    ].get_xdata().tolist() == [5]
    assert plots.plot_meeting_times([1, 2, 3], ax=ax, label="b") is ax
    assert ax.lines[2].get_color() != ax.lines[0].get_color()
    for times, met, message in (
        ([], None, "one"),
        ([1, np.inf], None, "1 of 2"),
        ([1, 2], [True], "met"),
    ):
        with pytest.raises(ValueError, match=message):
            plots.plot_meeting_times(times, met=met)
    plots.plot_meeting_times([3, 4], lag=2, ax=ax)
    assert ax.get_xlabel() == "t (sweeps)"  # of two lags
    plots.plot_meeting_times([3, 4], lag=2, ax=ax)
    assert ax.get_xlabel() == "t (sweeps)"


def test_plot_tv_bound():
    columns = {
        "meeting_time": ("chain", [5, 3, 2]),
        "met": ("chain", [True, True, False]),
        "lag": 2,
    }
    tree = xr.DataTree.from_dict({"meeting": xr.Dataset(columns)})
    ax, bound = plots.plot_tv_bound(tree, label="a"), tv_upper_bound(tree)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), bound.bound)
    band = ax.collections[0].get_paths()[0].vertices
    for column in (bound.lower, bound.upper):
        for t, value in zip(bound.t.values, column.values, strict=True):
            assert (np.abs(band - [t, value]).max(1) < 1e-12).any()
    assert texts(ax) == ["a: 1 of 3 pairs unmet"] and "lag 2" in ax.get_xlabel()
    infinite = bound.assign(bound=("t", np.full(bound.sizes["t"], np.inf)))
    plots.plot_tv_bound(infinite).figure.canvas.draw()
    with pytest.raises(ValueError, match="'meeting'"):
        plots.plot_tv_bound(xr.DataTree())


def test_curves_have_different_looks_and_a_legend_beside_the_axes():
    looks = {(look["color"], look["linestyle"]) for look in map(style.look, range(24))}
    assert len(looks) == 24
    for label in "abcdefgh":
        ax = plots.plot_meeting_times(
            [1, 2, 9], ax=None if label == "a" else ax, label=label
        )
    ax.figure.canvas.draw()
    legend = ax.get_legend().get_window_extent()
    assert ax.get_window_extent().x1 <= legend.x0 and legend.x1 <= ax.figure.bbox.x1
    assert (
        len({(line.get_color(), str(line._unscaled_dash_pattern)) for line in ax.lines})
        == 8
    )
