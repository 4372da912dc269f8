# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A report on a trained model: one page with what one should look at, and what could not be computed."""

from collections.abc import Callable, Mapping
import dataclasses
from html import escape
import os
from pathlib import Path
import time
from typing import Any
import warnings

import pandas as pd

from jax import Array

from ebmpp.core import Params, checks
from ebmpp.diagnostics.reporting import (
    certificate,
    likelihood,
    mixing,
    model,
    moments,
    nearest,
    pictures,
    weights,
)
from ebmpp.diagnostics.reporting.page import Section, page, verdict
from ebmpp.diagnostics.reporting.subject import WORK, Subject, Work, some_rows
from ebmpp.graph import FactorGraph
from ebmpp.graph.tables import as_table


def _nearest(subject: Subject) -> Section:
    return nearest.nearest_rows(subject, pictures.image_shapes(subject.graph, subject.image_shape))


_SECTIONS: tuple[tuple[str, Callable[[Subject], Section]], ...] = (
    ("The model", model.declaration),
    ("Log-likelihood", likelihood.likelihood),
    ("Mixing: meeting times of coupled chains", mixing.meeting),
    ("Mixing: Gibbs chains against parallel tempering", mixing.chains),
    ("Moments of data against model", moments.moments),
    ("Free energies of rows and samples", likelihood.free_energies),
    ("Latent units over the training rows", model.units),
    ("Singular values of the weights", weights.singular_values),
    ("Samples and filters", pictures.samples),
    ("Samples beside the nearest training rows", _nearest),
    ("Reconstruction and pseudo-likelihood", likelihood.proxies),
)


