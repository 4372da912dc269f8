# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Intensities as binary digits, and back.

Tests data/binarization.py.
"""

import numpy as np
import pytest

from ebmpp.data import decode_bits, encode_bits


def test_every_byte_is_encoded_without_loss():
    grey = np.arange(256).reshape(4, 64) / 255
    digits = encode_bits(grey)
    expected = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).reshape(
        4, 64, 8
    )
    np.testing.assert_array_equal(digits, expected)
    np.testing.assert_allclose(decode_bits(digits), grey, atol=1e-7)
    mean = decode_bits(digits.reshape(-1, 8).mean(0))
    assert mean == pytest.approx(grey.mean(), abs=1e-6)


def test_fewer_bits_round_to_their_levels():
    digits = encode_bits([0.0, 0.49, 0.51, 1.0], num_bits=2)
    np.testing.assert_array_equal(digits, [[0, 0], [0, 1], [1, 0], [1, 1]])
    np.testing.assert_allclose(decode_bits(digits), [0, 1 / 3, 2 / 3, 1], atol=1e-7)
