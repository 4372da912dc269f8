# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Every public name is described on the site, once; ``help(...)`` says when to choose
it and its strings."""

from collections import Counter
import contextlib
import functools
import importlib
import inspect
from pathlib import Path
import re
from typing import Any

import pytest

import ebmpp
from ebmpp import estimators, kernels, moves
from ebmpp.coupling import unbiased_expectation
from ebmpp.estimators import Estimator, MeanField
from ebmpp.kernels import RowKernel
from ebmpp.moves.couplings import KINDS, resolve
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.ppl import CoupledComposite

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.rst"))
ROOMS = sorted(
    p.name for p in (ROOT / "ebmpp").iterdir() if (p / "__init__.py").exists()
)
#: What a page describes: functions and classes, data, whole modules.
DESCRIBED = re.compile(
    r"^\.\. (?:py:)?(?:auto)?(?:class|function|data|module):: ([\w.]+)(?:\(.*\))?$",
    re.MULTILINE,
)


def described() -> list[str]:
    return [
        name
        for page in PAGES
        for name in DESCRIBED.findall(page.read_text(encoding="utf-8"))
    ]


def object_at(path: str) -> Any:
    """Return the object at a dotted path: attributes of the longest part that is a module."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(".".join(parts[:end]))
            return functools.reduce(getattr, parts[end:], module)
    return None


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_every_public_name_is_described(room: str) -> None:
    face = importlib.import_module(f"ebmpp.{room}" if room else "ebmpp")
    everything = [object_at(path) for path in described()]
    missing = [
        n
        for n in face.__all__
        if not any(obj is getattr(face, n) for obj in everything)
    ]
    assert not missing, f"put them on docs/reference/{room or 'index'}.rst"


@pytest.mark.parametrize("module", ["exact", "monitors", "optimizers", "plots"])
def test_what_a_module_at_the_root_makes_public_is_described(module: str) -> None:
    room = getattr(ebmpp, module)
    functions = inspect.getmembers(
        room, lambda f: inspect.isfunction(f) and f.__module__ == room.__name__
    )
    names = getattr(room, "__all__", None) or [
        n for n, f in functions if f.__doc__ and ">>>" in f.__doc__
    ]
    assert names and not set(names) - {path.rsplit(".", 1)[-1] for path in described()}


def test_a_name_is_described_once_and_is_there() -> None:
    assert not [name for name, count in Counter(described()).items() if count > 1]
    assert all(object_at(path) is not None for path in described())


#: Modules whose functions are public without a list.
OPEN = {
    "ebmpp.contrib.readers",
    "ebmpp.core.random",
    "ebmpp.errors",
    "ebmpp.optimizers",
    "ebmpp.plots",
}


def test_only_public_names_are_described() -> None:
    names = [n for n in described() if not inspect.ismodule(object_at(n))]
    private = []
    for path in names:
        face, _, name = path.rpartition(".")
        if face not in OPEN and name not in object_at(face).__all__:
            private.append(path)
    assert not private, "export them, or take them off the reference"


def test_the_table_of_the_root_is_whole() -> None:
    listed = re.findall(
        r"^   (\w+)$", (ROOT / "docs/reference/index.rst").read_text(), re.MULTILINE
    )
    assert set(ebmpp.__all__) - {"__version__"} <= set(listed)


#: How a sentence on when to choose something begins.
WHEN = re.compile(r"(For|To|The estimator to begin with|The first choice)\b")


def chosen_among() -> list[type]:
    """Estimators and kernels of the faces, but those to inherit from."""
    values = [*vars(estimators).values(), *vars(kernels).values()]
    kinds = [
        c
        for c in values
        if inspect.isclass(c) and {Estimator, RowKernel} & set(c.__mro__)
    ]
    return sorted(
        {*kinds, MeanField} - {Estimator, RowKernel}, key=lambda c: c.__name__
    )


@pytest.mark.parametrize("kind", chosen_among(), ids=lambda kind: kind.__name__)
def test_the_second_sentence_tells_when_to_choose_it(kind: type) -> None:
    summary, second = inspect.getdoc(kind).split("\n\n")[:2]
    assert WHEN.match(second) or "for classifiers" in summary


@pytest.mark.parametrize(
    "obj",
    [
        estimators.UCD,
        kernels.MaximalCoupling,
        moves.tempered,
        unbiased_expectation,
        CoupledComposite,
        moves.Layer,
        resolve,
        resolve_moves,
    ],
    ids=lambda obj: obj.__name__,
)
def test_what_takes_a_coupling_names_every_kind(obj: object) -> None:
    docstring = inspect.getdoc(obj)
    assert not [kind for kind in KINDS if f'"{kind}"' not in docstring]
