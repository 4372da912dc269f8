# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""HTML report on a trained model."""

from ebmpp.reporting.assemble import Report, report
from ebmpp.reporting.subject import Budget

__all__ = ["Budget", "Report", "report"]
