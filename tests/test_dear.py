# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What is left to ``make slow`` follows from what it costs."""

from tests import dear

LOG = """
== slowest durations ==
0.40s setup    tests/a.py::test_cases[x-1]
3.00s call     tests/a.py::test_cases[x-1]
2.00s call     tests/a.py::test_cases[y 2]
0.90s call     tests/a.py::test_cases[z]
6.20s call     tests/a.py::test_alone
0.10s teardown tests/a.py::test_alone
5.00s call     tests/b.py::test_others
9.00s call     ebmpp/c.py::ebmpp.c.fit
70.0s call     {always}
1 passed in 3.00s (0:00:03)
"""


def test_the_cheapest_case_stays_unless_it_is_dear() -> None:
    seconds = dear.durations(LOG.format(always=dear.ALWAYS[0]).splitlines())
    assert seconds["tests/a.py::test_cases"]["tests/a.py::test_cases[x-1]"] == 3.4
    assert dear.dear(seconds) == [
        "ebmpp/c.py::ebmpp.c.fit",
        "tests/a.py::test_alone",
        "tests/a.py::test_cases[x-1]",
        "tests/a.py::test_cases[y 2]",
    ]


def test_what_the_library_is_for_is_run_each_time() -> None:
    names = dear.names()
    for kept in dear.ALWAYS:
        assert kept not in names
    for test in dear.ALL_CASES:
        assert not [name for name in names if name.startswith(test)]
