# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Ratios of our times to other times, interleaved in one process, with their targets.

``python benchmarks/speed/ratios.py`` prints for each group of ``cases.py`` the minimum
of interleaved calls of ours, of hand-written JAX, of NumPyro, and of PyTorch and THRML
where they are installed; the lower bound of the matrix products and masked lockstep for
coupled pairs. ``--only gibbs ising`` takes some groups.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys
import time

sys.path[:0] = [str(Path(__file__).parents[2])]
from benchmarks.speed.cases import GROUPS, Call  # noqa: E402

# Threads of scikit-learn's products keep spinning for a while after the last one, and
# would take a core from the next call: 34 to 43 ms for our PCD-1 step without a pause,
# 22 to 24 with one.
_PAUSE = 0.1


def interleaved(calls: dict[str, Call], repeats: int) -> dict[str, tuple[float, float]]:
    """Return the first call's time, and the minimum of interleaved later calls, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            time.sleep(_PAUSE)
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: (t[0], min(t[1:])) for name, t in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=tuple(GROUPS), default=list(GROUPS)
    )
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args(argv)
    print(
        f"{'task':18} {'by':22} {'ms':>9} {'ours / it':>10} {'target':>7} {'first call, s':>14}"
    )
    for name in args.only:
        group = GROUPS[name]()
        result = interleaved({"ours": group.ours, **group.others}, args.repeats)
        for who, (first, best) in result.items():
            target = f"{group.targets[who]:7.2f}" if who in group.targets else ""
            ratio = result["ours"][1] / best
            print(
                f"{name:18} {who:22} {1e3 * best:9.2f} {ratio:10.2f} {target:7} {first:14.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
