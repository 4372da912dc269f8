# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Results of runs: DataTrees for ArviZ, meeting times and their bounds, plots."""

from ebmpp.diagnostics import plots
from ebmpp.diagnostics.datatree import summary, to_arviz, to_datatree
from ebmpp.diagnostics.meeting import tv_upper_bound, wasserstein_upper_bound
from ebmpp.diagnostics.plots import plot_meeting_times, plot_tv_bound
from ebmpp.diagnostics.relabelling import relabel
from ebmpp.diagnostics.thermodynamics import ladder

__all__ = [
    "ladder",
    "plot_meeting_times",
    "plot_tv_bound",
    "plots",
    "relabel",
    "summary",
    "to_arviz",
    "to_datatree",
    "tv_upper_bound",
    "wasserstein_upper_bound",
]
