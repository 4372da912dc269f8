# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A report on a trained model: one page with what one should look at, and what could not be computed."""

from ebmpp.diagnostics.reporting.assemble import Report, report
from ebmpp.diagnostics.reporting.subject import Work

__all__ = ["Report", "Work", "report"]
