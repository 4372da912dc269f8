# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Structure of a traced log density: the units that interact, and the powers of units that it is a sum of."""

from ebmpp.traced.dependence.program import Program, Step
from ebmpp.traced.dependence.pullback import run_guarded
from ebmpp.traced.dependence.rules import in_floats, is_affine
from ebmpp.traced.dependence.terms import Terms

__all__ = ["Program", "Step", "Terms", "in_floats", "is_affine", "run_guarded"]
