# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: valid values are normalised, invalid ones are named in errors that pickle.

Tests core/checks.py, errors.py.
"""

import copy
from fractions import Fraction
import pickle
import re
from typing import Any

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import errors
from ebmpp.core import checks
from ebmpp.errors import ArgumentError, DeclarationError, StateError


def test_integers_of_every_library_are_counts():
    for value in (3, np.int64(3), np.uint8(3), np.asarray(3), jnp.asarray(3)):
        count = checks.count("n", value)
        assert count == 3 and type(count) is int


def test_invalid_counts_are_refused():
    messages = {
        "n .*0": 0,
        "True": True,
        "n ": np.bool_(True),
        "3.0": 3.0,
        "'3'": "3",
        "None": None,
    }
    for message, value in (
        messages | {str(2**31): 2**31, r"\(3,\)": np.arange(3)}
    ).items():
        with pytest.raises(ArgumentError, match=message):
            checks.count("n", value)


def test_counts_have_an_upper_bound_and_are_not_traced():
    assert checks.count("n", 16, most=16) == 16
    with pytest.raises(ArgumentError, match="16.*17"):
        checks.count("n", 17, most=16)
    with pytest.raises(ArgumentError, match="n "):
        jax.jit(lambda n: checks.count("n", n))(3)


def test_numbers_have_bounds():
    for value in (0.5, np.float32(0.5), Fraction(1, 2), jnp.asarray(0.5)):
        assert checks.number("rate", value, above=0, most=1) == 0.5
    for value in (0, 1.5, float("nan"), float("inf"), "0.5", True, None, [0.5, 0.5]):
        with pytest.raises(ArgumentError, match=r"rate.*\(0, 1\]"):
            checks.number("rate", value, above=0, most=1)
    for bounds in (
        {"least": 0, "below": 1},
        {"above": 3},
        {"least": 3},
        {"below": 1},
        {"most": 1},
    ):
        with pytest.raises(ArgumentError, match="rate.*2"):
            checks.number("rate", 2, **bounds)


def test_choices_suggest_the_nearest_word():
    assert checks.choice("mode", "max", ("max", "min")) == "max"
    with pytest.raises(ArgumentError, match="mode.*'maxx'.*'max'"):
        checks.choice("mode", "maxx", ("max", "min"))
    with pytest.raises(StateError, match="'hiden'.*'hidden'"):
        checks.names("block", ["hiden"], ["v", "hidden"], StateError)


def test_flags_are_booleans_and_instances_are_not_classes():
    for value in (1, "yes", None, np.ones(2, bool)):
        with pytest.raises(ArgumentError, match="resume"):
            checks.flag("resume", value)
    assert checks.instance("when", Fraction(1), Fraction, "a Fraction") == 1
    for value, message in ((Fraction, "class"), ("x", "when.*'x'")):
        with pytest.raises(ArgumentError, match=message):
            checks.instance("when", value, Fraction, "a Fraction")


def test_keys_of_every_form_are_accepted():
    legacy = jax.random.PRNGKey(1)
    for key in (
        jax.random.key(1),
        legacy,
        np.asarray(legacy),
        jax.random.key(1, impl="rbg"),
    ):
        assert checks.key("rng_key", key).shape == key.shape
    keys = jax.random.split(jax.random.key(0), 3)
    cases = {
        "jax.random.key(7)": np.int64(7),
        "None": None,
        "(3,)": keys,
        "(2,)": np.ones(2),
    }
    for message, value in cases.items():
        with pytest.raises(ArgumentError, match="rng_key.*" + re.escape(message)):
            checks.key("rng_key", value)


def test_block_names():
    for name in ("v", "h1", "x.y", "v:h", "rng_key", "Bild 1", "ü"):
        assert checks.block_name(name) == name
    for name in (
        "chain",
        "draw",
        "clamped",
        "v_dim_0",
        "x[0]",
        "a/b",
        "..",
        "",
        " v",
        3,
    ):
        with pytest.raises(DeclarationError, match="block"):
            checks.block_name(name)


def test_arrays_of_numbers():
    for value in ([1, 2], np.ones(2), 3, [True]):
        assert checks.numbers("v", value).size
    for value in (["a"], [[1], [1, 2]], np.array([object()]), [1j], {"v": 1}):
        with pytest.raises(StateError, match="v must"):
            checks.numbers("v", value, StateError)


CLASSES = [
    c
    for c in vars(errors).values()
    if isinstance(c, type) and issubclass(c, BaseException)
]


@pytest.mark.parametrize(
    "clone", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))]
)
@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickle(kind: type, clone: Any) -> None:
    is_training = issubclass(kind, errors.TrainingError)
    error = kind("failed", *(({"v": np.ones(2)}, [1.0, 2.0], 7) if is_training else ()))
    error.add_note("a note")
    result = clone(error)
    assert (
        type(result) is kind
        and str(result) == "failed"
        and result.__notes__ == ["a note"]
    )
    if is_training:
        np.testing.assert_array_equal(result.params["v"], np.ones(2))
        assert (result.history, result.step) == ([1.0, 2.0], 7)
