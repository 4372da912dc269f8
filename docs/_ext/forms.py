# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Write the table of conditionals that blocks of models recognise, from the tables of the code."""

from sphinx.application import Sphinx

from ebmpp.traced.sweep import continuous, posterior

_MARK = ".. recognised forms"
#: NumPyro's constraints in words
_SUPPORTS = {
    "real": "real numbers, or an interval of them",
    "positive": "positive numbers, or an interval of them",
    "unit_interval": "probabilities",
    "simplex": "rows of probabilities",
}


def rows() -> list[tuple[str, str, str]]:
    """Return support, form of the log density, and family, for each family."""
    discrete = f"finitely many whole numbers, at most {posterior._MOST_VALUES} per unit"
    result = [(discrete, "any", "the probabilities of all values")]
    for kind, families in continuous._FAMILIES.items():
        for family, powers in families.items():
            form = " and ".join(continuous._in_words(powers))
            result.append((_SUPPORTS[kind], f"a sum of {form}", family))
    return result


def insert(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the table in place of its mark."""
    del app, page
    if _MARK in source[0]:
        head = ("Values of the site", "Log density as a function of the site", "Drawn from")
        lines = [".. list-table::", "   :header-rows: 1", ""]
        for first, *rest in (head, *rows()):
            lines += [f"   * - {first}", *(f"     - {cell}" for cell in rest)]
        source[0] = source[0].replace(_MARK, "\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", insert)
    return {"parallel_read_safe": True}
