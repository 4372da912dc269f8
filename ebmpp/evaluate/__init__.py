# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Quality of a model: exact sums where feasible, otherwise bounds and estimates."""

from ebmpp.evaluate import exact
from ebmpp.evaluate.activity import unit_activity
from ebmpp.evaluate.annealed import ais, bracket, reverse_ais
from ebmpp.evaluate.pseudo import pseudo_log_likelihood
from ebmpp.evaluate.variational import mean_field_bound

__all__ = [
    "ais",
    "bracket",
    "exact",
    "mean_field_bound",
    "pseudo_log_likelihood",
    "reverse_ais",
    "unit_activity",
]
