# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Data to learn from: small exact patterns, real digits, a reader of IDX files, encodings by bits.

Every function returns NumPy arrays on the host, one row an observation; training puts them on the device.
"""

from ebmpp.data.binarization import binarize, decode_bits, encode_bits
from ebmpp.data.images import digits, idx, mnist
from ebmpp.data.patterns import bars_and_stripes, shifting_bar

__all__ = [
    "bars_and_stripes",
    "binarize",
    "decode_bits",
    "digits",
    "encode_bits",
    "idx",
    "mnist",
    "shifting_bar",
]
