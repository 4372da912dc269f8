# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The callbacks of the page "Follow a run", with stubs of the packages that they write to."""

from pathlib import Path
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from training_tools import train

from release_files import python_blocks

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "follow_a_run.md"


@pytest.fixture(scope="module")
def recipes() -> dict[str, Any]:
    """Run the page's definitions, without its example."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in python_blocks(PAGE.read_text(encoding="utf-8")):
        exec(compile(block.partition("\nrbm =")[0], str(PAGE), "exec"), namespace)
    return namespace


class Writer:
    """Stub of TensorBoard's SummaryWriter and of a run of Weights & Biases."""

    written: list[tuple] = []

    def __init__(self, directory: str) -> None:
        self.written.clear()

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.append((step, tag, value))

    def log(self, values: dict, step: int) -> None:
        self.written.extend((step, *item) for item in values.items())


@pytest.mark.parametrize(
    ("name", "arguments"), [("tensorboard", ("runs",)), ("weights_and_biases", ())]
)
def test_each_value_is_written_once(
    name: str, arguments: tuple, recipes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = {
        "tensorboardX": {"SummaryWriter": Writer},
        "wandb": {"init": lambda: Writer("")},
    }
    for module, names in stubs.items():
        stub = ModuleType(module)
        vars(stub).update(names)
        monkeypatch.setitem(sys.modules, module, stub)
    fit = run(recipes[name](*arguments))
    frame = fit.history.to_dataframe().stack().dropna()
    assert sorted(Writer.written) == sorted(
        (*index, value) for index, value in frame.items()
    )


def test_the_table_on_disk_is_the_history(recipes: dict, tmp_path: Path) -> None:
    fit = run(recipes["csv"](tmp_path / "run.csv"))
    table = pd.read_csv(tmp_path / "run.csv", index_col="step")
    assert len(table) == 7 and list(table["sum"].dropna().index) == [2, 5, 6]
    np.testing.assert_allclose(table["sum"].dropna(), fit.history["sum"][1:], rtol=1e-5)


def run(callback: Any) -> Any:
    monitors = {"sum": lambda p: p["v"].sum()}
    return train(num_steps=7, monitors=monitors, monitor_every=3, callbacks=[callback])
