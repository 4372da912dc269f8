# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""``--data`` of the experiments: the name of a reader, or a folder of files."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ebmpp
from ebmpp.contrib import readers


def _presence(directory: Any = None, **options: Any) -> np.ndarray:
    """Presence of the thousand commonest words."""
    return (readers.bag_of_words(directory, num_words=1000) > 0).astype(np.float32)


def _grey(directory: Any = None, labels: bool = False, **options: Any) -> Any:
    """CIFAR-10 without its colours: 32x32 pixels."""
    result = readers.cifar10(directory, labels=labels, **options)
    rows = (result[0] if labels else result).reshape(-1, 3, 1024).mean(1)
    return (rows, result[1]) if labels else rows


#: Readers of rows in [0, 1] by name; each takes a folder, or None for the
#: environment's.
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


def option(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--data`` and ``--rows``."""
    text = f"{', '.join(READERS)}, or a folder with the files of one of them; default {default}"
    parser.add_argument("--data", type=_known, default=default, help=text)
    parser.add_argument(
        "--rows", type=int, help="rows at most, held-out ones included; default: all"
    )


def _known(data: str) -> str:
    if data not in READERS and not Path(data).is_dir():
        raise argparse.ArgumentTypeError(
            f"{data!r} is neither a folder nor one of {', '.join(READERS)}"
        )
    return data


def read(data: str, labels: bool = False) -> Any:
    """Return rows in [0, 1], and their labels if asked for.

    :raises SystemExit: with the missing file and where to get it.
    """
    options = {"labels": True} if labels else {}
    directory = None if data in READERS else data
    errors = []
    for name in [n for n in READERS if n != "digits"] if directory else [data]:
        try:
            return READERS[name](directory, **options)
        except FileNotFoundError as error:
            errors.append(str(error))
    text = (
        errors[0]
        if len(errors) == 1
        else f"{data} holds the files of no reader: {'; '.join(errors)}"
    )
    raise SystemExit(f"{text} Or take --data digits, which needs no file.")


def tag(data: str) -> str:
    """Return a name for files."""
    return data if data in READERS else Path(data).resolve().name


def shuffled(data: str, seed: int, most: int | None = None) -> np.ndarray:
    """Return rows in a random order, at most ``most`` of them."""
    rows = read(data)
    return rows[np.random.default_rng(seed).permutation(len(rows))[:most]]


def binary_split(args: argparse.Namespace, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return training rows and held-out ones, one in six, binarised once at random."""
    grey = shuffled(args.data, seed, args.rows)
    rows = (
        np.random.default_rng([seed, 1]).random(grey.shape, np.float32) < grey
    ).astype(np.float32)
    cut = len(rows) // 6
    return rows[cut:], rows[:cut]
