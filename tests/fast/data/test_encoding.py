# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

from ebmpp.data import decode_bits, encode_bits


@pytest.mark.parametrize("spin", [False, True])
def test_every_byte_is_encoded_without_loss(spin):
    grey = np.arange(256).reshape(4, 64) / 255
    made = encode_bits(grey, spin=spin)
    assert made.shape == (4, 64, 8)
    assert set(np.unique(made)) == ({-1.0, 1.0} if spin else {0.0, 1.0})
    # numpy's own digits, the highest first
    wanted = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).reshape(4, 64, 8)
    np.testing.assert_array_equal((made + spin) / (1 + spin), wanted)
    np.testing.assert_allclose(decode_bits(made, spin=spin), grey, atol=1e-7)


def test_other_numbers_of_bits_round_to_their_levels():
    made = encode_bits([0.0, 0.49, 0.51, 1.0], num_bits=2)
    np.testing.assert_array_equal(made, [[0, 0], [0, 1], [1, 0], [1, 1]])
    np.testing.assert_allclose(decode_bits(made), [0, 1 / 3, 2 / 3, 1], atol=1e-7)


def test_means_of_digits_give_the_mean_intensity():
    grey = np.array([0.1, 0.9, 0.4, 0.5])
    for spin in (False, True):
        digits = encode_bits(grey, spin=spin)
        assert decode_bits(digits.mean(0), spin=spin) == pytest.approx(
            decode_bits(digits, spin=spin).mean(), abs=1e-6
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: encode_bits([[0.0, 1.5]]), r"x at index \(0, 1\) is 1.5.*Scale the data first"),
        (lambda: encode_bits([np.nan]), "an intensity in .0, 1. is expected"),
        (lambda: encode_bits([0.0], num_bits=0), "num_bits is an int from 1 to 16, not 0"),
        (lambda: decode_bits([0.0, -1.0]), "digits are from 0 to 1 with spin=False; got -1.0"),
        (lambda: decode_bits([2.0], spin=True), "digits are from -1 to 1 with spin=True; got 2.0"),
        (lambda: decode_bits(1.0), "a last axis of digits"),
        (lambda: decode_bits(np.zeros(17)), "last axis is an int from 1 to 16, not 17"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
