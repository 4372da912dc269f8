# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Which units of a traced log density interact, and what it is a sum of."""

from ebmpp.traced.dependence.powers import LOG, Powers, powers_of
from ebmpp.traced.dependence.program import Program
from ebmpp.traced.dependence.pullback import run_guarded
from ebmpp.traced.dependence.terms import Terms
from ebmpp.traced.dependence.unit_sets import UnitSets

__all__ = ["LOG", "Powers", "Program", "Terms", "UnitSets", "powers_of", "run_guarded"]
