# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Which tests ``make test`` leaves to ``make slow``, by what they cost when nothing is compiled.

``dear.txt`` beside this file has their names; conftest.py marks them slow. To measure again, on a machine
that does nothing else::

    make clean
    : > tests/dear.txt
    make test PYTEST_ADDOPTS="--durations=0 --durations-min=0.05" | tee durations.log
    .venv/bin/python tests/dear.py durations.log

Of a test with several cases the cheapest is run each time, and the others where they take less than a second;
a test whose cheapest case takes more than five seconds is left to ``make slow``. Those of ``ALWAYS`` and
``ALL_CASES`` are not.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
import re
import sys

FILE = Path(__file__).with_name("dear.txt")
_CASE, _TEST = 1.0, 5.0  # seconds

#: What the library is for, and what nothing cheaper holds.
ALWAYS = (
    "tests/estimators/test_missing.py::test_the_gradient_is_unbiased",
    "tests/estimators/test_particles.py::test_gradients_are_unbiased",
    "tests/estimators/test_ucd_mixture.py::test_mean_gradient_is_that_of_the_negative_log_likelihood",
    "tests/graph/test_declarations.py::test_any_declaration",
    "tests/kernels/test_coupling.py::test_chain_methods_agree_bitwise",
    "tests/kernels/test_coupling.py::test_once_met_always_met",
    "tests/models/test_rbm.py::test_digits_end_to_end",
    "tests/sampling/test_devices.py::test_pairs_are_those_of_one_device",
    "tests/sampling/test_engine.py::test_total_is_unbiased_for_every_family_and_graph",
    "tests/sampling/test_engine.py::test_total_is_unbiased_for_every_window",
    "tests/sampling/test_ready.py::test_pairs_in_parts_are_those_of_one_run",
    "tests/sampling/test_systems.py::test_particle_expectations_are_unbiased",
    "tests/sampling/test_systems.py::test_smc_within_its_errors_and_what_it_tells",
    "tests/test_pages.py::test_a_page_runs[CONTRIBUTING]",
    "tests/test_pages.py::test_a_page_runs[README]",
    "tests/training/test_devices.py::test_two_processes_make_the_run_of_one",
)

#: Whose cases are all run each time: laws of what everything else is made of, and claims of their own.
ALL_CASES = (
    "tests/bad_inputs/test_bad_inputs.py::test_is_refused_by_name",
    "tests/estimators/test_particles.py::test_gradients_are_unbiased",
    "tests/estimators/test_ucd.py::test_mean_gradient_is_that_of_the_negative_log_likelihood",
    "tests/evaluate/test_ais.py::test_weights_are_unbiased_in_both_directions",
    "tests/kernels/test_gibbs_law.py::test_law_against_enumeration",
    "tests/moves/test_couplings.py::test_each_chain_keeps_its_own_law",
    "tests/moves/test_couplings.py::test_joint_maximal_couplings_meet_with_probability_one_minus_tv",
    "tests/ppl/test_from_model.py::test_conditionals_are_those_of_the_joint_density",
    "tests/sampling/test_engine.py::test_meeting_times_have_the_law_of_the_pair_chain",
    "tests/sampling/test_expectation_couplings.py::test_every_coupling_is_unbiased",
    "tests/sampling/test_systems.py::test_means_over_pairs_are_unbiased",
    "tests/training/test_checkpoint.py::test_a_resumed_run_is_the_run_that_never_stopped",
)


def names() -> frozenset[str]:
    """Those that are left to ``make slow``."""
    return frozenset(FILE.read_text(encoding="utf-8").splitlines())


def durations(lines: Iterable[str]) -> dict[str, dict[str, float]]:
    """Seconds of each case, set-up included, by test."""
    made: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in lines:
        if (found := re.match(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(\S.*?)\s*$", line)) is not None:
            made[found[2].split("[")[0]][found[2]] += float(found[1])
    return made


def dear(seconds: dict[str, dict[str, float]]) -> list[str]:
    """Names of the cases that are left out."""
    made = []
    for test, cases in seconds.items():
        first, *others = sorted(cases, key=lambda case: cases[case])
        if test not in (*ALWAYS, *ALL_CASES):
            made += [first] if cases[first] > _TEST else []
        if test not in ALL_CASES:
            made += [case for case in others if cases[case] > _CASE]
    return sorted(case for case in made if case not in ALWAYS)


def main(logs: list[str]) -> None:
    """Write them, and tell how many."""
    lines = [line for log in logs for line in Path(log).read_text(encoding="utf-8").splitlines()]
    seconds = durations(lines)
    chosen = dear(seconds)
    FILE.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    every = {case: s for cases in seconds.values() for case, s in cases.items()}
    print(f"{len(chosen)} cases, {sum(every[c] for c in chosen):.0f} of {sum(every.values()):.0f} seconds")


if __name__ == "__main__":
    main(sys.argv[1:])
