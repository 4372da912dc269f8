# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Labelled documents as word counts, for the models of text: nothing is ever downloaded.

"docstrings": what numpy, scipy and scikit-learn say of their public functions, labelled by subpackage; they
are installed with the extras. "newsgroups": the 20 newsgroups, if scikit-learn has them on disk already.
"""

import importlib
import inspect
import pkgutil
from typing import Any, NamedTuple
import warnings

import numpy as np

_PACKAGES = ("numpy", "scipy", "sklearn")
_FEWEST = 30  # documents a label needs
_WORDS = r"[a-z]{3,}"


class Corpus(NamedTuple):
    """Documents as counts, and what the columns and labels mean."""

    train: np.ndarray
    train_labels: np.ndarray
    held_out: np.ndarray
    held_out_labels: np.ndarray
    words: np.ndarray
    labels: list[str]


def load(name: str, num_words: int, seed: int, held_out: float = 0.2, fewest: int = 30) -> Corpus:
    """Counts of the commonest words that are not in every other document.

    :param name: "docstrings" or "newsgroups".
    :param num_words: size of the vocabulary.
    :param seed: of the split.
    :param held_out: share of the documents.
    :param fewest: words of the vocabulary that a document needs to be kept.
    :raises OSError: for newsgroups that are not on disk.
    """
    from sklearn.feature_extraction.text import CountVectorizer

    texts, labels = newsgroups() if name == "newsgroups" else docstrings()
    counter = CountVectorizer(
        max_features=num_words, max_df=0.25, min_df=3, stop_words="english", token_pattern=_WORDS
    )
    counts = np.asarray(counter.fit_transform(texts).todense(), np.float32)
    long = counts.sum(1) >= fewest
    counts, labels = counts[long], np.asarray(labels)[long]
    names, many = np.unique(labels, return_counts=True)
    enough = np.isin(labels, names[many >= _FEWEST])
    counts, labels = counts[enough], labels[enough]
    names = sorted(set(labels.tolist()))
    numbers = np.searchsorted(names, labels)
    order = np.random.default_rng(seed).permutation(len(counts))
    cut = round(held_out * len(counts))
    test, train = order[:cut], order[cut:]
    parts = counts[train], numbers[train], counts[test], numbers[test]
    return Corpus(*parts, counter.get_feature_names_out(), names)


def newsgroups() -> tuple[list[str], list[str]]:
    """The 20 newsgroups without headers and quotations.

    :raises OSError: when they are not on disk.
    """
    from sklearn.datasets import fetch_20newsgroups

    found = fetch_20newsgroups(
        subset="all", remove=("headers", "footers", "quotes"), download_if_missing=False
    )
    return found.data, [found.target_names[i] for i in found.target]


def docstrings() -> tuple[list[str], list[str]]:
    """Docstrings of public functions and classes, each once, and the subpackage of each."""
    found: dict[str, str] = {}
    for package in _PACKAGES:
        for name in _subpackages(package):
            module = _import(name)
            for public in sorted(getattr(module, "__all__", ())):
                text = _docstring(module, public)
                if text:
                    found.setdefault(text, name)
    return list(found), list(found.values())


def _subpackages(package: str) -> list[str]:
    path = importlib.import_module(package).__path__
    names = (m.name for m in pkgutil.iter_modules(path) if m.ispkg and not m.name.startswith("_"))
    return sorted(f"{package}.{name}" for name in names if name not in ("tests", "testing", "conftest"))


def _import(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is deprecated
        try:
            return importlib.import_module(name)
        except ImportError:  # parts that need a compiler, say
            return None


def _docstring(module: Any, name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = getattr(module, name)
        except (AttributeError, ImportError):  # names that have to be enabled first
            return ""
    if not (inspect.isroutine(found) or inspect.isclass(found) or isinstance(found, np.ufunc)):
        return ""
    return inspect.getdoc(found) or ""
