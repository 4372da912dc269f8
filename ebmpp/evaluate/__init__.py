# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Quality of a model on data, models of tables, completion of rows, differentiable means."""

from ebmpp.evaluate.activity import unit_activity
from ebmpp.evaluate.completion import Completion, complete
from ebmpp.evaluate.derivatives import expectation
from ebmpp.evaluate.scores import mean_field_bound, pseudo_log_likelihood
from ebmpp.evaluate.tables import TableModel, from_dataframe

__all__ = [
    "Completion",
    "TableModel",
    "complete",
    "expectation",
    "from_dataframe",
    "mean_field_bound",
    "pseudo_log_likelihood",
    "unit_activity",
]
