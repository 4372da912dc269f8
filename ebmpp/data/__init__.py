# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Data to learn from: small exact patterns, real digits, readers of files, encodings by bits.

Every function returns NumPy arrays on the host, one row an observation; training puts them on the device.
"""

from ebmpp.data.binarization import binarize, decode_bits, encode_bits
from ebmpp.data.idx_files import idx
from ebmpp.data.images import cifar10, digits, fashion_mnist, mnist
from ebmpp.data.matlab_images import caltech101_silhouettes, omniglot
from ebmpp.data.patterns import bars_and_stripes, shifting_bar
from ebmpp.data.text_files import bag_of_words, usps

__all__ = [
    "bag_of_words",
    "bars_and_stripes",
    "binarize",
    "caltech101_silhouettes",
    "cifar10",
    "decode_bits",
    "digits",
    "encode_bits",
    "fashion_mnist",
    "idx",
    "mnist",
    "omniglot",
    "shifting_bar",
    "usps",
]
