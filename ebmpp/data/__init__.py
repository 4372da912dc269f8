# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Data for examples: exact patterns, real digits, and encodings by bits.

Functions return NumPy arrays with one row per observation. Readers of other public data
sets are in :mod:`ebmpp.contrib.readers`.
"""

from ebmpp.data.binarization import binarize, decode_bits, encode_bits
from ebmpp.data.files import idx
from ebmpp.data.images import digits, fashion_mnist, mnist
from ebmpp.data.patterns import bars_and_stripes, shifting_bar

__all__ = [
    "bars_and_stripes",
    "binarize",
    "decode_bits",
    "digits",
    "encode_bits",
    "fashion_mnist",
    "idx",
    "mnist",
    "shifting_bar",
]