@dataclasses.dataclass(frozen=True)
class Report:
    """A page, and what is on it; see :func:`report`."""

    path: Path | None
    """Where the page is; None where it was not written."""
    html: str
    figures: Mapping[str, bytes]
    """PNG files by name."""
    tables: Mapping[str, pd.DataFrame]
    missing: tuple[str, ...]
    """What raised an error, and which: a line a section."""

    def __repr__(self) -> str:
        told = f", {len(self.missing)} sections missing" if self.missing else ""
        where = "not written" if self.path is None else repr(str(self.path))
        return f"Report({where}, figures {list(self.figures)}, tables {list(self.tables)}{told})"

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame, so that its style stays its own."""
        frame = "width:100%;height:40rem;border:1px solid #cbd2d9"
        return f'<iframe style="{frame}" srcdoc="{escape(self.html)}"></iframe>'


def report(
    graph: FactorGraph,
    params: Params,
    data: Any,
    *,
    rng_key: Array,
    held_out: Any = None,
    path: str | os.PathLike[str] | None = "report.html",
    work: str | Work = "quick",
    image_shape: tuple[int, int] | Mapping[str, tuple[int, int]] | None = None,
    history: Any = None,
    title: str = "Report on an energy-based model",
) -> Report:
    """One self-contained HTML page on a trained model.

    It begins with a verdict: what was looked at and found in order, and what is to be doubted. It shows the
    declaration and its drawing; the log-likelihood of training and held-out rows, exact where
    states can be summed and else between annealed importance sampling forward and in reverse; meeting times
    of coupled chains from noise and the bound that follows; effective sample sizes, R-hat and rank plots of
    Gibbs chains against parallel tempering; moments of the data against the model's; free energies of rows
    and samples; dead, saturated and constant units; singular values of the weights; samples and filters, and
    the training rows nearest to the samples; reconstruction and pseudo-likelihood with their caveats; and of
    a fit, where it is asked for (``work``), the bias of the gradient that trained it, given its last chains.
    What cannot be computed for a model is named on the page with the reason. Needs matplotlib (the extra
    ``plots``).

    :param graph: the model.
    :param params: its params.
    :param data: the rows it was trained on.
    :param rng_key: a jax key, which fixes all numbers but times.
    :param held_out: rows that it was not trained on.
    :param path: where the page goes; None to write nothing.
    :param work: "quick" (about a minute for 784x500 on two cores), "thorough", or a :class:`Work`.
    :param image_shape: ``(height, width)`` of the visible blocks, or a dict of them by block; by default
        blocks of a square number of units are taken for square images.
    :param history: a fit, or its history, which tells nothing of the estimator.
    :param title: of the page.
    :raises ParameterError: for params that do not fit.
    :raises StateError: for data or an image shape that do not fit.
    :raises ArgumentError: for an unknown ``work``, a graph or key of another kind, or under ``jit``.

    **References**

    1. Hinton (2012), *A practical guide to training restricted Boltzmann machines*: what to look at.
    2. Vehtari et al. (2021), *Rank-normalization, folding, and localization*: rank plots of chains.
    3. Grosse, Ghahramani, Adams (2015), *Sandwiching the marginal likelihood*.
    4. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with L-lag couplings*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm, data = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(3)), ebmpp.data.bars_and_stripes(3)
    >>> made = ebmpp.report(  # doctest: +SKIP
    ...     rbm, rbm.init(jax.random.key(0)), data, rng_key=jax.random.key(1), path="rbm.html"
    ... )
    >>> made.tables["log_likelihood"]["exact"]  # doctest: +SKIP
    """
    checks.instance("report: graph", graph, FactorGraph, "a FactorGraph")
    rng_key = checks.key("report: rng_key", rng_key)
    checks.on_host("report", rng_key, params, data)
    graph.check(params)
    if not isinstance(work, Work):
        checks.choice("report: work", work, WORK, also="ebmpp.diagnostics.reporting.Work(...)")
    amount = WORK[work] if isinstance(work, str) else work
    given = {"train": data} | ({} if held_out is None else {"held out": held_out})
    taken = {name: some_rows(graph, rows, amount.rows, i) for i, (name, rows) in enumerate(given.items())}
    pictures.image_shapes(graph, image_shape)  # a wrong one is told at once
    rows = {name: found for name, (found, _) in taken.items()}
    every = as_table(graph, data, "the report")
    subject = Subject(graph, params, rows, amount, rng_key, image_shape, every)
    made, missing, seconds = [], [], {}
    of_run = (
        ("Bias of the gradient", lambda subject: certificate.bias(subject, history)),
        ("Training", lambda _: pictures.training(history)),
    )
    for name, build in (*_SECTIONS, *of_run):
        begin = time.monotonic()
        section, why = _guarded(name, build, subject)
        made.append(section)
        missing += why
        seconds[name] = time.monotonic() - begin
    made.append(_settings(taken, amount, seconds, held_out is None))
    html = page(title, verdict(made), _lead(taken), made)
    if path is not None:
        path = Path(path)
        path.write_text(html, encoding="utf-8")
    figures = {name: png for section in made for name, png in section.figures.items()}
    tables = {name: frame for section in made for name, frame in section.tables.items()}
    return Report(path, html, figures, tables, tuple(missing))


def _guarded(title: str, build: Callable[[Subject], Section], subject: Subject) -> tuple[Section, list[str]]:
    """A section; with what it warned of, and where it fails with the reason instead."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            section, why = build(subject), []
        except (ValueError, RuntimeError, NotImplementedError) as error:
            section, why = Section(title), [f"{title}: {type(error).__name__}: {error}"]
            section.missing(title, f"{type(error).__name__}: {error}")
    for words in dict.fromkeys(str(w.message) for w in told if issubclass(w.category, UserWarning)):
        section.caveat(words)
    for other in told:
        if not issubclass(other.category, UserWarning):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    return section, why


def _lead(taken: Mapping[str, tuple[Any, int]]) -> str:
    each = []
    for name, (rows, total) in taken.items():
        count = len(next(iter(rows.values())))
        each.append(f"{count} of {total} {name} rows" if count < total else f"{total} {name} rows")
    return "Computed from " + " and ".join(each) + "."


def _settings(taken: Any, work: Work, seconds: Mapping[str, float], alone: bool) -> Section:
    section = Section("How this was computed")
    if alone:
        section.missing("anything on held-out rows", "none were given (held_out=...)")
    section.text(f"{work!r}; {sum(seconds.values()):.0f} s in all, with compilation.")
    frame = pd.DataFrame({"section": list(seconds), "seconds": list(seconds.values())})
    section.table("seconds", frame)
    return section
