# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The experiments of the papers, from one place.

``python benchmarks/papers.py`` runs them all at settings that end in an hour or so on two cores; ``--only u5
d4`` some; ``--settings quick`` at settings that end in minutes and show only that everything runs;
``--settings paper`` at the papers' own. Figures and tables go to ``--out``. Every experiment is a script of
its own, with options of its own.

==== ===================================================== ================================
u5   bars and stripes 4x4: bias and variance of UCD,       Qiu et al. (2020), section 5.1
     CD, PCD, with bands over seeds; u7 (PCD, then UCD)
     and the gradient's variance (u8) in the same picture
u6   a simulated 200x20 model, fitted with 100 units       Qiu et al. (2020), section 5.1
u10  meeting times on untrained models                     Qiu et al. (2020), figure 5
u9   784x1000 on MNIST (for Fashion-MNIST): CD, PCD, UCD;  Qiu et al. (2020), section 6.3
     u7 on real data: PCD first, then UCD
u8   what holds the variance of a gradient, and its cost   ours
d4   bars and stripes 3x3, shifting bar: S-DCP, CS-DCP     Upadhya, Sastry (2017), figs. 1, 2
d5   784x500 on MNIST: CD, PCD, centered, S-DCP, CS-DCP;  Upadhya, Sastry (2017), figure 3
     d6, the held-out likelihood along the way
d7   the same in batches of 1000, and spectral descent     Upadhya, Sastry (2017), figure 5
lmi  UCD-LMI, ablated by exact log-likelihood on digits    Taniguchi et al. (2023), table 2
l7   meeting times on orthogonal weights, from uniform     Taniguchi et al. (2023), fig. 1
     draws and from local modes
l8   images of deep and Gaussian-Bernoulli machines by a   Taniguchi et al. (2023), table 1
     Frechet distance, which is not the FID
r4   indirect sampling likelihood by number of samples:    Breuleux et al. (2011), figure 2
     Gibbs, rates-FPCD and its kin, parallel tempering
ais  coverage of annealed importance sampling's bracket;   Grosse et al. (2015)
     a diverging model by it and by a flattering estimate
==== ===================================================== ================================
"""

import argparse
from collections.abc import Sequence
import importlib
from pathlib import Path
import sys
import time

_MANY = [str(seed) for seed in range(20)]
_FEW = _MANY[:5]
_BIASED = ["--only", "cd1", "cd5", "pcd", "--every", "100", "--variance-every", "1000"]
_UNBIASED = [
    "--only",
    "ucd_few",
    "truncated",
    "ucd1",
    "persistent",
    "--every",
    "50",
    "--variance-every",
    "500",
]
_MNIST = ["--data", "mnist", "--hidden", "500", "--steps", "10000"]
_TINY = ["--data", "digits", "--epochs", "5", "--chains", "10"]
_ORIGINAL = ["--only", "ucd", "ucd1", "truncated", "persistent", "pcd_ucd", "cd1", "cd5", "cd20", "pcd"]
_SMALL = ["--visible", "6", "--latent", "4", "--repeats", "20", "--pairs", "50"]
_DIGITS = ["--data", "digits", "--latent", "16", "--batch-size", "100", "--epochs", "1", "--points", "2"]


def _settings(experiment: str, epochs: float) -> dict[str, list[list[str]]]:
    """Of ``mnist_rbm``: an epoch of digits, four of MNIST, or the paper's number of them."""
    return {
        "quick": [[experiment, *_DIGITS, "--temperatures", "30"]],
        "small": [[experiment]],
        "paper": [[experiment, "--epochs", str(epochs), "--points", "50", "--temperatures", "10000"]],
    }


#: The script of each experiment, and its options by settings; a list of options a run.
EXPERIMENTS: dict[str, tuple[str, dict[str, list[list[str]]]]] = {
    "u5": (
        "bars_and_stripes",
        {
            "quick": [["--steps", "1000", "--every", "250", "--only", "cd1", "pcd"]],
            "small": [
                [*_BIASED, "--steps", "12000", "--seeds", *_MANY],
                [*_UNBIASED, "--steps", "3000", "--seconds", "120", "--seeds", *_FEW],
                ["--only", "pcd_ucd", "--steps", "6000", "--every", "50", "--seconds", "600"],
            ],
            "paper": [[*_ORIGINAL, "--rate", "0.01", "--steps", "50000", "--seeds", *_MANY]],
        },
    ),
    "u6": (
        "simulated_rbm",
        {
            "quick": [["--steps", "20", "--points", "2", "--temperatures", "100", "--only", "cd1", "pcd"]],
            "small": [["--steps", "3000", "--seconds", "600"]],
            "paper": [["--steps", "10000"]],
        },
    ),
    "u10": (
        "meeting_times",
        {
            "quick": [["untrained"]],
            "small": [["untrained"]],
            "paper": [["untrained"]],
        },
    ),
    "l7": (
        "meeting_times",
        {
            "quick": [["orthogonal", "--sizes", "2", "10"]],
            "small": [["orthogonal"]],
            "paper": [["orthogonal"]],
        },
    ),
    "d4": (
        "dc_programming",
        {
            "quick": [["--trials", "2", "--epochs", "500"]],
            "small": [["--trials", "10", "--epochs", "30000"]],
            "paper": [["--trials", "25", "--epochs", "50000"]],
        },
    ),
    "u9": ("mnist_rbm", _settings("ucd", 40)),
    "u8": ("gradient_variance", {"quick": [_SMALL], "small": [[]], "paper": [["--repeats", "2000"]]}),
    "d5": ("mnist_rbm", _settings("dc", 200)),
    "d7": ("mnist_rbm", _settings("spectral", 250)),
    "lmi": (
        "local_modes",
        {
            "quick": [["--steps", "40", "--seeds", "0", "--only", "lmi", "pcd"]],
            "small": [[]],
            "paper": [["--steps", "100000"]],
        },
    ),
    "l8": (
        "image_quality",
        {
            "quick": [[*_TINY, "--sides", "20", "20", "--steps", "40", "--samples", "100", "--sweeps", "10"]],
            "small": [[]],
            "paper": [
                ["--sides", "6272", "6272", "--steps", "100000", "--samples", "10000", "--sweeps", "1000"]
            ],
        },
    ),
    "r4": (
        "mixing",
        {
            "quick": [["--steps", "200", "--samples", "200", "--tune", "50", "--only", "gibbs", "fpcd"]],
            "small": [[], [*_MNIST, "--samples", "20000"]],
            "paper": [[*_MNIST, "--samples", "200000"]],
        },
    ),
    "ais": (
        "bracket",
        {
            "quick": [["--repeats", "2", "--temperatures", "30", "--steps", "500", "--points", "2"]],
            "small": [[]],
            "paper": [["--repeats", "100", "--temperatures", "20", "300", "10000"]],
        },
    ),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--settings", choices=("quick", "small", "paper"), default="small")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/report"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """One experiment after another."""
    args = parse(argv)
    sys.path.insert(0, str(Path(__file__).parent))
    for name in args.only:
        script, settings = EXPERIMENTS[name]
        module, begin = importlib.import_module(script), time.monotonic()
        for options in settings[args.settings]:
            print(f"{name}: {script}.py {' '.join(options)}", flush=True)
            module.main([*options, "--out", str(args.out)])
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
