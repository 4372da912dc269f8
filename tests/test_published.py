# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Every published analysis agrees with its source."""

from pathlib import Path
import sys

import pytest

pytestmark = pytest.mark.nightly

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "published"))
from analyses import ANALYSES, main  # noqa: E402


@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_agrees(name: str) -> None:
    rows = ANALYSES[name]()
    assert rows
    assert not [row for row in rows if not row.agrees]


def test_without_a_name_analyses_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*ANALYSES]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["isingg"])
    assert "got ['isingg']" in capsys.readouterr().err
