# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How biased the gradient is that trained the model."""

from typing import Any

import numpy as np
import pandas as pd

import jax

from ebmpp.diagnostics.reporting.page import Section
from ebmpp.diagnostics.reporting.subject import Subject
from ebmpp.estimators import GradientBias, gradient_bias
from ebmpp.training import Fit

_SEEN = 3.0  # standard errors


def bias(subject: Subject, history: Any) -> Section:
    """The run's estimator against an unbiased one, at the last params.

    :param history: a fit, whose estimator and last state are asked for; anything else has none.
    """
    section, count = Section("Bias of the gradient"), subject.work.references
    why = _why_not(subject, history)
    if why is not None:
        section.missing("the bias of the gradient that trained the model", why)
        return section
    made = gradient_bias(
        subject.graph,
        subject.params,
        subject.train,
        history.estimator,
        history.estimator_state,
        rng_key=subject.key(9),
        num_references=count,
    )
    section.text(
        f"The mean gradient of {made.estimator!r} over {made.conditioning}, against the mean of {count} "
        "unbiased ones by coupled particle systems, at the last params and the same rows. Squared norms come "
        "from products of different repeats, so that noise does not add to them; where there is no bias they "
        "are below 0 about as often as above."
    )
    if made.chains is not None:
        section.text(
            "The last chains count as independent given the way of the params, which owes something to each "
            "of them; what they have in common is bias."
        )
    section.table("gradient_bias", _table(made), "By factor, and over all params.")
    total = made.total
    seen = "seen" if total.squared_bias > _SEEN * total.standard_error else "not seen beyond its error"
    section.fact(
        f"Bias of the gradient of {type(made.estimator).__name__}: {seen}; its squared norm is "
        f"{total.squared_bias:.3g} +- {total.standard_error:.2g}, beside {total.squared_gradient:.3g} +- "
        f"{total.gradient_error:.2g} of the gradient."
    )
    section.caveat(
        "It is measured against what particle systems find: a mode that they all miss is missed here too. "
        "Near an optimum the gradient is small, and a bias may well be larger."
    )
    return section


def _why_not(subject: Subject, history: Any) -> str | None:
    """What is lacking, if anything is."""
    if not isinstance(history, Fit) or history.estimator is None:
        return "no fit was given (history=fit)"
    if not subject.work.references:
        return 'it takes many particle systems: ask for it by work="thorough" or Work(references=20)'
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), dict(subject.params), dict(history.params))
    if not all(jax.tree.leaves(same)):
        return "the params are not the last ones of the fit, at which its estimator is"
    return None


def _table(made: GradientBias) -> pd.DataFrame:
    rows = []
    for name, squares in [*made.factors.items(), ("all", made.total)]:
        rows.append(
            {
                "factor": name,
                "squared bias": squares.squared_bias,
                "standard error": squares.standard_error,
                "squared gradient": squares.squared_gradient,
                "its error": squares.gradient_error,
            }
        )
    return pd.DataFrame(rows)
