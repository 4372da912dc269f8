# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Times of every call of ``cases.py`` by pytest-benchmark.

``make bench`` runs them without the tests' ``conftest.py`` and saves them under
``.benchmarks``; ``pytest-benchmark compare`` sets commits side by side. Calls of one
group share a table. Ratios to other libraries are read off ``ratios.py``, which
interleaves the calls.
"""

from functools import cache
from typing import Any

import pytest

from benchmarks.speed.cases import GROUPS, Call

# Another library warns as it likes.
pytestmark = pytest.mark.filterwarnings("default")


@cache
def calls(group: str) -> dict[str, Call]:
    """Return the calls of a group, which is built once."""
    result = GROUPS[group]()
    return {"ours": result.ours, **result.others}


@pytest.mark.parametrize("group", GROUPS)
def test_ours(group: str, benchmark: Any) -> None:
    """Time our call."""
    benchmark.group = group
    benchmark.pedantic(calls(group)["ours"], rounds=7, warmup_rounds=1)


@pytest.mark.parametrize(
    ("group", "other"),
    [
        *(
            ("gibbs", "by hand"),
            ("cd_gradient", "by hand"),
            ("gibbs_convolution", "by hand"),
        ),
        *(
            ("cd_convolution", "by hand"),
            ("cd_step", "PyTorch"),
            ("pcd_step", "PyTorch"),
        ),
        *(("pcd_step", "scikit-learn"), ("ising", "by hand"), ("ising", "THRML")),
        *(
            ("pairs_16x16", "lockstep"),
            ("pairs_200x100", "lockstep"),
            ("pairs_200x100", "bound"),
        ),
        *(("pairs_784x500", "bound"), ("denoising", "DiscreteHMCGibbs")),
    ],
)
def test_others(group: str, other: str, benchmark: Any) -> None:
    """Time another library's call, or a bound."""
    if other not in calls(group):
        pytest.skip(f"{other} is not installed")
    benchmark.group = group
    benchmark.pedantic(calls(group)[other], rounds=3, warmup_rounds=1)
