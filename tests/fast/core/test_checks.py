# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The checks of arguments: what passes comes back in one form, what does not is told by name."""

from fractions import Fraction
import re

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.errors import ArgumentError, DeclarationError, StateError


@pytest.mark.parametrize("given", [3, np.int64(3), np.uint8(3), jnp.asarray(3), np.asarray(3)])
def test_whole_numbers_of_every_library_are_counts(given):
    made = checks.count("n", given)
    assert made == 3 and type(made) is int


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (0, "n is an int of at least 1, not 0"),
        (True, "n is an int of at least 1, not True"),
        (np.bool_(True), "n is an int of at least 1"),
        (3.0, r"not 3.0 \(give 3\)"),
        ("3", "not '3'"),
        (None, "not None"),
        (2**31, "n is an int of at least 1, and at most 2147483647, not 2147483648"),
        (np.arange(3), r"not an array of shape \(3,\) and dtype int64"),
    ],
)
def test_what_is_no_count_is_told(given, told):
    with pytest.raises(ArgumentError, match=told):
        checks.count("n", given)


def test_a_count_with_both_ends_tells_both():
    assert checks.count("n", 16, most=16) == 16
    with pytest.raises(ArgumentError, match="n is an int from 1 to 16, not 17"):
        checks.count("n", 17, most=16)


def test_a_traced_count_is_refused_by_name():
    with pytest.raises(ArgumentError, match="n is an int"):
        jax.jit(lambda n: checks.count("n", n))(3)


@pytest.mark.parametrize("given", [0.5, np.float32(0.5), jnp.asarray(0.5), Fraction(1, 2)])
def test_numbers_of_every_library_are_floats(given):
    assert checks.number("rate", given, above=0, most=1) == 0.5


@pytest.mark.parametrize("given", [0, 1.5, float("nan"), float("inf"), "0.5", True, None, [0.5, 0.5]])
def test_what_is_no_number_in_range_is_told(given):
    with pytest.raises(ArgumentError, match=r"rate is a number in \(0, 1\], not "):
        checks.number("rate", given, above=0, most=1)


def test_open_and_single_bounds_are_told():
    for bounds, told in [
        ({"least": 0, "below": 1}, r"in \[0, 1\), not 2"),
        ({"above": 3}, "above 3, not 2"),
        ({"least": 3}, "of at least 3, not 2"),
        ({"below": 1}, "below 1, not 2"),
        ({"most": 1}, "of at most 1, not 2"),
    ]:
        with pytest.raises(ArgumentError, match=told):
            checks.number("rate", 2, **bounds)


def test_a_choice_tells_the_nearest_word():
    assert checks.choice("mode", "max", ("max", "min")) == "max"
    with pytest.raises(ArgumentError, match="mode is one of 'max', 'min', not 'maxx'; did you mean 'max'?"):
        checks.choice("mode", "maxx", ("max", "min"))
    with pytest.raises(ArgumentError, match="or a number, not 3"):
        checks.choice("mode", 3, ("max", "min"), also="a number")


@pytest.mark.parametrize("given", [1, "yes", None, np.ones(2, bool)])
def test_a_flag_is_no_word_and_no_number(given):
    with pytest.raises(ArgumentError, match="resume is True or False"):
        checks.flag("resume", given)


def test_an_instance_is_not_its_class():
    assert checks.instance("when", Fraction(1), Fraction, "a Fraction") == 1
    with pytest.raises(ArgumentError, match=re.escape("got a class: call it, Fraction(...)")):
        checks.instance("when", Fraction, Fraction, "a Fraction")
    with pytest.raises(ArgumentError, match="when is a Fraction, not 'x'"):
        checks.instance("when", "x", Fraction, "a Fraction")


@pytest.mark.parametrize(
    "given",
    [
        jax.random.key(1),
        jax.random.PRNGKey(1),
        np.asarray(jax.random.PRNGKey(1)),
        jax.random.key(1, impl="rbg"),
    ],
)
def test_keys_of_every_form_pass(given):
    assert checks.key("rng_key", given).shape == given.shape


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (0, "rng_key is a jax key, not the number 0: give jax.random.key(0)"),
        (np.int64(7), "give jax.random.key(7)"),
        (None, "such as jax.random.key(0), not None"),
        (jax.random.split(jax.random.key(0), 3), "not an array of keys of shape (3,)"),
        (jax.random.split(jax.random.PRNGKey(0), 3), "not an array of keys of shape (3,)"),
        (np.ones(2), "such as jax.random.key(0), not an array of shape (2,) and dtype float64"),
        (jax.random.split(jax.random.key(0), 3)[:0], "an empty array of keys"),
    ],
)
def test_what_is_no_single_key_is_told(given, told):
    with pytest.raises(ArgumentError, match=re.escape(told)):
        checks.key("rng_key", given)


@pytest.mark.parametrize("name", ["v", "h1", "x.y", "v:h", "k", "rng_key", "Bild 1", "ü"])
def test_most_names_are_names_of_blocks(name):
    assert checks.block_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "draw",
        "row",
        "sample",
        "clamped",
        "v_dim_0",
        "x[0]",
        "a/b",
        ".",
        "..",
        "",
        " v",
        "v\n",
        3,
        None,
    ],
)
def test_names_that_cannot_live_are_refused(name):
    with pytest.raises(DeclarationError, match="block"):
        checks.block_name(name)


def test_unknown_names_are_told_with_the_nearest():
    with pytest.raises(
        StateError, match="unknown block 'hiden'; there is 'v', 'hidden'; did you mean 'hidden'?"
    ):
        checks.names("block", ["hiden"], ["v", "hidden"], StateError)


@pytest.mark.parametrize("given", [[1, 2], np.ones(2), jnp.ones(2), 3, [True], jnp.ones(2, jnp.bfloat16)])
def test_numbers_are_arrays(given):
    assert checks.numbers("v", given).size


@pytest.mark.parametrize("given", [["a"], [[1], [1, 2]], np.array([object()]), [1j], {"v": 1}, object()])
def test_what_holds_no_numbers_is_refused(given):
    with pytest.raises(StateError, match="v: expected "):
        checks.numbers("v", given, StateError)
