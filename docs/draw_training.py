# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/training.png: the exact log-likelihood along training, by unbiased gradients and by biased ones.

Of runs that ``python benchmarks/exact_gradients.py bars --seeds 1 --only particles weighted pcd cd`` keeps,
three minutes: ``python docs/draw_training.py``.
"""

import argparse
import json
from pathlib import Path

from matplotlib import pyplot as plt
import numpy as np

ROOT = Path(__file__).parents[1]
BEST = 32 * np.log(1 / 32) + 2 * 2 * np.log(2)  # the blank and the full image come twice
EVERY = 100  # steps between two looks
#: Runs, what they are called, colours that differ in print too, and where the name stands: step, value.
METHODS = {
    "particles": ("ParticleUCD: unbiased", "#08519c", (4600, -117)),
    "weighted": ("WeightedPCD: consistent", "#238b45", (13900, -112.5)),
    "pcd": ("PCD: biased", "#d95f0e", (13000, -127)),
    "cd": ("CD: biased", "#7a7a7a", (2800, -181)),
}


def main() -> None:
    """One curve a method, each with its name beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raw", type=Path, default=ROOT / "benchmarks/report/raw/exact_gradients")
    folder = parser.parse_args().raw
    figure, ax = plt.subplots(figsize=(7.6, 3.4), layout="constrained")
    ax.axhline(BEST, color="#1f2933", linewidth=0.9, linestyle=(0, (4, 3)))
    ax.text(150, BEST + 2, "the best possible", va="bottom", fontsize=9, color="#1f2933")
    for name, (label, color, at) in METHODS.items():
        curve = np.array(json.loads((folder / f"{name}_0.json").read_text())["curve"])
        steps = EVERY * np.arange(len(curve))
        ax.plot(steps, curve, color=color, linewidth=1.9 if name == "particles" else 1.2)
        ax.text(*at, label, color=color, fontsize=10, va="top")
    ax.set(xlim=(0, 20_000), ylim=(-215, -98), xlabel="step", ylabel="log-likelihood of the data (nats)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.2)
    figure.savefig(ROOT / "docs" / "training.png", dpi=120)


if __name__ == "__main__":
    main()
