# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Reproduce analyses that others have published, and print their figures beside ours.

``python benchmarks/published/analyses.py`` lists them, ``all`` or some names run them. Data
are typed in (``published_data.py``), and nothing is downloaded. Where nobody has published a
figure, that of an independent program stands in its place (``references.py``).
"""

import argparse
from collections.abc import Sequence
import time

import lattices
import maxima
import networks
import posterior_means

ANALYSES = {
    analysis.__name__: analysis
    for analysis in (
        maxima.earthquakes,
        maxima.latent_classes,
        maxima.annotators,
        maxima.salamanders,
        maxima.dippers,
        maxima.law_school,
        networks.florentine,
        posterior_means.hearts,
        posterior_means.biopsies,
        posterior_means.asia,
        posterior_means.cervix,
        posterior_means.eyes,
        posterior_means.coal,
        posterior_means.stagnant,
        posterior_means.diabetes,
        lattices.ising,
        lattices.potts,
        lattices.hopfield,
        lattices.hard_core,
        lattices.angles,
        lattices.field,
    )
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the analyses named on the command line, or list all."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    # argparse of Python 3.11 holds an empty list against choices
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args(argv).names
    if unknown := sorted({*names} - {*ANALYSES, "all"}):
        parser.error(f"NAME must be all or one of {list(ANALYSES)}, got {unknown}.")
    if not names:
        for name, analysis in ANALYSES.items():
            print(f"{name:15s} {str(analysis.__doc__).splitlines()[0]}")
        return
    print("| analysis | quantity | published | ours | error | CPU-s | agrees |")
    print("|---|---|---|---|---|---|---|")
    for name in ANALYSES if "all" in names else names:
        began = time.process_time()
        rows = ANALYSES[name]()
        seconds = f"{time.process_time() - began:.0f}"
        for row in rows:
            figures = f"{row.published:g} | {row.ours:.7g} | {row.error:.2g}"
            verdict = "yes" if row.agrees else "**no**"
            print(
                f"| {name} | {row.quantity} | {figures} | {seconds} | {verdict} |",
                flush=True,
            )
            name = seconds = ""


if __name__ == "__main__":
    main()
