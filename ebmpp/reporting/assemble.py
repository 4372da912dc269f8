# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The function :func:`report`, which runs the sections and collects their results."""

from collections.abc import Callable, Mapping
import dataclasses
from html import escape
import os
import pathlib
import time
import warnings

import pandas as pd

from jax import Array

from ebmpp.core import Params, StateLike, archive, checks, num_rows
from ebmpp.diagnostics.plots import panels
from ebmpp.graph import FactorGraph, tables
from ebmpp.reporting import likelihood, mixing, model, samples
from ebmpp.reporting.page import Section, render
from ebmpp.reporting.subject import BUDGETS, Budget, Subject, check_rows

_SECTIONS: dict[str, Callable[[Section, Subject], None]] = {
    "The model": model.declaration,
    "Log-likelihood": likelihood.likelihood,
    "Mixing: meeting times of coupled chains": mixing.meeting_times,
    "Mixing: Gibbs chains against parallel tempering": mixing.chains,
    "Moments of data against model": samples.moments,
    "Free energies of rows and samples": likelihood.free_energies,
    "Latent units over the training rows": model.latent_units,
    "Samples and filters": samples.pictures,
    "Training": model.training,
}


@dataclasses.dataclass(frozen=True)
class Report:
    """HTML page with its figures and tables; see :func:`report`.

    :param file: file of the page; None if it was not written.
    :param html: the page.
    :param figures: PNG files by name.
    :param tables: tables of the page by name.
    :param missing: errors of the sections that failed, one line per section, and of the
        file.
    """

    file: pathlib.Path | None
    html: str
    figures: Mapping[str, bytes]
    tables: Mapping[str, pd.DataFrame]
    missing: tuple[str, ...]

    def __repr__(self) -> str:
        missing = f", {len(self.missing)} sections missing" if self.missing else ""
        where = "not written" if self.file is None else repr(str(self.file))
        return f"Report({where}, figures {list(self.figures)}, tables {list(self.tables)}{missing})"

    def _repr_html_(self) -> str:
        """Return the page in a frame, which keeps its style apart from the notebook's."""
        style = "width:100%;height:40rem;border:1px solid #cbd2d9"
        return f'<iframe style="{style}" srcdoc="{escape(self.html)}"></iframe>'


def report(
    graph: FactorGraph,
    params: Params,
    data: StateLike,
    *,
    rng_key: Array,
    held_out: StateLike | None = None,
    file: str | os.PathLike[str] | None = None,
    budget: str | Budget = "quick",
    history: object = None,
    title: str = "Report on an energy-based model",
) -> Report:
    """Return one self-contained HTML page on a trained model, and write it to ``file``.

    The page begins with a verdict: results to be doubted and checks that passed. Its
    sections are the declaration; the log-likelihood of training and held-out rows,
    exact or bracketed; meeting times of coupled chains and the bound that follows;
    effective sample sizes, R-hat and rank plots of Gibbs chains and parallel tempering;
    moments of data and model; free energies; dead, saturated and constant units;
    samples and filters; and, for a fit, its history. The page names each result that
    cannot be computed for the model, with the reason. Needs the extra ``plots``.

    :param data: training rows. Visible blocks of two axes, or of a square number of
        units, are shown as images.
    :param rng_key: a jax key, which determines all numbers except times.
    :param held_out: rows that were not used for training.
    :param file: file to write, atomically, such as "report.html". None, the default,
        writes nothing: the result has the page as ``html``, and a notebook shows it. If
        the disk fails, a warning says so.
    :param budget: "quick" (about a minute for 784x500 units on two cores), "thorough",
        or a :class:`ebmpp.reporting.Budget`.
    :param history: a fit, or its history.
    :raises ParameterError: params that do not fit.
    :raises StateError: data that do not fit.
    :raises ArgumentError: an unknown ``budget``, a graph or key of another type, or a
        call under ``jit``.

    **References**

    1. Hinton (2012), *A practical guide to training restricted Boltzmann machines*.
    2. Vehtari et al. (2021), *Rank-normalization, folding, and localization*: rank
       plots of chains.
    3. Grosse, Ghahramani, Adams (2015), *Sandwiching the marginal likelihood*.
    4. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with
       L-lag couplings*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(3))
    >>> data = ebmpp.data.bars_and_stripes(3)
    >>> result = ebmpp.report(  # doctest: +SKIP
    ...     rbm, rbm.init(jax.random.key(0)), data, rng_key=jax.random.key(1), file="rbm.html"
    ... )
    >>> result.tables["log_likelihood"]["exact"]  # doctest: +SKIP
    """
    checks.instance("report: graph", graph, FactorGraph)
    rng_key = checks.key("report: rng_key", rng_key)
    checks.on_host("report", rng_key, params, data)
    graph.check(params)
    if not isinstance(budget, Budget):
        other = "ebmpp.reporting.Budget(...)"
        budget = BUDGETS[checks.choice("report: budget", budget, BUDGETS, also=other)]
    if file is not None:
        file = checks.output_file("report: file", file)
    checks.instance("report: title", title, str, "a string")
    dataset = None if history is None else panels("report: history", history)[0]
    sets = {"train": data}
    if held_out is not None:
        sets["held out"] = held_out
    inputs = {}
    rows = {}
    for seed, (name, values) in enumerate(sets.items()):
        inputs[name] = tables.as_table(graph, values, "the report")
        rows[name] = check_rows(graph, inputs[name], budget.rows, seed)
    subject = Subject(
        graph, params, rows, budget, rng_key, inputs["train"].batch[0], dataset
    )
    sections = []
    missing = []
    seconds = {}
    for name, build in _SECTIONS.items():
        begin = time.monotonic()
        sections.append(Section(name))
        missing += _run(build, sections[-1], subject)
        seconds[name] = time.monotonic() - begin
    last = Section("How this was computed")
    if held_out is None:
        last.missing("results on held-out rows", "none were given (held_out=...)")
    last.text(f"{budget!r}; {sum(seconds.values()):.0f} s in all, with compilation.")
    last.table("seconds", [{"section": n, "seconds": s} for n, s in seconds.items()])
    sections.append(last)
    counts = [
        f"{num_rows(rows[n])} of {t.batch[0]} {n} rows" for n, t in inputs.items()
    ]
    html = render(title, f"Computed from {' and '.join(counts)}.", sections)
    if file is not None:
        try:
            with archive.replacing(file) as stream:
                stream.write(html.encode(errors="replace"))
        except OSError as error:
            missing.append(f"The file: {error}")
            warnings.warn(
                f"report: {file} cannot be written: {error}. The page is the attribute "
                "html of the result; free disk space or fix the permissions.",
                stacklevel=2,
            )
            file = None
    figures = {}
    frames = {}
    for section in sections:
        figures |= section.figures
        frames |= section.tables
    return Report(file, html, figures, frames, tuple(missing))


def _run(
    build: Callable[[Section, Subject], None], section: Section, subject: Subject
) -> list[str]:
    """Fill a section, with its warnings as notes; return its error, if any."""
    missing = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            build(section, subject)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = f"{type(error).__name__}: {error}"
            section.missing("the rest of this section", reason)
            missing = [f"{section.title}: {reason}"]
    for w in caught:
        if not issubclass(w.category, UserWarning):
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        elif ("note", str(w.message), "") not in section.parts:
            section.note(str(w.message))
    return missing
