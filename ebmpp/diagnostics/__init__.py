# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a run tells: DataTrees, meeting times and what they bound, pictures, a report."""

from ebmpp.diagnostics import plots
from ebmpp.diagnostics.datatree import summary, to_arviz, to_datatree
from ebmpp.diagnostics.meeting import (
    cost_times_variance,
    suggest_k_m,
    tv_upper_bound,
    wasserstein_upper_bound,
)
from ebmpp.diagnostics.plots import plot_meeting_times, plot_tv_bound
from ebmpp.diagnostics.reporting import Report, report

__all__ = [
    "Report",
    "cost_times_variance",
    "plot_meeting_times",
    "plot_tv_bound",
    "plots",
    "report",
    "suggest_k_m",
    "summary",
    "to_arviz",
    "to_datatree",
    "tv_upper_bound",
    "wasserstein_upper_bound",
]
