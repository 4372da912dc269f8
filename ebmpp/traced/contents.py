# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Comparison of Python objects by content, whatever their own ``==`` compares."""

from collections.abc import Hashable
import io
import pickle
from types import FunctionType
from typing import TypeGuard

import numpy as np

from jax import Array

from ebmpp.core import Numbers


class _Pickler(pickle.Pickler):
    """A pickler to which the layout of arrays in memory does not matter."""

    def persistent_id(self, obj: object) -> object:
        if is_array(obj):
            return np.shape(obj), str(obj.dtype), np.asarray(obj).tobytes()
        # xarray replaces one by the other when it is read
        if obj is None or (isinstance(obj, dict) and not obj):
            return ()
        # pickle would know these by name
        return id(obj) if isinstance(obj, type | FunctionType) else None


def content(value: object) -> Hashable:
    """Return what is equal for equal content; the identity if a value cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value.item() if isinstance(value, np.generic) else value)
    except Exception:  # of any kind
        return id(value)
    return file.getvalue()


def is_array(value: object) -> TypeGuard[Numbers]:
    """Return True for an array that jax can hold: not of strings, dates or objects."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufcV"
    return isinstance(value, Array)
