# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draw docs/rooms.svg: the rooms on their floors, from the imports of the code.

Run it after a room has changed: ``python docs/draw_rooms.py`` (import-linter's grimp reads the imports).
"""

from collections import Counter
from pathlib import Path
import tomllib

import grimp
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parents[1]
LABELS = {
    "contrib": "methods of single papers",
    "reporting": "the HTML report",
    "diagnostics": "DataTrees, meeting times, plots",
    "sklearn": "a transformer, a classifier",
    "dimod": "a sampler for dimod",
    "training": "fit",
    "ppl": "graphs in NumPyro models",
    "traced": "blocks of NumPyro models",
    "distribution": "a graph as a distribution",
    "kernels": "NumPyro kernels of a graph",
    "estimators": "gradients",
    "evaluate": "model quality",
    "annealing": "paths and particle systems",
    "coupling": "the engine of coupled pairs",
    "exact": "sums, perfect sampling",
    "moves": "transitions of chains and pairs",
    "graph": "the declaration and its energy",
    "families": "exponential families",
    "dependence": "structure of traced functions",
    "data": "patterns, images",
    "core": "random words, checks, files",
    "errors": "exceptions",
}
_WIDTH, _HEIGHT, _FLOOR = 3.1, 0.86, 1.45
_GROUND = ["errors", "core", "data"]  # drawn side by side; nearly every room imports the first two
_SHOWN = {("moves", "graph"), ("graph", "families"), ("families", "core"), ("data", "core")}
_COMMON = {"core", "errors", "families", "graph"}  # their many arrows would hide the others
_INK, _FILL, _ARROW = "#1f2933", "#e3ecf5", "#54728f"


def floors() -> list[list[str]]:
    """Return the rooms by floor, the ground last, from the contract that ``lint-imports`` checks."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    rooms = [layer for layer in layers if layer not in (*_GROUND, "__main__")]  # a program, not a room
    return [layer.split(" | ") for layer in rooms] + [_GROUND]


def imports() -> Counter[tuple[str, str]]:
    """Count the files of each room that import from each other room."""
    modules, count = grimp.build_graph("ebmpp"), Counter()
    for name in modules.modules:
        for other in modules.find_modules_directly_imported_by(name):
            a, b = (".".join(m.split(".")[1:2]) for m in (name, other))
            count[a, b] += a != b and bool(a and b)
    return count


def size(room: str) -> int:
    """Return the number of lines of a room."""
    folder = ROOT / "ebmpp" / room
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    return sum(len(path.read_text().splitlines()) for path in files)


def _ends(above: tuple[float, float], below: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """Return the ends of an arrow: vertical between floors, horizontal on one floor."""
    (x, y), (u, v) = above, below
    if y == v:
        side = _WIDTH / 2 if u > x else -_WIDTH / 2
        return (x + side, y), (u - side, v)
    return (x, y - _HEIGHT / 2), (u, v + _HEIGHT / 2)


def main() -> None:
    """Draw a box per room and an arrow per import, thicker if more files import."""
    rows, position = floors(), {}
    figure, ax = plt.subplots(figsize=(11.5, 9.6), layout="constrained")
    for level, rooms in enumerate(reversed(rows)):
        for i, room in enumerate(rooms):
            position[room] = ((i - (len(rooms) - 1) / 2) * (_WIDTH + 0.75), level * _FLOOR)
    for (a, b), number in sorted(imports().items()):
        if a not in position or not number or (b in _COMMON and (a, b) not in _SHOWN):
            continue
        (x, y), (u, v) = position[a], position[b]
        down = (y - v) / _FLOOR
        bend = 0.0 if down < 1.5 or abs(x - u) > _WIDTH else 0.12 * down * (1 if x + u > 0 else -1)
        ax.add_patch(
            FancyArrowPatch(
                *_ends((x, y), (u, v)),
                connectionstyle=f"arc3,rad={bend}",
                arrowstyle="-|>",
                mutation_scale=9,
                color=_ARROW,
                alpha=0.55,
                linewidth=0.5 + number / 12,
                zorder=1,
            )
        )
    for room, (x, y) in position.items():
        corner = (x - _WIDTH / 2, y - _HEIGHT / 2)
        ax.add_patch(
            FancyBboxPatch(
                corner,
                _WIDTH,
                _HEIGHT,
                "round,pad=0.02,rounding_size=0.08",
                fc=_FILL,
                ec=_INK,
                lw=0.9,
                zorder=2,
            )
        )
        ax.text(x, y + 0.14, room, ha="center", va="center", fontsize=12, weight="bold", color=_INK, zorder=3)
        ax.text(x, y - 0.22, LABELS[room], ha="center", va="center", fontsize=8.5, color=_INK, zorder=3)
        ax.text(
            x + _WIDTH / 2 - 0.05,
            y + 0.22,
            f"{size(room)}",
            ha="right",
            va="center",
            fontsize=7,
            color=_ARROW,
            zorder=3,
        )
    for level in range(len(rows)):
        ax.text(-6.3, level * _FLOOR, str(level), ha="center", va="center", fontsize=11, color=_ARROW)
    ax.set(xlim=(-6.6, 6.4), ylim=(-0.8, (len(rows) - 1) * _FLOOR + 0.8))
    ax.axis("off")
    plt.rcParams["svg.hashsalt"] = "ebmpp"  # reproducible ids
    figure.savefig(ROOT / "docs" / "rooms.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
