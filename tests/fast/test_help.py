# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""``help(...)`` tells soon when to choose a thing, and which strings it takes."""

import inspect
import re

import pytest

from ebmpp import estimators, kernels, moves
from ebmpp.coupling import unbiased_expectation
from ebmpp.estimators import Estimator, MeanField
from ebmpp.kernels import RowKernel
from ebmpp.moves.couplings import KINDS, resolve
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.ppl import CoupledComposite

#: How a sentence on when to choose something begins.
WHEN = re.compile(r"(For|To|The estimator to begin with|The first choice)\b")


def chosen_among() -> list[type]:
    """Estimators and kernels of the faces, but those to inherit from."""
    made = [*vars(estimators).values(), *vars(kernels).values()]
    kinds = [c for c in made if inspect.isclass(c) and {Estimator, RowKernel} & set(c.__mro__)]
    return sorted({*kinds, MeanField} - {Estimator, RowKernel}, key=lambda c: c.__name__)


@pytest.mark.parametrize("kind", chosen_among(), ids=lambda kind: kind.__name__)
def test_the_second_sentence_tells_when_to_choose_it(kind: type) -> None:
    summary, second = inspect.getdoc(kind).split("\n\n")[:2]
    assert WHEN.match(second) or "for classifiers" in summary


@pytest.mark.parametrize(
    "made",
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
    ids=lambda made: made.__name__,
)
def test_what_takes_a_coupling_tells_which_there_are(made: object) -> None:
    told = inspect.getdoc(made)
    assert not [kind for kind in KINDS if f'"{kind}"' not in told]
