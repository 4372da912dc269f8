# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""``--data`` of every experiment that takes images or counts: the name of a reader, or a folder of files."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ebmpp
from ebmpp.contrib import readers


def _presence(directory: Any = None, **options: Any) -> np.ndarray:
    """Which of the thousand commonest words a document has."""
    return (readers.bag_of_words(directory, num_words=1000) > 0).astype(np.float32)


def _grey(directory: Any = None, labels: bool = False, **options: Any) -> Any:
    """CIFAR-10 without its colours: 32x32 pixels."""
    made = readers.cifar10(directory, labels=labels, **options)
    rows = (made[0] if labels else made).reshape(-1, 3, 1024).mean(1)
    return (rows, made[1]) if labels else rows


#: name: reader of rows in [0, 1], from a folder (or None, the environment's)
READERS: dict[str, Callable[..., Any]] = {
    "digits": lambda directory=None, **options: ebmpp.data.digits(**options),
    "mnist": ebmpp.data.mnist,
    "fashion_mnist": ebmpp.data.fashion_mnist,
    "omniglot": readers.omniglot,
    "caltech101_silhouettes": readers.caltech101_silhouettes,
    "usps": readers.usps,
    "cifar10": _grey,
    "bag_of_words": _presence,
}
_IN_FILES = [name for name in READERS if name != "digits"]


def option(parser: argparse.ArgumentParser, default: str) -> None:
    """``--data``."""
    told = f"{', '.join(READERS)}, or a folder that holds the files of one of them; default {default}"
    parser.add_argument("--data", type=_known, default=default, help=told)


def _known(data: str) -> str:
    if data not in READERS and not Path(data).is_dir():
        raise argparse.ArgumentTypeError(f"{data!r} is no folder, and none of {', '.join(READERS)}")
    return data


def read(data: str, labels: bool = False) -> Any:
    """Rows in [0, 1], with what they are if asked for.

    :raises SystemExit: with what is missing, and where to get it.
    """
    options = {"labels": True} if labels else {}
    directory = None if data in READERS else data
    missing = []
    for name in _IN_FILES if directory else [data]:
        try:
            return READERS[name](directory, **options)
        except FileNotFoundError as error:
            missing.append(str(error))
    told = missing[0] if len(missing) == 1 else f"{data} holds the files of no reader: {'; '.join(missing)}"
    raise SystemExit(f"{told} Or take --data digits, which needs no file.")


def tag(data: str) -> str:
    """What files are named by."""
    return data if data in READERS else Path(data).resolve().name


def shuffled(data: str, seed: int, most: int | None = None) -> np.ndarray:
    """Rows in an order of the seed's, at most so many."""
    rows = read(data)
    return rows[np.random.default_rng(seed).permutation(len(rows))[:most]]
