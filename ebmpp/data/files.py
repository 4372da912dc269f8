# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Where a data set's files are, and their bytes: packed or not, whole or said to be damaged."""

import bz2
from collections.abc import Generator, Sequence
import contextlib
import gzip
import os
from pathlib import Path
from typing import BinaryIO, cast
import zlib

import numpy as np

from ebmpp.errors import ArgumentError

Array = np.ndarray
Labelled = tuple[np.ndarray, np.ndarray]
Folder = str | os.PathLike[str] | None

DATA_DIR_VARIABLE = "EBMPP_DATA_DIR"

#: by a file's first bytes: what it is, what opens it, and how that says that it is damaged
_PACKED = {
    b"\x1f\x8b": ("gzip", gzip.open, (EOFError, gzip.BadGzipFile, zlib.error)),
    b"BZh": ("bzip2", bz2.open, (EOFError, OSError)),
}
_CHUNK = 1 << 20


def find(
    who: str, directory: Folder, name: str, folders: Sequence[str], source: str, packed: str = ""
) -> Path:
    """The path of a file of a data set, packed or not.

    :param who: the reader, for its errors.
    :param directory: a folder; None for the environment's.
    :param folders: under it, where the file is looked for, in order; "." is the folder itself.
    :param source: where the file is to be had.
    :param packed: the suffix that its packed form has.
    :raises FileNotFoundError: if it is nowhere; the text says where it was looked for and how to get it.
    """
    given = os.environ.get(DATA_DIR_VARIABLE) if directory is None else directory
    told = f"{name}[{packed}]" if packed else name
    if not given:
        raise FileNotFoundError(
            f"{who}: no directory given, and the environment variable {DATA_DIR_VARIABLE} is not "
            f"set. Set it to the folder that holds {told}, or pass directory=... ({source})"
        )
    places = [Path(given, folder) for folder in folders]
    for place in places:
        for path in (place / name, place / f"{name}{packed}"):
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"{who}: no {told} in {' or '.join(map(str, places))}; pass directory=..., or set "
        f"{DATA_DIR_VARIABLE}, to the folder that holds it. ({source})"
    )


@contextlib.contextmanager
def unpacked(path: Path) -> Generator[BinaryIO]:
    """A file to read, of which gzip and bzip2 are undone: its first bytes tell, not its name.

    :raises ArgumentError: from inside, where what is packed is damaged.
    """
    with open(path, "rb") as raw:
        first = raw.read(max(map(len, _PACKED)))
        raw.seek(0)
        known = [how for magic, how in _PACKED.items() if first.startswith(magic)]
        if not known:
            yield raw
            return
        ((kind, opened, damaged),) = known
        try:
            with opened(raw) as file:
                yield cast(BinaryIO, file)
        except damaged as error:
            raise ArgumentError(
                f"{path}: damaged {kind} ({error}); fetch the file again, or check its checksum."
            ) from error


def read_up_to(file: BinaryIO, size: int) -> bytearray:
    """Up to `size` bytes, in chunks: asking for them all at once would allocate them first."""
    data = bytearray()
    while len(data) < size and (chunk := file.read(min(_CHUNK, size - len(data)))):
        data += chunk
    return data
