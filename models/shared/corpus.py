# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Labelled documents as word counts. Nothing is downloaded.

"docstrings": the docstrings of public functions of numpy, scipy and scikit-learn,
labelled by subpackage. "newsgroups": the 20 newsgroups, if scikit-learn has them on
disk.
"""

import importlib
import inspect
import pkgutil
from typing import Any, NamedTuple
import warnings

import numpy as np

_PACKAGES = ("numpy", "scipy", "sklearn")
_FEWEST = 30  # documents per label at least
_WORDS = r"[a-z]{3,}"


class Corpus(NamedTuple):
    """Documents as counts, and the meaning of columns and labels."""

    train: np.ndarray
    train_labels: np.ndarray
    held_out: np.ndarray
    held_out_labels: np.ndarray
    words: np.ndarray
    labels: list[str]


def load(
    name: str, num_words: int, seed: int, held_out: float = 0.2, fewest: int = 30
) -> Corpus:
    """Count the commonest words that are in at most a quarter of the documents.

    :param name: "docstrings" or "newsgroups".
    :param num_words: size of the vocabulary.
    :param seed: seed of the split.
    :param held_out: share of the documents.
    :param fewest: words of the vocabulary that a document must have.
    :raises OSError: if the newsgroups are not on disk.
    """
    from sklearn.feature_extraction.text import CountVectorizer

    texts, labels = newsgroups() if name == "newsgroups" else docstrings()
    counter = CountVectorizer(
        max_features=num_words,
        max_df=0.25,
        min_df=3,
        stop_words="english",
        token_pattern=_WORDS,
    )
    counts = np.asarray(counter.fit_transform(texts).todense(), np.float32)
    long = counts.sum(1) >= fewest
    counts = counts[long]
    labels = np.asarray(labels)[long]
    names, sizes = np.unique(labels, return_counts=True)
    large = np.isin(labels, names[sizes >= _FEWEST])
    counts = counts[large]
    labels = labels[large]
    names = sorted(set(labels.tolist()))
    numbers = np.searchsorted(names, labels)
    order = np.random.default_rng(seed).permutation(len(counts))
    cut = round(held_out * len(counts))
    test = order[:cut]
    train = order[cut:]
    parts = counts[train], numbers[train], counts[test], numbers[test]
    return Corpus(*parts, counter.get_feature_names_out(), names)


def newsgroups() -> tuple[list[str], list[str]]:
    """Return the 20 newsgroups without headers and quotations.

    :raises OSError: if they are not on disk.
    """
    from sklearn.datasets import fetch_20newsgroups

    groups = fetch_20newsgroups(
        subset="all", remove=("headers", "footers", "quotes"), download_if_missing=False
    )
    return groups.data, [groups.target_names[i] for i in groups.target]


def docstrings() -> tuple[list[str], list[str]]:
    """Return the distinct docstrings of public functions and classes, and their subpackages."""
    labels: dict[str, str] = {}
    for package in _PACKAGES:
        for name in _subpackages(package):
            module = _import(name)
            for public in sorted(getattr(module, "__all__", ())):
                text = _docstring(module, public)
                if text:
                    labels.setdefault(text, name)
    return list(labels), list(labels.values())


def _subpackages(package: str) -> list[str]:
    path = importlib.import_module(package).__path__
    names = (
        m.name
        for m in pkgutil.iter_modules(path)
        if m.ispkg and not m.name.startswith("_")
    )
    return sorted(
        f"{package}.{name}"
        for name in names
        if name not in ("tests", "testing", "conftest")
    )


def _import(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated modules
        try:
            return importlib.import_module(name)
        except ImportError:  # it may need a compiler
            return None


def _docstring(module: Any, name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = getattr(module, name)
        except (AttributeError, ImportError):  # a name that must be enabled first
            return ""
    if not (
        inspect.isroutine(value)
        or inspect.isclass(value)
        or isinstance(value, np.ufunc)
    ):
        return ""
    return inspect.getdoc(value) or ""
