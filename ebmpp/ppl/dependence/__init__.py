# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Which units of a traced log density interact, and what it is a sum of."""

from ebmpp.ppl.dependence.powers import LOG, Powers, powers_of
from ebmpp.ppl.dependence.program import Program
from ebmpp.ppl.dependence.pullback import run_guarded
from ebmpp.ppl.dependence.terms import Terms
from ebmpp.ppl.dependence.unit_sets import UnitSets

__all__ = ["LOG", "Powers", "Program", "Terms", "UnitSets", "powers_of", "run_guarded"]
