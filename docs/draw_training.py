# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draw docs/training.png: the exact log-likelihood along training, by unbiased gradients and by biased ones.

Run ``python benchmarks/papers/bars_and_stripes.py --name exact --falling --rate 0.2 --steps 20000 --every 100
--seeds 0 --only particles weighted pcd cd1`` first, which takes three minutes.
"""

import argparse
import json
from pathlib import Path

from matplotlib import pyplot as plt
import numpy as np

ROOT = Path(__file__).parents[1]
BEST = 32 * np.log(1 / 32) + 2 * 2 * np.log(2)  # the blank and the full image come twice
#: Label, colour (distinct in print too) and place of the label (step, value) by run.
METHODS = {
    "particles": ("ParticleUCD: unbiased", "#08519c", (4600, -117)),
    "weighted": ("WeightedPCD: consistent", "#238b45", (13900, -112.5)),
    "pcd": ("PCD: biased", "#d95f0e", (13000, -127)),
    "cd1": ("CD: biased", "#7a7a7a", (2800, -181)),
}


def main() -> None:
    """Draw one curve per method, labelled on the curve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raw", type=Path, default=ROOT / "benchmarks/report/raw")
    folder = parser.parse_args().raw
    figure, ax = plt.subplots(figsize=(7.6, 3.4), layout="constrained")
    ax.axhline(BEST, color="#1f2933", linewidth=0.9, linestyle=(0, (4, 3)))
    ax.text(150, BEST + 2, "the best possible", va="bottom", fontsize=9, color="#1f2933")
    for name, (label, color, at) in METHODS.items():
        run = json.loads((folder / f"bars_and_stripes_exact-{name}-0.json").read_text())
        ax.plot(*np.transpose(run["curve"]), color=color, linewidth=1.9 if name == "particles" else 1.2)
        ax.text(*at, label, color=color, fontsize=10, va="top")
    ax.set(xlim=(0, 20_000), ylim=(-215, -98), xlabel="step", ylabel="log-likelihood of the data (nats)")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.2)
    figure.savefig(ROOT / "docs" / "training.png", dpi=120)


if __name__ == "__main__":
    main()
