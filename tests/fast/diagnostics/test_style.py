# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""That curves can be told apart, in print and by colour-blind readers too, and that nothing lies on them."""

from collections.abc import Iterator

from matplotlib import colors, pyplot as plt
import numpy as np
import pytest

from ebmpp.diagnostics import plots, style

#: What three kinds of colour-blind readers see of linear red, green, blue: Machado et al. (2009), severity 1.
SEEN = {
    "protan": (0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998),
    "deutan": (0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.011820, 0.042940, 0.968881),
    "tritan": (1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.303900),
    "others": (1, 0, 0, 0, 1, 0, 0, 0, 1),
}
#: Linear red, green and blue to X, Y and Z over those of white.
XYZ = np.array([[0.4339, 0.3763, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]])


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    plt.close("all")


def test_no_two_curves_look_alike() -> None:
    looks = [(look["color"], look["linestyle"]) for look in map(style.look, range(24))]
    assert len(set(looks)) == 24
    assert len({look[1] for look in looks[:8]}) == len({look[0] for look in looks[:8]}) == 8
    assert len({style.marker(i) for i in range(8)}) == 8


@pytest.mark.parametrize("kind", SEEN)
def test_colour_blind_readers_tell_the_colours_apart(kind: str) -> None:
    rgb = np.array([colors.to_rgb(c) for c in style.COLORS])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(SEEN[kind]).reshape(3, 3).T, 0, 1) @ XYZ.T
    root = np.where(seen > 0.008856, np.cbrt(seen), 7.787 * seen + 16 / 116)
    lab = np.stack([116 * root[:, 1], 500 * (root[:, 0] - root[:, 1]), 200 * (root[:, 1] - root[:, 2])], 1)
    apart = np.linalg.norm(lab[:, None] - lab, axis=-1)[np.triu_indices(8, 1)]
    assert apart.min() > 15  # 2 is just seen, side by side


def test_a_legend_stands_beside_the_axes() -> None:
    ax = plots.plot_meeting_times([1, 2, 3], label="a")
    for label in "bcdefgh":
        plots.plot_meeting_times([1, 2, 9], ax=ax, label=label)
    ax.figure.canvas.draw()
    assert ax.get_legend().get_window_extent().x0 >= ax.get_window_extent().x1
    assert ax.get_legend().get_window_extent().x1 <= ax.figure.bbox.x1  # and within the picture
    looks = {(line.get_color(), str(line._unscaled_dash_pattern)) for line in ax.lines}
    assert len(looks) == 8
    given = plots.plot_meeting_times([4, 5], ax=ax, color="red", linestyle="--").lines[-1]
    assert given.get_color() == "red" and given.get_linestyle() == "--"


def test_one_legend_names_what_is_on_several_axes_once() -> None:
    figure, axes = style.grid(3)
    for ax, names in zip(axes, ("ab", "bc", ""), strict=True):
        for name in names:
            ax.plot([0, 1], label=name)
    style.legend_below(figure, axes, ncols=3)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c"]


def test_an_axis_that_cuts_nothing() -> None:
    _, (ax,) = style.grid(1)
    values = [-1.5, -2.0, -5.0, -1000.0]
    ax.plot(values)
    style.below(ax, -1.0, [-2, -10, -1000])
    place = ax.transData.transform([(0, v) for v in values])[:, 1]
    assert (np.diff(place) < 0).all() and np.isfinite(place).all()
    half, one, four, thousand = place  # equal ratios of the distance from -1 are equal steps
    assert (half - one) * 2 == pytest.approx(one - four)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["-2", "-10", "-1000"]
