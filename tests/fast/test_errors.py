# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Errors travel between processes."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from ebmpp import errors

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, BaseException)]


@pytest.mark.parametrize("clone", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickle(kind: type, clone: Any) -> None:
    is_training = issubclass(kind, errors.TrainingError)
    error = kind("failed", *(({"v": np.ones(2)}, [1.0, 2.0], 7) if is_training else ()))
    error.add_note("a note")
    result = clone(error)
    assert type(result) is kind and str(result) == "failed" and result.__notes__ == ["a note"]
    if is_training:
        np.testing.assert_array_equal(result.params["v"], np.ones(2))
        assert (result.history, result.step) == ([1.0, 2.0], 7)
